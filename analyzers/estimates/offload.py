"""Moving states or activations to the host: what it saves, what it costs, when it hides.

Optimizer offload after ZeRO-Offload (Ren et al., arXiv 2101.06840): gradients stream to the host
during backward, Adam runs on the host, parameters return; 4 bytes per parameter cross the link.
Step: t_fwd + max(t_bwd, 2Ψ/B_d2h) + t_adam + 2Ψ/B_h2d, with t_adam = 30 bytes per parameter ÷ the
host's memory bandwidth.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from chopper.analyzers.estimates import Estimate, assumed
from chopper.analyzers.estimates.formulas import deepspeed_zero2_bytes, deepspeed_zero3_bytes
from chopper.analyzers.estimates.step import Step
from chopper.analyzers.estimates.training import Training
from chopper.errors import UsageError
from chopper.models.architectures import Architecture
from chopper.quantities import between, positive

ADAM_BYTES = 30
"""Read and written per parameter by one Adam step with a copy in 16 bits."""
_HIDDEN_RATIO = 0.05
_STASH_LAYERS = 2
_MOST_RANKS = 1024


class Machine(msgspec.Struct, kw_only=True, frozen=True):
    """A device, its link to the host, and the host; per rank."""

    device: str
    flop_per_s: float
    """Peak × efficiency."""
    memory_bytes: int
    memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    host_bytes_per_s: float
    """DRAM bandwidth that this rank has."""
    host_memory_bytes: int | None = None
    """Of the node, for all of its ranks; None: not known, and not a bound."""
    source: str


class Variant(msgspec.Struct, kw_only=True, frozen=True):
    """One way of keeping states, with time and memory of a step."""

    name: str
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_transfer_s: float
    """Time that the device waits for the link."""
    link_bytes: int
    """Both directions, per step and rank."""
    device_bytes: float
    """States; activations are not in it."""
    host_bytes: float
    """Of the node."""
    fits: bool
    """The device, and the host where its memory is known."""
    largest_parameters_count: int
    """Whose states fit."""


class Activations(msgspec.Struct, kw_only=True, frozen=True):
    """Offload of activations against keeping and recomputing them."""

    layer_bytes: float
    saved_bytes: float
    """All layers but those under way."""
    hideable_ratio: float
    """Of the transfer, behind this model's forward."""
    bound_ratio: float
    """The general bound min(1, 0.71·h·B/F)."""
    kept_s: float
    recomputed_s: float
    synchronous_s: float
    """The program waits for every copy (save_on_cpu)."""
    overlapped_s: float
    link_for_all_bytes_per_s: float
    """Rate of the link at which all of it hides."""
    best: str
    """The fastest that gives memory back: recompute or offload."""


class Offload(Estimate, kw_only=True, frozen=True):
    """Time and memory of offloading, by variant."""

    SCHEMA: ClassVar[str] = "chopper.estimate.offload/1"

    model: str
    parameters_count: int
    active_parameters_count: int
    """That one token goes through: what forward and backward compute with."""
    ranks_count: int
    tokens_count: int
    machine: Machine
    variants: tuple[Variant, ...]
    activations: Activations
    tokens_to_hide_gradients: float
    """Per rank and step: from here on the stream of gradients hides behind backward."""
    tokens_for_small_overhead: float | None
    """Per rank and step, at which optimizer offload costs less than 5 %; null: it costs nothing."""
    fitting_ranks_count: int | None = None
    """Where nothing fits: ranks of the node, doubled until something does; null: not even 1024."""


def hideable_ratio(*, width: int, link_bytes_per_s: float, flop_per_s: float) -> float:
    """Share of a layer's activations that its forward can hide: min(1, 0.71·h·B/F).

    24 h² FLOP and 34 h bytes per token (Korthikanti et al.) give 24/34 = 0.71.
    """
    for name, value in (("width", width), ("link", link_bytes_per_s), ("rate", flop_per_s)):
        positive(value, name)
    return min(1.0, 24 / 34 * width * link_bytes_per_s / flop_per_s)


def offload(
    architecture: Architecture,
    machine: Machine,
    *,
    batch_count: int = 1,
    sequence_count: int = 2048,
    ranks_count: int = 1,
) -> Offload:
    """Return all variants for one model on one machine.

    Args:
        architecture: the model.
        machine: device, link and host, per rank.
        batch_count: sequences per rank.
        sequence_count: tokens of each.
        ranks_count: of one node, over which states are partitioned.

    Raises:
        UsageError: anything not positive.
    """
    _check(machine, batch_count, sequence_count, ranks_count)
    count, active = architecture.parameters_count, architecture.active_count
    tokens = batch_count * sequence_count
    forward_s = 2 * active * tokens / machine.flop_per_s
    part, down = count / ranks_count, machine.to_host_bytes_per_s
    overhead_s = (
        ADAM_BYTES * part / machine.host_bytes_per_s
        + 2 * part / machine.to_device_bytes_per_s
        - ADAM_BYTES * part / machine.memory_bytes_per_s
    )
    per_token_s = 6 * active / machine.flop_per_s
    variants = _variants(architecture, machine, ranks_count, forward_s)
    more = None
    if not any(v.fits for v in variants):
        doubled = (ranks_count * 2**power for power in range(1, 11))
        more = next(
            (n for n in doubled if n <= _MOST_RANKS and _fits(architecture, machine, n)), None
        )
    return Offload(
        assumptions=assumed("offload"),
        model=architecture.name,
        parameters_count=count,
        active_parameters_count=active,
        ranks_count=ranks_count,
        tokens_count=tokens,
        machine=machine,
        variants=variants,
        fitting_ranks_count=more,
        activations=_activations(architecture, machine, batch_count, sequence_count, forward_s),
        tokens_to_hide_gradients=count * machine.flop_per_s / (2 * active * down * ranks_count),
        tokens_for_small_overhead=(
            overhead_s / (_HIDDEN_RATIO * per_token_s) if overhead_s > 0 else None
        ),
    )


