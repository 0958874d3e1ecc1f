"""Measure what this machine achieves: matrix products, memory, links, launches.

Everything is measured in worker processes that do the same at the same time, as ranks do, so that
a rank's ceiling on shared cores is what a rank can have. The caller's own process is left as it
is: it needs no torch, and its thread counts stay.

Each rate is repeated after a warm-up and kept as its best, its median and its spread.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import time
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from chopper.errors import CollectorUnavailable, UsageError
from chopper.fresh_python import own_python
from chopper.hardware.calibration import MIB, Calibration, Measured
from chopper.hardware.environment import cpu_model, loopback
from chopper.limits import usable_cores
from chopper.storage.caches import scratch
from chopper.storage.files import pack_message, unpack_message
from chopper.version import __version__

if TYPE_CHECKING:
    from chopper.hardware.measure import Call

ROUNDS = 3
"""In which each rate is measured."""
Section = Literal["launch", "gemm", "memory", "transfer", "link"]


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """Sizes that the workers measure, and for how long."""

    gemm_sizes: tuple[int, ...]
    gemm_s: float
    """Time per shape and data type."""
    memory_bytes: int
    memory_s: float
    link_bytes: tuple[int, ...]
    link_s: float


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """One worker's orders."""

    rank: int
    world_size: int
    ranks: int
    """The first so many measure everything; the others stand by for the link."""
    threads: int
    device_type: str
    sections: tuple[Section, ...]
    plan: Plan


class Result(msgspec.Struct, kw_only=True):
    """Rates that one worker measured."""

    torch_version: str
    device_name: str
    gemm: dict[str, list[Measured]] = {}
    memory: list[Measured] = []
    transfer: list[Measured] = []
    link: list[Measured] = []
    link_backend: str | None = None
    launch_ns: int | None = None
    roundtrip_ns: int | None = None
    absent: dict[str, str] = {}


