"""The device events of all ranks inside their step windows, as arrays that views group by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, strings

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.attribution import Attribution

_KEY = "analyzers.events"


@dataclass(frozen=True)
class Events:
    """Device events of all ranks that lie in a step window, rank after rank, each in its order.

    Attributes:
        rank: rank of each event.
        row: its row in that rank's `device_event`.
        step: index of its window.
        start_ns, dur_ns: when, and how long it ran.
        device_id, stream_id: where.
        launch_row, op_row: rows of that rank's `host_span`, -1 where there is none.
        kernel, op, phase, work_class: codes and values; code -1 is null.
        work_flop, work_bytes, ideal_ns, roofline_ns: of the work model, NaN where unknown.
        math: model math (a product, convolution or attention).
        modelled: math or memory-bound work; the work model knows the operator.
        dtype: codes and values of the arithmetic; code -1 is unknown.
    """

    rank: np.ndarray
    row: np.ndarray
    step: np.ndarray
    start_ns: np.ndarray
    dur_ns: np.ndarray
    device_id: np.ndarray
    stream_id: np.ndarray
    launch_row: np.ndarray
    op_row: np.ndarray
    kernel: tuple[np.ndarray, list[str]]
    op: tuple[np.ndarray, list[str]]
    phase: tuple[np.ndarray, list[str]]
    work_class: tuple[np.ndarray, list[str]]
    work_flop: np.ndarray
    work_bytes: np.ndarray
    ideal_ns: np.ndarray
    roofline_ns: np.ndarray
    math: np.ndarray
    modelled: np.ndarray
    dtype: tuple[np.ndarray, list[str]]

    def __len__(self) -> int:
        return len(self.row)


def of_run(attribution: Attribution) -> Events:
    """The events of an attributed run; joined once, then kept with the attribution."""
    cache = attribution._cache
    if _KEY not in cache:
        cache[_KEY] = _joined(attribution)
    found: Events = cache[_KEY]
    return found


def _joined(attribution: Attribution) -> Events:
    found = [_of_rank(attribution, rank) for rank in attribution.run.ranks]
    parts = [p for p in found if p is not None]
    texts = pa.concat_tables([p.texts for p in parts]) if parts else _NO_TEXTS
    dtypes = sorted({name for p in parts for name in p.dtypes})
    code = {name: i for i, name in enumerate(dtypes)}
    dtype = [np.array([*(code[n] for n in p.dtypes), -1], dtype=np.int64)[p.dtype] for p in parts]

    def joined(get: Callable[[_RankEvents], np.ndarray], kind: Any = np.int64) -> np.ndarray:
        return np.concatenate([get(p) for p in parts]) if parts else np.zeros(0, kind)

    def numbers(name: str, kind: Any = np.int64) -> np.ndarray:
        return joined(lambda p: p.numbers[name], kind)

    return Events(
        **{n: numbers(n) for n in _INTEGERS},
        kernel=strings(texts, "kernel"),
        op=strings(texts, "op"),
        phase=strings(texts, "phase"),
        work_class=strings(texts, "work_class"),
        **{n: numbers(n, np.float64) for n in _FLOATS},
        math=numbers("math", np.bool_),
        modelled=numbers("modelled", np.bool_),
        dtype=(np.concatenate(dtype) if dtype else np.zeros(0, np.int64), dtypes),
    )


_INTEGERS = (
    "rank",
    "row",
    "step",
    "start_ns",
    "dur_ns",
    "device_id",
    "stream_id",
    "launch_row",
    "op_row",
)
_FLOATS = ("work_flop", "work_bytes", "ideal_ns", "roofline_ns")
_TEXT = pa.dictionary(pa.int32(), pa.string())
_NO_TEXTS = pa.schema(
    [(name, _TEXT) for name in ("kernel", "op", "phase", "work_class")]
).empty_table()


@dataclass(frozen=True)
class _RankEvents:
    numbers: dict[str, np.ndarray]
    texts: pa.Table
    dtype: np.ndarray
    dtypes: list[str] = field(default_factory=list)


def _of_rank(attribution: Attribution, rank: int) -> _RankEvents | None:
    links = attribution.links.get(rank)
    events = attribution.run.table(rank, "device_event")
    if links is None or not links.num_rows:
        return None
    row = np.flatnonzero(links["step_index"].is_valid().to_numpy())
    work = attribution.work.get(rank)
    unknown = np.full(len(row), np.nan)
    numbers = {
        "rank": np.full(len(row), rank, dtype=np.int64),
        "row": row,
        "step": ints(links, "step_index")[row],
        "launch_row": ints(links, "launch_row")[row],
        "op_row": ints(links, "op_row")[row],
        "math": np.zeros(len(row), dtype=np.bool_) if work is None else work.math[row],
    }
    numbers["modelled"] = numbers["math"] if work is None else (work.math | work.vector)[row]
    for name in ("start_ns", "dur_ns", "device_id", "stream_id"):
        numbers[name] = ints(events, name)[row]
    for name in _FLOATS:
        numbers[name] = unknown if work is None else getattr(work, name)[row]
    taken = pa.array(row)
    texts = pa.table(
        {
            "kernel": events["name"].take(taken),
            "op": links["op"].take(taken),
            "phase": links["phase"].take(taken),
            "work_class": links["work_class"].take(taken),
        }
    )
    if work is None:
        return _RankEvents(numbers, texts, np.full(len(row), -1, dtype=np.int64))
    return _RankEvents(numbers, texts, work.dtype[row], work.dtypes)


@dataclass(frozen=True)
class Grouped:
    """Exact statistics of integer values by group, groups in order of their key.

    Attributes:
        first: an index of each group's members, the first in the given order.
        group: group of each value.
        count, sum, min, max: as named.
        median: of an even number, half-way between the two in the middle, rounded down.
        mean, std: rounded; std is the sample's (n − 1), 0 for one value.
    """

    first: np.ndarray
    group: np.ndarray
    count: np.ndarray
    sum: np.ndarray
    min: np.ndarray
    max: np.ndarray
    median: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def grouped(keys: list[np.ndarray], values: np.ndarray) -> Grouped:
    """Group ``values`` by several integer keys of the same length."""
    group, first = group_of(keys)
    count = np.bincount(group, minlength=len(first))
    order = np.lexsort((values, group))
    ordered = values[order]
    begin = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int64)
    if not len(first):
        none = np.zeros(0, np.int64)
        return Grouped(first, group, none, none, none, none, none, none, none)
    total = np.add.reduceat(ordered, begin)
    mean = total / count
    squares = np.add.reduceat((ordered - np.repeat(mean, count)) ** 2, begin)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    return Grouped(
        first,
        group,
        count,
        total,
        ordered[begin],
        ordered[begin + count - 1],
        (ordered[begin + (count - 1) // 2] + ordered[begin + count // 2]) // 2,
        np.rint(mean).astype(np.int64),
        np.rint(std).astype(np.int64),
    )


def group_of(keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Dense group of each row by several integer keys, and the first row of each group."""
    if not len(keys[0]):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    code = np.zeros(len(keys[0]), dtype=np.int64)
    size = 1
    for key in keys:
        low = int(key.min())
        width = int(key.max()) - low + 1
        if size * width >= 1 << 62:
            code = np.unique(code, return_inverse=True)[1]
            size = int(code.max()) + 1
        code = code * width + (key - low)
        size *= width
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    return group, first


