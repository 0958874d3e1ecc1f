"""Several troubles at once, some of them taken away: the model's truth, and more is never less."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.replay import Replay
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Dose, Plan
from tests.known_causes.model.writer import write

HOST = "idle.preparation."
KNOBS = {
    "data": (HOST + "data", 2e7),
    "python": (HOST + "python", 6e6),
    "collection": (HOST + "gc", 5e6),
    "allocator": (HOST + "allocator", 5e6),
    "dispatch": (HOST + "dispatch", 2e5),
    "call": ("idle.call", 2e5),
    "copy": ("copy.host_to_device", 4e6),
    "fill": ("copy.memset", 3e6),
    "slow": ("communication.wait", 1.0),
}
"""Of the model: the cause that each makes, and how much at most."""


def attributed(plan: Plan, folder: Path) -> Attribution:
    write(simulate(plan), folder)
    return pipeline.attribute(folder)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_of_several_troubles_is_the_models_truth(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    turned: dict[str, Any] = {
        knob: Dose(
            KNOBS[knob][1] * rng.uniform(0.1, 1),
            ranks=(rng.randrange(2),) if knob == "slow" else None,
            every=rng.choice((1, 2)),
        )
        for knob in rng.sample(sorted(KNOBS), 3)
    }
    plan = Plan(layers=1, seed=seed, **turned)
    gone = rng.sample(sorted(turned), 2)
    causes = [KNOBS[knob][0] for knob in gone]
    before = attributed(plan, tmp_path / "before")
    after = attributed(replace(plan, **(turned | dict.fromkeys(gone, Dose()))), tmp_path / "after")
    found = chopper.whatif(before, fix=causes)
    steps = after.step_time_ns()
    assert found.predicted_step_ns == pytest.approx(sum(steps) / len(steps), rel=0.02)
    one = chopper.whatif(before, fix=causes[0]).predicted_step_ns
    assert found.observed_step_ns >= one >= found.predicted_step_ns
    left = found.next_bottleneck
    assert left is not None
    assert left.id not in causes
    assert Replay(before).error_ratio <= 0.001
