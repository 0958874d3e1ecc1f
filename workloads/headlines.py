"""The numbers that the reference workloads exist to show, drawn from what they measured.

Each function takes an experiment and returns its headlines; what was not measured says why. Survey
and primary source are quoted as they stand, also where they disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

from chopper.experiments.results import Exhibit, Experiment, Headline, Labels, Row, between, line
from chopper.workloads import offload_tables, places
from chopper.workloads.machine_headlines import collectives, gemm, membw

if TYPE_CHECKING:
    from chopper.statistics import Estimate

NO_LOSS = "{} has no loss at some steps: it was no number, or the run ended before"


def interconnect(experiment: Experiment) -> tuple[Headline, ...]:
    """The line T = T_c + V/B through the variants, and the same law at the survey's rates."""
    slow, step_s = [], []
    for variant in experiment.variants:
        step, rate = (
            experiment.find(name, variant) for name in ("median_step_ns", "link_bytes_per_s")
        )
        for time_ns in () if step is None else step.values:
            slow.append(0.0 if rate is None else 1 / rate.estimate.value)
            step_s.append(time_ns / 1e9)
    out = []
    if len(set(slow)) >= 3:
        fixed_s, volume_bytes, ci95, r2 = line(slow, step_s)
        beside = [
            f"{what} {row.estimate.value / 1e6:.1f} MB"
            for what, name in (
                ("sent, as the kernel counts it,", "sent_bytes"),
                ("a ring's", "ring_bytes"),
                ("a ring's that reduces and scatters by all-reduce, as gloo does,", "gloo_bytes"),
            )
            if (row := experiment.find(name, experiment.variants[-1])) is not None
        ]
        out.append(
            Headline(
                system="Interconnect",
                claim="bytes per step and rank from the fit T = T_c + V/B",
                survey=None,
                primary=None,
                unit="MB",
                ours=volume_bytes / 1e6,
                ci95=ci95 and (ci95[0] / 1e6, ci95[1] / 1e6),
                configuration=f"T_c {fixed_s:.2f} s, R² {r2:.4f}; " + "; ".join(beside),
            )
        )
    slowest, fastest = experiment.variants[-1], experiment.variants[0]
    ratio = experiment.ratio("median_step_ns", slowest, fastest)
    if ratio is not None and slowest != fastest:
        out.append(
            Headline(
                system="Interconnect",
                claim=f"step over {slowest} against {fastest}",
                survey="39.8 s/step over 10 GbE, 4.4 s/step over InfiniBand: 9×",
                primary=None,
                unit="×",
                ours=ratio.value,
                ci95=ratio.ci95,
                configuration="another model, another ratio of computation to bytes",
            )
        )
    return (*out, *interconnect_model())


def interconnect_model() -> tuple[Headline, ...]:
    """The survey's rows by T = T_c + V/B; they need no measurement."""
    # n = 16 ranks, 12e9 weights of 2 bytes, all-reduced by a ring; T_c from the faster row.
    volume_bytes = 2 * 15 / 16 * 2 * 12e9
    return tuple(
        Headline(
            system="Interconnect",
            claim=f"12B fine-tune at {bytes_per_s / 1e9:g} GB/s by T = 4.29 s + 45 GB / B",
            survey=said,
            primary=None,
            unit="s",
            ours=4.29 + volume_bytes / bytes_per_s,
            stated=stated_s,
            configuration="model, not measured: consistent with the survey's rows, assuming two "
            "nodes of 8, bf16 gradients all-reduced by a ring, nothing overlapped",
        )
        for bytes_per_s, said, stated_s in (
            (1.25e9, "39.8 s/step over 10 GbE", 39.8),
            (400e9, "4.4 s/step over 8 × 400 Gb/s", 4.4),
        )
    )


