"""Measure matrix products per data type and shape, on random numbers or on zeros.

    chopper run gemm
    chopper run gemm -- --dtypes bfloat16 --shapes 8192x8192x8192 --seconds 10

Zeros toggle no transistors: a device that lowers its clock under load draws less power on them,
clocks higher and is faster at the very same work. What the difference amounts to here, and what the
clock did where it was sampled, is what the two variants show.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

import chopper
from chopper.errors import UsageError
from chopper.workloads import options
from chopper.workloads.machine import Needs, own_device, wait
from chopper.workloads.progress import Progress

SWEEP = {
    "cpu": ("512x512x512", "1024x1024x1024", "1024x64x1024"),
    "cuda": ("1024x1024x1024", "4096x4096x4096", "8192x8192x8192", "8192x1024x8192"),
}
DTYPES = {
    "cpu": ("float32", "float64", "bfloat16"),
    "cuda": ("float32", "float16", "bfloat16", "float64"),
}
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def needs(args: argparse.Namespace, _ranks: int, device: str) -> Needs:
    """Three matrices of the largest shape in the widest type."""
    dtypes = chosen_dtypes(args, device)
    largest = max(m * n + n * k + m * k for m, n, k in chosen_shapes(args, device))
    return Needs(
        memory_bytes=largest * max(_ELEMENT_BYTES[d] for d in dtypes),
        what=f"--shapes {args.shapes}",
        remedy="take smaller shapes",
    )


def chosen_shapes(args: argparse.Namespace, device: str) -> list[tuple[int, int, int]]:
    """Shapes as (M, N, K): [M, K] times [K, N].

    Raises:
        UsageError: a shape is not three whole numbers.
    """
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
    """Data types by torch's names.

    Raises:
        UsageError: one is not known.
        ValueError: the device lacks one.
    """
    if args.dtypes != "all":
        names = [word.strip() for word in args.dtypes.split(",")]
    else:
        names = [*DTYPES[device]]
    for name in names:
        if name not in _ELEMENT_BYTES:
            raise UsageError(f"--dtypes: {name!r} is none of {', '.join(_ELEMENT_BYTES)}")
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        if args.dtypes != "all" and "bfloat16" in names:
            raise ValueError(f"--dtypes: {torch.cuda.get_device_name()} has no bfloat16")
        names = [name for name in names if name != "bfloat16"]
    return names


def main() -> None:
    """Measure every shape in every type."""
    args = options.parse(options.GEMM, prog="gemm", description="Measure matrix products.")
    device = own_device(args.device)
    torch.manual_seed(args.seed)
    # Tracing costs time: one product of each is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        for dtype in chosen_dtypes(args, device.type):
            for m, n, k in chosen_shapes(args, device.type):
                run(*operands(args.variant, (m, n, k), dtype, device), 0, device)
        prof.step()
        dtypes, shapes = chosen_dtypes(args, device.type), chosen_shapes(args, device.type)
        progress = Progress(len(dtypes) * len(shapes), "product")
        for dtype in dtypes:
            for m, n, k in shapes:
                a, b = operands(args.variant, (m, n, k), dtype, device)
                times_s = run(a, b, args.seconds, device)
                labels = {"dtype": dtype, "shape": f"{m}x{n}x{k}"}
                # The fastest is what the device can do; the median what it did.
                prof.measure(
                    "median_flop_per_s", 2 * m * n * k / statistics.median(times_s), **labels
                )
                prof.measure("best_flop_per_s", 2 * m * n * k / min(times_s), **labels)
                prof.step()
                progress.advance()


def operands(
    variant: str, shape: tuple[int, int, int], dtype: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[M, K] and [K, N], of normal random numbers or of zeros."""
    m, n, k = shape
    make = torch.zeros if variant == "zeros" else torch.randn
    kind = getattr(torch, dtype)
    return make(m, k, device=device).to(kind), make(k, n, device=device).to(kind)


def run(a: Tensor, b: Tensor, seconds: int, device: torch.device) -> list[float]:
    """Times of batches of products, per product, over so many seconds."""
    out = a @ b
    batch = 1
    times_s: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times_s) < 3:
        begin = time.perf_counter()
        for _ in range(batch):
            torch.mm(a, b, out=out)
        wait(device)
        took_s = time.perf_counter() - begin
        if took_s < 0.01 and batch < 10_000:
            # Too short to be timed, or to keep a device busy between two synchronizations.
            batch *= 2
            continue
        times_s.append(took_s / batch)
    return times_s


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
