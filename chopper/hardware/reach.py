"""What well-shaped work reaches of a device's peaks: the list that comes with the program."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from chopper.analyzers.estimates.project import Reach
    from chopper.hardware.devices import DevicePeaks


@cache
def _table() -> dict[str, dict[str, Reach]]:
    from chopper.analyzers.estimates.project import Reach

    data = msgspec.json.decode(files("chopper").joinpath("data", "achievable.json").read_bytes())
    return {
        part: {name: msgspec.convert(value, Reach) for name, value in data[part].items()}
        for part in ("devices", "vendors")
    }


def of(device: DevicePeaks) -> Reach:
    """Of a device of the table; where it is not listed, of its vendor's, and the source says so."""
    table = _table()
    return table["devices"].get(device.id) or table["vendors"][device.vendor]
