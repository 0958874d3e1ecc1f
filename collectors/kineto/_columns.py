"""Columns under construction: events go in chunk by chunk, arrays come out.

Time: ``ts`` and ``dur`` are microseconds with up to three decimals (integers until 2024). They
become integer nanoseconds before anything is added to them: float64 holds the sum with
``baseTimeNanoseconds`` only to 256 ns.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from chopper.collectors._arrays import NO_VALUE
from chopper.collectors.kineto._events import (
    NOTHING,
    Args,
    CounterEvent,
    Event,
    ExactTimes,
    Header,
    Number,
)

NO_ARGS = Args()
MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""Longer spans are overflows of the recorder: no step takes a month."""
EXACT_FLOAT_US = float(1 << 43)
"""Above this a float64 of microseconds no longer tells nanoseconds apart."""


_NUMBERED = re.compile(r"\s*(?:stream\s*)?(-?\d+)\s*", re.IGNORECASE)
LAST_NS = 1 << 62
"""Times beyond the year 2116, or as long before 1970, are no times."""


RELATIVE_NS_THRESHOLD = 1e14
"""With a base, ``ts`` counts from it, less than a few months (8e12 µs); more is nanoseconds."""
ABSOLUTE_NS_THRESHOLD = 9.2e15
"""Without a base, ``ts`` may be Unix microseconds (1.8e15); more is nanoseconds."""


class Counts:
    """Counts of repairs and oddities, turned into findings at the end."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, code: str, count: int = 1) -> None:
        """Count ``count`` more of ``code``."""
        if count:
            self.values[code] = self.values.get(code, 0) + count


class Ids(dict[Any, int]):
    """Process and thread ids as integers; ``stream 7`` is 7, other words get negative numbers.

    Merge tools write ``rank0_4711`` for what was 4711: such words stay apart from each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[int, str] = {}

    def __call__(self, value: Number) -> int:
        return self[value]

    def __missing__(self, value: Any) -> int:
        if isinstance(value, bool) or value is None:
            found = -1
        elif isinstance(value, int):
            # An unsigned 64-bit id keeps its bits.
            found = value - 2**64 if 2**63 <= value < 2**64 else value
            if not -(2**63) <= found < 2**63:
                found = -1
        elif isinstance(value, float):
            found = int(value) if value == value and abs(value) < 2**62 else -1
        else:
            match = _NUMBERED.fullmatch(value)
            if match and len(value) < 30 and abs(int(match.group(1))) < 2**63:
                found = int(match.group(1))
            else:
                found = -1_000_000 + len(self.labels)
                self.labels[found] = str(value)
        self[value] = found
        return found


def number(value: Any) -> float | None:
    """A finite float, or None for what is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def integer(value: Any) -> int | None:
    """An integer of 64 bits, or None for what is none; strings are parsed."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        real = number(value)
        if real is None:
            return None
        found = int(real)
    return found if -(2**63) <= found < 2**63 else None


def base_of(header: Header) -> int | None:
    """What is to be added to every recorded time, in ns; None when the file does not say."""
    found = integer(header.baseTimeNanoseconds)
    return found if found is not None and 0 < found < LAST_NS else None


def threshold_of(header: Header) -> float:
    """A recorded ``ts`` of at least this can only be nanoseconds."""
    return ABSOLUTE_NS_THRESHOLD if base_of(header) is None else RELATIVE_NS_THRESHOLD


Names = dict[tuple[int, int | None, str], str]
"""(pid, tid or None, "process_name" | "thread_name") → name."""


def note_name(names: Names, ids: Ids, event: Event) -> None:
    """Note what a metadata event calls a process or thread, if it does."""
    if event.name not in ("process_name", "thread_name"):
        return
    if event.args is None or event.args.name is NOTHING:
        return
    try:
        text = clean(str(msgspec.json.decode(event.args.name)))
    except (msgspec.DecodeError, RecursionError):
        return
    tid = None if event.name == "process_name" else ids[event.tid]
    names[ids[event.pid], tid, str(event.name)] = text


def _ints(values: list[Any]) -> np.ndarray:
    """Recorded integers; strings are parsed, what is no number becomes ``NO_VALUE``."""
    found = np.array([NO_VALUE if v is None else v for v in values])
    if found.dtype != np.int64:
        parsed = (integer(v) for v in values)
        found = np.array([NO_VALUE if v is None else v for v in parsed], dtype=np.int64)
    return found


