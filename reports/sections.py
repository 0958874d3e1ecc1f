"""Parts of the page of a run: times by level, detailed tables, the environment."""

from __future__ import annotations

import datetime as dt
import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from chopper import tables as declarations
from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution, Group
from chopper.analyzers.views import View
from chopper.causes import CAUSES, LEAVES, PHASE_COLORS, WAITS, Level
from chopper.reports.labels import color, full_label
from chopper.reports.page import (
    BROWSER,
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Items,
    Mark,
    Page,
    Paragraph,
    Section,
    Table,
)
from chopper.reports.story import Story
from chopper.reports.tables import ORDERED, windows_of_groups
from chopper.storage.manifest import DIMENSIONS, CollectorReport, RunManifest
from chopper.views import in_sections

LEVELS: tuple[tuple[Level, str], ...] = (
    ("phase", "Phase"),
    ("layer", "Layer"),
    ("op", "Operator"),
    ("kernel", "Kernel"),
    ("step", "Step"),
    ("rank", "Rank"),
    *((dimension, f"{dimension.capitalize()} parallelism") for dimension in DIMENSIONS),
)
_MAX_ROWS = 1000
"""Rows of one level in a page; the rest is one row."""
OWN_TIME = "Own time: how long the device events themselves ran, without the waiting before them."


def _group_label(story: Story, group: Group, level: Level) -> str:
    """Return the label of a group's key; None is the group without a value at this level."""
    if group.key is None:
        return "whole trace" if level == "step" else f"no {level}"
    if level == "kernel":
        return fmt.kernel_name(str(group.key))
    if level == "rank":
        return next((r.label for r in story.run.ranks if r.rank == group.key), f"rank {group.key}")
    return f"{level} {group.key}" if level in DIMENSIONS else str(group.key)


def levels_of(story: Story) -> list[tuple[Level, str]]:
    """Return the levels of a page with their titles: without dimensions that divide no ranks."""
    unknown = {*DIMENSIONS} - {*story.run.dimensions}
    return [(level, title) for level, title in LEVELS if level not in unknown]


def level_table(story: Story, level: Level, *, rows: int | None) -> Table:
    """Return the first rows of one level as a table; None for all of them."""
    groups, windows = story.by(level), windows_of_groups(story.run, level)
    observed = max(story.run.observed_ns, 1)
    has_own_time = level in ("op", "kernel")
    waits = level in ("rank", *DIMENSIONS) and any(WAITS & group.causes.keys() for group in groups)
    lines = []
    labels = [_group_label(story, group, level) for group in groups[:rows]]
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
                fmt.duration(group.time_ns / windows[group.key]),
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
    return group.time_ns - sum(group.causes.get(cause, 0) for cause in WAITS)


def level_data(story: Story) -> dict[str, Any]:
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
        "levels": [_level(story, level, label, order) for level, label in levels_of(story)],
    }


