"""The page of a validation: cause × magnitude, what was injected and what was attributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.reports import formatted
from chopper.reports.page import Cell, Column, Items, Page, Section, Table
from chopper.validation.results import Case, score, to_dict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.reports.page import Mark

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
    "Injected: true time with the injection minus true time without it, over all flavours. "
    "Recovered, leaked: of the worst case, as shares of what it injected. Into: the cause that "
    "received most of the leak."
)


@dataclass(frozen=True, slots=True)
class Row:
    """The cases of one injection and magnitude: their sum, and the worst of them."""

    suite: str
    injection: str
    cause: str
    magnitude: str
    cases: tuple[Case, ...]

    @property
    def status(self) -> str:
        """The worst status: missed before ok before refused before skipped."""
        return min((c.status for c in self.cases), key=("missed", "ok", "refused", "skipped").index)

    @property
    def name(self) -> str:
        """The injection; of a mix, with the last part of the cause that the row is about."""
        mixed = any(c.mixed for c in self.cases)
        return f"{self.injection}: {self.cause.rpartition('.')[2]}" if mixed else self.injection

    def cells(self) -> tuple[str | Cell, ...]:
        """Return what each column of the table shows."""
        name = Cell(text=self.name, hint=self.cause)
        status = Cell(text=self.status, mark=_MARKS[self.status])
        scored = [c for c in self.cases if c.status in ("ok", "missed")]
        if not scored:
            return (name, self.magnitude, str(len(self.cases)), *[fmt.UNKNOWN] * 4, status)
        worst = max(scored, key=lambda c: c.error_ratio)
        leaking = max(scored, key=lambda c: c.leaked_ratio)
        shown = worst.recovered_ratio
        return (
            name,
            self.magnitude,
            str(len(scored)),
            fmt.duration(sum(c.injected_ns for c in scored)),
            f"{worst.error_ratio:.2%} of it" if shown is None else f"{shown:.2%}",
            f"{leaking.leaked_ratio:.2%}",
            leaking.worst_leak[0]
            if leaking.worst_leak and leaking.leaked_ratio >= 5e-5
            else fmt.UNKNOWN,
            status,
        )


def rows(cases: Sequence[Case]) -> list[Row]:
    """Gather cases by suite, injection, cause and magnitude, in the order they came."""
    gathered: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in cases:
        key = (case.suite, case.injection, case.cause, case.magnitude)
        gathered.setdefault(key, []).append(case)
    return [Row(*key, tuple(found)) for key, found in gathered.items()]


def verdict(cases: Sequence[Case]) -> str:
    """Return the overall score in one line."""
    total = score(cases)
    parts = [f"{total.ok} of {total.ok + total.missed} cases within their bar"]
    if total.recovered_ratio is not None:
        parts.append(f"{total.recovered_ratio:.2%} of the injected time recovered")
        parts.append(f"worst case {total.worst_error_ratio:.2%} off")
        parts.append(f"worst leak {total.worst_leaked_ratio:.2%}")
    if total.refused:
        parts.append(f"{total.refused} refused")
    if total.skipped:
        parts.append(f"{total.skipped} skipped")
    return ", ".join(parts)


def _notes(cases: Sequence[Case]) -> list[str]:
    """Return why cases were missed, refused or skipped; the same reason once."""
    grouped: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        if case.status != "ok" and case.reason:
            grouped.setdefault((case.status, case.injection, case.reason), []).append(case)
    return [
        f"{status}: {injection} "
        f"({', '.join(dict.fromkeys(f'{c.magnitude} {c.flavour}' for c in of))}): {reason}"
        for (status, injection, reason), of in sorted(grouped.items(), key=lambda i: i[0][0])
    ]


def page(cases: Sequence[Case]) -> Page:
    """Return the page of a validation."""
    table = Table(
        columns=_COLUMNS, rows=[row.cells() for row in rows(cases)], words=2, note=_LEGEND
    )
    notes = _notes(cases)
    return Page(
        title="Validation on known causes",
        headline=f"{verdict(cases)}.",
        sections=(
            Section(title="Injections", blocks=(table,)),
            *([Section(title="Not recovered", blocks=(Items(items=notes),))] if notes else []),
        ),
    )


def render(cases: Sequence[Case], format: str, *, seed: int) -> str:
    """Return a validation as one string; the seed is for the JSON form."""
    return formatted(lambda: page(cases), lambda: to_dict(cases, seed=seed), format)
