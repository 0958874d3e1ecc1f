"""Body of the sampler's process."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from pathlib import Path

from chopper.collectors.sampler._loop import WATCH_S, Sampler
from chopper.collectors.sampler._source import COMM, SamplerConfig, SystemClock
from chopper.errors import ChopperError, OutputError, say
from chopper.storage.clock import anchor
from chopper.storage.files import encode_json, unpack_message

_NICE = 5
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


def _prctl(option: int, value: int | bytes) -> None:
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        libc.prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: pipe and parent check remain
        return


def _settle(clock: SystemClock) -> None:
    """Make this process quiet, recognisable, and mortal with its parent."""

    def stop(_signal: int, _frame: object) -> None:
        clock.stop_requested = True

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    # The kernel sends this when the parent's *thread* ends, so it only wakes the loop, which then
    # looks whether the parent process is still there.
    signal.signal(signal.SIGUSR1, lambda _signal, _frame: None)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    clock._stop_fds.append(read_fd)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1))
    _prctl(_PR_SET_NAME, COMM.encode())
    _prctl(_PR_SET_TIMERSLACK, 1000)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError, AttributeError):
        # A rank pinned to its cores passes that on; the sampler belongs wherever there is room.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _end_with_parent(parent_pid: int, begun: threading.Event) -> None:
    """End this process with its parent, also while a driver's call hangs at its start.

    Once the sampler has begun, it looks itself.
    """

    def watch() -> None:
        while not begun.wait(WATCH_S):
            if os.getppid() != parent_pid:
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="mortal").start()


class _Refuse:
    """An import hook that makes numpy and pandas look absent."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name in ("numpy", "pandas"):
            raise ModuleNotFoundError(f"the sampler runs without {name}", name=name)


def _load_pyarrow() -> None:
    """Load pyarrow before the first sample, without numpy and pandas.

    It would load both to see whether what it is given is theirs. Measured: 0.48 s of CPU and 112 MB
    with them, 0.09 s and 52 MB without.
    """
    refuse = _Refuse()
    sys.meta_path.insert(0, refuse)
    try:
        pyarrow = importlib.import_module("pyarrow")
        pyarrow.array([1], type=pyarrow.int64())
    except ImportError:  # before release 18 it insisted on numpy
        sys.meta_path.remove(refuse)
        for name in [n for n in sys.modules if n.partition(".")[0] == "pyarrow"]:
            del sys.modules[name]
        importlib.import_module("pyarrow")


def main() -> int:
    """Body of the sampler process: configuration on stdin, one line of answer on stdout."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return 1
        line += chunk
    config = unpack_message(line, SamplerConfig)
    anchor(config.clock_ns)
    clock = SystemClock(0, config.parent_pid)
    _settle(clock)
    begun = threading.Event()
    _end_with_parent(config.parent_pid, begun)
    try:
        _load_pyarrow()
        importlib.import_module("chopper.storage.streams")
        sampler = Sampler(
            config.collector,
            Path(config.directory),
            [(spec.make(), spec.hz) for spec in config.specs],
            clock,
            config.flush_ns,
            cpu_ratio=config.cpu_ratio,
        )
        sampler.flush()
    except ChopperError as exc:
        os.write(1, encode_json({"error": str(exc)}) + b"\n")
        return 1
    try:
        os.write(1, b"{}\n")
    except BrokenPipeError:  # the parent died while this process was starting
        return 1
    try:
        # Not sys.exit: a thread inside a driver's call would be waited for.
        begun.set()
        sampler.run_watched(os._exit)
    except OutputError as exc:
        say(str(exc))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
