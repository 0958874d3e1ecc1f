"""The page of a comparison of two runs, cause by cause, and of a run beside its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal
from xml.etree import ElementTree as ET

import msgspec
from msgspec.structs import replace

from chopper import wording as fmt
from chopper.analyzers.actions import Actions
from chopper.analyzers.actions import actions as ranked
from chopper.analyzers.compare.gate import Verdict
from chopper.analyzers.compare.history import Judgement
from chopper.analyzers.compare.result import (
    Change,
    Check,
    Comparison,
    Total,
    percent,
    signed,
    signed_duration,
)
from chopper.analyzers.compare.result import Item as Difference
from chopper.analyzers.replay.replay import replay_or_reason
from chopper.causes import CAUSES
from chopper.errors import printable
from chopper.reports import actions, figures, formatted
from chopper.reports.labels import cause_cell, color, finding_table, full_label, method
from chopper.reports.page import (
    BROWSER,
    DOCUMENT,
    PLAIN,
    TERMINAL,
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Figure,
    Item,
    Items,
    Mark,
    Page,
    Paragraph,
    Section,
    Table,
)

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


def render(comparison: Comparison, format: str, *, gate: Verdict | None = None) -> str:
    """Return a comparison as one string: ``html``, ``md``, ``json`` (documented) or ``txt``."""
    return formatted(lambda: page(comparison, gate=gate), lambda: to_json(comparison, gate), format)


def to_json(comparison: Comparison, gate: Verdict | None) -> dict[str, object]:
    """Return the documented form; with a gate, what became of it."""
    in_a, in_b = tried(comparison)
    out = comparison.to_dict()
    out["actions"] = None if in_b is None else actions.to_json(in_b.ranked, base=in_a)
    out["predictions"] = predictions(comparison, in_a, in_b)
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
    in_a, in_b = tried(comparison)
    return Page(
        title=f"{comparison.a.name} and {comparison.b.name}",
        headline=comparison.verdict,
        summary=(
            *_predicted(predictions(comparison, in_a, in_b), comparison),
            *_sides(comparison),
            *_outcomes(comparison),
            *([] if gate is None else [Items(items=gate_items(gate), title="Gate")]),
            *_unlike(comparison),
        ),
        sections=(
            *_first(comparison, in_a, in_b),
            _same_work(comparison),
            _causes(comparison),
            *_items("op", "Operators", comparison.operations, top=top),
            *_items("kernel", "Kernels", comparison.kernels, top=top),
            _quality(comparison),
            Section(
                title="How the numbers are computed",
                short="Method",
                id="method",
                blocks=(method("comparison"),),
                formats=BROWSER,
            ),
        ),
    )


def predictions(
    comparison: Comparison, in_a: Actions | None, in_b: Actions | None
) -> list[dict[str, Any]]:
    """Return A's actions that B took, with the change of the step that A's replay predicted.

    An action counts as taken if its pattern could save less than a tenth as much in B. Predictions
    are scaled to untraced steps where the comparison has them.
    """
    if in_a is None or in_b is None or comparison.refused:
        return []
    left_ns: Counter[str] = Counter()
    for action in in_b.ranked:
        left_ns[action.detector] += action.saved_ns
    is_scaled = comparison.untraced is not None and in_a.pace == 1
    scale = comparison.runs[0].step_time().scale if is_scaled else 1.0
    return [
        {
            "detector": action["detector"],
            "title": action["title"],
            "predicted_difference_ns": -round(action["recoverable_step_ns"] * scale),
        }
        for action in actions.to_json(in_a.ranked)
        if 10 * left_ns[action["detector"]] < action["recoverable_step_ns"]
    ]


def _predicted(taken: Sequence[dict[str, Any]], comparison: Comparison) -> list[Block]:
    """Return A's predicted savings of the actions that B took, with the measured ones."""
    if not taken:
        return []
    total = comparison.untraced or comparison.step
    predicted = "; ".join(
        f"{signed_duration(p['predicted_difference_ns'])} ({p['title']})"
        for p in taken[: actions.SHOWN]
    )
    noise = "" if total.ci95_ns is None else f" (95 %: {interval(total.ci95_ns)})"
    overlap = " Savings overlap, so they do not add up." if len(taken) > 1 else ""
    measured = f"{signed_duration(total.difference_ns)}{noise}"
    return [Paragraph(f"Predicted by a replay of A: {predicted}. Measured: {measured}.{overlap}")]


