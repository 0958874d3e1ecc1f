"""The page of an experiment: the variants of a workload and what they measured.

Measures become tables: one of all numbers without labels, variants below each other, and one for
each set of labels (sizes, shapes), a row for each combination.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from chopper import wording as fmt
from chopper.analyzers.compare.result import Change, signed, signed_duration
from chopper.errors import InputError
from chopper.experiments.declarations import ShownView
from chopper.experiments.judgement import MOST_SPREAD, too_far_apart
from chopper.experiments.results import Experiment, Fit, Headline, Row, quotient
from chopper.experiments.sweep import Point, Sweep, shown
from chopper.reports import figures, formatted, to_markdown
from chopper.reports.comparison import waterfall
from chopper.reports.labels import full_label, sentence
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
    Page,
    Paragraph,
    Section,
    Table,
)
from chopper.statistics import Estimate

_LEAST_SHARE = 0.01
_ROUNDING = 1e-9
_BASES = {"measured": "here", "model": "by a model", "recorded": "recorded elsewhere"}
"""What a headline's number rests on, for a terminal."""
_CAUSES = 5
"""Causes named for each variant."""
_UNITS = {"_flop_per_s": "FLOP/s", "_bytes_per_s": "B/s", "_bytes": "B", "_ns": "s", "_hz": "Hz"}


def render(experiment: Experiment, format: str) -> str:
    """Return an experiment as one string: ``html``, ``md``, ``json`` (documented) or ``txt``."""
    return formatted(lambda: page(experiment), experiment.to_dict, format)


def page(experiment: Experiment) -> Page:
    """Return the page of an experiment."""
    return Page(
        title=experiment.plan.workload,
        headline=sentence(experiment.plan.summary),
        facts=facts(experiment),
        summary=[*_warnings("Missing", experiment.notes), *_withheld(experiment)],
        sections=sections(experiment),
    )


def _warnings(title: str, said: Sequence[str]) -> list[Block]:
    return [Items(items=[Item(one, "warning") for one in said], title=title)] if said else []


def _withheld(experiment: Experiment) -> list[Block]:
    return _warnings("Withheld", [finding.message for finding in experiment.findings])


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
    """Return the withheld results and the headlines as lines of Markdown for another page."""
    notes = [*experiment.notes, *(f"withheld: {f.message}" for f in experiment.findings)]
    table = to_markdown.table(headline_table(experiment.headlines))[0].split("\n")
    return [
        *(f"- {to_markdown.escape(note)}" for note in notes),
        *([""] if notes else []),
        *(["**Headlines**", "", *table] if experiment.headlines else []),
    ]


def facts(experiment: Experiment) -> list[str]:
    """Return how it was run: ranks, device, repetitions, options."""
    plan = experiment.plan
    repeats = max((len(v.runs) for v in plan.variants), default=0)
    return [
        f"{fmt.plural(plan.ranks, 'rank')} on {plan.device}",
        fmt.plural(repeats, "repetition"),
        *_others(experiment),
        *(f"{key} {value}" for key, value in plan.options.items() if value is not None),
    ]


def machine(experiment: Experiment) -> str:
    """Return the machine of the measurement, in a line."""
    attribution = next((a for runs in experiment.attributions.values() for a in runs), None)
    if attribution is None:
        return f"{experiment.plan.device}, of a machine that is not known"
    rank = attribution.recording.manifest.ranks[0]
    facts = rank.environment
    device = next((d.name for d in rank.devices if d.name), None)
    parts = [
        f"{facts.get('cores_allowed', '?')} cores of {facts.get('cpu', 'an unknown processor')}",
        *([device] if device else []),
        f"torch {facts.get('torch', '?')}",
        " ".join(facts.get("platform", "").split("-")[:2]),  # system and kernel
    ]
    return ", ".join(part for part in parts if part)


def _others(experiment: Experiment) -> list[str]:
    plan = experiment.plan
    if not experiment.other_cores or plan.machine_cores is None:
        return []
    most = max(experiment.other_cores.values())
    return [f"other programs used at most {most:.1f} of {plan.machine_cores} cores"]


