"""Sources of NVIDIA devices that the sampler process reads, one a tier."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from chopper.collectors._plan import DEVICE, SENSOR, Call, Column, Plan, PlannedDevice
from chopper.collectors.device_sources import DeviceSource, columns_of
from chopper.collectors.nvml import _library as nvml
from chopper.collectors.nvml._gpm import METRICS, Gpm
from chopper.collectors.sampler import held
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chopper.collectors._plan import DeviceTotals
    from chopper.collectors.sampler import Sink

_SM, _MEMORY = 1, 2
"""Clock types of NVML."""
_FIELD_POWER_AVERAGE = 185
_KIB = 1024


class _Sensor:
    """One value of one device that may be refused, once or for good."""

    def __init__(self, column: str, device: nvml.NvmlDevice, make: Callable[[], Any]) -> None:
        self.column = column
        self._device = device
        self.absent: str | None = None
        self._read: Callable[[], Any] | None = self._judged(make, for_good=True)

    @property
    def reader(self) -> Callable[[], Any] | None:
        """The function that reads it; None where it is refused."""
        return None if self.absent is not None else self._read

    def read(self) -> Any:
        """The value now; None where there is none."""
        if self._read is None or self.absent is not None or self._device.lost is not None:
            return None
        return self._judged(self._read)

    def _judged(self, call: Callable[[], Any], *, for_good: bool = False) -> Any:
        try:
            return call()
        except nvml.ReadingFailed as exc:
            if exc.kind == "sensor" or (for_good and exc.kind == "moment"):
                self.absent = str(exc)
            elif exc.kind != "moment":
                self._device.lost = str(exc)
        return None


class _Source(DeviceSource[nvml.NvmlDevice, list[_Sensor]]):
    """Devices, their sensors, and one row per device and sample."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh: dict[int, list[Callable[[], None]]] = {}
        """Device → what is to be done before each of its readings."""

    def open(self) -> None:
        """Initialize NVML, find the devices and what each of them offers.

        Raises:
            CollectorUnavailable: no device, or none that offers anything of this tier.
        """
        self._stack.enter_context(nvml.session())
        for device in nvml.devices():
            self._devices.append((device, self._sensors(device)))
        for _device, sensors in self._devices:
            for sensor in sensors:
                sensor.read()
        offered = [
            s for device, sensors in self._devices for s in sensors if not (s.absent or device.lost)
        ]
        if not offered:
            reasons = "; ".join(dict.fromkeys(self.absent.values()))
            self.close()
            raise CollectorUnavailable(reasons)

    def _sensors(self, device: nvml.NvmlDevice) -> list[_Sensor]:
        """The sensors of a row, in the order of the table's columns."""
        raise NotImplementedError

    def _before_each(self, device: nvml.NvmlDevice, *actions: Callable[[], None]) -> None:
        """Have something done before each reading of a device."""
        self._fresh.setdefault(device.index, []).extend(actions)

    def _add(
        self, sink: Sink, device: nvml.NvmlDevice, sensors: list[_Sensor], now_ns: int
    ) -> None:
        del now_ns
        for action in self._fresh.get(device.index, ()):
            action()
        values = [sensor.read() for sensor in sensors]
        if device.lost is None and any(value is not None for value in values):
            sink.add(self.tables[0], device.index, device.uuid, *values)

    @property
    def absent(self) -> dict[str, str]:
        """``table.column`` → why it stays null: on all devices, or on which ones."""
        table = self.tables[0]
        why: dict[str, dict[int, str]] = {}
        for device, sensors in self._devices:
            if device.lost is not None:
                why.setdefault(table, {})[device.index] = device.lost
                continue
            for sensor in sensors:
                if sensor.absent is not None:
                    why.setdefault(f"{table}.{sensor.column}", {})[device.index] = sensor.absent
        absent = {}
        for what, reasons in why.items():
            distinct = set(reasons.values())
            if len(reasons) == len(self._devices) and len(distinct) == 1:
                absent[what] = distinct.pop()
            else:
                absent |= {f"{what}[device {i}]": reason for i, reason in reasons.items()}
        return absent


