"""Runs of many ranks: wall and CPU time, peak memory of all processes, and what grows beyond.

    python -m benchmarks.many_ranks [--ranks 8 16 32 64 256 1024] [--events 10000] [--traces DIR]
    CHOPPER_PEERS=PYTHON python -m benchmarks.many_ranks --ranks 8 16 32 --peers

Each row is `chopper analyze` of so many traces (benchmarks/_ranks.py: about three host spans per
device event, collectives of all ranks), in one process and in one for each core, from the command's
start to its end. The peak is the sum over all its processes of their proportional memory (PSS). HTA
loads the same traces and makes its temporal breakdown. At the end, time and memory from 64
ranks on are fitted by a line over the ranks and carried to 100 000 ranks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks._peers import Sample, peer_python
from benchmarks._ranks import write_ranks
from chopper.limits import usable_cores

RANKS = (8, 16, 32, 64, 256, 1024)
SERIAL_UP_TO = 64
BEYOND = (1024, 10_000, 100_000)
LIMIT_S, LIMIT_BYTES = 150, 2e9
"""Of 1 024 ranks on two cores."""
_SAMPLE_S = 0.1
_HTA = """
import logging, sys; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files = {i: f for i, f in enumerate(sys.argv[1:])}
TraceAnalysis(trace_files=files).get_temporal_breakdown(visualize=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--events", type=int, default=10_000, help="device events of each rank")
    parser.add_argument("--traces", type=Path, help="where they are written, and stay")
    parser.add_argument("--peers", action="store_true", help="HTA beside")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        rows = measured(options.traces or Path(made), options)
    fitted(rows)


def measured(folder: Path, options: argparse.Namespace) -> list[tuple[int, Sample]]:
    """One line per number of ranks; return those in one process for each core."""
    peer = peer_python("hta") if options.peers else None
    if options.peers and peer is None:
        print("HTA is not installed: set CHOPPER_PEERS to a python that has it")
    print(f"{options.events} device events per rank, {usable_cores()} cores")
    print(f"{'ranks':>6} {'how':>12} {'wall s':>8} {'CPU s':>8} {'peak MB':>8}")
    rows = []
    for ranks in options.ranks:
        traces = folder / f"{ranks}"
        if not (traces / f"rank-{ranks - 1}.json.gz").exists():
            write_ranks(traces, ranks, options.events)
        files = sorted(map(str, traces.glob("rank-*.json.gz")))
        chopper = [sys.executable, "-m", "chopper", "analyze", "--json", str(traces)]
        if ranks <= SERIAL_UP_TO:
            shown(ranks, "one process", watched([*chopper, "--workers", "1"]))
        rows.append((ranks, watched(chopper)))
        shown(ranks, "all cores", rows[-1][1])
        if peer is not None:
            shown(ranks, "HTA", watched([peer, "-c", _HTA, *files]))
    return rows


def watched(command: list[str]) -> Sample:
    """Run a command; return its times and the peak memory of all its processes."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        tree, peak, cpu_s = psutil.Process(process.pid), 0, {}
        while process.poll() is None:
            now = 0
            for one in (tree, *_children(tree)):
                try:
                    now += one.memory_full_info().pss
                    times = one.cpu_times()
                except psutil.Error:
                    continue
                cpu_s[one.pid] = times.user + times.system
            peak = max(peak, now)
            time.sleep(_SAMPLE_S)
        wall_s = time.perf_counter() - start_s
        if process.returncode:
            assert process.stderr is not None
            raise RuntimeError(f"{command}: {process.stderr.read().decode()[-2000:]}")
    return Sample(wall_s, sum(cpu_s.values()), peak)


def _children(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return tree.children(recursive=True)
    except psutil.Error:
        return []


def shown(ranks: int, how: str, found: Sample) -> None:
    print(
        f"{ranks:>6} {how:>12} {found.wall_s:>8.1f} {found.cpu_s:>8.1f} "
        f"{found.peak_bytes / 1e6:>8.0f}",
        flush=True,
    )


def fitted(rows: list[tuple[int, Sample]]) -> None:
    """Print lines over the ranks, and where they lead."""
    large = {ranks: found for ranks, found in rows if ranks == max(BEYOND[:1])}
    for found in large.values():
        within = found.wall_s <= LIMIT_S and found.peak_bytes <= LIMIT_BYTES
        print(f"1024 ranks within {LIMIT_S} s and {LIMIT_BYTES / 1e9:.0f} GB: {within}")
    # Smaller runs are held in memory as a whole: they lie on another line.
    rows = [row for row in rows if row[0] >= SERIAL_UP_TO]
    if len(rows) < 2:
        return
    ranks = np.array([r for r, _ in rows], dtype=float)
    cpu = np.polyfit(ranks, [s.cpu_s for _, s in rows], 1)
    memory = np.polyfit(ranks, [s.peak_bytes / 1e6 for _, s in rows], 1)
    print(f"CPU seconds = {cpu[1]:.1f} + {cpu[0]:.3f} × ranks")
    print(f"peak MB     = {memory[1]:.0f} + {memory[0]:.2f} × ranks")
    print(f"{'ranks':>7} {'core hours':>11} {'peak GB':>8}   (by these lines)")
    for count in BEYOND:
        hours, gb = np.polyval(cpu, count) / 3600, np.polyval(memory, count) / 1e3
        print(f"{count:>7} {hours:>11.2f} {gb:>8.1f}")


if __name__ == "__main__":
    main()
