"""Runs of many ranks: wall and CPU time, peak memory of all processes, and what grows beyond.

    python -m benchmarks.many_ranks [--ranks 8 16 32 64 256 1024] [--events 10000] [--traces DIR]
    python -m benchmarks.many_ranks --ranks 64 --different 64
    CHOPPER_PEERS=PYTHON python -m benchmarks.many_ranks --ranks 8 16 32 --peers
    python -m benchmarks.many_ranks --ranks 64 --ray 4
    python -m benchmarks.many_ranks --ranks 1024 --report

Each row is `chopper analyze` of so many traces (benchmarks/_ranks.py: about three host spans per
device event, collectives of all ranks; ``--different`` of them have work of their own), in one
process (on one core, where chopper starts no others), with one worker beside it and with one for
each core, from the command's start to its end, predictions from all ranks included. The peak is the
sum over all its processes of their proportional memory (PSS); own CPU is that of the command's own
process, the rest is its workers'. HTA loads the same traces and makes its temporal breakdown;
TraceLens writes its report of each rank, one after the other, and then its report of the
collectives of all, on all cores. A peer is stopped at a limit of time or memory, and the ranks that
it had done are counted. With ``--ray``, a cluster of four nodes of one core each runs the same in
turns with four processes. With ``--report``, the HTML report is written and opened in Chromium. At
the end, time and memory from 64 ranks on are fitted by a line over the ranks and carried to 100 000
ranks.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks._peers import Sample, peer_python
from benchmarks._ranks import DIFFERENT, write_ranks
from benchmarks.report import interactive
from chopper.fresh_python import PACKAGE_PARENT
from chopper.limits import usable_cores
from tests.engines.nodes import started_nodes

RANKS = (8, 16, 32, 64, 256, 1024)
SERIAL_UP_TO = 64
BEYOND = (1024, 10_000, 100_000)
LIMITS = {64: (6, 400e6), 1024: (120, 1e9)}
"""Seconds and bytes that so many ranks of 10 000 device events may take on two cores, predictions
from all of them included."""
_SAMPLE_S = 0.1
CHOPPER = [sys.executable, "-m", "chopper"]
ANALYZE = [*CHOPPER, "analyze", "--json"]
_HTA = """
import logging, sys; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files = {i: f for i, f in enumerate(sys.argv[1:])}
TraceAnalysis(trace_files=files).get_temporal_breakdown(visualize=False)
"""
_TRACELENS = """
import sys, tempfile
from TraceLens.Reporting.generate_perf_report_pytorch import generate_perf_report_pytorch as report
for file in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        report(file, output_csvs_dir=folder)
    print("@", file=sys.stderr, flush=True)
"""
_TRACELENS_ALL = """
import os, sys, tempfile
from TraceLens.Reporting.generate_multi_rank_collective_report_pytorch import (
    generate_collective_report as report,
)
pattern = os.path.join(os.path.dirname(sys.argv[1]), "rank-*.json.gz")
with tempfile.TemporaryDirectory() as folder:
    report(trace_pattern=pattern, world_size=len(sys.argv) - 1, output_csvs_dir=folder,
           use_multiprocessing=True)
