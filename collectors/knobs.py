"""Clocks and power caps that can be set: what a device allows, how it was, and how to go back.

Each vendor's file lists its knobs, sets one, and undoes that from the recorded state alone, so that
another process can do it.
"""

from __future__ import annotations

import importlib
from typing import Literal, Protocol, cast

import msgspec

from chopper.errors import ChopperError

What = Literal["clock", "power", "host"]
_MODULES = {
    "nvml": "chopper.collectors.nvml.knobs",
    "amdsmi": "chopper.collectors.amd.knobs",
    "cpufreq": "chopper.collectors.host.knobs",
}


class SettingRefused(ChopperError):
    """A clock or power cap cannot be set; the message says what would allow it."""


class Knob(msgspec.Struct, kw_only=True, frozen=True):
    """A clock or power cap of one device."""

    vendor: Literal["nvml", "amdsmi", "cpufreq"]
    what: Literal["clock", "power"]
    target: str
    """By which the vendor's file finds the device again."""
    label: str
    unit: Literal["Hz", "W"]
    scale: float
    """Of ``unit`` per number that the driver takes."""
    allowed: tuple[int, ...]
    """Ascending, as the driver counts; where it takes any number, the least and the most."""
    continuous: bool
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
    """The functions that a vendor's file offers."""

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
    """Return the functions of a vendor's file."""
    return cast("Driver", importlib.import_module(_MODULES[vendor]))


def refused(knob: Knob, reason: str, *, permission: bool) -> SettingRefused:
    """Return the error of a setting that a driver refused."""
    if permission:
        return SettingRefused(
            f"{knob.label}: no permission to set it; run as root (sudo), or have the administrator "
            "allow it"
        )
    return SettingRefused(f"{knob.label}: cannot be set ({reason})")
