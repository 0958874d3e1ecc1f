"""The page of an experiment: the variants of a workload and what they measured.

Measures become tables: one of all numbers without labels, variants below each other, and one for
each set of labels (sizes, shapes), a row for each combination.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.analyzers.compare.result import signed, signed_duration
from chopper.reports import formatted, to_markdown
from chopper.reports.comparison import waterfall
from chopper.reports.experiment_figures import heading, sides, sweeps
from chopper.reports.labels import full_label, sentence
from chopper.reports.page import (
    BROWSER,
    DOCUMENT,
    PLAIN,
    TERMINAL,
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

    from chopper.analyzers.compare.result import Change, Comparison
    from chopper.experiments.declarations import ShownView
    from chopper.experiments.results import Experiment, Headline, Row
    from chopper.reports.page import Block
    from chopper.statistics import Estimate

_LEAST_SHARE = 0.01
_ROUNDING = 1e-9
_CAUSES = 5
"""Causes named for each variant."""


def render(experiment: Experiment, format: str) -> str:
    """Return an experiment as one string: ``html``, ``md``, ``json`` (documented) or ``txt``."""
    return formatted(lambda: page(experiment), experiment.to_dict, format)


def page(experiment: Experiment) -> Page:
    """Return the page of an experiment."""
    return Page(
        title=experiment.plan.workload,
        headline=sentence(experiment.plan.summary),
        facts=facts(experiment),
        summary=(
            (Items(items=[Item(note, "warning") for note in experiment.notes], title="Missing"),)
            if experiment.notes
            else ()
        ),
        sections=sections(experiment),
    )


def headlines_page(workload: str, headlines: Sequence[Headline]) -> Page:
    """Return a page of headlines alone: of a model, where nothing was measured."""
    return Page(title=workload, headline="", sections=(_headlines(headlines),))


def sections(experiment: Experiment) -> list[Section]:
    """Return what an experiment shows below its headline."""
    return [
        *([_headlines(experiment.headlines)] if experiment.headlines else []),
        *_glance(experiment),
        _measured(experiment),
        *_removed(experiment),
        _method(experiment),
    ]


def section(experiment: Experiment) -> list[str]:
    """Return all that an experiment shows as lines of Markdown, for a page about more than that."""
    out = [f"- {to_markdown.escape(note)}" for note in experiment.notes]
    for part in sections(experiment):
        inner = to_markdown.blocks(part.blocks, level=0)
        if "md" in part.formats and inner:
            out += ["", f"**{to_markdown.escape(part.title)}**"]
            out += [line for paragraph in inner for line in ("", *paragraph.split("\n"))]
    return out[1:] if out and not out[0] else out


def facts(experiment: Experiment) -> list[str]:
    """Return how it was run: ranks, device, repetitions, options."""
    plan = experiment.plan
    repeats = max((len(v.runs) for v in plan.variants), default=0)
    return [
        f"{fmt.plural(plan.ranks, 'rank')} on {plan.device}",
        fmt.plural(repeats, "repetition"),
        *(f"{key} {value}" for key, value in plan.options.items() if value is not None),
    ]


def intervals(experiment: Experiment) -> str:
    """Return what ± and intervals are of, and how they were made."""
    if all(row.estimate.ci95 is None for row in experiment.rows):
        return "One repetition: no spread and no interval; --repeats 3 gives both."
    of = "repetitions"
    if all(len(variant.runs) < 2 for variant in experiment.plan.variants):
        of = "parts of a single run, which are less independent than runs (--repeats 3)"
    return (
        f"± is the coefficient of variation and 95 % Student's t over {of}; of a ratio between "
        "logarithms, with Welch's degrees of freedom."
    )


def tables(experiment: Experiment, *, full: bool) -> list[Table]:
    """Return all that was measured, as tables.

    Args:
        experiment: what to show.
        full: with the intervals of ratios.
    """
    out = [
        Table(
            title=e.title,
            columns=_columns(e.headings, e.words),
            rows=e.rows,
            words=e.words,
            note=e.note,
        )
        for e in experiment.exhibits
    ]
    shown_whole = {measure for e in experiment.exhibits for measure in e.shows}
    rest = [row for row in experiment.rows if row.measure not in shown_whole]
    unlabelled = [row for row in rest if not row.labels]
    out += [_by_variant(experiment, unlabelled, full=full)] if unlabelled else []
    out += _causes(experiment, full=full)
    out += [_of_view(experiment, shown, full=full) for shown in experiment.shown]
    sets: dict[tuple[str, ...], list[Row]] = {}
    for row in rest:
        if row.labels:
            sets.setdefault(tuple(key for key, _ in row.labels), []).append(row)
    for rows in sets.values():
        out += _by_labels(experiment, rows, full=full)
    return [t if full else replace(t, formats=TERMINAL) for t in out]


def _columns(headings: Sequence[str], words: int = 1) -> list[str | Column]:
    """Return columns of which the leading ones hold names that are wrapped, never cut."""
    return [Column(h, kind="prose") if i < words else h for i, h in enumerate(headings)]


def _glance(experiment: Experiment) -> list[Section]:
    drawn = sweeps(experiment) or sides(experiment)
    if not drawn:
        return []
    return [
        Section(
            title="At a glance",
            id="curves",
            intro="Means; whiskers reach from the least to the most of the repetitions.",
            blocks=[
                Figure(name=f"sweep-{i}", title=title, figure=figure)
                for i, (title, figure) in enumerate(drawn)
            ],
            formats=BROWSER,
        )
    ]


def _measured(experiment: Experiment) -> Section:
    baseline = experiment.plan.baseline
    ratios = (
        f", and in brackets how many times the value of {baseline}, with its 95 % interval"
        if baseline
        else ""
    )
    return Section(
        title="What was measured",
        short="Measured",
        id="measured",
        intro=f"Means over the repetitions, ± their coefficient of variation{ratios}.",
        blocks=[
            *tables(experiment, full=False),
            *(replace(t, formats=DOCUMENT) for t in tables(experiment, full=True)),
        ],
    )


def _removed(experiment: Experiment) -> list[Section]:
    """Show what each variant changed, cause by cause."""
    baseline = experiment.plan.baseline
    blocks: list[Block] = []
    for i, (name, comparison) in enumerate(experiment.comparisons.items()):
        title = f"{baseline} → {name}"
        changes = [change_line(c, comparison.step.a_ns) for c in told(comparison)]
        blocks += [
            Paragraph(title, "strong"),
            Paragraph(comparison.verdict),
            *([Items(items=changes, formats=PLAIN)] if changes else []),
            Figure(
                name=f"causes-{i}",
                title="",
                figure=waterfall(comparison),
                label=f"Waterfall from {baseline} to {name}",
            ),
        ]
    if not blocks:
        return []
    return [
        Section(
            title="Which cause each variant removed",
            short="Causes",
            id="causes",
            intro=f"From the step of {baseline} to that of the variant, in the repetitions with "
            "the median step. Every nanosecond of the difference is in exactly one bar; whiskers "
            "are 95 % intervals over steps.",
            blocks=blocks,
        )
    ]


def _method(experiment: Experiment) -> Section:
    plan = experiment.plan
    variants = [f"{v.name}: {v.summary} ({fmt.plural(len(v.runs), 'run')})" for v in plan.variants]
    own = "; the length of a step is the mean of those that were traced" if plan.steps else ""
    return Section(
        title="How each number was made",
        short="Method",
        id="method",
        blocks=(
            Paragraph(intervals(experiment), "dim"),
            Items(items=variants, title="Variants", formats=BROWSER),
            Paragraph(
                "They ran in turn, so that a change of the machine hits all alike. The workload "
                f"measured its own numbers{own}.",
                formats=BROWSER,
            ),
            Paragraph(f"`{shlex.join(plan.command)}`", formats=BROWSER),
        ),
    )


def _causes(experiment: Experiment, *, full: bool) -> list[Table]:
    """Show the causes of each variant's step; those that are small in all are left out."""
    rows = experiment.causes
    whole: dict[str, float] = {}
    for row in rows:
        whole[row.variant] = whole.get(row.variant, 0.0) + row.estimate.value
    large = dict.fromkeys(
        row.measure for row in rows if row.estimate.value >= _LEAST_SHARE * whole[row.variant]
    )
    if not large:
        return []
    at = {(row.variant, row.measure): row for row in rows}
    others = {
        v: sum(r.estimate.value for r in rows if r.variant == v and r.measure not in large)
        for v in whole
    }
    return [
        Table(
            title="Where a step's time goes",
            columns=_columns(("Cause", *experiment.variants)),
            rows=[
                *(
                    (
                        full_label(c),
                        *(_cell(at.get((v, c)), "time_ns", full=full) for v in experiment.variants),
                    )
                    for c in large
                ),
                ("All others", *(fmt.duration(others.get(v)) for v in experiment.variants)),
                ("Step", *(fmt.duration(whole.get(v)) for v in experiment.variants)),
            ],
            totals=1,
            note="Of each rank, in the steps that were traced.",
        )
    ]


