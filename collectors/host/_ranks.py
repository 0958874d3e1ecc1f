"""The ranks of a run on this host, found through the manifests that they write.

One sampler a host sees all of them, whenever they begin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from chopper.collectors.procfs import Budget, FileSource
from chopper.errors import JSON_ERRORS
from chopper.storage.processes import machine
from chopper.tables.ranges import Count, Rank

_SCAN_NS = 1_000_000_000
_SCAN_COST_RATIO = 0.005


class RankPart(msgspec.Struct):
    """The few fields of a rank's manifest that a sampler needs."""

    rank: Rank
    hostname: str | None = None
    machine: str | None = None
    pid: Count | None = None


class RankWatcher(FileSource):
    """A source that follows the ranks of a run on this host, whenever they begin."""

    def __init__(
        self, run_path: str, hostname: str, root: str = "/", scan_ns: int = _SCAN_NS
    ) -> None:
        super().__init__(root)
        self._run_path = Path(run_path)
        self._hostname = hostname
        self._scan = Budget(scan_ns, _SCAN_COST_RATIO)
        self._parts: dict[str, tuple[int, RankPart]] = {}
        """Folder of a rank → when its manifest changed, and that."""
        self._pids: dict[int, int] = {}
        """Rank → its process."""

    def look(self, now_ns: int) -> None:
        """Find new ranks, and changes in their processes, unless it is too soon."""
        if not self._scan.due(now_ns):
            return
        # CPU time: on a busy machine a look may take long because others run in the middle of it.
        before_ns = time.thread_time_ns()
        for rank, pid in self._changed():
            if self._pids.get(rank) != pid:
                self._forget(rank)  # restarted under another process
                self._pids[rank] = pid
                self._begin(rank, pid)
        self._look_within()
        self._scan.charge(now_ns, time.thread_time_ns() - before_ns)

    def _changed(self) -> Iterator[tuple[int, int]]:
        """(rank, process) of this host's ranks whose manifest changed since the last look."""
        try:
            folders = [e.name for e in os.scandir(self._run_path) if e.name.startswith("rank-")]
        except OSError:
            return  # the run directory is on a file system that went away; watch who is known
        for folder in folders:
            seen_ns, known = self._parts.get(folder, (None, None))
            if known is not None and not self._is_here(known):
                continue  # another host's: on a shared file system there may be thousands
            file = self._run_path / folder / "manifest.json"
            try:
                changed_ns = file.stat().st_mtime_ns
                if seen_ns == changed_ns:
                    continue
                part = msgspec.json.decode(file.read_bytes(), type=RankPart)
            except (OSError, *JSON_ERRORS):
                continue  # not written yet, or not ours: the next look comes soon
            self._parts[folder] = (changed_ns, part)
            if self._is_here(part) and part.pid is not None:
                yield part.rank, part.pid

    def _is_here(self, part: RankPart) -> bool:
        """Tell whether a rank's number of its process means that process here."""
        return part.hostname == self._hostname and part.machine in (None, machine())

    def _begin(self, rank: int, pid: int) -> None:
        """Begin to watch a rank's process."""

    def _look_within(self) -> None:
        """Find changes in the watched processes."""

    def _forget(self, rank: int) -> None:
        """Close a rank's open files, if any."""

    def close(self) -> None:
        for rank in self._pids:
            self._forget(rank)
        super().close()