def _first(comparison: Comparison, in_a: Actions | None, in_b: Actions | None) -> list[Section]:
    """Return what to try first in B, and what the same pattern costs A; none without a replay."""
    if in_b is None:
        return []
    section = actions.section(*actions.tell(comparison.runs[1], in_b, comparison.unit, base=in_a))
    return [replace(section, title="What to try first in B")]


def tried(comparison: Comparison) -> Iterator[Actions | None]:
    """Yield the actions worth trying in A and in B; None if a run cannot be replayed."""
    for run in comparison.runs:
        replay = replay_or_reason(run)
        yield None if isinstance(replay, str) else ranked(run, replay)


def _sides(comparison: Comparison) -> list[Block]:
    median = f"The median {comparison.unit} {_went(comparison.median)}."
    if comparison.untraced is not None:
        median = f"The step time, without a trace, {_went(comparison.untraced)}. {median}"
    facts = []
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        steps = "1 window" if side.windows == side.steps == 1 else fmt.plural(side.steps, "step")
        about = " · ".join([fmt.plural(side.ranks, "rank"), *side.devices, steps])
        facts.append(Fact(label=name, value=side.source, note=about))
    return [Paragraph(median), Facts(facts=facts)]


def _outcomes(comparison: Comparison) -> list[Block]:
    """Return throughput and cost of a step, with the reason for each value not recorded."""
    known = [o for o in comparison.outcomes if o.reason is None]
    rows = [
        [
            Cell(text=text, dim=o.told is False)
            for text in (
                o.label,
                fmt.cell(o.id, o.a),
                fmt.cell(o.id, o.b),
                signed(o.ratio),
                fmt.UNKNOWN
                if o.ci95_ratio is None
                else f"{signed(o.ci95_ratio[0])} … {signed(o.ci95_ratio[1])}",
            )
        ]
        for o in known
    ]
    columns = ("Of both runs", "A", "B", "B over A", "95 % interval")
    notes = "; ".join(f"{o.label}: {o.note}" for o in known[1:])
    by_reason: dict[str, list[str]] = {}
    for o in comparison.outcomes:
        if o.reason is not None:
            by_reason.setdefault(o.reason, []).append(o.label)
    unknown = "; ".join(f"{', '.join(labels)} ({why})" for why, labels in by_reason.items())
    return [
        *([Table(columns=columns, rows=rows, note=f"{notes}.")] if len(known) > 1 else []),
        *([Items(items=[Item(f"Not known: {unknown}", "info")])] if unknown else []),
    ]


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
    items = [
        Item(
            f"{c.label}: {c.shown('a')} and {c.shown('b')}; {c.note}",
            "info" if c.id == "steps" else _mark(c),
        )
        for c in comparison.checks
        if c.status == "differs"
    ]
    items += [Item(note, "info") for note in comparison.notes]
    same = ", ".join(c.label for c in comparison.checks if c.status == "pass")
    unknown = ", ".join(c.label for c in comparison.checks if c.status == "unknown")
    shared = [Item(f"same: {same}", "ok")] if same else []
    shared += [Item(f"unknown in at least one run: {unknown}", "info")] if unknown else []
    both = Items(items=items), Items(items=shared, formats=TERMINAL)
    return [block for block in both if block.items]


