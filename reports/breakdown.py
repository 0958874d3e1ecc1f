"""The same nanoseconds, grouped another way: as a table, and as data for a page's scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from chopper import wording as fmt
from chopper.analyzers.attribution import Group
from chopper.analyzers.events.collectives import WAIT
from chopper.causes import CAUSES, LEAVES, PHASE_COLORS, Level
from chopper.reports.labels import color, full_label
from chopper.reports.page import Cell, Column, Table
from chopper.reports.story import Story

LEVELS: tuple[tuple[Level, str], ...] = (
    ("phase", "Phase"),
    ("layer", "Layer"),
    ("op", "Operator"),
    ("kernel", "Kernel"),
    ("step", "Step"),
    ("rank", "Rank"),
)
_MAX_ROWS = 1000
"""Rows of one level in a page; the rest is one row."""
OWN_TIME = "Own time: how long the device events themselves ran, without the waiting before them."


def _label(story: Story, group: Group, level: Level) -> str:
    """Return the label of a group's key; None is the group without a value at this level."""
    if group.key is None:
        return "whole trace" if level == "step" else f"no {level}"
    if level == "kernel":
        return fmt.kernel_name(str(group.key))
    if level == "rank":
        return next((r.label for r in story.run.ranks if r.rank == group.key), f"rank {group.key}")
    return str(group.key)


def _windows(story: Story, level: Level) -> Mapping[str | int | None, int]:
    """Return, for each step or rank, how many windows its time is the sum of; else nothing."""
    if level == "step":
        return Counter(story.run.windows["number"].to_pylist())
    return {r.rank: max(r.steps, 1) for r in story.run.ranks} if level == "rank" else {}


def table(story: Story, level: Level, *, rows: int | None) -> Table:
    """Return the first rows of one level as a table; None for all of them."""
    groups, windows = story.by(level), _windows(story, level)
    observed = max(story.run.observed_ns, 1)
    has_own_time = level in ("op", "kernel")
    waits = level == "rank" and any(WAIT in group.causes for group in groups)
    lines = []
    labels = [_label(story, group, level) for group in groups[:rows]]
    alike = {label for label, number in Counter(labels).items() if number > 1}
    for group, label in zip(groups, labels, strict=False):
        cause, time_ns = max(group.causes.items(), key=lambda kv: kv[1], default=("", 0))
        mostly = fmt.UNKNOWN
        if cause and group.time_ns:
            mostly = f"{fmt.ratio(time_ns / group.time_ns)} {CAUSES[cause].label}"
        share = group.time_ns / observed
        if level == "kernel" and group.key is not None and label in alike:
            label = fmt.whole_kernel_name(str(group.key))
        if level == "step" and group.key is not None:
            label = f"step {label}"
        lines.append(
            (
                Cell(text=label, hint=str(group.key)),
                fmt.duration(group.time_ns / windows.get(group.key, story.windows)),
                *([fmt.duration((group.own_ns or 0) / story.windows)] if has_own_time else ()),
                *([fmt.duration(_own_ns(group) / windows[group.key])] if waits else ()),
                Cell(text=fmt.ratio(share), share_ratio=share, color=cause and color(cause)),
                Cell(text=mostly, dim=True),
            )
        )
    rest = ""
    if len(groups) > len(lines):
        left_ns = sum(g.time_ns for g in groups[len(lines) :])
        rest = (
            f"{fmt.plural(len(groups) - len(lines), 'more row')}: "
            f"{fmt.duration(left_ns / story.windows)} per {story.traced_unit}, "
            f"{fmt.ratio(left_ns / observed)} (--top shows more)"
        )
    unit = "Time" if level == "step" else f"Per {story.traced_unit}"
    columns = (
        dict(LEVELS)[level],
        unit,
        *(("Own time",) if has_own_time else ()),
        *(("Without waiting",) if waits else ()),
        "Share",
        Column("Largest cause", kind="name"),
    )
    return Table(columns=columns, rows=lines, rest=rest, note=OWN_TIME if has_own_time else "")


def _own_ns(group: Group) -> int:
    return group.time_ns - group.causes.get(WAIT, 0)


def data(story: Story) -> dict[str, Any]:
    """Return what a page's scripts read: causes, levels, windows, colours."""
    run = story.run
    order = sorted((row.id for row in run.leaves()), key=LEAVES.index)
    return {
        "unit": story.unit,
        "windows": story.windows,
        "observed_ns": run.observed_ns,
        "causes": [
            {"id": c, "label": full_label(c), "color": color(c)}
            for c in dict.fromkeys((*order, *CAUSES))
        ],
        "phase_colors": PHASE_COLORS,
        "rank_labels": {str(r.rank): r.label for r in run.ranks},
        "step_index": sorted({int(i) for i in run.windows["step_index"].to_pylist()}),
        "levels": [_level(story, level, label, order) for level, label in LEVELS],
    }


def _level(story: Story, level: Level, label: str, leaves: list[str]) -> dict[str, Any]:
    """Return one level for the scripts.

    Rows are ``[key, shown, time_ns, divisor, runs, own_ns, [[cause, time_ns]…], order]``: the
    divisor turns the sum into a mean per step, runs and own time are sums over all windows.
    """
    groups, windows = story.by(level), _windows(story, level)
    ordered = level in ("step", "rank")
    rows = [
        (
            None if group.key is None else str(group.key),
            _label(story, group, level),
            group.time_ns,
            windows.get(group.key, story.windows),
            group.events_count,
            group.own_ns,
            sorted((leaves.index(c), t) for c, t in group.causes.items() if t > 0),
            i if ordered else None,
        )
        for i, group in enumerate(groups[:_MAX_ROWS])
    ]
    rest = groups[_MAX_ROWS:]
    time_ns = sum(g.time_ns for g in rest)
    cut = (
        f"{fmt.plural(len(rest), 'smaller row')} not listed: "
        f"{fmt.duration(time_ns / story.windows)}, "
        f"{fmt.ratio(time_ns / max(story.run.observed_ns, 1))} in total."
    )
    return {
        "id": level,
        "label": label,
        "ordered": ordered,
        "calls": not ordered,
        "own_time": OWN_TIME,
        "rows": rows,
        "cut": cut if rest else None,
    }
