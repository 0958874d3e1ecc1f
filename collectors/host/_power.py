"""Clocks and energy of the host's processors; virtual machines rarely show them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.procfs import FileSource, KeptFile, counted
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from chopper.collectors.sampler import Sink

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
