"""The gate of ``chopper compare``: when is B too much slower than A?

    step>+5%
    step>+5% or idle.preparation.data>+1ms or communication>+10%

An expression is one or several conditions joined by ``or``: a quantity (``step``, ``median``,
``untraced`` or the id of a cause), ``>`` or ``<``, and a limit of its change from A to B, in
percent of A's value or as a time in ns, us, ms or s. A condition is met when the whole 95 %
interval of the change lies beyond the limit, so that noise does not fail a gate.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from chopper import wording as fmt
from chopper.analyzers.compare.result import signed, signed_duration
from chopper.causes import CAUSES
from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.analyzers.compare.result import Change, Comparison, Total

_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_SIGN = re.compile(r"[<>]")
_NUMBER = re.compile(r"[+\-−]?(\d+(\.\d*)?|\.\d+)")
_UNIT = re.compile(r"%|ns|us|µs|ms|s(?![A-Za-z])")
_OR = re.compile(r"or(?![A-Za-z0-9_.])")
_TOTALS = ("step", "median", "untraced")
_LONGEST = 10_000
_LARGEST = 1e18
"""Largest limit, in ns (30 years) or as a ratio: a larger one could never be exceeded."""

Outcome = Literal["beyond", "within", "undecided"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a gate.

    Attributes:
        quantity: ``step``, ``median``, ``untraced`` or a cause.
        sign: ``>`` or ``<``.
        limit: a ratio of A's value, or nanoseconds.
        relative: whether it is a ratio.
        text: as it was written.
    """

    quantity: str
    sign: Literal["<", ">"]
    limit: float
    relative: bool
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of one condition."""

    condition: Condition
    outcome: Outcome
    reason: str
    """Measured change and interval, in words."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a gate."""

    failed: bool
    decisions: tuple[Decision, ...]
    refused: str | None
    """Why nothing was decided: the runs do not do the same work. The gate has failed then."""

    def to_dict(self) -> dict[str, Any]:
        """The gate's part of the JSON form."""
        return {
            "failed": self.failed,
            "refused": self.refused,
            "conditions": [
                {**asdict(d.condition), "outcome": d.outcome, "reason": d.reason}
                for d in self.decisions
            ],
        }


class _Reader:
    """Reads an expression from left to right and knows where it is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def take(self, pattern: re.Pattern[str], expected: str) -> str:
        """Return the text that matches here.

        Raises:
            UsageError: nothing does.
        """
        found = self.maybe(pattern)
        if found is None:
            raise self.error(f"expected {expected}")
        return found

    def maybe(self, pattern: re.Pattern[str]) -> str | None:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def more(self) -> bool:
        """True when anything but space follows."""
        self.skip()
        return self.at < len(self.text)

    def skip(self) -> None:
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at

    def error(self, expected: str, at: int | None = None) -> UsageError:
        at = self.at if at is None else at
        found = repr(self.text[at : at + 20]) if at < len(self.text) else "its end"
        return UsageError(
            f"--fail-on: at character {at + 1} of {self.text[:200]!r}: {expected}, found {found}"
        )


def parse(text: str) -> tuple[Condition, ...]:
    """The conditions of an expression.

    Raises:
        UsageError: it is not one; the message names the place.
    """
    if len(text) > _LONGEST:
        raise UsageError(f"--fail-on: longer than {_LONGEST} characters")
    reader = _Reader(text)
    conditions = [_condition(reader)]
    while reader.more():
        reader.take(_OR, "'or' or the end")
        conditions.append(_condition(reader))
    return tuple(conditions)


def _condition(reader: _Reader) -> Condition:
    reader.skip()
    start = reader.at
    quantity = reader.take(_NAME, "step, median, untraced or the id of a cause")
    if quantity not in _TOTALS and quantity not in CAUSES:
        from difflib import get_close_matches

        close = get_close_matches(quantity, [*CAUSES, *_TOTALS], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise reader.error(f"expected step, median, untraced or the id of a cause{hint}", start)
    sign = reader.take(_SIGN, "> or <")
    reader.skip()
    number_at = reader.at
    value = float(reader.take(_NUMBER, "a number").replace("−", "-"))
    unit = reader.maybe(_UNIT)
    if unit is None and value:
        raise reader.error("expected a unit: %, ns, us, ms or s")
    relative = unit == "%"
    limit = value / 100 if relative else value * _UNITS_NS[unit or "ns"]
    if not abs(value if relative else limit) <= _LARGEST:
        raise reader.error("expected a limit of at most 1e18 ns or 1e18 %", number_at)
    text = reader.text[start : reader.at]
    return Condition(quantity, ">" if sign == ">" else "<", limit, relative, text)


def decide(
    comparison: Comparison, conditions: tuple[Condition, ...], *, point: bool = False
) -> Verdict:
    """Judge a comparison.

    Args:
        comparison: what was found.
        conditions: from :func:`parse`; the gate fails when one of them is met.
        point: by the difference itself, whatever its interval says.
    """
    if comparison.refused:
        said = ", ".join(c.label for c in comparison.refused)
        return Verdict(True, (), f"A and B do not do the same work ({said})")
    decisions = tuple(_decide(comparison, c, point=point) for c in conditions)
    return Verdict(any(d.outcome == "beyond" for d in decisions), decisions, None)


def _quantity(comparison: Comparison, name: str) -> Change | Total | None:
    if name in _TOTALS:
        total: Total | None = getattr(comparison, name)
        return total
    return next((c for c in comparison.changes if c.id == name), None)


def _decide(comparison: Comparison, condition: Condition, *, point: bool) -> Decision:
    found = _quantity(comparison, condition.quantity)
    if found is None and condition.quantity == "untraced":
        return Decision(
            condition,
            "undecided",
            "a run has fewer than three steps of the other's kind without a trace: not failed",
        )
    if found is None:
        return Decision(condition, *_absent(condition))
    if condition.relative:
        if not found.a_ns:
            return Decision(
                condition,
                "undecided",
                f"A spent nothing there, B {fmt.duration(found.b_ns)}: no percentage; give a time",
            )
        value: float = found.difference_ns / found.a_ns
        interval: tuple[float, float] | None = found.ci95_ratio
    else:
        value, interval = float(found.difference_ns), found.ci95_ns
    show = signed if condition.relative else signed_duration
    times = f"{show(value)}, from {fmt.duration(found.a_ns)} to {fmt.duration(found.b_ns)}"
    above = condition.sign == ">"
    if point:
        return _judged(condition, value, f"{times}; by the difference itself")
    if interval is None:
        beyond = value > condition.limit if above else value < condition.limit
        where = "beyond" if beyond else "within"
        return Decision(
            condition,
            "undecided",
            f"{times}; fewer than 3 steps give no interval: not failed ({where} the limit by the "
            "difference itself, which --fail-on-point goes by)",
        )
    said = f"{times}; 95 %: {show(interval[0])} … {show(interval[1])}"
    return _judged(condition, interval[0] if above else interval[1], said)


def _judged(condition: Condition, value: float, reason: str) -> Decision:
    beyond = value > condition.limit if condition.sign == ">" else value < condition.limit
    return Decision(condition, "beyond" if beyond else "within", reason)


def _absent(condition: Condition) -> tuple[Outcome, str]:
    beyond = (condition.limit < 0) if condition.sign == ">" else (condition.limit > 0)
    if condition.relative:
        return "undecided", "neither run spent time there: no percentage"
    return ("beyond" if beyond else "within"), "neither run spent time there"