def intervals(experiment: Experiment) -> str:
    """Return what ± and intervals are of, and how they were made."""
    if all(row.estimate.ci95 is None for row in experiment.rows):
        return "One repetition: no spread and no interval; --repeats 3 adds both."
    of = "repetitions"
    if all(len(variant.runs) < 2 for variant in experiment.plan.variants):
        of = "parts of a single run, which are less independent than separate runs (--repeats 3)"
    return (
        f"± is the coefficient of variation, and 95 % intervals are Student's t over {of}; for "
        "ratios, on logarithms with Welch's degrees of freedom."
    )


def tables(experiment: Experiment) -> list[Table]:
    """Return all that was measured, as tables."""
    sets: dict[tuple[str, ...], list[Row]] = {}
    for row in experiment.all_rows:
        sets.setdefault(tuple(key for key, _ in row.labels), []).append(row)
    title = "Variants" if len(experiment.variants) > 1 else "Measured"
    out = [_by_variant(experiment, title, sets.pop(()))] if () in sets else []
    out += _causes(experiment)
    out += [_of_view(experiment, shown_view) for shown_view in experiment.shown]
    for rows in sets.values():
        out += _by_labels(experiment, rows)
    return out


def _columns(headings: Sequence[str], words: int = 1) -> list[str | Column]:
    """Return columns of which the leading ones hold names that are wrapped, never cut."""
    return [Column(h, kind="prose") if i < words else h for i, h in enumerate(headings)]


