"""Kernels whose model, FLOP, bytes or peak are unknown: time and reason.

Over all ranks and steps, by kernel, operator and reason.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.event_work import operator_work, refined
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import dictionary, ints, matching, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.work import MATH_FAMILIES, Work, matmul_dtype
from chopper.hardware.ceilings import Ceiling

_KEYS = ["cause", "kernel", "op", "reason"]
CAUSES = ("compute.unmodelled", "compute.no_peak", "compute.vector.no_bytes")
_STRUCTURAL = (
    "no model of its operator",
    "no enclosing operator",
    "its launch is not in the trace, nor is the same kernel with an operator",
    "replayed by a graph; the same kernel did not run with an operator",
    "launched inside a wrapper, without an operator",
)

VIEW = View(
    "unmodelled",
    __doc__,
    (
        optional("kernel", "Name of the kernel as recorded; null where not recorded."),
        column("time_ns", "Exclusive time attributed to the kernel."),
        optional("share_ratio", "Share of all compute time."),
        column("reason", "Reason why the kernel's work, or its ideal time, is unknown."),
        optional("op", "Operator that launched it; null where none was recorded."),
        column("call_count", "Number of device events."),
        column("cause", "Id of the cause that the time is attributed to."),
    ),
    title="Unmodelled kernels",
    section="Operators",
    needs="every compute kernel has a model, and the device's peaks are known",
)


def unmodelled(run: Attribution) -> pa.Table:
    """PIECE, EVENT_LINK, HOST_SPAN, DEVICE_EVENT -> UNMODELLED, longest first."""
    pieces = run.pieces
    cause, causes = strings(pieces, "cause")
    computing = matching(cause, causes, lambda c: c.startswith("compute."))
    total = int(ints(pieces, "time_ns")[computing].sum())
    pieces = pieces.filter(matching(cause, causes, CAUSES.__contains__))
    rank, event = ints(pieces, "rank"), ints(pieces, "event_row")
    texts: dict[str, int] = {}
    reason = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        reason[mine] = _reasons(run, int(one), np.unique(event[mine]), texts)[event[mine]]
    pieces = pieces.append_column("reason", dictionary(reason, list(texts))).unify_dictionaries()
    # An event may be in several pieces.
    events = pieces.group_by([*_KEYS, "rank", "event_row"]).aggregate([("time_ns", "sum")])
    sums = events.group_by(_KEYS).aggregate([("time_ns_sum", "sum"), ("event_row", "count")])
    rows = sums.rename_columns([*_KEYS, "time_ns", "call_count"]).to_pylist()
    for row in rows:
        row["share_ratio"] = row["time_ns"] / total
    rows.sort(key=lambda r: (-r["time_ns"], str(tuple(r[key] for key in _KEYS))))
    return VIEW.of_rows(rows)


def _reasons(run: Attribution, rank: int, events: np.ndarray, texts: dict[str, int]) -> np.ndarray:
    """Reason code of each event of the rank, -1 for others; adds new reasons to ``texts``."""
    links = run.joined[rank].links()
    work = run.work.get(rank)
    ceilings = run.ceilings.get(rank)
    ceiling = None
    if ceilings is not None:
        ceiling = ceilings.theoretical or ceilings.achievable
    like = events
    if work is not None:
        like = np.where(work.like_row[events] >= 0, work.like_row[events], events)
    structural = _without_operator(links)
    signature = np.full(len(links.events), -1, dtype=np.int64)
    operators = None
    if len(links.host):
        rows = np.unique(links.op_row[like])
        operators = operator_work(links, rows[rows >= 0])
        has = links.op_row[like] >= 0
        row_of = operators.row_of[links.op_row[like[has]]]
        signature[like[has]] = np.where(row_of >= 0, operators.signature[row_of], -1)
    name_codes, name_values = links.events.names
    width = max(len(name_values), 1)
    keys = np.where(
        signature[like] >= 0,
        signature[like] * width + name_codes[like],
        -1 - structural[like],
    )
    codes = np.full(len(links.events), -1, dtype=np.int64)
    for key in np.unique(keys).tolist():
        if key < 0:
            text = _STRUCTURAL[-1 - key]
        else:
            assert operators is not None
            call, own = operators.calls[key // width], operators.works[key // width]
            kernel = name_values[key % width]
            text = _of_work(refined(call, own, kernel), kernel, ceiling)
        codes[events[keys == key]] = texts.setdefault(text, len(texts))
    return codes


def _without_operator(links: Links) -> np.ndarray:
    """Index into _STRUCTURAL for each event, as if no model applied to it."""
    op, launch = links.op_row, links.launch_row
    found = np.where(op < 0, np.where(launch < 0, 2, 1), 0)
    if len(links.host):
        found[(op >= 0) & links.host.named(names.is_wrapper)[op]] = 4
        found[(launch >= 0) & links.host.named(names.is_graph_launch)[launch]] = 3
    return found


def _of_work(work: Work, kernel: str, ceiling: Ceiling | None) -> str:
    if work.family in MATH_FAMILIES and work.flop_count is not None:
        dtype = matmul_dtype(work.dtype, kernel)
        if ceiling is None:
            return "the device's peak is unknown"
        return (
            f"the peak for {dtype} is unknown"
            if dtype
            else "the data type of its arithmetic is unknown"
        )
    if work.family not in MATH_FAMILIES and work.bytes_count is not None:
        return "the device's memory bandwidth is unknown"
    return (work.reason or "not known").removeprefix("bytes: ")
