"""Manifests of ranks: written by each rank, read and put together when the run is opened."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import time
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.errors import ChopperError, OutputError, RunFormatError, reason_of
from chopper.quantities import digits
from chopper.storage import manifest as m
from chopper.storage.files import create, inside, read_bytes, write_atomic
from chopper.storage.findings import checks, finding
from chopper.storage.layout import (
    MANIFEST,
    is_rank_dir,
    is_run,
    last_written_s,
    rank_dir_name,
    rank_dirs,
    sub_runs,
)
from chopper.storage.processes import (
    LOCK,
    LOCK_WAIT_S,
    HeldElsewhere,
    locked,
    part_of,
    recorded_by,
    recorder_runs,
)
from chopper.storage.streams import read_stream
from chopper.tables import TABLES
from chopper.tables.ranges import MOST_RANKS
from chopper.version import __version__
from chopper.wording import plural, some

if TYPE_CHECKING:
    from collections.abc import Collection

    import pyarrow as pa


_RESERVE = ".reserve.tmp"
_RESERVE_BYTES = 48 << 10


class RunWriter:
    """One rank's side of a run: its folder, its manifest part, its files.

    The run directory is created when missing, and shared by all ranks.
    """

    def __init__(self, path: Path, rank: int, manifest: m.RankManifest | None = None) -> None:
        self.directory = inside(path, rank_dir_name(rank))
        checks()  # read now: some are noted where no more files can be opened
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"{self.directory}: cannot be created ({exc.strerror})") from exc
        self.manifest = manifest or m.RankManifest(
            rank=rank, chopper_version=__version__, start_ns=time.time_ns(), pid=os.getpid()
        )

    def reserve(self) -> None:
        """Hold some of the disk, so that the manifest can still be written when it is full.

        Raises:
            OutputError: it is full.
        """
        try:
            with create(self.directory / _RESERVE) as file:
                file.write(bytes(_RESERVE_BYTES))
        except OSError as exc:
            if exc.errno != errno.EFBIG:  # a limit of files' sizes holds for each of them
                raise OutputError(
                    f"{self.directory}: cannot be written ({reason_of(exc)})"
                ) from exc

    def release(self) -> None:
        """Let go of what :meth:`reserve` holds. Idempotent."""
        with contextlib.suppress(OSError):
            (self.directory / _RESERVE).unlink(missing_ok=True)

    def note(
        self,
        code: str,
        case: str | None = None,
        *,
        severity: m.Severity | None = None,
        **values: Any,
    ) -> None:
        """Add a finding, once for each code; arguments as for ``finding``."""
        if all(found.code != code for found in self.manifest.findings):
            self.manifest.findings.append(finding(code, case, severity=severity, **values))

    def save(self) -> None:
        """Write the part as it stands; called early and often, so that a kill loses little.

        Raises:
            OutputError: it cannot be written; what is most important of it may have been.
        """
        path = self.directory / MANIFEST
        try:
            write_atomic(path, m.encode(self.manifest))
        except OutputError:
            brief = msgspec.structs.replace(self.manifest, environment={}, collectors=[])
            with contextlib.suppress(OutputError):
                write_atomic(path, m.encode(brief))
            raise


def read_parts(
    path: Path, exit_code: int | None = None
) -> tuple[list[m.RankManifest], list[m.Finding]]:
    """Read the manifests of a run's ranks; return them with findings about them.

    A folder without a readable one gets a part that says only what its files do. The exit code is
    that of the command that was recorded; None where nobody waited for it.
    """
    parts: list[m.RankManifest] = []
    findings: list[m.Finding] = []
    try:
        folders = sorted(inside(path, p.name) for p in path.iterdir() if is_rank_dir(p))
    except OSError as exc:
        raise RunFormatError(f"{path}: cannot be read ({reason_of(exc)})") from exc
    for folder in folders:
        file = inside(folder, MANIFEST)
        why = "the rank died before it wrote one"
        try:
            part = (
                m.decode_rank(read_bytes(file, error=RunFormatError), str(file))
                if file.is_file()
                else None
            )
        except m.NewerRunError:
            raise
        except RunFormatError as exc:
            part, why = None, str(exc)
        if part is None:
            findings.append(finding("run.part_missing", folder=folder.name, why=why))
            part = m.RankManifest(rank=int(folder.name[5:]), status="running")
            part.traces = tuple(sorted(p.name for p in folder.glob("trace*.json*")))
        if part.status == "running":
            end = _end_of(part, folder, exit_code)
            findings.append(finding("run.rank_died", rank=part.rank, end=end))
        parts.append(part)
    parts, of_older = _latest_attempt(parts)
    dropped = {p.rank for p in of_older}
    findings = [f for f in findings if f.rank not in dropped]
    if of_older:
        names = [rank_dir_name(p.rank) for p in of_older]
        findings.append(finding("run.older_attempt", count=len(of_older), folders=some(names)))
    return parts, findings


def _end_of(part: m.RankManifest, folder: Path, exit_code: int | None) -> str:
    """Describe how a process ended that did not close its recording, and when."""
    import pyarrow.compute as pc

    alive = recorder_runs(part)
    known = ["it was killed, or is still running"]
    if alive is not None:
        state = "is still running" if alive else "is gone: killed, or ended by os._exit"
        known = [f"process {part.pid} {state}"]
    with contextlib.suppress(ValueError):
        name = signal.Signals((exit_code or 0) - 128).name
        known.append(f"the command's exit code is {exit_code}, as after {name}")
    steps = TABLES["step"].empty()
    with contextlib.suppress(ChopperError):
        steps = recorded_steps(folder)
    if steps.num_rows:
        number, end_ns = (pc.max(steps[column]).as_py() for column in ("number", "end_ns"))
        known.append(f"the last step on disk is step {number}, which ended at {_moment(end_ns)}")
    else:
        known.append("no step is on disk")
    if (written_s := last_written_s(folder)) is not None:
        known.append(f"{folder.name} was last written to at {_moment(int(written_s * 1e9))}")
    return "; ".join(known)


def recorded_steps(folder: Path) -> pa.Table:
    """Return the steps that a rank flushed, from its folder; an empty table without any."""
    stream = inside(folder, "step.arrow")
    return read_stream(stream, "step")[0] if stream.is_file() else TABLES["step"].empty()


def _moment(time_ns: int) -> str:
    import numpy as np

    return f"{np.datetime64(time_ns, 'ns').astype('datetime64[s]')} UTC".replace("T", " ", 1)


def restart_count(part: m.RankManifest) -> int | None:
    """Return how often torchrun had restarted the program; None without torchrun."""
    return digits(part.environment.get("TORCHELASTIC_RESTART_COUNT", ""))


def _latest_attempt(
    parts: list[m.RankManifest],
) -> tuple[list[m.RankManifest], list[m.RankManifest]]:
    """Split parts into those of the first rank's attempt, and those left by an earlier one.

    A restart with fewer ranks leaves the folders of the ranks that are no more.
    """
    current: list[m.RankManifest] = []
    older: list[m.RankManifest] = []
    for part in parts:
        latest = parts[0]
        count, theirs = restart_count(latest), restart_count(part)
        if count is not None and theirs is not None and count != theirs:
            stale = theirs < count
        else:
            stale = (
                None not in (part.world_size, latest.world_size)
                and part.world_size != latest.world_size
                and part.start_ns is not None
                and latest.start_ns is not None
                and part.start_ns < latest.start_ns
            )
        (older if stale else current).append(part)
    return current, older


def of_all_ranks(parts: list[m.RankManifest]) -> list[m.Finding]:
    """Find ranks of the job that left nothing or traced other steps than the others did."""
    worlds = {p.world_size for p in parts if p.world_size}
    missing = ranks_missing({p.rank for p in parts}, max(worlds)) if len(worlds) == 1 else []
    return [*missing, *_windows_apart(parts)]


def _windows_apart(parts: list[m.RankManifest]) -> list[m.Finding]:
    """Say which steps each rank traced, where they are not the same."""
    ranks: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        if part.traced_steps is not None and part.traced_steps[0] < part.traced_steps[1]:
            ranks.setdefault(part.traced_steps, []).append(part.rank)
    if len(ranks) < 2:
        return []
    each = (
        f"{first} to {stop - 1} on rank{'s' * (len(of) > 1)} {some(of)}"
        for (first, stop), of in sorted(ranks.items())
    )
    return [finding("run.windows_apart", steps="; ".join(each))]


def ranks_missing(
    ranks: Collection[int], world: int, severity: m.Severity | None = None
) -> list[m.Finding]:
    """Say which ranks of a job are not in a run."""
    missing = sorted(set(range(world)) - set(ranks))
    if not missing:
        return []
    return [
        finding(
            "run.ranks_missing",
            severity=severity,
            count=len(missing),
            withholds=False,  # that shows when the ranks' collectives are matched
            world=world,
            ranks=some(missing),
        )
    ]


def run_of_parts(
    path: Path, parts: list[m.RankManifest], findings: list[m.Finding]
) -> m.RunManifest:
    """Return the manifest of a recorded run whose ranks said this about themselves."""
    return m.RunManifest(
        chopper_version=__version__,
        kind="recorded",
        name=path.resolve().name,
        command=parts[0].command,
        created_ns=min((p.start_ns for p in parts if p.start_ns), default=None),
        ranks=parts,
        findings=findings,
    )


def read_manifest(path: Path) -> m.RunManifest:
    """Read what a run directory says about itself; one that was never closed, from its parts.

    Raises:
        RunFormatError: not a run, damaged, or written by a newer version.
    """
    if not is_run(path):
        raise RunFormatError(f"{path}: not a chopper run: no {MANIFEST} and no rank-* folder")
    file = inside(path, MANIFEST)
    state = finding("run.manifest_missing", run=path)
    if file.is_file():
        data = read_bytes(file, error=RunFormatError)
        try:
            run = checked_run(data, str(file))
        except m.NewerRunError:
            raise
        except RunFormatError as exc:
            if part_of(path) is not None:
                raise RunFormatError(
                    f"{path}: is the folder of one rank; pass the run: {path.resolve().parent}"
                ) from exc
            if not any(is_rank_dir(p) for p in path.iterdir()):
                raise
            state = finding("run.manifest_damaged", error=exc)
        else:
            run.findings += [*_without_folders(path, run), *other_processes(path)]
            return run
    parts, findings = read_parts(path)
    position = 0 if state.code == "run.manifest_damaged" else len(findings)
    findings.insert(position, state)
    return run_of_parts(path, parts, [*findings, *of_all_ranks(parts), *other_processes(path)])


def _without_folders(path: Path, run: m.RunManifest) -> list[m.Finding]:
    """Leave out the ranks that only the manifest names: nothing of them is in the run.

    Raises:
        RunFormatError: all are.
    """
    folders = {p.name for p in path.iterdir() if is_rank_dir(p)}
    absent = [p.rank for p in run.ranks if rank_dir_name(p.rank) not in folders]
    if not absent:
        return []
    if len(absent) == len(run.ranks):
        raise RunFormatError(
            f"{path / MANIFEST}: names {plural(len(absent), 'rank')} ({some(absent)}), but there "
            f"is no {rank_dir_name(absent[0])} beside it; copy the whole run"
        )
    run.ranks = [p for p in run.ranks if rank_dir_name(p.rank) in folders]
    return [
        finding(
            "run.ranks_missing",
            "no_folder",
            count=len(absent),
            withholds=False,
            ranks=some(absent),
        )
    ]


def checked_run(data: bytes, where: str) -> m.RunManifest:
    """Decode a run's manifest, which must name each rank once; ``where`` names it in errors.

    Raises:
        RunFormatError: damaged, or written by a newer version.
    """
    run = m.decode_run(data, where)
    ranks = [part.rank for part in run.ranks]
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= r < MOST_RANKS for r in ranks):
        raise RunFormatError(f"{where}: damaged manifest (ranks {some(ranks) or 'none'})")
    return run


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


def content_of(path: Path) -> Content:
    """Return how much a run directory holds, with the runs inside it, or an experiment."""
    most = Content.TELEMETRY
    for folder in (f for pattern in ("rank-*", "*/rank-*") for f in path.glob(pattern)):
        part = part_of(folder)
        if has_steps(folder) or (part is not None and part.status == "imported"):
            return Content.STEPS
        if part is not None and (part.traces or part.measures):
            most = Content.UNSTEPPED
    return most


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


def further_processes(path: Path) -> list[SubRun]:
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


def other_processes(path: Path, shown_path: Path | None = None) -> list[m.Finding]:
    """Return findings about further processes, whose runs are inside ``path``."""
    subs = further_processes(path)
    if not subs:
        return []
    trained = any(sub.steps != 0 for sub in subs)
    named = [str(replace(sub, path=(shown_path or path) / sub.path.name)) for sub in subs]
    return [
        finding(
            "run.processes",
            severity=None if trained else "info",
            count=len(subs) + 1,
            others="other" if len(subs) == 1 else "others",
            paths=some(named),
        )
    ]
