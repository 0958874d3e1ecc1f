"""Memory that grows from step to step is told from memory that is enlarged once, or varies."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.views.memory import Growth, memory_growth
from chopper.storage.manifest import Device, RankManifest, RunManifest
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests import command
from tests.attributing import verdict_of

MIB = 1 << 20
STEP_NS = 50_000_000
RNG = np.random.default_rng(7)
NOISE = RNG.normal(0, 3 * MIB, 200)


def recorded(resident: np.ndarray, *, available: int | None = None) -> list[Growth]:
    """Two hundred steps with a reading of the process at the end of each."""
    count = len(resident)
    time_ns = (np.arange(count) + 1) * STEP_NS + 1
    steps = [
        {
            "number": i,
            "start_ns": i * STEP_NS,
            "end_ns": (i + 1) * STEP_NS,
            "source": "marked",
            "traced": False,
        }
        for i in range(count)
    ]
    process = [
        {"time_ns": int(t), "span_ns": 0, "rank": 0, "pid": 1, "rss_bytes": int(v)}
        for t, v in zip(time_ns, resident, strict=True)
    ]
    tables = {(0, "step"): TABLES["step"].of_rows(steps)}
    tables[0, "process"] = TABLES["process"].of_rows(process)
    if available is not None:
        host = [{"time_ns": int(t), "span_ns": 0, "memory_available_bytes": available}
                for t in time_ns]  # fmt: skip
        tables[0, "host"] = TABLES["host"].of_rows(host)
    part = RankManifest(rank=0, devices=[Device(device_id=0, name="made")])
    run = Run(RunManifest(kind="recorded", name="made", ranks=[part]), None, tables)
    return memory_growth(pipeline.attribute(run))


def test_steady_growth_is_told_with_its_rate_and_what_is_left() -> None:
    (grown,) = recorded(500 * MIB + 4 * MIB * np.arange(200) + NOISE, available=400 * MIB)
    assert grown.what == "resident memory of the process"
    assert grown.bytes_per_step == pytest.approx(4 * MIB, rel=0.05)
    assert grown.steps_left == pytest.approx(100, abs=6)
    # Quarters of steps 41 to 199: their middles are 120 steps apart.
    assert grown.steps_count == pytest.approx(120, abs=3)
    assert grown.last_bytes - grown.first_bytes == pytest.approx(480 * MIB, rel=0.05)


@pytest.mark.parametrize(
    "resident",
    [
        500 * MIB + NOISE,
        500 * MIB + 4 * MIB * np.minimum(np.arange(200), 30) + NOISE,  # warm-up
        500 * MIB + 200 * MIB * (np.arange(200) >= 120) + NOISE,  # enlarged once
        500 * MIB + 100 * MIB * (np.arange(200) % 40 / 40) + NOISE,  # epochs
        500 * MIB - 2 * MIB * np.arange(200) + NOISE,
        500 * MIB + 0.01 * MIB * np.arange(200) + NOISE,  # 2 MiB in all
        500 * MIB + 4 * MIB * np.arange(10),  # too few steps
    ],
    ids=["noise", "warm-up", "once", "epochs", "falls", "little", "few"],
)
def test_other_courses_are_no_growth(resident: np.ndarray) -> None:
    assert recorded(resident) == []


PROGRAM = """
import sys, torch
torch.set_num_threads(1)
kept, model = [], torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(1024, 512)
for step in range(120):
    optimizer.zero_grad()
    loss = model(data).square().mean() + model(data).abs().mean()
    loss.backward()
    optimizer.step()
    if sys.argv[1] == "keeps":
        kept.append(torch.ones(1_000_000))  # 4 MB
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["keeps", "drops"])
def test_a_program_that_keeps_tensors_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["-o", "run", "--no-trace", "--", sys.executable, "train.py", kind]
    assert command.process("record", *options, cwd=tmp_path).code == 0
    run = pipeline.attribute(pipeline.read(tmp_path / "run"))
    grown = [f.message for f in run.findings if f.code == "memory.growth"]
    assert ("grows by" in verdict_of(run).sentence) == (kind == "keeps")
    assert len(grown) == (kind == "keeps")
    assert all("resident memory of the process grows by" in text for text in grown)
