"""Sources of AMD devices that the sampler process reads, one a tier.

A metric is a column, its unit, and the fields of the metrics structure that hold it, of which the
first that the device has counts; or the call of amdsmi and the member of what that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import byref, c_uint32
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chopper.collectors import amd
from chopper.collectors.base import held
from chopper.collectors.devices import DeviceReader, DeviceSource, Getter, Unit, columns_of

_MEGA = 1_000_000
_KIB, _MIB = 1024, 1 << 20
_HERTZ = Unit(_MEGA, least=1)
_WATTS = Unit(1.0, least=1, most=10_000)
"""A device that answers draws power, and no socket draws 10 kW."""
_CELSIUS = Unit(1.0)
_RATIO = Unit(0.01, most=100)
"""Activity above 100 % is how some firmware says that it does not know."""
_JOULES = Unit(15.259e-6)
"""Resolution of the energy accumulator."""
_MICROWATTS = Unit(1e-6)

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
_MOST_GB_PER_S = 1024
"""Several times the fastest PCIe: a larger rate is of a counter that jumped."""
_NOT_AVAILABLE = "not available on this device"
_CALL = "amdsmi_get_gpu_metrics_info"
_CLOCK_GFX = 0
_READ_KB, _WRITE_KB = "xgmi_read_data_acc", "xgmi_write_data_acc"

# Call -> structure that it fills, and its arguments between the device and that.
_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "amdsmi_get_clock_info": ("amdsmi_clk_info_t", (c_uint32(_CLOCK_GFX),)),
    "amdsmi_get_power_cap_info": ("amdsmi_power_cap_info_t", (c_uint32(0),)),
    "amdsmi_get_gpu_vram_usage": ("amdsmi_vram_usage_t", ()),
}


class _Residency:
    """Time for which the clock was held down, from the accumulators' growth between readings.

    Attributes:
        reasons: bits of what held it down between the last two readings.
    """

    def __init__(self) -> None:
        self.reasons = 0
        self._last: dict[str, int] = {}
        self._last_ns: int | None = None
        self.totals_ns = {"power": 0.0, "thermal": 0.0}

    def grew(self, metrics: amd.Metrics, now_ns: int | None) -> bool:
        """Add what passed since the previous reading; False where nothing tells."""
        ticks = metrics.number("accumulation_counter")
        counts = {name: metrics.number(name) for name in _RESIDENCIES}
        now = {name: value for name, value in counts.items() if value is not None}
        before, before_ns = self._last, self._last_ns
        if ticks is None or not now:
            return False
        if before.get("ticks") == ticks and before_ns is not None:
            return False  # not refreshed since
        self._last, self._last_ns = {**now, "ticks": ticks}, now_ns
        grown = {name: value - before.get(name, value) for name, value in now.items()}
        passed = ticks - before.get("ticks", ticks)
        if passed <= 0 or min(grown.values()) < 0:
            return False  # reset, or the first one
        self.reasons = 0
        for name, count in grown.items():
            self.reasons |= _RESIDENCIES[name] if count else 0
        if now_ns is not None and before_ns is not None:
            shares = {"power": 0.0, "thermal": 0.0}
            for name, count in grown.items():
                kind = "power" if _RESIDENCIES[name] == _REASON_POWER_CAP else "thermal"
                shares[kind] += count / passed
            for kind, share in shares.items():
                # Several sensors may be hot at once: no more than all of the time.
                self.totals_ns[kind] += min(share, 1.0) * (now_ns - before_ns)
        return True


class _Traffic:
    """Bytes over PCIe since the first reading, from the accumulated rate.

    At each tick of ``accumulation_counter`` the firmware adds the rate of both directions in GB/s.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int, int] | None = None
        self._total_bytes = 0.0

    def bytes_until(self, metrics: amd.Metrics, now_ns: int | None) -> int | None:
        """Return the bytes in both directions so far; None where a reading does not tell."""
        rate_sum = metrics.number("pcie_bandwidth_acc")
        ticks = metrics.number("accumulation_counter")
        if rate_sum is None or ticks is None:
            return None
        if now_ns is None:
            return 0
        before, self._last = self._last, (rate_sum, ticks, now_ns)
        if before is None:
            return 0
        grown, passed = rate_sum - before[0], ticks - before[1]
        if grown < 0 or passed < 0:
            return None  # reset: counts from here
        if not passed:
            self._last = before  # not refreshed since
        elif grown / passed <= _MOST_GB_PER_S:
            self._total_bytes += grown / passed * (now_ns - before[2])
        else:
            return None
        return round(self._total_bytes)


