"""Measures of loading, as ranks see it while they train: rates, waits, memory of whoever loads."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from chopper.workloads.batch import Batch

ACTORS = ("SourceLoader", "PlannerActor", "DataConstructor")


@dataclass
class Window:
    """One rank's view of a stretch of the measured steps."""

    elapsed_s: float
    own_cpu_s: float
    """Time of a core that this rank took, with what it started."""
    busy_cpu_s: float
    """That all programs of this machine took."""
    loaded: int
    """Samples that were loaded, of this rank's or, in the first one's window, of all."""
    wait_s: float = 0.0
    compute_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cells: int = 0

    @classmethod
    def now(cls, loaded: int) -> Window:
        """Read the clocks, now that so many samples were loaded; two readings make a stretch."""
        here = psutil.Process()
        own_s = 0.0
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                own_s += sum(process.cpu_times()[:2])
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # What guests take is counted as the user's, too.
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return cls(time.perf_counter(), own_s, sum(times) - idle_s - guest_s, loaded)

    def end(self, now: Window) -> None:
        """Turn what the clocks said at the beginning into what passed."""
        self.elapsed_s = now.elapsed_s - self.elapsed_s
        self.own_cpu_s = now.own_cpu_s - self.own_cpu_s
        self.busy_cpu_s = now.busy_cpu_s - self.busy_cpu_s
        self.loaded = now.loaded - self.loaded

    def add(self, batch: Batch, waited_s: float, compute_s: float) -> None:
        """A step was trained on."""
        self.wait_s += waited_s
        self.compute_s.append(compute_s)
        self.tokens += sum(map(sum, batch.documents))
        self.cells += batch.tokens.size


def rates(
    windows: Sequence[Window], batch: int, own_cpu_s: float, *, ahead: bool
) -> dict[str, float]:
    """Calculate the rates of a stretch from the windows of all data-parallel ranks.

    ``own_cpu_s``: time of cores that the run took.

    Loaded counts, not trained on: a DataLoader hands batches out in order, and how many of those
    that its workers read a short stretch ends behind is luck. With ``ahead`` it counts up to what
    trainers that never wait would have taken, else up to what they took.
    """
    elapsed_s = max(w.elapsed_s for w in windows)
    compute_s = np.array([w.compute_s for w in windows])
    ranks, steps = compute_s.shape
    trained = steps * ranks * batch
    most = trained
    if ahead:
        busy = 1 - max(w.wait_s / w.elapsed_s for w in windows)
        most = trained / busy if busy > 0 else math.inf
    samples = max(0.0, min(most, sum(w.loaded for w in windows)))
    others_s = windows[0].busy_cpu_s - own_cpu_s
    tokens, cells = sum(w.tokens for w in windows), sum(w.cells for w in windows)
    return {
        "samples_per_s": samples / elapsed_s,
        "tokens_per_s": samples / trained * tokens / elapsed_s,
        "data_wait_ratio": statistics.fmean(w.wait_s / w.elapsed_s for w in windows),
        "compute_imbalance_ratio": float(np.mean(compute_s.max(0) / compute_s.mean(0))),
        "slowest_rank_ns": float(compute_s.max(0).mean()) * 1e9,
        "padding_ratio": 1 - tokens / cells,
        # Clock ticks of many processes: a little less than nothing is nothing.
        "other_programs_ratio": max(0.0, others_s / elapsed_s / (psutil.cpu_count() or 1)),
    }


def role_of(process: psutil.Process) -> str:
    """Name the kind of a process that loads, in a word or two."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    if words and words[0].startswith("ray::"):
        name = words[0].removeprefix("ray::").split(".")[0].split(":")[0]
        return name if name in ACTORS else "Ray itself"
    return "Ray itself" if any("/ray/" in word for word in words) else "workers"


def memory_bytes(pids: Sequence[int]) -> int:
    """Proportional set size of processes, summed; 0 of one that is gone (Linux only)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:"))
    return total * 1024
