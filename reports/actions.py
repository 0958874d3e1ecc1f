"""Tell what to try first: the verdict that pages of a run begin with, and its JSON form."""

from __future__ import annotations

import shlex
import string
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from chopper import wording as fmt
from chopper.analyzers.actions import Action, Actions
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.detectors import detector
from chopper.analyzers.events.places import Where
from chopper.causes import CAUSES
from chopper.reports.page import Items, Paragraph, Section

SHOWN = 3
"""Actions at the top of a page."""
RANKED = (
    "Ranked by recoverable time: what a replay of the run without the pattern predicts. Savings "
    "overlap, so they do not add up."
)
_MUCH_MORE = 0.2
_DURING = {"between": "between phases", "data": "while data is loaded", "other": ""}
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


class Told(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def line(self) -> str:
        """What to do and what it saves."""
        return f"{self.title}: {self.saved} recoverable ({self.detail})"


def tell(
    run: Attribution, tried: Actions, unit: str, *, base: Actions | None = None
) -> tuple[list[Told], list[str]]:
    """Put all actions into words, and say in sentences what was dropped and what could not be told.

    Args:
        run: the attributed run.
        tried: what is worth trying in it.
        unit: ``step``, ``traced step`` or ``window`` of the causes.
        base: of a run to compare with, A: what the same pattern costs there is said.
    """
    found = []
    for action in tried.ranked:
        declared, say = detector(action.detector), _Sentence().format
        of = "loop" if action.of == "loop" else saving_unit(tried.pace, unit)
        share = f"{fmt.ratio(action.saved_ratio)} of the {of}"
        scaled = _scaled(run, action, tried.pace)
        found.append(
            Told(
                title=_title(action),
                evidence=_evidence(action),
                remedy=say(declared.remedy, **action.evidence),
                saved=fmt.duration(action.saved_ns),
                detail=f"{share}{_spread(action)}{_beyond(action)}{scaled}{_in_base(action, base)}",
                place=place(action.where),
                command=f"chopper analyze {shlex.quote(run.source)} --view {declared.view}",
                links=_links(action, declared.view),
                condition=declared.condition,
                without=declared.without,
            )
        )
    notes = []
    dropped = [f"{_title(action)} ({reason})" for action, reason in tried.dropped]
    if dropped:
        more = len(dropped) - SHOWN
        rest = f"; {fmt.count(more)} more: --json" if more > 0 else ""
        notes.append(f"Seen, but not certain: {'; '.join(dropped[:SHOWN])}{rest}.")
    if tried.failed:
        reasons = "; ".join(f"{name} ({why})" for name, why in tried.failed.items())
        notes.append(f"Not checked, because of an error in Chopper: {reasons}.")
    return found, notes


def _spread(action: Action) -> str:
    """Return the interval of a saving; of uneven steps what single ones save."""
    low, high = action.ci95_ns or (0, 0)
    if low > 0:
        return f", 95 % interval {fmt.interval((low, high))}"
    least, most = (max(ratio, 0.0) for ratio in action.step_ratios)
    return f", {fmt.ratio(least)} to {fmt.ratio(most)} of single steps" if action.ci95_ns else ""


def _beyond(action: Action) -> str:
    """Return how much of a saving is time of causes that wait for the ones that are removed."""
    more_ns = action.saved_ns - action.rank_ns
    if more_ns < _MUCH_MORE * action.rank_ns:
        return ""
    return f"; {fmt.duration(more_ns)} of it is other waiting that ends sooner"


def _evidence(action: Action) -> str:
    """Return what was seen, in a sentence."""
    text = _Sentence().format(detector(action.detector).evidence, **action.evidence)
    return f"{text[:1].upper()}{text[1:]}."


def _title(action: Action) -> str:
    return _Sentence().format(detector(action.detector).title, **action.evidence)


def saving_unit(pace: float, unit: str) -> str:
    """Return what savings are of: a step without a trace where the host's pace is known."""
    return unit if pace == 1 else unit.removeprefix("traced ")


def _scaled(run: Attribution, action: Action, pace: float) -> str:
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


def section(told: Sequence[Told], notes: Sequence[str] = ()) -> Section:
    """Return what to try first, as text: three actions in full, the others in a line each.

    Args:
        told: all actions.
        notes: what was dropped, and what could not be looked for.
    """
    items = [
        f"{t.line}{t.place and f', {t.place}'}. {t.evidence} {t.remedy} Rows: `{t.command}`"
        for t in told[:SHOWN]
    ]
    items += [t.line for t in told[SHOWN:]]
    return Section(
        title="What to try first",
        intro=RANKED if told else "",
        blocks=(
            *([Items(items=items)] if items else []),
            *(Paragraph(note, "dim") for note in notes),
        ),
    )


def _links(action: Action, view: str) -> tuple[tuple[str, str], ...]:
    table = ("Table", f"#details?table={view}")
    if action.longest is None:
        return (table,)
    rank, start_ns = action.longest
    return (("Timeline", f"#timeline?rank={rank}&at={start_ns}"), table)


def place(where: Where) -> str:
    """Return a place in words: ``in forward, in layer h.0, by aten::mm``."""
    parts = [
        where.phase and _DURING.get(where.phase, f"in {where.phase}"),
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
            "recoverable_step_ci95_low_ns": a.ci95_ns[0] if a.ci95_ns else None,
            "recoverable_step_ci95_high_ns": a.ci95_ns[1] if a.ci95_ns else None,
            **_base_json(a, base),
            "share_ratio": a.saved_ratio,
            "of": a.of,
            **asdict(a.where),
            "evidence": _evidence(a),
            "evidence_values": a.evidence,
            "events_count": a.events_count,
            "remedy": _Sentence().format(detector(a.detector).remedy, **a.evidence),
            "view": detector(a.detector).view,
        }
        for a in ranked
    ]


def dropped_json(tried: Actions) -> list[dict[str, Any]]:
    """Return the JSON form of the patterns that were seen but are no actions."""
    return [
        {
            "detector": action.detector,
            "title": _title(action),
            "recoverable_step_ns": action.saved_ns,
            "share_ratio": action.saved_ratio,
            "reason": reason,
        }
        for action, reason in tried.dropped
    ]
