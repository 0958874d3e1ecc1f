"""The dated list of prices that comes with the program, and lists of one's own."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chopper.errors import JSON_ERRORS, InputError
from chopper.storage.files import read_bytes

if TYPE_CHECKING:
    from chopper.analyzers.estimates.cost import Prices


def load(path: Path | None = None) -> Prices:
    """The list in a file, None for the one that comes with the program.

    Raises:
        InputError: it cannot be read, a field is missing, unknown or wrong, or a price is not positive.
    """
    from chopper.analyzers.estimates.cost import Prices

    where = "prices.json" if path is None else str(path)
    try:
        data = (
            files("chopper").joinpath("data", "prices.json").read_bytes()
            if path is None
            else read_bytes(path)
        )
        found = msgspec.json.decode(data, type=Prices)
    except OSError as exc:
        raise InputError(f"{where}: cannot be read ({exc.strerror})") from exc
    except JSON_ERRORS as exc:
        raise InputError(f"{where}: {exc}; expected the fields of chopper.prices/1") from exc
    if found.schema != "chopper.prices/1":
        raise InputError(f"{where}: has schema {found.schema!r}, expected 'chopper.prices/1'")
    wrong = [name for name, price in found.devices.items() if not price.value > 0]
    if wrong:
        raise InputError(f"{where}: price of {wrong[0]} is not above zero")
    return found