def _of_view(experiment: Experiment, shown: ShownView, *, full: bool) -> Table:
    from chopper.views import VIEWS

    view, rows = VIEWS[shown.view], experiment.view_rows(shown)
    table = _by_variant(experiment, list(rows), title=view.title, full=full)
    return replace(
        table, note=view.summary if rows else f"Not known here: {view.needs or 'no rows'}."
    )


def _by_variant(
    experiment: Experiment, rows: list[Row], *, title: str | None = None, full: bool
) -> Table:
    measures = list(dict.fromkeys(row.measure for row in rows))
    at = {(row.variant, row.measure): row for row in rows}
    title = title or ("Variants" if len(experiment.variants) > 1 else "Measured")
    if not measures:
        return Table(title=title, columns=(), rows=())
    if len(measures) > len(experiment.variants):
        # Whichever is longer goes down the page.
        return Table(
            title=title,
            columns=_columns(("Measure", *experiment.variants)),
            rows=[
                (fmt.heading(m), *(_cell(at.get((v, m)), full=full) for v in experiment.variants))
                for m in measures
            ],
        )
    return Table(
        title=title,
        columns=_columns(("Variant", *(fmt.heading(m) for m in measures))),
        rows=[
            (variant, *(_cell(at.get((variant, m)), full=full) for m in measures))
            for variant in experiment.variants
        ],
    )


