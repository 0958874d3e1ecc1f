"""Sources of a mixture: facts that every process has, and documents read from Parquet shards.

A source that is open holds the row groups that it reads from, decoded: they are its state. A
document's image is a request of its own. A request waits as long as the specification adds, which
stands for the distance of a storage that is not there; what comes is real.

No torch here, nor in what plans: loader processes do without it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from chopper.errors import ChopperError

Ints = NDArray[np.int64]
Tokens = NDArray[np.uint16]
Sample = tuple[int, int]
"""Numbers of a source and of one of its documents."""
Modality = Literal["text", "image"]

VOCABULARY = 320
"""Ids: 0 is padding, 1 to 256 are bytes, those above are brightnesses of patches."""
READ_TIMEOUT_S = 20.0
PATCH = 16
"""Pixels of a patch's edge."""
_IMAGE_COLUMNS = ("media", "offset", "size", "sha256")
"""Columns that say where a document's image lies."""
_HELD = 2
"""Row groups of a source that stay: steps are read ahead across the end of one."""
_THREADS = 16
_OPENING = 2
_NORMALS_COUNT = 4099

Read = tuple[Tokens, float, float]
"""A document's tokens, and the seconds that storage and a core took."""


class SourceError(ChopperError):
    """A source did not give what it was asked for; the message names it and the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Facts about a source that every process has; the documents' lengths only planners read."""

    name: str
    number: int
    shards: tuple[str, ...]
    groups: tuple[tuple[int, int, int], ...]
    """Row groups of all shards in order: shard, number in it, rows."""
    weight: float
    """Relative frequency in the mixture."""
    state_bytes: int
    """Bytes of its largest row group in memory."""
    modality: Modality = "text"
    latency_s: float = 0.0
    """Mean time that is added to each request of storage, as a distance would."""
    seed: int = 0

    @property
    def size(self) -> int:
        """Count its documents."""
        return sum(rows for _, _, rows in self.groups)

    @property
    def columns(self) -> list[str]:
        """Columns that a document is made of."""
        return ["text", *(_IMAGE_COLUMNS if self.modality == "image" else ())]

    def latency_of(self, index: int) -> float:
        """Seconds added to the request for one document: around the mean, seldom twice it."""
        at = (index * 2654435761 + self.number * 40503 + self.seed * 97) % _NORMALS_COUNT
        return self.latency_s * math.exp(0.35 * float(_normals()[at]) - 0.35**2 / 2)


@functools.cache
def _normals() -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal(_NORMALS_COUNT)


def _why(exc: Exception) -> str:
    """Name an error of any library, in one line."""
    return ": ".join([type(exc).__name__, *str(exc).splitlines()[:1]])


def lengths_of(spec: SourceSpec) -> Ints:
    """Read the tokens of each document of a source, which is all that planning needs of it.

    Raises:
        SourceError: a shard cannot be read.
    """

    def read(shard: str) -> NDArray[Any]:
        try:
            column = pq.ParquetFile(shard).read(["length"], use_threads=False)["length"]
        except Exception as exc:
            raise SourceError(f"source {spec.name}: {shard}: {_why(exc)}") from exc
        return np.asarray(column.to_numpy())

    with ThreadPoolExecutor(_THREADS) as pool:
        lengths = np.concatenate(list(pool.map(read, spec.shards)))
    return lengths.astype(np.min_scalar_type(lengths.max(initial=0)))


