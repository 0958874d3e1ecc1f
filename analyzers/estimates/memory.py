"""Peak memory of a training step, per rank and category, by running it symbolically.

M = parameters + gradients + optimizer + activations + logits + communication + temporaries,
at the moment at which their sum is largest, + fragmentation. Parallel strategies decide which of
them are whole, sharded, gathered for a while, or on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, ClassVar

import msgspec

from chopper.analyzers.estimates import Estimate, assumed
from chopper.analyzers.estimates.step import Step
from chopper.analyzers.estimates.tape import CATEGORIES
from chopper.analyzers.estimates.training import (
    DEEPSPEED,
    SHARDS_OPTIMIZER,
    SHARDS_PARAMETERS,
    Training,
)
from chopper.errors import UsageError
from chopper.models.architectures import Architecture
from chopper.quantities import MAX_INT, positive

_RULE_BYTES_PER_PARAMETER = 40
_RULE_DEVICE_BYTES = 80 * 10**9
RULE_TABLE_COUNT = (10**9, 7 * 10**9, 13 * 10**9, 70 * 10**9, 175 * 10**9)
RULE_FAULTS = assumed("rule_of_thumb")


class Nearest(msgspec.Struct, kw_only=True, frozen=True):
    """A change of the training with which it fits."""

    changes: dict[str, Any]
    """Fields of `Training`, and what they become."""
    peak_bytes: int


class Fit(msgspec.Struct, kw_only=True, frozen=True):
    """The largest batch, sequence and model that fit a capacity."""

    capacity_bytes: int
    """Of the device, less what is left free."""
    fits: bool
    largest_batch_count: int | None
    """With the sequence as given; null: not even 1."""
    largest_sequence_count: int | None
    """With the batch as given, in steps of 64; null: not even 64."""
    largest_model: str | None
    """Of the catalogue, by parameters, trained the same way; null: none fits."""
    largest_parameters_count: int | None
    """As `largest` finds it; null: not one layer fits, or the host decides."""
    nearest: tuple[Nearest, ...] = ()
    """Where it does not fit: the least of each kind of change with which it does (recomputation,
    a loss in parts, more ranks, offload); where none alone is enough, the least together."""


class Memory(Estimate, kw_only=True, frozen=True):
    """Peak memory of one rank, by category."""

    SCHEMA: ClassVar[str] = "chopper.estimate.memory/1"

    training: Training | None
    """Null for a captured module."""
    captured: dict[str, Any] | None = None
    """For a captured module: what was captured, and by which torch."""
    parameters_count: int
    active_parameters_count: int
    """That one token goes through: fewer than all with experts; of a captured module, all."""
    allocated_bytes: int
    """The peak without pools, fragmentation and workspaces: what ``max_memory_allocated`` counts.
    """
    peak_bytes: int
    """With them: what ``max_memory_reserved`` and the driver see."""
    categories_bytes: dict[str, int]
    """Sums to `peak_bytes`."""
    phases_bytes: dict[str, int]
    """Highest of each phase, without fragmentation and workspaces."""
    peak_at: str
    steady_bytes: int
    """Bytes that stay from step to step."""
    host_bytes: int
    """Of this rank, what was offloaded."""
    fit: Fit | None = None
    """The most that fits a device, when one was named."""


def _assumed(training: Training) -> tuple[str, ...]:
    """Return the assumptions that these options make."""
    names = ["memory", "fragmentation"]
    if training.tensor_parallel_count > 1:
        names.append("tensor_parallel")
    balance: tuple[str, ...] = ()
    if training.architecture.experts is not None:
        names.append("experts")
        rows = f"tokens × {training.architecture.experts.chosen_count} rows"
        if training.expert_parallel_count == 1:
            sentence = f"each rank has all experts, so {rows} stay its own whatever the routing"
        elif training.imbalance_ratio == 1:
            sentence = (
                f"experts are balanced: each rank's get {rows}, as many as it sends (--imbalance: "
                "load of the busiest rank over an even share)"
            )
        else:
            ratio = training.imbalance_ratio
            sentence = f"the busiest rank's experts get {ratio:g} × its even share of {rows}"
        balance = (sentence,)
    deepspeed = ("deepspeed",) * (training.strategy in DEEPSPEED)
    stage_3 = ("zero3",) * (training.strategy == "zero3")
    return assumed(*names) + balance + assumed(*deepspeed, *stage_3)


def memory(training: Training) -> Memory:
    """Return the peak memory of one rank; where ranks differ, of the one that needs the most.

    Raises:
        UsageError: options that contradict each other, or sizes that 64 bits cannot count.
    """
    ranks: set[int | None] = {None}
    if training.strategy in ("zero1", "zero2"):
        # Stage 1 reduces in the order of the model: the first rank has its part while all gradients
        # are there.
        ranks = {0, *Step(training).parts().extremes()}
    steps = [Step(training, rank=rank) for rank in ranks]
    for step in steps:
        step.run()
    step = max(steps, key=lambda run: run.ledger.peak_bytes)
    ledger = step.ledger
    moving = ledger.peak_bytes - step.steady_bytes
    fragmentation = round(training.fragmentation_ratio * max(moving, 0))
    categories = {name: ledger.peak[name] for name in CATEGORIES}
    # A GPU's caching allocator gives a stream's memory to no other: what FSDP's had at their
    # highest is still theirs at the peak of all.
    categories["pools"] = ledger.apart_bytes() if training.kernels == "gpu" else 0
    categories["fragmentation"] = fragmentation
    categories["workspace"] = training.workspace_bytes
    peak = sum(categories.values())
    if peak > MAX_INT:
        raise UsageError(f"memory: {peak:.3g} bytes exceed 64 bits; specify less")
    return Memory(
        assumptions=_assumed(training),
        training=training,
        parameters_count=training.architecture.parameters_count,
        active_parameters_count=training.architecture.active_count,
        allocated_bytes=ledger.peak_bytes,
        peak_bytes=peak,
        categories_bytes=categories,
        phases_bytes=dict(ledger.phases),
        peak_at=ledger.peak_at,
        steady_bytes=step.steady_bytes,
        host_bytes=step.host_bytes,
    )


class Largest(msgspec.Struct, kw_only=True, frozen=True):
    """The largest model that fits, and the memory of the host that it takes."""

    parameters_count: int
    layers_count: int
    host_bytes: int
    """Of all ranks."""


_MOST, _MOST_LAYERS = 2**24, 2000


def largest(
    training: Training, capacity_bytes: int, host_bytes: int | None = None
) -> Largest | None:
    """Return the largest model that can be trained: the most layers of this shape that fit.

    This is what "largest model" means everywhere. A whole step has to fit: its peak, with
    activations, buffers and the assumed fragmentation, each rank's device, and what is offloaded
    the memory of the host, which the ranks share. None: not one layer fits, or weights are on a
    host whose memory is unknown.
    """
    if host_bytes is None and "parameters" in training.offload:
        return None
    ranks, room = training.ranks_count, math.inf if host_bytes is None else host_bytes

    def at(layers: int) -> tuple[Memory, bool]:
        deep = msgspec.structs.replace(training.architecture, layers_count=layers)
        estimate = memory(msgspec.structs.replace(training, architecture=deep))
        fits = estimate.peak_bytes <= capacity_bytes and ranks * estimate.host_bytes <= room
        return estimate, fits

    # Memory grows by the same for each layer, once layers and not the loss decide the peak.
    (few, _), (many, _) = at(64), at(128)
    layers = _MOST_LAYERS
    for have, of_few, of_many in (
        (capacity_bytes, few.peak_bytes, many.peak_bytes),
        (room, ranks * few.host_bytes, ranks * many.host_bytes),
    ):
        if of_many > of_few and have < math.inf:
            layers = min(layers, 64 + int((have - of_few) * 64 // (of_many - of_few)))
    while layers > 0:
        estimate, fits = at(layers)
        if fits:
            return Largest(
                parameters_count=estimate.parameters_count,
                layers_count=layers,
                host_bytes=ranks * estimate.host_bytes,
            )
        layers -= 1
    return None


def fit(training: Training, capacity_bytes: int, catalogue: dict[str, Architecture]) -> Fit:
    """Return the largest batch, sequence and model that fit a capacity, the rest unchanged."""

    def fits(**changed: object) -> bool:
        return _peak_bytes(training, changed) <= capacity_bytes

    def most(limit: int, change: Callable[[int], dict[str, object]]) -> int:
        """The most that fits, bit by bit; 0 for none."""
        count = 0
        for bit in (2**i for i in reversed(range(limit.bit_length()))):
            if count + bit <= limit and fits(**change(count + bit)):
                count += bit
        return count

    deepest = largest(training, capacity_bytes)
    models = sorted(catalogue.values(), key=lambda m: m.parameters_count, reverse=True)
    of_catalogue = next((m.name for m in models if fits(architecture=m)), None)
    enough = fits()
    return Fit(
        capacity_bytes=capacity_bytes,
        fits=enough,
        nearest=() if enough else nearest(training, capacity_bytes),
        largest_batch_count=most(_MOST, lambda n: {"batch_count": n}) or None,
        largest_sequence_count=64 * most(_MOST // 64, lambda n: {"sequence_count": 64 * n}) or None,
        largest_model=of_catalogue,
        largest_parameters_count=None if deepest is None else deepest.parameters_count,
    )


def _peak_bytes(training: Training, changes: dict[str, Any]) -> float:
    """Return the peak with some options changed; infinite where they contradict the others."""
    try:
        return memory(msgspec.structs.replace(training, **changes)).peak_bytes
    except UsageError:
        return math.inf


def nearest(training: Training, capacity_bytes: int) -> tuple[Nearest, ...]:
    """Return the least changes with which a training fits; none where even all do not help."""

    def fitting(kind: list[dict[str, Any]], besides: dict[str, Any]) -> dict[str, Any] | None:
        """Return the smallest change of a kind that fits, without unneeded further changes."""
        # Each kind is ordered by effect: where its last does not help, none does.
        if not kind or _peak_bytes(training, besides | kind[-1]) > capacity_bytes:
            return None
        chosen = next(c for c in kind if _peak_bytes(training, besides | c) <= capacity_bytes)
        for name in besides:
            fewer = {n: value for n, value in besides.items() if n != name}
            if _peak_bytes(training, fewer | chosen) <= capacity_bytes:
                besides = fewer
        slices = (besides | one for one in sliced if one.keys() <= besides.keys())
        fits = (b | chosen for b in slices if _peak_bytes(training, b | chosen) <= capacity_bytes)
        return next(fits, besides | chosen)

    recomputed, in_parts, ranks, offloaded, sliced = kinds = _kinds(training)
    recompute = (recomputed or [{}])[-1] | (in_parts or [{}])[-1]
    sharded = recompute | (sliced or [{}])[-1]
    alone: list[dict[str, Any]] = [{}]
    rounds: tuple[list[tuple[list[dict[str, Any]], dict[str, Any]]], ...] = (
        [(kind, {}) for kind in kinds],
        [(alone, recompute)],
        [(offloaded, recompute), (ranks, recompute)],
        [(alone, sharded)],
        [(ranks, sharded)],
        [(ranks, sharded | (offloaded or [{}])[-1])],
    )
    for attempts in rounds:
        if found := [c for kind, besides in attempts if (c := fitting(kind, besides))]:
            return tuple(
                Nearest(changes=changes, peak_bytes=int(_peak_bytes(training, changes)))
                for changes in found
            )
    return ()


def _kinds(training: Training) -> list[list[dict[str, Any]]]:
    """Return what each kind of change can be, least first; each leaves the rest as it is."""
    levels = ("none", "selective", "full")
    checkpoints = levels[levels.index(training.checkpoint) + 1 :]
    sharded = training.strategy in SHARDS_OPTIMIZER
    how = {} if sharded else {"strategy": "fsdp2"}
    ranks = training.ranks_count
    counts = [ranks * 2**power for power in range(sharded or ranks == 1, 11)]
    moved = set(training.offload) - {"none"}
    movable = [what for what in ("optimizer", "parameters", "activations") if what not in moved]
    if training.strategy not in SHARDS_PARAMETERS and "parameters" in movable:
        movable.remove("parameters")
    more = [set(c) for size in range(1, len(movable) + 1) for c in combinations(movable, size)]
    sliced: list[dict[str, Any]] = [
        {"tensor_parallel_count": n, "sequence_parallel": True}
        for n in (2, 4, 8)
        if n > training.tensor_parallel_count
        and _peak_bytes(training, {"tensor_parallel_count": n}) < math.inf
    ]
    if training.architecture.experts is not None:
        sliced = [{"expert_parallel_count": n} for n in (8,) if n > training.expert_parallel_count]
    return [
        [{"checkpoint": level} for level in checkpoints],
        [{"loss": "chunked"}] * (training.loss != "chunked"),
        [{**how, "ranks_count": count} for count in counts],
        [{"offload": tuple(sorted(moved | what))} for what in more],
        sliced,
    ]


def of_capture(
    capture: dict[str, Any],
    request: dict[str, Any],
    *,
    fragmentation_ratio: float = 0.15,
    workspace_bytes: int = 0,
) -> Memory:
    """Return the estimate for a module that was tracked under fake tensors.

    Args:
        capture: result of :func:`chopper.collectors.fake_tensors.capture`.
        request: options of the capture, to be shown.
        fragmentation_ratio: share of reserved memory that is fragmented.
        workspace_bytes: of libraries.
    """
    categories = {name: int(capture["categories_bytes"].get(name, 0)) for name in CATEGORIES}
    steady = categories["parameters"] + categories["optimizer"]
    allocated = sum(categories.values())
    categories["fragmentation"] = round(fragmentation_ratio * (allocated - steady))
    categories["workspace"] = workspace_bytes
    return Memory(
        assumptions=assumed("captured_memory", "fragmentation"),
        training=None,
        captured={**request, "torch": capture["torch"], "units_count": capture["units_count"]},
        parameters_count=capture["parameters_count"],
        active_parameters_count=capture["parameters_count"],
        allocated_bytes=allocated,
        peak_bytes=sum(categories.values()),
        categories_bytes=categories,
        phases_bytes={},
        peak_at="unknown",
        steady_bytes=steady,
        host_bytes=0,
    )


def rule_of_thumb(parameters_count: int) -> tuple[int, int]:
    """A common rule of thumb: 40 bytes per parameter, and 80 GB devices for it.

    Returns:
        Bytes, and devices (rounded up).
    """
    positive(parameters_count, "parameters")
    size = _RULE_BYTES_PER_PARAMETER * parameters_count
    return size, -(-size // _RULE_DEVICE_BYTES)
