"""Measure memory bandwidth over array sizes with the four kernels of STREAM.

    chopper run membw
    chopper run membw -- --largest 4294967296
    chopper run membw --variants random,zeros

Copy, scale, add and triad (McCalpin 1995), bytes read plus bytes written, as STREAM counts them.
Small arrays stay in a cache: the steps of the curve are its levels, and its end is memory.

Each round runs every kernel at every size once more, so that all of them are measured over the same
stretch of time, whatever else the machine does in it; smaller arrays are the front of the largest.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import chopper
from chopper.workloads import options
from chopper.workloads.machine import own_device, wait
from chopper.workloads.progress import Progress
from chopper.workloads.sweep import sizes

WARMUP = 2
LEAST_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""Moved between two readings of the clock: some milliseconds of memory's time."""
SCALAR = 2**0.5 - 1
"""s with which no array grows: one kernel after the other makes (2·s + s²)·a of a."""


def main() -> None:
    """Measure each kernel at each size."""
    args = options.parse(options.MEMBW, prog="membw", description="Measure memory bandwidth.")
    device = own_device(args.device)
    torch.manual_seed(args.seed)
    largest = max(sizes(args, 4)) // 4
    # Written here, all of it: no page is touched first while it is timed.
    arrays = [torch.randn(largest, device=device) for _ in range(3)]
    if args.variant == "zeros":
        for array in arrays:
            array.zero_()
    # Tracing costs time: one pass is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        for _, call in kernels(arrays).values():
            call()
        wait(device)
        prof.step()
        cells = {
            (name, size_bytes): (passes * size_bytes, call)
            for size_bytes in sizes(args, 4)
            for name, (passes, call) in kernels([a[: size_bytes // 4] for a in arrays]).items()
        }
        times_s: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
        progress = Progress(WARMUP + args.repeats, "round")
        for repeat in range(WARMUP + args.repeats):
            for cell, (moved_bytes, call) in cells.items():
                time_s = call_time_s(call, moved_bytes, device)
                if repeat >= WARMUP:
                    times_s[cell].append(time_s)
            prof.step()
            progress.advance()
        for (name, size_bytes), found_s in times_s.items():
            moved_bytes, _ = cells[name, size_bytes]
            for measure, time_s in (
                ("bandwidth_bytes_per_s", statistics.median(found_s)),
                ("best_bandwidth_bytes_per_s", min(found_s)),
            ):
                prof.measure(measure, moved_bytes / time_s, kernel=name, array_bytes=size_bytes)


def kernels(arrays: list[Tensor]) -> dict[str, tuple[int, Callable[[], object]]]:
    """STREAM's kernels on three arrays: how many each passes over, and a call that runs it once."""
    a, b, c = arrays
    return {
        "copy": (2, lambda: c.copy_(a)),
        "scale": (2, lambda: torch.mul(c, SCALAR, out=b)),
        "add": (3, lambda: torch.add(a, b, out=c)),
        "triad": (3, lambda: torch.add(b, c, alpha=SCALAR, out=a)),
    }


def call_time_s(call: Callable[[], object], moved_bytes: int, device: torch.device) -> float:
    """Seconds of one call behind one that is not timed; short ones are timed many at once."""
    batch = -(-LEAST_BYTES[device.type] // moved_bytes)
    call()
    wait(device)
    begin = time.perf_counter()
    for _ in range(batch):
        call()
    wait(device)
    return (time.perf_counter() - begin) / batch


def median_time_s(
    call: Callable[[], object], repeats: int, moved_bytes: int, device: torch.device
) -> float:
    """Median of ``repeats`` of ``call_time_s``."""
    return statistics.median(call_time_s(call, moved_bytes, device) for _ in range(repeats))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
