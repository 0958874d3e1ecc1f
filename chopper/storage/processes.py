"""The processes that record: which of them run still, and the locks that they hold.

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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chopper.errors import RunFormatError
from chopper.storage import manifest as m
from chopper.storage.files import open_own, read_bytes
from chopper.storage.layout import MANIFEST, last_written_s, rank_dirs, sub_runs

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".claim"
"""Inside a run, while folders are claimed or moved."""
LOCK_WAIT_S = 20.0
"""Claiming takes milliseconds; a process that was stopped meanwhile must not hold up others."""
_RECENT_S = 3600.0
"""A recording of another host that wrote within this time may be alive: nobody here can tell."""
_PROC = Path("/proc")
_POLL_S = 0.002


class Identity(NamedTuple):
    """One process of one machine; the fields are named as those of a rank's manifest."""

    pid: int
    process_started: int | None
    """When it started, in units that only comparisons for equality need; None when unknown."""
    machine: str | None
    """The boot and the PID namespace that ``pid`` belongs to; None when unknown."""


def identity_of(pid: int) -> Identity:
    """Return the identity of a process of this machine."""
    return Identity(pid, _look_up(pid)[1], machine())


def parent_identity() -> str:
    """Return a text that processes with the same parent have in common, and no others."""
    return f"{os.getppid()}.{_look_up(os.getppid())[1]}"


def recorder_runs(part: m.RankManifest) -> bool | None:
    """Return whether the process that recorded a rank runs; None on other machines, or unknown."""
    if part.pid is None or part.machine is None or part.machine != machine():
        return None
    there, started = _look_up(part.pid)
    return there and (None in (started, part.process_started) or started == part.process_started)


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
    """Return until when a process of this machine had started, in Unix ns; None if hidden.

    It may have started a tick of the kernel (10 ms) before, but not after.
    """
    ticks = _look_up(pid)[1]
    if ticks is not None:
        # Not by the time of the boot, which /proc and psutil know to a second.
        until_ns = (ticks + 1) * 10**9 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + until_ns
    import psutil

    try:
        return int(psutil.Process(pid).create_time() * 1e9)
    except psutil.Error:  # it is hidden from this user, or ended just now
        return None


def part_of(folder: Path) -> m.RankManifest | None:
    """Return a rank's manifest; None when there is none that can be read."""
    try:
        return m.decode_rank(read_bytes(folder / MANIFEST, error=RunFormatError), "")
    except (OSError, RunFormatError):
        return None


def recorded_by(directory: Path) -> str | None:
    """Name the process that records into a rank's folder now; None when nobody does.

    Recordings of other hosts are taken for alive for an hour after their last sign of life.
    """
    part = part_of(directory)
    if part is None or part.status != "running" or part.pid is None:
        return None
    alive = recorder_runs(part)
    if alive is not None:
        return f"process {part.pid}" if alive and part.pid != os.getpid() else None
    if part.hostname is None:
        return None
    seen_s = last_written_s(directory)
    if seen_s is None or time.time() - seen_s >= _RECENT_S:
        return None
    return f"process {part.pid} of the host {part.hostname}"


def recorders(path: Path) -> list[tuple[Path, str]]:
    """The folders of a run, its sub-runs' included, that are being recorded into, and by whom."""
    folders = [folder for run in (path, *sub_runs(path)) for folder in rank_dirs(run)]
    owners = ((folder, recorded_by(folder)) for folder in folders)
    return [(folder, owner) for folder, owner in owners if owner is not None]


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
        lock_status = file.lstat()
        _write(file, str(pid))
        yield functools.partial(_write, file)
    finally:
        if os.getpid() == pid:  # not a forked child, which has it open, too
            with contextlib.suppress(OSError):
                if os.path.samestat(lock_status, file.lstat()):  # not moved with the run meanwhile
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
