"""Accelerate: a tracker, which records from ``init_trackers`` to ``end_training``.

    from chopper.integrations.accelerate import ChopperTracker
    accelerator = Accelerator(..., log_with=ChopperTracker("runs/mine"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from chopper.integrations.recording import TrainerRecording


class ChopperTracker(GeneralTracker):
    """Records each rank; a step ends where the optimizer updated the weights.

    What is logged is left to other trackers.

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
        self._over = False

    @property
    def tracker(self) -> TrainerRecording:
        """The recording."""
        return self._recording

    def start(self) -> None:
        """Begin the recording."""
        self._over = False
        self._recording.begin()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Begin the recording, in versions that do not call ``start``."""
        self._recording.begin()

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Begin the recording, in versions that called nothing before."""
        if not self._over:
            self._recording.begin()

    def finish(self) -> None:
        """End the recording."""
        self._over = True
        self._recording.end()
