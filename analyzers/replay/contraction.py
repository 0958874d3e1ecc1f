"""The graphs of single ranks, contracted to what other ranks see of them, and solved together.

Between two collectives a rank depends on no other one. So its graph is made and changed where its
tables are, and what is left of it is small: its arrivals at collectives and the bounds of its
windows, each the latest of a few earlier moments and a time after each. Nothing is lost: all of
these are longest paths, and so is what leads from one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.replay.changes import CauseTimes, LinkChange, change_rank, set_pace
from chopper.analyzers.replay.graph import build
from chopper.analyzers.replay.scenario import Base, Scenario, windows_of
from chopper.analyzers.replay.whatif_options import Changes

try:
    from chopper.analyzers.replay._longest import contract as _contract
    from chopper.analyzers.replay._longest import couple as _couple

    COMPILED = True
except ImportError:  # no compiler when it was installed
    COMPILED = False

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from chopper.analyzers.causes.factors import Factors
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.rank_join import JoinedRank


@dataclass(frozen=True)
class Case:
    """Changes to a job, as each of its ranks applies them.

    Attributes:
        changes: what is changed.
        pace: share of its traced time that the host's work takes.
        link: the change of the link, where that changes.
        deviations: how many standard errors off the sensitivities to the clock are taken.
    """

    changes: Changes = field(default_factory=Changes)
    pace: float = 1.0
    link: LinkChange | None = None
    deviations: float = 0.0


@dataclass(frozen=True)
class Contracted:
    """The contractions of one rank's graph, one after another; equal ones are there once.

    Attributes:
        rank: its number.
        of_case: contraction of each case.
        records: contraction k is records[k] … records[k + 1].
        first: terms of record n are first[n] … first[n + 1].
        basis, weight_ns: of each term: 0 for the zero of time, else 1 + a record of its
            contraction; and how long after that.
        instance: collective whose last arrival a record is, -1 for none; the terms of that tell
            when this rank arrives.
        lasting, begin_ns: as in :class:`~chopper.analyzers.replay.scenario.WindowBounds`, whose
            bounds are the last records of a contraction, but for the following.
        earliest_count: by contraction, moments of which the first may be the begin of the windows.
    """

    rank: int
    of_case: np.ndarray
    records: np.ndarray
    first: np.ndarray
    basis: np.ndarray
    weight_ns: np.ndarray
    instance: np.ndarray
    lasting: np.ndarray
    begin_ns: int | None
    earliest_count: np.ndarray

    @property
    def case_bytes(self) -> np.ndarray:
        """Memory that the contraction of each case takes, in bytes."""
        terms, records = np.diff(self.first[self.records]), np.diff(self.records)
        return np.asarray((12 * terms + 12 * records)[self.of_case])

    def of(self, cases: Sequence[int]) -> Contracted:
        """Return the contractions of some cases, in their order."""
        chosen, of_case = np.unique(self.of_case[[*cases]], return_inverse=True)
        bounds = [(int(self.records[k]), int(self.records[k + 1])) for k in chosen]
        terms = [slice(int(self.first[low]), int(self.first[high])) for low, high in bounds]
        lengths = [np.diff(self.first[low : high + 1]) for low, high in bounds]
        return replace(
            self,
            of_case=of_case,
            records=np.append(0, np.cumsum([high - low for low, high in bounds])),
            first=np.append(0, np.cumsum(np.concatenate(lengths))),
            basis=np.concatenate([self.basis[some] for some in terms]),
            weight_ns=np.concatenate([self.weight_ns[some] for some in terms]),
            instance=np.concatenate([self.instance[low:high] for low, high in bounds]),
            earliest_count=self.earliest_count[chosen],
        )


def contract(
    joined: JoinedRank,
    matched: Matched | None,
    piece: pa.Table,
    factors: Factors | None,
    cases: Sequence[Case],
) -> Contracted:
    """Contract the graph of a rank with a device under each case.

    Args:
        joined: the rank.
        matched: its collectives, matched with the other ranks'; None when it is alone.
        piece: the `piece` table of the rank.
        factors: measured factors of its device events; None where there are none.
        cases: what is changed.
    """
    base = Base(build([(joined, matched)], with_others=False))
    fact = CauseTimes(base.graph.ranks[0], piece, factors)
    known: dict[tuple[int, ...], list[tuple[int, tuple[np.ndarray, ...]]]] = {}
    of_case: list[int] = []
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]] = []
    for case in cases:
        scenario = Scenario(base)
        if case.pace < 1:
            set_pace(scenario, case.pace)
        change_rank(scenario, fact, case.changes, case.link, case.deviations)
        own = (*scenario.weights(), scenario.happens(0))
        like = known.setdefault(tuple(int(column.sum()) for column in own), [])
        same = (k for k, other in like if all(map(np.array_equal, own, other)))
        if (at := next(same, None)) is None:
            at = len(parts)
            like.append((at, own))
            parts.append(_contracted(scenario, *own[:2]))
        of_case.append(at)
    firsts, bases, weights, instances, earliest_count = zip(*parts, strict=True)
    lengths = np.concatenate([np.diff(first) for first in firsts])
    bounds = base.bounds(0)
    return Contracted(
        fact.node.rank,
        np.array(of_case, dtype=np.int64),
        np.append(0, np.cumsum([len(instance) for instance in instances])),
        np.append(0, np.cumsum(lengths)),
        np.concatenate(bases),
        np.concatenate(weights),
        np.concatenate(instances),
        bounds.lasting,
        bounds.begin_ns,
        np.array(earliest_count, dtype=np.int64),
    )


def _contracted(
    scenario: Scenario, weight: np.ndarray, lag: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Contract one scenario: (first, basis, weight, instance) of its records, earliest moments."""
    graph, bounds = scenario.base.graph, scenario.bounds(0)
    arrivals = np.full(len(graph.time_ns), -1, dtype=np.int32)
    arrivals[graph.ready] = graph.instance
    order = np.argsort(bounds.of, kind="stable")
    ends = np.searchsorted(bounds.of[order], np.arange(bounds.count + 1))
    earliest_count = len(bounds.earliest)
    records = _contract(
        graph.first,
        graph.source,
        weight,
        lag,
        graph.time_ns,
        arrivals,
        np.concatenate([ends, ends[-1] + 1 + np.arange(earliest_count)]),
        np.concatenate([bounds.moment[order], bounds.earliest]).astype(np.int32),
        np.concatenate([bounds.late_ns[order], np.zeros(earliest_count, np.int64)]),
    )
    types = (np.int64, np.int32, np.int64, np.int32)
    first, basis, terms, instance = map(np.frombuffer, records, types)
    return first, basis, terms, instance, earliest_count


