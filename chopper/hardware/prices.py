"""The dated price list that ships with the program, and price lists of users."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

from chopper.storage.files import decode_document, read_bytes


class Priced(msgspec.Struct, kw_only=True, frozen=True):
    """A number with its source."""

    value: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
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
    return decode_document(
        data,
        Prices,
        "chopper.prices/1",
        f"{where}: is not a price list",
        remedy="give the fields that the built-in list has",
    )
