"""Whose work is it: the ranks in a file, and the devices of a rank.

A process that launches device work, or that runs steps, is a rank. Profilers write one rank per
file; tools then merge the files, and correlation ids, device ordinals and even process ids of
different ranks may collide. Nothing is joined across ranks here: each device event goes to the
one process that can have launched it, and where that cannot be told, the doubt is said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from chopper.collectors.formats.arrays import is_one_of, most_frequent
from chopper.collectors.formats.kineto._reader import FileReader
from chopper.storage.manifest import Finding, add_finding

_RANK = re.compile(r"\brank[\s_:#=-]*(\d{1,6})(?!\d)", re.IGNORECASE | re.ASCII)
_LATE_NS = 10 * 10**9
"""No device event starts this long after its launch; an older launch is another's."""
_PID_LIMIT = 1 << 22
"""Linux gives no higher process ids."""


@dataclass
class Part:
    """One rank of a file.

    Attributes:
        pid: its process, None when the file has no host events.
        name: the process as the file names it.
        rank: from that name; None when it does not say.
        host_rows, device_rows: masks; None for all rows.
    """

    pid: int | None
    name: str | None = None
    rank: int | None = None
    host_rows: np.ndarray | None = None
    device_rows: np.ndarray | None = None

    def leave_out(self, host_rows: np.ndarray, device_rows: np.ndarray) -> None:
        """Take rows away."""
        self.host_rows = ~host_rows & (True if self.host_rows is None else self.host_rows)
        self.device_rows = ~device_rows & (True if self.device_rows is None else self.device_rows)


def parts_of_file(
    path: Path, reader: FileReader, host: dict[str, Any], device: dict[str, Any]
) -> tuple[list[Part], list[Finding]]:
    """Return a file's ranks, in order of rank or process id, and findings about doubtful ones."""
    pids = host["pid"]
    has_device = len(device["start_ns"]) > 0
    launches = is_one_of(host["category"], "runtime", "driver")
    if has_device:
        correlation = host["correlation_id"]
        launches = launches & (correlation >= 0)
        candidates = [int(p) for p in np.unique(pids[launches])]
    else:
        candidates = _working_processes(host)
    if len(candidates) < 2:
        alone = candidates[0] if candidates else _busiest_process(host)
        return [Part(alone)], []
    doubt: list[Finding] = []
    if has_device:
        sharing = _Launches(host, device, launches, candidates)
        owner, unsure = _owners(reader, sharing, host, device)
        used = [pid for pid in candidates if (owner == pid).any()]
        if len(used) < 2:
            return [Part(used[0] if used else candidates[0])], []
        if unsure:
            add_finding(
                doubt,
                "trace.ranks_ambiguous",
                f"{path.name}: {unsure} device events match launches of several "
                "merged ranks (same ids) and were assigned in order of time and device: load the "
                "ranks' own files to be sure",
                count=unsure,
            )
    else:
        used, owner = candidates, np.zeros(0, np.int64)
    stray = ~np.isin(pids, used)
    parts = [
        Part(
            pid,
            *_name_of(reader, pid),
            # Helpers that launch nothing (data loader workers) go with the first rank.
            host_rows=(pids == pid) | (stray if pid == used[0] else False),
            device_rows=owner == pid,
        )
        for pid in used
    ]
    ranks = [part.rank for part in parts]
    if None in ranks or len(set(ranks)) < len(ranks):
        for part in parts:
            part.rank = None
        return parts, doubt
    return sorted(parts, key=lambda p: p.rank or 0), doubt


def _busiest_process(host: dict[str, Any]) -> int | None:
    working = host["pid"][is_one_of(host["category"], "cpu_op", "annotation")]
    return most_frequent(working) if len(working) else None