class _Planned(_Source):
    """A source whose readings a thread in C can make."""

    def plan(self) -> Plan:
        """The same readings for the thread in C: what was refused at the start is not asked."""
        devices = []
        for device, sensors in self._devices:
            calls: list[Call] = []
            columns: list[Column | None] = []
            for sensor in sensors:
                reader = sensor.reader
                if not isinstance(reader, nvml.Reader):
                    columns.append(None)
                    continue
                # Columns of one call share it.
                at = next((i for i, call in enumerate(calls) if call is reader.call), len(calls))
                columns.append(reader.column._replace(call=at))
                if at == len(calls):
                    calls.append(reader.call)
            if device.lost is None:
                planned = PlannedDevice(device.index, device.uuid, tuple(calls), tuple(columns))
                devices.append(planned)
        outcomes = {
            code: SENSOR if kind == "sensor" else DEVICE
            for code, (kind, _) in nvml.ERRORS.items()
            if kind != "moment"
        }
        return Plan(self.tables[0], tuple(devices), outcomes)

    def learn(self, totals: list[DeviceTotals]) -> None:
        """Take over what the thread in C was refused."""
        of = {device.index: (device, sensors) for device, sensors in self._devices}
        for device_totals in totals:
            device, sensors = of[device_totals.id]
            if device_totals.lost:
                device.lost = nvml.explain(device_totals.lost)[1]
            for sensor, code in zip(sensors, device_totals.refused, strict=True):
                if code:
                    sensor.absent = nvml.explain(code)[1]


class ClockSource(_Planned):
    """The fast tier: clocks, instant power, event reasons. -> DEVICE_CLOCK."""

    name: ClassVar[str] = "nvml_clock"
    tables: ClassVar[tuple[str, ...]] = ("device_clock",)

    def _sensors(self, device: nvml.NvmlDevice) -> list[_Sensor]:
        return [
            _Sensor("sm_clock_hz", device, lambda: nvml.clock_reader(device, _SM)),
            _Sensor("memory_clock_hz", device, lambda: nvml.clock_reader(device, _MEMORY)),
            _Sensor("power_w", device, lambda: nvml.power_reader(device)),
            _Sensor("event_reasons", device, lambda: nvml.reasons_reader(device)),
        ]

    def calls(self) -> dict[str, Callable[[], object]]:
        """Each call of the driver that one device's sample makes."""
        for device, sensors in self._devices:
            if device.lost is None:
                return {
                    name: sensor.read
                    for name, sensor in zip(_clock_calls(device), sensors, strict=True)
                    if sensor.reader is not None
                }
        return {}


def _clock_calls(device: nvml.NvmlDevice) -> tuple[str, ...]:
    """Names of the calls of the fast tier, in the order of its sensors."""
    try:
        power = f"power ({nvml.power_basis(device)})"
    except nvml.ReadingFailed:
        power = "power"
    return (
        "nvmlDeviceGetClockInfo (SM)",
        "nvmlDeviceGetClockInfo (memory)",
        power,
        "nvmlDeviceGetCurrentClocksEventReasons",
    )


_LINK_ERRORS = (38, 45, 52)
"""CRC errors of flits and of data, and replays: totals over links."""

