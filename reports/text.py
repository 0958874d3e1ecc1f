"""The attribution for a terminal: verdict, causes, ranks."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chopper import wording as fmt
from chopper.errors import printable
from chopper.reports.details import REASONS
from chopper.reports.palette import color
from chopper.reports.story import KIND_HEADER, Story, Views, kind_rows, tell, tracing_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.views import View
    from chopper.attribution import CauseRow, Group, Level, Recoverable

_MARK = {"error": ("✗", "bold red"), "warning": ("!", "yellow"), "info": ("·", "dim")}
_MIN_WIDTH = 60
_MODEL_MARK = "~"
_WITHHELD_MARK = "?"
_VIEW_ROWS = 20


def render(
    attribution: Attributed,
    *,
    by: Level | None = None,
    top: int | None = None,
    width: int = 100,
    color: bool = False,
) -> str:
    """The attribution as text.

    Args:
        attribution: what to print.
        by: regroup by this level instead of showing the tree of causes.
        top: rows of a regrouping; None for 20 (steps and ranks are all shown).
        width: columns of the terminal; lines never exceed it.
        color: emit ANSI colours.
    """
    width = max(width, _MIN_WIDTH)
    views = Views(attribution)
    story = tell(views)
    console = _console(width, color)
    _head(console, attribution, story)
    if by is None or by == "cause":
        _causes(console, attribution, story, width)
    else:
        _groups(console, views, story, by, top, width)
    _ranks(console, views, story, width)
    return _written(console)


def _console(width: int, color: bool) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def _written(console: Console) -> str:
    out = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in out.splitlines()) + "\n"


def render_view(
    view: View, table: pa.Table, *, top: int | None = None, width: int = 100, color: bool = False
) -> str:
    """One view as text: its title, what it shows, and its first rows.

    Columns stand in order of importance: those that do not fit are named below the table, and so
    are those without any value. Why a row has none stands there too, in full.

    Args:
        view: which one.
        table: its declared table.
        top: rows; None for 20.
        width: columns of the terminal; lines never exceed it.
        color: emit ANSI colours.
    """
    width = max(width, _MIN_WIDTH)
    console = _console(width, color)
    console.print(Text(view.title, style="bold"))
    console.print(Text(view.doc, style="dim"))
    console.print()
    if not table.num_rows:
        console.print(Text(nothing(view)))
        return _written(console)
    shown = table.slice(0, _VIEW_ROWS if top is None else top)
    why = [n for n in REASONS if n in shown.column_names and _is_optional(view, n)]
    known = [n for n in shown.column_names if n not in why]
    empty = [n for n in known if table[n].null_count == table.num_rows]
    columns = [_Column(n, shown) for n in known if n not in empty]
    empty = [n for n in empty if n not in _ALSO_NAMING]
    fitting = _fitted(columns, width)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for column in fitting:
        grid.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
    for row in zip(*(c.cells for c in fitting), strict=True):
        grid.add_row(*(Text(cell) for cell in row))
    console.print(grid)
    for line in _reasons(shown, why):
        console.print(line)
    notes = []
    if table.num_rows > shown.num_rows:
        notes.append(f"{fmt.plural(table.num_rows - shown.num_rows, 'more row')} (--top N)")
    hidden = [fmt.heading(c.name) for c in columns[len(fitting) :]]
    if hidden:
        notes.append(f"not shown, but in --csv and --json: {', '.join(hidden)}")
    if empty:
        notes.append(f"not known of any row: {', '.join(fmt.heading(n) for n in empty)}")
    for note in notes:
        console.print(Text(f"… {note}", style="dim"))
    return _written(console)


_ALSO_NAMING = ("phase", "window")
"""Columns that tell rows apart, wherever they stand."""
_NAMED_ROWS = 4


def _is_optional(view: View, name: str) -> bool:
    return any(c.name == name and c.nullable for c in view.table.columns)


def _reasons(table: pa.Table, columns: list[str]) -> list[Text]:
    """Why rows lack values: each reason once, with the rows that it is of."""
    naming = []
    for field in table.schema:
        if not (fmt.is_number_of(field.name) or str(field.type).startswith("dict")):
            break
        naming.append(field.name)
    naming += [n for n in _ALSO_NAMING if n in table.column_names and n not in naming]
    rows: dict[str, list[str]] = {}
    for row in table.to_pylist():
        for name in columns:
            if row[name] is not None:
                words = (_named(n, row[n]) for n in naming if row[n] is not None)
                rows.setdefault(row[name], []).append(printable(", ".join(words)))
    lines = []
    for reason, names in rows.items():
        distinct = list(dict.fromkeys(names))
        shown = "; ".join(distinct[:_NAMED_ROWS])
        if len(distinct) > _NAMED_ROWS:
            shown += f" and {len(distinct) - _NAMED_ROWS} more"
        line = Text(f"{fmt.UNKNOWN} {shown}: ", style="dim")
        lines.append(line.append(printable(reason), style="not dim"))
    return lines


def _named(column: str, value: object) -> str:
    text = fmt.cell(column, value)
    return f"{fmt.heading(column)} {text}" if isinstance(value, int) or column == "ranks" else text


def nothing(view: View) -> str:
    """Why a view has no rows."""
    return f"No rows: {view.needs}." if view.needs else "No rows."


# Least width of a first column of words, of the others, and of names of kernels.
_FIRST_WIDTH, _WORDS_WIDTH, _KERNEL_WIDTH = 24, 17, 36
_GAP = 2


class _Column:
    """A column of a view as text cells."""

    def __init__(self, name: str, table: pa.Table) -> None:
        kind = str(table.schema.field(name).type)
        self.name = name
        self.heading = fmt.heading(name)
        self.words = not kind.startswith(("int", "double", "bool"))
        self.cells = [printable(fmt.cell(name, v)) for v in table[name].to_pylist()]
        self.width = max(len(self.heading), *(len(c) for c in self.cells))

    def narrowed(self, width: int) -> None:
        """Cut the middle out of cells that are longer than ``width``."""
        self.cells = [fmt.ellipsize(c, width) for c in self.cells]


def _fitted(columns: list[_Column], width: int) -> list[_Column]:
    """The first columns that fit, long words shortened so that all of them do."""
    least = []
    for i, column in enumerate(columns):
        floor = _WORDS_WIDTH if i else _FIRST_WIDTH
        floor = max(_KERNEL_WIDTH if column.name == "kernel" else floor, len(column.heading))
        least.append(min(column.width, floor) if column.words else column.width)
    count = 1
    while count < len(columns) and sum(least[: count + 1]) + _GAP * count <= width:
        count += 1
    chosen = columns[:count]
    spare = width - sum(least[:count]) - _GAP * (count - 1)
    # The shortest first: what they do not need is left for the long ones.
    words = sorted((i for i in range(count) if chosen[i].words), key=lambda i: chosen[i].width)
    for left, i in zip(range(len(words), 0, -1), words, strict=True):
        given = min(chosen[i].width, least[i] + max(spare, 0) // left)
        spare -= given - least[i]
        chosen[i].narrowed(given)
    return chosen


def _head(console: Console, attribution: Attributed, story: Story) -> None:
    title = Text(story.title, style="bold")
    title.append("  " + " · ".join(story.facts), style="not bold dim")
    console.print(title)
    for finding in story.findings:
        mark, style = _MARK[finding.severity]
        where = (
            "" if finding.rank is None or len(attribution.ranks) < 2 else f"rank {finding.rank}: "
        )
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column()
        line.add_row(Text(mark, style=style), Text(where + finding.message, style=style))
        console.print(line)
    console.print()
    console.print(Text(story.verdict, style="bold"))
    # Why no ideal is known is the whole detail then, and was said among the findings.
    if story.detail and all(f.message != story.ideal_reason for f in story.findings):
        console.print(Text(story.detail))
    if story.tracing:
        console.print(Text(story.tracing))
    for said in (*story.ceiling, story.utilization, story.withheld):
        if said:
            console.print(Text(said, style="dim"))
    console.print()
    _kinds(console, story)


def _kinds(console: Console, story: Story) -> None:
    """Steps of several kinds, a row each."""
    rows = kind_rows(story.step)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    last = len(KIND_HEADER) - 1
    for i, name in enumerate(KIND_HEADER):
        longest = min(max(len(name), *(len(row[i]) for row in rows)), _FIRST_WIDTH + 8)
        table.add_column(
            name,
            justify="left" if i in (0, last) else "right",
            no_wrap=True,
            min_width=None if i == last else longest,
            max_width=None if i == last else longest,
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)
    console.print()


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    full, part = divmod(max(eighths, 1 if share > 0 else 0), 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")


def _causes(console: Console, attribution: Attributed, story: Story, width: int) -> None:
    rows = [r for r in attribution.causes() if r.time_ns > 0]
    if not rows:
        return
    wide = width >= 84
    bar_width = max(6, min(30, width - 88 - 7 * bool(story.tracing))) if wide else 0
    back = attribution.recoverable()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("where the time went", no_wrap=True, overflow="ellipsis")
    table.add_column(f"per {story.traced_unit}", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if wide:
        table.add_column("gives back", justify="right", no_wrap=True)
        table.add_column("95 % interval", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, width=bar_width)
    modelled = unsupported = False
    for row in rows:
        modelled |= not row.measured and row.withheld is None
        unsupported |= row.withheld is not None
        table.add_row(*_cause_cells(row, back[row.id].time_ns, story, bar_width if wide else 0))
    total = ["observed", fmt.duration(story.observed_per_window_ns), "100 %"]
    table.add_section()
    table.add_row(*[Text(t, style="bold") for t in total], *([""] * (3 if wide else 0)))
    for label, time, share, interval in tracing_rows(story):
        table.add_row(label, time, share, *(["", interval, ""] if wide else []))
    console.print(table)
    notes = [f"{_MODEL_MARK} a model has a part in it; the others are recorded times"] * modelled
    notes += [
        f"{_WITHHELD_MARK} the data does not support it: see what is not claimed"
    ] * unsupported
    if wide:
        notes.append(_back_note(list(back.values())))
    if notes:
        console.print()
    for note in notes:
        console.print(Text(note, "dim"))


def _back_note(back: list[Recoverable]) -> str:
    """What the column of the replay says, or why it is empty."""
    if any(one.time_ns is not None for one in back):
        return "gives back: less time if this alone were gone, by a replay (chopper whatif); no sum"
    return f"gives back: not known, {next((one.reason for one in back if one.reason), '')}"


def _cause_cells(row: CauseRow, back_ns: int | None, story: Story, bar_width: int) -> list[Text]:
    depth = row.id.count(".")
    style = "bold" if depth == 0 else ""
    label = Text("  " * depth + row.label, style=style)
    if row.withheld is not None:
        label.append(f" {_WITHHELD_MARK}", style="dim")
    elif not row.measured:
        label.append(f" {_MODEL_MARK}", style="dim")
    cells = [
        label,
        Text(fmt.duration(row.time_ns / story.windows), style=style),
        Text(fmt.ratio(row.share_ratio), style=style),
    ]
    if bar_width:
        interval = fmt.UNKNOWN
        if row.ci95_ns is not None:
            low, high = (v / story.windows for v in row.ci95_ns)
            interval = f"{fmt.duration(low)} – {fmt.duration(high)}"
        back = None if back_ns is None else back_ns / story.windows
        cells.append(Text(fmt.duration(back)))
        cells.append(Text(interval, style="dim"))
        cells.append(Text(_bar(row.share_ratio or 0.0, bar_width), style=color(row.id)))
    return cells


def _groups(
    console: Console, views: Views, story: Story, level: Level, top: int | None, width: int
) -> None:
    groups = views.by(level)
    per_step = level == "step"
    ordered = level in ("step", "rank")
    limit = top if top is not None else (len(groups) if ordered else 20)
    shown = groups[:limit]
    ranks = max(len(views.attribution.ranks), 1)
    steps_of = {r.rank: max(r.steps, 1) for r in views.attribution.ranks}
    observed = max(views.attribution.observed_ns, 1)
    wide = width >= 84
    bar_width = max(6, min(24, width - 80)) if wide else 0
    figures = 22 + (bar_width + 2 if wide else 0)
    room = width - figures - 4
    cause_width = min(28, max(14, room // 3))
    name_width = max(12, room - cause_width)
    longest = max((len(group_label(group, level)) for group in shown), default=0)
    cause_width = max(cause_width, room - max(longest, len(level)))

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(level, no_wrap=True, max_width=name_width)
    table.add_column(
        "time" if per_step else f"per {story.traced_unit}", justify="right", no_wrap=True
    )
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("mostly", no_wrap=True, max_width=cause_width, overflow="ellipsis")
    if wide:
        table.add_column("", no_wrap=True, width=bar_width)
    for group in shown:
        divisor = (
            ranks
            if per_step
            else steps_of.get(int(group.key), 1)
            if level == "rank" and group.key is not None
            else story.windows
        )
        table.add_row(*_group_cells(group, level, divisor, observed, name_width, bar_width))
    console.print(table)
    if len(groups) > len(shown):
        rest = sum(g.time_ns for g in groups[len(shown) :])
        console.print(
            Text(
                f"{fmt.plural(len(groups) - len(shown), 'more row')}: "
                f"{fmt.duration(rest / story.windows)} per {story.traced_unit}, "
                f"{fmt.ratio(rest / observed)} (--top shows more)",
                style="dim",
            )
        )


def group_label(group: Group, level: str) -> str:
    """A group's key for people, printable; None is what has no value at this level."""
    if group.key is None:
        return {"step": "whole trace", "rank": "no rank"}.get(level, f"(no {level})")
    if level == "kernel":
        return printable(fmt.kernel_name(str(group.key)))
    if level in ("step", "rank"):
        return f"{level} {group.key}"
    return printable(str(group.key))


