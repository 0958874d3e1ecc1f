"""An experiment for a terminal or as Markdown; the page is `experiment_html`.

What was measured becomes grids: one of all numbers without labels, variants below each other, and
one for each set of labels (sizes, shapes), a row for each combination.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chopper import wording as fmt
from chopper.analyzers.compare.result import signed, signed_duration
from chopper.errors import UsageError, printable
from chopper.reports import FORMATS
from chopper.reports.markdown import escape
from chopper.reports.story import full_label
from chopper.reports.text import _console, _written

if TYPE_CHECKING:
    from rich.console import Console

    from chopper.analyzers.compare.result import Change, Comparison
    from chopper.experiments.catalogue import Beside
    from chopper.experiments.results import Experiment, Headline, Labels, Row
    from chopper.statistics import Estimate

_MIN_WIDTH = 60
_LEAST_SHARE = 0.01
_ROUNDING = 1e-9
_CAUSES = 5
"""Causes named for each variant."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table for people."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int
    """So many leading columns hold names, the rest numbers."""
    note: str = ""
    """What it is of; why it has no rows where it has none."""


def render(experiment: Experiment, format: str) -> str:
    """An experiment as one string: ``html``, ``md``, ``json`` (documented) or ``txt``.

    Raises:
        UsageError: no such format.
    """
    if format == "html":
        from chopper.reports import experiment_html

        return experiment_html.render(experiment)
    if format == "md":
        return markdown(experiment)
    if format == "txt":
        return text(experiment)
    if format == "json":
        return json.dumps(experiment.to_dict(), indent=2, ensure_ascii=False) + "\n"
    raise UsageError(f"format {format!r} unknown: one of {', '.join(FORMATS)}")


def facts(experiment: Experiment) -> str:
    """How it was run, in a line."""
    plan = experiment.plan
    repeats = max((len(v.runs) for v in plan.variants), default=0)
    return " · ".join(
        [
            f"{fmt.plural(plan.ranks, 'rank')} on {plan.device}",
            fmt.plural(repeats, "repetition"),
            *(f"{key} {value}" for key, value in plan.options.items() if value is not None),
        ]
    )


def intervals(experiment: Experiment) -> str:
    """What ± and intervals are of, and how they were made."""
    if all(row.estimate.ci95 is None for row in experiment.rows):
        return "One repetition: no spread and no interval; --repeats 3 gives both."
    of = "repetitions"
    if all(len(variant.runs) < 2 for variant in experiment.plan.variants):
        of = "parts of a single run, which are less independent than runs (--repeats 3)"
    return (
        f"± is the coefficient of variation and 95 % Student's t over {of}; of a ratio between "
        "logarithms, with Welch's degrees of freedom."
    )


def grids(experiment: Experiment, *, full: bool = False) -> list[Grid]:
    """All that was measured, as tables.

    Args:
        experiment: what to show.
        full: with the intervals of ratios.
    """
    out = [
        Grid(title=e.title, headings=e.headings, rows=e.rows, words=e.words, note=e.note)
        for e in experiment.exhibits
    ]
    shown_whole = {measure for e in experiment.exhibits for measure in e.shows}
    rest = [row for row in experiment.rows if row.measure not in shown_whole]
    plain = [row for row in rest if not row.labels]
    out += [_by_variant(experiment, plain, full=full)] if plain else []
    out += _causes(experiment, full=full)
    out += [_of_view(experiment, shown, full=full) for shown in experiment.shown]
    sets: dict[tuple[str, ...], list[Row]] = {}
    for row in rest:
        if row.labels:
            sets.setdefault(tuple(key for key, _ in row.labels), []).append(row)
    for rows in sets.values():
        out += _by_labels(experiment, rows, full=full)
    return out


