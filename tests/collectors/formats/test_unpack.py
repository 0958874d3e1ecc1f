"""Packed files: zstd as gzip, whole, in several frames, cut off and damaged."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import pyarrow as pa
import pytest

from chopper.collectors.formats.unpack import head_of, lines, pieces, salvaged
from chopper.limits import Intake

TEXT = "".join(f"line {i}: {random.Random(i).random()}\n" for i in range(40_000)).encode()


def zstd(text: bytes) -> bytes:
    return bytes(pa.compress(text, codec="zstd"))


PACKED = {
    "gzip": gzip.compress(TEXT),
    "gzip members": gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]),
    "zstd": zstd(TEXT),
    "zstd frames": zstd(TEXT[:1000]) + zstd(TEXT[1000:]),
}


def _intake(path: Path) -> Intake:
    return Intake(path, 1.0)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("unpack", [pieces, salvaged])
def test_whole_files_give_their_text(packed: str, unpack, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(PACKED[packed])
    with path.open("rb") as file:
        assert b"".join(unpack(file, _intake(path))) == TEXT
    assert TEXT.startswith(head_of(path))
    assert len(head_of(path)) >= 1000
    assert "".join(lines(path, held_ratio=1.0)).encode() == TEXT


@pytest.mark.parametrize("packed", PACKED)
def test_a_file_that_is_cut_off_gives_what_is_before(packed: str, tmp_path: Path) -> None:
    whole = PACKED[packed]
    path = tmp_path / "text"
    path.write_bytes(whole[: len(whole) // 2])
    found: list[bytes] = []
    with path.open("rb") as file, pytest.raises(EOFError):
        found.extend(salvaged(file, _intake(path)))
    assert TEXT.startswith(b"".join(found))
    assert len(b"".join(found)) > 0.3 * len(TEXT)


def test_a_damaged_frame_gives_what_is_before() -> None:
    damaged = bytearray(PACKED["zstd"])
    damaged[len(damaged) // 2] ^= 0x55
    found: list[bytes] = []
    with pytest.raises(EOFError):
        found.extend(pieces(io.BytesIO(damaged), _intake(Path("text"))))
    assert TEXT.startswith(b"".join(found))


def test_a_head_that_is_cut_off_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(PACKED["zstd"][:9])
    assert head_of(path) == b""
