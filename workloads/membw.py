"""Measure memory bandwidth over array sizes with the four kernels of STREAM.

    chopper bench membw
    chopper bench membw -- --largest 4294967296
    chopper bench membw --variants random,zeros

Copy, scale, add and triad (McCalpin 1995), bytes read plus bytes written, as STREAM counts them.
Small arrays stay in a cache: the steps of the curve are its levels, and its end is memory.

Each round runs every kernel at every size once more, so that all of them are measured over the same
stretch of time, whatever else the machine does in it; smaller arrays are the front of the largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    DEVICE,
    SEED,
    Needs,
    Option,
    Variant,
    Workload,
    as_program,
    positive,
)
from chopper.experiments.results import Experiment, Headline, quotient

WORKLOAD = Workload(
    name="membw",
    chosen="so that the largest arrays outgrow usual caches",
    summary="copy, scale, add and triad over array sizes, as STREAM defines them: bandwidth of "
    "each cache and of memory",
    options=(
        Option("smallest", "bytes of the smallest array", 256 << 10, positive),
        Option("largest", "bytes of the largest array", 256 << 20, positive),
        Option("factor", "factor from one size to the next", 4, positive),
        Option("repeats", "timed rounds through all sizes", 20, positive),
        SEED,
        DEVICE,
    ),
    variants=(
        Variant("random", "normal random numbers"),
        Variant("zeros", "zeros", default=False),
    ),
    baseline="random",
    ranks=1,
    measures=True,
    repeats=3,
    seconds=60,
    position=9,
)


def needs(args: argparse.Namespace, _ranks: int, _device: str) -> Needs:
    """Three arrays of the largest size: of STREAM's kernels, or sent, received and staged."""
    if args.smallest > args.largest:
        raise UsageError(f"--smallest {args.smallest} is larger than --largest {args.largest}")
    if args.factor < 2:
        raise UsageError(f"--factor {args.factor}: sizes must grow: choose 2 or more")
    return Needs(
        memory_bytes=3 * args.largest,
        what=f"--largest {args.largest}",
        remedy="choose a smaller --largest",
    )


def sizes(args: argparse.Namespace, quantum: int) -> Iterator[int]:
    """Bytes from the smallest to the largest, each rounded up to whole quanta."""
    size = args.smallest
    while size <= args.largest:
        yield -(-size // quantum) * quantum
        size *= args.factor


def largest(experiment: Experiment, measure: str, label: str) -> int | None:
    """The largest size that a measure has."""
    values = [int(dict(row.labels)[label]) for row in experiment.rows if row.measure == measure]
    return max(values, default=None)


def mib(size_bytes: int) -> str:
    """A size in MiB, in words."""
    return f"{size_bytes / (1 << 20):g} MiB"


def clock_and_power(experiment: Experiment) -> str:
    """Clock and power on zeros over those on random numbers, in words."""
    sensed = (("clock", "sm_clock_hz"), ("power", "power_w"))
    ratios = [(what, experiment.ratio(name, "zeros", "random")) for what, name in sensed]
    return ", ".join(
        f"{what} {ratio.value:.2f}×" if ratio else f"no {what} was sampled"
        for what, ratio in ratios
    )


def main() -> None:
    """Measure each kernel at each size."""
    import torch

    from chopper.hardware.measure import Bench, rate, stream, wait
    from chopper.workloads.ranks import Progress, own_device

    args = WORKLOAD.parse()
    device = own_device(args.device)
    torch.manual_seed(args.seed)
    count = max(sizes(args, 4)) // 4
    # Written here, all of it: no page is touched first while it is timed.
    arrays = [torch.randn(count, device=device) for _ in range(3)]
    if args.variant == "zeros":
        for array in arrays:
            array.zero_()
    # Tracing costs time: one pass is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        for _, call in stream(arrays).values():
            call()
        wait(device)
        prof.step()
        bench: Bench[tuple[str, int]] = Bench(device)
        moved_bytes = {}
        for size_bytes in sizes(args, 4):
            for name, (passes, call) in stream([a[: size_bytes // 4] for a in arrays]).items():
                moved_bytes[name, size_bytes] = passes * size_bytes
                bench.add((name, size_bytes), call, moved_bytes=passes * size_bytes)
        progress = Progress(args.repeats, "round")
        times_s = bench.run(args.repeats, after_round=(prof.step, progress.advance))
        for (name, size_bytes), moved in moved_bytes.items():
            reached = rate(name, moved, times_s[name, size_bytes])
            for measure, value in (
                ("bandwidth_bytes_per_s", reached.median_per_s),
                ("best_bandwidth_bytes_per_s", reached.best_per_s),
            ):
                prof.measure(measure, value, kernel=name, array_bytes=size_bytes)


_RATIOS = (
    ("scale", "each reads one array and writes one: 1 in theory"),
    (
        "add",
        "bytes as STREAM counts them: 1 where stores go past the caches, 1.125 where each line "
        "is read before it is written (3/4 of its traffic is counted, 2/3 of copy's)",
    ),
)


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold memory's bandwidth against its datasheet, and the kernels' ratios against their laws."""
    size = largest(experiment, "bandwidth_bytes_per_s", "array_bytes")
    if size is None:
        return
    where = f"{experiment.plan.device}, arrays of {mib(size)}"
    rows = {
        name: experiment.find("bandwidth_bytes_per_s", kernel=name, array_bytes=size)
        for name in ("copy", "scale", "add", "triad")
    }
    triad = rows["triad"]
    if triad is not None:
        name, stated = _datasheet(experiment)
        unknown = f"; the peak memory bandwidth is unknown for {name}"
        yield Headline.of(
            triad.estimate,
            scale=1e-9,
            system="Memory",
            claim="triad's bandwidth (STREAM)",
            primary=f"{stated / 1e9:,.0f} GB/s ({name}'s datasheet)" if stated else None,
            unit="GB/s",
            stated=stated / 1e9 if stated else None,
            most=stated / 1e9 if stated else None,
            bound="memory is no faster than its datasheet; arrays in a cache are (--largest)",
            configuration=where + ("" if stated else unknown),
        )
    for name, law in _RATIOS:
        over_copy = quotient(rows[name], rows["copy"])
        if over_copy is not None:
            yield Headline.of(
                over_copy,
                system="Memory",
                claim=f"bandwidth of {name} over copy's",
                configuration=f"{where}; {law}",
            )
    if "zeros" in experiment.variants:
        labels = {"kernel": "triad", "array_bytes": size}
        yield Headline.of(
            experiment.ratio("bandwidth_bytes_per_s", "zeros", "random", **labels),
            system="Memory",
            claim="triad on zeros over random numbers",
            why="the variant with random numbers was not run",
            configuration=f"{where}; {clock_and_power(experiment)}",
        )


def _datasheet(experiment: Experiment) -> tuple[str, float | None]:
    from chopper.hardware.devices import peaks_of

    attribution = next((a for runs in experiment.attributions.values() for a in runs), None)
    if attribution is None:
        return "an unknown machine", None
    part = attribution.recording.manifest.ranks[0]
    device = next((d for d in part.devices if d.name), None)
    peaks = peaks_of(device)
    if peaks is not None and peaks.memory_bandwidth_bytes_per_s.value is not None:
        return peaks.label, float(peaks.memory_bandwidth_bytes_per_s.value)
    name = part.environment.get("cpu", "an unknown processor") if device is None else device.name
    return str(name), None


if __name__ == "__main__":
    as_program(main)
