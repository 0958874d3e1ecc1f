"""NVIDIA devices through NVML: devices, error codes and calls, and the collector.

``_sources`` are what the sampler process reads, one class a tier and one line a metric.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, ClassVar

from chopper.collectors.base import CollectorContext
from chopper.collectors.devices import (
    Device,
    DeviceCollector,
    DriverError,
    Errors,
    NothingVisible,
    Reading,
    Unit,
    chosen_by,
    local_ranks,
)
from chopper.collectors.sampler import ONCE_HZ, SourceSpec
from chopper.errors import CollectorUnavailable

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that is summed over links; a bare id would mean link 0 alone."""
ERRORS = Errors("NVML")
WATTS = Unit(1e-3, least=1, most=10_000_000)
"""Of a power in mW: a device that answers draws some, and none draws 10 kW."""


def binding() -> Any:
    """Import nvidia-ml-py; CollectorUnavailable if it is not installed."""
    try:
        import pynvml
    except ImportError as exc:
        raise CollectorUnavailable("nvidia-ml-py is not installed") from exc
    return pynvml


@contextlib.contextmanager
def session() -> Iterator[None]:
    """NVML initialized inside, shut down after; sessions may nest."""
    pynvml = binding()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        raise CollectorUnavailable(ERRORS.explain(exc.value)[1]) from exc
    except OSError as exc:
        raise CollectorUnavailable(f"NVML's library cannot be loaded ({exc})") from exc
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@dataclass
class NvmlDevice(Device):
    """One device, in NVML's order, which is that of PCI addresses."""

    name: str | None = None
    note: str | None = None
    """Why it is special (MIG), None for nothing."""


def devices() -> list[NvmlDevice]:
    """The devices that this job may use, in NVML's order.

    In CUDA_VISIBLE_DEVICES, UUIDs and, under CUDA_DEVICE_ORDER=PCI_BUS_ID, numbers choose devices;
    other numbers follow an order that NVML does not know, so they choose only where all devices are
    of one kind. More ranks on this host than visible devices mean that each rank sees its own: then
    all devices are read.

    Raises:
        CollectorUnavailable: there is none, or CUDA sees none.
    """
    pynvml = binding()
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as exc:
        raise CollectorUnavailable(ERRORS.explain(exc.value)[1]) from exc
    readable = []
    problems = []
    for index in range(count):
        try:
            readable.append(_device(pynvml, index))
        except pynvml.NVMLError as exc:
            problems.append(f"device {index}: {ERRORS.explain(exc.value)[1]}")
    if not readable:
        raise CollectorUnavailable("; ".join(problems) or "NVML finds no device")
    ranks, unknown = local_ranks()
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    one_kind = len({device.name for device in readable}) == 1
    named = partial(_named, pynvml, readable)
    chosen = chosen_by(_VISIBLE, readable, named, numbers_known=by_pci or one_kind)
    if chosen is None:
        chosen = readable
    if ranks > len(chosen) > 0:
        chosen = readable
    if not chosen:
        raise NothingVisible(_VISIBLE, "CUDA")
    if unknown is not None:
        problems.append(unknown)
    if problems:
        chosen[0].note = "; ".join([*problems, *filter(None, [chosen[0].note])])
    return chosen


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _device(pynvml: Any, index: int) -> NvmlDevice:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    device = NvmlDevice(handle, index)
    for name, call in (
        ("uuid", pynvml.nvmlDeviceGetUUID),
        ("name", pynvml.nvmlDeviceGetName),
        ("pci_address", lambda h: pynvml.nvmlDeviceGetPciInfo(h).busId),
    ):
        with contextlib.suppress(pynvml.NVMLError):
            value = call(handle)
            setattr(device, name, value.decode() if isinstance(value, bytes) else value)
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(handle)[0]:
            device.note = (
                f"device {index} is partitioned (MIG): clocks, power and energy are those of the "
                "whole device"
            )
    return device


def _named(pynvml: Any, listed: list[NvmlDevice], entry: str) -> list[NvmlDevice] | None:
    """The device whose UUID begins so, which of a MIG device is its parent's; None: not known."""
    # MIG-GPU-<uuid of the parent>/… names the parent; of MIG-<uuid> the driver tells it.
    name = entry.removeprefix("MIG-").partition("/")[0]
    if entry.startswith("MIG-") and not name.startswith("GPU-"):
        try:
            part = pynvml.nvmlDeviceGetHandleByUUID(entry.encode())
            parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
            uuid = pynvml.nvmlDeviceGetUUID(parent)
        except pynvml.NVMLError:
            return None
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
    named = [device for device in listed if device.uuid and device.uuid.startswith(name)]
    return named if len(named) == 1 else []


