"""Memory of a training step as a page."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.analyzers.estimates.formulas import (
    RULE_FAULTS,
    RULE_TABLE_COUNT,
    rule_of_thumb,
    zero_states_bytes,
)
from chopper.analyzers.estimates.memory import Fit, Memory, Training
from chopper.reports.estimates.page import Grid, Page, Plot, stacked_figure

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


def page(found: Memory) -> Page:
    """The peak by category, what fits, and the rule of thumb beside it."""
    total = found.peak_bytes
    at = f", at its highest in: {found.peak_at}" if found.phases_bytes else ""
    facts = [
        described(found.training) if found.training else _captured(found),
        f"{fmt.bytes_(found.allocated_bytes)} allocated (max_memory_allocated){at}; "
        f"{fmt.bytes_(found.steady_bytes)} of it stays from step to step",
    ]
    assumed = found.categories_bytes["fragmentation"]
    if assumed:
        facts.append(
            f"{fmt.bytes_(total - assumed)} follow from shapes and sources; fragmentation is assumed "
            "(--fragmentation)"
        )
    if found.host_bytes:
        facts.append(f"{fmt.bytes_(found.host_bytes)} per rank in the host's memory")
    rows = [
        (name, fmt.bytes_(size), fmt.ratio(size / total))
        for name in _ORDER
        if (size := found.categories_bytes.get(name, 0))
    ]
    rows.append(("peak", fmt.bytes_(total), "100 %"))
    grids = [
        Grid(
            title="Peak memory of one rank",
            columns=("category", "size", "share"),
            rows=rows,
            strong=frozenset((len(rows) - 1,)),
            note="communication: gathers, reductions and buckets; temporary: gradients of "
            "activations and operators' workspaces; pools: freed, but not for all to use",
        )
    ]
    if found.fit is not None:
        grids.append(_fit(found.fit))
    grids += [_rule(found), _partition(found)]
    parts = {n: found.categories_bytes.get(n, 0) / 2**30 for n in _ORDER}
    figure = stacked_figure(
        {"this estimate": {n: v for n, v in parts.items() if v}},
        x="GiB per rank",
        line=("device", found.fit.capacity_bytes / 2**30) if found.fit else None,
    )
    fits = ""
    if found.fit is not None:
        said = "fits" if found.fit.fits else "does not fit"
        fits = f": {said} {fmt.bytes_(found.fit.capacity_bytes)}"
    return Page(
        title="Memory of a training step",
        verdict=f"{fmt.bytes_(total)} per rank at the peak{fits}.",
        facts=tuple(facts),
        grids=tuple(grids),
        plots=(Plot(name="memory", title="Peak by category", figure=figure),),
        assumptions=found.assumptions,
        notes=tuple(f"About the rule: {fault}." for fault in RULE_FAULTS),
    )


def described(training: Training) -> str:
    """The options in one line."""
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


def _captured(found: Memory) -> str:
    of = found.captured or {}
    return (
        f"{of.get('module')} captured ({found.parameters_count / 1e6:.1f} M parameters, "
        f"{of.get('units_count')} units) by torch {of.get('torch')}: {of.get('strategy')}, "
        f"precision {of.get('precision')}, checkpointing {of.get('checkpoint')}"
    )


def _fit(fit: Fit) -> Grid:
    count = "–" if fit.largest_parameters_count is None else f"{fit.largest_parameters_count:.3g}"
    rows: list[tuple[str, ...]] = [
        ("largest batch at this sequence", _number(fit.largest_batch_count)),
        ("largest sequence at this batch", _number(fit.largest_sequence_count)),
        ("most parameters, with more or fewer of these layers", count),
        ("largest model of the catalogue", fit.largest_model or "–"),
    ]
    return Grid(
        title=f"What fits {fmt.bytes_(fit.capacity_bytes)}, all else as given",
        columns=("", "most"),
        rows=rows,
    )


def _number(value: int | None) -> str:
    return fmt.UNKNOWN if value is None else fmt.count(value)


def _rule(found: Memory) -> Grid:
    rows = []
    for count in (*RULE_TABLE_COUNT, found.parameters_count):
        size, devices = rule_of_thumb(count)
        name = f"{count / 1e9:g} B" if count in RULE_TABLE_COUNT else "this model"
        rows.append((name, f"{size / 1e9:,.0f} GB", str(devices)))
    return Grid(
        title="Beside it, the rule of thumb: 40 bytes × parameters",
        columns=("parameters", "rule", "80 GB devices"),
        rows=rows,
        strong=frozenset((len(rows) - 1,)),
        note="a rule of thumb, printed to be compared; what is wrong about it follows",
    )


def _partition(found: Memory) -> Grid:
    """Stages by offload, which the survey's table gives as one list."""
    psi = found.parameters_count
    ranks = found.training.ranks_count if found.training else 1
    ranks = ranks if ranks > 1 else 64
    rows = []
    for stage in (0, 1, 2, 3):
        whole = zero_states_bytes(psi, ranks, stage)
        less = zero_states_bytes(psi, ranks, stage, optimizer_bytes=0)
        rows.append(
            (
                f"stage {stage}" if stage else "data parallel",
                f"{whole / 1e9:,.1f} GB",
                f"{less / 1e9:,.1f} GB",
                "one layer at a time" if stage == 3 else "needs stage 3",
            )
        )
    return Grid(
        title=f"States of this model over {ranks} ranks: stages partition, offload moves",
        columns=("", "on the device", "optimizer offloaded", "parameters too"),
        rows=rows,
        note="2 + 2 + 12 bytes per parameter in 16 bits with Adam; activations are not in it",
    )
