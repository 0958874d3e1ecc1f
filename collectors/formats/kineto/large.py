"""A trace that is too large for memory: cut into stretches of steps, each read for itself.

While the file is scanned its rows go to a folder. Then its steps are known, and each row goes to
the file of every stretch that needs it: host spans by their time, device events by the step that
launched them. A stretch needs the step before and the step after its own: what the host did while
the device ran, and where the device was when the stretch began.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.cleaning import MAX_DURATION_NS, damage_findings
from chopper.collectors.formats.kineto._assemble import STEP, traces_of
from chopper.collectors.formats.kineto._groups import (
    DEVICE,
    GROUPS,
    HOST,
    HOST_KINDS,
    MEMORY,
    SYNCHRONIZATION,
    Columns,
    Marked,
    Scanned,
)
from chopper.collectors.formats.kineto._native import scan_file, stacked
from chopper.collectors.formats.kineto._reader import FileReader, usable
from chopper.collectors.formats.kineto._values import base_of
from chopper.collectors.formats.parsed import ParsedTrace, step_table
from chopper.errors import OutputError, reason_of
from chopper.limits import Intake
from chopper.storage.store import BEGINNING_NS, END_NS, Span

STRETCH_ROWS = 1_000_000
"""Rows of a stretch, about; its neighbours' steps come on top."""
_ROW_BYTES = 500
"""Memory that a row takes where all are read at once."""
_CUT_ROW_BYTES = 90
"""Of a row in a file."""
_ANNOTATION = 1 + HOST_KINDS.index("annotation")
_CALLS = [1 + HOST_KINDS.index(kind) for kind in ("runtime", "driver")]
_START, _DUR, _PID, _TID, _NAME, _CODE, _FLAGS, _PLACE, _FIXED = range(9)
_TABLE_OF = {HOST: "host_span", DEVICE: "device_event", MEMORY: "memory_event"}


@dataclass(frozen=True)
class LargeTrace:
    """A trace whose tables are read a stretch at a time.

    Attributes:
        trace: what is known of it; its only table is ``step``.
        rows_count: rows of its tables, by name, repetitions counted.
        stretches: in the order of their steps.
    """

    trace: ParsedTrace
    rows_count: dict[str, int]
    stretches: list[TraceStretch]


@dataclass(frozen=True)
class TraceStretch:
    """One stretch of a trace.

    Attributes:
        path: the trace.
        folder: with the rows of all stretches.
        number: of this one, from 0.
        span: its steps.
        keeper: whoever removes the folder; not of a stretch that was sent elsewhere.
    """

    path: Path
    folder: Path
    number: int
    span: Span
    keeper: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TraceStretch, (self.path, self.folder, self.number, self.span)

    def get(self) -> dict[str, pa.Table]:
        """Read its tables, by name."""
        return _tables(self.path, self.folder, [_rows_of(self.folder, self.number)])


