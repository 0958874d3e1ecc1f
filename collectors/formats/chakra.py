"""Execution traces of Chakra (MLCommons): protobuf (``.et``), and JSON with a ``workload_graph``.

A node is an operator of the host or an event of a device, with its duration in µs and the nodes
that it depends on. Converters leave out when nodes began: events of a device are then laid out by
their dependencies, as early as these and their stream allow.

The messages are those of ``et_def.proto`` (mlcommons/chakra, schema 0.0.4): a varint of the length
before each, ``GlobalMetadata`` first.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from chopper.collectors.formats.parsed import NO_VALUE, ParsedTrace
from chopper.collectors.formats.recording import Recording, coded, traces_of
from chopper.collectors.formats.unpack import read_bytes
from chopper.errors import JSON_ERRORS, InputError

_JSON = re.compile(rb'\s*\{\s*"workload_graph"\s*:')
_PROTOBUF = re.compile(
    rb"[\x01-\xff]{1,3}(?:\n[\x01-\x20][\w.-]{1,32})?\x12[\x01-\x7f]\n\x06schema\xea\x01", re.DOTALL
)
_EXECUTION_TRACE = re.compile(rb'\s*\{\s*"schema"\s*:\s*"[\w.-]{0,40}chakra')


COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes."""
_SCHEMA = "1.1.1-chakra.0.0.4"


class Node(msgspec.Struct, rename={"id": "Id", "name": "Name", "kind": "NodeType"}):
    """One node; times in µs.

    ``attributes`` are what is written of it beside its operator, thread and times.
    """

    id: int
    name: str = ""
    kind: int = 0
    data_deps: list[int] = []
    runtime: int = 0
    start: int | None = None
    is_cpu_op: bool = True
    tid: int = 0
    attributes: Mapping[str, int | str] = {}


class _Graph(msgspec.Struct):
    workload_graph: list[Node]


def sniff(head: bytes) -> bool:
    """Return whether a file is such a trace."""
    return any(p.match(head) for p in (_JSON, _PROTOBUF, _EXECUTION_TRACE))


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read the trace of one rank.

    Raises:
        InputError: it cannot be read, or has no durations.
    """
    (path,) = files
    data, findings = read_bytes(path)
    if _EXECUTION_TRACE.match(data):
        raise InputError(
            f"{path}: an execution trace of PyTorch, which has no durations; link it with its "
            "Kineto trace and convert it (chakra_trace_link, chakra_converter), or pass the Kineto "
            "trace"
        )
    try:
        if _JSON.match(data):
            nodes = msgspec.json.decode(data, type=_Graph).workload_graph
        else:
            nodes = [*decode(data)]
    except (*JSON_ERRORS, IndexError, ValueError) as exc:
        raise InputError(f"{path}: not a whole execution trace of Chakra ({exc})") from exc
    recording = Recording(path=path, tool="an execution trace of Chakra", findings=findings)
    host = [node for node in nodes if node.is_cpu_op]
    device = [node for node in nodes if not node.is_cpu_op]
    starts = {node.id: node.start for node in nodes if node.start is not None}
    if len(starts) == len(nodes):
        ids = np.array([node.id for node in host], dtype=np.int64)
        recording.host.add(
            *_times(host, starts),
            pid=0,
            tid=np.array([node.tid for node in host], dtype=np.int64),
            category="cpu_op",
            name=coded([node.name for node in host]),
            external_id=ids,
        )
    else:
        starts = _laid_out(path, nodes)
        recording.lacks.append(
            "when events began (they are laid out as early as their dependencies and streams "
            "allow: idle time is the least, and overlap the most, that there can be)"
        )
    operators = {node.id for node in host}
    issued_by = [next((d for d in node.data_deps if d in operators), NO_VALUE) for node in device]
    recording.device.add(
        *_times(device, starts),
        pid=-1,
        device_id=0,
        stream_id=np.array([node.tid for node in device], dtype=np.int64),
        kind="kernel",
        name=coded([node.name for node in device]),
        external_id=np.array(issued_by, dtype=np.int64),
    )
    return traces_of(recording)


def _times(nodes: Sequence[Node], starts: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of nodes in ns."""
    start_ns = np.array([starts[node.id] for node in nodes], dtype=np.int64) * 1000
    return start_ns, start_ns + np.array([node.runtime for node in nodes], dtype=np.int64) * 1000


