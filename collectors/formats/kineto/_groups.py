"""Groups of rows that a trace is read into, by the scanner in C and by the decoder in Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chopper.collectors.formats.kineto._events import Args, CounterEvent, Header
from chopper.collectors.formats.kineto._values import Ids, Names

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
