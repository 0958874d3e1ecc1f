"""Files as they come, packed by gzip, zstd or not, however damaged: in pieces, lines, or whole."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from zlib import decompressobj
from zlib import error as _Damaged

from chopper.errors import InputError
from chopper.limits import MAX_LINE_BYTES, Intake
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding

try:
    from isal.isal_zlib import decompressobj  # type: ignore[assignment]
    from isal.isal_zlib import error as _Damaged  # type: ignore[assignment]
except ImportError:  # no wheel for this machine
    pass


_HEAD_BYTES = 1 << 16
_READ_BYTES = 1 << 13
"""Of a compressed file: some hundred kilobytes of text, which stay in the processor's cache."""
_READ_TEXT_BYTES = 1 << 20
_ZSTD_BLOCK_BYTES = 1 << 17
"""The largest that can be unpacked as a whole only (RFC 8878, 3.1.1.2)."""
_PIECE_BYTES = 1 << 16
"""Of what zstd unpacks: a damaged one is lost."""
_PIECES_AHEAD = 16
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
PACKED = {_GZIP: ".gz", _ZSTD: ".zst"}
"""What packed files begin with, and how their names end."""
DAMAGE = (EOFError, zlib.error, _Damaged)
"""What a cut off and a damaged file raise, after the pieces that could be unpacked."""


def head_of(path: Path) -> bytes:
    """The first bytes of a file, unpacked.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(_ZSTD):
            head += file.read(_ZSTD_BLOCK_BYTES)
    if head.startswith(_ZSTD):
        with contextlib.suppress(EOFError):
            return next(_of_zstd(io.BytesIO(), head, lambda _: None), b"")[:_HEAD_BYTES]
        return b""
    if not head.startswith(_GZIP):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


def pieces(file: BinaryIO, intake: Intake) -> Iterator[bytes]:
    """Yield the content of a file, plain, in gzip members or in frames of zstd.

    Raises:
        EOFError: a member is cut off, or a frame is cut off or damaged.
        OSError, error of zlib or isal: it cannot be read.
        InputError: it unpacks to more than the limits allow.
    """
    return _pieces(
        file, intake, decompressobj, lambda inflate, packed: [inflate.decompress(packed)]
    )


def ahead(content: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces that a thread of its own unpacks meanwhile, a few of them ahead."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, content, None) for _ in range(_PIECES_AHEAD))
        while (piece := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, content, None))
            yield piece


def salvaged(file: BinaryIO, intake: Intake) -> Iterator[bytes]:
    """Yield the same, but of a damaged member everything before its first bad byte; slower.

    Raises:
        EOFError, OSError, error of zlib, InputError: as :func:`pieces`.
    """
    return _pieces(file, intake, zlib.decompressobj, _up_to_damage)


def _pieces(
    file: BinaryIO,
    intake: Intake,
    start: Callable[..., Any],
    unpack: Callable[[Any, bytes], Iterable[bytes]],
) -> Iterator[bytes]:
    packed = file.read(_READ_BYTES)
    read_bytes = len(packed)
    unpacked_bytes = 0
    if packed.startswith(_ZSTD):
        yield from _of_zstd(
            file, packed, lambda unpacked_bytes: intake.check(file.tell(), unpacked_bytes)
        )
        return
    if not packed.startswith(_GZIP):
        while packed:
            intake.check(read_bytes, read_bytes)
            yield packed
            packed = file.read(_READ_TEXT_BYTES)
            read_bytes += len(packed)
        return
    while packed.startswith(_GZIP):
        inflate = start(wbits=31)
        while not inflate.eof:
            if not packed:
                raise EOFError("the stream ends before its end marker")
            for text in unpack(inflate, packed):
                unpacked_bytes += len(text)
                intake.check(read_bytes, unpacked_bytes)
                if text:
                    yield text
            packed = b""
            if not inflate.eof:
                packed = file.read(_READ_BYTES)
                read_bytes += len(packed)
        packed = inflate.unused_data
        if len(packed) < 2:
            packed += (more := file.read(_READ_BYTES))
            read_bytes += len(more)


def _of_zstd(file: BinaryIO, begun: bytes, check: Callable[[int], None]) -> Iterator[bytes]:
    """Decompress the bytes already read and the rest; ``check`` gets the size so far."""
    import pyarrow as pa

    stream_bytes = _Stream(itertools.chain([begun], iter(lambda: file.read(_READ_TEXT_BYTES), b"")))
    unpacked_bytes = 0
    try:
        with pa.CompressedInputStream(pa.PythonFile(stream_bytes, mode="r"), "zstd") as stream:
            while text := stream.read(_PIECE_BYTES):
                unpacked_bytes += len(text)
                check(unpacked_bytes)
                yield text
    except OSError as exc:
        if exc.errno is not None:
            raise
        raise EOFError(str(exc)) from exc


def _up_to_damage(inflate: Any, packed: bytes) -> Iterator[bytes]:
    """Unpack a piece; where it is damaged, what stands before the damage comes first."""
    before = inflate.copy()
    try:
        text = inflate.decompress(packed)
    except zlib.error:
        # A failing call gives nothing of what it had unpacked: go byte by byte.
        for at in range(len(packed)):
            yield before.decompress(packed[at : at + 1])
        raise
    yield text


class _Stream(io.RawIOBase):
    """Pieces as a file to read."""

    def __init__(self, content: Iterator[bytes]) -> None:
        self._content = content
        self._rest = memoryview(b"")
        self.damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            try:
                self._rest = memoryview(next(self._content, b""))
            except DAMAGE as exc:
                self.damage = exc
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def cells_of(text: str) -> list[str]:
    """Return the cells of a text's first line; none if it is not CSV."""
    try:
        return next(csv.reader(text.splitlines()[:1], skipinitialspace=True), [])
    except csv.Error:
        return []


