"""The page of a comparison: two runs, cause by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from chopper import wording as fmt
from chopper.analyzers.compare.result import signed, signed_duration
from chopper.reports import figures, formatted
from chopper.reports.labels import cause_cell, color, finding_table, full_label
from chopper.reports.page import (
    BROWSER,
    DOCUMENT,
    PLAIN,
    TERMINAL,
    Cards,
    Cell,
    Column,
    Fact,
    Facts,
    Figure,
    Item,
    Items,
    Page,
    Paragraph,
    Section,
    Table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.compare.gate import Verdict
    from chopper.analyzers.compare.result import Change, Check, Comparison, Total
    from chopper.analyzers.compare.result import Item as Difference
    from chopper.reports.page import Block, Mark

TOP = 15
"""Kernels and operators shown unless told otherwise."""
_SMALL_RATIO = 0.001
"""Causes whose difference is a smaller share of the step, and not told from noise, are one line."""
_SMALL_BAR_RATIO = 0.01
"""Causes below this share of all differences stand together in the waterfall."""
_MAX_ROWS = 500
"""Kernels or operators in a page."""
_STATUS = {"both": "", "appeared": "new", "vanished": "gone"}
_OUTCOMES: dict[str, Mark] = {"beyond": "error", "within": "ok", "undecided": "unknown"}
_METHOD = (
    (
        "Per step",
        (
            "The mean over the step windows of all ranks, in whole nanoseconds that sum exactly: "
            "the leaf causes' differences make the step's. Leading steps that took much longer "
            "than all later ones are left out as warm-up, and named above.",
        ),
    ),
    (
        "Kernels and operators",
        (
            "Device events by name. By count: the change of the number of calls, at the mean "
            "duration of both runs; by duration: the rest. Told from noise by Welch's t test, "
            "with at most 5 % false discoveries in a table (Benjamini and Hochberg).",
        ),
    ),
    (
        "95 % interval",
        (
            "Steps of both runs are resampled 2 000 times, independently. With few steps, and "
            "where steps resemble the one before, the interval is stretched accordingly. With "
            "fewer than 3 steps in a run there is none, and no verdict.",
        ),
    ),
    (
        "What it does not cover",
        (
            "It tells how steps vary within these two recordings, not what else differs between "
            "two recordings of the same program: another node, temperature, neighbours. If that "
            "matters, record each side more than once.",
        ),
    ),
)


def render(comparison: Comparison, format: str, *, gate: Verdict | None = None) -> str:
    """Return a comparison as one string: ``html``, ``md``, ``json`` (documented) or ``txt``."""
    return formatted(lambda: page(comparison, gate=gate), lambda: to_json(comparison, gate), format)


def to_json(comparison: Comparison, gate: Verdict | None) -> dict[str, object]:
    """Return the documented form; with a gate, what became of it."""
    out = comparison.to_dict()
    if gate is not None:
        out["gate"] = gate.to_dict()
    return out


def page(comparison: Comparison, *, gate: Verdict | None = None, top: int = TOP) -> Page:
    """Return the page of a comparison.

    Args:
        comparison: what to show.
        gate: what became of ``--fail-on``.
        top: kernels and operators in text and Markdown.
    """
    return Page(
        title=f"{comparison.a.name} and {comparison.b.name}",
        headline=comparison.verdict,
        summary=(
            *_sides(comparison),
            *([] if gate is None else [Items(items=gate_items(gate), title="Gate")]),
            *_unlike(comparison),
        ),
        sections=(
            _same_work(comparison),
            _causes(comparison),
            *(_items(*level, top=top) for level in _levels(comparison) if level[2]),
            _quality(comparison),
            Section(
                title="How each number was made",
                short="Method",
                id="method",
                blocks=(Cards(cards=_METHOD),),
                formats=BROWSER,
            ),
        ),
    )


def _sides(comparison: Comparison) -> list[Block]:
    facts = [
        Fact(label=name, value=side.source, note=_about(side))
        for name, side in (("A", comparison.a), ("B", comparison.b))
    ]
    return [Paragraph(f"{median_line(comparison)}."), Facts(facts=facts)]


def _about(side: Any) -> str:
    """Return what a side was, in a line."""
    steps = "1 window" if side.windows == side.steps == 1 else fmt.plural(side.steps, "step")
    return " · ".join([fmt.plural(side.ranks, "rank"), *side.devices, steps])


def median_line(comparison: Comparison) -> str:
    """Return the medians in words: of the compared steps, and of those without a trace."""
    if comparison.untraced is None:
        return f"The median step {_went(comparison.median)}"
    return (
        f"Without a trace, the median step {_went(comparison.untraced)}; "
        f"the median traced one {_went(comparison.median)}"
    )


def _went(median: Total) -> str:
    words = f"went from {fmt.duration(median.a_ns)} to {fmt.duration(median.b_ns)}"
    if median.ratio is not None:
        words += f", {signed(median.ratio)}"
    if median.ci95_ratio is not None:
        words += f" (95 %: {signed(median.ci95_ratio[0])} … {signed(median.ci95_ratio[1])})"
    return words


def gate_items(gate: Verdict) -> list[Item]:
    """Return what became of each condition of a gate, and of the gate."""
    items = [Item(f"{d.condition.text}: {d.reason}", _OUTCOMES[d.outcome]) for d in gate.decisions]
    undecided = sum(d.outcome == "undecided" for d in gate.decisions)
    if gate.refused is not None:
        items.append(Item(f"gate refused: {gate.refused}", "error"))
    elif gate.failed:
        items.append(Item("the gate failed", "error"))
    elif undecided:
        of = fmt.plural(len(gate.decisions), "condition")
        items.append(Item(f"the gate passed, {undecided} of {of} undecided", "unknown"))
    else:
        items.append(Item("the gate passed", "ok"))
    return items


def _unlike(comparison: Comparison) -> list[Block]:
    """Return what the runs do not share; on a terminal, what they do share, too."""
    items = []
    for check in comparison.checks:
        if check.status == "differs":
            mark: Mark = "error" if check.withholds else "warning"
            words = f"{check.label}: {check.shown('a')} and {check.shown('b')}; {check.note}"
            items.append(Item(words, "info" if check.id == "steps" else mark))
    items += [Item(note, "info") for note in comparison.notes]
    same = ", ".join(c.label for c in comparison.checks if c.status == "pass")
    unknown = ", ".join(c.label for c in comparison.checks if c.status == "unknown")
    shared = [Item(f"same: {same}", "ok")] if same else []
    shared += [Item(f"not known in both: {unknown}", "info")] if unknown else []
    return [
        *([Items(items=items)] if items else []),
        *([Items(items=shared, formats=TERMINAL)] if shared else []),
    ]


def _same_work(comparison: Comparison) -> Section:
    intro = "Checked before any time is compared. What is unknown in a run does not count as equal."
    if comparison.refused:
        intro = (
            "They do not, so no verdict is given; the differences below compare two different "
            "workloads."
        )
    table = Table(
        columns=("Check", Column("Result", kind="name"), "A", "B", Column("Meaning", kind="prose")),
        rows=[
            (c.label, Cell(text=c.status, mark=_mark(c)), c.shown("a"), c.shown("b"), c.note)
            for c in comparison.checks
        ],
    )
    return Section(
        title="Do they do the same work?",
        short="Same work?",
        id="parity",
        intro=intro,
        blocks=(table,),
        formats=DOCUMENT,
    )


def _mark(check: Check) -> Mark:
    if check.withholds:
        return "error"
    marks: dict[str, Mark] = {"differs": "warning", "pass": "ok"}
    return marks.get(check.status, "info")


def interval(ci95_ns: tuple[int, int] | None) -> str:
    """Return a 95 % interval of a difference: ``−1.2 ms … +0.3 ms``."""
    if ci95_ns is None:
        return fmt.UNKNOWN
    return f"{signed_duration(ci95_ns[0])} … {signed_duration(ci95_ns[1])}"


def shown_changes(comparison: Comparison) -> tuple[list[Change], int]:
    """Return the causes worth a line of their own, and how many are not."""
    least = _SMALL_RATIO * max(comparison.step.a_ns, comparison.step.b_ns)
    shown = [
        c
        for c in comparison.changes
        if abs(c.difference_ns) >= least or max(c.a_ns, c.b_ns) >= 20 * least
    ]
    return shown, len(comparison.changes) - len(shown)


def _causes(comparison: Comparison) -> Section:
    shown, hidden = shown_changes(comparison)
    rest = f"{fmt.plural(hidden, 'cause')} with next to no difference not shown" if hidden else ""
    step = comparison.step
    label = "Waterfall from A's step to B's; the table below holds the same figures"
    return Section(
        title="Where the difference lies",
        short="Causes",
        id="causes",
        intro=f"Starts at A's step of {fmt.duration(step.a_ns)}, adds what each cause takes more "
        f"or less of, ends at B's step of {fmt.duration(step.b_ns)}: means over the step windows "
        "of all ranks. The leaf causes' differences sum to that of the step exactly; whiskers are "
        "95 % intervals. Grey: not told from noise.",
        blocks=(
            Figure(name="waterfall", title="", figure=waterfall(comparison), label=label),
            *([_changes(comparison, shown, rest, PLAIN)] if shown else []),
            _changes(comparison, comparison.changes, "", BROWSER),
        ),
    )


def _changes(comparison: Comparison, changes: Sequence[Change], rest: str, formats: Any) -> Table:
    step = comparison.step
    largest = max((abs(c.difference_ns) for c in comparison.changes), default=0) or 1

    def row(change: Change | Total, name: Cell) -> tuple[str | Cell, ...]:
        difference = Cell(
            text=signed_duration(change.difference_ns),
            dim=change.told is False,
            share_ratio=abs(change.difference_ns) / largest if change is not step else None,
            color=name.color,
        )
        of_step = signed(change.difference_ns / step.a_ns) if step.a_ns else fmt.UNKNOWN
        times = fmt.duration(change.a_ns), fmt.duration(change.b_ns)
        ci95 = Cell(text=interval(change.ci95_ns), dim=True)
        return (name, *times, difference, ci95, Cell(text=of_step, dim=True))

    columns = (
        *("Cause, per step", "A", "B", "B − A"),
        Column("95 % interval", wide=True),
        Column("Of A's step", wide=True),
    )
    rows = [row(c, cause_cell(c.id, c.label)) for c in changes]
    return Table(
        columns=columns,
        rows=[*rows, row(step, Cell(text="Step"))],
        totals=1,
        rest=rest,
        formats=formats,
    )


def waterfall(comparison: Comparison) -> figures.Figure:
    """Return a figure from A's step to B's: a bar per leaf cause, the largest difference first."""
    leaves = [c for c in comparison.leaves() if c.difference_ns]
    if not leaves:
        return {"data": [], "layout": {}}
    whole = sum(abs(c.difference_ns) for c in leaves)
    large = [c for c in leaves if abs(c.difference_ns) >= _SMALL_BAR_RATIO * whole]
    small = leaves[len(large) :]
    bars: list[figures.Bar] = []
    start = 0

    def add(label: str, length_ns: int, hue: str, ci95_ns: tuple[int, int] | None) -> None:
        words = signed_duration(length_ns)
        hover = f"{words} per step<br>95 %: {interval(ci95_ns)}"
        bars.append(figures.Bar(label, start, length_ns, hue, words, hover, ci95_ns))

    for change in large:
        add(full_label(change.id), change.difference_ns, color(change.id), change.ci95_ns)
        start += change.difference_ns
    if small:
        label = full_label(small[0].id) if len(small) == 1 else f"{len(small)} smaller"
        add(label, sum(c.difference_ns for c in small), figures.GREY, None)
    start = 0
    add("B − A", comparison.step.difference_ns, "", comparison.step.ci95_ns)
    ends = [bar.start_ns + bar.length_ns for bar in bars]
    low, high = min(0.0, *ends), max(0.0, *ends)
    room = 0.14 * (high - low or 1)
    return figures.bars(
        bars, axis="ms per step, difference from A", span_ns=(low - room, high + room), aligned=True
    )


_Level = Literal["op", "kernel"]


def _levels(comparison: Comparison) -> list[tuple[_Level, str, list[Difference]]]:
    """Return operators and kernels that differ, with the name of their level."""

    def changed(items: Sequence[Difference]) -> list[Difference]:
        return [i for i in items if i.difference_ns or i.status != "both"]

    return [
        ("op", "Operators", changed(comparison.operations)),
        ("kernel", "Kernels", changed(comparison.kernels)),
    ]


def calls(count: float) -> str:
    """Return a count per step, whole or with one digit."""
    if count == round(count) or count >= 99.95:
        return fmt.count(round(count))
    return f"{count:.1f}" if count >= 0.95 else f"{count:.2g}"


def _items(level: _Level, title: str, items: Sequence[Difference], *, top: int) -> Section:
    columns = (
        "Name",
        "B − A",
        Column("95 % interval", wide=True),
        *("By count", "By duration", "Calls A", "Calls B"),
        *(Column("Time A", wide=True), Column("Time B", wide=True)),
        Column("", kind="id"),
    )
    cut = len(items) - _MAX_ROWS
    table = Table(
        columns=columns,
        rows=[_item_cells(level, i) for i in items[:_MAX_ROWS]],
        limit=top,
        searchable=True,
        rest=f"{cut} smaller differences not listed." if cut > 0 else "",
    )
    return Section(
        title=title,
        id=level,
        intro="Time of their device events per step of one rank. A difference is cut in two: "
        "running more or less often, and taking longer or shorter each time. Grey rows are not "
        "told from noise.",
        blocks=(table,),
    )


def _item_cells(level: _Level, item: Difference) -> list[Cell]:
    noise = item.told is False
    name = fmt.kernel_name(item.name) if level == "kernel" else item.name
    numbers = (
        (item.difference_ns, signed_duration(item.difference_ns)),
        (item.ci95_ns[0] if item.ci95_ns else 0, interval(item.ci95_ns)),
        (item.by_count_ns, signed_duration(item.by_count_ns)),
        (item.by_duration_ns, signed_duration(item.by_duration_ns)),
        (item.a_count, calls(item.a_count)),
        (item.b_count, calls(item.b_count)),
        (item.a_ns, fmt.duration(item.a_ns)),
        (item.b_ns, fmt.duration(item.b_ns)),
    )
    words = [_STATUS[item.status], "noise" if noise else ""]
    return [
        Cell(text=name, hint=item.name, dim=noise),
        *(Cell(text=text, value=value, dim=noise) for value, text in numbers),
        Cell(text=" ".join(filter(None, words)), dim=True),
    ]


def _quality(comparison: Comparison) -> Section:
    blocks: list[Block] = []
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        if side.findings:
            blocks.append(finding_table(side.findings, ranks=side.ranks, title=name))
        else:
            blocks.append(Paragraph(f"{name}: nothing that would weaken its figures.", "dim"))
    return Section(
        title="Trace quality",
        short="Quality",
        id="quality",
        intro="What was found about each run's data before anything was claimed from it.",
        blocks=blocks,
        formats=BROWSER,
    )
