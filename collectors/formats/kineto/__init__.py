"""Reader of Kineto traces: every dialect that PyTorch has written, whole or damaged.

``read_trace(path)`` gives one :class:`ParsedTrace` per rank and device in the file, as declared
tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.cleaning import (
    aligned,
    calls_of_device,
    cut_overruns,
    damage_findings,
    far_in_time,
    integer,
    timelines_of,
)
from chopper.collectors.formats.kineto._events import Args, Header, Names, text_of
from chopper.collectors.formats.kineto._native import scan_file
from chopper.collectors.formats.kineto._reader import FileReader
from chopper.collectors.formats.parsed import (
    NO_VALUE,
    ParsedTrace,
    is_one_of,
    most_frequent,
    numbers,
    sorted_table,
    table_of_rows,
    to_arrow,
    to_numpy,
)
from chopper.collectors.formats.steps import find_steps
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Device, Finding
from chopper.tables import TABLES
from chopper.tables.ranges import NUMBER_MOST

__all__ = ["ParsedTrace", "read", "read_trace"]

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
            doubt.append(finding("trace.ranks_ambiguous", count=unsure, source=path.name))
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


def read_trace(path: Path) -> list[ParsedTrace]:
    """Read one file.

    Usually that is one rank with one device. Several ranks that a tool merged into one file, and
    several devices that one process drives, come as one trace each: every device is a timeline.

    Raises:
        InputError: the file is missing, empty, or no Kineto trace; one line says which.
    """
    return traces_of(path, FileReader(path, scan_file(path)))


def traces_of(path: Path, reader: FileReader) -> list[ParsedTrace]:
    """Return the traces of a file that was read.

    Raises:
        InputError: it holds no usable event.
    """
    host, device = reader.host.columns, reader.device.columns
    unknown = ", ".join(f"{k} ({v})" for k, v in sorted(reader.unknown.items())[:5])
    if not len(device["start_ns"]):
        refuse_other_devices(path, reader.names, reader.counts)
    if not len(host["start_ns"]) and not len(device["start_ns"]):
        raise InputError(
            f"{path}: a trace without a single usable event{_what_else(reader, unknown)}"
        )
    far = far_in_time(host, device)
    if far is not None:
        reader.counts["event.far_in_time"] += int(far[0].sum() + far[1].sum())
    findings = [*reader.findings, *damage_findings(reader.counts, path.name)]
    if unknown:
        found = finding(
            "event.unknown_category",
            count=sum(reader.unknown.values()),
            source=path.name,
            categories=unknown,
        )
        findings.append(found)
    parts, doubt = parts_of_file(path, reader, host, device)
    findings += doubt
    if far is not None:
        for part in parts:
            part.leave_out(*far)
    traces = []
    for part in parts:
        traces += _timelines(reader, path, host, device, part, len(parts))
    traces[0].findings[:0] = findings
    return traces


_OTHER_DEVICE = re.compile(
    r"ascend|/(device|host):|\b(cann|npu|tpu|hpu|mlu|neuron|device|hardware)\b", re.IGNORECASE
)
"""Name of a process of device work in traces of torch_npu, XLA and other vendors."""


def refuse_other_devices(path: Path, names: Names, counts: Counter[str]) -> None:
    """Refuse a file of device work without categories, which would pass for a run on the host.

    Raises:
        InputError: the file is one.
    """
    count = counts["event.without_category"]
    for (_, _, kind), name in names.items() if count else ():
        if kind == "process_name" and _OTHER_DEVICE.search(name):
            raise InputError(
                f"{path}: device work of {name!r} ({count} events without a category), as in "
                "trace_view.json of torch_npu (Huawei Ascend) or traces of XLA, is not read; "
                "expected a trace of torch.profiler on CUDA, ROCm or XPU, or of nsys or rocprof"
            )


def _what_else(reader: FileReader, unknown: str) -> str:
    """Say why nothing could be used, as far as it can be told."""
    if unknown:
        return f": its events are of categories that Kineto does not write: {unknown}"
    if +reader.counts:
        count, code = max((count, code) for code, count in reader.counts.items())
        hint = " (rocmProfileData's JSON? Pass the .rpd that it was made from)"
        message = finding(code, count=count, source="").message
        return message + (hint if code == "event.without_category" else "")
    return "; was the profiler active while the program ran?"


def _timelines(
    reader: FileReader,
    path: Path,
    host: dict[str, Any],
    device: dict[str, Any],
    part: Part,
    ranks_in_file: int,
) -> list[ParsedTrace]:
    """One trace per device that the process drives, the busiest first."""
    base_ns, pid = reader.base_ns, part.pid
    info = reader.header.distributedInfo
    info = info if isinstance(info, dict) else {}
    host_table, host_rows = sorted_table("host_span", host, part.host_rows, base_ns)
    host_table, host_rows, dropped = _drop_duplicates(host_table, host_rows, ("pid", "tid"))
    step, marked = find_steps(host_table, path.name, pid)
    shared = {
        "thread": _threads(reader),
        "step": step,
        "memory_event": _memory(reader, base_ns, pid if ranks_in_file > 1 else None),
        "counter": _counters(reader, base_ns),
    }
    counts: Counter[str] = Counter()
    device = cut_overruns(counts, device, part.device_rows)
    timelines, findings = timelines_of(device, part.device_rows, path.name)
    findings += marked
    groups = info.get("pg_config")
    rank = integer(info.get("rank"))
    world = integer(info.get("world_size"))
    recorded = rank if rank is not None and rank >= 0 and ranks_in_file == 1 else part.rank
    traces: list[ParsedTrace] = []
    for device_id, rows in timelines:
        device_table, device_rows = sorted_table("device_event", device, rows, base_ns)
        device_table, device_rows, dropped_device = _drop_duplicates(
            device_table, device_rows, ("device_id", "stream_id")
        )
        dropped += dropped_device
        own_host = calls_of_device(host_table, device, part.device_rows, rows)
        device_table, shifted = aligned(
            own_host, device_table, path.name, only_device=rows is part.device_rows
        )
        findings += shifted
        traces.append(
            ParsedTrace(
                source=path.name,
                rank=recorded,
                world_size=world if world is not None and world > 0 else None,
                backend=str(info["backend"]) if info.get("backend") else None,
                tables={
                    **shared,
                    "host_span": own_host,
                    "device_event": device_table,
                    "synchronization": TABLES["synchronization"].empty()
                    if device_id is None or ranks_in_file > 1
                    else _synchronization(reader, base_ns, device_id),
                    "collective": _collectives(reader, host_rows, device_rows),
                },
                devices=_devices(reader.header),
                host_pid=pid,
                process=part.name if ranks_in_file > 1 else None,
                device_id=device_id,
                main=not traces,
                process_groups=[g for g in groups if isinstance(g, dict)]
                if isinstance(groups, list)
                else [],
                environment=_environment(reader.header, info),
            )
        )
    counts["event.duplicate"] = dropped
    findings += damage_findings(counts, path.name)
    traces[0].findings += findings
    return traces


def _drop_duplicates(
    table: pa.Table, rows: np.ndarray, place_columns: tuple[str, str]
) -> tuple[pa.Table, np.ndarray, int]:
    """Drop events that repeat an earlier one in place_columns, time, name and ids.

    One stream or thread cannot run two things at once, so an exact repetition is the recorder's.
    Only events with a duration and an id count: points in time may well repeat.

    Returns:
        The table, the map old row → new row, and how many were dropped.
    """
    if table.num_rows < 2:
        return table, rows, 0
    start, dur = to_numpy(table["start_ns"]), to_numpy(table["dur_ns"])
    # Sorted by start then longest first: repetitions share both with a neighbour.
    near = (start[1:] == start[:-1]) & (dur[1:] == dur[:-1]) & (dur[1:] > 0)
    if not near.any():
        return table, rows, 0
    candidates = np.flatnonzero(np.append(near, False) | np.append(False, near))
    few = table.take(to_arrow(candidates))
    ids = [to_numpy(few[c], missing=-1) for c in ("correlation_id", "external_id")]
    keys = np.stack(
        [
            start[candidates],
            dur[candidates],
            *(to_numpy(few[c]).astype(np.int64) for c in place_columns),
            to_numpy(few["name"].combine_chunks().indices).astype(np.int64),
            *ids,
        ]
    )
    order = np.lexsort(keys[::-1])
    same = np.zeros(len(candidates), dtype=bool)
    same[order[1:]] = (keys[:, order[1:]] == keys[:, order[:-1]]).all(axis=0)
    same &= (ids[0] > 0) | (ids[1] > 0)
    dropped = int(same.sum())
    if not dropped:
        return table, rows, 0
    keep = np.ones(table.num_rows, dtype=bool)
    keep[candidates[same]] = False
    new_position = np.cumsum(keep) - 1
    valid = rows >= 0
    moved = rows.copy()
    moved[valid] = np.where(keep[rows[valid]], new_position[rows[valid]], -1)
    return table.filter(to_arrow(keep)).combine_chunks(), moved, dropped


def _collectives(reader: FileReader, host_rows: np.ndarray, device_rows: np.ndarray) -> pa.Table:
    rows: list[tuple[str, int, Args]] = []
    for source, listed, moved in (
        ("device_event", reader.device.collectives, device_rows),
        ("host_span", reader.host.collectives, host_rows),
    ):
        rows += [(source, int(moved[i]), a) for i, a in listed if moved[i] >= 0]
    rows.sort(key=lambda r: (r[0], r[1]))
    # The arguments are named like the columns.
    fields = list(TABLES["collective"].arrow)[2:]
    readers = [(f.name, integer if f.type == pa.int64() else text_of) for f in fields]
    return table_of_rows(
        "collective",
        [(*position, *(read(getattr(a, name)) for name, read in readers)) for *position, a in rows],
    )


def _threads(reader: FileReader) -> pa.Table:
    processes = {pid: n for (pid, _, k), n in reader.names.items() if k == "process_name"}
    rows: list[tuple[int, int, str | None, str | None]] = [
        (pid, tid, processes.get(pid), name)
        for (pid, tid, kind), name in reader.names.items()
        if kind == "thread_name" and tid is not None
    ]
    named = {pid for pid, *_ in rows}
    rows += [(pid, -1, name, None) for pid, name in processes.items() if pid not in named]
    rows.sort(key=lambda r: (r[0], r[1]))
    return table_of_rows("thread", rows)


def _memory(reader: FileReader, base_ns: int, pid: int | None) -> pa.Table:
    declared = TABLES["memory_event"]
    columns = reader.memory
    order = np.argsort(columns["time_ns"], kind="stable")
    if pid is not None:
        order = order[columns["pid"][order] == pid]
    arrays = []
    for f in declared.arrow:
        picked = columns[f.name][order]
        arrays.append(numbers(picked + base_ns if f.name == "time_ns" else picked, f.type))
    return pa.Table.from_arrays(arrays, schema=declared.arrow)


def _synchronization(reader: FileReader, base_ns: int, device_id: int | None) -> pa.Table:
    """Records of one device; ids below zero say that there is none."""
    columns = dict(reader.synchronization.columns)
    for name in ("stream_id", "event_stream_id", "event_correlation_id"):
        columns[name] = np.where(columns[name] < 0, NO_VALUE, columns[name])
    return sorted_table("synchronization", columns, columns["device_id"] == device_id, base_ns)[0]


def _counters(reader: FileReader, base_ns: int) -> pa.Table:
    time_ns, rows = reader.counters
    order = np.argsort(time_ns, kind="stable").tolist()
    times = (time_ns + base_ns).tolist()
    return table_of_rows("counter", [(times[i], *rows[i]) for i in order])


def _devices(header: Header) -> list[Device]:
    listed = header.deviceProperties or header.computeProperties
    if not isinstance(listed, list):
        return []
    devices = []
    for position, entry in enumerate(listed):
        if not isinstance(entry, dict):
            continue
        device_id = integer(entry.get("id"))
        name = entry.get("name")
        if device_id is not None and not -1 <= device_id < 1 << 31:
            continue
        devices.append(
            Device(
                device_id=position if device_id is None else device_id,
                name=name if isinstance(name, str) and name else None,
                memory_bytes=_positive(entry.get("totalGlobalMem")),
                multiprocessor_count=_positive(entry.get("numSms")),
            )
        )
    return devices


def _positive(value: Any) -> int | None:
    number = integer(value)
    return number if number is not None and 0 < number <= NUMBER_MOST else None


def _environment(header: Header, info: dict[str, Any]) -> dict[str, str]:
    facts = {
        "host_name": header.host_name,
        "trace_name": header.traceName,
        "nccl_version": info.get("nccl_version"),
    }
    return {k: str(v) for k, v in facts.items() if v}


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read one file; see :func:`read_trace`."""
    (path,) = files
    return read_trace(path)
