"""Measure what this machine achieves: matrix products, memory, links, launches.

Everything is measured in worker processes that do the same at the same time, as ranks do, so that
a rank's ceiling on shared cores is what a rank can have. The caller's own process is left as it
is: it needs no torch, and its thread counts stay.

Each rate is repeated after a warm-up and kept as its best, its median and its spread.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import chopper
from chopper._environment import usable_cores
from chopper._version import __version__
from chopper.calibration import Calibration, Measured
from chopper.errors import CollectorUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT_S = 180.0
# Everything is measured this often, in turn: a disturbance then spoils some repeats of each rate,
# not all of one.
_ROUNDS = 3
_MIN_LINK_REPEATS = 3
_MAX_REPEATS = 50

Section = Literal["launch", "gemm", "memory", "transfer", "link"]


class _Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What the workers measure, and for how long."""

    gemm_sizes: tuple[int, ...]
    gemm_s: float
    """Time per shape and data type."""
    memory_bytes: int
    memory_s: float
    link_bytes: tuple[int, ...]
    link_s: float


_MIB = 1024**2
_CPU_FULL = _Plan(
    gemm_sizes=(256, 512, 1024, 2048),
    gemm_s=0.3,
    memory_bytes=128 * _MIB,
    memory_s=0.6,
    link_bytes=(_MIB, 8 * _MIB, 32 * _MIB),
    link_s=0.3,
)
_CPU_QUICK = _Plan(
    gemm_sizes=(256, 512, 1024),
    gemm_s=0.1,
    memory_bytes=128 * _MIB,
    memory_s=0.2,
    link_bytes=(_MIB, 8 * _MIB),
    link_s=0.1,
)
_DEVICE_FULL = _Plan(
    gemm_sizes=(2048, 4096, 8192),
    gemm_s=0.4,
    memory_bytes=1024 * _MIB,
    memory_s=0.5,
    link_bytes=(16 * _MIB, 128 * _MIB, 512 * _MIB),
    link_s=0.4,
)
_DEVICE_QUICK = _Plan(
    gemm_sizes=(4096,),
    gemm_s=0.15,
    memory_bytes=512 * _MIB,
    memory_s=0.15,
    link_bytes=(64 * _MIB,),
    link_s=0.2,
)


class _Job(msgspec.Struct, kw_only=True, frozen=True):
    """One worker's orders."""

    rank: int
    world_size: int
    ranks: int
    """The first so many measure everything; the others stand by for the link."""
    threads: int
    device_type: str
    sections: tuple[Section, ...]
    plan: _Plan
    directory: str


class _Result(msgspec.Struct, kw_only=True):
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


