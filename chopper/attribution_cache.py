"""Attributions that commands and the library keep for later ones on the same run.

An entry is one file in the user's cache, named by the hash of everything that it depends on: the
contents of all inputs, what the user chose, calibrations and chopper itself. It holds what
:func:`chopper.pipeline.attribute` returned, with the tables that were read from traces; the parts
of a rank are decoded when somebody asks for them.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from chopper import limits
from chopper.addresses import is_address
from chopper.analyzers.attribution import Attribution
from chopper.errors import ChopperError, OutputError
from chopper.hardware import calibration
from chopper.pipeline import rank_input
from chopper.storage import results
from chopper.storage.caches import cache_folder
from chopper.storage.files import write_atomic
from chopper.storage.layout import is_run
from chopper.storage.parquet import FiledTables
from chopper.storage.parts import read_manifest
from chopper.storage.results import InFile
from chopper.storage.run import HeldTables, Run, Store
from chopper.version import __version__

if TYPE_CHECKING:
    from chopper.pipeline import Source

_Value = TypeVar("_Value")
FileFacts = tuple[str, int, int, int, int]
"""Path, size, inode and times of a file: they change with its contents."""
_MOST_INPUT_BYTES = 4 << 30
_MOST_ENTRY_BYTES = 256 << 20
_MOST_BYTES = 1 << 30
_UNUSED_S = 7 * 86_400
_DIGEST_BYTES, _LENGTH_BYTES, _HEAD_BYTES = 32, 4, 8192
_UNWRITABLE = (UnicodeEncodeError, OverflowError)
"""Errors of values that MessagePack does not hold: a name that is not UTF-8, a huge number."""
_APART = ("recording", "joined", "work", "factors", "superset", "part")
"""Fields of an attribution that are not in the head of an entry, or attributions themselves."""


class _Document(msgspec.Struct, array_like=True):
    """The contents of an entry.

    Attributes:
        head: the run without its tables, and the attribution without what is of one rank.
        ranks: rank → its joined events, work and factors.
        tables: rank → its tables, of those that were read from traces.
    """

    head: memoryview
    ranks: dict[int, memoryview]
    tables: dict[int, memoryview]


@dataclass(frozen=True)
class Entry:
    """The place of an attribution in the cache.

    Attributes:
        key: what it depends on, hashed.
        inputs: the files that it is made from.
    """

    key: str
    inputs: tuple[FileFacts, ...]

    def read(self) -> Attribution | None:
        """Return the attribution; None where there is none, or it is damaged."""
        with contextlib.suppress(ValueError, msgspec.DecodeError, ChopperError):
            if (content := self.load()) is not None:
                run = _restored(msgspec.msgpack.decode(content, type=_Document))
                run.keep_answers(_Answers(self))
                return run
        return None

    def write(self, run: Attribution) -> None:
        """Keep an attribution, unless it is too large, incomplete, or its inputs have changed."""
        recording = run.recording
        if any(map(recording.tables.stretches, recording.ranks)) or any(
            finding.code == "run.rank_lost" for finding in run.findings
        ):
            return
        with contextlib.suppress(*_UNWRITABLE):
            document = _document(run)
            if document is None or _facts(path for path, *_ in self.inputs) != self.inputs:
                return
            self.store(msgspec.msgpack.encode(document))
            run.keep_answers(_Answers(self))

    def load(self, name: str = "") -> memoryview | None:
        """Return what :meth:`store` was called with; None where there is none, or it is damaged."""
        path = _folder() / f"{self.key}{name}"
        try:
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            os.utime(path)
        except (OSError, ValueError):  # an empty file
            return None
        content = data[_DIGEST_BYTES:]
        if _digest(content, self.key + name) != data[:_DIGEST_BYTES]:
            return None
        return content[_LENGTH_BYTES + len(_source(content)) :]

    def store(self, content: bytes, name: str = "") -> None:
        """Write a file of this entry, as a whole or not at all."""
        source = os.path.abspath(self.inputs[0][0]).encode("utf-8", "surrogateescape")  # noqa: PTH100
        data = len(source).to_bytes(_LENGTH_BYTES, "little") + source + content
        folder = _folder()
        with contextlib.suppress(OutputError):  # without room for it, the next command makes it
            write_atomic(folder / f"{self.key}{name}", _digest(data, self.key + name) + data)
        _remove_unused(folder)


@dataclass(frozen=True)
class _Answers:
    """Answers about an attribution, in files beside its own."""

    entry: Entry

    def get(self, name: str, make: Callable[[], _Value]) -> _Value:
        """Return the answer of a name; make and keep it where there is none."""
        with contextlib.suppress(ChopperError):
            if (content := self.entry.load(f"-{name}")) is not None:
                answer: _Value = results.decode(content)
                return answer
        answer = make()
        with contextlib.suppress(*_UNWRITABLE, ChopperError):
            self.entry.store(results.encode(answer, compressed=True), f"-{name}")
        return answer


def attribution_of(
    sources: Sequence[str],
    make: Callable[[], Attribution],
    *choices: Any,
    inputs: tuple[FileFacts, ...] | None = None,
) -> Attribution:
    """Return the attribution of a run, or of traces: one that was kept, else what ``make`` returns.

    Args:
        sources: run directories, trace files, globs and directories of traces.
        make: reads and attributes them.
        choices: everything else that the user chose.
        inputs: facts of the files that were read, which none is kept of if they have changed.
    """
    entry = entry_of(sources, *choices)
    if entry is None or inputs not in (None, entry.inputs):
        return make()
    found = entry.read()
    if found is None:
        found = make()
        entry.write(found)
    return found


def names_of(source: Source) -> list[str]:
    """Return what names a run, as texts."""
    return [str(source)] if isinstance(source, str | Path) else [*map(str, source)]


def facts_of(sources: Sequence[str]) -> tuple[FileFacts, ...] | None:
    """Return what the system says of all files that are read for sources; None if it does not."""
    if any(map(is_address, sources)):
        return None
    try:
        return _facts(map(str, _files(sources)))
    except (OSError, ValueError):  # whoever reads them says why
        return None


def entry_of(sources: Sequence[str], *choices: Any) -> Entry | None:
    """Return the place of the attribution of a run, or of traces; None where none is kept.

    Args:
        sources: run directories, trace files, globs and directories of traces.
        choices: everything else that the user chose.
    """
    inputs = facts_of(sources)
    try:
        if not inputs or sum(size for _, size, *_ in inputs) > _MOST_INPUT_BYTES:
            return None
        with ThreadPoolExecutor(limits.usable_cores()) as threads:
            digests = [*threads.map(_digest_of_file, (path for path, *_ in inputs))]
        # Whether a process of a recording is alive is not in its files.
        manifests = [results.encode(read_manifest(p)) for p in map(Path, sources) if is_run(p)]
        limit = os.environ.get(limits.VARIABLE)
        stated = [[*sources], choices, limit, os.getcwd(), time.tzname]  # noqa: PTH109
        known = _facts([str(calibration.default_path())])
        seen = [_code(), repr(stated).encode(), repr(known).encode(), *manifests]
        names = [path.encode("utf-8", "surrogateescape") for path, *_ in inputs]
    except (OSError, ValueError, OverflowError, ChopperError):  # whoever reads them says why
        return None
    key = _digest(b"".join(map(_digest, (*seen, *names, *digests)))).hex()
    return Entry(key, inputs)


def _files(sources: Sequence[str]) -> list[Path]:
    """Return all files that are read for sources, or may be."""
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source)
        if path.is_dir():
            named = [p for p in path.rglob("*") if p.is_file()]
        elif path.exists():
            # A database has a log beside it where its writer has not ended.
            named = [path, *path.parent.glob(f"{glob.escape(path.name)}-*")]
        else:
            named = [*map(Path, glob.glob(source, recursive=True))]  # noqa: PTH207
        found |= dict.fromkeys(file for file in sorted(named) if file.is_file())
    return [*found]


def _facts(paths: Iterable[str]) -> tuple[FileFacts, ...]:
    """Return what the system says of files; of a missing one that it has none."""
    found = []
    for path in paths:
        try:
            is_ = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            found.append((path, 0, 0, 0, 0))
            continue
        found.append((path, is_.st_size, is_.st_ino, is_.st_mtime_ns, is_.st_ctime_ns))
    return tuple(found)


def _digest(data: bytes | memoryview, name: str = "") -> bytes:
    hashed = hashlib.blake2b(data, digest_size=_DIGEST_BYTES)
    hashed.update(name.encode())
    return hashed.digest()


def _digest_of_file(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return hashlib.file_digest(file, "blake2b").digest()


@lru_cache(maxsize=1)
def _code() -> bytes:
    """Return what tells this chopper from others, also in a clone that is being worked on."""
    seen = [f"{__version__} {pa.__version__}"]
    package = Path(__file__).parent
    for folder, _, names in os.walk(package, followlinks=True):
        files = (os.path.join(folder, n) for n in names if not n.endswith(".pyc"))  # noqa: PTH118
        seen += map(repr, _facts(files))
    return _digest("\n".join(sorted(seen)).encode("utf-8", "surrogateescape"))


def _folder() -> Path:
    return cache_folder("results", "attributions")


def _remove_unused(folder: Path) -> None:
    """Remove entries that nobody used for a week, whose run is gone, and beyond the limit."""
    used = []
    for path in folder.glob("[!.]*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            used.append((facts.st_mtime, facts.st_size, path))
    total = 0
    for when, size, path in sorted(used, reverse=True):
        total += size
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            if total > _MOST_BYTES or time.time() - when > _UNUSED_S or _is_orphan(path):
                path.unlink()


def _is_orphan(path: Path) -> bool:
    """Return whether the run that an entry is of is gone."""
    with path.open("rb") as file:
        head = file.read(_DIGEST_BYTES + _HEAD_BYTES)
    return not os.path.lexists(_source(head[_DIGEST_BYTES:]))


def _source(content: bytes | memoryview) -> bytes:
    """Return the path of the run that a file of an entry begins with."""
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    return bytes(content[_LENGTH_BYTES:end])


def _document(run: Attribution) -> _Document | None:
    """Return the entry of an attribution; None where it is too large."""
    recording, store = run.recording, run.recording.tables
    ranks, tables, files = {}, {}, {}
    size = 0
    for rank, joined in run.joined.items():
        parts = joined.stored(), run.work.get(rank), run.factors.get(rank)
        ranks[rank] = memoryview(results.encode(parts, compressed=True))
        size += len(ranks[rank])
    for rank, held in store.held.items():
        if isinstance(held, FiledTables) and held.keeper is None:
            files[rank] = {name: os.fspath(path) for name, path in held.files.items()}
        elif isinstance(held, InFile):
            tables[rank] = held.data()
        elif size <= _MOST_ENTRY_BYTES:
            tables[rank] = memoryview(results.encode({**held.get()}, compressed=True))
        size += len(tables.get(rank, b""))
    if size > _MOST_ENTRY_BYTES:
        return None
    path = None if recording.path is None else os.fspath(recording.path)
    originals = {rank: [*map(os.fspath, of)] for rank, of in recording.originals.items()}
    described = recording.manifest, path, recording.source, originals
    stored = store.in_memory, store.held_rows, files
    head = described, stored, [*run.work], [*run.factors], _fields(run)
    return _Document(memoryview(results.encode(head, compressed=True)), ranks, tables)


def _fields(run: Attribution) -> dict[str, Any]:
    """Return what is not of one rank alone, of an attribution and of those in it."""
    own = {f.name: getattr(run, f.name) for f in fields(Attribution) if f.name not in _APART}
    parts = {name: getattr(run, name) for name in ("superset", "part")}
    return own | {name: None if part is None else _fields(part) for name, part in parts.items()}


class _OfRanks(Mapping[int, _Value]):
    """Values of ranks, each made when it is asked for first."""

    def __init__(self, ranks: Iterable[int], make: Callable[[int], _Value]) -> None:
        self._ranks = dict.fromkeys(ranks)
        self._make = lru_cache(maxsize=None)(make)

    def __getitem__(self, rank: int) -> _Value:
        if rank not in self._ranks:
            raise KeyError(rank)
        return self._make(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


@dataclass(frozen=True)
class _Encoded:
    """Tables of a rank in an entry."""

    data: memoryview

    def get(self) -> dict[str, pa.Table]:
        """Decode them."""
        tables: dict[str, pa.Table] = results.decode(self.data)
        return tables


def _restored(document: _Document) -> Attribution:
    """Return the attribution of an entry, whose parts of ranks are decoded when they are used."""
    described, stored, with_work, with_factors, own = results.decode(document.head)
    manifest, path, source, named_originals = described
    originals = {rank: [*map(Path, of)] for rank, of in named_originals.items()}
    in_memory, rows_count, files = stored
    held: dict[int, HeldTables] = {rank: _Encoded(data) for rank, data in document.tables.items()}
    for rank, named in files.items():
        held[rank] = FiledTables({name: Path(file) for name, file in named.items()})
    store = Store(in_memory, held, rows_count)
    folder = None if path is None else Path(path)
    recording = Run(manifest, folder, store, source, originals)

    @cache
    def parts(rank: int) -> tuple[Any, ...]:
        joined, work, factors = results.decode(document.ranks[rank])
        return joined.restored(rank_input(recording, rank, joined.inputs)), work, factors

    of_ranks: dict[str, Any] = {
        "joined": _OfRanks(document.ranks, lambda rank: parts(rank)[0]),
        "work": _OfRanks(with_work, lambda rank: parts(rank)[1]),
        "factors": _OfRanks(with_factors, lambda rank: parts(rank)[2]),
    }

    def made(own: dict[str, Any], recording: Run) -> Attribution:
        if own["part"] is not None:
            ranks = [summary.rank for summary in own["part"]["ranks"]]
            own["part"] = made(own["part"], recording.of_ranks(ranks))
        if own["superset"] is not None:
            own["superset"] = made(own["superset"], recording)
        return Attribution(**own, **of_ranks, recording=recording)

    return made(own, recording)