def _laid_out(path: Path, nodes: Sequence[Node]) -> dict[int, int]:
    """Return the earliest start of each device event, by its dependencies and its stream, in µs.

    Operators of the host pass dependencies on and take no time. Events of a stream follow each
    other in the order of their numbers, as far as dependencies allow.

    Raises:
        InputError: nodes depend on each other in a circle.
    """
    by_id = {node.id: node for node in nodes}
    open_count = {node.id: sum(d in by_id for d in node.data_deps) for node in nodes}
    followers: dict[int, list[int]] = {}
    for node in nodes:
        for before in node.data_deps:
            followers.setdefault(before, []).append(node.id)
    ready = [number for number, count in open_count.items() if not count]
    heapq.heapify(ready)
    done: dict[int, int] = {}
    starts: dict[int, int] = {}
    free: dict[int, int] = {}
    while ready:
        node = by_id[heapq.heappop(ready)]
        end = max((done[d] for d in node.data_deps if d in done), default=0)
        if not node.is_cpu_op:
            starts[node.id] = max(end, free.get(node.tid, 0))
            free[node.tid] = end = starts[node.id] + node.runtime
        done[node.id] = end
        for after in followers.get(node.id, ()):
            open_count[after] -= 1
            if not open_count[after]:
                heapq.heappush(ready, after)
    if len(done) < len(by_id):
        number = next(number for number in by_id if number not in done)
        raise InputError(f"{path}: node {number} depends on itself; expected no circles")
    return starts


def decode(data: bytes) -> Iterator[Node]:
    """Yield the nodes of protobuf messages, each behind its length."""
    at, count = 0, 0
    while at < len(data):
        length, at = _varint(data, at)
        message = data[at : at + length]
        if len(message) < length:
            raise ValueError(f"it ends within message {count}")
        if count:  # the first one is GlobalMetadata
            yield _node(message)
        at, count = at + length, count + 1


def _node(message: bytes) -> Node:
    node = Node(id=0, is_cpu_op=False)
    for number, value in _fields(message):
        if isinstance(value, bytes):
            if number == 2:
                node.name = value.decode("utf-8", "replace")
            elif number == 5:
                node.data_deps = [*node.data_deps, *_packed(value)]
            elif number == 10:
                _set_attribute(node, [v for _, v in _fields(value)])
        elif number in _NUMBERS:
            setattr(node, _NUMBERS[number], value)
        elif number == 5:
            node.data_deps = [*node.data_deps, value]
    return node


_NUMBERS = {1: "id", 3: "kind", 6: "start", 7: "runtime"}


def _set_attribute(node: Node, parts: Sequence[int | bytes]) -> None:
    """Set what an attribute of a node tells: its name, then its value."""
    if len(parts) == 2 and isinstance(parts[1], int):
        if parts[0] == b"is_cpu_op":
            node.is_cpu_op = bool(parts[1])
        elif parts[0] == b"tid":
            node.tid = parts[1]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire not in _WIDTHS:
            raise ValueError(f"a field of wire type {wire}")
        width, at = _varint(message, at) if wire == 2 else (_WIDTHS[wire], at)
        if at + width > len(message):
            raise ValueError("a field that is cut off")
        yield number, message[at : at + width]
        at += width


_WIDTHS = {1: 8, 2: 0, 5: 4}


def _packed(values: bytes) -> Iterator[int]:
    at = 0
    while at < len(values):
        value, at = _varint(values, at)
        yield value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def encode(nodes: Iterable[Node]) -> Iterator[bytes]:
    """Yield a trace as protobuf messages, each behind its length."""
    for message in (_attribute(2, "schema", _SCHEMA), *map(_encoded, nodes)):
        yield _number(len(message)) + message


def _encoded(node: Node) -> bytes:
    numbers = ((number, getattr(node, name)) for number, name in _NUMBERS.items())
    parts = [
        _number(number << 3) + _number(value) for number, value in numbers if value is not None
    ]
    parts.append(_bytes(2, node.name.encode()))
    if node.data_deps:
        parts.append(_bytes(5, b"".join(map(_number, node.data_deps))))
    attributes = {"is_cpu_op": node.is_cpu_op, "tid": node.tid, **node.attributes}
    parts += (_attribute(10, name, value) for name, value in attributes.items())
    return b"".join(parts)


def _attribute(number: int, name: str, value: bool | int | str) -> bytes:
    """Return a field that holds an ``AttributeProto``: bool_val, int64_val or string_val."""
    if isinstance(value, str):
        held = _bytes(29, value.encode())
    else:
        field = 27 if isinstance(value, bool) else 9
        held = _number(field << 3) + _number(int(value))
    return _bytes(number, _bytes(1, name.encode()) + held)


def _bytes(number: int, value: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    """Return a varint; negative numbers as 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
