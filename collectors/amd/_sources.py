"""Sources of AMD devices that the sampler process reads, one a tier."""

from __future__ import annotations

from ctypes import byref, c_uint32, create_string_buffer, sizeof
from typing import TYPE_CHECKING, Any, ClassVar

from chopper.collectors._plan import (
    DEVICE,
    MEAN,
    NUMBER,
    RESIDENCY,
    Call,
    Column,
    Plan,
    PlannedDevice,
    address,
    content,
    pointer,
)
from chopper.collectors.amd import _library as amd
from chopper.collectors.device_sources import DeviceSource, columns_of
from chopper.collectors.sampler import held
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chopper.collectors._plan import DeviceTotals
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

    def reasons(self, metrics: amd.Reading, now_ns: int | None) -> int | None:
        """Bits of the reasons that held since the previous reading; None where nothing tells.

        0 says that the device counts residencies and none grew.
        """
        counts = {name: metrics.numbers[name] for name in _RESIDENCIES}
        ticks = metrics.numbers["accumulation_counter"]
        now = {name: value for name, value in counts.items() if value is not None}
        if ticks is None or not now:
            return None
        now["accumulation_counter"] = ticks
        before, before_ns = self._last, self._last_ns
        if before is not None and before["accumulation_counter"] == ticks and before_ns is not None:
            return None  # not refreshed since
        self._last, self._last_ns = now, now_ns
        if before is None:
            return None
        grown = {name: now[name] - before.get(name, now[name]) for name in now}
        if min(grown.values()) < 0 or not grown["accumulation_counter"]:
            return None  # reset
        bits = 0
        shares = {"power": 0.0, "thermal": 0.0}
        for name, reason in _RESIDENCIES.items():
            share = grown.get(name, 0) / grown["accumulation_counter"]
            if share:
                bits |= reason
                shares["power" if reason == _REASON_POWER_CAP else "thermal"] += share
        for kind, share in shares.items():
            # Several sensors may be hot at once: no more than all of the time.
            if now_ns is not None and before_ns is not None:
                self.totals_ns[kind] += min(share, 1.0) * (now_ns - before_ns)
        return bits


class _Traffic:
    """Bytes over PCIe since the first reading, from the accumulated rate.

    At each tick of ``accumulation_counter`` the firmware adds the rate of both directions in GB/s.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int, int] | None = None
        self._total_bytes = 0.0

    def bytes_until(self, metrics: amd.Reading, now_ns: int | None) -> int | None:
        """Return the bytes in both directions so far; None where a reading does not tell."""
        rate_sum, ticks = (
            metrics.numbers[name] for name in ("pcie_bandwidth_acc", "accumulation_counter")
        )
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


_MOST_GB_PER_S = 1024
"""Several times the fastest PCIe: a larger rate is of a counter that jumped."""


class _Source(DeviceSource[amd.AmdDevice, amd.Metrics]):
    """Devices and their metrics; one row per device and sample."""

    def __init__(self) -> None:
        super().__init__()
        self._absent: dict[str, str] = {}
        self._wrapper: Any = None

    def open(self) -> None:
        """Initialize the library, find the devices, read each once.

        Raises:
            CollectorUnavailable: no device, or none whose metrics can be read.
        """
        self._wrapper = self._stack.enter_context(amd.session())
        layout = amd.Layout(self._wrapper.amdsmi_gpu_metrics_t)
        for device in amd.devices(self._wrapper):
            self._devices.append((device, amd.Metrics(self._wrapper, device, layout)))
        refused = []
        for device, metrics in self._devices:
            code = metrics.read()
            if code:
                loss, reason = amd.explain(code)
                refused.append(f"device {device.index}: {reason}")
                if loss != "moment":
                    self._lose(device, reason)
        if len(refused) == len(self._devices):
            self.close()
            raise CollectorUnavailable("; ".join(refused))
        self._find_absent()

    @property
    def absent(self) -> dict[str, str]:
        """``table.column`` → why it stays null."""
        return self._absent

    def _lose(self, device: amd.AmdDevice, reason: str) -> None:
        device.lost = reason
        self._absent[f"{self.tables[0]}[device {device.index}]"] = reason

    def _find_absent(self) -> None:
        """Name the columns that no device has."""
        live = [(d, m) for d, m in self._devices if d.lost is None]
        rows = [list(self._values(device, metrics.now, None)) for device, metrics in live]
        for name, values in zip(columns_of(self.tables[0]), zip(*rows, strict=True), strict=True):
            if all(value is None for value in values) and name not in self._later:
                self._absent[f"{self.tables[0]}.{name}"] = "not available on this device"

    _later: ClassVar[frozenset[str]] = frozenset()
    """Columns that need two readings."""

    def _values(
        self, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int | None
    ) -> Iterable[Any]:
        """A row's values after the device, in the order of the table's columns.

        ``now_ns`` is None for the first reading, which makes no row.
        """
        raise NotImplementedError

    def _add(self, sink: Sink, device: amd.AmdDevice, metrics: amd.Metrics, now_ns: int) -> None:
        code = metrics.read()
        if not code:
            self._add_rows(sink, device, metrics.now, now_ns)
            return
        loss, reason = amd.explain(code)
        if loss != "moment":
            self._lose(device, reason)

    def _add_rows(
        self, sink: Sink, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int
    ) -> None:
        """Add what one reading gives."""
        values = self._values(device, metrics, now_ns)
        sink.add(self.tables[0], device.index, device.uuid, *values)

    def calls(self) -> dict[str, Callable[[], object]]:
        """The call of the driver that one device's sample makes."""
        for device, metrics in self._devices:
            if device.lost is None:
                basis = _power_basis(metrics.now)
                power = f" (power: {basis})" if basis is not None else ""
                return {f"amdsmi_get_gpu_metrics_info{power}": metrics.read}
        return {}


