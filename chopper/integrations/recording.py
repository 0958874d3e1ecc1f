"""What the integrations share: a recording that begins, steps and ends with a trainer's events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from chopper.recording.messages import exception_text, say
from chopper.recording.profile import Profile, profile


class TrainerRecording:
    """A recording driven by the events of a trainer; none of its methods raises.

    Within ``chopper record``, or a ``chopper.profile`` that is already recording, its events go to
    that recording.

    Args:
        name: of the integration, for messages.
        output: the run directory, as for :func:`chopper.profile`.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong; before the training begins.
    """

    def __init__(self, name: str, output: str | Path | None = None, **options: Any) -> None:
        self._name = name
        self._profile = profile(output, **options)
        self._entered: Profile | None = None
        self._phases: list[tuple[str, AbstractContextManager[Any]]] = []

    @property
    def output(self) -> Path | None:
        """The run directory; None before the recording starts."""
        return self._profile.output

    def begin(self) -> None:
        """Begin to record; once, however often the trainer says that it begins."""
        if self._entered is None:
            self._safely(self._begin)

    def _begin(self) -> None:
        self._profile.__enter__()
        self._entered = self._profile

    def end(self, error: BaseException | None = None) -> None:
        """End the recording, with the error that ended the training, if one did. Idempotent."""
        entered, self._entered = self._entered, None
        if entered is not None:
            while self._phases:
                self.end_phase(self._phases[-1][0])
            self._safely(entered.__exit__, type(error) if error else None, error, None)

    def step(self, tokens: int | None = None) -> None:
        """Mark the end of a training step: an update of the weights."""
        if self._entered is not None:
            self._safely(lambda: self._profile.step(tokens=tokens))

    def begin_phase(self, name: str) -> None:
        """Begin work outside training steps, such as ``evaluation`` or ``checkpoint``."""
        if self._entered is not None:
            phase = self._profile.phase(name)
            self._safely(phase.__enter__)
            self._phases.append((name, phase))

    def end_phase(self, name: str) -> None:
        """End it, and what began within it; nothing where it did not begin."""
        if any(begun == name for begun, _ in self._phases):
            while True:
                begun, phase = self._phases.pop()
                self._safely(phase.__exit__, None, None, None)
                if begun == name:
                    return

    def _safely(self, part: Callable[..., Any], *args: Any) -> None:
        try:
            part(*args)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            say(f"{self._name}: {exception_text(exc)}; the training goes on")
