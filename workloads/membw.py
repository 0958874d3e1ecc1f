"""Measure memory bandwidth over array sizes with the four kernels of STREAM.

    chopper run membw
    chopper run membw -- --largest 4294967296

Copy, scale, add and triad (McCalpin 1995), bytes read plus bytes written, as STREAM counts them.
Small arrays stay in a cache: the steps of the curve are its levels, and its end is memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

import chopper
from chopper.workloads import options
from chopper.workloads.machine import own_device, wait
from chopper.workloads.progress import Progress
from chopper.workloads.sweep import sizes

WARMUP = 2


def main() -> None:
    """Measure each kernel at each size."""
    args = options.parse(options.MEMBW, prog="membw", description="Measure memory bandwidth.")
    device = own_device(args.device)
    torch.manual_seed(args.seed)
    # Tracing costs time: one pass is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        for _, call in kernels(args.largest, device).values():
            call()
        wait(device)
        prof.step()
        progress = Progress(len([*sizes(args, 4)]), "size")
        for size_bytes in sizes(args, 4):
            for name, (passes, call) in kernels(size_bytes, device).items():
                moved = passes * size_bytes
                times_s = call_times_s(call, args.repeats, moved, device)
                for measure, time_s in (
                    ("bandwidth_bytes_per_s", statistics.median(times_s)),
                    ("best_bandwidth_bytes_per_s", min(times_s)),
                ):
                    prof.measure(measure, moved / time_s, kernel=name, array_bytes=size_bytes)
            prof.step()
            progress.advance()


def kernels(size_bytes: int, device: torch.device) -> dict[str, tuple[int, Callable[[], object]]]:
    """STREAM's kernels: arrays that each passes over, and a call that runs it once."""
    a, b, c = (torch.randn(size_bytes // 4, device=device) for _ in range(3))
    return {
        "copy": (2, lambda: c.copy_(a)),
        "scale": (2, lambda: torch.mul(c, 3.0, out=b)),
        "add": (3, lambda: torch.add(a, b, out=c)),
        "triad": (3, lambda: torch.add(b, c, alpha=3.0, out=a)),
    }


def call_times_s(
    call: Callable[[], object], repeats: int, moved_bytes: int, device: torch.device
) -> list[float]:
    """Times of one call in seconds; short ones are timed in batches of about 64 MiB."""
    batch = max(1, (64 << 20) // moved_bytes)
    times_s = []
    for repeat in range(WARMUP + repeats):
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        wait(device)
        if repeat >= WARMUP:
            times_s.append((time.perf_counter() - begin) / batch)
    return times_s


def median_time_s(
    call: Callable[[], object], repeats: int, moved_bytes: int, device: torch.device
) -> float:
    """Median of ``call_times_s``."""
    return statistics.median(call_times_s(call, repeats, moved_bytes, device))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
