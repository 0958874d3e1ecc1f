"""Parsers for the numbers, times, ids and texts of a trace.

Time: ``ts`` and ``dur`` are microseconds with up to three decimals (integers until 2024). They
become integer nanoseconds before anything is added to them: float64 holds the sum with
``baseTimeNanoseconds`` only to 256 ns.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE
from chopper.collectors.formats.cleaning import LAST_NS, clean, integer
from chopper.collectors.formats.kineto._events import NOTHING, Event, Header
from chopper.errors import JSON_ERRORS

_NUMBERED = re.compile(r"\s*(?:stream\s*)?(-?\d+)\s*", re.IGNORECASE | re.ASCII)


class Ids(dict[Any, int]):
    """Process and thread ids as integers; ``stream 7`` is 7, other words get negative numbers.

    Merge tools write ``rank0_4711`` for what was 4711: such words stay apart from each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[int, str] = {}

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
    """Return the offset of all recorded times, in ns; None if the trace does not have it."""
    base_ns = integer(header.baseTimeNanoseconds)
    return base_ns if base_ns is not None and 0 < base_ns < LAST_NS else None


def threshold_of(header: Header) -> float:
    """Return the magnitude from which a recorded ``ts`` can only be nanoseconds.

    Without a base it may be Unix microseconds (1.8e15); else it counts from the base, less than a
    few months (8e12 µs).
    """
    return 9.2e15 if base_of(header) is None else 1e14


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
    """Return recorded integers; strings are parsed, other values become ``NO_VALUE``."""
    numbers = np.array([NO_VALUE if v is None else v for v in values])
    if numbers.dtype != np.int64:
        parsed = (integer(v) for v in values)
        numbers = np.array([NO_VALUE if v is None else v for v in parsed], dtype=np.int64)
    return numbers


def unsigned(ids: np.ndarray) -> np.ndarray:
    """Correlation ids as recorders count them: those printed as negative have 32 or 64 bits."""
    negative = (ids < 0) & (ids != NO_VALUE)
    mask = np.where(ids < -(2**31), 2**63 - 1, 2**32 - 1)
    return np.where(negative, ids & mask, ids) if negative.any() else ids


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


_decode_numbers = msgspec.json.Decoder(list[int | float]).decode
_EXACT_FLOAT_US = float(1 << 43)
"""Above this a float64 of microseconds no longer tells nanoseconds apart."""


def _plain_ns(digits: list[msgspec.Raw], unit: float | np.ndarray) -> np.ndarray | None:
    """Return plain microseconds in ns, all at once; None where the digits of one must be read."""
    try:
        times = np.array(_decode_numbers(b"[%b]" % b",".join(digits)))
    except msgspec.MsgspecError:
        return None
    if len(times) != len(digits):  # one that is not there
        return None
    largest = float(np.abs(times.astype(np.float64)).max(initial=0))
    if largest >= unit if isinstance(unit, float) else unit.any():
        return None
    if largest >= (9.2e15 if times.dtype == np.int64 else _EXACT_FLOAT_US):
        return None
    whole_us = times.astype(np.int64)
    plain: np.ndarray = whole_us * 1000 + np.rint((times - whole_us) * 1000).astype(np.int64)
    return plain


def to_ns(
    digits: list[msgspec.Raw], unit: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (integer ns, usable, recorded in ns) of recorded times; unusable ones are 0.

    Args:
        digits: as they were written.
        unit: values from this magnitude on are nanoseconds, all others microseconds; or a mask
            that says which are nanoseconds.
    """
    plain = _plain_ns(digits, unit)
    if plain is not None:
        return plain, np.ones(len(digits), dtype=bool), np.zeros(len(digits), dtype=bool)
    time_ns = np.zeros(len(digits), dtype=np.int64)
    ok = np.zeros(len(digits), dtype=bool)
    in_ns = ok.copy() if isinstance(unit, float) else unit
    for i, written in enumerate(digits):
        exact = _exact_thousandths(bytes(written).decode("ascii", "replace").strip('"'))
        if exact is None or abs(exact) >= 1000 << 63:
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
