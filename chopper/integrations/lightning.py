"""Lightning's ``Trainer``, from ``lightning`` and from ``pytorch_lightning``.

    from chopper.integrations.lightning import ChopperCallback
    trainer = Trainer(..., callbacks=[ChopperCallback("runs/mine")])

or, with ``ChopperProfiler``, ``Trainer(..., profiler=ChopperProfiler("runs/mine"))``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper.integrations.recording import TrainerRecording

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback
    from lightning.pytorch.profilers import Profiler
else:  # the program's own, also where both are installed
    from pytorch_lightning import Callback
    from pytorch_lightning.profilers import Profiler

_LIBRARY = Callback.__module__.partition(".")[0].replace("_", "-")
_LEAST_VERSION = "2.4"
_OPTIMIZER_STEP = "optimizer_step"


class ChopperCallback(Callback):
    """Records each ``trainer.fit()``; a step ends with the batch in which an optimizer stepped.

    Args:
        output: the run directory, ``runs/<time>`` by default; that of a second fit is
            ``<output>-2``.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        self._recording = TrainerRecording(_LIBRARY, _LEAST_VERSION, output, **options)
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the recording."""
        self._steps = trainer.global_step
        self._recording.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """End a step, if this batch ended one."""
        before, self._steps = self._steps, trainer.global_step
        if self._steps != before:
            self._recording.step()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the recording."""
        self._recording.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the recording of a training that failed."""
        self._recording.end(exception)


class ChopperProfiler(Profiler):
    """The same as Lightning's profiler, from the first epoch's start on.

    Args:
        output: as for :class:`ChopperCallback`.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self._recording = TrainerRecording(_LIBRARY, _LEAST_VERSION, output, **options)
        self._stepped = False

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Run an action; end the recording of a training that fails in it."""
        try:
            with super().profile(action_name):
                yield action_name
        except BaseException as exc:
            if action_name == "run_training_epoch":
                self._recording.end(exc)
            raise

    def start(self, action_name: str) -> None:
        """Begin the recording with the first epoch."""
        if action_name == "run_training_epoch":
            self._recording.begin()

    def stop(self, action_name: str) -> None:
        """End a step with the batch in which an optimizer stepped."""
        if action_name.rpartition(".")[2] == _OPTIMIZER_STEP:
            self._stepped = True
        elif action_name == "run_training_batch" and self._stepped:
            self._stepped = False
            self._recording.step()

    def summary(self) -> str:
        """Return nothing: the recording says where its run is."""
        return ""

    def teardown(self, stage: str | None) -> None:
        """End the recording."""
        if stage == "fit":
            self._recording.end()
        super().teardown(stage)
