"""Plans of steps: their samples, and the rank that gets each.

Nothing here reads a sample: the planner sees metadata only (source, index, length), and a plan is a
function of the seed and the step alone. So any process can make it again after a restart, and what
was lost with a process can be loaded again without losing or repeating a sample.

Primitives and cost model after MegaScale-Data (arXiv 2504.09844): mix, cost, balance, pack.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.workloads.sources import Ints, Sample, SourceError, SourceSpec, lengths_of

Floats = NDArray[np.float64]

METHODS = ("random", "greedy", "kk")
"""As drawn, with as many samples for each rank; largest cost first to the least loaded rank;
Karmarkar–Karp's largest differencing method."""
_KEPT_STEPS = 64
"""Steps between two whose positions are kept, so that an earlier step is planned again at once."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of training on a document: α·length + β·length², in any unit."""

    alpha: float = 1.0
    beta: float = 0.0

    def __call__(self, lengths: NDArray[np.integer]) -> Floats:
        """Cost of each document."""
        length = np.asarray(lengths, dtype=np.float64)
        return self.alpha * length + self.beta * length * length


def loads(costs: Floats, ranks_of: Ints, ranks: int) -> Floats:
    """Sum of costs per rank."""
    return np.bincount(ranks_of, weights=costs, minlength=ranks).astype(np.float64)


def imbalance(costs: Floats, ranks_of: Ints, ranks: int) -> float:
    """Largest load over the mean load: 1 is even, or nothing to do."""
    total = float(np.sum(costs))
    return float(loads(costs, ranks_of, ranks).max()) * ranks / total if total else 1.0


def balance(costs: Floats, ranks: int, method: str) -> Ints:
    """The rank of each sample; all but ``random`` may give ranks different numbers of samples."""
    if method == "greedy":
        return _greedy(costs, ranks)
    if method == "kk":
        return _karmarkar_karp(costs, ranks)
    # In the order of the draw, which is random already.
    return np.arange(len(costs)) * ranks // max(1, len(costs))


def _greedy(costs: Floats, ranks: int) -> Ints:
    ranks_of = np.zeros(len(costs), dtype=np.int64)
    heap = [(0.0, rank) for rank in range(ranks)]
    for sample in np.argsort(-costs, kind="stable"):
        load, rank = heap[0]
        ranks_of[sample] = rank
        heapq.heapreplace(heap, (load + float(costs[sample]), rank))
    return ranks_of


def _karmarkar_karp(costs: Floats, ranks: int) -> Ints:
    """Merge the two partitions of the largest spread until one is left (Korf 1998)."""
    ranks_of = np.zeros(len(costs), dtype=np.int64)
    # (−spread, tie, parts): parts are (sum, samples), smallest sum first.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for sample, cost in enumerate(map(float, costs)):
        parts: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(ranks - 1)]
        heap.append((-cost if ranks > 1 else 0.0, sample, [*parts, (cost, [sample])]))
    heapq.heapify(heap)
    tie = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = sorted(
            ((x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)),
            key=lambda part: part[0],
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], tie, merged))
        tie += 1
    if heap:
        for rank, (_, samples) in enumerate(heap[0][2]):
            ranks_of[samples] = rank
    return ranks_of


def pack(lengths: NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Rows of documents, none longer than ``capacity`` tokens: first fit, longest first."""
    rows: list[list[int]] = []
    free: list[int] = []
    for document in np.argsort(-np.asarray(lengths), kind="stable"):
        length = int(lengths[document])
        if length > capacity:
            raise ValueError(f"a document of {length} tokens does not fit into {capacity}")
        row = next((r for r, left in enumerate(free) if length <= left), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(int(document))
        free[row] -= length
    return rows


@dataclass(frozen=True, slots=True)
class Plan:
    """Samples that one step loads: an entry for each of the global batch."""

    source: Ints
    index: Ints
    length: Ints
    rank: Ints

    def of(self, rank: int) -> list[Sample]:
        """Samples of a rank."""
        mine = self.rank == rank
        return list(zip(self.source[mine].tolist(), self.index[mine].tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Facts from which any process makes the same plans."""

    sources: tuple[SourceSpec, ...]
    batch: int
    ranks: int
    """Data-parallel ones: those that train on different samples."""
    seed: int
    """Of the draws and of the order within each source."""
    cost: Cost
    method: str

    @property
    def digest(self) -> str:
        """Text that tells what is drawn from what else could be."""
        drawn = (
            [(s.name, s.groups, s.weight) for s in self.sources],
            (self.batch, self.ranks, self.seed),
        )
        return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]


