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
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.errors import ChopperError

Ints = NDArray[np.int64]
Tokens = NDArray[np.uint16]
Sample = tuple[int, int]
"""Numbers of a source and of one of its documents."""

VOCABULARY = 320
"""Ids; 0 is padding."""
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
    weight: float
    latency_s: float
    """Mean time of its storage per read."""
    state_bytes: int
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
) -> tuple[SourceSpec, ...]:
    """``count`` sources around the given means, skewed.

    State is half to one and a half times the mean, a source's latency a third to three times that
    of what is read, documents follow Zipf's law, median lengths are half to twice ``tokens``.
    ``fault`` is injected into the second source.
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
        bad = made[min(1, count - 1)]
        size = {"empty": 0, "endless": None}.get(fault, bad.size)
        made[bad.number] = replace(bad, fault=fault, size=size)
    return tuple(made)


Read = tuple[Tokens, float, float]
"""A document's tokens, and the seconds that storage and a core took."""


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

    def read(self, index: int) -> Read:
        """Read one document."""
        spec = self.spec
        try:
            began = time.perf_counter()
            text = self._fetch(index)
            waited_s = time.perf_counter() - began
            # Of this thread: others of this process tokenize in turn, under Python's lock.
            began = time.thread_time()
            ids = tokenize(text)
            return ids, waited_s, time.thread_time() - began
        except Exception as exc:
            raise SourceError(
                f"source {spec.name}, sample {index}: {type(exc).__name__}: {exc}"
            ) from exc

    def _fetch(self, index: int) -> str:
        spec = self.spec
        if spec.fault == "hangs":
            threading.Event().wait()
        time.sleep(spec.latency_of(index))
        if spec.fault == "raises":
            raise OSError("connection reset by storage (injected fault)")
        words = int(spec.lengths(np.array([index]))[0]) // 2
        # The row group repeats the same words.
        count = len(self._starts) - 1
        first = index * 7919 % count
        rounds, last = divmod(first + words, count)
        start = int(self._starts[first])
        end = rounds * int(self._starts[-1]) + int(self._starts[last])
        return self._text[start:end].tobytes().decode()


_STEM_IDS = {stem: 1 + i for i, stem in enumerate(_STEMS)}
_ENDING_IDS = {ending: 1 + len(_STEMS) + i for i, ending in enumerate(_ENDINGS)}


def tokenize(text: str) -> Tokens:
    """Split words into their longest known stem and the rest, as WordPiece does."""
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

    def _source(self, number: int) -> Source:
        with self._lock:
            if number not in self._open:
                self._open[number] = Source(self.specs[number])
            return self._open[number]

    def read(self, sample: Sample) -> Read:
        """Read one document."""
        source, index = sample
        return self._source(source).read(index)

    def read_all(self, samples: Sequence[Sample], pool: Executor) -> list[Read]:
        """Read documents at once from a pool's threads; returned in the order asked for."""
        reads = [pool.submit(self.read, sample) for sample in samples]
        done, missing = wait(reads, READ_TIMEOUT_S, return_when="FIRST_EXCEPTION")
        for read in done:
            read.result()
        if missing:
            source, index = samples[next(i for i, read in enumerate(reads) if read in missing)]
            raise SourceError(
                f"source {self.specs[source].name}, sample {index}: no answer for "
                f"{READ_TIMEOUT_S:.0f} s"
            )
        return [read.result() for read in reads]

    def marked(self, samples: Iterable[Sample]) -> list[tuple[int, int, int]]:
        """Each sample with its mark."""
        return [(*sample, mark(self.read(sample)[0])) for sample in samples]


def mark(tokens: Tokens) -> int:
    """Number that tells a document's tokens from others'."""
    return zlib.crc32(tokens.tobytes())


def bare(specs: Sequence[SourceSpec]) -> Mixture:
    """The same documents without storage, its faults and its state."""
    return Mixture([replace(spec, latency_s=0.0, state_bytes=0, fault="none") for spec in specs])
