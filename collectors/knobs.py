"""Clocks and power caps that can be set: what a device allows, how it was, and how to go back.

Each vendor's driver lists its knobs, sets one, and undoes that from the recorded state alone, so
that another process can do it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from chopper.errors import ChopperError, CollectorUnavailable

What = Literal["clock", "power", "host"]
_POLICIES = "devices/system/cpu/cpufreq"
_NVML_NO_PERMISSION, _AMDSMI_NO_PERMISSION = 4, 10
_LOCK_UNKNOWN = (
    "NVML does not tell whether clocks were locked before: an earlier lock is gone afterwards"
)


class SettingRefused(ChopperError):
    """A clock or power cap cannot be set; the message says what would allow it."""


class Knob(msgspec.Struct, kw_only=True, frozen=True):
    """A clock or power cap of one device."""

    vendor: Literal["nvml", "amdsmi", "cpufreq"]
    what: Literal["clock", "power"]
    target: str
    """By which the vendor's driver finds the device again."""
    label: str
    unit: Literal["Hz", "W"]
    scale: float
    """Of ``unit`` per number that the driver takes."""
    allowed: tuple[int, ...]
    """Ascending, as the driver counts; where it takes any number, the least and the most."""
    continuous: bool = True
    before: dict[str, int]
    """State before anything was set, with which `Driver.undo` goes back."""
    note: str = ""
    """What of that state the driver does not tell."""

    def nearest(self, value: float) -> int | None:
        """Return the allowed number nearest to a value in ``unit``; None beyond the range."""
        number = value / self.scale
        rounding = 1e-6 * self.allowed[-1]
        if not self.allowed[0] - rounding <= number <= self.allowed[-1] + rounding:
            return None
        if self.continuous:
            return min(max(round(number), self.allowed[0]), self.allowed[-1])
        return min(self.allowed, key=lambda one: abs(one - number))


class Driver(Protocol):
    """What can be set through one vendor's driver."""

    def knobs(self, what: What, root: str) -> list[Knob]:
        """Return the knobs of the devices that this process sees.

        Raises:
            CollectorUnavailable: there are none, or the driver cannot be asked.
        """
        ...

    def put(self, knob: Knob, number: int) -> None:
        """Set a knob; SettingRefused where the driver does not let it."""
        ...

    def undo(self, knob: Knob) -> None:
        """Restore the previous setting; raise SettingRefused if the driver rejects it."""
        ...


def driver(vendor: str) -> Driver:
    """Return what sets the knobs of a vendor's devices."""
    drivers: dict[str, Driver] = {"nvml": _Nvml(), "amdsmi": _Amdsmi(), "cpufreq": _Cpufreq()}
    return drivers[vendor]


def _refused(knob: Knob, reason: str, *, permission: bool) -> SettingRefused:
    if permission:
        return SettingRefused(
            f"{knob.label}: no permission to set it; run as root (sudo), or have the administrator "
            "allow it"
        )
    return SettingRefused(f"{knob.label}: cannot be set ({reason})")


def _ends(knob: Knob, least: int, most: int) -> Iterator[tuple[str, int]]:
    """Yield both limits; the lower one first out of the way, so that they never cross."""
    yield from (("min", knob.allowed[0]), ("max", most), ("min", least))


