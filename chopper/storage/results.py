"""Results of tasks that only later tasks need: in memory, or in files of a folder."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from chopper.errors import InputError, OutputError, reason_of
from chopper.storage import values
from chopper.storage.caches import TemporaryFolder


class Result(Protocol):
    """A value that later tasks need."""

    def get(self) -> Any:
        """Return the value."""


class Folder(TemporaryFolder):
    """A temporary folder of results, by default on a disk.

    It is removed when nobody refers to it or to a result in it, or the process ends.

    Raises:
        OutputError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__("spill", parent)
        _folders[self.path] = self


_folders: weakref.WeakValueDictionary[Path, Folder] = weakref.WeakValueDictionary()


def owner(path: Path) -> Folder | None:
    """Return the folder of this process at a path; None in another process."""
    return _folders.get(path)


@dataclass(frozen=True)
class InMemory:
    """A result in the memory of this process."""

    value: Any

    def get(self) -> Any:
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class InFile:
    """A result in a file, which is removed with it where the folder is this process's own."""

    path: Path
    folder: Folder | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", owner(self.path.parent))
        if self.folder is not None:
            weakref.finalize(self, _unlink, self.path, os.getpid()).atexit = False

    def get(self) -> Any:
        """Read the value.

        Raises:
            InputError: the file is gone.
        """
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
        return InFile, (self.path,)


def leave(value: Any, folder: Path | None) -> Result:
    """Leave a value for later tasks: in a file of a folder, or in memory where there is none.

    Raises:
        OutputError: it cannot be written.
    """
    if folder is None:
        return InMemory(value)
    return written([values.encode(value, compressed=True)], folder)


def written(data: Iterable[Any], folder: Path) -> InFile:
    """Write an encoded value to a file of a folder, as a whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    path = folder / secrets.token_hex(8)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(data)
        partial.replace(path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(exc, OSError):
            raise
        raise OutputError(
            f"{folder}: a temporary file cannot be written ({reason_of(exc)}); free space there, "
            "or set TMPDIR to another disk"
        ) from exc
    return InFile(path)


def _unlink(path: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        path.unlink(missing_ok=True)
