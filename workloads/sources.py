"""Sources of a mixture: synthetic documents in Parquet shards, written for a run and read from it.

A source that is open holds the row groups that it reads from, decoded: they are its state. A
document's image is a request of its own. Requests go to a storage at a distance (object_store.py),
or wait as long as the specification says where there is none; what comes is real.

Texts are random bytes and images are noise; what is drawn how often, how long documents are and how
far the storage is differs by source, as in mixtures that are trained on.

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
from chopper.workloads.object_store import fetch

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
_KINDS = ("web", "code", "books", "chat", "papers", "forum", "news", "math")
_GRIDS = np.array([(h, w) for h in range(1, 64) for w in (h, h + 1)])
"""Patches of images: height, width."""
_COPIES = 4
"""Images of each size."""
_MOST_PATCHES = 512
_SHARDS = 2
_PLACE_BYTES = 98
"""Bytes of an image's place and digest in a decoded row group."""
_HELD = 2
"""Row groups of a source that stay: steps are read ahead across the end of one."""
_THREADS = 16
_OPENING = 2
_NORMALS_COUNT = 4099


class SourceError(ChopperError):
    """A document could not be read; the message names the source and the sample."""


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
    storage: int | None = None
    """Port of the storage that is asked; None: the disk, after that time."""
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

    def read(self, index: int) -> Tokens:
        """Read one document."""
        try:
            return tokenize(*self._fetch(index))
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
        self._travel(self.spec.size + number, Path(self.spec.shards[shard]), 0, 0)
        with Path(self.spec.shards[shard]).open("rb") as file:
            # No threads and nothing read ahead: forked workers would inherit their locks.
            parquet = pq.ParquetFile(file, pre_buffer=False)
            table = parquet.read_row_group(group, self.spec.columns, use_threads=False)
        return [table[name].combine_chunks() for name in self.spec.columns]

    def _travel(self, index: int, path: Path, offset: int, size: int) -> bytes:
        """Request a part of a file; it has come when this returns."""
        delay_s = self.spec.latency_of(index)
        if self.spec.storage is not None:
            return fetch(self.spec.storage, path, offset, size, delay_s)
        if delay_s:
            time.sleep(delay_s)
        if not size:
            return b""
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size)

    def _fetch(self, index: int) -> tuple[str, bytes | None]:
        """Return a document's text, and its image."""
        number, columns = self._group_of(index)
        row = index - int(self._starts[number])
        text, *media = (column[row].as_py() for column in columns)
        if not media:
            return text, None
        name, offset, size, digest = media
        shard = Path(self.spec.shards[self.spec.groups[number][0]])
        image = self._travel(index, shard.parent / name, offset, size)
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
        self._spent = np.zeros((3, len(specs)))
        self._lock = threading.Lock()

    def open(self, samples: Iterable[Sample]) -> None:
        """Open the sources of samples, with the row groups that hold these."""
        # Few: each thread's buffers for decoding stay with it.
        with ThreadPoolExecutor(_OPENING) as pool:
            list(pool.map(lambda sample: self._source(sample[0]).warm(sample[1]), samples))
        pa.default_memory_pool().release_unused()

    def _source(self, number: int) -> Source:
        with self._lock:
            if number not in self._open:
                self._open[number] = Source(self.specs[number])
            return self._open[number]

    def read(self, sample: Sample) -> Tokens:
        """Read one document."""
        source, index = sample
        began_s, began_core_s = time.perf_counter(), time.thread_time()
        tokens = self._source(source).read(index)
        core_s = time.thread_time() - began_core_s
        with self._lock:
            self._spent[:, source] += (1, time.perf_counter() - began_s - core_s, core_s)
        return tokens

    def spent(self) -> NDArray[np.float64]:
        """Return samples, and seconds waited and computed, by source, since the last call."""
        with self._lock:
            spent, self._spent = self._spent, np.zeros_like(self._spent)
        return spent

    def read_all(self, samples: Sequence[Sample], pool: Executor) -> list[Tokens]:
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
        return [(*sample, mark(self.read(sample))) for sample in samples]


def mark(tokens: Tokens) -> int:
    """Hash a document's tokens, to tell them from others'."""
    return zlib.crc32(tokens.tobytes())


def without_latency(specs: Sequence[SourceSpec]) -> OpenSources:
    """Open the same sources on the disk, without added latency."""
    return OpenSources([replace(spec, latency_s=0.0, storage=None) for spec in specs])


