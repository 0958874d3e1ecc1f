"""Sources of NVIDIA devices that the sampler process reads, one a tier."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from chopper.collectors._plan import (
    FIELD,
    FIELD_BYTES,
    METRIC,
    NUMBER,
    SUM,
    Column,
    Interval,
    LiveCall,
    address,
    content,
    pointer,
)
from chopper.collectors.device_sources import DeviceSource, PlannedReader, PlannedSource
from chopper.collectors.nvml import _library as nvml
from chopper.collectors.sampler import Sink
from chopper.errors import CollectorUnavailable
from chopper.storage import clock

_SM, _MEMORY = 1, 2
"""Clock types of NVML."""
_KIB = 1024


class _Planned(PlannedSource[nvml.NvmlDevice]):
    """A source whose readings a thread in C can make."""

    errors = nvml.ERRORS

    def open(self) -> None:
        """Initialize NVML, find the devices and what each of them offers."""
        self._stack.enter_context(nvml.session())
        self._begin(nvml.devices())
        if not any(d.lost is None and reader.planned().calls for d, reader in self._devices):
            reasons = "; ".join(dict.fromkeys(self.absent.values()))
            self.close()
            raise CollectorUnavailable(reasons)


@contextlib.contextmanager
def _refusals(reader: PlannedReader, *columns: str) -> Iterator[None]:
    """Name the columns that this driver has no call for."""
    try:
        yield
    except nvml.ReadingFailed as exc:
        reader.absent |= dict.fromkeys(columns, str(exc))


class ClockSource(_Planned):
    """The fast tier: clocks, instant power, event reasons. -> DEVICE_CLOCK."""

    name: ClassVar[str] = "nvml_clock"
    tables: ClassVar[tuple[str, ...]] = ("device_clock",)

    def _describe(self, reader: PlannedReader, device: nvml.NvmlDevice) -> None:
        name = "nvmlDeviceGetClockInfo"
        for column, kind, what in (
            ("sm_clock_hz", _SM, "SM"),
            ("memory_clock_hz", _MEMORY, "memory"),
        ):
            with _refusals(reader, column):
                call = nvml.call_of(device, name, bytes(4), kind)
                reader.describe(f"{name} ({what})", call, {column: nvml.HERTZ})
        with _refusals(reader, "power_w"):
            call, watts, _ = nvml.power(device)
            label = "power"
            with contextlib.suppress(nvml.ReadingFailed):
                label = f"power ({nvml.power_basis(device)})"
            reader.describe(label, call, {"power_w": watts})
        with _refusals(reader, "event_reasons"):
            name = "nvmlDeviceGetCurrentClocksEventReasons"
            try:
                call = nvml.call_of(device, name, bytes(8))
            except nvml.ReadingFailed:  # older drivers
                call = nvml.call_of(device, "nvmlDeviceGetCurrentClocksThrottleReasons", bytes(8))
            reader.describe(name, call, {"event_reasons": nvml.BITS})


# Column of `device_counter` → (field, what one unit of it is) to try in turn. Links are summed over
# all: a bare field would mean link 0 alone.
_FIELDS: dict[str, tuple[tuple[int, float | int], ...]] = {
    "energy_j": ((83, 1e-3),),
    "power_average_w": ((185, 1e-3),),
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
    # Not in turn but the sum: CRC errors of flits and of data, and replays, over all links.
    "link_error_count": ((38, 1), (45, 1), (52, 1)),
}
_OF_ALL_LINKS = ("link_tx_bytes", "link_rx_bytes")
_DEAR_NS = 500_000
"""Eight devices' field of such a cost take 4 % of the tier's period."""
_RARELY = 10
"""Once a second in a tier of 10 Hz."""
_MEMORY_V2 = 0x02000028
"""Version of nvmlMemory_v2_t: the structure's 40 bytes and a 2 in the top byte."""
_TEMPERATURE_V1 = 0x0100000C
"""Version of nvmlTemperature_v1_t, likewise; its sensor 0 is that of the chip."""
_PERCENT = Column(NUMBER, 0, ((0, 4, 0),), 0.01, most=100)
_CELSIUS = Column(NUMBER, 0, ((8, 4, 1),), 1.0)
_OLDER_CELSIUS = Column(NUMBER, 0, ((0, 4, 0),), 1.0, sentinel=True, most=1000)


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

    def __init__(
        self, cost_ns: Callable[[nvml.NvmlDevice, list[tuple[int, int]]], int] | None = None
    ) -> None:
        super().__init__()
        self._cost_ns = cost_ns or _fields_cost_ns

    def _describe(self, reader: PlannedReader, device: nvml.NvmlDevice) -> None:
        reader.absent |= dict.fromkeys(reader.table_columns, "NVML has no such counter")
        with _refusals(reader, *_FIELDS):
            self._describe_fields(reader, device)
        name = "nvmlDeviceGetTemperatureV"
        with _refusals(reader, "temperature_c"):
            call = nvml.call_of(device, name, _words(_TEMPERATURE_V1, 0, 0))
            celsius = _CELSIUS
            with contextlib.suppress(nvml.ReadingFailed):
                older = nvml.call_of(device, "nvmlDeviceGetTemperature", bytes(4), 0)
                if not nvml.offers(call, celsius) and nvml.offers(older, _OLDER_CELSIUS):
                    name, call, celsius = "nvmlDeviceGetTemperature", older, _OLDER_CELSIUS
            reader.describe(name, call, {"temperature_c": celsius})
        with _refusals(reader, "device_utilization_ratio", "memory_utilization_ratio"):
            call = nvml.call_of(device, "nvmlDeviceGetUtilizationRates", bytes(8))
            memory = _PERCENT._replace(places=((4, 4, 0),))
            columns = {"device_utilization_ratio": _PERCENT, "memory_utilization_ratio": memory}
            reader.describe("nvmlDeviceGetUtilizationRates", call, columns)
        with _refusals(reader, "memory_used_bytes"):
            call = nvml.call_of(device, "nvmlDeviceGetMemoryInfo_v2", _words(_MEMORY_V2, *9 * [0]))
            used = Column(NUMBER, 0, ((32, 8, 0),), 1, sentinel=True)
            reader.describe("nvmlDeviceGetMemoryInfo_v2", call, {"memory_used_bytes": used})

    def _describe_fields(self, reader: PlannedReader, device: nvml.NvmlDevice) -> None:
        """One call for all fields that are cheap, one for each other."""
        scopes = dict.fromkeys(_OF_ALL_LINKS, nvml.ALL_LINKS)
        ids = {
            column: [(number, scopes.get(column, 0)) for number, _ in fields]
            for column, fields in _FIELDS.items()
        }
        dear = [column for column, pairs in ids.items() if self._cost_ns(device, pairs) > _DEAR_NS]
        cheap = [column for column in ids if column not in dear]
        for columns in (cheap, *([column] for column in dear)):
            pairs = [pair for column in columns for pair in ids[column]]
            call = nvml.fields_call(device, pairs)
            label = f"{len(pairs)} fields"
            if columns is not cheap:
                label = f"{columns[0]}, at each {_RARELY}th sample"
                call = call._replace(every=_RARELY, turn=device.index % _RARELY)
            described, at = {}, 0
            for column in columns:
                described[column] = _field_column(column, at)
                at += len(ids[column])
            reader.describe(f"nvmlDeviceGetFieldValues ({label})", call, described)


