"""Train with the memory of a step in one place or another, and measure what that costs.

    chopper bench offload
    chopper bench offload --variants all
    chopper bench offload --variants ddp,zero3,zero3-param-offload -- --sequence 256
    chopper bench offload --ranks 8 -- --size 1b               # on GPUs

    chopper bench offload --ranks 1 --steps 1 --repeats 1 --variants streamed -- --size 13b \\
        --dtype bfloat16 --optimizer sgd --batch 1 --sequence 4 --device-memory 8GB

One model, one corpus, one seed; the losses of all variants (PLACEMENTS) agree.
Stages partition, offload moves: they are independent, but offloading weights needs stage 3. In
float32, variants can be compared to the last digits: 4 bytes each for weight and gradient, 8 for
AdamW's moments, and 4 more where DeepSpeed keeps a second copy of the weights it updates.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    Bound,
    Needs,
    Option,
    Variant,
    Workload,
    as_program,
    changed,
)
from chopper.experiments.results import Experiment, Headline, ratio
from chopper.wording import plural
from chopper.workloads import training
from chopper.workloads.placement import (
    CATEGORIES,
    LARGEST_SEQUENCE,
    PLACEMENTS,
    STATES,
    capacity_bytes,
    disk_bytes,
    host_bytes,
    largest_of,
    scratch_of,
    widths_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chopper.workloads.offload_trainers import Trainer
    from chopper.workloads.placement import Placement
    from chopper.workloads.unified_memory import Managed

_TRAINING = {
    option.name: option
    for option in changed(training.OPTIONS, steps=10, batch=2, sequence=128)
    if option.name != "checkpoint"
}
BYTES_PER_UPDATE = {"adamw": 7, "sgd": 3}
"""Values read and written per weight: weight, gradient, two moments; weight, moments."""

WORKLOAD = Workload(
    name="offload",
    summary="one training job with its memory placed in twelve ways: ZeRO's stages, optimizer, "
    "weights and activations in host memory, layers on disk, checkpointing, unified memory; "
    "predicted and measured, what each costs, and the largest model that fits",
    options=(
        *(option for name, option in _TRAINING.items() if name != "dtype"),
        Option(
            "device-memory",
            "budget of each device (32GB, or a device's name): variants that need more are left "
            "out; GPUs allocate no more",
            None,
        ),
        Option(
            "fits",
            "device or memory size (24GB) for which the largest model is estimated",
            "v100-sxm2-32gb",
        ),
        Option("host", "host memory that the largest model may use", "1500GB"),
        Option(
            "dtype",
            "data type of the computation; in bfloat16, the streamed variant keeps all in it",
            "float32",
            choices=("float32", "bfloat16"),
        ),
        Option(
            "optimizer",
            "adamw, or sgd without momentum, which keeps no state",
            "adamw",
            choices=("adamw", "sgd"),
        ),
        Option("scratch", "directory for the layers of the streamed variant (else TMPDIR)", None),
    ),
    variants=tuple(
        Variant(name, of.summary, needs_gpu=of.overlapped, default=of.default)
        for name, of in PLACEMENTS.items()
    ),
    baseline="ddp",
    measures=True,
    bounds=(
        Bound(
            measure="update_over_bound_ratio",
            least=1.0,
            why="no update is quicker than its bytes pass through DRAM at triad's rate; one that "
            "fits into a cache is no update from DRAM (--size)",
        ),
    ),
    repeats=3,
    seconds=100,
    position=6,
)

TRACED = (2, 5)
"""Steps that are traced; those after them are timed."""
STREAM_BYTES = 64 << 20
"""Size of each of triad's arrays: more than caches hold."""
STREAM_ROUNDS = 5
MIGRATED_BYTES = 256 << 20


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Memory of the most demanding variant, with its offloaded part on CPUs."""
    from chopper.workloads import unified_memory
    from chopper.workloads.llama import SIZES
    from chopper.workloads.offload_memory import estimated

    capacity_bytes(args.fits)
    host_bytes(args.host)
    absent = dict.fromkeys(
        (v for v in args.variants if PLACEMENTS[v].managed), unified_memory.problem()
    )
    if importlib.util.find_spec("deepspeed") is None:
        lacking = "needs deepspeed, which is not installed: pip install deepspeed"
        absent |= dict.fromkeys((v for v in args.variants if PLACEMENTS[v].deepspeed), lacking)
    budget = args.device_memory and capacity_bytes(args.device_memory, "device-memory")[1]
    sizes_bytes = {}
    for variant in (v for v in args.variants if absent.get(v) is None):
        placement = PLACEMENTS[variant]
        memory = estimated(args, placement, ranks, device)
        if budget and memory.peak_bytes > budget:
            absent[variant] = (
                f"needs about {memory.peak_bytes / 1e9:.1f} GB of each device, --device-memory "
                f"allows {budget / 1e9:.1f} GB"
            )
            continue
        if placement.on_disk and (problem := disk_problem(args, ranks)) is not None:
            absent[variant] = problem
            continue
        offloaded_bytes = memory.host_bytes if device == "cpu" else 0
        sizes_bytes[variant] = memory.peak_bytes + offloaded_bytes
    parameters = SIZES[args.size].parameters_count
    most = max(sizes_bytes, key=lambda v: sizes_bytes[v], default="ddp")
    return Needs(
        memory_bytes=sizes_bytes.get(most, 0),
        what=f"{most} with --size {args.size} ({parameters / 1e9:.2f} B parameters, "
        f"batch {args.batch}, sequence {args.sequence})",
        remedy="choose a smaller size, batch or sequence, or --variants that need less memory",
        absent={v: why for v, why in absent.items() if why is not None},
    )


def disk_problem(args: argparse.Namespace, ranks: int) -> str | None:
    """Name what the directory of the streamed variant lacks, or None."""
    from chopper.workloads.llama import SIZES

    config, directory = SIZES[args.size], scratch_of(args.scratch)
    if not directory.is_dir():
        raise UsageError(f"--scratch {directory}: is not a directory, expected an existing one")
    width = widths_of(PLACEMENTS["streamed"], args.dtype, args.optimizer)
    layers_count = config.parameters_count - config.outer_count
    needed = ranks * disk_bytes(PLACEMENTS["streamed"], width, layers_count)
    free = shutil.disk_usage(directory).free
    if needed <= free:
        return None
    return (
        f"needs {needed / 1e9:.1f} GB on disk, {directory} has {free / 1e9:.1f} GB: choose another "
        "--scratch, --dtype or --optimizer"
    )


def main() -> None:
    """Join the other ranks, train, leave."""
    import torch

    from chopper.workloads.offload_trainers import built
    from chopper.workloads.ranks import joined

    # DeepSpeed calls what torch renamed, once per call.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    args = WORKLOAD.parse()
    placement = PLACEMENTS[args.variant]
    with joined(args.device, prog="offload") as device, memory_of(placement, device) as shared:
        if args.device_memory and device.type == "cuda":
            _, budget = capacity_bytes(args.device_memory, "device-memory")
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
        trainer = built(args, device)
        traced = TRACED if args.steps > TRACED[1] + 1 else None
        with chopper.profile(args.output, steps=traced, memory=args.allocations == "yes") as prof:
            train(args, trainer, device, prof)
            if shared is not None:
                keep_unified(prof, shared, device)


@contextlib.contextmanager
def memory_of(placement: Placement, device: torch.device) -> Iterator[Managed | None]:
    """Unified memory for the variant that wants it, else torch's own."""
    from chopper.workloads import unified_memory

    if not placement.managed:
        yield None
        return
    try:
        with unified_memory.pool(device) as shared:
            yield shared
    except unified_memory.Unavailable as exc:
        raise SystemExit(f"offload: {exc}") from exc


