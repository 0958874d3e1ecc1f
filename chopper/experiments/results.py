"""A reference workload in several variants, each repeated: what they measured, beside each other.

An experiment is a directory: ``experiment.json`` says what was run, and each repetition of each
variant is a run of its own beside it (``sequential-1``, ``chunked-1``, …), which every other
command reads. The numbers are those that the workload measured itself (``prof.measure``) and the
time of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from chopper.experiments.judgement import (
    beyond,
    beyond_limits,
    disturbances,
    natural_bounds,
    too_far_apart,
)
from chopper.notebook import as_cell
from chopper.storage.files import decode_document, document, read_bytes
from chopper.storage.layout import EXPERIMENT
from chopper.tables import ranges
from chopper.tables.ranges import FileName, Integer, Ranks, Ratio, Time

if TYPE_CHECKING:
    import argparse

    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.compare.result import Comparison
    from chopper.experiments.declarations import Bound, Needs, ShownView, Workload
    from chopper.statistics import Estimate
    from chopper.storage.manifest import Finding, RunManifest

SCHEMA = "chopper.experiment/1"
REPETITION = "repetition"
"""Label of a number that a run measured several times over, each time of something else: a stretch
of its steps. Where a variant has a single run, these are its repetitions."""
STEP = "step_ns"
"""Measured by chopper in every variant that has steps: the step time of a run's report."""

_ALIKE_RATIO = 0.1
"""Numbers that differ by no more are alike: published ones are rounded."""

Basis = Literal["measured", "model", "recorded"]
Labels = tuple[tuple[str, str | int | float], ...]
Value = tuple[str, str, Labels, float]


class VariantPlan(msgspec.Struct, kw_only=True):
    """One variant and the names of its runs."""

    name: str
    summary: str
    runs: list[FileName] = []