def _fits(architecture: Architecture, machine: Machine, ranks_count: int) -> bool:
    return any(v.fits for v in _variants(architecture, machine, ranks_count, 0.0))


def _check(machine: Machine, batch_count: int, sequence_count: int, ranks_count: int) -> None:
    positive(batch_count, "batch")
    positive(sequence_count, "sequence")
    between(ranks_count, 1, _MOST_RANKS, "ranks in a node")
    positive(machine.memory_bytes_per_s, "memory bandwidth")
    for name, rate in (
        ("peak", machine.flop_per_s),
        ("link to device", machine.to_device_bytes_per_s),
        ("link to host", machine.to_host_bytes_per_s),
        ("host bandwidth of a rank", machine.host_bytes_per_s),
    ):
        # Below, a step takes centuries.
        between(rate, 1e3, 1e24, name)
    if machine.host_memory_bytes is not None:
        positive(machine.host_memory_bytes, "host memory")
    if batch_count * sequence_count > 2**40:
        raise UsageError(f"batch × sequence: {batch_count * sequence_count:.3g} is too large")


def _variants(
    architecture: Architecture, machine: Machine, ranks_count: int, forward_s: float
) -> tuple[Variant, ...]:
    """Return ZeRO's stages 2 and 3, with more and more of the states on the host."""
    count, largest, n = architecture.parameters_count, architecture.layer_count, ranks_count
    part, backward_s = count / n, 2 * forward_s
    down_s = 2 * part / machine.to_host_bytes_per_s
    up_s = 2 * part / machine.to_device_bytes_per_s
    device_s = ADAM_BYTES * part / machine.memory_bytes_per_s
    host_s = ADAM_BYTES * part / machine.host_bytes_per_s
    # Forward, backward, update, return of weights; and bytes that cross the link.
    stays = forward_s, backward_s, device_s, 0.0, 0
    streamed = forward_s, max(backward_s, down_s), host_s, up_s, 4 * part
    passes_s = max(forward_s, up_s), max(backward_s, up_s, down_s)
    fetched = *passes_s, host_s, 0.0, 6 * part
    on_device, optimizer_off, all_off = (
        deepspeed_zero3_bytes(count, largest, n, offload=what)
        for what in ("none", "optimizer", "parameters")
    )
    variants = []
    for name, times, sizes in (
        ("stage 2, all on the device", stays, deepspeed_zero2_bytes(count, n, offload=False)),
        ("stage 2, optimizer on the host", streamed, deepspeed_zero2_bytes(count, n, offload=True)),
        ("stage 3, all on the device", stays, on_device),
        ("stage 3, optimizer on the host", streamed, optimizer_off),
        ("stage 3, optimizer and parameters on the host", fetched, all_off),
    ):
        forward, backward, update, returning, link_bytes = times
        rooms = [(sizes[0], machine.memory_bytes)]
        if machine.host_memory_bytes is not None and sizes[1]:
            rooms.append((sizes[1], machine.host_memory_bytes))
        variants.append(
            Variant(
                name=name,
                step_s=forward + backward + update + returning,
                forward_s=forward,
                backward_s=backward,
                optimizer_s=update,
                exposed_transfer_s=(forward + backward) - (forward_s + backward_s) + returning,
                link_bytes=int(link_bytes),
                device_bytes=sizes[0],
                host_bytes=sizes[1],
                fits=all(size <= room for size, room in rooms),
                largest_parameters_count=int(min(room / (size / count) for size, room in rooms)),
            )
        )
    return tuple(variants)


def _layer_bytes(a: Architecture, batch: int, sequence: int) -> float:
    """Return bytes that a layer keeps in 16 bits until its backward, mean over all layers."""
    if a.positions_count:
        # Bytes of a layer do not depend on how many there are.
        enough = sequence + a.positions_unused_count
        a = msgspec.structs.replace(a, positions_count=max(a.positions_count, enough))
    of = Training(architecture=a, batch_count=batch, sequence_count=sequence, precision="bf16")
    step = Step(of)
    step.forward()
    return (step.ledger.now["activations"] - step.x_bytes) / a.layers_count


def _activations(
    a: Architecture, machine: Machine, batch: int, sequence: int, forward_s: float
) -> Activations:
    layer = _layer_bytes(a, batch, sequence)
    down, up = machine.to_host_bytes_per_s, machine.to_device_bytes_per_s
    # On average: layers with and without experts differ.
    layer_forward_s = forward_s * (1 - a.outer_count / a.active_count) / a.layers_count
    everything = layer * a.layers_count
    step_s = 3 * forward_s
    overlapped = max(forward_s, everything / down) + max(2 * forward_s, everything / up)
    recomputed = step_s + layer_forward_s * a.layers_count
    return Activations(
        layer_bytes=layer,
        saved_bytes=layer * max(0, a.layers_count - _STASH_LAYERS),
        hideable_ratio=min(1.0, layer_forward_s * down / layer),
        bound_ratio=hideable_ratio(
            width=a.width, link_bytes_per_s=down, flop_per_s=machine.flop_per_s
        ),
        kept_s=step_s,
        recomputed_s=recomputed,
        synchronous_s=step_s + everything / down + everything / up,
        overlapped_s=overlapped,
        link_for_all_bytes_per_s=layer / layer_forward_s,
        best="recompute" if recomputed < overlapped else "offload",
    )
