"""Ranks of nodes without a shared disk hand their files to rank 0, through the job's store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from chopper.recording import handover
from chopper.storage import manifest as m
from chopper.storage.layout import rank_dir_name
from chopper.storage.parts import RunWriter

TRACE = bytes(range(256)) * 40
dist: Any = torch.distributed
Lines = dict[int, str | None]


def rank(run: Path, number: int, world: int) -> tuple[Path, m.RankManifest]:
    writer = RunWriter(run, number)
    part = writer.manifest
    part.world_size, part.hostname = world, run.parent.name
    part.status, part.machine, part.process_started = "complete", run.parent.name, 1
    writer.save()
    (writer.directory / "trace.json.gz").write_bytes(TRACE * number)
    (writer.directory / "empty").touch()
    return writer.directory, part


def handed_over(*ranks: tuple[Path, m.RankManifest]) -> Lines:
    """Close the recordings of ranks, each in a thread with a connection of its own."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines: Lines = {}

    def close(folder: Path, part: m.RankManifest) -> None:
        store = dist.PrefixStore("chopper", server.clone())
        lines[part.rank] = handover.hand_over(store, folder, part)

    threads = [threading.Thread(target=close, args=one) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lines


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], Path]:
    def run_of(name: str) -> Path:
        return tmp_path / name / "run"

    return run_of


def test_files_of_ranks_on_other_disks_come_to_rank_0(
    node: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_CHUNK_BYTES", 1000)
    here, there = node("a"), node("b")
    lines = handed_over(rank(here, 0, 4), rank(here, 1, 4), rank(there, 2, 4), rank(there, 3, 4))
    assert lines == {
        0: "gathered 2 ranks of other nodes",
        1: None,
        2: f"rank 2 was gathered into {here} on a",
        3: f"rank 3 was gathered into {here} on a",
    }
    for number in (2, 3):
        name = rank_dir_name(number)
        files = {p.name: p.read_bytes() for p in (there / name).iterdir()}
        assert {p.name: p.read_bytes() for p in (here / name).iterdir()} == files
        assert len(files["trace.json.gz"]) == number * len(TRACE)
    assert sorted(p.name for p in here.iterdir()) == [rank_dir_name(n) for n in range(4)]


def test_a_full_disk_is_told_to_all_and_leaves_nothing_half_written(
    node: Callable[[str], Path], small_disk: Path
) -> None:
    there = node("b")
    large = rank(there, 1, 3)
    (large[0] / "trace.json.gz").write_bytes(bytes(2 << 20))
    lines = handed_over(rank(small_disk / "run", 0, 3), large, rank(there, 2, 3))
    reason = f"{small_disk / 'run/rank-00001'} cannot be written (No space left on device)"
    remedy = "bring the nodes' directories together, and make one run of them with chopper gather"
    assert lines == {
        0: f"not all ranks were gathered: {reason}; {remedy}",
        1: f"rank 1 was not gathered: {reason}; {remedy}",
        2: f"rank 2 was not gathered: {reason}; {remedy}",
    }
    assert [p.name for p in (small_disk / "run").iterdir()] == ["rank-00000"]


def test_a_rank_that_died_is_named_and_holds_up_nobody(
    node: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.5)
    here, there = node("a"), node("b")
    lines = handed_over(rank(here, 0, 4), rank(there, 3, 4))
    assert lines[0] is not None
    assert "no message from 2 ranks (1, 2)" in lines[0]
    assert lines[3] == f"rank 3 was gathered into {here} on a"
    assert [p.name for p in sorted(here.iterdir())] == ["rank-00000", "rank-00003"]


@pytest.mark.parametrize("number", [0, 1])
def test_without_rank_0_or_a_process_group_the_command_is_named(
    node: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.1)
    lines = [handover.hand_over(None, *rank(node("a"), number, 2))]
    if number:
        lines += handed_over(rank(node("a"), 1, 2)).values()
    for line, reason in zip(
        lines, ("the process group had ended", "no message for 0 s"), strict=False
    ):
        assert line is not None
        assert line.startswith(f"rank {number} was not gathered: {reason}; bring ")
        assert line.endswith("chopper gather")
