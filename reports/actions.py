"""What to try first: the verdict that pages of a run begin with, and its JSON form."""

from __future__ import annotations

import shlex
import string
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.analyzers.actions import detector
from chopper.causes import CAUSES
from chopper.reports.page import Item, Items, Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.actions import Action, Where

SHOWN = 3
"""Actions at the top of a page."""
_SHOWS = {"ns": fmt.duration, "ratio": fmt.ratio, "bytes": fmt.bytes_, "factor": fmt.factor}


class _Sentence(string.Formatter):
    """Fills in the sentences of a detector: ``{waited_ns:ns}`` shows a duration."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _SHOWS:
            return _SHOWS[format_spec](value)
        if value in CAUSES:
            return CAUSES[value].label.lower()
        return fmt.count(value) if isinstance(value, int | float) else str(value)


def section(actions: Sequence[Action], source: str, unit: str) -> Section:
    """Return the first three things to try.

    Args:
        actions: what is worth trying, the most recoverable time first.
        source: what the user named, for the commands.
        unit: ``step`` or ``window``.
    """
    if not actions:
        text = (
            "No known pattern costs time here that can be told from noise. The causes below say "
            "where the time went; `chopper whatif` predicts what a change would give back."
        )
        return Section(title="What to try first", blocks=(Items(items=(text,)),), id="actions")
    items = [Item(_told(a, source, unit)) for a in actions[:SHOWN]]
    rest = len(actions) - len(items)
    more = (f"{fmt.plural(rest, 'more action')}: chopper report",) if rest else ()
    return Section(
        title="What to try first",
        intro="Ranked by the time that a replay of the run predicts each would give back by "
        "itself. Savings overlap, so they do not add up.",
        blocks=(Items(items=[*items, *more]),),
        id="actions",
    )


def _told(action: Action, source: str, unit: str) -> str:
    declared, say = detector(action.detector), _Sentence().format
    interval = f", 95 % interval {fmt.interval(action.ci95_ns)}" if action.ci95_ns else ""
    place = _place(action.where)
    return (
        f"{say(declared.title, **action.evidence)}: {fmt.duration(action.saved_ns)} of a {unit} "
        f"({fmt.ratio(action.saved_ratio)}{interval}){place and f', {place}'}. "
        f"{_capital(say(declared.evidence, **action.evidence))}. "
        f"{say(declared.remedy, **action.evidence)} "
        f"Rows: `chopper analyze {shlex.quote(source)} --view {declared.view}`."
    )


def _place(where: Where) -> str:
    parts = [
        where.phase and f"in {where.phase}",
        where.layer and f"in layer {where.layer}",
        where.op and f"by {where.op}",
        where.line and f"at {where.line}",
    ]
    return ", ".join(p for p in parts if p)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def to_json(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """Return the JSON form of all actions, the most recoverable time first."""
    return [
        {
            "detector": a.detector,
            "title": _Sentence().format(detector(a.detector).title, **a.evidence),
            "recoverable_step_ns": round(a.saved_ns),
            "recoverable_step_ci95_ns": a.ci95_ns and [round(v) for v in a.ci95_ns],
            "share_ratio": a.saved_ratio,
            **asdict(a.where),
            "evidence": a.evidence,
            "events_count": a.events_count,
            "remedy": _Sentence().format(detector(a.detector).remedy, **a.evidence),
            "view": detector(a.detector).view,
        }
        for a in actions
    ]
