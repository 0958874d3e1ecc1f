"""Ranks of nodes without a shared disk hand their files to rank 0, through the job's store."""

from __future__ import annotations

import json
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
    (writer.directory / "step.arrow").touch()
    return writer.directory, part


def handed_over(
    *ranks: tuple[Path, m.RankManifest], also: Callable[[Any], None] = lambda store: None
) -> Lines:
    """Close the recordings of ranks, each in a thread with a connection of its own.

    Args:
        ranks: folder and manifest of each.
        also: what somebody else does in the job's store.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines: Lines = {}

    def close(folder: Path, part: m.RankManifest) -> None:
        store = dist.PrefixStore("chopper", server.clone())
        lines[part.rank] = handover.hand_over(store, folder, part)

    threads = [threading.Thread(target=close, args=one) for one in ranks]
    also(dist.PrefixStore("chopper", server.clone()))
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
    ranks = [rank(here, 0, 4), rank(here, 1, 4), rank(there, 2, 4), rank(there, 3, 4)]
    (there / rank_dir_name(3) / "of-the-program.txt").write_text("not to be sent")
    lines = handed_over(*ranks)
    assert lines == {
        0: "gathered 2 ranks of other nodes",
        1: None,
        2: f"rank 2 was gathered into {here} on a",
        3: f"rank 3 was gathered into {here} on a",
    }
    for number in (2, 3):
        name = rank_dir_name(number)
        files = {p.name: p.read_bytes() for p in (there / name).iterdir() if p.suffix != ".txt"}
        assert {p.name: p.read_bytes() for p in (here / name).iterdir()} == files
        assert len(files["trace.json.gz"]) == number * len(TRACE)
    assert sorted(p.name for p in here.iterdir()) == [rank_dir_name(n) for n in range(4)]


REMEDY = "bring the nodes' directories together, and make one run of them with chopper gather"


def test_a_full_disk_is_told_to_all_and_leaves_nothing_half_written(
    node: Callable[[str], Path], small_disk: Path
) -> None:
    there = node("b")
    many = rank(there, 1, 3)
    for number in range(400):  # each takes a page of the disk
        (many[0] / f"trace-{number}.json").write_text("{}")
    lines = handed_over(rank(small_disk / "run", 0, 3), many, rank(there, 2, 3))
    reason = f"{small_disk / 'run/rank-00001'} cannot be written (No space left on device)"
    assert lines == {
        0: f"not all ranks were gathered: {reason}; {REMEDY}",
        1: f"rank 1 was not gathered: {reason}; {REMEDY}",
        2: f"rank 2 was not gathered: {reason}; {REMEDY}",
    }
    assert [p.name for p in (small_disk / "run").iterdir()] == ["rank-00000"]


def test_a_rank_for_which_there_is_no_room_is_refused_alone(
    node: Callable[[str], Path], small_disk: Path
) -> None:
    there = node("b")
    large = rank(there, 1, 3)
    (large[0] / "trace.json.gz").write_bytes(bytes(2 << 20))
    lines = handed_over(rank(small_disk / "run", 0, 3), large, rank(there, 2, 3))
    assert "rank 1 was refused (it announces 2.00 MiB, where " in str(lines[0])
    assert lines[2] == f"rank 2 was gathered into {small_disk / 'run'} on disk"
    names = sorted(p.name for p in (small_disk / "run").iterdir())
    assert names == ["rank-00000", "rank-00002"]


GOOD = {"manifest.json": b"", "trace.json.gz": b"abc"}
"""Of a hostile rank; its manifest is made when it is sent."""
Hostile = Callable[[Any, dict[str, bytes]], None]


def _announces(what: bytes | list[Any]) -> Hostile:
    def send(store: Any, files: dict[str, bytes]) -> None:
        store.set("1/0", what if isinstance(what, bytes) else json.dumps(what))
        store.set("1/1", "end")

    return send


def _sends(
    change: Callable[[dict[str, bytes]], dict[str, bytes]], *, announced: bool = True
) -> Hostile:
    """Send other files; announced, or in place of those that were."""

    def send(store: Any, files: dict[str, bytes]) -> None:
        sent = change(dict(files))
        sizes = {name: len(data) for name, data in (sent if announced else files).items()}
        store.set("1/0", json.dumps([*sizes.items()]))
        messages = [data for data in sent.values() if data or not announced]
        for number, data in enumerate([*messages, *[b"end"] * announced], 1):
            store.set(f"1/{number}", data)

    return send


def _manifest(**fields: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: (
        files | {"manifest.json": json.dumps(json.loads(files["manifest.json"]) | fields).encode()}
    )


def _more(files: dict[str, bytes]) -> dict[str, bytes]:
    return files | {"trace.json.gz": files["trace.json.gz"] + b"more"}


HOSTILE = (
    (_announces(b"\xff"), "what it announces is no list of files and sizes"),
    (_announces(b"[" * 100_000), "no list of files and sizes"),
    (_announces([["a", -1]]), "no list of files and sizes"),
    (_announces([["a", 1e400]]), "no list of files and sizes"),
    (_announces([["a"]]), "no list of files and sizes"),
    (_announces([["a", 0]] * 10_001), "no list of files and sizes"),
    (_announces([["a", 0]] * 2), "it announces a file twice"),
    (_announces([["step.arrow", 1 << 60]]), "it announces 1024 PiB, where "),
    *(
        (_announces([[name, 1]]), "which is not inside it")
        for name in ("../rank-00002/a", "/etc/chopper", "..", "a/../../b", "", "a\0b")
    ),
    (_announces([["a", 0], ["./a", 0]]), "cannot be written (File exists)"),
    (_announces([["a" * 300, 1]]), "cannot be written (File name too long)"),
    (_announces([]), "it sends no manifest.json"),
    (_sends(lambda files: files | {"x.sh": b"x"}), "'x.sh' is no file that a rank records"),
    (_sends(lambda files: files | {"rank-00002/step.arrow": b""}), "is no file that a rank"),
    (_sends(lambda files: {"trace.json.gz": b"x"}), "it sends no manifest.json"),
    (_sends(lambda files: files | {"manifest.json": b"{}"}), "its manifest.json: "),
    (_sends(_manifest(rank=2)), "it sends rank 2 of 3"),
    (_sends(_manifest(world_size=9)), "it sends rank 1 of 9"),
    (_sends(_more, announced=False), "it sends 7 bytes where it announced 3"),
    (_sends(lambda files: dict.fromkeys(files, b""), announced=False), "it sends 0 bytes where"),
    (_sends(lambda files: {}, announced=False), "no message from 1 rank (1)"),
    (lambda store, files: None, "no message from 1 rank (1)"),
)


@pytest.mark.parametrize(("send", "reason"), HOSTILE)
def test_a_rank_that_sends_otherwise_than_announced_is_refused_alone(
    send: Hostile, reason: str, node: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_LEAVING_S", 0.1)
    if "no message" in reason:
        monkeypatch.setattr(handover, "_PATIENCE_S", 0.5)
    here, there = node("a"), node("b")
    good = rank(node("c"), 1, 3)[0] / "manifest.json"
    files = GOOD | {"manifest.json": good.read_bytes()}
    lines = handed_over(rank(here, 0, 3), rank(there, 2, 3), also=lambda store: send(store, files))
    assert reason in str(lines[0])
    assert str(lines[0]).startswith("not all ranks were gathered: ")
    assert lines[2] == f"rank 2 was gathered into {here} on a"
    assert sorted(p.name for p in here.iterdir()) == ["rank-00000", "rank-00002"]


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