def _by_labels(experiment: Experiment, rows: list[Row], *, full: bool) -> list[Table]:
    """Show measures beside each other; with several variants, a table per measure."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    labels = list(dict.fromkeys(row.labels for row in rows))
    names = tuple(fmt.heading(key) for key, _ in labels[0])
    at = {(row.variant, row.measure, row.labels): row for row in rows}
    several = len({row.variant for row in rows}) > 1
    measured = {(row.variant, row.measure) for row in rows}
    columns = [(v, m) for m in measures for v in experiment.variants if (v, m) in measured]
    split = [[c for c in columns if c[1] == m] for m in measures] if several else [columns]
    return [
        Table(
            title=heading(part[0][1]).capitalize() if several else f"By {' and '.join(names)}",
            columns=_columns(
                (*names, *(v if several else heading(m) for v, m in part)), len(names)
            ),
            rows=[
                (
                    *(fmt.cell(key, value) for key, value in label),
                    *(_cell(at.get((v, m, label)), full=full) for v, m in part),
                )
                for label in labels
                if any((v, m, label) in at for v, m in part)
            ],
            words=len(names),
        )
        for part in split
    ]


def _cell(row: Row | None, unit_of: str | None = None, *, full: bool) -> str | Cell:
    if row is None:
        return fmt.UNKNOWN
    said = fmt.cell(unit_of or row.measure, row.estimate.value)
    if row.estimate.cv_ratio is not None:
        said += f" ±{row.estimate.cv_ratio * 100:.0f} %"
    return said if row.ratio is None else Cell(text=said, below=_of_baseline(row.ratio, full=full))


def _of_baseline(ratio: Estimate, *, full: bool) -> str:
    """Return how many times the baseline's; ``same`` where all repetitions gave one number."""
    if ratio.ci95 is None:
        return f"{ratio.value:.2f}×"
    low, high = ratio.ci95
    if max(abs(low - 1), abs(high - 1)) < _ROUNDING:
        return "same"
    return f"{ratio.value:.2f}×" + (f", {low:.2f} … {high:.2f}" if full else "")


