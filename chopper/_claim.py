"""Where a rank records: which run directory, and how earlier recordings in it are kept."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import shutil
from pathlib import Path

from chopper import manifest as m
from chopper.errors import CaptureError, OutputError, RunFormatError
from chopper.outputs import recorded_by
from chopper.quantities import digits
from chopper.run import MANIFEST, is_run, rank_dir_name, restart_count
from chopper.storage import inside, read_bytes

OUTPUT_VARIABLE = "CHOPPER_OUTPUT"
"""The run directory when the program names none; set by ``chopper run`` and ``chopper record``."""
LAUNCHED_VARIABLE = "CHOPPER_LAUNCHED"
"""Set when chopper launched the program: the launcher closes the run, and its output wins."""
RUNS = Path("runs")


def launched() -> bool:
    """Whether chopper itself launched this program."""
    return bool(os.environ.get(LAUNCHED_VARIABLE))


def choose_output(output: str | Path | None, name: str | None) -> Path:
    """The run directory: as named, else ``CHOPPER_OUTPUT``, else ``runs/<time>[-<name>]``.

    When chopper launched the program, where it told the launcher to write wins over what the
    program names: one run must not be spread over two directories.
    """
    from_environment = os.environ.get(OUTPUT_VARIABLE)
    if from_environment and (output is None or launched()):
        return Path(from_environment)
    if output is not None:
        return Path(output)
    return _default_output(name)


def _default_output(name: str | None) -> Path:
    # A name is for people: it may hold what would lead to another directory.
    suffix = f"-{safe}" if (safe := re.sub(r"[^\w.-]+", "-", name or "").strip("-.")) else ""
    started = dt.datetime.now()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # All ranks must come to the same name without a word: their launcher started once.
        import psutil

        started = dt.datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
        suffix = f"-{os.environ.get('MASTER_PORT', '0')}{suffix}"
        return RUNS / f"{started:%Y%m%d-%H%M%S}{suffix}"
    path = RUNS / f"{started:%Y%m%d-%H%M%S}{suffix}"
    count = 1
    while path.exists():
        count += 1
        path = RUNS / f"{started:%Y%m%d-%H%M%S}{suffix}-{count}"
    return path


def check_output(path: Path, rank: int, *, force: bool) -> None:
    """Refuse an output that would overwrite something; called before anything is written.

    Raises:
        OutputError: it is a file, holds files that are not a run, or holds this rank's part of an
            earlier run and ``force`` is not given.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file; a run is a directory, choose another output")
    if not path.is_dir():
        return
    if any(path.iterdir()) and not is_run(path):
        raise OutputError(f"{path}: holds files that are not a chopper run; choose another output")
    directory = path / rank_dir_name(rank)
    if directory.exists() and not (force or launched() or _restarts()):
        raise OutputError(
            f"{path}: holds a run already; pass force=True to replace it, or another output"
        )


def claim(path: Path, info_rank: int, world_size: int, *, force: bool) -> m.Finding | None:
    """Make room for this rank's folder in the run; never touches another rank's.

    An earlier recording of the same rank, left by a restarted or by a previous process of the
    same launch, is moved to ``attempt-<n>/``, which is a run of its own.

    Returns:
        A finding when an earlier recording was moved.

    Raises:
        CaptureError: another living process records as this rank.
        OSError: the directory cannot be written.
    """
    directory = path / rank_dir_name(info_rank)
    finding = None
    if directory.exists():
        replace = force and not launched() and not _restarts()
        # A restart may bring a rank to another host, whose last part still says "running".
        other = recorded_by(directory, anywhere=replace)
        if other is not None:
            raise CaptureError(
                f"{directory}: {other} is recording as rank {info_rank} already; this "
                "process is not recorded. If it is another rank, enter chopper.profile after "
                "init_process_group, or set RANK"
            )
        if replace:
            shutil.rmtree(directory)
        else:
            finding = _set_aside(path, directory)
    if info_rank == 0 and force and not launched() and not _restarts() and path.is_dir():
        _clear_stale(path, world_size)
    directory.mkdir(parents=True, exist_ok=True)
    return finding


def _restarts() -> int:
    try:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    except ValueError:
        return 0


def _set_aside(path: Path, directory: Path) -> m.Finding:
    # The same number on all ranks of one attempt, whichever ranks it had.
    number = 0
    with contextlib.suppress(OSError, RunFormatError):
        number = (
            restart_count(m.decode_rank(read_bytes(directory / MANIFEST, error=RunFormatError), ""))
            or 0
        )
    while (path / f"attempt-{number}" / directory.name).exists():
        number += 1
    kept = inside(path, f"attempt-{number}")
    kept.mkdir(exist_ok=True)
    directory.replace(kept / directory.name)
    return m.Finding(
        code="run.restarted",
        severity="info",
        message=f"{directory.name} was recorded before, by a process that ended: that recording "
        f"is kept as the run {kept.name}/",
    )


def _clear_stale(path: Path, world_size: int) -> None:
    """Remove what belongs to the run that ``force`` replaces and no rank of this one will."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path / "tables", ignore_errors=True)
    for folder in path.glob("rank-*"):
        if (digits(folder.name[5:]) or 0) >= world_size:
            shutil.rmtree(folder)
