"""Numbers, times, ids and texts of a trace, from what it wrote.

Time: ``ts`` and ``dur`` are microseconds with up to three decimals (integers until 2024). They
become integer nanoseconds before anything is added to them: float64 holds the sum with
``baseTimeNanoseconds`` only to 256 ns.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE
from chopper.collectors.formats.cleaning import LAST_NS, clean, integer
from chopper.collectors.formats.kineto._events import (
    NOTHING,
    Event,
    Header,
    Number,
)
from chopper.errors import JSON_ERRORS

EXACT_FLOAT_US = float(1 << 43)
"""Above this a float64 of microseconds no longer tells nanoseconds apart."""

_NUMBERED = re.compile(r"\s*(?:stream\s*)?(-?\d+)\s*", re.IGNORECASE)

RELATIVE_NS_THRESHOLD = 1e14
"""With a base, ``ts`` counts from it, less than a few months (8e12 µs); more is nanoseconds."""
ABSOLUTE_NS_THRESHOLD = 9.2e15
"""Without a base, ``ts`` may be Unix microseconds (1.8e15); more is nanoseconds."""


class Ids(dict[Any, int]):
    """Process and thread ids as integers; ``stream 7`` is 7, other words get negative numbers.

    Merge tools write ``rank0_4711`` for what was 4711: such words stay apart from each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[int, str] = {}

    def __call__(self, value: Number) -> int:
        return self[value]

    def __missing__(self, value: Any) -> int:
        if isinstance(value, bool) or value is None:
            number = -1
        elif isinstance(value, int):
            # An unsigned 64-bit id keeps its bits.
            number = value - 2**64 if 2**63 <= value < 2**64 else value
            if not NO_VALUE < number < 2**63:
                number = -1
        elif isinstance(value, float):
            number = int(value) if value == value and abs(value) < 2**62 else -1
        else:
            match = _NUMBERED.fullmatch(value)
            if match and len(value) < 30 and abs(int(match.group(1))) < 2**63:
                number = int(match.group(1))
            else:
                number = -1_000_000 + len(self.labels)
                self.labels[number] = str(value)
        self[value] = number
        return number


def base_of(header: Header) -> int | None:
    """Return what is to be added to every recorded time, in ns; None when it is not recorded."""
    base_ns = integer(header.baseTimeNanoseconds)
    return base_ns if base_ns is not None and 0 < base_ns < LAST_NS else None


def threshold_of(header: Header) -> float:
    """A recorded ``ts`` of at least this can only be nanoseconds."""
    return ABSOLUTE_NS_THRESHOLD if base_of(header) is None else RELATIVE_NS_THRESHOLD


Names = dict[tuple[int, int | None, str], str]
"""(pid, tid or None, "process_name" | "thread_name") → name."""


def note_name(names: Names, ids: Ids, event: Event) -> None:
    """Note what a metadata event calls a process or thread, if it does."""
    if event.name not in ("process_name", "thread_name"):
        return
    if event.args is None or event.args.name is NOTHING:
        return
    try:
        text = clean(str(msgspec.json.decode(event.args.name)))
    except JSON_ERRORS:
        return
    tid = None if event.name == "process_name" else ids[event.tid]
    names[ids[event.pid], tid, str(event.name)] = text


def ints(values: list[Any]) -> np.ndarray:
    """Recorded integers; strings are parsed, what is no number becomes ``NO_VALUE``."""
    whole = np.array([NO_VALUE if v is None else v for v in values])
    if whole.dtype != np.int64:
        parsed = (integer(v) for v in values)
        whole = np.array([NO_VALUE if v is None else v for v in parsed], dtype=np.int64)
    return whole


def no_ints(count: int) -> np.ndarray:
    return np.full(count, NO_VALUE, dtype=np.int64)


