"""NVML's devices, error codes and field values, on top of the vendor's Python binding.

The binding's convenience functions allocate per call; sensors here keep their C structures and call
the library's functions through the binding's own table, so that a reading costs microseconds.
"""

from __future__ import annotations

import contextlib
import os
from ctypes import byref, c_int32, c_uint, c_ulonglong, sizeof
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from chopper.collectors._plan import (
    FIELD,
    NUMBER,
    SUM,
    Call,
    Column,
    address,
    content,
    pointer,
)
from chopper.collectors._visible import NothingVisible, local_ranks, numbers_and_names, ordinal
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from chopper.collectors.device_sources import Loss

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that is summed over links; a bare id would mean link 0 alone."""

# NVML's return codes by their number in nvml.h: what is lost, and in words why.
ERRORS: dict[int, tuple[Loss, str]] = {
    1: ("library", "NVML was not initialized"),
    2: ("sensor", "the driver does not know this sensor (invalid argument)"),
    3: ("sensor", "not supported by this device"),
    4: ("sensor", "no permission to read it"),
    5: ("moment", "NVML was initialized already"),
    6: ("sensor", "not found"),
    7: ("sensor", "the driver wants a larger buffer than this binding gives"),
    8: ("device", "the device's power cables are not attached properly"),
    9: ("library", "the NVIDIA driver is not loaded"),
    10: ("moment", "the driver's time ran out"),
    11: ("moment", "an interrupt problem of the device"),
    12: ("library", "NVML's library is not installed (libnvidia-ml.so.1)"),
    13: ("sensor", "this driver is too old to offer it"),
    14: ("sensor", "the device's infoROM is corrupted"),
    15: ("device", "the device has fallen off the bus"),
    16: ("device", "the device needs a reset"),
    17: ("library", "the operating system or a container blocks access to the devices"),
    18: ("library", "library and kernel module of the NVIDIA driver differ in version: reboot"),
    19: ("moment", "in use by another process"),
    20: ("moment", "not enough memory"),
    21: ("moment", "no data yet"),
    22: ("sensor", "ECC counts are not available on this virtual device"),
    23: ("moment", "not enough of a resource"),
    24: ("sensor", "frequency not supported"),
    25: ("sensor", "the driver speaks another version of this call"),
    26: ("sensor", "withdrawn by this driver"),
    27: ("moment", "not ready"),
    28: ("device", "the device is gone"),
    29: ("moment", "not in this state of the device"),
    30: ("sensor", "reset type not supported"),
    999: ("moment", "unknown error of the driver"),
}


_VERSION_MISMATCH = 25


def explain(code: int) -> tuple[Loss, str]:
    """Return the loss by a code and its reason; a code of a newer driver costs one reading."""
    return ERRORS.get(code, ("moment", f"NVML error {code}, which this version does not know"))


_LARGEST = 0x7FFF_FFFF_FFFF_FFFF
"""Largest number of an int64 column."""


class ReadingFailed(Exception):
    """A call returned something other than success.

    Attributes:
        kind: what it takes away.
        code: as the driver returned it.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        self.kind, reason = explain(code)
        super().__init__(reason)


def _binding() -> Any:
    try:
        import pynvml
    except ImportError as exc:
        raise CollectorUnavailable("nvidia-ml-py is not installed") from exc
    return pynvml


@contextlib.contextmanager
def session() -> Iterator[None]:
    """NVML initialized inside, shut down after; sessions may nest.

    Raises:
        CollectorUnavailable: it cannot be initialized here; the message says why.
    """
    pynvml = _binding()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        raise CollectorUnavailable(explain(exc.value)[1]) from exc
    except OSError as exc:
        raise CollectorUnavailable(f"NVML's library cannot be loaded ({exc})") from exc
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


@dataclass
class NvmlDevice:
    """One device.

    Attributes:
        index: in NVML's order, which is that of PCI addresses.
        uuid, name, pci_address: as the driver writes them; None where it refuses.
        note: what is special about it (MIG), None for nothing.
        lost: why it is read no more, None while it is.
    """

    handle: Any
    index: int
    uuid: str | None = None
    name: str | None = None
    pci_address: str | None = None
    note: str | None = None
    lost: str | None = field(default=None, compare=False)


def devices() -> list[NvmlDevice]:
    """The devices that this job may use, in NVML's order.

    In CUDA_VISIBLE_DEVICES, UUIDs and, under CUDA_DEVICE_ORDER=PCI_BUS_ID, numbers choose devices;
    other numbers follow an order that NVML does not know, so they choose only where all devices are
    of one kind. More ranks on this host than visible devices mean that each rank sees its own: then
    all devices are read.

    Raises:
        CollectorUnavailable: there is none, or CUDA sees none.
    """
    pynvml = _binding()
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as exc:
        raise CollectorUnavailable(explain(exc.value)[1]) from exc
    readable = []
    problems = []
    for index in range(count):
        try:
            readable.append(_device(pynvml, index))
        except pynvml.NVMLError as exc:
            problems.append(f"device {index}: {explain(exc.value)[1]}")
    if not readable:
        raise CollectorUnavailable("; ".join(problems) or "NVML finds no device")
    ranks, unknown = local_ranks()
    chosen = _visible(pynvml, readable)
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