def _working_processes(host: dict[str, Any]) -> list[int]:
    """Processes that run steps; on a trace without steps, those that run operators."""
    codes, names = host["name"]
    steps = [i for i, n in enumerate(names) if n is not None and n.startswith("ProfilerStep")]
    stepping = np.unique(host["pid"][np.isin(codes, steps)])
    if len(stepping):
        return [int(p) for p in stepping]
    pids, counts = np.unique(host["pid"][is_one_of(host["category"], "cpu_op")], return_counts=True)
    # A tenth of the busiest: less is a helper, not a rank.
    return [int(p) for p, n in zip(pids, counts, strict=True) if n * 10 >= counts.max()]


def _name_of(reader: FileReader, pid: int) -> tuple[str, int | None]:
    """Return the file's name of a process, and the rank that this says."""
    label = reader.ids.labels.get(pid)
    name = reader.names.get((pid, None, "process_name"))
    for text in (label, name):
        match = _RANK.search(text.replace("_", " ")) if text else None
        if match:
            return label or f"process {pid}", int(match.group(1))
    return label or f"process {pid}", None


class _Launches:
    """Launches of each process, ready to be asked which device events they explain."""

    def __init__(
        self, host: dict[str, Any], device: dict[str, Any], mask: np.ndarray, pids: list[int]
    ) -> None:
        correlation = host["correlation_id"]
        self.pids = pids
        self.wanted = device["correlation_id"]
        self.start = device["start_ns"]
        self.of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for pid in pids:
            rows = np.flatnonzero(mask & (host["pid"] == pid))
            rows = rows[np.lexsort((host["start_ns"][rows], correlation[rows]))]
            self.of[pid] = correlation[rows], host["start_ns"][rows]

    def explains(self, pid: int) -> np.ndarray:
        """Per device event: index of the latest launch of its id before it, -1 for none."""
        ids, start = self.of[pid]
        # Latest launch at or before the event: search the pairs (id, time) as one order.
        order = np.lexsort(
            (
                np.concatenate([np.zeros(len(ids)), np.ones(len(self.wanted))]),
                np.concatenate([start, self.start]),
                np.concatenate([ids, self.wanted]),
            )
        )
        is_launch = order < len(ids)
        last = np.maximum.accumulate(np.where(is_launch, np.arange(len(order)), -1))
        events = ~is_launch
        at = order[np.maximum(last[events], 0)]
        which = order[events] - len(ids)
        ok = (last[events] >= 0) & (at < len(ids))
        at = np.where(ok, at, 0)
        ok &= (self.wanted[which] >= 0) & (ids[at] == self.wanted[which])
        ok &= self.start[which] - start[at] < _LATE_NS
        launch_by_event = np.full(len(self.wanted), -1, dtype=np.int64)
        launch_by_event[which] = np.where(ok, at, -1)
        return launch_by_event


def _owners(
    reader: FileReader,
    launches: _Launches,
    host: dict[str, Any],
    device: dict[str, Any],
) -> tuple[np.ndarray, int]:
    """The process of each device event, and how many of them could be of another as well."""
    pids = np.array(launches.pids)
    keys, first, group = np.unique(
        device["pid"] * 65536 + device["device_id"], return_index=True, return_inverse=True
    )
    explained = np.stack([launches.explains(pid) for pid in launches.pids])
    votes = np.stack([np.bincount(group, weights=e >= 0, minlength=len(keys)) for e in explained])
    best = votes.argmax(axis=0)
    ranked = np.sort(votes, axis=0)
    # Where the ids of ranks collide, several processes explain a device equally well.
    open_keys = np.flatnonzero(ranked[-2] >= 0.9 * ranked[-1])
    owner = pids[best][group]
    if not len(open_keys):
        return owner, 0
    rows = np.flatnonzero(np.isin(group, open_keys))
    placed = _by_place(reader, rows, launches.pids, host)
    if placed is not None:
        claims = explained[:, rows] >= 0
        fits = ~claims.any(axis=0) | claims[placed, np.arange(len(rows))]
        owner[rows] = pids[np.where(fits, placed, claims.argmax(axis=0))]
        return owner, 0
    named = _by_name(reader, [int(p) for p in device["pid"][first[open_keys]]], launches.pids)
    if named is not None:
        best[open_keys] = named
        return pids[best][group], 0
    taken = np.delete(best, open_keys)
    free = [i for i in range(len(pids)) if i not in taken and votes[i, open_keys].any()]
    if len(free) == len(open_keys):
        # One each: launchers give devices out in the order in which they start processes.
        best[open_keys] = free
        return pids[best][group], len(rows)
    if len(free) < 2:
        return owner, len(rows)
    divided, unsure = _divide(rows, free, explained, launches, device)
    owner[rows] = pids[divided]
    return owner, unsure


