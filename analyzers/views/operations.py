"""Operations by unique arguments, operators by name, kernels by name.

A call's time is the time in which device events that it launched itself (as their innermost
operator) ran: their union, as TraceLens' *direct kernel time* has it. What others ran beside them
counts in full, so the sums over calls can exceed the attributed time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import dictionary, nullable, strings
from chopper.analyzers.views.events import Events, Grouped, busy_of, group_of, grouped, of_run
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

_KEY = "analyzers.operations.calls"
_ARGUMENTS = ("input_dims", "input_types", "concrete_inputs")


def operations(attribution: Attribution) -> pa.Table:
    """Calls of operators with the same arguments in the same phase, most time first.

    EVENT_LINK, DEVICE_EVENT, HOST_SPAN -> OPERATIONS. An operator's call is one row of
    `host_span`; its time is that of all events that it launched. Events without an operator are
    one row per phase, each event a call.
    """
    events = of_run(attribution)
    if not len(events):
        return TABLES["operations"].empty()
    calls = _calls(attribution, events)
    arguments = _arguments(attribution, events, calls.first)
    keys = [codes[calls.first] for codes, _ in (events.op, events.phase)]
    found = grouped([*keys, *(codes for codes, _ in arguments)], calls.busy_ns)
    order = np.argsort(-found.sum, kind="stable")
    one = calls.first[found.first]
    work = _Work(events, found.group[calls.group], len(found.first))
    columns = {
        "op": (events.op[0][one], events.op[1]),
        **{
            name: (codes[found.first], values)
            for name, (codes, values) in zip(_ARGUMENTS, arguments, strict=True)
        },
        "phase": (events.phase[0][one], events.phase[1]),
    }
    return _table("operations", columns, found, work, order, by_call=True)


def operators(attribution: Attribution) -> pa.Table:
    """Calls of operators by name, most time first. EVENT_LINK, DEVICE_EVENT -> OPERATORS."""
    events = of_run(attribution)
    if not len(events):
        return TABLES["operators"].empty()
    calls = _calls(attribution, events)
    op, names = events.op
    found = grouped([op[calls.first]], calls.busy_ns)
    order = np.argsort(-found.sum, kind="stable")
    work = _Work(events, found.group[calls.group], len(found.first))
    kernel_count = np.bincount(found.group[calls.group], minlength=len(found.first))
    return _table(
        "operators",
        {"op": (op[calls.first[found.first]], names)},
        found,
        work,
        order,
        kernel_count=kernel_count,
    )


def kernels(attribution: Attribution) -> pa.Table:
    """Device events by name and the operator that launched them. DEVICE_EVENT -> KERNELS."""
    events = of_run(attribution)
    if not len(events):
        return TABLES["kernels"].empty()
    found = grouped([events.kernel[0], events.op[0]], events.dur_ns)
    order = np.argsort(-found.sum, kind="stable")
    columns = {
        name: (codes[found.first], values)
        for name, (codes, values) in (
            ("kernel", events.kernel),
            ("op", events.op),
            ("work_class", events.work_class),
        )
    }
    return _table("kernels", columns, found, None, order)


@dataclass(frozen=True)
class _Calls:
    """Calls of operators.

    Attributes:
        first: an event of each call.
        group: call of each event.
        busy_ns: time of each call.
    """

    first: np.ndarray
    group: np.ndarray
    busy_ns: np.ndarray


def _calls(attribution: Attribution, events: Events) -> _Calls:
    """Events of the same operator's call; an event without an operator is a call of its own."""
    cache = attribution._cache
    if _KEY not in cache:
        alone = events.op_row < 0
        group, first = group_of([events.rank, np.where(alone, -1 - events.row, events.op_row)])
        busy = busy_of(group, len(first), events.start_ns, events.dur_ns)
        cache[_KEY] = _Calls(first, group, busy)
    found: _Calls = cache[_KEY]
    return found


def _arguments(
    attribution: Attribution, events: Events, rows: np.ndarray
) -> list[tuple[np.ndarray, list[str]]]:
    """Recorded arguments of the operators that launched ``rows`` of the events."""
    parts = []
    place = []
    for rank in np.unique(events.rank[rows]):
        mine = np.flatnonzero(events.rank[rows] == rank)
        op_row = events.op_row[rows[mine]]
        spans = attribution.run.table(int(rank), "host_span").select(list(_ARGUMENTS))
        parts.append(spans.take(pa.array(op_row, mask=op_row < 0)))
        place.append(mine)
    table = pa.concat_tables(parts)
    back = np.argsort(np.concatenate(place), kind="stable")
    found = []
    for name in _ARGUMENTS:
        codes, values = strings(table, name)
        texts = [_compact(v) for v in values]
        distinct = sorted(set(texts))
        code = {text: i for i, text in enumerate(distinct)}
        same = np.array([*(code[t] for t in texts), -1], dtype=np.int64)
        found.append((same[codes[back]], distinct))
    return found


