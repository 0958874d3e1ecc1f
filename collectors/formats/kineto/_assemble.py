"""From a file's columns to one set of declared tables per rank."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.alignment import aligned, calls_of_device
from chopper.collectors.formats.arrays import NO_VALUE, to_arrow, to_numpy
from chopper.collectors.formats.cleaning import (
    DAMAGES,
    cut_overruns,
    damage_findings,
    far_in_time,
    integer,
    timelines_of,
)
from chopper.collectors.formats.kineto._events import Args, Header
from chopper.collectors.formats.kineto._native import scan_file
from chopper.collectors.formats.kineto._processes import Part, parts_of_file
from chopper.collectors.formats.kineto._reader import FileReader
from chopper.collectors.formats.kineto._values import Names, text_of
from chopper.collectors.formats.parsed import (
    ParsedTrace,
    numbers,
    sorted_table,
    table_of_rows,
)
from chopper.collectors.formats.steps import find_steps
from chopper.errors import InputError
from chopper.storage.manifest import Device, add_finding
from chopper.tables import TABLES
from chopper.tables.ranges import NUMBER_MOST


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
        add_finding(
            findings,
            "event.unknown_category",
            f"{path.name}: events of unknown categories were not used: {unknown}",
            severity="info",
            count=sum(reader.unknown.values()),
        )
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
        return f": {count} {DAMAGES[code]}{hint if code == 'event.without_category' else ''}"
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