def _visible(pynvml: Any, listed: list[NvmlDevice]) -> list[NvmlDevice]:
    """Those that CUDA sees; all of them where it cannot be told which."""
    entries = numbers_and_names(_VISIBLE)
    if entries is None:
        return listed
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    one_kind = len({device.name for device in listed}) == 1
    chosen: dict[int, NvmlDevice] = {}
    for entry in entries:
        number = ordinal(entry)
        if number is None:
            named = _named(pynvml, entry, listed)
            if named is None:
                return listed
            if len(named) != 1:
                break
            chosen[named[0].index] = named[0]
        elif not 0 <= number < len(listed):
            break
        elif not (by_pci or one_kind):
            return listed
        else:
            chosen[listed[number].index] = listed[number]
    return [chosen[index] for index in sorted(chosen)]


def _named(pynvml: Any, entry: str, listed: list[NvmlDevice]) -> list[NvmlDevice] | None:
    """The devices whose UUID begins so, which of a MIG device is its parent's; None: not known."""
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
    return [device for device in listed if device.uuid is not None and device.uuid.startswith(name)]


def function(name: str) -> Callable[..., int]:
    """A function of the library itself, through the binding.

    Raises:
        ReadingFailed: this driver does not have it.
    """
    pynvml = _binding()
    try:
        pointer: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)
    except pynvml.NVMLError as exc:
        raise ReadingFailed(exc.value) from exc
    return pointer


def query(name: str, *arguments: Any) -> Any:
    """Call a function of the binding.

    Raises:
        ReadingFailed: the driver refuses, or does not have the function.
    """
    pynvml = _binding()
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as exc:
        raise ReadingFailed(exc.value) from exc
    except (pynvml.NVMLLibraryMismatchError, AttributeError) as exc:
        raise ReadingFailed(_VERSION_MISMATCH) from exc


@dataclass(frozen=True)
class Reader:
    """One sensor: how it is read here, and the same as a step of the fast tier's plan.

    Attributes:
        read: its value now; raises ReadingFailed.
        call, column: what the plan calls, and how it finds the value.
    """

    read: Callable[[], Any]
    call: Call
    column: Column

    def __call__(self) -> Any:
        """The value now."""
        return self.read()


def _number_reader(
    device: NvmlDevice,
    call: Any,
    out: c_uint | c_ulonglong,
    factor: int | float,
    argument: int | None = None,
    *,
    nonzero: bool = False,
    most: int = _LARGEST,
) -> Reader:
    """``call(handle[, argument], &out)`` gives one number; one unit of it is ``factor``.

    All bits one are no value, nor is what is larger than ``most``.
    """
    handle, at = device.handle, byref(out)
    width = 4 if isinstance(out, c_uint) else 8
    blank = (1 << 8 * width) - 1
    arguments = (handle, at) if argument is None else (handle, c_uint(argument), at)

    def read() -> int | float | None:
        code = call(*arguments)
        if code:
            raise ReadingFailed(code)
        value = out.value
        if value == blank or value > most or (nonzero and not value):
            return None
        return value * factor

    return Reader(
        read,
        Call(address(call), pointer(handle), argument, bytes(width)),
        Column(NUMBER, 0, ((0, width, 0),), factor, nonzero=nonzero, sentinel=True, most=most),
    )


_MOST_MHZ = 20_000
_MOST_MW = 10_000_000
"""More than any device reaches: a larger reading is none."""


def clock_reader(device: NvmlDevice, clock: int) -> Reader:
    """Current clock in Hz; None where the driver says 0."""
    call = function("nvmlDeviceGetClockInfo")
    return _number_reader(device, call, c_uint(), 1_000_000, clock, nonzero=True, most=_MOST_MHZ)


def reasons_reader(device: NvmlDevice) -> Reader:
    """Clocks event reasons as bits; older drivers call them throttle reasons."""
    try:
        call = function("nvmlDeviceGetCurrentClocksEventReasons")
    except ReadingFailed:
        call = function("nvmlDeviceGetCurrentClocksThrottleReasons")
    return _number_reader(device, call, c_ulonglong(), 1)


