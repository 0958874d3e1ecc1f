"""Measure matrix products per data type and shape, on random numbers or on zeros.

    chopper bench gemm
    chopper bench gemm -- --dtypes bfloat16 --shapes 8192x8192x8192 --seconds 10

Zeros toggle no transistors: a device that lowers its clock under load draws less power on them,
clocks higher and is faster at the very same work. What the difference amounts to here, and what the
clock did where it was sampled, is what the two variants show.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    DEVICE,
    MEASURED,
    SEED,
    Needs,
    Option,
    Variant,
    Workload,
    as_program,
    positive,
)
from chopper.experiments.results import Experiment, Headline, Labels
from chopper.workloads.membw import clock_and_power

WORKLOAD = Workload(
    name="gemm",
    chosen="to end within minutes, and of its shapes the one that is quickest on both",
    summary="matrix products per data type and shape, on random numbers and on zeros: what the "
    "device achieves, and what the data does to it",
    options=(
        Option("shapes", "MxNxK, comma-separated; or a sweep", "sweep"),
        Option("dtypes", "comma-separated torch names; or those the device computes", "all"),
        Option("seconds", "whole seconds per shape and type", 1, positive),
        Option("steps", "steps of all products, once measured; as many again traced", 5, positive),
        SEED,
        DEVICE,
    ),
    variants=(Variant("random", "normal random numbers"), Variant("zeros", "zeros")),
    baseline="random",
    ranks=1,
    measures=True,
    repeats=3,
    seconds=100,
    position=8,
)

SWEEP = {
    "cpu": ("512x512x512", "1024x1024x1024", "1024x64x1024"),
    "cuda": ("1024x1024x1024", "4096x4096x4096", "8192x8192x8192", "8192x1024x8192"),
}
DTYPES = {
    "cpu": ("float32", "float64", "bfloat16"),
    "cuda": ("float32", "float16", "bfloat16", "float64"),
}
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ROUNDS = 3
_STEP_FLOP = {"cuda": {2: 10**14, 4: 5 * 10**12, 8: 5 * 10**12}}
"""FLOP of each product in such a step by bytes of an element: some 100 ms on an H100, whose driver
renews its clock as often. Of a CPU, whose clock is not sampled, one product."""
_MOST_CALLS = 200
"""Calls of a small product in such a step at most: each is an event of the trace."""


def needs(args: argparse.Namespace, _ranks: int, device: str) -> Needs:
    """Factors of the largest shape, and the largest product, in each type."""
    shapes = chosen_shapes(args, device)
    largest = max(m * k + k * n for m, n, k in shapes) + max(m * n for m, n, _ in shapes)
    return Needs(
        memory_bytes=largest * sum(_ELEMENT_BYTES[d] for d in chosen_dtypes(args, device)),
        what=f"--shapes {args.shapes}",
        remedy="choose smaller shapes",
    )


def chosen_shapes(args: argparse.Namespace, device: str) -> list[tuple[int, int, int]]:
    """Shapes as (M, N, K): [M, K] times [K, N]."""
    words = SWEEP[device] if args.shapes == "sweep" else args.shapes.split(",")
    shapes = []
    for word in words:
        sides = word.strip().lower().split("x")
        if len(sides) != 3 or not all(s.isdecimal() and int(s) > 0 for s in sides):
            raise UsageError(f"--shapes: {word!r} is not MxNxK, for example 4096x4096x4096")
        m, n, k = map(int, sides)
        shapes.append((m, n, k))
    return shapes


def chosen_dtypes(args: argparse.Namespace, device: str) -> list[str]:
    """Data types by torch's names; ValueError where the device lacks one."""
    import torch

    if args.dtypes != "all":
        names = [word.strip() for word in args.dtypes.split(",")]
    else:
        names = [*DTYPES[device]]
    for name in names:
        if name not in _ELEMENT_BYTES:
            raise UsageError(f"--dtypes: {name!r} unknown: one of {', '.join(_ELEMENT_BYTES)}")
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        if args.dtypes != "all" and "bfloat16" in names:
            raise ValueError(f"--dtypes: {torch.cuda.get_device_name()} has no bfloat16")
        names = [name for name in names if name != "bfloat16"]
    return names


def main() -> None:
    """Measure every shape in every type."""
    import torch

    from chopper.hardware.measure import Bench, Call, product, rate, wait
    from chopper.workloads.ranks import Progress, own_device

    args = WORKLOAD.parse()
    device = own_device(args.device)
    torch.manual_seed(args.seed)
    make = torch.zeros if args.variant == "zeros" else torch.randn

    shapes = chosen_shapes(args, device.type)
    products: dict[tuple[str, int, int, int], Call] = {}
    for dtype in chosen_dtypes(args, device.type):
        kind = getattr(torch, dtype)
        values = make(max(m * k + k * n for m, n, k in shapes), device=device).to(kind)
        out = torch.empty(max(m * n for m, n, _ in shapes), dtype=kind, device=device)
        products |= {(dtype, *shape): product(values, out, *shape) for shape in shapes}
    # Tracing costs time: what is measured is not traced. What is traced comes after it, on a device
    # that is as hot and as slow as it gets.
    with chopper.profile(args.output, steps=(1 + args.steps, 1 + 2 * args.steps)) as prof:
        progress = Progress(len(products), "product")
        for (dtype, m, n, k), call in products.items():
            bench: Bench[str] = Bench(device)
            bench.add("", call, flop=2 * m * n * k)
            with prof.phase(MEASURED):
                times_s = bench.run(_ROUNDS, budget_s=args.seconds / _ROUNDS)[""]
            achieved = rate("", 2 * m * n * k, times_s)
            labels = {"dtype": dtype, "shape": f"{m}x{n}x{k}"}
            # The fastest is what the device can do; the median what it did.
            prof.measure("median_flop_per_s", achieved.median_per_s, **labels)
            prof.measure("best_flop_per_s", achieved.best_per_s, **labels)
            progress.advance()
        prof.step()
        for _ in range(2 * args.steps):
            for (dtype, m, n, k), call in products.items():
                for _ in range(calls_per_step(device.type, dtype, 2 * m * n * k)):
                    call()
            wait(device)
            prof.step()


def calls_per_step(device: str, dtype: str, flop: int) -> int:
    """Count the calls of a product of ``flop`` FLOP in each step after the measurement."""
    budget = _STEP_FLOP.get(device, {}).get(_ELEMENT_BYTES[dtype], 0)
    return min(max(budget // flop, 1), _MOST_CALLS)


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold zeros against random numbers, in the shape that is quickest on both."""
    rates: dict[str, dict[Labels, float]] = {}
    for row in experiment.rows:
        if row.measure == "median_flop_per_s":
            products = rates.setdefault(str(dict(row.labels)["dtype"]), {})
            products[row.labels] = products.get(row.labels, 1.0) * row.estimate.value
    for dtype, products in rates.items() if "zeros" in experiment.variants else ():
        quickest = max(products, key=products.__getitem__)
        labels = dict(quickest)
        yield Headline.of(
            experiment.ratio("median_flop_per_s", "zeros", "random", **labels),
            system="Chopper: DVFS",
            claim=f"{dtype} products on zeros over random numbers, {labels['shape']}",
            why=experiment.why(
                "median_flop_per_s",
                "zeros",
                "random",
                otherwise="the variant with random numbers was not run",
                **labels,
            ),
            configuration=f"rate on {experiment.plan.device}; {clock_and_power(experiment)}",
        )


if __name__ == "__main__":
    as_program(main)
