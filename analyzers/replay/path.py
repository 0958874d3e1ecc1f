"""The critical path of a schedule: what was, moment by moment, the thing that everything waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.idle import IDLE_CAUSES
from chopper.analyzers.links import COMMUNICATION, COMPUTE, COPY
from chopper.analyzers.replay import graph as g
from chopper.analyzers.replay.program import CALL
from chopper.analyzers.replay.solve import critical_path
from chopper.causes import LEAVES

if TYPE_CHECKING:
    from chopper.analyzers.replay.changes import RankFacts
    from chopper.analyzers.replay.scenario import Outcome

LATENCY, DEPENDENCY = "idle.launch_latency", "idle.dependency"
LAG = 100
"""Kind of a stretch that is a moment's lag: no trace shows what was waited for."""


@dataclass(frozen=True)
class Path:
    """Stretches of the critical path in time order; they tile the time from its begin to its end.

    Attributes:
        place: of the rank, in the order of the graph.
        start_ns, end_ns: in the graph's time.
        kind: of the edge that the stretch is; LAG where it is a lag.
        event: device event that runs, or that the stretch leads to; -1 for the program's own.
        interval: interval of the program, -1 for others.
    """

    place: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    kind: np.ndarray
    event: np.ndarray
    interval: np.ndarray

    @property
    def length_ns(self) -> np.ndarray:
        """Length of each stretch."""
        return self.end_ns - self.start_ns


def path_of(outcome: Outcome, alike: int | None = None) -> Path:
    """The critical path to the end of the last window: of all ranks, or of the one in that place."""
    scenario = outcome.scenario
    graph = scenario.base.graph
    ends = []
    for place, node in enumerate(scenario.ranks):
        bounds = outcome.windows(place)
        if not len(bounds) or (alike is not None and place != alike):
            continue
        at = np.flatnonzero(outcome.time_ns[node.end] == bounds[-1])
        if len(at):
            ends.append((int(bounds[-1]), int(node.end[at[-1]]), int(bounds[0])))
    nothing = np.zeros(0, np.int64)
    if not ends:
        return Path(*[nothing] * 6)
    _, last, begin = max(ends)
    moments = critical_path(graph, outcome.decided, last)
    edge = outcome.decided[moments[1:]].astype(np.int64)
    low, high = outcome.time_ns[moments[:-1]], outcome.time_ns[moments[1:]]
    reached = low + outcome.weight_ns[edge]
    kind, of = graph.kind[edge].astype(np.int64), graph.of[edge]
    place = np.maximum(graph.rank[moments[1:]], graph.rank[moments[:-1]])
    base = np.array([n.event_base for n in scenario.ranks])
    first = np.array([n.interval_base for n in scenario.ranks])
    host = kind == g.PROGRAM
    event = np.where(host, -1, of - base[place])
    interval = np.where(host, of - first[place], -1)
    # An edge, and then the lag of the moment that it leads to.
    both = [
        np.stack([a, b], axis=1).reshape(-1)
        for a, b in (
            (low, reached),
            (reached, high),
            (kind, np.full(len(kind), LAG)),
        )
    ]
    start, end, kinds = both
    rows = np.repeat(np.arange(len(kind)), 2)
    start, end = np.maximum(start, begin), np.maximum(end, begin)
    keep = np.flatnonzero(end > start)
    rows = rows[keep]
    return Path(place[rows], start[keep], end[keep], kinds[keep], event[rows], interval[rows])


def causes_of(outcome: Outcome, path: Path, facts: list[RankFacts]) -> dict[tuple[str, str], float]:
    """Nanoseconds of the path by (leaf cause, what it was).

    What ran is named by its operator or kernel and divided among the causes that the attribution
    gives it; what the host did by its causes; latencies by theirs.
    """
    found: dict[tuple[str, str], float] = defaultdict(float)
    for place, fact in enumerate(facts):
        rows = np.flatnonzero(path.place == place)
        if not len(rows):
            continue
        length = path.length_ns[rows]
        kind, event = path.kind[rows], path.event[rows]
        _running(fact, event, length, np.isin(kind, [g.RUN, g.TRANSFER]), found)
        _preparing(outcome, place, fact, path.interval[rows], length, found)
        _waiting(fact, kind, event, length, found)
    return dict(found)