def train(
    args: argparse.Namespace, trainer: Trainer, device: torch.device, prof: chopper.Profile
) -> None:
    """Train ``args.steps`` steps; rank 0 keeps what they took, and where the memory was."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from chopper.hardware.measure import wait
    from chopper.workloads.llama import SIZES
    from chopper.workloads.offload_memory import Saver, UpdateClock, keep_memory

    placement = PLACEMENTS[args.variant]
    saving = Saver(placement, device)
    clock = UpdateClock(trainer.optimizer, device)
    losses: list[Tensor] = []
    periods_ns: list[int] = []
    updates_ns: list[int] = []
    begin_ns = time.perf_counter_ns()
    for step, (tokens, labels) in enumerate(prof.watch(training.batches(args, device))):
        clock.running, clock.taken_ns = step >= TRACED[1] or args.steps <= TRACED[1], 0
        tokens, labels = tokens.to(device), labels.to(device)
        if step == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the model was made whole at first
        with saving.forward():
            logits = trainer.forward(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        trainer.backward(loss)
        losses.append(loss.detach())
        del loss
        if step == args.steps - 1:
            keep_memory(prof, args, trainer, saving, device)
        trainer.update()
        wait(device)
        prof.step(tokens=tokens.numel())
        periods_ns.append(time.perf_counter_ns() - begin_ns)
        updates_ns.append(clock.taken_ns)
        begin_ns = time.perf_counter_ns()
    # All ranks at once, as they update: they share the memory's bandwidth.
    dist.barrier()
    triad_bytes_per_s = memory_bytes_per_s(device, placement)
    if dist.get_rank():
        return
    for step, value in enumerate(torch.stack(losses).tolist()):
        prof.measure("loss", value, step=step)
    # Traced steps are slow, the first makes the optimizer's states, the last's memory is counted.
    timed = slice(TRACED[1], -1) if args.steps > TRACED[1] + 1 else slice(1, None)
    timed_ns = periods_ns[timed] or periods_ns
    updated_ns = statistics.median(updates_ns[timed] or updates_ns)
    period_ns = statistics.median(timed_ns)
    prof.measure("median_step_ns", period_ns)
    if len(timed_ns) > 1:
        prof.measure("step_cv_ratio", statistics.stdev(timed_ns) / statistics.fmean(timed_ns))
    prof.measure("parameters_count", SIZES[args.size].parameters_count)
    prof.measure("update_ns", updated_ns)
    value_bytes = 2 if placement.on_disk and args.dtype == "bfloat16" else 4
    count = SIZES[args.size].parameters_count
    updated = count / dist.get_world_size() if placement.stage else count
    update_bytes = updated * BYTES_PER_UPDATE[args.optimizer] * value_bytes
    bound_ns = update_bytes / triad_bytes_per_s * 1e9
    prof.measure("update_bound_ns", bound_ns)
    prof.measure("update_over_bound_ratio", updated_ns / bound_ns)
    prof.measure("triad_bytes_per_s", triad_bytes_per_s)
    print(f"{args.variant}: {period_ns / 1e9:.3f} s per step", flush=True)


def memory_bytes_per_s(device: torch.device, placement: Placement) -> float:
    """Bandwidth of the memory that holds the optimizer's states: triad's, or triad's in place.

    Triad's stores may read what they only write, which STREAM does not count; an update, as triad
    in place, writes what it has read.
    """
    import torch

    from chopper.hardware.measure import Bench

    where = torch.device("cpu") if "optimizer" in placement.on_host else device
    a, b, c = (torch.ones(STREAM_BYTES // 4, device=where) for _ in range(3))
    bench: Bench[str] = Bench(where)
    bench.add("triad", lambda: torch.add(b, c, alpha=3.0, out=a))
    bench.add("in place", lambda: torch.add(a, b, alpha=3.0, out=a))
    times_s = bench.run(STREAM_ROUNDS)
    return max(3 * STREAM_BYTES / statistics.median(found_s) for found_s in times_s.values())


def keep_unified(prof: chopper.Profile, shared: Managed, device: torch.device) -> None:
    """Measure how much was managed memory, and how fast its pages come to the device."""
    import torch.distributed as dist

    from chopper.workloads import unified_memory

    if dist.get_rank():
        return
    prof.measure("managed_bytes", shared.peak_bytes)
    for pattern, rate in unified_memory.migration_bytes_per_s(device, MIGRATED_BYTES).items():
        prof.measure("migration_bytes_per_s", rate, pattern=pattern)


def totals(
    experiment: Experiment,
    measure: str,
    variant: str,
    categories: Iterable[str],
    location: str = "",
) -> tuple[float, ...]:
    """Sum a measure over places and categories, per repetition; empty where it was not measured."""
    values_by_row = [
        row.values
        for row in experiment.rows
        if row.measure == measure
        and row.variant == variant
        and str((labels := dict(row.labels))["category"]) in categories
        and location in ("", labels["place"])
    ]
    return tuple(sum(values) for values in zip(*values_by_row, strict=True))


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Losses alike, states as ZeRO's formulas say, the host's update, the largest model."""
    variants = [v for v in experiment.variants if v in PLACEMENTS]
    dtype = experiment.plan.options.get("dtype", "float32")
    where = f"{plural(experiment.plan.ranks, 'rank')} on {experiment.plan.device}, {dtype}"
    losses = training.loss_headline(experiment, "ZeRO, offload", variants, where)
    if losses is not None:
        yield losses
    yield from _states(experiment, variants, where)
    yield from _device_memory(experiment, variants, where)
    yield from _times(experiment, variants, where)
    yield from _largest_models(experiment, variants)


