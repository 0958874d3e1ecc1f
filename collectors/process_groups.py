"""The ranks of a run on this host, found through the manifests that they write.

One sampler a host sees all of them, whenever they begin.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chopper.storage.files import JSON_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator


class RankPart(msgspec.Struct):
    """The few fields of a rank's manifest that a sampler needs."""

    rank: int
    hostname: str | None = None
    pid: int | None = None


class RankFinder:
    """Looks for manifests that are new or were written anew.

    Args:
        run_path: the run directory.
        hostname: this host's name as the ranks write it.
    """

    def __init__(self, run_path: str, hostname: str) -> None:
        self._run_path = Path(run_path)
        self._hostname = hostname
        self._parts: dict[str, tuple[int, RankPart | None]] = {}

    def changed(self) -> Iterator[tuple[int, int]]:
        """(rank, process) of this host's ranks whose manifest changed since the last look."""
        try:
            folders = [e.name for e in os.scandir(self._run_path) if e.name.startswith("rank-")]
        except OSError:
            return  # the run directory is on a file system that went away; watch who is known
        for folder in folders:
            known = self._parts.get(folder)
            if known is not None and known[1] is not None and known[1].hostname != self._hostname:
                continue  # another host's: on a shared file system there may be thousands
            file = self._run_path / folder / "manifest.json"
            try:
                changed_ns = file.stat().st_mtime_ns
                if known is not None and known[0] == changed_ns:
                    continue
                part = msgspec.json.decode(file.read_bytes(), type=RankPart)
            except (OSError, *JSON_ERRORS):
                continue  # not written yet, or not ours: the next look comes soon
            self._parts[folder] = (changed_ns, part)
            if part.hostname == self._hostname and part.pid is not None:
                yield part.rank, part.pid
