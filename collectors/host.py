"""The host that a rank runs on: cores, memory, pressure, throttling, the ranks' processes, NICs.

Everything is read from /proc and /sys by a sampler process (:mod:`chopper.collectors.sampler`).
What a machine does not offer is left null and named with its reason; it is never 0.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from chopper.collectors.base import Availability
from chopper.collectors.process_groups import RankFinder
from chopper.collectors.procfs import Budget, KeptFile, counted, held, try_open
from chopper.collectors.sampled import CLOCKS, SampledCollector
from chopper.collectors.sampler import COMM, SourceSpec
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chopper.collectors.base import CollectorContext
    from chopper.collectors.sampler import Sink, Source

NAME = "host"
BY_DEFAULT = True
_DEFAULT_HZ = 10.0
# /proc/stat counts in ticks of 10 ms, and one row is written per core: on many cores a high rate
# costs disk and time and shows only the ticks.
_CORE_ROWS_PER_S = 1024
_SLOW_HZ = 2.0
"""Of what is read thread by thread: totals, so that nothing is lost between."""


class CoreSource:
    """Use of each core. /proc/stat -> CPU_CORE.

    Args:
        root: where the machine's ``proc`` lies.
    """

    name: ClassVar[str] = "cores"
    tables: ClassVar[tuple[str, ...]] = ("cpu_core",)

    def __init__(self, root: str = "/") -> None:
        self.absent: dict[str, str] = {}
        self._path = Path(root) / "proc/stat"
        self._file: KeptFile | None = None
        self._last: dict[int, list[int]] = {}

    def open(self) -> None:
        """Open /proc/stat and take the counters to start from."""
        file = try_open(self._path)
        if isinstance(file, str):
            raise CollectorUnavailable(file)
        self._file = file
        self._last = _core_ticks(file.read())
        if not self._last:
            raise CollectorUnavailable(f"{self._path}: names no core")
        if any(len(ticks) < 8 for ticks in self._last.values()):
            self.absent["cpu_core.steal_ratio"] = f"{self._path} has no steal column"

    def sample(self, sink: Sink, now_ns: int) -> None:
        """One row per core that both this reading and the one before know."""
        del now_ns
        assert self._file is not None
        ticks = _core_ticks(self._file.read())
        for core, now in ticks.items():
            before = self._last.get(core)
            if before is not None:
                sink.add("cpu_core", core, *_core_ratios(before, now))
        self._last = ticks

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


_MOST_CORES = 1 << 16
_LEAST_TICKS = 7
"""Kernels before 2.6.11 count no steal."""


def _core_ticks(stat: bytes) -> dict[int, list[int]]:
    cores: dict[int, list[int]] = {}
    for line in stat.split(b"\n"):
        if not line.startswith(b"cpu"):
            break  # the cores stand first
        name, *fields = line.split()
        # user nice system idle iowait irq softirq steal; guest time is inside user.
        core, *ticks = (counted(field) for field in (name[3:], *fields[:8]))
        if core is not None and core < _MOST_CORES and len(ticks) >= _LEAST_TICKS:
            told = [tick for tick in ticks if tick is not None]
            if len(told) == len(ticks):
                cores[core] = told
    return cores


def _core_ratios(
    before: list[int], now: list[int]
) -> tuple[float | None, float | None, float | None]:
    """Busy, system and steal since ``before``; None where a counter went backwards.

    idle and iowait are known to do that (proc(5)); a ratio made of them would be wrong.
    """
    delta = [b - a for a, b in zip(before, now, strict=False)]
    total = sum(delta)
    if total <= 0 or min(delta) < 0:
        return None, None, None
    user, nice, system, _idle, _iowait, irq, softirq, *steal = delta
    busy = user + nice + system + irq + softirq
    return (
        busy / total,
        (system + irq + softirq) / total,
        steal[0] / total if steal else None,
    )


class MachineSource:
    """Memory, pressure and CPU quota of the host. -> HOST.

    Args:
        root: where the machine's ``proc`` and ``sys`` lie.
    """

    name: ClassVar[str] = "machine"
    tables: ClassVar[tuple[str, ...]] = ("host",)

    def __init__(self, root: str = "/") -> None:
        self.absent: dict[str, str] = {}
        self._root = Path(root)
        self._meminfo: KeptFile | None = None
        self._pressure: dict[str, KeptFile | None] = {}
        self._throttling: list[tuple[KeptFile, bytes, int]] = []

    def open(self) -> None:
        """Find out which of the files there are."""
        self._meminfo = self._keep("proc/meminfo", "memory_available_bytes")
        for kind in ("cpu", "memory", "io"):
            self._pressure[kind] = self._keep(f"proc/pressure/{kind}", f"pressure_{kind}_some_ns")
        found = _throttling_files(self._root)
        if isinstance(found, str):
            self.absent["host.cgroup_throttled_ns"] = found
            self.absent["host.cgroup_throttled_count"] = found
        else:
            self._throttling = found
        if len(self.absent) == 6:
            raise CollectorUnavailable("; ".join(dict.fromkeys(self.absent.values())))

    def _keep(self, path: str, column: str) -> KeptFile | None:
        file = try_open(self._root / path)
        if isinstance(file, str):
            self.absent[f"host.{column}"] = file
            return None
        return file

    def sample(self, sink: Sink, now_ns: int) -> None:
        """One row."""
        del now_ns
        throttled_ns, throttled_count = self._throttled()
        sink.add(
            "host",
            self._available_bytes(),
            *(self._some_ns(kind) for kind in ("cpu", "memory", "io")),
            throttled_ns,
            throttled_count,
        )

    def _available_bytes(self) -> int | None:
        text = _read(self._meminfo)
        found = re.search(rb"^MemAvailable:\s+(\S+) kB", text, re.MULTILINE)
        return counted(found[1], 1024) if found else None

    def _some_ns(self, kind: str) -> int | None:
        found = re.match(rb"some .*total=(\S+)", _read(self._pressure[kind]))
        return counted(found[1], 1000) if found else None  # PSI counts in microseconds

    def _throttled(self) -> tuple[int | None, int | None]:
        """Summed over this cgroup and those above it: any of them may hold the job back."""
        total_ns: int | None = None
        total_count: int | None = None
        for file, key, unit_ns in self._throttling:
            fields = dict(line.split(b" ", 1) for line in _read(file).splitlines() if b" " in line)
            throttled_ns = counted(fields.get(key, b""), unit_ns)
            throttled_count = counted(fields.get(b"nr_throttled", b""))
            if throttled_ns is None or throttled_count is None:
                return None, None  # a sum without one of its parts would step back
            total_ns = (total_ns or 0) + throttled_ns
            total_count = (total_count or 0) + throttled_count
        return _within(total_ns), _within(total_count)

    def close(self) -> None:
        """Close the files."""
        for file in (self._meminfo, *self._pressure.values(), *(t[0] for t in self._throttling)):
            if file is not None:
                file.close()


def _within(total: int | None) -> int | None:
    return None if total is None else held(total)


def _read(file: KeptFile | None) -> bytes:
    """Content, or nothing when the file has gone or never was: the row's column becomes null."""
    if file is None:
        return b""
    try:
        return file.read()
    except OSError:
        return b""


