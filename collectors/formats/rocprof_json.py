"""rocprofv3's JSON (``rocprofv3 --sys-trace --output-format json``): key ``rocprofiler-sdk-tool``.

Times are nanoseconds of the host's monotonic clock. Calls are named by their kind and operation,
which are numbers into lists that the file carries; kernels by a table of symbols; ROCTx ranges by
their correlation id. Grids count threads.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE
from chopper.collectors.formats.json_text import read_bytes
from chopper.collectors.formats.recording import (
    Recording,
    blocks_of,
    by_number,
    coded,
    constant,
    counters_table,
    traces_of,
    triples,
    units_count,
)
from chopper.collectors.formats.rocpd import api_category, copy_name
from chopper.errors import InputError
from chopper.kernel_names import without_suffixes
from chopper.storage.manifest import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from chopper.collectors.formats.parsed import ParsedTrace

_KEY = b'"rocprofiler-sdk-tool"'
_APIS = ("hip_api", "hsa_api", "rccl_api", "marker_api")
_GPU = 2

Int = int | None


class _Handle(msgspec.Struct, gc=False, frozen=True):
    handle: Int = None


class _Correlation(msgspec.Struct, gc=False, frozen=True):
    internal: Int = None


class _Size(msgspec.Struct, gc=False, frozen=True):
    x: Int = None
    y: Int = None
    z: Int = None


_NO_HANDLE, _NO_CORRELATION, _NO_SIZE = _Handle(), _Correlation(), _Size()


class _Dispatch(msgspec.Struct, gc=False, frozen=True):
    agent_id: _Handle = _NO_HANDLE
    queue_id: _Handle = _NO_HANDLE
    kernel_id: Int = None
    dispatch_id: Int = None
    group_segment_size: Int = None
    workgroup_size: _Size = _NO_SIZE
    grid_size: _Size = _NO_SIZE


_NO_DISPATCH = _Dispatch()


class _Kernel(msgspec.Struct, gc=False, frozen=True):
    correlation_id: _Correlation = _NO_CORRELATION
    start_timestamp: Int = None
    end_timestamp: Int = None
    dispatch_info: _Dispatch = _NO_DISPATCH
    stream_id: _Handle = _NO_HANDLE


class _Copy(msgspec.Struct, gc=False, frozen=True):
    kind: Int = None
    operation: Int = None
    correlation_id: _Correlation = _NO_CORRELATION
    start_timestamp: Int = None
    end_timestamp: Int = None
    dst_agent_id: _Handle = _NO_HANDLE
    src_agent_id: _Handle = _NO_HANDLE
    stream_id: _Handle = _NO_HANDLE
    bytes: Int = None


class _Call(msgspec.Struct, gc=False, frozen=True):
    kind: Int = None
    operation: Int = None
    correlation_id: _Correlation = _NO_CORRELATION
    start_timestamp: Int = None
    end_timestamp: Int = None
    thread_id: Int = None


class _Buffers(msgspec.Struct, frozen=True):
    kernel_dispatch: list[_Kernel] = []
    memory_copy: list[_Copy] = []
    hip_api: list[_Call] = []
    hsa_api: list[_Call] = []
    rccl_api: list[_Call] = []
    marker_api: list[_Call] = []


class _Value(msgspec.Struct, gc=False, frozen=True):
    counter_id: _Handle = _NO_HANDLE
    value: float | int | str | None = None


class _Counted(msgspec.Struct, gc=False, frozen=True):
    dispatch_data: _Kernel = _Kernel()
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
    id: _Handle = _NO_HANDLE
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
    id: _Handle = _NO_HANDLE
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


def whole(values: Iterable[Int]) -> np.ndarray:
    """Whole numbers of 64 bits; what is none is ``NO_VALUE``."""
    listed = [NO_VALUE if v is None else v for v in values]
    try:
        return np.array(listed, dtype=np.int64).reshape(-1)
    except OverflowError:
        fits = (v if -(2**63) <= v < 2**63 else NO_VALUE for v in listed)
        return np.array(list(fits), dtype=np.int64)


def _agents(recording: Recording, agents: list[_Agent]) -> dict[Int, int]:
    gpus = [a for a in agents if a.type == _GPU]
    gpus.sort(key=lambda a: (a.logical_node_type_id or 0, a.node_id or 0))
    for ordinal, agent in enumerate(gpus):
        if all(d.device_id != ordinal for d in recording.devices):
            recording.devices.append(
                Device(
                    device_id=ordinal,
                    name=agent.product_name or agent.name or None,
                    multiprocessor_count=units_count(agent.cu_count),
                )
            )
    return {agent.id.handle: ordinal for ordinal, agent in enumerate(gpus)}


def _kernels(
    recording: Recording,
    records: list[_Kernel],
    ordinals: dict[Int, int],
    symbols: dict[int, str],
    pid: int,
) -> None:
    infos = [r.dispatch_info for r in records]
    block = [whole(getattr(i.workgroup_size, axis) for i in infos) for axis in "xyz"]
    grid = [
        blocks_of(whole(getattr(i.grid_size, axis) for i in infos), size)
        for axis, size in zip("xyz", block, strict=True)
    ]
    streams = whole(r.stream_id.handle for r in records)
    queues = whole(i.queue_id.handle for i in infos)
    recording.device.add(
        whole(r.start_timestamp for r in records),
        whole(r.end_timestamp for r in records),
        pid=np.full(len(records), pid, dtype=np.int64),
        device_id=whole(ordinals.get(i.agent_id.handle, -1) for i in infos),
        stream_id=streams if len(np.unique(streams)) > 1 else queues,
        kind=constant("kernel", len(records)),
        name=by_number(whole(i.kernel_id for i in infos), symbols),
        correlation_id=whole(r.correlation_id.internal for r in records),
        grid=triples(*grid),
        block=triples(*block),
        shared_memory_bytes=whole(i.group_segment_size for i in infos),
    )


def _copies(recording: Recording, tool: _Tool, ordinals: dict[Int, int], pid: int) -> None:
    records = tool.buffer_records.memory_copy
    target = whole(ordinals.get(r.dst_agent_id.handle, -1) for r in records)
    source = whole(ordinals.get(r.src_agent_id.handle, -1) for r in records)
    recording.device.add(
        whole(r.start_timestamp for r in records),
        whole(r.end_timestamp for r in records),
        pid=np.full(len(records), pid, dtype=np.int64),
        device_id=np.where(target >= 0, target, source),
        stream_id=whole(r.stream_id.handle for r in records),
        kind=constant("memcpy", len(records)),
        name=coded([copy_name(_operation(tool, r) or "unknown") for r in records]),
        correlation_id=whole(r.correlation_id.internal for r in records),
        bytes_count=whole(r.bytes for r in records),
    )


def _operation(tool: _Tool, record: _Copy | _Call) -> str | None:
    kinds = tool.strings.buffer_records
    if record.kind is None or not 0 <= record.kind < len(kinds):
        return None
    names = kinds[record.kind].operations
    at = record.operation
    return names[at] if at is not None and 0 <= at < len(names) else kinds[record.kind].kind


def _calls(recording: Recording, tool: _Tool, pid: int) -> None:
    messages = {t.key: t.value for t in tool.strings.marker_api}
    buffers = tool.buffer_records
    records = list(chain.from_iterable(getattr(buffers, name) for name in _APIS))
    kinds = [
        category
        for name in _APIS
        for category in [api_category(name)] * len(getattr(buffers, name))
    ]
    category = np.array(kinds, dtype=np.int32)
    marker = category == 3
    recording.host.add(
        whole(r.start_timestamp for r in records),
        whole(r.end_timestamp for r in records),
        pid=np.full(len(records), pid, dtype=np.int64),
        tid=whole(r.thread_id for r in records),
        category=(category, [None, "runtime", "driver", "annotation"]),
        name=coded(
            [
                (messages.get(r.correlation_id.internal) if kind == 3 else None)
                or _operation(tool, r)
                for r, kind in zip(records, kinds, strict=True)
            ]
        ),
        correlation_id=np.where(
            marker, NO_VALUE, whole(r.correlation_id.internal for r in records)
        ),
    )