def _causes(experiment: Experiment, *, full: bool) -> list[Grid]:
    """Where the step's time goes in each variant; causes that are little in all are left out."""
    rows = experiment.causes
    whole: dict[str, float] = {}
    for row in rows:
        whole[row.variant] = whole.get(row.variant, 0.0) + row.estimate.value
    kept = dict.fromkeys(
        row.measure for row in rows if row.estimate.value >= _LEAST_SHARE * whole[row.variant]
    )
    if not kept:
        return []
    at = {(row.variant, row.measure): row for row in rows}
    others = {
        v: sum(r.estimate.value for r in rows if r.variant == v and r.measure not in kept)
        for v in whole
    }
    return [
        Grid(
            title="Where a step's time goes",
            headings=("", *experiment.variants),
            rows=(
                *(
                    (
                        full_label(c),
                        *(_cell(at.get((v, c)), "time_ns", full=full) for v in experiment.variants),
                    )
                    for c in kept
                ),
                ("All others", *(fmt.duration(others.get(v)) for v in experiment.variants)),
                ("Step", *(fmt.duration(whole.get(v)) for v in experiment.variants)),
            ),
            words=1,
            note="Each rank's, in the steps that were traced.",
        )
    ]


def _of_view(experiment: Experiment, shown: Beside, *, full: bool) -> Grid:
    from chopper.views import VIEWS

    view, rows = VIEWS[shown.view], experiment.beside(shown)
    grid = _by_variant(experiment, list(rows), title=view.title, full=full)
    return replace(grid, note=view.doc if rows else f"Not known here: {view.needs or 'no rows'}.")


def _by_variant(
    experiment: Experiment, rows: list[Row], *, title: str | None = None, full: bool
) -> Grid:
    measures = list(dict.fromkeys(row.measure for row in rows))
    at = {(row.variant, row.measure): row for row in rows}
    title = title or ("Variants" if len(experiment.variants) > 1 else "Measured")
    if not measures:
        return Grid(title=title, headings=(), rows=(), words=0)
    if len(measures) > len(experiment.variants):
        # Whichever is longer goes down the page.
        return Grid(
            title=title,
            headings=("", *experiment.variants),
            rows=tuple(
                (fmt.heading(m), *(_cell(at.get((v, m)), full=full) for v in experiment.variants))
                for m in measures
            ),
            words=1,
        )
    return Grid(
        title=title,
        headings=("", *(fmt.heading(m) for m in measures)),
        rows=tuple(
            (variant, *(_cell(at.get((variant, m)), full=full) for m in measures))
            for variant in experiment.variants
        ),
        words=1,
    )


def _by_labels(experiment: Experiment, rows: list[Row], *, full: bool) -> list[Grid]:
    """Measures beside each other; with several variants one grid per measure instead."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    labels = list(dict.fromkeys(row.labels for row in rows))
    names = tuple(fmt.heading(key) for key, _ in labels[0])
    at = {(row.variant, row.measure, row.labels): row for row in rows}
    several = len({row.variant for row in rows}) > 1
    found = {(row.variant, row.measure) for row in rows}
    columns = [(v, m) for m in measures for v in experiment.variants if (v, m) in found]
    split = [[c for c in columns if c[1] == m] for m in measures] if several else [columns]
    return [
        Grid(
            title=heading(part[0][1]).capitalize() if several else f"By {' and '.join(names)}",
            headings=(*names, *(v if several else heading(m) for v, m in part)),
            rows=tuple(
                (*_words(label), *(_cell(at.get((v, m, label)), full=full) for v, m in part))
                for label in labels
                if any((v, m, label) in at for v, m in part)
            ),
            words=len(names),
        )
        for part in split
    ]


def heading(measure: str) -> str:
    """A measure's name for people; "best" alone would not say what of."""
    words = fmt.heading(measure)
    return f"{words} rate" if measure.endswith("_flop_per_s") else words


def _words(labels: Labels) -> tuple[str, ...]:
    return tuple(printable(fmt.cell(key, value)) for key, value in labels)


def _cell(row: Row | None, unit_of: str | None = None, *, full: bool) -> str:
    if row is None:
        return fmt.UNKNOWN
    said = fmt.cell(unit_of or row.measure, row.estimate.value)
    if row.estimate.cv_ratio is not None:
        said += f" ±{row.estimate.cv_ratio * 100:.0f} %"
    return said if row.ratio is None else f"{said} ({_of_baseline(row.ratio, full=full)})"


def _of_baseline(ratio: Estimate, *, full: bool) -> str:
    """How many times the baseline's; ``same`` where each repetition of both gave one number."""
    if ratio.ci95 is None:
        return f"{ratio.value:.2f}×"
    low, high = ratio.ci95
    if max(abs(low - 1), abs(high - 1)) < _ROUNDING:
        return "same"
    return f"{ratio.value:.2f}×" + (f", {low:.2f} … {high:.2f}" if full else "")


