"""Files of run directories and JSON documents: checked before they are used, written as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import msgspec

from chopper.addresses import without_secrets
from chopper.errors import (
    JSON_ERRORS,
    InputError,
    OutputError,
    RunFormatError,
    json_text,
    printable,
    reason_of,
)
from chopper.wording import bytes_

_T = TypeVar("_T")

DOCUMENT_MOST_BYTES = 512 << 20
"""Of a manifest or another JSON document; the manifest of 10 000 ranks has about 80 MB."""
DOCUMENT_MOST_VALUES = 8 << 20
"""Each takes some 100 bytes of memory; the manifest of 100 000 imported ranks has 6 million."""


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
    if len(data) > DOCUMENT_MOST_VALUES:
        count = sum(map(data.count, (b",", b"{", b"[")))
        if count > DOCUMENT_MOST_VALUES:
            after = f"; {remedy}" if remedy else ""
            raise error(
                f"{problem} ({count} values, expected at most {DOCUMENT_MOST_VALUES}){after}"
            )
    try:
        return msgspec.json.decode(data, type=kind)
    except JSON_ERRORS as exc:
        after = f"; {remedy}" if remedy else ""
        raise error(f"{problem} ({printable(str(exc))}){after}") from exc


def decode_document(data: bytes, kind: type[_T], schema: str, problem: str, *, remedy: str) -> _T:
    """Decode a JSON document that names its schema, which is checked before anything else.

    Raises:
        InputError: damaged, or of another schema.
    """
    document = decode_json(data, dict[str, Any], problem, remedy=remedy, error=InputError)
    named = document.get("schema", "")
    if named != schema:
        schema_text = printable(str(named)[:80])
        raise InputError(f"{problem} (has schema {schema_text!r}, expected {schema!r}); {remedy}")
    return decode_json(data, kind, problem, remedy=remedy, error=InputError)


def encode_json(value: Any) -> bytes:
    """Encode as JSON for people and other programs: a terminal obeys none of it.

    Names of files are bytes and need not be UTF-8: their byte 0xff reads ``\\udcff``.
    """
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_readable(msgspec.to_builtins(value)))
    return json_text(data.decode()).encode()


def document(value: Any) -> bytes:
    """Encode as indented JSON, without the secrets of addresses in it."""
    return msgspec.json.format(json_without_secrets(encode_json(value)), indent=2) + b"\n"


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_readable(k): _readable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(v) for v in value]
    return value


def json_without_secrets(data: bytes) -> bytes:
    """Return a JSON document whose texts went through :func:`without_secrets`.

    A damaged one is returned as it is: whoever reads it says what is wrong.
    """
    if not re.search(rb"//|:/|%2f|\\/|\\u00", data, re.IGNORECASE):
        return data
    try:
        return encode_json(_cleaned(msgspec.json.decode(data)))
    except JSON_ERRORS:
        return data


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {without_secrets(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def pack_message(value: Any) -> bytes:
    """Encode a struct for a process of ours, in one line; names that are not UTF-8 stay exact."""
    return json.dumps(msgspec.to_builtins(value)).encode() + b"\n"


def unpack_message(line: bytes | str, kind: type[_T]) -> _T:
    """Decode what :func:`pack_message` encoded."""
    return msgspec.convert(json.loads(line), kind)


def read_bytes(
    file: Path,
    *,
    error: type[Exception] = InputError,
    most_bytes: int | None = DOCUMENT_MOST_BYTES,
) -> bytes:
    """Read a whole file; a failure is raised as ``error`` with one line.

    A pipe or device, which could be read for ever, is refused; so is a larger file.
    """
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise error(f"{file}: is not a regular file")
        if most_bytes is not None and facts.st_size > most_bytes:
            raise error(
                f"{file}: has {bytes_(facts.st_size)}, expected at most {bytes_(most_bytes)} of a "
                "document; remove or replace it"
            )
        return file.read_bytes()
    except OSError as exc:
        raise error(f"{file}: cannot be read ({reason_of(exc)})") from exc


def inside(root: Path, name: str | Path) -> Path:
    """Return the path of a file or folder of a run, which must be inside the run's directory.

    That directory may itself be reached through a link.

    Raises:
        RunFormatError: the name is absolute, leads upwards, or one of its parts is a link.
    """
    relative = PurePosixPath(name)
    parts = relative.parts
    text = printable(str(name))
    leaves = os.name == "nt" and any("\\" in part or ":" in part for part in parts)
    if relative.is_absolute() or ".." in parts or not parts or "\0" in str(name) or leaves:
        raise RunFormatError(
            f"{root}: names {text!r}, which is not inside it; only files of the run are read"
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


def create(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a new file to write, in place of one that a killed process left.

    Exclusively: never through a link, nor into a pipe or a file that somebody put there. A device
    is what the user named.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            return path.open("wb", buffering=buffering)
        path.unlink()
    return path.open("xb", buffering=buffering)


def open_own(path: Path, mode: int = 0o666) -> int:
    """Open a small file of ours to read and write, made if it is missing; return its descriptor.

    Raises:
        OutputError: a link, a pipe or a file of another user stands there, who could have made it
            to have another file overwritten, or this process wait for ever.
        OSError: it cannot be opened.
    """
    with contextlib.suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        opened = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        _check_own(path, path.lstat())
        raise
    try:
        _check_own(path, os.fstat(opened))
    except BaseException:
        os.close(opened)
        raise
    return opened


def is_users(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user."""
    return sys.platform == "win32" or status.st_uid == os.geteuid()


def _check_own(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
        kind = "a link"
    elif not stat.S_ISREG(status.st_mode):
        kind = "not a file"
    # Some file systems give all files to one user: whoever has the folder could replace them.
    elif not is_users(status) and status.st_uid != path.parent.stat().st_uid:
        kind = f"a file of another user ({status.st_uid})"
    else:
        return
    raise OutputError(
        f"{path}: is {kind}, where chopper keeps a lock of its own; remove it, or choose another "
        "output"
    )


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part.

    Raises:
        OutputError: the disk is full, or the place is read-only.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with create(temporary) as file:
            file.write(data)
        temporary.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({reason_of(exc)})") from exc
