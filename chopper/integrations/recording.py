"""What the integrations share: a recording that begins, steps and ends with a trainer's events."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from chopper.errors import ChopperError, UsageError, say
from chopper.recording.finish import exception_text
from chopper.recording.hook import arming
from chopper.recording.profile import Profile, profile
from chopper.recording.session import Session, active

_driver: TrainerRecording | None = None
"""The one whose events this process records, or waits for."""


class TrainerRecording:
    """A recording driven by the events of a trainer; none of its methods raises.

    It tells where the recording begins and ends, and where steps do. Evaluation, checkpointing and
    micro-steps are told by the functions of trainers that every recording watches
    (``recording/trainers.json``), so that they are the same with and without an integration.

    Within ``chopper record`` the events go to its recording. Whatever else records in this process
    already stays the only recording: this one says so in one line.

    Args:
        library: distribution of the trainer, for messages and its version.
        least_version: oldest version with the events that are used, such as ``"2.4"``.
        output: the run directory, as for :func:`chopper.profile`; that of a further training is
            ``<output>-2`` and so on.
        options: further arguments of :func:`chopper.profile`.

    Raises:
        UsageError: an option is wrong; before the training begins.
    """

    def __init__(
        self, library: str, least_version: str, output: str | Path | None = None, **options: Any
    ) -> None:
        self._library = library
        self._least_version = least_version
        if output is not None and os.fspath(output):
            output = Path(output).absolute()  # trainers change the directory
        self._first = profile(output, **options)
        self._profile: Profile | None = None
        self._begun = 0
        self._refused = False
        self.recording = False
        """True from a successful beginning to the end."""

    @property
    def output(self) -> Path | None:
        """The run directory; None before the recording starts."""
        return None if self._profile is None else self._profile.output

    def begin(self) -> None:
        """Begin to record; once, however often the trainer says that it begins."""
        if not self.recording and not self._refused:
            self._refused = not self.safely(self._begin)

    def begin_with_training(self) -> None:
        """Begin at the first sign of training in this process, as ``chopper record`` does."""
        if active() is not None:  # chopper record's, or one that is to be the only one
            self.begin()
        elif os.environ.get(arming.HOOK_VARIABLE) is None:  # else it will be recorded anyhow
            self._refused = not self.safely(self._arm)

    def _arm(self) -> None:
        self._claim()
        arming.arm(self._start)

    def _start(self, **_: bool) -> Session | None:
        self.begin()
        return active()

    def _claim(self) -> None:
        global _driver
        if _driver not in (None, self):
            raise UsageError(
                f"the integration of {_driver._library} is recording already; use one of the two"
            )
        check_version(self._library, self._least_version)
        _driver = self

    def _begin(self) -> None:
        global _driver
        self._claim()
        self._begun += 1
        self._profile = self._first.again(self._begun)
        try:
            self._profile.__enter__()
        except BaseException:
            _driver = None
            raise
        self.recording = True
        atexit.register(self._end_at_exit)  # before the recording's own, which says nothing

    def end(self, error: BaseException | None = None) -> None:
        """End the recording, with the error that ended the training, if one did. Idempotent."""
        global _driver
        self._refused = False
        if _driver is not self:
            return
        _driver = None
        was_recording, self.recording = self.recording, False
        if not was_recording:
            self.safely(arming.disarm)
        elif self._profile is not None:
            atexit.unregister(self._end_at_exit)
            self.safely(self._profile.__exit__, type(error) if error else None, error, None)

    def _end_at_exit(self) -> None:
        self.end(getattr(sys, "last_value", None))

    def step(self) -> None:
        """Mark the end of a training step: an update of the weights."""
        if self.recording and self._profile is not None:
            self.safely(self._profile.step)

    def safely(self, part: Callable[..., Any], *args: Any) -> bool:
        """Return whether it succeeded; say in one line why not."""
        try:
            part(*args)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            where = f"chopper.integrations.{self._library}"
            say(f"{where}: {exception_text(exc)}; not recorded, the training goes on")
            return False
        return True


def check_version(library: str, least: str) -> None:
    """Check that a library is new enough; one of unknown version is taken to be.

    Raises:
        ChopperError: it is older.
    """
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        return
    if _numbers(version) < _numbers(least):
        raise ChopperError(
            f"{library} {version} is not supported: expected {least} or later; upgrade it, or use "
            "chopper record"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    first = version.split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in first)