@dataclass
class _Reading:
    """A device, its metrics as they were last read, and what is counted between readings."""

    device: amd.AmdDevice
    metrics: amd.Metrics
    residency: _Residency = field(default_factory=_Residency)
    traffic: _Traffic = field(default_factory=_Traffic)
    links: dict[str, list[int]] = field(default_factory=dict)
    """Direction → links that the first reading told."""

    def bytes_over_links(self, name: str) -> int | None:
        """Return the sum over links, always over the same ones, or it would seem to jump."""
        items = self.metrics.items(name)
        known = [i for i, value in enumerate(items) if value is not None]
        counted = self.links.setdefault(name, known)
        return _kib(_sum_of([items[i] for i in counted])) if counted else None


class _Source(DeviceSource[amd.AmdDevice]):
    """A source that is read through the metrics structure: one call of the driver per reading."""

    errors = amd.ERRORS
    keep_empty = True
    fields: ClassVar[dict[str, tuple[Unit, tuple[str, ...]]]] = {}
    """Column → its unit and the fields of the metrics structure."""
    answers: ClassVar[dict[str, tuple[Unit, str, str]]] = {}
    """Column → its unit, a call, and the member of the structure that this fills."""
    _later: ClassVar[frozenset[str]] = frozenset()
    """Columns that no first reading tells."""

    def _list(self) -> list[amd.AmdDevice]:
        self._wrapper = self._stack.enter_context(amd.session())
        self._rows: list[list[Any]] = []
        self._readings: list[_Reading] = []
        return amd.devices(self._wrapper)

    def _describe(self, reader: DeviceReader, device: amd.AmdDevice) -> None:
        reading = _Reading(device, amd.Metrics(self._wrapper, device))
        self._readings.append(reading)

        def read() -> Iterable[Any]:
            reading.metrics.fill()
            number = reading.metrics.number
            values: dict[str, Any] = {
                column: unit.convert(number(*names))
                for column, (unit, names) in self.fields.items()
            }
            filled = {call: self._call(device, call) for _, call, _ in self.answers.values()}
            for column, (unit, call, member) in self.answers.items():
                answer = filled[call]
                values[column] = None if answer is None else unit.convert(getattr(answer, member))
            values |= self._values(reading, reader.now_ns)
            return map(values.get, reader.columns)

        reader.add(Getter(_CALL, reader.columns, read))

    def _call(self, device: amd.AmdDevice, name: str) -> Any:
        """Return the structure that a call fills; None where the device refuses."""
        structure, arguments = _CALLS[name]
        answer = getattr(self._wrapper, structure)()
        code = getattr(self._wrapper, name)(device.handle, *arguments, byref(answer))
        return None if code else answer

    def _values(self, reading: _Reading, now_ns: int | None) -> dict[str, Any]:
        """Return further values by column; the first reading, without a time, makes no row."""
        del reading, now_ns
        return {}

    def open(self) -> None:
        """Initialize the library, find the devices, read each once."""
        super().open()
        rows = [row for row in self._rows if row]
        columns = columns_of(self.tables[0])
        for name, values in zip(columns, zip(*rows, strict=True), strict=False):
            if all(value is None for value in values) and name not in self._later:
                for device, reader in self._devices:
                    if device.lost is None:
                        reader.absent[name] = _NOT_AVAILABLE

    def _first(self, reader: DeviceReader) -> None:
        self._rows.append(reader.read() or [])


