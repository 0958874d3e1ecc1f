"""Parts of the pages of estimates: listings, figures and assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from chopper import wording as fmt
from chopper.analyzers.estimates import Estimate
from chopper.reports.figures import LINES, layout, mark, significant
from chopper.reports.page import Column, Figure, Items, Page, Section, Table

T = TypeVar("T")


def estimate_page(
    result: Estimate,
    *,
    title: str,
    headline: str,
    limit: str,
    assumes: str,
    remedy: str,
    facts: Iterable[str],
    sections: Sequence[Section],
    figures: Sequence[Figure] = (),
) -> Page:
    """Return a page that begins with the answer and ends with the estimate's assumptions.

    Args:
        result: what was estimated.
        title: of the page.
        headline: the number, and the range in which it lies.
        limit: what makes it as large as it is.
        assumes: what it depends on most.
        remedy: what to do about it.
        facts: what else is known, in sentences.
        sections, figures: the details.
    """
    answer = f"Limit: {limit}", f"Assumes: {assumes}", f"Try: {remedy}"
    known = Items(items=tuple(facts))
    return Page(
        title=title,
        headline=headline,
        summary=(Items(items=answer),),
        sections=(
            *((Section(title="In detail", blocks=(known,)),) if known.items else ()),
            *(
                Section(title=f.title, blocks=(replace(f, title="", label=f.title),))
                for f in figures
            ),
            *sections,
            Section(title="Assumptions", blocks=(Items(items=result.assumptions),)),
        ),
    )


def brief(page: Page) -> Page:
    """Return what a terminal shows of an estimate unless asked for more: the answer."""
    (answer,) = page.summary
    drawn = any(isinstance(block, Figure) for s in page.sections for block in s.blocks)
    file = "-o FILE.html (figures)" if drawn else "-o FILE.html"
    more = f"More: --details (tables, all assumptions), {file}, --json"
    items = (*answer.items, more) if isinstance(answer, Items) else ()
    return Page(title=page.headline, headline="", summary=(Items(items=items),))


def listing(
    title: str,
    items: Iterable[T],
    columns: Mapping[str | Column, str | Callable[[T], str]],
    **table: Any,
) -> Section:
    """Return a section of one table with a row for each item.

    ``columns``: heading or column → field of an item, whose name tells the unit, or text of a cell.
    """
    rows = [[_text(item, source) for source in columns.values()] for item in items]
    return Section(title=title, blocks=(Table(columns=tuple(columns), rows=rows, **table),))


def _text(item: T, source: str | Callable[[T], str]) -> str:
    if not isinstance(source, str):
        return source(item)
    value = getattr(item, source)
    return (
        fmt.duration(value * 1e9)
        if source.endswith("_s") and "_per_" not in source
        else (fmt.cell(source, value))
    )


def values(title: str, rows: Sequence[tuple[str, str]], note: str = "") -> Section:
    """Return a table of quantities with their names."""
    return Section(title=title, blocks=(Table(columns=("", "value"), rows=rows, note=note),))


def stacked_figure(
    rows: Mapping[str, Mapping[str, float]], *, x: str, wall: tuple[str, float] | None = None
) -> dict[str, Any]:
    """Return horizontal stacked bars: bar → part → value; `wall` is a vertical line's name."""
    parts = list(dict.fromkeys(part for bar in rows.values() for part in bar))
    figure_layout = layout(
        190 + 44 * len(rows),
        8,
        24,
        legend=True,
        barmode="stack",
        xaxis={"title": {"text": x}, "rangemode": "tozero"},
        yaxis={"type": "category", "automargin": True, "autorange": "reversed"},
    )
    if wall is not None:
        mark(figure_layout, "x", wall[1], wall[0])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": list(rows),
            "x": significant(bar.get(part, 0.0) for bar in rows.values()),
            "marker": {"color": LINES[i % len(LINES)]},
        }
        for i, part in enumerate(parts)
    ]
    return {"data": data, "layout": figure_layout}