class Plan(msgspec.Struct, kw_only=True):
    """Content of ``experiment.json``."""

    schema: str = SCHEMA
    chopper_version: str
    workload: str
    summary: str
    command: list[str]
    created_ns: Time
    ranks: Ranks
    device: str
    options: dict[str, str | Integer | ranges.Value | None]
    steps: bool
    """True where its steps are what it is about, and no traced pass before it measures."""
    baseline: str | None
    """The variant that others are compared with; None: there is nothing to compare."""
    variants: list[VariantPlan]
    other_cores: dict[str, Ratio] = {}
    """Run → cores that other programs used while it was recorded; empty in older experiments."""
    machine_cores: Ranks | None = None
    """Cores of the machine that these are of."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number of one variant."""

    measure: str
    labels: Labels
    variant: str
    values: tuple[float, ...]
    """One per repetition: the median of what the repetition recorded, averaged over its ranks.
    Of a single run that labels its own, one for each of these."""
    estimate: Estimate
    ratio: Estimate | None
    """To the baseline's; None for the baseline itself, and where it did not measure this."""
    withheld: str = ""
    """Why its values cannot be, where they cannot: it keeps its place, without a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A number that a system is known for, beside the same number here."""

    system: str
    claim: str
    published: str | None = None
    """The number as commonly published."""
    primary: str | None = None
    """What the primary source itself says."""
    unit: str = "×"
    ours: float | None = None
    """None when it was not measured; ``why`` says why."""
    ci95: tuple[float, float] | None = None
    stated: float | None = None
    """The one number, in ``unit``, that ours is compared with: the primary source's, or the
    published one where the primary states another quantity; None where neither is one number."""
    configuration: str = ""
    why: str = ""
    basis: Basis = "measured"
    """Measured here, ``model`` for arithmetic alone, or ``recorded`` on another machine."""
    chosen: str = ""
    """What its configuration was chosen for, where a choice decides the number."""
    by_choice: bool = False
    """That choice, or a constant of the model, was made to reach the stated number."""
    timed: bool = True
    """False where other programs on the machine cannot change it: losses, bytes, a model."""
    spread_ratio: float | None = None
    """Coefficient of variation of the repetitions."""
    least: float | None = None
    most: float | None = None
    """In ``unit``: what lies beyond cannot be, because of ``bound``."""
    bound: str = ""
    withheld: tuple[str, ...] = ()
    """Codes of the checks because of which ``ours`` is None although it was measured."""

    @classmethod
    def of(
        cls, estimate: Estimate | None, *, why: str = "", scale: float = 1.0, **facts: Any
    ) -> Headline:
        """Return the headline that an estimate is, times ``scale``; ``why`` where there is none."""
        if estimate is None:
            return cls(why=why, **facts)
        ci95 = estimate.ci95 and (estimate.ci95[0] * scale, estimate.ci95[1] * scale)
        spread_ratio = estimate.cv_ratio
        return cls(ours=estimate.value * scale, ci95=ci95, spread_ratio=spread_ratio, **facts)

    def judged(self, disturbances: Sequence[Finding]) -> Headline:
        """Return it, or where it cannot be or shows nothing, the reasons in place of its number.

        Args:
            disturbances: of the machine, for all that was timed.
        """
        if self.ours is None:
            return self
        reasons = beyond_limits(self.ours, self.unit, self.least, self.most, self.bound)
        if self.timed:
            reasons += [*too_far_apart(self.spread_ratio), *disturbances]
        if not reasons:
            return self
        # The configuration may repeat the number, or others that it was made of.
        return replace(
            self,
            ours=None,
            ci95=None,
            spread_ratio=None,
            configuration="",
            why="withheld: " + "; ".join(finding.message for finding in reasons),
            withheld=tuple(finding.code for finding in reasons),
        )

    @property
    def ratio(self) -> float | None:
        """Our number over the stated one; None if either is unknown."""
        return None if self.ours is None or not self.stated else self.ours / self.stated

    @property
    def verdict(self) -> str:
        """Judge the stated number by ours: within a tenth of its interval, or not.

        ``reproduced`` (a model: ``consistent``), ``differs``, ``by choice`` where a choice was made
        to reach the stated number, so that neither would say anything of it, ``not shown here``
        where there is no number of ours, and empty where one number is not stated.
        """
        if self.ours is None:
            return "not shown here"
        if not self.stated:
            return ""
        if self.by_choice:
            return "by choice"
        low, high = self.ci95 or (self.ours, self.ours)
        if not low * (1 - _ALIKE_RATIO) <= self.stated <= high * (1 + _ALIKE_RATIO):
            return "differs"
        return "consistent" if self.basis == "model" else "reproduced"


