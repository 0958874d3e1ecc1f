"""Examples of trainers: with the two lines in them, and without under ``chopper record``."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chopper.storage.run import Run
from tests import command
from tests.clients.expected import PROGRAMS
from tests.clients.runner import CALL_NS, NAMED_TOLERANCE
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROBE = PROGRAMS.parent / "probe" / "site-packages"
PYTHON = (sys.executable,)
TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Example:
    trainer: str
    steps: int
    micro_steps: int | None
    phases: dict[str, int]
    """Phase → how often it was entered, on rank 0."""
    timed: dict[str, str] = field(default_factory=dict)
    """Phase → the function of the trainer whose calls it is, as ``module:Class.method``."""
    launcher: tuple[str, ...] = PYTHON
    ranks: int = 1
    program: Path | None = None
    """The trainer's example where None."""

    @property
    def file(self) -> Path:
        return self.program or EXAMPLES / f"train_{self.trainer}.py"


_OF_TRANSFORMERS = {
    "evaluation": "transformers.trainer:Trainer._evaluate",
    "checkpoint": "transformers.trainer:Trainer._save_checkpoint",
}
TRAINERS = (
    Example("transformers", 20, 2, {"evaluation": 4, "checkpoint": 2}, _OF_TRANSFORMERS),
    Example("trl", 12, 2, {"evaluation": 3, "checkpoint": 2}, _OF_TRANSFORMERS),
    Example(
        "lightning", 20, 2, {"evaluation": 2, "checkpoint": 2},
        {
            "evaluation": "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",
            "checkpoint": "lightning.pytorch.trainer.trainer:Trainer.save_checkpoint",
        },
    ),
    Example(
        "accelerate", 20, 2, {"checkpoint": 1},
        {"checkpoint": "accelerate.accelerator:Accelerator.save_state"},
        launcher=(
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
            *("--dynamo_backend", "no", "--main_process_port", "0"),
        ),
        ranks=2,
    ),
    Example(
        "deepspeed", 10, 2, {"checkpoint": 1},
        {"checkpoint": "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint"},
        launcher=TWO_RANKS, ranks=2,
    ),
    Example("ray", 20, None, {"checkpoint": 4}, ranks=2),
)  # fmt: skip


