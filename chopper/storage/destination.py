"""Places of new runs: refused where something would be lost, and the run that was there kept.

While a command writes to NAME it holds a lock, ``.NAME.claim``. ``.NAME.old`` is a run that is
being replaced, ``.NAME.new`` one that is being removed, ``.NAME.moving`` a part of the run in NAME
that is being moved; who holds the lock next finds what a killed command left.
A recording that may not replace the run that was there is kept as ``NAME.no-steps``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from chopper.errors import OutputError, RunFormatError, printable, reason_of
from chopper.storage import manifest as m
from chopper.storage.caches import scratch
from chopper.storage.files import create, is_users, read_bytes
from chopper.storage.layout import (
    MANIFEST,
    foreign_files,
    is_experiment,
    is_rank_dir,
    is_run,
)
from chopper.storage.parts import Content, content_of
from chopper.storage.processes import LOCK, HeldElsewhere, locked, part_of, recorders
from chopper.wording import some

NOTES = ".hook-notes"
"""Begin of the name of a file in the run while ``chopper record`` lasts: how the processes below it
fared."""
_PROVIDED_S = 5.0
"""The first recorder of a job provides its directory in milliseconds; the others wait for it."""
_POLL_S = 0.02
_OWN_ENTRY = re.compile(
    r"rank-\d{5,7}|attempt-\d+|process-\d+|tables|manifest\.json|\.chopper-probe|\.claim"
    r"|\.hook-notes(\..+)?|\.rank-\d{5,7}\..+\.new|\.manifest\.json\.\d+\.tmp",
    re.DOTALL | re.ASCII,
)
_OWN_IN_EXPERIMENT = re.compile(
    r"experiment\.json|report\.html|\.experiment\.json\.\d+\.tmp", re.ASCII
)


def is_of_run(name: str) -> bool:
    """Return whether chopper gives this name to an entry of a run."""
    return _OWN_ENTRY.fullmatch(name) is not None


def is_own(entry: Path) -> bool:
    """Return whether chopper wrote this entry of a run or an experiment."""
    if is_of_run(entry.name):
        return True
    if not is_experiment(entry.parent):
        return False
    if entry.is_dir() and not entry.is_symlink():
        return all(_OWN_ENTRY.fullmatch(p.name) for p in entry.iterdir())
    return bool(_OWN_IN_EXPERIMENT.fullmatch(entry.name))


def check_output(path: Path, *, force: bool = False) -> bool:
    """Refuse a place where a run must not be written; changes nothing.

    Returns:
        Whether a run is there that ``force`` allows to replace.

    Raises:
        OutputError: it is not a directory, holds a run and ``force`` is not given, holds what
            chopper did not write, or is being recorded into.
    """
    try:
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path}: is a file; a run is a directory, choose another -o")
        if not path.is_dir():
            return False
        # A command that was killed before any rank began leaves its notes, a probe or a lock.
        entries = sorted(
            p for p in path.iterdir() if not (p.name.startswith(".") and is_of_run(p.name))
        )
        if not entries:
            return False
        if not is_run(path) and not is_experiment(path):
            raise OutputError(f"{path}: holds files that are not a chopper run; choose another -o")
        if not force:
            raise OutputError(f"{path}: holds a run already; pass --force to replace it")
        foreign = [p.name for p in entries if not is_own(p)] or _foreign_below(path)
        if foreign:
            raise OutputError(
                f"{path}: holds, besides a run, files that chopper did "
                f"not write ({some([printable(name) for name in foreign])}): nothing is removed; "
                f"move them away, or choose another -o"
            )
        for folder, owner in recorders(path):
            raise OutputError(
                f"{path}: {owner} is recording into it ({folder.name}); wait for its end, or "
                "choose another -o"
            )
    except OSError as exc:
        raise OutputError(f"{path}: cannot be read ({reason_of(exc)}); choose another -o") from exc
    return True


def _foreign_below(path: Path) -> list[str]:
    """Return which files in a run, or in the runs of an experiment, are not theirs."""
    runs = [p for p in path.iterdir() if not is_of_run(p.name)] if is_experiment(path) else [path]
    foreign = []
    for run in runs:
        names = []
        for folder, folders, files in os.walk(run):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            names += [Path(folder, name).relative_to(run).as_posix() for name in (*files, *links)]
        # Names of imported traces are their own: the rank's manifest has them.
        unknown = foreign_files(names)
        folders_of = {name.rpartition("/")[0] for name in unknown}
        named = {f"{folder}/{name}" for folder in folders_of for name in _named_in(run / folder)}
        inside = run.relative_to(path)
        foreign += [str(inside / name) for name in foreign_files(unknown, named)]
    return foreign


def _named_in(folder: Path) -> set[str]:
    """Return the files that the manifest of a rank's folder names."""
    part = part_of(folder) if is_rank_dir(folder) else None
    return set() if part is None else m.named_by(part)


