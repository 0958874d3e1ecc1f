"""Columns under construction: events go in chunk by chunk, arrays come out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE
from chopper.collectors.formats.cleaning import Counts, clean, number, usable_spans, usable_starts
from chopper.collectors.formats.kineto._events import (
    NOTHING,
    Args,
    CounterEvent,
    Event,
    ExactTimes,
)
from chopper.collectors.formats.kineto._values import Ids, ints, no_ints, text_of, to_ns

NO_ARGS = Args()


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
        start, ok, in_ns = to_ns(
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
        dur, dur_ok, _ = to_ns(
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
        nothing = no_ints(len(group))
        self.ints["external_id"].append(
            ints([a.external_id for a in args]) if category != "python" else nothing
        )
        if operators:
            self.ints["correlation_id"].append(nothing)
            self.ints["sequence_id"].append(ints([a.sequence for a in args]))
            self.ints["forward_tid"].append(ints([a.forward_tid for a in args]))
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
                ints([a.correlation for a in args]) if category != "python" else nothing
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
        self.ints["correlation_id"].append(ints([a.correlation for a in args]))
        self.ints["external_id"].append(
            ints([a.external_id if a.external_id is not None else a.external_id_2021 for a in args])
        )
        self.ints["bytes_count"].append(ints([a.bytes for a in args]))
        self.ints["registers_count"].append(ints([a.registers for a in args]))
        self.ints["shared_memory_bytes"].append(ints([a.shared_memory for a in args]))
        self.ints["graph_id"].append(ints([a.graph_id for a in args]))
        self.ints["graph_node_id"].append(ints([a.graph_node_id for a in args]))
        self.grid.add_raw([a.grid for a in args])
        self.block.add_raw([a.block for a in args])
        percent = [a.occupancy for a in args]
        try:
            occupancy = np.array(percent, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
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
    """SYNCHRONIZATION under construction."""

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
        device = ints([a.device for a in args])
        pid = np.array([ids[e.pid] for e in group], dtype=np.int64)
        device = np.where(device == NO_VALUE, pid, device)
        self.device.append(np.where(np.abs(device) < 1 << 31, device, -1))
        stream = ints([a.stream for a in args])
        tid = np.array([ids[e.tid] for e in group], dtype=np.int64)
        self.stream.append(np.where(stream == NO_VALUE, tid, stream))
        self.ints["correlation_id"].append(ints([a.correlation for a in args]))
        self.ints["event_stream_id"].append(ints([a.event_stream for a in args]))
        self.ints["event_correlation_id"].append(ints([a.event_correlation for a in args]))

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
            self.ints[name].append(ints(values))

    def finish(self) -> dict[str, Any]:
        """All columns."""
        return {
            "time_ns": _concat(self.start),
            "pid": _concat(self.pid),
            "tid": _concat(self.tid),
            **{name: _concat(parts) for name, parts in self.ints.items()},
        }
