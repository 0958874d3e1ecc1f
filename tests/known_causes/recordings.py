"""Recordings of two-rank training on this machine with injections that time themselves.

Every step with an injection has a neighbour without one in the same recording, so that drift of the
machine weighs on both alike.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chopper import pipeline
from chopper.errors import CaptureError
from chopper.experiments.judgement import others_while
from chopper.fresh_python import ended_by_signals
from chopper.storage.caches import scratch
from chopper.storage.files import pack_message
from chopper.workloads import link
from chopper.workloads.processes import first_failure, running_ranks
from tests.known_causes.injections.plan import Job, Truth

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.attribution import Attribution
    from tests.known_causes.injections.plan import Plan

LINKED = "slow_link"
"""The injection whose ranks are joined by a link that can be shaped."""
_START_LIMIT_S, _STEP_LIMIT_S = 120.0, 5.0
RANKS = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """One plan, recorded in two ranks; no attribution where the injection is impossible here."""

    plan: Plan
    truths: list[Truth]
    attribution: Attribution | None
    other_cores: float

    @property
    def skipped(self) -> str | None:
        """Return why the injection could not be made here."""
        return next((t.skipped for t in self.truths if t.skipped), None)


def record(plans: Sequence[Plan]) -> Iterator[Recorded]:
    """Record and attribute plans one after the other; only ``slow_link`` has a link to shape."""
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
                attribution = pipeline.attribute(pipeline.read(path)).all_steps
            yield Recorded(plan, truths, attribution, others.cores)


def run(job: Job, *, timeout_s: float) -> None:
    """Run the job in two ranks to its end; CaptureError has the last line of one that failed."""
    log = Path(job.directory, "ranks.log")
    with (
        log.open("wb") as out,
        running_ranks(
            "tests.known_causes.injections.program",
            RANKS,
            linked=job.linked,
            words=[pack_message(job).decode()],
            environment=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # Its own session, whose priority the rank may raise.
            start_new_session=True,
        ) as started,
    ):
        try:
            failed = first_failure(started, timeout_s)
        except TimeoutError as exc:
            raise CaptureError(f"{exc}: {_last_line(log)}") from exc
        if failed is not None:
            how = f"rank {failed.rank} ended with exit code {failed.code}"
            raise CaptureError(f"{how}: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "it wrote nothing"


def _environment() -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("CHOPPER_")},
        "PYTHONPATH": str(Path(__file__).parents[2]),
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