def run(
    *line: str | Path, cwd: Path, timed: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that ends well, watched by the probe where functions are to be timed."""
    # AMD's package without its library ends each of Ray's processes.
    (cwd / "amdsmi.py").write_text('raise ImportError("not here")\n')
    watched = {}
    if timed:
        (seen := cwd / "probe").mkdir(exist_ok=True)
        watched = {
            "PYTHONPATH": os.pathsep.join((str(PROBE), str(cwd))),
            "CLIENTS_PROBE": str(seen),
            "CLIENTS_TIMED": ",".join(timed.values()),
            "CLIENTS_NO_FORWARD": "1",
        }
    done = subprocess.run(
        [str(word) for word in line],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd), **watched},
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


def by_phase(path: Path) -> dict[str, int]:
    """Phase → events in the traced steps; checks that causes sum to its time to the nanosecond."""
    found = json.loads(command.run("analyze", path, "--by", "phase", "--json").out)
    whole = found["all_kinds"] or found
    for group in whole["groups"]:
        causes_ns = [ns for column, ns in group.items() if "." in column]
        assert sum(causes_ns) == group["step_ns"]
    assert sum(group["time_ns"] for group in whole["groups"]) == whole["observed_ns"] > 0
    return {group["phase"]: group["events_count"] for group in whole["groups"]}


def work(path: Path) -> dict[str, int]:
    """Phase → events in the traced steps of a copy without samples of the stack.

    Two runs of a program have the same, however long a busy machine lets each of them wait: of the
    time of these small examples that is half, and differs by half from one run to the next. Samples
    decide the phase of the operators around them, and fall elsewhere in each run.
    """
    unsampled = path.with_name(f"{path.name}-unsampled")
    shutil.copytree(path, unsampled, ignore=shutil.ignore_patterns("python_sample.arrow"))
    by_phase(path)
    return by_phase(unsampled)


def check_durations(example: Example, path: Path, seen: Path) -> None:
    """Compare the phases with the calls of the trainer's functions, which the probe timed."""
    found = Run.open(path)
    for part in found.manifest.ranks if example.timed else ():
        lines = (seen / f"{part.pid}.jsonl").read_text().splitlines()
        calls = [event for event in map(json.loads, lines) if event.get("event") == "call"]
        begin_ns = found.table(part.rank, "step").to_pylist()[0]["start_ns"]
        for phase, name in example.timed.items():
            spans = [
                (row["start_ns"], row["end_ns"])
                for row in found.table(part.rank, "program_phase").to_pylist()
                if row["name"] == phase
            ]
            expected = [
                (call["began_ns"], call["t_ns"])
                for call in calls
                if call["name"] == name.partition(":")[2] and call["t_ns"] > begin_ns
            ]
            assert len(spans) == len(expected) > 0
            # Of half of the calls: between two readings of a clock, a core may be lost.
            off_ns = [
                abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(spans, expected, strict=True)
            ]
            length_ns = statistics.mean(end - begin for begin, end in expected)
            assert statistics.median_low(off_ns) <= NAMED_TOLERANCE * length_ns + CALL_NS


def run_example(example: Example, directory: Path) -> Path:
    """The run directory of an example, which recorded what it did."""
    if importlib.util.find_spec(example.trainer) is None:
        pytest.skip(f"{example.trainer} is not installed")
    path = directory / "lines"
    done = run(*example.launcher, example.file, path, cwd=directory, timed=example.timed)
    assert "not recorded" not in done.stderr + done.stdout
    check_recorded(example, path)
    check_durations(example, path, directory / "probe")
    return path


def check_recorded(example: Example, path: Path) -> None:
    steps, phases = of_ranks(path, "step"), of_ranks(path, "program_phase")
    assert [[row["number"] for row in of_rank] for of_rank in steps] == [
        list(range(example.steps))
    ] * example.ranks
    assert {row["micro_steps"] for of_rank in steps for row in of_rank} == {example.micro_steps}
    assert Counter(row["name"] for row in phases[0]) == example.phases


@pytest.mark.long
def test_an_example_records_its_steps_and_phases(tmp_path):
    (example,) = (e for e in TRAINERS if e.trainer == "transformers")
    by_phase(run_example(example, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("example", TRAINERS, ids=lambda e: e.trainer)
def test_two_lines_record_what_the_command_records(example, tmp_path):
    with_lines = compare(example, tmp_path)
    if example.trainer == "trl":
        table = command.run("analyze", with_lines, "--view", "steps", "--json").out
        assert {row["micro_steps"] for row in json.loads(table)["rows"]} == {2}
        command.run("report", with_lines, "-o", tmp_path / "report.html")
        assert "2 micro-steps in each step." in (tmp_path / "report.html").read_text()


def compare(example: Example, directory: Path) -> Path:
    """Record a program by its two lines and, without them, by the command; compare the runs."""
    with_lines, by_command = run_example(example, directory), directory / "command"
    plain = without_chopper(example.file, directory)
    record = (sys.executable, "-m", "chopper", "record", "-o", by_command, "--")
    run(*record, *example.launcher, plain, cwd=directory, timed=example.timed)

    check_recorded(example, by_command)
    check_durations(example, by_command, directory / "probe")
    traced = [
        [[row["number"] for row in of_rank if row["traced"]] for of_rank in of_ranks(path, "step")]
        for path in (with_lines, by_command)
    ]
    assert traced[0] == traced[1] != [[]] * example.ranks
    # An operator that loses its core while it prepares its work counts as one that works itself,
    # and its few parts do not: of hundreds in a phase, that is one or two.
    assert work(with_lines) == pytest.approx(work(by_command), rel=0.02, abs=8)
    phases = [
        [[row["name"] for row in of_rank] for of_rank in of_ranks(path, "program_phase")]
        for path in (with_lines, by_command)
    ]
    assert phases[0] == phases[1]
    return with_lines


GRPO = (
    "trainer.train()\n",
    "import sys; from chopper.integrations.transformers import ChopperCallback  # chopper\n"
    "trainer.add_callback(ChopperCallback(sys.argv[1]))  # chopper\n"
    "trainer.train()\n",
)
"""What a program of the command's clients is without the two lines, and with them."""


@pytest.mark.slow
@pytest.mark.long
def test_rollouts_are_recorded_from_the_first_on(tmp_path):
    program = tmp_path / "trl_grpo.py"
    program.write_text((PROGRAMS / program.name).read_text().replace(*GRPO))
    compare(Example("trl", 12, 1, {"rollout": 12, "generation": 12}, program=program), tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_stages_of_a_pipeline_have_the_same_steps(tmp_path):
    """DeepSpeed's engine of pipelines, whose stages run the backward pass each in its own way."""
    timed = {
        "evaluation": "deepspeed.runtime.pipe.engine:PipelineEngine.eval_batch",
        "checkpoint": "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
    }
    program = Path(__file__).parent / "programs/pipeline.py"
    phases = {"evaluation": 2, "checkpoint": 1}
    pipeline = Example("deepspeed", 12, 4, phases, timed, TWO_RANKS, 2, program)
    compare(pipeline, tmp_path)


def test_the_plain_loop_and_the_profiled_one_run(tmp_path):
    run(sys.executable, EXAMPLES / "train_with_profile.py", "run", cwd=tmp_path)
    assert len(of_ranks(tmp_path / "run", "step")[0]) == 12