class Planner:
    """Draws the global batch of each step and gives each sample to a rank.

    The order within a source goes through its row groups, in another order each time, and through
    each one's documents in another order: so a reader holds a row group or two. A source that is
    shorter than its share is read again, as mixtures with a weight for small sources want it; in
    one reading no sample comes twice.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self._count = draw.batch * draw.ranks
        self._lengths = [lengths_of(source) for source in draw.sources]
        self._sizes = np.array([len(lengths) for lengths in self._lengths])
        self._ends = [
            np.cumsum([rows for _, _, rows in source.groups], dtype=np.int64)
            for source in draw.sources
        ]
        for source in draw.sources:
            if not source.size:
                raise SourceError(f"source {source.name} has no document: leave it out")
        if self._count > (available := int(self._sizes.sum())):
            raise SourceError(
                f"a step takes {self._count} samples ({draw.ranks} ranks × {draw.batch}), all "
                f"sources together hold {available}: choose a smaller --batch, or add data"
            )
        weights = np.array([source.weight for source in draw.sources])
        self.shares: Floats = weights / weights.sum()
        """Share of each source; they sum to 1."""
        self._step = 0
        self._positions = np.zeros(len(draw.sources), dtype=np.int64)
        self._kept = {0: self._positions}

    def plan(self, step: int) -> Plan:
        """Plan a step; the same whenever, wherever and however often it is asked."""
        self._go_to(step)
        source = self._drawn(step)
        position = self._positions[source] + occurrence(source)
        index, length = np.empty_like(position), np.empty_like(position)
        for s in np.unique(source).tolist():
            mine = source == s
            index[mine] = self._shuffled(s, position[mine])
            length[mine] = self._lengths[s][index[mine]]
        rank = balance(self.draw.cost(length), self.draw.ranks, self.draw.method)
        return Plan(source, index, length, rank)

    def upcoming(self, step: int, sources: Sequence[int]) -> list[Sample]:
        """The next sample of each source from a step on."""
        self._go_to(step)
        return [(s, int(self._shuffled(s, self._positions[[s]])[0])) for s in sources]

    def resume(self, positions: Mapping[int, Ints]) -> None:
        """Take over positions by step, from a checkpoint of the same draw."""
        self._kept |= positions

    def kept(self, step: int) -> tuple[int, Ints]:
        """The last step up to one whose positions are kept, and these."""
        known = max(known for known in self._kept if known <= step)
        return known, self._kept[known]

    def _go_to(self, step: int) -> None:
        """Count what was drawn before a step, from the nearest one before that is known."""
        if not self._step <= step < self._step + _KEPT_STEPS:
            self._step, self._positions = self.kept(step)
        while self._step < step:
            drawn = np.bincount(self._drawn(self._step), minlength=len(self._positions))
            self._step += 1
            self._positions = self._positions + drawn
            if self._step % _KEPT_STEPS == 0:
                self._kept[self._step] = self._positions

    def _drawn(self, step: int) -> Ints:
        """The source of each sample. What a source is too short for in one step, others give."""
        rng = np.random.default_rng((self.draw.seed, step))
        weights, limits = self.shares, self._sizes
        source = rng.choice(len(weights), size=self._count, p=weights)
        while (over := occurrence(source) >= limits[source]).any():
            full = np.bincount(source[~over], minlength=len(limits)) >= limits
            left = np.where(full, 0.0, weights)
            if not left.sum():
                left = np.where(full, 0.0, 1.0)
            source[over] = rng.choice(len(left), size=int(over.sum()), p=left / left.sum())
        return source

    def _shuffled(self, source: int, position: Ints) -> Ints:
        """Index of a source's n-th drawn samples."""
        size, group_ends = int(self._sizes[source]), self._ends[source]
        index = np.empty_like(position)
        for epoch in np.unique(position // size).tolist():
            mine = position // size == epoch
            ends, starts, seeds = _order(self.draw.seed, (source, epoch), group_ends.tobytes())
            at = position[mine] % size
            group = np.searchsorted(ends, at, side="right")
            row = at - np.concatenate([[0], ends[:-1]])[group]
            rows = np.diff(np.concatenate([[0], ends]))[group]
            maps = np.array([_affine(seeds[g], int(n)) for g, n in zip(group, rows, strict=True)])
            index[mine] = starts[group] + (row * maps[:, 0] + maps[:, 1]) % rows
        return index


@functools.lru_cache(maxsize=4096)
def _order(seed: int, reading: tuple[int, ...], ends: bytes) -> tuple[Ints, Ints, list[Any]]:
    """A reading's order of row groups: where each ends, where it starts in the source, its seed."""
    bounds = np.frombuffer(ends, dtype=np.int64)
    starts = np.concatenate([[0], bounds[:-1]])
    order = np.random.default_rng((seed, *reading, 1)).permutation(len(bounds))
    return np.cumsum((bounds - starts)[order]), starts[order], [(seed, *reading, g) for g in order]


@functools.lru_cache(maxsize=4096)
def _affine(seed: tuple[int, ...], size: int) -> tuple[int, int]:
    """Factor, prime to the size, and offset of an affine map, which visits each index once."""
    rng = np.random.default_rng(seed)
    factor = int(rng.integers(1, size + 1))
    while math.gcd(factor, size) != 1:
        factor += 1
    return factor, int(rng.integers(size))


def occurrence(values: Ints) -> Ints:
    """Count how often each value stood in the array before: [5, 7, 5] → [0, 0, 1]."""
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    first = np.searchsorted(sorted_values, sorted_values)
    out = np.empty_like(values)
    out[order] = np.arange(len(values)) - first
    return out