@dataclass(frozen=True)
class Experiment:
    """All that was measured, and where it lies."""

    path: Path
    plan: Plan
    rows: tuple[Row, ...]
    attributions: dict[str, list[Attribution]] = field(repr=False)
    """Variant → its repetitions that could be attributed."""
    notes: tuple[str, ...] = ()
    program: Program | None = field(default=None, repr=False)
    """Its workload; None where this version of chopper has none of that name."""
    impossible: tuple[tuple[Row, Finding], ...] = ()
    """Rows that cannot be, and are not among ``rows``; with what says so."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names, the baseline first when there is one."""
        return tuple(v.name for v in self.plan.variants)

    def _repr_html_(self) -> str:
        return as_cell(self, "chopper.reports.experiment:page")

    def find(self, measure: str, variant: str | None = None, **labels: Any) -> Row | None:
        """The row of a measure with (at least) these labels; of the first variant by default."""
        variant = variant if variant is not None else self.variants[0]
        wanted = labels.items()
        for row in self.rows:
            if (
                row.measure == measure
                and row.variant == variant
                and wanted <= dict(row.labels).items()
            ):
                return row
        return None

    def why(self, measure: str, *variants: str, otherwise: str = "", **labels: Any) -> str:
        """Return why a measure of one of the variants was withheld; ``otherwise`` if it was not."""
        wanted = labels.items()
        for row, finding in self.impossible:
            if (
                row.measure == measure
                and row.variant in variants
                and wanted <= dict(row.labels).items()
            ):
                return f"withheld: {finding.message}"
        return otherwise

    @cached_property
    def other_cores(self) -> dict[str, float]:
        """Run → cores that other programs used; empty where that is unknown.

        A workload that measures it (``other_programs_ratio``) knows it better: of the stretches
        that count, and with the processes that it started and nobody waited for.
        """
        cores = dict(self.plan.other_cores)
        for planned in self.plan.variants if self.plan.machine_cores is not None else ():
            measured = [
                value
                for row in self.rows
                if (row.measure, row.variant) == ("other_programs_ratio", planned.name)
                for value in row.values
            ]
            if measured:
                used = max(measured) * (self.plan.machine_cores or 0)
                cores |= dict.fromkeys(planned.runs, used)
        return cores

    @cached_property
    def disturbances(self) -> tuple[Finding, ...]:
        """Other work of the machine, where it spoils all that was timed."""
        return tuple(disturbances(self.other_cores, self.plan.machine_cores))

    def value(self, measure: str, variant: str | None = None, **labels: Any) -> float | None:
        """The mean over repetitions of what `find` looks up; None when it was not measured."""
        row = self.find(measure, variant, **labels)
        return None if row is None else row.estimate.value

    def ratio(self, measure: str, of: str, to: str, **labels: Any) -> Estimate | None:
        """Divide ``of``'s value by ``to``'s; None when one of them was not measured."""
        return quotient(self.find(measure, of, **labels), self.find(measure, to, **labels))

    def view(self, name: str, variant: str) -> list[list[dict[str, Any]]]:
        """Rows of a view (``chopper analyze --view``) of each repetition of a variant."""
        from chopper.views import view

        return [view(a, name).to_pylist() for a in self.attributions.get(variant, [])]

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """Rows, then those that are withheld."""
        return (*self.rows, *(row for row, _ in self.impossible))

    @property
    def shown(self) -> tuple[ShownView, ...]:
        """Views whose columns are compared between the variants."""
        if self.program is None or not self.plan.steps:
            return ()
        return self.program.workload.shown

    def view_rows(self, columns_of: ShownView) -> tuple[Row, ...]:
        """Columns of a view, averaged over ranks and steps, for each variant; none: no rows."""
        measured = [
            (variant, column, (), value)
            for variant in self.variants
            for column in columns_of.columns
            for value in self.means(columns_of, column, variant)
        ]
        return rows_of(measured, self.plan.baseline)

    def means(self, columns_of: ShownView, column: str, variant: str) -> list[float]:
        """Mean of a view's column over ranks and steps, for each repetition of a variant."""
        of_repeats = []
        for rows in self.view(columns_of.view, variant):
            values = [
                float(row[column])
                for row in rows
                if row.get(column) is not None
                and (columns_of.where is None or row[columns_of.where[0]] == columns_of.where[1])
            ]
            if values:
                of_repeats.append(fmean(values))
        return of_repeats

    @cached_property
    def causes(self) -> tuple[Row, ...]:
        """Time per step of each leaf cause (the measure is its id), the largest first."""
        if not self.plan.steps:
            return ()
        measured: list[Value] = []
        for variant, attributions in self.attributions.items():
            for attribution in attributions:
                windows = sum(rank.steps for rank in attribution.ranks)
                for leaf in attribution.leaves() if windows else ():
                    measured.append((variant, leaf.id, (), leaf.time_ns / windows))
        rows = rows_of(measured, self.plan.baseline)
        most: dict[str, float] = {}
        for row in rows:
            most[row.measure] = max(most.get(row.measure, 0.0), row.estimate.value)
        return tuple(sorted(rows, key=lambda row: (-most[row.measure], row.measure)))

    def share(self, cause: str, variant: str) -> list[float]:
        """Share of the observed time that a cause has, in each repetition of a variant."""
        return [
            sum(row.time_ns for row in a.causes() if row.id == cause) / a.observed_ns
            for a in self.attributions.get(variant, [])
            if a.observed_ns
        ]

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """Variant → its difference from the baseline, between repetitions of median steps."""
        from chopper.analyzers.compare.runs import compare

        baseline = self.plan.baseline
        if baseline is None or not self.plan.steps or not self.attributions.get(baseline):
            return {}
        base = _median_run(self.attributions[baseline])
        return {
            name: compare(base, _median_run(runs), allow_different=True)
            for name, runs in self.attributions.items()
            if name != baseline and any(a.observed_ns for a in runs)
        }

    @cached_property
    def headlines(self) -> tuple[Headline, ...]:
        """The numbers that the workload exists to show."""
        if self.program is None or self.program.headlines is None:
            return ()
        own, given = self.program.workload, self.plan.options
        # What the user left open may have been filled in since: of that, the command tells.
        named = {word.partition("=")[0] for word in self.plan.command}
        by_default = not any(
            f"--{o.name}" in named
            if o.default is None
            else given.get(o.name.replace("-", "_"), o.default) != o.default
            for o in own.options
        )
        judged = (h.judged(self.disturbances) for h in self.program.headlines(self))
        return tuple(
            replace(h, chosen=own.chosen)
            if by_default and not h.chosen and h.basis == "measured" and h.ours is not None
            else h
            for h in judged
        )

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        """The laws that are drawn through the measured points."""
        draw = None if self.program is None else self.program.fits
        return () if draw is None else tuple(draw(self))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of checks: of the machine, and of numbers that cannot be."""
        return (*self.disturbances, *dict.fromkeys(finding for _, finding in self.impossible))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, schema ``chopper.experiment/1``."""
        return {
            **msgspec.to_builtins(self.plan),
            "path": str(self.path),
            "notes": list(self.notes),
            "measures": [_row_to_dict(row) for row in self.all_rows],
            "causes": [_row_to_dict(row) for row in self.causes],
            "views": {
                columns_of.view: [_row_to_dict(row) for row in self.view_rows(columns_of)]
                for columns_of in self.shown
            },
            "headlines": [headline_to_dict(h) for h in self.headlines],
            "findings": msgspec.to_builtins(self.findings),
            "comparisons": {name: c.to_dict() for name, c in self.comparisons.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A straight line through the repetitions of all variants, for a figure."""

    title: str
    x: str
    y: str
    unit: str
    """Of y."""
    points: Mapping[str, Sequence[tuple[float, float]]]
    """Variant → x and y of each repetition."""
    law: str
    """The line in words, with its numbers."""
    intercept: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A workload's declaration with the functions of its module."""

    workload: Workload

    needs: Callable[[argparse.Namespace, int, str], Needs]
    """Takes the options, the number of ranks and the kind of device; raises ValueError with what
    the machine lacks, UsageError with what is wrong with the options."""

    headlines: Callable[[Experiment], Iterable[Headline]] | None = None
    """The numbers that it exists to show, out of its experiment."""

    fits: Callable[[Experiment], Iterable[Fit]] | None = None
    """The laws that its page draws through the measured points."""

    model: Callable[[], Iterable[Headline]] | None = None
    """Headlines that need no measurement, shown where it cannot run."""


def _row_to_dict(row: Row) -> dict[str, Any]:
    estimate = msgspec.to_builtins(row.estimate)
    return {
        "measure": row.measure,
        "labels": dict(row.labels),
        "variant": row.variant,
        "values": [] if row.withheld else list(row.values),
        **(dict.fromkeys(estimate) if row.withheld else estimate),
        "ratio": None if row.ratio is None else row.ratio.value,
        "ratio_ci95": None if row.ratio is None else row.ratio.ci95,
        "withheld": row.withheld or None,
    }


def headline_to_dict(headline: Headline) -> dict[str, Any]:
    """A headline as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(headline)
    return plain | {"ratio": headline.ratio, "verdict": headline.verdict}


def quotient(over: Row | None, under: Row | None) -> Estimate | None:
    """Divide one row's value by another one's; None when one of them is missing."""
    return None if over is None or under is None else ratio(over.values, under.values)


def ratio_of_pairs(over: Row | None, under: Row | None) -> Estimate | None:
    """Divide values measured side by side, pair by pair: what slows one pair down is in neither."""
    if over is None or under is None or len(over.values) != len(under.values):
        return None
    ratios = [o / u for o, u in zip(over.values, under.values, strict=True)]
    return ratio(ratios, [1.0] * len(ratios))


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate | None:
    """Divide the values of repetitions; None where one side has none."""
    from chopper import statistics as stats

    return stats.ratio(over, under) if over and under else None


def difference(more: Sequence[float], less: Sequence[float]) -> Estimate | None:
    """Subtract the values of repetitions; None where one side has none."""
    from chopper import statistics as stats

    return stats.difference(more, less) if more and less else None


def read_plan(path: Path) -> Plan:
    """Read ``experiment.json``."""
    file = path / EXPERIMENT
    return decode_document(
        read_bytes(file),
        Plan,
        SCHEMA,
        f"{file}: is not an experiment",
        remedy="run the workload again",
    )


def write_plan(path: Path, plan: Plan) -> None:
    """Write ``experiment.json``; called early and often, so that an interruption loses nothing."""
    from chopper.storage.files import write_atomic

    write_atomic(path / EXPERIMENT, document(plan))


def measures_of(manifest: RunManifest) -> Iterator[tuple[str, Labels, list[float]]]:
    """Join what one run measured: of each repetition, ranks' medians, averaged."""
    measures: dict[tuple[str, Labels], dict[int | str | float, dict[int, list[float]]]] = {}
    for rank in manifest.ranks:
        for measure in rank.measures:
            labels = tuple(sorted((k, v) for k, v in measure.labels.items() if k != REPETITION))
            repetitions = measures.setdefault((measure.name, labels), {})
            ranks = repetitions.setdefault(measure.labels.get(REPETITION, 0), {})
            ranks.setdefault(rank.rank, []).append(measure.value)
    for (name, labels), repetitions in measures.items():
        values = [fmean(median(v) for v in ranks.values()) for ranks in repetitions.values()]
        yield name, labels, values


def rows_of(measured: Sequence[Value], baseline: str | None) -> tuple[Row, ...]:
    """Join repetitions to rows, each compared with that of the baseline."""
    from chopper import statistics as stats

    values: dict[tuple[str, Labels, str], list[float]] = {}
    for variant, measure, labels, value in measured:
        values.setdefault((measure, labels, variant), []).append(value)
    rows = []
    for (measure, labels, variant), of_variant in values.items():
        base = values.get((measure, labels, baseline)) if baseline not in (None, variant) else None
        compared = stats.ratio(of_variant, base) if base else None
        estimate = stats.estimate(of_variant)
        rows.append(Row(measure, labels, variant, tuple(of_variant), estimate, compared))
    return tuple(rows)


def sorted_out(
    rows: Sequence[Row], bounds: Sequence[Bound]
) -> tuple[tuple[Row, ...], tuple[tuple[Row, Finding], ...]]:
    """Return the rows that can be, and those that cannot with what says so.

    A row without a baseline that can be has no ratio to it.
    """
    broken: dict[tuple[str, str, object], Finding] = {}
    for row in rows:
        for bound in (*bounds, *natural_bounds(row.measure)):
            if bound.measure != row.measure:
                continue
            finding = beyond(bound, row.variant, row.labels, row.estimate.value)
            if finding is not None:
                for measure in (row.measure, *bound.with_it):
                    broken.setdefault((measure, row.variant, row.labels), finding)
    if not broken:
        return tuple(rows), ()
    impossible = tuple(
        (replace(row, ratio=None, withheld=broken[key].message), broken[key])
        for row in rows
        if (key := (row.measure, row.variant, row.labels)) in broken
    )
    spoilt = {(row.measure, row.labels) for row, _ in impossible}
    possible = (row for row in rows if (row.measure, row.variant, row.labels) not in broken)
    return (
        tuple(
            replace(row, ratio=None) if (row.measure, row.labels) in spoilt else row
            for row in possible
        ),
        impossible,
    )


def _median_run(attributions: list[Attribution]) -> Attribution:
    order = sorted(attributions, key=lambda a: a.step_time().headline_ns or 0)
    return order[(len(order) - 1) // 2]
