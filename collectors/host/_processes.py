"""The ranks of a run on this host, found by their manifests: their processes, threads, events."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from chopper.collectors.procfs import Budget, FileSource, KeptFile, content, try_open
from chopper.collectors.sampler import COMM, Sink
from chopper.errors import JSON_ERRORS, CollectorUnavailable
from chopper.storage.processes import machine
from chopper.tables.ranges import Count, Rank

_SCAN_NS = 1_000_000_000
_SCAN_COST_RATIO = 0.005


class ProcessPart(msgspec.Struct):
    """The few fields of a rank's manifest that a sampler needs."""

    rank: Rank
    hostname: str | None = None
    machine: str | None = None
    pid: Count | None = None


class ProcessWatcher(FileSource):
    """A source that follows the ranks of a run on this host, whenever they begin."""

    def __init__(
        self, run_path: str, hostname: str, root: str = "/", scan_ns: int = _SCAN_NS
    ) -> None:
        super().__init__(root)
        self._run_path = Path(run_path)
        self._hostname = hostname
        self._scan = Budget(scan_ns, _SCAN_COST_RATIO)
        self._parts: dict[str, tuple[int, ProcessPart]] = {}
        """Folder of a rank → when its manifest changed, and that."""
        self._pids: dict[int, int] = {}
        """Rank → its process."""

    def look(self, now_ns: int) -> None:
        """Find new ranks, and changes in their processes, unless it is too soon."""
        if not self._scan.due(now_ns):
            return
        # CPU time: on a busy machine a look may take long because others run in the middle of it.
        before_ns = time.thread_time_ns()
        for rank, pid in self._changed():
            if self._pids.get(rank) != pid:
                self._forget(rank)  # restarted under another process
                self._pids[rank] = pid
                self._begin(rank, pid)
        self._look_within()
        self._scan.charge(now_ns, time.thread_time_ns() - before_ns)

    def _changed(self) -> Iterator[tuple[int, int]]:
        """(rank, process) of this host's ranks whose manifest changed since the last look."""
        try:
            folders = [e.name for e in os.scandir(self._run_path) if e.name.startswith("rank-")]
        except OSError:
            return  # the run directory is on a file system that went away; watch who is known
        for folder in folders:
            seen_ns, known = self._parts.get(folder, (None, None))
            if known is not None and not self._is_here(known):
                continue  # another host's: on a shared file system there may be thousands
            file = self._run_path / folder / "manifest.json"
            try:
                changed_ns = file.stat().st_mtime_ns
                if seen_ns == changed_ns:
                    continue
                part = msgspec.json.decode(file.read_bytes(), type=ProcessPart)
            except (OSError, *JSON_ERRORS):
                continue  # not written yet, or not ours: the next look comes soon
            self._parts[folder] = (changed_ns, part)
            if self._is_here(part) and part.pid is not None:
                yield part.rank, part.pid

    def _is_here(self, part: ProcessPart) -> bool:
        """Tell whether a rank's number of its process means that process here."""
        return part.hostname == self._hostname and part.machine in (None, machine())

    def _begin(self, rank: int, pid: int) -> None:
        """Begin to watch a rank's process."""

    def _look_within(self) -> None:
        """Find changes in the watched processes."""

    def _forget(self, rank: int) -> None:
        """Close a rank's open files, if any."""

    def close(self) -> None:
        for rank in self._pids:
            self._forget(rank)
        super().close()


class _Process:
    """One process under watch, through kept files; OSError where it is gone already."""

    def __init__(self, pid: int, proc: Path, *, with_clock: bool) -> None:
        self.pid = pid
        self._proc = proc / str(pid)
        self._stat = KeptFile(self._proc / "stat")
        self._schedstat: KeptFile | str | None = None
        # The kernel's CPU clock of a process counts nanoseconds; /proc/<pid>/stat counts 10 ms.
        self._clock_id = ((~pid) << 3) | 2 if with_clock else None
        fields = self._fields()
        self.parent_pid = int(fields[1])
        self.is_sampler = self._comm == COMM.encode()
        self._cpu_ns = self._cpu_total_ns(fields)

    def _fields(self) -> list[bytes]:
        """Fields of ``stat`` from the third on: the second, the name, may hold anything."""
        data = self._stat.read()
        head, _, tail = data.rpartition(b")")
        self._comm = head.partition(b"(")[2]
        return tail.split()

    def _cpu_total_ns(self, fields: list[bytes]) -> int:
        if self._clock_id is not None:
            try:
                return time.clock_gettime_ns(self._clock_id)
            except OSError:
                self._clock_id = None
        return (int(fields[11]) + int(fields[12])) * _TICK_NS

    def sample(self) -> tuple[int | None, int, int]:
        """CPU time since the last call (None when it went backwards), RSS, threads."""
        fields = self._fields()
        if fields[0] in (b"Z", b"X"):
            raise ProcessLookupError(self.pid)
        cpu_ns = self._cpu_total_ns(fields)
        used_ns = cpu_ns - self._cpu_ns
        self._cpu_ns = cpu_ns
        return (
            used_ns if used_ns >= 0 else None,
            int(fields[21]) * _PAGE_BYTES,
            int(fields[17]),
        )

    def run_delay_ns(self) -> int | None:
        """Time that its main thread waited for a core, total."""
        if self._schedstat is None:
            self._schedstat = try_open(self._proc / "schedstat")
        if isinstance(self._schedstat, str):
            return None
        fields = content(self._schedstat).split()
        return int(fields[1]) if len(fields) > 1 else None

    def close(self) -> None:
        for file in (self._stat, self._schedstat):
            if isinstance(file, KeptFile):
                file.close()


