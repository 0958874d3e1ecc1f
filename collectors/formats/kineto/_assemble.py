"""From a file's columns to one set of declared tables per rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.arrays import NO_VALUE, to_arrow, to_numpy
from chopper.collectors.formats.cleaning import far_in_time, integer, main_and_others
from chopper.collectors.formats.kineto._processes import Part, parts_of_file
from chopper.collectors.formats.kineto._reader import FileReader
from chopper.collectors.formats.kineto._values import text_of
from chopper.collectors.formats.parsed import (
    ParsedTrace,
    numbers,
    sorted_table,
    step_table,
    table_of_rows,
)
from chopper.errors import InputError
from chopper.storage.manifest import Device, Finding, Severity
from chopper.tables import TABLES

if TYPE_CHECKING:
    from pathlib import Path

    from chopper.collectors.formats.kineto._events import Args, Header

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})$")

_COUNT_MESSAGES: dict[str, tuple[Severity, str]] = {
    "event.without_ts": ("warning", "events without a usable ts were dropped"),
    "event.without_name": ("warning", "events without a name were dropped"),
    "event.without_dur": ("warning", "events without a dur were taken as points in time"),
    "event.negative_duration": ("warning", "events with a negative dur were taken as points"),
    "event.overflowing_duration": (
        "warning",
        "events with an overflowing dur (over 30 days) were taken as points",
    ),
    "event.nested_too_deep": ("warning", "events nested deeper than any trace were dropped"),
    "event.not_an_object": ("warning", "entries of traceEvents that are no objects were dropped"),
    "event.without_ph": ("warning", "events without a phase (ph) were dropped"),
    "event.without_category": ("info", "events without a category were not used"),
    "event.nanosecond_unit": (
        "warning",
        "events count in nanoseconds where the format says microseconds; converted",
    ),
    "event.far_in_time": (
        "warning",
        "events lie more than a day from the rest of the trace (another clock, or a wrong ts) and "
        "were dropped",
    ),
    "event.duplicate": ("warning", "events were recorded twice; the repetitions were dropped"),
}


def read_trace(path: Path) -> list[ParsedTrace]:
    """Read one file.

    Usually that is one rank with one device. Several ranks that a tool merged into one file, and
    several devices that one process drives, come as one trace each: every device is a timeline.

    Raises:
        InputError: the file is missing, empty, or no Kineto trace; one line says which.
    """
    reader = FileReader(path)
    host, device = reader.host.columns, reader.device.columns
    if not len(host["start_ns"]) and not len(device["start_ns"]):
        raise InputError(f"{path}: a trace without a single usable event{_what_else(reader)}")
    far = far_in_time(host, device)
    if far is not None:
        reader.counts.add("event.far_in_time", int(far[0].sum() + far[1].sum()))
    findings = [*reader.findings, *_count_findings(reader, path.name)]
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


def _what_else(reader: FileReader) -> str:
    """Why nothing could be used, as far as it can be told."""
    if reader.unknown:
        listed = ", ".join(f"{k} ({v})" for k, v in sorted(reader.unknown.items())[:5])
        return f": its events are of categories that Kineto does not write: {listed}"
    if reader.counts.values:
        code, count = max(reader.counts.values.items(), key=lambda item: item[1])
        hint = " (rocmProfileData's JSON? Pass the .rpd that it was made from)"
        return f": {count} {_COUNT_MESSAGES[code][1]}" + (
            hint if code == "event.without_category" else ""
        )
    return "; was the profiler active while the program worked?"


def _count_findings(reader: FileReader, source: str) -> list[Finding]:
    findings = [
        Finding(
            code=code,
            severity=_COUNT_MESSAGES[code][0],
            message=f"{source}: {count} {_COUNT_MESSAGES[code][1]}",
            count=count,
        )
        for code, count in sorted(reader.counts.values.items())
    ]
    if reader.unknown:
        listed = ", ".join(f"{k} ({v})" for k, v in sorted(reader.unknown.items())[:5])
        findings.append(
            Finding(
                code="event.unknown_category",
                severity="info",
                message=f"{source}: events of unknown categories were not used: {listed}",
                count=sum(reader.unknown.values()),
            )
        )
    return findings


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
    shared = {
        "host_span": host_table,
        "thread": _threads(reader),
        "step": _steps(host_table, pid),
        "memory_event": _memory(reader, base_ns, pid if ranks_in_file > 1 else None),
        "counter": _counters(reader, base_ns),
    }
    main, others, findings = main_and_others(device, part.device_rows, path.name)
    rank = integer(info.get("rank"))
    world = integer(info.get("world_size"))
    recorded = rank if rank is not None and rank >= 0 and ranks_in_file == 1 else part.rank
    traces = []
    for device_id in [main, *others]:
        rows = part.device_rows
        if others and device_id is not None:
            on_device = device["device_id"] == device_id
            rows = on_device if rows is None else rows & on_device
        elif device_id is not None and findings:
            # Stray work on other devices is left out, and said.
            rows = (device["device_id"] == device_id) & (True if rows is None else rows)
        device_table, device_rows = sorted_table("device_event", device, rows, base_ns)
        device_table, device_rows, dropped_device = _drop_duplicates(
            device_table, device_rows, ("device_id", "stream_id")
        )
        dropped += dropped_device
        traces.append(
            ParsedTrace(
                source=path.name,
                rank=recorded,
                world_size=world if world is not None and world > 0 else None,
                backend=str(info["backend"]) if info.get("backend") else None,
                tables={
                    **shared,
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
                main=device_id == main,
                process_groups=_process_groups(info),
                environment=_environment(reader.header, info),
            )
        )
    if dropped:
        findings.append(
            Finding(
                code="event.duplicate",
                severity="warning",
                count=dropped,
                message=f"{path.name}: {dropped} {_COUNT_MESSAGES['event.duplicate'][1]}",
            )
        )
    traces[0].findings += findings
    return traces


def _process_groups(info: dict[str, Any]) -> list[dict[str, Any]]:
    listed = info.get("pg_config")
    return [g for g in listed if isinstance(g, dict)] if isinstance(listed, list) else []


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
    return table_of_rows("collective", [(source, row, *_cells(a)) for source, row, a in rows])


def _cells(a: Args) -> tuple[Any, ...]:
    """Return what a collective's arguments say, in the order of COLLECTIVE's columns."""
    return (
        a.collective,
        integer(a.in_elements),
        integer(a.out_elements),
        text_of(a.dtype),
        integer(a.group_size),
        text_of(a.group_name),
        text_of(a.group_ranks),
        integer(a.collective_sequence),
        integer(a.first_rank),
        integer(a.rank_stride),
        integer(a.source_rank),
        integer(a.target_rank),
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


def _steps(host: pa.Table, pid: int | None) -> pa.Table:
    """`ProfilerStep#N` spans of the rank's process."""
    names = host["name"].combine_chunks()
    numbers = {
        i: int(m.group(1))
        for i, n in enumerate(names.dictionary.to_pylist())
        if (m := _STEP.match(n))
    }
    codes = to_numpy(names.indices)
    rows = np.flatnonzero(np.isin(codes, list(numbers)))
    pids = to_numpy(host["pid"])
    if pid is not None and (pids[rows] == pid).any():
        rows = rows[pids[rows] == pid]
    start = to_numpy(host["start_ns"])[rows]
    end = start + to_numpy(host["dur_ns"])[rows]
    # A step recorded twice (as an operator and as an annotation) counts once.
    seen: set[int] = set()
    keep = []
    for i, row in enumerate(rows):
        n = numbers[int(codes[row])]
        if n not in seen:
            seen.add(n)
            keep.append(i)
    kept_numbers = [numbers[int(codes[rows[i]])] for i in keep]
    return step_table(kept_numbers, start[keep], end[keep], "profiler_step")


def _memory(reader: FileReader, base_ns: int, pid: int | None) -> pa.Table:
    declared = TABLES["memory_event"]
    columns = reader.memory
    keep = np.flatnonzero(columns["pid"] == pid) if pid is not None else None
    order = np.argsort(columns["time_ns"], kind="stable")
    if keep is not None:
        order = order[np.isin(order, keep)]
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
    whole = integer(value)
    return whole if whole is not None and whole > 0 else None


def _environment(header: Header, info: dict[str, Any]) -> dict[str, str]:
    facts = {
        "host_name": header.host_name,
        "trace_name": header.traceName,
        "nccl_version": info.get("nccl_version"),
    }
    return {k: str(v) for k, v in facts.items() if v}
