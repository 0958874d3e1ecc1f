"""Tell what to try first: the verdict that pages of a run begin with, and its JSON form."""

from __future__ import annotations

import shlex
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chopper import wording as fmt
from chopper.analyzers.actions import Action, Actions, Where, detector
from chopper.analyzers.attributed import Attributed
from chopper.causes import CAUSES
from chopper.reports.page import Items, Paragraph, Section

SHOWN = 3
"""Actions at the top of a page."""
RANKED = (
    "Ranked by recoverable time (the lower end of its interval), as a replay of the run without "
    "each pattern predicts it. "
    "Savings overlap, so they do not add up."
)
_SHOWS = {"ns": fmt.duration, "ratio": fmt.ratio, "bytes": fmt.bytes_, "factor": fmt.factor}


class _Sentence(string.Formatter):
    """Fills in the sentences of a detector: ``{waited_ns:ns}`` shows a duration."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _SHOWS:
            return _SHOWS[format_spec](value)
        if value is None:
            return "what was not recorded"
        if value in CAUSES:
            return fmt.inside(CAUSES[value].label)
        return fmt.count(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Told:
    """An action in words.

    Attributes:
        title, evidence, remedy: the detector's sentences, filled in.
        saved: recoverable time of a step.
        detail: its share and interval.
        place: phase, layer, operator and line; empty where none holds most of the time.
        command: what shows the rows.
        links: the same in a browser, as words and address: the longest event, the table.
        condition: when the pattern is said to be seen.
        without: what a run without it is taken to be.
    """

    title: str
    evidence: str
    remedy: str
    saved: str
    detail: str
    place: str
    command: str
    links: tuple[tuple[str, str], ...]
    condition: str
    without: str


def tell(
    run: Attributed, tried: Actions, unit: str, *, base: Actions | None = None
) -> tuple[list[Told], int, str]:
    """Put the first three actions into words, count the rest, and say what was not looked for.

    Args:
        run: the attributed run.
        tried: what is worth trying in it.
        unit: ``step``, ``traced step`` or ``window`` of the causes.
        base: of a run to compare with, A: what the same pattern costs there is said.
    """
    found = []
    for action in tried.ranked[:SHOWN]:
        declared, say = detector(action.detector), _Sentence().format
        share = f"{fmt.ratio(action.saved_ratio)} of the {saving_unit(tried.pace, unit)}"
        interval = f", 95 % interval {fmt.interval(action.ci95_ns)}" if action.ci95_ns else ""
        evidence = say(declared.evidence, **action.evidence)
        scaled = _scaled(run, action, tried.pace)
        found.append(
            Told(
                title=_title(action),
                evidence=f"{evidence[:1].upper()}{evidence[1:]}.",
                remedy=say(declared.remedy, **action.evidence),
                saved=fmt.duration(action.saved_ns),
                detail=f"{share}{interval}{scaled}{_in_base(action, base)}",
                place=_place(action.where),
                command=f"chopper analyze {shlex.quote(run.source)} --view {declared.view}",
                links=_links(action, declared.view),
                condition=declared.condition,
                without=declared.without,
            )
        )
    reasons = "; ".join(f"{name} ({why})" for name, why in tried.failed.items())
    failed = f"Not checked, because of an error in Chopper: {reasons}." if reasons else ""
    unsure = "; ".join(_title(action) for action in tried.unsure)
    if unsure:
        failed = (
            f"Withheld: {unsure}. Fewer than three steps were traced, and the first iteration "
            f"of any run shows this. {failed}".strip()
        )
    return found, len(tried.ranked) - len(found), failed


def _title(action: Action) -> str:
    return _Sentence().format(detector(action.detector).title, **action.evidence)


def saving_unit(pace: float, unit: str) -> str:
    """Return what savings are of: a step without a trace where the host's pace is known."""
    return unit if pace == 1 else unit.removeprefix("traced ")


def _scaled(run: Attributed, action: Action, pace: float) -> str:
    """Return the saving of an untraced step, where tracing made the traced ones much longer."""
    step = run.step_time()
    if pace < 1 or not step.is_slowed_by_tracing:
        return ""
    return f"; about {fmt.duration(action.saved_ns * step.scale)} without tracing"


def _alike(action: Action, base: Actions) -> Action | None:
    """Return the costliest pattern of the same detector in another run."""
    return next((a for a in base.ranked if a.detector == action.detector), None)


def _in_base(action: Action, base: Actions | None) -> str:
    if base is None:
        return ""
    alike = _alike(action, base)
    return "; not seen in A" if alike is None else f"; in A {fmt.duration(alike.saved_ns)}"


def _base_json(action: Action, base: Actions | None) -> dict[str, int | None]:
    if base is None:
        return {}
    alike = _alike(action, base)
    return {"recoverable_step_a_ns": None if alike is None else alike.saved_ns}


def section(told: Sequence[Told], rest: int, failed: str = "") -> Section:
    """Return the first three things to try, as text.

    Args:
        told: of a run that can be replayed.
        rest: so many more are not shown.
        failed: what could not be looked for, in a sentence.
    """
    failures = (Paragraph(failed),) if failed else ()
    if not told:
        text = (
            "No known pattern costs a significant amount of time in this run. The causes below "
            "show where the time went; `chopper whatif` predicts what a change would save."
        )
        return Section(title="What to try first", blocks=(Paragraph(text), *failures))
    items = [
        f"{t.title}: {t.saved} recoverable ({t.detail}){t.place and f', {t.place}'}. {t.evidence} "
        f"{t.remedy} Rows: `{t.command}`"
        for t in told
    ]
    more = (f"{fmt.plural(rest, 'more action')}: --json",) if rest else ()
    blocks = (Items(items=[*items, *more]), *failures)
    return Section(title="What to try first", intro=RANKED, blocks=blocks)


def _links(action: Action, view: str) -> tuple[tuple[str, str], ...]:
    table = ("Table", f"#details?table={view}")
    if action.longest is None:
        return (table,)
    rank, start_ns = action.longest
    return (("Timeline", f"#timeline?rank={rank}&at={start_ns}"), table)


def _place(where: Where) -> str:
    parts = [
        where.phase and f"in {where.phase}",
        where.layer and f"in layer {where.layer}",
        where.op and f"by {where.op}",
        where.line and f"at {where.line}",
    ]
    return ", ".join(p for p in parts if p)


def to_json(ranked: Sequence[Action], base: Actions | None = None) -> list[dict[str, Any]]:
    """Return the JSON form of all actions, in their order.

    Args:
        base: of a run to compare with, A: what the same pattern costs there, null where it was not
            seen.
    """
    return [
        {
            "detector": a.detector,
            "title": _title(a),
            "recoverable_step_ns": a.saved_ns,
            "recoverable_step_ci95_ns": a.ci95_ns,
            **_base_json(a, base),
            "share_ratio": a.saved_ratio,
            **asdict(a.where),
            "evidence": a.evidence,
            "events_count": a.events_count,
            "remedy": _Sentence().format(detector(a.detector).remedy, **a.evidence),
            "view": detector(a.detector).view,
        }
        for a in ranked
    ]
