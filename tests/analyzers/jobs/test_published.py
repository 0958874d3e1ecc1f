"""Two jobs with a published what-if analysis (CHOPPER_MEASURED), from file to numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper.analyzers.replay.answers import WhatIf
from tests.analyzers.jobs.make import measured
from tests.command import run

MEASURED = measured()
pytestmark = pytest.mark.skipif(MEASURED is None, reason="CHOPPER_MEASURED: no measured data")
TOLERANCE = 0.005


def folder() -> Path:
    assert MEASURED is not None
    return MEASURED / "straggler-analysis"


@cache
def found(job: str) -> WhatIf:
    return chopper.whatif(folder() / f"trace-{job}.parquet")


def published(name: str) -> Any:
    return json.loads((folder() / f"{name}.json").read_text())


def best(values: dict[str, float]) -> str:
    return max(values, key=lambda name: values[name])


@pytest.mark.parametrize("job", ["ST", "AR"])
def test_the_slowdown_and_its_shares_are_the_published_ones(job: str) -> None:
    document = found(job).to_dict()
    result = published(f"result-{job}")
    assert document["slowdown_ratio"] == pytest.approx(result["blocking_slowdown"], rel=TOLERANCE)
    worst = published(f"mw-{job}")["Mw"]
    assert document["worst_workers_share_ratio"] == pytest.approx(worst, abs=TOLERANCE)
    last = published(f"ms-{job}")["Ms"]
    assert document["last_stage_share_ratio"] == pytest.approx(last, rel=TOLERANCE, abs=1e-4)


@pytest.mark.parametrize("job", ["ST", "AR"])
def test_the_unchanged_replay_is_the_recorded_step(job: str) -> None:
    slowdown = found(job).job
    assert slowdown is not None
    steps = [*published(f"result-{job}")["step_t_base"].values()]
    recorded_ns = 1e9 * sum(steps) / len(steps)
    assert slowdown.recorded_step_ns == pytest.approx(recorded_ns, rel=1e-4)
    assert slowdown.replay_error_ratio < 0.003
    assert slowdown.steps_count == len(steps)


@pytest.mark.parametrize("job", ["ST", "AR"])
def test_each_decomposition_is_the_published_one(job: str) -> None:
    slowdown = found(job).job
    assert slowdown is not None
    result = published(f"result-{job}")
    parts = {
        "optype": {one.name: one.slowdown_ratio for one in slowdown.types},
        "stage": {one.name.removeprefix("stage "): one.slowdown_ratio for one in slowdown.stages},
        "dp_rank": {
            one.name.removeprefix("replica "): one.slowdown_ratio for one in slowdown.replicas
        },
    }
    renamed = {"forward-pp-comm": "forward-send/recv", "backward-pp-comm": "backward-send/recv"}
    for name, ours in parts.items():
        theirs = {
            renamed.get(key, key.partition(",")[0]): value
            for key, value in result[f"blocking_decompose_by_{name}"].items()
        }
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
        assert best(ours) == best(theirs)


@pytest.mark.parametrize(("job", "worker"), [("AR", "rank 0"), ("ST", "rank 7")])
def test_the_worst_worker_leads(job: str, worker: str) -> None:
    slowdown = found(job).job
    assert slowdown is not None
    assert slowdown.workers[0].name == worker
    assert slowdown.bubble is not None
    assert slowdown.bubble.schedule == "1f1b"


def test_the_page_and_the_command_say_the_same() -> None:
    trace = folder() / "trace-ST.parquet"
    told = run("whatif", trace)
    assert told.code == 0, told.err
    assert f"S = {found('ST').to_dict()['slowdown_ratio']:.3f}" in told.out
    fixed = run("whatif", trace, "--fix", "stage=3", "--json")
    document = json.loads(fixed.out)
    assert document["schema"] == "chopper.whatif/3"
    assert document["predicted_step_ns"] < document["observed_step_ns"]
    assert document["slowdown_ratio"] == found("ST").to_dict()["slowdown_ratio"]


def test_a_straggler_is_fixed_without_the_bubble() -> None:
    fixed = chopper.whatif(folder() / "trace-ST.parquet", fix="straggler")
    assert fixed.job is not None
    assert fixed.saved_ratio == pytest.approx(1 - 1 / fixed.job.slowdown_ratio, rel=0.02)
