"""A reference workload in several variants, each repeated: what they measured, beside each other.

An experiment is a directory: ``experiment.json`` says what was run, and each repetition of each
variant is a run of its own beside it (``sequential-1``, ``chunked-1``, …), which every other command
reads. The numbers are those that the workload measured itself (``prof.measure``) and the time of
its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.errors import InputError
from chopper.storage.files import decode_json, encode_json, inside, read_bytes
from chopper.storage.layout import EXPERIMENT

if TYPE_CHECKING:
    from chopper.analyzers.compare.result import Comparison
    from chopper.attribution import Attribution
    from chopper.experiments.catalogue import Beside
    from chopper.statistics import Estimate
    from chopper.storage.run import Run

SCHEMA = "chopper.experiment/1"
REPETITION = "repetition"
"""Label of a number that a run measured several times over, each time of something else: a stretch
of its steps. Where a variant has a single run, these are its repetitions."""
STEP = "step_ns"
"""Measured by chopper in every variant that has steps: mean length of a recorded step."""

Labels = tuple[tuple[str, str | int | float], ...]


class VariantPlan(msgspec.Struct, kw_only=True):
    """One variant and what was recorded of it."""

    name: str
    summary: str
    runs: list[str] = []
    """Directories of its repetitions, relative to the experiment's."""


