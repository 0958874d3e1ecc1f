"""Nsight Systems reports exported to SQLite (``nsys export --type sqlite report.nsys-rep``).

Tables are those of NVIDIA's "SQLite Export Schema Reference"; which of them and which columns exist
differs by version and by what was traced. Times are nanoseconds since the session's start, whose
Unix time the export carries. Process and thread are packed into one number, ``globalTid``.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from chopper.arrow import to_arrow as from_list
from chopper.collectors.formats.parsed import NO_VALUE, numbers
from chopper.collectors.formats.recording import (
    Recording,
    Text,
    by_number,
    coded,
    renamed,
)
from chopper.collectors.formats.sqlite import Database
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Device
from chopper.tables import TABLES
from chopper.tables.ranges import NUMBER_MOST

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RANGES = "NVTX_EVENTS"
_EVENTS = (_KERNEL, _MEMCPY, _MEMSET, _RUNTIME, _GRAPH, _RANGES)

_VERSION_SUFFIX = re.compile(r"_v\d+$|_ptsz$|_ptds$")
_PUSH_POP, _START_END = 59, 60
"""``eventType`` of ranges in NVTX_EVENTS."""
_COPIES = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD",
    9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
"""``copyKind``, CUPTI's enumeration; from 11 on: unified memory."""
_METRICS = {
    "SMs Active [Throughput %]": "sm_utilization_ratio",
    "Compute Warps in Flight [Throughput %]": "sm_occupancy_ratio",
    "Tensor Active [Throughput %]": "tensor_utilization_ratio",
    "DRAM Read Bandwidth [Throughput %]": "read",
    "DRAM Write Bandwidth [Throughput %]": "write",
    "GPC Clock Frequency [MHz]": "clock",
}
"""GPU metrics by their names (``--gpu-metrics-devices``), which of them depends on the device."""
_HZ_FROM = 100_000
"""A clock from here on is in Hz, whatever its name says: newer versions write that."""
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}


def knows(database: Database) -> bool:
    """Return whether a database is such an export."""
    return "StringIds" in database.tables and (
        any(t in database.tables for t in _EVENTS) or "TARGET_INFO_SYSTEM_ENV" in database.tables
    )


