"""Two runs beside each other, for a terminal or as Markdown; the page is `comparison_html`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chopper import wording as fmt
from chopper.analyzers.compare.result import percent, signed, signed_duration
from chopper.errors import UsageError, printable
from chopper.reports import FORMATS
from chopper.reports.markdown import escape
from chopper.reports.palette import color
from chopper.reports.text import _bar, _console, _written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from chopper.analyzers.compare.gate import Verdict
    from chopper.analyzers.compare.result import Change, Check, Comparison, Item, Side, Total

TOP = 15
"""Kernels and operators shown unless told otherwise."""
_MIN_WIDTH = 60
_SMALL_RATIO = 0.001
"""Causes whose difference is a smaller share of the step, and not told from noise, are one line."""
STATUS = {"both": "", "appeared": "new", "vanished": "gone"}


def render(comparison: Comparison, format: str, *, gate: Verdict | None = None) -> str:
    """A comparison as one string: ``html``, ``md``, ``json`` (documented) or ``txt``.

    Raises:
        UsageError: no such format.
    """
    if format == "html":
        from chopper.reports import comparison_html

        out = comparison_html.render(comparison, gate=gate)
    elif format == "md":
        out = markdown(comparison, gate=gate)
    elif format == "txt":
        out = text(comparison, gate=gate)
    elif format == "json":
        out = json.dumps(to_json(comparison, gate), indent=2, ensure_ascii=False) + "\n"
    else:
        raise UsageError(f"format {format!r} unknown: one of {', '.join(FORMATS)}")
    return out.encode("utf-8", "replace").decode("utf-8")


def to_json(comparison: Comparison, gate: Verdict | None) -> dict[str, object]:
    """The documented form; with a gate, what became of it."""
    out = comparison.to_dict()
    if gate is not None:
        out["gate"] = gate.to_dict()
    return out


def facts(side: Side) -> str:
    """What a side was, in a line."""
    steps = fmt.plural(side.steps, "step")
    if side.windows == 1 and side.steps == 1:
        steps = "1 window"
    return " · ".join([fmt.plural(side.ranks, "rank"), *map(printable, side.devices), steps])


def interval(ci95_ns: tuple[int, int] | None) -> str:
    """A 95 % interval of a difference."""
    if ci95_ns is None:
        return fmt.UNKNOWN
    return f"{signed_duration(ci95_ns[0])} … {signed_duration(ci95_ns[1])}"


def shown_changes(comparison: Comparison) -> tuple[list[Change], int]:
    """Causes worth a line of their own, and how many are not."""
    least = _SMALL_RATIO * max(comparison.step.a_ns, comparison.step.b_ns)
    shown = [
        c
        for c in comparison.changes
        if abs(c.difference_ns) >= least or max(c.a_ns, c.b_ns) >= 20 * least
    ]
    return shown, len(comparison.changes) - len(shown)


def calls(count: float) -> str:
    """A count per step, whole or with one digit."""
    if count == round(count) or count >= 99.95:
        return fmt.count(round(count))
    return f"{count:.1f}" if count >= 0.95 else f"{count:.2g}"


def item_name(item: Item, level: str) -> str:
    """A kernel's or operator's name for people, printable."""
    return printable(fmt.kernel_name(item.name) if level == "kernel" else item.name)


def text(
    comparison: Comparison,
    *,
    gate: Verdict | None = None,
    top: int = TOP,
    width: int = 100,
    color: bool = False,
) -> str:
    """A comparison as text.

    Args:
        comparison: what to print.
        gate: what became of ``--fail-on``.
        top: kernels and operators to print.
        width: columns of the terminal; lines never exceed it.
        color: emit ANSI colours.
    """
    width = max(width, _MIN_WIDTH)
    console = _console(width, color)
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        line = Text(f"{name}  {printable(side.source)}", style="bold")
        line.append(f"  {facts(side)}", style="not bold dim")
        console.print(line)
    _text_checks(console, comparison.checks)
    for note in comparison.notes:
        _marked(console, "·", printable(note), "dim")
    console.print()
    console.print(Text(printable(comparison.verdict), style="bold"))
    console.print(Text(median_line(comparison), style="dim"))
    console.print()
    _text_changes(console, comparison, width)
    for level, title, items in levels(comparison):
        _text_items(console, level, title, items[:top], len(items), width)
    if gate is not None:
        _text_gate(console, gate)
    return _written(console)


def levels(comparison: Comparison) -> list[tuple[str, str, tuple[Item, ...]]]:
    return [
        ("op", "operators", _changed(comparison.operations)),
        ("kernel", "kernels", _changed(comparison.kernels)),
    ]


def _changed(items: Sequence[Item]) -> tuple[Item, ...]:
    return tuple(i for i in items if i.difference_ns or i.status != "both")


def median_line(comparison: Comparison) -> str:
    """The medians in words: of the compared steps, and of those without a trace."""
    if comparison.untraced is None:
        return f"The median step {_went(comparison.median)}"
    return (
        f"Without a trace, the median step {_went(comparison.untraced)}; "
        f"the median traced one {_went(comparison.median)}"
    )


def _went(median: Total) -> str:
    said = f"went from {fmt.duration(median.a_ns)} to {fmt.duration(median.b_ns)}"
    if median.ratio is not None:
        said += f", {signed(median.ratio)}"
    if median.ci95_ratio is not None:
        said += f" (95 %: {signed(median.ci95_ratio[0])} … {signed(median.ci95_ratio[1])})"
    return said


def _marked(console: Console, mark: str, words: str, style: str) -> None:
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column()
    line.add_row(Text(mark, style=style), Text(words, style=style))
    console.print(line)


def _text_checks(console: Console, checks: Sequence[Check]) -> None:
    for check in checks:
        if check.status != "differs":
            continue
        mark, style = ("✗", "bold red") if check.withholds else ("!", "yellow")
        if check.id == "steps":
            mark, style = "·", "dim"
        found = f"{check.label}: {check.shown('a')} and {check.shown('b')}; {check.note}"
        _marked(console, mark, printable(found), style)
    unknown = [c.label for c in checks if c.status == "unknown"]
    same = [c.label for c in checks if c.status == "pass"]
    if same:
        _marked(console, "✓", f"same: {', '.join(same)}", "dim")
    if unknown:
        _marked(console, "?", f"not known in both: {', '.join(unknown)}", "dim")


def _text_changes(console: Console, comparison: Comparison, width: int) -> None:
    rows, hidden = shown_changes(comparison)
    if not rows:
        return
    wide = width >= 92
    bar_width = max(6, min(20, width - 92)) if wide else 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("per step", no_wrap=True, overflow="ellipsis")
    for heading in ("A", "B", "B − A"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    if bar_width:
        table.add_column("", no_wrap=True, width=bar_width)
    largest = max(abs(c.difference_ns) for c in comparison.changes) or 1
    for change in rows:
        style = "bold" if change.parent is None else ""
        faint = style if change.told is not False else "dim"
        cells = [
            Text("  " * change.id.count(".") + change.label, style=style),
            Text(fmt.duration(change.a_ns)),
            Text(fmt.duration(change.b_ns)),
            Text(signed_duration(change.difference_ns), style=faint),
            Text(interval(change.ci95_ns), style="dim"),
        ]
        if bar_width:
            share = abs(change.difference_ns) / largest
            cells.append(Text(_bar(share, bar_width), style=color(change.id)))
        table.add_row(*cells)
    step = comparison.step
    table.add_section()
    table.add_row(
        *(
            Text(t, style="bold")
            for t in (
                "step",
                fmt.duration(step.a_ns),
                fmt.duration(step.b_ns),
                signed_duration(step.difference_ns),
                interval(step.ci95_ns),
            )
        ),
        *([""] if bar_width else []),
    )
    console.print(table)
    if hidden:
        console.print(
            Text(f"{fmt.plural(hidden, 'cause')} with next to no difference not shown", "dim")
        )


def _text_items(
    console: Console, level: str, title: str, items: Sequence[Item], total: int, width: int
) -> None:
    if not items:
        return
    console.print()
    name_width = max(16, width - 70)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column(title, no_wrap=True, max_width=name_width)
    for heading in ("B − A", "by count", "by duration", "calls A → B", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in items:
        style = "dim" if item.told is False else ""
        words = [STATUS[item.status], "" if item.told is not False else "noise"]
        table.add_row(
            Text(fmt.ellipsize(item_name(item, level), name_width), style=style),
            Text(signed_duration(item.difference_ns), style=style),
            Text(signed_duration(item.by_count_ns), style=style),
            Text(signed_duration(item.by_duration_ns), style=style),
            Text(f"{calls(item.a_count)} → {calls(item.b_count)}", style=style),
            Text(" ".join(filter(None, words)), style="dim"),
        )
    console.print(table)
    if total > len(items):
        console.print(Text(f"… {total - len(items)} more {title} (--top N)", style="dim"))


def gate_lines(gate: Verdict) -> list[tuple[str, str, str]]:
    """(mark, words, style) of each condition of a gate, and of its end."""
    lines = []
    for decision in gate.decisions:
        mark, style = {
            "beyond": ("✗", "bold red"),
            "within": ("✓", "green"),
            "undecided": ("?", "yellow"),
        }[decision.outcome]
        lines.append((mark, f"{decision.condition.text}: {decision.reason}", style))
    undecided = sum(d.outcome == "undecided" for d in gate.decisions)
    if gate.refused is not None:
        lines.append(("✗", f"gate refused: {gate.refused}", "bold red"))
    elif gate.failed:
        lines.append(("✗", "the gate failed", "bold red"))
    elif undecided:
        of = fmt.plural(len(gate.decisions), "condition")
        lines.append(("?", f"the gate passed, {undecided} of {of} undecided", "yellow"))
    else:
        lines.append(("✓", "the gate passed", "green"))
    return lines


def _text_gate(console: Console, gate: Verdict) -> None:
    console.print()
    for mark, words, style in gate_lines(gate):
        _marked(console, mark, printable(words), style)


def markdown(comparison: Comparison, *, gate: Verdict | None = None) -> str:
    """A comparison as Markdown: for pull requests."""
    from chopper.reports.markdown import _table

    parts = [
        f"# {escape(comparison.a.name)} and {escape(comparison.b.name)}",
        "\n".join(
            f"- **{n}**: {escape(s.source)} ({escape(facts(s))})"
            for n, s in (("A", comparison.a), ("B", comparison.b))
        ),
        f"**{escape(comparison.verdict)}** {escape(median_line(comparison))}.",
    ]
    if gate is not None:
        parts.append("\n".join(f"- {m} {escape(w)}" for m, w, _ in gate_lines(gate)))
    parts.append("## The same work?")
    parts.append(
        _table(
            ["", "A", "B", "", ""],
            [
                [
                    escape(c.label),
                    escape(c.shown("a")),
                    escape(c.shown("b")),
                    f"**{c.status}**" if c.status == "differs" else c.status,
                    escape(c.note),
                ]
                for c in comparison.checks
            ],
            {1, 2},
        )
    )
    parts += ["\n".join(f"- {escape(n)}" for n in comparison.notes)]
    rows, _ = shown_changes(comparison)
    table = [
        [
            "&nbsp;" * 4 * c.id.count(".")
            + (escape(c.label) if c.parent else f"**{escape(c.label)}**"),
            fmt.duration(c.a_ns),
            fmt.duration(c.b_ns),
            f"**{signed_duration(c.difference_ns)}**"
            if c.told
            else signed_duration(c.difference_ns),
            interval(c.ci95_ns),
        ]
        for c in rows
    ]
    step = comparison.step
    table.append(
        [
            "**Step**",
            fmt.duration(step.a_ns),
            fmt.duration(step.b_ns),
            signed_duration(step.difference_ns),
            interval(step.ci95_ns),
        ]
    )
    parts += [
        "## Where the difference lies",
        _table(["Cause", "A", "B", "B − A", "95 % interval"], table, {1, 2, 3, 4}),
        "Per step, mean over the step windows of all ranks; the leaf causes' differences sum to "
        "that of the step exactly. Bold: told from noise.",
    ]
    for level, title, items in levels(comparison):
        if items:
            parts += [f"## {title.capitalize()}", _markdown_items(level, items[:TOP])]
            if len(items) > TOP:
                parts.append(f"{len(items) - TOP} more {title}.")
    return "\n\n".join(p for p in parts if p) + "\n"


def _markdown_items(level: str, items: Sequence[Item]) -> str:
    from chopper.reports.markdown import _table

    rows = [
        [
            escape(item_name(i, level)),
            f"**{signed_duration(i.difference_ns)}**"
            if i.told
            else signed_duration(i.difference_ns),
            signed_duration(i.by_count_ns),
            signed_duration(i.by_duration_ns),
            f"{calls(i.a_count)} → {calls(i.b_count)}",
            STATUS[i.status],
        ]
        for i in items
    ]
    header = ["", "B − A", "By count", "By duration", "Calls A → B", ""]
    return _table(header, rows, {1, 2, 3, 4})


__all__ = ["facts", "interval", "markdown", "percent", "render", "text", "to_json"]
