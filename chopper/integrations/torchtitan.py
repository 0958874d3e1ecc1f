"""torchtitan: a component in the place of its profiler, which records as well.

from chopper.integrations.torchtitan import ChopperProfiler
config.profiler = ChopperProfiler.Config(output="runs/mine")   # in a function of configurations
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtitan.tools.profiler import Profiler

from chopper.integrations.recording import TrainerRecording


class ChopperProfiler(Profiler):
    """Records each rank from torchtitan's first step to its last; the optimizer's steps are steps.

    torchtitan's own profiler goes on to work as it is configured. Its ``step()`` comes after the
    validation and the checkpoint that follow a step.

    Raises:
        UsageError: an option is wrong.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):
        """What torchtitan's profiler can be told, and where to record."""

        output: str = ""
        """The run directory; ``runs/<time>`` by default."""
        options: dict[str, Any] = field(default_factory=dict)
        """Further arguments of :func:`chopper.profile`."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        output = config.output or None
        self._recording = TrainerRecording("torchtitan", "0.3", output, **config.options)

    def __enter__(self) -> ChopperProfiler:
        super().__enter__()
        self._recording.begin()
        return self

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> bool:
        self._recording.end(exc)
        return bool(super().__exit__(kind, exc, traceback))
