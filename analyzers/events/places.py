"""The place of a cause: phase, layer, operator and the program's own function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.names import is_program_frame
from chopper.analyzers.trace.nesting import cut
from chopper.analyzers.trace.totals import window_keys
from chopper.causes import Level

_MOST = 0.5
"""A place is named if it holds more than this share of the time."""
_SCRIPT = ("<module>", ": main")
_LISTED = 0.02
"""Functions with a smaller share of the time are left out."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """The place that holds most of a cause or a pattern; None if no single one does.

    Attributes:
        phase, layer, op: names.
        line: file, line and function of the program; None without Python stacks.
    """

    phase: str | None
    layer: str | None
    op: str | None
    line: str | None


def links_of(run: Attribution) -> dict[int, Links]:
    """Return the joined events of the ranks whose tables are there."""
    return {rank: joined.links() for rank, joined in run.detail.joined.items()}


def place_of(run: Attribution, links: Mapping[int, Links], causes: Collection[str]) -> Where:
    """Return the place that holds most of the time in some leaf causes. PIECE, GAP -> Where."""
    functions = functions_in(run, links, causes)
    return Where(
        phase=largest(run, "phase", causes),
        layer=largest(run, "layer", causes),
        op=largest(run, "op", causes),
        line=innermost_function(functions),
    )


def line_in_steps(
    run: Attribution, links: Mapping[int, Links], numbers: Collection[int], cause: str
) -> str | None:
    """Return the function that holds most of a leaf cause in some traced steps. GAP -> function."""
    near = run.detail.all_steps
    rows = np.flatnonzero(np.isin(ints(near.windows, "number"), [*numbers]))
    windows = near.windows.take(rows)

    def inside(table: pa.Table) -> pa.Table:
        return table.filter(np.isin(window_keys(table), window_keys(windows)))

    gaps, pieces = inside(near.gaps), inside(near.pieces)
    some = replace(near, windows=windows, gaps=gaps, pieces=pieces, superset=None, part=None)
    return innermost_function(functions_in(some, links, (cause,)))


def largest(run: Attribution, level: Level, causes: Collection[str]) -> str | None:
    """Return the group of a level that holds most of the time in some leaf causes."""
    groups = run.by(level)
    times = {g.key: sum(g.causes.get(cause, 0) for cause in causes) for g in groups}
    key, time_ns = max(times.items(), key=lambda item: item[1], default=(None, 0))
    return str(key) if key is not None and time_ns > _MOST * sum(times.values()) else None


@dataclass(frozen=True)
class Functions:
    """Host time by function of the program, over ranks and steps.

    Attributes:
        total: function → time in it and in what it calls, in ns.
        own: function → time in it and in libraries that it calls, in ns.
        whole_ns: all of the time, in a function of the program or not.
    """

    total: Counter[str]
    own: Counter[str]
    whole_ns: int


def functions_in(
    run: Attribution, links: Mapping[int, Links], causes: Collection[str] | None = None
) -> Functions:
    """Return the time of the program's functions on the main thread. GAP, HOST_SPAN -> Functions.

    Args:
        run: the attributed run.
        links: rank → its joined events.
        causes: leaf causes of idle time to count; None for the whole step.
    """
    run = run.detail
    found = Functions(Counter(), Counter(), 0)
    whole_ns = 0
    for rank, link in links.items():
        if causes is None:
            windows = run.windows.filter(ints(run.windows, "rank") == rank)
            start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
        else:
            start, end = _intervals(run, rank, causes)
        whole_ns += _count(link, start, end, found)
    return Functions(found.total, found.own, whole_ns)


def _intervals(
    run: Attribution, rank: int, causes: Collection[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return when the host spent the time of some causes: gaps, and operators without a device."""

    def of_causes(table: pa.Table) -> pa.Table:
        mine = table.filter(ints(table, "rank") == rank)
        codes, names = strings(mine, "cause")
        return mine.filter(np.isin(codes, [names.index(c) for c in causes if c in names]))

    gaps = of_causes(run.gaps)
    start, end = ints(gaps, "start_ns"), ints(gaps, "end_ns")
    if run.joined[rank].host_only:
        row = np.unique(ints(of_causes(run.pieces), "event_row"))
        events = run.joined[rank].device_event.take(row[row >= 0])
        begin_ns = ints(events, "start_ns")
        start = np.concatenate([start, begin_ns])
        end = np.concatenate([end, begin_ns + ints(events, "dur_ns")])
    return start, end


def _count(links: Links, start_ns: np.ndarray, end_ns: np.ndarray, into: Functions) -> int:
    """Add the functions of one rank in some intervals; return the length of these."""
    host = links.host
    length_ns = int((end_ns - start_ns).sum())
    frames = host.of("python") & host.named(is_program_frame)
    if not frames.any() or not len(start_ns):
        return length_ns
    thread = np.full(len(start_ns), links.main_thread)
    _, begin, finish, span = cut(host.activity, thread, start_ns, end_ns)
    frame = host.nesting.nearest(frames)[span]
    known = (span >= 0) & (frame >= 0)
    own_ns = np.zeros(len(host), dtype=np.int64)
    np.add.at(own_ns, frame[known], (finish - begin)[known])
    total_ns, parent = own_ns.copy(), host.nesting.parent
    for depth in range(int(host.nesting.depth.max(initial=0)), 0, -1):
        rows = np.flatnonzero((host.nesting.depth == depth) & (total_ns > 0))
        np.add.at(total_ns, parent[rows], total_ns[rows])
    codes, values = host.names
    own_by_name, total_by_name = np.zeros((2, len(values)), dtype=np.int64)
    np.add.at(own_by_name, codes[frames], own_ns[frames])
    np.add.at(total_by_name, codes[frames], total_ns[frames])
    for code in np.flatnonzero(total_by_name > _LISTED * length_ns).tolist():
        # If a function calls itself, its outermost calls hold the time of the inner ones.
        same = frames & (codes == code)
        outermost = same & (host.nesting.topmost(same) == np.arange(len(host)))
        into.total[values[code]] += int(total_ns[outermost].sum())
        into.own[values[code]] += int(own_by_name[code])
    return length_ns


def innermost_function(functions: Functions, share: float = _MOST) -> str | None:
    """Return the innermost function that holds more than a share of the time; None if none does.

    Functions that hold it nest, so the innermost one has the least time; of equal ones, the most of
    its own. A script's own code and its ``main`` hold everything, and say nothing.
    """
    held = [
        name
        for name, time in functions.total.items()
        if time > share * functions.whole_ns and not name.endswith(_SCRIPT)
    ]
    return min(held, key=lambda n: (functions.total[n], -functions.own[n]), default=None)