def overlap(experiment: Experiment) -> tuple[Headline, ...]:
    """Overlapped against one after the other, against the library, and without the swizzle."""
    out = []
    claims = (
        ("chunked", "sequential", "overlapped against one after the other, bounded by 2×", None),
        (
            "chunked",
            "library",
            "overlapped against the library's collective",
            "1.09–44.97× over PyTorch with NCCL; 1.04–1.22× realistic",
        ),
        ("chunked", "unswizzled", "swizzled against the order of the rows", None),
        ("symmetric", "sequential", "torch's fused operator against one after the other", None),
        ("symmetric", "library", "torch's fused operator against the library's collective", None),
        ("triton", "sequential", "one kernel with flags against one after the other", None),
        ("triton", "triton-unswizzled", "one kernel, swizzled against the order of the rows", None),
    )
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        for variant, against, claim, said in claims:
            found = experiment.ratio("time_ns", against, variant, operation=operation)
            bound = experiment.find("bound_over_time_ratio", variant, operation=operation)
            alone = [
                experiment.find(name, variant, operation=operation)
                for name in ("compute_ns", "transfer_ns")
            ]
            if found is None or bound is None or None in alone:
                continue
            parts_ns = [row.estimate.value for row in alone if row is not None]
            most = sum(parts_ns) / max(parts_ns)
            busy = experiment.find("cores_busy_ratio", variant, operation=operation)
            kept = f", its cores busy for {busy.estimate.value:.0%} of the time" if busy else ""
            out.append(
                Headline(
                    system="Triton-distributed",
                    claim=f"{operation.replace('_', ' ')}: {claim}",
                    survey=said,
                    primary=said and said.partition(";")[0],
                    unit="×",
                    ours=found.value,
                    ci95=found.ci95,
                    configuration=f"{bound.estimate.value:.0%} of max(T_compute, T_transfer) + first "
                    f"chunk{kept}; hiding all of the shorter gives {most:.2f}×, 2× at the very most; "
                    f"{_way(experiment, variant)}",
                )
            )
    return tuple(out)


def _way(experiment: Experiment, variant: str) -> str:
    """What the chunks travelled over."""
    plan = experiment.plan
    if plan.ranks == 1:
        return f"one {plan.device}, shards from pinned host memory"
    ranks = f"{plan.ranks} ranks on {plan.device}"
    rate = experiment.find("link_bytes_per_s", variant)
    if rate is None:
        return f"{ranks}, no shaped link"
    return f"{ranks}, each end of their link sends at most {rate.estimate.value / 1e6:g} MB/s"


def fsdp(experiment: Experiment) -> tuple[Headline, ...]:
    """What the published characterization says of FSDP1 and FSDP2, for the machine at hand."""
    if not {"fsdp1", "fsdp2"} <= set(experiment.variants):
        return ()
    where = f"{experiment.plan.ranks} ranks on {experiment.plan.device}"
    out = []
    faster = experiment.ratio("step_ns", "fsdp1", "fsdp2")
    if faster is not None:
        out.append(
            Headline(
                system="FSDP",
                claim="step of fsdp1 over that of fsdp2",
                survey=None,
                primary=None,
                unit="×",
                ours=faster.value,
                ci95=faster.ci95,
                configuration=where,
            )
        )
    apart, why = _losses(experiment)
    out.append(
        Headline(
            system="FSDP",
            claim="largest difference between their losses at a step",
            survey=None,
            primary=None,
            unit="",
            ours=apart,
            why=why,
            configuration=where,
        )
    )
    said = (
        "FSDP2: deterministic memory, about 20 % higher and steadier clocks",
        "memory determinism (FSDP2) gives higher, steadier clocks",
    )
    for claim, view, column in (
        ("steps' allocations alike", "memory_determinism", "similarity_ratio"),
        ("deviation of the peak over its mean", "memory_determinism", "peak"),
        ("copies in and out of the step", "", "compute.fsdp_copy"),
    ):
        one, two = (
            _means(experiment, view, column, v) if view else experiment.share(column, v)
            for v in ("fsdp1", "fsdp2")
        )
        found = between(two, one)
        out.append(
            Headline(
                system="FSDP",
                claim=f"{claim}, fsdp2 less fsdp1",
                survey=said[0] if view else None,
                primary=said[1] if view else None,
                unit="points",
                ours=None if found is None else 100 * found.value,
                ci95=None
                if found is None or found.ci95 is None
                else (100 * found.ci95[0], 100 * found.ci95[1]),
                why="" if found else "--allocations no" if view else "nothing was attributed",
                configuration=f"{where}; fsdp1 {fmean(one):.2%}, fsdp2 {fmean(two):.2%}"
                if found
                else where,
            )
        )
    one, two = (_means(experiment, "clock_by_step", "clock_mean_hz", v) for v in ("fsdp1", "fsdp2"))
    clock = between(two, one, ratio=True)
    out.append(
        Headline(
            system="FSDP",
            claim="SM clock, fsdp2 over fsdp1",
            survey=said[0],
            primary=said[1],
            unit="×",
            ours=clock.value if clock else None,
            ci95=clock.ci95 if clock else None,
            stated=1.2,
            why="" if clock else "no clock was sampled",
            configuration=f"{where}; fsdp1 {fmean(one) / 1e6:.0f} MHz, fsdp2 {fmean(two) / 1e6:.0f} MHz"
            if clock
            else where,
        )
    )
    return tuple(out)


