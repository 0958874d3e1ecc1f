"""An import that was killed goes on where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_input.make import of_rank
from tests.command import Outcome, run

PROGRAM = """
import os, signal, sys
from chopper import cli
from chopper.ingest import recorded

log, killed_at, *arguments = sys.argv[1:]
read_traces = recorded.read_traces

def read(files, columns=None):
    with open(log, "a+") as names:
        names.seek(0)
        if len(names.readlines()) == int(killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        names.write(files[0].name + os.linesep)
    return read_traces(files, columns)

recorded.read_traces = read
sys.argv = ["chopper", *arguments]
cli.main()
"""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(4):
        (folder / f"rank{rank}.json").write_bytes(of_rank(rank, 4))
    return folder


def imported(traces: Path, log: Path, *more: Path, killed_at: int = -1) -> Outcome:
    """Import, in a process that says which files it read, and may be killed before one of them."""
    program = [sys.executable, "-c", PROGRAM, str(log), str(killed_at)]
    ended = subprocess.run(
        [
            *program,
            "import",
            str(traces),
            *map(str, more),
            "-o",
            str(traces.parent / "run"),
            "--workers",
            "1",
        ],
        capture_output=True,
        text=True,
    )
    return Outcome(ended.returncode, ended.stdout, ended.stderr)


def test_files_that_a_killed_import_read_are_not_read_again(traces: Path, tmp_path: Path) -> None:
    assert imported(traces, tmp_path / "first", killed_at=2).code == -9
    assert not (tmp_path / "run").exists()
    changed = traces / "rank1.json"
    os.utime(changed, ns=(0, changed.stat().st_mtime_ns + 1))
    done = imported(traces, tmp_path / "again")
    assert done.code == 0, done.err
    assert (tmp_path / "first").read_text().split() == ["rank0.json", "rank1.json"]
    assert (tmp_path / "again").read_text().split() == ["rank1.json", "rank2.json", "rank3.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "first", "run", "traces"]
    of_run, of_traces = (
        json.loads(run("analyze", source, "--json").out) for source in (tmp_path / "run", traces)
    )
    assert of_run["causes"] == of_traces["causes"]


def test_what_was_read_goes_with_an_import_that_fails(traces: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.json"
    text.write_text("no trace")
    done = imported(traces, tmp_path / "names", text)
    assert done.code == 1
    assert len((tmp_path / "names").read_text().split()) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["names", "text.json", "traces"]


def test_the_manifest_names_the_engine_and_why(traces: Path, tmp_path: Path) -> None:
    engines = {}
    for workers in ((), ("--workers", "2")):
        target = tmp_path / f"run{len(workers)}"
        done = run("import", traces, "-o", target, *workers)
        assert done.code == 0, done.err
        engine = json.loads((target / "manifest.json").read_bytes())["engine"]
        engines[engine["name"]] = engine["workers"], engine["reason"]
    assert engines.keys() == {"serial", "processes"}
    assert engines["processes"] == (2, "--workers 2")
    assert engines["serial"][1].startswith("4 traces, about ")
    first, second = (tables_of(tmp_path / name) for name in ("run0", "run2"))
    assert first == second


def tables_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.glob("rank-*/*")}
