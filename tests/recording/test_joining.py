from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.destination import new_output
from chopper.storage.files import write_atomic
from chopper.storage.layout import MANIFEST
from chopper.storage.parts import RunWriter
from chopper.storage.run import Run
from chopper.storage.streams import StreamWriter
from tests.waiting import PATIENCE_S

HOUR_NS = 3600 * 10**9


def node(path, ranks, *, world=4, start_ns=10**18, run_id="none", exit_code=0):
    """What `chopper record` leaves on one node: its ranks' parts, and a manifest of them."""
    for rank in ranks:
        writer = RunWriter(path, rank)
        part = writer.manifest
        part.world_size = world
        part.hostname = path.name
        part.start_ns, part.end_ns = start_ns, start_ns + 60 * 10**9
        part.status = "complete"
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
            }
        )
        steps.close()
    finalize(
        path, command=["torchrun", f"--node-rank={path.name}", "train.py"], exit_code=exit_code
    )
    return path


def joined(*args):
    """The command in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "chopper", "import", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_directories_of_nodes_become_one_run(tmp_path):
    first = node(tmp_path / "a", [0, 1])
    second = node(tmp_path / "b", [2, 3], exit_code=3)
    assert [f.code for f in Run.open(first).manifest.findings] == ["run.ranks_missing"]
    done = joined(second, first, "-o", "run")
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


def test_ranks_that_are_in_none_are_missing(tmp_path):
    done = joined(node(tmp_path / "a", [0]), node(tmp_path / "b", [2, 3]))
    assert done.returncode == 0, done.stderr
    run = Run.open(Path("runs/a-joined"))
    assert run.ranks == [0, 2, 3]
    (finding,) = run.manifest.findings
    assert finding.code == "run.ranks_missing"
    assert finding.count == 1


def test_a_node_that_was_killed_is_joined_from_its_parts(tmp_path):
    first, second = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    (second / MANIFEST).unlink()
    (second / "rank-00003" / MANIFEST).unlink()
    done = joined(first, second, "-o", "run")
    assert done.returncode == 0, done.stderr
    run = Run.open(Path("run"))
    assert run.ranks == [0, 1, 2, 3]
    assert run.table(3, "step").num_rows == 2
    assert "run.rank_died" in {f.code for f in run.manifest.findings}


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"ranks": [1, 2]}, "two of the runs hold rank 1: "),
        ({"ranks": [2, 3], "world": 8}, "the job's size differs ("),
        ({"ranks": [2, 3], "run_id": "other"}, "the launcher's run id differs ("),
        ({"ranks": [2, 3], "start_ns": 10**18 + 2 * HOUR_NS}, "b began 2.0 h after "),
    ],
)
def test_what_is_not_of_one_run_is_refused(tmp_path, second, why):
    first = node(tmp_path / "a", [0, 1])
    done = joined(first, node(tmp_path / "b", **second), "-o", "run")
    assert done.returncode == 1
    assert why in done.stderr
    assert not Path("run").exists()


def test_runs_are_joined_with_runs_only(tmp_path):
    first = node(tmp_path / "a", [0, 1])
    trace = tmp_path / "trace.json"
    trace.write_text("{}")
    done = joined(first, trace, "-o", "run")
    assert (done.returncode, "is not a run directory" in done.stderr) == (1, True)
    done = joined(first, first, "-o", "run")
    assert (done.returncode, "is a run directory already" in done.stderr) == (1, True)
    assert not Path("run").exists()


def test_a_damaged_run_is_named(tmp_path):
    first, second = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    newer = m.RunManifest(kind="recorded", name="b", schema_version=m.SCHEMA_VERSION + 1)
    write_atomic(second / MANIFEST, m.encode(newer))
    done = joined(first, second, "-o", "run")
    assert done.returncode == 1
    assert "written by a newer chopper" in done.stderr


def test_an_existing_run_is_replaced_only_when_told(tmp_path):
    nodes = node(tmp_path / "a", [0, 1]), node(tmp_path / "b", [2, 3])
    assert joined(*nodes, "-o", "run").returncode == 0
    assert joined(*nodes, "-o", "run").returncode == 1
    assert joined(*nodes, "-o", "run", "--force").returncode == 0
    table = Run.open(Path("run")).table(2, "step")
    assert isinstance(table, pyarrow.Table)
    assert table.num_rows == 2


def test_an_import_does_not_write_where_another_command_does(tmp_path):
    node(tmp_path / "a", [0, 1])
    node(tmp_path / "b", [2, 3])
    arguments = ["import", str(tmp_path / "a"), str(tmp_path / "b"), "-o", "run"]
    with new_output(Path("run")):
        refused = CliRunner().invoke(cli, arguments)
        forced = CliRunner().invoke(cli, [*arguments, "--force"])
        assert list(Path("run").iterdir()) == []
    for done in (refused, forced):
        assert done.exit_code == 1
        assert f"run: process {os.getpid()} is writing a run into it" in str(done.exception)
    assert CliRunner().invoke(cli, arguments).exit_code == 0