def ours(headline: Headline) -> str:
    """Return a headline's number here; the reason where there is none."""
    if headline.ours is None:
        return headline.why or fmt.UNKNOWN
    mark = "" if headline.unit in ("×", "") else " "
    return f"{_number(headline.ours)}{mark}{headline.unit}"


def interval(headline: Headline) -> str:
    """Return its 95 % interval: ``1.71 … 1.96``."""
    if headline.ours is None or headline.ci95 is None:
        return fmt.UNKNOWN
    return f"{_number(headline.ci95[0])} … {_number(headline.ci95[1])}"


def against(headline: Headline) -> str:
    """Return how many times what is stated it is: ``1.05×``."""
    return fmt.UNKNOWN if headline.ratio is None else f"{headline.ratio:.2f}×"


def _number(value: float) -> str:
    size = f"{abs(value):.3g}"
    if 0 < abs(value) < 1e-4:
        return "< 0.0001" if value > 0 else "> −0.0001"
    if "e" in size:
        size = f"{abs(value):.0f}"
    return ("−" if value < 0 else "") + size


def told(comparison: Comparison) -> list[Change]:
    """Return the leaf causes that moved most, those told from noise first."""
    leaves = [c for c in comparison.leaves() if c.difference_ns]
    return sorted(leaves, key=lambda c: (not c.told, -abs(c.difference_ns)))[:_CAUSES]


def change_line(change: Change, step_ns: int) -> str:
    """Return one cause's difference in words."""
    share = f", {signed(change.difference_ns / step_ns)} of the step" if step_ns else ""
    sure = "" if change.told else " (within noise)" if change.told is not None else " (no interval)"
    return f"{full_label(change.id)}: {signed_duration(change.difference_ns)}{share}{sure}"


def _headlines(headlines: Sequence[Headline]) -> Section:
    """Show what systems are known for beside the same numbers here."""
    blocks: list[Block] = []
    for h in headlines:
        value = ours(h)
        if h.ours is not None and h.ci95 is not None:
            value += f" (95 %: {interval(h)})"
        if h.ratio is not None:
            value += f", {against(h)} what is stated"
        stated = [
            Fact(label=who, value=words)
            for who, words in (("survey", h.survey), ("primary source", h.primary))
            if words is not None
        ]
        blocks.append(
            Facts(
                title=f"{h.system}: {h.claim}",
                facts=[*stated, Fact(label="here", value=value, note=h.configuration)],
                formats=TERMINAL,
            )
        )
    blocks.append(replace(_headline_table(headlines), formats=DOCUMENT))
    return Section(title="Headlines", id="headlines", blocks=blocks)


def _headline_table(headlines: Sequence[Headline]) -> Table:
    prose = [Column(h, kind="prose") for h in ("system", "number", "survey", "primary source")]
    return Table(
        columns=(*prose, "here", "95 %", "ratio", Column("configuration", kind="prose", wide=True)),
        rows=[
            (
                *(h.system, h.claim, h.survey or fmt.UNKNOWN, h.primary or fmt.UNKNOWN),
                *(ours(h), interval(h), against(h), h.configuration),
            )
            for h in headlines
        ],
    )


def headline_table(headlines: Sequence[Headline]) -> list[str]:
    """Return headlines as lines of a Markdown table; the ratio is ours over what is stated."""
    [table] = to_markdown.table(_headline_table(headlines))
    return table.split("\n")