def _field_column(name: str, at: int) -> Column:
    """The column of fields that lie from a position on in their call."""
    units = [unit for _, unit in _FIELDS[name]]
    places = tuple(
        ((at + i) * FIELD_BYTES, 8, unit if isinstance(unit, int) else 0)
        for i, unit in enumerate(units)
    )
    if name == "power_average_w":
        return nvml.FIELD_WATTS._replace(places=places)
    return Column(SUM if name == "link_error_count" else FIELD, 0, places, units[0])


def _words(*words: int) -> bytes:
    """A structure that begins with its version, and holds these words of 32 bits."""
    return b"".join(word.to_bytes(4, "little") for word in words)


def _fields_cost_ns(device: nvml.NvmlDevice, ids: list[tuple[int, int]]) -> int:
    """Measure a reading of these fields: the least of three calls; a cheap one is enough."""
    call = LiveCall(nvml.fields_call(device, ids))
    costs_ns: list[int] = []
    while len(costs_ns) < 3 and (not costs_ns or costs_ns[-1] > _DEAR_NS):
        before_ns = time.monotonic_ns()
        call.make()
        costs_ns.append(time.monotonic_ns() - before_ns)
    return min(costs_ns)


_MOST_MIB_PER_S = 16 << 20
"""16 TiB/s, more than any link of a device carries; counters that wrapped come out as anything."""
# Column of `device_activity` → metric of GPM, what one unit of it is, and the largest value.
_METRICS = {
    "sm_utilization_ratio": (2, 0.01, 100),
    "sm_occupancy_ratio": (3, 0.01, 100),
    "tensor_utilization_ratio": (5, 0.01, 100),
    "dram_utilization_ratio": (10, 0.01, 100),
    "fp64_utilization_ratio": (11, 0.01, 100),
    "fp32_utilization_ratio": (12, 0.01, 100),
    "fp16_utilization_ratio": (13, 0.01, 100),
    "pcie_tx_bytes_per_s": (20, float(1 << 20), _MOST_MIB_PER_S),
    "pcie_rx_bytes_per_s": (21, float(1 << 20), _MOST_MIB_PER_S),
    "link_rx_bytes_per_s": (60, float(1 << 20), _MOST_MIB_PER_S),
    "link_tx_bytes_per_s": (61, float(1 << 20), _MOST_MIB_PER_S),
}