"""
PEERS = {
    "HTA": ("hta", _HTA),
    "TraceLens": ("TraceLens", _TRACELENS),
    "its collectives": ("TraceLens", _TRACELENS_ALL),
}
PEER_LIMIT_S, PEER_LIMIT_BYTES = 240, 12e9
NODES = 4
FIRST_CORE = str(min(os.sched_getaffinity(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--events", type=int, default=10_000, help="device events of each rank")
    parser.add_argument("--different", type=int, default=DIFFERENT, help="ranks that differ")
    parser.add_argument("--traces", type=Path, help="where they are written, and stay")
    parser.add_argument("--peers", action="store_true", help="HTA and TraceLens beside")
    parser.add_argument("--ray", type=int, default=0, metavar="TURNS", help="Ray beside processes")
    parser.add_argument("--report", action="store_true", help="the HTML report of each, instead")
    options = parser.parse_args()
    # Processes of a clone may each have to compile what an installation has compiled.
    package = Path(PACKAGE_PARENT, "chopper")
    for folder in (package, *filter(Path.is_symlink, package.iterdir())):
        compileall.compile_dir(folder, quiet=1)
    with tempfile.TemporaryDirectory() as made:
        folder = options.traces or Path(made)
        print(f"{options.events} device events per rank, {usable_cores()} cores, {load()}")
        if options.report:
            reported(folder, options)
        elif options.ray:
            in_turns(folder, options)
        else:
            fitted(measured(folder, options))
        print(load())


def load() -> str:
    """What else the machine does."""
    return f"load {', '.join(f'{x:.1f}' for x in os.getloadavg())}"


def traces_of(folder: Path, ranks: int, options: argparse.Namespace) -> Path:
    """Write the traces of so many ranks, unless they are there."""
    traces = folder / f"{ranks}"
    if not (traces / f"rank-{ranks - 1}.json.gz").exists():
        write_ranks(traces, ranks, options.events, options.different)
    return traces


def measured(folder: Path, options: argparse.Namespace) -> list[tuple[int, Watched]]:
    """One line per number of ranks; return those in one process for each core."""
    peers = {}
    for name, (module, code) in PEERS.items() if options.peers else ():
        python = peer_python(module)
        if python is None:
            print(f"{name}: not installed; set CHOPPER_PEERS to a python that has {module}")
        else:
            peers[name] = [python, "-c", code]
    print(f"{'ranks':>6} {'how':>15} {'wall s':>8} {'CPU s':>8} {'own CPU s':>10} {'peak MB':>8}")
    rows = []
    for ranks in options.ranks:
        traces = traces_of(folder, ranks, options)
        files = sorted(map(str, traces.glob("rank-*.json.gz")))
        chopper = [*ANALYZE, str(traces)]
        if ranks <= SERIAL_UP_TO:
            shown(ranks, "one process", watched(["taskset", "-c", FIRST_CORE, *chopper]))
            shown(ranks, "one worker", watched([*chopper, "--workers", "1"]))
        rows.append((ranks, watched(chopper)))
        shown(ranks, "all cores", rows[-1][1])
        for name, command in peers.items():
            try:
                shown(ranks, name, watched([*command, *files], PEER_LIMIT_S, PEER_LIMIT_BYTES))
            except RuntimeError as exc:
                print(f"{ranks:>6} {name:>15} {str(exc).splitlines()[-1]}", flush=True)
    return rows


def reported(folder: Path, options: argparse.Namespace) -> None:
    """One line per number of ranks: what the HTML report takes."""
    print(f"{'ranks':>6} {'wall s':>8} {'peak MB':>8} {'page MB':>8} {'interactive s':>14}")
    for ranks in options.ranks:
        page = folder / f"{ranks}.html"
        traces = traces_of(folder, ranks, options)
        found = watched([*CHOPPER, "report", str(traces), "-o", str(page), "--force"])
        size, ready = page.stat().st_size / 1e6, interactive(page)["interactive_s"]
        print(
            f"{ranks:>6} {found.wall_s:>8.1f} {found.peak_bytes / 1e6:>8.0f} {size:>8.2f} "
            f"{'–' if ready is None else f'{ready:.2f}':>14}",
            flush=True,
        )


def in_turns(folder: Path, options: argparse.Namespace) -> None:
    """Processes and Ray in turns, as many at a time; and the ratio of their medians."""
    print(f"{'ranks':>6} {'how':>15} {'wall s':>8}")
    with started_nodes(NODES, store_bytes=500_000_000) as nodes:
        for ranks in options.ranks:
            command = [*ANALYZE, str(traces_of(folder, ranks, options))]
            ways = {"processes": ["--workers", f"{NODES}"], "Ray": ["--ray", nodes.address]}
            turns: dict[str, list[float]] = {how: [] for how in ways}
            for _ in range(options.ray):
                for how, words in ways.items():
                    # Not watched: sampling memory would cost the processes alone, since the
                    # workers of a cluster are none of the command's own.
                    start_s = time.perf_counter()
                    subprocess.run([*command, *words], capture_output=True, check=True)
                    turns[how].append(time.perf_counter() - start_s)
                    print(f"{ranks:>6} {how:>15} {turns[how][-1]:>8.1f}", flush=True)
            of = [statistics.median(turns[how]) for how in ways]
            print(f"{ranks:>6} Ray takes {of[1] / of[0] - 1:+.0%}", flush=True)


@dataclass(frozen=True)
class Watched(Sample):
    """``own_cpu_s`` is the part of the command's own process."""

    own_cpu_s: float