class _Nvml:
    """Locked clocks and power limits of NVIDIA's devices."""

    def knobs(self, what: What, root: str) -> list[Knob]:  # noqa: ARG002 - as every driver's
        from chopper.collectors.nvml import ERRORS, binding, devices, session

        pynvml = binding()
        with session():
            try:
                return [self._knob(pynvml, device, what) for device in devices()]
            except pynvml.NVMLError as exc:
                what_is = "supported clocks" if what == "clock" else "power limits"
                raise CollectorUnavailable(
                    f"NVML: the {what_is} cannot be read ({ERRORS.explain(exc.value)[1]})"
                ) from exc

    def _knob(self, pynvml: Any, device: Any, what: What) -> Knob:
        handle, named = device.handle, f"device {device.index} ({device.name or 'unknown'})"
        target = device.uuid or str(device.index)
        if what == "clock":
            memory_mhz = max(pynvml.nvmlDeviceGetSupportedMemoryClocks(handle))
            clocks_mhz = {*pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz)}
            return Knob(
                vendor="nvml",
                what="clock",
                target=target,
                label=f"{named}, SM clock",
                unit="Hz",
                scale=1e6,
                allowed=tuple(sorted(clocks_mhz)),
                continuous=False,
                before={},
                note=_LOCK_UNKNOWN,
            )
        return Knob(
            vendor="nvml",
            what="power",
            target=target,
            label=f"{named}, power limit",
            unit="W",
            scale=1e-3,
            allowed=tuple(pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)),
            before={"limit_mw": pynvml.nvmlDeviceGetPowerManagementLimit(handle)},
        )

    def put(self, knob: Knob, number: int) -> None:
        if knob.what == "clock":
            self._call(knob, "nvmlDeviceSetGpuLockedClocks", number, number)
        else:
            self._call(knob, "nvmlDeviceSetPowerManagementLimit", number)

    def undo(self, knob: Knob) -> None:
        if knob.what == "clock":
            self._call(knob, "nvmlDeviceResetGpuLockedClocks")
        else:
            self.put(knob, knob.before["limit_mw"])

    def _call(self, knob: Knob, name: str, *numbers: int) -> None:
        from chopper.collectors.nvml import ERRORS, binding, session

        pynvml = binding()
        with session():
            try:
                if knob.target.isdigit():
                    handle = pynvml.nvmlDeviceGetHandleByIndex(int(knob.target))
                else:
                    handle = pynvml.nvmlDeviceGetHandleByUUID(knob.target)
                getattr(pynvml, name)(handle, *numbers)
            except pynvml.NVMLError as exc:
                reason, denied = ERRORS.explain(exc.value)[1], exc.value == _NVML_NO_PERMISSION
                raise _refused(knob, reason, permission=denied) from exc


