"""An attributed run as execution traces of Chakra, for simulators of systems (ASTRA-sim)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints, pick, strings
from chopper.collectors.formats.chakra import COLLECTIVE, COMPUTE, RECEIVE, SEND, Node, encode

_TYPES = ("allreduce", "reduce", "allgather", "gather", "scatter", "broadcast", "alltoall")
_COMM_TYPES = {name: number for number, name in enumerate((*_TYPES, "reducescatter"))}
"""Collectives, as ``CollectiveCommType`` of et_def.proto numbers them."""


def write_chakra(run: Attribution, rank: int, path: Path) -> None:
    """Write the operators and device events of a rank, with all its steps.

    An event depends on the operator that launched it and on the event before it on its stream, an
    operator on the one before it on its thread. Times are cut to whole µs.
    """
    with path.open("wb") as file:
        file.writelines(encode(_nodes(run.all_steps, rank)))


def _nodes(run: Attribution, rank: int) -> Iterator[Node]:
    joined, link = run.joined[rank], run.links[rank]
    host, events = joined.host_span, joined.device_event
    # Without a device, the events are the operators.
    op_row = np.full(events.num_rows, -1) if joined.host_only else ints(link, "op_row")
    operators = np.unique(op_row[op_row >= 0])
    # Numbered by time; where an operator and an event begin together, the operator comes first.
    start_ns = np.concatenate([ints(host, "start_ns")[operators], ints(events, "start_ns")])
    dur_ns = np.concatenate([ints(host, "dur_ns")[operators], ints(events, "dur_ns")])
    lane = np.concatenate([ints(host, "tid")[operators], ints(events, "stream_id")])
    names = [*_texts(host, operators), *_texts(events, np.arange(events.num_rows))]
    order = np.argsort(start_ns, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    count = len(operators)
    issuing = np.full(len(order), -1, dtype=np.int64)
    at = np.searchsorted(operators, op_row)
    issuing[count:] = pick(number[:count], np.where(op_row >= 0, at, -1))
    communication = _communication(run, rank)
    last: dict[tuple[bool, int], int] = {}
    for row in order.tolist():
        on_host, key = row < count, (row < count, int(lane[row]))
        before = [last[key]] if key in last else []
        last[key] = int(number[row])
        kind, attributes = communication.get(row - count, (COMPUTE, {}))
        start = int(start_ns[row]) // 1000
        yield Node(
            id=int(number[row]),
            name=names[row],
            kind=kind,
            data_deps=[*before, *([int(issuing[row])] if issuing[row] >= 0 else [])],
            runtime=int(start_ns[row] + dur_ns[row]) // 1000 - start,
            start=start,
            is_cpu_op=on_host or joined.host_only,
            tid=int(lane[row]),
            attributes=attributes,
        )


def _texts(table: pa.Table, rows: np.ndarray) -> list[str]:
    codes, values = strings(table, "name")
    return [values[code] for code in codes[rows].tolist()]


def _communication(run: Attribution, rank: int) -> dict[int, tuple[int, dict[str, int | str]]]:
    """Return type and attributes of the communication events of a rank, by their rows."""
    found: dict[int, tuple[int, dict[str, int | str]]] = {}
    table = run.communication
    columns = ("event_row", "collective", "group", "message_bytes")
    mine = table.filter(ints(table, "rank") == rank).select(columns)
    names = strings(run.joined[rank].device_event, "name")
    for row in mine.to_pylist():
        attributes = {"comm_size": row["message_bytes"], "pg_name": row["group"]}
        kind = COLLECTIVE
        if row["collective"] == "sendrecv":
            kind = RECEIVE if "recv" in names[1][names[0][row["event_row"]]].lower() else SEND
        else:
            attributes["comm_type"] = _COMM_TYPES.get(row["collective"])
        known = {name: value for name, value in attributes.items() if value is not None}
        found[row["event_row"]] = kind, known
    return found
