"""Start to record when this process begins to train; see the package's docstring.

The sign is a forward call of a module in training mode, with gradients on and something to train,
outside data loader workers; or, for models that are no modules, the first backward pass or step of
an optimizer. A known trainer may show one before: a micro-step, a rollout to train on. A program
without an optimizer that calls modules again and again infers: it is recorded, too, by time. What
calls no module shows no sign, and is recorded from the import of torch on where the user asks for
it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

HOOK_VARIABLE = "CHOPPER_HOOK"
"""Options of the recording, JSON: keywords of ``make_options``."""

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs 5 ms
_handles: list[Callable[[], None]] = []
"""Each ends a watch."""
_INFERENCE_CALLS = 3
"""Outermost calls of modules, without an optimizer, from which on a program infers: one or two look
at shapes or warm something up before the training."""
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "run.py", "ray")
"""Programs that import torch and leave the work to processes that they start."""


def hooked(output: str, launched: str, options: dict[str, Any]) -> dict[str, str]:
    """Variables of an environment in which every Python records itself when it trains.

    The output is absolute, the options are what JSON can hold.
    """
    import json

    before = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{_FOLDER}{os.pathsep}{before}" if before else _FOLDER,
        "CHOPPER_OUTPUT": output,
        "CHOPPER_LAUNCHED": launched,
        HOOK_VARIABLE: json.dumps(options),
    }


class ChildrenRecorded:
    """Has the Pythons that this process starts record themselves, unseen by the program."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def end(self) -> None:
        """Put the environment back, except for what the program itself changed meanwhile."""
        variables, self._variables = self._variables, {}
        for name, value in variables.items():
            now, before = os.environ.get(name), self._before[name]
            if now is not None and now != value and name == "PYTHONPATH":
                entries = [entry for entry in now.split(os.pathsep) if entry != _FOLDER]
                os.environ[name] = os.pathsep.join(entries)
            elif now == value and before is None:
                del os.environ[name]
            elif now == value and before is not None:
                os.environ[name] = before


def arm_forked(start: Callable[[], Any]) -> None:
    """Record a forked child of a process that records, if it trains."""
    if os.environ.get(HOOK_VARIABLE) and not _handles:
        arm(start)


def arm(start: Callable[..., Any]) -> None:
    """Watch for the first sign of work, at which ``start`` begins and returns the recording.

    ``start`` is called with ``infers=True`` where nothing is trained as yet.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from chopper.recording.annotate import ModuleCalls, parameters
    from chopper.recording.optimizers import BackwardWatch, StepHook, optimizer_was_made

    def trains(module: torch.nn.Module) -> bool:
        return (
            module.training
            and torch.is_grad_enabled()
            and not _in_loader_worker()
            and any(parameter.requires_grad for parameter in parameters(module))
            and optimizer_was_made()
        )

    recordings: list[Any] = []
    outermost: list[torch.nn.Module] = []
    """The module that was called from outside of any other, while it runs."""
    calls_count = 0

    def begin(**how: bool) -> Any:
        disarm()
        return start(**how)

    def infers(module: torch.nn.Module) -> bool:
        nonlocal calls_count
        if outermost:
            return False
        outermost.append(module)
        calls_count += 1
        enough = calls_count >= _INFERENCE_CALLS
        return enough and not optimizer_was_made() and not _in_loader_worker()

    def before_forward(module: torch.nn.Module) -> bool:
        recording = None
        with contextlib.suppress(Exception):  # a module may be of any kind
            if trains(module):
                recording = begin()
            elif infers(module):
                recording = begin(infers=True)
        if recording is not None:
            recordings.append(recording)
            recording.enter_root(module)
        return recording is not None or any(module is one for one in outermost)

    def after_forward(module: torch.nn.Module) -> None:
        outermost.clear()
        if recordings:
            recordings[0].leave_root(module)

    def sign(*_: Any) -> None:
        if not _in_loader_worker():
            begin()

    if _from_import():
        begin(infers=True)
        return
    backward = BackwardWatch(before=sign)
    backward.begin()
    _handles.append(backward.remove)
    _handles.append(ModuleCalls(before_forward, after_forward).remove)
    _handles.append(StepHook(register_optimizer_step_pre_hook, sign).remove)
    _watch_trainers(begin)


def _watch_trainers(begin: Callable[[], Any]) -> None:
    """Watch for a known trainer's first micro-step and first rollout, which are recorded whole."""
    from chopper.recording.logs import Phase
    from chopper.recording.optimizers import optimizer_was_made
    from chopper.recording.trainers import TrainerPhases

    def micro_step() -> None:
        recording = None if _in_loader_worker() else begin()
        if recording is not None:
            recording.micro_step()

    def phase(name: str) -> Phase:
        trains = name == "rollout" and optimizer_was_made() and not _in_loader_worker()
        return Phase(begin() if trains else None, name)

    trainers = TrainerPhases(phase, micro_step)
    _handles.append(trainers.end)
    trainers.begin()


def _from_import() -> bool:
    """Tell whether this process is to be recorded without a sign."""
    import json

    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""  # noqa: PTH119
    wanted = json.loads(os.environ.get(HOOK_VARIABLE, "{}")).get("from_import", False)
    return bool(wanted) and program not in _LAUNCHERS


def disarm() -> None:
    """Watch no longer: the program records itself, or a recording began."""
    while _handles:
        _handles.pop()()


def _in_loader_worker() -> bool:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
