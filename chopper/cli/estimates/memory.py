"""Peak memory of a training step, per rank and category."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from chopper import wording as fmt
from chopper.analyzers.estimates import Option, OptionsOf
from chopper.analyzers.estimates.memory import (
    RULE_FAULTS,
    RULE_TABLE_COUNT,
    Fit,
    Memory,
    Nearest,
    fit,
    memory,
    of_capture,
    rule_of_thumb,
)
from chopper.analyzers.estimates.training import Training
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.models.architectures import CATALOGUE, named
from chopper.models.configs import read_config
from chopper.models.layouts import parse_layout
from chopper.reports.estimate import estimate_page, listing, stacked_figure
from chopper.reports.page import Column, Figure, Items, Page, Section, Table

_MOST_FRAGMENTATION_RATIO = 0.35
"""Published runs reserved 5 to 35 % more than was active."""
_LONG = 40
"""Characters of a change beside which no second one stands."""
_OF_A_MODULE = ("batch_count", "sequence_count", "strategy", "ranks_count", "checkpoint")
_OF_BOTH = (*_OF_A_MODULE, "optimizer", "precision", "fragmentation_ratio", "workspace_bytes")


class Options(_options.Options, kw_only=True, frozen=True):
    """Show the peak memory of one rank in a training step, by category.

    MODEL is a model of the catalogue (llama3-8b, gpt3-175b, mixtral-8x7b, deepseek-v3 …). The step
    runs symbolically, operator by operator: nothing is allocated, and only --module needs torch.
    With --device or --capacity, the largest batch, sequence and model that fit are found.

    --config reads dense models and mixtures of experts of some 40 families; others are refused,
    with a list of those that are supported.

    \b
    Examples:
      chopper estimate memory mixtral-8x7b --strategy fsdp2 --ranks 64 --ep 8
      chopper estimate memory llama3-8b --strategy fsdp2 --ranks 8 --device b200
      chopper estimate memory --config config.json --checkpoint full --json
      chopper estimate memory --module model:make --batch 4 --sequence 1024
    """

    model: Annotated[str | None, Option("", argument=True)] = None
    config: Annotated[Path | None, Option("A Hugging Face config.json.", metavar="FILE")] = None
    module: Annotated[
        str | None,
        Option(
            "Your own module, captured under fake tensors: needs torch, allocates no memory.",
            metavar="PACKAGE.MODULE:FACTORY",
        ),
    ] = None
    training: Annotated[dict[str, Any], OptionsOf(Training)] = msgspec.field(default_factory=dict)
    layout: Annotated[
        str | None,
        Option("In place of --tp, --ranks and --ep: tp=8,dp=16,ep=8.", metavar="DIM=N,…"),
    ] = None
    device: Annotated[str | None, Option("Find what fits this device.", metavar="NAME")] = None
    capacity_bytes: Annotated[
        int | None, Option("Find what fits this much memory.", metavar="SIZE")
    ] = None


def estimate(options: Options) -> Memory:
    """Return the peak of a model's step, or of a module that is captured."""
    options.exactly_one("model", "config", "module", missing="no model given")
    options.contradict("device", "capacity_bytes")
    capacity_bytes = _usable_bytes(options.device) if options.device else options.capacity_bytes
    if options.module is not None:
        return _captured(options.module, options)
    strategy = options.training.get("strategy", "single")
    if "bucket_count" in options.given and strategy not in ("zero1", "zero2", "zero3"):
        raise UsageError(
            f"--bucket is DeepSpeed's; it contradicts --strategy {strategy}; "
            "choose zero1, zero2 or zero3, or leave it out"
        )
    architecture = read_config(options.config) if options.config else named(options.model or "")
    fields = {
        **options.training,
        **_of_layout(options),
        "offload": tuple(dict.fromkeys(options.training.get("offload", ()))),
    }
    training = Training(architecture=architecture, **fields)
    result = memory(training)
    if capacity_bytes is None:
        return result
    return msgspec.structs.replace(result, fit=fit(training, capacity_bytes, CATALOGUE))


def _of_layout(options: Options) -> dict[str, int]:
    """Return the ranks of each dimension that a layout names."""
    fields = {
        "tensor": "tensor_parallel_count",
        "data": "ranks_count",
        "expert": "expert_parallel_count",
    }
    if options.layout is None:
        return {}
    for field in fields.values():
        options.contradict("layout", field)
    layout = parse_layout(options.layout)
    for dimension, size in layout.sizes:
        if dimension not in fields and size > 1:
            raise UsageError(
                f"--layout {options.layout!r}: memory is estimated without {dimension} "
                "parallelism; name a layout of tp, dp and ep"
            )
    sizes: dict[str, int] = {**dict(layout.sizes), "expert": layout.experts or 1}
    return {field: sizes.get(dimension, 1) for dimension, field in fields.items()}


def _usable_bytes(name: str) -> int:
    """Return what a process can have of a device's memory."""
    from chopper.hardware.devices import named

    device = named(name)
    if device.usable_bytes is None:
        raise UsageError(f"--device {name}: memory of {device.label} is not known; use --capacity")
    return device.usable_bytes


