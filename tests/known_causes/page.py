"""The table of a validation: cause × magnitude, what was injected and what was attributed."""

from __future__ import annotations

from collections.abc import Sequence

from chopper import wording as fmt
from chopper.reports import to_text
from chopper.reports.labels import full_label
from chopper.reports.page import Cell, Column, Items, Mark, Page, Section, Table
from tests.known_causes.results import Case, score

_COLUMNS = (
    "injection",
    "magnitude",
    "cases",
    "injected",
    "recovered",
    "leaked",
    Column("into", kind="name"),
    Column("", kind="name"),
)
_MARKS: dict[str, Mark] = {"missed": "error", "ok": "ok", "refused": "warning", "skipped": "info"}
_LEGEND = (
    "Injected: true time with the injection minus true time without it, summed over all "
    "variants. Recovered, leaked: worst case, as shares of what it injected. Into: the cause "
    "that received most of the leak."
)


_WORST_FIRST = ("missed", "ok", "refused", "skipped")


def _row(cases: Sequence[Case]) -> tuple[str | Cell, ...]:
    """Return the row of the cases of one injection and magnitude: their sum, the worst of them."""
    first = cases[0]
    name = first.injection
    if any(c.mixed for c in cases):
        name += f": {first.cause.rpartition('.')[2]}"
    status = min((c.status for c in cases), key=_WORST_FIRST.index)
    scored = [c for c in cases if c.status in ("ok", "missed")]
    numbers = [str(len(cases)), *[fmt.UNKNOWN] * 4]
    if scored:
        worst = max(scored, key=lambda c: c.error_ratio)
        leaking = max(scored, key=lambda c: c.leaked_ratio)
        shown = worst.recovered_ratio
        into = leaking.worst_leak if leaking.leaked_ratio >= 5e-5 else None
        numbers = [
            str(len(scored)),
            fmt.duration(sum(c.injected_ns for c in scored)),
            f"{fmt.percent(worst.error_ratio, '.2f')} of it"
            if shown is None
            else fmt.percent(shown, ".2f"),
            fmt.percent(leaking.leaked_ratio, ".2f"),
            full_label(into[0]) if into else fmt.UNKNOWN,
        ]
    outcome = Cell(text=status, mark=_MARKS[status])
    return (Cell(text=name, hint=full_label(first.cause)), first.magnitude, *numbers, outcome)


def verdict(cases: Sequence[Case]) -> str:
    """Return the overall score in one line."""
    total = score(cases)
    parts = [f"{total.ok} of {total.ok + total.missed} cases within their limits"]
    if total.recovered_ratio is not None:
        parts.append(f"{fmt.percent(total.recovered_ratio, '.2f')} of the injected time recovered")
        parts.append(f"worst case off by {fmt.percent(total.worst_error_ratio, '.2f')}")
        parts.append(f"worst leak {fmt.percent(total.worst_leaked_ratio, '.2f')}")
    if total.refused:
        parts.append(f"{total.refused} refused")
    if total.skipped:
        parts.append(f"{total.skipped} skipped")
    return ", ".join(parts)


def page(cases: Sequence[Case]) -> Page:
    """Return the page of a validation."""
    rows: dict[object, list[Case]] = {}
    reasons: dict[tuple[str, str, str], dict[str, None]] = {}
    for case in cases:
        key = (case.suite, case.injection, case.cause, case.magnitude)
        rows.setdefault(key, []).append(case)
        if case.status != "ok" and case.reason:
            reason = case.reason
            if case.worst_leak is not None:
                reason = reason.replace(case.worst_leak[0], full_label(case.worst_leak[0]))
            of = reasons.setdefault((case.status, case.injection, reason), {})
            of[f"{case.magnitude} {case.flavour}"] = None
    notes = [
        f"{status}: {injection} ({', '.join(of)}): {reason}"
        for (status, injection, reason), of in sorted(reasons.items(), key=lambda i: i[0][0])
    ]
    table = Table(columns=_COLUMNS, rows=[*map(_row, rows.values())], words=2, note=_LEGEND)
    sections = [Section(title="Injections", blocks=(table,))]
    if notes:
        sections.append(Section(title="Not recovered", blocks=(Items(items=notes),)))
    headline = f"{verdict(cases)}."
    return Page(title="Validation on known causes", headline=headline, sections=sections)


def render(cases: Sequence[Case]) -> str:
    """Return a validation as text."""
    return to_text.render(page(cases))