def _throttling_files(root: Path) -> list[tuple[KeptFile, bytes, int]] | str:
    """``cpu.stat`` of this process' cgroup and those above it, or why there is none.

    Returns:
        Kept file, name of its field with the throttled time, and that field's unit in ns.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError as exc:
        return f"{exc.filename}: {exc.strerror}"
    version: Literal[1, 2]
    for version, key, unit_ns in ((1, b"throttled_time", 1), (2, b"throttled_usec", 1000)):
        kept = []
        for folder in _cgroup_folders(root, memberships, mounts, version):
            file = try_open(folder / "cpu.stat")
            if isinstance(file, str):
                continue
            if key in file.read():
                kept.append((file, key, unit_ns))
            else:
                file.close()
        if kept:
            return kept
    return "no cgroup with a cpu controller above this process counts throttling"


def _cgroup_folders(
    root: Path, memberships: list[str], mounts: list[str], version: Literal[1, 2]
) -> list[Path]:
    """This process' folder in the cpu hierarchy, and those above it up to the mount."""
    for line in memberships:
        _number, controllers, path = line.split(":", 2)
        if (controllers == "") if version == 2 else ("cpu" in controllers.split(",")):
            break
    else:
        return []
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _source, options = right.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "cpu" in options.split(","):
            mount_root, mount_point = left.split(" ")[3:5]
            break
    else:
        return []
    # In a container the mount shows a part of the hierarchy; the path is that of the whole.
    if mount_root != "/" and (path + "/").startswith(mount_root.rstrip("/") + "/"):
        path = path[len(mount_root) :]
    top = root / mount_point.lstrip("/")
    own = top / path.strip("/")
    if ".." in path or not own.is_dir():
        own = top
    folders = [own]
    while folders[-1] != top:
        folders.append(folders[-1].parent)
    return folders


