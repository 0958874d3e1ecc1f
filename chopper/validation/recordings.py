"""Recordings of two-rank training on this machine with injections that time themselves.

Every step with an injection has a neighbour without one in the same recording, so that drift of the
machine weighs on both alike.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.errors import CaptureError
from chopper.fresh_python import own_python
from chopper.storage.destination import scratch
from chopper.storage.files import pack_message
from chopper.validation.injections.plan import Job, Truth
from chopper.workloads import link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.attributed import Attributed
    from chopper.validation.injections.plan import Plan

LINKED = "slow_link"
"""The injection whose ranks are joined by a link that can be shaped."""
_START_LIMIT_S, _STEP_LIMIT_S = 120.0, 5.0
RANKS = 2
_POLL_S = 0.05
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """One plan, recorded in two ranks of this machine.

    Attributes:
        truths: by rank.
        attribution: of the recording; None where the injection could not be made here.
        other_cores: cores that other programs used while the plans were recorded.
    """

    plan: Plan
    truths: list[Truth]
    attribution: Attributed | None
    other_cores: float

    @property
    def skipped(self) -> str | None:
        """Return why the injection could not be made here."""
        return next((t.skipped for t in self.truths if t.skipped), None)


def record(plans: Sequence[Plan]) -> Iterator[Recorded]:
    """Record plans one after the other and attribute them; only ``slow_link`` has a link to shape.

    Raises:
        CaptureError: the training failed.
    """
    linked = [plan for plan in plans if plan.injection == LINKED]
    alone = [plan for plan in plans if plan.injection != LINKED]
    unavailable = link.unavailable() if linked else None
    if alone:
        yield from _record(alone, linked=False)
    if unavailable:
        yield from (Recorded(plan, [Truth(skipped=unavailable)], None, 0.0) for plan in linked)
    elif linked:
        yield from _record(linked, linked=True)


def _record(plans: Sequence[Plan], *, linked: bool) -> Iterator[Recorded]:
    import chopper
    from chopper.recording.finish import finalize

    steps = sum(len(plan.levels()) for plan in plans)
    with ended_by_signals(), scratch("validate") as directory:
        job = Job(directory=str(directory), plans=tuple(plans), linked=linked)
        with others_while() as others:
            run(job, timeout_s=_START_LIMIT_S + steps * _STEP_LIMIT_S)
        for plan in plans:
            path = directory / plan.injection
            truths = [
                msgspec.json.decode(Path(f"{path}.truth-{rank}.json").read_bytes(), type=Truth)
                for rank in range(RANKS)
            ]
            attribution = None
            if not any(truth.skipped for truth in truths):
                finalize(path)
                attribution = chopper.attribute(chopper.load(path)).whole
            yield Recorded(plan, truths, attribution, others.cores)


@dataclass(slots=True)
class OtherPrograms:
    """Cores that programs other than this one and its children used while a block ran."""

    cores: float = 0.0


@contextlib.contextmanager
def others_while() -> Iterator[OtherPrograms]:
    """Measure the cores that other programs use while the block runs."""
    import psutil

    def used() -> tuple[float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return (
            sum(machine) - machine.idle - getattr(machine, "iowait", 0.0),
            own.user + own.system + own.children_user + own.children_system,
        )

    others = OtherPrograms()
    began, (machine_before, own_before) = time.monotonic(), used()
    yield others
    machine, own = used()
    others.cores = (machine - machine_before - own + own_before) / (time.monotonic() - began)


def run(job: Job, *, timeout_s: float) -> None:
    """Run the job in two ranks to its end.

    Raises:
        CaptureError: a rank failed, or they took too long. The last line that it wrote says why.
    """
    with ended_by_signals(), contextlib.ExitStack() as stack:
        channels = [socket.socketpair() for _ in range(RANKS)]
        for pair in channels:
            for end in pair:
                stack.enter_context(end)
        log = stack.enter_context(Path(job.directory, "ranks.log").open("w+b"))
        environment = _environment(job)
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        for rank in range(RANKS):
            started.append(
                subprocess.Popen(
                    own_python(
                        "chopper.validation.injections.program",
                        *(str(os.getpid()), str(channels[rank][1].fileno())),
                        pack_message(job).decode(),
                    ),
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    pass_fds=[channels[rank][1].fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Its own session: what the rank starts can be ended with it.
                    start_new_session=True,
                )
            )
        for _, theirs in channels:
            theirs.close()  # so that a rank that ends is noticed
        if job.linked:
            try:
                link.connect((started[0].pid, started[1].pid), (channels[0][0], channels[1][0]))
            except OSError as exc:
                raise CaptureError(f"the ranks cannot be linked: {exc}") from exc
        _wait(started, log, timeout_s)


def _environment(job: Job) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("CHOPPER_", "TORCHELASTIC_"))},
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        # In namespaces of their own nobody else listens; else they meet by a file.
        **({"MASTER_ADDR": link.ADDRESSES[0], "MASTER_PORT": "29500"} if job.linked else {}),
        "GLOO_SOCKET_IFNAME": link.INTERFACE if job.linked else "lo",
        # Two ranks share few cores: neither may take them all.
        "OMP_NUM_THREADS": "1",
        # Memory that was freed stays the process's: pages that fault in again, which on a virtual
        # machine may take longer than the work on them, would be nobody's injection.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        "MALLOC_ARENA_MAX": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }


def _wait(started: list[subprocess.Popen[bytes]], log: Any, timeout_s: float) -> None:
    """Wait until all have ended well, or one has not."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in started]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            raise CaptureError(
                f"rank {failed} ended with exit code {codes[failed]}: {_last_line(log)}"
            )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise CaptureError(f"the ranks did not end within {timeout_s:.0f} s: {_last_line(log)}")
        time.sleep(_POLL_S)


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it wrote nothing"


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks and all that they started."""
    for process in started:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        # Its children may outlive it by a moment, or for ever.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an exception, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:  # noqa: ARG001
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
