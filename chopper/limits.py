"""Limits of reading other tools' files: a small file cannot take a machine's memory.

Recordings unpack to 10 to 50 times their size; a file made to do harm unpacks to 1000 times. What
is unpacked is therefore measured against what was read, and what is held in memory against what is
free. ``chopper --max-input 40GB …``, or ``CHOPPER_MAX_INPUT=40GB`` in the environment, replaces
both by one size: that much may be unpacked from each file, and no more. The same holds for what a
server sends, which is also bounded in time and by the free disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from chopper.errors import InputError
from chopper.quantities import size_bytes
from chopper.wording import bytes_

_T = TypeVar("_T")
VARIABLE = "CHOPPER_MAX_INPUT"
MAX_RATIO = 200
"""Bytes unpacked for each byte read; DEFLATE gives up to 1032."""
RATIO_FROM_BYTES = 16 << 20
"""Files that unpack to less than this may have any ratio."""
LARGE_TRACE_BYTES = 1_000_000_000
"""Of text: a trace that has more is read a stretch of its steps at a time."""
ROW_BYTES = 250
"""Of text, about, that a host span or a device event takes in a trace."""
MAX_LINE_BYTES = 1 << 20
"""A line of a CSV; the longest kernel names have some thousand bytes."""
SLOW_S, SLOWEST_BYTES_PER_S = 30.0, 1_000
"""A server that sends less than that for so long is given up."""
LONGEST_S = 6 * 3_600.0
"""Of the download of one file."""
UNTOLD_BYTES = 2 << 30
"""That a server may send of a file whose size it has not told before."""
_DISK_EACH_BYTES = 8 << 20


def usable_memory_bytes() -> int:
    """Memory that can be had without swapping, and within the container's limit."""
    import psutil

    available: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")

    def text(name: str) -> str:
        return (group / name).read_text(encoding="ascii")

    try:
        limit = int(text("memory.max"))  # "max" is no number: no limit
        used = int(text("memory.current"))
        stat = dict(line.split() for line in text("memory.stat").splitlines())
        # File pages count as used, but are given up under pressure.
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        return max(0, min(available, limit - used + cached))
    except (OSError, ValueError, KeyError):
        return available