class Plan(msgspec.Struct, kw_only=True):
    """What ``experiment.json`` holds."""

    schema: str = SCHEMA
    chopper_version: str
    workload: str
    summary: str
    command: list[str]
    created_ns: int
    """Unix time."""
    ranks: int
    device: str
    options: dict[str, str | int | float | None]
    steps: bool
    """Whether its steps are what it is about, and not a traced pass before it measures."""
    baseline: str | None
    """The variant that others are compared with; None: there is nothing to compare."""
    variants: list[VariantPlan]


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number of one variant."""

    measure: str
    """With its unit as suffix."""
    labels: Labels
    variant: str
    values: tuple[float, ...]
    """One per repetition: the median of what the repetition recorded, averaged over its ranks.
    Of a single run that labels its own, one for each of these."""
    estimate: Estimate
    ratio: Estimate | None
    """To the baseline's; None for the baseline itself, and where it did not measure this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A number that a system is known for, beside the same number here."""

    system: str
    claim: str
    """What the number is of, in words."""
    survey: str | None
    """What the survey says, as it says it."""
    primary: str | None
    """What the primary source says."""
    unit: str
    """``×``, ``s``, ``%`` …"""
    ours: float | None
    """None when it was not measured; ``why`` says why."""
    ci95: tuple[float, float] | None = None
    stated: float | None = None
    """The one number, in ``unit``, that ours can be held against: the primary source's, or the
    survey's where the primary states another quantity; None where both state a range or another."""
    configuration: str = ""
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over what is stated."""
        return None if self.ours is None or not self.stated else self.ours / self.stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """A table that a workload draws from what it measured: of variants, or of a claim."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """So many leading columns hold names, the rest numbers."""
    note: str = ""
    """How it is to be read."""
    shows: tuple[str, ...] = ()
    """Measures that are in it whole, and need no table of their own."""


@dataclass(frozen=True)
class Experiment:
    """All that was measured, and where it lies."""

    path: Path
    plan: Plan
    rows: tuple[Row, ...]
    attributions: dict[str, list[Attribution]] = field(repr=False)
    """Variant → its repetitions that could be attributed."""
    notes: tuple[str, ...] = ()
    """What is missing, and why."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names, the baseline first when there is one."""
        return tuple(v.name for v in self.plan.variants)

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

    def ratio(self, measure: str, of: str, to: str, **labels: Any) -> Estimate | None:
        """How many times ``to``'s value ``of``'s is; None when one of them was not measured."""
        return quotient(self.find(measure, of, **labels), self.find(measure, to, **labels))

    def view(self, name: str, variant: str) -> list[list[dict[str, Any]]]:
        """Rows of a view (``chopper analyze --view``) of each repetition of a variant.

        Raises:
            UsageError: no such view.
        """
        from chopper.views import view

        return [view(a, name).to_pylist() for a in self.attributions.get(variant, [])]

    @property
    def shown(self) -> tuple[Beside, ...]:
        """Which views its workload wants beside each other."""
        from chopper.experiments.catalogue import WORKLOADS

        workload = WORKLOADS.get(self.plan.workload)
        return () if workload is None or not self.plan.steps else workload.beside

    def beside(self, shown: Beside) -> tuple[Row, ...]:
        """Columns of a view, averaged over ranks and steps, for each variant; none: no rows."""
        found = {
            variant: {column: self._column(shown, column, variant) for column in shown.columns}
            for variant in self.variants
        }
        base = found.get(self.plan.baseline or "", {})
        return tuple(
            _row(column, (), variant, values, base.get(column) or None, self.plan.baseline)
            for variant, columns in found.items()
            for column, values in columns.items()
            if values
        )

    def _column(self, shown: Beside, column: str, variant: str) -> list[float]:
        """A value per repetition that has one."""
        import statistics

        of_repeats = []
        for rows in self.view(shown.view, variant):
            values = [
                float(row[column])
                for row in rows
                if row.get(column) is not None
                and (shown.where is None or row[shown.where[0]] == shown.where[1])
            ]
            if values:
                of_repeats.append(statistics.fmean(values))
        return of_repeats

    @cached_property
    def causes(self) -> tuple[Row, ...]:
        """Time per step of each leaf cause (the measure is its id), the largest first."""
        if not self.plan.steps:
            return ()
        found: dict[str, dict[str, list[float]]] = {}
        for variant, attributions in self.attributions.items():
            for attribution in attributions:
                windows = sum(rank.steps for rank in attribution.ranks)
                for leaf in attribution.leaves() if windows else ():
                    of = found.setdefault(leaf.id, {}).setdefault(variant, [])
                    of.append(leaf.time_ns / windows)
        baseline = self.plan.baseline
        order = sorted(found, key=lambda c: -max(sum(v) / len(v) for v in found[c].values()))
        return tuple(
            _row(cause, (), variant, values, found[cause].get(baseline or ""), baseline)
            for cause in order
            for variant, values in found[cause].items()
        )

    def share(self, cause: str, variant: str) -> list[float]:
        """Share of the observed time that a cause has, in each repetition of a variant."""
        return [
            sum(row.time_ns for row in a.causes() if row.id == cause) / a.observed_ns
            for a in self.attributions.get(variant, [])
            if a.observed_ns
        ]

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """Variant → its difference from the baseline, cause by cause.

        Of each side the repetition whose step is the median one.
        """
        from chopper.api import compare

        baseline = self.plan.baseline
        if baseline is None or not self.plan.steps or not self.attributions.get(baseline):
            return {}
        base = _median_run(self.attributions[baseline])
        return {
            name: compare(base, _median_run(found), allow_different=True)
            for name, found in self.attributions.items()
            if name != baseline and found
        }

    @cached_property
    def headlines(self) -> tuple[Headline, ...]:
        """What the workload exists to show."""
        from chopper.experiments.catalogue import headlines_of

        draw = headlines_of(self.plan.workload)
        return () if draw is None else draw(self)

    @cached_property
    def exhibits(self) -> tuple[Exhibit, ...]:
        """The workload's own tables."""
        from chopper.experiments.catalogue import exhibits_of

        draw = exhibits_of(self.plan.workload)
        return () if draw is None else draw(self)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, schema ``chopper.experiment/1``."""
        return {
            **msgspec.to_builtins(self.plan),
            "path": str(self.path),
            "notes": list(self.notes),
            "measures": [_row_to_dict(row) for row in self.rows],
            "causes": [_row_to_dict(row) for row in self.causes],
            "views": {
                shown.view: [_row_to_dict(row) for row in self.beside(shown)]
                for shown in self.shown
            },
            "exhibits": msgspec.to_builtins(self.exhibits),
            "headlines": [headline_to_dict(h) for h in self.headlines],
            "comparisons": {name: c.to_dict() for name, c in self.comparisons.items()},
        }


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {
        "measure": row.measure,
        "labels": dict(row.labels),
        "variant": row.variant,
        "values": list(row.values),
        **msgspec.to_builtins(row.estimate),
        "ratio": None if row.ratio is None else row.ratio.value,
        "ratio_ci95": None if row.ratio is None else row.ratio.ci95,
    }


def headline_to_dict(headline: Headline) -> dict[str, Any]:
    """A headline as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(headline)
    return plain | {"ratio": headline.ratio}


def quotient(over: Row | None, under: Row | None) -> Estimate | None:
    """How many times one row's value another one's is; None when one of them is missing."""
    from chopper.statistics import ratio

    return None if over is None or under is None else ratio(over.values, under.values)


def between(of: Sequence[float], to: Sequence[float], *, ratio: bool = False) -> Estimate | None:
    """How much more, or how many times, the repetitions of ``of`` are; None without one of them."""
    from chopper.statistics import difference
    from chopper.statistics import ratio as ratio_of_means

    if not of or not to:
        return None
    return ratio_of_means(of, to) if ratio else difference(of, to)


def line(
    x: Sequence[float], y: Sequence[float]
) -> tuple[float, float, tuple[float, float] | None, float]:
    """a, b, the 95 % interval of b, and R², of y = a + b·x through a point per repetition."""
    from chopper.statistics import line

    return line(x, y)