@dataclass(frozen=True)
class WholeTrace:
    """All tables of a trace that was cut, as far as there is memory for them."""

    path: Path
    folder: Path
    stretches_count: int
    keeper: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeTrace, (self.path, self.folder, self.stretches_count)

    def get(self) -> dict[str, pa.Table]:
        """Read its tables, by name.

        Raises:
            InputError: there is not enough memory for them.
        """
        numbers = range(self.stretches_count)
        cut_bytes = sum(_file(self.folder, "stretch", n).stat().st_size for n in numbers)
        _check_memory(self.path, cut_bytes // _CUT_ROW_BYTES)
        blocks = [_rows_of(self.folder, number) for number in numbers]
        return _tables(self.path, self.folder, [_each_once(stacked(blocks))])


def read_or_cut(path: Path, folder: Path, threads: int = 1) -> list[ParsedTrace] | LargeTrace:
    """Read a file, or cut it where it is too large for that.

    What is not of one process on one device in numbered steps, or has repairs to be made to its
    text, is read whole.

    Args:
        path: the file.
        folder: where its rows go; made, and empty again where it was not cut.
        threads: how many read at a time.

    Raises:
        InputError: it cannot be read.
        OutputError: the folder has no room.
    """
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
        events: (device, start, end, correlation) of the device's events.
    """

    folder: Path
    blocks_count: int = 0
    rows_count: int = 0
    annotations: list[np.ndarray] = field(default_factory=list)
    launches: list[np.ndarray] = field(default_factory=list)
    events: list[np.ndarray] = field(default_factory=list)

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
        on, by = (device[_FIXED + ints.index(name)] for name in ("device_id", "correlation_id"))
        dur = device[_DUR]
        ok = (device[_FLAGS] == 0) & (dur >= 0) & (dur <= MAX_DURATION_NS)
        start = device[_START]
        self.events.append(np.array([on[ok], start[ok], (start + dur)[ok], by[ok]]))

    def blocks(self) -> Iterator[tuple[Columns, Marked]]:
        """Yield the blocks; each is removed once it was read."""
        for number in range(self.blocks_count):
            file = _file(self.folder, "block", number)
            [block] = _read(file)
            file.unlink()
            yield block

    def remove(self) -> None:
        """Remove what was written."""
        for number in range(self.blocks_count):
            _file(self.folder, "block", number).unlink(missing_ok=True)

    def cut(self, path: Path, scanned: Scanned) -> LargeTrace | None:
        """Give the rows to stretches; None where they have no steps to be cut at."""
        plan = self._plan(scanned)
        self.annotations, self.launches, self.events = [], [], []
        if plan is None:
            return None
        base_ns = base_of(scanned.header) or 0
        counts, rows_count = Counter(scanned.counts), Counter[str]()
        bounds_ns = [END_NS, BEGINNING_NS]
        for columns, collectives in self.blocks():
            for group, own in enumerate(columns):
                ok, own = usable(counts, base_ns, group, own)
                columns[group] = own
                low, high = plan.of_rows(group, own)
                low[~ok], high[~ok] = plan.stretches_count, 0
                own += [low, high]
                rows_count[_TABLE_OF.get(group, "synchronization")] += int(ok.sum())
                if group in (HOST, DEVICE) and ok.any():
                    end = int((own[_START] + own[_DUR])[ok].max())
                    first = min(bounds_ns[0], int(own[_START][ok].min()))
                    bounds_ns = [first, max(bounds_ns[1], end)]
            first = min(int(low.min(initial=plan.stretches_count)) for *_, low, _ in columns)
            last = max(int(high.max(initial=0)) for *_, high in columns)
            for number in range(first, last):
                rows = _chosen(columns, collectives, number)
                _append(_file(self.folder, "stretch", number), rows)
        scanned.counts = Counter()
        _append(self.folder / "common", scanned)
        spans = plan.spans(base_ns)
        stretches = [TraceStretch(path, self.folder, n, span) for n, span in enumerate(spans)]
        [first_rows] = [_rows_of(self.folder, 0)]
        trace = traces_of(path, _reader(path, self.folder, first_rows))[0]
        findings = [*damage_findings(counts, path.name), *trace.findings]
        others = {n: t.num_rows for n, t in trace.tables.items() if n not in rows_count}
        small = {"step": plan.step_table(base_ns)}
        span_ns = bounds_ns[0] + base_ns, bounds_ns[1] + base_ns
        trace = replace(trace, tables=small, findings=findings, held_span_ns=span_ns)
        rows_count["step"] = small["step"].num_rows
        return LargeTrace(trace, {**others, **rows_count}, stretches)

    def _plan(self, scanned: Scanned) -> _Plan | None:
        """Return which steps make a stretch; None where they cannot be told."""
        number_by_code = {
            code: int(match[1])
            for code, name in enumerate(scanned.names, 1)
            if (match := STEP.match(name))
        }
        name, start, dur, pid = np.concatenate(self.annotations, axis=1)
        of_step = np.flatnonzero(np.isin(name, [*number_by_code]))
        of_step = of_step[np.lexsort((-dur[of_step], start[of_step]))]
        launcher, correlation, launch_ns = np.concatenate(self.launches, axis=1)
        device, *_ = np.concatenate(self.events, axis=1)
        processes = np.unique(np.concatenate([pid[of_step], launcher]))
        if len(processes) != 1 or len(np.unique(device)) > 1:
            return None
        row_by_number: dict[int, int] = {}
        for row in of_step.tolist():
            row_by_number.setdefault(number_by_code[int(name[row])], row)
        rows = np.array([*row_by_number.values()])
        per_stretch = max(1, round(STRETCH_ROWS * len(rows) / self.rows_count))
        if len(rows) <= per_stretch:
            return None
        order = np.argsort(correlation, kind="stable")
        return _Plan(
            number=[*row_by_number],
            start_ns=start[rows],
            end_ns=start[rows] + dur[rows],
            first=np.arange(0, len(rows), per_stretch),
            correlation=correlation[order],
            launch_ns=launch_ns[order],
            events=np.concatenate(self.events, axis=1),
        )


@dataclass
class _Plan:
    """Which steps make a stretch, and which stretches need a row.

    Attributes:
        number, start_ns, end_ns: of each step, in the order of time.
        first: the first step of each stretch.
        correlation, launch_ns: of the calls that launch, sorted by correlation.
        events: as in :class:`_Rows`.
    """

    number: list[int]
    start_ns: np.ndarray
    end_ns: np.ndarray
    first: np.ndarray
    correlation: np.ndarray
    launch_ns: np.ndarray
    events: np.ndarray

    @property
    def stretches_count(self) -> int:
        return len(self.first)

    @cached_property
    def last(self) -> np.ndarray:
        """The step after the last of each stretch."""
        return np.append(self.first[1:], len(self.number))

    @cached_property
    def device_end_ns(self) -> np.ndarray:
        """When the device was done with all steps up to each one."""
        _, start, end, correlation = self.events
        step = self._step_of(correlation, start)
        latest = np.full(len(self.number), BEGINNING_NS)
        inside = step >= 0
        np.maximum.at(latest, step[inside], end[inside])
        self.events = self.events[:, :0]
        return np.maximum.accumulate(latest)

    def _step_of(self, correlation: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return the step that launched each event; by its own time where nobody did."""
        launch_ns = start.copy()
        if len(self.correlation):
            at = np.searchsorted(self.correlation, correlation)
            at[at == len(self.correlation)] = 0
            launched = (self.correlation[at] == correlation) & (correlation >= 0)
            launch_ns[launched] = self.launch_ns[at[launched]]
        return np.searchsorted(self.start_ns, launch_ns, side="right") - 1

    def of_rows(self, group: int, columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first stretch that needs each row, and the one after the last."""
        start = columns[_START]
        if group == DEVICE:
            correlation = columns[_FIXED + [*GROUPS[DEVICE].ints].index("correlation_id")]
            step = self._step_of(correlation, start)
            begin, done = self._device_ns
            # Of its own steps and their neighbours, and what ran meanwhile for later ones.
            low = np.minimum(
                np.searchsorted(self.last, step - 1, side="right"),
                np.searchsorted(done, start, side="right"),
            )
            high = np.maximum(
                np.searchsorted(self.first, step + 1, side="right"),
                np.searchsorted(begin, start + columns[_DUR], side="left"),
            )
        else:
            begin, end = self._host_ns
            dur = columns[_DUR] if group in (HOST, SYNCHRONIZATION) else 0
            low = np.searchsorted(end, start, side="right")
            high = np.searchsorted(begin, start + dur, side="right")
        low, high = np.minimum(low, len(self.first) - 1), np.maximum(high, 1)
        return low.astype(np.int32), high.astype(np.int32)

    @cached_property
    def _device_ns(self) -> tuple[np.ndarray, np.ndarray]:
        """From when to when the device was busy with each stretch."""
        done = self.device_end_ns[self.last - 1]
        return np.append(BEGINNING_NS, done[:-1]), done

    @cached_property
    def _host_ns(self) -> tuple[np.ndarray, np.ndarray]:
        """From when to when each stretch needs the host: until the device was done with it."""
        begin, end = self._read_ns()
        return begin, np.maximum.accumulate(np.maximum(end, self._device_ns[1]))

    def _read_ns(self) -> tuple[np.ndarray, np.ndarray]:
        start = np.concatenate([[BEGINNING_NS], self.start_ns, [END_NS, END_NS]])
        return start[self.first], start[self.last + 2]

    def spans(self, base_ns: int) -> list[Span]:
        """Return the steps of each stretch."""
        begin, end = self._read_ns()
        bounds = self.start_ns[self.first] + base_ns
        bounds[0] = BEGINNING_NS
        before = np.concatenate([[BEGINNING_NS, BEGINNING_NS], self.device_end_ns])[self.first]
        return [
            Span(
                own_ns=(int(bounds[n]), int(bounds[n + 1]) if n + 1 < len(bounds) else END_NS),
                read_ns=(_shifted(begin[n], base_ns), _shifted(end[n], base_ns)),
                device_begin_ns=None if before[n] == BEGINNING_NS else int(before[n]) + base_ns,
            )
            for n in range(len(bounds))
        ]

    def step_table(self, base_ns: int) -> pa.Table:
        """Return STEP of all steps."""
        start, end = self.start_ns + base_ns, self.end_ns + base_ns
        return step_table(self.number, start, end, "profiler_step")


def _shifted(time_ns: Any, base_ns: int) -> int:
    whole = int(time_ns)
    return whole if abs(whole) == END_NS else whole + base_ns


def _chosen(columns: Columns, collectives: Marked, number: int) -> tuple[Columns, Marked]:
    """Return the rows that a stretch needs: the last two columns say which stretches do."""
    needed = [np.flatnonzero((low <= number) & (number < high)) for *_, low, high in columns]
    chosen = [[c[rows] for c in own] for (*own, _, _), rows in zip(columns, needed, strict=True)]
    return chosen, _moved(collectives, needed)


def _each_once(rows: tuple[Columns, Marked]) -> tuple[Columns, Marked]:
    """Return rows in the order of the file, those that several stretches need once."""
    columns, collectives = rows
    firsts = [np.unique(group[_PLACE], return_index=True)[1] for group in columns]
    once = [[c[first] for c in group] for group, first in zip(columns, firsts, strict=True)]
    return once, _moved(collectives, firsts)


def _moved(collectives: Marked, kept: list[np.ndarray]) -> Marked:
    """Return those whose rows are kept, by where they are among these."""
    number: dict[tuple[int, int], int] = {}
    for group, rows in enumerate(kept):
        own = [row for of, row, _ in collectives if of == group]
        at = np.flatnonzero(np.isin(rows, own))
        number.update(zip([(group, row) for row in rows[at].tolist()], at.tolist(), strict=True))
    return [(g, number[g, row], args) for g, row, args in collectives if (g, row) in number]


def _reader(path: Path, folder: Path, rows: tuple[Columns, Marked]) -> FileReader:
    [scanned] = _read(folder / "common")
    groups, collectives = rows
    return FileReader(path, replace(scanned, groups=groups, collectives=collectives))


def _tables(path: Path, folder: Path, rows: list[tuple[Columns, Marked]]) -> dict[str, pa.Table]:
    """Return the tables of rows, which are forgotten meanwhile."""
    return dict(traces_of(path, _reader(path, folder, rows.pop()))[0].tables)


def _rows_of(folder: Path, number: int) -> tuple[Columns, Marked]:
    return stacked([*_read(_file(folder, "stretch", number))])


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
