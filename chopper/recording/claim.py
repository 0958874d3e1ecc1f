"""Choose and claim the run directory of a rank; earlier recordings in it are kept."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import itertools
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import OutputError, say
from chopper.hardware.launchers import job_name
from chopper.quantities import digits
from chopper.storage import clock, processes
from chopper.storage import manifest as m
from chopper.storage.destination import (
    claim_file,
    is_own,
    left_aside,
    recover,
    replaces,
    set_aside,
    settle,
)
from chopper.storage.files import inside, write_atomic
from chopper.storage.findings import finding
from chopper.storage.layout import MANIFEST, is_run, rank_dir_name, rank_dirs, sub_run
from chopper.storage.parts import has_steps, restart_count
from chopper.version import __version__

if TYPE_CHECKING:
    from chopper.hardware.launchers import LaunchEnvironment

OUTPUT_VARIABLE = "CHOPPER_OUTPUT"
"""The run directory when the program names none; set by ``chopper bench`` and ``record``."""
STACKS_VARIABLE = "CHOPPER_STACKS"
"""Set by ``chopper bench --stacks``: the workload's own profiles trace call stacks, too."""
LAUNCHED_VARIABLE = "CHOPPER_LAUNCHED"
"""Set when chopper launched the program: the launcher closes the run, and its output wins."""
IN_PROFILE = "profile"
"""Its value in the children of a process that records inside ``chopper.profile``."""
RUNS = Path("runs")
_COMMAND_WAIT_S = 1.0
"""Another rank holds the lock for milliseconds, a command until it ends."""


def launched(path: Path | None = None) -> bool:
    """Return whether chopper itself launched this program, or a process that records did.

    Of a path: whether the launcher told to record there.
    """
    output = os.environ.get(OUTPUT_VARIABLE)
    if not os.environ.get(LAUNCHED_VARIABLE):
        return False
    return path is None or not output or Path(output) in (path, *path.parents)


def choose_output(
    output: str | Path | None, name: str | None, info: LaunchEnvironment | None = None
) -> Path:
    """The run directory: as named, else ``CHOPPER_OUTPUT``, else ``runs/<time>[-<name>]``.

    When a command of chopper launched the program, where that was told to write wins over what
    the program names: one run must not be spread over two directories. The default directory of a
    rank is made here, so that no two processes choose the same.
    """
    from_environment = os.environ.get(OUTPUT_VARIABLE)
    wins = os.environ.get(LAUNCHED_VARIABLE) not in (None, "", IN_PROFILE)
    if from_environment and (output is None or wins):
        return Path(from_environment)
    if output is not None:
        return Path(output)
    return _default_output(name, info)


def _default_output(name: str | None, info: LaunchEnvironment | None) -> Path:
    # A name is for people: it may hold what would lead to another directory.
    suffix = f"-{safe}" if (safe := re.sub(r"[^\w.-]+", "-", name or "").strip("-.")) else ""
    started = dt.datetime.now()
    if info is not None and info.world_size > 1:
        # All ranks must come to the same name without a word: their launcher started once.
        import psutil

        started = dt.datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
        suffix = f"-{os.environ.get('MASTER_PORT', '0')}{suffix}"
        return RUNS / f"{started:%Y%m%d-%H%M%S}{suffix}"
    count = 1
    while True:
        again = f"-{count}" if count > 1 else ""
        path = RUNS / f"{started:%Y%m%d-%H%M%S}{suffix}{again}"
        count += 1
        if path.exists() or claim_file(path).exists():
            continue
        try:
            if info is not None:
                path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # claim() says so
            pass
        return path


