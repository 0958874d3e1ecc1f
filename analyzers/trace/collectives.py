"""The record of each communication event: its collective, the ranks in it, its bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import distinct_rows, first_with, ints, pick, strings
from chopper.analyzers.trace.join import COMMUNICATION, Links
from chopper.analyzers.trace.tables import RankTables
from chopper.errors import JSON_ERRORS
from chopper.hardware.ceilings import Link
from chopper.storage.manifest import Dimension

# Part of the normalized name → (k, whether (n - 1)/n scales it): busbw = algbw · k · (n - 1)/n,
# as in nccl-tests' PERFORMANCE.md. Looked for in this order.
_BUS_FACTORS: dict[str, tuple[int, bool]] = {
    "allreduce": (2, True),
    "reducescatter": (1, True),
    "allgather": (1, True),
    "alltoall": (1, True),
    "gather": (1, True),
    "scatter": (1, True),
    "broadcast": (1, False),
    "reduce": (1, False),
}
ALL_TO_ALL = "alltoall"
_UNEVEN = frozenset((ALL_TO_ALL,))
"""Ranks may send different amounts in these: the size tells no instance from another."""
_SHARED = frozenset(("reducescatter", "allgather"))
"""One side of these holds the parts of all ranks: input and output cannot be of one size."""
_OUTPUT_FIRST = "c10d::"
"""Operators that take what comes out before what goes in (or the one tensor that is both)."""
POINT_TO_POINT = "sendrecv"
"""No collective: two ranks, in one direction."""
_Read = TypeVar("_Read")
_PEER = re.compile(r"(?:^|[:_])i?(send|recv)(?: *\d+ *(?:->|<-) *(\d+))?$", re.ASCII)
_ELEMENTS_MAX = 1 << 60
LEFT_EARLY_NS = 50_000
"""A rank that left so long before the last one came did not wait for it, whatever clocks err by."""
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "float64", "long", "long int", "int64"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}
Group = tuple[tuple[int, ...], int, str]
"""A process group: its members as far as they are recorded, how many there are, its name."""


@dataclass(frozen=True, slots=True)
class Key:
    """Traits that two ranks' events of one collective share, beside their sequence number.

    Attributes:
        members: global ranks that take part; empty where only their number is told.
        size: how many ranks take part.
        group: name of the group as recorded.
        what: normalized name of the collective; with its direction for a pair.
        elements: size of the message, -1 where it is unknown or may differ between ranks; None
            where without a number nothing tells which ranks they are of.
        numbered: events that have a sequence number are told by it, whatever their size.
    """

    members: tuple[int, ...]
    size: int
    group: str
    what: str
    elements: int | None
    numbered: bool = False

    @property
    def process_group(self) -> Group:
        """The group that it is of."""
        return self.members, self.size, self.group


@dataclass(frozen=True, slots=True)
class Kind:
    """The record of communication events that are alike.

    Attributes:
        what: normalized name.
        group: name of the process group.
        size, members: how many ranks take part, and their global ranks; empty where not known.
        message_bytes: message as nccl-tests count it.
        key: None for what cannot be matched: its group, or its peer, is not told.
        sent_bytes: that the rank puts in, where it is known.
        dimension: of parallelism that the group divides: tensor, context or expert; None for
            another, or where nothing tells.
    """

    what: str
    group: str | None
    size: int | None
    members: tuple[int, ...]
    message_bytes: int | None
    key: Key | None = None
    sent_bytes: int | None = None
    dimension: Dimension | None = None

    @property
    def bus_ratio(self) -> float | None:
        """nccl-tests' bus factor, None where unknown."""
        if self.what == POINT_TO_POINT:
            return 1.0
        if self.what not in _BUS_FACTORS or not self.size or self.size < 2:
            return None
        times, shared = _BUS_FACTORS[self.what]
        return times * ((self.size - 1) / self.size if shared else 1.0)

    @property
    def bus_bytes(self) -> float:
        """Bytes times the bus factor, NaN where unknown."""
        if self.message_bytes is None or self.bus_ratio is None:
            return float("nan")
        return self.message_bytes * self.bus_ratio