_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessSource(ProcessWatcher):
    """The ranks of a run on this host, with their children. -> PROCESS."""

    name: ClassVar[str] = "ranks"
    tables: ClassVar[tuple[str, ...]] = ("process",)

    def __init__(
        self, run_path: str, hostname: str, root: str = "/", scan_ns: int = _SCAN_NS
    ) -> None:
        super().__init__(run_path, hostname, root, scan_ns)
        self._proc = self.root / "proc"
        self._with_clock = root == "/"
        self._ranks: dict[int, _Process] = {}
        self._children: dict[int, dict[int, _Process]] = {}
        self._parents: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}

    def open(self) -> None:
        if not (self._proc / "self/stat").exists():
            raise CollectorUnavailable(f"{self._proc}/self/stat: not found")
        if not (self._proc / "self/schedstat").exists():
            self.absent["process.run_delay_ns"] = f"{self._proc}/<pid>/schedstat: not found"
        self.look(time.monotonic_ns())

    def sample(self, sink: Sink, now_ns: int) -> None:
        self.look(now_ns)
        for rank, process in list(self._ranks.items()):
            row = self._rank_row(rank, process, now_ns)
            if row is not None:
                children = len(self._children.get(rank, ()))
                sink.add("process", rank, process.pid, *row, children)

    def _rank_row(
        self, rank: int, process: _Process, now_ns: int
    ) -> tuple[float | None, float | None, int | None, int, int] | None:
        try:
            own_ns, rss_bytes, threads = process.sample()
        except OSError:
            self._forget(rank)
            return None
        child_ns: int | None = 0
        for pid, child in list(self._children.get(rank, {}).items()):
            try:
                used_ns, child_rss_bytes, child_threads = child.sample()
            except OSError:
                self._children[rank].pop(pid).close()
                continue
            rss_bytes += child_rss_bytes
            threads += child_threads
            child_ns = None if child_ns is None or used_ns is None else child_ns + used_ns
        elapsed_ns = now_ns - self._last_ns.get(rank, now_ns)
        self._last_ns[rank] = now_ns
        cpu_ratio = child_ratio = None
        if elapsed_ns > 0 and own_ns is not None and child_ns is not None:
            cpu_ratio = (own_ns + child_ns) / elapsed_ns
            child_ratio = child_ns / elapsed_ns
        return cpu_ratio, child_ratio, process.run_delay_ns(), rss_bytes, threads

    def _forget(self, rank: int) -> None:
        processes = [self._ranks.pop(rank, None), *self._children.pop(rank, {}).values()]
        for process in processes:
            if process is not None:
                process.close()
        self._last_ns.pop(rank, None)

    def _begin(self, rank: int, pid: int) -> None:
        with contextlib.suppress(OSError):
            self._ranks[rank] = _Process(pid, self._proc, with_clock=self._with_clock)

    def _look_within(self) -> None:
        """Find new children: /proc/<pid>/task/*/children is often not built in."""
        if not self._ranks:
            return
        alive = {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208
        for pid in self._parents.keys() - alive:
            del self._parents[pid]
        for pid in alive - self._parents.keys():
            try:
                stat = (self._proc / str(pid) / "stat").read_bytes()
            except OSError:
                continue
            self._parents[pid] = int(stat.rpartition(b")")[2].split()[1])
        rank_of = {process.pid: rank for rank, process in self._ranks.items()}
        for pid in sorted(alive):
            rank = self._ancestor(pid, rank_of)
            if rank is None or pid in rank_of or pid in self._children.get(rank, {}):
                continue
            try:
                child = _Process(pid, self._proc, with_clock=self._with_clock)
            except OSError:
                continue
            if child.is_sampler:
                child.close()
            else:
                self._children.setdefault(rank, {})[pid] = child

    def _ancestor(self, pid: int, rank_of: dict[int, int]) -> int | None:
        depth = 0
        while pid not in rank_of:
            pid = self._parents.get(pid, 0)
            depth += 1
            if pid <= 1 or depth > 64:
                return None
        return rank_of[pid]


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


class ThreadSource(ProcessWatcher):
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


def open_event(kind: int, number: int, tid: int, cpu: int = -1) -> int:
    """Open a descriptor that counts one event of a thread and of its future children.

    With a ``cpu``, and -1 as the thread, all that happens there counts. Where the kernel does not
    let a user see itself, only what runs outside of the kernel counts.

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
        descriptor = libc.syscall(call, attribute, tid, cpu, -1, ctypes.c_ulong(1 << 3))
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


class EventSource(ProcessWatcher):
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
                self.absent[f"process_event.{column}"] = why_uncounted(exc)
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
                    self.absent[f"process_event.{column}"] = f"rank {rank}: {why_uncounted(exc)}"
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


def why_uncounted(exc: OSError) -> str:
    """Return why the kernel counts no event, in words."""
    if exc.errno in (errno.EACCES, errno.EPERM):
        return (
            "the kernel does not allow it: kernel.perf_event_paranoid must be 1 or less, or the "
            "process needs CAP_PERFMON"
        )
    if exc.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL):
        return "this machine does not count it (virtual ones rarely do)"
    return exc.strerror or str(exc)