# Column of `device_counter` → (field, what one unit of it is) to try in turn. Links are summed over
# all: a bare field would mean link 0 alone.
_COUNTER_FIELDS: dict[str, tuple[tuple[int, float | int], ...]] = {
    "energy_j": ((83, 1e-3),),
    "power_average_w": ((_FIELD_POWER_AVERAGE, 1e-3),),
    "memory_temperature_c": ((82, 1.0),),
    "pcie_tx_bytes": ((197, 1),),
    "pcie_rx_bytes": ((198, 1),),
    "link_tx_bytes": ((138, _KIB), (202, 1)),
    "link_rx_bytes": ((139, _KIB), (204, 1)),
    "ecc_corrected_count": ((3, 1),),
    "ecc_uncorrected_count": ((4, 1),),
    "pcie_replay_count": ((94, 1),),
    "power_throttle_ns": ((74, 1),),
    "thermal_throttle_ns": ((75, 1),),
    "sync_boost_throttle_ns": ((76, 1),),
    "board_limit_throttle_ns": ((77, 1),),
    "reliability_throttle_ns": ((79, 1),),
    "application_clock_ns": ((80, 1),),
    "software_thermal_ns": ((269, 1),),
    "hardware_thermal_ns": ((270, 1),),
    "power_brake_ns": ((271, 1),),
}
_OF_ALL_LINKS = ("link_tx_bytes", "link_rx_bytes")


class CounterSource(_Planned):
    """The medium tier: energy, temperature, utilization, memory, link and throttle counters.

    -> DEVICE_COUNTER. All fields of a device come with one call of the driver, but for those that
    cost more than 0.5 ms by themselves, as the average power does with some drivers: each of them
    has a call of its own, made once a second, of one device after the other. PCIe counters are the
    non-blocking fields: ``nvmlDeviceGetPcieThroughput`` would block for 20 ms.

    Args:
        cost_ns: what reading these fields of a device takes; measured where it is not given.
    """

    name: ClassVar[str] = "nvml_counter"
    tables: ClassVar[tuple[str, ...]] = ("device_counter",)

    def _sensors(self, device: nvml.NvmlDevice) -> list[_Sensor]:
        by_column: dict[str, Callable[[], Any]] = {}
        for offered in (self._fields, self._structures):
            by_column |= offered(device)
        other = _refusing(_NoSuchCounter())
        return [
            _Sensor(c, device, lambda c=c: by_column.get(c, other))  # type: ignore[misc]
            for c in columns_of("device_counter")
        ]

    def _fields(self, device: nvml.NvmlDevice) -> dict[str, Callable[[], Any]]:
        """Columns that are field values: one call for all that are cheap, one for each other."""
        wanted = {
            column: [(i, nvml.ALL_LINKS if column in _OF_ALL_LINKS else 0) for i, _ in fields]
            for column, fields in _COUNTER_FIELDS.items()
        }
        errors = wanted["link_error_count"] = [(i, 0) for i in _LINK_ERRORS]
        try:
            rare = [c for c, pairs in wanted.items() if self._cost_ns(device, pairs) > _DEAR_NS]
            cheap = [pair for c, pairs in wanted.items() if c not in rare for pair in pairs]
            common = nvml.Fields(device, cheap)
            own = {c: nvml.Fields(device, wanted[c], every=_RARELY) for c in rare}
        except nvml.ReadingFailed as exc:
            return dict.fromkeys(wanted, _refusing(exc))
        readers: dict[str, Callable[[], Any]] = {}
        for column, fields in _COUNTER_FIELDS.items():
            shared = own.get(column, common)
            pairs, units = wanted[column], [unit for _, unit in fields]
            places = list(zip(map(shared.place, pairs), units, strict=True))
            if column == "power_average_w":
                read = partial(_power_of, shared, pairs[0])
                readers[column] = nvml.Reader(read, shared.call, nvml.power_column(places))
                continue
            readers[column] = nvml.Reader(
                _field_reader(shared, pairs, units), shared.call, nvml.field_column(places)
            )
        shared = own.get("link_error_count", common)
        readers["link_error_count"] = nvml.Reader(
            partial(_sum_of_fields, shared, errors),
            shared.call,
            nvml.field_column([(shared.place(pair), 1) for pair in errors], summed=True),
        )
        self._before_each(device, common.forget, *(fields.forget for fields in own.values()))
        self._calls.setdefault(f"nvmlDeviceGetFieldValues ({common.count} fields)", common.read)
        for column, one in own.items():
            name = f"nvmlDeviceGetFieldValues ({column}, at each {_RARELY}th sample)"
            self._calls.setdefault(name, one.read)
        return readers

    def _structures(self, device: nvml.NvmlDevice) -> dict[str, Callable[[], Any]]:
        """Columns that are members of structures, a call for each structure."""
        readers: dict[str, Callable[[], Any]] = {}
        for name, structure, members in nvml.counter_structures():
            try:
                filled = nvml.Structure(device, name, structure)
            except nvml.ReadingFailed as exc:
                readers |= dict.fromkeys((column for column, *_ in members), _refusing(exc))
                continue
            self._before_each(device, filled.forget)
            self._calls.setdefault(name, filled.read_anew)
            for column, member, factor, signed, most in members:
                readers[column] = filled.reader(member, factor, signed=signed, most=most)
        return readers | self._older_temperature(device, readers["temperature_c"])

    def _older_temperature(
        self, device: nvml.NvmlDevice, newer: Callable[[], Any]
    ) -> dict[str, Callable[[], Any]]:
        """The call of older drivers, where the device refuses the one that came after it."""
        try:
            newer()
        except nvml.ReadingFailed as exc:
            with contextlib.suppress(nvml.ReadingFailed):
                if exc.kind == "sensor":
                    older = nvml.older_temperature_reader(device)
                    older()
                    self._calls.setdefault("nvmlDeviceGetTemperature", older)
                    return {"temperature_c": older}
        return {}

    def __init__(
        self, cost_ns: Callable[[nvml.NvmlDevice, list[tuple[int, int]]], int] | None = None
    ) -> None:
        super().__init__()
        self._cost_ns = cost_ns or _fields_cost_ns
        self._calls: dict[str, Callable[[], object]] = {}
        """Name → call, of the first device."""

    def calls(self) -> dict[str, Callable[[], object]]:
        """Each call of the driver that one device's sample makes."""
        return self._calls


