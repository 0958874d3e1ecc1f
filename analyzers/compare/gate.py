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
from difflib import get_close_matches
from typing import Any, Literal

from chopper import wording as fmt
from chopper.analyzers.compare.result import Change, Comparison, Total, signed, signed_duration
from chopper.causes import CAUSES
from chopper.errors import UsageError

_UNITS_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_TOTALS = ("step", "median", "untraced")
_PARTS = {
    "quantity": (r"[A-Za-z_][A-Za-z0-9_.]*", "step, median, untraced or the id of a cause"),
    "sign": (r"[<>]", "> or <"),
    "number": (r"[+\-−]?(\d+(\.\d*)?|\.\d+)", "a number"),
    "unit": (r"%|ns|us|µs|ms|s(?![A-Za-z])", "a unit: %, ns, us, ms or s"),
}
"""Parts of a condition in their order: how each reads, and what it is called."""
_OR = re.compile(r"or(?![A-Za-z0-9_.])")
_LONGEST = 10_000
_LARGEST = 1e18
"""Largest limit, in ns (30 years) or as a ratio: a larger one could never be exceeded."""

Outcome = Literal["beyond", "within", "undecided"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a gate, ``text`` as it was written.

    ``limit`` is a ratio of A's value where it is ``relative``, else nanoseconds.
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


def parse(text: str) -> tuple[Condition, ...]:
    """Return the conditions of an expression; a `UsageError` names the place where it is none."""
    if len(text) > _LONGEST:
        raise UsageError(f"--fail-on: longer than {_LONGEST} characters")
    condition, at = _condition(text, 0)
    conditions = [condition]
    while at < len(text):
        joined = _OR.match(text, at)
        if joined is None:
            raise _error(text, at, "expected 'or' or the end")
        condition, at = _condition(text, joined.end())
        conditions.append(condition)
    return tuple(conditions)


def _condition(text: str, at: int) -> tuple[Condition, int]:
    """Read one condition from ``at`` on; return it and where what follows begins."""
    parts: dict[str, str] = {}
    places: dict[str, int] = {}
    end = at
    for name, (pattern, called) in _PARTS.items():
        at = _after_space(text, at)
        places[name] = at
        match = re.compile(pattern).match(text, at)
        if match is not None:
            parts[name] = match.group()
            at = end = match.end()
        elif name != "unit" or float(parts["number"].replace("−", "-")):
            raise _error(text, at, f"expected {called}")
        if name == "quantity" and parts[name] not in (*_TOTALS, *CAUSES):
            close = get_close_matches(parts[name], [*CAUSES, *_TOTALS], n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise _error(text, places[name], f"expected {called}{hint}")
    value, unit = float(parts["number"].replace("−", "-")), parts.get("unit", "ns")
    limit = value / 100 if unit == "%" else value * _UNITS_NS[unit]
    if not abs(value if unit == "%" else limit) <= _LARGEST:
        raise _error(text, places["number"], "expected a limit of at most 1e18 ns or 1e18 %")
    sign: Literal["<", ">"] = ">" if parts["sign"] == ">" else "<"
    written = text[places["quantity"] : end]
    return Condition(parts["quantity"], sign, limit, unit == "%", written), _after_space(text, end)


def _after_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _error(text: str, at: int, expected: str) -> UsageError:
    read = repr(text[at : at + 20]) if at < len(text) else "its end"
    return UsageError(
        f"--fail-on: at character {at + 1} of {text[:200]!r}: {expected}, found {read}"
    )


def decide(
    comparison: Comparison, conditions: tuple[Condition, ...], *, point: bool = False
) -> Verdict:
    """Judge a comparison; with ``point`` by the difference, whatever its interval says."""
    if comparison.refused:
        differences = ", ".join(c.label for c in comparison.refused)
        return Verdict(True, (), f"A and B do not do the same work ({differences})")
    decisions = tuple(Decision(c, *_decide(comparison, c, point=point)) for c in conditions)
    return Verdict(any(d.outcome == "beyond" for d in decisions), decisions, None)


def _decide(comparison: Comparison, condition: Condition, *, point: bool) -> tuple[Outcome, str]:
    """Return what became of a condition, and the measured change in words."""
    quantity, relative = condition.quantity, condition.relative
    measured: Change | Total | None
    if quantity in _TOTALS:
        measured = getattr(comparison, quantity)
    else:
        measured = next((c for c in comparison.changes if c.id == quantity), None)
    if measured is None and quantity == "untraced":
        few = "a run has fewer than three untraced steps of the kind compared: not failed"
        return "undecided", few
    if measured is None:
        none = "neither run spent time there"
        return (
            ("undecided", f"{none}, so there is no percentage")
            if relative
            else (_met(condition, 0), none)
        )
    a, b = fmt.duration(measured.a_ns), fmt.duration(measured.b_ns)
    if relative and not measured.a_ns:
        return (
            "undecided",
            f"A spent no time there, B {b}: so there is no percentage; specify the limit as a time",
        )
    value: float = measured.difference_ns / (measured.a_ns if relative else 1)
    interval: tuple[float, float] | None = measured.ci95_ratio if relative else measured.ci95_ns
    show = signed if relative else signed_duration
    times = f"{show(value)}, from {a} to {b}"
    if point:
        return _met(condition, value), f"{times}; judged by the difference itself"
    if interval is None:
        return "undecided", (
            f"{times}; fewer than 3 steps give no interval: not failed ({_met(condition, value)} "
            "the limit by the difference itself; --fail-on-point judges by that)"
        )
    nearest = interval[0] if condition.sign == ">" else interval[1]
    return _met(condition, nearest), f"{times}; 95 %: {show(interval[0])} … {show(interval[1])}"


def _met(condition: Condition, value: float) -> Outcome:
    over = value > condition.limit if condition.sign == ">" else value < condition.limit
    return "beyond" if over else "within"
