"""The events of a Kineto trace as typed structures: only what chopper uses is decoded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np

from chopper.collectors.formats.cleaning import LAST_NS, clean, integer
from chopper.collectors.formats.parsed import NO_VALUE
from chopper.errors import JSON_ERRORS

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


_NUMBERED = re.compile(r"\s*(?:stream\s*)?(-?\d+)\s*", re.IGNORECASE | re.ASCII)


class Ids(dict[Any, int]):
    """Process and thread ids as integers; ``stream 7`` is 7, other words get negative numbers.

    Merge tools write ``rank0_4711`` for what was 4711: such words stay apart from each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[int, str] = {}

    def __missing__(self, value: Any) -> int:
        if isinstance(value, bool) or value is None:
            number = -1
        elif isinstance(value, int):
            # An unsigned 64-bit id keeps its bits.
            number = value - 2**64 if 2**63 <= value < 2**64 else value
            if not NO_VALUE < number < 2**63:
                number = -1
        elif isinstance(value, float):
            number = int(value) if value == value and abs(value) < 2**62 else -1
        else:
            match = _NUMBERED.fullmatch(value)
            if match and len(value) < 30 and abs(int(match.group(1))) < 2**63:
                number = int(match.group(1))
            else:
                number = -1_000_000 + len(self.labels)
                self.labels[number] = str(value)
        self[value] = number
        return number


def base_of(header: Header) -> int | None:
    """Return the offset of all recorded times, in ns; None if the trace does not have it."""
    base_ns = integer(header.baseTimeNanoseconds)
    return base_ns if base_ns is not None and 0 < base_ns < LAST_NS else None


def threshold_of(header: Header) -> float:
    """Return the magnitude from which a recorded ``ts`` can only be nanoseconds.

    Without a base it may be Unix microseconds (1.8e15); else it counts from the base, less than a
    few months (8e12 µs).
    """
    return 9.2e15 if base_of(header) is None else 1e14


Names = dict[tuple[int, int | None, str], str]
"""(pid, tid or None, "process_name" | "thread_name") → name."""


def note_name(names: Names, ids: Ids, event: Event) -> None:
    """Note what a metadata event calls a process or thread, if it does."""
    if event.name not in ("process_name", "thread_name"):
        return
    if event.args is None or event.args.name is NOTHING:
        return
    try:
        text = clean(str(msgspec.json.decode(event.args.name)))
    except JSON_ERRORS:
        return
    tid = None if event.name == "process_name" else ids[event.tid]
    names[ids[event.pid], tid, str(event.name)] = text


def ints(values: list[Any]) -> np.ndarray:
    """Return recorded integers; strings are parsed, other values become ``NO_VALUE``."""
    numbers = np.array([NO_VALUE if v is None else v for v in values])
    if numbers.dtype != np.int64:
        parsed = (integer(v) for v in values)
        numbers = np.array([NO_VALUE if v is None else v for v in parsed], dtype=np.int64)
    return numbers


def unsigned(ids: np.ndarray) -> np.ndarray:
    """Correlation ids as recorders count them: those printed as negative have 32 or 64 bits."""
    negative = (ids < 0) & (ids != NO_VALUE)
    mask = np.where(ids < -(2**31), 2**63 - 1, 2**32 - 1)
    return np.where(negative, ids & mask, ids) if negative.any() else ids


