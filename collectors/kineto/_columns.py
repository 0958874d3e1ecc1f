"""Columns under construction: events go in chunk by chunk, arrays come out.

Time: ``ts`` and ``dur`` are microseconds with up to three decimals (integers until 2024). They
become integer nanoseconds before anything is added to them: float64 holds the sum with
``baseTimeNanoseconds`` only to 256 ns.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chopper.collectors.kineto._events import NOTHING, Args, Event, ExactTimes, Number

NO_ARGS = Args()
MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""Longer spans are overflows of the recorder: no step takes a month."""
EXACT_FLOAT_US = float(1 << 43)
"""Above this a float64 of microseconds no longer tells nanoseconds apart."""


class Counts:
    """Counts of repairs and oddities, turned into findings at the end."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, code: str, count: int = 1) -> None:
        """Count ``count`` more of ``code``."""
        if count:
            self.values[code] = self.values.get(code, 0) + count


class Ids(dict[Any, int]):
    """Process and thread ids as integers; ``stream 7`` is 7, other words get negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[int, str] = {}

    def __call__(self, value: Number) -> int:
        return self[value]

    def __missing__(self, value: Any) -> int:
        if isinstance(value, bool) or value is None:
            found = -1
        elif isinstance(value, int):
            found = value if -(2**63) <= value < 2**63 else value - 2**64
        elif isinstance(value, float):
            found = int(value) if value == value and abs(value) < 2**62 else -1
        else:
            match = re.search(r"-?\d+$", value)
            if match and int(match.group()) < 2**63:
                found = int(match.group())
            else:
                found = -1000 - len(self.labels)
                self.labels[found] = str(value)
        self[value] = found
        return found


def number(value: Any) -> float | None:
    """A finite float, or None for what is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number and abs(number) != float("inf") else None


def _integer(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    try:
        number = int(value) if isinstance(value, str) else int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _ints(values: list[Any]) -> pa.Array:
    """Nullable int64 of recorded ids; strings are parsed, what is no number becomes null."""
    try:
        return pa.array(values, type=pa.int64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError):
        return pa.array([_integer(v) for v in values], type=pa.int64())


def _exact_ns(raw: msgspec.Raw) -> int | None:
    text = bytes(raw).decode("ascii", "replace").strip('"')
    head, dot, tail = text.partition(".")
    try:
        if dot and tail.isdigit():
            fraction = int((tail + "0000")[:4])
            sign = -1 if head.startswith("-") else 1
            return int(head) * 1000 + sign * ((fraction + 5) // 10)
        if not dot and "e" not in text and "E" not in text:
            return int(text) * 1000
        return round(Decimal(text) * 1000)
    except (ValueError, InvalidOperation):
        return None


def _numbers(values: list[Any]) -> np.ndarray:
    """An integer array where all values are integers, else float64 with NaN for what is none."""
    try:
        array = np.array(values)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, dtype=object)
    if array.dtype.kind == "u":
        array = np.minimum(array, np.uint64(2**63 - 1)).astype(np.int64)
    if array.dtype.kind in "if":
        return array
    numbers = [number(v) for v in values]
    return np.array([np.nan if n is None else n for n in numbers], dtype=np.float64)


def _microseconds_to_ns(values: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Recorded microseconds → (integer ns, usable mask); what is not usable is 0.

    The whole and the fractional part are converted apart, so that no digit is lost.
    """
    array = _numbers(values)
    if array.dtype.kind == "i":
        ok = np.abs(array) < 9_200_000_000_000_000
        return np.where(ok, array, 0) * 1000, ok
    ok = np.isfinite(array) & (np.abs(array) < 9.2e15)
    safe = np.where(ok, array, 0.0)
    whole = np.floor(safe)
    return whole.astype(np.int64) * 1000 + np.rint((safe - whole) * 1000).astype(np.int64), ok


