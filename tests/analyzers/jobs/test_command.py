"""Jobs from files: spans of another tool, kernels with a pipeline's annotations, and neither."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chopper
from chopper.analyzers.jobs.schedules import BACKWARD, FORWARD, SCHEDULES, Action
from chopper.errors import UsageError
from tests.analyzers.jobs import make
from tests.analyzers.jobs.make import MS, Row, recorded
from tests.command import run
from tests.kineto_writer import Trace

P, M = 4, 8
F, B = 10 * MS, 20 * MS
TAIL = 3 * 5 * MS


def slow(step: int, replica: int, rank: int, action: Action) -> int:
    return (F if action.kind == FORWARD else B) * (2 if (replica, rank) == (1, 2) else 1)


def write(rows: Sequence[Row], path: Path) -> Path:
    """Write operations as a table of spans, as workers' timers call them."""
    names = {FORWARD: "forward-compute", BACKWARD: "backward-compute", "other": "optimizer"}
    nth = {True: "grads-reduce-scatter", False: "optimizer-clip-main-grad"}
    begun = min(row.start_ns for row in rows)
    table = {
        "rank": [row.replica * P + row.rank_in_pipeline for row in rows],
        "step": [row.step for row in rows],
        "stage": [row.rank_in_pipeline for row in rows],
        "dp_rank": [row.replica for row in rows],
        "optype": [
            nth[row.instance % 100 != 99]
            if row.role == "collective"
            else names.get(row.role, row.role.replace("_", "-"))
            for row in rows
        ],
        "mb_id": [row.micro_batch for row in rows],
        "start_ns": [row.start_ns - begun for row in rows],
        "duration_ns": [row.end_ns - row.start_ns for row in rows],
    }
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = recorded(SCHEDULES["1f1b"](P, M, 1), slow, replicas=2)
    return write(rows, tmp_path_factory.mktemp("job") / "job.parquet")


def test_spans_give_the_slowdown_by_hand(job: Path) -> None:
    told = run("whatif", job, "--json")
    assert told.code == 0, told.err
    document = json.loads(told.out)
    ideal = (M + P - 1) * (F + B) * 9 / 8 + TAIL
    # As in test_model: what paces the step is stage 2 of replica 1.
    expected = (2 * M * (F + B) + 2 * F + 2 * B + (B - F) + TAIL) / ideal
    assert document["slowdown_ratio"] == pytest.approx(expected, rel=1e-6)
    assert document["worst_workers_share_ratio"] > 1
    assert document["model"] == "operations"
    assert document["job"]["workers"][0]["name"] == "rank 6"
    assert document["job"]["pipeline"]["schedule"] == "1f1b"
    assert document["job"]["replay_error_ratio"] < 1e-6


def test_each_change_is_told_in_words(job: Path) -> None:
    shape = ("--schedule", "interleaved", "--virtual-stages", "2", "--micro-batches", "x2")
    told = run("whatif", job, "--fix", "rank=6", "--fix", "sequence-lengths", *shape)
    assert told.code == 0, told.err
    for word in ("Rank 6", "micro-batch as long", "interleaved", "2 virtual stages", "16 micro"):
        assert word in told.out
    assert "Slowdown S = " in told.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fix", "stage=9"), "no such stage"),
        (("--fix", "colour=1"), "or one of stage=N"),
        (("--schedule", "dualpipes"), "did you mean dualpipe"),
        (("--fix", "all", "--clock", "1GHz"), "combine with each other"),
        (("--fix", "straggler", "--fix", "gc"), "--fix straggler of a pipeline"),
        (("--virtual-stages", "0"), "expected 1 or more"),
        (("--micro-batches", "x0.3"), "no whole number"),
        (("--schedule", "dualpipe", "--micro-batches", "6"), "at least twice as many"),
    ],
)
def test_what_cannot_be_changed_is_one_line(
    job: Path, arguments: tuple[str, ...], said: str
) -> None:
    told = run("whatif", job, *arguments)
    assert told.code == 2
    assert said in told.line


def test_python_takes_the_same(job: Path) -> None:
    fixed = chopper.whatif(job, fix="rank=6")
    assert fixed.predicted_step_ns < fixed.observed_step_ns
    assert fixed.to_dict()["causes"] == []
    doubled = chopper.whatif(job, micro_batches=2 * M)
    assert doubled.predicted_step_ns > doubled.observed_step_ns
    with pytest.raises(UsageError, match="no schedule is called"):
        chopper.whatif(job, schedule="none")


