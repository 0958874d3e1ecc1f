"""rocmProfileData's databases (``runTracer.sh``, rpdTracerControl): rocpd_api, rocpd_op.

Times are nanoseconds of the host's monotonic clock. An operation of a device is joined to the call
that launched it through rocpd_api_ops; what a kernel is called stands in the operation, or, where
that is empty, with the arguments of its call.
"""

from __future__ import annotations

import numpy as np

from chopper.collectors.formats.parsed import NO_VALUE, is_one_of, most_frequent, table_of_rows
from chopper.collectors.formats.recording import (
    Recording,
    Text,
    blocks_of,
    by_number,
    coded,
    lookup,
    renamed,
    taken,
)
from chopper.collectors.formats.sqlite import Database
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Device

_FILL = "FillBuffer"
_NAMES = {
    _FILL: "Memset (Device)",
    "CopyDeviceToHost": "Memcpy DtoH (Device -> Host)",
    "CopyHostToDevice": "Memcpy HtoD (Host -> Device)",
    "CopyDeviceToDevice": "Memcpy DtoD (Device -> Device)",
}
_NO_WORK = frozenset(("Barrier", "Marker", "UserMarker"))
_IN_THREADS = frozenset(
    ("hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel", "hipExtLaunchKernel")
)
"""Calls whose grid counts threads; the others' count blocks."""
_MARKER = "UserMarker"
_IDLE_RATIO, _BUSY_RATIO = 1.1, 3.0
"""A GPU whose clock varies by less stays idle; one that works runs at this many times that."""


def knows(database: Database) -> bool:
    """Return whether a database is one of rocmProfileData."""
    return "rocpd_op" in database.tables or "rocpd_api" in database.tables


def read(database: Database) -> Recording:
    """Operations, calls, markers, operators and monitored clocks.

    Raises:
        InputError: a table or column without which nothing can be said is missing.
    """
    tool = database.with_schema("a rocmProfileData database", "rocpd_metadata")
    for table, column in (
        ("rocpd_op", "start"),
        ("rocpd_api", "start"),
        ("rocpd_string", "string"),
    ):
        if not database.has(table, column):
            raise InputError(
                f"{database.path}: {tool} without {table}.{column}; was it closed properly? Found "
                f"{', '.join(sorted(database.tables)[:6]) or 'no tables'}"
            )
    recording = Recording(path=database.path, tool=tool, boot_clock=True)
    strings = database.named("rocpd_string", "id", "string")
    calls = database.integers(
        "rocpd_api", ("id", "pid", "tid", "start", "end", "apiName_id", "args_id")
    )
    _calls(database, recording, strings, calls)
    _operations(database, recording, strings, calls)
    _monitor(database, recording)
    return recording


def _calls(
    db: Database, recording: Recording, strings: dict[int, str], calls: dict[str, np.ndarray]
) -> None:
    name = by_number(calls["apiName_id"], strings)
    marker = is_one_of(name, _MARKER)
    operators = db.integers("ext_autogradapi", ("api_ptr_id", "autogradName_id", "seq", "op_id"))
    shapes = db.texts("ext_autogradapi", "sizes")
    at = lookup(operators["api_ptr_id"], calls["id"])
    sequence = taken(operators["seq"], at)
    recording.host.add(
        calls["start"],
        calls["end"],
        pid=calls["pid"],
        tid=calls["tid"],
        category=(np.where(marker, 2, 1).astype(np.int32), [None, "runtime", "annotation"]),
        name=by_number(np.where(marker, calls["args_id"], calls["apiName_id"]), strings),
        correlation_id=np.where(marker, NO_VALUE, calls["id"]),
        sequence_id=np.where(sequence < 0, NO_VALUE, sequence),
        external_id=taken(operators["op_id"], at),
        input_dims=coded(
            [shapes[i] or None if 0 <= i < len(shapes) else None for i in at.tolist()]
        ),
    )


