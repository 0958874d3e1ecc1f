"""Overlap a matrix product with the transfer that feeds it, or that it feeds.

    chopper bench overlap
    chopper bench overlap --variants sequential,chunked -- --m 8192 --rate 300mbit
    chopper bench overlap --ranks 8                        # on GPUs, over NCCL
    chopper bench overlap --ranks 1                # on one GPU: shards from pinned host memory

All-gather then product: each rank holds rows of X, gathers all, multiplies by its own W. Product
then reduce-scatter: each rank multiplies its part of the inner dimension, and partial products are
summed into the rank that owns the rows. Both exchange directly, rank to rank, in chunks:

    library      the collectives of torch.distributed, then the product (or before it)
    sequential   the same exchange as below, all of it before the product (or after it)
    chunked      each chunk's product while later chunks travel; each rank begins with the rows that
                 it has (or sends first what others wait for): the swizzle of Triton-distributed
    unswizzled   the same, in row order, which is the same order on every rank
    symmetric    torch's fused operators on symmetric memory (several GPUs that reach each other)
    triton       one kernel whose tiles wait for what other ranks send, on symmetric memory; with
                 triton-unswizzled in row order. On one GPU the copy engine sends. On CPUs the
                 kernels run in Triton's interpreter: checked, not timed

Overlap alone cannot make it more than 2× faster: T_sequential = T_compute + T_transfer, and no
order takes less than the larger of the two and the first chunk. What is beyond that against a
library is the library's own inefficiency (arXiv 2504.19442 reports 1.09–44.97× against PyTorch with
NCCL).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import chopper
from chopper import wording as fmt
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    CHANNEL,
    DEVICE,
    DTYPE,
    SEED,
    STEPS,
    Bound,
    Needs,
    Option,
    Variant,
    Workload,
    as_program,
    positive,
)
from chopper.experiments.results import Experiment, Headline
from chopper.hardware.devices import lookup
from chopper.workloads import link
from chopper.workloads.balance import Sizes, balanced, needed_bytes, rates_of

if TYPE_CHECKING:
    import torch

    from chopper.workloads.tiles import Order

WORKLOAD = Workload(
    name="overlap",
    chosen="so that product and transfer take about as long as each other, where rates are known",
    summary="all-gather with product and product with reduce-scatter: one after the other, chunk "
    "by chunk, with and without the swizzle, against the bound of pure overlap",
    options=(
        Option("m", "rows of the product, over all ranks; by the device's rates", None, positive),
        Option("k", "inner dimension; by the device's rates", None, positive),
        Option("n", "columns; by the device's rates", None, positive),
        Option("chunks", "chunks into which each rank's rows are split", 8, positive),
        link.RATE,
        replace(STEPS, help="timed repetitions of each operation", default=9),
        replace(DTYPE, help="data type of the computation"),
        SEED,
        DEVICE,
        CHANNEL,
    ),
    linked=True,
    variants=(
        Variant("sequential", "the exchange, then the product, or the reverse"),
        Variant("library", "the collectives of torch.distributed"),
        Variant("chunked", "chunk by chunk, local and earliest chunks first"),
        Variant("unswizzled", "chunk by chunk, in the order of the rows"),
        Variant("symmetric", "torch's fused operators on symmetric memory", needs_gpu=True),
        Variant("triton", "one kernel that waits for what is sent, the nearest rank's first"),
        Variant("triton-unswizzled", "the same, in row order"),
    ),
    baseline="sequential",
    measures=True,
    repeats=3,
    seconds=150,
    position=5,
    bounds=(
        Bound(
            measure="bound_over_time_ratio",
            most=1.0,
            why="an operation cannot end before its product or its transfer does",
            with_it=("time_ns", "bound_ns"),
        ),
    ),
)

KERNELS: dict[str, Order] = {"triton": "ring", "triton-unswizzled": "rows"}
"""Variant that is one kernel → order of what it sends and of its tiles."""
ON_CPU = Sizes(m=1024, k=2048, n=1024)
_WHY_ON_CPU = "--m 1024 --k 2048 --n 1024: balanced at 130 GFLOP/s of each rank and 1 Gbit/s"
SHARDS = 4
"""With one rank: as if so many held the rows, of which this one's are the last."""
WARMUP = 2
TRACED = 5
CHECKED = 3
"""Steps of a kernel that is checked alone: the third writes where the first was read."""


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Matrices as they are computed with, in float64 to check them, and where they are sent."""
    chosen, notes = _sizes(args, ranks, device)
    args = argparse.Namespace(**vars(args) | chosen)
    if ranks == 1 and device == "cpu":
        raise UsageError("--ranks 1: one rank has no peer to exchange with, except on a GPU")
    of = f"{ranks} ranks" if ranks > 1 else f"{SHARDS} shards"
    if args.m % ((ranks if ranks > 1 else SHARDS) * args.chunks):
        raise UsageError(f"--m {args.m}: its rows do not divide into {of} of {args.chunks} chunks")
    if args.k % ranks:
        raise UsageError(f"--k {args.k}: does not divide among {ranks} ranks")
    reason = link.absence(args.rate, ranks, device)
    if reason is not None:
        notes.append(
            f"no shaped link ({reason}): over the loopback, where a transfer takes the cores "
            "that the product needs, little can be hidden"
        )
    return Needs(
        memory_bytes=needed_bytes(
            Sizes(args.m, args.k, args.n),
            parts=ranks if ranks > 1 else SHARDS,
            element_bytes=_ELEMENT_BYTES[args.dtype],
        ),
        what=f"--m {args.m} --k {args.k} --n {args.n}",
        remedy="choose smaller matrices",
        notes=tuple(notes),
        absent=_absent(ranks, device),
        chosen=chosen,
    )


_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def _sizes(args: argparse.Namespace, ranks: int, device: str) -> tuple[dict[str, int], list[str]]:
    """Return the sizes that the user left open, and why all of them are as they are."""
    missing = [name for name in Sizes._fields if getattr(args, name) is None]
    sizes, why = (ON_CPU, [_WHY_ON_CPU]) if device == "cpu" or not missing else _on_gpu(args, ranks)
    chosen = {name: getattr(sizes, name) for name in missing}
    return chosen, why if len(missing) == len(sizes) else []


def _on_gpu(args: argparse.Namespace, ranks: int) -> tuple[Sizes, list[str]]:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    of_name = {"multi_processor_count": gpu.multi_processor_count, "memory_bytes": gpu.total_memory}
    rates = rates_of(
        gpu.name,
        lookup(gpu.name, **of_name),
        ranks=ranks,
        devices_count=torch.cuda.device_count(),
        dtype=args.dtype,
    )
    if rates is None:
        return ON_CPU, [f"the rates of {gpu.name} are unknown: sizes as on CPUs, bound by launches"]
    return balanced(
        rates,
        parts=ranks if ranks > 1 else SHARDS,
        chunks=args.chunks,
        element_bytes=_ELEMENT_BYTES[args.dtype],
        memory_bytes=gpu.total_memory,
        scatters=ranks > 1,
    )


def _absent(ranks: int, device: str) -> dict[str, str]:
    absent: dict[str, str | None] = {}
    if ranks == 1:
        why = "needs another rank; --ranks 1 takes the shards from pinned host memory"
        absent |= {"library": why, "symmetric": why}
    elif device == "cuda":
        absent |= dict.fromkeys(("symmetric", *KERNELS), _no_peer_access(ranks))
    if importlib.util.find_spec("triton") is None:
        absent |= dict.fromkeys(KERNELS, "needs triton, which is not installed: pip install triton")
    elif device == "cpu" and sys.platform != "linux":
        why = f"on CPUs ranks share memory by Linux's memfd, this is {sys.platform}"
        absent |= dict.fromkeys(KERNELS, why)
    return {variant: why for variant, why in absent.items() if why is not None}


def _no_peer_access(ranks: int) -> str | None:
    import torch

    for other in range(1, ranks):
        if not torch.cuda.can_device_access_peer(0, other):
            return f"needs GPUs with peer access to each other; 0 and {other} have none"
    return None


def main() -> None:
    """Join the other ranks, measure, leave."""
    import torch
    import torch.distributed as dist

    from chopper.workloads.ranks import joined

    args = WORKLOAD.parse()
    link_bits_per_s = None if args.channel is None else link.RATES[args.rate]
    if args.channel is not None:
        link.enter(args.channel, link_bits_per_s)
    with joined(args.device, prog="overlap") as device:
        chosen, _ = _sizes(args, dist.get_world_size(), device.type)
        args = argparse.Namespace(**vars(args) | chosen)
        torch.manual_seed(args.seed + dist.get_rank())
        measure(args, device, link_bits_per_s)


def measure(args: argparse.Namespace, device: torch.device, link_bits_per_s: int | None) -> None:
    """Check the operations against float64, then time them; rank 0 keeps the slowest rank's."""
    import torch
    import torch.distributed as dist

    interpreted = device.type == "cpu" and args.variant in KERNELS
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from chopper.workloads import exchange

    problems: dict[str, exchange.Problem] = {}
    before = None
    if dist.get_world_size() == 1:
        shards = exchange.HostShards(args, device, SHARDS)
        problems["all_gather_matmul"], before = shards, shards.before
    else:
        problems["all_gather_matmul"] = exchange.GatherMatmul(args, device)
        problems["matmul_reduce_scatter"] = exchange.MatmulScatter(args, device)
    errors = {}
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, problem in problems.items():
        run = exchange.operation(problem, args.variant, KERNELS.get(args.variant))
        relative_errors = [problem.error(run) for _ in range(CHECKED)]
        errors[name] = exchange.require_exact(f"{name} {args.variant}", relative_errors, args.dtype)
        problem.transfer()  # no row is poison any more: a product's time may depend on data
        runs[name, "all"] = run
        runs[name, "compute"], runs[name, "transfer"] = problem.compute, problem.transfer
    if interpreted:
        with chopper.profile(args.output) as prof:
            for name, error in errors.items():
                prof.measure("relative_error", error, operation=name)
        return
    # Before anything is recorded, which takes of the cores that exchange and product share.
    times = timed(runs, args.steps, device, before=before)
    with chopper.profile(args.output) as prof:
        whole_runs = {run: call for run, call in runs.items() if run[1] == "all"}
        timed(whole_runs, TRACED, device, prof, before=before)
        if link_bits_per_s is not None:
            prof.measure("link_bytes_per_s", link_bits_per_s / 8)
        for name, error in errors.items() if dist.get_rank() == 0 else ():
            total, compute, transfer = (
                times[name, part] for part in ("all", "compute", "transfer")
            )
            measures = exchange.overlap_measures(
                total.time_s,
                compute.time_s,
                transfer.time_s,
                chunks=problems[name].chunks,
                error=error,
            )
            if device.type == "cpu":
                # What chunks and a transfer beside the product cost is in this, not in the bound.
                cores_s = total.time_s * torch.get_num_threads()
                measures["core_time_ns"] = total.core_s * 1e9
                measures["cores_busy_ratio"] = total.core_s / cores_s
            for measure_name, value in measures.items():
                prof.measure(measure_name, value, operation=name)


