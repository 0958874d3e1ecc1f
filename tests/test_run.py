"""The run directory: written rank by rank, closed once, read whole or half."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chopper.errors import OutputError, RunFormatError
from chopper.manifest import RankManifest, RunManifest, encode
from chopper.run import (
    Run,
    RunWriter,
    StreamWriter,
    check_output,
    finalize,
    is_run,
    prepare_output,
    rank_dir_name,
    read_stream,
    write_atomic,
)
from chopper.tables import TABLES


def counters(*times: int) -> dict[str, list[object]]:
    return {
        "time_ns": list(times),
        "track": [f"t{t % 2}" for t in times],
        "name": ["n"] * len(times),
        "value": [float(t) if t else None for t in times],
    }


# ---------------------------------------------------------------- streams


def test_stream_holds_what_was_written_batch_by_batch(tmp_path: Path) -> None:
    stream = StreamWriter(tmp_path / "counter.arrow", "counter")
    for batch in ((0, 1), (2,), (3, 4, 5)):
        stream.write(counters(*batch))
        # Flushed: a reader sees it while the writer is at work.
        table, finding = read_stream(stream.path, "counter")
        assert table["time_ns"].to_pylist()[-1] == batch[-1]
        assert finding is None
    stream.close()
    stream.close()
    table, finding = read_stream(stream.path, "counter")
    assert finding is None
    assert table.to_pylist() == [
        {"time_ns": t, "track": f"t{t % 2}", "name": "n", "value": float(t) if t else None}
        for t in range(6)
    ]
    assert table.schema.equals(TABLES["counter"].arrow)


def test_stream_cut_anywhere_gives_its_whole_batches(tmp_path: Path) -> None:
    stream = StreamWriter(tmp_path / "counter.arrow", "counter")
    ends = []
    for t in range(4):
        stream.write(counters(t))
        ends.append(stream.path.stat().st_size)
    stream.close()
    data = stream.path.read_bytes()
    for size in range(0, len(data), 7):
        stream.path.write_bytes(data[:size])
        table, finding = read_stream(stream.path, "counter")
        whole = sum(end <= size for end in ends)
        # New dictionary values come just before the batch that uses them.
        assert table.num_rows == whole
        assert table["time_ns"].to_pylist() == list(range(whole))
        if size not in ends and size < ends[-1]:
            assert finding is not None
            assert finding.code == "telemetry.truncated"


def test_stream_on_a_full_device_says_so(tmp_path: Path) -> None:
    stream = StreamWriter(Path("/dev/full"), "counter")
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space"):
        stream.write(counters(1))
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written"):
        stream.close()
    stream.close()
    with pytest.raises(OutputError, match="cannot be written"):
        StreamWriter(tmp_path, "counter")


# ---------------------------------------------------------------- parts and the whole


def test_run_is_made_of_its_parts(tmp_path: Path) -> None:
    for rank in (1, 0):
        writer = RunWriter(tmp_path, rank)
        writer.manifest.world_size = 4
        writer.manifest.start_ns = 100 + rank
        writer.manifest.status = "complete"
        writer.save()
    closed = finalize(tmp_path, command=["torchrun", "x.py"], workload="fsdp2", exit_code=0)
    assert [p.rank for p in closed.ranks] == [0, 1]
    assert (closed.created_ns, closed.exit_code, closed.workload) == (100, 0, "fsdp2")
    assert [f.code for f in closed.findings] == ["run.ranks_missing"]
    assert closed.findings[0].count == 2
    opened = Run.open(tmp_path)
    assert encode(opened.manifest) == encode(closed)
    assert opened.ranks == [0, 1]
    assert opened.part(1).start_ns == 101
    assert opened.table(0, "counter").num_rows == 0


def test_run_without_ranks_cannot_be_closed(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="no rank recorded anything"):
        finalize(tmp_path)


def test_unknown_table_and_rank(tmp_path: Path) -> None:
    run = Run(RunManifest(kind="imported", name="x", ranks=[RankManifest(rank=0)]), None)
    with pytest.raises(KeyError):
        run.table(0, "no such table")
    with pytest.raises(RunFormatError, match="has no directory"):
        run.rank_dir(0)
    assert run.table(0, "counter").num_rows == 0
    assert repr(run) == "<chopper.Run 'None': 1 rank(s)>"


def test_members_of_a_later_minor_version_are_ignored(tmp_path: Path) -> None:
    RunWriter(tmp_path, 0).save()
    finalize(tmp_path)
    file = tmp_path / "manifest.json"
    document = json.loads(file.read_text())
    document["a_member_of_the_future"] = {"x": 1}
    file.write_text(json.dumps(document))
    assert Run.open(tmp_path).ranks == [0]


# ---------------------------------------------------------------- places


def test_what_is_a_run(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / "nothing")
    (tmp_path / "rank-1").mkdir()
    assert not is_run(tmp_path)
    (tmp_path / rank_dir_name(1)).mkdir()
    assert is_run(tmp_path)
    assert rank_dir_name(123456) == "rank-123456"


def test_output_is_prepared_but_nothing_is_overwritten(tmp_path: Path) -> None:
    fresh = tmp_path / "a" / "b"
    assert prepare_output(fresh) == fresh
    assert list(fresh.iterdir()) == []
    assert prepare_output(fresh) == fresh
    (fresh / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match="holds a run already; pass --force"):
        prepare_output(fresh)
    assert check_output(fresh, force=True)
    assert (fresh / "manifest.json").exists()
    prepare_output(fresh, force=True)
    assert list(fresh.iterdir()) == []
    (fresh / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match="holds files that are not a chopper run"):
        prepare_output(fresh, force=True)
    with pytest.raises(OutputError, match="is a file"):
        prepare_output(fresh / "thesis.tex", force=True)
    assert (fresh / "thesis.tex").read_text() == "mine"
    with pytest.raises(OutputError, match="cannot write here"):
        prepare_output(Path("/proc/nothing/run"))


def test_atomic_write_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomic(file, b"old")
    write_atomic(file, b"new")
    assert file.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    with pytest.raises(OutputError, match="cannot be written"):
        write_atomic(tmp_path / "missing" / "f", b"x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(OutputError, match=r"taken: cannot be written \(Is a directory\)"):
        write_atomic(tmp_path / "taken", b"x")
    assert sorted(os.listdir(tmp_path)) == ["f", "taken"]  # noqa: PTH208


def test_rank_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OutputError, match="cannot be created"):
        RunWriter(tmp_path / "run", 0)