_DEAR_NS = 500_000
"""Eight devices' field of such a cost take 4 % of the tier's period."""
_RARELY = 10
"""Once a second in a tier of 10 Hz."""


def _fields_cost_ns(device: nvml.NvmlDevice, ids: list[tuple[int, int]]) -> int:
    """Measure a reading of these fields: the least of three calls; a cheap one is enough.

    Raises:
        ReadingFailed: this driver has no field values.
    """
    fields = nvml.Fields(device, ids)
    least_ns: int | None = None
    for _ in range(3):
        before_ns = time.monotonic_ns()
        with contextlib.suppress(nvml.ReadingFailed):
            fields.read()
        spent_ns = time.monotonic_ns() - before_ns
        least_ns = spent_ns if least_ns is None else min(least_ns, spent_ns)
        if least_ns <= _DEAR_NS:
            break
    assert least_ns is not None
    return least_ns


def _sum_of(values: Iterable[float | None]) -> int | None:
    """The sum; None where one is not known: a sum of some would look like a counter that fell."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += int(value)
    return held(total)


def _sum_of_fields(shared: nvml.Fields, pairs: list[tuple[int, int]]) -> int | None:
    return _sum_of(nvml.scaled(shared.value(pair), 1) for pair in pairs)


class _NoSuchCounter(nvml.ReadingFailed):
    """A column that this vendor's driver has no counter for."""

    def __init__(self) -> None:
        Exception.__init__(self, "NVML has no such counter")
        self.kind, self.code = "sensor", 0


def _refusing(why: nvml.ReadingFailed) -> Callable[[], Any]:
    """A reader of what this driver does not have at all."""

    def read() -> Any:
        raise why

    return read


def _power_of(shared: nvml.Fields, pair: tuple[int, int]) -> float | None:
    return nvml.power_w(shared.value(pair))