def last_line(text: str) -> str:
    """Return the last line that a failed program wrote."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it gave no reason"


class _Worker:
    """Measures in one process, in step with its peers."""

    def __init__(self, job: Job, directory: Path) -> None:
        import torch

        from chopper.hardware import measure

        self.torch, self.measure, self.job, self.directory = torch, measure, job, directory
        torch.set_num_threads(job.threads)
        if job.device_type == "cpu":
            self.device = torch.device("cpu")
            name = cpu_model() or platform.machine()
        else:
            self.device = torch.device(job.device_type, job.rank)
            torch.accelerator.set_device_index(job.rank)
            name = torch.get_device_module(self.device).get_device_name(self.device)
        self.result = Result(torch_version=str(torch.__version__), device_name=name)

    def run(self) -> Result:
        """Measure each section, all workers beginning it together."""
        job = self.job
        if job.world_size > 1:
            self._join()
        for section in job.sections:
            if section == "link" or (job.rank < job.ranks and job.ranks > 1):
                self.torch.distributed.barrier()
            if section == "link" or job.rank < job.ranks:
                getattr(self, f"_{section}")()
        if job.world_size > 1:
            self.torch.distributed.barrier()
            self.torch.distributed.destroy_process_group()
        return self.result

    def _join(self) -> None:
        backend = self.measure.BACKEND.get(self.job.device_type)
        if backend is None:
            raise CollectorUnavailable(f"no collectives known for {self.job.device_type}")
        self.result.link_backend = backend
        # Gloo looks its own name up, which some machines cannot resolve: stay on the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.torch.distributed.init_process_group(
            backend,
            init_method=f"file://{self.directory}/store",
            rank=self.job.rank,
            world_size=self.job.world_size,
        )

    def _launch(self) -> None:
        times_ns = self.measure.launch_times_ns(self.device)
        self.result.launch_ns, self.result.roundtrip_ns = times_ns

    def _gemm(self) -> None:
        torch, budget_s = self.torch, self.job.plan.gemm_s
        sizes = self.job.plan.gemm_sizes
        dtypes = {
            "fp32": torch.float32,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp64": torch.float64,
        }
        if self.device.type == "cuda" and torch.version.hip is None:
            dtypes["tf32"] = torch.float32
        # Random values: on a device the power, and with it the clock, depends on the data.
        random = torch.randn(max(sizes) ** 2, device=self.device)
        bench = self.measure.Bench[tuple[str, int]](self.device, ranks=self.job.ranks)
        for name, dtype in dtypes.items():
            try:
                values, out = random.to(dtype), torch.empty_like(random, dtype=dtype)
                smaller, call_s = sizes[0], 0.0
                for n in sizes:
                    # A type that the device emulates takes seconds at the next size.
                    if call_s * (n / smaller) ** 3 > budget_s:
                        break
                    call = self.measure.product(values, out, n, n, n)
                    call = self._with_tf32(call) if name == "tf32" else call
                    call_s = bench.add((name, n), call, flop=2 * n**3)
                    smaller = n
            except (RuntimeError, TypeError) as exc:  # no such kernel, or too little memory
                self.result.absent[f"gemm.{name}"] = last_line(str(exc))
        for (name, n), times_s in bench.run(ROUNDS, budget_s=budget_s / ROUNDS).items():
            rate = self.measure.rate(f"{name} {n}x{n}x{n}", 2 * n**3, times_s)
            self.result.gemm.setdefault(name, []).append(rate)

    def _with_tf32(self, call: Call) -> Call:
        matmul = self.torch.backends.cuda.matmul

        def allowed() -> None:
            matmul.allow_tf32 = True
            call()
            matmul.allow_tf32 = False

        return allowed

    def _memory(self) -> None:
        count = self._array_bytes() // 4
        kernels = self.measure.stream(
            [self.torch.ones(count, device=self.device) for _ in range(3)]
        )
        bench = self.measure.Bench[str](self.device, ranks=self.job.ranks)
        for name in ("copy", "triad"):
            passes, call = kernels[name]
            bench.add(name, call, moved_bytes=passes * 4 * count)
        for name, times_s in bench.run(ROUNDS, budget_s=self.job.plan.memory_s / ROUNDS).items():
            moved_bytes = kernels[name][0] * count * 4
            rate = self.measure.rate(name, moved_bytes, times_s, size_bytes=moved_bytes)
            self.result.memory.append(rate)

    def _array_bytes(self) -> int:
        """Size of an array that exceeds all caches and fits in free memory, in bytes."""
        if self.device.type == "cpu":
            import psutil

            free = psutil.virtual_memory().available // self.job.ranks
        else:
            free = self.torch.accelerator.get_memory_info()[0]
        return max(min(self.job.plan.memory_bytes, free // 16), MIB)

    def _transfer(self) -> None:
        torch = self.torch
        size_bytes = min(self.job.plan.memory_bytes // 4, 256 * MIB)

        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        here = torch.empty_like(host, device=self.device, pin_memory=False)
        bench = self.measure.Bench[str](self.device, ranks=self.job.ranks)
        bench.add("host to device", lambda: here.copy_(host, non_blocking=True))
        bench.add("device to host", lambda: host.copy_(here, non_blocking=True))
        if self.job.ranks == 1 and torch.accelerator.device_count() > 1:
            there = torch.empty_like(here, device=torch.device(self.device.type, 1))
            bench.add("device to device", lambda: there.copy_(here, non_blocking=True))
        else:
            self.result.absent["transfer.device to device"] = (
                "one accelerator only" if self.job.ranks == 1 else "see the link"
            )
        for name, times_s in bench.run(1, budget_s=self.job.plan.memory_s / 2).items():
            rate = self.measure.rate(name, size_bytes, times_s, size_bytes=size_bytes)
            self.result.transfer.append(rate)

    def _link(self) -> None:
        """Bus bandwidth, as nccl-tests defines it: what a link must carry."""
        plan, ranks = self.job.plan, self.job.world_size
        collectives = self.measure.Collectives(max(plan.link_bytes), ranks, self.device)
        factors = self.measure.bus_factors(ranks)
        bench = self.measure.Bench[tuple[str, int]](self.device, together=True)
        for size_bytes in plan.link_bytes:
            for name in ("all_reduce", "all_gather"):
                bench.add((name, size_bytes), collectives.call(name, size_bytes))
        times = bench.run(ROUNDS, budget_s=plan.link_s / ROUNDS)
        for (name, size_bytes), times_s in times.items():
            bus_bytes = factors[name] * (size_bytes // 4 // ranks * ranks * 4)
            what = f"{name} {size_bytes / MIB:g} MiB"
            rate = self.measure.rate(what, bus_bytes, times_s, size_bytes=size_bytes)
            self.result.link.append(rate)


def main(directory: Path, orders: str) -> None:
    """Measure as ordered; the result goes into a file of the directory."""
    job = unpack_message(orders, Job)
    result = _Worker(job, directory).run()
    (directory / f"result-{job.rank}.json").write_bytes(msgspec.json.encode(result))


_TIMEOUT_S = 180.0


def plan_of(device_type: str, *, quick: bool) -> Plan:
    """Return what to measure of the host's cores, or of an accelerator."""
    data = files("chopper").joinpath("data", "calibration_plans.json").read_bytes()
    plans = msgspec.json.decode(data, type=dict[str, Plan])
    return plans[("cpu" if device_type == "cpu" else "device") + (", quick" if quick else "")]


