"""What is read from disk is checked before it is used, and stays inside its directory.

Documents (JSON), telemetry streams (Arrow) and files of a run directory are read through this
module. Damage is an error of one line, or, for streams, ends what can be read of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from chopper.errors import InputError, OutputError, RunFormatError, printable, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    import pyarrow as pa

_T = TypeVar("_T")

CHECKSUM = b"chopper.crc32"
"""Key of a batch's metadata: CRC-32 of the bytes of the file before the batch, in hexadecimal."""
_TRAILER = b"chopper.crc32="
"""Follows the end mark of a stream; then the CRC-32 of all bytes before it, in hexadecimal."""


JSON_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Exceptions that decoding JSON raises: text that is not UTF-8 and deep nesting are not msgspec's."""


def decode_json(
    data: bytes, kind: type[_T], problem: str, *, remedy: str = "", error: type[Exception]
) -> _T:
    """Decode a JSON document.

    Args:
        data: the document.
        kind: its type.
        problem: file and what it should be, for example ``a.json: is not a calibration``.
        remedy: what to do about it.
        error: exception to raise, with the problem, its reason and the remedy in one line.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except JSON_ERRORS as exc:
        after = f"; {remedy}" if remedy else ""
        raise error(f"{problem} ({printable(str(exc))}){after}") from exc


def encode_json(value: Any) -> bytes:
    """Encode as JSON for people and other programs.

    Names of files are bytes and need not be UTF-8: their byte 0xff reads ``\\udcff``.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_readable(msgspec.to_builtins(value)))


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_readable(k): _readable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(v) for v in value]
    return value


def pack_message(value: Any) -> bytes:
    """Encode a struct for a process of ours, in one line; names that are not UTF-8 stay exact."""
    return json.dumps(msgspec.to_builtins(value)).encode() + b"\n"


def unpack_message(line: bytes | str, kind: type[_T]) -> _T:
    """Decode what :func:`pack_message` encoded."""
    return msgspec.convert(json.loads(line), kind)


def read_bytes(file: Path, *, error: type[Exception] = InputError) -> bytes:
    """Read a whole file; a failure is raised as ``error`` with one line.

    A pipe or device, which could be read for ever, is refused.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise error(f"{file}: is not a regular file")
        return file.read_bytes()
    except OSError as exc:
        raise error(f"{file}: cannot be read ({reason_of(exc)})") from exc


def inside(root: Path, name: str | Path) -> Path:
    """Path of a file or folder of a run, which must lie in the run's own directory.

    Args:
        root: the directory; it may itself be reached through a link.
        name: path relative to it.

    Raises:
        RunFormatError: the name is absolute, leads upwards, or one of its parts is a link.
    """
    relative = PurePosixPath(name)
    parts = relative.parts
    shown = printable(str(name))
    if relative.is_absolute() or ".." in parts or not parts or "\0" in str(name):
        raise RunFormatError(
            f"{root}: names {shown!r}, which is not inside it; only files of the run are read"
        )
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise RunFormatError(
                f"{path}: is a link; the files of a run lie inside it, replace the link by a copy"
            )
    return path


def check_links(root: Path) -> None:
    """Refuse links anywhere below a directory that is going to be copied.

    Raises:
        RunFormatError: there is one.
    """
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            inside(Path(folder), name)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part.

    Raises:
        OutputError: the disk is full, or the place is read-only.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        # Exclusively: never through a link that somebody left there.
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({reason_of(exc)})") from exc


class ChecksummedSink:
    """A file that counts the CRC-32 of what was written to it.

    Args:
        file: opened for writing, empty.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Write bytes; returns how many."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)

    def batch_metadata(self) -> dict[bytes, bytes]:
        """Metadata of the next batch: the checksum of what stands before it."""
        return {CHECKSUM: b"%08x" % self.crc32}

    def write_trailer(self) -> None:
        """Write the checksum of the whole file, after the stream's end."""
        self._file.write(_TRAILER + b"%08x" % self.crc32)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class DamagedStreamError(ValueError):
    """A stream cannot be read further; its message is the reason, in one line."""


def arrow_errors() -> tuple[type[Exception], ...]:
    """Exceptions that reading damaged Arrow and Parquet data raises."""
    import pyarrow as pa

    # Names that are not UTF-8 are ValueErrors, absurd sizes memory or overflow errors.
    return (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, EOFError)


def check_batch(batch: pa.RecordBatch) -> None:
    """Check a batch that was read: offsets, indices, UTF-8, nulls inside dictionaries.

    Raises:
        DamagedStreamError: using it could crash, or give other values than were written.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
        for column in batch.columns:
            if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
                raise DamagedStreamError("a dictionary holds nulls")
    except arrow_errors() as exc:
        raise DamagedStreamError(one_line(exc)) from exc


def one_line(exc: BaseException) -> str:
    """First line of an exception's message, or its type where it has none."""
    lines = str(exc).splitlines()
    return printable(lines[0]) if lines else type(exc).__name__


def stream_batches(data: bytes) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow IPC stream, each checked; those without checksums are older.

    A batch is returned when the checksum that follows it agrees, or when nothing follows it.

    Raises:
        DamagedStreamError: the stream ends in the middle, or is damaged; what was returned is good.
    """
    import pyarrow as pa

    file = pa.BufferReader(data)
    before: pa.RecordBatch | None = None
    checksummed = False
    crc32 = start = 0
    try:
        with pa.ipc.open_stream(file) as reader:
            while True:
                end = file.tell() if before is not None else 0
                try:
                    batch, metadata = reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    break
                crc32, start = zlib.crc32(memoryview(data)[start:end], crc32), end
                said = (metadata or {}).get(CHECKSUM)
                if before is None:
                    checksummed = said is not None
                if said != (b"%08x" % crc32 if checksummed else None):
                    raise DamagedStreamError("its checksum differs")
                if before is not None:
                    yield before
                check_batch(batch)
                before = batch
            end = file.tell()
    except DamagedStreamError:
        raise
    except arrow_errors() as exc:
        if before is not None:
            yield before
        raise DamagedStreamError(one_line(exc)) from exc
    trailer = _TRAILER + b"%08x" % zlib.crc32(memoryview(data)[start:end], crc32)
    # A writer that was killed leaves a part of it, an older one none.
    if not trailer.startswith(data[end:]):
        raise DamagedStreamError("its checksum differs")
    if before is not None:
        yield before
