"""Optimizer, parameters or activations on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from chopper import wording as fmt
from chopper.analyzers.estimates import Option
from chopper.analyzers.estimates.offload import Machine, Offload, offload
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.hardware.devices import HostRates, host_link_of, host_rates_of
from chopper.hardware.devices import named as device_named
from chopper.models.architectures import named
from chopper.models.configs import read_config
from chopper.quantities import between
from chopper.reports.estimate import estimate_page, listing, stacked_figure
from chopper.reports.page import Column, Figure, Page, Section


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
        granule_bytes=None if link is None else int(link.granule_bytes.value or 0) or None,
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
            *_accesses(result),
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
    small = result.tokens_for_small_overhead
    cheap = f"; offload costs less than 5 % from {fmt.count(small)}" if small else ""
    yield (
        f"gradients hide behind backward from {fmt.count(result.tokens_to_hide_gradients)} tokens "
        f"per rank and step{cheap}"
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


def _accesses(result: Offload) -> Iterator[Section]:
    machine = result.machine
    if not result.accesses:
        return
    how = "in place, by the line" if machine.coherent else "by pages that migrate on a fault"
    yield listing(
        "Unified memory: what the device reads of the host's, without a copy",
        result.accesses,
        {
            "access": "pattern",
            "used": "used_bytes",
            "moved": "moved_bytes",
            "useful, at most": lambda a: fmt.rate(a.useful_bytes_per_s),
        },
        note=f"read {how}; "
        + ("" if machine.coherent else "what migrated is then the device's, if there is room; ")
        + "bandwidth alone: the time of a fault or of a miss is not in it",
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
