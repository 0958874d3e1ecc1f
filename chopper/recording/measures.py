"""Numbers that the program measured itself, kept in the manifest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from chopper.storage import manifest as m

if TYPE_CHECKING:
    from chopper.storage.parts import RunWriter

_MAX_MEASURES = 10_000


def finite_number(value: Any) -> float | int | None:
    """Return a value as the number that a manifest can hold; None when it is no finite number."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several values
        return None
    return number if math.isfinite(number) else None


def _label(value: Any) -> str | int | float:
    """Return a label as a manifest can hold it: anything but a finite number as text."""
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    number = finite_number(value)
    return str(value) if number is None else number


def keep_measure(
    part: RunWriter, name: str, value: float, labels: dict[str, str | int | float]
) -> None:
    """Keep a number with its labels, or note why it is dropped."""
    number = finite_number(value)
    measures = part.manifest.measures
    if number is not None and len(measures) < _MAX_MEASURES:
        texts = {str(key): _label(label) for key, label in labels.items()}
        measures.append(m.Measure(name=str(name), value=number, labels=texts))
        return
    why = "is not a number" if number is None else f"is past the {_MAX_MEASURES}th"
    part.note("measures.dropped", f"measure {name!r} {why}: not kept, nor others like it")