class ClockSource(_Source):
    """The fast tier: clocks, power, what holds the clock down. -> DEVICE_CLOCK."""

    name: ClassVar[str] = "amdsmi_clock"
    tables: ClassVar[tuple[str, ...]] = ("device_clock",)
    _later = frozenset({"event_reasons"})

    def __init__(self) -> None:
        super().__init__()
        self._residency: dict[int, _Residency] = {}

    def _values(
        self, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int | None
    ) -> Iterable[Any]:
        residency = self._residency.setdefault(id(device), _Residency())
        return (
            _gfx_clock_hz(metrics),
            _hertz(_first(metrics, "current_uclk", "average_uclk_frequency")),
            _watts(metrics),
            residency.reasons(metrics, now_ns),
        )

    def plan(self) -> Plan:
        """The same readings for the thread in C."""
        function = address(self._wrapper.amdsmi_get_gpu_metrics_info)
        devices = []
        for device, metrics in self._devices:
            if device.lost is not None:
                continue
            call = Call(function, pointer(device.handle), None, content(metrics.structure))
            kind = type(metrics.structure)
            clock = _items(kind, "current_gfxclks") + _numbers(
                kind, "current_gfxclk", "average_gfxclk_frequency"
            )
            memory = _numbers(kind, "current_uclk", "average_uclk_frequency")
            watts = _numbers(kind, "current_socket_power", "average_socket_power")
            reasons = tuple(
                place
                for name, bit in _RESIDENCIES.items()
                for place in _numbers(kind, name, tag=bit)
            )
            ticks = _numbers(kind, "accumulation_counter") if reasons else ()
            planned = (
                Column(MEAN, 0, clock, _MEGA, nonzero=True),
                Column(NUMBER, 0, memory, _MEGA, nonzero=True, sentinel=True),
                Column(NUMBER, 0, watts, 1.0, nonzero=True, sentinel=True, most=_MOST_W),
                Column(RESIDENCY, 0, (*ticks, *reasons) if ticks else (), 1),
            )
            # Older versions of the binding lack fields.
            columns = tuple(column if column.places else None for column in planned)
            devices.append(PlannedDevice(device.index, device.uuid, (call,), columns))
        outcomes = {code: DEVICE for code, (kind, _) in amd.ERRORS.items() if kind != "moment"}
        return Plan(self.tables[0], tuple(devices), outcomes, keep_empty=True)

    def learn(self, totals: list[DeviceTotals]) -> None:
        """Take over what the thread in C was refused."""
        of = {device.index: device for device, _ in self._devices}
        for device_totals in totals:
            if device_totals.lost and of[device_totals.id].lost is None:
                self._lose(of[device_totals.id], amd.explain(device_totals.lost)[1])


