"""What the sampler process reads of AMD devices, one source a tier."""

from __future__ import annotations

import contextlib
from ctypes import byref, c_uint32
from typing import TYPE_CHECKING, Any, ClassVar

from chopper.collectors.amd import _library as amd
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chopper.collectors.sampler import Sink

_MEGA = 1_000_000
_ENERGY_UNIT_J = 15.259e-6
"""Resolution of the energy accumulator."""
_KIB = 1024
_MIB = 1 << 20

# Bits as NVML names the same reasons, so that one analysis reads both.
_REASON_POWER_CAP, _REASON_THERMAL, _REASON_PROCHOT = 0x4, 0x20, 0x40

# Residency accumulator → reason. Each counts the ticks of `accumulation_counter` in which it held.
_RESIDENCIES = {
    "ppt_residency_acc": _REASON_POWER_CAP,
    "socket_thm_residency_acc": _REASON_THERMAL,
    "vr_thm_residency_acc": _REASON_THERMAL,
    "hbm_thm_residency_acc": _REASON_THERMAL,
    "prochot_residency_acc": _REASON_PROCHOT,
}


class _Residency:
    """Why the clock is held down, from the accumulators' growth between two readings."""

    def __init__(self) -> None:
        self._last: dict[str, int] | None = None
        self._last_ns: int | None = None
        self.totals_ns = {"power": 0.0, "thermal": 0.0}

    def reasons(self, metrics: Any, now_ns: int) -> int | None:
        """Bits of the reasons that held since the previous reading; None where nothing tells.

        0 says that the device counts residencies and none grew.
        """
        counts = {name: amd.known(metrics, name) for name in _RESIDENCIES}
        ticks = amd.known(metrics, "accumulation_counter")
        now = {name: value for name, value in counts.items() if value is not None}
        if ticks is None or not now:
            return None
        now["accumulation_counter"] = ticks
        before, before_ns = self._last, self._last_ns
        self._last, self._last_ns = now, now_ns
        if before is None or before_ns is None:
            return None
        grown = {name: now[name] - before.get(name, now[name]) for name in now}
        if min(grown.values()) < 0 or not grown["accumulation_counter"]:
            return None  # reset, or not refreshed since
        bits = 0
        for name, reason in _RESIDENCIES.items():
            share = grown.get(name, 0) / grown["accumulation_counter"]
            if share:
                bits |= reason
                kind = "power" if reason == _REASON_POWER_CAP else "thermal"
                self.totals_ns[kind] += min(share, 1.0) * (now_ns - before_ns)
        return bits


