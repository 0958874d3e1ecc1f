"""Shares of devices' peak rates that well-shaped work reaches, listed in ``achievable.json``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from chopper.hardware.devices import DevicePeaks


class Reach(msgspec.Struct, kw_only=True, frozen=True):
    """Share of a device's peak rates that well-shaped work reaches."""

    products: float
    """Share of FLOP/s, by matrix products."""
    memory: float
    """Share of the memory's bandwidth."""
    source: str


@cache
def _table() -> dict[str, dict[str, Reach]]:
    data = msgspec.json.decode(files("chopper").joinpath("data", "achievable.json").read_bytes())
    return {
        part: {name: msgspec.convert(value, Reach) for name, value in data[part].items()}
        for part in ("devices", "vendors")
    }


def of(device: DevicePeaks) -> Reach:
    """Look a device of the table up; a device that is not listed has its vendor's reach."""
    table = _table()
    return table["devices"].get(device.id) or table["vendors"][device.vendor]