def _same_work(comparison: Comparison) -> Section:
    intro = (
        "Checked before any times are compared. A value that is unknown in either run does "
        "not count as equal."
    )
    if comparison.refused:
        intro = (
            "They do not, so there is no verdict; the differences below are between two "
            "different workloads."
        )
    table = Table(
        columns=(
            *("Check", Column("Result", kind="name"), "A", "B"),
            Column("Meaning", kind="prose", wide=True),
        ),
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


def _causes(comparison: Comparison) -> Section:
    step = comparison.step
    least = _SMALL_RATIO * max(step.a_ns, step.b_ns)
    listed_causes = [
        c
        for c in comparison.changes
        if abs(c.difference_ns) >= least or max(c.a_ns, c.b_ns) >= 20 * least
    ]
    hidden = len(comparison.changes) - len(listed_causes)
    rest = f"{fmt.plural(hidden, 'cause')} with negligible differences not shown" if hidden else ""
    label = "Waterfall from A's step to B's; the table below has the same figures"
    return Section(
        title="Where the runs differ",
        short="Causes",
        id="causes",
        intro="Means over the step windows of all ranks. The differences of the leaf causes sum "
        "to that of the step exactly. A difference whose 95 % interval includes 0 is within noise.",
        blocks=(
            Figure(
                name="waterfall",
                title="",
                figure=waterfall(comparison),
                note=f"Starts at A's step of {fmt.duration(step.a_ns)}, adds each cause's "
                f"difference and ends at B's step of {fmt.duration(step.b_ns)}. Whiskers are 95 % "
                "intervals. Grey, here and below: within noise, or too small to be shown alone.",
                label=label,
            ),
            *([_changes(comparison, listed_causes, rest, PLAIN)] if listed_causes else []),
            _changes(comparison, comparison.changes, "", BROWSER),
        ),
    )


def _changes(comparison: Comparison, changes: Sequence[Change], rest: str, formats: Any) -> Table:
    step = comparison.step
    largest = max((abs(c.difference_ns) for c in comparison.changes), default=0) or 1

    def row(change: Change | Total, name: Cell) -> tuple[str | Cell, ...]:
        difference_ns, noise = change.difference_ns, change.told is False
        of_step = signed(difference_ns / step.a_ns) if step.a_ns else fmt.UNKNOWN
        times = map(fmt.duration, (change.a_ns, change.b_ns))
        cells = [Cell(text=t, dim=noise) for t in (*times, interval(change.ci95_ns), of_step)]
        difference = Cell(
            text=signed_duration(difference_ns),
            dim=noise,
            share_ratio=abs(difference_ns) / largest if change is not step else None,
            color=_hue(change, name.color),
        )
        return (replace(name, dim=noise), *cells[:2], difference, *cells[2:])

    wide = (Column(heading, wide=True) for heading in ("95 % interval", "Share of A's step"))
    rows = [row(c, cause_cell(c.id, c.label)) for c in changes]
    return Table(
        columns=(f"Cause, per {comparison.unit}", "A", "B", "B − A", *wide),
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
    total_ns = sum(abs(c.difference_ns) for c in leaves)
    large = [c for c in leaves if abs(c.difference_ns) >= _SMALL_BAR_RATIO * total_ns]
    small = leaves[len(large) :]
    parts = [(full_label(c.id), c.difference_ns, _hue(c, color(c.id)), c.ci95_ns) for c in large]
    if small:
        label = full_label(small[0].id) if len(small) == 1 else f"{len(small)} smaller"
        parts.append((label, sum(c.difference_ns for c in small), figures.GREY, None))
    step = comparison.step
    parts.append(("B − A", step.difference_ns, _hue(step, ""), step.ci95_ns))
    bars: list[figures.Bar] = []
    start = 0
    for label, length_ns, hue, ci95_ns in parts:
        words = signed_duration(length_ns)
        hover = f"{words} per step<br>95 %: {interval(ci95_ns)}"
        begin = start if len(bars) < len(parts) - 1 else 0
        bars.append(figures.Bar(label, begin, length_ns, hue, words, hover, ci95_ns))
        start += length_ns
    ends = [0.0, *(bar.start_ns + bar.length_ns for bar in bars)]
    room = 0.14 * (max(ends) - min(ends) or 1)
    span_ns = (min(ends) - room, max(ends) + room)
    return figures.bars(bars, axis="ms per step, difference from A", span_ns=span_ns, aligned=True)


def _hue(change: Total, hue: str) -> str:
    """Return the colour of a difference: grey within noise."""
    return figures.GREY if change.told is False else hue


def calls(count: float) -> str:
    """Return a count per step, whole or with one digit."""
    if count == round(count) or count >= 99.95:
        return fmt.count(round(count))
    return f"{count:.1f}" if count >= 0.95 else f"{count:.2g}"


def _items(level: str, title: str, items: Sequence[Difference], *, top: int) -> list[Section]:
    """Return the operators or kernels that differ."""
    changed = [i for i in items if i.difference_ns or i.status != "both"]
    columns = (
        "Name",
        "B − A",
        Column("95 % interval", wide=True),
        *("By count", "By duration", "Calls A", "Calls B"),
        *(Column("Time A", wide=True), Column("Time B", wide=True)),
        Column("Status", kind="id"),
    )
    cut = len(changed) - _MAX_ROWS
    table = Table(
        columns=columns,
        rows=[_item_cells(level, i) for i in changed[:_MAX_ROWS]],
        limit=top,
        searchable=True,
        rest=f"{cut} smaller differences not listed." if cut > 0 else "",
    )
    section = Section(
        title=title,
        id=level,
        intro="Time of their device events per step and rank. A difference splits into the "
        "change in count and the change in duration. Rows marked noise (grey in a browser) are "
        "within noise.",
        blocks=(table,),
    )
    return [section] if changed else []


def _item_cells(level: str, item: Difference) -> list[Cell]:
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
    status = _STATUS[item.status] + (" noise" if noise else "")
    return [
        Cell(text=name, hint=item.name, dim=noise),
        *(Cell(text=text, value=value, dim=noise) for value, text in numbers),
        Cell(text=status.strip(), dim=True),
    ]


def _quality(comparison: Comparison) -> Section:
    return Section(
        title="Trace quality",
        short="Quality",
        id="quality",
        intro="Findings about each run's data, made before any figure was computed.",
        blocks=[
            finding_table(side.findings, ranks=side.ranks, title=name)
            if side.findings
            else Paragraph(f"{name}: no finding limits its figures.", "dim")
            for name, side in (("A", comparison.a), ("B", comparison.b))
        ],
        formats=BROWSER,
    )


_MOST_CAUSES = 8


def history_page(judgement: Judgement, *, outcome: str) -> Page:
    """Return the page of a judgement, short enough for a comment on a pull request.

    Args:
        judgement: what to show.
        outcome: what became of the run: added to the history or not.
    """
    items = [Item(outcome, "info")]
    items += [
        Item(f"{c.label}: {c.shown('a')} in the latest earlier run, {c.shown('b')} here", "info")
        for c in judgement.checks
    ]
    items += [Item(note, "info") for note in judgement.notes]
    return Page(
        title=f"{judgement.run.name} and its history",
        headline=judgement.sentence,
        summary=[*_step_times(judgement), *_noisy_causes(judgement), Items(items=items)],
    )


def _step_times(judgement: Judgement) -> list[Block]:
    if judgement.reference_ns is None:
        return []
    of = fmt.plural(len(judgement.reference), "earlier run")
    row: list[str | Cell] = [
        fmt.duration(judgement.reference_ns),
        fmt.duration(judgement.step_ns),
        Cell(text=signed(judgement.change_ratio), strong=judgement.failed),
        *(
            fmt.UNKNOWN if value is None else percent(value)
            for value in (
                judgement.spread_ratio,
                judgement.limit_ratio,
                judgement.detectable_ratio,
            )
        ),
    ]
    columns = ("Step", "This run", "Change", "Runs vary by", "Noise limit", "Found in 90 %")
    note = f"Step: of {of}, {judgement.statistic} over steps; without a trace where known."
    return [Table(columns=columns, rows=[row], note=note)]


def _noisy_causes(judgement: Judgement) -> list[Block]:
    listed_causes = [c for c in judgement.causes if c.told or c.difference_ns < -c.limit_ns]
    if not listed_causes:
        return []
    rows = [
        [
            CAUSES[c.id].label,
            fmt.duration(c.reference_ns),
            fmt.duration(c.run_ns),
            signed_duration(c.difference_ns),
            fmt.duration(c.limit_ns),
        ]
        for c in listed_causes[:_MOST_CAUSES]
    ]
    columns = ("Cause, per traced step", "Earlier runs", "This run", "Change", "Noise limit")
    return [Table(columns=columns, rows=rows, title="Causes beyond their own noise")]


class Case(msgspec.Struct, frozen=True):
    """One test case of a JUnit file."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str
    seconds: float = 0.0


def cases(judgement: Judgement) -> list[Case]:
    """Return the cases of a judgement: whether the work is the same, and the step time."""
    changed = judgement.verdict == "changed work"
    seconds = judgement.step_ns / 1e9
    step: Literal["passed", "failed", "skipped"] = "passed"
    if changed or judgement.undecided:
        step = "skipped"
    elif judgement.failed:
        step = "failed"
    if changed:
        work = Case("same work", "failed", judgement.sentence)
    elif not judgement.reference:
        work = Case("same work", "skipped", "No earlier run to compare with.")
    else:
        work = Case("same work", "passed", "")
    return [work, Case("step time", step, judgement.sentence, seconds)]


def cases_of_gate(gate: Verdict) -> list[Case]:
    """Return the cases of ``--fail-on``: one of each condition."""
    if gate.refused is not None:
        return [Case("same work", "failed", gate.refused)]
    outcomes: dict[str, Literal["passed", "failed", "skipped"]] = {
        "beyond": "failed",
        "within": "passed",
        "undecided": "skipped",
    }
    return [Case(d.condition.text, outcomes[d.outcome], d.reason) for d in gate.decisions]


def junit(name: str, cases: Sequence[Case], time_ns: int) -> str:
    """Return JUnit XML as GitHub's actions, GitLab and Jenkins read it.

    Args:
        name: of the run.
        cases: in order.
        time_ns: Unix time of the run.
    """
    counted = {
        "tests": str(len(cases)),
        "failures": str(sum(c.outcome == "failed" for c in cases)),
        "errors": "0",
    }
    skipped = {"skipped": str(sum(c.outcome == "skipped" for c in cases))}
    time = {"time": f"{sum(c.seconds for c in cases):.6f}"}
    root = ET.Element("testsuites", {"name": "chopper compare", **counted, **time})
    when = datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    suite = ET.SubElement(
        root, "testsuite", {"name": _xml(name), **counted, **skipped, **time, "timestamp": when}
    )
    for case in cases:
        attributes = {"name": _xml(case.name), "classname": f"chopper.{_xml(name)}"}
        element = ET.SubElement(suite, "testcase", attributes | {"time": f"{case.seconds:.6f}"})
        message = _xml(case.message)
        if case.outcome == "failed":
            failure = ET.SubElement(element, "failure", {"message": message, "type": "chopper"})
            failure.text = message
        elif case.outcome == "skipped":
            ET.SubElement(element, "skipped", {"message": message})
        elif message:
            ET.SubElement(element, "system-out").text = message
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _xml(text: str) -> str:
    """Return a text that XML 1.0 can hold."""
    return "".join(c if c >= " " and c not in "\ufffe\uffff" else " " for c in printable(text))
