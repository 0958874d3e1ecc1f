"""The dated list of prices that comes with the program, and lists of one's own."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import msgspec

from chopper.errors import JSON_ERRORS, InputError
from chopper.storage.files import read_bytes


class Priced(msgspec.Struct, kw_only=True, frozen=True):
    """A number with its source."""

    value: float
    source: str


class Prices(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A dated list of prices, all in one currency."""

    schema: str = "chopper.prices/1"
    date: str
    currency: str
    electricity_per_kwh: Priced
    pue_ratio: Priced
    devices: dict[str, Priced] = {}
    """Device id → price of one device for one hour."""


def load(path: Path | None = None) -> Prices:
    """Read a price list from a file, or, for None, the built-in one.

    Raises:
        InputError: it cannot be read, or a field is missing, unknown or wrong.
    """
    where = "prices.json" if path is None else str(path)
    shipped = files("chopper").joinpath("data", "prices.json")
    data = shipped.read_bytes() if path is None else read_bytes(path)
    try:
        found = msgspec.json.decode(data, type=Prices)
    except JSON_ERRORS as exc:
        raise InputError(f"{where}: {exc}; expected the fields of chopper.prices/1") from exc
    if found.schema != "chopper.prices/1":
        raise InputError(f"{where}: has schema {found.schema!r}, expected 'chopper.prices/1'")
    wrong = [name for name, price in found.devices.items() if not price.value > 0]
    if wrong:
        raise InputError(f"{where}: price of {wrong[0]} is not above zero")
    return found
