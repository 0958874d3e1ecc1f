"""AMD devices through amdsmi: import, error codes, devices, sources of metrics, the collector.

The package's import binds every symbol of the native library at once: without the library it prints
and raises KeyError, with an older one AttributeError.

A source is what the sampler process reads, one a tier. A metric is a column, its unit, and the
fields of the metrics structure that hold it, of which the first that the device has counts; or the
call of amdsmi and the member of what that returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from ctypes import byref, c_uint32, create_string_buffer
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from chopper.collectors.base import held
from chopper.collectors.devices import (
    Device,
    DeviceCollector,
    DeviceReader,
    DeviceSource,
    DriverError,
    Errors,
    Getter,
    NothingVisible,
    Unit,
    chosen_by,
    columns_of,
    local_ranks,
)
from chopper.collectors.sampler import ONCE_HZ, Sink
from chopper.errors import CollectorUnavailable

ERRORS = Errors("amdsmi")


def _candidates(package: Path) -> list[str]:
    """Return the paths at which amdsmi looks for the native library, in its order."""
    home = os.getenv("ROCM_HOME", os.getenv("ROCM_PATH"))
    return [
        *([str(Path(home) / "lib/libamd_smi.so")] if home else []),
        "libamd_smi.so",
        str(package / "libamd_smi.so"),
        str(Path(os.getenv("ROCM_PATH", "/opt/rocm")) / "lib" / "libamd_smi.so"),
    ]


def load() -> Any:
    """Import the wrapper module of amdsmi, once its native library is known to be there.

    Raises:
        CollectorUnavailable: the package or the library is missing, or they do not fit together.
    """
    if "amdsmi.amdsmi_wrapper" in sys.modules:
        return sys.modules["amdsmi.amdsmi_wrapper"]
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        raise CollectorUnavailable("amdsmi is not installed")
    for candidate in _candidates(Path(spec.origin).parent):
        with contextlib.suppress(OSError):
            ctypes.CDLL(candidate)
            break
    else:
        raise CollectorUnavailable("AMD's library is not installed (libamd_smi.so)")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            importlib.import_module("amdsmi")
    except (KeyError, OSError, AttributeError, ImportError) as exc:
        # A failed import leaves parts of the package behind, which would look like success.
        for name in [n for n in sys.modules if n.partition(".")[0] == "amdsmi"]:
            del sys.modules[name]
        raise CollectorUnavailable(
            f"amdsmi and libamd_smi.so do not fit together ({type(exc).__name__}: {exc}); "
            "install the amdsmi of the ROCm that is installed"
        ) from exc
    return sys.modules["amdsmi.amdsmi_wrapper"]


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """The library initialized for GPUs inside, shut down after; gives amdsmi's wrapper module."""
    wrapper = load()
    code = wrapper.amdsmi_init(_INIT_GPUS)
    if code:
        raise CollectorUnavailable(ERRORS.explain(code)[1])
    try:
        yield wrapper
    finally:
        wrapper.amdsmi_shut_down()


_INIT_GPUS = 1 << 1


@dataclass
class AmdDevice(Device):
    """One device, or one partition of one: those of a device share all but the PCI function.

    They are numbered as HIP does, which is not amd-smi's order; as amd-smi where HIP is not known.
    """

    partition: str | None = None
    """Compute partitioning (SPX, CPX …), None where unknown."""


def devices(wrapper: Any) -> list[AmdDevice]:
    """The GPUs that this job may use, by index."""
    interface = importlib.import_module("amdsmi.amdsmi_interface")
    try:
        handles = interface.amdsmi_get_processor_handles()
    except interface.AmdSmiException as exc:
        code = exc.get_error_code() if hasattr(exc, "get_error_code") else None
        raise CollectorUnavailable(
            ERRORS.explain(0xFFFFFFFF if code is None else int(code))[1]
        ) from exc
    listed = [_device(wrapper, interface, handle, i) for i, handle in enumerate(handles)]
    if not listed:
        raise CollectorUnavailable("amdsmi finds no device")
    if not hasattr(wrapper, _ENUMERATION):
        _number(wrapper, listed)
    listed.sort(key=lambda device: device.index)
    chosen = _visible(listed)
    return listed if local_ranks()[0] > len(chosen) else chosen


