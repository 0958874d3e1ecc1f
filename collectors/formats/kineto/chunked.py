"""A trace that is too large for memory: cut into stretches of steps, each read for itself.

While the file is scanned its rows go to a folder. Then its steps are known, and each row goes to
the file of every stretch that needs it: host spans by their time, device events by the step that
launched them. A stretch needs the step before and the step after its own: what the host did while
the device ran, and where the device was when the stretch began.
"""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.cleaning import MAX_DURATION_NS, cut_overruns, damage_findings
from chopper.collectors.formats.kineto import refuse_other_devices, traces_of
from chopper.collectors.formats.kineto._events import (
    DEVICE,
    DEVICE_KINDS,
    GROUPS,
    HOST,
    HOST_KINDS,
    SYNCHRONIZATION,
    Columns,
    Marked,
    Scanned,
    base_of,
)
from chopper.collectors.formats.kineto._native import scan_file, stacked
from chopper.collectors.formats.kineto._reader import FileReader, usable
from chopper.collectors.formats.parsed import ParsedTrace, step_table
from chopper.collectors.formats.steps import PROFILER_STEP
from chopper.errors import OutputError, reason_of
from chopper.limits import Intake
from chopper.storage.run import BEGINNING_NS, END_NS, Span
from chopper.storage.stretches import Plan

_ROW_BYTES = 500
"""Memory that a row takes where all are read at once."""
_CUT_ROW_BYTES = 90
"""Of a row in a file."""
_ANNOTATION = 1 + HOST_KINDS.index("annotation")
_CALLS = [1 + HOST_KINDS.index(kind) for kind in ("runtime", "driver")]
_START, _DUR, _PID, _TID, _NAME, _CODE, _FLAGS, _PLACE, _FIXED = range(9)


@dataclass(frozen=True)
class LargeTrace:
    """A trace whose tables are read a stretch at a time.

    Attributes:
        trace: what is known of it; its only table is ``step``.
        stretches: in the order of their steps.
    """

    trace: ParsedTrace
    stretches: list[TraceStretch]


@dataclass(frozen=True)
class TraceStretch:
    """One stretch of a trace.

    Attributes:
        path: the trace.
        folder: with the rows of all stretches.
        number: of this one, from 0.
        span: its steps.
    """

    path: Path
    folder: Path
    number: int
    span: Span

    def get(self) -> dict[str, pa.Table]:
        """Read its tables, by name."""
        rows = stacked([*_read(_file(self.folder, "stretch", self.number))])
        return dict(traces_of(self.path, _reader(self.path, self.folder, rows))[0].tables)


def read_or_cut(path: Path, folder: Path, threads: int = 1) -> list[ParsedTrace] | LargeTrace:
    """Read a file, or cut it where it is too large for that.

    What is not of one process on one device in numbered steps, or has repairs to be made to its
    text, is read whole.

    Args:
        path: the file.
        folder: where its rows go; made, emptied of what an attempt that was killed left, and
            empty again where it was not cut.
        threads: how many read at a time.

    Raises:
        InputError: it cannot be read.
        OutputError: the folder has no room.
    """
    shutil.rmtree(folder, ignore_errors=True)
    rows = _Rows(folder)
    scanned = scan_file(path, rows, threads)
    if scanned is None or not rows.blocks_count:
        rows.remove()
        return traces_of(path, FileReader(path, scanned))
    cut = rows.cut(path, scanned)
    if cut is None:
        _check_memory(path, rows.rows_count)
        blocks = [*rows.blocks()]
        rows.remove()
        scanned.groups, scanned.collectives = stacked(blocks)
        return traces_of(path, FileReader(path, scanned))
    return cut


