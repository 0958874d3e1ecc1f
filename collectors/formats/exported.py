"""Timelines that ``chopper export --to perfetto`` wrote: each carries the run that it shows.

The value of the key ``chopperRun``, before the events, is an object: file of a run directory → its
content in base64; then ``sha256``, of the names and contents. Viewers skip keys that they do not
know.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from chopper.collectors.formats.unpack import DAMAGE, pieces
from chopper.errors import InputError, reason_of
from chopper.limits import Intake
from chopper.storage import parquet
from chopper.storage.files import decode_json, inside
from chopper.storage.layout import MANIFEST
from chopper.storage.parts import checked_run
from chopper.tables import TABLES

_KEY = "chopperRun"
_BEGIN = re.compile(rb'"%s"\s*:\s*\{' % _KEY.encode())
_CHECKSUM = "sha256"
_END = re.compile(rb',\s*"traceEvents"\s*:\s*\[')
_END_BYTES = 64
_VALUE_BYTES = 4
"""At least, in memory: the code of a text."""
_NAME = re.compile(r"manifest\.json|rank-[0-9]{5,7}/[a-z_]+\.parquet")
_HELD_RATIO = 3
"""Memory for each byte of text: the text, the files, and their tables."""
_BLOCK_BYTES = 3 << 18
"""Three bytes are four letters."""


class _Head(msgspec.Struct):
    files: dict[str, bytes] = msgspec.field(name=_KEY)


def sniff(head: bytes) -> bool:
    """Return whether a file begins as such a timeline."""
    return head.lstrip().startswith(b"{") and _BEGIN.search(head, 0, 1024) is not None


def encoded(directory: Path) -> Iterator[bytes]:
    """Yield the key and its value for a run directory, in pieces."""
    yield f'"{_KEY}":{{'.encode()
    checksum = hashlib.sha256()
    for file in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = file.relative_to(directory).as_posix()
        checksum.update(name.encode())
        yield f'"{name}":"'.encode()
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                checksum.update(block)
                yield base64.b64encode(block)
        yield b'",'
    yield b'"%s":"%s"}' % (_CHECKSUM.encode(), base64.b64encode(checksum.digest()))


def unpack(path: Path, directory: Path) -> None:
    """Write the run that a timeline carries into an empty directory.

    Raises:
        InputError: the timeline is damaged, cannot be read, or unpacks to more than the limits
            allow.
        OSError: the directory cannot be written.
    """
    files = _files(path)
    stored_checksum, checksum = files.pop(_CHECKSUM, b""), hashlib.sha256()
    for name, content in files.items():
        checksum.update(name.encode())
        checksum.update(content)
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{path}: carries {name!r}, which is no file of a run; export the run again"
            )
    if MANIFEST not in files:
        raise InputError(f"{path}: the run that it carries lacks {MANIFEST}; export the run again")
    run = checked_run(files[MANIFEST], f"{path}, {MANIFEST} of the run that it carries")
    damaged = "of the run that it carries is damaged; export the run again"
    if stored_checksum != checksum.digest():
        raise InputError(f"{path}: the checksum {damaged}")
    if any(part.traces for part in run.ranks):
        raise InputError(
            f"{path}: the run that it carries names raw traces, which no timeline holds; export "
            "the run again"
        )
    # Tables are read a stretch at a time where memory is short: only their ratio is checked.
    intake = Intake(path, held_ratio=0)
    for name, content in files.items():
        file = inside(directory, name)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        if file.suffix == parquet.SUFFIX:
            with _naming_problem(f"{path}: {name} {damaged}"):
                values_count = parquet.values_count(file)
            intake.check(len(content), values_count * _VALUE_BYTES)
            if file.stem in TABLES:
                with _naming_problem(f"{path}: {name} {damaged}"):
                    parquet.check(file, file.stem)


@contextlib.contextmanager
def _naming_problem(problem: str) -> Iterator[None]:
    """Say it of the timeline where a file made of it is damaged."""
    try:
        yield
    except InputError as exc:
        raise InputError(problem) from exc


def _files(path: Path) -> dict[str, bytes]:
    text, end = bytearray(), None
    try:
        with path.open("rb") as file:
            for piece in pieces(file, Intake(path, _HELD_RATIO)):
                searched = max(0, len(text) - _END_BYTES)
                text += piece
                if end := _END.search(text, searched):
                    break
    except DAMAGE:
        pass
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({reason_of(exc)})") from exc
    if end is None:
        raise InputError(f"{path}: ends within the run that it carries; export the run again")
    head = bytes(text[: end.start()]) + b"}"
    problem = f"{path}: the run that it carries is damaged"
    return decode_json(head, _Head, problem, error=InputError, remedy="export the run again").files
