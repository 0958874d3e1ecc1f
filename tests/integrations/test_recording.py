"""What a trainer's events do to a recording, and that none of them ends the training."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import chopper
from chopper.errors import UsageError
from chopper.integrations.recording import TrainerRecording
from chopper.recording import session
from chopper.storage.run import Run
from tests.recording.conftest import clean_environment  # noqa: F401 - a fixture
from tests.recording.make import DESCENT, TRACE_ONLY, Task, steps_of


def recording(output: str = "run", least_version: str = "2.0", library: str = "torch"):
    return TrainerRecording(library, least_version, output, collect=TRACE_ONLY, trace=False)


def train(driver: TrainerRecording, steps: int = 3) -> None:
    task = Task()
    driver.begin()
    for _ in range(steps):
        task.step()
        driver.step()
    driver.end()


def test_each_training_is_a_run(tmp_path, capsys):
    driver = recording()
    train(driver)
    train(driver, 2)
    assert driver.output == tmp_path / "run-2"
    assert [row["source"] for row in steps_of("run")] == ["mark"] * 3
    assert len(steps_of("run-2")) == 2
    assert "recorded 1 rank, 3 steps" in capsys.readouterr().err


def test_a_training_after_one_that_failed_is_a_run_of_its_own():
    """transformers tells a callback of no error: trials of a search, and smaller batches."""
    pytest.importorskip("transformers")
    from chopper.integrations.transformers import ChopperCallback

    callback, task = ChopperCallback("run", collect=TRACE_ONLY, trace=False), Task()
    for steps in (2, 3):
        callback.on_train_begin()
        for _ in range(steps):
            task.step()
            callback.on_optimizer_step()
    callback.on_train_end()
    assert (len(steps_of("run")), len(steps_of("run-2"))) == (2, 3)


def test_a_training_that_fails_ends_its_run(tmp_path):
    """With transformers itself, whose callbacks hear of no error."""
    transformers = pytest.importorskip("transformers")
    from chopper.integrations.transformers import ChopperCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.fails = True

        def forward(self, inputs, labels):
            if self.fails and trainer.state.global_step == 2:
                raise ValueError("of the program")
            return {"loss": (self.layer(inputs) - labels).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir="saved", max_steps=4, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, save_strategy="no", use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"inputs": torch.ones(4), "labels": torch.ones(1)}] * 8
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=data)
    trainer.add_callback(ChopperCallback("run", collect=TRACE_ONLY, trace=False))
    with pytest.raises(ValueError, match="of the program"):
        trainer.train()
    assert session.active() is None
    part = Run.open(tmp_path / "run").part(0)
    assert (part.status, part.error) == ("failed", "ValueError: of the program")
    assert len(steps_of("run")) == 2
    trainer.model.fails = False
    trainer.train()
    assert Run.open(tmp_path / "run-2").part(0).status == "complete"
    assert len(steps_of("run-2")) == 4


def test_a_library_that_is_too_old_is_one_line(capsys):
    train(recording(least_version="99.1"))
    found = torch.__version__.partition("+")[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"chopper: chopper.integrations.torch: torch {found}")
    assert "is not supported: expected 99.1 or later" in line
    assert line.endswith("not recorded, the training goes on")


def test_a_second_one_stays_out_in_one_line(capsys):
    first, second = recording("first"), recording("second")
    first.begin()
    train(second)
    assert not second.recording
    (line,) = capsys.readouterr().err.splitlines()
    assert "the integration of torch is recording already; use one of the two" in line
    task = Task()
    task.step()
    first.step()
    first.end()
    assert len(steps_of("first")) == 1
    train(second)  # nothing else records any more
    assert len(steps_of("second")) == 3


def test_within_a_profile_it_stays_out_in_one_line(capsys):
    with chopper.profile("outer", collect=TRACE_ONLY, trace=False):
        train(recording())
    line, *_ = capsys.readouterr().err.splitlines()
    assert "this process is recording to outer already" in line
    assert line.endswith("not recorded, the training goes on")
    assert {row["source"] for row in steps_of("outer")} == {"optimizer"}


def test_within_a_profile_the_first_sign_of_training_begins_nothing(capsys):
    with chopper.profile("outer", collect=TRACE_ONLY, trace=False):
        recording().begin_with_training()
    line, *_ = capsys.readouterr().err.splitlines()
    assert "this process is recording to outer already" in line


def test_within_the_command_it_takes_part_in_that_recording(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        DESCENT + "from chopper.integrations.recording import TrainerRecording\n"
        "driver = TrainerRecording('torch', '2.0', 'other')\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = Descent(model.parameters(), 0.1)\n"
        "driver.begin()\n"
        "for number in range(8):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    if number % 2:\n"
        "        driver.step()\n"
        "driver.end()\n"
    )
    line = [sys.executable, "-m", "chopper", "record", "--no-trace", "-o", "run", "--"]
    done = subprocess.run(
        [*line, sys.executable, program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "other").exists()
    assert "not recorded" not in done.stderr
    assert [row["source"] for row in steps_of(tmp_path / "run")] == ["mark"] * 4


def test_it_can_be_sent_to_processes_that_train():
    assert pickle.loads(pickle.dumps(recording()))._first._options == recording()._first._options


def test_an_output_that_holds_a_run_is_one_line(capsys):
    train(recording())
    capsys.readouterr()
    train(recording())
    (line,) = capsys.readouterr().err.splitlines()
    assert "run" in line
    assert line.endswith("not recorded, the training goes on")


def test_an_error_of_the_training_is_in_the_run():
    driver = recording()
    driver.begin()
    driver.end(RuntimeError("the loss is not a number"))
    part = Run.open(driver.output).part(0)
    assert (part.status, part.error) == ("failed", "RuntimeError: the loss is not a number")


def test_a_wrong_option_is_said_before_the_training():
    with pytest.raises(UsageError, match="nonsense"):
        TrainerRecording("torch", "2.0", "run", collect="nonsense")
    assert session.active() is None


def test_a_program_that_fails_within_the_training_leaves_its_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from chopper.integrations.recording import TrainerRecording\n"
        "driver = TrainerRecording('torch', '2.0', 'run', collect='torch_trace', trace=False)\n"
        "driver.begin()\n"
        "raise ValueError('of the program')\n"
    )
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "chopper: recorded 1 rank, 0 steps" in done.stderr
    part = Run.open(tmp_path / "run").part(0)
    assert (part.status, part.error) == ("failed", "ValueError: of the program")


def test_it_may_begin_with_the_training(capsys):
    task, driver, second = Task(), recording(), recording("second")
    driver.begin_with_training()
    second.begin_with_training()
    (line,) = capsys.readouterr().err.splitlines()
    assert "the integration of torch is recording already" in line
    assert not driver.recording
    task.step()
    assert driver.recording
    task.step()
    driver.end()
    assert [row["source"] for row in steps_of("run")] == ["optimizer"] * 2
    driver.begin_with_training()
    driver.end()
    task.step()
    assert session.active() is None


def test_a_micro_step_may_be_the_first_sign_of_training():
    """Of what is no module, a backward pass is: the one that the trainer's function is within."""
    from accelerate import Accelerator

    weight = nn.Parameter(torch.ones(4))
    optimizer, accelerator = torch.optim.SGD([weight], lr=0.1), Accelerator(cpu=True)
    driver = recording()
    driver.begin_with_training()
    for _ in range(3):
        for _ in range(2):
            accelerator.backward(weight.square().sum())
        optimizer.step()
    driver.end()
    assert [row["micro_steps"] for row in steps_of("run")] == [2, 2, 2]


def test_micro_steps_are_those_that_began_before_the_step_ended():
    """Accumulated over 3, 1 and 2 passes; the first step's end is certain only with the second."""
    from accelerate import Accelerator

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    with chopper.profile("run", collect=TRACE_ONLY, trace=False):
        for passes in (3, 1, 2):
            for _ in range(passes):
                accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
    assert [row["micro_steps"] for row in steps_of("run")] == [3, 1, 2]


def test_steps_that_were_one_step_keep_its_micro_steps():
    from accelerate import Accelerator

    task, accelerator = Task(), Accelerator(cpu=True)
    with chopper.profile("run", collect=TRACE_ONLY, trace=False) as prof:
        for marks in (False, False, True, True):
            accelerator.backward(task.model(torch.ones(2, 8)).sum())
            task.optimizer.step()
            if marks:
                prof.step()
    assert [row["micro_steps"] for row in steps_of("run")] == [3, 1]


def test_without_a_trainer_micro_steps_are_unknown():
    train(recording())
    assert {row["micro_steps"] for row in steps_of("run")} == {None}