def return_freed_memory() -> None:
    """Return freed memory to the system, as far as the allocators can."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity mask, and its container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no second version of control groups here
    return cores


def within(limit_s: float, work: Callable[[], _T]) -> _T:
    """Do what waits for a server, in a thread: no signal ends what waits in C++.

    Raises:
        TimeoutError: it takes longer.
    """
    answers: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as exc:  # noqa: BLE001 - raised below
            answers.put((None, exc))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer for {limit_s:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class Intake:
    """Count the bytes read of one file; beyond the limits raise an `InputError`.

    Args:
        path: the file, for messages.
        held_ratio: bytes of memory that the reader takes for each byte of text.
    """

    def __init__(self, path: Path | str, held_ratio: float) -> None:
        self._path = path
        self._held_ratio = held_ratio
        named = os.environ.get(VARIABLE)
        self._allowed_bytes = None if not named else size_bytes(named, VARIABLE)
        self._usable_bytes: int | None = None

    @property
    def allowed_bytes(self) -> int | None:
        """What the user allows of each file; None where they named no size."""
        return self._allowed_bytes

    def check(self, read_bytes: int, unpacked_bytes: int) -> None:
        """Refuse a file of which this much was read and unpacked so far."""
        if self._allowed_bytes is not None:
            if unpacked_bytes > self._allowed_bytes:
                raise InputError(
                    f"{self._path}: exceeds the limit of {bytes_(self._allowed_bytes)} set by "
                    "--max-input; raise it, or record less"
                )
            return
        if unpacked_bytes <= RATIO_FROM_BYTES:
            return
        if unpacked_bytes > MAX_RATIO * read_bytes:
            raise InputError(
                f"{self._path}: {bytes_(read_bytes)} of it unpack to {bytes_(unpacked_bytes)}, "
                f"more than {MAX_RATIO} times as much, implausible for a recording; if "
                "it is genuine, allow its size with `chopper --max-input 10GB` before the command"
            )
        self.check_memory(unpacked_bytes)

    def check_memory(self, text_bytes: int, held_ratio: float | None = None) -> None:
        """Refuse a text that takes more memory than there is.

        Args:
            text_bytes: its size so far.
            held_ratio: bytes of memory for each of its bytes, where it is not the file's usual.
        """
        if self._allowed_bytes is not None:
            return
        if self._usable_bytes is None:
            self._usable_bytes = usable_memory_bytes()
        needed_bytes = round(text_bytes * (self._held_ratio if held_ratio is None else held_ratio))
        if needed_bytes > self._usable_bytes:
            raise InputError(
                f"{self._path}: reading {bytes_(text_bytes)} of it takes about "
                f"{bytes_(needed_bytes)} of memory, but only {bytes_(self._usable_bytes)} are "
                "free; read it on a machine with more memory, or try anyway with `chopper "
                "--max-input 10GB` before the command"
            )


class Arrival:
    """Count the bytes that a server sends of one file; beyond the limits raise an `InputError`.

    Args:
        name: the file, for messages.
        folder: where it is written; None where it is not.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._name = name
        self._folder = folder
        self._intake = Intake(name, 0.0)
        self._began_s = self._since_s = time.monotonic()
        self._since_bytes = 0
        self._disk_at_bytes = _DISK_EACH_BYTES
        self._least_free_bytes = 0 if folder is None else self._reserve(folder)
        self._most_bytes: int | None = None
        self._is_told = self._intake.allowed_bytes is not None
        self.sent_bytes = 0
        """So far."""

    def _reserve(self, folder: Path) -> int:
        """Bytes of the disk that stay free: half of it, or what a named limit leaves alone."""
        disk = shutil.disk_usage(folder)
        named = self._intake.allowed_bytes is not None
        return min(disk.total // 50, 2 << 30) if named else disk.free // 2

    def expect(self, size_bytes: int | None) -> None:
        """Take notice of the size that a server tells; refuse one beyond the limits."""
        if size_bytes is not None:
            self._is_told = True
            self._most_bytes = size_bytes
            self._intake.check(size_bytes, size_bytes)
            if self._folder is not None and size_bytes > _DISK_EACH_BYTES:
                self._check_disk(size_bytes)

    def at(self, sent_bytes: int) -> None:
        """Count the bytes received so far."""
        self.sent_bytes = max(self.sent_bytes, sent_bytes)
        self._intake.check(self.sent_bytes, self.sent_bytes)
        if self._most_bytes is not None and self.sent_bytes > self._most_bytes:
            raise InputError(
                f"{self._name}: more arrives than the {bytes_(self._most_bytes)} that the server "
                "told; try again"
            )
        if not self._is_told and self.sent_bytes > UNTOLD_BYTES:
            raise InputError(
                f"{self._name}: more than {bytes_(UNTOLD_BYTES)} arrived of a file whose size the "
                "server has not told; if it is genuine, allow its size with `chopper --max-input "
                "10GB` before the command"
            )
        if self._folder is not None and self.sent_bytes >= self._disk_at_bytes:
            self._disk_at_bytes = self.sent_bytes + _DISK_EACH_BYTES
            self._check_disk(0)
        now_s = time.monotonic()
        if now_s - self._began_s > LONGEST_S:
            raise InputError(
                f"{self._name}: {bytes_(self.sent_bytes)} arrived in "
                f"{LONGEST_S / 3_600:.0f} hours, which is as long as a download may take; copy it "
                "by other means and name the copy"
            )
        if now_s - self._since_s > SLOW_S:
            came_bytes = self.sent_bytes - self._since_bytes
            if came_bytes < SLOWEST_BYTES_PER_S * SLOW_S:
                raise InputError(
                    f"{self._name}: {came_bytes} bytes arrived in {SLOW_S:g} s, expected at least "
                    f"{SLOWEST_BYTES_PER_S} each second; try again, or copy it by other means"
                )
            self._since_s, self._since_bytes = now_s, self.sent_bytes

    def _check_disk(self, more_bytes: int) -> None:
        assert self._folder is not None
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes - more_bytes < self._least_free_bytes:
            raise InputError(
                f"{self._name}: {bytes_(self.sent_bytes + more_bytes)} of it leave too little "
                f"of the disk of {self._folder.parent} free ({bytes_(free_bytes)}); set "
                "XDG_CACHE_HOME to a larger disk, or allow its size with `chopper --max-input "
                "100GB` before the command"
            )
