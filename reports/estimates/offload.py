"""Offload to the host as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.reports.estimates.parts import estimate_page, listing, stacked_figure
from chopper.reports.page import Column, Figure, Page, Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.analyzers.estimates.offload import Offload


def page(result: Offload) -> Page:
    """Return variants of optimizer offload, and offload of activations."""
    fits = [v for v in result.variants if v.fits]
    headline = "No variant's states fit."
    if fits:
        best = min(fits, key=lambda v: v.step_s)
        slower = best.step_s / result.variants[0].step_s
        headline = f"Fastest that fits: {best.name}, {slower:.2f}× the step without offload."
    return estimate_page(
        result,
        title="Offload to the host",
        headline=headline,
        facts=_facts(result),
        figures=(_figure(result),),
        sections=(_variants(result), _activations(result)),
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
    host = "as much as is needed"
    if machine.host_memory_bytes is not None:
        host = f"{fmt.bytes_(machine.host_memory_bytes)} in all"
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
    device_only = result.machine.host_memory_bytes is None
    return listing(
        "States on the device and on the host",
        result.variants,
        {
            Column("variant", kind="prose"): lambda v: v.name,
            "step": lambda v: fmt.duration(v.step_s * 1e9),
            "waits for link": lambda v: fmt.duration(v.exposed_transfer_s * 1e9),
            "over link": lambda v: fmt.bytes_(v.link_bytes),
            "device": lambda v: fmt.bytes_(v.device_bytes),
            "host": lambda v: fmt.bytes_(v.host_bytes),
            "fits": lambda v: "yes" if v.fits else "no",
            "at most": lambda v: f"{v.largest_parameters_count / 1e9:.3g} B",
        },
        note="device: states of one rank; host: of the node; at most: parameters whose states fit"
        + (" the device" if device_only else ""),
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