def link_peaks(kinds: list[Kind], link: Link) -> list[float | None]:
    """Link peak of each kind, None where unknown."""
    return [link.of_group(kind.size, kind.members)[0] for kind in kinds]


@dataclass(frozen=True, slots=True)
class Communication:
    """The communication of one rank, one row per event.

    Attributes:
        kind: code into ``kinds``, distinct descriptions.
        sequence: number within the group, -1 where not recorded.
        entered_ns, left_ns: when the rank entered it, and when it was done, Unix time.
        device_event_count: of the rank, those that do not communicate included.
    """

    event_row: np.ndarray
    kinds: list[Kind]
    kind: np.ndarray
    sequence: np.ndarray
    entered_ns: np.ndarray
    left_ns: np.ndarray
    device_event_count: int

    @property
    def bus_bytes(self) -> np.ndarray:
        """Bytes times the bus factor of each row, NaN where unknown."""
        return np.array([k.bus_bytes for k in self.kinds] + [np.nan])[self.kind]


def describe(links: Links, annotation_row: np.ndarray, inputs: RankTables) -> Communication:
    """Describe each communication event of a rank from its records. COLLECTIVE -> Communication.

    Args:
        links: the rank's joined events.
        annotation_row: innermost annotation of the user's around each event's launch, -1 for none.
        inputs: of the rank.
    """
    rows = np.flatnonzero(links.work_class == COMMUNICATION)
    recorded = _Recorded(inputs.collective)
    entry = recorded.of_events(links, rows)
    name, called_names = _event_names(links, annotation_row[rows], rows)
    operator = np.where(entry < 0, _with_input(links, annotation_row[rows], rows), -1)
    peer, entered_ns = _peers(links, rows)
    peer = np.where(entry < 0, peer, -1)
    host = links.host
    sizes = [pick(codes, operator) for codes, _ in (host.input_dims, host.input_types)]
    of_c10d = host.named(lambda n: n.startswith(_OUTPUT_FIRST))
    output_first = pick(of_c10d, operator, otherwise=False)
    first, kind = distinct_rows(
        [recorded.alike[entry], name, peer, *sizes, output_first.astype(np.int64)]
    )
    describing = _Describing(inputs)
    kinds = []
    for row in first:
        called = called_names[name[row]]
        if peer[row] >= 0:  # as NCCL's own spans say it
            called = f"{called} {inputs.rank}->{peer[row]}"
        if entry[row] >= 0:
            fields = recorded.fields[recorded.alike[entry[row]]]
            kind_of_row = describing.by_metadata(fields, called)
        else:
            size = _first_input(links, int(operator[row]))
            kind_of_row = describing.by_names(called, *size, output_first=bool(output_first[row]))
        kinds.append(describing.placed(kind_of_row))
    sequence = recorded.sequence[entry]
    unnumbered = sequence < 0
    sequence[unnumbered] = _numbered_by_operator(links, rows, recorded)[unnumbered]
    # Sends and receives are numbered by each rank for itself, unless the file is of the whole job.
    own = [k.what == POINT_TO_POINT and not (k.key and k.key.numbered) for k in kinds]
    sequence = np.where(np.array([*own, False])[kind], -1, sequence)
    left_ns = links.events.end_ns[rows]
    return Communication(rows, kinds, kind, sequence, entered_ns, left_ns, len(links.events))