def calibrate(
    *,
    device: str = "auto",
    ranks: int = 1,
    threads: int | None = None,
    quick: bool = False,
) -> Calibration:
    """Measure this machine; takes under 30 s, quick under 10 s.

    Args:
        device: ``auto``, ``cpu`` or ``cuda`` (ROCm too).
        ranks: processes that measure at the same time, on an accelerator each or on the host.
        threads: of each; None divides the cores among the ranks.
        quick: fewer shapes and repeats.

    Raises:
        CollectorUnavailable: torch is missing, or a worker failed; the message says why.
        UsageError: the device is not there, or too few of them.
    """
    require_torch()
    if ranks < 1 or (threads is not None and threads < 1):
        raise UsageError("ranks and threads must be at least 1")
    threads = threads or default_threads(ranks)
    device_type, device_count = find_device(device)
    if device_type != "cpu" and ranks > device_count:
        raise UsageError(
            f"{ranks} ranks need {ranks} accelerators, torch sees {device_count}; "
            "ask for fewer ranks, or for --device cpu"
        )
    workers, sections, absent = _sections(ranks, device_type, device_count, quick=quick)
    jobs = [
        Job(
            rank=rank,
            world_size=workers,
            ranks=ranks,
            threads=threads,
            device_type=device_type,
            sections=sections,
            plan=plan_of(device_type, quick=quick),
        )
        for rank in range(workers)
    ]
    merged = _merge(_run_workers(jobs)[:ranks])
    measured = msgspec.structs.asdict(merged) | {"absent": merged.absent | absent}
    return Calibration(
        kind="quick" if quick else "full",
        created_ns=time.time_ns(),
        chopper_version=__version__,
        hostname=socket.gethostname(),
        device_type=device_type,
        ranks=ranks,
        threads=threads,
        cores=usable_cores(),
        link_ranks=workers if merged.link else None,
        **measured,
    )


def _sections(
    ranks: int, device_type: str, device_count: int, *, quick: bool
) -> tuple[int, tuple[Section, ...], dict[str, str]]:
    """Choose the number of workers and what they measure; what they cannot, with the reason."""
    sections: list[Section] = ["launch", "gemm", "memory"]
    absent = {}
    if device_type == "cpu":
        absent["transfer"] = "no accelerator"
    else:
        sections.append("transfer")
    # A link takes two: with one rank, a second worker stands by for the link alone.
    if ranks == 1 and device_type != "cpu" and device_count < 2:
        absent["link"] = "one accelerator only"
    elif ranks == 1 and quick:
        absent["link"] = "not part of a quick calibration of one rank"
    elif device_type == "cpu" and sys.platform == "linux" and loopback() is None:
        absent["link"] = "the loopback has a queue that limits it, or its queue is unknown"
    else:
        sections.append("link")
    return max(ranks, 2 if "link" in sections else 1), tuple(sections), absent


