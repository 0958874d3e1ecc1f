"""One small recording, written as each tool would write it: Nsight Systems, rpd, rocprofv3.

Two steps of a program that launches a product and copies its result back, with ranges as torch's
``emit_nvtx`` pushes them. What a format cannot hold is left out by its writer.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PID, TID = 4711, 4712
START_NS = 1_700_000_000 * 10**9
"""When the session began, for formats that say so."""
KERNEL = "void gemm<float>(float*, float const*)"
DEVICE = "NVIDIA A100-SXM4-80GB"


@dataclass
class Span:
    """A call or a range of the host."""

    name: str
    start: int
    end: int
    correlation: int | None = None


@dataclass
class Work:
    """A kernel or copy of the device."""

    name: str
    start: int
    end: int
    correlation: int
    copied: int | None = None


@dataclass
class Recording:
    """Times in ns from an origin of its own."""

    calls: list[Span] = field(default_factory=list)
    ranges: list[Span] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


def small() -> Recording:
    """Two steps of 1 ms each."""
    made = Recording()
    for step in range(2):
        at = 1_000_000 * (step + 1)
        number = 10 * (step + 1)
        made.ranges += [
            Span(f"iteration {step + 5}", at, at + 900_000),
            Span(
                f"aten::mm, seq = {number}, op_id = {number + 1}, "
                "sizes = [[64, 32], [32, 128]], input_op_ids = [(3,0)]",
                at + 10_000,
                at + 60_000,
            ),
        ]
        made.calls += [
            Span("LaunchKernel", at + 20_000, at + 30_000, number),
            Span("MemcpyAsync", at + 70_000, at + 80_000, number + 1),
        ]
        made.work += [
            Work(KERNEL, at + 50_000, at + 450_000, number),
            Work("DtoH", at + 450_000, at + 650_000, number + 1, 32_768),
        ]
    return made


# ---------------------------------------------------------------- Nsight Systems


def _create(database: sqlite3.Connection, table: str, columns: str, rows: list[Any]) -> None:
    names = columns.split()
    quoted = ", ".join(f'"{n}"' for n in names)
    database.execute(f'CREATE TABLE "{table}" ({quoted})')
    marks = ", ".join("?" * len(names))
    database.executemany(f'INSERT INTO "{table}" VALUES ({marks})', rows)


class _Numbered(dict[str, int]):
    """Texts by number, as databases keep them."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self) + 1
        return number


def packed(pid: int, tid: int = 0) -> int:
    """Nsight's number for a process or a thread of it."""
    return (1 << 48) + (pid << 24) + tid


def write_nsys(
    path: Path, recording: Recording, *, pids: tuple[int, ...] = (PID,), inline: bool = False
) -> Path:
    """``nsys export --type sqlite``; the same work for each process."""
    strings = _Numbered()
    runtime, kernels, copies, ranges, ranks = [], [], [], [], []
    for rank, pid in enumerate(pids):
        ranks.append((packed(pid, TID), rank))
        runtime += [
            (c.start, c.end, packed(pid, TID), c.correlation, strings[f"cuda{c.name}_v7000"])
            for c in recording.calls
        ]
        kernels += [
            (
                w.start,
                w.end,
                rank,
                7,
                w.correlation,
                packed(pid),
                strings[w.name],
                strings["gemm"],
                32,
                4,
                2,
                1,
                256,
                1,
                1,
                1024,
                512,
            )
            for w in recording.work
            if w.copied is None
        ]
        copies += [
            (w.start, w.end, rank, 7, w.correlation, packed(pid), w.copied, 2, 2, 1)
            for w in recording.work
            if w.copied is not None
        ]
        ranges += [
            (
                r.start,
                r.end,
                59,
                packed(pid, TID),
                r.name if inline else None,
                None if inline else strings[r.name],
            )
            for r in recording.ranges
        ]
    with sqlite3.connect(path) as db:
        _create(
            db,
            "TARGET_INFO_SESSION_START_TIME",
            "utcEpochNs utcTime",
            [(START_NS, "2023-11-14T22:13:20")],
        )
        _create(
            db,
            "TARGET_INFO_GPU",
            "id name uuid totalMemory smCount",
            [(i, DEVICE, f"uuid-{i}", 80 << 30, 108) for i in range(len(pids))],
        )
        _create(
            db,
            "META_DATA_EXPORT",
            "name value",
            [("EXPORT_PRODUCT_VERSION", "2024.5"), ("EXPORT_SCHEMA_VERSION", "3.13")],
        )
        _create(
            db,
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            "start end globalTid correlationId nameId",
            runtime,
        )
        _create(
            db,
            "CUPTI_ACTIVITY_KIND_KERNEL",
            "start end deviceId streamId correlationId globalPid demangledName shortName "
            "registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory "
            "dynamicSharedMemory",
            kernels,
        )
        _create(
            db,
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            "start end deviceId streamId correlationId globalPid bytes copyKind srcKind dstKind",
            copies,
        )
        _create(db, "NVTX_EVENTS", "start end eventType globalTid text textId", ranges)
        _create(db, "MPI_RANKS", "globalTid rank", ranks if len(pids) > 1 else [])
        _create(db, "StringIds", "id value", [(n, s) for s, n in strings.items()])
    db.close()
    return path


