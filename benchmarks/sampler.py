"""How well the sampler keeps its rate, and what it costs: idle, and beside busy processes.

    python benchmarks/sampler.py [--seconds 3] [--nice 5] [--json]

Each line is one real sampler process that reads the host's sources. ``share`` columns are ratios,
so that they mean the same on any machine; the slowdown compares work done by busy processes, one
per core, with and without a sampler beside them, in turns within one run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from chopper.collectors.base import CollectorContext
from chopper.collectors.host import HostCollector
from chopper.collectors.sampler import SamplerProcess, SamplerStatus
from chopper.run import RunWriter

RATES_HZ = (10.0, 100.0, 1000.0)


def busy(stop: Event, done: Any) -> None:
    """Count rounds of pure work until told to stop."""
    while not stop.is_set():
        sum(range(20_000))
        done.value += 1


class Busy:
    """One busy process per core, and how much they got done."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._done = [context.Value("q", 0, lock=False) for _ in range(count)]
        self._processes = [
            context.Process(target=busy, args=(self._stop, done), daemon=True)
            for done in self._done
        ]
        for process in self._processes:
            process.start()
        while self._processes and min(done.value for done in self._done) == 0:
            time.sleep(0.01)

    def work(self) -> int:
        return sum(done.value for done in self._done)

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.join()


def sample(hz: float, seconds: float, nice: int) -> SamplerStatus:
    """Run a sampler of the host's sources for a while."""
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder), 0)
        writer.manifest.hostname = socket.gethostname()
        writer.save()
        context = CollectorContext(
            directory=writer.directory,
            run_path=Path(folder),
            pid=os.getpid(),
            hostname=socket.gethostname(),
        )
        specs = HostCollector(hz=hz).specs(context)
        process = SamplerProcess("bench", writer.directory, specs, nice=nice)
        process.start()
        time.sleep(seconds)
        status = process.stop()
    if status is None or status.state != "complete":
        raise SystemExit(f"the sampler failed: {status}")
    return status


def summarize(
    status: SamplerStatus, hz: float, load: str, slowdown: float | None
) -> dict[str, Any]:
    fast = [s for s in status.sources if s.requested_hz == hz]
    taken = sum(s.samples_count for s in fast)
    dropped = sum(s.dropped_count for s in fast)
    return {
        "requested_hz": hz,
        "load": load,
        "achieved_share": statistics.median((s.achieved_hz or 0.0) for s in fast) / hz,
        "late_share": sum(s.late_count for s in fast) / max(taken, 1),
        "dropped_share": dropped / max(taken + dropped, 1),
        "jitter_p50_us": (fast[0].jitter_p50_ns or 0) / 1e3,
        "jitter_p99_us": (fast[0].jitter_p99_ns or 0) / 1e3,
        "call_p50_us": sum(s.call_p50_ns or 0 for s in fast) / 1e3,
        "core_share": status.cpu_ns / status.wall_ns,
        "slowdown_share": slowdown,
        "slowed_down": [f"{s.name}: {s.note}" for s in status.sources if s.note],
    }


def measure(hz: float, seconds: float, nice: int, cores: int) -> list[dict[str, Any]]:
    idle = summarize(sample(hz, seconds, nice), hz, "idle", None)
    crowd = Busy(cores)
    try:
        with_s: list[float] = []
        without_s: list[float] = []
        statuses = []
        for _ in range(3):
            begun, before = time.perf_counter(), crowd.work()
            time.sleep(seconds)
            without_s.append((crowd.work() - before) / (time.perf_counter() - begun))
            begun, before = time.perf_counter(), crowd.work()
            statuses.append(sample(hz, seconds, nice))
            with_s.append((crowd.work() - before) / (time.perf_counter() - begun))
    finally:
        crowd.close()
    slowdown = 1 - statistics.median(with_s) / statistics.median(without_s)
    worst = min(statuses, key=lambda s: s.sources[0].achieved_hz or 0)
    return [idle, summarize(worst, hz, f"{cores} busy", slowdown)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--nice", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows = [row for hz in RATES_HZ for row in measure(hz, options.seconds, options.nice, cores)]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'rate':>8}  {'load':<8} {'achieved':>8} {'late':>7} {'dropped':>7} "
        f"{'jitter p50/p99':>18} {'a sample':>9} {'of a core':>9} {'slowdown':>8}"
    )
    for row in rows:
        slowdown = "–" if row["slowdown_share"] is None else f"{row['slowdown_share']:.1%}"
        jitter = f"{row['jitter_p50_us']:.0f}/{row['jitter_p99_us']:.0f} µs"
        print(
            f"{row['requested_hz']:>5.0f} Hz  {row['load']:<8} {row['achieved_share']:>8.1%} "
            f"{row['late_share']:>7.2%} {row['dropped_share']:>7.2%} {jitter:>18} "
            f"{row['call_p50_us']:>6.0f} µs {row['core_share']:>9.2%} {slowdown:>8}"
        )
        for note in row["slowed_down"]:
            print(f"          {note}")


if __name__ == "__main__":
    main()
