"""Accelerate: a tracker, which records each process from its first sign of training on.

from chopper.integrations.accelerate import ChopperTracker
accelerator = Accelerator(..., log_with=ChopperTracker("runs/mine"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from chopper.integrations.recording import TrainerRecording


class ChopperTracker(GeneralTracker):
    """Records until ``end_training()`` or the end of the process; the optimizer's steps are steps.

    Accelerate tells trackers of events in the main process only (1.15): the others begin by
    themselves, and so does this one without ``init_trackers``. What is logged is left to other
    trackers.

    Args:
        output: the run directory, ``runs/<time>`` by default.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong.
    """

    name = "chopper"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self._recording = TrainerRecording("accelerate", "1.0", output, **options)
        self._recording.begin_with_training()

    @property
    def tracker(self) -> TrainerRecording:
        """The recording."""
        return self._recording

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Leave the configuration to other trackers."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Ignore logged metrics, which other trackers store."""

    def finish(self) -> None:
        """End the recording."""
        self._recording.end()
