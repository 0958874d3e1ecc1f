"""A comparison as one self-contained page, in the shell of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.analyzers.compare.result import signed, signed_duration
from chopper.causes import CAUSES, LEAVES
from chopper.errors import printable
from chopper.reports import shell as page
from chopper.reports.comparison import (
    STATUS,
    calls,
    facts,
    gate_lines,
    interval,
    item_name,
    levels,
    median_line,
)
from chopper.reports.figures import plain
from chopper.reports.html import emphasised
from chopper.reports.palette import color
from chopper.reports.story import full_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.compare.gate import Verdict
    from chopper.analyzers.compare.result import Change, Comparison, Item

_MAX_ROWS = 500
"""Kernels or operators in the page."""
_SMALL_RATIO = 0.01
"""Causes below this share of all differences stand together in the waterfall."""
_GATE = {"✗": "error", "✓": "ok", "?": "warning"}


def render(comparison: Comparison, *, gate: Verdict | None = None) -> str:
    """The HTML page of a comparison; names from data are escaped by the template."""
    context = _context(comparison, gate)
    return page.render("comparison.html.j2", context, {"waterfall": waterfall(comparison)})


def _context(comparison: Comparison, gate: Verdict | None) -> dict[str, Any]:
    sides = (("A", comparison.a), ("B", comparison.b))
    step = comparison.step
    return {
        "title": f"{printable(comparison.a.name)} and {printable(comparison.b.name)}",
        "sides": [
            {
                "name": name,
                "source": printable(side.source),
                "facts": facts(side),
                "findings": [f for f in side.findings if f.severity != "info"],
                "remarks": [f for f in side.findings if f.severity == "info"],
            }
            for name, side in sides
        ],
        "verdict_parts": emphasised(printable(comparison.verdict)),
        "refused": [c.id for c in comparison.refused],
        "median": median_line(comparison),
        "notes": [printable(n) for n in comparison.notes],
        "gate": [
            {"tone": _GATE[mark], "words": printable(words)} for mark, words, _ in gate_lines(gate)
        ]
        if gate is not None
        else [],
        "checks": [
            {
                "label": c.label,
                "a": printable(c.shown("a")),
                "b": printable(c.shown("b")),
                "status": c.status,
                "tone": "error"
                if c.withholds
                else {"differs": "warning", "pass": "ok", "unknown": "info"}[c.status],
                "note": printable(c.note),
            }
            for c in comparison.checks
        ],
        "differing": [c for c in comparison.checks if c.status == "differs" and c.id != "steps"],
        "step": {
            "a": fmt.duration(step.a_ns),
            "b": fmt.duration(step.b_ns),
            "difference": signed_duration(step.difference_ns),
            "ratio": signed(step.ratio),
            "interval": interval(step.ci95_ns),
        },
        "changes": [_change(c, step.a_ns) for c in comparison.changes],
        "tables": [
            {
                "id": level,
                "title": title,
                "rows": [_item(i, level) for i in items[:_MAX_ROWS]],
                "cut": len(items) - _MAX_ROWS,
            }
            for level, title, items in levels(comparison)
        ],
    }


def _change(change: Change, step_ns: int) -> dict[str, Any]:
    return {
        "label": change.label,
        "doc": CAUSES[change.id].doc,
        "depth": change.id.count("."),
        "leaf": change.id in LEAVES,
        "color": color(change.id),
        "a": fmt.duration(change.a_ns),
        "b": fmt.duration(change.b_ns),
        "difference": signed_duration(change.difference_ns),
        "ratio": signed(change.difference_ns / step_ns) if step_ns else fmt.UNKNOWN,
        "interval": interval(change.ci95_ns),
        "told": change.told,
    }


def _item(item: Item, level: str) -> dict[str, Any]:
    return {
        "name": item_name(item, level),
        "full": printable(item.name),
        "status": STATUS[item.status],
        "told": item.told,
        "difference_ns": item.difference_ns,
        "cells": [
            (item.difference_ns, signed_duration(item.difference_ns)),
            (item.ci95_ns[0] if item.ci95_ns else 0, interval(item.ci95_ns)),
            (item.by_count_ns, signed_duration(item.by_count_ns)),
            (item.by_duration_ns, signed_duration(item.by_duration_ns)),
            (item.a_count, calls(item.a_count)),
            (item.b_count, calls(item.b_count)),
            (item.a_ns, fmt.duration(item.a_ns)),
            (item.b_ns, fmt.duration(item.b_ns)),
        ],
    }


def waterfall(comparison: Comparison) -> dict[str, Any]:
    """From A's step to B's: one bar per leaf cause, the largest difference first."""
    leaves = [c for c in comparison.leaves() if c.difference_ns]
    whole = sum(abs(c.difference_ns) for c in leaves)
    large = [c for c in leaves if abs(c.difference_ns) >= _SMALL_RATIO * whole]
    small = leaves[len(large) :]
    bars: list[tuple[str, float, float, str, tuple[int, int] | None]] = []
    start = 0
    for change in large:
        bars.append(
            (
                full_label(change.id),
                start,
                change.difference_ns,
                color(change.id),
                change.ci95_ns,
            )
        )
        start += change.difference_ns
    if small:
        rest = sum(c.difference_ns for c in small)
        label = full_label(small[0].id) if len(small) == 1 else f"{len(small)} smaller"
        bars.append((label, start, rest, "#9aa0a8", None))
    step = comparison.step
    bars.append(("B − A", 0, step.difference_ns, "", step.ci95_ns))
    return (
        {"data": [_bars(bars)], "layout": _layout(bars)} if leaves else {"data": [], "layout": {}}
    )


def _bars(bars: Sequence[tuple[str, float, float, str, tuple[int, int] | None]]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "y": [plain(b[0]) for b in bars],
        "base": [_ms(b[1]) for b in bars],
        "x": [_ms(b[2]) for b in bars],
        "marker": {"color": [b[3] for b in bars]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_ms(b[4][1] - b[2]) if b[4] else 0 for b in bars],
            "arrayminus": [_ms(b[2] - b[4][0]) if b[4] else 0 for b in bars],
            "color": "#85888e",
            "thickness": 1,
            "width": 3,
        },
        "customdata": [[signed_duration(b[2]), interval(b[4])] for b in bars],
        "hovertemplate": "<b>%{y}</b><br>%{customdata[0]} per step<br>"
        "95 %: %{customdata[1]}<extra></extra>",
        "showlegend": False,
        "width": 0.62,
    }


def _layout(
    bars: Sequence[tuple[str, float, float, str, tuple[int, int] | None]],
) -> dict[str, Any]:
    ends = [b[1] + b[2] for b in bars]
    low, high = min(0.0, *ends), max(0.0, *ends)
    room = 0.14 * (high - low or 1)
    return {
        "height": 64 + 30 * len(bars),
        "margin": {"l": 8, "r": 96, "t": 8, "b": 44},
        "xaxis": {
            "title": {"text": "ms per step, difference from A"},
            "range": [_ms(low - room), _ms(high + room)],
            "zeroline": True,
        },
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "annotations": [
            {
                "x": 1,
                "xref": "paper",
                "y": plain(b[0]),
                "text": signed_duration(b[2]),
                "xanchor": "left",
                "xshift": 8,
                "showarrow": False,
            }
            for b in bars
        ],
    }


def _ms(time_ns: float) -> float:
    return float(f"{time_ns / 1e6:.6g}")