@dataclass
class _Rows:
    """The rows of a file, in blocks; and in memory what must be known of all to cut them.

    Attributes:
        annotations: (name, start, duration, process) of the annotations of the host.
        launches: (process, correlation, start) of the calls that launch.
        events: (device, stream, kind, start, duration, correlation, place) of the device's events.
        cut_ns: durations of kernels that overrun their stream, by place.
    """

    folder: Path
    blocks_count: int = 0
    rows_count: int = 0
    annotations: list[np.ndarray] = field(default_factory=list)
    launches: list[np.ndarray] = field(default_factory=list)
    events: list[np.ndarray] = field(default_factory=list)
    cut_ns: dict[int, int] = field(default_factory=dict)

    def take(self, columns: Columns, collectives: Marked) -> None:
        """Write a block of rows to the folder."""
        _append(_file(self.folder, "block", self.blocks_count), (columns, collectives))
        self.blocks_count += 1
        self.rows_count += sum(len(group[_START]) for group in columns)
        host, device = columns[HOST], columns[DEVICE]
        correlation = host[_FIXED + [*GROUPS[HOST].ints].index("correlation_id")]
        step = host[_CODE] == _ANNOTATION
        call = np.isin(host[_CODE], _CALLS) & (correlation >= 0)
        names = (_NAME, _START, _DUR, _PID)
        self.annotations.append(np.array([host[i][step] for i in names], dtype=np.int64))
        self.launches.append(np.array([host[_PID][call], correlation[call], host[_START][call]]))
        ints = [*GROUPS[DEVICE].ints]
        ids = ("device_id", "stream_id", "correlation_id")
        on, stream, by = (device[_FIXED + ints.index(name)] for name in ids)
        start, dur = device[_START], device[_DUR]
        ok = (device[_FLAGS] == 0) & (dur >= 0) & (dur <= MAX_DURATION_NS)
        ok &= (start != 0) | (dur > 0)
        of_kind, position = device[_CODE], device[_PLACE]
        self.events.append(np.array([on, stream, of_kind, start, dur, by, position])[:, ok])

    def blocks(self) -> Iterator[tuple[Columns, Marked]]:
        """Yield the blocks; each is removed once it was read."""
        for number in range(self.blocks_count):
            file = _file(self.folder, "block", number)
            [block] = _read(file)
            file.unlink()
            yield block

    def remove(self) -> None:
        """Remove the written files."""
        for number in range(self.blocks_count):
            _file(self.folder, "block", number).unlink(missing_ok=True)

    def cut(self, path: Path, scanned: Scanned) -> LargeTrace | None:
        """Give the rows to stretches; None where they have no steps to be cut at."""
        if not any(map(np.size, self.events)):
            refuse_other_devices(path, scanned.called, scanned.counts)
        plan = self._plan(scanned)
        self.annotations, self.launches, self.events = [], [], []
        if plan is None:
            return None
        base_ns = base_of(scanned.header) or 0
        counts = Counter(scanned.counts)
        counts["event.overrun"] = len(self.cut_ns)
        bounds_ns = [END_NS, BEGINNING_NS]
        for columns, collectives in self.blocks():
            for group, one in enumerate(columns):
                if group == DEVICE:
                    for row in np.flatnonzero(np.isin(one[_PLACE], [*self.cut_ns])).tolist():
                        one[_DUR][row] = self.cut_ns[int(one[_PLACE][row])]
                ok, one = usable(counts, base_ns, group, one)
                columns[group] = one
                low, high = _needed(plan, group, one)
                low[~ok], high[~ok] = len(plan.first), 0
                one += [low, high]
                if group in (HOST, DEVICE) and ok.any():
                    end = int((one[_START] + one[_DUR])[ok].max())
                    first = min(bounds_ns[0], int(one[_START][ok].min()))
                    bounds_ns = [first, max(bounds_ns[1], end)]
            first = min(int(low.min(initial=len(plan.first))) for *_, low, _ in columns)
            last = max(int(high.max(initial=0)) for *_, high in columns)
            for number in range(first, last):
                rows = _chosen(columns, collectives, number)
                _append(_file(self.folder, "stretch", number), rows)
        scanned.counts = Counter()
        _append(self.folder / "common", scanned)
        spans = plan.spans(base_ns)
        stretches = [TraceStretch(path, self.folder, n, span) for n, span in enumerate(spans)]
        first_rows = stacked([*_read(_file(self.folder, "stretch", 0))])
        trace = traces_of(path, _reader(path, self.folder, first_rows))[0]
        findings = [*damage_findings(counts, path.name), *trace.findings]
        bounds = plan.start_ns + base_ns, plan.end_ns + base_ns
        small = {"step": step_table(plan.number, *bounds, "profiler_step")}
        span_ns = bounds_ns[0] + base_ns, bounds_ns[1] + base_ns
        trace = replace(trace, tables=small, findings=findings, held_span_ns=span_ns)
        return LargeTrace(trace, stretches)

    def _plan(self, scanned: Scanned) -> Plan | None:
        """Return which steps make a stretch; None where they cannot be told."""
        number_by_code = {
            code: int(match[1])
            for code, name in enumerate(scanned.names, 1)
            if (match := PROFILER_STEP.match(name))
        }
        name, start, dur, pid = np.concatenate(self.annotations, axis=1)
        of_step = np.flatnonzero(np.isin(name, [*number_by_code]))
        of_step = of_step[np.lexsort((-dur[of_step], start[of_step]))]
        launcher, correlation, launch_ns = np.concatenate(self.launches, axis=1)
        processes = np.unique(np.concatenate([pid[of_step], launcher]))
        devices = np.unique(np.concatenate([device for device, *_ in self.events]))
        if len(processes) != 1 or len(devices) > 1:
            return None
        row_by_number: dict[int, int] = {}
        for row in of_step.tolist():
            row_by_number.setdefault(number_by_code[int(name[row])], row)
        rows = np.array([*row_by_number.values()], dtype=np.int64)
        plan = Plan.of(
            ([*row_by_number], start[rows], start[rows] + dur[rows]),
            (correlation, launch_ns),
            self.rows_count,
        )
        if plan is not None:
            on, stream, kind, start, dur, by, position = np.concatenate(self.events, axis=1)
            columns = {"device_id": on, "stream_id": stream, "start_ns": start, "dur_ns": dur}
            columns |= {"correlation_id": by}
            device = {**columns, "kind": (kind, [None, *DEVICE_KINDS])}
            cut = cut_overruns(Counter(), device)["dur_ns"]
            shorter = cut != dur
            self.cut_ns = dict(zip(position[shorter].tolist(), cut[shorter].tolist(), strict=True))
            plan.take_events(start, start + cut, by)
        return plan


