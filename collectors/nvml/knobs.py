"""Locked clocks and power limits of NVIDIA's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chopper.collectors.knobs import Knob, What, refused
from chopper.collectors.nvml._library import ERRORS, binding, devices, session
from chopper.errors import CollectorUnavailable

_NO_PERMISSION = 4
_LOCK_UNKNOWN = (
    "NVML does not tell whether clocks were locked before: an earlier lock is gone afterwards"
)


def knobs(what: What, root: str) -> list[Knob]:  # noqa: ARG001 - as every vendor's
    """Return the SM clock or the power limit of each device."""
    pynvml = binding()
    with session():
        try:
            return [_knob(pynvml, device, what) for device in devices()]
        except pynvml.NVMLError as exc:
            what_is = "supported clocks" if what == "clock" else "power limits"
            raise CollectorUnavailable(
                f"NVML: the {what_is} cannot be read ({ERRORS.explain(exc.value)[1]})"
            ) from exc


def _knob(pynvml: Any, device: Any, what: What) -> Knob:
    handle, named = device.handle, f"device {device.index} ({device.name or 'unknown'})"
    if what == "clock":
        memory_mhz = max(pynvml.nvmlDeviceGetSupportedMemoryClocks(handle))
        clocks_mhz = sorted({*pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz)})
        return Knob(
            vendor="nvml",
            what="clock",
            target=device.uuid or str(device.index),
            label=f"{named}, SM clock",
            unit="Hz",
            scale=1e6,
            allowed=tuple(clocks_mhz),
            continuous=False,
            before={},
            note=_LOCK_UNKNOWN,
        )
    least_mw, most_mw = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return Knob(
        vendor="nvml",
        what="power",
        target=device.uuid or str(device.index),
        label=f"{named}, power limit",
        unit="W",
        scale=1e-3,
        allowed=(least_mw, most_mw),
        continuous=True,
        before={"limit_mw": pynvml.nvmlDeviceGetPowerManagementLimit(handle)},
    )


def put(knob: Knob, number: int) -> None:
    """Lock the SM clock at one frequency, or set the power limit."""
    if knob.what == "clock":
        _call(knob, lambda nvml, h: nvml.nvmlDeviceSetGpuLockedClocks(h, number, number))
    else:
        _call(knob, lambda nvml, h: nvml.nvmlDeviceSetPowerManagementLimit(h, number))


def undo(knob: Knob) -> None:
    """Unlock the clocks, or set the power limit that was before."""
    if knob.what == "clock":
        _call(knob, lambda nvml, h: nvml.nvmlDeviceResetGpuLockedClocks(h))
    else:
        put(knob, knob.before["limit_mw"])


def _call(knob: Knob, call: Callable[[Any, Any], None]) -> None:
    pynvml = binding()
    with session():
        try:
            if knob.target.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(knob.target))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(knob.target)
            call(pynvml, handle)
        except pynvml.NVMLError as exc:
            reason = ERRORS.explain(exc.value)[1]
            raise refused(knob, reason, permission=exc.value == _NO_PERMISSION) from exc
