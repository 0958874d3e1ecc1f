"""The processes of the ranks: CPU time, memory, threads, children."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import ClassVar

from chopper.collectors.host._ranks import RankWatcher
from chopper.collectors.procfs import Budget, KeptFile, content, try_open
from chopper.collectors.sampler import COMM, Sink
from chopper.errors import CollectorUnavailable


class _Process:
    """One process under watch, through kept files; OSError where it is gone already."""

    def __init__(self, pid: int, proc: Path, *, with_clock: bool) -> None:
        self.pid = pid
        self._proc = proc / str(pid)
        self._stat = KeptFile(self._proc / "stat")
        self._rollup: KeptFile | str | None = None
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

    def pss_bytes(self) -> int | str:
        """Proportional set size, or why it cannot be read."""
        if self._rollup is None:
            self._rollup = try_open(self._proc / "smaps_rollup")
        if isinstance(self._rollup, str):
            return self._rollup
        line = re.search(rb"^Pss:\s+(\d+) kB", content(self._rollup), re.MULTILINE)
        return int(line[1]) * 1024 if line else f"{self._rollup.path}: has no Pss"

    def close(self) -> None:
        for file in (self._stat, self._rollup, self._schedstat):
            if isinstance(file, KeptFile):
                file.close()


_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RankSource(RankWatcher):
    """The ranks of a run on this host, with their children. -> PROCESS.

    Args:
        scan_ns: time between looks for new ranks and new children.
        pss_ns: shortest time between readings of the proportional set size.
    """

    name: ClassVar[str] = "ranks"
    tables: ClassVar[tuple[str, ...]] = ("process",)

    # Reading smaps_rollup walks the page tables with the process' memory map locked.
    _PSS_COST_RATIO = 0.005
    _PSS_LIMIT_NS = 50_000_000

    def __init__(
        self,
        run_path: str,
        hostname: str,
        root: str = "/",
        scan_ns: int = 1_000_000_000,
        pss_ns: int = 1_000_000_000,
    ) -> None:
        super().__init__(run_path, hostname, root, scan_ns)
        self._proc = self.root / "proc"
        self._with_clock = root == "/"
        self._pss = Budget(pss_ns, self._PSS_COST_RATIO)
        self._pss_off = False
        self._ranks: dict[int, _Process] = {}
        self._children: dict[int, dict[int, _Process]] = {}
        self._parents: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}

    def open(self) -> None:
        if not (self._proc / "self/stat").exists():
            raise CollectorUnavailable(f"{self._proc}/self/stat: not found")
        if not (self._proc / "self/schedstat").exists():
            self.absent["process.run_delay_ns"] = f"{self._proc}/<pid>/schedstat: not found"
        if not (self._proc / "self/smaps_rollup").exists():
            self._no_pss(f"{self._proc}/<pid>/smaps_rollup: not found")
        self.look(time.monotonic_ns())

    def _no_pss(self, reason: str) -> None:
        self._pss_off = True
        self.absent["process.pss_bytes"] = reason

    def sample(self, sink: Sink, now_ns: int) -> None:
        self.look(now_ns)
        with_pss = not self._pss_off and bool(self._ranks) and self._pss.due(now_ns)
        pss_cost_ns = 0
        for rank, process in list(self._ranks.items()):
            row = self._rank_row(rank, process, now_ns)
            if row is None:
                continue
            pss_bytes = None
            if with_pss:
                before_ns = time.thread_time_ns()
                pss_bytes = self._pss_of(rank)
                pss_cost_ns += time.thread_time_ns() - before_ns
            *shares, rss_bytes, threads = row
            children = len(self._children.get(rank, ()))
            values = (*shares, rss_bytes, pss_bytes, threads, children)
            sink.add("process", rank, process.pid, *values)
        if with_pss:
            self._pss.charge(now_ns, pss_cost_ns)

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

    def _pss_of(self, rank: int) -> int | None:
        total_bytes = 0
        for process in (self._ranks[rank], *self._children.get(rank, {}).values()):
            before_ns = time.thread_time_ns()
            pss = process.pss_bytes()
            took_ns = time.thread_time_ns() - before_ns
            if took_ns > self._PSS_LIMIT_NS:
                self._no_pss(
                    f"left out after one reading took {took_ns / 1e6:.0f} ms, in which the "
                    "process could not change its memory map"
                )
            if isinstance(pss, str):
                self.absent["process.pss_bytes"] = pss
                return None
            total_bytes += pss
        return total_bytes

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
