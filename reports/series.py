"""Telemetry as series over time: one list for the figure of the run and the strips of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.samples import per_device
from chopper.analyzers.views.host import depths as depths_of
from chopper.storage.run import Run


class Series(msgspec.Struct, frozen=True):
    """One quantity over time.

    Attributes:
        panel: what it is drawn with; series of one panel share a unit.
        label: short name within the panel.
        unit: ``ratio``, ``bytes``, ``bytes_per_s``, ``hz``, ``w``, ``c`` or as recorded.
        rank: rank that it belongs to; None for the host.
        time_ns: Unix times, ascending.
        value: values; NaN where nothing was recorded.
    """

    panel: str
    label: str
    unit: str
    rank: int | None
    time_ns: np.ndarray
    value: np.ndarray


class _Line(msgspec.Struct, array_like=True):
    column: str
    panel: str
    label: str
    unit: str
    grows: bool = False


class _Lines(msgspec.Struct):
    device: dict[str, list[_Line]]
    buffered: dict[str, _Line]
    host: dict[str, list[_Line]]
    rank: dict[str, list[_Line]]


_LINES = msgspec.toml.decode(Path(__file__).with_name("series.toml").read_bytes(), type=_Lines)
_BUFFERED = [line.panel for line in _LINES.buffered.values()]
_KEYS = {
    "nic": ["interface"],
    "memory_controller": ["controller"],
    "process": ["rank"],
    "memory_event": ["device_id"],
    "counter": ["track", "name"],
}
"""Columns whose values tell the series of a table apart."""
_FIRST = (
    *("SM clock", *_BUFFERED, "Board power"),
    *("Temperature", "Device busy", "Device units", "NVLink, XGMI", "PCIe"),
)
"""Panels of devices come first: they explain the kernels above them."""
_OF_HOST = ("CPU", "CPU of ranks", "Pressure", "Network", "Host memory traffic", "Memory of ranks")
SAMPLED = frozenset((*_FIRST, *_OF_HOST))
SAMPLED -= frozenset(_BUFFERED)
"""Panels of what is read at a rate; what is said at events (allocations) holds until the next."""
_GAP_FACTOR = 4
_LEAST_GAP_NS = 2_000_000
_ON_HOST = 0
"""The ``device_type`` of the allocator of the host."""
_QUEUE_RANKS = 8
LARGEST_DRAWN = 1e30
"""Values beyond are holes in curves: the page draws with 32 bits, and an axis spans them all."""


def collect(run: Run) -> list[Series]:
    """Return all telemetry of a run, that of devices first, then host-wide."""
    series: list[Series] = []
    for rank in run.ranks:
        series += _of_device(run, rank)
    several = len({p.hostname for p in run.manifest.ranks}) > 1
    for rank in run.ranks:
        name = run.part(rank).hostname
        host = {"host": f" {name}" if several and name else ""}
        for table, lines in _LINES.host.items():
            series += _of_table(run.table(rank, table), table, lines, None, host)
    for rank in run.ranks:
        for table, lines in _LINES.rank.items():
            series += _of_table(run.table(rank, table), table, lines, rank, {"rank": rank})
    series.sort(key=lambda s: _FIRST.index(s.panel) if s.panel in _FIRST else len(_FIRST))
    return [with_gaps(s) for s in series if len(s.time_ns) > 1 and np.isfinite(s.value).any()]


def _of_device(run: Run, rank: int) -> Iterator[Series]:
    """Yield the samples of a rank's device; in a log without a trace, of every device."""
    for name in (*_LINES.device, "device_buffered"):
        for number, table in per_device(run, rank, name):
            key = {"device": f"rank {rank}" if number is None else f"device {number}"}
            parts = [(table, line) for line in _LINES.device.get(name, ())]
            if name == "device_buffered":
                parts = [
                    (table.filter(pc.field("quantity") == quantity), line)
                    for quantity, line in _LINES.buffered.items()
                ]
            for rows, line in parts:
                yield from _drawn(rows, line, rank, key)


