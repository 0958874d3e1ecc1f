"""Clock limits and power caps of AMD's devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from chopper.collectors.amd._library import ERRORS, devices, session
from chopper.collectors.knobs import Knob, What, refused
from chopper.errors import CollectorUnavailable

_NO_PERMISSION = 10


def knobs(what: What, root: str) -> list[Knob]:  # noqa: ARG001 - as every vendor's
    """Return the clock or the power cap of each device."""
    with session() as wrapper:
        return [_knob(wrapper, device, what) for device in devices(wrapper)]


def _knob(wrapper: Any, device: Any, what: What) -> Knob:
    named, target = f"device {device.index}", device.pci_address or str(device.index)
    if what == "clock":
        clock, level = wrapper.amdsmi_clk_info_t(), ctypes.c_uint32()
        _read(wrapper.amdsmi_get_clock_info, device, wrapper.AMDSMI_CLK_TYPE_SYS, clock)
        _read(wrapper.amdsmi_get_gpu_perf_level, device, level)
        return Knob(
            vendor="amdsmi",
            what="clock",
            target=target,
            label=f"{named}, clock",
            unit="Hz",
            scale=1e6,
            allowed=(clock.min_clk, clock.max_clk),
            continuous=True,
            before={"min_mhz": clock.min_clk, "max_mhz": clock.max_clk, "level": level.value},
        )
    cap = wrapper.amdsmi_power_cap_info_t()
    _read(wrapper.amdsmi_get_power_cap_info, device, ctypes.c_uint32(0), cap)
    return Knob(
        vendor="amdsmi",
        what="power",
        target=target,
        label=f"{named}, power cap",
        unit="W",
        scale=1e-6,
        allowed=(cap.min_power_cap, cap.max_power_cap),
        continuous=True,
        before={"cap_uw": cap.power_cap},
    )


def _read(function: Callable[..., int], device: Any, *arguments: Any) -> None:
    *numbers, out = arguments
    code = function(device.handle, *numbers, ctypes.byref(out))
    if code:
        raise CollectorUnavailable(
            f"amdsmi: device {device.index}: its limits cannot be read ({ERRORS.explain(code)[1]})"
        )


def put(knob: Knob, number: int) -> None:
    """Limit the clock to one frequency from both sides, or set the power cap."""
    if knob.what == "clock":
        _limit(knob, number, number)
    else:
        _call(knob, lambda w, h: [w.amdsmi_set_power_cap(h, 0, number)])


def undo(knob: Knob) -> None:
    """Restore the previous limits and performance level, or the previous power cap."""
    before = knob.before
    if knob.what == "power":
        put(knob, before["cap_uw"])
        return
    _limit(knob, before["min_mhz"], before["max_mhz"])
    _call(knob, lambda w, h: [w.amdsmi_set_gpu_perf_level(h, before["level"])])


def _limit(knob: Knob, least_mhz: int, most_mhz: int) -> None:
    """Set both limits; the lower one first out of the way, so that they never cross."""

    def calls(w: Any, h: Any) -> list[int]:
        sys = w.AMDSMI_CLK_TYPE_SYS
        return [
            w.amdsmi_set_gpu_clk_limit(h, sys, limit, mhz)
            for limit, mhz in (
                (w.CLK_LIMIT_MIN, knob.allowed[0]),
                (w.CLK_LIMIT_MAX, most_mhz),
                (w.CLK_LIMIT_MIN, least_mhz),
            )
        ]

    _call(knob, calls)


def _call(knob: Knob, calls: Callable[[Any, Any], list[int]]) -> None:
    with session() as wrapper:
        names = [
            device.handle
            for device in devices(wrapper)
            if knob.target in (device.pci_address, str(device.index))
        ]
        if not names:
            raise refused(knob, "the device is no longer there", permission=False)
        for code in calls(wrapper, names[0]):
            if code:
                reason = ERRORS.explain(code)[1]
                raise refused(knob, reason, permission=code == _NO_PERMISSION)