def power_reader(device: NvmlDevice) -> Reader:
    """Instant power in W: the field of newer drivers, else what older ones call power usage.

    None where the driver says 0: a device that answers draws power.
    """
    fields = _instant_power(device)
    if fields is not None:
        return Reader(lambda: power_w(fields.read()[0]), fields.call, power_column([(0, 1e-3)]))
    usage = function("nvmlDeviceGetPowerUsage")
    return _number_reader(device, usage, c_uint(), 1e-3, nonzero=True, most=_MOST_MW)


def _instant_power(device: NvmlDevice) -> Fields | None:
    """The field of newer drivers; None where it is refused for good, not where it fails once."""
    try:
        fields = Fields(device, [(_FIELD_POWER_INSTANT, 0)])
        (power,) = fields.read()
    except ReadingFailed as exc:
        power = exc
        if exc.kind != "moment":
            return None
    refused = isinstance(power, ReadingFailed) and power.kind == "sensor"
    return None if refused else fields


_FIELD_POWER_INSTANT = 186
_AVERAGED_SINCE = (8, 1)
"""Compute capability from which the power usage is an average (nvml.h: Ampere other than GA100)."""


def power_basis(device: NvmlDevice) -> str:
    """Return which power `power_reader` reads: instant, or the driver's average over a second.

    Raises:
        ReadingFailed: power usage it is, and the device does not say which of both that is.
    """
    if _instant_power(device) is not None:
        return "instant"
    query("nvmlDeviceGetPowerUsage", device.handle)
    capability = query("nvmlDeviceGetCudaComputeCapability", device.handle)
    return "average over 1 s" if tuple(capability) >= _AVERAGED_SINCE else "instant"


def scaled(value: int | float | ReadingFailed | None, factor: float) -> float | None:
    """A field's value in the unit wanted; None for what is no number.

    Raises:
        ReadingFailed: the field has none.
    """
    if isinstance(value, ReadingFailed):
        raise value
    return value * factor if value is not None and isfinite(value) else None


def older_temperature_reader(device: NvmlDevice) -> Reader:
    """Temperature of the chip in °C as older drivers tell it.

    Raises:
        ReadingFailed: this one does not have the call.
    """
    call = function("nvmlDeviceGetTemperature")
    return _number_reader(device, call, c_uint(), 1.0, _CHIP, most=_MOST_C)


_CHIP = 0
_MOST_C = 1000


def power_w(value_mw: int | float | ReadingFailed | None) -> float | None:
    """A field's power; None for what is no power.

    Raises:
        ReadingFailed: the field has none.
    """
    power = scaled(value_mw, 1e-3)
    return None if power is None or not 0 < power <= _MOST_MW * 1e-3 else power


class Fields:
    """Field values of one device, read in one call; several columns come from it.

    Args:
        ids: (field id, scope) of each.
        every: the call is made at one of so many samples, devices taking turns; between them
            nothing is known.
    """

    def __init__(
        self, device: NvmlDevice, ids: Sequence[tuple[int, int]], *, every: int = 1
    ) -> None:
        pynvml = _binding()
        call = function("nvmlDeviceGetFieldValues")
        handle, count = device.handle, len(ids)
        self.count = count
        self._structures = (pynvml.c_nvmlFieldValue_t * count)()
        for value, (field_id, scope) in zip(self._structures, ids, strict=True):
            value.fieldId, value.scopeId = field_id, scope
        self._function, self._arguments = call, (handle, c_int32(count), byref(self._structures))
        self._position = {pair: i for i, pair in enumerate(ids)}
        self._every = every
        self._turn = device.index % every
        self._values: list[int | float | ReadingFailed | None] | None = None
        self._failed: ReadingFailed | None = None
        self.call = Call(
            address(call),
            pointer(handle),
            count,
            content(self._structures),
            every=every,
            turn=self._turn,
        )

    def forget(self) -> None:
        """Make the next reading anew, if it is time for one."""
        due = self._turn == 0
        self._turn = (self._every if due else self._turn) - 1
        self._failed = None
        self._values = None if due else [None] * self.count

    def read(self) -> list[int | float | ReadingFailed | None]:
        """Make the call and return each field's value, or why there is none.

        Raises:
            ReadingFailed: the whole call failed.
        """
        code = self._function(*self._arguments)
        if code:
            raise ReadingFailed(code)
        return [
            ReadingFailed(v.nvmlReturn) if v.nvmlReturn else decoded(v.valueType, v.value)
            for v in self._structures
        ]

    def place(self, pair: tuple[int, int]) -> int:
        """Return the position of a field in the call."""
        return self._position[pair]

    def value(self, pair: tuple[int, int]) -> int | float | ReadingFailed | None:
        """Return one field of this sample, for which the call is made once.

        Raises:
            ReadingFailed: the call failed, for each of its fields.
        """
        if self._values is None and self._failed is None:
            try:
                self._values = self.read()
            except ReadingFailed as exc:
                self._failed = exc
        if self._failed is not None:
            raise self._failed
        assert self._values is not None
        return self._values[self._position[pair]]