def _captured(module: str, options: Options) -> Memory:
    from chopper.collectors.fake_tensors import capture

    wrong = options.first_given(
        *(field for field in Training.__struct_fields__ if field not in _OF_BOTH),
        "layout",
        "device",
        "capacity_bytes",
    )
    if wrong:
        raise UsageError(
            f"{wrong} contradicts --module: a captured module runs as it is; "
            "leave it out, or give MODEL or --config"
        )
    asked = {field.name: field.default for field in msgspec.structs.fields(Training)}
    asked |= options.training
    request = {name.removesuffix("_count"): asked[name] for name in (*_OF_A_MODULE, "optimizer")}
    usual = "mixed" if asked["strategy"] == "fsdp2" else "bf16"
    precision = options.training.get("precision", usual)
    return of_capture(
        capture(module, precision=precision, **request),
        {"module": module, "precision": precision, **request},
        fragmentation_ratio=asked["fragmentation_ratio"],
        workspace_bytes=asked["workspace_bytes"],
    )


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
    largest = max(result.categories_bytes, key=lambda name: result.categories_bytes[name])
    size = result.categories_bytes[largest]
    at = f"; the peak is in {result.peak_at}" if result.phases_bytes else ""
    return estimate_page(
        result,
        title="Memory of a training step",
        headline=_headline(result),
        limit=f"{largest}, {fmt.bytes_(size)} ({fmt.ratio(size / result.peak_bytes)}){at}",
        assumes=_assumes(result),
        remedy=_remedy(result),
        facts=_facts(result),
        figures=(_figure(result),),
        sections=(
            _categories(result),
            *((_fit(result.fit),) if result.fit else ()),
            _rule(result),
            Section(title="About the rule of thumb", blocks=(Items(items=RULE_FAULTS),)),
        ),
    )


def _fragmentation_ratio(result: Memory) -> float:
    moving = result.allocated_bytes - result.steady_bytes
    return result.categories_bytes["fragmentation"] / moving if moving else 0.0


def _headline(result: Memory) -> str:
    """Return the peak, its range by fragmentation, and whether it fits."""
    size, fragmentation = fmt.bytes_(result.peak_bytes), result.categories_bytes["fragmentation"]
    low = result.peak_bytes - fragmentation
    high = low + round(_MOST_FRAGMENTATION_RATIO * (result.allocated_bytes - result.steady_bytes))
    assumed = math.isclose(_fragmentation_ratio(result), 0.15, abs_tol=1e-3)
    between = f" ({fmt.bytes_(low)} – {fmt.bytes_(high)})" if assumed and high > low else ""
    if result.fit is None:
        return f"{size} per rank at the peak{between}."
    capacity = result.fit.capacity_bytes
    verdict = "fits" if result.fit.fits else "does not fit"
    unless = " unless fragmentation is high" if result.fit.fits and high > capacity else ""
    return f"{size} per rank{between} {verdict} {fmt.bytes_(capacity)}{unless if between else ''}."


def _assumes(result: Memory) -> str:
    ratio = _fragmentation_ratio(result)
    if result.training is None:
        return f"{fmt.percent(ratio, '.0f')} fragmentation; a GPU that fuses operators keeps less"
    of = result.training
    return (
        f"{fmt.percent(ratio, '.0f')} fragmentation (published: up to 35 %), "
        f"{of.attention} attention, {of.optimizer}"
    )


def _remedy(result: Memory) -> str:
    """Return the least that makes it fit, or what there is room for."""
    fits = result.fit
    if fits is None:
        return (
            "--device NAME or --capacity SIZE, to see what fits"
            if result.training
            else "MODEL or --config instead, to see what fits a device"
        )
    if fits.fits:
        return (
            f"up to --batch {fits.largest_batch_count} or --sequence "
            f"{fits.largest_sequence_count}; largest model {fits.largest_model or fmt.UNKNOWN}"
        )
    if not fits.nearest:
        return "a larger device: no recomputation, offload or number of ranks makes it fit"
    ways = [_changed(way) for way in fits.nearest]
    return ways[0] if len(ways[0]) > _LONG else " or ".join(ways[:2])


def _changed(way: Nearest) -> str:
    options = _options.written(Training, way.changes)
    return f"{options} ({fmt.bytes_(way.peak_bytes)})"


def _facts(result: Memory) -> Iterator[str]:
    yield described(result.training) if result.training else _captured_line(result)
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


def _captured_line(result: Memory) -> str:
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
        "activations and operators' workspaces; pools: freed, but reserved for one stream",
    )


def _figure(result: Memory) -> Figure:
    parts = {n: result.categories_bytes.get(n, 0) / 2**30 for n in _ORDER}
    figure = stacked_figure(
        {"this estimate": {n: v for n, v in parts.items() if v}},
        x="GiB per rank",
        wall=("device", result.fit.capacity_bytes / 2**30) if result.fit else None,
    )
    return Figure(name="memory", title="Peak by category", figure=figure)


def _fit(fit: Fit) -> Section:
    count = fit.largest_parameters_count
    rows = [
        *(
            ("fits with " + _options.written(Training, way.changes), fmt.bytes_(way.peak_bytes))
            for way in fit.nearest
        ),
        ("largest batch at this sequence", fmt.count(fit.largest_batch_count)),
        ("largest sequence at this batch", fmt.count(fit.largest_sequence_count)),
        (
            "most parameters, with more or fewer of these layers",
            fmt.UNKNOWN if count is None else f"{count:.3g}",
        ),
        ("largest model of the catalogue", fit.largest_model or fmt.UNKNOWN),
    ]
    return Section(
        title=f"What fits {fmt.bytes_(fit.capacity_bytes)}, everything else unchanged",
        blocks=(Table(columns=(Column("", kind="prose"), "most"), rows=rows),),
    )


def _rule(result: Memory) -> Section:
    counts = (*RULE_TABLE_COUNT, result.parameters_count)
    return listing(
        "For comparison, the rule of thumb: 40 bytes × parameters",
        counts,
        {
            "parameters": lambda n: f"{n / 1e9:g} B" if n in RULE_TABLE_COUNT else "this model",
            "rule": lambda n: f"{rule_of_thumb(n)[0] / 1e9:,.0f} GB",
            "80 GB devices": lambda n: str(rule_of_thumb(n)[1]),
        },
        totals=1,
        note="a rule of thumb, printed for comparison; its errors follow",
    )
