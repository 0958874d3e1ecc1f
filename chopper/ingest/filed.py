"""Tables of large ranks as Parquet files: written and read a stretch of steps at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import limits
from chopper.arrow import with_column
from chopper.collectors.formats.kineto import ParsedTrace
from chopper.collectors.formats.kineto.chunked import LargeTrace
from chopper.collectors.formats.parsed import is_one_of, to_arrow, to_numpy
from chopper.engines import Engine, Lost
from chopper.errors import ChopperError, InputError, OutputError
from chopper.storage import parquet
from chopper.storage.results import Folder, InMemory, Result, leave
from chopper.storage.run import HeldTables, Span, Stretch
from chopper.storage.stretches import Plan
from chopper.tables import TABLES, TIME_OF

_SOURCES = ("device_event", "host_span")
"""Tables whose rows ``collective`` names."""
_NO_ROWS = np.zeros((0, 2), dtype=np.int64)
_Moved = Mapping[str, Callable[[np.ndarray], np.ndarray]]


def write_stretches(
    writer: parquet.TablesWriter,
    stretches: Sequence[Stretch],
    omitted: Iterable[str],
    engine: Engine,
) -> None:
    """Write the tables of a rank's stretches: each row once, in the order of the whole tables.

    Args:
        writer: of the rank's files.
        stretches: of the rank, in their order.
        others: tables that are left out.
        engine: what reads the stretches.

    Raises:
        InputError: a stretch cannot be read.
        OutputError: the files cannot be written.
    """
    left_out = {*omitted}
    of_host: list[pa.Table] = []
    calls = ((stretch, engine.folder) for stretch in stretches)
    for number, done in enumerate(engine.map(own_task, calls, label="import")):
        if isinstance(done, Lost):
            raise done.error if isinstance(done.error, ChopperError) else InputError(done.reason)
        tables = done.get()
        collective = _counted_on(tables.pop("collective"), writer)
        is_host = pc.equal(collective["source"], "host_span")
        writer.write("collective", collective.filter(pc.invert(is_host)))
        of_host.append(collective.filter(is_host))
        for name, table in tables.items():
            if name not in left_out and (number == 0 or name in TIME_OF):
                writer.write(name, table)
    for table in of_host:  # as the table is sorted
        writer.write("collective", table)


def own_task(stretch: Stretch, folder: Path | None) -> Result:
    """Read a stretch; leave its tables, of those that it holds in part its own rows.

    ``collective`` names rows as counted from the first own one.
    """
    tables = {**stretch.get()}
    moved: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    for name, column in TIME_OF.items():
        bounds = stretch.span.device_ns if name == "device_event" else stretch.span.own_ns
        first, after = np.searchsorted(to_numpy(tables[name][column]), bounds).tolist()
        tables[name] = tables[name].slice(first, after - first)
        moved[name] = _within(first, after)
    tables["collective"] = _renumbered(tables["collective"], moved)
    return leave(tables, folder)


def _within(first: int, after: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: np.where((rows >= first) & (rows < after), rows - first, -1)


def _after(count: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: rows + count


def _counted_on(collective: pa.Table, writer: parquet.TablesWriter) -> pa.Table:
    """Return COLLECTIVE with rows as counted behind those that are written."""
    return _renumbered(collective, {name: _after(writer.rows_count(name)) for name in _SOURCES})


def _renumbered(collective: pa.Table, moved: _Moved) -> pa.Table:
    """Return COLLECTIVE with other numbers of rows, without those that become negative."""
    if not collective.num_rows:
        return collective
    rows = to_numpy(collective["row"]).copy()
    for name, of in moved.items():
        mine = _is(collective["source"], name)
        rows[mine] = of(rows[mine])
    return with_column(collective, "row", to_arrow(rows)).filter(to_arrow(rows >= 0))


def _is(texts: pa.ChunkedArray, *names: str) -> np.ndarray:
    """Return the mask of the rows of a dictionary column that hold one of some texts."""
    masks = [
        is_one_of((to_numpy(chunk.indices, -1), chunk.dictionary.to_pylist()), *names)
        for chunk in texts.chunks
    ]
    return np.concatenate([np.zeros(0, dtype=bool), *masks])


@dataclass(frozen=True)
class FiledStretch:
    """The tables of a stretch of a rank's steps, in the rank's files.

    Attributes:
        files: by table.
        ranges: table → its rows, as (first, one after the last), of those held in part.
        span: the steps.
        keeper: whoever removes the files; not of another process.
    """

    files: Mapping[str, Path]
    ranges: Mapping[str, np.ndarray]
    span: Span
    keeper: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return FiledStretch, (self.files, self.ranges, self.span)

    def get(self) -> Mapping[str, pa.Table]:
        """Return the tables; one is read when it is asked for."""
        return _Tables(self)

    def rows(self, name: str) -> np.ndarray:
        """Return which row of the whole table each row of the stretch is."""
        parts = (np.arange(*of) for of in self.ranges.get(name, _NO_ROWS).tolist())
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


class _Tables(dict[str, pa.Table]):
    """Tables of a stretch by name, each read when it is asked for first."""

    def __init__(self, stretch: FiledStretch) -> None:
        self._stretch = stretch

    def __missing__(self, name: str) -> pa.Table:
        stretch = self._stretch
        table = parquet.read(stretch.files[name], name, stretch.ranges.get(name))
        if name == "collective":
            table = _renumbered(table, {s: _found_in(stretch.rows(s)) for s in _SOURCES})
        return self.setdefault(name, table)


def _found_in(held: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: np.searchsorted(held, rows)


def stretches_of(
    files: Mapping[str, Path], rows_count: Mapping[str, int], keeper: Folder | None = None
) -> list[FiledStretch]:
    """Return the stretches of a rank whose tables are too large to be read as a whole; else none.

    Args:
        files: of the rank, by table.
        rows_count: of each.
        keeper: whoever removes the files.

    Raises:
        InputError: a file is damaged.
    """
    events_count = sum(rows_count.get(name, 0) for name in ("host_span", "device_event"))
    if events_count * limits.ROW_BYTES < limits.LARGE_TRACE_BYTES:
        return []
    if not {"step", "host_span"} <= {*files}:
        return []
    step = parquet.read(files["step"], "step")
    step = step.filter(step["traced"])
    number, start, end = (to_numpy(step[name]) for name in ("number", "start_ns", "end_ns"))
    if (np.diff(start) <= 0).any():
        return []
    every = sum(rows_count.get(name, 0) for name in TIME_OF)
    plan = Plan.of((number.tolist(), start, end), _launches(files["host_span"]), every)
    if plan is None:
        return []
    columns = ("start_ns", "dur_ns", "correlation_id")
    on_device = files.get("device_event")
    for block in () if on_device is None else parquet.blocks(on_device, "device_event", columns):
        begin, dur, correlation = (to_numpy(block[name], missing=-1) for name in columns)
        plan.take_events(begin, begin + dur, correlation)
    ranges = {name: _ranges(plan, name, file) for name, file in files.items() if name in TIME_OF}
    if "collective" in files:
        ranges["collective"] = _ranges_of_collectives(files["collective"], ranges)
    return [
        FiledStretch(files, {name: of[at] for name, of in ranges.items()}, span, keeper)
        for at, span in enumerate(plan.spans())
    ]


def _launches(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return correlation and start of the calls that launch."""
    correlations, starts = [], []
    for block in parquet.blocks(file, "host_span", ("start_ns", "category", "correlation_id")):
        correlation = to_numpy(block["correlation_id"], missing=-1)
        category = pa.chunked_array([block["category"]])
        call = _is(category, "runtime", "driver") & (correlation >= 0)
        correlations.append(correlation[call])
        starts.append(to_numpy(block["start_ns"])[call])
    return np.concatenate(correlations), np.concatenate(starts)


