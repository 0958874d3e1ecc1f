"""One worker of a calibration: measures in a process of its own, in step with its peers.

Its result goes into a file.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from chopper.errors import CollectorUnavailable
from chopper.hardware.calibration import MIB, Measured
from chopper.hardware.environment import cpu_model
from chopper.storage.files import unpack_message

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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
