"""Values in files of a temporary folder, which goes with the process that made it."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chopper.errors import InputError, OutputError, reason_of
from chopper.storage.files import is_users
from chopper.storage.process_identity import lock

_PREFIX = "chopper-spill-"
_NEW_S = 60.0
"""A folder younger than this may not have been locked yet."""


class Folder:
    """A temporary folder, removed when nobody holds a value in it, or at the end of the process.

    Its owner holds a lock on it: one without is of a process that was killed, and is removed by the
    next.

    Args:
        parent: where it is made; by default where the system has temporary files, on a disk.

    Raises:
        OutputError: no folder can be made there.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or _on_disk()
        for old in parent.glob(f"{_PREFIX}*"):
            _remove_abandoned(old)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as exc:
            raise OutputError(
                f"{parent}: cannot create a temporary folder there ({reason_of(exc)}); set TMPDIR "
                "to another one"
            ) from exc
        held = None
        with contextlib.suppress(OSError):  # no locks here: nobody else removes it
            held = os.open(self.path, os.O_RDONLY)
            lock(held)
        weakref.finalize(self, _remove, self.path, held, os.getpid())

    def spilled(self, path: Path) -> Spilled:
        """Return the value of a file, which is removed with it."""
        value = Spilled(path, self)
        weakref.finalize(value, _unlink, path, os.getpid()).atexit = False
        return value


@dataclass(frozen=True)
class Spilled:
    """A value in a file.

    Attributes:
        folder: keeps the file; None in a worker.
    """

    path: Path
    folder: Folder | None

    def get(self) -> Any:
        """Read the value.

        Raises:
            InputError: the file is gone.
        """
        from chopper.storage import values

        return values.decode(self.data())

    def data(self) -> memoryview:
        """Map the encoded value.

        Raises:
            InputError: the file is gone.
        """
        try:
            with self.path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError as exc:
            raise InputError(
                f"{self.path}: a temporary file was removed while it was in use; run again"
            ) from exc

    def __reduce__(self) -> tuple[Any, ...]:
        return Spilled, (self.path, None)


def write(path: Path, value: Any) -> None:
    """Write a value to a file, as a whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    from chopper.storage import values

    write_parts(path, [values.encode(value, compressed=True)])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write the parts of an encoded value to a file, as a whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(parts)
        partial.replace(path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(exc, OSError):
            raise
        raise OutputError(
            f"{path.parent}: a temporary file cannot be written ({reason_of(exc)}); free space "
            "there, or set TMPDIR to another disk"
        ) from exc


def _remove(path: Path, held: int | None, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)


def _unlink(path: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        path.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that nobody has locked."""
    try:
        status = folder.lstat()
        if not is_users(status) or time.time() - status.st_mtime < _NEW_S:
            return
        held = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return
    try:
        lock(held)
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
