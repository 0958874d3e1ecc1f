"""A run that is being replaced waits beside its place; what becomes of it when the command dies.

``.NAME.HOST-PID.old`` is the run that was there, ``.NAME.HOST-PID.new`` one that is being written.
A command that is killed leaves them; the next one that writes to the same place finds them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


NOTES = ".hook-notes"
"""A file in the run while ``chopper record`` lasts: what the processes below it came to."""


def beside(place: Path, what: Literal["old", "new"]) -> Path:
    """Where this process keeps a run while it replaces the one in ``place``."""
    return place.with_name(f".{place.name}.{socket.gethostname()}-{os.getpid()}.{what}")


def holds_recording(place: Path) -> bool:
    """Whether a rank has written anything into a run directory, or into a run of an experiment."""
    return any(
        p.is_file() and p.stat().st_size
        for pattern in ("rank-*/*", "*/rank-*/*")
        for p in place.glob(pattern)
    )


def left_by_the_dead(place: Path, what: Literal["old", "new"]) -> Iterator[Path]:
    """What commands of this host left beside ``place`` when they were killed, oldest first."""
    pattern = re.compile(
        rf"\.{re.escape(place.name)}\.(?:(?P<host>.+)-)?(?P<pid>\d+)\.{what}$", re.DOTALL
    )
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for entry in place.parent.iterdir():
            match = pattern.match(entry.name)
            if match is None or not entry.is_dir() or entry.is_symlink():
                continue
            host = match["host"]
            if host not in (None, socket.gethostname()):
                continue  # nobody can tell from here whether it lives
            moved_ns = entry.stat().st_ctime_ns
            if not _lives(int(match["pid"]), moved_ns):
                found.append((moved_ns, entry))
    for _, entry in sorted(found):
        yield entry


def _lives(pid: int, since_ns: int) -> bool:
    """Whether the process that had this number at a time is there still."""
    import psutil

    if pid == os.getpid():
        return True
    try:
        # A process that began later has its number by chance. Its start is known to 10 ms.
        return int(psutil.Process(pid).create_time() * 1e9) <= since_ns + 20_000_000
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def bring_to_light(old: Path, place: Path) -> Path:
    """Give a run that was being replaced a name that its user sees; nothing is overwritten."""
    number = 1
    while True:
        visible = place.with_name(f"{place.name}.before" + (f"-{number}" if number > 1 else ""))
        if not visible.exists() and not visible.is_symlink():
            old.replace(visible)
            return visible
        number += 1


def remove(directory: Path) -> None:
    """Remove a run that was never whole; best effort."""
    shutil.rmtree(directory, ignore_errors=True)