def unused(path: Path, rank: int) -> Path:
    """Return the first of ``path``, ``path-2``, ``path-3`` … that holds no part of this rank."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    candidates = itertools.chain((path,), numbered)
    return next(p for p in candidates if not (p / rank_dir_name(rank)).exists())


def check_rank_output(path: Path, rank: int, *, force: bool) -> None:
    """Refuse an output that would overwrite something; called before anything is written.

    Raises:
        OutputError: it is a file, holds files that are not a run, or holds this rank's part of an
            earlier run and ``force`` is not given.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file; a run is a directory, choose another output")
    if not path.is_dir():
        return
    if not (is_run(path) or all(is_own(entry) for entry in path.iterdir())):
        raise OutputError(f"{path}: holds files that are not a chopper run; choose another output")
    directory = path / rank_dir_name(rank)
    if directory.exists() and not (force or _restarts() or _contemporary(directory)):
        raise OutputError(
            f"{path}: holds a run already; pass force=True to replace it, or another output"
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A rank's folder, which is this process's own."""

    path: Path
    """The run directory: the output, or a run inside it."""
    part: m.RankManifest
    """The folder's manifest."""
    finding: m.Finding | None
    """Set when an earlier recording was moved."""


def claim(path: Path, info: LaunchEnvironment, *, force: bool) -> Claim:
    """Make this rank's folder, with a manifest that names this process; nobody else gets it.

    A process that is no rank of the job that records into ``path`` gets a run inside it: one
    without rank while others record, or after one that took steps; and the ranks of another job.
    Else an earlier recording of the same rank, by a process that ended, is moved to
    ``attempt-<n>/``, which is a run of its own; with ``force`` the whole run that was there waits
    beside it, until :func:`settled`. Folders of living processes are never touched.

    Raises:
        OSError: the directory cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    part = _part(info)
    with contextlib.ExitStack() as held:
        # Without the lock, the folder is still made by one process alone.
        with contextlib.suppress(processes.HeldElsewhere):
            lock = processes.locked(path / processes.LOCK, wait_s=processes.LOCK_WAIT_S)
            held.enter_context(lock)
        force = force and not launched(path) and not _restarts()
        if force:
            try:
                output_lock = claim_file(path.resolve())
                held.enter_context(processes.locked(output_lock, wait_s=_COMMAND_WAIT_S))
            except processes.HeldElsewhere:  # by a command, which decides about the run there
                force = False
            else:
                for line in recover(path):
                    say(line)
        while True:
            claimed = _choose(path, part, force=force)
            if _occupy(claimed.path, part):
                return claimed


def _part(info: LaunchEnvironment) -> m.RankManifest:
    job = None
    if info.known:
        job = job_name() or f"parent {processes.parent_identity()}"
    return m.RankManifest(
        rank=info.rank,
        world_size=info.world_size,
        local_rank=info.local_rank,
        node=info.node,
        chopper_version=__version__,
        start_ns=clock.now_ns(),
        hostname=socket.gethostname(),
        job=job,
        **processes.identity_of(os.getpid())._asdict(),
        environment={
            name: os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT",) if name in os.environ
        },
    )


def _occupy(path: Path, part: m.RankManifest) -> bool:
    """Make the rank's folder in one step; False when another process made it meanwhile."""
    folder = path / rank_dir_name(part.rank)
    fresh = path / f".{folder.name}.{socket.gethostname()}-{os.getpid()}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_atomic(fresh / MANIFEST, m.encode(part))
    try:
        fresh.rename(folder)
    except OSError as exc:
        shutil.rmtree(fresh, ignore_errors=True)
        if exc.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _choose(path: Path, part: m.RankManifest, *, force: bool) -> Claim:
    """Choose the run directory for a rank, and make room in it."""
    folders = {folder: processes.part_of(folder) for folder in rank_dirs(path)}
    recorded = [f for f, other in folders.items() if _recorded(f, other, part)]
    folder = path / rank_dir_name(part.rank)
    if part.job is None:
        apart = bool(recorded) or any(
            _contemporary(f) and has_steps(f) and not _is_of_this_process(other)
            for f, other in folders.items()
        )
    else:
        apart = folder in recorded or not all(_same_job(part, folders[f]) for f in recorded)
    if apart:
        return Claim(_sub_run_for(path, part), part, None)
    finding = None
    if force and not any(map(_contemporary, folders)):
        set_aside(path.resolve())
    elif folder.exists():
        finding = _set_aside(path, folder)
    return Claim(path, part, finding)


def _recorded(folder: Path, other: m.RankManifest | None, part: m.RankManifest) -> bool:
    """Return whether a folder is being recorded into while ``part`` begins."""
    if processes.recorded_by(folder) is None or other is None:
        return False
    if other.machine == part.machine or part.job is None:
        return True
    # A restart may bring a rank to another host, where its last part still says "running".
    return restart_count(other) == restart_count(part) and not _same_job(part, other)


def _sub_run_for(path: Path, part: m.RankManifest) -> Path:
    """The run inside ``path`` that a process records into: a new one, or that of its job."""
    number = 2
    while True:
        inner = sub_run(path, number)
        with contextlib.suppress(FileExistsError):
            inner.mkdir()
            return inner
        folders = rank_dirs(inner)
        if (
            part.job is not None
            and inner / rank_dir_name(part.rank) not in folders
            and all(_same_job(part, processes.part_of(f)) for f in folders)
        ):
            return inner
        number += 1


def _same_job(part: m.RankManifest, other: m.RankManifest | None) -> bool:
    """Return whether two ranks are of one distributed job, as far as that can be told."""
    if other is None or part.job is None or other.job is None:
        return False
    if part.world_size != other.world_size:
        return False
    # A parent is the same only on one machine; a port or a job's name is, where it is set, on all.
    by_parent = any(job.startswith("parent ") for job in (part.job, other.job))
    comparable = part.machine == other.machine or not by_parent
    return part.job == other.job or not comparable


def _is_of_this_process(part: m.RankManifest | None) -> bool:
    """Return whether this process recorded a part, before."""
    me = processes.identity_of(os.getpid())
    return part is not None and me == (part.pid, part.process_started, part.machine)


def _contemporary(folder: Path) -> bool:
    """Return whether a rank's folder is of this launch, no earlier run that may be replaced."""
    if launched(folder) or processes.recorded_by(folder) is not None:
        return True
    part = processes.part_of(folder)
    if part is None or part.end_ns is None or _is_of_this_process(part):
        return False
    began_ns = processes.started_ns(os.getpid())
    return began_ns is None or part.end_ns > began_ns


def _restarts() -> int:
    return digits(os.environ.get("TORCHELASTIC_RESTART_COUNT", "")) or 0


def _set_aside(path: Path, directory: Path) -> m.Finding:
    # The same number on all ranks of one attempt, whichever ranks it had.
    part = processes.part_of(directory)
    number = (restart_count(part) if part is not None else None) or 0
    while (path / f"attempt-{number}" / directory.name).exists():
        number += 1
    attempt = inside(path, f"attempt-{number}")
    attempt.mkdir(exist_ok=True)
    directory.replace(attempt / directory.name)
    return finding("run.restarted", folder=directory.name, attempt=attempt.name)


def settled(path: Path) -> Path | None:
    """Have a run that ended replace the one that its first rank set aside, or put that one back.

    The last of its ranks to end decides, or the first that took a step. ``path`` has its links
    followed.

    Returns:
        Where the recording is kept, as it took no step; None when it stays where it is.

    Raises:
        OutputError: the run that was set aside cannot be put back.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(processes.HeldElsewhere):
            held.enter_context(processes.locked(claim_file(path), wait_s=processes.LOCK_WAIT_S))
        old = left_aside(path)
        if old is None or (processes.recorders(path) and not replaces(path, old)):
            return None
        return settle(path, old)
