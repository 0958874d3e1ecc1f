"""Match the same collective on all ranks: who came last, and when the transfer could begin.

By process group and sequence number where they are recorded. Else by time: no rank can leave a
collective before every rank has entered it, so the instances of one collective overlap. A dropped
event therefore shifts nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from chopper.analyzers.columns import ints, strings
from chopper.analyzers.links import COMMUNICATION

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_POINT_TO_POINT = frozenset(("sendrecv",))
"""No collective: two ranks, in one direction."""
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
class Key:
    """What two ranks' events must share to be of the same collective.

    Attributes:
        members: global ranks of the group; empty where neither the event nor the trace tells.
        group: name of the group as recorded.
        sequence: number within the group, -1 where not recorded.
        what: normalized name of the collective.
        elements: size of the message, -1 where it is unknown or may differ between ranks.
    """

    members: tuple[int, ...]
    group: str
    sequence: int
    what: str
    elements: int


@dataclass(frozen=True, slots=True)
class Communication:
    """The collectives of one rank, one row per communication event.

    Attributes:
        event_row: device event.
        key: what makes it the same as another rank's; None for what is no collective of a known
            group (point-to-point, groups of unknown members).
        bus_bytes: bytes times nccl-tests' bus factor, NaN where unknown.
    """

    event_row: np.ndarray
    key: list[Key | None]
    bus_bytes: np.ndarray


def describe(
    links: Links,
    collective: pa.Table,
    world_size: int | None,
    groups: Mapping[str, tuple[int, ...]],
) -> Communication:
    """What is recorded about each communication event of a rank. COLLECTIVE -> Communication.

    Args:
        links: the rank's joined events.
        collective: recorded metadata.
        world_size: ranks of the run, None when not known.
        groups: process groups by name, with their ranks, as far as the trace lists them.
    """
    rows = np.flatnonzero(links.work_class == COMMUNICATION)
    source_codes, source_values = strings(collective, "source")
    recorded = {
        (source_values[code], int(row)): entry
        for code, row, entry in zip(
            source_codes,
            ints(collective, "row"),
            collective.drop_columns(["source", "row"]).to_pylist(),
            strict=True,
        )
    }
    key: list[Key | None] = []
    bus = np.full(len(rows), np.nan)
    for position, event in enumerate(rows):
        found = recorded.get(("device_event", int(event)))
        if found is None:
            found = recorded.get(("host_span", int(links.op_row[event])))
        if found is None:
            made, size = _from_names(links, int(event), world_size, groups)
        else:
            made, size = _from_metadata(found, _event_name(links, int(event)), world_size, groups)
        key.append(made)
        if made is not None and size is not None:
            bus[position] = _bus_bytes(made.what, size, len(made.members) or world_size)
    return Communication(rows, key, bus)


def _event_name(links: Links, event: int) -> str:
    """Name of the collective: the backend's own span around the launch knows best."""
    codes, values = links.annotations
    if codes[event] >= 0 and values[codes[event]].startswith(("nccl:", "rccl:", "gloo:")):
        return values[codes[event]]
    codes, values = links.events.names
    return values[codes[event]]


def _from_metadata(
    found: dict[str, Any], name: str, world_size: int | None, groups: Mapping[str, tuple[int, ...]]
) -> tuple[Key | None, int | None]:
    """(key, bytes) of an event whose collective was recorded."""
    what = _normalized(found["collective"] or name)
    group, count = found["group_name"], found["group_size_count"]
    members = _listed(found["group_ranks"])
    if count is not None and len(members) != count:
        members = groups.get(group or "", ())
        if len(members) != count:
            members = tuple(range(count)) if count == world_size else ()
    elements = max(found["in_elements_count"] or 0, found["out_elements_count"] or 0)
    width = _ELEMENT_BYTES.get((found["dtype"] or "").lower())
    size = elements * width if width and elements else None
    if what in _POINT_TO_POINT or not members:
        return None, size
    sequence = found["sequence_id"]
    told = sequence is not None or what in _UNEVEN
    return Key(
        members, group or "", -1 if sequence is None else sequence, what, -1 if told else elements
    ), size


def _from_names(
    links: Links, event: int, world_size: int | None, groups: Mapping[str, tuple[int, ...]]
) -> tuple[Key | None, int | None]:
    """(key, bytes) of an event of which only names and, at best, the input are recorded."""
    what = _normalized(_event_name(links, event))
    # Of the world, unless the trace lists smaller groups that it might be of.
    world = world_size if world_size is not None else 0
    sub_groups = any(len(members) < world for members in groups.values())
    if what in _POINT_TO_POINT or world < 2 or sub_groups:
        return None, None
    elements, size = -1, None
    row = int(links.op_row[event])
    if row >= 0:
        elements, size = _first_input(links.host.input_dims, links.host.input_types, row)
    # gloo's spans carry the input: an all-gather's input is one rank's part.
    if size is not None and what == "allgather":
        size *= world
    return Key(tuple(range(world)), "", -1, what, -1 if what in _UNEVEN else elements), size