class ActivitySource(_Planned):
    """GPU performance monitoring of Hopper and later: what the units were busy with.

    -> DEVICE_ACTIVITY. Each row covers the time between two snapshots of a device. GPM wants 100 ms
    between them: while the driver has nothing to tell of so short a time, the older one stays, and
    the next row covers the time of both. It coexists with CUPTI's profilers.
    """

    name: ClassVar[str] = "nvml_activity"
    tables: ClassVar[tuple[str, ...]] = ("device_activity",)

    def _describe(self, reader: PlannedReader, device: nvml.NvmlDevice) -> None:
        with _refusals(reader, *_METRICS):
            if not nvml.query("nvmlGpmQueryDeviceSupport", device.handle).isSupportedDevice:
                raise nvml.ReadingFailed(_NOT_SUPPORTED)
            snapshots = []
            for _ in range(2):
                snapshots.append(nvml.query("nvmlGpmSampleAlloc"))
                self._stack.callback(_free, snapshots[-1])
            request, metric_offsets = nvml.gpm_request([number for number, *_ in _METRICS.values()])
            interval = Interval(
                address(nvml.function("nvmlGpmMetricsGet")),
                pointer(snapshots[0]),
                pointer(snapshots[1]),
                type(request).sample1.offset,
                type(request).sample2.offset,
            )
            call = nvml.call_of(device, "nvmlGpmSampleGet", content(request))
            columns = {
                column: Column(METRIC, 0, ((offset, 8, 0),), unit, most=most)
                for (column, (_, unit, most)), offset in zip(
                    _METRICS.items(), metric_offsets, strict=True
                )
            }
            label = "nvmlGpmSampleGet, nvmlGpmMetricsGet"
            reader.describe(label, call._replace(interval=interval), columns)


_NOT_SUPPORTED = 3


def _free(snapshot: Any) -> None:
    with contextlib.suppress(nvml.ReadingFailed):
        nvml.query("nvmlGpmSampleFree", snapshot)


class _Asked:
    """Values of one device, each asked for by a call of its own that may be refused."""

    def __init__(self, device: nvml.NvmlDevice, calls: dict[str, Callable[[], Any]]) -> None:
        self._device = device
        self.calls = calls
        self.absent: dict[str, str] = {}

    def read(self) -> dict[str, Any]:
        return {column: self._ask(column, call) for column, call in self.calls.items()}

    def _ask(self, column: str, call: Callable[[], Any]) -> Any:
        if column not in self.absent and self._device.lost is None:
            try:
                return call()
            except nvml.ReadingFailed as exc:
                if exc.kind == "sensor":
                    self.absent[column] = str(exc)
                elif exc.kind != "moment":
                    self._device.lost = str(exc)
        return None


class _AskedSource(DeviceSource[nvml.NvmlDevice, _Asked]):
    """Devices that are asked rarely, through the binding."""

    def open(self) -> None:
        """Initialize NVML, find the devices and what each of them offers."""
        self._stack.enter_context(nvml.session())
        for device in nvml.devices():
            asked = _Asked(device, self._calls(device))
            asked.read()
            self._devices.append((device, asked))
        if all(d.lost or len(asked.absent) == len(asked.calls) for d, asked in self._devices):
            reasons = "; ".join(dict.fromkeys(self.absent.values()))
            self.close()
            raise CollectorUnavailable(reasons)

    @abstractmethod
    def _calls(self, device: nvml.NvmlDevice) -> dict[str, Callable[[], Any]]:
        """Return the call that gives each column."""

    def _add(self, sink: Sink, device: nvml.NvmlDevice, reader: _Asked, _now_ns: int) -> None:
        values = list(reader.read().values())
        if device.lost is None and any(value is not None for value in values):
            sink.add(self.tables[0], device.index, device.uuid, *values)


