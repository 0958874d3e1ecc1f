"""The command on what is damaged: its answer, or its one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.command import run
from tests.kineto_writer import encode as encode_trace
from tests.kineto_writer import small_trace


def refused(source: str | Path, tmp_path: Path) -> str:
    """The one line that all three commands print for a source that cannot be used."""
    report, made = tmp_path / "made.json", tmp_path / "made-run"
    said = set()
    for command in (
        ("analyze", source, "--json"),
        ("report", source, "-o", report),
        ("import", source, "-o", made),
    ):
        outcome = run(*command)
        assert outcome.code == 1, outcome
        assert outcome.out == ""
        (line,) = outcome.lines
        assert line.startswith("chopper: ")
        said.add(line.removeprefix("chopper: "))
    assert not report.exists()
    assert not made.exists()
    assert len(said) == 1, said
    return said.pop()


def analyzed(*sources: str | Path) -> dict[str, Any]:
    """The attribution of a source that can be used, with exact closure."""
    outcome = run("analyze", *sources, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.lines == []
    found: dict[str, Any] = json.loads(outcome.out)
    parents = {c["parent"] for c in found["causes"]}
    leaves = [c["time_ns"] for c in found["causes"] if c["id"] not in parents]
    assert sum(leaves) == found["observed_ns"]
    return found


def quality(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f["code"]: f for f in found["quality"]}


def write(path: Path, data: bytes | dict[str, Any]) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else encode_trace(data))
    return path


def same(found: dict[str, Any], intact: dict[str, Any]) -> bool:
    return bool(
        found["observed_ns"] == intact["observed_ns"] and found["causes"] == intact["causes"]
    )


GOOD = small_trace().encode()
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def of_rank(rank: int, world: int = 2, **how: Any) -> bytes:
    return small_trace(rank=rank, world=world, pid=100 + rank, device=rank, **how).encode()


def without_tables(directory: Path) -> Path:
    """Return a run directory that has only its traces, as one of an older import has."""
    for file in directory.glob("rank-*/*.parquet"):
        file.unlink()
    return directory
