"""Pipeline jobs with known waits, read as anybody's timers are, attributed and compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from chopper import pipeline
from tests.known_causes.pipelines import Job, waits, write

RECOVERED, LEAKED = 0.98, 0.01
BUBBLE = ("warm_up", "steady", "cool_down")


def attributed(job: Job, directory: Path) -> Counter[str]:
    """Return the waits of a job by cause, in ns over all ranks: the end of each cause's id."""
    run = pipeline.attribute(write(job, directory / "job.csv"))
    assert sum(row.time_ns for row in run.leaves()) == run.observed_ns
    found: Counter[str] = Counter()
    for row in run.leaves():
        leaf = row.id.rpartition(".")[2]
        if ".pipeline." in row.id or row.id == "communication.wait":
            found["bubble" if leaf in BUBBLE else leaf] += row.time_ns
        elif row.id.startswith("idle."):
            found["idle"] += row.time_ns
    return found


def truth(job: Job, even: Job, cause: str) -> Counter[str]:
    """Return what the bubble is, and what ranks wait more than in the same job made even."""
    found: Counter[str] = Counter()
    alike = waits(even)
    for rank, waited_ns in waits(job).items():
        found["bubble"] += min(waited_ns, alike[rank])
        found[cause] += max(waited_ns - alike[rank], 0)
    return found


EVEN = Job()
FEW = Job(stages=2, replicas=1, micro_batches=4)
UNLIKE = Job(counts=(8, 5, 6))
LONGER_BATCH = 1 + 1 / EVEN.micro_batches
"""One of the micro-batches is twice as long: as much work, evenly divided."""
CASES = {
    "1f1b": (EVEN, EVEN, "wait"),
    "gpipe": (Job(schedule="gpipe"), Job(schedule="gpipe"), "wait"),
    "two stages": (FEW, FEW, "wait"),
    "long last stage": (EVEN.with_longer(1.4, stage=3), EVEN, "stage_imbalance"),
    "long first stage": (EVEN.with_longer(1.1, stage=0), EVEN, "stage_imbalance"),
    "long stage of two": (FEW.with_longer(1.5, stage=1), FEW, "stage_imbalance"),
    "long micro-batch": (
        EVEN.with_longer(2, batch=3),
        EVEN.with_longer(LONGER_BATCH),
        "micro_batch_imbalance",
    ),
    "slow worker": (EVEN.with_longer(1.3, replica=1, stage=1), EVEN, "wait"),
    "micro-batches not numbered": (
        replace(EVEN, numbered=False).with_longer(1.4, stage=3),
        EVEN,
        "stage_imbalance",
    ),
    "other micro-batches in each step": (UNLIKE, UNLIKE, "wait"),
    "slow worker in one step": (EVEN.with_longer(1.5, replica=0, stage=2, step=1), EVEN, "wait"),
}


@pytest.mark.parametrize("name", CASES)
def test_waits_go_to_the_cause_that_was_injected(name: str, tmp_path: Path) -> None:
    job, even, cause = CASES[name]
    found, expected = attributed(job, tmp_path), truth(job, even, cause)
    injected_ns = expected[cause] or expected["bubble"]
    for one in ("bubble", cause):
        assert found[one] >= RECOVERED * expected[one], (one, found, expected)
    for one, time_ns in found.items():
        assert time_ns - expected[one] <= LEAKED * injected_ns, (one, found, expected)