def _needed(plan: Plan, group: int, columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first stretch that needs each row of a group, and the one after the last."""
    start, dur = columns[_START], columns[_DUR]
    if group == DEVICE:
        correlation = columns[_FIXED + [*GROUPS[DEVICE].ints].index("correlation_id")]
        return plan.of_device(start, dur, correlation)
    return plan.of_host(start, dur if group in (HOST, SYNCHRONIZATION) else 0)


def _chosen(columns: Columns, collectives: Marked, number: int) -> tuple[Columns, Marked]:
    """Return the rows that a stretch needs: the last two columns say which stretches do."""
    needed = [np.flatnonzero((low <= number) & (number < high)) for *_, low, high in columns]
    chosen = [
        [c[rows] for c in group] for (*group, _, _), rows in zip(columns, needed, strict=True)
    ]
    return chosen, _moved(collectives, needed)


def _moved(collectives: Marked, usable_rows: list[np.ndarray]) -> Marked:
    """Return those whose rows are kept, by where they are among these."""
    number: dict[tuple[int, int], int] = {}
    for group, rows in enumerate(usable_rows):
        marked_rows = [row for of, row, _ in collectives if of == group]
        at = np.flatnonzero(np.isin(rows, marked_rows))
        number.update(zip([(group, row) for row in rows[at].tolist()], at.tolist(), strict=True))
    return [(g, number[g, row], args) for g, row, args in collectives if (g, row) in number]


def _reader(path: Path, folder: Path, rows: tuple[Columns, Marked]) -> FileReader:
    [scanned] = _read(folder / "common")
    groups, collectives = rows
    return FileReader(path, replace(scanned, groups=groups, collectives=collectives))


def _check_memory(path: Path, rows_count: int) -> None:
    """Refuse to read all rows of a trace where they take more memory than there is.

    Raises:
        InputError: they do.
    """
    size = max(path.stat().st_size, 1)
    Intake(path, 0).check_memory(size, rows_count * _ROW_BYTES / size)


def _file(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}-{number}"


def _append(path: Path, value: Any) -> None:
    """Write a value behind those that a file holds.

    Raises:
        OutputError: there is no room for it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            pickle.dump(value, file, protocol=5)
    except OSError as exc:
        raise OutputError(
            f"{path.parent}: a temporary file cannot be written ({reason_of(exc)}); free space "
            "there, or set TMPDIR to another disk"
        ) from exc


def _read(path: Path) -> Iterator[Any]:
    """Yield the values of a file."""
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)
