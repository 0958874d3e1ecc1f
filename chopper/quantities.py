"""Numbers with units as people write them: ``80GB``, ``400Gb/s``, ``8K``, ``90d``, ``4.5us``.

Each reader returns a plain number in the unit of its name. What is not a number, not positive, of
another unit, or too large or small for what is computed from it, is a `UsageError` of one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from chopper.errors import UsageError

_LEAST, _MOST = 1e-15, 1e60
"""In the unit that is read; beyond, products and quotients of several leave a float's range."""
_NUMBER = re.compile(
    r"\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?:\s*([^\s\d._]\S*))?\s*", re.ASCII
)
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = {**_DECIMAL, "K": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, **_BINARY}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "days": 86400.0,
    "y": 365.25 * 86400.0,
}

MAX_INT = 2**63 - 1
"""What a column of 64 bits holds; larger counts and sizes are refused."""


_MOST_INTEGERS = 1_000_000


def digits(text: str) -> int | None:
    """The number that a text writes in ASCII digits; None for other texts and beyond 18 digits.

    ``str.isdigit`` holds for ``²``, of which ``int`` fails, as it does of thousands of digits.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def size_bytes(text: str, name: str = "size") -> int:
    """``80GB``, ``16GiB``, ``512MB``, ``4096B``; ``80`` is refused: bytes or gigabytes?"""
    units = {p + b: f for p, f in _PREFIXES.items() for b in ("B", "") if p + b} | {"b": 1}
    return whole(
        _read(text, units, name, "a size such as 80GB or 512MiB", "{0}GB or {0}GiB?"), name
    )


def rate_bytes_per_s(text: str, name: str = "rate") -> float:
    """``50GB/s``, ``400Gb/s`` (bits), ``10Gbit/s``; ``400G`` is refused: bits or bytes?"""
    units: dict[str, float] = {}
    for prefix, factor in _PREFIXES.items():
        units |= dict.fromkeys((f"{prefix}B/s", f"{prefix}Bps"), float(factor))
        units |= dict.fromkeys(
            (f"{prefix}b/s", f"{prefix}bps", f"{prefix}bit/s", f"{prefix}bit"), factor / 8
        )
    return _read(text, units, name, "a rate such as 50GB/s or 400Gb/s")


def seconds(text: str, name: str = "time") -> float:
    """``4.5us``, ``90d``, ``2h``; ``90`` is refused: days to one reader, seconds to another."""
    return _read(text, _SECONDS, name, "a time such as 90d, 4.5us or 30ms")


def power_w(text: str, name: str = "power") -> float:
    """``700W``, ``0.7kW``; ``700`` is refused."""
    units = {f"{prefix}{w}": f for prefix, f in _DECIMAL.items() for w in "Ww"}
    return _read(text, units, name, "a power such as 700W", "{0}W or {0}kW?")


def flop_per_s(text: str, name: str = "peak") -> float:
    """``989TFLOP/s``, ``989T`` or ``989e12``; ``989`` is refused."""
    names = ("", "FLOP/s", "FLOPS", "FLOPs", "flops")
    units = {prefix + unit: f for prefix, f in _DECIMAL.items() for unit in names}
    value = _read(text, units, name, "a rate such as 989TFLOP/s or 989e12")
    if value < 10**6:
        raise UsageError(
            f"{name} {text!r}: less than 1 MFLOP/s; expected a rate such as 989TFLOP/s"
        )
    return value


def frequency_hz(text: str, name: str = "frequency") -> float:
    """``1980MHz``, ``1.4GHz``."""
    units: dict[str, float] = {f"{p}{hz}": f for p, f in _DECIMAL.items() for hz in ("Hz", "hz")}
    units |= {"mhz": 1e6, "ghz": 1e9}
    return _read(text, units, name, "a frequency such as 1980MHz")


def count(text: str, name: str = "count") -> int:
    """``8192``, ``8K`` (8000), ``70B``, ``1e9``: whole and positive."""
    units = {s: f for u, f in _COUNTS.items() for s in (u, u.upper())}
    value = _read(text, units, name, "a whole number such as 8192 or 70B")
    if value != int(value):
        raise UsageError(f"{name} {text!r}: is not whole; expected a number such as 8192")
    return whole(value, name)


def integers(text: str, name: str = "numbers") -> list[int]:
    """Read whole numbers and ranges of them: ``3,17,100-107``.

    Raises:
        UsageError: it is no such list.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = digits(first), digits(last if dash else first)
        if low is None or high is None or not low <= high < low + _MOST_INTEGERS:
            raise UsageError(f"{name} {text!r}: not a list of whole numbers; write 3,17,100-107")
        numbers += range(low, high + 1)
    return numbers


def number(text: str, name: str = "number") -> float:
    """A positive number: ``1e28``, ``0.05``."""
    return _read(text, {"": 1.0}, name, "a positive number such as 0.5 or 1e28")


def whole(value: float, name: str) -> int:
    """A number that 64 bits can count, made whole."""
    if value > MAX_INT:
        raise UsageError(f"{name}: {value:.3g} exceeds 64 bits; specify less")
    return int(value)


def positive(value: float, name: str) -> None:
    """Refuse a value that is not a positive finite number."""
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name}: found {value:g}, expected more than zero")


def between(value: float, least: float, most: float, name: str) -> None:
    """Refuse a value outside of the range of the formulas, where a result would be nonsense."""
    positive(value, name)
    if not least <= value <= most:
        raise UsageError(f"{name}: found {value:g}, expected {least:g} to {most:g}")


def _read(
    text: str, units: Mapping[str, float], name: str, example: str, without_unit: str = ""
) -> float:
    """Read a number in one of the units; ``without_unit`` asks which, with the number as {0}."""
    match = _NUMBER.fullmatch(text)
    unit = (match and match[2]) or ""
    value = float(match[1].replace("_", "")) if match else 0.0
    size = value * units.get(unit, 1.0)
    if match is None:
        wrong = f"is not a number; expected {example}"
    elif unit not in units:
        expected = (
            without_unit.format(match[1]) if without_unit and not unit else f"expected {example}"
        )
        wrong = f"{f'unit {unit!r}' if unit else 'no unit'}; {expected}"
    elif value <= 0:
        wrong = "expected more than zero"
    elif not _LEAST <= size <= _MOST:
        wrong = f"is too {'small' if size < _LEAST else 'large'}"
    else:
        return size
    raise UsageError(f"{name} {text!r}: {wrong}")


def one_of(kind: str, name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """The known name that was meant, whatever its case.

    Args:
        kind: what it names.
        name: as given.
        known: all names.
        otherwise: what to say where none is near; None to list them all.

    Raises:
        UsageError: there is none; the nearest names are suggested.
    """
    names = list(known)
    lowered = {n.lower(): n for n in names}
    wanted = name.strip().lower()
    if wanted in lowered:
        return lowered[wanted]
    begins = [n for n in lowered if wanted and n.startswith(wanted)]
    near = get_close_matches(wanted, lowered, n=3, cutoff=0.45)
    close = [lowered[n] for n in dict.fromkeys(begins + near)][:4]
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = otherwise or f"there are {', '.join(names)}"
    raise UsageError(f"no {kind} is called {name!r}; {hint}")