def _exact_thousandths(text: str) -> int | None:
    """A decimal number times 1000, rounded half up, from its digits."""
    text = text.strip()
    if "_" in text:
        return None
    head, dot, tail = text.partition(".")
    try:
        if dot and tail.isdigit():
            fraction = int((tail + "0000")[:4])
            sign = -1 if head.startswith("-") else 1
            return int(head) * 1000 + sign * ((fraction + 5) // 10)
        if not dot and "e" not in text and "E" not in text:
            return int(text) * 1000
        value = Decimal(text)
        return round(value * 1000) if value.adjusted() < 20 else None
    except (ValueError, ArithmeticError):
        return None


_decode_numbers = msgspec.json.Decoder(list[int | float]).decode
_EXACT_FLOAT_US = float(1 << 43)
"""Above this a float64 of microseconds no longer tells nanoseconds apart."""


def _plain_ns(digits: list[msgspec.Raw], unit: float | np.ndarray) -> np.ndarray | None:
    """Return plain microseconds in ns, all at once; None where the digits of one must be read."""
    try:
        times = np.array(_decode_numbers(b"[%b]" % b",".join(digits)))
    except msgspec.MsgspecError:
        return None
    if len(times) != len(digits):  # one that is not there
        return None
    largest = float(np.abs(times.astype(np.float64)).max(initial=0))
    if largest >= unit if isinstance(unit, float) else unit.any():
        return None
    if largest >= (9.2e15 if times.dtype == np.int64 else _EXACT_FLOAT_US):
        return None
    whole_us = times.astype(np.int64)
    plain: np.ndarray = whole_us * 1000 + np.rint((times - whole_us) * 1000).astype(np.int64)
    return plain


def to_ns(
    digits: list[msgspec.Raw], unit: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (integer ns, usable, recorded in ns) of recorded times; unusable ones are 0.

    Args:
        digits: as they were written.
        unit: values from this magnitude on are nanoseconds, all others microseconds; or a mask
            that says which are nanoseconds.
    """
    plain = _plain_ns(digits, unit)
    if plain is not None:
        return plain, np.ones(len(digits), dtype=bool), np.zeros(len(digits), dtype=bool)
    time_ns = np.zeros(len(digits), dtype=np.int64)
    ok = np.zeros(len(digits), dtype=bool)
    in_ns = ok.copy() if isinstance(unit, float) else unit
    for i, written in enumerate(digits):
        exact = _exact_thousandths(bytes(written).decode("ascii", "replace").strip('"'))
        if exact is None or abs(exact) >= 1000 << 63:
            continue
        if isinstance(unit, float):
            in_ns[i] = abs(exact) >= unit * 1000
        if in_ns[i]:
            exact //= 1000
        if abs(exact) < 1 << 63:
            time_ns[i], ok[i] = exact, True
    return time_ns, ok, in_ns


def text_of(value: Any) -> str | None:
    """A recorded JSON value as text; strings without their quotes."""
    if isinstance(value, msgspec.Raw):
        value = bytes(value) or None
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        if text == "null":
            return None
        if text.startswith('"'):
            try:
                return clean(str(msgspec.json.decode(text)))
            except JSON_ERRORS:
                return text
        return text
    return None if value is None else clean(str(value))


_HOST_CATEGORIES = {
    "annotation": ("user_annotation",),
    "cpu_op": ("cpu_op", "Operator"),
    "driver": ("cuda_driver", "xpu_driver", "privateuse1_driver"),
    "overhead": ("overhead",),
    "python": ("python_function",),
    "runtime": (
        *("cuda_runtime", "Runtime", "hip_runtime", "xpu_runtime"),
        *("mtia_runtime", "privateuse1_runtime"),
    ),
}
"""`host_span.category` → Kineto's categories, today's and 2021's."""
_DEVICE_CATEGORIES = {
    "kernel": ("kernel", "Kernel", "concurrent_kernel"),
    "memcpy": ("gpu_memcpy", "Memcpy"),
    "memset": ("gpu_memset", "Memset"),
}
"""`device_event.kind` → Kineto's categories."""
_SKIPPED_CATEGORIES = (
    "gpu_user_annotation",
    "cuda_event",
    "cuda_profiler_range",
    "Trace",
    "fwdbwd",
    "ac2g",
    "async",
    "async_cpu_to_gpu",
    "async_gpu",
    "forward_backward",
    "collective_comm",
    "critical_path",
)
"""Known categories that repeat what other rows say, or that no analyzer reads yet."""

HOST, DEVICE, MEMORY, SYNCHRONIZATION = range(4)
SKIPPED, REFUSED = -1, -2
HOST_KINDS = [*_HOST_CATEGORIES]
DEVICE_KINDS = [*_DEVICE_CATEGORIES]
OPERATORS = ("cpu_op", "annotation")

# As in _scan.c; the last is the decoder's own.
WITHOUT_TS, WITHOUT_DUR, OVERFLOWING_DUR, WITHOUT_NAME, IN_NS = 1, 2, 4, 8, 16


class Group(NamedTuple):
    """Arguments that the rows of a group keep, by column."""

    ints: dict[str, str]
    texts: dict[str, str]


GROUPS = (
    Group(
        {
            "correlation_id": "correlation",
            "external_id": "External id",
            "sequence_id": "Sequence number",
            "forward_tid": "Fwd thread id",
        },
        {
            "input_dims": "Input Dims",
            "input_dims_2021": "Input dims",
            "input_types": "Input type",
            "concrete_inputs": "Concrete Inputs",
        },
    ),
    Group(
        {
            "device_id": "device",
            "stream_id": "stream",
            "correlation_id": "correlation",
            "external_id": "External id",
            "external_id_2021": "external id",
            "bytes_count": "bytes",
            "registers_count": "registers per thread",
            "shared_memory_bytes": "shared memory",
            "graph_id": "graph id",
            "graph_node_id": "graph node id",
        },
        {"grid": "grid", "block": "block", "occupancy": "est. achieved occupancy %"},
    ),
    Group(
        {
            "device_type": "Device Type",
            "device_id": "Device Id",
            "address_id": "Addr",
            "bytes_count": "Bytes",
            "allocated_bytes": "Total Allocated",
            "reserved_bytes": "Total Reserved",
        },
        {},
    ),
    Group(
        {
            "device_id": "device",
            "stream_id": "stream",
            "correlation_id": "correlation",
            "event_stream_id": "wait_on_stream",
            "event_correlation_id": "wait_on_cuda_event_record_corr_id",
        },
        {},
    ),
)


class Target(NamedTuple):
    """Table that the spans of a category go to."""

    group: int
    code: int = 0
    """Place of their kind among the group's kinds, from 1."""
    has_collectives: bool = False
    """Whether the arguments of collectives are read."""


MTIA = "mtia_ccp_events"
"""A category whose events are told apart by their names."""
_COLLECTIVES = {*OPERATORS, "kernel", "memcpy"}
TARGETS = {
    "cuda_sync": Target(SYNCHRONIZATION),
    **dict.fromkeys(_SKIPPED_CATEGORIES, Target(SKIPPED)),
    **{
        category: Target(group, code, kind in _COLLECTIVES)
        for group, kinds in ((HOST, _HOST_CATEGORIES), (DEVICE, _DEVICE_CATEGORIES))
        for code, (kind, categories) in enumerate(kinds.items(), 1)
        for category in categories
    },
}


Columns = list[list[np.ndarray]]
"""Columns of each group: start and duration in ns, pid, tid, name, code, flags, place in the file;
its integers; its texts. Names and texts are codes, 0 for none."""
Marked = list[tuple[int, int, Args]]
"""Group, row and arguments of collectives."""


@dataclass(kw_only=True)
class Scanned:
    """Contents of a file, before anything is left out.

    Attributes:
        header: what the file says about itself.
        groups, collectives: its rows.
        names: by code - 1.
        texts: JSON by code - 1.
        counters: samples.
        ids: process and thread ids that were recorded as words.
        called: names of processes and threads.
        unknown: events of categories nobody knows, by category.
        counts: events that could not be used, or were repaired, by code.
    """

    header: Header
    groups: Columns
    names: list[str]
    texts: list[bytes]
    collectives: Marked
    counters: list[CounterEvent]
    ids: Ids
    called: Names
    unknown: dict[str, int]
    counts: Counter[str]
