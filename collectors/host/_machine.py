"""Cores, memory, pressure, CPU quota, network interfaces, clocks and energy of the host."""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from chopper.collectors.base import held
from chopper.collectors.procfs import FileSource, KeptFile, content, counted
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from chopper.collectors.sampler import Sink


class CoreSource(FileSource):
    """Use of each core. /proc/stat -> CPU_CORE."""

    name: ClassVar[str] = "cores"
    tables: ClassVar[tuple[str, ...]] = ("cpu_core",)

    def open(self) -> None:
        self._file = file = self.keep("proc/stat")
        self._last = _core_ticks(file.read())
        if not self._last:
            raise CollectorUnavailable(f"{file.path}: names no core")
        if any(len(ticks) < 8 for ticks in self._last.values()):
            self.absent["cpu_core.steal_ratio"] = f"{file.path} has no steal column"

    def sample(self, sink: Sink, _now_ns: int) -> None:
        ticks = _core_ticks(self._file.read())
        for core, now in ticks.items():
            before = self._last.get(core)
            if before is not None:
                sink.add("cpu_core", core, *_core_ratios(before, now))
        self._last = ticks


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
            numbers = [tick for tick in ticks if tick is not None]
            if len(numbers) == len(ticks):
                cores[core] = numbers
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


class MachineSource(FileSource):
    """Memory, pressure and CPU quota of the host. -> HOST."""

    name: ClassVar[str] = "machine"
    tables: ClassVar[tuple[str, ...]] = ("host",)

    def open(self) -> None:
        self._meminfo = self._keep_for("memory_available_bytes", "proc/meminfo")
        self._pressure = [
            self._keep_for(f"pressure_{kind}_some_ns", f"proc/pressure/{kind}")
            for kind in ("cpu", "memory", "io")
        ]
        self._throttling: list[tuple[KeptFile, bytes, int]] = []
        try:
            self._throttling = self._throttling_files()
        except CollectorUnavailable as exc:
            self.absent["host.cgroup_throttled_ns"] = str(exc)
            self.absent["host.cgroup_throttled_count"] = str(exc)
        if len(self.absent) == 6:
            raise CollectorUnavailable("; ".join(dict.fromkeys(self.absent.values())))

    def _keep_for(self, column: str, path: str) -> KeptFile | None:
        try:
            return self.keep(path)
        except CollectorUnavailable as exc:
            self.absent[f"host.{column}"] = str(exc)
            return None

    def sample(self, sink: Sink, _now_ns: int) -> None:
        line = re.search(rb"^MemAvailable:\s+(\S+) kB", content(self._meminfo), re.MULTILINE)
        available_bytes = counted(line[1], 1024) if line else None
        stalled_ns = map(_stalled_ns, self._pressure)
        sink.add("host", available_bytes, *stalled_ns, *self._throttled())

    def _throttled(self) -> tuple[int | None, int | None]:
        """Summed over this cgroup and those above it: any of them may hold the job back."""
        total_ns: int | None = None
        total_count: int | None = None
        for file, key, unit_ns in self._throttling:
            lines = content(file).splitlines()
            fields = dict(line.split(b" ", 1) for line in lines if b" " in line)
            throttled_ns = counted(fields.get(key, b""), unit_ns)
            throttled_count = counted(fields.get(b"nr_throttled", b""))
            if throttled_ns is None or throttled_count is None:
                return None, None  # a sum without one of its parts would step back
            total_ns = (total_ns or 0) + throttled_ns
            total_count = (total_count or 0) + throttled_count
        return held(total_ns), held(total_count)

    def _throttling_files(self) -> list[tuple[KeptFile, bytes, int]]:
        """``cpu.stat`` of this process' cgroup and those above it, its field, and the unit."""
        root = self.root
        try:
            memberships = (root / "proc/self/cgroup").read_text().splitlines()
            mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        except OSError as exc:
            raise CollectorUnavailable(f"{exc.filename}: {exc.strerror}") from exc
        version: Literal[1, 2]
        for version, key, unit_ns in ((1, b"throttled_time", 1), (2, b"throttled_usec", 1000)):
            counting = []
            for folder in _cgroup_folders(root, memberships, mounts, version):
                with contextlib.suppress(CollectorUnavailable):
                    file = self.keep(folder / "cpu.stat")
                    if key in file.read():
                        counting.append((file, key, unit_ns))
            if counting:
                return counting
        raise CollectorUnavailable(
            "no cgroup with a cpu controller above this process counts throttling"
        )


