"""Sources of NVIDIA devices that the sampler process reads, one a tier.

A metric is a column, the call of nvidia-ml-py that reads it, and its unit: to add one, declare the
column in ``chopper/tables`` and add its line here.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import pynvml

from chopper.collectors import nvml
from chopper.collectors.base import held
from chopper.collectors.devices import (
    DeviceReader,
    DeviceSource,
    DriverError,
    Getter,
    Reading,
    Unit,
)
from chopper.collectors.sampler import Sink
from chopper.storage import clock

_KIB, _MIB = 1 << 10, 1 << 20
_HERTZ = Unit(1_000_000, least=1, most=20_000)
"""Of a clock in MHz: a device that answers has one, and none reaches 20 GHz."""
_RATIO = Unit(0.01, most=100)
_CELSIUS = Unit(1.0, least=-273, most=1000)
_BYTES_PER_S = Unit(float(_MIB), most=16 << 20)
"""Of MiB/s: no link carries 16 TiB/s; counters that wrapped come out as anything."""


class Metric(NamedTuple):
    """A column, the call that reads it, and its unit."""

    column: str
    call: str
    """Function of nvidia-ml-py."""
    unit: Unit = Unit()
    arguments: tuple[Any, ...] = ()
    """Arguments of the call after the device."""
    part: Callable[[Any], Any] | None = None
    """Picks the number out of what the call returns."""
    label: str = ""
    """Name in reports of costs, if not that of the call."""
    older: Metric | None = None
    """Metric of drivers that refuse this one for good."""
    output: type[ctypes._SimpleCData[int]] | None = None
    """C type of the one number that the library's function writes; it is then called directly."""


_SM, _MEMORY = (pynvml.NVML_CLOCK_SM,), (pynvml.NVML_CLOCK_MEM,)
_CLOCK = "nvmlDeviceGetClockInfo"
_REASONS = "nvmlDeviceGetCurrentClocks{}Reasons"
_UINT, _ULONGLONG = ctypes.c_uint, ctypes.c_ulonglong
_CLOCKS = (
    Metric("sm_clock_hz", _CLOCK, _HERTZ, _SM, label=f"{_CLOCK} (SM)", output=_UINT),
    Metric("memory_clock_hz", _CLOCK, _HERTZ, _MEMORY, label=f"{_CLOCK} (memory)", output=_UINT),
    Metric(
        "event_reasons",
        _REASONS.format("Event"),
        older=Metric("event_reasons", _REASONS.format("Throttle"), output=_ULONGLONG),
        output=_ULONGLONG,
    ),
)
_TEMPERATURE, _SENSOR = "nvmlDeviceGetTemperature", (pynvml.NVML_TEMPERATURE_GPU,)
_THRESHOLD = "nvmlDeviceGetTemperatureThreshold"
_CHIP_LIMIT = (pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,)
_MEMORY_LIMIT = (pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,)
_COUNTERS = (
    Metric(
        "temperature_c",
        f"{_TEMPERATURE}V",
        _CELSIUS,
        _SENSOR,
        older=Metric("temperature_c", _TEMPERATURE, _CELSIUS, _SENSOR),
    ),
    Metric(
        "memory_used_bytes",
        "nvmlDeviceGetMemoryInfo",
        arguments=(pynvml.nvmlMemory_v2,),
        part=lambda memory: memory.used,
        label="nvmlDeviceGetMemoryInfo_v2",
    ),
)


class Field(NamedTuple):
    """A column of `device_counter`, NVML's field for it, and its unit."""

    column: str
    field_id: int
    unit: Unit = Unit()
    scope: int = 0
    """A bare field of a link would mean link 0 alone."""
    alternatives: tuple[Field, ...] = ()
    """Fields in place of this one on other devices; or, with ``summed``, beside it."""
    summed: bool = False


def _link(column: str, field_id: int, newer_id: int) -> Field:
    newer = Field(column, newer_id, scope=nvml.ALL_LINKS)
    return Field(column, field_id, Unit(_KIB), nvml.ALL_LINKS, (newer,))


