"""Identity of the process that records, by which others learn whether it still runs.

The number of a process is reused, and means something only within one boot of one machine and one
PID namespace: with the process's start time and those two it is unique.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chopper.storage.files import open_own

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


def ran_at(pid: int, time_ns: int) -> bool:
    """Return whether a process of this machine had this number at a time, in Unix ns."""
    if pid == os.getpid() or not _look_up(pid)[0]:
        return pid == os.getpid()
    began_ns = started_ns(pid)
    # A process that began later has its number by chance. Its start is known to 10 ms.
    return began_ns is None or began_ns <= time_ns + 20_000_000


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
        return _exists(pid), None
    return (False, None) if state in (b"Z", b"X") else (True, int(fields[18]))


def _exists(pid: int) -> bool:
    if pid < 1:  # stands for a group of processes
        return False
    if sys.platform == "win32":  # there, signal 0 is Ctrl-C
        import psutil

        return psutil.pid_exists(pid)
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


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
    descriptor = _acquire(file, time.monotonic() + wait_s)
    pid = os.getpid()
    try:
        yield functools.partial(_write, descriptor)
    finally:
        if descriptor is not None:
            if os.getpid() == pid:
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.fstat(descriptor), file.lstat()):
                        file.unlink()
                _flock(descriptor, "LOCK_UN")  # a forked child may have it open still
            os.close(descriptor)


def lock(descriptor: int) -> None:
    """Take the lock of an open file or directory, which ends with this process.

    Raises:
        BlockingIOError: another process holds it.
        OSError: there are no locks here.
    """
    _flock(descriptor, "LOCK_EX", "LOCK_NB")


def _flock(descriptor: int, *flags: str) -> None:
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "no locks on Windows")
    import fcntl

    fcntl.flock(descriptor, sum(getattr(fcntl, flag) for flag in flags))


def _write(descriptor: int | None, text: str) -> None:
    if descriptor is not None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _acquire(file: Path, deadline_s: float) -> int | None:
    if sys.platform == "win32":  # a file that is open could not be removed
        return None
    while True:
        try:
            descriptor = open_own(file)
        except FileNotFoundError:
            if not file.parent.is_dir():
                return None
            continue  # its holder removed it just now
        except OSError:
            return None
        try:
            lock(descriptor)
            # Whoever held it has removed the file: then this lock is of one that nobody sees.
            if os.path.samestat(os.fstat(descriptor), file.lstat()):
                _write(descriptor, str(os.getpid()))
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = os.pread(descriptor, 1 << 12, 0).decode(errors="replace")
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                raise HeldElsewhere(holder) from None
            time.sleep(_POLL_S)
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)
