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
from chopper.errors import InputError
from chopper.ingest.ranks import host_of, rank_by_name

Read = list[tuple[Path, "ParsedTrace"]]

_IDS = {
    "host_span": ("correlation_id", "external_id"),
    "device_event": ("correlation_id", "external_id"),
    "synchronization": ("correlation_id", "event_correlation_id"),
}
"""Ids that each trace counts from the beginning."""


def joined_windows(traces: Read) -> tuple[Read, dict[Path, list[Path]]]:
    """Join the traces of one process.

    Returns:
        The traces, each with its first file; and all files of those that were joined, by the first.

    Raises:
        InputError: two traces of one process overlap in time.
    """
    groups: dict[Hashable, Read] = {}
    for i, (file, trace) in enumerate(traces):
        groups.setdefault(_process(file, trace) or i, []).append((file, trace))
    out: Read = []
    files: dict[Path, list[Path]] = {}
    for group in groups.values():
        spans = [trace.span_ns for _, trace in group]
        if len(group) == 1 or None in spans:
            out += group
            continue
        group.sort(key=lambda item: item[1].span_ns or (0, 0))
        for (file, trace), (later, after) in pairwise(group):
            if (after.span_ns or (0, 0))[0] < (trace.span_ns or (0, 0))[1]:
                raise InputError(
                    f"{file} and {later}: of one process (pid {trace.host_pid}) and overlapping in "
                    "time: the same trace twice, or of two profilers; pass one of them"
                )
        first = group[0][0]
        files[first] = [file for file, _ in group]
        out.append((first, join([trace for _, trace in group])))
    return out, files


def _process(file: Path, trace: ParsedTrace) -> Hashable | None:
    """Return what the windows of a process share; None where nothing says which process it was."""
    host, rank = host_of(file, trace), trace.rank
    if trace.host_pid is None or (host is None and rank is None):
        return None
    if rank is None:
        rank = rank_by_name(file)
    return host, trace.host_pid, rank, trace.world_size, trace.device_id, trace.main, trace.process


def join(windows: Sequence[ParsedTrace]) -> ParsedTrace:
    """Return one trace of several windows of a process, given in order of time.

    Ids that each window counts anew are made distinct. Steps keep their numbers unless a window
    counts from the beginning again; a window without steps is one step.
    """
    tables: dict[str, list[pa.Table]] = {}
    rows = {"host_span": 0, "device_event": 0}
    offset, number = 0, None
    for window in windows:
        own = dict(window.tables)
        own["step"] = step = _steps(window, number)
        number = step["number"][step.num_rows - 1].as_py()
        offset = _distinct(own, offset)
        if "collective" in own:
            own["collective"] = _moved(own["collective"], rows)
        for name in rows:
            rows[name] += own[name].num_rows
        for name, table in own.items():
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