class _Process:
    """One process under watch, through kept files.

    Raises:
        OSError: it is gone already.
    """

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
        """CPU time since the last call (None when it went backwards), RSS, threads.

        Raises:
            OSError: the process has ended.
        """
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
        fields = _read(self._schedstat).split()
        return int(fields[1]) if len(fields) > 1 else None

    def pss_bytes(self) -> int | str:
        """Proportional set size, or why it cannot be read."""
        if self._rollup is None:
            self._rollup = try_open(self._proc / "smaps_rollup")
        if isinstance(self._rollup, str):
            return self._rollup
        found = re.search(rb"^Pss:\s+(\d+) kB", _read(self._rollup), re.MULTILINE)
        return int(found[1]) * 1024 if found else f"{self._rollup.path}: has no Pss"

    def close(self) -> None:
        for file in (self._stat, self._rollup, self._schedstat):
            if isinstance(file, KeptFile):
                file.close()


_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RankSource:
    """The ranks of a run on this host, with their children. -> PROCESS.

    Ranks are found through the manifests that they write into the run directory, so that one
    sampler per host sees all of them, whenever they begin.

    Args:
        run_path: the run directory.
        hostname: this host's name as the ranks write it.
        root: where the machine's ``proc`` lies.
        scan_ns: time between looks for new ranks and new children.
        pss_ns: shortest time between readings of the proportional set size.
    """

    name: ClassVar[str] = "ranks"
    tables: ClassVar[tuple[str, ...]] = ("process",)

    # Reading smaps_rollup walks the page tables with the process' memory map locked.
    _PSS_COST_RATIO = 0.005
    _PSS_LIMIT_NS = 50_000_000
    _SCAN_COST_RATIO = 0.005

    def __init__(
        self,
        run_path: str,
        hostname: str,
        root: str = "/",
        scan_ns: int = 1_000_000_000,
        pss_ns: int = 1_000_000_000,
    ) -> None:
        self.absent: dict[str, str] = {}
        self._finder = RankFinder(run_path, hostname)
        self._proc = Path(root) / "proc"
        self._with_clock = root == "/"
        self._scan = Budget(scan_ns, self._SCAN_COST_RATIO)
        self._pss = Budget(pss_ns, self._PSS_COST_RATIO)
        self._pss_off = False
        self._ranks: dict[int, _Process] = {}
        self._children: dict[int, dict[int, _Process]] = {}
        self._parents: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}

    def open(self) -> None:
        """Look for ranks; there may be none yet."""
        if not (self._proc / "self/stat").exists():
            raise CollectorUnavailable(f"{self._proc}/self/stat: not there")
        if not (self._proc / "self/schedstat").exists():
            self.absent["process.run_delay_ns"] = f"{self._proc}/<pid>/schedstat: not there"
        if not (self._proc / "self/smaps_rollup").exists():
            self._no_pss(f"{self._proc}/<pid>/smaps_rollup: not there")
        self._look(time.monotonic_ns())

    def _no_pss(self, reason: str) -> None:
        self._pss_off = True
        self.absent["process.pss_bytes"] = reason

    def sample(self, sink: Sink, now_ns: int) -> None:
        """One row per rank that lives."""
        if self._scan.due(now_ns):
            self._look(now_ns)
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
            cpu_ratio, child_ratio, run_delay_ns, rss_bytes, threads = row
            sink.add(
                "process",
                rank,
                process.pid,
                cpu_ratio,
                child_ratio,
                run_delay_ns,
                rss_bytes,
                pss_bytes,
                threads,
                len(self._children.get(rank, ())),
            )
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
        self._ranks.pop(rank).close()
        for child in self._children.pop(rank, {}).values():
            child.close()
        self._last_ns.pop(rank, None)

    def _look(self, now_ns: int) -> None:
        """Find new ranks and new children; how often follows from what it costs."""
        # CPU time: on a busy machine a look may take long because others run in the middle of it.
        before_ns = time.thread_time_ns()
        self._look_for_ranks()
        if self._ranks:
            self._look_for_children()
        self._scan.charge(now_ns, time.thread_time_ns() - before_ns)

    def _look_for_ranks(self) -> None:
        for rank, pid in self._finder.changed():
            known = self._ranks.get(rank)
            if known is not None:
                if known.pid == pid:
                    continue
                self._forget(rank)  # restarted under another process
            try:
                self._ranks[rank] = _Process(pid, self._proc, with_clock=self._with_clock)
            except OSError:
                continue

    def _look_for_children(self) -> None:
        """/proc/<pid>/task/*/children is often not built in: look at who is new instead."""
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
        seen = 0
        while pid not in rank_of:
            pid = self._parents.get(pid, 0)
            seen += 1
            if pid <= 1 or seen > 64:
                return None
        return rank_of[pid]

    def close(self) -> None:
        """Close the files."""
        for rank in list(self._ranks):
            self._forget(rank)