def _states(experiment: Experiment, variants: list[str], where: str) -> Iterator[Headline]:
    states_bytes = {
        variant: [
            totals(experiment, f"{what}_bytes", variant, STATES)
            for what in ("measured", "predicted")
        ]
        for variant in variants
    }
    ratios = {v: over for v, both in states_bytes.items() if (over := ratio(*both)) is not None}
    if not ratios:
        return
    furthest = max(ratios, key=lambda v: abs(math.log(ratios[v].value)))
    measured_mb, predicted_mb = (fmean(sizes) / 1e6 for sizes in states_bytes[furthest])
    yield Headline.of(
        ratios[furthest],
        system="ZeRO, offload",
        claim="weights, gradients and optimizer per rank, measured over predicted, in the variant "
        "that is furthest off",
        timed=False,
        configuration=f"{furthest}: {measured_mb:.1f} MB of {predicted_mb:.1f}; {len(ratios)} "
        f"variants; {where}",
    )


def _device_memory(experiment: Experiment, variants: list[str], where: str) -> Iterator[Headline]:
    base = experiment.plan.baseline
    device_bytes = {
        v: totals(experiment, "measured_bytes", v, CATEGORIES, "device") for v in variants
    }
    for variant in variants:
        less = ratio(device_bytes[variant], device_bytes.get(base or "", ()))
        if less is None or variant == base:
            continue
        on_host = totals(experiment, "measured_bytes", variant, CATEGORIES, "host") or (0.0,)
        device_mb, host_mb = (fmean(of) / 1e6 for of in (device_bytes[variant], on_host))
        yield Headline.of(
            less,
            system="ZeRO, offload",
            claim=f"{variant}: memory on the device, of {base}'s",
            timed=False,
            configuration=f"{device_mb:.1f} MB and {host_mb:.1f} on the host, between backward "
            f"and update; {where}",
        )


