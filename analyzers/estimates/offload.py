"""Moving states or activations to the host: memory saved, time added, share hidden.

Optimizer offload after ZeRO-Offload (Ren et al., arXiv 2101.06840): gradients stream to the host
during backward, Adam runs on the host, parameters return; 4 bytes per parameter cross the link.
Step: t_fwd + max(t_bwd, 2Ψ/B_d2h) + t_adam + 2Ψ/B_h2d, with t_adam = 30 bytes per parameter ÷ the
host's memory bandwidth. Memory, and the largest model, are those of `estimate memory`.

Over a coherent link the device can update states where they are: it reads and writes 12 bytes per
parameter through the link, and no gradient or weight is copied. Where device and host have one
memory, offload moves nothing and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from chopper.analyzers.estimates import Estimate, assumed
from chopper.analyzers.estimates.memory import largest, memory
from chopper.analyzers.estimates.step import Step
from chopper.analyzers.estimates.training import Offload as Moved
from chopper.analyzers.estimates.training import Strategy, Training
from chopper.errors import UsageError
from chopper.models.architectures import Architecture
from chopper.quantities import between, positive

ADAM_BYTES = 30
"""Read and written per parameter by one Adam step with a copy in 16 bits."""
_REMOTE_BYTES = 12
"""Of these, states in float32: read through a coherent link, and written."""
_HIDDEN_RATIO = 0.05
_STASH_LAYERS = 2
_MOST_RANKS = 1024


class Machine(msgspec.Struct, kw_only=True, frozen=True):
    """A device, its link to the host, and the host; per rank."""

    device: str
    flop_per_s: float
    """Peak × efficiency."""
    memory_bytes: int
    """That a process can have."""
    memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    host_bytes_per_s: float
    """DRAM bandwidth that this rank has."""
    host_memory_bytes: int | None = None
    """Of the node, for all of its ranks; None: not known, and not a bound."""
    source: str
    coherent: bool = False
    """Device and host read each other's memory in place."""
    shared: bool = False
    """They have one memory."""
    granule_bytes: int | None = None
    """Least that an access to the other's memory moves."""


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
    device_bytes: int
    """Peak of a rank, as `estimate memory` counts it."""
    host_bytes: int
    """Of the node."""
    fits: bool
    """The device, and the host where its memory is known."""
    largest_parameters_count: int | None
    """Of the largest model, with layers of this one's shape; null: not one layer fits, or weights
    are on a host whose memory is not known."""


class Access(msgspec.Struct, kw_only=True, frozen=True):
    """One way in which the device reads the host's memory without a copy."""

    pattern: str
    used_bytes: int
    """Of each piece that is read."""
    moved_bytes: int
    """For it."""
    useful_bytes_per_s: float
    """At most: the link's rate times the share that is used."""


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

    SCHEMA: ClassVar[str] = "chopper.estimate.offload/2"

    model: str
    parameters_count: int
    active_parameters_count: int
    """That one token goes through: what forward and backward compute with."""
    ranks_count: int
    tokens_count: int
    machine: Machine
    checkpoint: str
    variants: tuple[Variant, ...]
    activations: Activations
    accesses: tuple[Access, ...]
    """Unified memory by access pattern; none where what an access moves is not known."""
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
    checkpoint: Literal["none", "full"] = "full",
) -> Offload:
    """Return all variants for one model on one machine.

    Args:
        architecture: the model.
        machine: device, link and host, per rank.
        batch_count: sequences per rank.
        sequence_count: tokens of each.
        ranks_count: of one node, over which states are partitioned.
        checkpoint: full runs each layer's forward again in backward.

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
    backwards = 3 if checkpoint == "full" else 2
    per_token_s = 2 * (1 + backwards) * active / machine.flop_per_s
    training = Training(
        architecture=_reaching(architecture, sequence_count),
        batch_count=batch_count,
        sequence_count=sequence_count,
        ranks_count=ranks_count,
        strategy="zero2",
        checkpoint=checkpoint,
    )
    variants = _variants(training, machine, forward_s, backwards * forward_s)
    more = None
    if not any(v.fits for v in variants):
        doubled = (ranks_count * 2**power for power in range(1, 11))
        more = next(
            (n for n in doubled if n <= _MOST_RANKS and _any_fits(training, machine, n)), None
        )
    return Offload(
        assumptions=assumed("offload"),
        model=architecture.name,
        parameters_count=count,
        active_parameters_count=active,
        ranks_count=ranks_count,
        tokens_count=tokens,
        machine=machine,
        checkpoint=checkpoint,
        variants=variants,
        accesses=tuple(_accesses(machine)),
        fitting_ranks_count=more,
        activations=_activations(architecture, machine, batch_count, sequence_count, forward_s),
        tokens_to_hide_gradients=count
        * machine.flop_per_s
        / (backwards * active * down * ranks_count),
        tokens_for_small_overhead=(
            overhead_s / (_HIDDEN_RATIO * per_token_s) if overhead_s > 0 else None
        ),
    )


def _any_fits(training: Training, machine: Machine, ranks_count: int) -> bool:
    wider = msgspec.structs.replace(training, ranks_count=ranks_count)
    return any(_room(way, wider, machine)[2] for way in _ways(machine))


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


class _Way(msgspec.Struct, frozen=True):
    """A stage, and what of its states is on the host."""

    name: str
    strategy: Strategy
    moved: tuple[Moved, ...] = ()
    in_place: bool = False
    """The device updates what is on the host through the link."""


_WAYS = (
    _Way("stage 2, all on the device", "zero2"),
    _Way("stage 2, optimizer on the host", "zero2", ("optimizer",)),
    _Way("stage 3, all on the device", "zero3"),
    _Way("stage 3, optimizer on the host", "zero3", ("optimizer",)),
    _Way("stage 3, optimizer and parameters on the host", "zero3", ("parameters",)),
    _Way("stage 2, optimizer on the host, updated by the device", "zero2", ("optimizer",), True),
)


def _ways(machine: Machine) -> Iterator[_Way]:
    """Yield those of a machine: within one memory there is nowhere to move states to."""
    for way in _WAYS:
        if not (machine.shared and way.moved) and (machine.coherent or not way.in_place):
            yield way


def _room(way: _Way, training: Training, machine: Machine) -> tuple[int, int, bool]:
    """Return bytes of a rank's device and of the host, and whether there is room for them."""
    estimate = memory(msgspec.structs.replace(training, strategy=way.strategy, offload=way.moved))
    host_bytes = training.ranks_count * estimate.host_bytes
    room = machine.host_memory_bytes
    fits = estimate.peak_bytes <= machine.memory_bytes and (room is None or host_bytes <= room)
    return estimate.peak_bytes, host_bytes, fits


