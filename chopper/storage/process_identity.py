"""Identity of the process that records, by which others learn whether it still runs.

The number of a process is reused, and means something only within one boot of one machine and one
PID namespace: with the process's start time and those two it is unique.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chopper.storage.files import open_own, read_bytes

if TYPE_CHECKING:
    from filelock import FileLock

_PROC = Path("/proc")
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one machine."""

    pid: int
    started: int | None
    """When it started, in units that only comparisons for equality need; None when unknown."""
    machine: str | None
    """The boot and the PID namespace that ``pid`` belongs to; None when unknown."""


def identity_of(pid: int) -> ProcessIdentity:
    """Return the identity of a process of this machine."""
    return ProcessIdentity(pid, _look_up(pid)[1], machine())


def parent_identity() -> str:
    """Return a text that processes with the same parent have in common, and no others."""
    return f"{os.getppid()}.{_look_up(os.getppid())[1]}"


def runs(process: ProcessIdentity) -> bool | None:
    """Return whether a process still runs; None when it is of another machine, or unknown."""
    if process.machine is None or process.machine != machine():
        return None
    there, started = _look_up(process.pid)
    return there and (None in (started, process.started) or started == process.started)


@functools.cache
def machine() -> str:
    """Return the host, boot and PID namespace that the numbers of processes belong to."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append((_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(str((_PROC / "self/ns/pid").readlink()))
    return " ".join(parts)


def _look_up(pid: int) -> tuple[bool, int | None]:
    """Return whether a process runs, and when it started, where that is known.

    One that its parent has not reaped runs no more. One that /proc does not show (it is mounted
    with hidepid, or not at all) runs when it could be sent a signal.
    """
    try:
        # The name of the program, in parentheses, may hold anything.
        state, *fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        import psutil

        return psutil.pid_exists(pid), None
    return (False, None) if state in (b"Z", b"X") else (True, int(fields[18]))


def started_ns(pid: int) -> int | None:
    """Return when a process of this machine started, in Unix ns, to some 10 ms; None if hidden."""
    ticks = _look_up(pid)[1]
    if ticks is not None:
        # Not by the time of the boot, which /proc and psutil know to a second.
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf(
            "SC_CLK_TCK"
        )
        return time.time_ns() - age_ns
    import psutil

    try:
        return int(psutil.Process(pid).create_time() * 1e9)
    except psutil.Error:  # it is hidden from this user, or ended just now
        return None


class HeldElsewhere(Exception):
    """Another process holds a lock; its number, where it could be read, is the argument."""


@contextlib.contextmanager
def locked(file: Path, *, wait_s: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Hold a lock that ends with this process, whatever ends it; ``file`` is gone afterwards.

    Yields a function that replaces the number of this process, which others read, by a text.

    Where the file cannot be written, or there are no such locks (some file systems, Windows),
    nothing is held.

    Raises:
        HeldElsewhere: another process holds it still, after ``wait_s``.
        OutputError: what stands there is not a lock of ours.
    """
    lock, pid = _acquire(file, wait_s), os.getpid()
    if lock is None:
        yield lambda _: None
        return
    try:
        own = file.lstat()
        _write(file, str(pid))
        yield functools.partial(_write, file)
    finally:
        if os.getpid() == pid:  # not a forked child, which has it open, too
            with contextlib.suppress(OSError):
                if os.path.samestat(own, file.lstat()):  # not moved with the run meanwhile
                    file.unlink()
            lock.release()


def _acquire(file: Path, wait_s: float) -> FileLock | None:
    if sys.platform == "win32":  # a file that is open could not be removed
        return None
    import filelock

    lock = filelock.FileLock(file, poll_interval=_POLL_S, fallback_to_soft=False)
    try:
        os.close(open_own(file))  # filelock takes whatever stands there
        lock.acquire(timeout=wait_s)
    except filelock.Timeout:
        raise HeldElsewhere(_holder(file)) from None
    except FileNotFoundError:  # removed by its holder just now, or there is no such folder
        return _acquire(file, wait_s) if file.parent.is_dir() else None
    except OSError:
        return None
    return lock


def _write(file: Path, text: str) -> None:
    descriptor = open_own(file)
    with os.fdopen(descriptor, "wb") as opened:
        opened.truncate()
        opened.write(text.encode())


def _holder(file: Path) -> str:
    try:
        return read_bytes(file, error=OSError).decode(errors="replace")
    except OSError:  # it ended just now
        return ""
