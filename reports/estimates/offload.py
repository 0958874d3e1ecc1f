"""Offload to the host as a page."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.analyzers.estimates.offload import Offload
from chopper.reports.estimates.page import Grid, Page, Plot, stacked_figure


def page(found: Offload) -> Page:
    """Variants of optimizer offload, and offload of activations."""
    base = found.variants[0]
    fits = [v for v in found.variants if v.fits]
    best = min(fits, key=lambda v: v.step_s) if fits else None
    variants = Grid(
        title="States on the device and on the host",
        columns=(
            "variant",
            "step",
            "waits for link",
            "over link",
            "device",
            "host",
            "fits",
            "at most",
        ),
        rows=[
            (
                v.name,
                fmt.duration(v.step_s * 1e9),
                fmt.duration(v.exposed_transfer_s * 1e9),
                fmt.bytes_(v.link_bytes),
                fmt.bytes_(v.device_bytes),
                fmt.bytes_(v.host_bytes),
                "yes" if v.fits else "no",
                f"{v.largest_parameters_count / 1e9:.3g} B",
            )
            for v in found.variants
        ],
        note="device: states of one rank; host: of the node; at most: parameters whose states fit"
        + (" the device" if found.machine.host_memory_bytes is None else ""),
    )
    a = found.activations
    activations = Grid(
        title="Activations: keep, recompute or offload",
        columns=("", "step", "against keeping"),
        rows=[
            (name, fmt.duration(s * 1e9), f"{s / a.kept_s:.2f}×")
            for name, s in (
                ("kept on the device", a.kept_s),
                ("recomputed (full checkpointing)", a.recomputed_s),
                ("offloaded, the program waits (save_on_cpu)", a.synchronous_s),
                ("offloaded, beside compute", a.overlapped_s),
            )
        ],
        note=f"{fmt.bytes_(a.layer_bytes)} per layer, {fmt.bytes_(a.saved_bytes)} leave the device; "
        f"{fmt.ratio(a.hideable_ratio)} of the copy hides behind this model's forward (bound by "
        f"width alone: {fmt.ratio(a.bound_ratio)}); all of it would at "
        f"{fmt.rate(a.link_for_all_bytes_per_s)}",
    )
    small = found.tokens_for_small_overhead
    fewer = found.active_parameters_count < found.parameters_count
    active = f", {found.active_parameters_count / 1e9:.2f} B active" if fewer else ""
    facts = (
        f"{found.model} ({found.parameters_count / 1e9:.2f} B parameters{active}) on {found.machine.device}, "
        f"{fmt.plural(found.ranks_count, 'rank')}, {fmt.count(found.tokens_count)} tokens per rank and step",
        f"link {fmt.rate(found.machine.to_device_bytes_per_s)} to the device, "
        f"{fmt.rate(found.machine.to_host_bytes_per_s)} back: {found.machine.source}; host memory "
        f"{fmt.rate(found.machine.host_bytes_per_s)} for each rank, "
        + (
            "as much as is needed"
            if found.machine.host_memory_bytes is None
            else f"{fmt.bytes_(found.machine.host_memory_bytes)} in all"
        ),
        f"gradients hide behind backward from {fmt.count(found.tokens_to_hide_gradients)} tokens per "
        "rank and step"
        + (f"; offload costs less than 5 % from {fmt.count(small)}" if small else ""),
        f"activations: {a.best} is faster",
    )
    rows = {
        v.name + ("" if v.fits else " (does not fit)"): {
            "forward": v.forward_s,
            "backward": v.backward_s,
            "optimizer": v.optimizer_s,
            "parameters return": v.step_s - v.forward_s - v.backward_s - v.optimizer_s,
        }
        for v in found.variants
    }
    said = (
        f"fastest that fits: {best.name}, {best.step_s / base.step_s:.2f}× the step without offload"
        if best
        else "no variant's states fit"
    )
    return Page(
        title="Offload to the host",
        verdict=f"{said[:1].upper()}{said[1:]}.",
        facts=facts,
        grids=(variants, activations),
        plots=(
            Plot(
                name="offload",
                title="Time of a step",
                figure=stacked_figure(rows, x="seconds per step"),
            ),
        ),
        assumptions=found.assumptions,
    )
