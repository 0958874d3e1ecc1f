"""Write a simulated run as a recorded one: Kineto traces of CUDA or ROCm, and clock samples."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.recording.finish import finalize
from chopper.storage.manifest import Device
from chopper.storage.parts import RunWriter
from chopper.storage.streams import write_table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.known_causes.model.engine import Task
    from tests.known_causes.model.records import RankRecord, Recording

_BASE_NS = 1_767_189_312_000_000_000
_START_NS = 3_743_411_230_000_000_000 % 1_000_000_000_000_000
_TAIL_NS = 2_000_000


def write(recording: Recording, directory: Path) -> None:
    """Write a run directory, as ``chopper record`` would have left it."""
    for record in recording.ranks:
        _write_rank(recording, record, directory)
    finalize(directory, command=("train.py",), exit_code=0)


class _Clock:
    """True time → what a rank's host says: an offset, and a drift."""

    def __init__(self, recording: Recording, rank: int) -> None:
        plan = recording.plan
        self._offset_ns = _START_NS + plan.host_offsets_ns[rank % len(plan.host_offsets_ns)]
        self._drift = plan.host_drift_ns_per_s[rank % len(plan.host_drift_ns_per_s)] / 1e9

    def at(self, true_ns: int) -> int:
        return self._offset_ns + true_ns + round(true_ns * self._drift)


def _write_rank(recording: Recording, record: RankRecord, directory: Path) -> None:
    plan, node = recording.plan, recording.machine
    clock = _Clock(recording, record.rank)
    writer = RunWriter(directory, record.rank)
    (writer.directory / "trace.json").write_bytes(
        msgspec.json.encode(_document(recording, record, clock))
    )
    write_table(writer.directory, "device_clock", _samples(recording, record.rank, clock))
    part = writer.manifest
    part.world_size = plan.ranks
    part.local_rank = record.rank
    part.hostname = f"node-{record.rank}"
    part.backend = "nccl"
    part.process_groups = _groups(recording)
    part.devices = [
        Device(
            device_id=i,
            name=node.device_name,
            memory_bytes=node.memory_bytes,
            multiprocessor_count=node.units,
        )
        for i in range(plan.ranks)
    ]
    part.device_id = record.rank
    part.traces = ("trace.json",)
    part.steps_source = "profiler_step"
    part.status = "complete"
    writer.save()


def _groups(recording: Recording) -> list[dict[str, Any]]:
    return [
        {"pg_name": name, "pg_desc": "default_pg", "pg_size": len(ranks), "ranks": list(ranks)}
        for name, ranks in recording.groups
    ]


def _document(recording: Recording, record: RankRecord, clock: _Clock) -> dict[str, Any]:
    node, plan = recording.machine, recording.plan
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_labels",
            "ts": 0,
            "pid": record.rank,
            "tid": 0,
            "args": {"labels": f"GPU {record.rank}"},
        }
    ]
    pid = 1000 * (record.rank + 1)
    for span in record.spans:
        if span.start_ns >= record.recording_ns:
            events.append(_row(span.category, span.name, pid, span.tid, span, clock, span.args))
    for task in record.tasks:
        if task.end_ns > record.recording_ns:
            events.append(_device_row(recording, record, task, clock))
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": i,
                "name": node.device_name,
                "totalGlobalMem": node.memory_bytes,
                **node.properties,
            }
            for i in range(plan.ranks)
        ],
        "distributedInfo": {
            "backend": "nccl",
            "rank": record.rank,
            "world_size": plan.ranks,
            "pg_count": len(recording.groups),
            "pg_config": _groups(recording),
            "nccl_version": node.nccl_version,
        },
        "record_shapes": 1,
        **node.versions,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _BASE_NS,
        "traceEvents": events,
    }


def _us(time_ns: int) -> msgspec.Raw:
    """Microseconds with the digits that Kineto writes: nanoseconds after the point."""
    return msgspec.Raw(b"%d.%03d" % divmod(time_ns, 1000))


def _row(
    category: str, name: str, pid: int, tid: int, timed: Any, clock: _Clock, args: dict[str, Any]
) -> dict[str, Any]:
    start = clock.at(timed.start_ns)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": _us(start),
        "dur": _us(clock.at(timed.end_ns) - start),
        "args": args,
    }


def _device_row(
    recording: Recording, record: RankRecord, task: Task, clock: _Clock
) -> dict[str, Any]:
    cuda = recording.machine.flavour == "cuda"
    args: dict[str, Any] = {
        "device": record.rank,
        "stream": task.stream,
        "correlation": task.correlation,
    }
    shape = dict(task.shape)
    # On ROCm a fill is a kernel of the runtime's own.
    category = "kernel"
    if task.lane == "copy" and not task.name.startswith("__"):
        category = "gpu_memset" if task.name.startswith("Memset") else "gpu_memcpy"
    if cuda:
        args["External id"] = task.external
        if category == "kernel":
            args |= {"queued": 0, "context": 1, "registers per thread": 32, "shared memory": 0}
            grid = shape.get("grid", [1, 1, 1])
            per_unit = grid[0] / recording.machine.units
            args |= {
                "blocks per SM": round(per_unit, 6),
                "warps per SM": round(per_unit * shape.get("block", [128])[0] / 32, 6),
                "est. achieved occupancy %": 0,
            }
        args |= shape
        if task.graph is not None:
            args |= {"graph id": task.graph[0], "graph node id": task.graph[1]}
        if task.collective is not None:
            collective = task.collective
            args |= {
                "Collective name": collective.name,
                "In msg nelems": collective.in_elements,
                "Out msg nelems": collective.out_elements,
                "Group size": len(collective.members),
                "dtype": "BFloat16",
                "Process Group Name": collective.group,
                "Process Group Ranks": str(list(collective.members)),
                "Seq": collective.sequence,
            }
    else:
        # roctracer: the grid stands on the launch row, too; there are no registers, no External id.
        args["kind"] = "Dispatch Kernel"
        if "grid" in shape:
            args |= {"grid": shape["grid"], "block": shape["block"]}
        if category == "gpu_memcpy":
            args |= {"kind": task.name.split()[1], "bytes": shape["bytes"]}
    return _row(category, task.name, record.rank, task.stream, task, clock, args)


def _samples(recording: Recording, rank: int, clock: _Clock) -> dict[str, list[Any]]:
    plan, node = recording.plan, recording.machine
    rng = random.Random(f"{plan.seed}/{rank}/sampler")
    period = 1e9 / plan.telemetry_hz
    changes = recording.clocks[rank]
    record = recording.ranks[rank]
    time_ns = record.recording_ns - 3 * period
    rows = []
    at = 0
    while time_ns < recording.end_ns + max(_TAIL_NS, period):
        sample_ns = max(round(time_ns + period * 0.04 * rng.uniform(-1, 1)), 0)
        while at + 1 < len(changes) and changes[at + 1][0] <= sample_ns:
            at += 1
        _, hz, reasons = changes[at]
        row = {
            "time_ns": _BASE_NS + clock.at(sample_ns),
            "span_ns": round(rng.uniform(20_000, 60_000)),
            "device_id": rank,
            "sm_clock_hz": round(hz / 1e6) * 1_000_000,
            "memory_clock_hz": node.memory_clock_hz,
            "power_w": round(560 + 20 * rng.random(), 1),
            "event_reasons": reasons,
            "device_uuid": None,
        }
        rows.append(row)
        time_ns += period
    return {name: [row[name] for row in rows] for name in rows[0]}
