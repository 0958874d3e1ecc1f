"""The same nanoseconds, grouped another way: as a table, and as data for a page's scripts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from chopper import wording as fmt
from chopper.causes import CAUSES, LEAVES
from chopper.reports.labels import PHASES, color, full_label
from chopper.reports.page import Cell, Column, Table

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import Group
    from chopper.causes import Level
    from chopper.reports.story import Groupings, Story

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
_UNCOUNTED: tuple[int | None, int | None] = (None, None)


def group_label(group: Group, level: str, labels: dict[int, str] | None = None) -> str:
    """Return a group's key for people; None is what has no value at this level.

    Args:
        group: whose.
        level: of the grouping.
        labels: names of ranks, where they have any.
    """
    if group.key is None:
        return {"step": "whole trace", "rank": "no rank"}.get(level, f"no {level}")
    if level == "kernel":
        return fmt.kernel_name(str(group.key))
    if level == "rank" and labels is not None:
        return labels.get(int(group.key), f"rank {group.key}")
    return f"{level} {group.key}" if level in ("step", "rank") else str(group.key)


def divisors(groupings: Groupings, level: Level) -> list[int]:
    """Return, for each group of a level, how many windows its time is the sum of."""
    run = groupings.run
    steps = {r.rank: max(r.steps, 1) for r in run.ranks}
    windows = Counter(run.windows["number"].to_pylist() if level == "step" else [])
    out = []
    for group in groupings.by(level):
        if level == "rank" and group.key is not None:
            out.append(steps.get(int(group.key), 1))
        else:
            out.append(max(windows[group.key], 1) if level == "step" else groupings.windows)
    return out


def table(groupings: Groupings, story: Story, level: Level, *, rows: int | None) -> Table:
    """Return one level as a table.

    Args:
        groupings: of the run.
        story: names the unit of the times.
        level: which one.
        rows: groups to list; None for all.
    """
    groups = groupings.by(level)
    observed = max(groupings.run.observed_ns, 1)
    lines = []
    for group, divisor in list(zip(groups, divisors(groupings, level), strict=True))[:rows]:
        largest = max(group.causes.items(), key=lambda kv: kv[1], default=None)
        mostly = fmt.UNKNOWN
        if largest is not None and group.time_ns:
            mostly = f"{fmt.ratio(largest[1] / group.time_ns)} {CAUSES[largest[0]].label}"
        share = group.time_ns / observed
        hue = color(largest[0]) if largest else ""
        lines.append(
            (
                Cell(text=group_label(group, level), hint=str(group.key)),
                fmt.duration(group.time_ns / divisor),
                Cell(text=fmt.ratio(share), share_ratio=share, color=hue),
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
    heading = dict(LEVELS)[level]
    columns = (heading, unit, "Share", Column("Mostly", kind="name"))
    return Table(columns=columns, rows=lines, rest=rest)


def data(groupings: Groupings, story: Story) -> dict[str, Any]:
    """Return what a page's scripts read: causes, levels, windows, colours."""
    run = groupings.run
    order = sorted((row.id for row in run.leaves()), key=LEAVES.index)
    number = {cause: i for i, cause in enumerate(order)}
    return {
        "unit": story.unit,
        "windows": story.windows,
        "observed_ns": run.observed_ns,
        "causes": [
            {"id": c, "label": full_label(c), "color": color(c)}
            for c in [*order, *(c for c in CAUSES if c not in number)]
        ],
        "phase_colors": PHASES,
        "rank_labels": {str(r.rank): r.label for r in run.ranks},
        "step_index": sorted({int(i) for i in run.windows["step_index"].to_pylist()}),
        "levels": [_level(groupings, level, label, number) for level, label in LEVELS],
    }


def _level(
    groupings: Groupings, level: Level, label: str, number: dict[str, int]
) -> dict[str, Any]:
    """Return one level for the scripts.

    Rows are ``[key, shown, time_ns, divisor, calls, busy_ns, [[cause, time_ns]…], order]``: the
    divisor turns the sum into a mean per step, calls and busy are counted over all windows.
    """
    run, groups = groupings.run, groupings.by(level)
    ordered = level in ("step", "rank")
    labels = {r.rank: r.label for r in run.ranks}
    counted = {} if ordered else calls(run, level)
    rows: list[list[Any]] = []
    for i, (group, divisor) in enumerate(
        zip(groups[:_MAX_ROWS], divisors(groupings, level)[:_MAX_ROWS], strict=True)
    ):
        causes = [[number[c], t] for c, t in group.causes.items() if t > 0 and c in number]
        shown = str(group.key) if level == "step" else group_label(group, level, labels)
        if group.key is None:
            shown = "whole trace" if level == "step" else f"no {level}"
        rows.append(
            [
                *(None if group.key is None else str(group.key), shown, group.time_ns, divisor),
                *counted.get(group.key, _UNCOUNTED),
                sorted(causes),
                i if ordered else None,
            ]
        )
    rest = groups[_MAX_ROWS:]
    time_ns = sum(g.time_ns for g in rest)
    cut = (
        f"{fmt.plural(len(rest), 'smaller row')} not listed: "
        f"{fmt.duration(time_ns / groupings.windows)}, "
        f"{fmt.ratio(time_ns / max(run.observed_ns, 1))} in all."
    )
    return {
        "id": level,
        "label": label,
        "ordered": ordered,
        "calls": not ordered,
        "rows": rows,
        "cut": cut if rest else None,
    }


def calls(run: Attributed, level: str) -> dict[str | int | None, tuple[int, int]]:
    """Return, for each value of a level, its device events in the windows and how long they ran.

    Durations count overlapped time too, so they can exceed the attributed time.
    """
    counted: dict[str | int | None, tuple[int, int]] = {}
    for rank, trace in run.joined.items():
        links, events = run.links[rank], trace.device_event
        key = (events["name"] if level == "kernel" else links[level]).cast(pa.string())
        rows = pa.table({"key": key, "dur_ns": events["dur_ns"]})
        groups = rows.filter(links["step_index"].is_valid()).group_by("key")
        for row in groups.aggregate([("dur_ns", "count"), ("dur_ns", "sum")]).to_pylist():
            count, busy_ns = counted.get(row["key"], (0, 0))
            counted[row["key"]] = count + row["dur_ns_count"], busy_ns + row["dur_ns_sum"]
    return counted