def _peers(links: Links, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With whom each send or receive of a CPU backend is exchanged, and when the rank entered it.

    The span of the transfer says neither: it may begin when a message is out already. The operator
    that began it does, on the same thread; its third input is the peer's rank in the group (-1
    where unknown): ``c10d::send(tensors, group, rank, tag)``. Any other event is entered at its
    start.
    """
    peer = np.full(len(rows), -1, dtype=np.int64)
    entered_ns = links.events.start_ns[rows]
    host, launch = links.host, links.launch_row[rows]
    transfers = np.flatnonzero(pick(host.named(names.is_unscoped_span), launch, otherwise=False))
    if not len(transfers):
        return peer, entered_ns
    operators = np.flatnonzero(host.named(lambda n: n in ("c10d::send", "c10d::recv_")))
    tid = ints(host.table, "tid")
    codes, values = host.concrete_inputs
    for thread in np.unique(tid[operators]).tolist():
        begun = operators[tid[operators] == thread]
        mine = transfers[tid[launch[transfers]] == thread]
        start = host.start_ns[launch[mine]]
        last = np.searchsorted(host.start_ns[begun], start, side="right") - 1
        operator = begun[last]
        inside = (last >= 0) & (host.ends(operator) >= start)
        peer[mine[inside]] = [
            _read(_third, [values[codes[r]]], -1) if codes[r] >= 0 else -1 for r in operator[inside]
        ]
        entered_ns[mine[inside]] = host.start_ns[operator[inside]]
    return peer, entered_ns


def _read(reader: Callable[..., _Read], texts: Sequence[str], otherwise: _Read) -> _Read:
    """Return what a reader makes of recorded JSON; ``otherwise`` where it is not as expected."""
    try:
        return reader(*map(msgspec.json.decode, texts))
    except (*JSON_ERRORS, IndexError, KeyError, TypeError, ValueError):
        return otherwise


def _third(inputs: Any) -> int:
    """The third recorded input as a whole number of 0 or more; -1 for a smaller one."""
    return max(int(inputs[2]), -1)


def _numbered_by_operator(links: Links, rows: np.ndarray, recorded: _Recorded) -> np.ndarray:
    """Sequence number that each event's ``record_param_comms`` tells, -1 for none.

    As metadata (``Seq``), or, before PyTorch recorded that, as the first number among its inputs,
    which come before or after the tensors: ``RECORD_PARAM_COMMS`` in ParamCommsUtils.hpp.
    """
    sequence = recorded.sequence[recorded.of_operators(links, rows)]
    host, operator = links.host, links.op_row[rows]
    records = host.named(lambda n: n == "record_param_comms")
    lacking = (sequence < 0) & pick(records, operator, otherwise=False)
    unread = operator[lacking]
    if len(unread):
        (kinds, types), (codes, inputs) = host.input_types, host.concrete_inputs
        first, alike = distinct_rows([kinds[unread], codes[unread]])
        numbers = [
            _read(_first_number, [types[kinds[r]], inputs[codes[r]]], -1)
            if kinds[r] >= 0 and codes[r] >= 0
            else -1
            for r in unread[first]
        ]
        sequence[lacking] = np.array(numbers, dtype=np.int64)[alike]
    return sequence


def _first_number(kinds: Any, values: Any) -> int:
    """The scalar that leads the inputs, or follows the tensors; -1 where it is not recorded."""
    at = 1 if kinds[0] == "TensorList" else 0
    return int(values[at]) if kinds[at] == "Scalar" else -1


def _event_names(
    links: Links, annotation: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Name of each collective: the backend's own span around the launch knows best."""
    codes, values = links.events.names
    own_codes, marked = links.host.names_of(annotation)
    backend = np.array(
        [names.is_backend_span(v) or v.startswith("gloo:") for v in marked] + [False]
    )
    return np.where(backend[own_codes], own_codes + len(values), codes[rows]), [*values, *marked]