def _visible(visible: list[AmdDevice]) -> list[AmdDevice]:
    """Those that HIP sees: ROCR_VISIBLE_DEVICES first, then HIP's own of what that left.

    Raises:
        NothingVisible: it sees none.
    """
    of_hip = "HIP_VISIBLE_DEVICES"
    if of_hip not in os.environ:
        of_hip = "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", of_hip):
        chosen = chosen_by(variable, visible, partial(_named, visible))
        if chosen == []:
            raise NothingVisible(variable, "HIP")
        visible = visible if chosen is None else chosen
    return visible


def _named(listed: list[AmdDevice], uuid: str) -> list[AmdDevice]:
    return [device for device in listed if device.uuid == uuid]  # parts of one may share it


_ENUMERATION = "amdsmi_enumeration_info_t"
"""Tells what HIP calls a device; amdsmi has it from 6.4 on."""


def _number(wrapper: Any, listed: list[AmdDevice]) -> None:
    """Number and name devices as HIP does, of an amdsmi without the call that tells it.

    HIP numbers them in the order of KFD's nodes, and names them by the serial number.
    """
    nodes: list[int] = []
    for device in listed:
        kfd, asic = wrapper.amdsmi_kfd_info_t(), wrapper.amdsmi_asic_info_t()
        if wrapper.amdsmi_get_gpu_kfd_info(device.handle, byref(kfd)) == 0:
            nodes.append(kfd.node_id)
        if wrapper.amdsmi_get_gpu_asic_info(device.handle, byref(asic)) == 0:
            with contextlib.suppress(ValueError):
                device.uuid = f"GPU-{int(asic.asic_serial, 16):016x}"
    if len({*nodes}) == len(listed):
        for device, node in zip(listed, nodes, strict=True):
            device.index = sorted(nodes).index(node)


def _device(wrapper: Any, interface: Any, handle: Any, position: int) -> AmdDevice:
    device = AmdDevice(handle, position)
    known = getattr(wrapper, _ENUMERATION, None)
    info = None if known is None else known()
    if info and wrapper.amdsmi_get_gpu_enumeration_info(handle, byref(info)) == 0:
        if info.hip_id != 0xFFFFFFFF:
            device.index = int(info.hip_id)
        device.uuid = info.hip_uuid.decode(errors="replace") or None
    with contextlib.suppress(interface.AmdSmiException):
        device.pci_address = interface.amdsmi_get_gpu_device_bdf(handle)
    text = create_string_buffer(16)
    if wrapper.amdsmi_get_gpu_compute_partition(handle, text, ctypes.c_uint32(16)) == 0:
        device.partition = text.value.decode(errors="replace") or None
    return device