class NicSource:
    """Bytes through each network interface. /proc/net/dev -> NIC.

    An interface appears once it has carried anything; on machines with thousands, those that had
    carried most when the limit was reached.

    Args:
        root: where the machine's ``proc`` lies.
    """

    name: ClassVar[str] = "nics"
    tables: ClassVar[tuple[str, ...]] = ("nic",)

    _LIMIT = 256

    def __init__(self, root: str = "/") -> None:
        self.absent: dict[str, str] = {}
        # Of the sampler's own network namespace, which it shares with the rank that started it.
        self._path = Path(root) / "proc/self/net/dev"
        self._file: KeptFile | None = None
        self._chosen: set[bytes] | None = None

    def open(self) -> None:
        """Open the file."""
        file = try_open(self._path)
        if isinstance(file, str):
            raise CollectorUnavailable(file)
        self._file = file

    def sample(self, sink: Sink, now_ns: int) -> None:
        """One row per interface that has carried anything."""
        del now_ns
        assert self._file is not None
        carried = {}
        for line in self._file.read().splitlines()[2:]:
            name, _, rest = line.rpartition(b":")
            fields = rest.split()
            if len(fields) < 9 or not (fields[0] + fields[8]).isdigit():
                continue
            received, sent = int(fields[0]), int(fields[8])
            if received or sent:
                carried[name.strip()] = (received, sent)
        for name in self._kept(carried):
            received, sent = carried[name]
            sink.add("nic", name.decode(errors="replace"), held(received), held(sent))

    def _kept(self, carried: dict[bytes, tuple[int, int]]) -> Iterable[bytes]:
        if len(carried) <= self._LIMIT and self._chosen is None:
            return carried
        if self._chosen is None:
            busiest = sorted(carried, key=lambda name: sum(carried[name]), reverse=True)
            self._chosen = set(busiest[: self._LIMIT])
        self.absent["nic[others]"] = (
            f"{len(carried.keys() - self._chosen)} of {len(carried)} interfaces are left out: "
            f"{self._LIMIT} are kept, those that had carried most"
        )
        return [name for name in carried if name in self._chosen]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class HostCollector(SampledCollector):
    """Samples the host while a run goes on, in a process of its own.

    Writes ``cpu_core``, ``host``, ``process``, ``process_thread``, ``process_event``, ``nic``,
    ``core_clock``, ``core_cycle``, ``host_energy`` and ``clock``.

    Args:
        hz: samples per second of each source; per-core rows are thinned on many cores.
        root: where the machine's ``proc`` and ``sys`` lie.
    """

    name: ClassVar[str] = NAME

    def __init__(self, *, hz: float = _DEFAULT_HZ, root: str = "/") -> None:
        self._hz = hz
        self._root = root

    def probe(self, context: CollectorContext) -> Availability:
        """Available where there is a /proc; its reason names what stays null."""
        absent: dict[str, str] = {}
        readable = 0
        refusals: list[str] = []
        for make in self._makers(context):
            source = make()
            try:
                source.open()
                readable += 1
            except CollectorUnavailable as exc:
                refusals.append(str(exc))
                absent.update(dict.fromkeys(source.tables, str(exc)))
            finally:
                source.close()
            absent.update(source.absent)
        if not readable:
            return Availability(
                ok=False,
                reason="; ".join(refusals),
                remedy="run on Linux with /proc mounted",
            )
        by_reason: dict[str, list[str]] = {}
        for what, why in absent.items():
            by_reason.setdefault(why, []).append(what)
        limits = "; ".join(f"no {', '.join(names)} ({why})" for why, names in by_reason.items())
        return Availability(ok=True, reason=limits or None)

    def _makers(self, context: CollectorContext) -> list[Callable[[], Source]]:
        # Clocks can be read anywhere: they alone are no reason to start.
        return [spec.make for spec in self.specs(context) if spec is not CLOCKS]

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """What its sampler reads, and how often."""
        here, power = "chopper.collectors.host", "chopper.collectors.cpu_power"
        threads, slow_hz = "chopper.collectors.threads", min(self._hz, _SLOW_HZ)
        root: dict[str, Any] = {"root": self._root}
        cores_hz = min(self._hz, max(_CORE_ROWS_PER_S / (os.cpu_count() or 1), 1.0))
        run = {"run_path": str(context.run_path.resolve()), "hostname": context.hostname}
        specs = [
            SourceSpec(factory=f"{here}:CoreSource", hz=cores_hz, options=root),
            SourceSpec(factory=f"{here}:RankSource", hz=self._hz, options=root | run),
            SourceSpec(factory=f"{here}:MachineSource", hz=self._hz, options=root),
            SourceSpec(factory=f"{here}:NicSource", hz=self._hz, options=root),
            SourceSpec(factory=f"{power}:CoreClockSource", hz=min(cores_hz, 1.0), options=root),
            SourceSpec(factory=f"{power}:CycleSource", hz=min(cores_hz, 1.0), options=root),
            SourceSpec(factory=f"{power}:RaplSource", hz=self._hz, options=root),
            SourceSpec(factory=f"{threads}:ThreadSource", hz=slow_hz, options=root | run),
            CLOCKS,
        ]
        if self._root == "/":  # the kernel counts events of real processes only
            specs.append(SourceSpec(factory=f"{threads}:EventSource", hz=slow_hz, options=run))
        return specs