def _by_name(reader: FileReader, devices: list[int], processes: list[int]) -> list[int] | None:
    """Return the process of each device by how a merge tool renamed them; None if by none.

    Tools put the rank before both, as a word or as a multiple that no process id reaches.
    """
    labels = reader.ids.labels
    if all(d in labels for d in devices):
        shared = {_stem(labels[p]): i for i, p in enumerate(processes) if p in labels}
        owners = [shared.get(_stem(labels[d])) for d in devices]
    elif max(devices) >= _PID_LIMIT:
        order = sorted(range(len(processes)), key=lambda i: processes[i])
        at = np.searchsorted(np.sort(processes), devices)
        owners = [order[i] if i < len(order) else None for i in at]
    else:
        return None
    return None if None in owners else [i for i in owners if i is not None]


def _stem(label: str) -> str:
    """A name without its last number: ``rank2_1002`` and ``rank2_0`` are of one rank."""
    numbered = label.rstrip("".join({char for char in label if not char.isdecimal()}))
    if not numbered:
        return label
    stem = numbered.rstrip("0123456789").rstrip("_:- \t")
    return stem.removesuffix("GPU").removesuffix("CPU").removesuffix("python")


def _divide(
    rows: np.ndarray,
    processes: list[int],
    explained: np.ndarray,
    launches: _Launches,
    device: dict[str, Any],
) -> tuple[np.ndarray, int]:
    """Share events that several processes explain among them, launch by launch, in time order.

    Returns the process of each row, and how many rows were in doubt.
    """
    claims = explained[processes][:, rows] >= 0
    count = claims.sum(axis=0)
    owners = np.array(processes)[claims.argmax(axis=0)]
    # In merged files the usual correlation id repeats.
    ids = device["correlation_id"][rows]
    _, events = np.unique(ids[ids >= 0], return_counts=True)
    if not len(events) or np.median(events) < 2:
        return np.full(len(rows), processes[0]), 0
    taken: dict[tuple[int, int], int] = {}
    several = np.flatnonzero(count > 1)
    for at in several[np.argsort(device["start_ns"][rows[several]], kind="stable")]:
        options = []
        for i in processes:
            launch = int(explained[i, rows[at]])
            if launch >= 0:
                # A launch that has had no event yet comes first, then the earliest.
                began = int(launches.of[launches.pids[i]][1][launch])
                options.append((taken.get((i, launch), 0), began, i, launch))
        had, _, i, launch = min(options)
        taken[i, launch] = had + 1
        owners[at] = i
    return owners, len(several) + int((count == 0).sum())


def _by_place(
    reader: FileReader, rows: np.ndarray, pids: list[int], host: dict[str, Any]
) -> np.ndarray | None:
    """Return the process that each event stands with in the file; None where they are mixed."""
    host_place, device_place = reader.host.places, reader.device.places
    blocks = []
    for i, pid in enumerate(pids):
        places = host_place[host["pid"] == pid]
        blocks.append((int(places.min()), int(places.max()), i))
    blocks.sort()
    if any(last > first for (_, last, _), (first, _, _) in pairwise(blocks)):
        return None
    starts = np.array([first for first, _, _ in blocks])
    at = np.maximum(np.searchsorted(starts, device_place[rows], side="right") - 1, 0)
    owners: np.ndarray = np.array([i for _, _, i in blocks])[at]
    return owners