class MedianTime(NamedTuple):
    """Medians over rounds, each of the slowest rank."""

    time_s: float
    core_s: float
    """Processor time of all threads of a rank, those that send and receive among them."""


def timed(
    runs: Mapping[tuple[str, str], Callable[[], object]],
    rounds: int,
    device: torch.device,
    prof: chopper.Profile | None = None,
    *,
    before: Callable[[str], None] | None = None,
) -> dict[tuple[str, str], MedianTime]:
    """Time each once per round, so that all are measured over the same stretch of time.

    Args:
        before: called with the part (``all``, ``compute``, ``transfer``) before each run of it.
    """
    import torch
    import torch.distributed as dist

    from chopper.hardware.measure import wait

    times: dict[tuple[str, str], list[MedianTime]] = {run: [] for run in runs}
    for step in range(WARMUP + rounds):
        for run, call in runs.items():
            if before is not None:
                before(run[1])
            # Without it, one rank's lateness would count as the transfer's slowness.
            dist.barrier()
            begin, begin_core = time.perf_counter(), time.process_time()
            call()
            wait(device)
            if step >= WARMUP:
                core_s = time.process_time() - begin_core
                times[run].append(MedianTime(time.perf_counter() - begin, core_s))
        if prof is not None:
            prof.step()
    slowest = torch.tensor([*times.values()], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    medians = slowest.median(dim=1).values.tolist()
    return {run: MedianTime(*values) for run, values in zip(runs, medians, strict=True)}


_NCCL = "1.09–44.97× over PyTorch with NCCL"
_CLAIMS = (
    ("chunked", "sequential", "overlapped against one after the other, bounded by 2×", None),
    ("chunked", "library", "overlapped against the library's collective", _NCCL),
    ("chunked", "unswizzled", "swizzled against the order of the rows", None),
    ("symmetric", "sequential", "torch's fused operator against one after the other", None),
    ("symmetric", "library", "torch's fused operator against the library's collective", None),
    ("triton", "sequential", "one kernel that waits against one after the other", None),
    ("triton", "library", "one kernel that waits against the library's collective", _NCCL),
    ("triton", "triton-unswizzled", "one kernel, swizzled against the order of the rows", None),
)
"""Variant, the variant it is compared with, the claim, and the published number."""


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold overlap against one after the other, the library, and without the swizzle."""
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        for variant, against, claim, published in _CLAIMS:
            claim = f"{operation.replace('_', ' ')}: {claim}"
            faster = experiment.ratio("time_ns", against, variant, operation=operation)
            configuration = faster and _configuration(experiment, variant, operation)
            if faster is None or configuration is None:
                why = _interpreted(experiment, variant, operation)
                why = why or experiment.why("time_ns", against, variant, operation=operation)
                if not why or not {against, variant} <= {*experiment.variants}:
                    continue
                faster = None
            else:
                why = ""
                if experiment.plan.device == "cpu":
                    published = None  # of NCCL between GPUs
            yield Headline.of(
                faster,
                why=why,
                system="Triton-distributed",
                claim=claim,
                published=published,
                primary=published,
                most=2.0 if against == "sequential" else None,
                bound="one after the other takes at most twice the longer of the two",
                configuration=configuration or "",
            )


def _interpreted(experiment: Experiment, variant: str, operation: str) -> str:
    checked = experiment.value("relative_error", variant, operation=operation) is not None
    if experiment.plan.device != "cpu" or variant not in KERNELS or not checked:
        return ""
    return (
        "withheld: on CPUs the kernel runs in Triton's interpreter, whose time says nothing of a "
        "GPU's; its results are right"
    )


def _configuration(experiment: Experiment, variant: str, operation: str) -> str | None:
    route = _route(experiment, variant)
    bound_ratio, compute_ns, transfer_ns, busy_ratio = (
        experiment.value(name, variant, operation=operation)
        for name in ("bound_over_time_ratio", "compute_ns", "transfer_ns", "cores_busy_ratio")
    )
    if not (bound_ratio and compute_ns and transfer_ns):
        return None
    most = (compute_ns + transfer_ns) / max(compute_ns, transfer_ns)
    cores = f", its cores busy for {fmt.ratio(busy_ratio)} of the time" if busy_ratio else ""
    return (
        f"{fmt.ratio(bound_ratio)} of max(T_compute, T_transfer) + first chunk{cores}; hiding all "
        f"of the shorter gives {most:.2f}×, 2× at the most; {route}"
    )


def _route(experiment: Experiment, variant: str) -> str:
    plan = experiment.plan
    if plan.ranks == 1:
        return f"one {plan.device}, shards from pinned host memory"
    ranks = f"{plan.ranks} ranks on {plan.device}"
    rate = experiment.value("link_bytes_per_s", variant)
    if rate is None:
        return f"{ranks}, no shaped link"
    return f"{ranks}, each end of their link sends at most {rate / 1e6:g} MB/s"


if __name__ == "__main__":
    as_program(main)