def _field_reader(
    shared: nvml.Fields, pairs: list[tuple[int, int]], units: list[float | int]
) -> Callable[[], int | float | None]:
    """Reads the first of these fields that the device has."""

    def read() -> int | float | None:
        refused: nvml.ReadingFailed | None = None
        for pair, unit in zip(pairs, units, strict=True):
            try:
                value = nvml.scaled(shared.value(pair), unit)
            except nvml.ReadingFailed as exc:
                if exc.kind != "sensor":
                    raise
                refused = refused or exc
                continue
            if value is None or isinstance(unit, float):
                return value
            return held(int(value))
        assert refused is not None
        raise refused

    return read


class ActivitySource(_Planned):
    """GPU performance monitoring of Hopper and later: what the units were busy with.

    -> DEVICE_ACTIVITY. Each row covers the time since the device's previous one. GPM wants 100 ms
    between two samples; it coexists with CUPTI's profilers.
    """

    name: ClassVar[str] = "nvml_activity"
    tables: ClassVar[tuple[str, ...]] = ("device_activity",)

    def __init__(self) -> None:
        super().__init__()
        self._gpm: list[Gpm] = []

    def _sensors(self, device: nvml.NvmlDevice) -> list[_Sensor]:
        gpm = Gpm(device)
        self._gpm.append(gpm)
        self._before_each(device, gpm.advance)
        return [
            _Sensor(column, device, lambda m=metric: gpm.reader(m))  # type: ignore[misc]
            for column, metric in METRICS.items()
        ]

    def calls(self) -> dict[str, Callable[[], object]]:
        """Both calls of a reading, made as one."""
        live = [gpm for gpm in self._gpm if gpm.offered]
        return {"nvmlGpmSampleGet, nvmlGpmMetricsGet": live[0].advance} if live else {}

    def close(self) -> None:
        """Free the samples, shut NVML down."""
        for gpm in self._gpm:
            gpm.free()
        super().close()


class LimitSource(_Source):
    """Constants of a run: limits, largest clocks, the PCIe link. -> DEVICE_LIMIT."""

    name: ClassVar[str] = "nvml_limit"
    tables: ClassVar[tuple[str, ...]] = ("device_limit",)

    def _sensors(self, device: nvml.NvmlDevice) -> list[_Sensor]:
        handle = device.handle

        def field(field_id: int) -> float | None:
            return nvml.scaled(nvml.Fields(device, [(field_id, 0)]).read()[0], 1e-3)

        def megahertz(name: str, *arguments: Any) -> int | None:
            return int(nvml.query(name, handle, *arguments)) * 1_000_000 or None

        readers: dict[str, Callable[[], Any]] = {
            "name": lambda: device.name,
            "pci_address": lambda: device.pci_address,
            "driver_version": lambda: str(nvml.query("nvmlSystemGetDriverVersion")),
            "sm_clock_max_hz": lambda: megahertz("nvmlDeviceGetMaxClockInfo", _SM),
            "sm_clock_boost_hz": lambda: megahertz("nvmlDeviceGetMaxCustomerBoostClock", _SM),
            "sm_clock_application_hz": lambda: megahertz(
                "nvmlDeviceGetClock", _SM, _CLOCK_ID_APPLICATION
            ),
            "memory_clock_max_hz": lambda: megahertz("nvmlDeviceGetMaxClockInfo", _MEMORY),
            "power_basis": lambda: nvml.power_basis(device),
            "power_limit_w": lambda: nvml.query("nvmlDeviceGetEnforcedPowerLimit", handle) * 1e-3,
            "power_limit_default_w": lambda: field(_FIELD_POWER_DEFAULT_LIMIT),
            "power_limit_max_w": lambda: field(_FIELD_POWER_MAX_LIMIT),
            "memory_bytes": lambda: int(
                nvml.query("nvmlDeviceGetMemoryInfo", handle, nvml.MEMORY_V2).total
            ),
            "pcie_generation": lambda: int(
                nvml.query("nvmlDeviceGetCurrPcieLinkGeneration", handle)
            ),
            "pcie_lane_count": lambda: int(nvml.query("nvmlDeviceGetCurrPcieLinkWidth", handle)),
            "mig": lambda: bool(nvml.query("nvmlDeviceGetMigMode", handle)[0]),
        }
        return [_Sensor(c, device, lambda r=r: r) for c, r in readers.items()]  # type: ignore[misc]