class _Source:
    """Devices and their metrics; one row per device and sample."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.absent: dict[str, str] = {}
        self._stack = contextlib.ExitStack()
        self._metrics: list[tuple[amd.AmdDevice, amd.Metrics]] = []
        self._wrapper: Any = None

    def open(self) -> None:
        """Initialize the library, find the devices, read each once.

        Raises:
            CollectorUnavailable: no device, or none whose metrics can be read.
        """
        self._wrapper = self._stack.enter_context(amd.session())
        for device in amd.devices(self._wrapper):
            self._metrics.append((device, amd.Metrics(self._wrapper, device)))
        refused = []
        for device, metrics in self._metrics:
            code = metrics.read()
            if code:
                kind, reason = amd.explain(code)
                refused.append(f"device {device.index}: {reason}")
                if kind != "moment":
                    self._lose(device, reason)
        if len(refused) == len(self._metrics):
            self.close()
            raise CollectorUnavailable("; ".join(refused))
        self._find_absent()

    def _lose(self, device: amd.AmdDevice, reason: str) -> None:
        device.lost = reason
        self.absent[f"{self.tables[0]}[device {device.index}]"] = reason

    def _find_absent(self) -> None:
        """Name the columns that no device has."""
        from chopper.tables import TABLES

        names = [column.name for column in TABLES[self.tables[0]].columns][4:]
        live = [(d, m) for d, m in self._metrics if d.lost is None]
        rows = [list(self._values(device, metrics.now, 0)) for device, metrics in live]
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            if all(value is None for value in values) and name not in self._later:
                self.absent[f"{self.tables[0]}.{name}"] = "not available on this device"

    _later: ClassVar[frozenset[str]] = frozenset()
    """Columns that need two readings."""

    def _values(self, device: amd.AmdDevice, metrics: Any, now_ns: int) -> Iterable[Any]:
        """A row's values after the device, in the order of the table's columns."""
        raise NotImplementedError

    def sample(self, sink: Sink, now_ns: int) -> None:
        """One row per device that is still there."""
        live = False
        for device, metrics in self._metrics:
            if device.lost is not None:
                continue
            code = metrics.read()
            if code:
                kind, reason = amd.explain(code)
                if kind != "moment":
                    self._lose(device, reason)
                    continue
                live = True
                continue
            live = True
            sink.add(
                self.tables[0],
                device.index,
                device.uuid,
                *self._values(device, metrics.now, now_ns),
            )
        if not live:
            raise RuntimeError("; ".join(dict.fromkeys(self.absent.values())) or "no device left")

    def close(self) -> None:
        """Shut the library down."""
        self._stack.close()


class ClockSource(_Source):
    """The fast tier: clocks, power, what holds the clock down. -> DEVICE_CLOCK."""

    name: ClassVar[str] = "amdsmi_clock"
    tables: ClassVar[tuple[str, ...]] = ("device_clock",)
    _later = frozenset({"event_reasons"})

    def __init__(self) -> None:
        super().__init__()
        self._residency: dict[int, _Residency] = {}

    def _values(self, device: amd.AmdDevice, metrics: Any, now_ns: int) -> Iterable[Any]:
        residency = self._residency.setdefault(id(device), _Residency())
        return (
            _gfx_clock_hz(metrics),
            _hertz(_first(metrics, "current_uclk", "average_uclk_frequency")),
            _watts(metrics),
            residency.reasons(metrics, now_ns),
        )


def _gfx_clock_hz(metrics: Any) -> int | None:
    """Mean clock of the dies that report one; of the device where it has no dies of its own."""
    dies = [clock for clock in amd.known_items(metrics, "current_gfxclks") if clock]
    if dies:
        return round(sum(dies) * _MEGA / len(dies))
    return _hertz(_first(metrics, "current_gfxclk", "average_gfxclk_frequency"))


def _first(metrics: Any, *names: str) -> int | None:
    return next((v for v in (amd.known(metrics, name) for name in names) if v is not None), None)


def _hertz(megahertz: int | None) -> int | None:
    return megahertz * _MEGA if megahertz else None


def _watts(metrics: Any) -> float | None:
    power = _first(metrics, "current_socket_power", "average_socket_power")
    return None if power is None else float(power)


class CounterSource(_Source):
    """The medium tier: energy, temperatures, activity, memory, links, residencies.

    -> DEVICE_COUNTER.
    """

    name: ClassVar[str] = "amdsmi_counter"
    tables: ClassVar[tuple[str, ...]] = ("device_counter",)
    _later = frozenset({"power_throttle_ns", "thermal_throttle_ns"})

    def __init__(self) -> None:
        super().__init__()
        self._residency: dict[int, _Residency] = {}
        self._columns: list[str] = []

    def _values(self, device: amd.AmdDevice, metrics: Any, now_ns: int) -> Iterable[Any]:
        residency = self._residency.setdefault(id(device), _Residency())
        counted = residency.reasons(metrics, now_ns) is not None
        energy = amd.known(metrics, "energy_accumulator")
        found: dict[str, Any] = {
            "energy_j": None if energy is None else energy * _ENERGY_UNIT_J,
            "power_average_w": _optional(amd.known(metrics, "average_socket_power"), float),
            "temperature_c": _optional(
                _first(metrics, "temperature_hotspot", "temperature_edge"), float
            ),
            "memory_temperature_c": _optional(amd.known(metrics, "temperature_mem"), float),
            "device_utilization_ratio": _percent(amd.known(metrics, "average_gfx_activity")),
            "memory_utilization_ratio": _percent(amd.known(metrics, "average_umc_activity")),
            "memory_used_bytes": self._memory_used_bytes(device),
            "link_tx_bytes": _sum_kib(amd.known_items(metrics, "xgmi_write_data_acc")),
            "link_rx_bytes": _sum_kib(amd.known_items(metrics, "xgmi_read_data_acc")),
            "pcie_replay_count": amd.known(metrics, "pcie_replay_count_acc"),
        }
        if counted:
            found["power_throttle_ns"] = int(residency.totals_ns["power"])
            found["thermal_throttle_ns"] = int(residency.totals_ns["thermal"])
        if not self._columns:
            from chopper.tables import TABLES

            self._columns = [c.name for c in TABLES["device_counter"].columns][4:]
        return map(found.get, self._columns)

    def _memory_used_bytes(self, device: amd.AmdDevice) -> int | None:
        usage = self._wrapper.amdsmi_vram_usage_t()
        if self._wrapper.amdsmi_get_gpu_vram_usage(device.handle, byref(usage)):
            return None
        return int(usage.vram_used) * _MIB


def _optional(value: int | None, make: Callable[[int], float]) -> float | None:
    return None if value is None else make(value)


def _percent(value: int | None) -> float | None:
    # Activity above 100 % is how some firmware says that it does not know.
    return value / 100 if value is not None and value <= 100 else None


def _sum_kib(values: list[int]) -> int | None:
    return sum(values) * _KIB if values else None


class LimitSource(_Source):
    """What holds for the whole run: the largest clock, the power cap, memory. -> DEVICE_LIMIT."""

    name: ClassVar[str] = "amdsmi_limit"
    tables: ClassVar[tuple[str, ...]] = ("device_limit",)

    def _values(self, device: amd.AmdDevice, metrics: Any, now_ns: int) -> Iterable[Any]:
        del now_ns
        wrapper, handle = self._wrapper, device.handle
        clock = wrapper.amdsmi_clk_info_t()
        has_clock = wrapper.amdsmi_get_clock_info(handle, c_uint32(_CLOCK_GFX), byref(clock)) == 0
        cap = wrapper.amdsmi_power_cap_info_t()
        has_cap = wrapper.amdsmi_get_power_cap_info(handle, c_uint32(0), byref(cap)) == 0
        usage = wrapper.amdsmi_vram_usage_t()
        has_memory = wrapper.amdsmi_get_gpu_vram_usage(handle, byref(usage)) == 0
        lanes = amd.known(metrics, "pcie_link_width")
        found: dict[str, Any] = {
            "pci_address": device.pci_address,
            "sm_clock_max_hz": _hertz(int(clock.max_clk)) if has_clock else None,
            "power_limit_w": cap.power_cap * 1e-6 if has_cap else None,
            "power_limit_default_w": cap.default_power_cap * 1e-6 if has_cap else None,
            "power_limit_max_w": cap.max_power_cap * 1e-6 if has_cap else None,
            "memory_bytes": int(usage.vram_total) * _MIB if has_memory else None,
            "pcie_lane_count": lanes,
            "mig": None if device.partition is None else device.partition != "SPX",
        }
        from chopper.tables import TABLES

        return [found.get(c.name) for c in TABLES["device_limit"].columns[4:]]


_CLOCK_GFX = 0