def times(estimate: Estimate | None) -> str:
    """A ratio with its interval: ``1.83× (1.71 … 1.96)``."""
    if estimate is None:
        return fmt.UNKNOWN
    said = f"{estimate.value:.2f}×"
    if estimate.ci95 is not None:
        said += f" ({estimate.ci95[0]:.2f} … {estimate.ci95[1]:.2f})"
    return said


def ours(headline: Headline) -> str:
    """A headline's number here; the reason where there is none."""
    if headline.ours is None:
        return headline.why or fmt.UNKNOWN
    mark = "" if headline.unit in ("×", "") else " "
    return f"{_number(headline.ours)}{mark}{headline.unit}"


def interval(headline: Headline) -> str:
    """Its 95 % interval: ``1.71 … 1.96``."""
    if headline.ours is None or headline.ci95 is None:
        return fmt.UNKNOWN
    return f"{_number(headline.ci95[0])} … {_number(headline.ci95[1])}"


def against(headline: Headline) -> str:
    """How many times what is stated it is: ``1.05×``."""
    return fmt.UNKNOWN if headline.ratio is None else f"{headline.ratio:.2f}×"


def _number(value: float) -> str:
    size = f"{abs(value):.3g}"
    if 0 < abs(value) < 1e-4:
        return "< 0.0001" if value > 0 else "> −0.0001"
    if "e" in size:
        size = f"{abs(value):.0f}"
    return ("−" if value < 0 else "") + size


def told(comparison: Comparison) -> list[Change]:
    """The leaf causes that moved most, those told from noise first."""
    leaves = [c for c in comparison.leaves() if c.difference_ns]
    return sorted(leaves, key=lambda c: (not c.told, -abs(c.difference_ns)))[:_CAUSES]


def change_line(change: Change, step_ns: int) -> str:
    """One cause's difference in words."""
    share = f", {signed(change.difference_ns / step_ns)} of the step" if step_ns else ""
    sure = "" if change.told else " (within noise)" if change.told is not None else " (no interval)"
    return f"{full_label(change.id)}: {signed_duration(change.difference_ns)}{share}{sure}"


def text(experiment: Experiment, *, width: int = 100, color: bool = False) -> str:
    """An experiment as text.

    Args:
        experiment: what to print.
        width: columns of the terminal.
        color: emit ANSI colours.
    """
    console = _console(max(width, _MIN_WIDTH), color)
    title = Text(experiment.plan.workload, style="bold")
    title.append(f"  {printable(facts(experiment))}", style="not bold dim")
    console.print(title)
    for note in experiment.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    for grid in grids(experiment):
        console.print()
        console.print(Text(grid.title, style="bold"))
        if grid.note:
            console.print(Text(f"  {printable(grid.note)}", style="dim"))
        if not grid.rows:
            continue
        for i, columns in enumerate(_blocks(grid, console.width)):
            if i:
                console.print()
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            for column, wide in zip(columns, _widths(grid, columns, console.width), strict=True):
                table.add_column(
                    grid.headings[column],
                    justify="left" if column < grid.words else "right",
                    overflow="fold",
                    width=wide,
                )
            for row in grid.rows:
                table.add_row(*(Text(row[column]) for column in columns))
            console.print(table)
    for name, comparison in experiment.comparisons.items():
        console.print()
        console.print(Text(f"{experiment.plan.baseline} → {name}", style="bold"))
        console.print(Text(f"  {printable(comparison.verdict)}"))
        for change in told(comparison):
            console.print(Text(f"  · {change_line(change, comparison.step.a_ns)}", style="dim"))
    _print_headlines(console, experiment.headlines)
    console.print()
    console.print(Text(intervals(experiment), style="dim"))
    return _written(console)


def headlines_text(
    headlines: tuple[Headline, ...], *, width: int = 100, color: bool = False
) -> str:
    """Headlines alone as text: of a model, where nothing was measured."""
    console = _console(max(width, _MIN_WIDTH), color)
    _print_headlines(console, headlines)
    return _written(console)


