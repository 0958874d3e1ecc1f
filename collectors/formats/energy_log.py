"""Energy of measured windows as Zeus logs it, as CSV: ``ZeusMonitor(log_file=…)``.

A row for each window, a column for each GPU: ``start_time,window_name,elapsed_time,gpu0_energy,…``,
in seconds and joules. Older versions take ``start_time`` from a clock that counts from the host's
start; such windows have a length and an energy, and no place in a trace.
"""

from __future__ import annotations

import csv
import math
import re
from typing import TYPE_CHECKING

import pyarrow as pa

from chopper.arrow import to_arrow
from chopper.collectors.formats.telemetry_csv import TelemetryLog, heading_of
from chopper.errors import InputError
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import tzinfo

_REQUIRED = ("start_time", "window_name", "elapsed_time")
_GPU = re.compile(r"gpu(\d{1,4})_energy")
_MOST_S = 1e10


def sniff(head: bytes) -> bool:
    """Return whether a file is such a log, by its first line."""
    return _is_log(_heading(head.decode("utf-8-sig", "replace")))


def _heading(text: str) -> list[str]:
    return [cell.strip() for cell in heading_of(text)]


def _rows(lines: Iterator[str]) -> Iterator[list[str]]:
    for line in lines:
        try:
            cells = next(csv.reader([line]), [])
        except csv.Error:
            cells = [line]
        if cells:
            yield cells


def _is_log(heading: list[str]) -> bool:
    return set(_REQUIRED) <= set(heading) and any(_GPU.fullmatch(cell) for cell in heading)


def read_log(
    lines: Iterable[str],
    where: str,
    *,
    zone: tzinfo | None = None,  # noqa: ARG001
) -> TelemetryLog:
    """Read a log. -> ENERGY_WINDOW.

    Args:
        lines: of the file.
        where: its name, for messages.
        zone: not needed: times are seconds of a clock.

    Raises:
        InputError: no such log, or not a row of it can be read.
    """
    content = iter(lines)
    heading = _heading(next(content, ""))
    if not _is_log(heading):
        raise InputError(f"{where}: no energy log: expected {', '.join(_REQUIRED)}, gpu0_energy …")
    column_at = {name: i for i, name in reversed(list(enumerate(heading)))}
    gpus = [(int(m[1]), i) for i, name in enumerate(heading) if (m := _GPU.fullmatch(name))]
    columns: dict[str, list[object]] = {
        column.name: [] for column in TABLES["energy_window"].columns
    }
    bad = read = 0
    for cells in _rows(content):
        times = [
            _seconds(cells[column_at[n]]) if len(cells) == len(heading) else None
            for n in ("start_time", "elapsed_time")
        ]
        start_s, elapsed_s = times
        if start_s is None or elapsed_s is None:
            bad += 1
            continue
        read += 1
        span_ns = _ns(elapsed_s)
        window = cells[column_at["window_name"]].strip() or "(no name)"
        for device, column in gpus:
            energy_j = _seconds(cells[column])
            if energy_j is not None:
                row = {
                    "time_ns": _ns(start_s) + span_ns // 2,
                    "span_ns": span_ns,
                    "device_id": device,
                    "window": window,
                    "energy_j": float(energy_j),
                }
                for name, values in columns.items():
                    values.append(row.get(name))
    if not columns["time_ns"]:
        raise InputError(f"{where}: an energy log without a readable row ({bad} could not be read)")
    declared = TABLES["energy_window"]
    arrays = [to_arrow(columns[f.name], f.type) for f in declared.arrow]
    table = pa.Table.from_arrays(arrays, schema=declared.arrow)
    table = declared.validate(table).sort_by("time_ns")
    known = {*_REQUIRED, *(heading[i] for _, i in gpus)}
    return TelemetryLog(
        {"energy_window": table}, tuple(h for h in heading if h not in known), False, read, bad
    )


def _seconds(cell: str) -> str | None:
    """A number that is no energy or time of this world is none."""
    text = cell.strip()
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        return None
    return text if math.isfinite(value) and 0 <= value < _MOST_S else None


def _ns(seconds: str) -> int:
    """By way of the digits: a float of seconds since 1970 tells no microseconds apart."""
    plain = re.fullmatch(r"(\d+)(?:\.(\d*))?", seconds)
    if plain is None:
        return round(float(seconds) * 1e9)
    return int(plain[1]) * 10**9 + int(((plain[2] or "") + "000000000")[:9])