def _exact_thousandths(text: str) -> int | None:
    """A decimal number times 1000, rounded half up, from its digits."""
    text = text.strip()
    if "_" in text:
        return None
    head, dot, tail = text.partition(".")
    try:
        if dot and tail.isdigit():
            fraction = int((tail + "0000")[:4])
            sign = -1 if head.startswith("-") else 1
            return int(head) * 1000 + sign * ((fraction + 5) // 10)
        if not dot and "e" not in text and "E" not in text:
            return int(text) * 1000
        value = Decimal(text)
        return round(value * 1000) if value.adjusted() < 20 else None
    except (ValueError, ArithmeticError):
        return None


def _thousandths(value: Any, stamp: msgspec.Raw | None) -> int | None:
    """A recorded number times 1000, without loss; None for what is no number of 64 bits."""
    if stamp is not None:
        exact = _exact_thousandths(bytes(stamp).decode("ascii", "replace").strip('"'))
    elif isinstance(value, str):
        exact = _exact_thousandths(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        exact = value * 1000
    elif isinstance(value, float) and math.isfinite(value):
        whole = math.floor(value)
        exact = whole * 1000 + round((value - whole) * 1000)
    else:
        exact = None
    return exact if exact is not None and abs(exact) < 1000 << 63 else None


def _as_array(values: list[Any]) -> np.ndarray | None:
    """The values as int64 or float64 when they all are numbers of that kind, else None.

    Floats are refused where float64 no longer tells thousandths apart.
    """
    try:
        array = np.array(values)
    except (TypeError, ValueError, OverflowError):
        return None
    if array.dtype == np.int64:
        return array
    if array.dtype != np.float64 or not len(array):
        return None
    if not np.isfinite(array).all() or np.abs(array).max() > EXACT_FLOAT_US:
        return None
    return array


def to_ns(
    values: list[Any], stamps: list[msgspec.Raw] | None, unit: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Recorded times → (integer ns, usable, recorded in ns); what is not usable is 0.

    The whole and the fractional part are converted apart, so that no digit is lost.

    Args:
        values: as decoded.
        stamps: their digits, where float64 may have lost some.
        unit: values from this magnitude on are nanoseconds, all others microseconds; or a mask
            that says which are nanoseconds.
    """
    array = None if stamps is not None else _as_array(values)
    if array is not None and array.dtype == np.int64:
        magnitude = np.abs(array)
        in_ns = magnitude >= unit if isinstance(unit, float) else unit
        # The one value without a positive counterpart has a negative magnitude.
        ok = (magnitude >= 0) & (in_ns | (magnitude < (1 << 63) // 1000))
        return np.where(ok, np.where(in_ns, array, np.where(ok, array, 0) * 1000), 0), ok, in_ns
    if array is not None and not (
        (np.abs(array).max() >= unit) if isinstance(unit, float) else unit.any()
    ):
        whole = np.floor(array)
        ns = whole.astype(np.int64) * 1000 + np.rint((array - whole) * 1000).astype(np.int64)
        return ns, np.ones(len(ns), dtype=bool), np.zeros(len(ns), dtype=bool)
    time_ns = np.zeros(len(values), dtype=np.int64)
    ok = np.zeros(len(values), dtype=bool)
    in_ns = np.zeros(len(values), dtype=bool) if isinstance(unit, float) else unit
    for i, value in enumerate(values):
        exact = _thousandths(value, None if stamps is None else stamps[i])
        if exact is None:
            continue
        if isinstance(unit, float):
            in_ns[i] = abs(exact) >= unit * 1000
        if in_ns[i]:
            exact //= 1000
        if abs(exact) < 1 << 63:
            time_ns[i], ok[i] = exact, True
    return time_ns, ok, in_ns


def text_of(value: Any) -> str | None:
    """A recorded JSON value as text; strings without their quotes."""
    if isinstance(value, msgspec.Raw):
        value = bytes(value) or None
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        if text == "null":
            return None
        if text.startswith('"'):
            try:
                return clean(str(msgspec.json.decode(text)))
            except JSON_ERRORS:
                return text
        return text
    return None if value is None else clean(str(value))
