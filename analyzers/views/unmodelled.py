"""Which kernels have no model, no FLOP, no bytes or no peak, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import links_of
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.work import MATH_FAMILIES, matmul_dtype
from chopper.analyzers.work.of_events import operator_work, refined
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.work import Work
    from chopper.attribution import Attribution
    from chopper.hardware.ceilings import Ceiling

CAUSES = ("compute.unmodelled", "compute.no_peak", "compute.vector.no_bytes")
_NO_OPERATOR = "no operator around its launch"
_NO_LAUNCH = "its launch is not in the trace, nor the same kernel with an operator"
_REPLAYED = "replayed by a graph; the same kernel was not seen with an operator"
_NO_MODEL = "no model of its operator"
_IN_WRAPPER = "launched without an operator inside a wrapper"


def unmodelled(attribution: Attribution) -> pa.Table:
    """Computing time without ideal or roofline, by kernel, operator and reason; longest first.

    PIECE, EVENT_LINK, HOST_SPAN, DEVICE_EVENT -> UNMODELLED.
    """
    pieces = attribution.pieces
    cause_codes, cause_names = strings(pieces, "cause")
    computing = np.isin(cause_codes, [i for i, c in enumerate(cause_names) if _computes(c)])
    time_ns = pieces["time_ns"].to_numpy()
    total = int(time_ns[computing].sum())
    wanted = np.isin(cause_codes, [i for i, c in enumerate(cause_names) if c in CAUSES])
    found: dict[tuple[str | None, ...], list[int]] = {}
    rank_of, event_of = ints(pieces, "rank"), ints(pieces, "event_row")
    kernel_codes, kernels = strings(pieces, "kernel")
    op_codes, ops = strings(pieces, "op")
    for rank in np.unique(rank_of[wanted]):
        rows = np.flatnonzero(wanted & (rank_of == rank))
        reason_of, reasons = _reasons(attribution, int(rank), np.unique(event_of[rows]))
        keys = np.stack(
            [cause_codes[rows], kernel_codes[rows], op_codes[rows], reason_of[event_of[rows]]]
        )
        distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
        inverse = inverse.reshape(-1)
        sums = np.zeros(distinct.shape[1], dtype=np.int64)
        np.add.at(sums, inverse, time_ns[rows])
        pairs = np.unique(np.stack([inverse, event_of[rows]]), axis=1)
        counts = np.bincount(pairs[0], minlength=len(sums))
        for (cause, kernel, op, reason), time, count in zip(distinct.T, sums, counts, strict=True):
            key = (
                cause_names[cause],
                kernels[kernel] if kernel >= 0 else None,
                ops[op] if op >= 0 else None,
                reasons[reason],
            )
            entry = found.setdefault(key, [0, 0])
            entry[0] += int(time)
            entry[1] += int(count)
    order = sorted(found, key=lambda key: (-found[key][0], str(key)))
    columns = {
        "kernel": [key[1] for key in order],
        "op": [key[2] for key in order],
        "time_ns": [found[key][0] for key in order],
        "share_ratio": [found[key][0] / total for key in order],
        "reason": [key[3] for key in order],
        "cause": [key[0] for key in order],
        "call_count": [found[key][1] for key in order],
    }
    declared = TABLES["unmodelled"]
    return pa.table({f.name: columns[f.name] for f in declared.arrow}, schema=declared.arrow)


def _computes(cause: str) -> bool:
    return cause.startswith("compute.")


def _reasons(
    attribution: Attribution, rank: int, events: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Why each of ``events`` has no number: codes per event of the rank, and texts."""
    links = links_of(attribution, rank)
    work = attribution.work.get(rank)
    ceilings = attribution.ceilings.get(rank)
    ceiling = None
    if ceilings is not None:
        ceiling = ceilings.theoretical or ceilings.achievable
    texts: dict[str, int] = {}
    codes = np.full(len(links.events), -1, dtype=np.int64)
    like = (
        events
        if work is None
        else np.where(work.like_row[events] >= 0, work.like_row[events], events)
    )
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
    for key in np.unique(keys):
        if key < 0:
            text = _STRUCTURAL[-1 - key]
        else:
            assert operators is not None
            call, own = operators.calls[key // width], operators.works[key // width]
            kernel = name_values[key % width]
            text = _of_work(refined(call, own, kernel), kernel, ceiling)
        codes[events[keys == key]] = texts.setdefault(text, len(texts))
    return codes, list(texts)


_STRUCTURAL = (_NO_MODEL, _NO_OPERATOR, _NO_LAUNCH, _REPLAYED, _IN_WRAPPER)


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
            return "the device's peak is not known"
        return f"no peak known for {dtype}" if dtype else "the type it computed in is not known"
    if work.family not in MATH_FAMILIES and work.bytes_count is not None:
        return "the device's memory bandwidth is not known"
    return (work.reason or "not known").removeprefix("bytes: ")
