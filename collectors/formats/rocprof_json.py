"""rocprofv3's JSON (``rocprofv3 --sys-trace --output-format json``): key ``rocprofiler-sdk-tool``.

Times are nanoseconds of the host's monotonic clock. Calls are named by their kind and operation,
which are numbers into lists that the file carries; kernels by a table of symbols; ROCTx ranges by
their correlation id. Grids count threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chopper.collectors.formats.parsed import NO_VALUE, ParsedTrace
from chopper.collectors.formats.recording import (
    Ordinals,
    Recording,
    blocks_of,
    by_number,
    coded,
    counters_table,
    traces_of,
)
from chopper.collectors.formats.rocpd import api_category, copy_name
from chopper.collectors.formats.unpack import read_bytes
from chopper.errors import InputError
from chopper.wording import without_suffixes

_KEY = b'"rocprofiler-sdk-tool"'
_APIS = ("hip_api", "hsa_api", "rccl_api", "marker_api")
_GPU = 2

Int = int | None


class _Id(msgspec.Struct, gc=False, frozen=True):
    handle: Int = None
    internal: Int = None
    """Of a correlation id."""


class _Size(msgspec.Struct, gc=False, frozen=True):
    x: Int = None
    y: Int = None
    z: Int = None


_NO_ID, _NO_SIZE = _Id(), _Size()


class _Dispatch(msgspec.Struct, gc=False, frozen=True):
    agent_id: _Id = _NO_ID
    queue_id: _Id = _NO_ID
    kernel_id: Int = None
    dispatch_id: Int = None
    group_segment_size: Int = None
    workgroup_size: _Size = _NO_SIZE
    grid_size: _Size = _NO_SIZE


_NO_DISPATCH = _Dispatch()


class _Record(msgspec.Struct, gc=False, frozen=True):
    """A kernel, a copy or a call."""

    kind: Int = None
    operation: Int = None
    thread_id: Int = None
    correlation_id: _Id = _NO_ID
    start_timestamp: Int = None
    end_timestamp: Int = None
    stream_id: _Id = _NO_ID
    dst_agent_id: _Id = _NO_ID
    src_agent_id: _Id = _NO_ID
    bytes: Int = None
    dispatch_info: _Dispatch = _NO_DISPATCH


class _Buffers(msgspec.Struct, frozen=True):
    kernel_dispatch: list[_Record] = []
    memory_copy: list[_Record] = []
    hip_api: list[_Record] = []
    hsa_api: list[_Record] = []
    rccl_api: list[_Record] = []
    marker_api: list[_Record] = []


class _Value(msgspec.Struct, gc=False, frozen=True):
    counter_id: _Id = _NO_ID
    value: float | int | str | None = None


class _Counted(msgspec.Struct, gc=False, frozen=True):
    dispatch_data: _Record = _Record()
    records: list[_Value] = []


class _Callbacks(msgspec.Struct, frozen=True):
    counter_collection: list[_Counted] = []


class _Names(msgspec.Struct, frozen=True):
    kind: str | None = None
    operations: list[str] = []


class _Text(msgspec.Struct, frozen=True):
    key: Int = None
    value: str | None = None


class _Strings(msgspec.Struct, frozen=True):
    buffer_records: list[_Names] = []
    marker_api: list[_Text] = []


class _Agent(msgspec.Struct, frozen=True):
    id: _Id = _NO_ID
    type: Int = None
    name: str | None = None
    product_name: str | None = None
    cu_count: Int = None
    logical_node_type_id: Int = None
    node_id: Int = None


class _Symbol(msgspec.Struct, frozen=True):
    kernel_id: Int = None
    kernel_name: str | None = None
    formatted_kernel_name: str | None = None


class _Counter(msgspec.Struct, frozen=True):
    id: _Id = _NO_ID
    name: str | None = None


class _Node(msgspec.Struct, frozen=True):
    hostname: str | None = None


class _Metadata(msgspec.Struct, frozen=True):
    pid: Int = None
    node: _Node = _Node()


class _Tool(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    agents: list[_Agent] = []
    counters: list[_Counter] = []
    strings: _Strings = _Strings()
    kernel_symbols: list[_Symbol] = []
    buffer_records: _Buffers = _Buffers()
    callback_records: _Callbacks = _Callbacks()


class _Document(msgspec.Struct, frozen=True):
    tools: list[_Tool] = msgspec.field(default=[], name="rocprofiler-sdk-tool")


_decode = msgspec.json.Decoder(_Document).decode


def sniff(head: bytes) -> bool:
    """Return whether a file begins as rocprofv3's JSON does."""
    return _KEY in head[:4096]


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read one file: a process, or several.

    Raises:
        InputError: it is damaged, or nothing was traced.
    """
    (path,) = files
    text, findings = read_bytes(path)
    try:
        document = _decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise InputError(
            f"{path}: rocprofv3 JSON that cannot be read ({exc}); was the program ended before "
            "rocprofv3 had written it?"
        ) from exc
    recording = Recording(path=path, tool="JSON of rocprofv3", boot_clock=True, findings=findings)
    for number, tool in enumerate(document.tools):
        _one(recording, tool, number)
    return traces_of(recording)


def _one(recording: Recording, tool: _Tool, number: int) -> None:
    pid = tool.metadata.pid if tool.metadata.pid is not None else number
    if not -(2**62) < pid < 2**62:
        pid = number
    if tool.metadata.node.hostname:
        recording.environment.setdefault("host_name", tool.metadata.node.hostname)
    ordinals = _agents(recording, tool.agents)
    symbols = {
        s.kernel_id: without_suffixes(s.formatted_kernel_name or s.kernel_name or "")
        for s in tool.kernel_symbols
        if s.kernel_id is not None and (s.formatted_kernel_name or s.kernel_name)
    }
    _kernels(recording, tool.buffer_records.kernel_dispatch, ordinals, symbols, pid)
    _copies(recording, tool, ordinals, pid)
    _calls(recording, tool, pid)
    counted = tool.callback_records.counter_collection
    if counted:
        names = {c.id.handle: c.name for c in tool.counters}
        recording.tables["kernel_counter"] = counters_table(
            recording.source,
            (
                (
                    entry.dispatch_data.dispatch_info.dispatch_id or 0,
                    symbols.get(entry.dispatch_data.dispatch_info.kernel_id or 0),
                    names.get(value.counter_id.handle),
                    value.value,
                )
                for entry in counted
                for value in entry.records
            ),
        )
        if not tool.buffer_records.kernel_dispatch:
            # Counters alone say when their kernels ran, too.
            _kernels(recording, [c.dispatch_data for c in counted], ordinals, symbols, pid)


def integers(values: Iterable[Int]) -> np.ndarray:
    """Return 64-bit integers; ``NO_VALUE`` for None and for larger numbers."""
    listed = [NO_VALUE if v is None else v for v in values]
    try:
        return np.array(listed, dtype=np.int64).reshape(-1)
    except OverflowError:
        fits = (v if -(2**63) <= v < 2**63 else NO_VALUE for v in listed)
        return np.array(list(fits), dtype=np.int64)


def _agents(recording: Recording, agents: list[_Agent]) -> Ordinals:
    gpus = [a for a in agents if a.type == _GPU]
    gpus.sort(key=lambda a: (a.logical_node_type_id or 0, a.node_id or 0))
    return recording.add_devices(
        (agent.id.handle, ordinal, agent.product_name or agent.name, agent.cu_count)
        for ordinal, agent in enumerate(gpus)
    )


def _spans(records: Sequence[_Record], pid: int) -> dict[str, Any]:
    return {
        "start_ns": integers(r.start_timestamp for r in records),
        "end_ns": integers(r.end_timestamp for r in records),
        "pid": pid,
        "correlation_id": integers(r.correlation_id.internal for r in records),
    }


def _kernels(
    recording: Recording,
    records: list[_Record],
    ordinals: Ordinals,
    symbols: dict[int, str],
    pid: int,
) -> None:
    infos = [r.dispatch_info for r in records]
    block = [integers(getattr(i.workgroup_size, axis) for i in infos) for axis in "xyz"]
    threads = [integers(getattr(i.grid_size, axis) for i in infos) for axis in "xyz"]
    streams = integers(r.stream_id.handle for r in records)
    queues = integers(i.queue_id.handle for i in infos)
    recording.device.add(
        **_spans(records, pid),
        device_id=integers(ordinals.get(i.agent_id.handle, -1) for i in infos),
        stream_id=streams if len(np.unique(streams)) > 1 else queues,
        kind="kernel",
        name=by_number(integers(i.kernel_id for i in infos), symbols),
        grid=list(map(blocks_of, threads, block)),
        block=block,
        shared_memory_bytes=integers(i.group_segment_size for i in infos),
    )


def _copies(recording: Recording, tool: _Tool, ordinals: Ordinals, pid: int) -> None:
    records = tool.buffer_records.memory_copy
    target = integers(ordinals.get(r.dst_agent_id.handle, -1) for r in records)
    source = integers(ordinals.get(r.src_agent_id.handle, -1) for r in records)
    recording.device.add(
        **_spans(records, pid),
        device_id=np.where(target >= 0, target, source),
        stream_id=integers(r.stream_id.handle for r in records),
        kind="memcpy",
        name=coded([copy_name(_operation(tool, r) or "unknown") for r in records]),
        bytes_count=integers(r.bytes for r in records),
    )


def _operation(tool: _Tool, record: _Record) -> str | None:
    kinds = tool.strings.buffer_records
    if record.kind is None or not 0 <= record.kind < len(kinds):
        return None
    names = kinds[record.kind].operations
    at = record.operation
    return names[at] if at is not None and 0 <= at < len(names) else kinds[record.kind].kind


def _calls(recording: Recording, tool: _Tool, pid: int) -> None:
    messages = {t.key: t.value for t in tool.strings.marker_api}
    for api in _APIS:
        records: list[_Record] = getattr(tool.buffer_records, api)
        spans = _spans(records, pid)
        names = [_operation(tool, r) for r in records]
        category = api_category(api)
        if category == "annotation":
            texts = [messages.get(r.correlation_id.internal) for r in records]
            names = [text or name for text, name in zip(texts, names, strict=True)]
            del spans["correlation_id"]
        recording.host.add(
            **spans,
            tid=integers(r.thread_id for r in records),
            category=category,
            name=coded(names),
        )
