"""Watching a recording from the process that started it: a panel, an endpoint for Prometheus."""

from __future__ import annotations

import contextlib
import threading
from typing import IO, TYPE_CHECKING

from chopper.errors import ChopperError
from chopper.recording.live import LiveRun, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from chopper.recording.live import Snapshot

_PERIOD_S = 1.0
_DRAIN_S = 5.0


class Watch:
    """Polls a run once a second in a thread of its own.

    Args:
        path: the run's directory.
        attribute: also say what bounds the run, as ``chopper analyze`` does, after each new trace.
    """

    def __init__(self, path: Path, *, attribute: bool) -> None:
        self._live = LiveRun(path)
        self._attribute = attribute
        self._stop = threading.Event()
        self._path = path
        self._seen: list[Path] = []
        self.latest: Snapshot = self._live.poll()
        self.verdict = ""
        """What bounds the run, in a sentence."""
        self._thread = threading.Thread(target=self._run, name="chopper-watch", daemon=True)
        self.changed: Callable[[], None] = lambda: None
        """Called after each poll."""

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.poll()

    def poll(self) -> None:
        """Read new rows and update the display."""
        self.latest = self._live.poll()
        if self._attribute and self.latest.traces != self._seen:
            # A rank that is still writing cannot be read yet: the next poll tries again.
            with contextlib.suppress(ChopperError, OSError):
                from chopper.api import attribute

                self.verdict = attribute(self._path).verdict.sentence
                self._seen = self.latest.traces
        self.changed()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._live.close()


@contextlib.contextmanager
def panel(path: Path, title: str) -> Iterator[Callable[[IO[bytes]], None]]:
    """A panel at the bottom of the terminal; gives what takes the command's output.

    The output goes through this process line by line and scrolls by above the panel.
    """
    from rich.console import Console
    from rich.live import Live

    from chopper.reports import live as rendering

    console = Console(stderr=True)
    watch = Watch(path, attribute=True)
    pumps: list[threading.Thread] = []

    def pump(stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            text = line.decode(errors="replace").rstrip("\n")
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    def take(stream: IO[bytes]) -> None:
        pumps.append(threading.Thread(target=pump, args=(stream,), daemon=True))
        pumps[-1].start()

    with Live(rendering.panel(watch.latest, title), console=console, auto_refresh=False) as display:
        watch.changed = lambda: display.update(
            rendering.panel(watch.latest, title, watch.verdict), refresh=True
        )
        watch.start()
        try:
            yield take
        finally:
            # All that held the pipe has ended, or was ended: what is left of it comes at once.
            for thread in pumps:
                thread.join(timeout=_DRAIN_S)
            watch.stop()
            watch.poll()


@contextlib.contextmanager
def endpoint(path: Path, address: tuple[str, int]) -> Iterator[int]:
    """Serve the run's metrics meanwhile; gives the port.

    Raises:
        ChopperError: the address cannot be taken, or prometheus-client is missing.
    """
    watch = Watch(path, attribute=False)
    port, stop = serve(address, lambda: watch.latest)
    watch.start()
    try:
        yield port
    finally:
        stop()
        watch.stop()