def _stalled_ns(pressure: KeptFile | None) -> int | None:
    total = re.match(rb"some .*total=(\S+)", content(pressure))
    return counted(total[1], 1000) if total else None


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
        mount_fields, _, right = line.partition(" - ")
        kind, _source, options = right.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "cpu" in options.split(","):
            mount_root, mount_point = mount_fields.split(" ")[3:5]
            break
    else:
        return []
    # In a container the mount shows a part of the hierarchy; the path is that of the whole.
    if mount_root != "/" and (path + "/").startswith(mount_root.rstrip("/") + "/"):
        path = path[len(mount_root) :]
    top = root / mount_point.lstrip("/")
    own_folder = top / path.strip("/")
    if ".." in path or not own_folder.is_dir():
        own_folder = top
    folders = [own_folder]
    while folders[-1] != top:
        folders.append(folders[-1].parent)
    return folders


class NicSource(FileSource):
    """Bytes through each network interface. /proc/net/dev -> NIC.

    An interface appears once it has carried anything; on machines with thousands, those that
    carried most by then.
    """

    name: ClassVar[str] = "nics"
    tables: ClassVar[tuple[str, ...]] = ("nic",)

    _LIMIT = 256

    def open(self) -> None:
        self._file = self.keep("proc/self/net/dev")

    def sample(self, sink: Sink, _now_ns: int) -> None:
        carried = {}
        for line in self._file.read().splitlines()[2:]:
            name, _, rest = line.rpartition(b":")
            fields = rest.split()
            if len(fields) < 9 or not (fields[0] + fields[8]).isdigit():
                continue
            received, sent = int(fields[0]), int(fields[8])
            if received or sent:
                carried[name.strip()] = (received, sent)
        for name in self._busiest(carried):
            received, sent = carried[name]
            sink.add("nic", name.decode(errors="replace"), held(received), held(sent))

    def _busiest(self, carried: dict[bytes, tuple[int, int]]) -> Iterable[bytes]:
        if len(carried) <= self._LIMIT:
            return carried
        self.absent["nic[others]"] = (
            f"{len(carried) - self._LIMIT} of {len(carried)} interfaces are left out: "
            f"{self._LIMIT} are kept, those that have carried most"
        )
        return heapq.nlargest(self._LIMIT, carried, key=lambda name: sum(carried[name]))


_CORES_LIMIT = 512
"""Files kept open at most; reading a core's clock may wake it."""


class CoreClockSource(FileSource):
    """Clock of each core as the governor sees it. cpufreq -> CORE_CLOCK.

    ``scaling_cur_freq`` is measured over the last tick (aperf over mperf) on today's x86 drivers
    and the requested clock on others; the manifest names the driver.
    """

    name: ClassVar[str] = "core_clocks"
    tables: ClassVar[tuple[str, ...]] = ("core_clock",)

    def open(self) -> None:
        folder = self.root / "sys/devices/system/cpu"
        self._files: dict[int, KeptFile] = {}
        cores = sorted(
            (int(path.name[3:]), path)
            for path in folder.glob("cpu[0-9]*")
            if path.name[3:].isdigit()
        )
        for core, path in cores[:_CORES_LIMIT]:
            with contextlib.suppress(CollectorUnavailable):
                self._files[core] = self.keep(path / "cpufreq/scaling_cur_freq")
        if not self._files:
            raise CollectorUnavailable(f"{folder}/cpu*/cpufreq: not found")
        if len(cores) > _CORES_LIMIT:
            self.absent["core_clock"] = (
                f"{len(cores) - _CORES_LIMIT} of {len(cores)} cores left out"
            )

    def sample(self, sink: Sink, _now_ns: int) -> None:
        for core, file in self._files.items():
            try:
                clock_hz = counted(file.read(), 1000)
            except OSError:  # taken offline; it may come back
                continue
            if clock_hz:
                sink.add("core_clock", core, clock_hz)


_MPERF, _APERF = 0xE7, 0xE8
"""Registers that count at the nominal clock, and at the clock now, while a core runs."""


