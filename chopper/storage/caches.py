"""Folders of this user alone: caches for later commands, and temporary ones."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from chopper.errors import OutputError, reason_of
from chopper.storage.files import is_users

_KEPT_S = 7 * 86_400
_NEW_S = 60.0
"""A folder younger than this may not have been locked yet."""
_ONCE_LOCKED = 0o1700
"""Mode of a folder that its owner has locked: the sticky bit says so."""


def cache_folder(kind: str, key: str) -> Path:
    """Return the folder of ``key``, made where it is missing; remove those unused for a week.

    It is ``$XDG_CACHE_HOME/chopper/KIND/HASH`` (``~/.cache`` by default), which nobody else may
    open. Where that cannot be made, or belongs to another user (``sudo`` keeps HOME), it is a
    temporary folder that ends with this process: nothing is ever taken from others.

    Raises:
        OutputError: no temporary folder can be made either.
    """
    name = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    # A relative path is invalid there (XDG Base Directory Specification).
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        home = named if named.is_absolute() else Path.home() / ".cache"
        home.mkdir(parents=True, exist_ok=True)
        if not is_users(home.stat()) and home.stat().st_uid:
            raise PermissionError
        folder = home
        for part in ("chopper", kind, name):
            folder = folder / part
            _make_own(folder)
        os.utime(folder)
    except (OSError, RuntimeError):  # pathlib's, where no home is known
        return _instead(kind, name).path
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.lstat().st_mtime > _KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _make_own(folder: Path) -> None:
    """Make a folder, or require that it is a real one of this user, and close it to others."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if sys.platform == "win32":
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not is_users(os.fstat(opened)):
            raise PermissionError
        os.fchmod(opened, 0o700)
    finally:
        os.close(opened)


@functools.cache
def _instead(kind: str, name: str) -> TemporaryFolder:
    """Return a folder of this process, for where there can be no cache."""
    del kind, name
    return TemporaryFolder("cache")


@contextlib.contextmanager
def scratch(use: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory for temporary files, and remove it afterwards.

    Raises:
        OutputError: it cannot be made; for the arguments see :class:`TemporaryFolder`.
    """
    folder = TemporaryFolder(use, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


class TemporaryFolder:
    """A temporary folder, removed when nobody refers to this object, or the process ends.

    Its owner holds a lock on it: one without is of a process that was killed, and is removed by the
    next.

    Args:
        use: a word of its name.
        parent: where it is made; by default where the system has temporary files, on a disk.

    Raises:
        OutputError: no folder can be made there.
    """

    def __init__(self, use: str, parent: Path | None = None) -> None:
        remedy = "set TMPDIR to another one" if parent is None else "choose another -o"
        parent = parent or _on_disk()
        for old in parent.glob(".chopper-*.tmp"):
            _remove_abandoned(old)
        try:
            self.path = Path(tempfile.mkdtemp(".tmp", f".chopper-{use}-", parent))
        except OSError as exc:
            raise OutputError(
                f"{parent}: cannot create a temporary folder there ({reason_of(exc)}); {remedy}"
            ) from exc
        held = None
        with contextlib.suppress(OSError):  # no locks here: nobody else removes it
            held = os.open(self.path, os.O_RDONLY)
            _lock(held)
            self.path.chmod(_ONCE_LOCKED)
        self.remove = weakref.finalize(self, _remove, self.path, held, os.getpid())


def _lock(descriptor: int) -> None:
    """Take the lock of an open folder, which ends with this process.

    Raises:
        OSError: another process holds it, or there are no locks here.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "no locks of folders on Windows")
    from filelock import lock_descriptor

    if not lock_descriptor(descriptor, blocking=False):
        raise BlockingIOError


def _remove(path: Path, held: int | None, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that nobody has locked."""
    if not re.fullmatch(r"\.chopper-[a-z]+-[a-z0-9_]{8}\.tmp", folder.name, re.ASCII):
        return
    try:
        status = folder.lstat()
        new = time.time() - status.st_mtime < _NEW_S
        if not is_users(status) or (new and stat.S_IMODE(status.st_mode) != _ONCE_LOCKED):
            return
        held = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return
    try:
        _lock(held)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # somebody works in it
    finally:
        os.close(held)


def _on_disk() -> Path:
    """Return the system's folder for temporary files, unless that is memory."""
    folder = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        mounts = [
            line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        ]
        around = [m for m in mounts if folder.is_relative_to(m[1])]
        if around and max(around, key=lambda m: len(m[1]))[2] in ("tmpfs", "ramfs"):
            return Path("/var/tmp")
    return folder
