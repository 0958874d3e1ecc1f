"""The events of a Kineto trace as typed structures: only what chopper uses is decoded."""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float | str | None
"""Ids occur as any of these."""
NOTHING = msgspec.Raw(b"")
"""An argument or member that is not there."""


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that chopper uses; the rest is skipped while decoding."""

    external_id: Number = msgspec.field(default=None, name="External id")
    external_id_2021: Number = msgspec.field(default=None, name="external id")
    correlation: Number = None
    sequence: Number = msgspec.field(default=None, name="Sequence number")
    forward_tid: Number = msgspec.field(default=None, name="Fwd thread id")
    input_dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    input_dims_2021: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")
    input_types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    device: Number = None
    stream: Number = None
    bytes: Number = None
    size: Number = None
    event_stream: Number = msgspec.field(default=None, name="wait_on_stream")
    event_correlation: Number = msgspec.field(
        default=None, name="wait_on_cuda_event_record_corr_id"
    )
    grid: msgspec.Raw = NOTHING
    block: msgspec.Raw = NOTHING
    registers: Number = msgspec.field(default=None, name="registers per thread")
    shared_memory: Number = msgspec.field(default=None, name="shared memory")
    occupancy: Number = msgspec.field(default=None, name="est. achieved occupancy %")
    graph_id: Number = msgspec.field(default=None, name="graph id")
    graph_node_id: Number = msgspec.field(default=None, name="graph node id")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements_count: Number = msgspec.field(default=None, name="In msg nelems")
    out_elements_count: Number = msgspec.field(default=None, name="Out msg nelems")
    group_size_count: Number = msgspec.field(default=None, name="Group size")
    dtype: msgspec.Raw = NOTHING
    group_name: msgspec.Raw = msgspec.field(default=NOTHING, name="Process Group Name")
    group_ranks: msgspec.Raw = msgspec.field(default=NOTHING, name="Process Group Ranks")
    sequence_id: Number = msgspec.field(default=None, name="Seq")
    first_rank_id: Number = msgspec.field(default=None, name="Global rank start")
    rank_stride_count: Number = msgspec.field(default=None, name="Global rank stride")
    source_rank_id: Number = msgspec.field(default=None, name="Src Rank")
    target_rank_id: Number = msgspec.field(default=None, name="Dst Rank")
    device_type: Number = msgspec.field(default=None, name="Device Type")
    memory_device: Number = msgspec.field(default=None, name="Device Id")
    address: Number = msgspec.field(default=None, name="Addr")
    memory_bytes: Number = msgspec.field(default=None, name="Bytes")
    allocated: Number = msgspec.field(default=None, name="Total Allocated")
    reserved: Number = msgspec.field(default=None, name="Total Reserved")
    name: msgspec.Raw = NOTHING
    kind: msgspec.Raw = NOTHING
    direction: msgspec.Raw = NOTHING


class Event(msgspec.Struct, gc=False):
    """One trace event."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: Number = None
    tid: Number = None
    # A float of microseconds since 1970 tells no nanoseconds apart: their digits do.
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    args: Args | None = None


class CounterEvent(msgspec.Struct, gc=False):
    """A sample of counter tracks."""

    ph: str = ""
    name: str | None = None
    pid: Number = None
    ts: msgspec.Raw = NOTHING
    args: dict[str, Any] | None = None


class Header(msgspec.Struct):
    """Members of a file beside its events."""

    schemaVersion: Any = None
    deviceProperties: Any = None
    computeProperties: Any = None
    distributedInfo: Any = None
    baseTimeNanoseconds: Any = None
    host_name: Any = None
    record_shapes: Any = None
    with_stack: Any = None
    traceName: Any = None
    chopperRun: Any = None


class Document(Header):
    """A whole file; the events stay undecoded text."""

    traceEvents: msgspec.Raw = NOTHING


NO_ARGS = Args()
ARGUMENTS = {field.encode_name: field for field in msgspec.structs.fields(Args)}
"""Fields of :class:`Args` by the names that traces give them."""

decode_events = msgspec.json.Decoder(list[Event]).decode
decode_counters = msgspec.json.Decoder(list[CounterEvent]).decode

MEMORY_NAME = "[memory]"
