"""Match the same collective on all ranks: who came last, and when the transfer could begin.

By process group and sequence number where they are recorded. Else by time: no rank can leave a
collective before every rank has entered it, so the instances of one collective overlap. A dropped
event therefore shifts nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.columns import ints, strings
from chopper.analyzers.links import COMMUNICATION

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.links import Links

# Part of the normalized name → (k, whether (n - 1)/n scales it): busbw = algbw · k · (n - 1)/n,
# as in nccl-tests' PERFORMANCE.md. Looked for in this order.
_BUS_FACTORS: dict[str, tuple[int, bool]] = {
    "allreduce": (2, True),
    "reducescatter": (1, True),
    "allgather": (1, True),
    "alltoall": (1, True),
    "broadcast": (1, False),
    "reduce": (1, False),
}
_UNEVEN = frozenset(("alltoall",))
"""Ranks may send different amounts in these: the size tells no instance from another."""
_ELEMENT_BYTES = {
    "double": 8,
    "float": 4,
    "float32": 4,
    "float64": 8,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "long": 8,
    "long int": 8,
    "int64": 8,
    "int": 4,
    "int32": 4,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Communication:
    """The collectives of one rank, one row per communication event.

    Attributes:
        event_row: device event.
        key: what two ranks' rows must share to be the same collective: (group, sequence number or
            -1, normalized name, elements or -1).
        bus_bytes: bytes times nccl-tests' bus factor, NaN where unknown.
    """

    event_row: np.ndarray
    key: list[tuple[str, int, str, int]]
    bus_bytes: np.ndarray


def describe(links: Links, collective: pa.Table, world_size: int | None) -> Communication:
    """What is recorded about each communication event of a rank. COLLECTIVE -> Communication."""
    rows = np.flatnonzero(links.work_class == COMMUNICATION)
    names_codes, name_values = links.events.names
    source_codes, source_values = strings(collective, "source")
    metadata: dict[tuple[str, int], int] = {}
    recorded_rows = ints(collective, "row")
    for index, (code, row) in enumerate(zip(source_codes, recorded_rows, strict=True)):
        metadata[source_values[code], int(row)] = index
    columns = {
        c: collective[c].to_pylist()
        for c in (
            "collective",
            "in_elements_count",
            "out_elements_count",
            "dtype",
            "group_size_count",
            "group_name",
            "group_ranks",
            "sequence_id",
        )
    }
    dims = strings(links.host.table, "input_dims") if len(links.host) else None
    types = strings(links.host.table, "input_types") if len(links.host) else None
    key: list[tuple[str, int, str, int]] = []
    bus = np.full(len(rows), np.nan)
    for position, event in enumerate(rows):
        i = metadata.get(("device_event", int(event)))
        if i is None:
            i = metadata.get(("host_span", int(links.op_row[event])))
        name = name_values[names_codes[event]]
        if i is None:
            span = int(links.op_row[event])
            what = _normalized(name)
            elements, size = -1, None
            if span >= 0 and dims is not None and types is not None:
                elements, size = _first_input(dims, types, span)
            key.append(("", -1, what, -1 if what in _UNEVEN else elements))
            # gloo's spans carry the input: an all-gather's input is one rank's part.
            if size is not None and world_size and what == "allgather":
                size *= world_size
            bus[position] = _bus_bytes(what, size, world_size)
            continue
        what = _normalized(columns["collective"][i] or name)
        group = f"{columns['group_name'][i]}:{columns['group_ranks'][i]}"
        sequence = columns["sequence_id"][i]
        inputs = columns["in_elements_count"][i]
        outputs = columns["out_elements_count"][i]
        width = _ELEMENT_BYTES.get((columns["dtype"][i] or "").lower())
        elements = max(inputs or 0, outputs or 0)
        told = sequence is not None or what in _UNEVEN
        key.append(
            (group, -1 if sequence is None else int(sequence), what, -1 if told else elements)
        )
        size = elements * width if width and elements else None
        bus[position] = _bus_bytes(what, size, columns["group_size_count"][i] or world_size)
    return Communication(rows, key, bus)


def _normalized(name: str) -> str:
    """``gloo:all_gather``, ``_allgather_base``, ``ncclDevKernel_AllGather_…`` → ``allgather``."""
    flat = name.lower().replace("_", "")
    return next((part for part in _BUS_FACTORS if part in flat), flat[:40])


def _bus_bytes(name: str, size: int | None, ranks: int | None) -> float:
    if size is None or not ranks or ranks < 2:
        return float("nan")
    if name not in _BUS_FACTORS:
        return float("nan")
    times, shared = _BUS_FACTORS[name]
    return size * times * ((ranks - 1) / ranks if shared else 1.0)


def _first_input(
    dims: tuple[np.ndarray, list[str]], types: tuple[np.ndarray, list[str]], row: int
) -> tuple[int, int | None]:
    """(elements, bytes) of a span's first input; -1 and None where not recorded."""
    import msgspec

    if dims[0][row] < 0 or types[0][row] < 0:
        return -1, None
    try:
        shapes = msgspec.json.decode(dims[1][dims[0][row]])
        kinds = msgspec.json.decode(types[1][types[0][row]])
        shape = shapes[0]
        if not shape or not all(isinstance(n, int) for n in shape):
            return -1, None
        elements = math.prod(shape)
        width = _ELEMENT_BYTES.get(str(kinds[0]).lower())
    except (msgspec.DecodeError, RecursionError, IndexError, KeyError, TypeError):
        return -1, None
    if not 0 <= elements < 1 << 60:
        return -1, None
    return elements, elements * width if width else None