class Metrics:
    """The metrics structure of one device, filled again at each reading.

    A field that the device does not have holds the largest number of its type.
    """

    def __init__(self, wrapper: Any, device: AmdDevice) -> None:
        self.structure = structure = wrapper.amdsmi_gpu_metrics_t()
        ctypes.memset(ctypes.byref(structure), 0xFF, ctypes.sizeof(structure))
        self._fill = partial(
            wrapper.amdsmi_get_gpu_metrics_info, device.handle, ctypes.byref(structure)
        )
        self._device = device
        self._blanks: dict[str, int] = {}
        for name, kind in structure._fields_:
            item = kind._type_ if hasattr(kind, "_length_") else kind
            self._blanks[name] = (1 << 8 * ctypes.sizeof(item)) - 1

    def fill(self) -> None:
        """Read the device. One call gives all columns, so that a refusal for good loses it.

        Raises:
            DriverError: it does not answer.
        """
        code: int = self._fill()
        if code:
            loss, reason = ERRORS.explain(code)
            if loss != "moment":
                self._device.lost = reason
            raise DriverError(code)

    def number(self, *names: str) -> int | None:
        """Return the first of these fields that is available."""
        for name in names:
            value: int | None = getattr(self.structure, name, None)
            if value is not None and value != self._blanks[name]:
                return value
        return None

    def items(self, name: str) -> list[int | None]:
        """Return the items of an array, None for those that are not available."""
        blank = self._blanks.get(name)
        return [None if item == blank else item for item in getattr(self.structure, name, ())]


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
_DIES = (("gfx", "current_gfxclks"), ("soc", "current_socclks"))
_READ_KB, _WRITE_KB = "xgmi_read_data_acc", "xgmi_write_data_acc"
_LINK_UP = 1
_NO_PART = 0xFFFFFFFF

# Call -> structure that it fills, and its arguments between the device and that.
_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "amdsmi_get_clock_info": ("amdsmi_clk_info_t", (c_uint32(_CLOCK_GFX),)),
    "amdsmi_get_power_cap_info": ("amdsmi_power_cap_info_t", (c_uint32(0),)),
    "amdsmi_get_gpu_vram_usage": ("amdsmi_vram_usage_t", ()),
    "amdsmi_get_gpu_kfd_info": ("amdsmi_kfd_info_t", ()),
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

    def grew(self, metrics: Metrics, now_ns: int | None) -> bool:
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

    def bytes_until(self, metrics: Metrics, now_ns: int | None) -> int | None:
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

    device: AmdDevice
    metrics: Metrics
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


class _Source(DeviceSource[AmdDevice]):
    """A source that is read through the metrics structure: one call of the driver per reading."""

    errors = ERRORS
    keep_empty = True
    fields: ClassVar[dict[str, tuple[Unit, tuple[str, ...]]]] = {}
    """Column → its unit and the fields of the metrics structure."""
    answers: ClassVar[dict[str, tuple[Unit, str, str]]] = {}
    """Column → its unit, a call, and the member of the structure that this fills."""
    _later: ClassVar[frozenset[str]] = frozenset()
    """Columns that no first reading tells."""

    def _list(self) -> list[AmdDevice]:
        self._wrapper = self._stack.enter_context(session())
        self._rows: list[list[Any]] = []
        self._readings: list[_Reading] = []
        return devices(self._wrapper)

    def _describe(self, reader: DeviceReader, device: AmdDevice) -> None:
        reading = _Reading(device, Metrics(self._wrapper, device))
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

    def _call(self, device: AmdDevice, name: str) -> Any:
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


def _power_basis(metrics: Metrics) -> str | None:
    """Return which of the two powers that a device may have `device_clock` holds."""
    if metrics.number("current_socket_power") is not None:
        return "instant"
    averaged = metrics.number("average_socket_power") is not None
    return "average" if averaged else None


class PartSource(_Source):
    """Dies and links one by one. -> DEVICE_DIE, DEVICE_LINK."""

    name: ClassVar[str] = "amdsmi_parts"
    tables: ClassVar[tuple[str, ...]] = ("device_die", "device_link")

    def __init__(self) -> None:
        super().__init__()
        self._missing: list[str] = []

    def _describe(self, reader: DeviceReader, device: AmdDevice) -> None:
        metrics = Metrics(self._wrapper, device)

        def read() -> list[tuple[Any, ...]]:
            metrics.fill()
            return list(_parts(metrics))

        reader.columns = ["parts"]
        reader.add(Getter(_CALL, "parts", read))

    def open(self) -> None:
        """Initialize the library, find the devices, read each once."""
        super().open()
        tables = {table for row in self._rows for (table, *_) in (row[0] if row else ())}
        self._missing = [table for table in self.tables if table not in tables]
        if len(self._missing) == len(self.tables):
            self.close()
            raise CollectorUnavailable("no device reports its dies or links separately")

    @property
    def absent(self) -> dict[str, str]:
        """Table, or table and device → why nothing is told of it."""
        return super().absent | dict.fromkeys(self._missing, _NOT_AVAILABLE)

    def _add(self, sink: Sink, device: AmdDevice, reader: DeviceReader, now_ns: int) -> None:
        for table, *values in (reader.read(now_ns) or [()])[0]:
            sink.add(table, device.index, device.uuid, *values)


