"""How well the sampler keeps its rate, and what it costs: beside a thread and beside nvidia-smi.

    python -m benchmarks.sampler [--seconds 10] [--rounds 40] [--steps 8] [--only idle|training]
        [--ways chopper,thread] [--json]

The devices are played by the tests' stand-in for NVIDIA's library (tests/native/nvml_shim.c), so
the calls cost what it costs to look a number up; a driver adds its own. All ways read the same of
each device: SM and memory clock, power, event reasons.

chopper       the sampler process: its fast tier; `all tiers` with counters, activity, limits;
              `renewed` of devices whose clocks are renewed every 20 ms, power every 100 ms
thread        nvidia-ml-py in a thread of the program, sleeping to absolute deadlines
smi -lms      a process that prints text at that interval, parsed by a thread (_smi.c)
smi           such a process for each sample

First on an otherwise idle machine. Then beside two ranks that train the debug Llama under FSDP2:
first for a while without a pause, which tells how well the rate is kept; then for some steps
running and for some paused, in turns, which tells what is added to a step. Each pair of blocks
gives the ratio of their median steps; of all pairs stand the median, the quartiles, and the
interval that holds the median in 95 of 100 cases, from the order of the ratios alone. Where that
interval holds both more and less than what is asked, the answer is that it cannot be told.

A share of a core is CPU time while it samples; what starting costs once is told beside it. On time
is a sample that began within half a period of its deadline, of all deadlines that there were.
Missed are deadlines that passed without a sample. Achieved is the rate of what was asked for:
chopper reads less often where sensors are renewed less often, or to take 1 % of a core at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
FAST_HZ = 100.0
FINEST_HZ = 1000.0
ALLOWED_SHARE = 0.005
"""What a sampler may add to a step."""
WAYS = ("chopper", "thread", "smi -lms", "smi")
CHOPPERS = ("chopper", "chopper all tiers", "chopper renewed", "chopper all tiers, renewed")


class Way(Protocol):
    """One way to sample, from start to stop."""

    def start(self) -> None: ...

    def pause(self, paused: bool) -> None: ...

    def stop(self) -> dict[str, Any]:
        """Times of the first device's samples in s, CPU time in s, and what else is known."""
        ...


class Chopper:
    """The sampler process."""

    def __init__(self, hz: float, *, all_tiers: bool = False) -> None:
        from chopper.collectors.nvml import NvmlCollector
        from chopper.collectors.sampler import SamplerProcess

        self._folder = tempfile.TemporaryDirectory()
        specs = NvmlCollector(hz=hz).specs(None)  # type: ignore[arg-type]
        self._hz = hz
        chosen = specs if all_tiers else specs[:1]
        self._process = SamplerProcess(
            "bench", Path(self._folder.name), chosen, cpu_ratio=NvmlCollector.cpu_ratio
        )

    def start(self) -> None:
        self._process.start()

    def pause(self, paused: bool) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def stop(self) -> dict[str, Any]:
        from chopper.storage.streams import read_stream

        status = self._process.stop()
        if status is None or status.state != "complete":
            raise SystemExit(f"the sampler failed: {status}")
        table, _ = read_stream(Path(self._folder.name) / "device_clock.arrow", "device_clock")
        self._folder.cleanup()
        of_first = table.filter(table["device_id"].to_numpy() == 0)
        fast = status.sources[0]
        due = fast.samples_count + fast.dropped_count
        return {
            "times_s": (of_first["time_ns"].to_numpy() / 1e9).tolist(),
            "cpu_s": status.cpu_ns / 1e9,
            "wall_s": status.wall_ns / 1e9,
            "achieved_share": (fast.achieved_hz or 0) / self._hz,
            "on_time_share": (fast.samples_count - fast.late_count) / max(due, 1),
            "late": fast.late_count,
            "missed": fast.dropped_count,
            "start_cpu_s": status.startup_cpu_ns / 1e9,
        }


