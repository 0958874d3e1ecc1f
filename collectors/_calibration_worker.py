"""One worker of a calibration: measures in a process of its own, in step with its peers.

Its orders come on stdin, its progress goes to stdout, its result into a file.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from chopper.errors import CollectorUnavailable
from chopper.hardware.calibration import Measured
from chopper.hardware.environment import cpu_model
from chopper.storage.files import unpack_message

if TYPE_CHECKING:
    from collections.abc import Callable


MIB = 1024**2
# Everything is measured this often, in turn: a disturbance then spoils some repeats of each rate,
# not all of one.
ROUNDS = 3
_MIN_LINK_REPEATS = 3
_MAX_REPEATS = 50

Section = Literal["launch", "gemm", "memory", "transfer", "link"]


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What the workers measure, and for how long."""

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
    directory: str


class Result(msgspec.Struct, kw_only=True):
    """What one worker found."""

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
    """What a failed program said last."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


class _Worker:
    """Measures in one process, in step with its peers."""

    def __init__(self, job: Job) -> None:
        import torch

        self.torch = torch
        self.job = job
        torch.set_num_threads(job.threads)
        self.device = torch.device(job.device_type, 0)
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
            if job.rank == 0:
                os.write(1, _TITLES[section].encode() + b"\n")
            if section == "link":
                self._barrier()
            elif job.rank >= job.ranks:
                continue
            else:
                self._in_step()
            getattr(self, f"_{section}")()
        if job.world_size > 1:
            self._barrier()
            self.torch.distributed.destroy_process_group()
        return self.result

    def _join(self) -> None:
        backend = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}.get(self.job.device_type)
        if backend is None:
            raise CollectorUnavailable(f"no collectives known for {self.job.device_type}")
        self.result.link_backend = backend
        # Gloo looks its own name up, which some machines cannot resolve: stay on the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.torch.distributed.init_process_group(
            backend,
            init_method=f"file://{self.job.directory}/store",
            rank=self.job.rank,
            world_size=self.job.world_size,
        )

    def _barrier(self) -> None:
        """Wait for all workers."""
        self.torch.distributed.barrier()

    def _in_step(self) -> None:
        """Wait for those that measure the same."""
        if self.job.ranks > 1:
            self._barrier()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            self.torch.accelerator.synchronize()

    def _time_s(self, work: Callable[[], object], budget_s: float) -> list[float]:
        """Seconds per call, over repeats that fill the budget, after a warm-up.

        On a device several calls are timed as one, so that launching them does not count.
        """
        self._batch_s(work, 1)
        once_s = self._batch_s(work, 1)
        calls = 1 if self.device.type == "cpu" else max(round(0.01 / once_s), 1)
        started_s = time.perf_counter()
        times_s: list[float] = []
        while len(times_s) < _MAX_REPEATS:
            times_s.append(self._batch_s(work, calls))
            spent_s = time.perf_counter() - started_s
            if spent_s > budget_s:
                break
        return times_s

    def _batch_s(self, work: Callable[[], object], calls: int) -> float:
        started_s = time.perf_counter()
        for _ in range(calls):
            work()
        self._synchronize()
        return (time.perf_counter() - started_s) / calls

    def _launch(self) -> None:
        one = self.torch.ones(1, device=self.device)
        other = self.torch.ones(1, device=self.device)

        def per_launch_ns(calls: int) -> float:
            started_ns = time.perf_counter_ns()
            for _ in range(calls):
                one.add_(other)
            return (time.perf_counter_ns() - started_ns) / calls

        def roundtrip_ns() -> int:
            started_ns = time.perf_counter_ns()
            one.add_(other)
            self._synchronize()
            return time.perf_counter_ns() - started_ns

        samples = []
        for _ in range(30):
            samples.append(per_launch_ns(100))
            self._synchronize()
        self.result.launch_ns = round(statistics.median(samples))
        self.result.roundtrip_ns = round(statistics.median(roundtrip_ns() for _ in range(100)))

    def _gemm(self) -> None:
        torch = self.torch
        kinds = {
            "fp32": torch.float32,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "fp64": torch.float64,
        }
        if self.device.type == "cuda" and torch.version.hip is None:
            kinds["tf32"] = torch.float32
        largest = max(self.job.plan.gemm_sizes)
        # Random values: on a device the power, and with it the clock, depends on the data.
        values = torch.randn(largest, largest, device=self.device)
        times_s: dict[tuple[str, int], list[float]] = {}
        for _ in range(ROUNDS):
            for name, dtype in kinds.items():
                # Together with its peers: one that is slow must not leave the others alone.
                self._in_step()
                torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
                try:
                    self._gemm_round(name, values.to(dtype), times_s)
                except (RuntimeError, TypeError) as exc:  # no such kernel, or too little memory
                    self.result.absent[f"gemm.{name}"] = last_line(str(exc))
        torch.backends.cuda.matmul.allow_tf32 = False
        for (name, n), found_s in times_s.items():
            what = f"{name} {n}x{n}x{n}"
            rates = self.result.gemm.setdefault(name, [])
            rates.append(_measured(what, 2 * n**3, found_s))

    def _gemm_round(
        self, name: str, values: Any, times_s: dict[tuple[str, int], list[float]]
    ) -> None:
        torch = self.torch
        budget_s = self.job.plan.gemm_s
        smaller: int | None = None
        for n in self.job.plan.gemm_sizes:
            # A data type that the device emulates takes seconds at the next size: the last tells.
            if smaller is not None:
                expected_s = min(times_s[name, smaller]) * (n / smaller) ** 3
                if expected_s > budget_s and (name, n) not in times_s:
                    break
            a, b = values[:n, :n].contiguous(), values[-n:, -n:].contiguous()
            work = partial(torch.mm, a, b, out=torch.empty_like(a))
            times_s.setdefault((name, n), []).extend(self._time_s(work, budget_s / ROUNDS))
            smaller = n

    def _memory(self) -> None:
        torch = self.torch
        size_bytes = self._memory_size_bytes()
        count = size_bytes // 4
        a, b, out = (torch.ones(count, device=self.device) for _ in range(3))
        work: list[tuple[str, int, Callable[[], object]]] = [
            ("copy", 2, lambda: out.copy_(a)),
            ("triad", 3, lambda: torch.add(a, b, alpha=2.0, out=out)),
        ]
        times_s: dict[str, list[float]] = {name: [] for name, _, _ in work}
        for _ in range(ROUNDS):
            for name, _passes, call in work:
                self._in_step()
                times_s[name].extend(self._time_s(call, self.job.plan.memory_s / ROUNDS))
        for name, passes, _call in work:
            moved = passes * count * 4
            rate = _measured(name, moved, times_s[name], size_bytes=moved)
            self.result.memory.append(rate)

    def _memory_size_bytes(self) -> int:
        """Per array: far beyond the caches, far below what is free."""
        wanted = self.job.plan.memory_bytes
        if self.device.type == "cpu":
            import psutil

            free = psutil.virtual_memory().available // self.job.ranks
        else:
            free = self.torch.accelerator.get_memory_info()[0]
        return max(min(wanted, free // 16), 1024**2)

    def _transfer(self) -> None:
        torch = self.torch
        size_bytes = min(self.job.plan.memory_bytes // 4, 256 * MIB)
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        here = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        work: list[tuple[str, Callable[[], object]]] = [
            ("host to device", lambda: here.copy_(host, non_blocking=True)),
            ("device to host", lambda: host.copy_(here, non_blocking=True)),
        ]
        if self.job.ranks == 1 and torch.accelerator.device_count() > 1:
            there = torch.empty(
                size_bytes, dtype=torch.uint8, device=torch.device(self.device.type, 1)
            )
            work.append(("device to device", lambda: there.copy_(here, non_blocking=True)))
        else:
            self.result.absent["transfer.device to device"] = (
                "one accelerator only" if self.job.ranks == 1 else "see the link"
            )
        for name, call in work:
            self._in_step()
            times_s = self._time_s(call, self.job.plan.memory_s / 2)
            self.result.transfer.append(_measured(name, size_bytes, times_s, size_bytes=size_bytes))

    def _link(self) -> None:
        """Bus bandwidth, as nccl-tests defines it (PERFORMANCE.md): what a link must carry.

        all_reduce: S/t × 2(n−1)/n; all_gather with S the gathered size: S/t × (n−1)/n.
        """
        torch = self.torch
        dist = torch.distributed
        n = self.job.world_size
        # Renamed in torch 2.13, where the old name warns.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for size_bytes in self.job.plan.link_bytes:
            count = size_bytes // 4 // n * n
            whole = torch.ones(count, device=self.device)
            part = torch.ones(count // n, device=self.device)
            work: list[tuple[str, float, Callable[[], object]]] = [
                ("all_reduce", 2 * (n - 1) / n, partial(dist.all_reduce, whole)),
                ("all_gather", (n - 1) / n, partial(gather, whole, part)),
            ]
            for name, factor, call in work:
                times_s = self._time_together_s(call, self.job.plan.link_s)
                on_bus = factor * count * 4
                what = f"{name} {size_bytes / MIB:g} MiB"
                self.result.link.append(_measured(what, on_bus, times_s, size_bytes=size_bytes))

    def _time_together_s(self, call: Callable[[], object], budget_s: float) -> list[float]:
        """Like ``_time_s`` for collectives: all ranks must make the same number of calls."""
        call()
        self._barrier()
        once_s = self._batch_s(call, 1)
        wanted = self.torch.tensor(
            [min(max(int(budget_s / once_s), _MIN_LINK_REPEATS), _MAX_REPEATS)], device=self.device
        )
        self.torch.distributed.broadcast(wanted, src=0)
        times_s = []
        for _ in range(int(wanted.item())):
            # Without this one rank's lateness counts as the link's slowness.
            self._barrier()
            times_s.append(self._batch_s(call, 1))
        return times_s


_TITLES: dict[Section, str] = {
    "launch": "launch latency",
    "gemm": "matrix products",
    "memory": "memory bandwidth",
    "transfer": "copies between host and device",
    "link": "collectives",
}


def _measured(
    what: str, amount: float, times_s: list[float], size_bytes: int | None = None
) -> Measured:
    median_s = statistics.median(times_s)
    low_s = high_s = median_s
    if len(times_s) > 1:
        low_s, _, high_s = statistics.quantiles(times_s, n=4, method="inclusive")
    return Measured(
        what=what,
        best_per_s=amount / min(times_s),
        median_per_s=amount / median_s,
        spread_ratio=(high_s - low_s) / median_s,
        repeats_count=len(times_s),
        size_bytes=size_bytes,
    )


def main() -> None:
    """Body of a worker: its job on stdin, progress on stdout, its result in a file."""
    job = unpack_message(sys.stdin.buffer.readline(), Job)
    result = _Worker(job).run()
    (Path(job.directory) / f"result-{job.rank}.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
