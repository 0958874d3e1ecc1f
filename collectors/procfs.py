"""Reading /proc and /sys without opening files again and again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from chopper.collectors.base import held
from chopper.errors import CollectorUnavailable

_CHUNK_BYTES = 16384


class KeptFile:
    """A file of /proc or /sys that is opened once and read from its start each time.

    A kept descriptor of ``/proc/<pid>/…`` belongs to that process for good: when the process is
    gone a read fails, even if another one has taken its number.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = os.fspath(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._size_bytes = _CHUNK_BYTES

    def read(self) -> bytes:
        """The whole content as of now.

        Raises:
            OSError: what the file spoke of has gone.
        """
        while True:
            data = os.pread(self._fd, self._size_bytes, 0)
            if len(data) < self._size_bytes:
                return data
            # The kernel renders such a file anew per read: parts read apart need not fit together.
            self._size_bytes *= 2

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def try_open(path: Path | str) -> KeptFile | str:
    """Return the file, kept open, or why it cannot be read."""
    try:
        file = KeptFile(path)
    except OSError as exc:
        return f"{os.fspath(path)}: {exc.strerror}"
    try:
        file.read()
    except OSError as exc:  # /proc/pressure exists but says EOPNOTSUPP when booted with psi=0
        file.close()
        return f"{file.path}: {exc.strerror}"
    return file


def content(file: KeptFile | None) -> bytes:
    """Return what a file holds now; nothing when it has gone or never was."""
    if file is None:
        return b""
    try:
        return file.read()
    except OSError:
        return b""


class FileSource:
    """A source that reads kept files; they are closed together.

    Args:
        root: folder in which the machine's ``proc``, ``sys`` and ``dev`` lie.
    """

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]

    def __init__(self, root: str = "/") -> None:
        self.absent: dict[str, str] = {}
        self.root = Path(root)
        self._kept: list[KeptFile] = []

    def keep(self, path: Path | str) -> KeptFile:
        """Open a file, below ``root`` unless the path is absolute, until the source is closed.

        Raises:
            CollectorUnavailable: it cannot be read.
        """
        file = try_open(self.root / path)
        if isinstance(file, str):
            raise CollectorUnavailable(file)
        self._kept.append(file)
        return file

    def close(self) -> None:
        """Close the files."""
        for file in self._kept:
            file.close()


def counted(text: bytes, factor: int = 1) -> int | None:
    """Parse a count; None if the text is not one ("N/A (no PMA)") or exceeds 64 bits."""
    stripped = text.strip()
    return held(int(stripped) * factor) if stripped.isdigit() else None


class Budget:
    """Spaces out a reading whose cost is not known beforehand.

    It is due again after ``period_ns``, or later where one reading costs more than
    ``cost_ratio`` of that.
    """

    def __init__(self, period_ns: int, cost_ratio: float) -> None:
        self._period_ns = period_ns
        self._cost_ratio = cost_ratio
        self._due_ns: int | None = None

    def due(self, now_ns: int) -> bool:
        """Return whether the reading may be made now."""
        return self._due_ns is None or now_ns >= self._due_ns

    def charge(self, now_ns: int, cost_ns: int) -> None:
        """Record the time and cost of a reading."""
        self._due_ns = now_ns + max(self._period_ns, int(cost_ns / self._cost_ratio))