def _glance(experiment: Experiment) -> list[Section]:
    drawn = [*((fit.title, _fit_figure(fit)) for fit in experiment.fits), *sweeps(experiment)]
    if not drawn:
        return []
    return [
        Section(
            title="At a glance",
            id="curves",
            intro="Means; whiskers of curves reach from the minimum to the maximum of the "
            "repetitions. A fit is drawn through all repetitions, a point each.",
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
        f", and in parentheses the ratio to {baseline}, with its 95 % interval (none where "
        f"repetitions scatter by more than {fmt.ratio(MOST_SPREAD)})"
        if baseline
        else ""
    )
    return Section(
        title="What was measured",
        short="Measured",
        id="measured",
        intro=f"Means over the repetitions, ± the coefficient of variation{ratios}.",
        blocks=tables(experiment),
    )


def _removed(experiment: Experiment) -> list[Section]:
    """Show what each variant changed, cause by cause."""
    baseline = experiment.plan.baseline
    blocks: list[Block] = []
    for i, (name, comparison) in enumerate(experiment.comparisons.items()):
        leaves = [c for c in comparison.leaves() if c.difference_ns]
        leaves.sort(key=lambda c: (not c.told, -abs(c.difference_ns)))
        changes = [_change_line(c, comparison.step.a_ns) for c in leaves[:_CAUSES]]
        label = f"Waterfall from {baseline} to {name}"
        blocks += [
            Paragraph(f"{baseline} → {name}", "strong"),
            Paragraph(comparison.verdict),
            *([Items(items=changes, formats=PLAIN)] if changes else []),
            Figure(name=f"causes-{i}", title="", figure=waterfall(comparison), label=label),
        ]
    section = Section(
        title="Causes that each variant removed",
        short="Causes",
        id="causes",
        intro=f"From the step of {baseline} to that of the variant, in the repetitions with the "
        "median step. Every nanosecond of the difference is in exactly one bar; whiskers "
        "are 95 % intervals over steps.",
        blocks=blocks,
    )
    return [section] if blocks else []


def _change_line(change: Change, step_ns: int) -> str:
    share = f", {signed(change.difference_ns / step_ns)} of the step" if step_ns else ""
    sure = {True: "", False: " (within noise)", None: " (no interval)"}[change.told]
    return f"{full_label(change.id)}: {signed_duration(change.difference_ns)}{share}{sure}"


def _method(experiment: Experiment) -> Section:
    plan = experiment.plan
    variants = [f"{v.name}: {v.summary} ({fmt.plural(len(v.runs), 'run')})" for v in plan.variants]
    step_method = "; a step takes what its run's report says" if plan.steps else ""
    return Section(
        title="How the numbers are computed",
        short="Method",
        id="method",
        blocks=(
            Paragraph(intervals(experiment), "dim"),
            Items(items=variants, title="Variants", formats=BROWSER),
            Paragraph(
                "They ran alternately, so that drift of the machine affects all of them alike. "
                f"The workload measured its own numbers{step_method}.",
                formats=BROWSER,
            ),
            Paragraph(f"`{shlex.join(plan.command)}`", formats=BROWSER),
        ),
    )


def _causes(experiment: Experiment) -> list[Table]:
    """Show the causes of each variant's step; those that are small in all are left out."""
    rows, variants = experiment.causes, experiment.variants
    total_by_variant = {r.variant: 0.0 for r in rows}  # in others nothing was traced
    for row in rows:
        total_by_variant[row.variant] += row.estimate.value
    large = dict.fromkeys(
        r.measure for r in rows if r.estimate.value >= _LEAST_SHARE * total_by_variant[r.variant]
    )
    if not large:
        return []
    at = {(row.variant, row.measure): row for row in rows}
    rest = dict(total_by_variant)
    for cause in large:
        for v in rest:
            rest[v] -= at[v, cause].estimate.value if (v, cause) in at else 0
    return [
        Table(
            title="Where a step's time goes",
            columns=_columns(("Cause", *variants)),
            rows=[
                *(
                    (full_label(c), *(_cell(at.get((v, c)), "_ns") for v in variants))
                    for c in large
                ),
                *(
                    (what, *(fmt.duration(of[v]) if v in of else fmt.UNKNOWN for v in variants))
                    for what, of in (("All others", rest), ("Step", total_by_variant))
                ),
            ],
            totals=1,
            note="Means per rank over the traced steps.",
        )
    ]


def _of_view(experiment: Experiment, shown: ShownView) -> Table:
    from chopper.views import VIEWS

    view, rows = VIEWS[shown.view], list(experiment.view_rows(shown))
    if not rows:
        note = f"Unknown here: {view.needs or 'no rows'}."
        return Table(title=view.title, columns=(), rows=(), note=note)
    return replace(_by_variant(experiment, view.title, rows), note=view.summary)


def _by_variant(experiment: Experiment, title: str, rows: list[Row]) -> Table:
    """Show measures and variants; whichever are more go down the page."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    at = {(row.variant, row.measure): row for row in rows}
    names = [fmt.heading(m) for m in measures]
    lines = [(v, *(_cell(at.get((v, m))) for m in measures)) for v in experiment.variants]
    head = ("Variant", *names)
    if len(measures) > len(experiment.variants):
        head = ("Measure", *experiment.variants)
        lines = [
            (name, *(_cell(at.get((v, m))) for v in experiment.variants))
            for name, m in zip(names, measures, strict=True)
        ]
    return Table(title=title, columns=_columns(head), rows=lines)


def _by_labels(experiment: Experiment, rows: list[Row]) -> list[Table]:
    """Show measures beside each other; with several variants, a table per measure."""
    labels = list(dict.fromkeys(row.labels for row in rows))
    names = tuple(fmt.heading(key) for key, _ in labels[0])
    at = {(row.variant, row.measure, row.labels): row for row in rows}
    several = len({row.variant for row in rows}) > 1
    measured = {(row.variant, row.measure) for row in rows}
    parts: dict[str, list[tuple[str, str]]] = {}
    for m in dict.fromkeys(row.measure for row in rows):
        title = heading(m).capitalize() if several else f"By {' and '.join(names)}"
        parts.setdefault(title, []).extend(
            (v, m) for v in experiment.variants if (v, m) in measured
        )
    return [
        Table(
            title=title,
            columns=_columns(
                (*names, *(v if several else heading(m) for v, m in part)), len(names)
            ),
            rows=[
                (
                    *(fmt.cell(key, value) for key, value in label),
                    *(_cell(at.get((v, m, label))) for v, m in part),
                )
                for label in labels
                if any((v, m, label) in at for v, m in part)
            ],
            words=len(names),
        )
        for title, part in parts.items()
    ]


def _cell(row: Row | None, unit_of: str = "") -> str | Cell:
    if row is None:
        return fmt.UNKNOWN
    if row.withheld:
        return "withheld"
    cell_text = fmt.cell(unit_of or row.measure, row.estimate.value)
    if row.estimate.cv_ratio is not None:
        cell_text += f" ±{fmt.percent(row.estimate.cv_ratio, '.0f')}"
    if row.ratio is None:
        return cell_text
    scattered = too_far_apart(row.ratio.cv_ratio)
    return Cell(text=cell_text, below="withheld" if scattered else _of_baseline(row.ratio))


def _of_baseline(ratio: Estimate) -> str:
    """Return how many times the baseline's; ``same`` where all repetitions gave one number."""
    if ratio.ci95 is None:
        return f"{ratio.value:.2f}×"
    low, high = ratio.ci95
    if max(abs(low - 1), abs(high - 1)) < _ROUNDING:
        return "same"
    return f"{ratio.value:.2f}×, {low:.2f} … {high:.2f}"


def _ours(headline: Headline) -> str:
    """Return a headline's number here; the reason where there is none."""
    if headline.ours is None:
        return headline.why or fmt.UNKNOWN
    mark = "" if headline.unit in ("×", "") else " "
    return f"{_number(headline.ours)}{mark}{headline.unit}"


def _interval(headline: Headline) -> str:
    """Return its 95 % interval: ``1.71 … 1.96``."""
    if headline.ours is None or headline.ci95 is None:
        return ""
    return " … ".join(map(_number, headline.ci95))


def headline_value(headline: Headline) -> str:
    """Return a headline's number here with its interval; the reason where there is none."""
    interval = _interval(headline)
    return _ours(headline) + (f" (95 %: {interval})" if interval else "")


def _number(value: float) -> str:
    if 0 < abs(value) < 1e-4:
        return "< 0.0001" if value > 0 else "> −0.0001"
    size = f"{abs(value):.3g}"
    return ("−" if value < 0 else "") + (f"{abs(value):.0f}" if "e" in size else size)


def _configuration(headline: Headline) -> str:
    """Return a headline's configuration, and what it was chosen for."""
    return "; chosen ".join(filter(None, (headline.configuration, headline.chosen)))


def _headlines(headlines: Sequence[Headline]) -> Section:
    """Show what systems are known for beside the same numbers here."""
    blocks: list[Block] = []
    for h in headlines:
        value = headline_value(h)
        if h.ratio is not None:
            value += f", {h.ratio:.2f}× the published value"
        stated = {"published": h.published, "primary source": h.primary}
        facts = [Fact(label=who, value=words) for who, words in stated.items() if words]
        label = "here" if h.ours is None else _BASES[h.basis]
        facts.append(Fact(label=label, value=value, note=_configuration(h)))
        blocks.append(Facts(title=f"{h.system}: {h.claim}", facts=facts, formats=TERMINAL))
    blocks.append(replace(headline_table(headlines), formats=DOCUMENT))
    return Section(title="Headlines", id="headlines", blocks=blocks)


def headline_table(headlines: Sequence[Headline]) -> Table:
    """Return headlines as a table; the ratio is ours over the published one."""
    words = ("system", "number", "published", "primary source", "here")  # or why there is none here
    last = Column("configuration", kind="prose", wide=True)
    return Table(
        columns=(
            *(Column(heading, kind="prose") for heading in words),
            *("95 %", "ratio", "verdict", "basis"),
            last,
        ),
        rows=[
            (
                *(h.system, h.claim, h.published or fmt.UNKNOWN, h.primary or fmt.UNKNOWN),
                *(_ours(h), _interval(h) or fmt.UNKNOWN),
                fmt.UNKNOWN if h.ratio is None else f"{h.ratio:.2f}×",
                *(h.verdict or fmt.UNKNOWN, fmt.UNKNOWN if h.ours is None else h.basis),
                _configuration(h),
            )
            for h in headlines
        ],
    )


def sweeps(experiment: Experiment) -> list[tuple[str, figures.Figure]]:
    """Return (title, figure) of measures with a number among their labels, a line per all else."""
    curves: dict[tuple[str, str], dict[str, list[tuple[float, Row]]]] = {}
    for row in experiment.rows:
        numbers = [(k, v) for k, v in row.labels if not isinstance(v, str)]
        if len(numbers) != 1:
            continue
        key, at = numbers[0]
        words = [row.variant] if len(experiment.variants) > 1 else []
        words += [str(v) for k, v in row.labels if k != key]
        curve = curves.setdefault((row.measure, key), {})
        curve.setdefault(" ".join(words) or row.measure, []).append((float(at), row))
    return [
        (f"{heading(measure)} over {fmt.heading(key)}".capitalize(), _figure(measure, key, of))
        for (measure, key), of in curves.items()
        if max(len(points) for points in of.values()) > 2
    ]


def _fit_figure(fit: Fit) -> figures.Figure:
    """Return the repetitions as points, and the line that was fitted to all of them."""
    most = max(x for points in fit.points.values() for x, _ in points)
    curves = {name: ([x for x, _ in of], [y for _, y in of]) for name, of in fit.points.items()}
    line = {fit.law: ([0.0, most], [fit.intercept, fit.intercept + fit.slope * most])}
    figure = figures.lines(curves | line, x=fit.x, y=fit.y, unit=fit.unit)
    for trace in figure["data"]:
        trace["mode"] = "lines" if trace["name"] == figures.plain(fit.law) else "markers"
        trace["marker"]["size"] = 9
    return figure


def _figure(measure: str, key: str, curves: dict[str, list[tuple[float, Row]]]) -> figures.Figure:
    """Return curves with whiskers from the least to the most of the repetitions."""
    unit = next((u for suffix, u in _UNITS.items() if measure.endswith(suffix)), "")
    scale = 1e-9 if measure.endswith("_ns") else 1.0
    for points in curves.values():
        points.sort(key=lambda point: point[0])
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [row.estimate.value for points in curves.values() for _, row in points]
    figure = figures.lines(
        {
            name: ([x for x, _ in points], [row.estimate.value * scale for _, row in points])
            for name, points in curves.items()
        },
        x=fmt.heading(key),
        y=heading(measure),
        unit=unit,
        log_x=xs[0] > 0 and xs[-1] >= 16 * xs[0],
        log_y=min(ys) > 0 and max(ys) > 20 * min(ys),
        x_ticks={x: fmt.cell(key, int(x) if x == int(x) else x) for x in xs},
    )
    for trace, points in zip(figure["data"], curves.values(), strict=True):
        rows = [row for _, row in points]
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [(max(row.values) - row.estimate.value) * scale for row in rows],
            "arrayminus": [(row.estimate.value - min(row.values)) * scale for row in rows],
            "thickness": 1,
            "width": 3,
        }
        trace["customdata"] = [
            [fmt.cell(key, x), fmt.cell(measure, row.estimate.value)] for x, row in points
        ]
        trace["hovertemplate"] = (
            "<b>%{fullData.name}</b><br>%{customdata[0]}: %{customdata[1]}<extra></extra>"
        )
    return figure


