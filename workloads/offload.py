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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    Needs,
    Option,
    Variant,
    Workload,
    as_program,
    changed,
)
from chopper.experiments.results import Experiment, Headline, ratio, ratio_of_pairs
from chopper.limits import usable_memory_bytes
from chopper.wording import plural
from chopper.workloads import training
from chopper.workloads.placement import (
    CATEGORIES,
    HOST,
    LARGEST_SEQUENCE,
    LARGEST_SHAPE,
    PLACEMENTS,
    STATES,
    V100,
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
UPDATE_BYTES = 28
"""Read and written by AdamW in float32: weight and two moments both ways, the gradient once."""

WORKLOAD = Workload(
    name="offload",
    chosen="so that each placement trains the same within a minute on two cores",
    summary="one training job with its memory placed in thirteen ways: ZeRO's stages, optimizer, "
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
            V100,
        ),
        Option("host", "host memory that the largest model may use", HOST),
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
    repeats=3,
    seconds=125,
    position=6,
)

TRACED = (2, 5)
"""Steps that are traced; those after them are timed."""
CACHES = 4
"""Updates alone, of all ranks together, are of so many times what the last-level caches hold."""
LEAST_STATES_BYTES = 128 << 20
"""The same where these are small, or the system does not tell their size."""
UPDATE_ROUNDS = 5
CORE, FUSED, PLAIN = "DeepSpeedCPUAdam", "torch's AdamW, fused", "torch's AdamW"
LARGER = 2
"""Times that the larger of the two updates alone exceeds the smaller."""
PREDICTED_COUNTS = tuple(billions * 10**9 for billions in (1, 3, 7, 13))
"""Weights of the models whose update on the host is predicted."""
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
    elif (problem := core_problem(args)) is not None:
        absent |= dict.fromkeys((v for v in args.variants if PLACEMENTS[v].core), problem)
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
        if placement.core:
            # Four arrays of the larger update alone, and both moments of three optimizers' two.
            alone_bytes = 4 * (4 * LARGER + 3 * 2 * (1 + LARGER)) * update_count(ranks)
            if alone_bytes * ranks > (usable_bytes := usable_memory_bytes()):
                absent[variant] = (
                    f"its updates alone, {CACHES} times the last-level caches, need "
                    f"{alone_bytes * ranks / 1e9:.1f} GB, {usable_bytes / 1e9:.1f} GB can be used"
                )
                continue
            offloaded_bytes = max(offloaded_bytes, alone_bytes)
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


def core_problem(args: argparse.Namespace) -> str | None:
    """Name what DeepSpeedCPUAdam lacks here, or None."""
    if args.optimizer != "adamw":
        return "its optimizer is AdamW: --optimizer adamw"
    tools = ("ninja", os.environ.get("CXX", "c++"))
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"DeepSpeedCPUAdam is compiled here, without {' and '.join(absent)}" if absent else None


def update_count(ranks: int) -> int:
    """Weights of a rank's smaller update alone: at 16 bytes each, all ranks' exceed the caches."""
    sizes_bytes: dict[tuple[int, str], int] = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, cpus = ((cache / fact).read_text() for fact in ("level", "shared_cpu_list"))
        size = (cache / "size").read_text().strip().removesuffix("K")
        sizes_bytes[int(level), cpus] = int(size) << 10
    last = max((level for level, _ in sizes_bytes), default=0)
    caches_bytes = sum(size for (level, _), size in sizes_bytes.items() if level == last)
    return max(LEAST_STATES_BYTES, CACHES * caches_bytes // ranks) // 16


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
    if placement.core:
        update_alone(prof, dist.get_world_size(), dist.get_rank())
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
    print(f"{args.variant}: {period_ns / 1e9:.3f} s per step", flush=True)


def update_alone(prof: chopper.Profile, ranks: int, rank: int) -> None:
    """Measure optimizers on the host, on states beyond its caches, beside the memory's bandwidth.

    All ranks at once, as they update: they share the bandwidth. It is that of triad, or of triad in
    place, which as an update writes what it has read, and no line that it did not.
    """
    import torch

    from chopper.hardware.measure import Bench
    from chopper.workloads.llama import optimizer_of
    from chopper.workloads.offload_trainers import host_adam

    made: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        CORE: host_adam,
        FUSED: lambda weights: optimizer_of("adamw", weights),
        PLAIN: lambda weights: torch.optim.AdamW(weights, lr=3e-4, weight_decay=0.1),
    }
    counts = [update_count(ranks) * times for times in (1, LARGER)]
    values, gradient, a, c = (torch.full((counts[-1],), 1e-3) for _ in range(4))
    bench: Bench[tuple[str, int]] = Bench(torch.device("cpu"), ranks=ranks)
    bench.add(("triad", 3), lambda: torch.add(gradient, c, alpha=3.0, out=a))
    bench.add(("in place", 3), lambda: torch.add(a, gradient, alpha=1e-3, out=a))
    for name, of in made.items():
        for count in counts:
            weight = torch.nn.Parameter(values[:count])
            weight.grad = gradient[:count]
            bench.add((name, count), of([weight]).step)
    times_s = {key: statistics.median(took) for key, took in bench.run(UPDATE_ROUNDS).items()}
    if rank:
        return
    passed_bytes = 3 * a.nbytes
    triad_bytes_per_s = passed_bytes / min(times_s.pop((k, 3)) for k in ("triad", "in place"))
    prof.measure("triad_bytes_per_s", triad_bytes_per_s)
    for (name, count), time_s in times_s.items():
        labels: dict[str, str | int] = {"optimizer": name, "parameters_count": count}
        prof.measure("host_update_ns", time_s * 1e9, **labels)
        rate = UPDATE_BYTES * count / time_s
        prof.measure("host_update_bytes_per_s", rate, **labels)
        prof.measure("host_update_over_triad_ratio", rate / triad_bytes_per_s, **labels)
        for predicted in PREDICTED_COUNTS if count == counts[-1] else ():
            labels = {"optimizer": name, "parameters_count": predicted}
            each = UPDATE_BYTES * predicted / ranks
            prof.measure("predicted_host_update_ns", each / rate * 1e9, **labels)


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


