"""Attribution of growing traces: how long, how much memory, and whether both grow linearly.

    python -m benchmarks.scaling [--events 10000 100000 1000000 3000000] [--peers-up-to 100000]
    python -m benchmarks.scaling --profile 1000000

Traces are synthetic (benchmarks/_synthetic.py): one rank of a data-parallel transformer, two
streams, about three host spans per device event, shapes and collectives. Every size is attributed
in an interpreter of its own, from the tables of a run directory to the causes; the peak is the
resident memory of the whole process. HTA and TraceLens read the same trace as Kineto JSON, where
they are installed (in this interpreter or the one that CHOPPER_PEERS names): HTA loads it and
makes its temporal breakdown, TraceLens builds its tree and its two central tables; up to a size
that can be waited for. They have no attribution to compare with: this is what they offer.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import _synthetic
from benchmarks._peers import Sample, measure, peer_python
from chopper import pipeline

SIZES = (10_000, 100_000, 1_000_000, 3_000_000)
LIMIT_S, LIMIT_BYTES = 5.0, 1.5e9
_STAGES = ("load tables", "attribute", "causes")
_HTA = (
    (
        "import logging; logging.disable(logging.CRITICAL)\n"
        "from hta.trace_analysis import TraceAnalysis"
    ),
    "TraceAnalysis(trace_files={{0: {path!r}}}).get_temporal_breakdown(visualize=False)",
)
_TRACELENS = (
    "import logging; logging.disable(logging.CRITICAL)\nfrom TraceLens import TreePerfAnalyzer",
    (
        "p = TreePerfAnalyzer.from_file({path!r}); p.get_df_gpu_timeline(); "
        "p.get_df_kernel_launchers()"
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--events", type=int, nargs="*", default=list(SIZES))
    parser.add_argument(
        "--repeats", type=int, default=3, help="the least of so many times is shown"
    )
    parser.add_argument("--peers-up-to", type=int, default=100_000, help="device events")
    parser.add_argument(
        "--profile", type=int, metavar="EVENTS", help="where the time goes, instead"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(_stages(options.child)))
    elif options.profile is not None:
        _profile(options.profile)
    else:
        growing(options.events, options.repeats, options.peers_up_to)


def growing(sizes: list[int], repeats: int, peers_up_to: int) -> None:
    """One row per size."""
    peers = {"HTA": (peer_python("hta"), _HTA), "TraceLens": (peer_python("TraceLens"), _TRACELENS)}
    for name, (python, _) in peers.items():
        if python is None:
            print(f"{name} is not installed: set CHOPPER_PEERS to a python that has it")
    head = f"{'device events':>13} {'host spans':>10}"
    head += "".join(f" {stage:>12}" for stage in _STAGES)
    head += f" {'total s':>8} {'CPU s':>6} {'µs/event':>8} {'peak MB':>8} {'B/event':>8}"
    print(head + "".join(f" {name + ' s':>12} {'peak MB':>8}" for name in peers))
    with tempfile.TemporaryDirectory(prefix="chopper-scaling-") as work:
        for size in sizes:
            folder = Path(work) / str(size)
            _synthetic.write_run(folder, size)
            done = [_child(folder) for _ in range(repeats if size <= 1_000_000 else 1)]
            shutil.rmtree(folder)
            one = min(done, key=lambda d: d["total_s"])
            events = int(one["events"])
            line = f"{events:>13,} {int(one['spans']):>10,}"
            line += "".join(f" {one[stage]:>12.2f}" for stage in _STAGES)
            line += (
                f" {one['total_s']:>8.2f} {one['cpu_s']:>6.2f} "
                f"{one['total_s'] / events * 1e6:>8.2f} {one['peak_bytes'] / 1e6:>8.0f} "
                f"{one['peak_bytes'] / events:>8.0f}"
            )
            trace = Path(work) / f"{size}.json.gz"
            if size <= peers_up_to and any(python for python, _ in peers.values()):
                _synthetic.write_kineto(trace, size)
            for python, statements in peers.values():
                line += _peer(python, statements, trace if size <= peers_up_to else None)
            trace.unlink(missing_ok=True)
            print(line, flush=True)
    print(
        f"wanted for 1 000 000: at most {LIMIT_S:.0f} s and {LIMIT_BYTES / 1e9:.1f} GB, growing "
        f"linearly; peers up to {peers_up_to:,} device events"
    )


def _child(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scaling", "--child", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"attribution failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _stages(folder: Path) -> dict[str, float]:
    """Seconds per stage and peak bytes of this process."""

    times = [time.perf_counter()]
    cpu = sum(os.times()[:4])
    run = pipeline.read(folder)
    for name in ("host_span", "device_event", "step", "collective"):
        run.table(0, name)
    times.append(time.perf_counter())
    attribution = pipeline.attribute(run)
    times.append(time.perf_counter())
    attribution.causes()
    times.append(time.perf_counter())
    found = dict(zip(_STAGES, (b - a for a, b in itertools.pairwise(times)), strict=True))
    return found | {
        "events": run.table(0, "device_event").num_rows,
        "spans": run.table(0, "host_span").num_rows,
        "total_s": times[-1] - times[0],
        "cpu_s": sum(os.times()[:4]) - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _peer(python: str | None, statements: tuple[str, str], trace: Path | None) -> str:
    """A peer's time and memory as columns; dashes where it was not measured."""
    if python is None or trace is None:
        return f" {'–':>12} {'–':>8}"
    setup, code = statements
    try:
        sample: Sample = measure(setup, code.format(path=str(trace)), python)
    except RuntimeError as exc:
        print(str(exc).splitlines()[-1][:200], file=sys.stderr)
        return f" {'failed':>12} {'–':>8}"
    return f" {sample.wall_s:>12.2f} {sample.peak_bytes / 1e6:>8.0f}"


def _profile(events: int) -> None:

    made = _synthetic.run(events)
    profiler = cProfile.Profile()
    profiler.enable()
    pipeline.attribute(made).causes()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
