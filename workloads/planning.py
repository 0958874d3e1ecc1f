"""Plans of steps: their samples, the rank that gets each, and the loaders that this needs.

Nothing here reads a sample: the planner sees metadata only (source, index, length), and a plan is a
function of the seed and the step alone. So any process can make it again after a restart, and what
was lost with a process can be loaded again without losing or repeating a sample.

Primitives and cost model after MegaScale-Data (arXiv 2504.09844): mix, cost, balance, pack.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chopper.workloads.mixture import Ints, Sample, SourceError, SourceSpec

CPU_S = 150e-6
"""Tokenizing one document of median length, about: for the first guess at the number of loaders."""
Floats = NDArray[np.float64]

METHODS = ("random", "greedy", "kk")
"""As drawn, with as many samples for each rank; largest cost first to the least loaded rank;
Karmarkar–Karp's largest differencing method."""


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
    seed: int
    """Of the draws and of the order within each source."""
    cost: Cost
    method: str
    ramp: int = 0
    """Steps over which the weights turn around, so that what was drawn most is drawn least; 0: they
    stay."""


class Planner:
    """Draws the global batch of each step and gives each sample to a rank.

    A source that is shorter than its share is read again in another order, as mixtures with a
    weight for small sources want it; in one reading no sample comes twice.
    """

    def __init__(self, draw: Draw) -> None:
        self._of = draw
        self._count = draw.batch * draw.ranks
        self._sizes = [source.size for source in draw.sources]
        for source in draw.sources:
            if source.size == 0:
                raise SourceError(f"source {source.name} is empty: leave it out of the mixture")
        there = sum(size or 0 for size in self._sizes)
        if None not in self._sizes and self._count > there:
            raise SourceError(
                f"a step takes {self._count} samples ({draw.ranks} ranks × {draw.batch}), all "
                f"sources together hold {there}: choose a smaller --batch, or add data"
            )
        self._weights = np.array([source.weight for source in draw.sources])
        order = np.argsort(self._weights)
        self._turned = np.empty_like(self._weights)
        self._turned[order] = self._weights[order[::-1]]
        self._step = 0
        self._positions = np.zeros(len(self._sizes), dtype=np.int64)

    def plan(self, step: int) -> Plan:
        """Plan a step; the same whenever, wherever and however often it is asked."""
        if step < self._step:
            self._step, self._positions = 0, np.zeros_like(self._positions)
        while self._step < step:
            self._positions += np.bincount(self._drawn(self._step), minlength=len(self._sizes))
            self._step += 1
        source = self._drawn(step)
        position = self._positions[source] + _occurrence(source)
        index, length = np.empty_like(position), np.empty_like(position)
        for s in np.unique(source).tolist():
            mine = source == s
            index[mine] = self._shuffled(s, position[mine])
            length[mine] = self._of.sources[s].lengths(index[mine])
        rank = balance(self._of.cost(length), self._of.ranks, self._of.method)
        return Plan(source, index, length, rank)

    def weights_at(self, step: int) -> Floats:
        """Share of each source at a step; they sum to 1."""
        turned = min(1.0, step / self._of.ramp) if self._of.ramp else 0.0
        weights = (1 - turned) * self._weights + turned * self._turned
        shares: Floats = weights / weights.sum()
        return shares

    def _drawn(self, step: int) -> Ints:
        """The source of each sample. What a source is too short for in one step, others give."""
        rng = np.random.default_rng((self._of.seed, step))
        weights = self.weights_at(step)
        source = rng.choice(len(weights), size=self._count, p=weights)
        limits = np.array([self._count if s is None else s for s in self._sizes])
        while (over := _occurrence(source) >= limits[source]).any():
            full = np.bincount(source[~over], minlength=len(limits)) >= limits
            left = np.where(full, 0.0, weights)
            source[over] = rng.choice(len(left), size=int(over.sum()), p=left / left.sum())
        return source

    def _shuffled(self, source: int, position: Ints) -> Ints:
        """Index of a source's n-th drawn sample: another order each time it is read."""
        size = self._sizes[source]
        if size is None:
            return position
        epochs = (position // size).tolist()
        orders = [_order(self._of.seed, source, epoch, size) for epoch in epochs]
        factors, offsets = np.array(orders, dtype=np.int64).T
        index: Ints = (position % size * factors + offsets) % size
        return index


@functools.lru_cache(maxsize=4096)
def _order(seed: int, source: int, epoch: int, size: int) -> tuple[int, int]:
    """Factor, prime to the size, and offset of an affine map, which visits each index once."""
    rng = np.random.default_rng((seed, source, epoch, 1))
    factor = int(rng.integers(1, size + 1))
    while math.gcd(factor, size) != 1:
        factor += 1
    return factor, int(rng.integers(size))


def _occurrence(values: Ints) -> Ints:
    """Count how often each value stood in the array before: [5, 7, 5] → [0, 0, 1]."""
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    first = np.searchsorted(sorted_values, sorted_values)
    out = np.empty_like(values)
    out[order] = np.arange(len(values)) - first
    return out


@dataclass(slots=True, kw_only=True)
class Load:
    """Load of serving each source, per sample; from its metadata at first, then as observed."""

    share: Floats
    """Share of all samples drawn: a moving average of the mixture."""
    wait_s: Floats
    cpu_s: Floats
    """Time of one core, under Python's lock."""
    state_bytes: int

    @classmethod
    def of(cls, sources: Sequence[SourceSpec]) -> Load:
        """By the metadata of sources."""
        return cls(
            share=np.array([source.weight for source in sources]),
            wait_s=np.array([source.latency_s for source in sources]),
            cpu_s=np.full(len(sources), CPU_S),
            state_bytes=sum(source.state_bytes for source in sources),
        )

    def busy(self) -> Floats:
        """Share of a thread's time that each source takes, at a sample per second."""
        return self.share * (self.wait_s + self.cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one loader, and of how many there may be."""

    threads: int
    memory_bytes: int
    """State that one loader may hold."""
    most: int
    least: int = 1
    """Loaders that stay, however little they have to do."""
    target: float = 0.75
    """Share of its threads, and of its core, that a loader should be busy at most."""


def loaders_needed(load: Load, samples_per_s: float, limits: Limits) -> int:
    """Count the loaders that serve ``samples_per_s``: by Little's law, by core and by memory."""
    wanted = max(
        samples_per_s * float(load.busy().sum()) / (limits.threads * limits.target),
        samples_per_s * float((load.share * load.cpu_s).sum()) / limits.target,
        load.state_bytes / limits.memory_bytes,
    )
    needed = max(math.ceil(wanted - 1e-9), limits.least)
    return max(1, min(needed, limits.most, len(load.share)))


def place(busy: Floats, loaders: int, before: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Sources of each loader, so that all are as busy; no loader is without one.

    Of those where they were ``before``, only what makes a loader busier than the others moves, for
    it is opened again.
    """
    # A little for holding the state: sources that are not drawn are spread as well.
    busy = busy + (busy.sum() or 1.0) * 1e-6
    fair = busy.sum() / loaders
    placed: list[list[int]] = [sorted(p, key=lambda s: busy[s]) for p in before[:loaders]]
    placed += [[] for _ in range(loaders - len(placed))]
    for here in placed:
        while len(here) > 1 and busy[here].sum() > 1.1 * fair:
            here.pop(0)
    # Each loader that is new gets one, and those that are left stay where there are most.
    while sum(map(len, placed)) > len(busy) - sum(not here for here in placed):
        max(placed, key=len).pop(0)
    kept = {s for here in placed for s in here}
    load = [float(busy[here].sum()) for here in placed]
    for source in np.argsort(-busy, kind="stable").tolist():
        if source not in kept:
            least = min(range(loaders), key=lambda i: (bool(placed[i]), load[i]))
            placed[least].append(source)
            load[least] += float(busy[source])
    return [sorted(here) for here in placed]


@dataclass
class Autoscaler:
    """Follows what serving the sources took, and says when to change the number of loaders."""

    load: Load
    limits: Limits
    memory: float = 0.8
    patience: int = 30
    """So many observations in a row must agree before loaders are taken away: giving one too many
    costs memory, one too few costs throughput."""
    samples_per_s: float = 0.0
    _surplus: int = field(default=0, init=False)

    def observe(
        self, elapsed_s: float, counts: Ints, wait_s: Floats, cpu_s: Floats, weights: Floats
    ) -> None:
        """Take in a period: samples and seconds by source, and their weights in the mixture."""
        load, new = self.load, 1 - self.memory
        rate = float(counts.sum()) / elapsed_s
        past = self.samples_per_s or rate
        self.samples_per_s = self.memory * past + new * rate
        load.share = self.memory * load.share + new * weights
        read, each = counts > 0, np.maximum(counts, 1)
        load.wait_s = np.where(read, self.memory * load.wait_s + new * wait_s / each, load.wait_s)
        load.cpu_s = np.where(read, self.memory * load.cpu_s + new * cpu_s / each, load.cpu_s)

    def decide(self, current: int, *, starving: bool) -> int:
        """Count the loaders that there should be, now that there are ``current``.

        More help only where it is ``starving``; else trainers are slow, however busy loaders are.
        """
        needed = loaders_needed(self.load, self.samples_per_s, self.limits)
        if needed >= current:
            self._surplus = 0
            return needed if starving else current
        self._surplus += 1
        return needed if self._surplus >= self.patience else current
