"""Examples of trainers: with the two lines in them, and without under ``chopper record``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from chopper.storage.run import Run
from tests import command
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PYTHON = (sys.executable,)
TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SHARE_TOLERANCE = 0.2
"""Of the traced time: what a phase of one run may differ from the other's, on a busy machine."""
NAMED_TOLERANCE, CALL_S = 0.1, 0.05
"""What evaluations may differ from what the trainer measured, of their time and for each call."""


@dataclass(frozen=True)
class Example:
    trainer: str
    steps: int
    micro_steps: int | None
    phases: dict[str, int]
    """Phase → how often it was entered, on rank 0."""
    launcher: tuple[str, ...] = PYTHON
    ranks: int = 1


TRAINERS = (
    Example("transformers", 20, 2, {"evaluation": 4, "checkpoint": 2}),
    Example("lightning", 20, 2, {"evaluation": 2, "checkpoint": 2}),
    Example(
        "accelerate", 20, 2, {"checkpoint": 1},
        launcher=(
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
            *("--dynamo_backend", "no", "--main_process_port", "0"),
        ),
        ranks=2,
    ),
    Example("deepspeed", 10, 2, {"checkpoint": 1}, launcher=TWO_RANKS, ranks=2),
    Example("ray", 20, None, {"checkpoint": 4}, ranks=2),
)  # fmt: skip
IN_EVERY_RUN = ("transformers", "lightning")
"""Trainers that are compared with the command each time; the others' examples run once."""


def run(*line: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # AMD's package without its library ends each of Ray's processes.
    (cwd / "amdsmi.py").write_text('raise ImportError("not here")\n')
    done = subprocess.run(
        [str(word) for word in line],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done


def without_chopper(file: Path, directory: Path) -> Path:
    """The script without its two marked lines."""
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.endswith("# chopper\n")]
    assert len(lines) - len(kept) == 2
    plain = directory / file.name
    plain.write_text("".join(kept))
    return plain


def of_ranks(path: Path, name: str) -> list[list[dict[str, Any]]]:
    found = Run.open(path)
    return [found.table(part.rank, name).to_pylist() for part in found.manifest.ranks]


def shares(path: Path) -> dict[str, float]:
    """Phase → share of the traced time; checks that causes sum to it to the nanosecond."""
    found = json.loads(command.run("analyze", path, "--by", "phase", "--json").out)
    for group in found["groups"]:
        assert sum(group["causes"].values()) == group["time_ns"]
    assert sum(group["time_ns"] for group in found["groups"]) == found["observed_ns"] > 0
    return {g["key"]: g["time_ns"] / found["observed_ns"] for g in found["groups"]}


def run_example(example: Example, directory: Path) -> tuple[Path, str]:
    """The run directory and the output of an example, which recorded what it did."""
    if importlib.util.find_spec(example.trainer) is None:
        pytest.skip(f"{example.trainer} is not installed")
    path, file = directory / "lines", EXAMPLES / f"train_{example.trainer}.py"
    done = run(*example.launcher, file, path, cwd=directory)
    assert "not recorded" not in done.stderr + done.stdout
    check_recorded(example, path)
    return path, done.stdout


def check_recorded(example: Example, path: Path) -> None:
    steps, phases = of_ranks(path, "step"), of_ranks(path, "program_phase")
    assert [[row["number"] for row in of_rank] for of_rank in steps] == [
        list(range(example.steps))
    ] * example.ranks
    assert {row["micro_steps"] for of_rank in steps for row in of_rank} == {example.micro_steps}
    assert Counter(row["name"] for row in phases[0]) == example.phases


UNCOMPILED = """
import deepspeed, runpy, sys
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
"""DeepSpeed without the operator between processes that it compiles for 90 s."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [e for e in TRAINERS if e.trainer not in IN_EVERY_RUN], ids=lambda e: e.trainer
)
def test_an_example_records_its_steps_and_phases(example, tmp_path):
    if example.trainer == "deepspeed":
        (tmp_path / "uncompiled.py").write_text(UNCOMPILED)
        example = replace(example, launcher=(*example.launcher, str(tmp_path / "uncompiled.py")))
    path, _ = run_example(example, tmp_path)
    shares(path)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            example,
            id=example.trainer,
            marks=[pytest.mark.slow]
            if example.trainer in IN_EVERY_RUN
            else [pytest.mark.slow, pytest.mark.long],
        )
        for example in TRAINERS
    ],
)
def test_two_lines_record_what_the_command_records(example, tmp_path):
    by_command = tmp_path / "command"
    with_lines, out = run_example(example, tmp_path)
    plain = without_chopper(EXAMPLES / f"train_{example.trainer}.py", tmp_path)
    record = (sys.executable, "-m", "chopper", "record", "-o", by_command, "--")
    witness = run(*record, *example.launcher, plain, cwd=tmp_path)

    check_recorded(example, by_command)
    traced = [
        [[row["number"] for row in of_rank if row["traced"]] for of_rank in of_ranks(path, "step")]
        for path in (with_lines, by_command)
    ]
    assert traced[0] == traced[1] != [[]] * example.ranks

    found, expected = shares(with_lines), shares(by_command)
    for phase in found.keys() | expected.keys():
        assert found.get(phase, 0) == pytest.approx(expected.get(phase, 0), abs=SHARE_TOLERANCE)

    if example.trainer == "transformers":
        table = command.run("analyze", with_lines, "--view", "steps", "--json").out
        assert {row["micro_steps"] for row in json.loads(table)["rows"]} == {2}
        command.run("report", with_lines, "-o", tmp_path / "report.html")
        assert "2 micro-steps in each step." in (tmp_path / "report.html").read_text()
        for path, text in ((with_lines, out), (by_command, witness.stdout)):
            measured = [float(s) for s in re.findall(r"'eval_runtime': '?([\d.]+)", text)]
            recorded = [
                (row["end_ns"] - row["start_ns"]) / 1e9
                for row in of_ranks(path, "program_phase")[0]
                if row["name"] == "evaluation"
            ]
            assert recorded == pytest.approx(measured, rel=NAMED_TOLERANCE, abs=CALL_S)


def test_the_plain_loop_and_the_profiled_one_run(tmp_path):
    run(sys.executable, EXAMPLES / "train_with_profile.py", "run", cwd=tmp_path)
    assert len(of_ranks(tmp_path / "run", "step")[0]) == 12
