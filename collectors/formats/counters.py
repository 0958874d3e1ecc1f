"""Readers of hardware counters that other tools wrote, as CSV: rocprofv3, rocprof, Nsight Compute.

    rocprofv3 --pmc SQ_INSTS_VALU_MFMA_MOPS_BF16 GRBM_GUI_ACTIVE --output-format csv -- python t.py
    ncu --metrics sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed --csv --page raw …

What a file is, is read from its heading, whatever its name.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from chopper.arrow import with_column
from chopper.collectors.formats.parsed import table_of_rows
from chopper.collectors.formats.unpack import DAMAGE, cells_of, letters_of, lines
from chopper.errors import InputError
from chopper.tables import TABLES

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

    def values(self, row: list[str], units: list[str]) -> Iterator[tuple[str, str, str]]:
        """Yield (counter, value, unit) of a row."""
        if self.counter is not None and self.value is not None and row[self.counter].strip():
            unit = row[self.unit] if self.unit is not None else ""
            yield row[self.counter].strip(), row[self.value], unit
        for column, counter in self.wide:
            if column < len(row):
                yield counter, row[column], units[column] if units else ""


def sniff(head: bytes) -> bool:
    """Return whether a file is a table of counters, by its first lines."""
    return _heading(io.StringIO(head.decode("utf-8-sig", "replace"))) is not None


def read_counters(path: Path) -> tuple[pa.Table, list[str]]:
    """Read KERNEL_COUNTER from a file; also return one line about each anomaly.

    Raises:
        InputError: it cannot be read, or is not a table of counters.
    """
    rows: list[tuple[object, ...]] = []
    odd: list[str] = []
    try:
        _read(path.name, lines(path, held_ratio=_HELD_RATIO), rows, odd)
    except DAMAGE as exc:
        odd.append(f"{path.name}: ends in the middle ({exc}); the rows before that are used")
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    except csv.Error as exc:
        raise InputError(f"{path}: not a CSV table ({exc})") from exc
    if not rows and not odd:
        raise InputError(
            f"{path}: a table of counters without counters; name them when recording, for example "
            "rocprofv3 --pmc NAME or ncu --metrics NAME"
        )
    return table_of(rows), odd


def _heading(content: Iterator[str]) -> tuple[_Layout, int] | None:
    """Return the layout and width of the table in a text that may begin with other lines."""
    for count, line in enumerate(content):
        if "," in line:
            cells = cells_of(line)
            layout = _layout(cells)
            if layout is not None:
                return layout, len(cells)
        if count == _HEADING_WITHIN:
            break
    return None


def _read(
    name: str, content: Iterator[str], taken: list[tuple[object, ...]], odd: list[str]
) -> None:
    heading = _heading(content)
    if heading is None:
        raise InputError(
            f"{name}: not a table of counters: found no heading with Kernel_Name and "
            "Counter_Value (rocprofv3 --output-format csv), or Kernel Name and metrics (ncu --csv)"
        )
    layout, width = heading
    columns = (layout.kernel, layout.value, layout.counter, layout.device, layout.unit)
    last = max(column for column in columns if column is not None)
    rows: Iterator[list[str]] = csv.reader(content)
    units: list[str] = []
    if layout.units_below:
        first = next(rows, [])
        units = first if len(first) == width and not first[layout.kernel].strip() else []
        if first and not units:
            rows = chain([first], rows)
    bad = bad_values = number = 0
    for row in filter(None, rows):
        kernel = row[layout.kernel].strip() if len(row) > last else ""
        dispatch: int | None = number
        if layout.dispatch is not None:
            cell = row[layout.dispatch].strip() if layout.dispatch < len(row) else ""
            integer = _WHOLE.fullmatch(cell)
            # A number that no 64 bits hold is no dispatch's; nor is one that a float rounds.
            dispatch = int(integer[1]) if integer and len(integer[1]) < 19 else None
        if not kernel or dispatch is None:
            bad += 1
            continue
        number += 1
        device = row[layout.device].strip() if layout.device is not None else None
        for counter, cell, unit in layout.values(row, units):
            value, base = measured(cell, unit)
            bad_values += value is None and cell.strip().lower() not in _ABSENT
            taken.append((name, dispatch, kernel, 0, device, counter, value, base))
    if bad:
        odd.append(f"{name}: {bad} rows are truncated or name no kernel, and are ignored")
    if bad_values:
        odd.append(f"{name}: {bad_values} values are not numbers and count as not measured")


def _layout(heading: list[str]) -> _Layout | None:
    """The layout of a table by its heading; None when it is not one of counters."""
    column_by_name: dict[str, int] = {}
    for i, cell in enumerate(heading):
        column_by_name.setdefault(letters_of(cell), i)
    kernel = column_by_name.get("kernelname")
    if kernel is None:
        return None
    dispatch, device = (
        next((column_by_name[n] for n in names if n in column_by_name), None)
        for names in (("dispatchid", "id", "index"), ("agentid", "gpuid", "device"))
    )
    for what in ("counter", "metric"):
        name, value, unit = (column_by_name.get(what + n) for n in ("name", "value", "unit"))
        if name is not None and value is not None:
            return _Layout(kernel, dispatch, device, name, value, unit)
    wide = tuple(
        (i, cell.strip())
        for i, cell in enumerate(heading)
        if _COUNTER.fullmatch(cell.strip()) and not _NO_COUNTER.match(cell.strip())
    )
    if not wide:
        return None
    return _Layout(kernel, dispatch, device, wide=wide, units_below="processid" in column_by_name)


def table_of(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    """KERNEL_COUNTER of a whole run, from rows in the order of its columns."""
    table = table_of_rows("kernel_counter", [(*row, None) for row in rows])
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
    names = kernel[begins]
    by_name = np.argsort(names, kind="stable")
    alike = names[by_name]
    occurrence = np.empty(len(names), dtype=np.int64)
    occurrence[by_name] = np.arange(len(names)) - np.searchsorted(alike, alike)
    return with_column(table, "occurrence_id", pa.array(occurrence[np.cumsum(begins) - 1]))


_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_SCALED = re.compile(
    r"([KMGTnum])((?:byte|second|s|inst|cycle|hz|Hz|request|sector|warp|thread)\b.*)$"
)
_SHORT = {"ns": ("second", 1e-9), "us": ("second", 1e-6), "ms": ("second", 1e-3)}
_ENGLISH = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_CONTINENTAL = re.compile(r"[+-]?\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?$|[+-]?\d{1,3}(?:\.\d{3})+,\d+$")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+$")
_ABSENT = frozenset(("", "n/a", "na", "nan", "none", "-", "no data", "(!) n/a"))


def measured(cell: str, unit: str) -> tuple[float | None, str | None]:
    """Return a value in base units, and that unit; None if it is not a number.

    ``("12.5", "Kbyte")`` is ``(12500.0, "byte")``; ``("10,240", "")`` is ``(10240.0, None)``.
    """
    value = _number(cell)
    base, factor = _base(unit)
    return (None if value is None else value * factor), base


def _number(cell: str) -> float | None:
    text = cell.strip().replace("\u202f", "").replace("\u00a0", "")
    if _ENGLISH.match(text):
        text = text.replace(",", "")
    elif _CONTINENTAL.match(text):
        text = text.replace(".", "").replace(",", ".")
    elif _DECIMAL_COMMA.match(text):
        text = text.replace(",", ".")
    try:
        # Python reads 1_000, which no profiler writes.
        value = math.nan if "_" in text else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _base(unit: str) -> tuple[str | None, float]:
    unit = unit.strip()
    if unit in _SHORT:
        return _SHORT[unit]
    match = _SCALED.match(unit)
    if match:
        return match[2], _PREFIX[match[1]]
    return unit or None, 1.0
