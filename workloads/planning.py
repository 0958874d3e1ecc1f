"""Plans of steps: their samples, the rank that gets each, and the rows that are packed from them.

Nothing here reads a sample: the planner sees metadata only (source, index, length), and a plan is a
function of the seed and the step alone. So any process can make it again after a restart, and what
was lost with a process can be loaded again without losing or repeating a sample.

Primitives and cost model after MegaScale-Data (arXiv 2504.09844): mix, cost, balance, pack; and how
many loaders a mixture needs.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.workloads.sources import (
    Ints,
    Sample,
    SourceError,
    SourceSpec,
    Tokens,
    lengths_of,
    mark,
)

Floats = NDArray[np.float64]

METHODS = ("random", "greedy", "kk")
"""As drawn, with as many samples for each rank; largest cost first to the least loaded rank;
Karmarkar–Karp's largest differencing method."""
IGNORED = -100
"""Target where nothing is predicted, as torch's cross entropy has it."""
_KEPT_STEPS = 64
"""Steps between two whose positions are kept, so that an earlier step is planned again at once."""
_DECODING_S = 100e-6
"""Time to decode one document, about: a first guess."""
_BUSY_RATIO = 0.75
"""Share of its threads, and of its core, that a loader should be busy at most."""
_LOADER_BYTES = 8 << 30
"""State that one loader may hold."""
_AGREEING = 30
"""Observations that have to agree before loaders are taken away."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of training on a document: α·length + β·length², in any unit."""

    alpha: float = 1.0
    beta: float = 0.0

    def __call__(self, lengths: NDArray[np.integer]) -> Floats:
        """Cost of each document."""
        length = np.asarray(lengths, dtype=np.float64)
        return self.alpha * length + self.beta * length * length


def cost_of(width: int, vocabulary: int) -> Cost:
    """FLOP to train `loading_trainer.Decoder` on a document.

    6 per weight and token, and 6·width·length² of causal attention.
    """
    return Cost(alpha=6 * (12 * width * width + width * vocabulary), beta=6 * width)


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
        row = next((r for r, free_tokens in enumerate(free) if length <= free_tokens), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(int(document))
        free[row] -= length
    return rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents that one data-parallel rank trains on in one step."""

    tokens: NDArray[np.uint16]
    """[rows, width], 0 where nothing is."""
    documents: list[list[int]]
    """Per row, the lengths of the documents that it holds, one after the other from its start."""
    samples: list[Sample]
    step: int
    step_tokens: int
    """Tokens of all ranks together."""

    def marked(self) -> list[tuple[int, int, int]]:
        """Each document's source and index, as asked for, and the mark of what came."""
        marks = [
            mark(part)
            for row, lengths in zip(self.tokens, self.documents, strict=True)
            for part in np.split(row, np.cumsum(lengths))[:-1]
        ]
        return [(*sample, came) for sample, came in zip(self.samples, marks, strict=True)]

    def places(self) -> Ints:
        """Return the position of each token in its document: [rows, width]."""
        out = np.zeros(self.tokens.shape, np.int64)
        for row, lengths in zip(out, self.documents, strict=True):
            row[: sum(lengths)] = np.concatenate([np.arange(n) for n in lengths])
        return out

    def targets(self) -> Ints:
        """Return the token that follows in the same document: [rows, width]."""
        out = np.full(self.tokens.shape, IGNORED, np.int64)
        for row, tokens, lengths in zip(out, self.tokens, self.documents, strict=True):
            row[: sum(lengths) - 1] = tokens[1 : sum(lengths)]
            # What follows the last token of a document is another one.
            row[np.cumsum(lengths) - 1] = IGNORED
        return out


def batch_of(
    samples: Sequence[Sample],
    documents: Sequence[Tokens],
    *,
    width: int | None,
    step: int = 0,
    step_tokens: int = 1,
) -> Batch:
    """Pack documents into rows of ``width``; None: a row for each, as long as the longest."""
    lengths = np.array([len(ids) for ids in documents])
    rows = [[d] for d in range(len(documents))] if width is None else pack(lengths, width)
    tokens = np.zeros((len(rows), width or lengths.max(initial=0)), dtype=np.uint16)
    for row, held in zip(tokens, rows, strict=True):
        text = np.concatenate([documents[d] for d in held])
        row[: len(text)] = text
    return Batch(
        tokens=tokens,
        documents=[lengths[held].tolist() for held in rows],
        samples=[samples[d] for held in rows for d in held],
        step=step,
        step_tokens=step_tokens,
    )


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

    def _go_to(self, step: int) -> None:
        """Count the samples drawn before a step, from the nearest known step before it."""
        if not self._step <= step < self._step + _KEPT_STEPS:
            self._step = max(known for known in self._kept if known <= step)
            self._positions = self._kept[self._step]
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
            weights_left = np.where(full, 0.0, weights)
            if not weights_left.sum():
                weights_left = np.where(full, 0.0, 1.0)
            source[over] = rng.choice(
                len(weights_left), size=int(over.sum()), p=weights_left / weights_left.sum()
            )
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


class Autoscaler:
    """Decides how many loaders a mixture needs, by moving averages of what reading it takes.

    By Little's law, rate × time per read are in flight: a loader reads with so many threads,
    decodes with one core under Python's lock, and holds the state of its sources.
    """

    def __init__(
        self, sources: Sequence[SourceSpec], *, threads: int, least: int, most: int
    ) -> None:
        weights = np.array([source.weight for source in sources])
        self.share: Floats = weights / weights.sum()
        """Share of all samples read, by source."""
        self.wait_s: Floats = np.array([source.latency_s for source in sources])
        self.core_s: Floats = np.full(len(sources), _DECODING_S)
        """Time of a core for each sample, by source."""
        self.samples_per_s = 0.0
        self._state_bytes = sum(source.state_bytes for source in sources)
        self._threads, self._least, self._most = threads, least, min(most, len(sources))
        self._surplus = 0

    def busy(self) -> Floats:
        """Return the time of a thread that each source takes of a mean sample, in s."""
        return self.share * (self.wait_s + self.core_s)

    def observe(self, elapsed_s: float, counts: Ints, wait_s: Floats, core_s: Floats) -> None:
        """Take in a period: samples read, and the seconds that these waited and computed."""
        read, each = counts > 0, np.maximum(counts, 1)
        rate = float(counts.sum()) / elapsed_s
        self.samples_per_s = _averaged(self.samples_per_s or rate, rate)
        self.share = _averaged(self.share, counts / max(1, counts.sum()))
        self.wait_s = np.where(read, _averaged(self.wait_s, wait_s / each), self.wait_s)
        self.core_s = np.where(read, _averaged(self.core_s, core_s / each), self.core_s)

    def loaders(self, current: int, *, starving: bool) -> int:
        """Return how many loaders there should be.

        Args:
            current: how many there are.
            starving: trainers wait for data. Otherwise no loader is added, however busy they are.
        """
        wanted = max(
            self.samples_per_s * float(self.busy().sum()) / (self._threads * _BUSY_RATIO),
            self.samples_per_s * float((self.share * self.core_s).sum()) / _BUSY_RATIO,
            self._state_bytes / _LOADER_BYTES,
        )
        needed = min(max(math.ceil(wanted), self._least), self._most)
        if needed >= current:
            self._surplus = 0
            return needed if starving else current
        # One too many costs memory, one too few throughput: several periods have to agree.
        self._surplus += 1
        return needed if self._surplus >= _AGREEING else current


def _averaged(past: Any, new: Any) -> Any:
    return 0.8 * past + 0.2 * new


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
