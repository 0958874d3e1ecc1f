"""Signals and forks: close a recording when the process is told to end, and end as it would have.

torchrun ends the other ranks by SIGTERM when one of them dies, and a terminal that is closed ends
its programs by SIGHUP. Python would be gone at once, and the last steps with it. A handler of the
program's own is never replaced, nor is the signal taken where it is ignored (``nohup``). No trace
survives in a forked child, and none may harm it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Windows has no SIGHUP.
_SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n))
_PATIENCE_S = 1.0
"""A main thread that has not noticed the signal for so long counts as blocked."""
_traced = False
"""True once this process, or one that it was forked from, has traced."""
_forked_from_traced = False


class TerminationGuard:
    """Calls ``close`` on SIGTERM and SIGHUP, then delivers the signal again.

    Python runs handlers in the main thread, between bytecodes: never, while that thread waits
    inside a collective whose peer is dead. So a second thread learns of the signal through the
    wake-up descriptor, waits a moment, and closes in the main thread's place.

    Args:
        close: called with the signal's number, and with True from the main thread, with False
            from the other one, where the profiler must not be touched; returns whether the process
            may end now.
    """

    def __init__(self, close: Callable[[int, bool], bool]) -> None:
        self._close = close
        self._noticed = threading.Event()
        self._reading = threading.Lock()
        self._received: set[int] = set()
        self._taken: list[signal.Signals] = []
        self._pipe: tuple[int, int] | None = None
        self._pid = os.getpid()

    def arm(self) -> None:
        """Take the signals over that nobody has, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        free = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if not free:
            return
        for number in free:
            signal.signal(number, self._on_signal)
        self._taken = free
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:  # an event loop uses it
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            os.close(reader)
            os.close(writer)
            return
        self._pipe = (reader, writer)
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="chopper").start()

    def disarm(self) -> None:
        """Give the signals back. In a forked child, where the thread is not, only that."""
        if not self._taken:
            return
        taken, self._taken = self._taken, []
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in taken:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)
            if self._pipe is not None:
                current = signal.set_wakeup_fd(-1)
                if current not in (-1, self._pipe[1]):
                    signal.set_wakeup_fd(current)
        if self._pipe is not None:
            reader, writer = self._pipe
            self._pipe = None
            os.close(writer)  # the thread reads the end of the pipe and closes its side
            if os.getpid() != self._pid:
                os.close(reader)

    def told_to_end(self) -> bool:
        """Tell whether Ctrl-C or a signal that ends programs came, whoever handled it."""
        if self._pipe is not None:
            self._read(self._pipe[0])
        return not self._received.isdisjoint((signal.SIGINT, *_SIGNALS))

    def _read(self, reader: int) -> bytes | None:
        """Return the numbers of signals that came, b"" at the end; None where there are none."""
        with self._reading:
            try:
                data = os.read(reader, 64)
            except BlockingIOError:
                return None
            self._received.update(data)
            return data

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self._noticed.set()
        if os.getpid() == self._pid and not self._close(number, True):
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _watch(self, reader: int) -> None:
        arrival = select.poll()
        arrival.register(reader, select.POLLIN)
        while True:
            arrival.poll()
            if self._read(reader) == b"":
                os.close(reader)
                return
            number = next((number for number in self._taken if number in self._received), None)
            if number is not None and not self._noticed.wait(_PATIENCE_S):
                if not self._close(number, False):
                    continue
                # signal.signal() is for the main thread only.
                ctypes.CDLL(None).signal(ctypes.c_int(number), ctypes.c_void_p(None))
                os.kill(os.getpid(), number)


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C: a second one must not cut short the writing of what the first one ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        # None: a handler that was not installed from Python cannot be put back.
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Until something is there to be put away, Ctrl-C ends this process with one line, in place."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody's own
        yield
        return

    def end(_number: int, _frame: Any) -> None:
        # A terminal's line may hold progress.
        os.write(
            2, b"\r\x1b[Kchopper: interrupted\n" if os.isatty(2) else b"chopper: interrupted\n"
        )
        os._exit(130)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def has_traced() -> None:
    """Kineto's threads run in this process from here on."""
    global _traced
    _traced = True


def cannot_trace() -> bool:
    """Return whether this process was forked from one that traced: it lacks Kineto's threads."""
    return _forked_from_traced


def watch_forks(before: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Have ``before`` called before each fork, and ``in_child`` after it, in the child."""

    def after() -> None:
        global _forked_from_traced
        if _traced:
            _forked_from_traced = True
            from chopper.collectors.torch_trace import leave_without_destructors

            leave_without_destructors()
        in_child()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=before, after_in_child=after)


def in_multiprocessing_child() -> bool:
    """Return whether multiprocessing started this process, which then ends without ``atexit``."""
    if "multiprocessing.util" not in sys.modules:
        return False
    import multiprocessing

    return multiprocessing.parent_process() is not None


def forks_loader_worker() -> bool:
    """Return whether torch's data loader is about to fork a worker, which only loads."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back
    return False