@dataclass(frozen=True, slots=True)
class Matched:
    """Per rank, per device event.

    Attributes:
        ready_ns: when the last rank entered the event's collective; -1 where it is not matched on
            all ranks of its group.
        last_rank: the rank that came last; -1 likewise.
    """

    ready_ns: np.ndarray
    last_rank: np.ndarray


def match(
    ranks: list[tuple[int, Links, Communication]], world_size: int | None
) -> dict[int, Matched]:
    """Match collectives over the ranks of a run.

    A collective counts as matched when every rank of its group (as recorded, else the world) is
    here and took part.
    """
    result = {
        rank: Matched(
            np.full(len(links.events), -1, dtype=np.int64),
            np.full(len(links.events), -1, dtype=np.int64),
        )
        for rank, links, _ in ranks
    }
    if len(ranks) < 2:
        return result
    by_key: dict[tuple[str, int, str, int], dict[int, list[int]]] = defaultdict(dict)
    links_of = {rank: links for rank, links, _ in ranks}
    for rank, _, communication in ranks:
        for event, key in zip(communication.event_row, communication.key, strict=True):
            by_key[key].setdefault(rank, []).append(int(event))
    for key, members in by_key.items():
        wanted = _group_members(key[0]) or (set(range(world_size)) if world_size else set(links_of))
        if len(wanted) < 2 or not wanted <= set(members):
            continue
        chosen = {r: np.array(members[r]) for r in sorted(wanted)}
        for instance in _instances(chosen, links_of):
            starts = {r: int(links_of[r].events.start_ns[e]) for r, e in instance.items()}
            last = max(starts, key=lambda r: starts[r])
            for rank, event in instance.items():
                result[rank].ready_ns[event] = starts[last]
                result[rank].last_rank[event] = last
    return result


def _group_members(group: str) -> set[int] | None:
    import msgspec

    ranks = group.partition(":")[2]
    try:
        members = msgspec.json.decode(ranks)
    except msgspec.DecodeError:
        return None
    if isinstance(members, list) and all(isinstance(m, int) for m in members) and members:
        return set(members)
    return None


def _instances(members: dict[int, np.ndarray], links: dict[int, Links]) -> list[dict[int, int]]:
    """Group events of equal key into collectives: those that overlap on all ranks.

    Walks all ranks in time order. The candidates are each rank's next event; when they have a
    moment in common they are one collective, else the one that ends first has lost its partners.
    """
    at = dict.fromkeys(members, 0)
    found: list[dict[int, int]] = []
    while all(at[r] < len(members[r]) for r in members):
        heads = {r: int(members[r][at[r]]) for r in members}
        start = {r: int(links[r].events.start_ns[e]) for r, e in heads.items()}
        end = {r: int(links[r].events.end_ns[e]) for r, e in heads.items()}
        if max(start.values()) <= min(end.values()):
            found.append(heads)
            for r in members:
                at[r] += 1
        else:
            at[min(end, key=lambda r: end[r])] += 1
    return found
