"""amdsmi behind a guard: import, error codes, devices, and the metrics structure read in place.

The package's import binds every symbol of the native library at once: without the library it prints
and raises KeyError, with an older one AttributeError. Its own dictionary of metrics
is built anew with some eighty entries a call; one reused structure costs the driver's time alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import os
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chopper.collectors._visible import NothingVisible, local_ranks, numbers_and_names, ordinal
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.collectors.device_sources import Loss

# Status codes of amdsmi.h: what is lost, and in words why.
ERRORS: dict[int, tuple[Loss, str]] = {
    1: ("sensor", "the library does not accept the call (invalid argument)"),
    2: ("sensor", "not supported by this device"),
    3: ("sensor", "not implemented by this library yet"),
    4: ("library", "a kernel module could not be loaded"),
    5: ("library", "a symbol of the library could not be loaded"),
    6: ("device", "the DRM device reports an error"),
    7: ("moment", "the call failed"),
    8: ("moment", "the driver's time ran out"),
    9: ("moment", "to be tried again"),
    10: ("sensor", "no permission to read it"),
    11: ("moment", "interrupted"),
    12: ("moment", "input or output error"),
    13: ("moment", "bad address"),
    14: ("sensor", "a file of the driver cannot be read"),
    15: ("moment", "not enough memory"),
    16: ("moment", "an exception inside the library"),
    17: ("sensor", "the library does not accept the call (out of bounds)"),
    18: ("library", "the library could not be initialized"),
    19: ("moment", "a reference counter overflowed"),
    20: ("sensor", "a directory of the driver is not there"),
    30: ("moment", "the device is busy"),
    31: ("device", "the device was not found"),
    32: ("library", "the library was not initialized"),
    33: ("moment", "no free slot"),
    34: ("library", "the amdgpu driver is not loaded"),
    39: ("moment", "there is more data than asked for"),
    40: ("moment", "no data yet"),
    41: ("sensor", "the driver wants a larger buffer than this binding gives"),
    42: ("sensor", "the driver's data has another size than this binding expects"),
    43: ("moment", "unexpected data"),
    44: ("sensor", "not an AMD processor"),
    45: ("sensor", "no energy driver"),
    46: ("sensor", "no MSR driver"),
    47: ("sensor", "no HSMP driver"),
    48: ("sensor", "HSMP is not supported"),
    49: ("sensor", "this HSMP message is not supported"),
    50: ("moment", "HSMP's time ran out"),
    51: ("sensor", "no driver for it"),
    52: ("sensor", "a file of the driver is not there"),
    53: ("sensor", "a null pointer was passed"),
    54: ("device", "the amdgpu driver could not be restarted"),
    55: ("sensor", "the setting is not available"),
    56: ("sensor", "the device's EEPROM is corrupted"),
    0xFFFFFFFE: ("moment", "an error that the library cannot name"),
    0xFFFFFFFF: ("moment", "unknown error of the library"),
}


def explain(code: int) -> tuple[Loss, str]:
    """Return the loss by a status and its reason; a code of a newer library costs one reading."""
    unsigned = code & 0xFFFFFFFF
    known = ERRORS.get(unsigned)
    return known or ("moment", f"amdsmi status {code}, which this version does not know")


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
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
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
    """The library initialized for GPUs inside, shut down after; gives amdsmi's wrapper module.

    Raises:
        CollectorUnavailable: it cannot be initialized here; the message says why.
    """
    wrapper = load()
    code = wrapper.amdsmi_init(_INIT_GPUS)
    if code:
        raise CollectorUnavailable(explain(code)[1])
    try:
        yield wrapper
    finally:
        wrapper.amdsmi_shut_down()


_INIT_GPUS = 1 << 1


@dataclass
class AmdDevice:
    """One device, or one partition of one.

    Attributes:
        index: as HIP numbers it, which is not amd-smi's order; amd-smi's where HIP's is not known.
        uuid: HIP's; None where the library does not say.
        pci_address: domain:bus:device.function; partitions of a device share all but the function.
        partition: compute partitioning (SPX, CPX …), None where unknown.
        lost: why it is read no more, None while it is.
    """

    handle: Any
    index: int
    uuid: str | None = None
    pci_address: str | None = None
    partition: str | None = None
    lost: str | None = field(default=None, compare=False)


def devices(wrapper: Any) -> list[AmdDevice]:
    """The GPUs that this job may use, by index.

    Raises:
        CollectorUnavailable: there is none, or HIP sees none.
    """
    interface = importlib.import_module("amdsmi.amdsmi_interface")
    try:
        handles = interface.amdsmi_get_processor_handles()
    except interface.AmdSmiException as exc:
        raise CollectorUnavailable(explain(_code_of(exc))[1]) from exc
    listed = [_device(wrapper, interface, handle, i) for i, handle in enumerate(handles)]
    if not listed:
        raise CollectorUnavailable("amdsmi finds no device")
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
        entries = numbers_and_names(variable)
        if entries is None:
            continue
        chosen: dict[int, AmdDevice] = {}
        for entry in entries:
            number = ordinal(entry)
            if number is None:
                named = [d for d in visible if d.uuid is not None and d.uuid == entry]
            else:
                named = visible[number : number + 1] if number >= 0 else []
            if not named:
                break
            chosen |= {device.index: device for device in named}  # parts of one may share a name
        if not chosen:
            raise NothingVisible(variable, "HIP")
        visible = [chosen[index] for index in sorted(chosen)]
    return visible


def _code_of(exc: Exception) -> int:
    code = exc.get_error_code() if hasattr(exc, "get_error_code") else None
    return int(code) if code is not None else 0xFFFFFFFF


def _device(wrapper: Any, interface: Any, handle: Any, position: int) -> AmdDevice:
    device = AmdDevice(handle, position)
    info = wrapper.amdsmi_enumeration_info_t()
    if wrapper.amdsmi_get_gpu_enumeration_info(handle, ctypes.byref(info)) == 0:
        if info.hip_id != 0xFFFFFFFF:
            device.index = int(info.hip_id)
        device.uuid = info.hip_uuid.decode(errors="replace") or None
    with contextlib.suppress(interface.AmdSmiException):
        device.pci_address = interface.amdsmi_get_gpu_device_bdf(handle)
    text = ctypes.create_string_buffer(16)
    if wrapper.amdsmi_get_gpu_compute_partition(handle, text, ctypes.c_uint32(16)) == 0:
        device.partition = text.value.decode(errors="replace") or None
    return device


NUMBERS = (
    "accumulation_counter",
    "average_gfx_activity",
    "average_gfxclk_frequency",
    "average_socket_power",
    "average_uclk_frequency",
    "average_umc_activity",
    "current_gfxclk",
    "current_socket_power",
    "current_uclk",
    "energy_accumulator",
    "hbm_thm_residency_acc",
    "pcie_bandwidth_acc",
    "pcie_l0_to_recov_count_acc",
    "pcie_link_width",
    "pcie_nak_rcvd_count_acc",
    "pcie_nak_sent_count_acc",
    "pcie_replay_count_acc",
    "ppt_residency_acc",
    "prochot_residency_acc",
    "socket_thm_residency_acc",
    "temperature_edge",
    "temperature_hotspot",
    "temperature_mem",
    "vr_thm_residency_acc",
)
ARRAYS = (
    "current_gfxclks",
    "current_socclks",
    "xgmi_link_status",
    "xgmi_read_data_acc",
    "xgmi_write_data_acc",
)
"""Fields of the metrics that are read, single ones and arrays."""

_CODES = {2: "H", 4: "I", 8: "Q"}


class Layout:
    """Offsets of those fields in the metrics; all of them are taken out at once.

    Field by field it would take several times as long, ten times a second for each device.
    """

    def __init__(self, kind: Any) -> None:
        declared = dict(kind._fields_)
        names = [name for name in (*NUMBERS, *ARRAYS) if name in declared]
        names.sort(key=lambda name: int(getattr(kind, name).offset))
        text, at, count = "<", 0, 0
        self._numbers: list[tuple[str, int]] = []
        self._arrays: list[tuple[str, slice]] = [(n, slice(0)) for n in ARRAYS if n not in names]
        self._blanks: list[int] = []
        for name in names:
            field_ = getattr(kind, name)
            items = getattr(declared[name], "_length_", 1)
            width = field_.size // items
            text += f"{field_.offset - at}x{items}{_CODES[width]}"
            at = field_.offset + field_.size
            if name in ARRAYS:
                self._arrays.append((name, slice(count, count + items)))
            else:
                self._numbers.append((name, count))
            self._blanks += [(1 << 8 * width) - 1] * items
            count += items
        self._missing = [name for name in NUMBERS if name not in names]
        self._unpack = struct.Struct(text).unpack_from

    def read(self, structure: Any) -> Reading:
        """The fields by name; None for what holds the largest number of its type."""
        values = [
            None if value == blank else value
            for value, blank in zip(self._unpack(structure), self._blanks, strict=True)
        ]
        numbers = {name: values[at] for name, at in self._numbers}
        for name in self._missing:
            numbers[name] = None
        return Reading(numbers, {name: values[place] for name, place in self._arrays})


class Reading(NamedTuple):
    """One reading of a device's metrics, None for what is not available."""

    numbers: dict[str, int | None]
    arrays: dict[str, list[int | None]]

    def items(self, name: str) -> list[int]:
        """The items of an array that are available."""
        return [value for value in self.arrays[name] if value is not None]


class Metrics:
    """The metrics structure of one device, filled again at each reading.

    Attributes:
        structure: what the device does not have holds the largest number of its type.
    """

    def __init__(self, wrapper: Any, device: AmdDevice, layout: Layout) -> None:
        self.structure = wrapper.amdsmi_gpu_metrics_t()
        self._layout = layout
        self._call = wrapper.amdsmi_get_gpu_metrics_info
        self._handle = device.handle
        self._at = ctypes.byref(self.structure)
        # Until something was read, nothing is available.
        ctypes.memset(self._at, 0xFF, ctypes.sizeof(self.structure))

    def read(self) -> int:
        """Fill the structure; the status of the call, 0 for success."""
        code: int = self._call(self._handle, self._at)
        return code

    @property
    def now(self) -> Reading:
        """The fields as the structure holds them now."""
        return self._layout.read(self.structure)