def dataloader(experiment: Experiment) -> tuple[Headline, ...]:
    """Loading by actors against the tuned DataLoader, and each of its parts alone."""
    said = experiment.plan.options
    ranks = f"{experiment.plan.ranks} ranks"
    mixture = f"{said['sources']} sources of {said['state']} MB"
    where = f"{mixture}, storage {said['latency']} ms (simulated)"
    usual, tuned = (f"{ranks} × {said[name]} workers, {where}" for name in ("workers", "tuned"))
    # Of a sweep, the point that the option names.
    at = {} if said["sweep"] == "none" else {"latency_ms": said["latency"]}
    survey = "4.5 % (four of its texts), 4.5×"
    rows = (
        (
            "tuned",
            "samples per second, balanced actors over the tuned DataLoader",
            survey,
            "≤3.63× iteration time",
            4.5,
            experiment.ratio("samples_per_s", "balanced", "tuned", **at),
            tuned,
        ),
        (
            "loader",
            "samples per second, balanced actors over the DataLoader as people use it",
            survey,
            "≤3.63× iteration time",
            4.5,
            experiment.ratio("samples_per_s", "balanced", "loader", **at),
            usual,
        ),
        (
            "concurrent",
            "samples per second, balanced actors over a DataLoader that reads a batch at once",
            None,
            None,
            None,
            experiment.ratio("samples_per_s", "balanced", "concurrent", **at),
            usual,
        ),
        (
            "tuned",
            "loader memory, the tuned DataLoader over balanced actors with all of Ray",
            "13.5×",
            "≤13.5×",
            13.5,
            experiment.ratio("loader_memory_bytes", "tuned", "balanced", **at),
            tuned,
        ),
        (
            "loader",
            "loader memory, the DataLoader as people use it over balanced actors with all of Ray",
            "13.5×",
            "≤13.5×",
            13.5,
            experiment.ratio("loader_memory_bytes", "loader", "balanced", **at),
            usual,
        ),
    )
    out = [
        Headline(
            system="MegaScale-Data",
            claim=claim,
            survey=surveyed,
            primary=primary,
            unit="×",
            ours=None if found is None else found.value,
            ci95=None if found is None else found.ci95,
            stated=stated,
            why="" if found is not None else "one of the two was not measured",
            configuration=configuration,
        )
        for variant, claim, surveyed, primary, stated, found, configuration in rows
        if {variant, "balanced"} <= set(experiment.variants)
    ]
    if "balanced" not in experiment.variants:
        return ()
    balanced = experiment.find("as_drawn_over_this_ratio", "balanced", method="kk", virtual_ranks=8)
    asked = [
        experiment.find("batch_latency_ns", "balanced", reader=reader, latency_ms=10)
        for reader in ("actors", "this process")
    ]
    alone = (
        (
            "balancing alone: what the slowest of 8 ranks computes, as drawn over Karmarkar–Karp",
            "≤4.54×, mean 1.77×",
            1.77,
            None if balanced is None else balanced.estimate,
            f"documents 4 times as long as those loaded: median {4 * int(said['tokens'] or 0)}, "
            f"at most {4 * int(said['longest'] or 0)} tokens; each computed by itself",
        ),
        (
            "disaggregation alone: a batch's latency through actors over in the process, "
            "storage 10 ms",
            "about 1.1×",
            1.1,
            _of_the_same(*asked),
            f"{ranks}, {mixture}; nothing loaded ahead, pairs of the same batches",
        ),
    )
    for claim, primary, stated, found, configuration in alone:
        out.append(
            Headline(
                system="MegaScale-Data",
                claim=claim,
                survey=None,
                primary=primary,
                unit="×",
                ours=None if found is None else found.value,
                ci95=None if found is None else found.ci95,
                stated=stated,
                why="" if found is not None else "balanced was not measured",
                configuration=configuration,
            )
        )
    return tuple(out)


