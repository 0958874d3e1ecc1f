"""The numbers that the reference workloads exist to show, drawn from what they measured.

Each function takes an experiment and returns its headlines; what was not measured says why. Survey
and primary source are quoted as they stand, also where they disagree.
"""

from __future__ import annotations

from collections.abc import Callable

from chopper.experiment import Experiment, Headline


def gemm(experiment: Experiment) -> tuple[Headline, ...]:
    """What the data of a matrix product does to its speed."""
    rates = [
        r for r in experiment.rows if r.measure == "median_flop_per_s" and r.variant == "zeros"
    ]
    out = []
    for dtype in dict.fromkeys(dict(r.labels)["dtype"] for r in rates):
        best = max(
            (r for r in rates if dict(r.labels)["dtype"] == dtype), key=lambda r: r.estimate.value
        )
        labels = dict(best.labels)
        found = experiment.ratio("median_flop_per_s", "zeros", "random", **labels)
        out.append(
            Headline(
                system="Chopper: DVFS",
                claim=f"{dtype} products on zeros over random numbers, {labels['shape']}",
                survey=None,
                primary=None,
                unit="×",
                ours=None if found is None else found.value,
                ci95=None if found is None else found.ci95,
                why="random numbers were not run" if found is None else "",
                configuration=f"{experiment.plan.device}, rate; clocks where they were sampled",
            )
        )
    return tuple(out)


HEADLINES: dict[str, Callable[[Experiment], tuple[Headline, ...]]] = {"gemm": gemm}
"""Workload → what it shows."""
