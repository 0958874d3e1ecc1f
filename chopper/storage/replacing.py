"""Directories of a command that is at work, and what becomes of them when it is killed.

``.NAME.HOST-PID.old`` is a run that is being replaced, ``.NAME.HOST-PID.new`` one that is being
written; the next command that writes to the same place finds what a killed one left.
``chopper-USE-HOST-PID-*`` among the temporary files is removed by the next command that wants one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from chopper.storage.process_identity import ran_at

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    host = re.escape(socket.gethostname())
    name = rf"\.{re.escape(place.name)}\.(?:{host}-)?(?P<pid>\d+)\.{what}$"
    yield from _of_the_dead(place.parent, name)


@contextlib.contextmanager
def scratch(use: str) -> Iterator[Path]:
    """Make a directory for temporary files; remove it afterwards, and those of killed commands.

    Args:
        use: a word that shows in its name.
    """
    import tempfile

    host = socket.gethostname()
    name = rf"chopper-[a-z]+-{re.escape(host)}-(?P<pid>\d+)-[a-z0-9_]{{8}}$"
    for left in _of_the_dead(Path(tempfile.gettempdir()), name):
        remove(left)
    prefix = f"chopper-{use}-{host}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as directory:
        yield Path(directory)


def _of_the_dead(directory: Path, pattern: str) -> Iterator[Path]:
    """Folders named after processes of this host that run no more, oldest first.

    Of another host's, nobody can tell from here whether they run.
    """
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            match = re.match(pattern, entry.name)
            if match is None or not entry.is_dir() or entry.is_symlink():
                continue
            moved_ns = entry.stat().st_ctime_ns
            if not ran_at(int(match["pid"]), moved_ns):
                found.append((moved_ns, entry))
    for _, entry in sorted(found):
        yield entry


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