def calibrate(
    *,
    device: str = "auto",
    ranks: int = 1,
    threads: int | None = None,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Measure this machine; takes under 30 s, quick under 10 s.

    Args:
        device: ``auto``, ``cpu`` or ``cuda`` (ROCm too).
        ranks: processes that measure at the same time, each on its own accelerator or all on the
            host's cores.
        threads: threads of each; None divides the cores among the ranks.
        quick: fewer shapes and repeats.
        progress: told in a few words what is being measured.

    Raises:
        CollectorUnavailable: torch is missing, or a worker failed; the message says why.
        UsageError: the device is not there, or too few of them.
    """
    require_torch()
    if ranks < 1 or (threads is not None and threads < 1):
        raise UsageError("ranks and threads begin at 1")
    cores = usable_cores()
    threads = threads or default_threads(ranks)
    say = progress or (lambda _text: None)
    say("loading torch")
    device_type, device_count = find_device(device)
    if device_type != "cpu" and ranks > device_count:
        raise UsageError(
            f"{ranks} ranks need {ranks} accelerators, torch sees {device_count}; "
            "ask for fewer ranks, or for --device cpu"
        )
    plan = {
        (True, True): _CPU_QUICK,
        (True, False): _CPU_FULL,
        (False, True): _DEVICE_QUICK,
        (False, False): _DEVICE_FULL,
    }[device_type == "cpu", quick]

    # A link takes two: with one rank, a second worker stands by for the link alone.
    lonely: str | None = None
    if ranks == 1 and device_type != "cpu" and device_count < 2:
        lonely = "one accelerator only"
    elif ranks == 1 and quick:
        lonely = "left out of a quick calibration of one rank"
    workers = max(ranks, 1 if lonely else 2)
    sections: list[Section] = ["launch", "gemm", "memory"]
    if device_type != "cpu":
        sections.append("transfer")
    if workers > 1:
        sections.append("link")
    results = _run_workers(
        world_size=workers,
        ranks=ranks,
        threads=threads,
        device_type=device_type,
        sections=tuple(sections),
        plan=plan,
        say=say,
    )
    merged = _merge(results[:ranks])
    absent = merged.absent | ({"link": lonely} if lonely else {})
    if device_type == "cpu":
        absent["transfer"] = "no accelerator"
    return Calibration(
        kind="quick" if quick else "full",
        created_ns=time.time_ns(),
        chopper_version=__version__,
        torch_version=merged.torch_version,
        hostname=socket.gethostname(),
        device_type=device_type,
        device_name=merged.device_name,
        ranks=ranks,
        threads=threads,
        cores=cores,
        gemm=merged.gemm,
        memory=merged.memory,
        transfer=merged.transfer,
        link=merged.link,
        link_ranks=workers if merged.link else None,
        link_backend=merged.link_backend if merged.link else None,
        launch_ns=merged.launch_ns,
        roundtrip_ns=merged.roundtrip_ns,
        absent=absent,
    )


def quick(threads: int | None = None, *, ranks: int = 1) -> Calibration:
    """A quick calibration of the host's cores, for a run on a machine that has none stored.

    Measures for under 3 s, plus the workers' loading of torch. Call it before or after a run,
    never during: it uses every core.

    Args:
        threads: threads of each rank; None divides the cores among the ranks.
        ranks: processes that share the cores.

    Raises:
        CollectorUnavailable: torch is missing, or a worker failed.
    """
    return calibrate(device="cpu", ranks=ranks, threads=threads, quick=True)


def require_torch() -> None:
    """Raises CollectorUnavailable without torch; does not load it."""
    if find_spec("torch") is None:
        raise CollectorUnavailable(
            "calibration needs torch, which is not installed; pip install torch"
        )


def host_name_of_cpu() -> str:
    """The processor as the kernel names it, for example ``AMD EPYC 9654``."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def default_threads(ranks: int) -> int:
    """Threads of each of ``ranks`` processes that share this machine's cores evenly."""
    return max(usable_cores() // ranks, 1)


_FIND_DEVICE = """
import torch
found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
print(found.type if found is not None else "cpu", torch.accelerator.device_count())
"""


def find_device(asked: str) -> tuple[str, int]:
    """Kind and number of devices, found in a process of its own.

    Raises:
        UsageError: the asked one is not there.
        CollectorUnavailable: torch cannot be loaded.
    """
    if asked == "cpu" or (asked == "auto" and _torch_is_for_cpus()):
        return "cpu", 0
    told = subprocess.run(
        [sys.executable, "-P", "-c", _FIND_DEVICE], capture_output=True, text=True, check=False
    )
    if told.returncode:
        raise CollectorUnavailable(f"torch cannot be loaded: {_last_line(told.stderr)}")
    kind, count = told.stdout.split()[-2:]
    if asked not in ("auto", kind):
        raise UsageError(f"--device {asked}: torch sees no such device here, only {kind}")
    return kind, int(count)


def _torch_is_for_cpus() -> bool:
    """Whether torch was built without any accelerator, without the seconds of loading it."""
    spec = find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if sys.platform == "darwin" or version is None or not version.is_file():
        return False
    built_for = re.findall(r"^(?:cuda|hip|xpu)\b.*=\s*(.+)$", version.read_text(), re.MULTILINE)
    return bool(built_for) and all(value.strip() == "None" for value in built_for)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from chopper.collectors.calibration import main; main()"
)


def _run_workers(
    *,
    world_size: int,
    ranks: int,
    threads: int,
    device_type: str,
    sections: tuple[Section, ...],
    plan: _Plan,
    say: Callable[[str], None],
) -> list[_Result]:
    """Start the workers, pass on what the first says, collect what all found.

    Raises:
        CollectorUnavailable: one of them failed or hung.
    """
    # This is not one of a program's ranks, and nothing to be recorded.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CHOPPER_") and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    package_parent = str(Path(chopper.__file__).resolve().parent.parent)
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="chopper-calibrate-") as directory:
        try:
            for rank in range(world_size):
                job = _Job(
                    rank=rank,
                    world_size=world_size,
                    ranks=ranks,
                    threads=threads,
                    device_type=device_type,
                    sections=sections,
                    plan=plan,
                    directory=directory,
                )
                with (Path(directory) / f"stderr-{rank}").open("wb") as errors:
                    worker = subprocess.Popen(
                        [sys.executable, "-P", "-c", _BOOTSTRAP, package_parent],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment,
                        bufsize=0,
                    )
                workers.append(worker)
                assert worker.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it died at once; _await says of what
                    worker.stdin.write(msgspec.json.encode(job) + b"\n")
            _await(workers, Path(directory), say)
            return [
                msgspec.json.decode(
                    (Path(directory) / f"result-{rank}.json").read_bytes(), type=_Result
                )
                for rank in range(world_size)
            ]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
                for pipe in (worker.stdin, worker.stdout):
                    if pipe is not None:
                        pipe.close()