def _listed(ranks: str | None) -> tuple[int, ...]:
    """Ranks of a group as recorded; empty when they are not, or only in part."""
    try:
        members = msgspec.json.decode(ranks or "[]")
    except (msgspec.DecodeError, RecursionError):
        return ()
    if isinstance(members, list) and all(type(m) is int for m in members):
        return tuple(sorted(members))
    return ()


def _normalized(name: str) -> str:
    """``gloo:all_gather``, ``_allgather_base``, ``ncclDevKernel_AllGather_…`` → ``allgather``."""
    flat = name.lower().replace("_", "")
    if "sendrecv" in flat or flat.endswith((":send", ":recv", "send", "recv")):
        return "sendrecv"
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
        ready_ns: when the last rank entered the event's collective, in this rank's clock; -1 where
            it is not matched on all ranks of its group.
        offset_ns: how far this rank's clock is ahead of the others', by when they leave collectives.
    """

    ready_ns: np.ndarray
    offset_ns: int = 0


def match(
    ranks: list[tuple[int, Links, Communication]], *, one_clock: bool = False
) -> dict[int, Matched]:
    """Match collectives over the ranks of a run.

    A collective counts as matched when every rank of its group is here and took part. All ranks
    leave a collective together, so the median difference of their ends is the difference of their
    clocks; it is taken out before anybody is called late.

    Args:
        ranks: (rank, its links, its communication).
        one_clock: the ranks are known to share a clock (one host): ends are not compared.
    """
    links_of = {rank: links for rank, links, _ in ranks}
    instances = [i for i in _all_instances(ranks, links_of) if len(i) > 1]
    offsets = dict.fromkeys(links_of, 0) if one_clock else _clock_offsets(instances, links_of)
    result = {
        rank: Matched(
            np.full(len(links.events), -1, dtype=np.int64),
            offsets[rank],
        )
        for rank, links, _ in ranks
    }
    for instance in instances:
        starts = {r: int(links_of[r].events.start_ns[e]) - offsets[r] for r, e in instance.items()}
        ready = max(starts.values())
        for rank, event in instance.items():
            result[rank].ready_ns[event] = ready + offsets[rank]
    return result


def _all_instances(
    ranks: list[tuple[int, Links, Communication]], links_of: dict[int, Links]
) -> list[dict[int, int]]:
    """Every collective that all ranks of its group took part in, as rank → device event."""
    by_key: dict[Key, dict[int, list[int]]] = defaultdict(dict)
    for rank, _, communication in ranks:
        for event, key in zip(communication.event_row, communication.key, strict=True):
            if key is not None:
                by_key[key].setdefault(rank, []).append(int(event))
    found: list[dict[int, int]] = []
    for key, members in by_key.items():
        if len(key.members) > 1 and set(key.members) <= set(members):
            found += _instances({r: np.array(members[r]) for r in key.members}, links_of)
    return found


def _clock_offsets(instances: list[dict[int, int]], links_of: dict[int, Links]) -> dict[int, int]:
    """Median lead of each rank's clock over the first rank's that it shares collectives with."""
    leads: dict[int, list[int]] = {rank: [] for rank in links_of}
    for instance in instances:
        ends = {r: int(links_of[r].events.end_ns[e]) for r, e in instance.items()}
        reference = ends[min(ends)]
        for rank, end in ends.items():
            leads[rank].append(end - reference)
    return {rank: int(np.median(lead)) if lead else 0 for rank, lead in leads.items()}


def _instances(members: dict[int, np.ndarray], links: dict[int, Links]) -> list[dict[int, int]]:
    """Group events of equal key into collectives: those that overlap on all ranks.

    Walks all ranks in time order. The candidates are each rank's next event; when they have a
    moment in common they are one collective, else the one that ends first has lost its partners.
    """
    starts = {r: links[r].events.start_ns[rows].tolist() for r, rows in members.items()}
    ends = {r: links[r].events.end_ns[rows].tolist() for r, rows in members.items()}
    at = dict.fromkeys(members, 0)
    heads = [(ends[r][0], r) for r in members]
    heapq.heapify(heads)
    latest = max(starts[r][0] for r in members)
    found: list[dict[int, int]] = []
    while True:
        first_end, loser = heads[0]
        if latest <= first_end:
            found.append({r: int(members[r][at[r]]) for r in members})
            for r in members:
                at[r] += 1
            if any(at[r] >= len(starts[r]) for r in members):
                return found
            heads = [(ends[r][at[r]], r) for r in members]
            heapq.heapify(heads)
            latest = max(starts[r][at[r]] for r in members)
            continue
        # Starts grow along a rank, so the latest of the heads can only be raised by this step.
        at[loser] += 1
        if at[loser] >= len(starts[loser]):
            return found
        heapq.heapreplace(heads, (ends[loser][at[loser]], loser))
        latest = max(latest, starts[loser][at[loser]])