_VERSION_MISMATCH = 25


def function(name: str) -> Callable[..., Any]:
    """Return a function of the binding; where it is older, one that refuses."""

    def lacks(*_arguments: Any) -> Any:
        raise DriverError(_VERSION_MISMATCH)

    called: Callable[..., Any] = getattr(binding(), name, lacks)
    return called


def query(name: str, *arguments: Any) -> Any:
    """Call a function of the binding; DriverError where the driver refuses."""
    pynvml = binding()
    try:
        return function(name)(*arguments)
    except pynvml.NVMLError as exc:
        raise DriverError(exc.value) from exc
    except pynvml.NVMLLibraryMismatchError as exc:
        raise DriverError(_VERSION_MISMATCH) from exc


def refuses(call: Callable[[], object]) -> bool:
    """Return whether a device refuses a call for good; one that fails now may answer later."""
    try:
        call()
    except (DriverError, binding().NVMLError) as exc:
        return ERRORS.explain_error(exc)[0] != "moment"
    return False


# nvmlFieldValue_t after the id: scope, time, latency, type, code, value.
_FIELD = struct.Struct("<4x4x8x8xIi8s")
# nvmlGpmMetric_t after the id: code, value, names and unit.
_METRIC = struct.Struct("<4xid24x")
# Members of nvmlValue_t by type, and the number with all bits one, which is a blank.
_TYPES = tuple(
    (struct.Struct(pattern).unpack_from, blank)
    for pattern, blank in (
        *(("<d", None), ("<I", (1 << 32) - 1), ("<Q", (1 << 64) - 1), ("<Q", (1 << 64) - 1)),
        *(("<q", None), ("<i", None), ("<H", None)),
    )
)


def decoded(kind: int, data: bytes) -> Reading:
    """Return the number in an nvmlValue_t, None for a blank; refuse types of newer drivers."""
    if kind >= len(_TYPES):
        return DriverError(_VERSION_MISMATCH)
    unpack, blank = _TYPES[kind]
    number: int | float = unpack(data)[0]
    return None if number == blank or not isfinite(number) else number


class Fields:
    """Some fields of a device, read by one call.

    The binding's function builds the structures anew, which costs 90 µs for 24 fields; these are
    filled again at each reading, and only numbers that changed are converted.

    Args:
        fields: their ids, scopes and units.
    """

    def __init__(self, device: NvmlDevice, fields: Sequence[tuple[int, int, Unit]]) -> None:
        pynvml = binding()
        self.ids = [field_id for field_id, _, _ in fields]
        self._units = [unit for _, _, unit in fields]
        self._structures = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, (field_id, scope, _) in zip(self._structures, fields, strict=True):
            value.fieldId, value.scopeId = field_id, scope
        count = ctypes.c_int(len(fields))
        self._arguments = (device.handle, count, ctypes.byref(self._structures))
        self._call: Callable[..., int] | None = None
        self._raw: list[tuple[int, int, bytes]] = [(-1, 0, b"")] * len(fields)
        self._values: list[Reading] = [None] * len(fields)

    def __call__(self) -> list[Reading]:
        """Read the fields; return a value each, None for a blank, or its refusal."""
        if self._call is None:
            self._call = _library_function("nvmlDeviceGetFieldValues")
        code = self._call(*self._arguments)
        if code:
            raise DriverError(code)
        raw = list(_FIELD.iter_unpack(self._structures))
        for at, (one, before) in enumerate(zip(raw, self._raw, strict=True)):
            if one != before:
                kind, code, data = one
                value = DriverError(code) if code else decoded(kind, data)
                if not isinstance(value, DriverError):
                    value = self._units[at].convert(value)
                self._values[at] = value
        self._raw = raw
        return self._values


def _library_function(name: str) -> Callable[..., int]:
    """Return a function of the library itself; DriverError where this driver does not have it."""
    pynvml = binding()
    try:
        pointer: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
    except pynvml.NVMLError as exc:
        raise DriverError(exc.value) from exc
    return pointer


def scalar(
    device: NvmlDevice, name: str, arguments: Sequence[int], output: type[ctypes._SimpleCData[int]]
) -> Callable[[], int]:
    """Return a reading of one number whose arguments are converted once, not at each call.

    The binding's function of the same name takes three times as long, and a sampler's share of a
    core is spent on such calls.
    """
    number = output()
    converted = (device.handle, *map(ctypes.c_uint, arguments), ctypes.byref(number))
    call: Callable[..., int] | None = None

    def read() -> int:
        nonlocal call
        if call is None:
            call = _library_function(name)
        code = call(*converted)
        if code:
            raise DriverError(code)
        return number.value

    return read