def write_sources(
    folder: Path,
    *,
    count: int,
    state_bytes: int,
    latency_s: float,
    tokens: int,
    longest: int,
    seed: int,
    modality: Modality = "image",
) -> tuple[SourceSpec, ...]:
    """Write ``count`` sources around the given means, skewed, with a row group in each shard.

    A row group is half to one and a half times the mean state, a source's latency a third to three
    times that of what is read, weights follow a power law, median lengths are half to twice
    ``tokens``.
    """
    rng = np.random.default_rng((seed, count))
    rank = rng.permutation(count) + 1
    weight = rank**-0.7 / np.sum(rank**-0.7)
    latency = np.exp(rng.uniform(-1.1, 1.1, count))
    latency *= latency_s / np.sum(latency * weight)
    state = np.linspace(0.5, 1.5, count)[rng.permutation(count)] if count > 1 else np.ones(1)
    median = tokens * np.exp2(rng.uniform(-1, 1, count))
    specs = []
    for number in range(count):
        name = f"{_KINDS[number % len(_KINDS)]}-{number:02d}"
        shards, rows = _write(
            folder / name,
            rng=np.random.default_rng((seed, number)),
            state_bytes=int(state_bytes * state[number]),
            median=max(4.0, median[number]),
            longest=longest,
            modality=modality,
        )
        specs.append(
            SourceSpec(
                name=name,
                number=number,
                shards=shards,
                groups=tuple((shard, 0, rows) for shard in range(_SHARDS)),
                weight=float(weight[number]),
                state_bytes=int(state_bytes * state[number]),
                modality=modality,
                latency_s=float(latency[number]),
                seed=seed,
            )
        )
    return tuple(specs)


def _write(
    folder: Path,
    *,
    rng: np.random.Generator,
    state_bytes: int,
    median: float,
    longest: int,
    modality: Modality,
) -> tuple[tuple[str, ...], int]:
    """Write the shards of a source; return their paths and the documents of each."""
    folder.mkdir(parents=True)
    # Text takes a byte for a token, and half of a document is its image's.
    row_bytes = 4 + 1.4 * median if modality == "text" else 4 + 0.7 * median + _PLACE_BYTES
    rows = max(16, int(state_bytes / row_bytes))
    places = _write_images(folder, rng, longest) if modality == "image" else None
    shards = []
    for shard in range(_SHARDS):
        drawn = median * np.exp(0.9 * rng.standard_normal(rows))
        lengths: Ints = np.clip(drawn, 4, longest).astype(np.int64)
        columns: dict[str, pa.Array] = {"length": pa.array(lengths, pa.int32())}
        texts = lengths
        if places is not None:
            patches = _GRIDS.prod(1)[: len(places["offset"]) // _COPIES]
            # About half of a document's tokens are its image's.
            grid = np.searchsorted(patches, lengths // 2, side="right") - 1
            texts = lengths - patches[grid]
            image = pa.array(grid * _COPIES + rng.integers(_COPIES, size=rows))
            columns |= {name: values.take(image) for name, values in places.items()}
        columns["text"] = _texts(rng, texts)
        path = folder / f"{shard:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=rows, compression="snappy")
        shards.append(str(path))
    return tuple(shards), rows


def _write_images(folder: Path, rng: np.random.Generator, longest: int) -> dict[str, pa.Array]:
    """Write all images of a source into one file, and return where each lies."""
    offsets, sizes, digests = [], [], []
    with (folder / "images.bin").open("wb") as file:
        for height, width in _GRIDS[_GRIDS.prod(1) <= min(longest, _MOST_PATCHES)].tolist():
            for _ in range(_COPIES):
                pixels = rng.integers(256, size=(height * PATCH, width * PATCH), dtype=np.uint8)
                image = f"P5\n{width * PATCH} {height * PATCH}\n255\n".encode() + pixels.tobytes()
                offsets.append(file.tell())
                sizes.append(len(image))
                digests.append(hashlib.sha256(image).hexdigest())
                file.write(image)
    return {
        "media": pa.array(["images.bin"] * len(offsets)),
        "offset": pa.array(offsets),
        "size": pa.array(sizes),
        "sha256": pa.array(digests),
    }


def _texts(rng: np.random.Generator, lengths: Ints) -> pa.Array:
    """Draw random texts of these lengths, in bytes."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    letters = rng.integers(97, 123, size=1 << 16, dtype=np.uint8)
    data = np.resize(letters, int(offsets[-1]))
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(data))