def _with_input(links: Links, span: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Span that recorded each collective's input: its operator, or the backend's own span."""
    operator = links.op_row[rows]
    # The spans whose first input's shape was recorded.
    codes, values = links.host.input_dims
    known = [not v.replace(" ", "").startswith(("[]", "[[]", "[[[]")) for v in values]
    sized = np.array([*known, False])[codes]
    takes = ~pick(sized, operator, otherwise=False) & pick(sized, span, otherwise=False)
    return np.where(takes, span, operator)


class _Recorded:
    """The `collective` table, looked up by device event.

    Attributes:
        alike: per entry, a code that is equal where all but the sequence number is; -1 at the end.
        fields: what was recorded, per code.
        sequence: per entry, -1 where there is none and at the end.
    """

    def __init__(self, table: pa.Table) -> None:
        texts = [strings(table, name) for name in _Fields.__slots__[:4]]
        numbers = [ints(table, name) for name in _Fields.__slots__[4:]]
        first, alike = distinct_rows([*(codes for codes, _ in texts), *numbers])
        self.alike = np.append(alike, -1)
        self.fields = [
            _Fields(
                *(values[c[row]] if c[row] >= 0 else None for c, values in texts),
                *(int(v[row]) if v[row] >= 0 else None for v in numbers),
            )
            for row in first
        ]
        self.sequence = np.append(ints(table, "sequence_id"), -1)
        source, sources = strings(table, "source")
        self._of_device = np.array([s == "device_event" for s in sources] + [False])[source]
        self._row = ints(table, "row")

    def of_events(self, links: Links, rows: np.ndarray) -> np.ndarray:
        """Entry of each event: its own, or its operator's; -1 for none."""
        own_entries = self._entries(self._of_device, rows)
        return np.where(own_entries >= 0, own_entries, self.of_operators(links, rows))

    def of_operators(self, links: Links, rows: np.ndarray) -> np.ndarray:
        """Entry of each event's operator; -1 for none."""
        return self._entries(~self._of_device, links.op_row[rows])

    def _entries(self, of: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        entries = np.flatnonzero(of)
        return pick(entries, first_with(self._row[entries], wanted))


@dataclass(frozen=True, slots=True)
class _Fields:
    """Columns of one entry of the `collective` table: first four texts, then numbers."""

    collective: str | None = None
    dtype: str | None = None
    group_name: str | None = None
    group_ranks: str | None = None
    in_elements_count: int | None = None
    out_elements_count: int | None = None
    group_size_count: int | None = None
    first_rank_id: int | None = None
    rank_stride_count: int | None = None
    source_rank_id: int | None = None
    target_rank_id: int | None = None


@dataclass(frozen=True, slots=True)
class _Describing:
    """Kinds of events as the trace of a rank describes them."""

    inputs: RankTables

    def by_metadata(self, entry: _Fields, name: str) -> Kind:
        """Kind of events whose collective was recorded."""
        what = _normalized(entry.collective or name)
        group, members = entry.group_name, self._members(entry)
        size = len(members) or entry.group_size_count
        width = _ELEMENT_BYTES.get((entry.dtype or "").lower())
        sent, received = entry.in_elements_count or 0, entry.out_elements_count or 0
        elements = max(sent, received)
        # More than fits an address space is a damaged record.
        elements = elements if elements < _ELEMENTS_MAX else 0
        message = elements * width if width and elements else None
        if what == POINT_TO_POINT:
            return self._pair(entry, name, group, members, message)
        if what in _SHARED and sent == received and size != 1:
            message = None
        if size is None or size < 2 or (members and self.inputs.rank not in members):
            return Kind(what, group, size, members, message)
        element_key = (-1 if what in _UNEVEN else elements) if members else None
        key = Key(members, size, group or "", what, element_key, numbered=True)
        known = width and entry.in_elements_count is not None and sent < _ELEMENTS_MAX
        sent_bytes = sent * width if width and known else None
        return Kind(what, group, size, members, message, key, sent_bytes)

    def placed(self, kind: Kind) -> Kind:
        """Return a kind with the dimension that its group divides."""
        if self.inputs.dimensions is None:
            return kind
        to_all = kind.what == ALL_TO_ALL
        dimension = self.inputs.dimensions.of(kind.group, kind.members, to_all=to_all)
        return replace(kind, dimension=dimension)

    def _members(self, entry: _Fields) -> tuple[int, ...]:
        """Global ranks of a group, empty when they are not known."""
        count = entry.group_size_count
        members = _listed(entry.group_ranks)
        if count is None or len(members) == count:
            return members
        members = self.inputs.process_groups.get(entry.group_name or "", ())
        if len(members) == count:
            return members
        first, stride = entry.first_rank_id, entry.rank_stride_count
        if first is not None and stride is not None and stride > 0 and count > 0:
            return tuple(range(first, first + count * stride, stride))
        return tuple(range(count)) if count == self.inputs.world_size else ()

    def _pair(
        self,
        entry: _Fields,
        name: str,
        group: str | None,
        members: tuple[int, ...],
        message: int | None,
    ) -> Kind:
        """A send or a receive whose peer the metadata has, or the backend's span."""
        source, target = entry.source_rank_id, entry.target_rank_id
        numbered = source is not None and target is not None
        for called in (entry.collective or "", name):
            direction = _PEER.search(called)
            if direction is None:
                continue
            way, peer = direction.groups()
            if way == "send":
                source = self.inputs.rank if source is None else source
            else:
                target = self.inputs.rank if target is None else target
            if peer is not None and members and int(peer) < len(members):
                # The span counts ranks within the group.
                other = members[int(peer)]
                source = other if source is None else source
                target = other if target is None else target
        ends = (source, target)
        if source is None or target is None or source == target or self.inputs.rank not in ends:
            return Kind(POINT_TO_POINT, group, 2, (), message)
        pair = (min(source, target), max(source, target))
        key = Key(pair, 2, group or "", f"send {source}→{target}", -1, numbered)
        return Kind(POINT_TO_POINT, group, 2, pair, message, key)

    def by_names(
        self, name: str, elements: int, first_bytes: int | None, *, output_first: bool
    ) -> Kind:
        """Kind of events whose record has names only and, at best, the operator's first argument.

        That is what goes in, or with ``output_first`` what comes out.
        """
        what = _normalized(name)
        # Of the world, unless the trace lists smaller groups that it might be of.
        world = self.inputs.world_size or 0
        sub_groups = any(len(members) < world for members in self.inputs.process_groups.values())
        if world < 2 or sub_groups:
            return Kind(what, None, None, (), None)
        members = tuple(range(world))
        if what == POINT_TO_POINT:
            return self._pair(_Fields(), name, None, members, first_bytes)
        # What goes into an all-gather, and what comes out of a scatter, is one rank's part.
        is_part = what in (("reducescatter", "scatter") if output_first else ("allgather",))
        size = first_bytes * world if first_bytes is not None and is_part else first_bytes
        key = Key(members, world, "", what, -1 if what in _UNEVEN else elements)
        sent_bytes = None if output_first else first_bytes
        return Kind(what, None, world, members, size, key, sent_bytes)


@lru_cache(maxsize=256)
def _listed(ranks: str | None) -> tuple[int, ...]:
    """Ranks of a group as recorded; empty when they are not, or only in part."""
    try:
        return tuple(sorted(msgspec.json.decode(ranks or "[]", type=list[int])))
    except JSON_ERRORS:
        return ()


def _normalized(name: str) -> str:
    """``gloo:all_gather``, ``_allgather_base``, ``ncclDevKernel_AllGather_…`` → ``allgather``."""
    flat = name.lower().replace("_", "")
    if "sendrecv" in flat or _PEER.search(name.lower()):
        return POINT_TO_POINT
    return next((part for part in _BUS_FACTORS if part in flat), flat[:40])


def _first_input(links: Links, row: int) -> tuple[int, int | None]:
    """(elements, bytes) of a span's first input; -1 and None where not recorded."""
    columns = (links.host.input_dims, links.host.input_types)
    unknown: tuple[int, int | None] = (-1, None)
    if row < 0 or any(codes[row] < 0 for codes, _ in columns):
        return unknown
    return _read(_size, [values[codes[row]] for codes, values in columns], unknown)


def _size(shapes: Any, kinds: Any) -> tuple[int, int | None]:
    """(elements, bytes) of the first of several inputs; -1 and None where it has no size."""
    shape = shapes[0]
    # A list of tensors has a list of shapes.
    listed = bool(shape) and all(isinstance(part, list) for part in shape)
    parts = shape if listed else [shape]
    if not shape or not all(isinstance(n, int) for part in parts for n in part):
        return -1, None
    elements = sum(math.prod(part) for part in parts)
    if not 0 <= elements < _ELEMENTS_MAX:
        return -1, None
    kind = kinds[0][0] if listed and isinstance(kinds[0], list) else kinds[0]
    width = _ELEMENT_BYTES.get(str(kind).lower())
    return elements, elements * width if width else None