def _exact_to_ns(raws: list[msgspec.Raw]) -> tuple[np.ndarray, np.ndarray]:
    """The same from the digits themselves, for times that float64 cannot hold."""
    found = [_exact_ns(r) for r in raws]
    ok = np.array([f is not None and abs(f) < 2**63 for f in found], dtype=bool)
    return np.array([f if k else 0 for f, k in zip(found, ok, strict=True)], dtype=np.int64), ok


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
                return str(msgspec.json.decode(value))
            except msgspec.DecodeError:
                return text
        return text
    return None if value is None else str(value)


class _TimedBuilder:
    """Shared part: start, duration, and counting what is not usable.

    Args:
        counts: where oddities are counted.
        ns_threshold: a ``ts`` of at least this many microseconds can only be nanoseconds.
    """

    def __init__(self, counts: Counts, ns_threshold: float) -> None:
        self.counts = counts
        self.ns_threshold = ns_threshold
        self.start: list[np.ndarray] = []
        self.dur: list[np.ndarray] = []

    def _starts(
        self, group: list[Event], stamps: list[ExactTimes] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start in ns, usable mask, and which events count in nanoseconds."""
        recorded = _numbers([e.ts for e in group])
        in_ns = np.abs(np.nan_to_num(recorded.astype(np.float64))) >= self.ns_threshold
        if stamps is not None:
            start, ok = _exact_to_ns([s.ts for s in stamps])
            start = np.where(in_ns, start // 1000, start)
        elif in_ns.any():
            start, ok = _microseconds_to_ns([e.ts for e in group])
            start = np.where(in_ns, np.nan_to_num(recorded, posinf=0, neginf=0), start).astype(
                np.int64
            )
            ok = ok | (in_ns & (np.abs(recorded.astype(np.float64)) < 9.2e18))
        else:
            start, ok = _microseconds_to_ns([e.ts for e in group])
        self.counts.add("event.without_ts", int((~ok).sum()))
        self.counts.add("event.nanosecond_unit", int((ok & in_ns).sum()))
        return start, ok, in_ns

    def _times(self, group: list[Event], stamps: list[ExactTimes] | None) -> list[Event]:
        """Append the times of the usable events and return those events."""
        start, ok, in_ns = self._starts(group, stamps)
        if stamps is not None:
            dur, dur_ok = _exact_to_ns([s.dur for s in stamps])
        else:
            dur, dur_ok = _microseconds_to_ns([e.dur for e in group])
        missing = np.array([e.dur is None for e in group], dtype=bool)
        if in_ns.any():
            dur = np.where(in_ns, dur // 1000, dur)
        named = np.array([e.name is not None for e in group], dtype=bool)
        self.counts.add("event.without_name", int((ok & ~named).sum()))
        ok &= named
        negative = dur_ok & (dur < 0)
        overflow = (~dur_ok & ~missing) | (dur_ok & (dur > MAX_DURATION_NS))
        self.counts.add("event.without_dur", int((ok & missing).sum()))
        self.counts.add("event.negative_duration", int((ok & negative).sum()))
        self.counts.add("event.overflowing_duration", int((ok & overflow).sum()))
        dur = np.where(dur_ok & ~negative & ~overflow, dur, 0)
        if not ok.all():
            group = [e for e, keep in zip(group, ok, strict=True) if keep]
            start, dur = start[ok], dur[ok]
        self.start.append(start)
        self.dur.append(dur)
        return group

    def _base(self) -> dict[str, Any]:
        return {"start_ns": _concat(self.start), "dur_ns": _concat(self.dur)}


def _concat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _concat_ints(parts: list[pa.Array]) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], type=pa.int64())


class HostBuilder(_TimedBuilder):
    """Host spans under construction."""

    _INTS = ("correlation_id", "external_id", "sequence_id", "forward_tid")

    def __init__(self, counts: Counts, ns_threshold: float) -> None:
        super().__init__(counts, ns_threshold)
        self.pid: list[np.ndarray] = []
        self.tid: list[np.ndarray] = []
        self.name, self.category = _Strings(), _Strings()
        self.dims, self.types, self.concrete = _Strings(), _Strings(), _Strings()
        self.ints: dict[str, list[pa.Array]] = {name: [] for name in self._INTS}
        self.collectives: list[tuple[int, Args]] = []
        self.count = 0

    def add(
        self, group: list[Event], category: str, stamps: list[ExactTimes] | None, ids: Ids
    ) -> None:
        """Append spans of one category."""
        group = self._times(group, stamps)
        self.pid.append(np.array([ids[e.pid] for e in group], dtype=np.int64))
        self.tid.append(np.array([ids[e.tid] for e in group], dtype=np.int64))
        self.name.add([e.name for e in group])
        self.category.add_constant(category, len(group))
        args = [e.args or NO_ARGS for e in group]
        # Only operators carry shapes and sequence numbers, only calls carry correlations.
        operators = category in ("cpu_op", "annotation")
        nothing = pa.nulls(len(group), pa.int64())
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

    def finish(self) -> dict[str, Any]:
        """All columns; dictionary columns as (codes, values)."""
        return {
            **self._base(),
            "pid": _concat(self.pid),
            "tid": _concat(self.tid),
            "category": self.category.finish(),
            "name": self.name.finish(),
            **{name: _concat_ints(parts) for name, parts in self.ints.items()},
            "input_dims": self.dims.finish(),
            "input_types": self.types.finish(),
            "concrete_inputs": self.concrete.finish(),
        }


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

    def __init__(self, counts: Counts, ns_threshold: float) -> None:
        super().__init__(counts, ns_threshold)
        self.pid: list[np.ndarray] = []
        self.device: list[np.ndarray] = []
        self.stream: list[np.ndarray] = []
        self.name, self.kind = _Strings(), _Strings()
        self.grid, self.block = _Strings(), _Strings()
        self.ints: dict[str, list[pa.Array]] = {name: [] for name in self._INTS}
        self.occupancy: list[np.ndarray] = []
        self.collectives: list[tuple[int, Args]] = []
        self.count = 0

    def add(self, group: list[Event], kind: str, stamps: list[ExactTimes] | None, ids: Ids) -> None:
        """Append events of one kind."""
        if kind == "mtia":
            group, stamps = _mtia_work(group, stamps)
            for e in group:
                if e.args is not None and e.args.bytes is None:
                    e.args.bytes = e.args.size
        group = self._times(group, stamps)
        args = [e.args or NO_ARGS for e in group]
        self.pid.append(np.array([ids[e.pid] for e in group], dtype=np.int64))
        self.device.append(
            np.array(
                [
                    ids[e.pid if a.device is None else a.device]
                    for e, a in zip(group, args, strict=True)
                ],
                dtype=np.int64,
            )
        )
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

    def finish(self) -> dict[str, Any]:
        """All columns; dictionary columns as (codes, values)."""
        return {
            **self._base(),
            "pid": _concat(self.pid),
            "device_id": _concat(self.device),
            "stream_id": _concat(self.stream),
            "kind": self.kind.finish(),
            "name": self.name.finish(),
            **{name: _concat_ints(parts) for name, parts in self.ints.items()},
            "grid": self.grid.finish(),
            "block": self.block.finish(),
            "occupancy_ratio": np.concatenate(self.occupancy)
            if self.occupancy
            else np.zeros(0, np.float64),
        }


def _mtia_work(
    group: list[Event], stamps: list[ExactTimes] | None
) -> tuple[list[Event], list[ExactTimes] | None]:
    """MTIA's queue rows without the waits and marks, which are no work of the device."""
    keep = [not str(e.name).startswith("event_") for e in group]
    kept = [e for e, k in zip(group, keep, strict=True) if k]
    if stamps is None:
        return kept, None
    return kept, [s for s, k in zip(stamps, keep, strict=True) if k]


class MemoryBuilder(_TimedBuilder):
    """Allocator instants under construction."""

    def __init__(self, counts: Counts, ns_threshold: float) -> None:
        super().__init__(counts, ns_threshold)
        self.pid: list[np.ndarray] = []
        self.tid: list[np.ndarray] = []
        self.ints: dict[str, list[pa.Array]] = {
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
            **{name: _concat_ints(parts) for name, parts in self.ints.items()},
        }