def run_around(path: Path) -> Path | None:
    """Return the run directory around a file, which need not exist; None without one."""
    for directory in _real(path).parents:
        if not is_run(directory):
            continue
        if any(is_rank_dir(p) for p in directory.iterdir()):
            return directory
        # A web page has a manifest.json, too.
        with contextlib.suppress(RunFormatError, OSError):
            m.decode_run(read_bytes(directory / MANIFEST, error=RunFormatError), "")
            return directory
    return None


def _real(path: Path) -> Path:
    """Return the directory that a path means, links followed."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as exc:  # links in a circle
        raise OutputError(f"{path}: cannot be read ({exc}); choose another -o") from exc


@contextlib.contextmanager
def new_output(
    path: Path,
    *,
    force: bool = False,
    say: Callable[[str], None] | None = None,
    job: str | None = None,
) -> Iterator[Path]:
    """Provide an empty directory for a new run; one that ``force`` replaces goes in the end.

    The old run waits beside its place. When no rank has recorded by the end, it is back there, and
    a directory that was made for the new run is gone. So it is when no rank took a step, and the
    new recording is kept beside it. What an earlier command left there when it was killed is put
    back first, and said in one line each. Recorders of one ``job`` share a directory, which the
    first of them provides.

    Yields:
        The directory, absolute and with links followed.

    Raises:
        OutputError: as :func:`check_output`; another command writes a run there; the directory
            cannot be written; or, at the end, the old run stays as no step was recorded, or cannot
            be put back (what is kept where, the message says).
    """
    with _claimed(path, job) as announce:
        if announce is None:
            yield _real(path)
            return
        for line in recover(path):
            if say is not None:
                say(line)
        replace = check_output(path, force=force)
        run_dir = _real(path)
        existed = run_dir.is_dir()
        try:
            old = set_aside(run_dir) if replace else None
        except OSError as exc:
            raise OutputError(
                f"{path}: cannot be replaced ({reason_of(exc)}); choose another -o"
            ) from exc
        try:
            _make_writable(path)
            if job is not None:
                with contextlib.suppress(OSError):
                    announce(f"{os.getpid()} {job}")
            yield run_dir
        except BaseException:
            problem = _finish(path, old, existed=existed)
            if problem is not None and say is not None:
                say(problem)
            raise
        problem = _finish(path, old, existed=existed)
        if problem is not None:
            raise OutputError(problem)


def _make_writable(path: Path) -> None:
    """Make a directory; through a link whose target is missing, the target."""
    try:
        _real(path).mkdir(parents=True, exist_ok=True)
        probe = path / ".chopper-probe"
        create(probe).close()
        probe.unlink()
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot write here ({reason_of(exc)}); choose another -o"
        ) from exc


def _finish(path: Path, old: Path | None, *, existed: bool) -> str | None:
    """Let the new recording replace the run in ``old``, if any; return why it did not."""
    run_dir = _real(path)
    if old is None:
        if not holds_recording(run_dir):
            _put_back(run_dir, None, existed=existed)
        return None
    if recorders(run_dir) and not replaces(run_dir, old):
        return f"{path}: is still being recorded into, without a step so far; " + _show(path, old)
    no_steps_dir = settle(run_dir, old)
    return None if no_steps_dir is None else no_step(path, path.with_name(no_steps_dir.name))


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Provide a new folder beside ``path``, whose files are moved there when all are whole.

    Afterwards it is gone; what killed commands left of theirs goes before.

    Raises:
        OutputError: it cannot be made.
    """
    parent = _real(path).parent
    with contextlib.ExitStack() as held:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            fresh = held.enter_context(scratch("new", parent)) / "new"
            fresh.mkdir()
        except OSError as exc:
            raise OutputError(
                f"{path}: cannot write here ({reason_of(exc)}); choose another -o"
            ) from exc
        try:
            yield fresh
        except OutputError as exc:
            raise OutputError(str(exc).replace(str(fresh), str(path))) from exc