def _variants(
    training: Training, machine: Machine, forward_s: float, backward_s: float
) -> tuple[Variant, ...]:
    """Return ZeRO's stages 2 and 3, with more and more of the states on the host."""
    variants = []
    for way in _ways(machine):
        forward, backward, update, returning, link_bytes = _times(
            way, training, machine, forward_s, backward_s
        )
        device_bytes, host_bytes, fits = _room(way, training, machine)
        most = largest(
            msgspec.structs.replace(training, strategy=way.strategy, offload=way.moved),
            machine.memory_bytes,
            machine.host_memory_bytes,
        )
        variants.append(
            Variant(
                name=way.name,
                step_s=forward + backward + update + returning,
                forward_s=forward,
                backward_s=backward,
                optimizer_s=update,
                exposed_transfer_s=(forward + backward) - (forward_s + backward_s) + returning,
                link_bytes=int(link_bytes),
                device_bytes=device_bytes,
                host_bytes=host_bytes,
                fits=fits,
                largest_parameters_count=None if most is None else most.parameters_count,
            )
        )
    return tuple(variants)


def _times(
    way: _Way, training: Training, machine: Machine, forward_s: float, backward_s: float
) -> tuple[float, float, float, float, float]:
    """Return times of forward, backward, update, return of weights; bytes that cross the link."""
    part = training.architecture.parameters_count / training.ranks_count
    device_s = ADAM_BYTES * part / machine.memory_bytes_per_s
    if not way.moved:
        return forward_s, backward_s, device_s, 0.0, 0
    down_s = 2 * part / machine.to_host_bytes_per_s
    up_s = 2 * part / machine.to_device_bytes_per_s
    host_s = ADAM_BYTES * part / machine.host_bytes_per_s
    if way.in_place:
        slower = min(machine.to_host_bytes_per_s, machine.to_device_bytes_per_s)
        # Both directions at once; the host's memory serves both.
        through_s = max(_REMOTE_BYTES / slower, 2 * _REMOTE_BYTES / machine.host_bytes_per_s) * part
        return forward_s, backward_s, max(device_s, through_s), 0.0, 2 * _REMOTE_BYTES * part
    if "parameters" in way.moved:
        return max(forward_s, up_s), max(backward_s, up_s, down_s), host_s, 0.0, 6 * part
    return forward_s, max(backward_s, down_s), host_s, up_s, 4 * part


def _accesses(machine: Machine) -> Iterator[Access]:
    """Yield what reading pieces of the host's memory in place moves, from whole to single values.

    An access moves what it asks for, in whole granules: lines where memory is coherent, else pages
    that migrate on a fault. The time of a fault is not in it.
    """
    granule = machine.granule_bytes
    if granule is None:
        return
    rate = machine.memory_bytes_per_s if machine.shared else machine.to_device_bytes_per_s
    for pattern, used in (
        ("in order", 2**21),
        ("scattered pages", 4096),
        ("scattered lines", 128),
        ("scattered values", 4),
    ):
        moved = -(-used // granule) * granule
        yield Access(
            pattern=pattern,
            used_bytes=used,
            moved_bytes=moved,
            useful_bytes_per_s=rate * used / moved,
        )


def _reaching(a: Architecture, sequence: int) -> Architecture:
    """Return a model with positions for a sequence; its layers do not depend on how many."""
    enough = sequence + a.positions_unused_count
    if not 0 < a.positions_count < enough:
        return a
    return msgspec.structs.replace(a, positions_count=enough)


def _layer_bytes(a: Architecture, batch: int, sequence: int) -> float:
    """Return bytes that a layer keeps in 16 bits until its backward, mean over all layers."""
    of = Training(
        architecture=_reaching(a, sequence),
        batch_count=batch,
        sequence_count=sequence,
        precision="bf16",
    )
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
        best="recompute" if machine.shared or recomputed < overlapped else "offload",
    )
