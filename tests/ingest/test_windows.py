"""Traces of several windows of one process are one run with more steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from tests.command import run
from tests.kineto_writer import Trace
from tests.waiting import PATIENCE_S

PROGRAM = """
import sys
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

torch.set_num_threads(1)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plain, handler = (Path(name) for name in sys.argv[1:])
plain.mkdir()
for write in (
    tensorboard_trace_handler(str(handler)),
    lambda p: p.export_chrome_trace(str(plain / f"{p.step_num}.json")),
):
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=2, warmup=1, active=2, repeat=3),
        on_trace_ready=write,
        record_shapes=True,
    ) as profiler:
        for _ in range(15):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
"""


def test_the_windows_of_a_schedule_are_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "plain"), str(tmp_path / "handler")]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    for name in ("handler", "plain"):
        files = sorted((tmp_path / name).iterdir())
        assert len(files) == 3
        # Whole: on a busy machine a slow step may be a kind of its own.
        together = pipeline.attribute(tmp_path / name).all_steps
        assert [r.rank for r in together.ranks] == [0]
        assert together.windows["number"].to_pylist() == [3, 4, 8, 9, 13, 14]
        # Each window as it is attributed alone: nothing between them counts.
        alone = [pipeline.attribute(file).all_steps for file in files]
        assert together.observed_ns == sum(one.observed_ns for one in alone)
        assert sum(r.time_ns for r in together.leaves()) == together.observed_ns
        assert {f.code for f in together.findings} >= {"trace.several_windows"}
        assert "run.no_common_time" not in {f.code for f in together.findings}
        for level in ("step", "op", "phase"):
            assert sum(g.time_ns for g in together.by(level)) == together.observed_ns
        imported = tmp_path / f"{name}-run"
        assert run("import", tmp_path / name, "-o", imported).code == 0
        kept = pipeline.attribute(imported).all_steps
        assert [r.time_ns for r in kept.causes()] == [r.time_ns for r in together.causes()]
        assert run("report", imported, "-o", tmp_path / f"{name}.html").code == 0


def window(path: Path, first: int, after_ns: int, *, rank: int | None = 0, pid: int = 5) -> Path:
    """Three steps of 40 µs from ``after_ns`` on, their ids counted from 1."""
    trace = Trace(rank=rank, world=None if rank is None else 2, pid=pid, tid=pid)
    trace.header["host_name"] = "box"
    for i in range(3):
        at = after_ns + 40_000 * i
        trace.step(first + i, at, 40_000)
        op = trace.op("aten::mm", at + 1_000, 1_000, shapes=[[64, 32], [32, 64]])
        trace.launch("gemm", at + 1_200, 200, kernel_at=at + 2_000, kernel_for=4_000, op=op)
    path.write_bytes(trace.encode())
    return path


def test_windows_of_two_ranks_keep_their_launches_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        for i, first in enumerate((2, 10)):
            window(tmp_path / f"{rank}-{i}.json", first, i * 10**9, rank=rank, pid=5 + rank)
    found = pipeline.attribute(tmp_path)
    assert [r.rank for r in found.ranks] == [0, 1]
    assert [r.steps for r in found.ranks] == [6, 6]
    alone = pipeline.attribute(tmp_path / "0-0.json")
    assert found.observed_ns == 4 * alone.observed_ns
    assert {r.id: r.time_ns for r in found.causes()} == {
        r.id: 4 * r.time_ns for r in alone.causes()
    }


def test_windows_that_count_their_steps_anew_stay_apart(tmp_path: Path) -> None:
    window(tmp_path / "a.json", 0, 0)
    window(tmp_path / "b.json", 0, 10**9)
    found = pipeline.attribute(tmp_path)
    assert found.windows["number"].to_pylist() == [0, 1, 2, 4, 5, 6]


def test_the_same_window_twice_is_refused_in_one_line(tmp_path: Path) -> None:
    window(tmp_path / "a.json", 0, 0)
    window(tmp_path / "b.json", 1, 60_000)
    shown = run("analyze", tmp_path)
    assert shown.code == 1
    assert "of one process (pid 5) and overlapping in time" in shown.line


def nameless(path: Path, first: int, after_ns: int, **of: Any) -> Path:
    """A window that names neither host nor rank, as PyTorch wrote it before 2.7."""
    document = json.loads(window(path, first, after_ns, rank=None, **of).read_text())
    del document["host_name"]
    path.write_text(json.dumps(document))
    return path


def test_windows_without_host_and_rank_are_joined_by_process_id(tmp_path: Path) -> None:
    for i, name in enumerate(("trace_5.json", "trace_10.json", "trace_15.json")):
        nameless(tmp_path / name, 3 + 5 * i, i * 10**9)
    found = pipeline.attribute(tmp_path)
    assert [r.steps for r in found.ranks] == [9]
    assert found.windows["number"].to_pylist() == [3, 4, 5, 8, 9, 10, 13, 14, 15]
    (said,) = [f for f in found.findings if f.code == "run.windows_by_pid"]
    assert "3 traces are taken for windows of one process (pid 5)" in said.message


@pytest.mark.parametrize(
    ("names", "after_ns"),
    [
        (("a.json", "b.json"), 50_000),  # at the same time: ranks in containers, each process 1
        (("rank0.json", "rank1.json"), 10**9),  # the files' names say which ranks they are
    ],
)
def test_process_ids_of_several_ranks_may_be_alike(
    tmp_path: Path, names: tuple[str, str], after_ns: int
) -> None:
    for i, name in enumerate(names):
        nameless(tmp_path / name, 0, i * after_ns, pid=1)
    assert len(pipeline.attribute(tmp_path).ranks) == 2


def test_a_copy_of_a_trace_is_no_other_rank(tmp_path: Path) -> None:
    nameless(tmp_path / "a.json", 0, 0)
    nameless(tmp_path / "copy of a.json", 0, 0)
    shown = run("analyze", tmp_path)
    assert shown.code == 1
    assert "of one process (pid 5) and overlapping in time: the same trace twice" in shown.line


def test_windows_hours_apart_are_of_one_run_only_if_the_process_is_known(tmp_path: Path) -> None:
    later_ns = 5 * 3600 * 10**9
    for i in range(2):
        window(tmp_path / f"{i}.json", 3 * i, i * later_ns)
    assert [r.steps for r in pipeline.attribute(tmp_path).ranks] == [6]
    for i in range(2):
        nameless(tmp_path / f"{i}.json", 3 * i, i * later_ns)
    shown = run("analyze", tmp_path)
    assert shown.code == 1
    assert "1.json starts 5.0 h after " in shown.line


def test_each_window_counts_from_its_own_base(tmp_path: Path) -> None:
    window(tmp_path / "a.json", 0, 0)
    window(tmp_path / "b.json", 3, 10**9)
    same = pipeline.attribute(tmp_path)
    document = json.loads((tmp_path / "b.json").read_text())
    document["baseTimeNanoseconds"] -= 7 * 10**9
    for event in document["traceEvents"]:
        event["ts"] += 7 * 10**6
    (tmp_path / "b.json").write_text(json.dumps(document))
    moved = pipeline.attribute(tmp_path)
    assert moved.windows["start_ns"].to_pylist() == same.windows["start_ns"].to_pylist()
    assert {r.id: r.time_ns for r in moved.causes()} == {r.id: r.time_ns for r in same.causes()}


def test_windows_of_different_bases_are_refused_in_one_line(tmp_path: Path) -> None:
    window(tmp_path / "a.json", 0, 0)
    document = json.loads(window(tmp_path / "b.json", 3, 10**9).read_text())
    document["baseTimeNanoseconds"] = 10**15
    (tmp_path / "b.json").write_text(json.dumps(document))
    shown = run("analyze", tmp_path)
    assert shown.code == 1
    assert "days apart: their times count from different bases" in shown.line


def test_other_processes_stay_ranks(tmp_path: Path) -> None:
    window(tmp_path / "a.json", 0, 0, rank=None, pid=5)
    window(tmp_path / "b.json", 0, 50_000, rank=None, pid=6)
    assert len(pipeline.attribute(tmp_path).ranks) == 2
    assert json.loads((tmp_path / "a.json").read_text())["host_name"] == "box"
