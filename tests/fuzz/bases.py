"""Valid inputs of every kind, made by this repository's own writers: what the campaign mutates."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from chopper.analyzers.compare.history import past_run
from chopper.cli.compare_ import add_run
from chopper.experiments import results
from chopper.hardware import calibration
from chopper.hardware.calibration import Calibration, Measured
from chopper.ingest import write_run
from chopper.pipeline import attribute, read
from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.manifest import Upload, encode_stored
from chopper.storage.parts import RunWriter
from chopper.storage.streams import StreamWriter
from chopper.tables import GROUPS, TABLES, Table
from tests import recordings
from tests.kineto_writer import BASE_NS, DIALECTS, TODAY, Trace, small_trace

_RECORDED_TABLES = (
    *(*GROUPS["telemetry"], *GROUPS["memory"]),
    *(TABLES["step"], TABLES["layer_sequence"]),
)
HEADING = "timestamp, index, clocks.current.sm [MHz], power.draw [W], clocks_event_reasons.active\n"
ROCPROFV3 = (
    '"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size",'
    '"Kernel_Id","Kernel_Name","Workgroup_Size","Counter_Name","Counter_Value"\n'
    '1,1,"Agent 4",1,9,9,64,16,"gemm",64,"GRBM_GUI_ACTIVE",16000\n'
    '2,2,"Agent 4",1,9,9,64,17,"add",64,"GRBM_GUI_ACTIVE",17000\n'
)
NCU = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","dram__bytes.sum","gpu__time_duration.sum"\n'
    '"","","","","","","","","","","","Kbyte","usecond"\n'
    '"0","12","python3","h","gemm","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","10,240.5","12.5"\n'
    '"1","12","python3","h","add","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","1","n/a"\n'
)
SMI = HEADING + "".join(
    f"{BASE_NS + i * 1_000}, 0, {1200 + i} MHz, 600 W, 0x4\n" for i in range(20)
)
SMI_WALL = HEADING + "".join(
    f"2025/07/02 12:20:{36 + i // 10:02}.{i % 10}00, 0, {1200 + i} MHz, 600 W, 0x4\n"
    for i in range(20)
)


def make(folder: Path) -> None:
    """Write every base input below a folder."""
    for number, dialect in enumerate(DIALECTS):
        write_trace(folder / "trace" / f"{number}.json", small_trace(dialect))
    for platform in ("rocm", "cpu"):
        write_trace(folder / "trace" / f"{platform}.json", small_trace(TODAY, platform=platform))
    write_trace(folder / "trace" / "layers.json", _layers())
    for rank in range(2):
        write_trace(folder / "ranks" / f"rank{rank}.json", _collective(rank))
    _databases(folder)
    _tables(folder)
    _runs(folder)
    _documents(folder)
    _full(folder)
    _history(folder)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as Kineto would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(trace.encode())


def _layers() -> Trace:
    """Annotated phases and layers, a copy, synchronizations, counters and memory."""
    trace = Trace(platform="cuda")
    for s in range(3):
        t = 100_000 * s
        trace.step(s + 3, t, 100_000)
        trace.annotation("chopper::data", t, 10_000)
        trace.annotation("chopper::forward", t + 10_000, 40_000)
        trace.annotation("chopper::layer::layers.0", t + 11_000, 20_000)
        op = trace.op("aten::mm", t + 12_000, 9_000, shapes=[[512, 256], [256, 128]], sequence=s)
        trace.launch("gemm", t + 13_000, 4_000, kernel_at=t + 20_000, kernel_for=22_000, op=op)
        trace.memory(t + 12_500, 4096, 8192, 16384)
        trace.op("autograd::engine", t + 55_000, 30_000, sequence=s, forward_tid=4711, tid=4712)
        op = trace.op("aten::add_", t + 56_000, 2_000, shapes=[[512, 128], [512, 128]])
        trace.launch("add", t + 56_500, 1_000, kernel_at=t + 58_000, kernel_for=3_000, op=op)
        trace.call("cudaDeviceSynchronize", t + 60_000, 5_000)
        trace.synchronization("Stream Synchronize", t + 60_000, 5_000, 7)
        trace.counter("GPU 0 Utilization", t + 1_000, value=0.5)
    trace.named("python", "thread 4711 (python)")
    return trace


def _collective(rank: int) -> Trace:
    trace = small_trace(TODAY, rank=rank, world=2, pid=100 + rank, device=rank)
    for s in range(2):
        t = 10_000 * s
        op = trace.op(
            "record_param_comms",
            t + 6_500,
            1_000,
            shapes=[[1024]],
            types=["float"],
            collective={
                "Collective name": "allreduce",
                "Process Group Ranks": "[0, 1]",
                "Process Group Name": "0",
                "Group size": 2,
                "In msg nelems": 1024,
                "Out msg nelems": 1024,
                "dtype": "Float",
                "Seq": s,
            },
        )
        trace.launch(
            "ncclDevKernel_AllReduce_Sum_f32",
            t + 6_600,
            300,
            kernel_at=t + 9_000 + 100 * rank,
            kernel_for=900 - 100 * rank,
            op=op,
            stream=20,
        )
    return trace


def _databases(folder: Path) -> None:
    place = folder / "database"
    place.mkdir()
    recordings.write_nsys(place / "report.sqlite", recordings.small())
    recordings.write_rpd(place / "trace.rpd", recordings.small())
    recordings.write_rocpd(place / "results.db", recordings.small())
    (folder / "rocprof").mkdir()
    recordings.write_rocprof_json(folder / "trace" / "rocprof.json", recordings.small())
    recordings.write_rocprof_csv(folder / "rocprof", recordings.small())


def _tables(folder: Path) -> None:
    place = folder / "table"
    place.mkdir()
    for name, text in (
        ("counters", ROCPROFV3), ("ncu", NCU), ("smi", SMI), ("wall", SMI_WALL),
    ):  # fmt: skip
        (place / f"{name}.csv").write_text(text)
    frame = {"name": "step", "filename": "train.py", "line": 7}
    block = {"address": 4096, "size": 512, "requested_size": 500, "state": "active_allocated"}
    segment = {"device": 0, "address": 4096, "total_size": 2048, "allocated_size": 512,
               "active_size": 512, "requested_size": 500, "stream": 0, "segment_type": "large",
               "blocks": [block | {"frames": [frame]}]}  # fmt: skip
    event = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "frames": [frame],
             "time_us": BASE_NS // 1000}  # fmt: skip
    (place / "snapshot.pickle").write_bytes(
        pickle.dumps({"segments": [segment], "device_traces": [[event]]}, protocol=4)
    )


def _plausible(table: Table, rank: int) -> dict[str, list[Any]]:
    """Eight rows in the order of time."""
    columns: dict[str, list[Any]] = {}
    for column in table.columns:
        values: list[Any]
        match column.name, column.type:
            case "start_ns" | "time_ns", _:
                values = [BASE_NS + 2_500 * i for i in range(8)]
            case "end_ns", _:
                values = [BASE_NS + 2_500 * (i + 1) for i in range(8)]
            case "span_ns" | "dur_ns", _:
                values = [100] * 8
            case "rank" | "device_id", _:
                values = [rank] * 8
            case "traced", _:
                values = [2 <= i < 6 for i in range(8)]
            case "profiled", _:
                values = [1 <= i < 6 for i in range(8)]
            case "name", _:
                values = ["evaluation", "generation"] * 4
            case _, "bool":
                values = [False] * 8
            case _, "float64":
                values = [1.0 + i for i in range(8)]
            case _, "string" | "text":
                values = [f"s{i % 2}" for i in range(8)]
            case _:
                values = [*range(8)]
        columns[column.name] = values
    return columns


def recorded(directory: Path, *, platform: Any = "cuda", telemetry: bool = False) -> None:
    """A run as ``chopper record`` leaves it: two ranks, traces, clocks, counters.

    With ``telemetry``, every table that any collector writes.
    """
    for rank in range(2):
        writer = RunWriter(directory, rank)
        part = writer.manifest
        part.world_size, part.local_rank, part.hostname = 2, rank, socket.gethostname()
        part.start_ns, part.end_ns, part.status = BASE_NS, BASE_NS + 10**9, "complete"
        trace = _collective(rank) if platform == "cuda" else small_trace(platform=platform)
        (writer.directory / "trace.json").write_bytes(trace.encode())
        part.traces = ("trace.json",)
        with_rows: dict[str, dict[str, list[Any]]] = {
            "device_clock": {
                "time_ns": [BASE_NS + 1_000 * i for i in range(20)],
                "span_ns": [100] * 20,
                "device_id": [rank] * 20,
                "device_uuid": ["GPU-1"] * 20,
                "sm_clock_hz": [1_000_000_000 + i for i in range(20)],
                "power_w": [300.0] * 20,
            },
            "counter": {
                "time_ns": [BASE_NS, BASE_NS + 1],
                "track": ["a", "b"],
                "name": ["n", "n"],
                "value": [1.0, None],
            },
        }
        for name, columns in with_rows.items():
            write_stream(writer.directory / f"{name}.arrow", name, columns)
        for table in _RECORDED_TABLES if telemetry else ():
            if table.name not in with_rows:
                columns = _plausible(table, rank)
                write_stream(writer.directory / f"{table.name}.arrow", table.name, columns)
        writer.save()
    finalize(directory, command=("train.py",), exit_code=0)


def write_stream(path: Path, name: str, columns: dict[str, list[Any]]) -> None:
    """Write one batch; columns that are not given are null."""
    from chopper.tables import TABLES

    count = len(next(iter(columns.values())))
    stream = StreamWriter(path, name)
    try:
        stream.write({c.name: columns.get(c.name, [None] * count) for c in TABLES[name].columns})
    finally:
        stream.close()


def _runs(folder: Path) -> None:
    runs = folder / "run"
    runs.mkdir()
    (runs / "imported").mkdir()
    write_run([folder / "ranks"], runs / "imported")
    stored = folder / "store"
    shutil.copytree(runs / "imported", stored / "old")
    shutil.copytree(runs / "imported", stored / "new" / "upload-0123456789abcdef")
    sizes = {
        p.relative_to(stored / "old").as_posix(): p.stat().st_size
        for p in (stored / "old").rglob("*")
        if p.is_file()
    }
    upload = Upload(folder="upload-0123456789abcdef", files=sizes)
    (stored / "new" / "manifest.json").write_bytes(encode_stored(upload))
    (runs / "layers").mkdir()
    write_run([folder / "trace" / "layers.json"], runs / "layers")
    recorded(runs / "recorded")
    recorded(runs / "host", platform="cpu")
    recorded(runs / "telemetry", telemetry=True)
    plan = results.Plan(
        chopper_version="0.1",
        workload="gemm",
        summary="products",
        command=["chopper", "bench", "gemm"],
        created_ns=BASE_NS,
        ranks=2,
        device="cpu",
        options={"size": 512},
        steps=True,
        baseline="a",
        variants=[results.VariantPlan(name=name, summary=name, runs=[name]) for name in ("a", "b")],
    )
    (runs / "experiment").mkdir()
    results.write_plan(runs / "experiment", plan)
    for name in ("a", "b"):
        shutil.copytree(runs / "recorded", runs / "experiment" / name)


def _full(folder: Path) -> None:
    """A run whose manifests have every field."""
    run = folder / "run" / "full"
    recorded(run, telemetry=True)
    (stored,) = calibration.load_all(folder / "document" / "calibration.json")[:1]
    manifest = m.decode_run((run / "manifest.json").read_bytes(), "base")
    manifest.created_ns, manifest.workload = BASE_NS, "gemm"
    for part in manifest.ranks:
        _fill(part, stored)
        (run / f"rank-0000{part.rank}" / "manifest.json").write_bytes(m.encode(part))
    (run / "manifest.json").write_bytes(m.encode(manifest))


def _fill(part: m.RankManifest, stored: Calibration) -> None:
    part.node, part.device_id, part.steps_count, part.traced_steps = 0, 0, 8, (2, 6)
    part.pid, part.process_started, part.steps_source = 100 + part.rank, 12_345, "range"
    part.devices = [
        m.Device(
            device_id=0,
            name="NVIDIA A100-SXM4-40GB",
            memory_bytes=40 << 30,
            multiprocessor_count=108,
            uuid="GPU-1",
            pci_address="0000:3b:00.0",
        )
    ]
    part.process_groups = [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]
    part.environment |= {"cores_allowed": "4", "TORCHELASTIC_RESTART_COUNT": "0"}
    part.collectors = [
        m.CollectorReport(
            name="nvml",
            status="obtained",
            requested_hz=100.0,
            achieved_hz=99.0,
            samples_count=900,
            dropped_count=1,
            late_count=2,
            jitter_p50_ns=1_000,
            jitter_p99_ns=9_000,
            call_p50_ns=50_000,
            call_p99_ns=90_000,
            calls={"power": m.CallCost(p50_ns=50_000, p99_ns=90_000, count=100)},
            cpu_ratio=0.01,
            clock_alignment_error_ns=500,
            absent={"device_clock.power_w": "not supported"},
        )
    ]
    anchor = m.ClockAnchor(realtime_ns=BASE_NS, monotonic_ns=10**12, monotonic_raw_ns=10**12)
    part.clock_anchors = [anchor, anchor]
    part.overhead = m.Overhead(
        setup_ns=10**9,
        per_step_ns=100,
        export_ns=10**8,
        close_ns=10**8,
        traced_step_ns=2_600,
        untraced_step_ns=2_500,
    )
    part.measures = [
        m.Measure(name="step_ns", value=2_500, labels={"size_bytes": 64, "ratio": 0.5})
    ]
    part.calibration = calibration.to_manifest(stored)
    part.findings = [
        m.Finding(
            code="trace.truncated",
            severity="warning",
            message="cut",
            rank=part.rank,
            count=3,
            withholds=("compute.ideal",),
            share_ratio=0.1,
        )
    ]


def _history(folder: Path) -> None:
    """Twelve runs of the job of the run that was imported."""
    (folder / "history").mkdir()
    base = past_run(attribute(read(folder / "run" / "full")))
    for number in range(12):
        earlier = msgspec.structs.replace(
            base,
            id=f"{number:016x}",
            time_ns=base.time_ns - (12 - number) * 3_600 * 10**9,
            median_ns=base.median_ns + 7 * (number % 5),
            mean_ns=base.mean_ns + 7 * (number % 5),
            error_ratio=0.01,
            other_cores=0.5,
            clock_hz=1_400_000_000,
            accepted=number == 2,
        )
        add_run(folder / "history", earlier)


def _rates(*names: str) -> list[Measured]:
    return [
        Measured(what=name, best_per_s=1e11, median_per_s=9e10, spread_ratio=0.01, repeats_count=5)
        for name in names
    ]


def _documents(folder: Path) -> None:
    place = folder / "document"
    place.mkdir()
    for ranks in (1, 2):
        calibration.save(
            Calibration(
                kind="full",
                created_ns=BASE_NS,
                chopper_version="0.1.0",
                torch_version="2.13.0",
                hostname=socket.gethostname(),
                device_type="cpu",
                device_name="A Processor",
                ranks=ranks,
                threads=1,
                cores=2,
                gemm={"fp32": _rates("fp32 256x256x256")},
                memory=_rates("copy", "triad"),
                link=_rates("all_reduce 1 MiB"),
                link_ranks=2,
                link_backend="gloo",
                launch_ns=900,
                roundtrip_ns=2_000,
            ),
            place / "calibration.json",
        )
    documents: dict[str, Callable[[], dict[str, Any]]] = {"config": _config}
    for name, document in documents.items():
        (place / f"{name}.json").write_text(json.dumps(document()))


def _config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