_CLOCK_ID_APPLICATION = 1
_FIELD_POWER_MAX_LIMIT, _FIELD_POWER_DEFAULT_LIMIT = 188, 189


# What the driver buffers: kind of sample, its name here, its unit, and what no device reaches.
_BUFFERS = (
    (0, "power_w", 1e-3, 1e4),
    (5, "sm_clock_hz", 1e6, 2e10),
    (6, "memory_clock_hz", 1e6, 2e10),
)
_STRAY_US = 86_400_000_000
"""A time further from now than a day is none."""


class BufferedSource(_Source):
    """Samples that the driver keeps, where they are finer than polling. -> DEVICE_BUFFERED.

    Clocks are taken as they come: the driver writes them when they change. Power comes at a rate of
    its own, and is taken only where its median distance is below that of polling.

    Args:
        polled_hz: rate of the fast tier.
    """

    name: ClassVar[str] = "nvml_buffered"
    tables: ClassVar[tuple[str, ...]] = ("device_buffered",)

    def __init__(self, polled_hz: float = 100.0) -> None:
        super().__init__()
        self._period_us = 1e6 / polled_hz
        self._seen_us: dict[tuple[int, int], int] = {}

    def _sensors(self, device: nvml.NvmlDevice) -> list[_Sensor]:
        return [
            _Sensor(quantity, device, partial(self._opened, device, kind, unit, most))
            for kind, quantity, unit, most in _BUFFERS
        ]

    def _opened(
        self, device: nvml.NvmlDevice, kind: int, unit: float, most: float
    ) -> Callable[[], list[tuple[int, float]]]:
        before = self._since(device, kind, unit, most)
        distances = sorted(b[0] - a[0] for a, b in pairwise(before))
        if kind == 0 and distances and distances[len(distances) // 2] >= self._period_us:
            raise TooCoarse(distances[len(distances) // 2])
        return lambda: self._since(device, kind, unit, most)

    def _since(
        self, device: nvml.NvmlDevice, kind: int, unit: float, most: float
    ) -> list[tuple[int, float]]:
        """(time in µs, value) of what is new since the last call."""
        key = (device.index, kind)
        seen_us = self._seen_us.get(key, 0)
        try:
            value_type, samples = nvml.query("nvmlDeviceGetSamples", device.handle, kind, seen_us)
        except nvml.ReadingFailed as exc:
            if exc.code in _NOTHING_NEW:
                return []
            raise
        fresh = []
        now_us = time.time_ns() // 1000
        for sample in samples:
            value = nvml.scaled(nvml.decoded(value_type, sample.sampleValue), unit)
            stray = abs(sample.timeStamp - now_us) > _STRAY_US
            if sample.timeStamp > seen_us and not stray and value is not None and 0 < value <= most:
                fresh.append((int(sample.timeStamp), value))
        fresh.sort()
        if fresh:
            self._seen_us[key] = fresh[-1][0]
        return fresh

    def _add(
        self, sink: Sink, device: nvml.NvmlDevice, sensors: list[_Sensor], now_ns: int
    ) -> None:
        del now_ns
        for sensor in sensors:
            for time_us, value in sensor.read() or ():
                row = (device.index, device.uuid, sensor.column, value)
                sink.add_at(self.tables[0], time_us * 1000, 1000, *row)


_NOTHING_NEW = (6, 21)
"""Not found, no data: the buffer holds nothing since then."""


class TooCoarse(nvml.ReadingFailed):
    """The driver's own samples are no finer than polling."""

    def __init__(self, distance_us: int) -> None:
        Exception.__init__(
            self, f"the driver keeps one every {distance_us / 1000:g} ms: polling is as fine"
        )
        self.kind, self.code = "sensor", 0