_FIELDS = (
    Field("energy_j", pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, Unit(1e-3)),
    Field("power_average_w", pynvml.NVML_FI_DEV_POWER_AVERAGE, nvml.WATTS),
    Field("memory_temperature_c", pynvml.NVML_FI_DEV_MEMORY_TEMP, Unit(1.0)),
    Field("pcie_tx_bytes", pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES),
    Field("pcie_rx_bytes", pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
    _link(
        "link_tx_bytes",
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES,
    ),
    _link(
        "link_rx_bytes",
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES,
    ),
    Field("ecc_corrected_count", pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL),
    Field("ecc_uncorrected_count", pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
    Field("pcie_replay_count", pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER),
    Field("power_throttle_ns", pynvml.NVML_FI_DEV_PERF_POLICY_POWER),
    Field("thermal_throttle_ns", pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL),
    Field("sync_boost_throttle_ns", pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST),
    Field("board_limit_throttle_ns", pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT),
    Field("reliability_throttle_ns", pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY),
    Field("application_clock_ns", pynvml.NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS),
    # nvidia-ml-py names these three from release 12.570 on:
    # NVML_FI_DEV_CLOCKS_EVENT_REASON_{SW_THERM,HW_THERM,HW_POWER_BRAKE}_SLOWDOWN.
    Field("software_thermal_ns", 269),
    Field("hardware_thermal_ns", 270),
    Field("power_brake_ns", 271),
    Field(
        "link_error_count",
        pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        alternatives=(
            Field("link_error_count", pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
            Field("link_error_count", pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
        ),
        summed=True,
    ),
)
# Column of `device_activity` -> metric of GPM, and its unit.
_ACTIVITIES = {
    "sm_utilization_ratio": (pynvml.NVML_GPM_METRIC_SM_UTIL, _RATIO),
    "sm_occupancy_ratio": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _RATIO),
    "tensor_utilization_ratio": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _RATIO),
    "dram_utilization_ratio": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _RATIO),
    "fp64_utilization_ratio": (pynvml.NVML_GPM_METRIC_FP64_UTIL, _RATIO),
    "fp32_utilization_ratio": (pynvml.NVML_GPM_METRIC_FP32_UTIL, _RATIO),
    "fp16_utilization_ratio": (pynvml.NVML_GPM_METRIC_FP16_UTIL, _RATIO),
    "pcie_tx_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _BYTES_PER_S),
    "pcie_rx_bytes_per_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _BYTES_PER_S),
    "link_rx_bytes_per_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _BYTES_PER_S),
    "link_tx_bytes_per_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _BYTES_PER_S),
}


def _getter(device: nvml.NvmlDevice, metric: Metric) -> Getter:
    """Return the call of a metric, or of its older one where the device refuses this for good."""
    if metric.older is not None and not hasattr(pynvml, metric.call):
        return _getter(device, metric.older)  # the binding is older than the call
    part = metric.part
    # Most readings repeat a recent value; the cache answers in a fifth of the time.
    convert = lru_cache(maxsize=64, typed=True)(metric.unit.convert)
    if metric.output is not None:
        number = nvml.scalar(device, metric.call, metric.arguments, metric.output)
    else:
        number = partial(nvml.function(metric.call), device.handle, *metric.arguments)
    if part is None:

        def read() -> Reading:
            return convert(number())
    else:

        def read() -> Reading:
            return convert(part(number()))

    getter = Getter(metric.label or metric.call, metric.column, read)
    if metric.older is not None and nvml.refuses(read):
        older = _getter(device, metric.older)
        if not nvml.refuses(older.read):
            return older
    return getter


class _NvmlSource(DeviceSource[nvml.NvmlDevice]):
    """Base of the sources: NVML's devices, read by ``metrics``."""

    errors = nvml.ERRORS
    failures = (pynvml.NVMLError, DriverError)
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def _list(self) -> list[nvml.NvmlDevice]:
        self._stack.enter_context(nvml.session())
        return nvml.devices()

    def _describe(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        for metric in self.metrics:
            reader.add(_getter(device, metric))


class ClockSource(_NvmlSource):
    """The fast tier: clocks, instant power, event reasons. -> DEVICE_CLOCK."""

    name: ClassVar[str] = "nvml_clock"
    tables: ClassVar[tuple[str, ...]] = ("device_clock",)
    fast = True
    metrics = _CLOCKS

    def _describe(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        super()._describe(reader, device)
        watts, _ = nvml.power(device)
        label = "power"
        with contextlib.suppress(DriverError):
            label = f"power ({nvml.power_basis(device)})"
        reader.add(Getter(label, "power_w", watts))


_DEAR_NS = 500_000
"""Eight devices' field of such a cost take 4 % of the tier's period."""
_RARELY = 10
"""Once a second in a tier of 10 Hz."""


class CounterSource(_NvmlSource):
    """The medium tier: energy, temperature, utilization, memory, link and throttle counters.

    -> DEVICE_COUNTER. All fields of a device come with one call of the driver, but for those that
    cost more than 0.5 ms by themselves, as the average power does with some drivers: each of them
    has a call of its own, made once a second, of one device after the other. PCIe counters are the
    non-blocking fields: ``nvmlDeviceGetPcieThroughput`` would block for 20 ms.
    """

    name: ClassVar[str] = "nvml_counter"
    tables: ClassVar[tuple[str, ...]] = ("device_counter",)
    metrics = _COUNTERS

    def _describe(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        reader.absent |= dict.fromkeys(reader.columns, "NVML has no such counter")
        for metric in (*self.metrics, *_FIELDS):
            reader.absent.pop(metric.column, None)
        self._describe_fields(reader, device)
        super()._describe(reader, device)
        name = "nvmlDeviceGetUtilizationRates"
        columns = ("device_utilization_ratio", "memory_utilization_ratio")
        for column in columns:
            reader.absent.pop(column, None)

        def rates() -> tuple[int | float | None, ...]:
            both = nvml.query(name, device.handle)
            return _RATIO.convert(both.gpu), _RATIO.convert(both.memory)

        reader.add(Getter(name, columns, rates))

    def _describe_fields(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        """Add one call for all fields that are cheap, one for each other."""
        cheap: list[Field] = []
        for field in _FIELDS:
            read = _fields(device, [field])
            if _cost_ns(read) <= _DEAR_NS:
                cheap.append(field)
                continue
            label = f"nvmlDeviceGetFieldValues ({field.column}, at each {_RARELY}th sample)"
            rare = partial(_values, [field], read)
            reader.add(
                Getter(label, (field.column,), rare, every=_RARELY, turn=device.index % _RARELY)
            )
        read = _fields(device, cheap)
        label = f"nvmlDeviceGetFieldValues ({len(read.ids)} fields)"
        columns = tuple(field.column for field in cheap)
        reader.add(Getter(label, columns, partial(_values, cheap, read)))


def _fields(device: nvml.NvmlDevice, fields: list[Field]) -> nvml.Fields:
    alike = [one for field in fields for one in (field, *field.alternatives)]
    return nvml.Fields(device, [(one.field_id, one.scope, one.unit) for one in alike])


def _values(fields: list[Field], read: nvml.Fields) -> list[Reading]:
    """Read fields once; return the value of each column, or its refusal."""
    values = read()
    columns: list[Reading] = []
    at = 0
    for field in fields:
        if field.alternatives:
            alike = values[at : at + 1 + len(field.alternatives)]
            columns.append(_sum_of(alike) if field.summed else _first_of(alike))
            at += len(alike)
        else:
            columns.append(values[at])
            at += 1
    return columns


def _first_of(values: list[Reading]) -> Reading:
    """Return the first accepted value, else the first refusal."""
    accepted = (value for value in values if not isinstance(value, DriverError))
    return next(accepted, values[0])


def _sum_of(values: list[Reading]) -> Reading:
    """Return the sum of all counters; None if one is unknown, as the sum would step back."""
    total = 0
    for value in values:
        if value is None or isinstance(value, DriverError):
            return value
        total += int(value)
    return held(total)


def _cost_ns(read: nvml.Fields) -> int:
    """Measure a reading of these fields: the least of three; a cheap one is enough."""
    costs_ns: list[int] = []
    while len(costs_ns) < 3 and (not costs_ns or costs_ns[-1] > _DEAR_NS):
        before_ns = time.monotonic_ns()
        with contextlib.suppress(DriverError):
            read()
        costs_ns.append(time.monotonic_ns() - before_ns)
    return min(costs_ns)


class ActivitySource(_NvmlSource):
    """GPU performance monitoring of Hopper and later: what the units were busy with.

    -> DEVICE_ACTIVITY. Each row covers the time between two snapshots of a device. GPM wants 100 ms
    between them: while the driver has nothing to tell of so short a time, the older one stays, and
    the next row covers the time of both. It coexists with CUPTI's profilers.
    """

    name: ClassVar[str] = "nvml_activity"
    tables: ClassVar[tuple[str, ...]] = ("device_activity",)

    def _describe(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        with reader.refusals(*_ACTIVITIES):
            support = nvml.query("nvmlGpmQueryDeviceSupport", device.handle)
            if not support.isSupportedDevice:
                raise DriverError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            activity = nvml.Activity(device, [number for number, _ in _ACTIVITIES.values()])
            self._stack.callback(activity.close)
            units = [unit for _, unit in _ACTIVITIES.values()]

            def read() -> list[Reading] | None:
                numbers = activity()
                return numbers and [
                    number if isinstance(number, DriverError) else unit.convert(number)
                    for unit, number in zip(units, numbers, strict=True)
                ]

            reader.add(Getter("nvmlGpmSampleGet, nvmlGpmMetricsGet", tuple(_ACTIVITIES), read))


class LimitSource(_NvmlSource):
    """Constants of a run: limits, largest clocks, the PCIe link. -> DEVICE_LIMIT."""

    name: ClassVar[str] = "nvml_limit"
    tables: ClassVar[tuple[str, ...]] = ("device_limit",)
    metrics = (
        Metric("sm_clock_max_hz", "nvmlDeviceGetMaxClockInfo", _HERTZ, _SM),
        Metric("sm_clock_boost_hz", "nvmlDeviceGetMaxCustomerBoostClock", _HERTZ, _SM),
        Metric(
            "sm_clock_application_hz",
            "nvmlDeviceGetClock",
            _HERTZ,
            (*_SM, pynvml.NVML_CLOCK_ID_APP_CLOCK_TARGET),
        ),
        Metric("memory_clock_max_hz", "nvmlDeviceGetMaxClockInfo", _HERTZ, _MEMORY),
        Metric("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", Unit(1e-3)),
        Metric("temperature_limit_c", _THRESHOLD, _CELSIUS, _CHIP_LIMIT),
        Metric("memory_temperature_limit_c", _THRESHOLD, _CELSIUS, _MEMORY_LIMIT),
        Metric(
            "memory_bytes",
            "nvmlDeviceGetMemoryInfo",
            arguments=(pynvml.nvmlMemory_v2,),
            part=lambda memory: memory.total,
        ),
        Metric("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        Metric("pcie_lane_count", "nvmlDeviceGetCurrPcieLinkWidth"),
    )

    def _describe(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        super()._describe(reader, device)

        def watts(field_id: int) -> Reading:
            (value,) = nvml.Fields(device, [(field_id, 0, Unit(1e-3))])()
            if isinstance(value, DriverError):
                raise value
            return value

        calls: dict[str, Callable[[], Any]] = {
            "name": lambda: device.name,
            "pci_address": lambda: device.pci_address,
            "driver_version": lambda: str(nvml.query("nvmlSystemGetDriverVersion")),
            "power_basis": lambda: nvml.power_basis(device),
            "power_limit_default_w": lambda: watts(pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT),
            "power_limit_max_w": lambda: watts(pynvml.NVML_FI_DEV_POWER_MAX_LIMIT),
            "mig": lambda: bool(nvml.query("nvmlDeviceGetMigMode", device.handle)[0]),
        }
        for column, call in calls.items():
            reader.add(Getter(column, column, call))

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return no call: they are made once."""
        return {}


# What the driver buffers: quantity -> kind of sample, and its unit.
_BUFFERS = {
    "power_w": (pynvml.NVML_TOTAL_POWER_SAMPLES, nvml.WATTS),
    "sm_clock_hz": (pynvml.NVML_PROCESSOR_CLK_SAMPLES, _HERTZ),
    "memory_clock_hz": (pynvml.NVML_MEMORY_CLK_SAMPLES, _HERTZ),
}
_STRAY_US = 86_400_000_000
"""A time further from now than a day is none."""
_NOTHING_NEW = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA)
"""The buffer holds nothing since then."""


class BufferedSource(_NvmlSource):
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

    def _describe(self, reader: DeviceReader, device: nvml.NvmlDevice) -> None:
        reader.columns = list(_BUFFERS)
        for quantity in _BUFFERS:
            since = partial(self._since, device, quantity)
            reader.add(Getter(quantity, quantity, since))

    def _since(self, device: nvml.NvmlDevice, quantity: str) -> list[tuple[int, float]]:
        """Return (time in µs, value) of the samples since the last call."""
        kind, unit = _BUFFERS[quantity]
        key = (device.index, quantity)
        seen_us = self._seen_us.get(key, 0)
        try:
            value_type, samples = nvml.query("nvmlDeviceGetSamples", device.handle, kind, seen_us)
        except DriverError as exc:
            if exc.value in _NOTHING_NEW:
                return []
            raise
        fresh = []
        now_us = time.time_ns() // 1000
        for sample in samples:
            number = nvml.decoded(value_type, bytes(sample.sampleValue))
            if isinstance(number, DriverError):
                raise number
            value = unit.convert(number)
            stray = abs(sample.timeStamp - now_us) > _STRAY_US
            if sample.timeStamp > seen_us and not stray and value is not None:
                fresh.append((int(sample.timeStamp), value))
        fresh.sort()
        if fresh:
            self._seen_us[key] = fresh[-1][0]
        distances = sorted(after[0] - before[0] for before, after in pairwise(fresh))
        if quantity == "power_w" and not seen_us and distances:
            distance_us = distances[len(distances) // 2]
            if distance_us >= self._period_us:
                why = f"the driver keeps one every {distance_us / 1000:g} ms: polling is as fine"
                raise DriverError(0, why)
        return fresh

    def _add(self, sink: Sink, device: nvml.NvmlDevice, reader: DeviceReader, now_ns: int) -> None:
        values = reader.read(now_ns) or ()
        for quantity, samples in zip(_BUFFERS, values, strict=False):
            for time_us, value in samples or ():
                row = (device.index, device.uuid, quantity, value)
                time_ns = time_us * 1000 - clock.set_by_ns()  # the driver's are of the wall clock
                sink.add_at(self.tables[0], time_ns, 1000, *row)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return no call: what the driver keeps is taken once a second."""
        return {}
