"""From a CSV of any of the known layouts to the table ``kernel_counter``."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.counters import _values
from chopper.collectors.formats.unpack import DAMAGE, lines
from chopper.errors import InputError
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_HELD_RATIO = 10
"""Memory for each byte of text: a row of 50 bytes becomes 8 values."""
_HEADING_WITHIN = 2000
"""Lines that the program and its tool may print before the table."""

_COUNTER = re.compile(
    r"""
    [A-Z][A-Z0-9]*_[A-Za-z0-9_]+(?:\[\d+\])?   # SQ_WAVES, TCC_HIT[3]
    | [a-z][a-z0-9]*__[a-z0-9_.]+                # sm__cycles_active.avg
    | (?:Mfma|VALU|SALU|VFetch|VWrite|SFetch|Flat|Mem|L2|LDS|Fetch|Write|GPU)[A-Z][A-Za-z]*
    """,
    re.VERBOSE,
)
"""A column that is a counter, in tables with a column for each."""
_WHOLE = re.compile(r"([0-9]+)(?:\.0{1,9})?")
_NO_COUNTER = re.compile(r"(?:LDS|XCC|GPU|SGPR|VGPR)_(?:Per|Block|Index|Count|Size|ID|Id)")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Numbers of a table's columns, None where it has no such column."""

    kernel: int
    dispatch: int | None
    device: int | None
    counter: int | None = None
    """Name of the counter, in tables with a row for each."""
    value: int | None = None
    unit: int | None = None
    wide: tuple[tuple[int, str], ...] = ()
    """Columns that are counters, in tables with a row for each kernel."""
    units_below: bool = False
    """The row below the heading names the units."""


def looks_like_counters(head: str) -> bool:
    """Return whether the beginning of a file is that of a table of counters."""
    return any(_layout(row) is not None for row in _rows(io.StringIO(head)))


def sniff(head: bytes) -> bool:
    """Return whether a file is a table of counters, by its first lines."""
    return looks_like_counters(head.decode("utf-8-sig", "replace"))


def read_counters(path: Path) -> tuple[pa.Table, list[str]]:
    """Read one file of counters.

    Returns:
        (table ``kernel_counter``, what is odd about the file, a line each).

    Raises:
        InputError: it cannot be read, or is not a table of counters.
    """
    columns: dict[str, list[object]] = {c.name: [] for c in TABLES["kernel_counter"].columns}
    odd: list[str] = []
    try:
        _read(path.name, lines(path, held_ratio=_HELD_RATIO), columns, odd)
    except DAMAGE as exc:
        odd.append(f"{path.name}: ends in the middle ({exc}); the rows before that are used")
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    except csv.Error as exc:
        raise InputError(f"{path}: not a CSV table ({exc})") from exc
    if not columns["counter"] and not odd:
        raise InputError(
            f"{path}: a table of counters without counters; name them when recording, for example "
            "rocprofv3 --pmc NAME or ncu --metrics NAME"
        )
    return _table(columns), odd


def _rows(file: Iterable[str]) -> Iterator[list[str]]:
    for count, line in enumerate(file):
        if count == _HEADING_WITHIN:
            return
        if "," in line:
            yield _cells(line)