def claim_file(run_dir: Path) -> Path:
    """Return the lock file beside a run directory, held while a command writes a run there."""
    return run_dir.with_name(f".{run_dir.name}.claim")


@contextlib.contextmanager
def _claimed(path: Path, job: str | None = None) -> Iterator[Callable[[str], None] | None]:
    """Keep other commands from writing a run to the same run_dir, until this one ends.

    Yields:
        What writes into the claim, for others to read; None where another recorder of the same
        ``job`` has provided the directory.

    Raises:
        OutputError: another command writes one there, or something else stands at the claim.
    """
    run_dir = _real(path)
    with contextlib.suppress(OSError):
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + (_PROVIDED_S if job is not None else 0.0)
    with contextlib.ExitStack() as held:
        while True:
            announce = None
            try:
                announce = held.enter_context(locked(claim_file(run_dir)))
                break
            except HeldElsewhere as exc:
                pid, _, of_job = str(exc).partition(" ")
                if job is not None and of_job == job:
                    break
                if time.monotonic() > until_s:
                    raise OutputError(
                        f"{path}: process {pid} is writing into it; wait for its end, or "
                        "choose another -o"
                    ) from None
            time.sleep(_POLL_S)
        yield announce


def recover(path: Path) -> list[str]:
    """Put back what commands that were killed left of the runs that they replaced; a line for each.

    A run goes back to its run_dir when nothing was recorded there since; else it stands beside it,
    under a name that is said. Nothing that was recorded is removed.

    Raises:
        OutputError: a run cannot be put back; it is kept where the message says.
    """
    run_dir = _real(path)
    lines: list[str] = []
    killed = "an earlier command was killed"
    if (unfinished := left_aside(run_dir, "new")) is not None:
        shutil.rmtree(unfinished, ignore_errors=True)
    if (moving := left_aside(run_dir, "moving")) is not None:
        try:
            _move_in(run_dir, moving)
        except OSError as exc:
            raise OutputError(
                f"{moving}: holds files of the run in {path}, and cannot be put back "
                f"({reason_of(exc)}); move them there"
            ) from exc
    old = left_aside(run_dir, "old")
    if old is not None and not recorders(run_dir):
        if run_dir.exists() and (not run_dir.is_dir() or replaces(run_dir, old)):
            lines.append(f"{killed} while it replaced {path}: {_show(path, old)}")
        elif (no_steps_dir := settle(run_dir, old)) is not None:
            lines.append(f"{killed}: {no_step(path, path.with_name(no_steps_dir.name))}")
        else:
            lines.append(
                f"{killed} before it recorded anything: the run that it was to replace is back in "
                f"{path}"
            )
    return lines


def _show(path: Path, old: Path) -> str:
    """Rename a run that was to be replaced so that users see it; return where it is, in words."""
    try:
        before = old.replace(_unused(_real(path), "before"))
    except OSError as exc:
        raise OutputError(
            f"{old}: holds a run that was being replaced, and cannot be renamed "
            f"({reason_of(exc)}); move it away"
        ) from exc
    return f"the run that was there before is kept as {path.with_name(before.name)}"


def set_aside(run_dir: Path) -> Path | None:
    """Move the run in a directory aside, until :func:`settle`; what else is in there stays.

    Returns:
        Where it is; None when there is none.
    """
    entries = [e for e in run_dir.iterdir() if is_own(e) and e.name != LOCK]
    if not entries:
        return None
    moving, old = (working_dir(run_dir, what) for what in ("moving", "old"))
    moving.mkdir()
    for entry in entries:
        entry.replace(moving / entry.name)
    return moving.replace(old)