def _ranges(plan: Plan, name: str, file: Path) -> list[np.ndarray]:
    """Return the rows of a table that each stretch needs."""
    columns = [TIME_OF[name]] + ["dur_ns"] * (name != "memory_event")
    columns += ["correlation_id"] * (name == "device_event")
    parts: list[list[np.ndarray]] = [[] for _ in plan.first]
    before = 0
    for block in parquet.blocks(file, name, columns):
        values = [to_numpy(block[column], missing=-1) for column in columns]
        if name == "device_event":
            low, high = plan.of_device(*values)
        else:
            low, high = plan.of_host(values[0], values[1] if len(values) > 1 else 0)
        for at in range(int(low.min()), int(high.max())):
            parts[at].append(before + np.flatnonzero((low <= at) & (at < high)))
        before += block.num_rows
    return [_as_ranges(part) for part in parts]


def _ranges_of_collectives(
    file: Path, ranges: Mapping[str, Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Return the rows of ``collective`` that each stretch needs: of the events that it holds."""
    host_span = ranges["host_span"]
    held = ranges.get("device_event", [_NO_ROWS] * len(host_span)), host_span
    parts: list[list[np.ndarray]] = [[] for _ in host_span]
    before = 0
    for block in parquet.blocks(file, "collective", ("source", "row")):
        row = to_numpy(block["row"])
        on_device = _is(pa.chunked_array([block["source"]]), "device_event")
        for at, (device, host) in enumerate(zip(*held, strict=True)):
            needed = np.where(on_device, _inside(device, row), _inside(host, row))
            parts[at].append(before + np.flatnonzero(needed))
        before += block.num_rows
    return [_as_ranges(part) for part in parts]


def _inside(ranges: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the mask of the row numbers within ranges."""
    at = np.searchsorted(ranges[:, 0], rows, side="right") - 1
    return (at >= 0) & (rows < np.append(ranges[:, 1], 0)[at])


def _as_ranges(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows, ascending, as (first, one after the last) of those that follow one another."""
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    if not len(rows):
        return _NO_ROWS
    breaks = np.flatnonzero(np.diff(rows) != 1)
    first, last = np.append(-1, breaks) + 1, np.append(breaks, len(rows) - 1)
    return np.stack([rows[first], rows[last] + 1], axis=1)


Key = TypeVar("Key", str, tuple[int, str])


@dataclass(frozen=True, eq=False)
class TraceTables(Mapping[str, pa.Table]):
    """Tables that are held elsewhere, each read when it is asked for.

    Attributes:
        rows_count: rows of each.
        small: those that are in memory all the same.
        stretches: of a trace that is too large to be read as a whole.
        large: a trace that was cut, whose tables are to be written to files.
    """

    held: HeldTables
    rows_count: Mapping[str, int]
    small: Mapping[str, pa.Table] = field(default_factory=dict)
    stretches: Sequence[FiledStretch] = ()
    large: LargeTrace | None = None

    def __getitem__(self, name: str) -> pa.Table:
        if name in self.small:
            return self.small[name]
        if name not in self.rows_count:
            raise KeyError(name)
        tables: Mapping[str, pa.Table] = self.held.get()
        return tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows_count)

    def __len__(self) -> int:
        return len(self.rows_count)


def cut(large: LargeTrace) -> TraceTables:
    """Return the tables of a trace that was cut, before they are in files."""
    small = large.trace.tables
    return TraceTables(InMemory(small), rows_of(small), small, large=large)


def in_files(tables: TraceTables, folder: Folder | None, engine: Engine) -> TraceTables:
    """Return tables, those of a trace that was cut in Parquet files of its folder.

    Raises:
        InputError: a stretch cannot be read.
        OutputError: the files cannot be written.
    """
    if tables.large is None or folder is None:
        return tables
    target = folder.path / "tables"
    try:
        target.mkdir()
    except OSError as exc:
        raise OutputError(f"{target}: cannot be written ({exc.strerror})") from exc
    small = tables.large.trace.tables
    with parquet.TablesWriter(target, 0) as writer:
        for name, table in small.items():
            writer.write(name, table)
        write_stretches(writer, tables.large.stretches, small, engine)
    shutil.rmtree(tables.large.stretches[0].folder)
    files = parquet.files(target)
    rows = {name: parquet.rows_count(file) for name, file in files.items()}
    return TraceTables(
        parquet.FiledTables(files, folder),
        {**rows, **rows_of(tables.small)},
        tables.small,
        stretches_of(files, rows, folder),
    )


def left(trace: ParsedTrace, folder: Path | None) -> ParsedTrace:
    """Return a trace whose tables were left for later tasks: in a file, or in memory."""
    tables = left_tables(valid(trace.tables), folder)
    return replace(trace, tables=tables, held_span_ns=trace.span_ns)


def left_tables(tables: dict[str, pa.Table], folder: Path | None) -> TraceTables:
    """Leave tables for later tasks: in a file, or in memory."""
    return TraceTables(leave(tables, folder), rows_of(tables))


def loaded(trace: ParsedTrace) -> ParsedTrace:
    """Return a trace with its tables in memory."""
    held = trace.tables
    return replace(trace, tables=held.held.get() if isinstance(held, TraceTables) else held)


def valid(tables: Mapping[Key, pa.Table]) -> dict[Key, pa.Table]:
    """Return tables, by name or by (rank, name), each validated.

    Raises:
        SchemaError: a table lacks or mistypes a column.
    """
    return {
        key: TABLES[key if isinstance(key, str) else key[1]].validate(table)
        for key, table in tables.items()
    }


def rows_of(tables: Mapping[str, pa.Table]) -> dict[str, int]:
    """Return the rows of tables by name."""
    return {name: table.num_rows for name, table in tables.items()}
