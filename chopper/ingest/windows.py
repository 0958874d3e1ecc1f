"""Several traces of one process, one after the other: windows of one rank.

``torch.profiler.schedule(repeat=n)`` writes a file for each of its windows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.arrow import with_column
from chopper.collectors.formats.kineto import ParsedTrace
from chopper.collectors.formats.parsed import step_table
from chopper.engines import Engine, Lost
from chopper.errors import InputError
from chopper.ingest.filed import left, loaded
from chopper.ingest.ranks import APART_NS, host_of, rank_by_name
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding

Read = list[tuple[Path, "ParsedTrace"]]

_IDS = {
    "host_span": ("correlation_id", "external_id"),
    "device_event": ("correlation_id", "external_id"),
    "synchronization": ("correlation_id", "event_correlation_id"),
}
"""Ids that each trace counts from the beginning."""
_ONE_CLOCK_NS = 100 * 24 * 3600 * 10**9
"""No process is traced again after so long: times of different bases are decades apart."""


def joined_windows(
    traces: Read, engine: Engine
) -> tuple[Read, dict[Path, list[Path]], list[Finding]]:
    """Join the traces of one process.

    Where neither host nor rank is recorded, its id alone tells a process: traces that overlap in
    time, or are far apart, are then of several.

    Returns:
        The traces, each with its first file; all files of those that were joined, by the first; and
        which of them were joined by the id alone.

    Raises:
        InputError: two traces of one process overlap in time, or their times have different bases.
    """
    groups: dict[Hashable, Read] = {}
    for i, (file, trace) in enumerate(traces):
        groups.setdefault(_process(file, trace) or i, []).append((file, trace))
    out: Read = []
    files: dict[Path, list[Path]] = {}
    findings: list[Finding] = []
    several: dict[int, list[ParsedTrace]] = {}
    for group in groups.values():
        spans = [trace.span_ns for _, trace in group]
        if len(group) == 1 or None in spans:
            out += group
            continue
        group.sort(key=lambda item: item[1].span_ns or (0, 0))
        first, trace = group[0]
        by_id_alone = trace.rank is None and host_of(first, trace) is None
        refused = _why_not_one(group, APART_NS if by_id_alone else _ONE_CLOCK_NS)
        if refused and by_id_alone and len({*spans}) == len(spans):
            out += group
            continue
        if refused:
            raise InputError(refused)
        if by_id_alone:
            note = finding("run.windows_by_pid", traces=len(group), pid=trace.host_pid)
            findings.append(note)
        files[first] = [file for file, _ in group]
        several[len(out)] = [trace for _, trace in group]
        out.append(group[0])
    calls = ((windows, engine.folder) for windows in several.values())
    for at, done in zip(several, engine.map(join_task, calls, label="join windows"), strict=True):
        if isinstance(done, Lost):
            raise done.error or InputError(f"{out[at][0]}: {done.reason}")
        out[at] = out[at][0], done
    return out, files, findings


def join_task(windows: Sequence[ParsedTrace], folder: Path | None) -> ParsedTrace:
    """Join windows of one process to one trace, whose tables are left in a folder."""
    return left(join([loaded(window) for window in windows]), folder)


def _why_not_one(group: Read, most_apart_ns: int) -> str:
    """Return why traces of one process, in order of time, are no windows of it; else nothing."""
    for (file, trace), (later, after) in pairwise(group):
        apart_ns = (after.span_ns or (0, 0))[0] - (trace.span_ns or (0, 0))[1]
        what = f"{file} and {later}: of one process (pid {trace.host_pid})"
        if apart_ns < 0:
            return (
                f"{what} and overlapping in time: the same trace twice, or of two profilers; pass "
                "one of them"
            )
        if apart_ns > most_apart_ns:
            return (
                f"{what}, but {apart_ns / 8.64e13:.0f} days apart: their times count from "
                "different bases (baseTimeNanoseconds); analyze them separately"
            )
    return ""


def _process(file: Path, trace: ParsedTrace) -> Hashable | None:
    """Return what the windows of a process share; None where nothing says which process it was."""
    if trace.host_pid is None:
        return None
    rank = rank_by_name(file) if trace.rank is None else trace.rank
    devices = tuple((device.device_id, device.name) for device in trace.devices)
    of_run = host_of(file, trace), trace.host_pid, rank, trace.world_size
    return *of_run, trace.device_id, trace.main, trace.process, devices


def join(windows: Sequence[ParsedTrace]) -> ParsedTrace:
    """Return one trace of several windows of a process, given in order of time.

    Ids that each window counts anew are made distinct. Steps keep their numbers unless a window
    counts from the beginning again; a window without steps is one step.
    """
    tables: dict[str, list[pa.Table]] = {}
    rows = {"host_span": 0, "device_event": 0}
    offset, number = 0, None
    for window in windows:
        merged = dict(window.tables)
        merged["step"] = step = _steps(window, number)
        number = step["number"][step.num_rows - 1].as_py()
        offset = _distinct(merged, offset)
        if "collective" in merged:
            merged["collective"] = _moved(merged["collective"], rows)
        for name in rows:
            rows[name] += merged[name].num_rows
        for name, table in merged.items():
            tables.setdefault(name, []).append(table)
    joined = {
        name: pa.concat_tables(parts).unify_dictionaries().combine_chunks()
        for name, parts in tables.items()
    }
    joined["thread"] = joined["thread"].group_by(joined["thread"].column_names).aggregate([])
    findings = {(f.code, f.message): f for window in windows for f in window.findings}
    borrowed = frozenset(name for window in windows for name in window.borrowed)
    return replace(windows[0], tables=joined, findings=list(findings.values()), borrowed=borrowed)


def _steps(window: ParsedTrace, last: int | None) -> pa.Table:
    """The steps of a window, numbered after ``last`` with a jump."""
    step = window.tables["step"]
    if not step.num_rows:
        start_ns, end_ns = window.span_ns or (0, 0)
        starts, ends = np.array([start_ns]), np.array([end_ns])
        step = step_table([0], starts, ends, "profiler_step")
    first = step["number"][0].as_py()
    if last is not None and first < last + 2:
        step = with_column(step, "number", pc.add(step["number"], last + 2 - first))
    return step


def _distinct(tables: dict[str, pa.Table], offset: int) -> int:
    """Add ``offset`` to a window's ids; returns that of the window after it."""
    highest = 0
    for name in _IDS.keys() & tables.keys():
        for column in _IDS[name]:
            ids = tables[name][column]
            highest = max(highest, pc.max(ids).as_py() or 0)
            moved = pc.if_else(pc.greater(ids, 0), pc.add(ids, offset), ids)
            tables[name] = with_column(tables[name], column, moved)
    return offset + highest + 1


def _moved(collective: pa.Table, rows: dict[str, int]) -> pa.Table:
    """The metadata of collectives, its rows counted from the first window."""
    first = [rows.get(source, 0) for source in collective["source"].to_pylist()]
    moved = pc.add(collective["row"], pa.array(first, pa.int64()))
    return with_column(collective, "row", moved)
