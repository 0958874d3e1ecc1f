from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.files import write_atomic
from chopper.storage.layout import MANIFEST
from chopper.storage.parts import RunWriter
from chopper.storage.processes import identity_of
from chopper.storage.run import Run
from chopper.storage.streams import StreamWriter
from tests import command

HOUR_NS = 3600 * 10**9


def node(path, ranks, *, world=4, start_ns=10**18, run_id="none", exit_code=0, job="port 29500"):
    """What `chopper record` leaves on one node: its ranks' parts, and a manifest of them."""
    for rank in ranks:
        writer = RunWriter(path, rank)
        part = writer.manifest
        part.world_size = world
        part.hostname, part.job = path.name, job
        part.start_ns, part.end_ns = start_ns, start_ns + 60 * 10**9
        part.status, part.steps_source = "complete", "mark"
        part.environment = {"TORCHELASTIC_RUN_ID": run_id}
        writer.save()
        steps = StreamWriter(writer.directory / "step.arrow", "step")
        steps.write(
            {
                "number": [0, 1],
                "start_ns": [start_ns, start_ns + rank + 1],
                "end_ns": [start_ns + rank + 1, start_ns + 2 * rank + 2],
                "source": ["mark"] * 2,
                "traced": [False] * 2,
                "profiled": [False] * 2,
                "micro_steps": [None] * 2,
            }
        )
        steps.close()
    finalize(
        path, command=["torchrun", f"--node-rank={path.name}", "train.py"], exit_code=exit_code
    )
    return path


def gathered(*args):
    """The command's exit code and messages, but for its progress."""
    done = command.run("gather", *args)
    said = "".join(f"{line}\n" for line in done.lines)
    return subprocess.CompletedProcess(args, done.code, done.out, said)


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_directories_of_nodes_become_one_run(tmp_path):
    first = node(tmp_path / "a", [0, 1])
    second = node(tmp_path / "b", [2, 3], exit_code=3)
    assert [f.code for f in Run.open(first).manifest.findings] == ["run.ranks_missing"]
    done = gathered(second, first, "-o", "run")
    assert done.returncode == 0, done.stderr
    assert "chopper analyze run" in done.stderr
    run = Run.open(Path("run"))
    assert run.ranks == [0, 1, 2, 3]
    assert run.manifest.kind == "recorded"
    assert run.manifest.exit_code == 3
    assert run.manifest.findings == []
    assert [part.hostname for part in run.manifest.ranks] == ["a", "a", "b", "b"]
    for rank in run.ranks:
        assert run.table(rank, "step")["end_ns"].to_pylist()[-1] == 10**18 + 2 * rank + 2
    # Each is where it was.
    assert Run.open(first).ranks == [0, 1]
    assert Run.open(second).ranks == [2, 3]


def test_a_node_that_was_killed_is_gathered_from_its_parts(tmp_path):
    first, second = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    (second / MANIFEST).unlink()
    (second / "rank-00003" / MANIFEST).unlink()
    done = gathered(first, second, "-o", "run")
    assert done.returncode == 0, done.stderr
    run = Run.open(Path("run"))
    assert run.ranks == [0, 1, 2, 3]
    assert run.table(3, "step").num_rows == 2
    codes = {f.code for f in run.manifest.findings}
    assert "run.rank_died" in codes
    assert "run.manifest_missing" not in codes


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"ranks": [1, 2]}, "two recordings of rank 1: "),
        ({"ranks": [2, 3], "world": 8}, "the job's size differs ("),
        ({"ranks": [2, 3], "job": "port 1"}, "the job differs ("),
        ({"ranks": [2, 3], "run_id": "other"}, "the launcher's run id differs ("),
        ({"ranks": [2, 3], "start_ns": 10**18 + 2 * HOUR_NS}, "b began 2.0 h after "),
    ],
)
def test_what_is_not_of_one_run_is_refused(tmp_path, second, why):
    first = node(tmp_path / "a", [0, 1])
    done = gathered(first, node(tmp_path / "b", **second), "-o", "run")
    assert done.returncode == 1
    assert why in done.stderr
    assert not Path("run").exists()


def test_runs_are_gathered_with_runs_only(tmp_path):
    first = node(tmp_path / "a", [0, 1])
    trace = tmp_path / "trace.json"
    trace.write_text("{}")
    done = gathered(first, trace, "-o", "run")
    assert (done.returncode, "is not a run directory" in done.stderr) == (1, True)
    done = gathered(first, first, "-o", "run")
    assert (done.returncode, "is one run directory" in done.stderr) == (1, True)
    assert not Path("run").exists()


def copied(source, target):
    """What rsync brings."""
    shutil.copytree(source, target)
    return target


def test_a_folder_of_the_nodes_is_enough(tmp_path):
    (tmp_path / "nodes").mkdir()
    node(tmp_path / "nodes/a", [0, 1])
    node(tmp_path / "nodes/b", [2, 3])
    (tmp_path / "nodes/notes.txt").touch()
    done = gathered(tmp_path / "nodes", "-o", "run")
    assert done.returncode == 0, done.stderr
    assert Run.open(Path("run")).ranks == [0, 1, 2, 3]


def test_the_same_recording_twice_is_taken_once_and_whole(tmp_path):
    first, second = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    early = copied(second, tmp_path / "early")
    (early / MANIFEST).unlink()
    part = m.decode_rank((early / "rank-00003" / MANIFEST).read_bytes(), "")
    part.status, part.machine = "running", "elsewhere"
    later = m.decode_rank((second / "rank-00003" / MANIFEST).read_bytes(), "")
    later.machine = "elsewhere"
    write_atomic(second / "rank-00003" / MANIFEST, m.encode(later))
    (second / MANIFEST).unlink()
    write_atomic(early / "rank-00003" / MANIFEST, m.encode(part))
    done = gathered(early, first, second, "-o", "run")
    assert done.returncode == 0, done.stderr
    run = Run.open(Path("run"))
    assert [p.status for p in run.manifest.ranks] == ["complete"] * 4
    twice = [f.message for f in run.manifest.findings if f.code == "run.gathered_twice"]
    assert twice == [
        f"rank {rank} is in {early} and in {second}: the same recording, taken once"
        for rank in (2, 3)
    ]


def test_a_run_that_is_being_recorded_is_refused(tmp_path):
    first, second = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    me = identity_of(os.getpid())
    part = m.decode_rank((second / "rank-00002" / MANIFEST).read_bytes(), "")
    part.status, part.pid = "running", me.pid
    part.process_started, part.machine = me.process_started, me.machine
    write_atomic(second / "rank-00002" / MANIFEST, m.encode(part))
    (second / MANIFEST).unlink()
    done = gathered(first, second, "-o", "run")
    assert done.returncode == 1
    assert done.stderr == (
        f"chopper: {second}: process {os.getpid()} is recording into it (rank-00002); gather when "
        "it has ended\n"
    )


def test_a_full_disk_leaves_nothing(tmp_path, small_disk):
    first, second = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    (second / "rank-00003" / "trace.json.gz").write_bytes(bytes(2 << 20))
    for force in ((), ("--force",)):
        done = gathered(first, second, "-o", small_disk / "run", *force)
        assert done.returncode == 1
        trace = "rank-00003/trace.json.gz"
        assert done.stderr == (
            f"chopper: {second}/{trace}: cannot be copied to {small_disk}/run/{trace} (No space "
            "left on device)\n"
        )
        assert [*small_disk.iterdir()] == []
