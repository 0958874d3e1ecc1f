"""Synthetic sources of text, as different from each other as real ones: in how much they hold, how
long their documents are, how often they are drawn, how long storage takes, how much state it needs.

A source's metadata (how many documents, how long each) is arithmetic that anyone can do. Reading
needs the source open: its state is allocated and written, 7 to 21 MB as a row group with its index
takes; a read waits as long as its storage does (the one thing here that is simulated: a sleep), and
its text is tokenized for real. No torch: loader processes do without it.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.errors import ChopperError
from chopper.workloads.planning import Cost, Planner, Ramp, SourceLoad

Ints = NDArray[np.int64]

VOCABULARY = 320
"""Ids; 0 is padding."""
FAULTS = ("none", "raises", "empty", "endless", "hangs", "killed-loader")
"""Faults that can be injected, to see what is said; the last of loader actors only."""
CPU_S = 150e-6
"""Tokenizing one document of median length, about: for the first guess at the number of loaders."""
READ_TIMEOUT_S = 20.0
_STEMS = tuple(a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in "lnrs")[:240]
_ENDINGS = tuple(a + b for a in "bcdgkmpt" for b in ("ed", "er", "ing", "ly", "es", "or"))
_WORDS = tuple(f"{stem}{ending} ".encode() for stem in _STEMS for ending in _ENDINGS)
_LENGTHS = np.array([len(word) for word in _WORDS])
_WORD = re.compile(r"[a-z]+")


class SourceError(ChopperError):
    """A source did not give what it was asked for; the message names it and the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The metadata of a source."""

    name: str
    number: int
    size: int | None
    """Documents; None: endless."""
    weight: float
    """Weight in the mixture, relative to the others."""
    latency_s: float
    """Mean time of its storage per read."""
    state_bytes: int
    """That it holds while it is open."""
    median_tokens: int
    longest_tokens: int
    seed: int
    fault: str = "none"

    def lengths(self, index: Ints) -> Ints:
        """Tokens of documents: log-normal, even, at least 4 and at most ``longest_tokens``."""
        drawn = self.median_tokens * np.exp(
            0.9 * _normals()[_spread(index, self.number, self.seed)]
        )
        even: Ints = (drawn / 2).astype(np.int64) * 2
        return np.clip(even, 4, self.longest_tokens // 2 * 2)

    def latency_of(self, index: int) -> float:
        """Seconds that storage takes for one document: around the mean, seldom twice it."""
        normal = float(_normals()[_spread(index, self.number, self.seed + 1)])
        return self.latency_s * math.exp(0.35 * normal - 0.35**2 / 2)


@functools.cache
def _normals() -> NDArray[np.float64]:
    """Standard normal numbers, in no order."""
    return np.random.default_rng(0).standard_normal(4099)


def _spread(index: Any, number: int, salt: int) -> Any:
    """Choose the one that a document has, always the same; of a number or an array."""
    return (index * 2654435761 + number * 40503 + salt * 97) % 4099


def make_sources(
    *,
    count: int,
    state_bytes: int,
    latency_s: float,
    documents: int,
    tokens: int,
    longest: int,
    seed: int,
    fault: str = "none",
) -> list[SourceSpec]:
    """``count`` sources around the given means, skewed.

    Args:
        count: sources.
        state_bytes: mean state of an open source; half to one and a half times that.
        latency_s: mean over what is read; a source's own is a third of it to three times.
        documents: mean number per source; sizes follow Zipf's law.
        tokens: median length of a document; from half to twice that, by source.
        longest: tokens that no document exceeds.
        seed: of everything.
        fault: one of ``FAULTS``; the second source has it.
    """
    rng = np.random.default_rng((seed, count))
    rank = rng.permutation(count) + 1
    sizes = np.maximum(1, documents * count / rank / np.sum(1.0 / rank)).astype(int)
    # Small sources are drawn more often than their size says, as mixtures are made.
    weight = rank**-0.7 / np.sum(rank**-0.7)
    latency = np.exp(rng.uniform(-1.1, 1.1, count))
    latency *= latency_s / np.sum(latency * weight)
    state = np.linspace(0.5, 1.5, count)[rng.permutation(count)] if count > 1 else np.ones(1)
    median = tokens * np.exp2(rng.uniform(-1, 1, count))
    kinds = ("web", "code", "books", "chat", "papers", "forum", "news", "math")
    made = [
        SourceSpec(
            name=f"{kinds[i % len(kinds)]}-{i:02d}",
            number=i,
            size=int(sizes[i]),
            weight=float(weight[i]),
            latency_s=float(latency[i]),
            state_bytes=int(state_bytes * state[i]),
            median_tokens=max(4, int(median[i])),
            longest_tokens=longest,
            seed=seed,
        )
        for i in range(count)
    ]
    if fault in ("raises", "empty", "endless", "hangs"):
        sizes_by_fault = {"empty": 0, "endless": None}
        bad = made[min(1, count - 1)]
        size = sizes_by_fault.get(fault, bad.size)
        made[bad.number] = replace(bad, fault=fault, size=size)
    return made


def planner(
    sources: Sequence[SourceSpec],
    *,
    batch: int,
    ranks: int,
    seed: int,
    cost: Cost,
    method: str,
    ramp: int = 0,
) -> Planner:
    """The planner of a mixture.

    Args:
        sources: what is mixed.
        batch: samples per rank and step.
        ranks: data-parallel ranks.
        seed: of the order.
        cost: of a document.
        method: how samples are given to ranks.
        ramp: steps over which the weights turn around, so that what was drawn most is drawn least;
            0: they stay.

    Raises:
        ChopperError: the mixture cannot be drawn from; one line.
    """
    weights = tuple(source.weight for source in sources)
    order = np.argsort(weights)
    turned = np.empty(len(weights))
    turned[order] = np.asarray(weights)[order[::-1]]
    try:
        return Planner(
            names=[source.name for source in sources],
            sizes=[source.size for source in sources],
            weights=Ramp(weights, tuple(turned.tolist()), ramp),
            lengths=lambda s, index: sources[s].lengths(index),
            batch=batch,
            ranks=ranks,
            seed=seed,
            cost=cost,
            method=method,
        )
    except ValueError as exc:
        raise SourceError(str(exc)) from exc


def first_loads(sources: Sequence[SourceSpec]) -> list[SourceLoad]:
    """Load that serving each source should be, by its metadata."""
    return [
        SourceLoad(share=s.weight, wait_s=s.latency_s, cpu_s=CPU_S, state_bytes=s.state_bytes)
        for s in sources
    ]


@dataclass(slots=True)
class Spent:
    """Time that reading one document took."""

    wait_s: float
    cpu_s: float


class Source:
    """An open source."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        drawn = np.random.default_rng((spec.seed, spec.number)).integers(len(_WORDS), size=4096)
        text = np.frombuffer(b"".join([_WORDS[i] for i in drawn.tolist()]), dtype=np.uint8)
        # Enough for the longest document, from any word on; and written, not only reserved: what
        # is never touched takes no memory.
        least = spec.longest_tokens // 2 // len(drawn) + 2
        self._text = np.tile(text, max(least, spec.state_bytes // len(text) + 1))
        self._starts = np.cumsum([0, *_LENGTHS[drawn].tolist()])

    def read(self, index: int) -> tuple[NDArray[np.uint16], Spent]:
        """The tokens of one document, and what it took.

        Raises:
            SourceError: the source failed.
        """
        spec = self.spec
        try:
            began = time.perf_counter()
            text = self._fetch(index)
            waited_s = time.perf_counter() - began
            # Of this thread: others of this process tokenize in turn, under Python's lock.
            began = time.thread_time()
            ids = tokenize(text)
            return ids, Spent(waited_s, time.thread_time() - began)
        except Exception as exc:
            raise SourceError(
                f"source {spec.name}, sample {index}: {type(exc).__name__}: {exc}"
            ) from exc

    def _words(self, index: int) -> int:
        # As lengths() of an array of one, at a tenth of its cost.
        spec = self.spec
        drawn = spec.median_tokens * math.exp(
            0.9 * float(_normals()[_spread(index, spec.number, spec.seed)])
        )
        return min(max(int(drawn / 2), 2), spec.longest_tokens // 2)

    def _fetch(self, index: int) -> str:
        """The document's text, once storage gave it."""
        spec = self.spec
        if spec.fault == "hangs":
            threading.Event().wait()
        time.sleep(spec.latency_of(index))
        if spec.fault == "raises":
            raise OSError("connection reset by storage (this source was asked to fail)")
        words = self._words(index)
        # The row group repeats the same words.
        count = len(self._starts) - 1
        first = index * 7919 % count
        rounds, last = divmod(first + words, count)
        start = int(self._starts[first])
        end = rounds * int(self._starts[-1]) + int(self._starts[last])
        return self._text[start:end].tobytes().decode()


_STEM_IDS = {stem: 1 + i for i, stem in enumerate(_STEMS)}
_ENDING_IDS = {ending: 1 + len(_STEMS) + i for i, ending in enumerate(_ENDINGS)}


def tokenize(text: str) -> NDArray[np.uint16]:
    """Ids of a text: words split by a pattern, each into its longest known stem and the rest.

    Greedy longest match first, as WordPiece does. Raises ValueError on a word it cannot split.
    """
    ids: list[int] = []
    for word in _WORD.findall(text):
        for cut in range(min(len(word) - 1, 4), 0, -1):
            stem = _STEM_IDS.get(word[:cut])
            if stem is not None and word[cut:] in _ENDING_IDS:
                ids += (stem, _ENDING_IDS[word[cut:]])
                break
        else:
            raise ValueError(f"unknown word {word!r}")
    return np.array(ids, dtype=np.uint16)


class Mixture:
    """The sources of one process, each opened when it is first read from."""

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        self.specs = list(specs)
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    def open(self, numbers: Sequence[int]) -> None:
        """Open sources."""
        for number in numbers:
            self._source(number)

    def close(self, numbers: Sequence[int]) -> None:
        """Give up the state of sources."""
        with self._lock:
            for number in numbers:
                self._open.pop(number, None)

    @property
    def opened(self) -> tuple[int, ...]:
        """Sources whose state is here."""
        return tuple(sorted(self._open))

    def _source(self, number: int) -> Source:
        with self._lock:
            if number not in self._open:
                self._open[number] = Source(self.specs[number])
            return self._open[number]

    def read(self, item: tuple[int, int]) -> tuple[NDArray[np.uint16], Spent]:
        """One document: (source, index)."""
        return self._source(item[0]).read(item[1])

    def read_all(
        self, items: Sequence[tuple[int, int]], pool: Executor | None, timeout_s: float
    ) -> Iterator[tuple[NDArray[np.uint16], Spent]]:
        """Documents in the order asked for: one after the other, or at once from a pool's threads.

        Raises:
            SourceError: one failed, or did not answer in time (with a pool only: who reads in the
                calling thread waits for as long as it takes).
        """
        if pool is None:
            yield from map(self.read, items)
            return
        reads = [pool.submit(self.read, item) for item in items]
        done, missing = wait(reads, timeout_s, return_when="FIRST_EXCEPTION")
        for read in done:
            read.result()
        if missing:
            source, index = items[next(i for i, read in enumerate(reads) if read in missing)]
            raise SourceError(
                f"source {self.specs[source].name}, sample {index}: no answer for {timeout_s:.0f} s"
            )
        yield from (read.result() for read in reads)


def mark(tokens: NDArray[np.uint16]) -> int:
    """Number that tells a document's tokens from others'."""
    return zlib.crc32(tokens.tobytes())


class Contents:
    """The marks of documents as they should come, without their storage, its faults and its state:
    what was loaded is held against these, for labels alone would only repeat the plan.
    """

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        self._mixture = Mixture(
            [replace(spec, latency_s=0.0, state_bytes=0, fault="none") for spec in specs]
        )

    def marked(self, items: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Each (source, index) with its mark."""
        for source, index in items:
            yield source, index, mark(self._mixture.read((source, index))[0])