def _compact(text: str) -> str:
    """JSON without white space; what is not JSON as it is."""
    try:
        return msgspec.json.format(text, indent=-1)
    except (msgspec.DecodeError, UnicodeError):
        return text


class _Work:
    """Modelled work of groups of events, null where it is not known of all of their products."""

    def __init__(self, events: Events, group: np.ndarray, size: int) -> None:
        self.flop = _known_sum(events.work_flop, events.modelled, group, size)
        self.bytes = _known_sum(events.work_bytes, events.modelled, group, size)
        self.ideal_ns = _known_sum(events.ideal_ns, events.math, group, size)
        self.roofline_ns = _known_sum(events.roofline_ns, events.modelled, group, size)
        codes, self.dtypes = events.dtype
        self.dtype = np.full(size, -1, dtype=np.int64)
        if self.dtypes:
            known = codes >= 0
            width = len(self.dtypes)
            time = np.bincount(
                group[known] * width + codes[known],
                weights=events.dur_ns[known],
                minlength=size * width,
            ).reshape(size, width)
            # Arguments tell the type, and the kernel which arithmetic stands in for it: most time.
            self.dtype = np.where(time.any(axis=1), time.argmax(axis=1), -1)


def _known_sum(values: np.ndarray, of: np.ndarray, group: np.ndarray, size: int) -> np.ndarray:
    """Sum by group over the events ``of``; NaN for groups with none, or with one unknown."""
    total: np.ndarray = np.bincount(group[of], weights=values[of], minlength=size)
    some = np.bincount(group[of], minlength=size) > 0
    return np.where(some, total, np.nan)


def _table(
    name: str,
    texts: dict[str, tuple[np.ndarray, list[str]]],
    found: Grouped,
    work: _Work | None,
    order: np.ndarray,
    *,
    kernel_count: np.ndarray | None = None,
    by_call: bool = False,
) -> pa.Table:
    total = int(found.sum.sum())
    columns: dict[str, pa.Array] = {
        key: dictionary(codes[order], values) for key, (codes, values) in texts.items()
    }
    columns |= {
        "call_count": pa.array(found.count[order]),
        "time_ns": pa.array(found.sum[order]),
        "share_ratio": pa.array(
            found.sum[order] / total if total else np.full(len(order), np.nan), from_pandas=True
        ),
        "mean_ns": pa.array(found.mean[order]),
        "median_ns": pa.array(found.median[order]),
        "min_ns": pa.array(found.min[order]),
        "max_ns": pa.array(found.max[order]),
        "std_ns": pa.array(found.std[order]),
    }
    if kernel_count is not None:
        columns["kernel_count"] = pa.array(kernel_count[order])
    if work is not None:
        columns |= _work_columns(found, work, order, found.count if by_call else 1)
    declared = TABLES[name]
    return pa.table([columns[f.name] for f in declared.arrow], schema=declared.arrow)


def _work_columns(
    found: Grouped, work: _Work, order: np.ndarray, divisor: np.ndarray | int
) -> dict[str, pa.Array]:
    seconds = np.where(found.sum > 0, found.sum, np.nan) / 1e9

    def whole(values: np.ndarray) -> pa.Array:
        each = (values / divisor)[order]
        return nullable(np.where(np.isnan(each), -1, np.rint(np.nan_to_num(each))))

    def floats(values: np.ndarray) -> pa.Array:
        return pa.array(values[order], from_pandas=True)

    with np.errstate(divide="ignore", invalid="ignore"):
        intensity = np.where(work.bytes > 0, work.flop / work.bytes, np.nan)
    return {
        "dtype": dictionary(work.dtype[order], work.dtypes),
        "math_flop": whole(work.flop),
        "traffic_bytes": whole(work.bytes),
        "compute_rate_flop_per_s": floats(work.flop / seconds),
        "memory_rate_bytes_per_s": floats(work.bytes / seconds),
        "flop_per_byte": floats(intensity),
        "ideal_ns": whole(work.ideal_ns),
        "roofline_ns": whole(work.roofline_ns),
    }
