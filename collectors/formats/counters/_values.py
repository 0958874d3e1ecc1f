"""Numbers as profilers print them: separators of thousands, scaled units, n/a."""

from __future__ import annotations

import math
import re

_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_SCALED = re.compile(
    r"([KMGTnum])((?:byte|second|s|inst|cycle|hz|Hz|request|sector|warp|thread)\b.*)$"
)
_SHORT = {"ns": ("second", 1e-9), "us": ("second", 1e-6), "ms": ("second", 1e-3)}
_ENGLISH = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_CONTINENTAL = re.compile(r"[+-]?\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?$|[+-]?\d{1,3}(?:\.\d{3})+,\d+$")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+$")
_ABSENT = frozenset(("", "n/a", "na", "nan", "none", "-", "no data", "(!) n/a"))


def is_absent(cell: str) -> bool:
    """Return whether a cell says that nothing was measured."""
    return cell.strip().lower() in _ABSENT


def measured(cell: str, unit: str) -> tuple[float | None, str | None]:
    """A value in its unit's base, and that base; None where there is no number.

    ``("12.5", "Kbyte")`` is ``(12500.0, "byte")``; ``("10,240", "")`` is ``(10240.0, None)``.
    """
    value = _number(cell)
    base, factor = _base(unit)
    return (None if value is None else value * factor), base


def _number(cell: str) -> float | None:
    text = cell.strip().replace("\u202f", "").replace("\u00a0", "")
    if _ENGLISH.match(text):
        text = text.replace(",", "")
    elif _CONTINENTAL.match(text):
        text = text.replace(".", "").replace(",", ".")
    elif _DECIMAL_COMMA.match(text):
        text = text.replace(",", ".")
    try:
        # Python reads 1_000, which no profiler writes.
        value = math.nan if "_" in text else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _base(unit: str) -> tuple[str | None, float]:
    unit = unit.strip()
    if unit in _SHORT:
        return _SHORT[unit]
    match = _SCALED.match(unit)
    if match:
        return match[2], _PREFIX[match[1]]
    return unit or None, 1.0
