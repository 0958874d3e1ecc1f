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
import time
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import msgspec

from chopper.collectors import _calibration_worker
from chopper.collectors._calibration_worker import Job, Plan, Result, Section, last_line
from chopper.errors import CollectorUnavailable, UsageError
from chopper.fresh_python import own_python
from chopper.hardware.calibration import Calibration, Measured
from chopper.limits import usable_cores
from chopper.storage.caches import scratch
from chopper.storage.files import pack_message
from chopper.version import __version__

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
    if requested == "cpu" or (requested == "auto" and _torch_is_for_cpus()):
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


def _torch_is_for_cpus() -> bool:
    """Tell whether torch was built without any accelerator, without the seconds of loading it."""
    spec = find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if sys.platform == "darwin" or version is None or not version.is_file():
        return False
    built_for = re.findall(
        r"^(?:cuda|hip|xpu)\b[^=\n]*=[ \t]*([^ \t\n].*)$", version.read_text(), re.MULTILINE
    )
    return bool(built_for) and all(value.strip() == "None" for value in built_for)


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
                own_python(
                    _calibration_worker.__name__, str(directory), pack_message(job).decode()
                ),
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