def _print_headlines(console: Console, headlines: tuple[Headline, ...]) -> None:
    for headline in headlines:
        console.print()
        console.print(Text(f"{headline.system}: {headline.claim}", style="bold"))
        for who, said in (("survey", headline.survey), ("primary", headline.primary)):
            if said is not None:
                console.print(Text(f"  {who:<8} {said}"))
        said = ours(headline)
        if headline.ours is not None and headline.ci95 is not None:
            said += f" (95 %: {interval(headline)})"
        if headline.ratio is not None:
            said += f", {against(headline)} what is stated"
        console.print(Text(f"  {'here':<8} {said}"))
        if headline.configuration:
            console.print(Text(f"  {headline.configuration}", style="dim"))


def _needed(grid: Grid, column: int) -> int:
    """Characters that a column cannot do without: names may be cut between words, numbers not."""
    words = grid.headings[column].split()
    for row in grid.rows:
        words += row[column].split() if column < grid.words else [row[column]]
    return max(map(len, words), default=0)


def _widths(grid: Grid, columns: list[int], width: int) -> list[int]:
    """Characters of columns that are printed beside each other: what is free goes to the first."""
    needed = [_needed(grid, column) for column in columns]
    free = max(0, width - sum(needed) - 2 * (len(needed) - 1))
    out = []
    for column, least in zip(columns, needed, strict=True):
        whole = max(len(grid.headings[column]), *(len(row[column]) for row in grid.rows))
        more = min(free, whole - least)
        free -= more
        out.append(least + more)
    return out


def _blocks(grid: Grid, width: int) -> list[list[int]]:
    """Columns to be printed beside each other, each block with the names, so that none is cut."""
    names = list(range(grid.words))
    left = width - sum(_needed(grid, name) + 2 for name in names)
    blocks: list[list[int]] = [[]]
    free = left
    for column in range(grid.words, len(grid.headings)):
        takes = _needed(grid, column) + 2
        if takes > free and blocks[-1]:
            blocks.append([])
            free = left
        blocks[-1].append(column)
        free -= takes
    return [names + block for block in blocks]


def markdown(experiment: Experiment) -> str:
    """An experiment as Markdown."""
    out = [f"# {escape(experiment.plan.workload)}", "", escape(facts(experiment)), ""]
    return "\n".join([*out, *section(experiment, heading="## {}")]) + "\n"


def section(experiment: Experiment, *, heading: str = "**{}**") -> list[str]:
    """All that an experiment shows, as lines of Markdown for a page about more than that.

    Args:
        experiment: what to show.
        heading: of a table.
    """
    out = [*(f"- {escape(note)}" for note in experiment.notes), *([""] if experiment.notes else [])]
    for grid in grids(experiment, full=True):
        out += [heading.format(escape(grid.title)), ""]
        if grid.note:
            out += [escape(grid.note), ""]
        if not grid.rows:
            continue
        out.append("| " + " | ".join(escape(h) for h in grid.headings) + " |")
        out.append("|" + "---|" * grid.words + "---:|" * (len(grid.headings) - grid.words))
        out += [*("| " + " | ".join(escape(c) for c in row) + " |" for row in grid.rows), ""]
    for name, comparison in experiment.comparisons.items():
        out += [heading.format(f"{escape(str(experiment.plan.baseline))} → {escape(name)}"), ""]
        out += [escape(comparison.verdict), ""]
        changes = [change_line(c, comparison.step.a_ns) for c in told(comparison)]
        out += [*(f"- {escape(change)}" for change in changes), ""]
    if experiment.headlines:
        out += [heading.format("Headlines"), "", *headline_table(experiment.headlines), ""]
    return [*out, escape(intervals(experiment))]


def headline_table(headlines: tuple[Headline, ...]) -> list[str]:
    """Headlines as the lines of a Markdown table; the ratio is ours over what is stated."""
    head = (
        "system",
        "number",
        "survey",
        "primary source",
        "here",
        "95 %",
        "ratio",
        "configuration",
    )
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|---:|---:|---:|---|"]
    for h in headlines:
        said = (h.survey or fmt.UNKNOWN, h.primary or fmt.UNKNOWN)
        cells = (h.system, h.claim, *said, ours(h), interval(h), against(h), h.configuration)
        lines.append("| " + " | ".join(escape(c) for c in cells) + " |")
    return lines