def _of_the_same(over: Row | None, under: Row | None) -> Estimate | None:
    """How many times one row's values the other's are, which were measured of the same batches:
    between pairs, what makes one batch slower than the next is in neither.
    """
    if over is None or under is None or len(over.values) != len(under.values):
        return None
    ratios = [o / u for o, u in zip(over.values, under.values, strict=True)]
    return between(ratios, [1.0] * len(ratios), ratio=True)


def _losses(experiment: Experiment) -> tuple[float | None, str]:
    """Largest difference between the variants' losses at a step; or why there is none."""
    of: dict[str, dict[Labels, float]] = {v: {} for v in experiment.variants}
    for row in experiment.rows:
        if row.measure == "loss":
            of[row.variant][row.labels] = row.estimate.value
    steps = set().union(*of.values())
    for variant, losses in of.items():
        if not losses or losses.keys() != steps:
            return None, NO_LOSS.format(variant)
    return max(max(at) - min(at) for at in ([o[s] for o in of.values()] for s in steps)), ""


def _means(experiment: Experiment, view: str, column: str, variant: str) -> list[float]:
    """Of each repetition, the mean of a view's column over ranks; those that measured it."""
    out = []
    for rows in experiment.view(view, variant):
        found = []
        for row in rows:
            if column == "peak":
                if row["peak_mean_bytes"] and row["peak_std_bytes"] is not None:
                    found.append(row["peak_std_bytes"] / row["peak_mean_bytes"])
            elif row.get(column) is not None:
                found.append(row[column])
        if found:
            out.append(fmean(found))
    return out