_VALUE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def decoded(kind: int, value: Any) -> int | float | ReadingFailed | None:
    """The member of a value that its type names; None for all bits one: not available."""
    if not 0 <= kind < len(_VALUE):
        return ReadingFailed(_VERSION_MISMATCH)
    number: int | float = getattr(value, _VALUE[kind])
    return None if number == _BLANK.get(kind) else number


_BLANK = {1: (1 << 32) - 1, 2: (1 << 64) - 1, 3: (1 << 64) - 1}


FIELD_BYTES = 40
"""Size of one nvmlFieldValue_t; a test holds it against the binding's."""


def field_column(places: Sequence[tuple[int, int | float]], *, summed: bool = False) -> Column:
    """Return a column of field values of one call: (position in the call, its unit) in turn."""
    (_, factor), *_ = places
    return Column(
        SUM if summed else FIELD,
        0,
        tuple((at * FIELD_BYTES, 8, unit if isinstance(unit, int) else 0) for at, unit in places),
        factor,
    )


def power_column(places: Sequence[tuple[int, int | float]]) -> Column:
    """As `field_column`, of a power."""
    return field_column(places)._replace(nonzero=True, most=_MOST_MW)


class Structure:
    """One call that fills a structure, made once a sample; several columns come from it.

    Args:
        name: the library's function, called with the handle and the structure.
        structure: what is passed, as it is before the first call.
    """

    def __init__(self, device: NvmlDevice, name: str, structure: Any) -> None:
        self._structure = structure
        self._function = function(name)
        self._handle, self._at = device.handle, byref(structure)
        self._code: int | None = None
        self.call = Call(address(self._function), pointer(device.handle), None, content(structure))

    def forget(self) -> None:
        """Make the next reading anew."""
        self._code = None

    def read(self) -> None:
        """Fill the structure unless that was done.

        Raises:
            ReadingFailed: the call failed, for each of its columns.
        """
        if self._code is None:
            self._code = self._function(self._handle, self._at)
        if self._code:
            raise ReadingFailed(self._code)

    def read_anew(self) -> None:
        """Make the call, whatever was read before."""
        self.forget()
        self.read()

    def reader(
        self, member: str, factor: int | float, *, signed: bool = False, most: int = _LARGEST
    ) -> Reader:
        """A column of it; what is larger than ``most`` is no value."""
        descriptor = getattr(type(self._structure), member)
        place = (descriptor.offset, descriptor.size, int(signed))

        def read() -> int | float | None:
            self.read()
            value = getattr(self._structure, member)
            return value * factor if value <= most else None

        column = Column(NUMBER, 0, (place,), factor, sentinel=descriptor.size == 8)
        return Reader(read, self.call, column._replace(most=0 if most == _LARGEST else most))


def gpm_request(metrics: Sequence[int]) -> Any:
    """The structure that asks for these GPM metrics; its two samples are set before each call."""
    pynvml = _binding()
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(metrics)
    for slot, metric in zip(request.metrics, metrics, strict=False):
        slot.metricId = metric
    return request


def gpm_metric_offset(position: int) -> int:
    """Return the offset of a metric in the structure that asks for them."""
    pynvml = _binding()
    first: int = pynvml.c_nvmlGpmMetricsGet_t.metrics.offset
    return first + position * sizeof(pynvml.c_nvmlGpmMetric_t)


def counter_structures() -> list[tuple[str, Any, list[tuple[str, str, int | float, bool, int]]]]:
    """Calls of the medium tier that fill a structure.

    Returns:
        Function, what is passed to it, and of each column: its name, the member of the structure,
        what one unit is, whether the member is signed, and the largest value.
    """
    pynvml = _binding()
    temperature = pynvml.c_nvmlTemperature_v1_t()
    temperature.version, temperature.sensorType = pynvml.nvmlTemperature_v1, 0
    memory = pynvml.c_nvmlMemory_v2_t()
    memory.version = MEMORY_V2
    return [
        (
            "nvmlDeviceGetTemperatureV",
            temperature,
            [("temperature_c", "temperature", 1.0, True, _LARGEST)],
        ),
        (
            "nvmlDeviceGetUtilizationRates",
            pynvml.c_nvmlUtilization_t(),
            [
                ("device_utilization_ratio", "gpu", 0.01, False, 100),
                ("memory_utilization_ratio", "memory", 0.01, False, 100),
            ],
        ),
        (
            "nvmlDeviceGetMemoryInfo_v2",
            memory,
            [("memory_used_bytes", "used", 1, False, _LARGEST)],
        ),
    ]


MEMORY_V2 = 0x02000028
"""Version of nvmlMemory_v2_t: the structure's 40 bytes and a 2 in the top byte."""