def _group_cells(
    group: Group, level: str, divisor: int, observed: int, name_width: int, bar_width: int
) -> list[Text]:
    from chopper.causes import CAUSES

    largest = max(group.causes.items(), key=lambda kv: kv[1], default=None)
    mostly = Text("")
    if largest is not None and group.time_ns:
        cause, time_ns = largest
        mostly = Text(f"{fmt.ratio(time_ns / group.time_ns)} {CAUSES[cause].label}", style="dim")
    cells = [
        Text(fmt.ellipsize(group_label(group, level), name_width)),
        Text(fmt.duration(group.time_ns / divisor)),
        Text(fmt.ratio(group.time_ns / observed)),
        mostly,
    ]
    if bar_width:
        style = color(largest[0]) if largest else ""
        cells.append(Text(_bar(group.time_ns / observed, bar_width), style=style))
    return cells


def _ranks(console: Console, views: Views, story: Story, width: int) -> None:
    """One line over the ranks: the spread of the step time, and who is slowest."""
    ranks = views.attribution.ranks
    if len(ranks) < 2:
        return
    per_step = {printable(r.label): r.observed_ns / max(r.steps, 1) for r in ranks}
    slowest = max(per_step, key=per_step.__getitem__)
    fastest = min(per_step, key=per_step.__getitem__)
    console.print()
    if len(ranks) <= 4 and width >= 84:
        parts = [f"{label} {fmt.duration(t)}" for label, t in per_step.items()]
        console.print(Text(f"per {story.traced_unit}: " + " · ".join(parts), style="dim"))
    else:
        console.print(
            Text(
                f"{len(ranks)} ranks, per {story.traced_unit}: fastest {fastest} "
                f"{fmt.duration(per_step[fastest])}, slowest {slowest} "
                f"{fmt.duration(per_step[slowest])}",
                style="dim",
            )
        )


__all__ = ["group_label", "render"]
