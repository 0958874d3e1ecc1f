"""Ray Train: a callback that records in each worker.

from chopper.integrations.ray import ChopperCallback
trainer = TorchTrainer(..., run_config=RunConfig(callbacks=[ChopperCallback("runs/mine")]))
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray

from chopper.errors import say
from chopper.hardware.launchers import LaunchEnvironment
from chopper.integrations.recording import TrainerRecording
from chopper.recording import claim
from chopper.recording.finish import exception_text

try:
    from ray.train.v2._internal.constants import is_v2_enabled
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    _SUPPORTED = is_v2_enabled()
except ImportError:
    _SUPPORTED = False
if not _SUPPORTED:
    from ray.tune import Callback as WorkerGroupCallback  # type: ignore[assignment]  # what the first Ray Train expects

_LEAST_VERSION = "2.60"
_WAIT_S = 60.0
_NAME = "chopper.integrations.ray"

_in_worker: TrainerRecording | None = None


def _arm(output: str, options: dict[str, Any]) -> None:
    """Begin to record where the worker's thread of training begins to train."""
    global _in_worker
    _in_worker = TrainerRecording("ray", _LEAST_VERSION, output, **options)
    _in_worker.begin_with_training()


def _end(errors: dict[int, str]) -> None:
    if _in_worker is not None:
        text = errors.get(ray.train.get_context().get_world_rank())
        _in_worker.end(None if text is None else RuntimeError(text))


class ChopperCallback(WorkerGroupCallback):
    """Records each worker from the first sign of training to its end.

    A step ends where the optimizer updated the weights. Workers that Ray starts anew after a
    failure record to ``<output>-2`` and so on. On several nodes, the directory is to be one that
    all of them see.

    Args:
        output: the run directory, as the driver sees it; ``runs/<time>`` by default.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        TrainerRecording("ray", _LEAST_VERSION, output, **options)  # checks the options
        chosen = claim.choose_output(output, options.get("name"), LaunchEnvironment())
        self._output, self._options = os.fspath(Path(chosen).absolute()), options
        self._groups = 0
        self._errors: dict[int, str] = {}
        if not _SUPPORTED:
            say(
                f"{_NAME}: Ray Train's first version is not supported: not recorded, the training "
                f"goes on; use ray {_LEAST_VERSION} or later without RAY_TRAIN_V2_ENABLED=0"
            )

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Have the workers record, whose process group is set up."""
        self._groups += 1
        self._errors = {}
        output = self._output if self._groups == 1 else f"{self._output}-{self._groups}"
        self._execute(worker_group, _arm, output, self._options)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Note which workers failed."""
        for rank, error in worker_group_status.errors.items():
            self._errors[rank] = exception_text(error)

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """End the recording in the workers."""
        self._execute(worker_group, _end, self._errors)

    def _execute(self, worker_group: Any, function: Any, *args: Any) -> None:
        try:
            ray.get(worker_group.execute_async(function, *args), timeout=_WAIT_S)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            say(f"{_NAME}: {exception_text(exc)}; the training goes on")
