"""Read an experiment and attribute its runs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from chopper import pipeline
from chopper.analyzers.trace.samples import in_phase, of_rank
from chopper.errors import ChopperError, InputError
from chopper.experiments.declarations import MEASURED
from chopper.experiments.prepare import program
from chopper.experiments.results import (
    STEP,
    Experiment,
    Value,
    measures_of,
    read_plan,
    rows_of,
    sorted_out,
)
from chopper.storage.files import inside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from chopper.analyzers.attribution import Attribution
    from chopper.storage.run import Run


def load(path: Path) -> Experiment:
    """Read an experiment and attribute its runs.

    Raises:
        InputError: there is none, it is damaged, or none of its runs was recorded.
    """
    plan = read_plan(path)
    of_workload = program(plan.workload)
    notes: list[str] = []
    attributions: dict[str, list[Attribution]] = {}
    measured: list[Value] = []
    for variant in plan.variants:
        attributions[variant.name] = []
        for name in variant.runs:
            try:
                run = pipeline.read(inside(path, name))
                measured += [
                    (variant.name, name, labels, value)
                    for name, labels, values in measures_of(run.manifest)
                    for value in (values if len(variant.runs) == 1 else [statistics.fmean(values)])
                ]
                attribution = pipeline.attribute(run)
            except ChopperError as exc:
                notes.append(f"{name}: {exc}")
                continue
            attributions[variant.name].append(attribution)
            step_ns = attribution.step_time().headline_ns
            if plan.steps and step_ns is not None:
                measured.append((variant.name, STEP, (), float(step_ns)))
            measured += [(variant.name, name, (), value) for name, value in _sensed(run)]
    if not measured:
        raise InputError(f"{path}: nothing was measured; " + "; ".join(notes or ["no runs"]))
    possible, impossible = sorted_out(
        rows_of(measured, plan.baseline), of_workload.workload.bounds if of_workload else ()
    )
    return Experiment(
        path=path,
        plan=plan,
        rows=possible,
        attributions=attributions,
        notes=tuple(notes),
        program=of_workload,
        impossible=impossible,
    )


def _sensed(run: Run) -> Iterator[tuple[str, float]]:
    """Mean clock and power of the ranks' devices, where sampled.

    Over the phases in which the workload measured; over the whole recording where it names none.
    """
    import pyarrow.compute as pc

    tables = [
        in_phase(run, rank, of_rank(run, rank, "device_clock"), MEASURED) for rank in run.ranks
    ]
    for column in ("sm_clock_hz", "power_w"):
        means = [m for t in tables if (m := pc.mean(t[column]).as_py()) is not None]
        if means:
            yield column, statistics.fmean(means)