def watched(
    command: list[str], limit_s: float = math.inf, limit_bytes: float = math.inf
) -> Watched:
    """Run a command; return its times and the peak memory of all its processes.

    Raises:
        RuntimeError: it failed, or was stopped at a limit.
    """
    with contextlib.ExitStack() as held:
        said = held.enter_context(tempfile.TemporaryFile("w+"))
        # What an earlier command kept must not answer this one.
        kept = held.enter_context(tempfile.TemporaryDirectory())
        start_s, stopped = time.perf_counter(), ""
        environment = os.environ | {"XDG_CACHE_HOME": kept}
        process = held.enter_context(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
        )
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
            if now > limit_bytes or time.perf_counter() - start_s > limit_s:
                stopped = f"stopped after {time.perf_counter() - start_s:.0f} s"
                for one in (*_children(tree), tree):
                    one.kill()
            time.sleep(_SAMPLE_S)
        wall_s = time.perf_counter() - start_s
        if process.returncode:
            said.seek(0)
            lines = said.read().splitlines()
            if not stopped:
                raise RuntimeError(f"{command}: failed: {' '.join(lines)[-2000:]}")
            done = lines.count("@")
            raise RuntimeError(f"{stopped} with {peak / 1e6:.0f} MB, {done} ranks done")
    return Watched(wall_s, sum(cpu_s.values()), peak, cpu_s.get(process.pid, 0.0))


def _children(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return tree.children(recursive=True)
    except psutil.Error:
        return []


def shown(ranks: int, how: str, found: Watched) -> None:
    print(
        f"{ranks:>6} {how:>15} {found.wall_s:>8.1f} {found.cpu_s:>8.1f} "
        f"{found.own_cpu_s:>10.1f} {found.peak_bytes / 1e6:>8.0f}",
        flush=True,
    )


def fitted(rows: list[tuple[int, Watched]]) -> None:
    """Print lines over the ranks, and where they lead."""
    for count, found in rows:
        if count in LIMITS:
            limit_s, limit_bytes = LIMITS[count]
            within = found.wall_s <= limit_s and found.peak_bytes <= limit_bytes
            print(f"{count} ranks within {limit_s} s and {limit_bytes / 1e6:.0f} MB: {within}")
    # Smaller runs are held in memory as a whole: they lie on another line.
    rows = [row for row in rows if row[0] >= SERIAL_UP_TO]
    if len(rows) < 2:
        return
    ranks = np.array([r for r, _ in rows], dtype=float)
    cpu = np.polyfit(ranks, [s.cpu_s for _, s in rows], 1)
    own = np.polyfit(ranks, [s.own_cpu_s for _, s in rows], 1)
    memory = np.polyfit(ranks, [s.peak_bytes / 1e6 for _, s in rows], 1)
    print(f"CPU seconds = {cpu[1]:.1f} + {cpu[0]:.3f} × ranks")
    print(f"own CPU s   = {own[1]:.1f} + {own[0]:.3f} × ranks")
    print(f"workers that keep the own process busy: {(cpu[0] - own[0]) / own[0]:.0f}")
    print(f"peak MB     = {memory[1]:.0f} + {memory[0]:.2f} × ranks")
    print(f"{'ranks':>7} {'core hours':>11} {'peak GB':>8}   (by these lines)")
    for count in BEYOND:
        hours, gb = np.polyval(cpu, count) / 3600, np.polyval(memory, count) / 1e3
        print(f"{count:>7} {hours:>11.2f} {gb:>8.1f}")


if __name__ == "__main__":
    main()