class _Amdsmi:
    """Clock limits and power caps of AMD's devices."""

    def knobs(self, what: What, root: str) -> list[Knob]:  # noqa: ARG002 - as every driver's
        from chopper.collectors.amd import devices, session

        with session() as wrapper:
            return [self._knob(wrapper, device, what) for device in devices(wrapper)]

    def _knob(self, wrapper: Any, device: Any, what: What) -> Knob:
        named, target = f"device {device.index}", device.pci_address or str(device.index)
        if what == "clock":
            clock, level = wrapper.amdsmi_clk_info_t(), ctypes.c_uint32()
            self._read(wrapper.amdsmi_get_clock_info, device, wrapper.AMDSMI_CLK_TYPE_SYS, clock)
            self._read(wrapper.amdsmi_get_gpu_perf_level, device, level)
            return Knob(
                vendor="amdsmi",
                what="clock",
                target=target,
                label=f"{named}, clock",
                unit="Hz",
                scale=1e6,
                allowed=(clock.min_clk, clock.max_clk),
                before={"min_mhz": clock.min_clk, "max_mhz": clock.max_clk, "level": level.value},
            )
        cap = wrapper.amdsmi_power_cap_info_t()
        self._read(wrapper.amdsmi_get_power_cap_info, device, ctypes.c_uint32(0), cap)
        return Knob(
            vendor="amdsmi",
            what="power",
            target=target,
            label=f"{named}, power cap",
            unit="W",
            scale=1e-6,
            allowed=(cap.min_power_cap, cap.max_power_cap),
            before={"cap_uw": cap.power_cap},
        )

    def _read(self, function: Callable[..., int], device: Any, *arguments: Any) -> None:
        from chopper.collectors.amd import ERRORS

        *numbers, out = arguments
        if code := function(device.handle, *numbers, ctypes.byref(out)):
            raise CollectorUnavailable(
                f"amdsmi: device {device.index}: its limits cannot be read "
                f"({ERRORS.explain(code)[1]})"
            )

    def put(self, knob: Knob, number: int) -> None:
        if knob.what == "clock":
            self._limit(knob, number, number)
        else:
            self._call(knob, "amdsmi_set_power_cap", (0, number))

    def undo(self, knob: Knob) -> None:
        before = knob.before
        if knob.what == "power":
            self.put(knob, before["cap_uw"])
            return
        self._limit(knob, before["min_mhz"], before["max_mhz"])
        self._call(knob, "amdsmi_set_gpu_perf_level", (before["level"],))

    def _limit(self, knob: Knob, least_mhz: int, most_mhz: int) -> None:
        from chopper.collectors.amd import load

        wrapper = load()
        which = {"min": wrapper.CLK_LIMIT_MIN, "max": wrapper.CLK_LIMIT_MAX}
        ends = [
            (wrapper.AMDSMI_CLK_TYPE_SYS, which[end], mhz)
            for end, mhz in _ends(knob, least_mhz, most_mhz)
        ]
        self._call(knob, "amdsmi_set_gpu_clk_limit", *ends)

    def _call(self, knob: Knob, name: str, *calls: tuple[int, ...]) -> None:
        from chopper.collectors.amd import ERRORS, devices, session

        with session() as wrapper:
            handles = [
                device.handle
                for device in devices(wrapper)
                if knob.target in (device.pci_address, str(device.index))
            ]
            if not handles:
                raise _refused(knob, "the device is no longer there", permission=False)
            # All of them: a limit that cannot be set back keeps no other from it.
            codes = [getattr(wrapper, name)(handles[0], *numbers) for numbers in calls]
            for code in filter(None, codes):
                reason, denied = ERRORS.explain(code)[1], code == _AMDSMI_NO_PERMISSION
                raise _refused(knob, reason, permission=denied)


class _Cpufreq:
    """Clock limits of the host's cores; a policy is the cores that share a clock."""

    def knobs(self, what: What, root: str) -> list[Knob]:  # noqa: ARG002 - as every driver's
        folder = Path(root) / _POLICIES
        policies = sorted(folder.glob("policy[0-9]*"), key=lambda path: int(path.name[6:]))
        if not policies:
            raise CollectorUnavailable(
                f"{folder}: no cpufreq policy; this kernel, or the virtual machine's host, does "
                "not let clocks be set"
            )
        return [self._knob(policy) for policy in policies]

    def _knob(self, policy: Path) -> Knob:
        least_khz, most_khz = (self._khz(policy / f"cpuinfo_{e}_freq") for e in ("min", "max"))
        return Knob(
            vendor="cpufreq",
            what="clock",
            target=str(policy),
            label=f"{policy.name}, core clock",
            unit="Hz",
            scale=1e3,
            allowed=(least_khz, most_khz),
            before={f"{e}_khz": self._khz(policy / f"scaling_{e}_freq") for e in ("min", "max")},
        )

    def _khz(self, file: Path) -> int:
        try:
            return int(file.read_text())
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it holds no number"
            raise CollectorUnavailable(f"{file}: cannot be read ({reason})") from exc

    def put(self, knob: Knob, number: int) -> None:
        self._limit(knob, number, number)

    def undo(self, knob: Knob) -> None:
        self._limit(knob, knob.before["min_khz"], knob.before["max_khz"])

    def _limit(self, knob: Knob, least_khz: int, most_khz: int) -> None:
        for end, khz in _ends(knob, least_khz, most_khz):
            try:
                (Path(knob.target) / f"scaling_{end}_freq").write_text(str(khz))
            except OSError as exc:
                denied = isinstance(exc, PermissionError)
                raise _refused(knob, exc.strerror or str(exc), permission=denied) from exc
