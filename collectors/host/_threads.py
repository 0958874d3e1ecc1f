"""Threads of the ranks: time on a core, time waiting for one; and the kernel's counts of events.

Which of a rank's threads waits matters: a data loader may, the thread that launches may not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from chopper.collectors.host._ranks import RankWatcher
from chopper.collectors.procfs import KeptFile
from chopper.collectors.sampler import Sink
from chopper.errors import CollectorUnavailable

_THREADS = 64
"""Threads of one rank that are watched: those that ran most when it was first looked at."""


class _Thread:
    """One thread's ``schedstat``: ns on a core, ns waiting for one, times it was put on one."""

    def __init__(self, folder: Path) -> None:
        self.tid = int(folder.name)
        self.name = (folder / "comm").read_text(errors="replace").strip()
        self._file = KeptFile(folder / "schedstat")
        self.last: tuple[int, int, int] | None = None

    def read(self) -> tuple[int, int, int]:
        """Raises OSError or ValueError when the thread has gone."""
        run, delay, slices = self._file.read().split()[:3]
        return int(run), int(delay), int(slices)

    def close(self) -> None:
        self._file.close()


class ThreadSource(RankWatcher):
    """Threads of each rank that ran or waited since their last row. schedstat -> PROCESS_THREAD."""

    name: ClassVar[str] = "threads"
    tables: ClassVar[tuple[str, ...]] = ("process_thread",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threads: dict[int, dict[int, _Thread]] = {}

    def open(self) -> None:
        """Look for ranks; there may be none yet."""
        file = self.keep("proc/self/schedstat")
        if len(file.read().split()) < 3:
            raise CollectorUnavailable(f"{file.path}: the kernel counts no run delays")
        self.look(time.monotonic_ns())

    def sample(self, sink: Sink, now_ns: int) -> None:
        self.look(now_ns)
        for rank, threads in self._threads.items():
            for tid, thread in list(threads.items()):
                try:
                    now = thread.read()
                except (OSError, ValueError):
                    threads.pop(tid).close()
                    continue
                if now != thread.last:
                    thread.last = now
                    sink.add("process_thread", rank, self._pids[rank], tid, thread.name, *now)

    def _look_within(self) -> None:
        for rank, pid in self._pids.items():
            self._look_at(rank, self.root / f"proc/{pid}/task")

    def _look_at(self, rank: int, folder: Path) -> None:
        known = self._threads.setdefault(rank, {})
        try:
            tids = [int(name) for name in os.listdir(folder) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return
        new_threads = []
        for tid in tids:
            if tid in known:
                continue
            try:
                thread = _Thread(folder / str(tid))
                new_threads.append((thread.read()[0], thread))
            except (OSError, ValueError):
                continue
        # The main thread counts first, then those that ran most.
        new_threads.sort(key=lambda entry: (entry[1].tid != self._pids[rank], -entry[0]))
        room = max(_THREADS - len(known), 0)
        for _ran, thread in new_threads[:room]:
            known[thread.tid] = thread
        for _ran, thread in new_threads[room:]:
            thread.close()
        if len(new_threads) > room:
            self.absent[f"process_thread[rank {rank}]"] = (
                f"{len(tids) - len(known)} of {len(tids)} threads are left out: "
                f"{_THREADS} are watched"
            )

    def _forget(self, rank: int) -> None:
        for thread in self._threads.pop(rank, {}).values():
            thread.close()


_HARDWARE, _SOFTWARE = 0, 1
# Column of `process_event` → type and number of perf_event_open(2).
EVENTS: dict[str, tuple[int, int]] = {
    "context_switch_count": (_SOFTWARE, 3),
    "migration_count": (_SOFTWARE, 4),
    "page_fault_count": (_SOFTWARE, 2),
    "major_fault_count": (_SOFTWARE, 6),
    "cycle_count": (_HARDWARE, 0),
    "instruction_count": (_HARDWARE, 1),
    "cache_miss_count": (_HARDWARE, 3),
}
_SYSCALLS = {"x86_64": 298, "aarch64": 241, "ppc64le": 319, "riscv64": 241}
_ATTRIBUTE_BYTES = 112
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_TIMES = 1 | 2
"""Each reading with the time that the event was wanted, and the time that it was counted."""
_EVENT_THREADS = 32


def open_event(kind: int, number: int, tid: int) -> int:
    """Open a descriptor that counts one event of a thread and of its future children.

    Where the kernel does not let a user see itself, only what runs outside of the kernel counts.

    Raises:
        OSError: it is not allowed, or this machine does not count it.
    """
    call = _SYSCALLS.get(platform.machine())
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    problem = 0
    for flags in (_INHERIT, _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR):
        if flags != _INHERIT and kind == _SOFTWARE and number in (3, 4):
            break  # the kernel switches and migrates: without it there is nothing to count
        head = struct.pack("IIQQQQQ", kind, _ATTRIBUTE_BYTES, number, 0, 0, _TIMES, flags)
        attribute = ctypes.create_string_buffer(head, _ATTRIBUTE_BYTES)
        descriptor = libc.syscall(call, attribute, tid, -1, -1, ctypes.c_ulong(1 << 3))
        if descriptor >= 0:
            return int(descriptor)
        problem = ctypes.get_errno()
        if problem not in (errno.EACCES, errno.EPERM):
            break
    raise OSError(problem, os.strerror(problem))


def read_event(descriptor: int) -> int:
    """Count so far, made up for the time in which other events had the counter."""
    words: tuple[int, int, int] = struct.unpack("QQQ", os.read(descriptor, 24))
    value, wanted_ns, counted_ns = words
    if counted_ns and counted_ns < wanted_ns:
        return round(value * (wanted_ns / counted_ns))
    return value


class EventSource(RankWatcher):
    """Events of each rank that the kernel counts. perf_event_open -> PROCESS_EVENT.

    Counted from when a rank is first seen: of the threads that it has then, and of all that these
    start later, data loader workers among them.
    """

    name: ClassVar[str] = "events"
    tables: ClassVar[tuple[str, ...]] = ("process_event",)

    def __init__(
        self, *args: Any, opener: Callable[[int, int, int], int] = open_event, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._opener = opener
        self._counters: dict[int, dict[str, list[int]]] = {}
        """Rank → column → descriptors, one for each thread."""
        self._usable: dict[str, tuple[int, int]] = {}

    def open(self) -> None:
        """Find out which events this process may count, of itself."""
        for column, event in EVENTS.items():
            try:
                os.close(self._opener(*event, 0))
                self._usable[column] = event
            except OSError as exc:
                self.absent[f"process_event.{column}"] = _why(exc)
        if not self._usable:
            raise CollectorUnavailable(
                "perf_event_open: " + "; ".join(dict.fromkeys(self.absent.values()))
            )
        self.look(time.monotonic_ns())

    def _begin(self, rank: int, pid: int) -> None:
        try:
            tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
        except OSError:
            return
        if len(tids) > _EVENT_THREADS:
            self.absent[f"process_event[rank {rank}]"] = (
                f"{len(tids) - _EVENT_THREADS} of {len(tids)} threads are not counted"
            )
        counters = self._counters[rank] = {}
        for column, event in self._usable.items():
            for tid in tids[:_EVENT_THREADS]:
                try:
                    counters.setdefault(column, []).append(self._opener(*event, tid))
                except ProcessLookupError:
                    continue
                except OSError as exc:
                    self.absent[f"process_event.{column}"] = f"rank {rank}: {_why(exc)}"
                    for descriptor in counters.pop(column, []):
                        os.close(descriptor)
                    break

    def sample(self, sink: Sink, now_ns: int) -> None:
        self.look(now_ns)
        for rank, counters in list(self._counters.items()):
            pid = self._pids[rank]
            if not Path(f"/proc/{pid}").exists():
                self._forget(rank)
                continue
            row = [
                sum(map(read_event, counters[column])) if counters.get(column) else None
                for column in EVENTS
            ]
            if any(value is not None for value in row):
                sink.add("process_event", rank, pid, *row)

    def _forget(self, rank: int) -> None:
        for descriptors in self._counters.pop(rank, {}).values():
            for descriptor in descriptors:
                os.close(descriptor)


def _why(exc: OSError) -> str:
    if exc.errno in (errno.EACCES, errno.EPERM):
        return (
            "the kernel does not allow it: kernel.perf_event_paranoid must be 1 or less, or the "
            "process needs CAP_PERFMON"
        )
    if exc.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL):
        return "this machine does not count it (virtual ones rarely do)"
    return exc.strerror or str(exc)