class Activity:
    """GPM metrics of a device, over the time between two snapshots of its counters."""

    def __init__(self, device: NvmlDevice, metrics: Sequence[int]) -> None:
        pynvml = binding()
        self._handle = device.handle
        self._newer, self._older = (query("nvmlGpmSampleAlloc") for _ in range(2))
        self._has_older = False
        self._get_sample = function("nvmlGpmSampleGet")
        self._get_metrics = function("nvmlGpmMetricsGet")
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(metrics)
        for structure, metric in zip(self._request.metrics, metrics, strict=False):
            structure.metricId = metric
        self._answers = (ctypes.c_char * (_METRIC.size * len(metrics))).from_buffer(
            self._request, type(self._request).metrics.offset
        )

    def __call__(self) -> list[Reading] | None:
        """Take a snapshot; return each metric since the one before, None for the first.

        While the driver has nothing to tell of so short a time, the older snapshot stays: the next
        reading covers the time of both.
        """
        self._get_sample(self._handle, self._newer)
        has_older, self._has_older = self._has_older, True
        if has_older:
            self._request.sample1, self._request.sample2 = self._older, self._newer
            self._get_metrics(self._request)
        self._older, self._newer = self._newer, self._older
        if not has_older:
            return None
        answers = _METRIC.iter_unpack(self._answers)
        return [DriverError(code) if code else value for code, value in answers]

    def close(self) -> None:
        """Free the snapshots."""
        for snapshot in (self._newer, self._older):
            with contextlib.suppress(DriverError):
                query("nvmlGpmSampleFree", snapshot)


_AVERAGED_SINCE = (8, 1)
"""Compute capability from which the power usage is an average (nvml.h: Ampere other than GA100)."""


def power(device: NvmlDevice) -> tuple[Callable[[], Reading], bool]:
    """Return what reads a device's power in W, and whether it is the instant one.

    That is a field of newer drivers; older ones have the power usage.
    """
    field = Fields(device, [(binding().NVML_FI_DEV_POWER_INSTANT, 0, WATTS)])

    def instant() -> Reading:
        (value,) = field()
        if isinstance(value, DriverError):
            raise value
        return value

    if not refuses(instant):
        return instant, True
    usage = function("nvmlDeviceGetPowerUsage")
    return lambda: WATTS.convert(usage(device.handle)), False


def power_basis(device: NvmlDevice) -> str:
    """Return which power `power` reads: instant, or the driver's average over a second."""
    if power(device)[1]:
        return "instant"
    query("nvmlDeviceGetPowerUsage", device.handle)
    capability = query("nvmlDeviceGetCudaComputeCapability", device.handle)
    return "average over 1 s" if tuple(capability) >= _AVERAGED_SINCE else "instant"


NAME = "nvml"
BY_DEFAULT = True


class NvmlCollector(DeviceCollector[NvmlDevice]):
    """Samples every NVIDIA device of the host that the job may use, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_ACTIVITY, DEVICE_BUFFERED, DEVICE_LIMIT.

    Args:
        hz: most readings per second of the fast tier: clocks, event reasons, instant power.
    """

    name: ClassVar[str] = NAME
    driver: ClassVar[str] = "NVIDIA's driver"
    silent_remedy: ClassVar[str] = (
        "check that nvidia-smi responds, and dmesg for device errors (Xid)"
    )
    absent_remedy: ClassVar[str] = (
        "none on a machine without NVIDIA devices; else install the driver, and in a container "
        "pass the devices in (docker run --gpus all)"
    )
    sources: ClassVar[str] = "chopper.collectors.nvml._sources"
    rates_hz: ClassVar[dict[str, float]] = {
        "CounterSource": 10.0,
        # GPM wants 100 ms between two snapshots: at 10 Hz a late one leaves the next too little.
        "ActivitySource": 1 / 0.11,
        "LimitSource": ONCE_HZ,
    }

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        # What the driver buffers is taken where it is finer than the fast tier.
        buffered = SourceSpec(
            factory=f"{self.sources}:BufferedSource", hz=1.0, options={"polled_hz": self._hz}
        )
        return [*super().specs(context), buffered]

    def devices(self) -> list[NvmlDevice]:
        """Ask NVML for its devices."""
        with session():
            return devices()

    def restrictions(self, devices: list[NvmlDevice]) -> list[str | None]:
        """Return the notes on devices, such as that one is partitioned."""
        return [device.note for device in devices]
