"""NVML's devices, errors and calls, on top of the vendor's Python binding.

The binding's convenience functions allocate per call; what is read again and again is described as
calls of the library's own functions, so that a reading costs microseconds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import sizeof
from dataclasses import dataclass
from functools import partial
from typing import Any

from chopper.collectors._plan import (
    FIELD,
    NUMBER,
    SENSOR,
    VERSION_MISMATCH,
    Call,
    Column,
    DeviceReader,
    PlannedDevice,
    address,
    content,
    field_value,
    pointer,
)
from chopper.collectors._visible import NothingVisible, chosen_by, local_ranks
from chopper.collectors.device_sources import Device, Errors
from chopper.errors import CollectorUnavailable

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that is summed over links; a bare id would mean link 0 alone."""
ERRORS = Errors("NVML")


class ReadingFailed(Exception):
    """A call returned something other than success; ``kind`` is what that takes away."""

    def __init__(self, code: int, why: str | None = None) -> None:
        self.code = code
        self.kind, reason = ERRORS.explain(code) if why is None else ("sensor", why)
        super().__init__(reason)


def binding() -> Any:
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


def function(name: str) -> Callable[..., int]:
    """A function of the library itself; ReadingFailed where this driver does not have it."""
    pynvml = binding()
    try:
        pointer_to: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
    except pynvml.NVMLError as exc:
        raise ReadingFailed(exc.value) from exc
    return pointer_to


def query(name: str, *arguments: Any) -> Any:
    """Call a function of the binding; ReadingFailed where the driver refuses."""
    pynvml = binding()
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as exc:
        raise ReadingFailed(exc.value) from exc
    except (pynvml.NVMLLibraryMismatchError, AttributeError) as exc:
        raise ReadingFailed(VERSION_MISMATCH) from exc


def query_device(device: NvmlDevice, name: str, *arguments: Any) -> Any:
    return query(name, device.handle, *arguments)


def call_of(device: NvmlDevice, name: str, buffer: bytes, argument: int | None = None) -> Call:
    """A call that fills a buffer: ``f(handle[, argument], buffer)``."""
    return Call(address(function(name)), pointer(device.handle), argument, buffer)


def fields_call(device: NvmlDevice, ids: Sequence[tuple[int, int]]) -> Call:
    """The call that reads these fields (id, scope) of a device at once."""
    structures = (binding().c_nvmlFieldValue_t * len(ids))()
    for value, (field_id, scope) in zip(structures, ids, strict=True):
        value.fieldId, value.scopeId = field_id, scope
    return call_of(device, "nvmlDeviceGetFieldValues", content(structures), len(ids))


def offers(call: Call, column: Column) -> bool:
    """Return whether a device answers a call; one that fails now may answer later."""
    outcomes = {code: SENSOR for code, (loss, _) in ERRORS.items() if loss != "moment"}
    reader = DeviceReader(PlannedDevice(0, None, (call,), (column,)), outcomes)
    reader.read(whole=True)
    return not reader.refused[0]


_MOST_MW = 10_000_000
"""More than any device draws: a larger reading is none."""
HERTZ = Column(NUMBER, 0, ((0, 4, 0),), 1_000_000, nonzero=True, sentinel=True, most=20_000)
BITS = Column(NUMBER, 0, ((0, 8, 0),), 1, sentinel=True)
_POWER_USAGE = Column(NUMBER, 0, ((0, 4, 0),), 1e-3, nonzero=True, sentinel=True, most=_MOST_MW)
FIELD_WATTS = Column(FIELD, 0, ((0, 8, 0),), 1e-3, nonzero=True, most=_MOST_MW)
_FIELD_POWER_INSTANT = 186
_AVERAGED_SINCE = (8, 1)
"""Compute capability from which the power usage is an average (nvml.h: Ampere other than GA100)."""


def power(device: NvmlDevice) -> tuple[Call, Column, bool]:
    """The call that reads a device's power, its column, and whether it is the instant one.

    That is a field of newer drivers; older ones have the power usage. 0 is no power.
    """
    try:
        call = fields_call(device, [(_FIELD_POWER_INSTANT, 0)])
        if offers(call, FIELD_WATTS):
            return call, FIELD_WATTS, True
    except ReadingFailed:
        pass
    return call_of(device, "nvmlDeviceGetPowerUsage", bytes(4)), _POWER_USAGE, False


def power_basis(device: NvmlDevice) -> str:
    """Return which power `power` reads: instant, or the driver's average over a second."""
    if power(device)[2]:
        return "instant"
    query("nvmlDeviceGetPowerUsage", device.handle)
    capability = query("nvmlDeviceGetCudaComputeCapability", device.handle)
    return "average over 1 s" if tuple(capability) >= _AVERAGED_SINCE else "instant"


def field(device: NvmlDevice, field_id: int) -> int | float | None:
    """A field's value now.

    Raises:
        ReadingFailed: the device does not have it.
    """
    (value,) = query("nvmlDeviceGetFieldValues", device.handle, [field_id])
    if value.nvmlReturn:
        raise ReadingFailed(value.nvmlReturn)
    return decoded(value.valueType, value.value)


def decoded(kind: int, value: Any) -> int | float | None:
    """The member of a value that its type names; None for all bits one: not available."""
    try:
        return field_value(kind, content(value))
    except IndexError:
        raise ReadingFailed(VERSION_MISMATCH) from None


def gpm_request(metrics: Sequence[int]) -> tuple[Any, list[int]]:
    """The structure that asks for these GPM metrics, and the offset of each of them in it."""
    pynvml = binding()
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(metrics)
    offsets = []
    for i, metric in enumerate(metrics):
        request.metrics[i].metricId = metric
        offsets.append(type(request).metrics.offset + i * sizeof(pynvml.c_nvmlGpmMetric_t))
    return request, offsets