def lines(path: Path, *, held_ratio: float) -> Iterator[str]:
    """Yield the lines of a text, with their ends.

    The caller takes ``held_ratio`` bytes of memory for each byte of text.

    Raises:
        EOFError, error of zlib or isal: it is cut off or damaged; the lines before were given.
        OSError: it cannot be read.
        InputError: a line, or all of it, is beyond the limits.
    """
    with path.open("rb") as file:
        intake = Intake(path, held_ratio)
        if file.seekable():
            # To unpack is quick, to read what is unpacked is not: a bomb is refused before.
            with contextlib.suppress(*DAMAGE):
                for _ in pieces(file, intake):
                    pass
            file.seek(0)
        stream = _Stream(pieces(file, intake))
        content = io.BufferedReader(stream, 1 << 16)
        text = io.TextIOWrapper(content, encoding="utf-8-sig", errors="replace", newline="")
        number = 0
        while line := text.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES and not line.endswith(("\n", "\r")):
                raise InputError(
                    f"{path}: line {number} has more than {MAX_LINE_BYTES >> 20} MiB, too long "
                    "for a line of a table"
                )
            # A number that is cut off is another number.
            if stream.damage is None or line.endswith(("\n", "\r")):
                yield line
        if stream.damage is not None:
            raise stream.damage


def letters_of(name: str) -> str:
    """Return a heading as its small letters and digits alone."""
    return "".join(char for char in name.lower() if char.isalnum())


_HELD_RATIO = 3
"""Memory for each byte of text: the text, a piece of it decoded, and the columns."""

_NOT_JSON = (
    (b"PK\x03\x04", "is a zip archive; unpack it and pass the trace inside"),
    (b"\xfd7zXZ\x00", "is xz-compressed; decompress it first (xz -d)"),
    (b"BZh", "is bzip2-compressed; decompress it first (bzip2 -d)"),
    (tuple(PACKED), "is compressed twice; decompress it once (gunzip, zstd -d) and pass that"),
    (
        b"version https://git-lfs",
        "is a Git LFS pointer, not the file that it stands for; fetch it (git lfs pull)",
    ),
    (
        (b"<!DOCTYPE", b"<!doctype", b"<html", b"<HTML", b"<?xml", b"<head", b"<Error"),
        "is a web page (HTML or XML), not a trace in JSON; download the file itself",
    ),
    (b"\x89PNG", "is a PNG image, not a trace in JSON"),
    (b"\x7fELF", "is a program, not a trace in JSON"),
    (
        b"SQLite format 3\x00",
        "is an SQLite database (nsys and rpd write such), not a Kineto trace in JSON",
    ),
    (b"PAR1", "is a Parquet file, not a trace in JSON"),
    (b"ARROW1", "is an Arrow file, not a trace in JSON"),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "is a Python pickle (a memory snapshot?), not a trace in JSON",
    ),
)
"""What people pass by mistake, by its first bytes."""


def refuse_other(path: Path, head: bytes) -> None:
    """Refuse what people pass by mistake.

    Raises:
        InputError: the file begins as such.
    """
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    for magic, what in _NOT_JSON:
        if head.startswith(magic) or start.startswith(magic):
            raise InputError(f"{path}: {what}")
    if head[257:262] == b"ustar":
        raise InputError(f"{path}: is a tar archive; unpack it (tar -xf) and pass the traces in it")


def read_bytes(path: Path) -> tuple[bytes, list[Finding]]:
    """The JSON text of a file, decompressed by its content, not by its name.

    A truncated gzip stream gives what could be decompressed, with a finding.

    Raises:
        InputError: missing, unreadable or empty.
    """
    intake = Intake(path, _HELD_RATIO)
    parts: list[bytes] = []
    problem = None
    try:
        with path.open("rb") as file:
            for part in salvaged(file, intake):
                if not parts:
                    refuse_other(path, part)
                parts.append(part)
    except DAMAGE as exc:
        problem = str(exc)
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file") from exc
    except IsADirectoryError as exc:
        raise InputError(f"{path}: is a directory, expected a trace file") from exc
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror})") from exc
    except ValueError as exc:
        raise InputError(f"{str(path)!r}: invalid file name ({exc})") from exc
    data = b"".join(parts)
    if not data and problem is not None:
        raise InputError(f"{path}: the compressed stream is damaged from its start ({problem})")
    if not data:
        raise InputError(f"{path}: is empty (0 bytes), expected a Kineto trace in JSON")
    findings: list[Finding] = []
    if problem is not None:
        size = f"{len(data)} bytes of text"
        findings.append(
            finding("trace.truncated_gzip", source=path.name, problem=problem, size=size)
        )
    refuse_other(path, data[:512])
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        findings.append(finding("trace.utf16", source=path.name))
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    if not data.strip():
        raise InputError(f"{path}: contains only white space, expected a Kineto trace in JSON")
    return data, findings
