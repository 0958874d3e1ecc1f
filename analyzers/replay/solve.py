"""The longest-path pass over a graph, in C where that was compiled, else in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from chopper.analyzers.replay.graph import Graph

try:
    from chopper.analyzers.replay._longest import longest as _longest

    COMPILED = True
except ImportError:  # no compiler when it was installed
    COMPILED = False

ABSENT = int(np.iinfo(np.int64).min)
"""Weight of an edge that is not there."""


def solve(graph: Graph, weight_ns: np.ndarray, lag_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each moment in ns, and the edge that decided it (-1 for none).

    Args:
        graph: moments and edges, in order.
        weight_ns: what each edge takes at least, ABSENT for none.
        lag_ns: what each moment takes beyond its latest predecessor.
    """
    time = np.empty(len(graph.time_ns), dtype=np.int64)
    decided = np.empty(len(time), dtype=np.int32)
    if COMPILED:
        _longest(graph.first, graph.source, weight_ns, lag_ns, graph.time_ns, time, decided)
    else:
        in_python(graph.first, graph.source, weight_ns, lag_ns, graph.time_ns, time, decided)
    return time, decided


def in_python(
    first: np.ndarray,
    source: np.ndarray,
    weight_ns: np.ndarray,
    lag_ns: np.ndarray,
    anchor_ns: np.ndarray,
    time_ns: np.ndarray,
    decided: np.ndarray,
) -> None:
    """Run the same pass in Python, on lists, where no compiler was available."""
    times: list[int] = []
    by: list[int] = []
    sources, weights = source.tolist(), weight_ns.tolist()
    low = 0
    for high, lag, anchor in zip(
        first[1:].tolist(), lag_ns.tolist(), anchor_ns.tolist(), strict=True
    ):
        best, edge = ABSENT, -1
        for at in range(low, high):
            weight = weights[at]
            if weight != ABSENT and (reached := times[sources[at]] + weight) > best:
                best, edge = reached, at
        times.append(anchor if edge < 0 else best + lag)
        by.append(edge)
        low = high
    time_ns[:] = times
    decided[:] = by


def critical_path(graph: Graph, decided: np.ndarray, end: int) -> np.ndarray:
    """The moments that decide when ``end`` comes, in time order, ``end`` the last."""
    # Only what leads to the end is walked: one step per moment of the path.
    follow = np.append(graph.source, -1)[decided].tolist()
    path = [end]
    while (at := follow[path[-1]]) >= 0:
        path.append(at)
    return np.array(path[::-1], dtype=np.int64)