def _operations(
    db: Database, recording: Recording, strings: dict[int, str], calls: dict[str, np.ndarray]
) -> None:
    ops = db.integers(
        "rocpd_op", ("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id")
    )
    pairs = db.integers("rocpd_api_ops", ("api_id", "op_id"))
    pair = lookup(pairs["op_id"], ops["id"])
    call = taken(pairs["api_id"], pair)
    row = lookup(calls["id"], call)
    pid = taken(calls["pid"], row)
    kernels = db.integers(
        "rocpd_kernelapi",
        (
            *("api_ptr_id", "kernelName_id", "gridX", "gridY", "gridZ"),
            *("workgroupX", "workgroupY", "workgroupZ", "groupSegmentSize"),
        ),
    )
    kernel = lookup(kernels["api_ptr_id"], call)
    types = by_number(ops["opType_id"], strings)
    copy = is_one_of(types, *(t for t in types[1] if t is not None and t.startswith("Copy")))
    fill = is_one_of(types, _FILL)
    work = ~is_one_of(types, *_NO_WORK)
    empty = np.isin(ops["description_id"], [n for n, s in strings.items() if not s])
    number = np.where(
        empty & ~copy & ~fill, taken(kernels["kernelName_id"], kernel), ops["description_id"]
    )
    codes, texts = by_number(number, {n: s for n, s in strings.items() if s})
    # What is still without a name, and copies, are called by what kind of operation they are.
    type_of, kinds = renamed(types, lambda kind: _NAMES.get(kind, kind))
    without_text = np.array([t is None for t in texts])[codes] | copy | fill
    name: Text = (
        np.where(without_text, type_of + (len(texts) - 1), codes).astype(np.int32),
        [*texts, *kinds[1:]],
    )
    block = [taken(kernels[f"workgroup{axis}"], kernel) for axis in "XYZ"]
    recorded = [taken(kernels[f"grid{axis}"], kernel) for axis in "XYZ"]
    launch = taken(calls["apiName_id"], row)
    threads = np.isin(launch, [n for n, s in strings.items() if s in _IN_THREADS])
    # A graph's launch has no arguments of a kernel; the ones of one kernel are not another's.
    grid = [
        np.where(threads, blocks_of(count, size), count)
        for count, size in zip(recorded, block, strict=True)
    ]
    copies = db.integers("rocpd_copyapi", ("api_ptr_id", "size"))
    size = taken(copies["size"], lookup(copies["api_ptr_id"], call))
    kind = np.where(copy, 2, np.where(fill, 3, 1)).astype(np.int32)
    # Operations whose call is not recorded are the busiest process's.
    busiest = most_frequent(calls["pid"]) if len(calls["pid"]) else -1
    recording.device.add(
        ops["start"],
        ops["end"],
        mask=work,
        pid=np.where(pid == NO_VALUE, busiest, pid),
        device_id=ops["gpuId"],
        stream_id=ops["queueId"],
        correlation_id=call,
        kind=(kind, [None, "kernel", "memcpy", "memset"]),
        name=name,
        grid=grid,
        block=block,
        bytes_count=np.where(copy | fill, size, NO_VALUE),
        shared_memory_bytes=taken(kernels["groupSegmentSize"], kernel),
    )
    recording.devices = [
        Device(device_id=int(d)) for d in np.unique(ops["gpuId"][work]) if 0 <= d < 1 << 31
    ]
    recording.lacks.append("the devices' names")


def _monitor(db: Database, recording: Recording) -> None:
    """Monitored values as counters; the clock as telemetry too, where its device is certain.

    The monitor numbers devices as the driver does, operations as the runtime does.
    """
    rows = db.integers("rocpd_monitor", ("start", "end", "deviceId"))
    kinds, values = db.texts("rocpd_monitor", "monitorType"), db.texts("rocpd_monitor", "value")
    readings = []
    for start, end, device, kind, text in zip(
        rows["start"].tolist(),
        rows["end"].tolist(),
        rows["deviceId"].tolist(),
        kinds,
        values,
        strict=False,
    ):
        value = _number(text)
        if value is None or kind is None or not 0 <= start < 1 << 62 or not 0 <= device < 1 << 31:
            continue
        readings.append((start, device, kind, value))
        # It held until then: two readings make a step of it.
        if start < end < 1 << 62:
            readings.append((end - 1, device, kind, value))
    if not readings:
        return
    readings.sort()
    recording.tables["counter"] = table_of_rows(
        "counter",
        [(time_ns, f"GPU {device}", kind, value) for time_ns, device, kind, value in readings],
    )
    clocks = [f for f in readings if f[2] == "sclk" and f[3] > 0]
    monitored = sorted({f[1] for f in clocks})
    used = _only_busy(clocks)
    if used is not None and len(recording.devices) == 1:
        device_id = recording.devices[0].device_id
        clock_rows = [
            (time_ns, 0, device_id, None, round(value * 1e6), None, None, None)
            for time_ns, device, _, value in clocks
            if device == used
        ]
        recording.tables["device_clock"] = table_of_rows("device_clock", clock_rows)
        if len(monitored) > 1:
            note = finding(
                "telemetry.device_inferred",
                source=recording.source,
                device=device_id,
                used=used,
                gpus=len(monitored),
            )
            recording.findings.append(note)
    elif clocks:
        note = finding(
            "telemetry.device_unknown",
            "numbering",
            count=len(monitored),
            source=recording.source,
            first=monitored[0],
            last=monitored[-1],
            devices=", ".join(str(d.device_id) for d in recording.devices),
        )
        recording.findings.append(note)


def _only_busy(clocks: list[tuple[int, int, str, float]]) -> int | None:
    """Return the only GPU with clocks, or the only one of several that left its idle clock."""
    low: dict[int, float] = {}
    high: dict[int, float] = {}
    for _, device, _, value in clocks:
        low[device] = min(value, low.get(device, value))
        high[device] = max(value, high.get(device, value))
    if len(low) == 1:
        return next(iter(low))
    idle = max((high[d] for d in low if high[d] < _IDLE_RATIO * low[d]), default=None)
    busy = [d for d in low if idle is not None and high[d] >= _BUSY_RATIO * idle]
    active = [d for d in low if high[d] >= _IDLE_RATIO * low[d]]
    return busy[0] if len(busy) == 1 and active == busy else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None