# ---------------------------------------------------------------- rocmProfileData


def write_rpd(
    path: Path,
    recording: Recording,
    *,
    monitored: tuple[int, ...] = (0,),
    idle: tuple[int, ...] = (),
) -> Path:
    """rocmProfileData's database; the clocks of the ``idle`` GPUs stay where they are."""
    strings = _Numbered({"": 1})
    calls = [
        (c.correlation, PID, TID, c.start, c.end, strings[f"hip{c.name}"], 1)
        for c in recording.calls
    ]
    marks = [
        (
            1000 + i,
            PID,
            TID,
            r.start,
            r.end,
            strings["UserMarker"],
            strings[r.name.partition(",")[0]],
        )
        for i, r in enumerate(recording.ranges)
    ]
    operators = [
        (1000 + i, 1, 10 * (i // 2 + 1), 10 * (i // 2 + 1) + 1, "[[64, 32], [32, 128]]")
        for i, r in enumerate(recording.ranges)
        if "seq" in r.name
    ]
    ops, pairs, kernels, copies = [], [], [], []
    for i, w in enumerate(recording.work):
        kind = "KernelExecution" if w.copied is None else "CopyDeviceToHost"
        ops.append((i + 1, 0, 0, w.start, w.end, 1 if w.copied else strings[w.name], strings[kind]))
        pairs.append((w.correlation, i + 1))
        if w.copied is None:
            kernels.append((w.correlation, 4, 2, 1, 256, 1, 1, 0, strings[w.name]))
        else:
            copies.append((w.correlation, w.copied))
    clocks = [
        ("gpu", g, "sclk", at * 500_000, (at + 1) * 500_000, str(1500 + at))
        for g in monitored
        for at in range(2, 6)
    ]
    clocks += [
        ("gpu", g, "sclk", at * 500_000, (at + 1) * 500_000, str(132 + at % 2))
        for g in idle
        for at in range(2, 6)
    ]
    with sqlite3.connect(path) as db:
        _create(db, "rocpd_metadata", "tag value", [("schema_version", "2")])
        _create(db, "rocpd_api", "id pid tid start end apiName_id args_id", calls + marks)
        _create(db, "rocpd_op", "id gpuId queueId start end description_id opType_id", ops)
        _create(db, "rocpd_api_ops", "api_id op_id", pairs)
        _create(
            db,
            "rocpd_kernelapi",
            "api_ptr_id gridX gridY gridZ workgroupX workgroupY "
            "workgroupZ groupSegmentSize kernelName_id",
            kernels,
        )
        _create(db, "rocpd_copyapi", "api_ptr_id size", copies)
        _create(db, "ext_autogradapi", "api_ptr_id autogradName_id seq op_id sizes", operators)
        _create(db, "rocpd_monitor", "deviceType deviceId monitorType start end value", clocks)
        _create(db, "rocpd_string", "id string", [(n, s) for s, n in strings.items()])
    db.close()
    return path


# ---------------------------------------------------------------- rocprofv3


def write_rocpd(path: Path, recording: Recording, *, guid: str = "_0000_aa11") -> Path:
    """``rocprofv3 --output-format rocpd``; process, thread and agents are numbered from 1."""
    strings = _Numbered()
    events: list[Any] = []
    regions: list[Any] = []
    dispatches: list[Any] = []
    copies: list[Any] = []
    for c in recording.calls:
        events.append((len(events) + 1, strings["HIP_RUNTIME_API"], c.correlation, "{}"))
        regions.append((1, 1, c.start, c.end, strings[f"hip{c.name}"], len(events)))
    for r in recording.ranges:
        details = json.dumps({"message": r.name})
        events.append((len(events) + 1, strings["MARKER_CORE_API"], 90_000 + len(events), details))
        regions.append((1, 1, r.start, r.end, strings["roctxRangePushA"], len(events)))
    for w in recording.work:
        events.append((len(events) + 1, strings["x"], w.correlation, "{}"))
        if w.copied is None:
            dispatches.append(
                (
                    1,
                    2,
                    1,
                    len(dispatches),
                    1,
                    1,
                    w.start,
                    w.end,
                    1024,
                    len(events),
                    256,
                    1,
                    1,
                    4 * 256,
                    2,
                    1,
                )
            )
        else:
            name = strings["MEMORY_COPY_DEVICE_TO_HOST"]
            copies.append((1, w.start, w.end, name, 1, 2, w.copied, 1, len(events)))
    with sqlite3.connect(path) as db:
        _create(db, f"rocpd_metadata{guid}", "tag value", [("schema_version", "3")])
        _create(db, f"rocpd_info_process{guid}", "id pid", [(1, PID)])
        _create(db, f"rocpd_info_thread{guid}", "id pid tid", [(1, 1, TID)])
        _create(
            db,
            f"rocpd_info_agent{guid}",
            "id type type_index product_name name extdata",
            [
                (1, "CPU", 0, "EPYC", "EPYC", "{}"),
                (2, "GPU", 0, "AMD Instinct MI300X", "gfx942", '{"cu_count": 304}'),
            ],
        )
        _create(
            db,
            f"rocpd_info_kernel_symbol{guid}",
            "id kernel_name display_name",
            [(1, "_Z4gemm.kd", KERNEL)],
        )
        _create(db, f"rocpd_event{guid}", "id category_id correlation_id extdata", events)
        _create(db, f"rocpd_region{guid}", "pid tid start end name_id event_id", regions)
        _create(
            db,
            f"rocpd_kernel_dispatch{guid}",
            "pid agent_id kernel_id dispatch_id queue_id "
            "stream_id start end group_segment_size event_id workgroup_size_x "
            "workgroup_size_y workgroup_size_z grid_size_x grid_size_y grid_size_z",
            dispatches,
        )
        _create(
            db,
            f"rocpd_memory_copy{guid}",
            "pid start end name_id dst_agent_id src_agent_id size queue_id event_id",
            copies,
        )
        _create(db, f"rocpd_info_pmc{guid}", "id name symbol", [(1, "SQ_WAVES", "SQ_WAVES")])
        _create(
            db,
            f"rocpd_pmc_event{guid}",
            "event_id pmc_id value",
            [(d[9], 1, 8.0) for d in dispatches] * 2,
        )
        _create(db, f"rocpd_string{guid}", "id string", [(n, s) for s, n in strings.items()])
        db.execute(f"CREATE VIEW IF NOT EXISTS rocpd_region AS SELECT * FROM rocpd_region{guid}")
    db.close()
    return path


def rocprof_json(recording: Recording) -> dict[str, Any]:
    """``rocprofv3 --output-format json``."""
    operations = [
        {"kind": "NONE", "operations": []},
        {"kind": "HIP_RUNTIME_API_EXT", "operations": ["hipLaunchKernel", "hipMemcpyAsync"]},
        {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_DEVICE_TO_HOST"]},
        {"kind": "MARKER_CORE_API", "operations": ["roctxRangePushA"]},
        {"kind": "KERNEL_DISPATCH", "operations": []},
    ]
    names = operations[1]["operations"]
    assert isinstance(names, list)

    def host(span: Span, kind: int, operation: int, correlation: int) -> dict[str, Any]:
        return {
            "kind": kind, "operation": operation, "thread_id": TID,
            "correlation_id": {"internal": correlation, "external": 0},
            "start_timestamp": span.start, "end_timestamp": span.end,
        }  # fmt: skip

    kernels = [
        {
            "kind": 4, "operation": 2, "thread_id": TID,
            "correlation_id": {"internal": w.correlation, "external": 0},
            "start_timestamp": w.start, "end_timestamp": w.end,
            "dispatch_info": {
                "agent_id": {"handle": 77}, "queue_id": {"handle": 1}, "kernel_id": 5,
                "dispatch_id": i, "group_segment_size": 1024,
                "workgroup_size": {"x": 256, "y": 1, "z": 1},
                "grid_size": {"x": 4 * 256, "y": 2, "z": 1},
            },
        }
        for i, w in enumerate(w for w in recording.work if w.copied is None)
    ]  # fmt: skip
    tool = {
        "metadata": {"pid": PID, "node": {"hostname": "node7"}},
        "agents": [
            {"id": {"handle": 76}, "type": 1, "name": "EPYC", "logical_node_type_id": 0},
            {"id": {"handle": 77}, "type": 2, "name": "gfx942", "cu_count": 304,
             "product_name": "AMD Instinct MI300X", "logical_node_type_id": 0, "node_id": 1},
        ],
        "counters": [{"id": {"handle": 3}, "name": "SQ_WAVES"}],
        "strings": {
            "buffer_records": operations,
            "marker_api": [
                {"key": 90_000 + i, "value": r.name} for i, r in enumerate(recording.ranges)
            ],
        },
        "kernel_symbols": [
            {"kernel_id": 5, "kernel_name": "_Z4gemm.kd", "formatted_kernel_name": KERNEL}
        ],
        "buffer_records": {
            "kernel_dispatch": kernels,
            "hip_api": [
                host(c, 1, names.index(f"hip{c.name}"), c.correlation or 0) for c in recording.calls
            ],
            "marker_api": [host(r, 3, 0, 90_000 + i) for i, r in enumerate(recording.ranges)],
            "memory_copy": [
                {
                    "kind": 2, "operation": 1, "bytes": w.copied,
                    "correlation_id": {"internal": w.correlation, "external": 0},
                    "start_timestamp": w.start, "end_timestamp": w.end,
                    "dst_agent_id": {"handle": 76}, "src_agent_id": {"handle": 77},
                }
                for w in recording.work if w.copied is not None
            ],
        },
        "callback_records": {
            "counter_collection": [
                {"dispatch_data": kernel,
                 "records": [{"counter_id": {"handle": 3}, "value": 4.0}] * 2}
                for kernel in kernels
            ]
        },
    }  # fmt: skip
    return {"rocprofiler-sdk-tool": [tool]}


def write_rocprof_json(path: Path, recording: Recording) -> Path:
    """The same as a file."""
    path.write_text(json.dumps(rocprof_json(recording)))
    return path


def write_rocprof_csv(folder: Path, recording: Recording, *, agents: bool = True) -> list[Path]:
    """``rocprofv3 --output-format csv``: a file for each kind of record."""
    tables: dict[str, list[list[Any]]] = {
        "kernel_trace": [
            [
                "Kind",
                "Agent_Id",
                "Queue_Id",
                "Stream_Id",
                "Thread_Id",
                "Dispatch_Id",
                "Kernel_Id",
                "Kernel_Name",
                "Correlation_Id",
                "Start_Timestamp",
                "End_Timestamp",
                "LDS_Block_Size",
                "VGPR_Count",
                "Workgroup_Size_X",
                "Workgroup_Size_Y",
                "Workgroup_Size_Z",
                "Grid_Size_X",
                "Grid_Size_Y",
                "Grid_Size_Z",
            ]
        ],
        "memory_copy_trace": [
            [
                "Kind",
                "Direction",
                "Stream_Id",
                "Source_Agent_Id",
                "Destination_Agent_Id",
                "Correlation_Id",
                "Start_Timestamp",
                "End_Timestamp",
            ]
        ],
        "hip_api_trace": [
            [
                "Domain",
                "Function",
                "Process_Id",
                "Thread_Id",
                "Correlation_Id",
                "Start_Timestamp",
                "End_Timestamp",
            ]
        ],
    }
    tables["marker_api_trace"] = [list(tables["hip_api_trace"][0])]
    for i, w in enumerate(recording.work):
        if w.copied is None:
            tables["kernel_trace"].append(
                ["KERNEL_DISPATCH", "Agent 4", 1, 0, TID, i, 5, w.name, w.correlation, w.start,
                 w.end, 1024, 32, 256, 1, 1, 1024, 2, 1]
            )  # fmt: skip
        else:
            tables["memory_copy_trace"].append(
                ["MEMORY_COPY", "MEMORY_COPY_DEVICE_TO_HOST", 0, "Agent 4", "Agent 0",
                 w.correlation, w.start, w.end]
            )  # fmt: skip
    for c in recording.calls:
        tables["hip_api_trace"].append(
            ["HIP_RUNTIME_API", f"hip{c.name}", PID, TID, c.correlation, c.start, c.end]
        )
    for r in recording.ranges:
        tables["marker_api_trace"].append(
            ["MARKER_CORE_API", r.name, PID, TID, 90_000, r.start, r.end]
        )
    if agents:
        tables["agent_info"] = [
            ["Node_Id", "Agent_Type", "Cu_Count", "Name", "Product_Name"],
            [0, "CPU", 64, "EPYC", "EPYC"],
            [4, "GPU", 304, "gfx942", "AMD Instinct MI300X"],
        ]
    files = []
    for name, rows in tables.items():
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_NONNUMERIC).writerows(rows)
        files.append(folder / f"run_{name}.csv")
        files[-1].write_text(text.getvalue())
    return files