def _of_table(
    table: pa.Table, name: str, lines: list[_Line], rank: int | None, key: dict[str, Any]
) -> Iterator[Series]:
    if name == "cpu_core" and table.num_rows:
        of_cores = [("busy_ratio", "mean"), ("busy_ratio", "max")]
        table = table.group_by("time_ns").aggregate(of_cores)
    if name == "memory_event":
        known = ~pc.field("device_id").is_null()
        table = table.filter((pc.field("device_type") != _ON_HOST) & known)
    if not table.num_rows:
        return
    parts = [(key, table)]
    if name in _KEYS:
        words = pa.table({c: table[c].cast(pa.string()) for c in _KEYS[name]})
        parts = []
        for key_values in words.group_by(_KEYS[name], use_threads=False).aggregate([]).to_pylist():
            mask = np.logical_and.reduce(
                [pc.equal(words[c], v).to_numpy() for c, v in key_values.items()]
            )
            parts.append((key | key_values, table.filter(pa.array(mask))))
    for key_values, rows in parts:
        for line in lines:
            yield from _drawn(
                rows, line, rank if rank is None else int(key_values["rank"]), key_values
            )


def _drawn(
    table: pa.Table, line: _Line, rank: int | None, key: Mapping[str, Any]
) -> Iterator[Series]:
    """Yield the series of a column, none where a running total never grows."""
    time = table["time_ns"].to_numpy()
    value = table[line.column].to_numpy().astype(np.float64)
    order = np.argsort(time, kind="stable")
    time, value = time[order], value[order]
    if line.grows:
        time, value = growth(time, value)
        value = value * 1e9 if line.unit == "bytes_per_s" else value
        if not np.nanmax(value, initial=0) > 0:
            return
    yield Series(line.panel.format(**key), line.label.format(**key), line.unit, rank, time, value)


def growth(times: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rate of a running total, per ns, and when; unknown where it was reset."""
    valid = np.isfinite(total)
    times, total = times[valid], total[valid]
    span, change = np.diff(times), np.diff(total)
    keep = span > 0
    return times[1:][keep], np.where(change >= 0, change, np.nan)[keep] / span[keep]


def with_gaps(series: Series) -> Series:
    """Return a series with NaN where samples are missing: no line is drawn across a hole."""
    if len(series.time_ns) < 3 or series.panel not in SAMPLED:
        return series
    span = np.diff(series.time_ns)
    hole = np.flatnonzero(span > max(_GAP_FACTOR * float(np.median(span)), _LEAST_GAP_NS))
    middle = series.time_ns[hole] + span[hole] // 2
    return replace(
        series,
        time_ns=np.insert(series.time_ns, hole + 1, middle),
        value=np.insert(series.value, hole + 1, np.nan),
    )


def queues(run: Attribution) -> list[Series]:
    """Return the launches that wait or run, over all streams, of each of the first few ranks."""
    series = []
    for rank in list(run.joined)[:_QUEUE_RANKS]:
        depths = depths_of(run, rank)
        if not depths:
            continue
        time = np.concatenate([d.time_ns for d in depths])
        change = np.concatenate([np.diff(d.count, prepend=0) for d in depths])
        order = np.argsort(time, kind="stable")
        entries = np.cumsum(change[order]).astype(np.float64)
        series.append(Series("Launch queue", f"rank {rank}", "", rank, time[order], entries))
    return [s for s in series if len(s.time_ns) > 1]


def thin(series: Series, points: int) -> Series:
    """Return at most about ``points`` samples, the extremes of each bin among them."""
    n = len(series.time_ns)
    if n <= points:
        return series
    size = -(-2 * n // points)
    rows = -(-n // size)
    low = np.full(rows * size, np.inf)
    low[:n] = np.nan_to_num(series.value, nan=np.inf)
    high = np.full(rows * size, -np.inf)
    high[:n] = np.nan_to_num(series.value, nan=-np.inf)
    first = np.arange(rows) * size
    # Holes stay holes: the first unknown of each run of them is kept, too.
    unknown = np.isnan(series.value)
    holes = np.flatnonzero(unknown & ~np.concatenate([[False], unknown[:-1]]))
    extremes = (low.reshape(rows, size).argmin(1), high.reshape(rows, size).argmax(1))
    index = np.unique(np.concatenate([first + extremes[0], first + extremes[1], holes]))
    return replace(series, time_ns=series.time_ns[index], value=series.value[index])
