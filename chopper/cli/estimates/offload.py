"""Optimizer, parameters or activations on the host.

Optimizer offload after ZeRO-Offload (Ren et al., arXiv 2101.06840): gradients stream to the host
during backward, Adam runs on the host, parameters return; 4 bytes per parameter cross the link.
Step: t_fwd + max(t_bwd, 2Ψ/B_d2h) + t_adam + 2Ψ/B_h2d, with t_adam = 30 bytes per parameter ÷ the
host's memory bandwidth. Memory, and the largest model, are those of `estimate memory`.

Over a coherent link the device can update states where they are: it reads and writes 12 bytes per
parameter through the link, and no gradient or weight is copied. Where device and host have one
memory, offload moves nothing and frees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from chopper import wording as fmt
from chopper.analyzers.estimates import Estimate, Option, assumed
from chopper.analyzers.estimates.memory import largest, memory
from chopper.analyzers.estimates.step import Step
from chopper.analyzers.estimates.training import Offload as Moved
from chopper.analyzers.estimates.training import Strategy, Training
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.hardware.devices import HostRates, host_link_of, host_rates_of
from chopper.hardware.devices import named as device_named
from chopper.models.architectures import Architecture, named
from chopper.models.configs import read_config
from chopper.quantities import between, positive
from chopper.reports.estimate import estimate_page, listing, stacked_figure
from chopper.reports.page import Column, Figure, Page, Section

ADAM_BYTES = 30
"""Read and written per parameter by one Adam step with a copy in 16 bits."""
_REMOTE_BYTES = 12
"""Of these, states in float32: read through a coherent link, and written."""
_STASH_LAYERS = 2
_MOST_RANKS = 1024


class Options(_options.Options, kw_only=True, frozen=True):
    """Show what offloading to the host saves and costs: ZeRO-Offload's variants, and activations.

    \b
    Examples:
      chopper estimate offload llama2-13b --device v100-sxm2-32gb --batch 8
      chopper estimate offload llama3-8b --device gh200-96gb --host-memory 480GB
      chopper estimate offload llama3-8b --link 50GB/s --sequence 8192 --json
    """

    model: Annotated[str | None, Option("", argument=True)] = None
    config: Annotated[Path | None, Option("A Hugging Face config.json.", metavar="FILE")] = None
    device: Annotated[str, Option("Name in the table of devices.")] = "h100-sxm"
    efficiency_ratio: Annotated[float, Option("Share of the peak that matrix products reach.")] = (
        0.5
    )
    batch_count: Annotated[int, Option("Sequences per rank.")] = 1
    sequence_count: Annotated[int, Option("Tokens per sequence.")] = 2048
    ranks_count: Annotated[int, Option("Ranks of the node.")] = 1
    checkpoint: Annotated[
        Literal["none", "full"], Option("Recomputation: none, or full (each layer again).")
    ] = "full"
    link_bytes_per_s: Annotated[
        float | None, Option("To the device and back.  [default: the device's]")
    ] = None
    host_bandwidth_bytes_per_s: Annotated[
        float, Option("DRAM bandwidth of the node, shared by its ranks.")
    ] = 200e9
    host_memory_bytes: Annotated[int | None, Option("DRAM of the node.  [default: unlimited]")] = (
        None
    )


def estimate(options: Options) -> Offload:
    """Return time and memory of each variant for a model on a machine."""
    options.exactly_one("model", "config", missing="no model given")
    architecture = read_config(options.config) if options.config else named(options.model or "")
    return offload(
        architecture,
        _machine(options),
        batch_count=options.batch_count,
        sequence_count=options.sequence_count,
        ranks_count=options.ranks_count,
        checkpoint=options.checkpoint,
    )


def _machine(options: Options) -> Machine:
    """Return the device of the table with its link, per rank."""
    between(options.efficiency_ratio, 0.001, 1, "--efficiency")
    device = device_named(options.device)
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    known = {
        "peak for 16 bits": peak,
        "memory": device.memory_bytes.value,
        "memory bandwidth": device.memory_bandwidth_bytes_per_s.value,
    }
    missing = [what for what, value in known.items() if value is None]
    if missing:
        raise UsageError(
            f"--device {options.device}: {device.label} has no known {missing[0]}; choose another"
        )
    link, rates = host_link_of(device), host_rates_of(device)
    if options.link_bytes_per_s is not None:
        link, rate = None, options.link_bytes_per_s
        rates = HostRates(rate, rate, "specified link")
    if rates is None:
        raise UsageError(
            f"--device {options.device}: the link of {device.label} to its host is not known; "
            "give --link"
        )
    return Machine(
        device=device.label,
        flop_per_s=float(peak or 0) * options.efficiency_ratio,
        memory_bytes=device.usable_bytes or 0,
        memory_bytes_per_s=float(device.memory_bandwidth_bytes_per_s.value or 0),
        to_device_bytes_per_s=rates.to_device_bytes_per_s,
        to_host_bytes_per_s=rates.to_host_bytes_per_s,
        host_bytes_per_s=options.host_bandwidth_bytes_per_s / options.ranks_count,
        host_memory_bytes=options.host_memory_bytes,
        source=rates.source,
        coherent=link is not None and link.coherent,
        shared=link is not None and link.shared,
    )


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

    SCHEMA: ClassVar[str] = "chopper.estimate.offload/3"

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
    tokens_to_hide_gradients: float
    """Per rank and step: from here on the stream of gradients hides behind backward."""
    fitting_ranks_count: int | None = None
    """Where nothing fits: ranks of the node, doubled until something does; null: not even 1024."""


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
        batch_count, sequence_count: sequences per rank, and tokens of each.
        ranks_count: of one node, over which states are partitioned.
        checkpoint: full runs each layer's forward again in backward.

    Raises:
        UsageError: anything not positive.
    """
    _check(machine, batch_count, sequence_count, ranks_count)
    count, active = architecture.parameters_count, architecture.active_count
    tokens = batch_count * sequence_count
    forward_s = 2 * active * tokens / machine.flop_per_s
    down = machine.to_host_bytes_per_s
    backwards = 3 if checkpoint == "full" else 2
    training = Training(
        architecture=_reaching(architecture, sequence_count),
        batch_count=batch_count,
        sequence_count=sequence_count,
        ranks_count=ranks_count,
        strategy="zero2",
        checkpoint=checkpoint,
    )
    variants = _variants_of(training, machine, forward_s, backwards * forward_s)
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
        fitting_ranks_count=more,
        activations=_activations_of(architecture, machine, batch_count, sequence_count, forward_s),
        tokens_to_hide_gradients=count
        * machine.flop_per_s
        / (backwards * active * down * ranks_count),
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