def _cells(line: str) -> list[str]:
    """Cells of a line that may be no CSV at all."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _read(
    name: str, content: Iterator[str], columns: dict[str, list[object]], odd: list[str]
) -> None:
    layout: _Layout | None = None
    for count, line in enumerate(content):
        if "," in line and (layout := _layout(_cells(line))) is not None:
            width = len(_cells(line))
            break
        if count == _HEADING_WITHIN:
            break
    if layout is None:
        raise InputError(
            f"{name}: not a table of counters: found no heading with Kernel_Name and "
            "Counter_Value (rocprofv3 --output-format csv), or Kernel Name and metrics (ncu --csv)"
        )
    rows: Iterator[list[str]] = csv.reader(content)
    units: list[str] = []
    if layout.units_below:
        first = next(rows, [])
        units = first if len(first) == width and not first[layout.kernel].strip() else []
        if first and not units:
            rows = chain([first], rows)
    taken = _Taken(name, layout, units, columns)
    bad = sum(not taken.row(row) for row in rows if row)
    if bad:
        odd.append(f"{name}: {bad} rows are cut short or hold no kernel, and are left out")
    if taken.bad_values:
        odd.append(f"{name}: {taken.bad_values} values are no numbers, and count as not measured")


class _Taken:
    """Rows of one file on their way into columns."""

    def __init__(
        self, name: str, layout: _Layout, units: list[str], columns: dict[str, list[object]]
    ) -> None:
        self._name = name
        self._layout = layout
        self._units = units
        self._columns = columns
        self._next = 0
        self._at: tuple[str, str] | None = None
        self.bad_values = 0

    def row(self, row: list[str]) -> bool:
        """Take a row; whether it could be."""
        layout = self._layout
        wanted = (layout.kernel, layout.value, layout.counter, layout.device, layout.unit)
        last = max(column for column in wanted if column is not None)
        if len(row) <= last or not row[layout.kernel].strip():
            return False
        kernel = row[layout.kernel].strip()
        dispatch = self._dispatch(row)
        if dispatch is None:
            return False
        device = row[layout.device].strip() if layout.device is not None else None
        if layout.counter is not None and layout.value is not None:
            unit = row[layout.unit].strip() if layout.unit is not None else ""
            counter = row[layout.counter].strip()
            if counter:
                self._add(dispatch, kernel, device, counter, row[layout.value], unit)
            return True
        for column, counter in layout.wide:
            if column < len(row):
                unit = self._units[column].strip() if self._units else ""
                self._add(dispatch, kernel, device, counter, row[column], unit)
        return True

    def _dispatch(self, row: list[str]) -> int | None:
        layout = self._layout
        if layout.dispatch is None:
            self._next += 1
            return self._next - 1
        cell = row[layout.dispatch].strip() if layout.dispatch < len(row) else ""
        whole = _WHOLE.fullmatch(cell)
        # A number that no 64 bits hold is no dispatch's; nor is one that a float rounds.
        return int(whole[1]) if whole and len(whole[1]) < 19 else None

    def _add(
        self, dispatch: int, kernel: str, device: str | None, counter: str, cell: str, unit: str
    ) -> None:
        value, base = _values.measured(cell, unit)
        if value is None and not _values.is_absent(cell):
            self.bad_values += 1
        row = (self._name, dispatch, kernel, 0, device, counter, value, base)
        for name, item in zip(self._columns, row, strict=True):
            self._columns[name].append(item)


def _layout(heading: list[str]) -> _Layout | None:
    """The layout of a table by its heading; None when it is not one of counters."""
    column_by_name: dict[str, int] = {}
    for i, name in enumerate(heading):
        column_by_name.setdefault(_simple(name), i)
    kernel = column_by_name.get("kernelname")
    if kernel is None:
        return None
    dispatch = next(
        (column_by_name[n] for n in ("dispatchid", "id", "index") if n in column_by_name), None
    )
    device = next(
        (column_by_name[n] for n in ("agentid", "gpuid", "device") if n in column_by_name), None
    )
    for counter, value, unit in (
        ("countername", "countervalue", "counterunit"),
        ("metricname", "metricvalue", "metricunit"),
    ):
        if counter in column_by_name and value in column_by_name:
            return _Layout(
                kernel,
                dispatch,
                device,
                column_by_name[counter],
                column_by_name[value],
                column_by_name.get(unit),
            )
    wide = tuple(
        (i, name.strip())
        for i, name in enumerate(heading)
        if _COUNTER.fullmatch(name.strip()) and not _NO_COUNTER.match(name.strip())
    )
    if not wide:
        return None
    return _Layout(kernel, dispatch, device, wide=wide, units_below="processid" in column_by_name)


def _simple(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def table_of(rows: list[tuple[object, ...]]) -> pa.Table:
    """KERNEL_COUNTER from rows in the order of its columns."""
    names = [c.name for c in TABLES["kernel_counter"].columns]
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return _table(dict(zip(names, map(list, columns), strict=True)))


def _table(columns: dict[str, list[object]]) -> pa.Table:
    schema = TABLES["kernel_counter"].arrow
    arrays = [
        pa.array(columns[f.name], pa.string()).dictionary_encode()
        if pa.types.is_dictionary(f.type)
        else pa.array(columns[f.name], f.type)
        for f in schema
    ]
    table = pa.Table.from_arrays(
        [a.cast(f.type) for a, f in zip(arrays, schema, strict=True)], schema=schema
    )
    return TABLES["kernel_counter"].validate(_ordered(table))


def _ordered(table: pa.Table) -> pa.Table:
    """Rows by kernel as they ran, and which of its name each kernel is."""
    dispatch = table["dispatch_id"].to_numpy()
    order = np.argsort(dispatch, kind="stable")
    table = table.take(pa.array(order))
    dispatch = dispatch[order]
    kernel = table["kernel"].combine_chunks().indices.to_numpy()
    begins = np.ones(len(dispatch), dtype=bool)
    begins[1:] = dispatch[1:] != dispatch[:-1]
    first = np.flatnonzero(begins)
    names = kernel[first]
    by_name = np.argsort(names, kind="stable")
    counts = np.bincount(names) if len(names) else np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]) if len(counts) else counts
    occurrence = np.empty(len(names), dtype=np.int64)
    occurrence[by_name] = np.arange(len(names)) - starts[names[by_name]]
    index = table.schema.get_field_index("occurrence_id")
    return table.set_column(
        index,
        table.schema.field(index),
        pa.array(occurrence[np.cumsum(begins) - 1] if len(first) else occurrence),
    )
