"""Plans of steps: their samples, the rank that gets each, and the rows that are packed from them.

Nothing here reads a sample: the planner sees metadata only (source, index, length), and a plan is a
function of the seed and the step alone. So any process can make it again after a restart, and what
was lost with a process can be loaded again without losing or repeating a sample.

Primitives and cost model after MegaScale-Data (arXiv 2504.09844): mix, cost, balance, pack.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.errors import InputError
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
_WHOLE_EVERY = 32
"""Lines from one with whole counts to the next."""
IGNORED = -100
"""Target where nothing is predicted, as torch's cross entropy has it."""
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

    @property
    def digest(self) -> str:
        """Hash of the draw: sources, batch, ranks and seed."""
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
        """Count the samples drawn before a step, from the nearest known step before it."""
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


class Checkpoint:
    """Checkpoint of a draw in a folder: how far each source was drawn, by step.

    A file that is only appended to: a line with the count of each source now and then, and in
    between only what was drawn since the line before. A planner that starts again, also in another
    run, begins at the nearest line before its step instead of at step 0.
    """

    def __init__(self, folder: Path, draw: Draw) -> None:
        self.positions: dict[int, Ints] = {}
        """By step, what of each source was drawn before it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"draw-{draw.digest}.jsonl"
        whole_bytes = self._read(len(draw.sources)) if self._path.exists() else 0
        if self._path.exists():
            os.truncate(self._path, whole_bytes)  # what a kill left of a line
        self._last = max(self.positions, default=0)
        self._lines = 0

    def _read(self, sources: int) -> int:
        """Read all whole lines, and return where they end."""
        end, last = 0, np.zeros(sources, dtype=np.int64)
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                if "whole" in entry:
                    last = np.array(entry["whole"], dtype=np.int64)
                else:
                    last = last.copy()
                    for source, count in entry["drawn"]:
                        last[source] += count
                self.positions[entry["step"]] = last
            except (ValueError, KeyError, TypeError, IndexError) as exc:
                raise InputError(
                    f"{self._path}, line {number}: no line of a checkpoint ({exc}); remove the file"
                ) from exc
            end += len(line)
        return end

    def write(self, step: int, positions: Ints) -> None:
        """Append the samples drawn up to a step, unless they are already recorded."""
        if step <= self._last:
            return
        before = self.positions.get(self._last)
        entry: dict[str, object] = {"step": step}
        if before is None or self._lines % _WHOLE_EVERY == 0 or (positions < before).any():
            entry["whole"] = positions.tolist()
        else:
            drawn = positions - before
            entry["drawn"] = [[int(s), int(drawn[s])] for s in np.flatnonzero(drawn)]
        # One write: a kill leaves a line whole, or the file's last one cut.
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
        self.positions, self._last = {step: positions}, step
        self._lines += 1


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