def _await(
    workers: list[subprocess.Popen[bytes]], directory: Path, say: Callable[[str], None]
) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    talking = {worker.stdout: rank for rank, worker in enumerate(workers) if worker.stdout}
    while talking:
        left_s = deadline_s - time.monotonic()
        readable, _, _ = select.select(list(talking), [], [], max(left_s, 0))
        if not readable:
            raise CollectorUnavailable(f"calibration did not end within {_TIMEOUT_S:.0f} s")
        for pipe in readable:
            line = pipe.readline()
            if line:
                if talking[pipe] == 0:
                    say(line.decode().strip())
                continue
            rank = talking.pop(pipe)
            if workers[rank].wait() != 0:
                words = (directory / f"stderr-{rank}").read_text(errors="replace")
                raise CollectorUnavailable(f"calibration failed: {_last_line(words)}")


def _merge(results: list[_Result]) -> _Result:
    """One rank's share: the median over ranks of each rate."""
    first = results[0]
    return _Result(
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


# What follows runs in the workers.


class _Worker:
    """Measures in one process, in step with its peers."""

    def __init__(self, job: _Job) -> None:
        import torch

        self.torch = torch
        self.job = job
        torch.set_num_threads(job.threads)
        self.device = torch.device(job.device_type, 0)
        if job.device_type == "cpu":
            self.device = torch.device("cpu")
            name = host_name_of_cpu()
        else:
            self.device = torch.device(job.device_type, job.rank)
            torch.accelerator.set_device_index(job.rank)
            name = torch.get_device_module(self.device).get_device_name(self.device)
        self.result = _Result(torch_version=str(torch.__version__), device_name=name)

    def run(self) -> _Result:
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
        for _ in range(_ROUNDS):
            for name, dtype in kinds.items():
                # Together with its peers: one that is slow must not leave the others alone.
                self._in_step()
                torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
                try:
                    self._gemm_round(name, values.to(dtype), times_s)
                except (RuntimeError, TypeError) as exc:  # no such kernel, or too little memory
                    self.result.absent[f"gemm.{name}"] = _last_line(str(exc))
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
            times_s.setdefault((name, n), []).extend(self._time_s(work, budget_s / _ROUNDS))
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
        for _ in range(_ROUNDS):
            for name, _passes, call in work:
                self._in_step()
                times_s[name].extend(self._time_s(call, self.job.plan.memory_s / _ROUNDS))
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
        size_bytes = min(self.job.plan.memory_bytes // 4, 256 * _MIB)
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
                what = f"{name} {size_bytes / _MIB:g} MiB"
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
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    result = _Worker(job).run()
    (Path(job.directory) / f"result-{job.rank}.json").write_bytes(msgspec.json.encode(result))
