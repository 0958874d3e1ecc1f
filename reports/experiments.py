"""The page of two experiments of one workload: what each measured, side by side.

They may come from different machines. Every number that both measured (same variant, measure and
labels) is a row: both values, B over A and its 95 % interval over repetitions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chopper import wording as fmt
from chopper.errors import InputError
from chopper.experiments.results import Experiment, Row, quotient
from chopper.reports.experiment import heading, headline_value, machine
from chopper.reports.page import Cell, Column, Fact, Facts, Item, Items, Page, Section, Table
from chopper.statistics import Estimate

SCHEMA = "chopper.experiments/1"
_MAX_ROWS = 500
_TOP = 40
"""Rows with labels in text and Markdown."""


@dataclass(frozen=True, slots=True)
class Pair:
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
            "measures": [_plain(pair) for pair in self.pairs],
        }


def _plain(pair: Pair) -> dict[str, Any]:
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


def page(found: Experiments, *, top: int = _TOP) -> Page:
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
            *_headlines(found),
            *(_section(i, of, sets[of], top) for i, of in enumerate(sorted(sets, key=len))),
        ],
    )


def _headlines(found: Experiments) -> list[Section]:
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


def _section(number: int, labels: tuple[str, ...], pairs: list[Pair], top: int) -> Section:
    """Show numbers with the largest differences first, those within noise last."""

    def size(pair: Pair) -> tuple[bool, float]:
        return pair.told is False, -abs(math.log(pair.ratio.value)) if pair.ratio else 0.0

    ordered = sorted(pairs, key=size) if labels else pairs
    words = ("Measure", "Variant", *(fmt.heading(key).capitalize() for key in labels))
    omitted_count = len(ordered) - _MAX_ROWS
    table = Table(
        columns=(
            *(Column(name, kind="prose") for name in words),
            *("A", "B", "B / A", Column("95 % interval", wide=True)),
        ),
        rows=[_cells(pair, labels) for pair in ordered[:_MAX_ROWS]],
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


def _cells(pair: Pair, labels: tuple[str, ...]) -> list[Cell]:
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