def _times(experiment: Experiment, variants: list[str], where: str) -> Iterator[Headline]:
    """Hold each step against the baseline's, and updates on the host against their DRAM bound."""
    base = experiment.plan.baseline or ""
    update_ns, step_ns = (experiment.value(m, base) for m in ("update_ns", "median_step_ns"))
    for variant in variants:
        slower = experiment.ratio("median_step_ns", variant, base)
        if slower is not None and variant != base:
            yield Headline.of(
                slower,
                system="ZeRO, offload",
                claim=f"{variant}: step over that of {base}",
                least=1 - update_ns / step_ns if update_ns and step_ns else None,
                bound=f"no placement saves more than all of {base}'s update",
                configuration=where,
            )
        bound = experiment.find("update_over_bound_ratio", variant)
        why = experiment.why("update_over_bound_ratio", variant)
        if "optimizer" in PLACEMENTS[variant].on_host and (bound is not None or why):
            yield Headline.of(
                None if bound is None else bound.estimate,
                why=why,
                system="ZeRO, offload",
                claim=f"{variant}: the optimizer's step on the host over its DRAM bound",
                configuration=f"bytes of each update over triad's bandwidth; {where}",
            )


def _largest_models(experiment: Experiment, variants: list[str]) -> Iterator[Headline]:
    options = experiment.plan.options
    for variant, claim, stated_b in (
        ("zero2-offload", "13 B on one V100 of 32 GB (1.4 B without)", 13.0),
        ("zero3-param-offload", "40 B on one V100 of 32 GB", 40.0),
    ):
        if variant not in variants or not options.get("fits"):
            continue
        label, _ = capacity_bytes(str(options["fits"]))
        host = str(options.get("host") or "1500GB")
        fitting = largest_of(variant, options, ranks=1, checkpoint=True)
        on_host = f"; {fitting.host_bytes / 1e9:,.0f} GB on a host of {host}" if fitting else ""
        yield Headline(
            system="ZeRO, offload",
            claim=f"{variant}: largest model on one {label}",
            published="10B+ on one GPU",
            primary=claim,
            unit="B parameters",
            stated=stated_b,
            basis="model",
            timed=False,
            ours=None if fitting is None else fitting.parameters_count / 1e9,
            why="no layer fits" if fitting is None else "",
            configuration="estimated, not measured: layers of llama3-8b, mixed precision, batch 1, "
            f"{LARGEST_SEQUENCE} tokens, checkpointing{on_host}",
        )


if __name__ == "__main__":
    as_program(main)