class CycleSource(FileSource):
    """Mean clock of each core while it ran, from its own counters. aperf, mperf -> CORE_CYCLE.

    What a governor says of the clock is asked for or estimated; these two registers count. They are
    read through the ``msr`` driver, which only root may, and which asks the core itself.
    """

    name: ClassVar[str] = "core_cycles"
    tables: ClassVar[tuple[str, ...]] = ("core_cycle",)

    def __init__(self, root: str = "/") -> None:
        super().__init__(root)
        self._devices = self.root / "dev/cpu"
        self._cores = self.root / "sys/devices/system/cpu"
        self._files: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._base_hz: dict[int, int | None] = {}

    def open(self) -> None:
        reasons: list[str] = []
        numbers = sorted(int(p.name) for p in self._devices.glob("[0-9]*"))
        for core in numbers[:_CORES_LIMIT]:
            path = self._devices / str(core) / "msr"
            try:
                self._files[core] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._last[core] = _registers(self._files[core])
                if self._last[core] == (0, 0):  # a hypervisor that answers
                    raise OSError(errno.EIO, "does not count")
            except OSError as exc:
                reasons.append(f"{path}: {exc.strerror}")
                if core in self._files:
                    os.close(self._files.pop(core))
            else:
                self._base_hz[core] = self._base(core)
        if not self._files:
            raise CollectorUnavailable(
                reasons[0] if reasons else f"{self._devices}: no msr driver (modprobe msr, as root)"
            )
        if None in self._base_hz.values():
            self.absent["core_cycle.clock_hz"] = "cpufreq reports no base clock"

    def _base(self, core: int) -> int | None:
        try:
            text = (self._cores / f"cpu{core}/cpufreq/base_frequency").read_text().strip()
        except OSError:
            return None
        return int(text) * 1000 if text.isdigit() else None

    def sample(self, sink: Sink, _now_ns: int) -> None:
        for core, file in self._files.items():
            try:
                now = _registers(file)
            except OSError:  # taken offline; it may come back
                continue
            aperf, mperf = ((b - a) % (1 << 64) for a, b in zip(self._last[core], now, strict=True))
            self._last[core] = now
            # A count that was set back looks like almost all of its 64 bits.
            if not mperf or max(aperf, mperf) >= 1 << 63:
                continue
            base = self._base_hz[core]
            ratio = aperf / mperf
            sink.add("core_cycle", core, ratio, None if base is None else round(ratio * base))

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}


def _registers(file: int) -> tuple[int, int]:
    """Raises OSError where the core does not have them."""
    values = []
    for register in (_APERF, _MPERF):
        data = os.pread(file, 8, register)
        if len(data) < 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        values.append(int.from_bytes(data, "little"))
    return values[0], values[1]


class _Domain:
    """One RAPL domain: a counter in µJ that wraps at its range."""

    def __init__(self, counter: KeptFile, folder: Path, name: str) -> None:
        self.name = name
        self.file = counter
        try:
            self._range_uj = int((folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            self._range_uj = 0
        self._last_uj: int | None = None
        self._total_uj = 0

    def joules(self) -> float:
        """Energy since the first reading, or since the counter was reset.

        A counter that went back has wrapped at its range, unless that would mean more than half of
        it since the last reading (a few minutes of a package): then, or without a range, it was
        reset, and what this returns goes back too, so that nobody takes a difference over it.

        Raises:
            OSError: the domain has gone.
        """
        now_uj = int(self.file.read())
        last_uj, self._last_uj = self._last_uj, now_uj
        grown_uj = now_uj - (now_uj if last_uj is None else last_uj)
        if grown_uj < 0:
            grown_uj += self._range_uj
            if not 0 <= grown_uj <= self._range_uj // 2:
                self._total_uj = min(0, self._total_uj - 1)
                grown_uj = 0
        self._total_uj += grown_uj
        return self._total_uj * 1e-6


class RaplSource(FileSource):
    """Energy of packages, cores and memory. powercap (RAPL) -> HOST_ENERGY."""

    name: ClassVar[str] = "rapl"
    tables: ClassVar[tuple[str, ...]] = ("host_energy",)

    def open(self) -> None:
        powercap = self.root / "sys/class/powercap"
        self._domains: list[_Domain] = []
        reasons: list[str] = []
        for folder in sorted(powercap.glob("*-rapl:*")):
            try:
                zone_name = (folder / "name").read_text().strip()
                parent = folder.name.rpartition(":")[0]
                above = powercap / parent / "name"
                name = f"{above.read_text().strip()}/{zone_name}" if above.is_file() else zone_name
                self._domains.append(_Domain(self.keep(folder / "energy_uj"), folder, name))
            except (OSError, CollectorUnavailable) as exc:
                denied = str(exc).endswith(os.strerror(errno.EACCES))
                reasons.append(f"{exc}; run as root, or chmod a+r it" if denied else str(exc))
        if not self._domains:
            raise CollectorUnavailable(
                "; ".join(dict.fromkeys(reasons)) or f"{powercap}: no RAPL domain"
            )
        if reasons:
            self.absent["host_energy"] = "; ".join(dict.fromkeys(reasons))

    def sample(self, sink: Sink, _now_ns: int) -> None:
        for domain in self._domains:
            with contextlib.suppress(OSError, ValueError):
                sink.add("host_energy", domain.name, domain.joules())
