"""The known-cause suite's result as text, Markdown, HTML and JSON: cause × magnitude."""

from __future__ import annotations

import html as markup
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.errors import UsageError, printable
from chopper.validation.results import Case, score, to_dict

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER = ("injection", "magnitude", "cases", "injected", "recovered", "leaked", "into", "")
_RIGHT = {2, 3, 4, 5}
_WIDTH = 124


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

    def cells(self) -> tuple[str, ...]:
        """What each column of the table shows."""
        scored = [c for c in self.cases if c.status in ("ok", "missed")]
        if not scored:
            return (self.name, self.magnitude, str(len(self.cases)), *["–"] * 4, self.status)
        worst = max(scored, key=lambda c: c.error_ratio)
        leaking = max(scored, key=lambda c: c.leaked_ratio)
        shown = worst.recovered_ratio
        return (
            self.name,
            self.magnitude,
            str(len(scored)),
            fmt.duration(sum(c.injected_ns for c in scored)),
            f"{worst.error_ratio:.2%} of it" if shown is None else f"{shown:.2%}",
            f"{leaking.leaked_ratio:.2%}",
            leaking.worst_leak[0] if leaking.worst_leak and leaking.leaked_ratio >= 5e-5 else "–",
            self.status,
        )


def rows(cases: Sequence[Case]) -> list[Row]:
    """Cases gathered by suite, injection, cause and magnitude, in the order they came."""
    gathered: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in cases:
        key = (case.suite, case.injection, case.cause, case.magnitude)
        gathered.setdefault(key, []).append(case)
    return [Row(*key, tuple(found)) for key, found in gathered.items()]


def verdict(cases: Sequence[Case]) -> str:
    """One line: the overall score."""
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
    """Why cases were missed, refused or skipped; the same reason once."""
    grouped: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        if case.status != "ok" and case.reason:
            grouped.setdefault((case.status, case.injection, case.reason), []).append(case)
    return [
        f"{status}: {injection} ({', '.join(dict.fromkeys(f'{c.magnitude} {c.flavour}' for c in of))}): "
        f"{reason}"
        for (status, injection, reason), of in sorted(grouped.items(), key=lambda i: i[0][0])
    ]


_LEGEND = (
    "injected: truth with the injection less truth without it, over all flavours; recovered, "
    "leaked: of the worst case, as shares of what it injected; into: the cause that leaked most"
)


def text(cases: Sequence[Case], *, width: int = _WIDTH) -> str:
    """The table for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width, no_color=True, highlight=False, markup=False, emoji=False
    )
    console.print(Text(verdict(cases)))
    console.print()
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=False)
    for i, name in enumerate(_HEADER):
        grid.add_column(name, justify="right" if i in _RIGHT else "left", no_wrap=True)
    for row in rows(cases):
        grid.add_row(*(Text(printable(c)) for c in row.cells()))
    console.print(grid)
    console.print()
    console.print(Text(_LEGEND))
    for note in _notes(cases):
        console.print(Text(printable(note)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def markdown(cases: Sequence[Case]) -> str:
    """The table as Markdown."""
    lines = [
        "# What the attribution made of known causes",
        "",
        f"**{verdict(cases)}.**",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|" + "|".join("---:" if i in _RIGHT else "---" for i in range(len(_HEADER))) + "|",
    ]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows(cases)]
    lines += ["", _LEGEND + "."]
    notes = _notes(cases)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}
th,td{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #8884}
.n{text-align:right;font-variant-numeric:tabular-nums}
.missed{color:#c22;font-weight:600}.ok{color:#282}.refused,.skipped{opacity:.7}
"""


def html(cases: Sequence[Case]) -> str:
    """One self-contained page."""

    def cell(i: int, value: str, row: Row) -> str:
        classes = "n" if i in _RIGHT else row.status if i == len(_HEADER) - 1 else ""
        title = f' title="{markup.escape(row.cause)}"' if i == 0 else ""
        return f'<td class="{classes}"{title}>{markup.escape(printable(value))}</td>'

    head = "".join(
        f'<th class="{"n" if i in _RIGHT else ""}">{name}</th>' for i, name in enumerate(_HEADER)
    )
    body = "\n".join(
        "<tr>" + "".join(cell(i, c, row) for i, c in enumerate(row.cells())) + "</tr>"
        for row in rows(cases)
    )
    notes = "".join(f"<li>{markup.escape(printable(n))}</li>" for n in _notes(cases))
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>chopper validate</title><style>{_STYLE}</style>\n"
        "<h1>What the attribution made of known causes</h1>\n"
        f"<p><strong>{markup.escape(verdict(cases))}</strong></p>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>\n"
        f"<p>{markup.escape(_LEGEND)}.</p>\n"
        + (f"<ul>{notes}</ul>\n" if notes else "")
        + "</html>\n"
    )


def render(cases: Sequence[Case], format: str, *, seed: int) -> str:
    """The result as one string.

    Args:
        cases: what was run.
        format: ``html``, ``md``, ``txt`` or ``json``.
        seed: of the run, for the JSON form.

    Raises:
        UsageError: no such format.
    """
    if format == "html":
        return html(cases)
    if format == "md":
        return markdown(cases)
    if format == "txt":
        return text(cases)
    if format == "json":
        return json.dumps(to_dict(cases, seed=seed), indent=2, ensure_ascii=False) + "\n"
    raise UsageError(f"format {format!r} unknown: one of html, md, json, txt")
