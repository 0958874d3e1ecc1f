"""transformers' ``Trainer``, TRL's trainers, which build on it, and PEFT's models.

from chopper.integrations.transformers import ChopperCallback
trainer = Trainer(..., callbacks=[ChopperCallback("runs/mine")])
"""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

from transformers import Trainer, TrainerCallback

from chopper.integrations.recording import TrainerRecording
from chopper.recording.trainers import Wrapper


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
        self._recording.safely(_watch_train)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the recording; end that of a try with larger batches, which no event tells."""
        self._recording.end()
        self._recording.begin()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End a step."""
        self._recording.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the recording."""
        self._recording.end()

    def close(self) -> None:
        """End the recording where nothing else did. Idempotent."""
        self._recording.end()


def _watch_train() -> None:
    """End our recordings when ``Trainer.train()`` raises: transformers has no such event."""
    if isinstance(vars(Trainer).get("train"), FunctionType) and not _wrappers:
        _wrappers.append(Wrapper(Trainer, "train", _train))


_wrappers: list[Wrapper] = []


def _train(original: Any, trainer: Trainer, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(trainer, *args, **kwargs)
    except BaseException as exc:
        handler = getattr(trainer, "callback_handler", None)
        for callback in getattr(handler, "callbacks", ()):
            if isinstance(callback, ChopperCallback):
                callback._recording.end(exc)
        raise
