"""transformers' ``Trainer``, and what is built on it: TRL's trainers, PEFT's models.

from chopper.integrations.transformers import ChopperCallback
trainer = Trainer(..., callbacks=[ChopperCallback("runs/mine")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from chopper.integrations.recording import TrainerRecording


class ChopperCallback(TrainerCallback):
    """Records each ``trainer.train()``; a step ends where the weights were updated.

    Args:
        output: the run directory, ``runs/<time>`` by default; that of a second training is
            ``<output>-2``.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        self._recording = TrainerRecording("transformers", "4.46", output, **options)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the recording; end that of a training that failed, which nothing else tells."""
        self._recording.end()
        self._recording.begin()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End a step."""
        self._recording.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the recording."""
        self._recording.end()

    def close(self) -> None:
        """End the recording where an error that the program survived left it open."""
        self._recording.end()