def _parts(metrics: Metrics) -> Iterable[tuple[Any, ...]]:
    """Yield the table and the values of each die and each link."""
    for domain, name in _DIES:
        for die, clock_mhz in enumerate(metrics.items(name)):
            if clock_mhz:
                yield "device_die", domain, die, clock_mhz * _MEGA
    received, sent = metrics.items(_READ_KB), metrics.items(_WRITE_KB)
    states = metrics.items("xgmi_link_status")
    for link, (rx_kb, tx_kb) in enumerate(zip(received, sent, strict=True)):
        if rx_kb is None and tx_kb is None:
            continue
        up = states[link] == _LINK_UP if states and states[link] is not None else None
        yield "device_link", link, _kib(tx_kb), _kib(rx_kb), up


def _kib(value: int | None) -> int | None:
    return None if value is None else held(value * _KIB)


class PartitionSource(_Source):
    """The partitioning of the devices. -> DEVICE_PARTITION."""

    name: ClassVar[str] = "amdsmi_partition"
    tables: ClassVar[tuple[str, ...]] = ("device_partition",)
    answers: ClassVar[dict[str, tuple[Unit, str, str]]] = {
        "partition_id": (
            Unit(most=_NO_PART - 1),
            "amdsmi_get_gpu_kfd_info",
            "current_partition_id",
        ),
    }

    def _values(self, reading: _Reading, now_ns: int | None) -> dict[str, Any]:
        del now_ns
        text = create_string_buffer(16)
        handle = reading.device.handle
        refused = self._wrapper.amdsmi_get_gpu_memory_partition(handle, text, c_uint32(16))
        return {
            "pci_address": reading.device.pci_address,
            "compute_partition": reading.device.partition,
            "memory_partition": None if refused else text.value.decode(errors="replace") or None,
        }


NAME = "amdsmi"
BY_DEFAULT = True


class AmdCollector(DeviceCollector[AmdDevice]):
    """Samples every AMD device of the host, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_DIE, DEVICE_LINK, DEVICE_LIMIT, DEVICE_PARTITION.

    Args:
        hz: most readings per second of the fast tier: clocks, power, what holds the clock down.
    """

    name: ClassVar[str] = NAME
    driver: ClassVar[str] = "AMD's driver"
    silent_remedy: ClassVar[str] = "check that amd-smi responds, and dmesg for device errors"
    absent_remedy: ClassVar[str] = (
        "none on a machine without AMD devices; else pip install 'chopper-profiler[amd]' in the "
        "version of the ROCm that is installed"
    )
    sources: ClassVar[str] = __name__
    rates_hz: ClassVar[dict[str, float]] = {
        "CounterSource": 10.0,
        "PartSource": 10.0,
        "LimitSource": ONCE_HZ,
        "PartitionSource": ONCE_HZ,
    }

    def devices(self) -> list[AmdDevice]:
        """Ask amdsmi for its devices."""
        with session() as wrapper:
            return devices(wrapper)

    def restrictions(self, devices: list[AmdDevice]) -> list[str | None]:
        """Say where devices are partitions, and what of the environment is not understood."""
        notes = [local_ranks()[1]]
        split = [d for d in devices if d.partition not in (None, "SPX")]
        if split:
            notes.append(
                f"{len(split)} of {len(devices)} devices are partitions ({split[0].partition}): "
                "power, energy and temperature are those of the whole socket"
            )
        return notes
