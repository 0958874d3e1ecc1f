"""AMD devices through amdsmi: import, error codes, devices, metrics, and the collector.

The package's import binds every symbol of the native library at once: without the library it prints
and raises KeyError, with an older one AttributeError. ``_sources`` are what the sampler reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from chopper.collectors.devices import (
    Device,
    DeviceCollector,
    DriverError,
    Errors,
    NothingVisible,
    chosen_by,
    local_ranks,
)
from chopper.collectors.sampler import ONCE_HZ
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


NAME = "amdsmi"
BY_DEFAULT = True


class AmdCollector(DeviceCollector[AmdDevice]):
    """Samples every AMD device of the host, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_LIMIT.

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
    sources: ClassVar[str] = "chopper.collectors.amd._sources"
    rates_hz: ClassVar[dict[str, float]] = {
        "CounterSource": 10.0,
        "LimitSource": ONCE_HZ,
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