def couple(
    ranks: Sequence[Contracted], case: int, late_ns: Mapping[int, tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Solve the contractions of several ranks together; yield each rank and its windows' bounds.

    Args:
        ranks: those that take part.
        case: the case to solve.
        late_ns: rank → collectives, ascending, at which others that it represents arrive after it,
            and by how much.
    """
    chosen = [int(one.of_case[case]) for one in ranks]
    low, high = (
        [int(one.records[k + more]) for one, k in zip(ranks, chosen, strict=True)]
        for more in (0, 1)
    )
    of_rank = np.append(0, np.cumsum(np.subtract(high, low)))
    each = [*zip(ranks, low, high, strict=True)]
    instance = np.concatenate([one.instance[a:b] for one, a, b in each])
    lengths = np.concatenate([np.diff(one.first[a : b + 1]) for one, a, b in each])
    terms = [(one, slice(int(one.first[a]), int(one.first[b]))) for one, a, b in each]
    late = np.zeros(len(instance), dtype=np.int64)
    for (one, *_), first, last in zip(each, of_rank[:-1], of_rank[1:], strict=True):
        if one.rank in late_ns:
            late[first:last] = _found(*late_ns[one.rank], instance[first:last])
    time_ns = np.empty(len(instance), dtype=np.int64)
    _couple(
        of_rank,
        np.append(0, np.cumsum(lengths)),
        np.concatenate([one.basis[some] for one, some in terms]),
        np.concatenate([one.weight_ns[some] for one, some in terms]),
        instance,
        late,
        np.empty(int(instance.max(initial=-1)) + 1, dtype=np.int64),
        time_ns,
    )
    for one, k, last in zip(ranks, chosen, of_rank[1:], strict=True):
        first = last - int(one.earliest_count[k])
        latest_ns = time_ns[first - 1 - len(one.lasting) : first]
        yield one.rank, windows_of(one.lasting, one.begin_ns, latest_ns, time_ns[first:last])


def _found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 where it has none; keys ascend."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