def _names(fact: RankFacts, event: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """What each event is called, as codes into names: its operator, or its kernel; "" for none."""
    links = fact.node.joined.links
    op_codes, op_values = links.op_names
    codes, values = links.events.names
    own = np.isin(links.work_class[event], [COMMUNICATION, COPY]) | (op_codes[event] < 0)
    code = np.where(own, codes[event], len(values) + op_codes[event])
    return np.where(event < 0, len(values) + len(op_values), code), [*values, *op_values, ""]


def _add(
    found: dict[tuple[str, str], float],
    cause: str,
    code: np.ndarray,
    names: list[str],
    time: np.ndarray,
) -> None:
    for i, value in enumerate(np.bincount(code, weights=time, minlength=len(names)).tolist()):
        if value > 0:
            found[cause, names[i]] += value


def _running(
    fact: RankFacts,
    event: np.ndarray,
    length: np.ndarray,
    running: np.ndarray,
    found: dict[tuple[str, str], float],
) -> None:
    rows = np.flatnonzero(running & (event >= 0))
    if not len(rows):
        return
    code, names = _names(fact, event[rows])
    total = np.zeros(len(fact.node.start))
    shares = {}
    for leaf in LEAVES:
        if leaf.startswith("idle.") or leaf == "communication.wait":
            continue
        time = fact.of_events(leaf)
        if time is not None:
            shares[leaf] = time
            total += time
    known = total[event[rows]] > 0
    for leaf, time in shares.items():
        part = np.where(
            known, length[rows] * time[event[rows]] / np.maximum(total[event[rows]], 1), 0.0
        )
        _add(found, leaf, code, names, part)
    links = fact.node.joined.links
    klass = links.work_class[event[rows]]
    coupled = fact.node.coupled[event[rows]]
    hidden = ~known
    for leaf, mask in (
        ("communication.transfer.no_peak", (klass == COMMUNICATION) & coupled),
        ("communication.unseparated", (klass == COMMUNICATION) & ~coupled),
        ("copy.other", klass == COPY),
        ("compute.unmodelled", klass == COMPUTE),
    ):
        _add(found, leaf, code[hidden & mask], names, length[rows][hidden & mask])


_WAITING = {
    g.LAUNCH: "idle.call",
    g.FOLLOW: "idle.call",
    g.EVENT: DEPENDENCY,
    g.STREAM: LATENCY,
    LAG: LATENCY,
    g.SYNCHRONIZE: "idle.preparation.synchronization",
    g.COLLECTIVE_WAIT: "idle.preparation.collective_wait",
}


def _waiting(
    fact: RankFacts,
    kind: np.ndarray,
    event: np.ndarray,
    length: np.ndarray,
    found: dict[tuple[str, str], float],
) -> None:
    """Latencies, by what they lead to."""
    for of, cause in _WAITING.items():
        rows = np.flatnonzero((kind == of) & (event >= 0))
        if len(rows):
            code, names = _names(fact, event[rows])
            _add(found, cause, code, names, length[rows])


def _preparing(
    outcome: Outcome,
    place: int,
    fact: RankFacts,
    interval: np.ndarray,
    length: np.ndarray,
    found: dict[tuple[str, str], float],
) -> None:
    rows = np.flatnonzero(interval >= 0)
    if not len(rows):
        return
    program = fact.node.program
    on_path = np.zeros(len(program))
    np.add.at(on_path, interval[rows], length[rows])
    parts = program.parts
    kept = ~outcome.scenario.removed_parts(place) & (on_path[parts.owner] > 0)
    owner, cause = parts.owner[kept], parts.cause[kept]
    time = (parts.end_ns - parts.start_ns)[kept]
    total = np.bincount(owner, weights=time, minlength=len(program))
    part = time * on_path[owner] / np.maximum(total[owner], 1)
    for code, value in enumerate(np.bincount(cause, weights=part, minlength=len(IDLE_CAUSES))):
        if value > 0:
            name = "launching calls" if code == CALL else "host"
            found[IDLE_CAUSES[code], name] += float(value)
    rest = on_path.sum() - part.sum()
    if rest > 0:
        found["idle.preparation.unobserved", "host"] += float(rest)


__all__ = ["LAG", "Path", "causes_of", "path_of"]
