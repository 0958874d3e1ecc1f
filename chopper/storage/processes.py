"""The processes of a run: which of them record, and which have a run of their own inside it.

The ranks of one job share a run. A further process that is no rank of that job (a worker of a
pool, a trial of a sweep, a second script) records into ``process-<n>/``, a run of its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from chopper.errors import RunFormatError
from chopper.storage import manifest as m
from chopper.storage.files import read_bytes
from chopper.storage.layout import MANIFEST, last_written_s, rank_dirs, sub_runs
from chopper.storage.process_identity import HeldElsewhere, ProcessIdentity, locked, runs
from chopper.wording import plural, some

LOCK = ".claim"
"""Inside a run, while folders are claimed or moved."""
LOCK_WAIT_S = 20.0
"""Claiming takes milliseconds; a process that was stopped meanwhile must not hold up others."""
_RECENT_S = 3600.0
"""A recording of another host that wrote within this time may be alive: nobody here can tell."""


def part_of(folder: Path) -> m.RankManifest | None:
    """Return a rank's manifest; None when there is none that can be read."""
    try:
        return m.decode_rank(read_bytes(folder / MANIFEST, error=RunFormatError), "")
    except (OSError, RunFormatError):
        return None


def recorded_by(directory: Path) -> str | None:
    """Name the process that records into a rank's folder now; None when nobody does.

    Recordings of other hosts are taken for alive for an hour after their last sign of life.
    """
    part = part_of(directory)
    if part is None or part.status != "running" or part.pid is None:
        return None
    alive = runs(ProcessIdentity(part.pid, part.process_started, part.machine))
    if alive is not None:
        return f"process {part.pid}" if alive and part.pid != os.getpid() else None
    if part.hostname is None:
        return None
    seen_s = last_written_s(directory)
    if seen_s is None or time.time() - seen_s >= _RECENT_S:
        return None
    return f"process {part.pid} of the host {part.hostname}"


def recorders(path: Path) -> list[tuple[Path, str]]:
    """The folders of a run, its sub-runs' included, that are being recorded into, and by whom."""
    folders = [folder for run in (path, *sub_runs(path)) for folder in rank_dirs(run)]
    owners = ((folder, recorded_by(folder)) for folder in folders)
    return [(folder, owner) for folder, owner in owners if owner is not None]


def has_steps(folder: Path) -> bool:
    """Return whether a rank's folder holds a step; of a killed recording, one that it flushed."""
    part = part_of(folder)
    if part is not None and part.end_ns is not None:
        return part.steps_source is not None
    try:
        return (folder / "step.arrow").stat().st_size > 0
    except OSError:
        return False


class Content(IntEnum):
    """How much a recording holds, ascending."""

    TELEMETRY = 0
    UNSTEPPED = 1
    """Traces, or numbers that the program measured, but no step."""
    STEPS = 2
    """Or an import, which was complete when it was written."""


def content(folders: Iterable[tuple[m.RankManifest | None, bool]]) -> Content:
    """Return how much a run holds whose ranks have these parts and, or not, steps."""
    found = Content.TELEMETRY
    for part, steps in folders:
        if steps or (part is not None and part.status == "imported"):
            return Content.STEPS
        if part is not None and (part.traces or part.measures):
            found = Content.UNSTEPPED
    return found


def may_replace(new: Content, old: Content) -> bool:
    """Return whether a recording replaces an earlier run, where it was told to.

    One without a step replaces no run that has any, and only with a trace or measures one that has
    none either.
    """
    return new > Content.TELEMETRY and new >= old


def content_of(path: Path) -> Content:
    """Return how much a run directory holds, with the runs inside it, or an experiment."""
    found = (f for pattern in ("rank-*", "*/rank-*") for f in path.glob(pattern))
    return content((part_of(folder), has_steps(folder)) for folder in found)


def yield_ranks(path: Path) -> None:
    """Give the ranks of a run to the first of its sub-runs that has steps, when it has none.

    A process that made a forward and left the training to its children holds rank 0, which one of
    them should have: the two change places. Nothing that is being recorded into is moved.
    """
    with contextlib.suppress(HeldElsewhere), locked(path / LOCK, wait_s=LOCK_WAIT_S):
        folders = rank_dirs(path)
        if not folders or any(has_steps(f) or recorded_by(f) for f in folders):
            return
        for sub in sub_runs(path):
            theirs = rank_dirs(sub)
            if any(map(has_steps, theirs)) and not any(map(recorded_by, theirs)):
                aside = sub.with_name(f".{sub.name}.new")
                aside.mkdir()
                for source, target in ((path, aside), (sub, path), (aside, sub)):
                    for folder in rank_dirs(source):
                        folder.replace(target / folder.name)
                aside.rmdir()
                (sub / MANIFEST).unlink(missing_ok=True)
                return


@dataclass(frozen=True, slots=True)
class SubRun:
    """A run inside of a run.

    Attributes:
        pid: process of its first rank; None where it cannot be read.
        ranks: how many recorded into it.
        steps: of its first rank; 0 where it has none yet, None for a recording that was cut short.
        recording: whether it is being recorded into.
    """

    path: Path
    pid: int | None
    ranks: int
    steps: int | None
    recording: bool
    command: tuple[str, ...]

    def __str__(self) -> str:
        words = [f"{self.ranks} ranks"] if self.ranks > 1 else []
        if self.steps is not None:
            words.append(plural(self.steps, "step"))
        if self.recording:
            words.append("still recording")
        if self.command:
            words.append(shlex.join(self.command[:4]))
        return f"{self.path} ({', '.join(words)})" if words else str(self.path)


def described(path: Path) -> list[SubRun]:
    """The runs inside of a run, by number."""
    runs_inside = []
    for sub in sub_runs(path):
        folders = rank_dirs(sub)
        part = part_of(folders[0]) if folders else None
        steps = part.steps_count if part is not None else None
        if steps is None and not any(map(has_steps, folders)):
            steps = 0
        runs_inside.append(
            SubRun(
                sub,
                part.pid if part is not None else None,
                len(folders),
                steps,
                any(map(recorded_by, folders)),
                (part.command if part is not None else None) or (),
            )
        )
    return runs_inside


def findings(path: Path, shown: Path | None = None) -> list[m.Finding]:
    """Return findings about the processes that are no part of a run, ``shown`` in messages."""
    subs = described(path)
    if not subs:
        return []
    trained = any(sub.steps != 0 for sub in subs)
    named = [str(replace(sub, path=(shown or path) / sub.path.name)) for sub in subs]
    return [
        m.Finding(
            code="run.processes",
            severity="warning" if trained else "info",
            count=len(subs) + 1,
            message=f"{len(subs) + 1} processes recorded separately; this is one of them. Analyze "
            f"the "
            f"{'other' if len(subs) == 1 else 'others'} by path: {some(named)}",
        )
    ]
