"""FSDP1 and FSDP2 beside each other: the same model, seed and data.

    chopper bench fsdp --ranks 2

The programs are fsdp1.py and fsdp2.py; this module holds what is drawn from both.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.experiments.declarations import ShownView, Variant, Workload, changed
from chopper.experiments.results import Experiment, Headline, difference, ratio
from chopper.workloads import training
from chopper.workloads.training import needs as needs

if TYPE_CHECKING:
    from chopper.statistics import Estimate

_ALLOCATIONS = ("--allocations", "yes")

_CLOCKS = ShownView(
    "clocks", ("clock_mean_hz", "observed_ns", "at_reference_ns"), where=("level", "step")
)
WORKLOAD = Workload(
    name="fsdp",
    chosen="to end within minutes on two cores",
    summary="FSDP1 and FSDP2 side by side, with the same model, seed, data and losses: how time, "
    "memory, allocation order, clocks and copies differ",
    # Allocations are what two ways of sharding differ in.
    options=changed(training.OPTIONS, allocations="yes"),
    variants=(
        Variant(
            "fsdp1",
            "FullyShardedDataParallel, flat parameters",
            words=_ALLOCATIONS,
            module="chopper.workloads.fsdp1",
        ),
        Variant(
            "fsdp2",
            "fully_shard, a DTensor per weight",
            words=_ALLOCATIONS,
            module="chopper.workloads.fsdp2",
        ),
    ),
    baseline="fsdp1",
    shown=(
        ShownView(
            "memory",
            ("peak_allocated_bytes", "allocation_count", "requested_bytes"),
            where=("phase", "all"),
        ),
        ShownView(
            "memory_determinism",
            ("similarity_ratio", "identical_ratio", "peak_mean_bytes", "peak_std_bytes"),
        ),
        _CLOCKS,
    ),
    repeats=3,
    seconds=80,
    position=3,
)

_TRACING_FACTOR = 2.0
"""Steps with a trace and those without disagree by no more, unless one of them was disturbed."""
_PUBLISHED = "FSDP2: deterministic memory, about 20 % higher and steadier clocks"
_PRIMARY = "memory determinism (FSDP2) gives higher, steadier clocks"


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold the two against each other in what the published characterization says of them."""
    if not {"fsdp1", "fsdp2"} <= set(experiment.variants):
        return
    where = f"{experiment.plan.ranks} ranks on {experiment.plan.device}"
    faster = experiment.ratio("step_ns", "fsdp1", "fsdp2")
    if faster is not None:
        step_ns = (
            experiment.value("median_step_ns", "fsdp1"),
            experiment.value("median_step_ns", "fsdp2"),
        )
        untraced = step_ns[0] / step_ns[1] if step_ns[0] and step_ns[1] else None
        yield Headline.of(
            faster,
            system="FSDP",
            claim="step of fsdp1 over that of fsdp2",
            least=untraced and untraced / _TRACING_FACTOR,
            most=untraced and untraced * _TRACING_FACTOR,
            bound=f"untraced steps differ by {fmt.factor(untraced or 0)}, and tracing changes "
            f"neither of them {_TRACING_FACTOR:g} times more than the other",
            configuration=where,
        )
    losses = training.loss_headline(experiment, "FSDP", ["fsdp2"], where)
    if losses is not None:
        yield losses
    for claim, view, column in (
        ("steps' allocations alike", "memory_determinism", "similarity_ratio"),
        ("deviation of the peak over its mean", "memory_determinism", "peak"),
        ("copies in and out of the step", "", "compute.fsdp_copy"),
    ):
        first, second = (
            _means(experiment, view, column, v) if view else experiment.share(column, v)
            for v in ("fsdp1", "fsdp2")
        )
        shares = (
            f"fsdp1 {fmt.percent(fmean(first), '.2f')}, fsdp2 {fmt.percent(fmean(second), '.2f')}"
            if first and second
            else ""
        )
        found, why = difference(second, first), "--allocations no" if view else ""
        if found is not None and view:
            why = _unshown(found, experiment.plan.device)
            found = None if why else found
        yield Headline.of(
            found,
            scale=100,
            system="FSDP",
            claim=f"{claim}, fsdp2 minus fsdp1",
            published=_PUBLISHED if view else None,
            primary=_PRIMARY if view else None,
            unit="points",
            timed=not view,
            least=-100.0,
            most=100.0,
            bound="shares differ by no more than the whole",
            why=why or "nothing was attributed",
            configuration=f"{where}; {shares}" if shares and found is not None else where,
        )
    yield _clock(experiment, where)


def _unshown(found: Estimate, device: str) -> str:
    """Say why a difference of allocations shows nothing of what is published, if so."""
    if device == "cpu":
        return "the claim is about the caching allocator of GPUs; a CPU's memory has none"
    if found.ci95 is None or found.ci95[0] <= 0 <= found.ci95[1]:
        return "the repetitions show no difference: no 95 % interval that leaves out zero"
    return ""


def _clock(experiment: Experiment, where: str) -> Headline:
    first_hz, second_hz = (
        experiment.means(_CLOCKS, "clock_mean_hz", v) for v in ("fsdp1", "fsdp2")
    )
    faster = ratio(second_hz, first_hz)
    if faster is not None:
        where += f"; fsdp1 {fmean(first_hz) / 1e6:.0f} MHz, fsdp2 {fmean(second_hz) / 1e6:.0f} MHz"
    return Headline.of(
        faster,
        system="FSDP",
        claim="SM clock, fsdp2 over fsdp1",
        published=_PUBLISHED,
        primary=_PRIMARY,
        stated=1.2,
        why="no clock was sampled",
        configuration=where,
    )


def _means(experiment: Experiment, view: str, column: str, variant: str) -> list[float]:
    """Mean of a view's column over ranks, per repetition; ``peak``: deviation over its mean."""
    means = []
    for rows in experiment.view(view, variant):
        if column == "peak":
            values = [
                row["peak_std_bytes"] / row["peak_mean_bytes"]
                for row in rows
                if row["peak_mean_bytes"] and row["peak_std_bytes"] is not None
            ]
        else:
            values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            means.append(fmean(values))
    return means
