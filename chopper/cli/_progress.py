"""Progress on stderr: of one thing, once it has taken a second, and of several runs in turn."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from rich.progress import Progress

    Sink = Callable[[IO[bytes]], None]

_QUIET_S = 1.0
_FRAME_S = 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what is going on once it has taken a second.

    On a terminal the line shows the seconds so far and is wiped at the end; elsewhere it is
    printed once.
    """
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, done), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(what: str, done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(_QUIET_S):
        return
    if not sys.stderr.isatty():
        sys.stderr.write(f"chopper: {what} …\n")
        sys.stderr.flush()
        return
    frame = 0
    while True:
        seconds = time.monotonic() - start
        sys.stderr.write(f"\r{_FRAMES[frame % len(_FRAMES)]} {what} … {seconds:.0f} s\x1b[K")
        sys.stderr.flush()
        frame += 1
        if done.wait(_FRAME_S):
            break
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()


class Bar:
    """Told of each run's begin and end."""

    def __init__(self, total: int, *, expected_s: float | None) -> None:
        self.total = total
        self.sink: Sink | None = None
        """Takes the output of what runs, where it would spoil the bar."""
        self.progress: Progress | None = None
        self._done = 0
        self._expected_s = expected_s
        self._started_s = time.monotonic()

    def left(self) -> str:
        """Say how long the remaining runs should take, by the finished ones or else as expected."""
        spent_s = time.monotonic() - self._started_s
        if self._done:
            left_s = spent_s / self._done * (self.total - self._done)
        elif self._expected_s is not None:
            left_s = max(self._expected_s - spent_s, 0.0)
        else:
            return ""
        if left_s < 1:
            return ""
        from chopper.wording import duration

        return f"about {f'{left_s:.0f} s' if left_s < 60 else duration(left_s * 1e9)} left"

    def begin(self, name: str) -> None:
        """A run begins."""
        left = self.left()
        if self.progress is not None:
            [task] = self.progress.task_ids
            self.progress.update(task, description=name, completed=self._done, left=left)
            return
        about = f", {left}" if left else ""
        click.echo(f"chopper: {self._done + 1} of {self.total}: {name}{about}", err=True)

    def end(self) -> None:
        """It has ended."""
        self._done += 1


@contextlib.contextmanager
def bar(total: int, *, expected_s: float | None) -> Iterator[Bar]:
    """A bar at the bottom of the terminal; what is written to stderr meanwhile stands above it.

    Args:
        total: runs.
        expected_s: what all of them take, where it is known; used until the first has ended.
    """
    shown = Bar(total, expected_s=expected_s)
    if not sys.stderr.isatty():
        yield shown
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from chopper.cli._watching import scrolling

    console = Console(stderr=True)
    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()),
        *(TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeElapsedColumn()),
        TextColumn("{task.fields[left]}"),
    )
    with (
        Progress(*columns, console=console, transient=True) as shown.progress,
        scrolling(console) as shown.sink,
    ):
        shown.progress.add_task("", total=total, left="")
        yield shown
