"""Values in files of a temporary folder, which goes with the process that made it."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chopper.errors import InputError, OutputError, reason_of
from chopper.storage.caches import TemporaryFolder


class Folder(TemporaryFolder):
    """A temporary folder of values, by default on a disk.

    Raises:
        OutputError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__("spill", parent)

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


def _unlink(path: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        path.unlink(missing_ok=True)
