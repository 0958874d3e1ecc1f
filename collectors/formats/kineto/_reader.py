"""A file's events as columns."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chopper.collectors.formats.cleaning import clean, number, usable_spans, usable_starts
from chopper.collectors.formats.kineto._decoder import decode
from chopper.collectors.formats.kineto._events import (
    DEVICE,
    DEVICE_KINDS,
    GROUPS,
    HOST_KINDS,
    IN_NS,
    MEMORY,
    OPERATORS,
    OVERFLOWING_DUR,
    WITHOUT_DUR,
    WITHOUT_NAME,
    WITHOUT_TS,
    Args,
    CounterEvent,
    Scanned,
    base_of,
    text_of,
    threshold_of,
    to_ns,
)
from chopper.collectors.formats.parsed import NO_VALUE
from chopper.collectors.formats.unpack import read_bytes
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding

Columns = dict[str, Any]


@dataclass
class Rows:
    """Spans or device events of a file, in its order.

    Attributes:
        columns: by name; integers have ``NO_VALUE`` where there is none, dictionary columns are
            (codes, values) where code 0 is null.
        collectives: (row, arguments) of those with a collective's metadata.
        places: each row's place among the events of the file.
    """

    columns: Columns
    collectives: list[tuple[int, Args]]
    places: np.ndarray


class FileReader:
    """Reads one file.

    What is whole and strict is read by the scanner in C; what that refuses, and everything where
    it could not be compiled, is decoded in Python. Both give the same.

    Args:
        path: the file.
        scanned: what the scanner in C read of it; None where it refused.

    Attributes:
        header, ids, names, unknown, counts: as :class:`Scanned` has them.
        base_ns: what is added to every recorded time.
        host, device, synchronization: in the order of the file.
        memory: columns of the allocator's instants.
        counters: times, and (track, name, value) of each sample.
        findings: what was damaged.
    """

    def __init__(self, path: Path, scanned: Scanned | None) -> None:
        self.findings: list[Finding] = []
        if scanned is None:
            text, self.findings = read_bytes(path)
            scanned, damages = decode(path, text)
            self.findings += damages
        self.header, self.ids = scanned.header, scanned.ids
        if self.header.chopperRun is not None:
            raise InputError(
                f"{path}: carries a run, but not at its beginning, where it is read; export the "
                "run again, or name the trace that it was made from"
            )
        self.names, self.unknown, self.counts = scanned.called, scanned.unknown, scanned.counts
        self.base_ns = base_of(self.header) or 0
        self._names = [None, *scanned.names]
        self._raw_texts = [b"null", *scanned.texts]
        self._texts = [text_of(text) for text in self._raw_texts]
        host, device, memory, synchronization = (
            self._rows(i, columns, [(r, args) for g, r, args in scanned.collectives if g == i])
            for i, columns in enumerate(scanned.groups)
        )
        self.host, self.device = self._host(host), self._device(device)
        self.synchronization = _with_device(synchronization)
        self.memory = {**memory.columns, "time_ns": memory.columns["start_ns"]}
        self.counters = self._counters(scanned.counters)
        base = self.header.baseTimeNanoseconds
        if base is not None and base_of(self.header) is None and base != 0:
            base_text = repr(base)
            stated = base_text if len(base_text) <= 40 else base_text[:39] + "…"
            self.findings.append(finding("trace.base_time", source=path.name, stated=stated))

    def _rows(
        self, group: int, columns: list[np.ndarray], collectives: list[tuple[int, Args]]
    ) -> Rows:
        """Return the usable rows of a group; those that are not are counted."""
        ok, columns = usable(self.counts, self.base_ns, group, columns)
        start, dur, pid, tid, name, code, _, position, *group_columns = columns
        every = {"start_ns": start, "dur_ns": dur, "pid": pid, "tid": tid, "name": name}
        every |= {"code": code, "place": position}
        every |= zip((*GROUPS[group].ints, *GROUPS[group].texts), group_columns, strict=True)
        if not ok.all():
            moved = np.cumsum(ok) - 1
            collectives = [(int(moved[row]), args) for row, args in collectives if ok[row]]
            every = {column: values[ok] for column, values in every.items()}
        rows = Rows(every, collectives, every["place"])
        rows.columns["name"] = every["name"], self._names
        return rows

    def _host(self, rows: Rows) -> Rows:
        columns = rows.columns
        code = columns["code"]
        columns["category"] = code, [None, *HOST_KINDS]
        # Only operators carry shapes and sequence numbers, only calls carry correlations.
        operator = np.isin(code, [HOST_KINDS.index(kind) + 1 for kind in OPERATORS])
        python = code == HOST_KINDS.index("python") + 1
        columns["correlation_id"][operator | python] = NO_VALUE
        columns["external_id"][python] = NO_VALUE
        for column in ("sequence_id", "forward_tid"):
            columns[column][~operator] = NO_VALUE
        dims = columns["input_dims"]
        columns["input_dims"] = np.where(dims == 0, columns["input_dims_2021"], dims)
        for column in ("input_dims", "input_types", "concrete_inputs"):
            columns[column] = np.where(operator, columns[column], 0), self._texts
        return rows

    def _device(self, rows: Rows) -> Rows:
        columns = _with_device(rows).columns
        columns["kind"] = columns["code"], [None, *DEVICE_KINDS]
        external = columns["external_id"]
        columns["external_id"] = np.where(
            external == NO_VALUE, columns["external_id_2021"], external
        )
        for column in ("grid", "block"):
            columns[column] = columns[column], self._texts
        percents = np.full(len(self._raw_texts), np.nan)
        for code in np.unique(columns["occupancy"]).tolist():
            percent = number(json.loads(self._raw_texts[code]))
            percents[code] = np.nan if percent is None else percent
        columns["occupancy_ratio"] = percents[columns["occupancy"]] / 100
        return rows

    def _counters(
        self, samples: list[CounterEvent]
    ) -> tuple[np.ndarray, list[tuple[str, str, float | None]]]:
        start, ok, in_ns = to_ns([e.ts for e in samples], threshold_of(self.header))
        ok = usable_starts(self.counts, self.base_ns, start, ok, in_ns)
        times: list[int] = []
        rows: list[tuple[str, str, float | None]] = []
        for at in np.flatnonzero(ok).tolist():
            event = samples[at]
            for key, value in (event.args or {}).items():
                name = key if event.name in (None, key) else f"{event.name}.{key}"
                times.append(int(start[at]))
                rows.append((clean(str(event.pid)), clean(name), number(value)))
        return np.array(times, dtype=np.int64), rows


def usable(
    counts: Counter[str], base_ns: int, group: int, columns: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a mask of the rows that can be used, and all columns with durations repaired.

    Args:
        counts: of what is dropped or repaired, by code; added to.
        base_ns: will be added to each time.
        group: of the rows.
        columns: of the group, as :class:`Scanned` has them.
    """
    start, dur, pid, tid, name, code, flags, position, *group_columns = columns
    ok = usable_starts(counts, base_ns, start, flags & WITHOUT_TS == 0, flags & IN_NS != 0)
    if group == DEVICE:
        lost = ok & np.isin(start, (0, -base_ns)) & (dur == 0)
        counts["event.without_time"] += int(lost.sum())
        ok &= ~lost
    if group != MEMORY:
        ok, dur = usable_spans(
            counts,
            ok,
            named=flags & WITHOUT_NAME == 0,
            dur=dur,
            dur_ok=flags & (WITHOUT_DUR | OVERFLOWING_DUR) == 0,
            missing=flags & WITHOUT_DUR != 0,
        )
    return ok, [start, dur, pid, tid, name, code, np.zeros_like(flags), position, *group_columns]


def _with_device(rows: Rows) -> Rows:
    """Name the device and stream of each row; older traces give them as process and thread."""
    columns = rows.columns
    device, stream = columns["device_id"], columns["stream_id"]
    device = np.where(device == NO_VALUE, columns["pid"], device)
    columns["device_id"] = np.where(np.abs(device) < 1 << 31, device, -1)
    columns["stream_id"] = np.where(stream == NO_VALUE, columns["tid"], stream)
    return rows
