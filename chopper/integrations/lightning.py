"""Lightning's ``Trainer``, from ``lightning`` and from ``pytorch_lightning``.

from chopper.integrations.lightning import ChopperCallback
trainer = Trainer(..., callbacks=[ChopperCallback("runs/mine")])
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper.integrations.recording import TrainerRecording

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback
else:  # the program's own, also where both are installed
    from pytorch_lightning import Callback

_LIBRARY = Callback.__module__.partition(".")[0].replace("_", "-")
_LEAST_VERSION = "2.4"


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