def _no_ints(count: int) -> np.ndarray:
    return np.full(count, NO_VALUE, dtype=np.int64)


def _exact_thousandths(text: str) -> int | None:
    """A decimal number times 1000, rounded half up, from its digits."""
    text = text.strip()
    head, dot, tail = text.partition(".")
    try:
        if dot and tail.isdigit():
            fraction = int((tail + "0000")[:4])
            sign = -1 if head.startswith("-") else 1
            return int(head) * 1000 + sign * ((fraction + 5) // 10)
        if not dot and "e" not in text and "E" not in text:
            return int(text) * 1000
        value = Decimal(text)
        return round(value * 1000) if value.adjusted() < 20 else None
    except (ValueError, ArithmeticError):
        return None


def _thousandths(value: Any, stamp: msgspec.Raw | None) -> int | None:
    """A recorded number times 1000, without loss; None for what is no number of 64 bits."""
    if stamp is not None:
        found = _exact_thousandths(bytes(stamp).decode("ascii", "replace").strip('"'))
    elif isinstance(value, str):
        found = _exact_thousandths(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        found = value * 1000
    elif isinstance(value, float) and math.isfinite(value):
        whole = math.floor(value)
        found = whole * 1000 + round((value - whole) * 1000)
    else:
        found = None
    return found if found is not None and abs(found) < 1000 << 63 else None


def _as_array(values: list[Any]) -> np.ndarray | None:
    """The values as int64 or float64 when they all are numbers of that kind, else None.

    Floats are refused where float64 no longer tells thousandths apart.
    """
    try:
        array = np.array(values)
    except (TypeError, ValueError, OverflowError):
        return None
    if array.dtype == np.int64:
        return array
    if array.dtype != np.float64 or not len(array):
        return None
    if not np.isfinite(array).all() or np.abs(array).max() > EXACT_FLOAT_US:
        return None
    return array


def _to_ns(
    values: list[Any], stamps: list[msgspec.Raw] | None, unit: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Recorded times → (integer ns, usable, recorded in ns); what is not usable is 0.

    The whole and the fractional part are converted apart, so that no digit is lost.

    Args:
        values: as decoded.
        stamps: their digits, where float64 may have lost some.
        unit: values from this magnitude on are nanoseconds, all others microseconds; or a mask
            that says which are nanoseconds.
    """
    array = None if stamps is not None else _as_array(values)
    if array is not None and array.dtype == np.int64:
        magnitude = np.abs(array)
        in_ns = magnitude >= unit if isinstance(unit, float) else unit
        # The one value without a positive counterpart has a negative magnitude.
        ok = (magnitude >= 0) & (in_ns | (magnitude < (1 << 63) // 1000))
        return np.where(ok, np.where(in_ns, array, np.where(ok, array, 0) * 1000), 0), ok, in_ns
    if array is not None and not (
        (np.abs(array).max() >= unit) if isinstance(unit, float) else unit.any()
    ):
        whole = np.floor(array)
        ns = whole.astype(np.int64) * 1000 + np.rint((array - whole) * 1000).astype(np.int64)
        return ns, np.ones(len(ns), dtype=bool), np.zeros(len(ns), dtype=bool)
    found = np.zeros(len(values), dtype=np.int64)
    ok = np.zeros(len(values), dtype=bool)
    in_ns = np.zeros(len(values), dtype=bool) if isinstance(unit, float) else unit
    for i, value in enumerate(values):
        exact = _thousandths(value, None if stamps is None else stamps[i])
        if exact is None:
            continue
        if isinstance(unit, float):
            in_ns[i] = abs(exact) >= unit * 1000
        if in_ns[i]:
            exact //= 1000
        if abs(exact) < 1 << 63:
            found[i], ok[i] = exact, True
    return found, ok, in_ns


class _Interner(dict[Any, int]):
    """Value → code, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _Strings:
    """A dictionary-encoded string column under construction; None is null."""

    def __init__(self) -> None:
        self.codes: list[np.ndarray] = []
        self.table = _Interner()
        self.table[None] = 0

    def add(self, values: list[Any]) -> None:
        table = self.table
        self.codes.append(np.array([table[v] for v in values], dtype=np.int32))

    def add_raw(self, values: list[msgspec.Raw]) -> None:
        table = self.table
        self.codes.append(
            np.array([0 if v is NOTHING else table[bytes(v)] for v in values], dtype=np.int32)
        )

    def add_constant(self, value: Any, count: int) -> None:
        self.codes.append(np.full(count, self.table[value], dtype=np.int32))

    def finish(self) -> tuple[np.ndarray, list[str | None]]:
        """Codes (0 is null) and the values they stand for."""
        codes = np.concatenate(self.codes) if self.codes else np.zeros(0, np.int32)
        return codes, [text_of(v) for v in self.table]


def text_of(value: Any) -> str | None:
    """A recorded JSON value as text; strings without their quotes."""
    if isinstance(value, msgspec.Raw):
        value = bytes(value) or None
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        if text == "null":
            return None
        if text.startswith('"'):
            try:
                return clean(str(msgspec.json.decode(text)))
            except msgspec.DecodeError:
                return text
        return text
    return None if value is None else clean(str(value))


def clean(text: str) -> str:
    """Text that UTF-8 can hold: half a surrogate pair, as broken names have, is replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def usable_starts(
    counts: Counts, base_ns: int, start: np.ndarray, ok: np.ndarray, in_ns: np.ndarray | None
) -> np.ndarray:
    """Mask of the events with a possible start, whichever way they were read; counts the others.

    Args:
        counts: where they are counted.
        base_ns: what will be added to every start.
        start: in ns.
        ok: what could be read at all.
        in_ns: what was recorded in ns instead of µs; None for nothing.
    """
    ok = ok & (np.abs(start) < LAST_NS) & (np.abs(start + base_ns) < LAST_NS)
    counts.add("event.without_ts", int((~ok).sum()))
    if in_ns is not None:
        counts.add("event.nanosecond_unit", int((ok & in_ns).sum()))
    return ok


def usable_spans(
    counts: Counts,
    ok: np.ndarray,
    named: np.ndarray,
    dur: np.ndarray,
    dur_ok: np.ndarray,
    missing: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the usable spans and all durations, repaired; counts the others and the repairs.

    Args:
        counts: where they are counted.
        ok: spans with a usable start.
        named: spans with a name.
        dur: in ns.
        dur_ok: what could be read.
        missing: spans without a duration.
    """
    counts.add("event.without_name", int((ok & ~named).sum()))
    ok = ok & named
    negative = dur_ok & (dur < 0)
    overflow = (~dur_ok & ~missing) | (dur_ok & (dur > MAX_DURATION_NS))
    counts.add("event.without_dur", int((ok & missing).sum()))
    counts.add("event.negative_duration", int((ok & negative).sum()))
    counts.add("event.overflowing_duration", int((ok & overflow).sum()))
    good = dur_ok & ~negative & ~overflow
    return ok, dur if good.all() else np.where(good, dur, 0)


@dataclass
class Rows:
    """Spans or device events of a file, in its order.

    Attributes:
        columns: by name; integers have ``NO_VALUE`` where there is none, dictionary columns are
            (codes, values) where code 0 is null.
        collectives: (row, arguments) of those with a collective's metadata.
        places: each row's place among the events of the file.
    """

    columns: dict[str, Any]
    collectives: list[tuple[int, Args]]
    places: np.ndarray


def _in_file_order(
    columns: dict[str, Any], collectives: list[tuple[int, Args]], parts: list[np.ndarray]
) -> Rows:
    """Rows that were grouped by category, as the file has them: ties in time keep that order."""
    places = _concat(parts)
    if (places[1:] > places[:-1]).all():
        return Rows(columns, collectives, places)
    order = np.argsort(places)
    moved = np.empty_like(order)
    moved[order] = np.arange(len(order))
    for name, value in columns.items():
        columns[name] = (value[0][order], value[1]) if isinstance(value, tuple) else value[order]
    return Rows(columns, [(int(moved[row]), args) for row, args in collectives], places[order])


class _TimedBuilder:
    """Shared part: start, duration, and counting what is not usable.

    Args:
        counts: where oddities are counted.
        base_ns: what will be added to every start.
        ns_threshold: a ``ts`` of at least this many microseconds can only be nanoseconds.

    Attributes:
        places: place of every row in the file.
    """

    def __init__(self, counts: Counts, base_ns: int, ns_threshold: float) -> None:
        self.counts = counts
        self.base_ns = base_ns
        self.ns_threshold = ns_threshold
        self.start: list[np.ndarray] = []
        self.dur: list[np.ndarray] = []
        self.places: list[np.ndarray] = []

    def _starts(
        self, group: list[Any], stamps: list[ExactTimes] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start in ns, usable mask, and which events count in nanoseconds."""
        start, ok, in_ns = _to_ns(
            [e.ts for e in group],
            None if stamps is None else [s.ts for s in stamps],
            self.ns_threshold,
        )
        return start, usable_starts(self.counts, self.base_ns, start, ok, in_ns), in_ns

    def _times(
        self, group: list[Event], stamps: list[ExactTimes] | None, places: np.ndarray
    ) -> list[Event]:
        """Append the times of the usable events and return those events."""
        start, ok, in_ns = self._starts(group, stamps)
        dur, dur_ok, _ = _to_ns(
            [e.dur for e in group], None if stamps is None else [s.dur for s in stamps], in_ns
        )
        missing = np.array([e.dur is None for e in group], dtype=bool)
        named = np.array([e.name is not None for e in group], dtype=bool)
        ok, dur = usable_spans(self.counts, ok, named, dur, dur_ok, missing)
        if not ok.all():
            group = [e for e, keep in zip(group, ok, strict=True) if keep]
            start, dur, places = start[ok], dur[ok], places[ok]
        self.start.append(start)
        self.dur.append(dur)
        self.places.append(places)
        return group

    def _base(self) -> dict[str, Any]:
        return {"start_ns": _concat(self.start), "dur_ns": _concat(self.dur)}


def _concat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class HostBuilder(_TimedBuilder):
    """Host spans under construction."""

    _INTS = ("correlation_id", "external_id", "sequence_id", "forward_tid")

    def __init__(self, counts: Counts, base_ns: int, ns_threshold: float) -> None:
        super().__init__(counts, base_ns, ns_threshold)
        self.pid: list[np.ndarray] = []
        self.tid: list[np.ndarray] = []
        self.name, self.category = _Strings(), _Strings()
        self.dims, self.types, self.concrete = _Strings(), _Strings(), _Strings()
        self.ints: dict[str, list[np.ndarray]] = {name: [] for name in self._INTS}
        self.collectives: list[tuple[int, Args]] = []
        self.count = 0

    def add(
        self,
        group: list[Event],
        category: str,
        stamps: list[ExactTimes] | None,
        ids: Ids,
        places: np.ndarray,
    ) -> None:
        """Append spans of one category."""
        group = self._times(group, stamps, places)
        self.pid.append(np.array([ids[e.pid] for e in group], dtype=np.int64))
        self.tid.append(np.array([ids[e.tid] for e in group], dtype=np.int64))
        self.name.add([e.name for e in group])
        self.category.add_constant(category, len(group))
        args = [e.args or NO_ARGS for e in group]
        # Only operators carry shapes and sequence numbers, only calls carry correlations.
        operators = category in ("cpu_op", "annotation")
        nothing = _no_ints(len(group))
        self.ints["external_id"].append(
            _ints([a.external_id for a in args]) if category != "python" else nothing
        )
        if operators:
            self.ints["correlation_id"].append(nothing)
            self.ints["sequence_id"].append(_ints([a.sequence for a in args]))
            self.ints["forward_tid"].append(_ints([a.forward_tid for a in args]))
            self.dims.add_raw(
                [a.input_dims_2021 if a.input_dims is NOTHING else a.input_dims for a in args]
            )
            self.types.add_raw([a.input_types for a in args])
            self.concrete.add_raw([a.concrete for a in args])
            self.collectives += [
                (self.count + i, a) for i, a in enumerate(args) if a.collective is not None
            ]
        else:
            self.ints["correlation_id"].append(
                _ints([a.correlation for a in args]) if category != "python" else nothing
            )
            self.ints["sequence_id"].append(nothing)
            self.ints["forward_tid"].append(nothing)
            for column in (self.dims, self.types, self.concrete):
                column.add_constant(None, len(group))
        self.count += len(group)

    def rows(self) -> Rows:
        """All of them."""
        columns = {
            **self._base(),
            "pid": _concat(self.pid),
            "tid": _concat(self.tid),
            "category": self.category.finish(),
            "name": self.name.finish(),
            **{name: _concat(parts) for name, parts in self.ints.items()},
            "input_dims": self.dims.finish(),
            "input_types": self.types.finish(),
            "concrete_inputs": self.concrete.finish(),
        }
        return _in_file_order(columns, self.collectives, self.places)


class DeviceBuilder(_TimedBuilder):
    """Device events under construction."""

    _INTS = (
        "correlation_id",
        "external_id",
        "bytes_count",
        "registers_count",
        "shared_memory_bytes",
        "graph_id",
        "graph_node_id",
    )

    def __init__(self, counts: Counts, base_ns: int, ns_threshold: float) -> None:
        super().__init__(counts, base_ns, ns_threshold)
        self.pid: list[np.ndarray] = []
        self.device: list[np.ndarray] = []
        self.stream: list[np.ndarray] = []
        self.name, self.kind = _Strings(), _Strings()
        self.grid, self.block = _Strings(), _Strings()
        self.ints: dict[str, list[np.ndarray]] = {name: [] for name in self._INTS}
        self.occupancy: list[np.ndarray] = []
        self.collectives: list[tuple[int, Args]] = []
        self.count = 0

    def add(
        self,
        group: list[Event],
        kind: str,
        stamps: list[ExactTimes] | None,
        ids: Ids,
        places: np.ndarray,
    ) -> None:
        """Append events of one kind."""
        if kind == "mtia":
            # Its queue rows hold waits and marks too, which are no work of the device.
            work = [not str(e.name).startswith("event_") for e in group]
            group = list(compress(group, work))
            stamps = None if stamps is None else list(compress(stamps, work))
            places = places[work]
            for e in group:
                if e.args is not None and e.args.bytes is None:
                    e.args.bytes = e.args.size
        group = self._times(group, stamps, places)
        args = [e.args or NO_ARGS for e in group]
        self.pid.append(np.array([ids[e.pid] for e in group], dtype=np.int64))
        device = np.array(
            [
                ids[e.pid if a.device is None else a.device]
                for e, a in zip(group, args, strict=True)
            ],
            dtype=np.int64,
        )
        self.device.append(np.where(np.abs(device) < 1 << 31, device, -1))
        self.stream.append(
            np.array(
                [
                    ids[e.tid if a.stream is None else a.stream]
                    for e, a in zip(group, args, strict=True)
                ],
                dtype=np.int64,
            )
        )
        self.name.add([e.name for e in group])
        if kind == "mtia":
            self.kind.add(["memcpy" if "dma" in str(e.name) else "kernel" for e in group])
        else:
            self.kind.add_constant(kind, len(group))
        self.ints["correlation_id"].append(_ints([a.correlation for a in args]))
        self.ints["external_id"].append(
            _ints(
                [a.external_id if a.external_id is not None else a.external_id_2021 for a in args]
            )
        )
        self.ints["bytes_count"].append(_ints([a.bytes for a in args]))
        self.ints["registers_count"].append(_ints([a.registers for a in args]))
        self.ints["shared_memory_bytes"].append(_ints([a.shared_memory for a in args]))
        self.ints["graph_id"].append(_ints([a.graph_id for a in args]))
        self.ints["graph_node_id"].append(_ints([a.graph_node_id for a in args]))
        self.grid.add_raw([a.grid for a in args])
        self.block.add_raw([a.block for a in args])
        percent = [a.occupancy for a in args]
        try:
            occupancy = np.array(percent, dtype=np.float64)
        except (TypeError, ValueError):
            occupancy = np.array(
                [np.nan if (n := number(p)) is None else n for p in percent], dtype=np.float64
            )
        self.occupancy.append(occupancy / 100)
        if kind in ("kernel", "memcpy"):
            self.collectives += [
                (self.count + i, a) for i, a in enumerate(args) if a.collective is not None
            ]
        self.count += len(group)

    def rows(self) -> Rows:
        """All of them."""
        columns = {
            **self._base(),
            "pid": _concat(self.pid),
            "device_id": _concat(self.device),
            "stream_id": _concat(self.stream),
            "kind": self.kind.finish(),
            "name": self.name.finish(),
            **{name: _concat(parts) for name, parts in self.ints.items()},
            "grid": self.grid.finish(),
            "block": self.block.finish(),
            "occupancy_ratio": np.concatenate(self.occupancy)
            if self.occupancy
            else np.zeros(0, np.float64),
        }
        return _in_file_order(columns, self.collectives, self.places)


class SynchronizationBuilder(_TimedBuilder):
    """What was waited for, under construction."""

    def __init__(self, counts: Counts, base_ns: int, ns_threshold: float) -> None:
        super().__init__(counts, base_ns, ns_threshold)
        self.name = _Strings()
        self.device: list[np.ndarray] = []
        self.stream: list[np.ndarray] = []
        self.ints: dict[str, list[np.ndarray]] = {
            name: [] for name in ("correlation_id", "event_stream_id", "event_correlation_id")
        }

    def add(
        self, group: list[Event], stamps: list[ExactTimes] | None, ids: Ids, places: np.ndarray
    ) -> None:
        """Append records."""
        group = self._times(group, stamps, places)
        args = [e.args or NO_ARGS for e in group]
        self.name.add([e.name for e in group])
        device = _ints([a.device for a in args])
        pid = np.array([ids[e.pid] for e in group], dtype=np.int64)
        device = np.where(device == NO_VALUE, pid, device)
        self.device.append(np.where(np.abs(device) < 1 << 31, device, -1))
        stream = _ints([a.stream for a in args])
        tid = np.array([ids[e.tid] for e in group], dtype=np.int64)
        self.stream.append(np.where(stream == NO_VALUE, tid, stream))
        self.ints["correlation_id"].append(_ints([a.correlation for a in args]))
        self.ints["event_stream_id"].append(_ints([a.event_stream for a in args]))
        self.ints["event_correlation_id"].append(_ints([a.event_correlation for a in args]))

    def rows(self) -> Rows:
        """All of them."""
        columns = {
            **self._base(),
            "device_id": _concat(self.device),
            "stream_id": _concat(self.stream),
            "name": self.name.finish(),
            **{name: _concat(parts) for name, parts in self.ints.items()},
        }
        return _in_file_order(columns, [], self.places)


class CounterBuilder(_TimedBuilder):
    """Counter samples under construction."""

    def __init__(self, counts: Counts, base_ns: int, ns_threshold: float) -> None:
        super().__init__(counts, base_ns, ns_threshold)
        self.rows: list[tuple[str, str, float | None]] = []
        self.lengths: list[np.ndarray] = []

    def add(self, group: list[CounterEvent], stamps: list[ExactTimes] | None) -> None:
        """Append samples; one event holds a value per track."""
        start, ok, _ = self._starts(group, stamps)
        lengths = np.zeros(len(group), dtype=np.int64)
        for i, event in enumerate(group):
            if not ok[i] or not event.args:
                continue
            lengths[i] = len(event.args)
            for key, value in event.args.items():
                name = key if event.name in (None, key) else f"{event.name}.{key}"
                self.rows.append((clean(str(event.pid)), clean(name), number(value)))
        self.start.append(start)
        self.lengths.append(lengths)

    def finish(self) -> tuple[np.ndarray, list[tuple[str, str, float | None]]]:
        """Times, and (track, name, value) of each."""
        return np.repeat(_concat(self.start), _concat(self.lengths)), self.rows


class MemoryBuilder(_TimedBuilder):
    """Allocator instants under construction."""

    def __init__(self, counts: Counts, base_ns: int, ns_threshold: float) -> None:
        super().__init__(counts, base_ns, ns_threshold)
        self.pid: list[np.ndarray] = []
        self.tid: list[np.ndarray] = []
        self.ints: dict[str, list[np.ndarray]] = {
            name: []
            for name in (
                "device_type",
                "device_id",
                "address_id",
                "bytes_count",
                "allocated_bytes",
                "reserved_bytes",
            )
        }

    def add(self, group: list[Event], stamps: list[ExactTimes] | None, ids: Ids) -> None:
        """Append ``[memory]`` instants."""
        start, ok, _ = self._starts(group, stamps)
        if not ok.all():
            group = [e for e, keep in zip(group, ok, strict=True) if keep]
            start = start[ok]
        args = [e.args or NO_ARGS for e in group]
        self.start.append(start)
        self.pid.append(np.array([ids[e.pid] for e in group], dtype=np.int64))
        self.tid.append(np.array([ids[e.tid] for e in group], dtype=np.int64))
        for name, values in (
            ("device_type", [a.device_type for a in args]),
            ("device_id", [a.memory_device for a in args]),
            ("address_id", [a.address for a in args]),
            ("bytes_count", [a.memory_bytes for a in args]),
            ("allocated_bytes", [a.allocated for a in args]),
            ("reserved_bytes", [a.reserved for a in args]),
        ):
            self.ints[name].append(_ints(values))

    def finish(self) -> dict[str, Any]:
        """All columns."""
        return {
            "time_ns": _concat(self.start),
            "pid": _concat(self.pid),
            "tid": _concat(self.tid),
            **{name: _concat(parts) for name, parts in self.ints.items()},
        }
