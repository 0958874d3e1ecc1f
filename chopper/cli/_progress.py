"""Progress on stderr: a line once something has taken a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