class Polling:
    """A thread of this process; what it does at each deadline, subclasses say."""

    def __init__(self, hz: float) -> None:
        self._period_s = 1 / hz
        self._times_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._cpu_s = 0.0
        self._late = self._missed = 0
        self._paused = False

    def _open(self) -> None: ...

    def _read(self) -> None: ...

    def _close(self) -> None: ...

    def start(self) -> None:
        self._open()
        self._begun = time.monotonic()
        self._children = _children_cpu_s()
        self._thread.start()

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def _run(self) -> None:
        deadline = time.monotonic()
        while not self._stop.is_set():
            if not self._paused:
                self._late += time.monotonic() - deadline > self._period_s / 2
                self._times_s.append(time.time())
                self._read()
            deadline += self._period_s
            over = time.monotonic() - deadline
            if over >= 0:
                missed = int(over // self._period_s) + 1
                self._missed += missed
                deadline += missed * self._period_s
            self._stop.wait(max(deadline - time.monotonic(), 0))
        self._cpu_s = time.thread_time()

    def stop(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        self._close()
        taken = len(self._times_s)
        return {
            "times_s": self._times_s,
            "cpu_s": self._cpu_s + _children_cpu_s() - self._children,
            "wall_s": time.monotonic() - self._begun,
            "on_time_share": (taken - self._late) / max(taken + self._missed, 1),
            "late": self._late,
            "missed": self._missed,
        }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Thread(Polling):
    """nvidia-ml-py in a thread."""

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        count = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self.rows: list[tuple[Any, ...]] = []

    def _read(self) -> None:
        nvml = self._nvml
        for index, handle in enumerate(self._handles):
            self.rows.append(
                (
                    time.time_ns(),
                    index,
                    nvml.nvmlDeviceGetClockInfo(handle, 1),
                    nvml.nvmlDeviceGetClockInfo(handle, 2),
                    nvml.nvmlDeviceGetPowerUsage(handle),
                    nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                )
            )

    def _close(self) -> None:
        self._nvml.nvmlShutdown()


class SmiLoop(Polling):
    """Text of one process that goes on."""

    def _open(self) -> None:
        self._smi = subprocess.Popen(
            [os.environ["BENCHMARK_SMI"], str(round(self._period_s * 1e3))],
            stdout=subprocess.PIPE,
            text=True,
        )

    def _run(self) -> None:
        assert self._smi.stdout is not None
        rows = []
        for line in self._smi.stdout:
            moment, index, *rest = line.split(", ")
            rows.append((float(moment), int(index), *rest))
            if index == "0":
                self._times_s.append(float(moment))
        self._cpu_s = time.thread_time()

    def pause(self, paused: bool) -> None:
        self._smi.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def stop(self) -> dict[str, Any]:
        self._smi.terminate()
        self._smi.wait()
        found = super().stop()
        assert self._smi.stdout is not None
        self._smi.stdout.close()
        # It sleeps between its readings: there are no deadlines to be late for.
        return found | {"on_time_share": None, "late": None, "missed": None}


class Smi(Polling):
    """One process a sample."""

    def _read(self) -> None:
        text = subprocess.run(
            [os.environ["BENCHMARK_SMI"]], capture_output=True, text=True, check=True
        ).stdout
        self.rows = [line.split(", ") for line in text.splitlines()]


def way(name: str, hz: float) -> Way:
    """A way to sample by its name."""
    if name.startswith("chopper"):
        return Chopper(hz, all_tiers="all tiers" in name)
    return {"thread": Thread, "smi -lms": SmiLoop, "smi": Smi}[name](hz)


def judged(name: str, hz: float, devices: int, load: str, found: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run."""
    times = found["times_s"]
    period = 1 / hz
    gaps = sorted(b - a for a, b in pairwise(times)) or [float("inf")]
    whole = max(round((times[-1] - times[0]) / period), 1) if times else 1
    return {
        "way": name,
        "requested_hz": hz,
        "devices": devices,
        "load": load,
        "achieved_share": found.get("achieved_share", (len(times) - 1) / whole),
        "on_time_share": found["on_time_share"],
        "late": found["late"],
        "missed": found["missed"],
        "gap_p50_periods": gaps[len(gaps) // 2] / period,
        "gap_p99_periods": gaps[len(gaps) * 99 // 100] / period,
        "core_share": found["cpu_s"] / found["wall_s"],
        "start_cpu_s": found.get("start_cpu_s"),
    }


def added(ratios: list[float]) -> dict[str, Any]:
    """What pairs of blocks say of the time that is added to a step."""
    ordered = sorted(ratios)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    below = within = 0.0
    count = 0
    for count in range(len(ordered) // 2 + 1):
        within += math.comb(len(ordered), count) / 2 ** len(ordered)
        if within > 0.025:
            break
        below = within
    least, most = (ordered[count - 1], ordered[-count]) if below else (-math.inf, math.inf)
    return {
        "added_median_share": statistics.median(ordered),
        "added_quartiles_share": [quartiles[0], quartiles[2]],
        "added_interval_share": [least, most],
        "pairs": len(ordered),
    }


def verdict(row: dict[str, Any]) -> str:
    """In words, whether a way adds time to a step, and whether it is more than what is allowed."""
    least, most = row["added_interval_share"]
    if least > 0:
        adds = f"adds {least:.2%} to {most:.2%}"
    elif most < 0:
        adds = f"steps were {-most:.2%} to {-least:.2%} shorter beside it"
    else:
        adds = f"not told apart from none ({least:+.2%} to {most:+.2%})"
    if most <= ALLOWED_SHARE:
        bar = f"at most {ALLOWED_SHARE:.1%}"
    elif least > ALLOWED_SHARE:
        bar = f"more than {ALLOWED_SHARE:.1%}"
    else:
        bar = f"whether more than {ALLOWED_SHARE:.1%} cannot be told"
    return f"{row['way']}: {adds}; {bar} (95 of 100 cases, {row['pairs']} pairs)"


def environment(folder: Path, devices: int, *, renewed: bool = False) -> dict[str, str]:
    """Build the stand-ins and say how they are found; ``renewed``: of sensors that change."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("no C compiler to build the stand-in for libnvidia-ml.so.1")
    library = folder / "libnvidia-ml.so.1"
    shim = ROOT / "tests/native/nvml_shim.c"
    flags = ("-O2", "-w")
    subprocess.run(
        [
            compiler,
            *flags,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnvidia-ml.so.1",
            "-o",
            library,
            shim,
        ],
        check=True,
    )
    smi = folder / "smi"
    source = ROOT / "benchmarks/_smi.c"
    subprocess.run([compiler, *flags, "-o", smi, source, "-ldl"], check=True)
    fields = (3, 4, 38, 45, 52, 74, 75, 76, 77, 79, 80, 82, 83, 94, 185, 197, 198)
    script = folder / f"script{devices}.txt"
    script.write_text(
        "".join(
            f"gpu {i} GPU-0000000{i}-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3\n"
            f"set {i} sm 1980\nset {i} mem 2619\nset {i} field:186 650000\nset {i} power 650000\n"
            f"set {i} reasons 4\nset {i} temperature 60\nset {i} utilization 90\n"
            f"set {i} memory_used 1000000\nset {i} gpm 1\nset {i} gpm:2 90\nset {i} gpm:5 60\n"
            f"set {i} field:138:all 10\nset {i} field:139:all 10\n"
            + "".join(f"set {i} field:{field} 1\n" for field in fields)
            + (f"ripple {i} sm 20\nripple {i} field:186 100\n" if renewed else "")
            for i in range(devices)
        )
    )
    return {
        "LD_LIBRARY_PATH": str(folder),
        "NVML_SHIM_SCRIPT": str(script),
        "BENCHMARK_SMI": str(smi),
        "PYTHONPATH": str(ROOT),
    }


def idle(name: str, hz: float, devices: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One way on a machine that does nothing else, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", name, str(hz), str(seconds)],
        env=os.environ | environment(folder, devices, renewed="renewed" in name),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return judged(name, hz, devices, "idle", json.loads(done.stdout))


def alone(name: str, hz: float, seconds: float) -> None:
    """Child of `idle`: sample for a while and print what was found."""
    chosen = way(name, hz)
    chosen.start()
    time.sleep(seconds)
    print(json.dumps(chosen.stop()))


def worker(rounds: int, steps: int, ways: list[str], output: str) -> None:
    """One rank: steps without and with each way; rank 0 samples and writes what it found."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from chopper.workloads.llama import SIZES, Llama

    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    config = SIZES["debug"]
    model = Llama(config)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocabulary_count, (2, 128))

    def timed(count: int) -> list[float]:
        durations = []
        for _ in range(count):
            begun = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            durations.append(time.perf_counter() - begun)
        return durations

    def sampled(kind: str) -> Way | None:
        sampling = way(kind, FAST_HZ) if first else None
        if sampling is not None:
            sampling.start()
            time.sleep(0.5)  # what its start costs is in no step
        dist.barrier()
        return sampling

    def block(sampling: Way | None, paused: bool) -> float:
        if sampling is not None:
            sampling.pause(paused)
        dist.barrier()
        return statistics.median(timed(steps + 1)[1:])

    timed(5)
    found: dict[str, dict[str, Any]] = {}
    ratios: dict[str, list[float]] = {kind: [] for kind in ways}
    step_s: list[float] = []
    for kind in ways:
        sampling = sampled(kind)
        timed(150)
        if sampling is not None:
            found[kind] = sampling.stop()
        dist.barrier()
    for kind in ways:
        sampling = sampled(kind)
        for count in range(rounds):
            # Paused first, then last: what drifts falls on both.
            begins = bool(count % 2)
            steps_s = {paused: block(sampling, paused) for paused in (begins, not begins)}
            ratios[kind].append(steps_s[False] / steps_s[True] - 1)
            step_s.append(steps_s[True])
        if sampling is not None:
            sampling.pause(False)
            sampling.stop()
        dist.barrier()
    if first:
        (Path(output) / "result.json").write_text(
            json.dumps([ratios, found, statistics.median(step_s)])
        )
    dist.barrier()
    dist.destroy_process_group()


def beside_training(
    rounds: int, steps: int, ways: list[str], devices: int, folder: Path
) -> list[dict[str, Any]]:
    """These ways beside two ranks that train."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, "--worker", str(folder)]
    command += ["--rounds", str(rounds), "--steps", str(steps), "--ways", ",".join(ways)]
    variables = os.environ | environment(folder, devices)
    variables |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    with contextlib.suppress(KeyError):
        del variables["CHOPPER_OUTPUT"]
    subprocess.run(command, check=True, env=variables)
    ratios, found, step_s = json.loads((folder / "result.json").read_text())
    rows = []
    for name in ways:
        row = judged(name, FAST_HZ, devices, "2 ranks", found[name])
        rows.append(row | added(ratios[name]) | {"step_s": step_s})
    return rows


def print_heading() -> None:
    print(
        f"{'way':<26} {'GPUs':>4} {'rate':>7}  {'load':<8} {'achieved':>8} {'on time':>8} "
        f"{'late':>6} {'missed':>6} {'gap p50/p99':>18} {'of a core':>9} {'start':>7}"
    )


def print_row(row: dict[str, Any]) -> None:
    gap = f"{row['gap_p50_periods']:.2f}/{row['gap_p99_periods']:.2f}"
    start = "–" if row["start_cpu_s"] is None else f"{row['start_cpu_s']:.2f} s"
    counts = ["–" if row[k] is None else f"{row[k]}" for k in ("late", "missed")]
    on_time = "–" if row["on_time_share"] is None else f"{row['on_time_share']:.2%}"
    print(
        f"{row['way']:<26} {row['devices']:>4} {row['requested_hz']:>4.0f} Hz  {row['load']:<8} "
        f"{row['achieved_share']:>8.2%} {on_time:>8} {counts[0]:>6} {counts[1]:>6} "
        f"{gap:>10} periods {row['core_share']:>9.2%} {start:>7}"
    )


def print_added(rows: list[dict[str, Any]]) -> None:
    """What each way adds to a step, and whether that can be told at all."""
    print(f"\n{'way':<26} {'added to a step':>15} {'quartiles of the pairs':>24}")
    for row in rows:
        first, third = row["added_quartiles_share"]
        spread = f"{first:+.2%} to {third:+.2%}"
        print(f"{row['way']:<26} {row['added_median_share']:>+15.2%} {spread:>24}")
    print(f"of steps of {rows[0]['step_s'] * 1e3:.0f} ms")
    for row in rows:
        print(verdict(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("idle", "training"), help="one half of it")
    parser.add_argument("--ways", default=",".join(WAYS), help="of those beside training")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ways = options.ways.split(",")
    if options.alone:
        alone(options.alone[0], float(options.alone[1]), float(options.alone[2]))
        return
    if options.worker:
        worker(options.rounds, options.steps, ways, options.worker)
        return
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        if not options.json:
            print_row(row)

    if not options.json:
        print_heading()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "training":
            for kind in (*CHOPPERS, *WAYS[1:]):
                show(idle(kind, FAST_HZ, 8, options.seconds, folder))
            for kind in ("chopper", *WAYS[1:3]):
                show(idle(kind, FINEST_HZ, 1, options.seconds, folder))
        if options.only != "idle":
            for row in beside_training(options.rounds, options.steps, ways, 8, folder):
                show(row)
    if options.json:
        print(json.dumps(rows, indent=2))
    elif options.only != "idle":
        print_added([row for row in rows if "pairs" in row])


if __name__ == "__main__":
    main()