def kernels(name: str, v: int, folder: Path) -> Path:
    """Write the kernels of two pipeline ranks with the annotations of torch's schedules."""
    order = SCHEDULES[name](2, 4, v)
    letter = {FORWARD: "F", BACKWARD: "B"}

    def lasts(rank: int, action: Action) -> int:
        return (F if action.kind == FORWARD else B) // v * (2 if rank == 1 else 1)

    times = make.run(order, lasts)
    step_ns = max(end for _, end in times.values()) + 5 * MS
    for rank, actions in enumerate(order):
        trace = Trace(rank=rank, world=2)
        for step in range(3):
            begun = step * step_ns + MS
            trace.step(step, begun - MS // 2, step_ns - MS // 2)
            for action in actions:
                start, end = (begun + time for time in times[action])
                label = f"PP:{action.stage}{letter[action.kind]}{action.micro_batch}"
                trace.annotation(label, start - 20_000, 15_000)
                # An action is several kernels, with gaps between them.
                half = (end - start) // 2
                for at, length in ((start, half - 9_000), (start + half, half)):
                    trace.launch(
                        "gemm", start - 18_000 + (at > start) * 5_000, 3_000,
                        kernel_at=at, kernel_for=length,
                    )  # fmt: skip
            trace.launch(
                "adam", begun + step_ns - 4 * MS, 3_000,
                kernel_at=begun + step_ns - 3 * MS, kernel_for=MS,
            )  # fmt: skip
        (folder / f"rank{rank}.json").write_bytes(trace.encode())
    return folder


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2)])
def test_kernels_with_a_pipelines_annotations_are_the_same_job(
    name: str, v: int, tmp_path: Path
) -> None:
    found = chopper.whatif(kernels(name, v, tmp_path)).job
    assert found is not None
    assert found.bubble is not None
    assert (found.bubble.schedule, found.bubble.virtual_stages) == (name, v)
    assert found.replay_error_ratio < 1e-6
    assert found.stages[0].name == "stage 1"
    # Rank 1 computes twice as long: F + B = 60 ms of 90 ms, for each of four micro-batches.
    assert found.recorded_step_ns == pytest.approx(
        found.bubble.recorded_ns + 4 * (F + B) * 3 / 2 + 5 * MS, rel=0.05
    )


def test_ranks_without_a_pipeline_are_compared_step_by_step(tmp_path: Path) -> None:
    for rank in range(4):
        trace = Trace(rank=rank, world=4)
        for step in range(3):
            begun, own = step * 100 * MS, (60 if rank == 3 else 40) * MS
            trace.step(step, begun, 100 * MS)
            op = trace.op("aten::mm", begun + MS, MS)
            trace.launch("gemm", begun + MS, 3_000, kernel_at=begun + 2 * MS, kernel_for=own, op=op)
            group = {
                "Collective name": "allreduce", "Process Group Name": "0",
                "Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4, "dtype": "Float",
                "In msg nelems": 1024, "Out msg nelems": 1024, "Seq": step,
            }  # fmt: skip
            trace.launch(
                "ncclDevKernel_AllReduce", begun + 2 * MS, 3_000,
                kernel_at=begun + 2 * MS + own, kernel_for=94 * MS - own, stream=20, args=group,
            )  # fmt: skip
        (tmp_path / f"rank{rank}.json").write_bytes(trace.encode())
    found = chopper.whatif(tmp_path)
    assert found.job is not None, found.job_reason
    assert found.model == "launches"
    assert found.job.bubble is None
    assert found.job.worst_workers == [3]
    # The slowest rank's 60 ms of work of a mean of 45, and then the same communication.
    rest = 100 - 60
    assert found.job.slowdown_ratio == pytest.approx((60 + rest) / (45 + rest), rel=0.02)


def test_one_rank_is_no_job(tmp_path: Path) -> None:
    trace = Trace(rank=0, world=1)
    trace.step(0, 0, 10 * MS)
    trace.launch("gemm", MS, 3_000, kernel_at=2 * MS, kernel_for=MS)
    (tmp_path / "rank0.json").write_bytes(trace.encode())
    found = chopper.whatif(tmp_path)
    assert found.job is None
    assert "one rank" in (found.job_reason or "")
    with pytest.raises(UsageError, match="cannot be modelled: it has one rank"):
        chopper.whatif(tmp_path, fix="all")


def test_the_bubble_is_no_straggler_where_micro_batches_cannot_be_told_apart(
    tmp_path: Path,
) -> None:
    kernels("1f1b", 1, tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_text(file.read_text().replace('"PP:', '"step '))
    with pytest.raises(UsageError, match="tell its micro-batches apart"):
        chopper.whatif(chopper.load(tmp_path, layout="pp=2"), fix="straggler")
