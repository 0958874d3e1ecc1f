"""Two lines in a training script: callbacks, trackers and hooks of trainers, one module for each.

None is imported unless used, and none changes or ends the training: what fails in here is one line
on stderr.
"""

from __future__ import annotations

TRACKERS = ("wandb", "mlflow", "tensorboard")
"""Experiment trackers that :mod:`chopper.integrations.trackers` logs into."""