def busy_of(group: np.ndarray, size: int, start_ns: np.ndarray, dur_ns: np.ndarray) -> np.ndarray:
    """Length of the union of each group's intervals: what overlaps within it counts once."""
    busy = np.zeros(size, dtype=np.int64)
    if not len(group):
        return busy
    order = np.lexsort((start_ns, group))
    start, end, of = start_ns[order], (start_ns + dur_ns)[order], group[order]
    begins = np.concatenate([[True], of[1:] != of[:-1]])
    latest = running_max(end, begins)
    before = np.where(begins, start, np.concatenate([start[:1], latest[:-1]]))
    np.add.at(busy, of, np.maximum(end - np.maximum(start, before), 0))
    return busy


def running_max(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Cumulative maximum that begins anew where ``begins`` is set, as it is at the first value."""
    low = int(values.min())
    # Shifted by more than their range per group, groups cannot see each other's maxima.
    width = int(values.max()) - low + 1
    group = np.cumsum(begins) - 1
    if int(group[-1] + 1) * width >= 1 << 62:
        return _running_max_by_group(values, np.flatnonzero(begins))
    shifted = values - low + group * width
    out: np.ndarray = np.maximum.accumulate(shifted) - group * width + low
    return out


def _running_max_by_group(values: np.ndarray, begin: np.ndarray) -> np.ndarray:
    parts = np.split(values, begin[1:])
    return np.concatenate([np.maximum.accumulate(p) for p in parts])