def _level(story: Story, level: Level, label: str, leaves: list[str]) -> dict[str, Any]:
    """Return one level for the scripts.

    Rows are ``[key, shown, time_ns, divisor, runs, own_ns, [[cause, time_ns]…], order]``: the
    divisor turns the sum into a mean per step, runs and own time are sums over all windows.
    """
    groups, windows = story.by(level), windows_of_groups(story.run, level)
    ordered = level in ORDERED
    rows = [
        (
            None if group.key is None else str(group.key),
            _group_label(story, group, level),
            group.time_ns,
            windows[group.key],
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


MAX_ROWS = 500
"""Rows of one view in the page; the command line prints all."""
REASONS = ("reason", "no_correlation")
"""Columns that say why others of a row are null: they are read, not compared."""
MAX_CHARACTERS = 300
"""Longer texts (shapes of a thousand tensors) are cut in the middle."""
_VIEW_ROWS = 20
_ALSO_NAMING = ("phase", "window")
"""Columns that tell rows apart, wherever they stand."""
_OFTEN_UNKNOWN = (*_ALSO_NAMING, "micro_steps")
"""Columns that few recordings can hold: nothing is said where they are empty."""
_NAMED_ROWS = 4


def view_page(view: View, table: pa.Table, *, top: int | None = None) -> Page:
    """Return the page of a view.

    Columns stand in order of importance. Those without any value are named below the table; why
    rows lack a value stands there too, in full.

    Args:
        view: which one.
        table: its declared table.
        top: rows; None for 20.
    """
    blocks = _blocks(view, table, top or _VIEW_ROWS)
    return Page(title=view.title, headline="", summary=(Paragraph(view.summary, "dim"), *blocks))


def _blocks(view: View, table: pa.Table, rows: int) -> list[Paragraph | Table | Items]:
    if not table.num_rows:
        return [Paragraph(f"No rows: {view.needs}." if view.needs else "No rows.")]
    first_rows = table.slice(0, rows)
    why = [c.name for c in view.columns if c.name in REASONS]
    known = [n for n in first_rows.column_names if n not in why]
    filled = [n for n in known if table[n].null_count < table.num_rows]
    unknown = [fmt.heading(n) for n in known if n not in (*filled, *_OFTEN_UNKNOWN)]
    more = table.num_rows - first_rows.num_rows
    notes = [f"… {fmt.plural(more, 'more row')} (--top N)"] if more else []
    notes += [f"… unknown in every row: {', '.join(unknown)}"] if unknown else []
    cells = [[_cell(n, value) for value in first_rows[n].to_pylist()] for n in filled]
    numbers = ("int", "double", "bool")
    kinds = [str(table.schema.field(n).type).startswith(numbers) for n in filled]
    grid = Table(
        columns=[
            Column(fmt.heading(n), kind="number" if number else "name")
            for n, number in zip(filled, kinds, strict=True)
        ],
        rows=[*zip(*cells, strict=True)],
        rest=". ".join(notes),
        overflow="named",
    )
    reasons = _reasons(first_rows, why)
    return [grid, *([Items(items=reasons)] if reasons else [])]


def _reasons(table: pa.Table, columns: list[str]) -> list[str]:
    """Return why rows lack values: each reason once, with the rows that it is about."""
    leading = itertools.takewhile(
        lambda f: fmt.is_number_of(f.name) or str(f.type).startswith("dict"), table.schema
    )
    also = (n for n in _ALSO_NAMING if n in table.column_names)
    naming = dict.fromkeys((*(field.name for field in leading), *also))
    rows: dict[str, dict[str, None]] = {}
    for row in table.to_pylist():
        words = ", ".join(_named(n, row[n]) for n in naming if row[n] is not None)
        for name in columns:
            if row[name] is not None:
                rows.setdefault(row[name], {})[words] = None
    lines = []
    for reason, names in rows.items():
        more = f" and {len(names) - _NAMED_ROWS} more" if len(names) > _NAMED_ROWS else ""
        lines.append(f"{'; '.join([*names][:_NAMED_ROWS])}{more}: {reason}")
    return lines


def _cell(column: str, value: object) -> str:
    """Return a value for people; causes by their labels."""
    known = column == "cause" and value is not None
    return full_label(str(value)) if known else fmt.cell(column, value)


def _named(column: str, value: object) -> str:
    text = _cell(column, value)
    return f"{fmt.heading(column)} {text}" if isinstance(value, int) or column == "ranks" else text


def view_tables(run: Attribution, views: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Return all views that have rows, in the order of their sections.

    A column of numbers is a list of values; a column of words is a list of codes into its
    ``names``, pairs of (as recorded, for people). Null is null. Columns without a value are left
    out.
    """
    source = shlex.quote(run.recording.source)
    return [
        {
            "id": one.name,
            "title": one.title,
            "doc": one.summary,
            "about": [part.replace("\n", " ") for part in one.doc.split("\n\n")],
            "total": table.num_rows,
            "command": f"chopper analyze {source} --view {one.name} --csv",
            "columns": [
                _column(declared, table.slice(0, MAX_ROWS))
                for declared in one.columns
                if table[declared.name].null_count < table.num_rows
            ],
        }
        for one in in_sections()
        for table in [views[one.name]]
        if table.num_rows
    ]


def _column(declared: declarations.Column, table: pa.Table) -> dict[str, Any]:
    values = table[declared.name].to_pylist()
    column: dict[str, Any] = {
        "label": fmt.heading(declared.name),
        "field": declared.name,
        "doc": declared.doc,
        "unit": fmt.unit(declared.name),
    }
    if declared.type in ("string", "text"):
        names = list(dict.fromkeys(v for v in values if v is not None))
        code = {name: i for i, name in enumerate(names)}
        column["names"] = [_full_name(declared.name, name) for name in names]
        column["values"] = [None if v is None else code[v] for v in values]
        column["prose"] = declared.name in REASONS
        return column
    if declared.type == "bool":
        column["unit"] = "bool"
    elif fmt.is_number_of(declared.name):
        column["unit"] = "id"
    column["values"] = [_short(v) if isinstance(v, float) else v for v in values]
    return column


def _full_name(column: str, text: str) -> list[str]:
    full = fmt.ellipsize(text, MAX_CHARACTERS)
    label = fmt.ellipsize(_cell(column, text), MAX_CHARACTERS)
    return [full] if label == full else [full, label]


def _short(value: float) -> float | None:
    """Six significant digits: what a table can show, and short in JSON."""
    short = float(f"{value:.6g}")
    return short if abs(short) < float("inf") else None


_LABELS = {
    "affinity": "Allowed cores",
    "cores_by_numa_node": "Cores by NUMA node",
    "cpu": "CPU",
    "cuda": "CUDA",
    "hip": "HIP",
    "nccl": "NCCL",
    "platform": "Platform",
    "python": "Python",
    "torch": "PyTorch",
    "torch_threads": "PyTorch's threads",
}
_MARKS: dict[str, Mark] = {"obtained": "ok", "refused": "warning", "failed": "error"}
_MAX_RANKS = 16
"""Ranks whose overhead is listed."""


def environment(run: Attribution) -> Section:
    """Return the environment of a run, its collectors, and what recording it cost."""
    manifest = run.recording.manifest
    blocks: list[Block] = [Facts(facts=_facts(manifest))]
    blocks += [t for t in (_collectors(manifest), _overhead(run)) if t.rows]
    return Section(
        title="Environment",
        id="environment",
        intro="What was run, where, and what chopper could record.",
        blocks=blocks,
        formats=BROWSER,
    )


def _facts(run: RunManifest) -> list[Fact]:
    ranks = run.ranks
    moment = dt.datetime.fromtimestamp((run.created_ns or 0) / 1e9, tz=dt.UTC)
    keys = dict.fromkeys(key for part in ranks for key in part.environment)
    traces = [Path(t).name for p in ranks for t in p.traces] if run.kind == "imported" else []
    texts = [
        ("Run", run.name),
        ("Command", shlex.join(run.command or ())),
        ("Workload", run.workload),
        ("Recorded", moment.strftime("%Y-%m-%d %H:%M:%S UTC") if run.created_ns else ""),
        ("Exit code", "" if run.exit_code is None else str(run.exit_code)),
        ("World size", ", ".join(map(str, sorted({p.world_size for p in ranks if p.world_size})))),
        ("Hosts", _few([p.hostname for p in ranks])),
        ("Backend", _few([p.backend for p in ranks])),
        ("Steps detected by", _few([p.steps_source for p in ranks])),
        ("Recorded by chopper", _few([p.chopper_version for p in ranks])),
        *(("Device", text if n == 1 else f"{n} × {text}") for text, n in _devices(run).items()),
        *((_LABELS.get(k, k), _few([p.environment.get(k) for p in ranks])) for k in keys),
        ("Traces", _few(traces)),
    ]
    return [Fact(label=label, value=text, code=label == "Command") for label, text in texts if text]


def _few(values: Sequence[str | None]) -> str:
    """Return the distinct values, in order of first use; how many there are beyond a few."""
    distinct = list(dict.fromkeys(v for v in values if v))
    more = f" and {len(distinct) - 4} more" if len(distinct) > 4 else ""
    return ", ".join(distinct[:4]) + more


def _devices(run: RunManifest) -> Counter[str]:
    return Counter(
        ", ".join(
            [
                device.name or "unknown device",
                *([fmt.bytes_(device.memory_bytes)] if device.memory_bytes else []),
                *(
                    [fmt.plural(device.multiprocessor_count, "multiprocessor")]
                    if device.multiprocessor_count
                    else []
                ),
            ]
        )
        for part in run.ranks
        for device in part.devices
        if part.device_id in (None, device.device_id)
    )


def _collectors(run: RunManifest) -> Table:
    """Show a row per collector and outcome, ranks that agree together."""
    rows: dict[tuple[object, ...], tuple[CollectorReport, list[int]]] = {}
    for part in run.ranks:
        for report in part.collectors:
            # What was sampled differs by rank; a refusal is the same everywhere.
            alone = part.rank if report.samples_count is not None else None
            key = (report.name, report.status, report.reason, alone)
            first, ranks = rows.setdefault(key, (report, []))
            ranks.append(part.rank)
            worst = max(first.clock_alignment_error_ns or 0, report.clock_alignment_error_ns or 0)
            if worst:
                rows[key] = msgspec.structs.replace(first, clock_alignment_error_ns=worst), ranks
    clock = "Clock offset from the run's other recordings, as measured"
    return Table(
        title="Collectors",
        columns=(
            *("Collector", "Ranks", Column("Status", kind="prose")),
            *("Rate", "Samples", "Dropped", "Jitter p50 / p99", "Call p50 / p99", "CPU"),
            Column("Clock", hint=clock),
        ),
        words=2,
        rows=[
            _collector_cells(*row) for row in sorted(rows.values(), key=lambda r: (r[0].name, r[1]))
        ],
    )


def _collector_cells(report: CollectorReport, ranks: list[int]) -> list[str | Cell]:
    why = [report.reason or "", f"Remedy: {report.remedy}" if report.remedy else ""]
    if report.absent:
        absent = "; ".join(f"{name}: {reason}" for name, reason in sorted(report.absent.items()))
        why.append(f"{len(report.absent)} not read: {absent}")
    rate = fmt.hertz(report.achieved_hz)
    if report.achieved_hz is not None and report.requested_hz is not None:
        rate += f" of {fmt.hertz(report.requested_hz)}"
    error_ns = report.clock_alignment_error_ns
    return [
        Cell(text=report.name, strong=True),
        fmt.ranges(ranks),
        Cell(text=report.status, mark=_MARKS[report.status], below=". ".join(filter(None, why))),
        rate,
        fmt.count(report.samples_count),
        fmt.count(report.dropped_count),
        _pair(report.jitter_p50_ns, report.jitter_p99_ns),
        _pair(report.call_p50_ns, report.call_p99_ns),
        fmt.ratio(report.cpu_ratio),
        fmt.UNKNOWN if error_ns is None else f"± {fmt.duration(error_ns)}",
    ]


def _pair(low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return fmt.UNKNOWN
    return f"{fmt.duration(low)} / {fmt.duration(high)}"


def _overhead(run: Attribution) -> Table:
    rows = []
    step = run.step_time()
    for part in run.recording.manifest.ranks[:_MAX_RANKS]:
        cost = part.overhead
        if cost is None:
            continue
        traced_ns, untraced_ns = step.traced_mean_ns, step.headline_ns
        if step.untraced is None:
            # What the recording itself counted, as older ones did not say of each step.
            traced_ns, untraced_ns = cost.traced_step_ns, cost.untraced_step_ns
        change = fmt.UNKNOWN
        if traced_ns and untraced_ns:
            change = fmt.percent(traced_ns / untraced_ns - 1, "+.1f")
        times = (cost.setup_ns, cost.per_step_ns, cost.export_ns, traced_ns, untraced_ns)
        rows.append((str(part.rank), *map(fmt.duration, times), change))
    columns = ("Rank", "Set-up", "In each step", "Writing the trace")
    steps = ("Traced step", "Untraced step", "Tracing costs")
    return Table(title="Chopper's own overhead", columns=(*columns, *steps), rows=rows)