class LimitSource(_AskedSource):
    """Constants of a run: limits, largest clocks, the PCIe link. -> DEVICE_LIMIT."""

    name: ClassVar[str] = "nvml_limit"
    tables: ClassVar[tuple[str, ...]] = ("device_limit",)

    def _calls(self, device: nvml.NvmlDevice) -> dict[str, Callable[[], Any]]:
        ask = partial(nvml.query_device, device)

        def watts(field_id: int) -> float | None:
            value = nvml.field(device, field_id)
            return None if value is None else value * 1e-3

        def hertz(name: str, *arguments: Any) -> int | None:
            return int(ask(name, *arguments)) * 1_000_000 or None

        return {
            "name": lambda: device.name,
            "pci_address": lambda: device.pci_address,
            "driver_version": lambda: str(nvml.query("nvmlSystemGetDriverVersion")),
            "sm_clock_max_hz": lambda: hertz("nvmlDeviceGetMaxClockInfo", _SM),
            "sm_clock_boost_hz": lambda: hertz("nvmlDeviceGetMaxCustomerBoostClock", _SM),
            "sm_clock_application_hz": lambda: hertz("nvmlDeviceGetClock", _SM, _APPLICATION),
            "memory_clock_max_hz": lambda: hertz("nvmlDeviceGetMaxClockInfo", _MEMORY),
            "power_basis": lambda: nvml.power_basis(device),
            "power_limit_w": lambda: ask("nvmlDeviceGetEnforcedPowerLimit") * 1e-3,
            "power_limit_default_w": lambda: watts(_FIELD_POWER_DEFAULT_LIMIT),
            "power_limit_max_w": lambda: watts(_FIELD_POWER_MAX_LIMIT),
            "memory_bytes": lambda: int(ask("nvmlDeviceGetMemoryInfo", _MEMORY_V2).total),
            "pcie_generation": lambda: int(ask("nvmlDeviceGetCurrPcieLinkGeneration")),
            "pcie_lane_count": lambda: int(ask("nvmlDeviceGetCurrPcieLinkWidth")),
            "mig": lambda: bool(ask("nvmlDeviceGetMigMode")[0]),
        }


_APPLICATION = 1
"""Clock id of NVML."""
_FIELD_POWER_MAX_LIMIT, _FIELD_POWER_DEFAULT_LIMIT = 188, 189

# What the driver buffers: quantity → kind of sample, its unit, and what no device reaches.
_BUFFERS = {
    "power_w": (0, 1e-3, 1e4),
    "sm_clock_hz": (5, 1e6, 2e10),
    "memory_clock_hz": (6, 1e6, 2e10),
}
_STRAY_US = 86_400_000_000
"""A time further from now than a day is none."""
_NOTHING_NEW = (6, 21)
"""Not found, no data: the buffer holds nothing since then."""


class BufferedSource(_AskedSource):
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
        self._seen_us: dict[tuple[int, str], int] = {}

    def _calls(self, device: nvml.NvmlDevice) -> dict[str, Callable[[], Any]]:
        return {quantity: partial(self._since, device, quantity) for quantity in _BUFFERS}

    def _since(self, device: nvml.NvmlDevice, quantity: str) -> list[tuple[int, float]]:
        """(time in µs, value) of what is new since the last call."""
        kind, unit, most = _BUFFERS[quantity]
        key = (device.index, quantity)
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
            number = nvml.decoded(value_type, sample.sampleValue)
            value = 0.0 if number is None else number * unit
            stray = abs(sample.timeStamp - now_us) > _STRAY_US
            if sample.timeStamp > seen_us and not stray and 0 < value <= most:
                fresh.append((int(sample.timeStamp), value))
        fresh.sort()
        if fresh:
            self._seen_us[key] = fresh[-1][0]
        distances = sorted(after[0] - before[0] for before, after in pairwise(fresh))
        if quantity == "power_w" and not seen_us and distances:
            distance_us = distances[len(distances) // 2]
            if distance_us >= self._period_us:
                why = f"the driver keeps one every {distance_us / 1000:g} ms: polling is as fine"
                raise nvml.ReadingFailed(0, why)
        return fresh

    def _add(self, sink: Sink, device: nvml.NvmlDevice, reader: _Asked, _now_ns: int) -> None:
        for quantity, samples in reader.read().items():
            for time_us, value in samples or ():
                row = (device.index, device.uuid, quantity, value)
                time_ns = time_us * 1000 - clock.set_by_ns()  # the driver's are of the wall clock
                sink.add_at(self.tables[0], time_ns, 1000, *row)
