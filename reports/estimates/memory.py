"""Memory of a training step as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.analyzers.estimates.formulas import (
    RULE_FAULTS,
    RULE_TABLE_COUNT,
    rule_of_thumb,
    zero_states_bytes,
)
from chopper.reports.estimates.parts import estimate_page, listing, stacked_figure
from chopper.reports.page import Figure, Items, Page, Section, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.analyzers.estimates.memory import Fit, Memory
    from chopper.analyzers.estimates.training import Training

_ORDER = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "temporary",
    "pools",
    "fragmentation",
    "workspace",
)


def page(result: Memory) -> Page:
    """Return the peak by category, what fits, and the rule of thumb beside it."""
    fits = ""
    if result.fit is not None:
        said = "fits" if result.fit.fits else "does not fit"
        fits = f": {said} {fmt.bytes_(result.fit.capacity_bytes)}"
    return estimate_page(
        result,
        title="Memory of a training step",
        headline=f"{fmt.bytes_(result.peak_bytes)} per rank at the peak{fits}.",
        facts=_facts(result),
        figures=(_figure(result),),
        sections=(
            _categories(result),
            *((_fit(result.fit),) if result.fit else ()),
            _rule(result),
            _partition(result),
            Section(title="About the rule of thumb", blocks=(Items(items=RULE_FAULTS),)),
        ),
    )


def _facts(result: Memory) -> Iterator[str]:
    yield described(result.training) if result.training else _captured(result)
    at = f", at its highest in: {result.peak_at}" if result.phases_bytes else ""
    yield (
        f"{fmt.bytes_(result.allocated_bytes)} allocated (max_memory_allocated){at}; "
        f"{fmt.bytes_(result.steady_bytes)} of it stays from step to step"
    )
    assumed = result.categories_bytes["fragmentation"]
    if assumed:
        yield (
            f"{fmt.bytes_(result.peak_bytes - assumed)} follow from shapes and sources; "
            "fragmentation is assumed (--fragmentation)"
        )
    if result.host_bytes:
        yield f"{fmt.bytes_(result.host_bytes)} per rank in the host's memory"


def described(training: Training) -> str:
    """Return the options in one line."""
    a = training.architecture
    active = f", {a.active_count / 1e9:.2f} B active" if a.experts else ""
    parts = [
        f"{a.name} ({a.parameters_count / 1e9:.2f} B parameters{active})",
        f"batch {training.batch_count}, sequence {training.sequence_count}",
        training.strategy + (f" over {training.ranks_count}" if training.ranks_count > 1 else ""),
        f"precision {training.precision}",
        f"checkpointing {training.checkpoint}",
        f"{training.optimizer_kind} {training.optimizer}",
    ]
    if training.tensor_parallel_count > 1:
        sp = " with sequence parallelism" if training.sequence_parallel else ""
        parts.append(f"tensor parallel {training.tensor_parallel_count}{sp}")
    if training.expert_parallel_count > 1:
        parts.append(f"expert parallel {training.expert_parallel_count}")
    if training.offload:
        parts.append(f"offload of {' and '.join(training.offload)}")
    return ", ".join(parts)


def _captured(result: Memory) -> str:
    of = result.captured or {}
    return (
        f"{of.get('module')} captured ({result.parameters_count / 1e6:.1f} M parameters, "
        f"{of.get('units_count')} units) by torch {of.get('torch')}: {of.get('strategy')}, "
        f"precision {of.get('precision')}, checkpointing {of.get('checkpoint')}"
    )


def _categories(result: Memory) -> Section:
    sizes = [(n, size) for n in _ORDER if (size := result.categories_bytes.get(n, 0))]
    return listing(
        "Peak memory of one rank",
        [*sizes, ("peak", result.peak_bytes)],
        {
            "category": lambda part: part[0],
            "size": lambda part: fmt.bytes_(part[1]),
            "share": lambda part: fmt.ratio(part[1] / result.peak_bytes),
        },
        totals=1,
        note="communication: gathers, reductions and buckets; temporary: gradients of "
        "activations and operators' workspaces; pools: freed, but not for all to use",
    )


def _figure(result: Memory) -> Figure:
    parts = {n: result.categories_bytes.get(n, 0) / 2**30 for n in _ORDER}
    figure = stacked_figure(
        {"this estimate": {n: v for n, v in parts.items() if v}},
        x="GiB per rank",
        limit=("device", result.fit.capacity_bytes / 2**30) if result.fit else None,
    )
    return Figure(name="memory", title="Peak by category", figure=figure)


def _fit(fit: Fit) -> Section:
    count = fit.largest_parameters_count
    rows = [
        ("largest batch at this sequence", fmt.count(fit.largest_batch_count)),
        ("largest sequence at this batch", fmt.count(fit.largest_sequence_count)),
        (
            "most parameters, with more or fewer of these layers",
            fmt.UNKNOWN if count is None else f"{count:.3g}",
        ),
        ("largest model of the catalogue", fit.largest_model or fmt.UNKNOWN),
    ]
    return Section(
        title=f"What fits {fmt.bytes_(fit.capacity_bytes)}, all else as given",
        blocks=(Table(columns=("", "most"), rows=rows),),
    )


def _rule(result: Memory) -> Section:
    counts = (*RULE_TABLE_COUNT, result.parameters_count)
    return listing(
        "Beside it, the rule of thumb: 40 bytes × parameters",
        counts,
        {
            "parameters": lambda n: f"{n / 1e9:g} B" if n in RULE_TABLE_COUNT else "this model",
            "rule": lambda n: f"{rule_of_thumb(n)[0] / 1e9:,.0f} GB",
            "80 GB devices": lambda n: str(rule_of_thumb(n)[1]),
        },
        totals=1,
        note="a rule of thumb, printed to be compared; what is wrong about it follows",
    )


def _partition(result: Memory) -> Section:
    """Return stages by offload, which the survey's table gives as one list."""
    count = result.parameters_count
    ranks = result.training.ranks_count if result.training else 1
    ranks = ranks if ranks > 1 else 64
    return listing(
        f"States of this model over {ranks} ranks: stages partition, offload moves",
        (0, 1, 2, 3),
        {
            "": lambda stage: f"stage {stage}" if stage else "data parallel",
            "on the device": lambda stage: _gigabytes(zero_states_bytes(count, ranks, stage)),
            "optimizer offloaded": lambda stage: _gigabytes(
                zero_states_bytes(count, ranks, stage, optimizer_bytes=0)
            ),
            "parameters too": lambda stage: (
                "one layer at a time" if stage == 3 else "needs stage 3"
            ),
        },
        note="2 + 2 + 12 bytes per parameter in 16 bits with Adam; activations are not in it",
    )


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"