class ClockSource(_Source):
    """The fast tier: clocks, power, what holds the clock down. -> DEVICE_CLOCK."""

    name: ClassVar[str] = "amdsmi_clock"
    tables: ClassVar[tuple[str, ...]] = ("device_clock",)
    fast = True
    fields: ClassVar[dict[str, tuple[Unit, tuple[str, ...]]]] = {
        "sm_clock_hz": (_HERTZ, ("current_gfxclk", "average_gfxclk_frequency")),
        "memory_clock_hz": (_HERTZ, ("current_uclk", "average_uclk_frequency")),
        "power_w": (_WATTS, ("current_socket_power", "average_socket_power")),
    }
    _later = frozenset({"event_reasons"})

    def _values(self, reading: _Reading, now_ns: int | None) -> dict[str, Any]:
        residency = reading.residency
        grew = residency.grew(reading.metrics, now_ns)
        values: dict[str, Any] = {"event_reasons": residency.reasons if grew else None}
        # The mean of the dies that report a clock, else the device's.
        dies_mhz = [mhz for mhz in reading.metrics.items("current_gfxclks") if mhz]
        if dies_mhz:
            values["sm_clock_hz"] = round(sum(dies_mhz) * _MEGA / len(dies_mhz))
        return values

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the call, with what its power is."""
        live = (reading for reading in self._readings if not reading.device.lost)
        basis = next((_power_basis(reading.metrics) for reading in live), None)
        power = "" if basis is None else f" (power: {basis})"
        return {f"{label}{power}": call for label, call in super().calls().items()}


class CounterSource(_Source):
    """The medium tier: energy, temperatures, activity, memory, links, residencies.

    -> DEVICE_COUNTER.
    """

    name: ClassVar[str] = "amdsmi_counter"
    tables: ClassVar[tuple[str, ...]] = ("device_counter",)
    fields: ClassVar[dict[str, tuple[Unit, tuple[str, ...]]]] = {
        "energy_j": (_JOULES, ("energy_accumulator",)),
        "power_average_w": (_WATTS, ("average_socket_power",)),
        "temperature_c": (_CELSIUS, ("temperature_hotspot", "temperature_edge")),
        "memory_temperature_c": (_CELSIUS, ("temperature_mem",)),
        "device_utilization_ratio": (_RATIO, ("average_gfx_activity",)),
        "memory_utilization_ratio": (_RATIO, ("average_umc_activity",)),
        "pcie_replay_count": (Unit(), ("pcie_replay_count_acc",)),
        "pcie_recovery_count": (Unit(), ("pcie_l0_to_recov_count_acc",)),
    }
    answers: ClassVar[dict[str, tuple[Unit, str, str]]] = {
        "memory_used_bytes": (Unit(_MIB), "amdsmi_get_gpu_vram_usage", "vram_used"),
    }
    _later = frozenset({"power_throttle_ns", "thermal_throttle_ns"})

    def _values(self, reading: _Reading, now_ns: int | None) -> dict[str, Any]:
        metrics, residency = reading.metrics, reading.residency
        naks = [metrics.number(f"pcie_nak_{way}_count_acc") for way in ("sent", "rcvd")]
        values: dict[str, Any] = {
            "link_tx_bytes": reading.bytes_over_links(_WRITE_KB),
            "link_rx_bytes": reading.bytes_over_links(_READ_KB),
            "pcie_bytes": reading.traffic.bytes_until(metrics, now_ns),
            "pcie_nak_count": _sum_of(naks),
        }
        if residency.grew(metrics, now_ns):
            values["power_throttle_ns"] = int(residency.totals_ns["power"])
            values["thermal_throttle_ns"] = int(residency.totals_ns["thermal"])
        return values


def _sum_of(values: list[int | None]) -> int | None:
    """Return the sum of counters; None if one is unknown."""
    known = [value for value in values if value is not None]
    return held(sum(known)) if len(known) == len(values) else None


class LimitSource(_Source):
    """Constants of a run: the largest clock, the power cap, memory. -> DEVICE_LIMIT."""

    name: ClassVar[str] = "amdsmi_limit"
    tables: ClassVar[tuple[str, ...]] = ("device_limit",)
    fields: ClassVar[dict[str, tuple[Unit, tuple[str, ...]]]] = {
        "pcie_lane_count": (Unit(), ("pcie_link_width",)),
    }
    answers: ClassVar[dict[str, tuple[Unit, str, str]]] = {
        "sm_clock_max_hz": (_HERTZ, "amdsmi_get_clock_info", "max_clk"),
        "power_limit_w": (_MICROWATTS, "amdsmi_get_power_cap_info", "power_cap"),
        "power_limit_default_w": (_MICROWATTS, "amdsmi_get_power_cap_info", "default_power_cap"),
        "power_limit_max_w": (_MICROWATTS, "amdsmi_get_power_cap_info", "max_power_cap"),
        "memory_bytes": (Unit(_MIB), "amdsmi_get_gpu_vram_usage", "vram_total"),
    }

    def _values(self, reading: _Reading, now_ns: int | None) -> dict[str, Any]:
        del now_ns
        partition = reading.device.partition
        return {
            "pci_address": reading.device.pci_address,
            "power_basis": _power_basis(reading.metrics),
            "mig": None if partition is None else partition != "SPX",
        }


def _power_basis(metrics: amd.Metrics) -> str | None:
    """Return which of the two powers that a device may have `device_clock` holds."""
    if metrics.number("current_socket_power") is not None:
        return "instant"
    averaged = metrics.number("average_socket_power") is not None
    return "average" if averaged else None


def _kib(value: int | None) -> int | None:
    return None if value is None else held(value * _KIB)
