"""Sampled Python stacks as spans of the thread that they were taken of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.tables import TABLES

_DATA = "chopper::data"
_Said = tuple[bool, str | None, str | None]
"""Whether a sample is of data, its function and what that called."""
_Kind = tuple[tuple[str, int], tuple[str, int]]
"""The regions that begin or end before and after a time."""
_NUMBER = re.compile(r"#?\d+")
_WORKS = re.compile(r"chopper::gc::|(?!chopper::)[A-Za-z_]\w*::")
"""An operator or a collection of garbage, of which a function has all or nothing."""


def with_samples(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Return a rank's tables with what its stacks say between operators. PYTHON_SAMPLE.

    Samples in a row that agree are one span, from half-way to the one before to half-way to the one
    after, cut at the regions (annotations, modules, steps) that begin and end between them; an
    operator is within such a span or outside. Times between regions of the same names that were not
    sampled are shared out as the samples of the others are. Nothing is added to a trace with Python
    stacks.
    """
    host, samples = tables.get("host_span"), tables.get("python_sample")
    if host is None or samples is None or not samples.num_rows:
        return dict(tables)
    category, name = (host[c].combine_chunks() for c in ("category", "name"))
    if "python" in pc.unique(category).to_pylist():
        return dict(tables)
    on_thread = pc.equal(host["tid"], samples["tid"][0])
    works = np.array([_WORKS.match(n) is not None for n in name.dictionary.to_pylist()])[
        name.indices.to_numpy()
    ]
    works &= pc.is_in(category, value_set=pa.array(["cpu_op", "runtime", "driver", "gc"])).to_numpy(
        zero_copy_only=False
    )
    rows = np.flatnonzero(on_thread.to_numpy())
    start_ns = host["start_ns"].to_numpy()
    end_ns = start_ns + host["dur_ns"].to_numpy()
    if not len(rows):
        return dict(tables)
    busy_start, busy_end = _union(start_ns[rows[works[rows]]], end_ns[rows[works[rows]]])
    regions = rows[~works[rows]]
    edges, at = np.unique(np.concatenate([start_ns[regions], end_ns[regions]]), return_index=True)
    free = _snapped(edges, busy_start, busy_end) == edges
    names = name.take(pa.array(regions[at[free] % len(regions)])).to_pylist()
    marks = [
        (_NUMBER.sub("", n), int(i)) for n, i in zip(names, at[free] // len(regions), strict=True)
    ]
    added = _spans(samples.sort_by("time_ns"), edges[free], marks, busy_start, busy_end)
    if not added:
        return dict(tables)
    for row in added:
        row["pid"] = host["pid"][rows[0]].as_py()
    return _merged(tables, TABLES["host_span"].of_rows(added))


def _union(start_ns: np.ndarray, end_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of the union of intervals that are sorted by start."""
    until = np.maximum.accumulate(end_ns)
    first = np.append(True, start_ns[1:] > until[:-1])[: len(start_ns)]
    return start_ns[first], until[np.append(first[1:], True)[: len(start_ns)]]


def _snapped(time_ns: np.ndarray, busy_start: np.ndarray, busy_end: np.ndarray) -> np.ndarray:
    """Return each time, or the end of the work around it."""
    at = np.searchsorted(busy_start, time_ns, side="left") - 1
    ends = np.append(busy_end, 0)[at]
    return np.where((at >= 0) & (ends > time_ns), ends, time_ns)


def _spans(
    samples: pa.Table,
    edges: np.ndarray,
    marks: list[tuple[str, int]],
    busy_start: np.ndarray,
    busy_end: np.ndarray,
) -> list[dict[str, Any]]:
    """Return rows of `host_span`, those that enclose others first.

    Args:
        samples: in the order of time.
        edges: starts and ends of regions.
        marks: the region of each edge, and whether it ends there.
        busy_start, busy_end: of the thread's operators.
    """
    time_ns = samples["time_ns"].to_numpy()
    says = [
        *zip(*(samples[c].to_pylist() for c in ("is_data", "function", "library")), strict=True)
    ]
    segment = np.searchsorted(edges, time_ns, side="right") - 1
    tid = samples["tid"][0].as_py()
    found: list[tuple[int, int, _Said]] = []
    counts: dict[_Kind, Counter[_Said]] = {}
    first = 0
    for i in range(1, len(says) + 1):
        if i < len(says) and segment[i] == segment[i - 1] and says[i] == says[first]:
            continue
        at = int(segment[first])
        if 0 <= at < len(edges) - 1:
            low = edges[at] if first == 0 or segment[first - 1] != at else _middle(time_ns, first)
            high = edges[at + 1] if i == len(says) or segment[i] != at else _middle(time_ns, i)
            found.append((int(low), int(high), says[first]))
            counts.setdefault((marks[at], marks[at + 1]), Counter())[says[first]] += i - first
        first = i
    begin, end = np.searchsorted(edges, time_ns[[0, -1]]).tolist()
    unsampled = np.setdiff1d(np.arange(begin, min(end, len(edges) - 1)), segment)
    found += _shared_out(unsampled.tolist(), edges, marks, counts)
    spans: list[dict[str, Any]] = []
    found.sort(key=lambda one: one[:2])
    bounds = np.array([one[:2] for one in found], dtype=np.int64).reshape(-1, 2)
    bounds = _snapped(bounds, busy_start, busy_end).tolist()
    for (low, high), (_, _, (is_data, *frames)) in zip(bounds, found, strict=True):
        names = [("annotation", _DATA)] if is_data else []
        names += [("python", frame) for frame in frames if frame is not None]
        spans += (
            {"start_ns": low, "dur_ns": high - low, "tid": tid, "category": c, "name": n}
            for c, n in names
            if high > low
        )
    return spans


def _shared_out(
    segments: list[int],
    edges: np.ndarray,
    marks: list[tuple[str, int]],
    counts: Mapping[_Kind, Counter[_Said]],
) -> Iterator[tuple[int, int, _Said]]:
    """Yield start, end and label of segments without a sample.

    Each that was sampled between regions of the same names gets as large a part of their time as it
    has of the samples.
    """
    due: dict[_Kind, Counter[_Said]] = {}
    for at in segments:
        kind = marks[at], marks[at + 1]
        if kind not in counts:
            continue
        low, high = int(edges[at]), int(edges[at + 1])
        total, mine = counts[kind].total(), due.setdefault(kind, Counter())
        for labels, count in counts[kind].items():
            mine[labels] += (high - low) * count // total
        [(most, _)] = mine.most_common(1)
        mine[most] -= high - low
        yield low, high, most


def _middle(time_ns: np.ndarray, i: int) -> int:
    return int(time_ns[i - 1] + (time_ns[i] - time_ns[i - 1]) // 2)


def _merged(tables: Mapping[str, pa.Table], added: pa.Table) -> dict[str, pa.Table]:
    """Return tables with spans added in their order, and the collectives of the rows they move."""
    host = tables["host_span"]
    both = TABLES["host_span"].joined([host, added])
    # Of equal spans, those that were recorded enclose the added ones.
    start_ns, dur_ns = both["start_ns"].to_numpy(), both["dur_ns"].to_numpy()
    order = np.lexsort((np.arange(len(start_ns)), -dur_ns, start_ns))
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    merged = {**tables, "host_span": both.take(pa.array(order))}
    collective = tables.get("collective")
    if collective is not None and collective.num_rows:
        on_host = pc.equal(collective["source"].cast(pa.string()), "host_span").to_numpy()
        row = collective["row"].to_numpy().copy()
        row[on_host] = position[row[on_host]]
        at = collective.schema.get_field_index("row")
        merged["collective"] = collective.set_column(at, collective.schema.field(at), pa.array(row))
    return merged
