"""Patterns are seen where they cost time, nowhere else, and what mending gives back is right."""

from __future__ import annotations

from pathlib import Path

import pytest

import chopper
from chopper.analyzers import actions, detectors
from chopper.analyzers.events.device import events_of
from chopper.analyzers.replay.replay import Replay
from chopper.reports import actions as report
from chopper.reports.page import Paragraph
from chopper.validation.model.job import simulate
from chopper.validation.model.plan import Clock, Dose, Plan
from chopper.validation.model.writer import write

MS = 1_000_000
POWER_CAP = 4


def attributed(folder: Path, plan: Plan) -> chopper.Attribution:
    write(simulate(plan), folder)
    return chopper.attribute(folder)


def found(run: chopper.Attribution) -> list[actions.Action]:
    return actions.actions(run, Replay(run))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("data_loading", Plan(data=Dose(5 * MS))),
        ("allocator_retries", Plan(allocator=Dose(4 * MS))),
        ("launch_bound", Plan(dispatch=Dose(400_000))),
        ("late_rank", Plan(slow=Dose(0.5, ranks=(1,)))),
        (
            "blocking_reads",
            Plan(ahead=True, synchronization=Dose(400_000), synchronization_count=8),
        ),
        ("reduced_clock", Plan(clocks=(Clock(0.7, POWER_CAP),))),
    ],
)
def test_an_action_gives_back_what_the_same_job_without_its_pattern_takes_less(
    tmp_path: Path, name: str, plan: Plan
) -> None:
    run = attributed(tmp_path / "with", plan)
    without = attributed(tmp_path / "without", Plan(ahead=plan.ahead))
    first = found(run)[0]
    assert first.detector == name
    times = [sum(r.step_time_ns()) / len(r.step_time_ns()) for r in (run, without)]
    assert first.saved_ns == pytest.approx(times[0] - times[1], rel=0.03)
    assert first.saved_ratio == pytest.approx(first.saved_ns / times[0])
    assert first.ci95_ns is not None
    assert first.ci95_ns[0] < first.saved_ns < first.ci95_ns[1]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(ahead=True),
        # The host is ahead of the device: what it waits for, or takes longer for, is hidden.
        Plan(ahead=True, data=Dose(5 * MS)),
        Plan(ahead=True, allocator=Dose(2 * MS)),
        Plan(ahead=True, dispatch=Dose(200_000)),
    ],
)
def test_nothing_is_said_where_mending_gives_nothing_back(tmp_path: Path, plan: Plan) -> None:
    run = attributed(tmp_path / "run", plan)
    assert found(run) == []
    [block] = report.section(*report.tell(run, Replay(run), "step")).blocks
    assert isinstance(block, Paragraph)
    assert "No known pattern" in block.text


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("kineto/v100-resnet50-dataloader0-2021.json.gz", "data_loading"),
        ("hta/v100-ddp-rank1of2-memory-events.json.gz", "optimizer_loops"),
        ("hta/a100-recsys-rank3of8.json.gz", "blocking_reads"),
        ("tracelens/mi300x-resnet18-train-no-distributedinfo.json.gz", "allocator_retries"),
        ("hta/a100-ddp-rank0of2-nccl-metadata.json.gz", "launch_bound"),
        ("param/v100-dlrm-8ranks", "late_rank"),
    ],
)
def test_actions_of_real_traces(traces_dir: Path, trace: str, name: str) -> None:
    run = chopper.attribute(traces_dir / trace)
    ranked = found(run)
    assert name in [a.detector for a in ranked]
    assert [a.saved_ns for a in ranked] == sorted((a.saved_ns for a in ranked), reverse=True)
    assert all(0.01 < a.saved_ratio < 1 for a in ranked)


@pytest.mark.parametrize(
    ("trace", "name", "evidence"),
    [
        (
            "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz",
            "unfused_attention",
            {"calls": 3, "dims": "16 × 8 × 128 × 128"},
        ),
        (
            "tracelens/mi300x-xdit-flux1-inference-python-stacks-large.json.gz",
            "unfused_attention",
            {"dims": "1 × 64 × 512 × 512"},
        ),
        ("hta/a100-alexnet-cuda-sync.json.gz", "pageable_copies", {"copies": 16, "pageable": 16}),
        (
            "hta/a100-recsys-rank3of8.json.gz",
            "reduced_precision",
            {"now": "fp32", "other": "tf32", "factor": 8.0},
        ),
        ("hta/a100-recsys-rank3of8.json.gz", "misaligned_products", {"kernels": 26}),
    ],
)
def test_patterns_that_cost_nothing_in_that_trace_are_seen(
    traces_dir: Path, trace: str, name: str, evidence: dict[str, object]
) -> None:
    run = chopper.attribute(traces_dir / trace)
    seen = [s for s in actions.sightings(run, events_of(run)) if s.detector == name]
    assert any(evidence.items() <= s.evidence.items() for s in seen)


@pytest.mark.parametrize(
    "trace",
    [
        "param/rtx2080ti-linear-train.json.gz",  # a softmax after a linear layer
        "tracelens/b300-moe-unit.json.gz",  # a softmax that routes tokens
        "tracelens/h100-bert-small-inference.json.gz",  # attention is fused
    ],
)
def test_other_softmaxes_are_no_attention(traces_dir: Path, trace: str) -> None:
    run = chopper.attribute(traces_dir / trace)
    seen = [s.detector for s in actions.sightings(run, events_of(run))]
    assert "unfused_attention" not in seen


def test_the_line_of_the_program_is_named(traces_dir: Path) -> None:
    run = chopper.attribute(
        traces_dir / "tracelens/mi300x-resnet18-train-no-distributedinfo.json.gz"
    )
    first = found(run)[0]
    assert first.where.line == "torchvision/models/resnet.py(89): forward"


def test_every_detector_declares_itself() -> None:
    names = actions.names()
    assert len(names) >= 10
    for name in names:
        declared = actions.detector(name)
        assert isinstance(declared, detectors.Detector)
        assert declared.view in chopper.views.VIEWS
        assert declared.condition.endswith(".")
        assert declared.remedy.endswith((".", "}"))