class Source:
    """An open source."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self._starts = np.cumsum([0, *(rows for _, _, rows in spec.groups)])
        self._groups: OrderedDict[int, Future[list[pa.Array]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, index: int) -> Read:
        """Read one document."""
        try:
            began = time.perf_counter()
            content = self._fetch(index)
            waited_s = time.perf_counter() - began
            # Of this thread: others of this process do the same in turn, under Python's lock.
            began = time.thread_time()
            ids = tokenize(*content)
            return ids, waited_s, time.thread_time() - began
        except Exception as exc:
            raise SourceError(f"source {self.spec.name}, sample {index}: {_why(exc)}") from exc

    def warm(self, index: int) -> None:
        """Read the row group of a document."""
        self._group_of(index)

    def _group_of(self, index: int) -> tuple[int, list[pa.Array]]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:
            group = self._groups.get(number)
            mine = group is None
            if group is None:
                group = self._groups[number] = Future()
                while len(self._groups) > _HELD:
                    self._groups.popitem(last=False)
            else:
                self._groups.move_to_end(number)
        if mine:
            try:
                group.set_result(self._read_group(number))
            except Exception as exc:  # noqa: BLE001 - raised by all who wait for the group
                with self._lock:  # whoever asks next tries again
                    self._groups.pop(number, None)
                group.set_exception(exc)
        return number, group.result()

    def _read_group(self, number: int) -> list[pa.Array]:
        shard, group, _ = self.spec.groups[number]
        self._travel(self.spec.size + number)
        with Path(self.spec.shards[shard]).open("rb") as file:
            # No threads and nothing read ahead: forked workers would inherit their locks.
            parquet = pq.ParquetFile(file, pre_buffer=False)
            table = parquet.read_row_group(group, self.spec.columns, use_threads=False)
        return [table[name].combine_chunks() for name in self.spec.columns]

    def _travel(self, index: int) -> None:
        if self.spec.latency_s:
            time.sleep(self.spec.latency_of(index))

    def _fetch(self, index: int) -> tuple[str, bytes | None]:
        """Return a document's text, and its image."""
        number, columns = self._group_of(index)
        row = index - int(self._starts[number])
        text, *media = (column[row].as_py() for column in columns)
        if not media:
            return text, None
        name, offset, size, digest = media
        self._travel(index)
        shard = Path(self.spec.shards[self.spec.groups[number][0]])
        with (shard.parent / name).open("rb", buffering=0) as file:
            file.seek(offset)
            image = file.read(size)
        if hashlib.sha256(image).hexdigest() != digest:
            raise ValueError(f"{name}, bytes {offset} to {offset + size}: not those of sha256")
        return text, image


def tokenize(content: str, image: bytes | None) -> Tokens:
    """Make tokens of a document: 1 more than its bytes, and 257 and more of its image's patches."""
    text = np.frombuffer(content.encode(), dtype=np.uint8).astype(np.uint16) + 1
    if image is None:
        return text
    pixels = decoded(image)
    height, width = (edge // PATCH for edge in pixels.shape)
    patches = pixels[: height * PATCH, : width * PATCH].reshape(height, PATCH, width, PATCH)
    brightness = patches.mean(axis=(1, 3)).astype(np.uint16).ravel()
    return np.concatenate([text, 257 + brightness // 5])


def decoded(image: bytes) -> np.ndarray:
    """Decode a binary PGM: gray pixels of 8 bits."""
    magic, size, most, pixels = image.split(b"\n", 3)
    width, height = map(int, size.split())
    if magic != b"P5" or most != b"255" or len(pixels) != width * height:
        raise ValueError("no binary PGM of 8 bits")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(height, width)


class OpenSources:
    """The sources of one process, each opened when it is first read from."""

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        # Arrow's own would keep what it freed.
        pa.set_memory_pool(pa.system_memory_pool())
        self.specs = list(specs)
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    def open(self, samples: Iterable[Sample]) -> None:
        """Open the sources of samples, with the row groups that hold these."""
        # Few: each thread's buffers for decoding stay with it.
        with ThreadPoolExecutor(_OPENING) as pool:
            list(pool.map(lambda sample: self._source(sample[0]).warm(sample[1]), samples))
        pa.default_memory_pool().release_unused()

    def close(self, numbers: Sequence[int]) -> None:
        """Give up the state of sources."""
        with self._lock:
            for number in numbers:
                self._open.pop(number, None)
        pa.default_memory_pool().release_unused()

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
        """Return each sample with its mark."""
        return [(*sample, mark(self.read(sample)[0])) for sample in samples]


def mark(tokens: Tokens) -> int:
    """Hash a document's tokens, to tell them from others'."""
    return zlib.crc32(tokens.tobytes())


def without_latency(specs: Sequence[SourceSpec]) -> OpenSources:
    """Open the same sources without added latency."""
    return OpenSources([replace(spec, latency_s=0.0) for spec in specs])