def read(database: Database) -> Recording:
    """Kernels, copies, memsets, whole graphs, API calls, ranges and sampled GPU metrics.

    Raises:
        InputError: nothing of this was traced, or a table lacks what makes it one.
    """
    tool = _tool(database)
    if not any(t in database.tables for t in _EVENTS):
        raise InputError(
            f"{database.path}: {tool} without {_KERNEL} and {_RUNTIME}: no CUDA was traced; record "
            "with nsys profile --trace=cuda,nvtx"
        )
    for table in _EVENTS:
        database.require(tool, table, "start")
    recording = Recording(path=database.path, tool=tool, devices=_devices(database))
    starts_ns = database.integers("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))["utcEpochNs"]
    known_ns = starts_ns[(starts_ns > 0) & (starts_ns < 1 << 61)]
    recording.boot_clock = not len(known_ns)
    base_ns = 0 if recording.boot_clock else int(known_ns[0])
    strings = database.named("StringIds", "id", "value")
    _device_events(database, recording, strings, base_ns)
    _calls(database, recording, strings, base_ns)
    _ranges(database, recording, strings, base_ns)
    _gpu_metrics(database, recording, base_ns)
    recording.threads = _threads(database, strings)
    ranks = database.integers("MPI_RANKS", ("globalTid", "rank"))
    recording.ranks = {
        int(pid): int(rank)
        for pid, rank in zip(_process(ranks["globalTid"]), ranks["rank"], strict=True)
        if 0 <= rank < 1 << 31
    }
    return recording


def _tool(database: Database) -> str:
    facts = database.facts("META_DATA_EXPORT", "name", "value")
    version = facts.get("EXPORT_PRODUCT_VERSION")
    schema = facts.get("EXPORT_SCHEMA_VERSION")
    return (
        "an Nsight Systems export"
        + (f" of version {version}" if version else "")
        + (f", schema {schema}" if schema else "")
    )


def _moved(times: np.ndarray, base_ns: int) -> np.ndarray:
    known = (times != NO_VALUE) & (np.abs(times) < 1 << 61)
    return np.where(known, np.where(known, times, 0) + base_ns, NO_VALUE)


def _process(packed: np.ndarray) -> np.ndarray:
    # Bits 24 to 47; above are the machine's, below the thread's.
    return np.where(packed == NO_VALUE, -1, (packed >> 24) & 0xFFFFFF)


def _thread(packed: np.ndarray) -> np.ndarray:
    return np.where(packed == NO_VALUE, -1, packed & 0xFFFFFF)


_COLUMNS = {
    "device_id": "deviceId",
    "stream_id": "streamId",
    "correlation_id": "correlationId",
    "bytes_count": "bytes",
    "registers_count": "registersPerThread",
    "graph_id": "graphId",
    "graph_node_id": "graphNodeId",
}
_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
_NAMES = ("demangledName", "shortName", "mangledName")


def _device_events(
    db: Database, recording: Recording, strings: dict[int, str], base_ns: int
) -> None:
    for table, kind in (
        (_KERNEL, "kernel"),
        (_MEMCPY, "memcpy"),
        (_MEMSET, "memset"),
        (_GRAPH, "kernel"),
    ):
        rows = db.integers(
            table,
            (
                *("start", "end", "globalPid", "copyKind", "srcKind", "dstKind", "memKind"),
                *("staticSharedMemory", "dynamicSharedMemory"),
                *(*_COLUMNS.values(), *_GRID, *_BLOCK, *_NAMES),
            ),
        )
        static, dynamic = rows["staticSharedMemory"], rows["dynamicSharedMemory"]
        shared = np.maximum(static, 0) + np.maximum(dynamic, 0)
        recording.device.add(
            _moved(rows["start"], base_ns),
            _moved(rows["end"], base_ns),
            kind=kind,
            name=_event_names(table, rows, strings),
            pid=_process(rows["globalPid"]),
            grid=[rows[column] for column in _GRID],
            block=[rows[column] for column in _BLOCK],
            shared_memory_bytes=np.where((static < 0) | (dynamic < 0), NO_VALUE, shared),
            **{ours: rows[theirs] for ours, theirs in _COLUMNS.items()},
        )
    # Of whole graphs, where the tool did not look into them.
    count = len(rows["start"])
    if count:
        found = finding("trace.whole_graphs", count=count, source=recording.source)
        recording.findings.append(found)


def _event_names(table: str, rows: dict[str, np.ndarray], strings: dict[int, str]) -> Text | str:
    if table == _GRAPH:
        return "CUDA graph, its kernels not recorded"
    if table == _MEMCPY:
        return _copy_names(rows)
    if table == _MEMSET:
        return coded([f"Memset ({_MEMORY.get(k, 'Unknown')})" for k in rows["memKind"].tolist()])
    name = rows[_NAMES[0]]
    for other in _NAMES[1:]:
        name = np.where(name == NO_VALUE, rows[other], name)
    return by_number(name, strings)


def _copy_names(rows: dict[str, np.ndarray]) -> Text:
    """As Kineto names copies: ``Memcpy HtoD (Pinned -> Device)``."""
    keys = np.stack([rows["copyKind"], rows["srcKind"], rows["dstKind"]], axis=1)
    kinds, codes = np.unique(keys, axis=0, return_inverse=True)
    texts = [
        f"Memcpy {_COPIES.get(kind, 'Unknown')} "
        f"({_MEMORY.get(source, 'Unknown')} -> {_MEMORY.get(target, 'Unknown')})"
        for kind, source, target in kinds.tolist()
    ]
    return codes.reshape(-1).astype(np.int32) + 1, [None, *texts]


def _calls(db: Database, recording: Recording, strings: dict[int, str], base_ns: int) -> None:
    columns = ("start", "end", "globalTid", "correlationId", "nameId")
    rows = db.integers(_RUNTIME, columns)
    name = by_number(
        rows["nameId"], {n: _VERSION_SUFFIX.sub("", text) for n, text in strings.items()}
    )
    category = renamed(name, lambda n: "driver" if re.match(r"cu[A-Z]", n) else "runtime")
    overhead = db.integers("PROFILER_OVERHEAD", columns)
    for calls, names, categories in (
        (rows, name, category),
        (overhead, by_number(overhead["nameId"], strings), "overhead"),
    ):
        recording.host.add(
            **_spans(calls, base_ns),
            category=categories,
            name=names,
            correlation_id=calls["correlationId"],
        )


def _spans(rows: dict[str, np.ndarray], base_ns: int) -> dict[str, np.ndarray]:
    return {
        "start_ns": _moved(rows["start"], base_ns),
        "end_ns": _moved(rows["end"], base_ns),
        "pid": _process(rows["globalTid"]),
        "tid": _thread(rows["globalTid"]),
    }


def _ranges(db: Database, recording: Recording, strings: dict[int, str], base_ns: int) -> None:
    rows = db.integers(_RANGES, ("start", "end", "eventType", "globalTid", "textId"))
    inline = db.texts(_RANGES, "text") or [None] * len(rows["start"])
    rows = {name: values[: len(inline)] for name, values in rows.items()}
    texts = [
        strings.get(number) if text is None else text
        for text, number in zip(inline, rows["textId"].tolist(), strict=False)
    ]
    # Older exports have no type; what has an end is a range there. A range that was never ended may
    # have none: it lasts as long as the recording.
    is_range = np.isin(rows["eventType"], (_PUSH_POP, _START_END))
    last_ns = max(int(db.integers(t, ("end",))["end"].max(initial=0)) for t in _EVENTS)
    rows["end"] = np.where(is_range & (rows["end"] == NO_VALUE), last_ns, rows["end"])
    is_range |= rows["eventType"] == NO_VALUE
    recording.host.add(
        **_spans(rows, base_ns),
        mask=is_range & (rows["end"] != NO_VALUE),
        category="annotation",
        name=coded(texts),
    )


def _gpu_metrics(db: Database, recording: Recording, base_ns: int) -> None:
    """Add what the tool sampled of the devices. -> DEVICE_ACTIVITY, DEVICE_CLOCK."""
    ids = db.integers("TARGET_INFO_GPU_METRICS", ("typeId", "metricId"))
    names = db.texts("TARGET_INFO_GPU_METRICS", "metricName")
    metrics = {
        (int(kind), int(metric)): _METRICS[name]
        for kind, metric, name in zip(ids["typeId"], ids["metricId"], names, strict=False)
        if name in _METRICS
    }
    uuids = {device.device_id: device.uuid for device in recording.devices}
    columns = ("timestamp", "typeId", "metricId", "value")
    if not metrics or not db.has("GPU_METRICS", *columns):
        return
    # Ten thousand times a second, a score of metrics.
    rows = db.integers("GPU_METRICS", columns, among={"metricId": {m for _, m in metrics}})
    time_ns = _moved(rows["timestamp"], base_ns)
    parts: dict[str, list[pa.Table]] = {"device_activity": [], "device_clock": []}
    for kind in np.unique(rows["typeId"]).tolist():
        mine = (rows["typeId"] == kind) & (time_ns != NO_VALUE)
        times_ns, at = np.unique(time_ns[mine], return_inverse=True)
        read = {metrics[key]: np.full(len(times_ns), np.nan) for key in metrics if key[0] == kind}
        for metric in np.unique(rows["metricId"][mine]).tolist():
            of = rows["metricId"][mine] == metric
            if (kind, metric) in metrics:
                read[metrics[kind, metric]][at[of]] = rows["value"][mine][of]
        unknown = np.full(len(times_ns), np.nan)
        clock = read.pop("clock", unknown)
        series = {"sm_clock_hz": clock * np.where(clock < _HZ_FROM, 1e6, 1.0)}
        series["sm_clock_hz"][clock <= 0] = np.nan
        read["dram_utilization_ratio"] = read.pop("read", unknown) + read.pop("write", unknown)
        for column, percent in read.items():
            series[column] = np.where((percent >= 0) & (percent <= 100), percent / 100, np.nan)
        device_id = kind & 0xFF  # the tool's number of the device
        for name, made in parts.items():
            made.append(_sampled(name, times_ns, device_id, uuids.get(device_id), series))
    recording.tables |= {n: pa.concat_tables(t) for n, t in parts.items() if sum(map(len, t))}


def _sampled(
    name: str, time_ns: np.ndarray, device_id: int, uuid: str | None, series: dict[str, np.ndarray]
) -> pa.Table:
    """Return a declared table of the series that it has columns for, where any has a value."""
    declared = TABLES[name].arrow
    own = {f.name: series[f.name] for f in declared if f.name in series}
    rows = ~np.isnan([*own.values()]).all(axis=0)
    columns = own | {
        "time_ns": time_ns,
        "span_ns": time_ns * 0,
        "device_id": time_ns * 0 + device_id,
    }
    arrays: dict[str, pa.Array] = {f.name: pa.nulls(int(rows.sum()), f.type) for f in declared}
    for column, values in columns.items():
        kept, type_ = values[rows], declared.field(column).type
        if pa.types.is_integer(type_) and kept.dtype == np.float64:
            kept = np.where(np.isnan(kept), NO_VALUE, kept).astype(np.int64)
        arrays[column] = numbers(kept, type_)
    arrays["device_uuid"] = from_list([uuid] * int(rows.sum()), declared.field("device_uuid").type)
    return pa.table(arrays, schema=declared)


def _threads(
    db: Database, strings: dict[int, str]
) -> list[tuple[int, int, str | None, str | None]]:
    processes = db.integers("PROCESSES", ("globalPid", "pid"))
    names = dict(
        zip(_process(processes["globalPid"]).tolist(), db.texts("PROCESSES", "name"), strict=False)
    )
    rows = db.integers("ThreadNames", ("nameId", "globalTid"))
    return [
        (pid, tid, names.get(pid), strings.get(number))
        for pid, tid, number in zip(
            _process(rows["globalTid"]).tolist(),
            _thread(rows["globalTid"]).tolist(),
            rows["nameId"].tolist(),
            strict=True,
        )
    ]


def _devices(db: Database) -> list[Device]:
    rows = db.integers("TARGET_INFO_GPU", ("id", "totalMemory", "smCount"))
    names = db.texts("TARGET_INFO_GPU", "name") or [None] * len(rows["id"])
    uuids = db.texts("TARGET_INFO_GPU", "uuid") or [None] * len(rows["id"])
    devices = [
        Device(
            device_id=number,
            name=name or None,
            memory_bytes=memory if 0 < memory <= NUMBER_MOST else None,
            multiprocessor_count=units if 0 < units <= NUMBER_MOST else None,
            uuid=f"GPU-{uuid}" if uuid else None,
        )
        for number, memory, units, name, uuid in zip(
            *(rows[n].tolist() for n in ("id", "totalMemory", "smCount")),
            names,
            uuids,
            strict=False,
        )
        if 0 <= number < 1 << 31
    ]
    return sorted(devices, key=lambda device: device.device_id)