def settle(run_dir: Path, old: Path) -> Path | None:
    """Remove the run in ``old`` if the recording in ``run_dir`` replaces it; else put it back.

    Returns:
        Where a recording is kept that replaced nothing; None when there is none.

    Raises:
        OutputError: the old run cannot be put back; it is kept where the message says.
    """
    if replaces(run_dir, old):
        gone = working_dir(run_dir, "new")  # what is removed in part is no run
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):
            old = old.replace(gone)
        shutil.rmtree(old, ignore_errors=True)
        return None
    no_steps_dir = None
    if run_dir.is_dir() and holds_recording(run_dir):
        no_steps_dir = _unused(run_dir, "no-steps")
        try:
            no_steps_dir.mkdir()
            for entry in [e for e in run_dir.iterdir() if is_own(e) and e.name != LOCK]:
                entry.replace(no_steps_dir / entry.name)
        except OSError as exc:
            raise OutputError(
                f"{run_dir}: what was recorded cannot be moved ({reason_of(exc)}); the previous "
                f"run is kept as {old}"
            ) from exc
    _put_back(run_dir, old)
    return no_steps_dir


def no_step(path: Path, no_steps_dir: Path) -> str:
    """Say that a recording replaced nothing."""
    return (
        f"{path}: no step was recorded, so the run that was there stays; what was recorded is kept "
        f"as {no_steps_dir}"
    )


def replaces(run_dir: Path, old: Path) -> bool:
    """Return whether the recording in a directory may replace the run in ``old``.

    One without a step replaces no run that has any, and only with a trace or measures one that has
    none either.
    """
    new = content_of(run_dir)
    return new > Content.TELEMETRY and new >= content_of(old)


def _put_back(run_dir: Path, old: Path | None, *, existed: bool = True) -> None:
    """Undo a recording that recorded nothing; what the command wrote there itself stays.

    The run that was there before, if any, was moved to ``old``.
    """
    try:
        if run_dir.is_dir():
            for entry in [e for e in run_dir.iterdir() if is_own(e)]:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            if old is not None or not existed:
                with contextlib.suppress(OSError):
                    run_dir.rmdir()
        if old is not None:
            old = old.replace(working_dir(run_dir, "moving"))
            _move_in(run_dir, old)
    except OSError as exc:
        remains = f"; the previous run is kept as {old}" if old is not None else ""
        raise OutputError(f"{run_dir}: cannot be put back ({reason_of(exc)}){remains}") from exc


def _move_in(run_dir: Path, moving: Path) -> None:
    """Move the entries of a run back into its directory."""
    run_dir.mkdir(exist_ok=True)
    for entry in moving.iterdir():
        entry.replace(run_dir / entry.name)
    moving.rmdir()


_Aside = Literal["old", "new", "moving"]


def working_dir(run_dir: Path, what: _Aside) -> Path:
    """Return where a run is held while the one in ``run_dir`` is replaced."""
    return run_dir.with_name(f".{run_dir.name}.{what}")


def left_aside(run_dir: Path, what: _Aside = "old") -> Path | None:
    """Return a run of this user that waits beside ``run_dir``, if there is one."""
    folder = working_dir(run_dir, what)
    return folder if _is_own_folder(folder) else None


def _is_own_folder(folder: Path) -> bool:
    """Return whether a folder, and no link to one, is there and belongs to this user."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_users(status)


def holds_recording(run_dir: Path) -> bool:
    """Return whether a rank wrote anything into a run directory, or a run of an experiment."""
    return any(
        p.is_file() and p.stat().st_size
        for pattern in ("rank-*/*", "*/rank-*/*")
        for p in run_dir.glob(pattern)
    )


def _unused(run_dir: Path, word: str) -> Path:
    """Return a name that a user sees, beside a run directory, which nothing has."""
    for number in itertools.count(1):
        visible = run_dir.with_name(f"{run_dir.name}.{word}" + (f"-{number}" if number > 1 else ""))
        if not visible.exists() and not visible.is_symlink():
            return visible
    raise AssertionError