def heading(measure: str) -> str:
    """Return a measure's name for people; "best" alone would not say of what."""
    words = fmt.heading(measure)
    return f"{words} rate" if measure.endswith("_flop_per_s") else words


SCHEMA = "chopper.experiments/1"
_MAX_PAIRS = 500
_TOP = 40
"""Rows with labels in text and Markdown."""


class Pair(msgspec.Struct, frozen=True):
    """One number of both experiments."""

    a: Row
    b: Row
    ratio: Estimate | None
    """B over A; None where one of them is not positive."""

    @property
    def told(self) -> bool | None:
        """True where the interval of the ratio is beyond 1; None without an interval."""
        if self.ratio is None or self.ratio.ci95 is None:
            return None
        return self.ratio.ci95[0] > 1 or self.ratio.ci95[1] < 1


@dataclass(frozen=True)
class Experiments:
    """Two experiments of one workload.

    Raises:
        InputError: they are of two workloads, or measured nothing in common.
    """

    a: Experiment
    b: Experiment

    def __post_init__(self) -> None:
        names = (self.a.plan.workload, self.b.plan.workload)
        if names[0] != names[1]:
            raise InputError(
                f"{self.a.path} is an experiment of {names[0]}, {self.b.path} of {names[1]}: "
                "compare two of one workload"
            )
        if not self.pairs:
            raise InputError(
                f"{self.a.path} and {self.b.path} have no variant and measure in common: run them "
                "with the same --variants"
            )

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Return what both measured, in A's order."""
        of_b = {(row.variant, row.measure, row.labels): row for row in self.b.rows}
        return tuple(
            Pair(row, row_of_b, quotient(row_of_b, row))
            for row in self.a.rows
            if (row_of_b := of_b.get((row.variant, row.measure, row.labels))) is not None
        )

    @property
    def differences(self) -> list[str]:
        """Return in which settings they differ, in words; machines apart."""
        a, b = self.a.plan, self.b.plan
        names = [*dict.fromkeys((*a.options, *b.options))]
        settings = [
            ("ranks", a.ranks, b.ranks),
            ("device", a.device, b.device),
            *((f"--{name}", a.options.get(name), b.options.get(name)) for name in names),
        ]
        only = [
            f"only in {side}: {', '.join(unmatched)}"
            for side, unmatched in (
                ("A", [v for v in self.a.variants if v not in self.b.variants]),
                ("B", [v for v in self.b.variants if v not in self.a.variants]),
            )
            if unmatched
        ]
        return [*(f"{name}: {x} and {y}" for name, x, y in settings if x != y), *only]

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, schema ``chopper.experiments/1``."""
        return {
            "schema": SCHEMA,
            "workload": self.a.plan.workload,
            "a": {"path": str(self.a.path), "machine": machine(self.a)},
            "b": {"path": str(self.b.path), "machine": machine(self.b)},
            "differences": self.differences,
            "measures": [_pair_dict(pair) for pair in self.pairs],
        }


def _pair_dict(pair: Pair) -> dict[str, Any]:
    return {
        "measure": pair.a.measure,
        "variant": pair.a.variant,
        "labels": dict(pair.a.labels),
        "a": pair.a.estimate.value,
        "b": pair.b.estimate.value,
        "ratio": None if pair.ratio is None else pair.ratio.value,
        "ratio_ci95": None if pair.ratio is None else pair.ratio.ci95,
        "told": pair.told,
    }


def page_of_two(found: Experiments, *, top: int = _TOP) -> Page:
    """Return the page of two experiments; ``top``: rows with labels in text and Markdown."""
    distinct = [pair.told for pair in found.pairs if pair.told is not None]
    differ = f"{fmt.count(sum(distinct))} of them differ beyond the spread of the repetitions"
    sets: dict[tuple[str, ...], list[Pair]] = {}
    for pair in found.pairs:
        sets.setdefault(tuple(key for key, _ in pair.a.labels), []).append(pair)
    sides = (("A", found.a), ("B", found.b))
    facts = [Fact(label=n, value=str(e.path), note=machine(e)) for n, e in sides]
    notices = [*found.differences, *(f"{n}: {f.message}" for n, e in sides for f in e.findings)]
    notes = Items(items=[Item(text, "warning") for text in notices], title="Differences")
    return Page(
        title=f"{found.a.plan.workload}, twice",
        headline=f"{fmt.plural(len(found.pairs), 'number')} measured in both; "
        f"{differ if distinct else 'one repetition gives no interval'}.",
        summary=[Facts(facts=facts), *([notes] if notices else [])],
        sections=[
            *_both_headlines(found),
            *(_pair_section(i, of, sets[of], top) for i, of in enumerate(sorted(sets, key=len))),
        ],
    )


def _both_headlines(found: Experiments) -> list[Section]:
    of_b = {(h.system, h.claim): h for h in found.b.headlines}
    rows = [
        (
            Cell(text=f"{h.system}: {h.claim}"),
            headline_value(h),
            headline_value(of_b[h.system, h.claim]),
        )
        for h in found.a.headlines
        if (h.system, h.claim) in of_b
    ]
    prose = [Column(name, kind="prose") for name in ("Headline", "A", "B")]
    table = Table(columns=prose, rows=rows)
    return [Section(title="Headlines", id="headlines", blocks=(table,))] if rows else []


def _pair_section(number: int, labels: tuple[str, ...], pairs: list[Pair], top: int) -> Section:
    """Show numbers with the largest differences first, those within noise last."""

    def size(pair: Pair) -> tuple[bool, float]:
        return pair.told is False, -abs(math.log(pair.ratio.value)) if pair.ratio else 0.0

    ordered = sorted(pairs, key=size) if labels else pairs
    words = ("Measure", "Variant", *(fmt.heading(key).capitalize() for key in labels))
    omitted_count = len(ordered) - _MAX_PAIRS
    table = Table(
        columns=(
            *(Column(name, kind="prose") for name in words),
            *("A", "B", "B / A", Column("95 % interval", wide=True)),
        ),
        rows=[_pair_cells(pair, labels) for pair in ordered[:_MAX_PAIRS]],
        words=len(words),
        limit=top if labels else None,
        searchable=bool(labels),
        rest=f"{fmt.count(omitted_count)} more in --json." if omitted_count > 0 else "",
    )
    intro = (
        "Means over the repetitions. A ratio whose 95 % interval includes 1 is within noise "
        "(grey in a browser)."
    )
    title = f"By {' and '.join(map(fmt.heading, labels))}" if labels else "Variants"
    return Section(title=title, id=f"measures-{number}", intro=intro, blocks=(table,))


def _pair_cells(pair: Pair, labels: tuple[str, ...]) -> list[Cell]:
    said = dict(pair.a.labels)
    name, ratio = pair.a.measure, pair.ratio
    words = [
        heading(name),
        pair.a.variant,
        *(fmt.cell(k, said[k]) if k in said else "" for k in labels),
    ]
    interval = fmt.UNKNOWN
    if ratio is not None and ratio.ci95 is not None:
        interval = f"{ratio.ci95[0]:.2f} … {ratio.ci95[1]:.2f}"
    value = None if ratio is None else ratio.value
    numbers = (
        *((row.estimate.value, fmt.cell(name, row.estimate.value)) for row in (pair.a, pair.b)),
        (value, fmt.UNKNOWN if value is None else f"{value:.2f}×"),
        (value, interval),
    )
    dim = pair.told is False
    return [
        *(Cell(text=word, dim=dim) for word in words),
        *(Cell(text=text, value=value, dim=dim) for value, text in numbers),
    ]


_SETTING = {"Hz": "clock", "W": "power cap"}


def sweep_page(sweep: Sweep) -> Page:
    """Return the page of a sweep."""
    return Page(
        title="sweep",
        headline=sweep_headline(sweep),
        summary=_sweep_notes(sweep),
        sections=(
            Section(
                title="Measured",
                id="measured",
                blocks=(_sweep_table(sweep), *_sweep_figures(sweep)),
            ),
        ),
    )


def sweep_headline(sweep: Sweep) -> str:
    """Return the fit in one line, or why there is none."""
    setting = _SETTING[sweep.unit]
    if sweep.sensitivity_ratio is None:
        return f"No fit of the step by {setting}: {sweep.why}."
    interval = ""
    if sweep.sensitivity_ci95 is not None:
        interval = " (95 %: {:.2f} to {:.2f})".format(*sweep.sensitivity_ci95)
    return f"Step time ∝ {setting}^(−a) with a = {sweep.sensitivity_ratio:.2f}{interval}."


def _sweep_notes(sweep: Sweep) -> tuple[Block, ...]:
    items = [Item(note, "warning") for note in sweep.notes]
    return (Items(items=items, title="Notes"),) if items else ()


def _sweep_table(sweep: Sweep) -> Table:
    return Table(
        columns=(
            f"{_SETTING[sweep.unit]}, set",
            *("step", "95 %", "power", "95 %", "energy per step", "95 %", "SM clock, held"),
        ),
        rows=[
            (
                shown(point.set_value, sweep.unit),
                *_point_cells("x_ns", point.step_ns),
                *_point_cells("x_w", point.power_w),
                *_point_cells("x_j", point.energy_j),
                fmt.UNKNOWN if point.clock_hz is None else fmt.cell("x_hz", point.clock_hz.value),
            )
            for point in sweep.points
        ],
        note="Power and energy are those of one device, mean power over the recording times the "
        "step.",
    )


def _point_cells(unit_of: str, found: Estimate | None) -> tuple[str, str]:
    if found is None:
        return fmt.UNKNOWN, fmt.UNKNOWN
    interval = fmt.UNKNOWN
    if found.ci95 is not None:
        interval = " – ".join(fmt.cell(unit_of, value) for value in found.ci95)
    return fmt.cell(unit_of, found.value), interval


def _sweep_figures(sweep: Sweep) -> list[Figure]:
    def curve(name: str) -> list[tuple[float, float]]:
        return sorted(
            (point.set_value, found.value)
            for point in sweep.points
            if (found := _point_estimate(point, name)) is not None
        )

    drawn = []
    for name, title, unit, scale in (
        ("step_ns", "Step", "s", 1e-9),
        ("energy_j", "Energy per step and device", "J", 1.0),
    ):
        points = curve(name)
        if len(points) < 2:
            continue
        setting = _SETTING[sweep.unit]
        figure = figures.lines(
            {title: ([x for x, _ in points], [y * scale for _, y in points])},
            x=setting,
            y=title,
            unit=unit,
            x_ticks={x: shown(x, sweep.unit) for x, _ in points},
        )
        drawn.append(
            Figure(
                name=f"sweep-{name}", title=f"{title} by {setting}", figure=figure, formats=BROWSER
            )
        )
    return drawn


def _point_estimate(point: Point, name: str) -> Estimate | None:
    estimate: Estimate | None = getattr(point, name)
    return estimate