def load(path: Path) -> Experiment:
    """Read an experiment and attribute its runs.

    Args:
        path: its directory.

    Raises:
        InputError: there is none, it is damaged, or none of its runs was recorded.
    """
    import statistics

    from chopper.api import attribute
    from chopper.api import load as load_run
    from chopper.errors import ChopperError

    plan = read_plan(path)
    notes: list[str] = []
    attributions: dict[str, list[Attribution]] = {}
    measured: list[tuple[str, str, Labels, float]] = []
    for variant in plan.variants:
        attributions[variant.name] = []
        for name in variant.runs:
            try:
                run = load_run(inside(path, name))
                measured += [
                    (variant.name, name, labels, value)
                    for name, labels, values in _measures_of(run.manifest)
                    for value in (values if len(variant.runs) == 1 else [statistics.fmean(values)])
                ]
                attribution = attribute(run)
            except ChopperError as exc:
                notes.append(f"{name}: {exc}")
                continue
            attributions[variant.name].append(attribution)
            step_ns = _step_ns(attribution)
            if plan.steps and step_ns is not None:
                measured.append((variant.name, STEP, (), step_ns))
            measured += [(variant.name, name, (), value) for name, value in _sensed(run)]
    if not measured:
        raise InputError(f"{path}: nothing was measured; " + "; ".join(notes or ["no runs"]))
    return Experiment(
        path=path,
        plan=plan,
        rows=tuple(_rows(measured, plan.baseline)),
        attributions=attributions,
        notes=tuple(notes),
    )


def read_plan(path: Path) -> Plan:
    """What ``experiment.json`` says.

    Raises:
        InputError: it is not there, or damaged, or newer than this chopper.
    """
    file = path / EXPERIMENT
    plan = decode_json(
        read_bytes(file),
        Plan,
        f"{file}: is not an experiment",
        remedy="run the workload again",
        error=InputError,
    )
    if plan.schema != SCHEMA:
        raise InputError(f"{file}: has schema {plan.schema!r}, expected {SCHEMA!r}")
    return plan


def write_plan(path: Path, plan: Plan) -> None:
    """Write ``experiment.json``; called early and often, so that an interruption loses nothing."""
    from chopper.storage.files import write_atomic

    write_atomic(path / EXPERIMENT, msgspec.json.format(encode_json(plan), indent=2) + b"\n")


def _measures_of(manifest: Any) -> Iterable[tuple[str, Labels, list[float]]]:
    """What one run measured, a value for each repetition of its own: the median of each rank's
    values, then the mean over ranks.
    """
    import statistics

    found: dict[tuple[str, Labels], dict[int | str | float, dict[int, list[float]]]] = {}
    for rank in manifest.ranks:
        for measure in rank.measures:
            labels = tuple(sorted((k, v) for k, v in measure.labels.items() if k != REPETITION))
            repetitions = found.setdefault((measure.name, labels), {})
            ranks = repetitions.setdefault(measure.labels.get(REPETITION, 0), {})
            ranks.setdefault(rank.rank, []).append(measure.value)
    for (name, labels), repetitions in found.items():
        values = [
            statistics.fmean(statistics.median(v) for v in ranks.values())
            for ranks in repetitions.values()
        ]
        yield name, labels, values


def _sensed(run: Run) -> Iterable[tuple[str, float]]:
    """Mean clock and power of the ranks' devices over the whole recording, where sampled."""
    import statistics

    import pyarrow.compute as pc

    from chopper.analyzers.trace.samples import of_rank

    tables = [of_rank(run, rank, "device_clock") for rank in run.ranks]
    for column in ("sm_clock_hz", "power_w"):
        means = [m for t in tables if (m := pc.mean(t[column]).as_py()) is not None]
        if means:
            yield column, statistics.fmean(means)


def _rows(measured: list[tuple[str, str, Labels, float]], baseline: str | None) -> Iterable[Row]:
    values: dict[tuple[str, Labels, str], list[float]] = {}
    for variant, measure, labels, value in measured:
        values.setdefault((measure, labels, variant), []).append(value)
    for (measure, labels, variant), found in values.items():
        base = values.get((measure, labels, baseline)) if baseline is not None else None
        yield _row(measure, labels, variant, found, base, baseline)


def _row(
    measure: str,
    labels: Labels,
    variant: str,
    values: list[float],
    base: list[float] | None,
    baseline: str | None,
) -> Row:
    from chopper.statistics import estimate, ratio

    compared = ratio(values, base) if base and variant != baseline else None
    return Row(measure, labels, variant, tuple(values), estimate(values), compared)


def _step_ns(attribution: Attribution) -> float | None:
    """Mean over the steps of the longest window over ranks.

    Not the median: steps that come in flights (a batch from each worker, then a wait for the next)
    have one that no throughput belongs to.
    """
    import statistics

    steps = attribution.step_time_ns()
    return statistics.fmean(steps) if steps else None


def _median_run(attributions: list[Attribution]) -> Attribution:
    order = sorted(attributions, key=lambda a: _step_ns(a) or 0.0)
    return order[(len(order) - 1) // 2]
