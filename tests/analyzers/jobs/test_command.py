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
from tests.analyzers.jobs.make import MS, Row, recorded
from tests.command import run

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
    told = run("whatif", job, "--mend", "rank=6", "--mend", "sequence-lengths", *shape)
    assert told.code == 0, told.err
    for word in ("Rank 6", "micro-batch as long", "interleaved", "2 virtual stages", "16 micro"):
        assert word in told.out
    assert "Slowdown S = " in told.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mend", "stage=9"), "no such stage"),
        (("--mend", "colour=1"), "expected one of stage=N"),
        (("--schedule", "dualpipes"), "did you mean dualpipe"),
        (("--mend", "all", "--clock", "1GHz"), "combine with each other"),
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
    mended = chopper.whatif(job, mend="rank=6")
    assert mended.predicted_step_ns < mended.observed_step_ns
    assert mended.to_dict()["causes"] == []
    doubled = chopper.whatif(job, micro_batches=2 * M)
    assert doubled.predicted_step_ns > doubled.observed_step_ns
    with pytest.raises(UsageError, match="no schedule is called"):
        chopper.whatif(job, schedule="none")
