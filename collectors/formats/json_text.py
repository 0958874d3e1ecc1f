"""From a file to its JSON text, whatever it is packed in, and however damaged."""

from __future__ import annotations

import codecs
from pathlib import Path

from chopper.collectors.formats.unpack import DAMAGE, PACKED, salvaged
from chopper.errors import InputError
from chopper.limits import Intake
from chopper.storage.manifest import Finding, add_finding

_HEAD_BYTES = 512
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
        add_finding(
            findings,
            "trace.truncated_gzip",
            f"{path.name}: compressed stream damaged ({problem}); {len(data)} bytes of text "
            "before that are used",
        )
    refuse_other(path, data[:_HEAD_BYTES])
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        add_finding(
            findings,
            "trace.utf16",
            f"{path.name}: is UTF-16, where JSON is UTF-8; converted",
            severity="info",
        )
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    if not data.strip():
        raise InputError(f"{path}: contains only white space, expected a Kineto trace in JSON")
    return data, findings