def require_torch() -> None:
    """Raises CollectorUnavailable without torch; does not load it."""
    if find_spec("torch") is None:
        raise CollectorUnavailable(
            "calibration needs torch, which is not installed; pip install torch"
        )


def default_threads(ranks: int) -> int:
    """Threads of each of ``ranks`` processes that share this machine's cores evenly."""
    return max(usable_cores() // ranks, 1)


_FIND_DEVICE = """
import torch
found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
print(found.type if found is not None else "cpu", torch.accelerator.device_count())
"""


def find_device(requested: str) -> tuple[str, int]:
    """Find the kind and number of devices, in a process of its own."""
    if requested == "cpu":
        return "cpu", 0
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FIND_DEVICE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CollectorUnavailable(f"torch cannot be loaded: {last_line(done.stderr)}")
    kind, count = done.stdout.split()[-2:]
    if requested not in ("auto", kind):
        raise UsageError(f"--device {requested}: torch sees no such device, only {kind}")
    return kind, int(count)


def _run_workers(jobs: list[Job]) -> list[Result]:
    """Start a worker for each job, and collect what all measured."""
    # This is not one of a program's ranks, and nothing to be recorded.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CHOPPER_") and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(jobs[0].threads))
    workers: list[subprocess.Popen[bytes]] = []
    with scratch("calibrate") as directory, contextlib.ExitStack() as running:
        for job in jobs:
            errors = running.enter_context((directory / f"stderr-{job.rank}").open("wb"))
            worker = subprocess.Popen(
                own_python(__name__, str(directory), pack_message(job).decode()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                bufsize=0,
            )
            running.enter_context(worker)
            running.callback(worker.kill)  # before it is waited for
            workers.append(worker)
        _await(workers, directory)
        files = [directory / f"result-{job.rank}.json" for job in jobs]
        return [msgspec.json.decode(file.read_bytes(), type=Result) for file in files]


def _await(workers: list[subprocess.Popen[bytes]], directory: Path) -> None:
    """Wait until each worker has closed its stdout, which it does when it ends."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    talking = {worker.stdout: rank for rank, worker in enumerate(workers) if worker.stdout}
    while talking:
        left_s = deadline_s - time.monotonic()
        readable, _, _ = select.select(list(talking), [], [], max(left_s, 0))
        if not readable:
            raise CollectorUnavailable(f"calibration did not end within {_TIMEOUT_S:.0f} s")
        for pipe in readable:
            if pipe.readline():
                continue
            rank = talking.pop(pipe)
            if workers[rank].wait() != 0:
                words = (directory / f"stderr-{rank}").read_text(errors="replace")
                raise CollectorUnavailable(f"calibration failed: {last_line(words)}")


def _merge(results: list[Result]) -> Result:
    """Join the ranks: the median over them of each rate is one rank's share."""
    first = results[0]
    return Result(
        torch_version=first.torch_version,
        device_name=first.device_name,
        gemm={
            dtype: _merge_rates([r.gemm.get(dtype, []) for r in results]) for dtype in first.gemm
        },
        memory=_merge_rates([r.memory for r in results]),
        transfer=_merge_rates([r.transfer for r in results]),
        link=_merge_rates([r.link for r in results]),
        link_backend=first.link_backend,
        launch_ns=_median_ns([r.launch_ns for r in results]),
        roundtrip_ns=_median_ns([r.roundtrip_ns for r in results]),
        absent={what: why for r in reversed(results) for what, why in r.absent.items()},
    )


def _merge_rates(per_rank: list[list[Measured]]) -> list[Measured]:
    by_what: dict[str, list[Measured]] = {}
    for rates in per_rank:
        for rate in rates:
            by_what.setdefault(rate.what, []).append(rate)
    return [
        Measured(
            what=what,
            best_per_s=statistics.median(r.best_per_s for r in rates),
            median_per_s=statistics.median(r.median_per_s for r in rates),
            spread_ratio=max(r.spread_ratio for r in rates),
            repeats_count=sum(r.repeats_count for r in rates),
            size_bytes=rates[0].size_bytes,
        )
        for what, rates in by_what.items()
    ]


def _median_ns(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return round(statistics.median(known)) if known else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