def offload(experiment: Experiment) -> tuple[Headline, ...]:
    """Losses alike, states as ZeRO's formulas say, the host's update, the largest model."""
    variants = [v for v in experiment.variants if v in places.PLACES]
    where = f"{experiment.plan.ranks} ranks on {experiment.plan.device}, float32"
    out = []
    far = offload_tables.worst_loss_ratio(experiment, variants)
    if far is not None:
        out.append(
            Headline(
                system="ZeRO, offload",
                claim="largest relative difference of a variant's loss from ddp's at any step",
                survey=None,
                primary=None,
                unit="",
                ours=far[1] if math.isfinite(far[1]) else None,
                why="" if math.isfinite(far[1]) else NO_LOSS.format(far[0]),
                configuration=f"{far[0]}; {where}; tolerance {offload_tables.LOSS_TOLERANCE:g}: "
                + ("kept" if far[1] <= offload_tables.LOSS_TOLERANCE else "exceeded"),
            )
        )
    base = experiment.plan.baseline
    held = {
        variant: [
            offload_tables.totals(experiment, f"{what}_bytes", variant, places.STATES)
            for what in ("measured", "predicted")
        ]
        for variant in variants
    }
    ratios = {v: over for v, of in held.items() if (over := between(*of, ratio=True)) is not None}
    if ratios:
        furthest = max(ratios, key=lambda v: abs(math.log(ratios[v].value)))
        over, (found, said) = ratios[furthest], held[furthest]
        out.append(
            Headline(
                system="ZeRO, offload",
                claim="weights, gradients and optimizer per rank, measured over predicted, in the "
                "variant that is furthest off",
                survey=None,
                primary=None,
                unit="×",
                ours=over.value,
                ci95=over.ci95,
                configuration=f"{furthest}: {fmean(found) / 1e6:.1f} MB of {fmean(said) / 1e6:.1f}; "
                f"{len(ratios)} variants; {where}",
            )
        )
    lies = {
        v: offload_tables.totals(experiment, "measured_bytes", v, places.CATEGORIES, "device")
        for v in variants
    }
    for variant in variants:
        less = between(lies[variant], lies.get(base or "", ()), ratio=True)
        if less is not None and variant != base:
            host = offload_tables.total(
                experiment, "measured_bytes", variant, places.CATEGORIES, "host"
            )
            out.append(
                Headline(
                    system="ZeRO, offload",
                    claim=f"{variant}: memory on the device, of {base}'s",
                    survey=None,
                    primary=None,
                    unit="×",
                    ours=less.value,
                    ci95=less.ci95,
                    configuration=f"{fmean(lies[variant]) / 1e6:.1f} MB and {(host or 0) / 1e6:.1f} on the "
                    f"host, between backward and update; {where}",
                )
            )
    for variant in variants:
        slower = experiment.ratio("median_step_ns", variant, base) if base else None
        bound = experiment.find("update_over_bound_ratio", variant)
        if slower is not None and variant != base:
            out.append(
                Headline(
                    system="ZeRO, offload",
                    claim=f"{variant}: step over that of {base}",
                    survey=None,
                    primary=None,
                    unit="×",
                    ours=slower.value,
                    ci95=slower.ci95,
                    configuration=where,
                )
            )
        if bound is not None and "optimizer" in places.PLACES[variant].on_host:
            out.append(
                Headline(
                    system="ZeRO, offload",
                    claim=f"{variant}: the optimizer's step on the host over its DRAM bound",
                    survey=None,
                    primary=None,
                    unit="×",
                    ours=bound.estimate.value,
                    ci95=bound.estimate.ci95,
                    configuration=f"28 bytes per updated weight over triad's bandwidth; {where}",
                )
            )
    for variant, claim in (
        ("zero2-offload", "13 B on one V100 of 32 GB (1.4 B without)"),
        ("zero3-param-offload", "40 B on one V100 of 32 GB"),
    ):
        if variant not in variants or not experiment.plan.options.get("fits"):
            continue
        label, capacity = places.capacity_bytes(str(experiment.plan.options["fits"]))
        around = str(experiment.plan.options.get("host") or "1500GB")
        largest = places.largest(
            places.PLACES[variant], capacity, 1, host=places.host_bytes(around), checkpoint=True
        )
        out.append(
            Headline(
                system="ZeRO, offload",
                claim=f"{variant}: largest model on one {label}",
                survey=None,
                primary=claim,
                unit="B parameters",
                ours=None if largest is None else largest.parameters_count / 1e9,
                why="not one layer fits" if largest is None else "",
                configuration="estimated, not measured: layers of llama3-8b, mixed precision, batch 1, "
                f"{places.LARGEST_SEQUENCE} tokens, checkpointing"
                + (
                    f"; {largest.host_bytes / 1e9:,.0f} GB on a host of {around}" if largest else ""
                ),
            )
        )
    return tuple(out)


HEADLINES: dict[str, Callable[[Experiment], tuple[Headline, ...]]] = {
    "collectives": collectives,
    "gemm": gemm,
    "membw": membw,
    "fsdp": fsdp,
    "interconnect": interconnect,
    "offload": offload,
    "overlap": overlap,
    "dataloader": dataloader,
}
"""Workload → what it shows."""

MODELS: dict[str, Callable[[], tuple[Headline, ...]]] = {"interconnect": interconnect_model}
"""Workload → what is left of its headlines where it cannot run."""

EXHIBITS: dict[str, Callable[[Experiment], tuple[Exhibit, ...]]] = {
    "offload": offload_tables.exhibits,
}
"""Workload → its own tables."""
