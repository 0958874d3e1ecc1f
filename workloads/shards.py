"""Open sources: documents from row groups of Parquet shards, on disk or at addresses (fsspec).

A source that is open holds the row groups that it reads from, decoded: they are its state. A
document's image is a request of its own. A request waits as long as the specification adds, which
stands for the distance of a storage that is not there; what comes is real.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chopper.errors import InputError
from chopper.storage.remote import opened
from chopper.workloads.mixture import (
    VOCABULARY,
    Ints,
    Sample,
    SourceError,
    SourceSpec,
    Tokens,
    beside,
)

READ_TIMEOUT_S = 20.0
PATCH = 16
"""Pixels of a patch's edge."""
_HELD = 2
"""Row groups of a source that stay: steps are read ahead across the end of one."""
_THREADS = 16
_OPENING = 2

Read = tuple[Tokens, float, float]
"""A document's tokens, and the seconds that storage and a core took."""


def _why(exc: Exception) -> str:
    """Name an error of any library, in one line."""
    return ": ".join([type(exc).__name__, *str(exc).splitlines()[:1]])


def matching(pattern: str) -> list[str]:
    """Return the files that a pattern matches, sorted."""
    if "://" not in pattern:
        return sorted(glob.glob(pattern))  # noqa: PTH207 - the pattern may be absolute
    try:
        fs, path = opened(pattern)
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))
    except InputError:
        raise
    except Exception as exc:  # those of file systems' libraries have no common class
        raise InputError(f"{pattern}: {_why(exc)}") from exc


def _opened(path: str) -> BinaryIO:
    if "://" not in path:
        return Path(path).open("rb")
    fs, name = opened(path)
    return cast(BinaryIO, fs.open(name, "rb"))


def _range(path: str, offset: int, size: int) -> bytes:
    """Read a range of a file."""
    if "://" not in path:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size)
    fs, name = opened(path)
    return bytes(fs.cat_file(name, start=offset, end=offset + size))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "string": _is_text,
    "integer": pa.types.is_integer,
    "list of integers": _is_list,
}


def groups_of(spec: SourceSpec) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """Read from footers: shard, number and rows of each row group, and the largest one's bytes.

    Raises:
        InputError: a shard is no Parquet file, or lacks a column; one line.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        footers = list(pool.map(functools.partial(_footer, spec), spec.shards))
    groups = [
        (shard, group, rows)
        for shard, footer in enumerate(footers)
        for group, (rows, _) in enumerate(footer)
        if rows
    ]
    return tuple(groups), max((size for footer in footers for _, size in footer), default=0)


def _footer(spec: SourceSpec, shard: str) -> list[tuple[int, int]]:
    """Rows of each row group of a shard, and bytes of the columns that are read from it."""
    where = f"source {spec.name}: {shard}"
    try:
        with _opened(shard) as file:
            parquet = pq.ParquetFile(file)
            schema, meta = parquet.schema_arrow, parquet.metadata
    except Exception as exc:  # those of file systems' libraries have no common class
        raise InputError(f"{where}: {_why(exc)}") from exc
    for column, kind in (*spec.columns.items(), (spec.length, "integer")):
        at = schema.get_field_index(column)
        if at < 0:
            found = ", ".join(schema.names)
            raise InputError(f"{where} has no column {column!r} ({kind}); it has {found}")
        if not _KINDS[kind](schema.field(at).type):
            found = schema.field(at).type
            raise InputError(f"{where}, column {column!r}: {found}, expected {kind}")
    footer = []
    for number in range(meta.num_row_groups):
        group = meta.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        read = [c for c in chunks if c.path_in_schema.split(".")[0] in spec.columns]
        footer.append((group.num_rows, sum(c.total_uncompressed_size for c in read)))
    return footer


def lengths_of(spec: SourceSpec) -> Ints:
    """Read the tokens of each document of a source, which is all that planning needs of it.

    Raises:
        SourceError: a shard cannot be read, or a length is missing or below 1.
    """

    def read(shard: str) -> pa.ChunkedArray:
        try:
            with _opened(shard) as file:
                return pq.ParquetFile(file).read([spec.length], use_threads=False)[spec.length]
        except Exception as exc:
            raise SourceError(f"source {spec.name}: {shard}: {_why(exc)}") from exc

    with ThreadPoolExecutor(_THREADS) as pool:
        columns = list(pool.map(read, spec.shards))
    for shard, column in zip(spec.shards, columns, strict=True):
        if column.null_count or (len(column) and column.to_numpy().min() < 1):
            raise SourceError(
                f"source {spec.name}: {shard}, column {spec.length!r}: a length is missing or "
                "below 1; leave such documents out"
            )
    lengths = np.concatenate([column.to_numpy() for column in columns])
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
        with _opened(self.spec.shards[shard]) as file:
            # No threads and nothing read ahead: forked workers would inherit their locks.
            parquet = pq.ParquetFile(file, pre_buffer=False)
            table = parquet.read_row_group(group, list(self.spec.columns), use_threads=False)
        return [table[name].combine_chunks() for name in self.spec.columns]

    def _travel(self, index: int) -> None:
        if self.spec.latency_s:
            time.sleep(self.spec.latency_of(index))

    def _fetch(self, index: int) -> tuple[Any, bytes | None]:
        """A document's text or tokens, and its image."""
        number, columns = self._group_of(index)
        row = index - int(self._starts[number])
        content, *media = (column[row].as_py() for column in columns)
        if self.spec.modality == "image":
            file, offset, size, digest = media
            self._travel(index)
            image = _range(
                beside(self.spec.shards[self.spec.groups[number][0]], file), offset, size
            )
            if hashlib.sha256(image).hexdigest() != digest:
                raise ValueError(f"{file}, bytes {offset} to {offset + size}: not those of sha256")
            return content, image
        return content, None


def tokenize(content: str | Sequence[int], image: bytes | None) -> Tokens:
    """Make tokens of a document: 1 more than its bytes, and 257 and more of its image's patches."""
    if not isinstance(content, str):
        # Those beyond the vocabulary of the small decoder are folded into it.
        ids = np.array(content, dtype=np.int64)
        return (1 + (ids - 1) % (VOCABULARY - 1)).astype(np.uint16)
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
        """Each sample with its mark."""
        return [(*sample, mark(self.read(sample)[0])) for sample in samples]


def mark(tokens: Tokens) -> int:
    """Number that tells a document's tokens from others'."""
    return zlib.crc32(tokens.tobytes())


def near(specs: Sequence[SourceSpec]) -> OpenSources:
    """The same documents without added latency."""
    return OpenSources([replace(spec, latency_s=0.0) for spec in specs])
