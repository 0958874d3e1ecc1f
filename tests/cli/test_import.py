"""``chopper import``: traces become a run that says the same as the traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chopper import pipeline, reports
from chopper.cli import cli
from chopper.errors import ChopperError, InputError, OutputError
from tests.kineto_writer import Trace, encode, merged, small_trace


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["import", *map(str, arguments)], catch_exceptions=False)


def said(source: Any) -> dict[str, Any]:
    found: dict[str, Any] = reports.document(pipeline.attribute(pipeline.read(source)))
    del found["run"]
    return found


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(3):
        trace = small_trace(rank=rank, world=4, pid=100 + rank, device=rank)
        (folder / f"rank{rank}.json.gz").write_bytes(trace.encode_gzip())
    return folder


@pytest.mark.parametrize("how", ["files", "glob", "directory"])
def test_a_run_says_what_its_traces_say(how: str, traces: Path, tmp_path: Path) -> None:
    named = {
        "files": sorted(map(str, traces.iterdir())),
        "glob": [str(traces / "rank*.json.gz")],
        "directory": [str(traces)],
    }[how]
    target = tmp_path / "run"
    made = run(*named, "-o", target)
    assert made.exit_code == 0
    assert made.stdout == f"{target}\n"
    # What takes over a second is announced; on a busy machine anything does.
    said_lines = [line for line in made.stderr.splitlines() if not line.startswith("chopper: ")]
    assert said_lines == [
        "warning: 1 of 4 ranks are missing (3): waiting for them cannot be separated from transfer",
        f"next: chopper analyze {target}",
    ]
    assert said(target) == said(named)
    for rank in range(3):
        folder = target / f"rank-0000{rank}"
        names = {p.name for p in folder.iterdir() if p.suffix != ".parquet"}
        assert names == {"manifest.json", "trace.json.gz"}
        raw = (traces / f"rank{rank}.json.gz").read_bytes()
        assert (folder / "trace.json.gz").read_bytes() == raw


def test_name_of_the_run(traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(traces).stdout == "runs/traces\n"
    single = tmp_path / "worker0.123.pt.trace.json.gz"
    single.write_bytes(small_trace().encode())
    assert run(single).stdout == "runs/worker0.123\n"
    assert pipeline.read("runs/worker0.123").manifest.name == "worker0.123"


def test_manifest_as_json(traces: Path, tmp_path: Path) -> None:
    made = run(traces, "-o", tmp_path / "run", "--json")
    manifest = json.loads(made.stdout)
    assert (manifest["kind"], manifest["name"]) == ("imported", "run")
    assert [r["rank"] for r in manifest["ranks"]] == [0, 1, 2]
    assert {r["status"] for r in manifest["ranks"]} == {"imported"}
    assert manifest == json.loads((tmp_path / "run" / "manifest.json").read_text())


def test_nothing_is_overwritten_without_force(traces: Path, tmp_path: Path) -> None:
    target = tmp_path / "run"
    run(traces, "-o", target)
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(OutputError, match="holds a run already; pass --force"):
        run(traces / "rank0.json.gz", "-o", target)
    assert (target / "manifest.json").read_bytes() == before
    assert run(traces / "rank0.json.gz", "-o", target, "--force").exit_code == 0
    replaced = pipeline.read(target)
    assert (replaced.ranks, replaced.manifest.name) == ([0], "run")
    assert sorted(p.name for p in target.iterdir()) == ["manifest.json", "rank-00000"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "traces"]


def test_a_failed_import_leaves_the_old_run_and_no_rest(traces: Path, tmp_path: Path) -> None:
    target = tmp_path / "run"
    run(traces, "-o", target)
    before = said(target)
    (traces / "rank0.json.gz").write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        run(traces / "rank0.json.gz", "-o", target, "--force")
    with pytest.raises(InputError, match="is empty"):
        run(traces / "rank0.json.gz", "-o", tmp_path / "new")
    assert said(target) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "traces"]
    # A directory that was there stays there, empty as it was.
    (tmp_path / "mine").mkdir()
    with pytest.raises(ChopperError):
        run(traces / "rank0.json.gz", "-o", tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_run_can_be_made_again_from_its_own_traces(traces: Path, tmp_path: Path) -> None:
    target = tmp_path / "run"
    run(traces / "rank1.json.gz", "-o", target)
    before = said(target)
    link = tmp_path / "latest"
    link.symlink_to(target)
    assert run(target / "rank-00001" / "trace.json.gz", "-o", link, "--force").exit_code == 0
    assert link.is_symlink()
    assert said(target) == before
    assert pipeline.read(target).manifest.name == "run"


def test_merged_ranks_and_further_devices_come_back_from_the_run(tmp_path: Path) -> None:
    documents = []
    for r in range(2):
        trace = Trace(pid=10 + r, tid=10 + r, device=2 * r)
        for i in range(6):
            for d in range(2):
                trace.launch("k", 1_000 * i, 50, kernel_at=1_000 * i + 100, kernel_for=300 + r,
                             device=2 * r + d)  # fmt: skip
        documents.append(trace.document())
    path = tmp_path / "all.json"
    path.write_bytes(encode(merged(*documents)))
    target = tmp_path / "run"
    assert run(path, "-o", target).exit_code == 0
    direct = said(path)
    assert [r["label"] for r in direct["ranks"]] == [
        "all.json process 10",
        "all.json process 11",
        "all.json process 10 device 1",
        "all.json process 11 device 3",
    ]
    assert said(target) == direct
    # The raw file is there once, however many ranks it holds.
    inodes = {p.stat().st_ino for p in target.glob("rank-*/trace.json")}
    assert len(inodes) == 1