_DGX2 = "in device and host as the publication's machine, a DGX-2; in layers and tokens by us"
_CORE_PUBLISHED = "5–7× over PyTorch's standard implementation"
"""DeepSpeed's tutorial of ZeRO-Offload (deepspeed.ai/tutorials/zero-offload)."""


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
    for variant in (v for v in variants if PLACEMENTS[v].core):
        yield from _updates_alone(experiment, variant)
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
    """Hold each step against the baseline's."""
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


def _updates_alone(experiment: Experiment, variant: str) -> Iterator[Headline]:
    """Hold DeepSpeedCPUAdam against torch's AdamW, memory, and its own time at another size."""
    rows = {
        (dict(row.labels)["optimizer"], dict(row.labels)["parameters_count"]): row
        for row in experiment.rows
        if (row.measure, row.variant) == ("host_update_ns", variant)
    }
    if not rows:
        return
    counts = sorted({int(count) for _, count in rows})
    ranks = plural(experiment.plan.ranks, "rank")
    where = f"{counts[-1] / 1e6:.0f} M weights in each of {ranks} at once, float32, beyond caches"
    own, smaller = (rows.get((CORE, count)) for count in (counts[-1], counts[0]))
    for other, published in ((PLAIN, _CORE_PUBLISHED), (FUSED, None)):
        yield Headline.of(
            ratio_of_pairs(rows.get((other, counts[-1])), own),
            system="ZeRO, offload",
            claim=f"update on the host, {CORE} over {other}",
            published=published,
            primary=published,
            why="one of the two was not measured",
            configuration=where,
        )
    labels: dict[str, str | int] = {"optimizer": CORE, "parameters_count": counts[-1]}
    of_memory = experiment.find("host_update_over_triad_ratio", variant, **labels)
    predicted_ns = (
        experiment.value("predicted_host_update_ns", variant, **labels | {"parameters_count": n})
        for n in PREDICTED_COUNTS
    )
    yield Headline.of(
        None if of_memory is None else of_memory.estimate,
        system="ZeRO, offload",
        claim=f"{CORE}: its {UPDATE_BYTES} bytes per weight and second over triad's bandwidth",
        why="was not measured",
        configuration=f"{where}; at this rate, models of 1, 3, 7 and 13 B take "
        f"{', '.join(f'{(ns or 0) / 1e9:.2f}' for ns in predicted_ns)} s to update",
    )
    scaled = ratio_of_pairs(own, smaller)
    yield Headline.of(
        scaled,
        scale=counts[0] / counts[-1],
        system="ZeRO, offload",
        claim=f"{CORE}: update of {counts[-1] / 1e6:.0f} M weights over that predicted from "
        f"{counts[0] / 1e6:.0f} M",
        why="was not measured",
        configuration="1 where the time is in proportion to the weights, as the prediction for 1 "
        "to 13 B assumes",
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
        host = str(options.get("host") or HOST)
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
            configuration=f"layers of {LARGEST_SHAPE}, mixed precision, batch 1, "
            f"{LARGEST_SEQUENCE} tokens, checkpointing{on_host}",
            chosen=_DGX2 if (options["fits"], host) == (V100, HOST) else "",
        )


if __name__ == "__main__":
    as_program(main)