def _variants_of(
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


def _activations_of(
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
        # 24 h² FLOP and 34 h bytes per token (Korthikanti et al.) give 24/34 = 0.71.
        bound_ratio=min(1.0, 24 / 34 * a.width * down / machine.flop_per_s),
        kept_s=step_s,
        recomputed_s=recomputed,
        synchronous_s=step_s + everything / down + everything / up,
        overlapped_s=overlapped,
        link_for_all_bytes_per_s=layer / layer_forward_s,
        best="recompute" if machine.shared or recomputed < overlapped else "offload",
    )


def page(result: Offload) -> Page:
    """Return variants of optimizer offload, and offload of activations."""
    fits = [v for v in result.variants if v.fits]
    headline = f"No configuration of {result.model} fits {result.machine.device}."
    if fits:
        best = min(fits, key=lambda v: v.step_s)
        name = best.name.replace("optimizer and parameters", "all states")
        without = f" ({fmt.duration(result.variants[0].step_s * 1e9)} without offload)"
        headline = (
            f"{fmt.duration(best.step_s * 1e9)} a step{without * bool(best.link_bytes)}: {name}."
        )
    return estimate_page(
        result,
        title="Offload to the host",
        headline=headline,
        limit=_limit(result),
        assumes=f"products at {fmt.flops(result.machine.flop_per_s)}, "
        + (
            "one memory for both"
            if result.machine.shared
            else f"the link at {fmt.rate(result.machine.to_device_bytes_per_s)}"
        )
        + f"; checkpointing {result.checkpoint}",
        remedy=_remedy(result),
        facts=_facts(result),
        figures=(_figure(result),),
        sections=(
            _variants(result),
            *(() if result.machine.shared else (_activations(result),)),
        ),
    )


def _limit(result: Offload) -> str:
    """Return what takes longest in the fastest variant that fits, or the memory that is lacking."""
    fits = [v for v in result.variants if v.fits]
    if not fits:
        least, machine = min(result.variants, key=lambda v: v.device_bytes), result.machine
        if machine.host_memory_bytes is None or least.device_bytes > machine.memory_bytes:
            memory = "device", least.device_bytes, machine.memory_bytes
        else:
            memory = "host", least.host_bytes, machine.host_memory_bytes
        what, needed_bytes, room_bytes = memory
        return (
            f"the {what}'s memory: {fmt.bytes_(room_bytes)}, needed at least "
            f"{fmt.bytes_(needed_bytes)}"
        )
    best = min(fits, key=lambda v: v.step_s)
    parts = {
        "forward and backward": best.forward_s + best.backward_s - best.exposed_transfer_s,
        "the optimizer": best.optimizer_s,
        "waiting for the link": best.exposed_transfer_s,
    }
    longest = max(parts, key=lambda name: parts[name])
    return (
        f"{longest}, {fmt.duration(parts[longest] * 1e9)}; device "
        f"{fmt.bytes_(best.device_bytes)}, host {fmt.bytes_(best.host_bytes)}"
    )


def _remedy(result: Offload) -> str:
    if not any(v.fits for v in result.variants):
        room = result.machine.memory_bytes
        least = min((v.host_bytes for v in result.variants if v.device_bytes <= room), default=None)
        ways = [f"--ranks {result.fitting_ranks_count}"] * bool(result.fitting_ranks_count)
        if least is not None:
            power, unit = (40, "TiB") if least >= 2**42 else (30, "GiB")
            ways.append(f"--host-memory {math.ceil(least / 2**power)}{unit}")
        return " or ".join(ways) or "a device with more memory, or a smaller model"
    best = result.activations.best
    if result.machine.shared:
        return f"for activations, {best}"
    return (
        f"for activations, {best}; {fmt.count(result.tokens_to_hide_gradients)} tokens a step hide "
        "the gradients"
    )


def _facts(result: Offload) -> Iterator[str]:
    machine = result.machine
    fewer = result.active_parameters_count < result.parameters_count
    active = f", {result.active_parameters_count / 1e9:.2f} B active" if fewer else ""
    yield (
        f"{result.model} ({result.parameters_count / 1e9:.2f} B parameters{active}) on "
        f"{machine.device}, {fmt.plural(result.ranks_count, 'rank')}, "
        f"{fmt.count(result.tokens_count)} tokens per rank and step"
    )
    host = "unlimited"
    if machine.host_memory_bytes is not None:
        host = f"{fmt.bytes_(machine.host_memory_bytes)} in all"
    if machine.shared:
        yield "processor and device have one memory: offload moves nothing and frees nothing"
        return
    yield (
        f"link {fmt.rate(machine.to_device_bytes_per_s)} to the device, "
        f"{fmt.rate(machine.to_host_bytes_per_s)} back: {machine.source}; host memory "
        f"{fmt.rate(machine.host_bytes_per_s)} for each rank, {host}"
    )
    yield (
        f"gradients hide behind backward from {fmt.count(result.tokens_to_hide_gradients)} tokens "
        "per rank and step"
    )
    yield f"activations: {result.activations.best} is faster"


def _variants(result: Offload) -> Section:
    return listing(
        "States on the device and on the host",
        result.variants,
        {
            Column("variant", kind="prose"): "name",
            "step": "step_s",
            "waits for link": "exposed_transfer_s",
            "over link": "link_bytes",
            "device": "device_bytes",
            "host": "host_bytes",
            "fits": lambda v: "yes" if v.fits else "no",
            "at most": lambda v: (
                fmt.UNKNOWN
                if v.largest_parameters_count is None
                else f"{v.largest_parameters_count / 1e9:.3g} B"
            ),
        },
        note="device: peak of one rank; host: of the node; at most: the largest model, layers of "
        "this shape as many as fit (–: none, or the host's memory is not specified)",
    )


def _activations(result: Offload) -> Section:
    a = result.activations
    return listing(
        "Activations: keep, recompute or offload",
        (
            ("kept on the device", a.kept_s),
            ("recomputed (full checkpointing)", a.recomputed_s),
            ("offloaded, the program waits (save_on_cpu)", a.synchronous_s),
            ("offloaded, beside compute", a.overlapped_s),
        ),
        {
            "": lambda way: way[0],
            "step": lambda way: fmt.duration(way[1] * 1e9),
            "against keeping": lambda way: f"{way[1] / a.kept_s:.2f}×",
        },
        note=f"{fmt.bytes_(a.layer_bytes)} per layer, {fmt.bytes_(a.saved_bytes)} leave the "
        f"device; "
        f"{fmt.ratio(a.hideable_ratio)} of the copy hides behind this model's forward (bound by "
        f"width alone: {fmt.ratio(a.bound_ratio)}); all of it would at "
        f"{fmt.rate(a.link_for_all_bytes_per_s)}",
    )


def _figure(result: Offload) -> Figure:
    bars = {
        v.name + ("" if v.fits else " (does not fit)"): {
            "forward": v.forward_s,
            "backward": v.backward_s,
            "optimizer": v.optimizer_s,
            "parameters return": v.step_s - v.forward_s - v.backward_s - v.optimizer_s,
        }
        for v in result.variants
    }
    figure = stacked_figure(bars, x="seconds per step")
    return Figure(name="offload", title="Time of a step", figure=figure)