def _numbers(structure: Any, *names: str, tag: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Return the places of those of these fields that the structure has."""
    fields = (getattr(structure, name, None) for name in names)
    return tuple((place.offset, place.size, tag) for place in fields if place is not None)


def _items(structure: Any, name: str) -> tuple[tuple[int, int, int], ...]:
    """Return the places of the items of an array field, tagged as parts of a mean."""
    descriptor = getattr(structure, name, None)
    if descriptor is None:
        return ()
    width = sizeof(dict(structure._fields_)[name]._type_)
    return tuple((descriptor.offset + i * width, width, 1) for i in range(descriptor.size // width))


def _gfx_clock_hz(metrics: amd.Reading) -> int | None:
    """Mean clock of the dies that report one; of the device where it has no dies of its own."""
    dies = [clock for clock in metrics.items("current_gfxclks") if clock]
    if dies:
        return round(sum(dies) * _MEGA / len(dies))
    return _hertz(_first(metrics, "current_gfxclk", "average_gfxclk_frequency"))


def _first(metrics: amd.Reading, *names: str) -> int | None:
    return next((v for v in (metrics.numbers[name] for name in names) if v is not None), None)


def _hertz(megahertz: int | None) -> int | None:
    return megahertz * _MEGA if megahertz else None


def _watts(metrics: amd.Reading) -> float | None:
    return _power(_first(metrics, "current_socket_power", "average_socket_power"))


def _power(watts: int | None) -> float | None:
    """A device that answers draws power: 0 says that it is not known."""
    return float(watts) if watts and watts <= _MOST_W else None


_MOST_W = 10_000
"""More than any socket draws."""


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
        self._traffic: dict[int, _Traffic] = {}
        self._links: dict[tuple[int, str], _Links] = {}
        self._columns = columns_of("device_counter")

    def _values(
        self, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int | None
    ) -> Iterable[Any]:
        residency = self._residency.setdefault(id(device), _Residency())
        traffic = self._traffic.setdefault(id(device), _Traffic())

        def over_links(name: str) -> int | None:
            links = self._links.setdefault((id(device), name), _Links())
            return links.sum_bytes(metrics.arrays[name])

        counted = residency.reasons(metrics, now_ns) is not None
        energy = metrics.numbers["energy_accumulator"]
        value_by_column: dict[str, Any] = {
            "energy_j": None if energy is None else energy * _ENERGY_UNIT_J,
            "power_average_w": _power(metrics.numbers["average_socket_power"]),
            "temperature_c": _optional(
                _first(metrics, "temperature_hotspot", "temperature_edge"), float
            ),
            "memory_temperature_c": _optional(metrics.numbers["temperature_mem"], float),
            "device_utilization_ratio": _percent(metrics.numbers["average_gfx_activity"]),
            "memory_utilization_ratio": _percent(metrics.numbers["average_umc_activity"]),
            "memory_used_bytes": self._memory_used_bytes(device),
            "link_tx_bytes": over_links(_WRITE_KB),
            "link_rx_bytes": over_links(_READ_KB),
            "pcie_bytes": traffic.bytes_until(metrics, now_ns),
            "pcie_replay_count": held(metrics.numbers["pcie_replay_count_acc"]),
            "pcie_nak_count": _sum_of(
                metrics.numbers["pcie_nak_sent_count_acc"],
                metrics.numbers["pcie_nak_rcvd_count_acc"],
            ),
            "pcie_recovery_count": held(metrics.numbers["pcie_l0_to_recov_count_acc"]),
        }
        if counted:
            value_by_column["power_throttle_ns"] = int(residency.totals_ns["power"])
            value_by_column["thermal_throttle_ns"] = int(residency.totals_ns["thermal"])
        return map(value_by_column.get, self._columns)

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


class _Links:
    """The sum over a device's links: always over the same ones, or it would seem to jump."""

    def __init__(self) -> None:
        self._counted: set[int] | None = None

    def sum_bytes(self, items_kib: list[int | None]) -> int | None:
        """Bytes over all links that the first reading told; None where one of them is missing."""
        if self._counted is None:
            self._counted = {i for i, value in enumerate(items_kib) if value is not None}
        values = [items_kib[i] for i in self._counted]
        if not values or None in values:
            return None
        return _kib(sum(value for value in values if value is not None))


def _sum_of(*values: int | None) -> int | None:
    """The sum of counters; None where one is not known."""
    known = [value for value in values if value is not None]
    return held(sum(known)) if len(known) == len(values) else None


class LimitSource(_Source):
    """Constants of a run: the largest clock, the power cap, memory. -> DEVICE_LIMIT."""

    name: ClassVar[str] = "amdsmi_limit"
    tables: ClassVar[tuple[str, ...]] = ("device_limit",)

    def _values(
        self, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int | None
    ) -> Iterable[Any]:
        del now_ns
        wrapper, handle = self._wrapper, device.handle
        clock = wrapper.amdsmi_clk_info_t()
        has_clock = wrapper.amdsmi_get_clock_info(handle, c_uint32(_CLOCK_GFX), byref(clock)) == 0
        cap = wrapper.amdsmi_power_cap_info_t()
        has_cap = wrapper.amdsmi_get_power_cap_info(handle, c_uint32(0), byref(cap)) == 0
        usage = wrapper.amdsmi_vram_usage_t()
        has_memory = wrapper.amdsmi_get_gpu_vram_usage(handle, byref(usage)) == 0
        lanes = metrics.numbers["pcie_link_width"]
        value_by_column: dict[str, Any] = {
            "pci_address": device.pci_address,
            "sm_clock_max_hz": _hertz(int(clock.max_clk)) if has_clock else None,
            "power_basis": _power_basis(metrics),
            "power_limit_w": cap.power_cap * 1e-6 if has_cap else None,
            "power_limit_default_w": cap.default_power_cap * 1e-6 if has_cap else None,
            "power_limit_max_w": cap.max_power_cap * 1e-6 if has_cap else None,
            "memory_bytes": int(usage.vram_total) * _MIB if has_memory else None,
            "pcie_lane_count": lanes,
            "mig": None if device.partition is None else device.partition != "SPX",
        }
        return map(value_by_column.get, columns_of("device_limit"))


def _power_basis(metrics: amd.Reading) -> str | None:
    """Return which of the two powers that a device may have `device_clock` holds."""
    if metrics.numbers["current_socket_power"] is not None:
        return "instant"
    averaged = metrics.numbers["average_socket_power"] is not None
    return "average" if averaged else None


_CLOCK_GFX = 0


class PartSource(_Source):
    """Dies and links one by one. -> DEVICE_DIE, DEVICE_LINK."""

    name: ClassVar[str] = "amdsmi_parts"
    tables: ClassVar[tuple[str, ...]] = ("device_die", "device_link")

    def _find_absent(self) -> None:
        """Name what no device tells apart."""
        live = [metrics.now for device, metrics in self._devices if device.lost is None]
        dies = any(m.items(f) for m in live for _, f in _DIES)
        links = any(m.items(f) for m in live for f in (_READ_KB, _WRITE_KB))
        if not dies:
            self._absent["device_die"] = "not available on this device"
        if not links:
            self._absent["device_link"] = "not available on this device"
        if not (dies or links):
            self.close()
            raise CollectorUnavailable("no device tells its dies or links apart")

    def _add_rows(
        self, sink: Sink, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int
    ) -> None:
        del now_ns
        who = (device.index, device.uuid)
        for domain, name in _DIES:
            for die, clock_mhz in enumerate(metrics.arrays[name]):
                if clock_mhz:
                    sink.add("device_die", *who, domain, die, clock_mhz * _MEGA)
        received, sent = metrics.arrays[_READ_KB], metrics.arrays[_WRITE_KB]
        states = metrics.arrays["xgmi_link_status"]
        for link, (rx_kb, tx_kb) in enumerate(zip(received, sent, strict=True)):
            if rx_kb is None and tx_kb is None:
                continue
            up = states[link] == _LINK_UP if states and states[link] is not None else None
            sink.add("device_link", *who, link, _kib(tx_kb), _kib(rx_kb), up)


_DIES = (("gfx", "current_gfxclks"), ("soc", "current_socclks"))
_READ_KB, _WRITE_KB = "xgmi_read_data_acc", "xgmi_write_data_acc"
_LINK_UP = 1


def _kib(value: int | None) -> int | None:
    return None if value is None else held(value * _KIB)


class PartitionSource(_Source):
    """The partitioning of the devices. -> DEVICE_PARTITION."""

    name: ClassVar[str] = "amdsmi_partition"
    tables: ClassVar[tuple[str, ...]] = ("device_partition",)

    def _values(
        self, device: amd.AmdDevice, metrics: amd.Reading, now_ns: int | None
    ) -> Iterable[Any]:
        del metrics, now_ns
        wrapper, handle = self._wrapper, device.handle
        text = create_string_buffer(16)
        refused = wrapper.amdsmi_get_gpu_memory_partition(handle, text, c_uint32(16))
        memory = None if refused else text.value.decode(errors="replace") or None
        info = wrapper.amdsmi_kfd_info_t()
        has_info = wrapper.amdsmi_get_gpu_kfd_info(handle, byref(info)) == 0
        part = info.current_partition_id if has_info else _NO_PART
        return (
            device.pci_address,
            device.partition,
            memory,
            None if part == _NO_PART else int(part),
        )


_NO_PART = 0xFFFFFFFF
