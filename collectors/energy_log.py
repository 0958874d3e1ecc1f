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

from chopper.collectors.telemetry_log import TelemetryLog
from chopper.errors import InputError
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

_REQUIRED = ("start_time", "window_name", "elapsed_time")
_GPU = re.compile(r"gpu(\d{1,4})_energy")
_MOST_S = 1e10


def sniff(head: bytes) -> bool:
    """Whether a file is such a log, by its first line."""
    return _is_log(_heading(head.decode("utf-8-sig", "replace")))


def _heading(text: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader(text.splitlines()[:1]), [])]
    except csv.Error:
        return []


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines()[1:]:
        try:
            cells = next(csv.reader([line]), [])
        except csv.Error:
            cells = [line]
        if cells:
            yield cells


def _is_log(heading: list[str]) -> bool:
    return set(_REQUIRED) <= set(heading) and any(_GPU.fullmatch(cell) for cell in heading)


def read_log(text: str, where: str, *, zone: tzinfo | None = None) -> TelemetryLog:  # noqa: ARG001
    """Read a log. -> ENERGY_WINDOW.

    Args:
        text: the whole file.
        where: its name, for messages.
        zone: not needed: times are seconds of a clock.

    Raises:
        InputError: no such log, or not a row of it can be read.
    """
    heading = _heading(text)
    if not _is_log(heading):
        raise InputError(f"{where}: no energy log: expected {', '.join(_REQUIRED)}, gpu0_energy …")
    place = {name: i for i, name in reversed(list(enumerate(heading)))}
    gpus = [(int(m[1]), i) for i, name in enumerate(heading) if (m := _GPU.fullmatch(name))]
    rows: list[dict[str, object]] = []
    bad = read = 0
    for cells in _rows(text):
        times = [
            _seconds(cells[place[n]]) if len(cells) == len(heading) else None
            for n in ("start_time", "elapsed_time")
        ]
        start_s, elapsed_s = times
        if start_s is None or elapsed_s is None:
            bad += 1
            continue
        read += 1
        for device, column in gpus:
            energy_j = _seconds(cells[column])
            if energy_j is not None:
                rows.append(
                    {
                        "time_ns": _ns(start_s) + _ns(elapsed_s) // 2,
                        "span_ns": _ns(elapsed_s),
                        "device_id": device,
                        "window": cells[place["window_name"]].strip() or "(no name)",
                        "energy_j": float(energy_j),
                    }
                )
    if not rows:
        raise InputError(f"{where}: an energy log without a readable row ({bad} could not be read)")
    declared = TABLES["energy_window"]
    table = declared.validate(pa.Table.from_pylist(rows, schema=declared.arrow)).sort_by("time_ns")
    known = {*_REQUIRED, *(heading[i] for _, i in gpus)}
    return TelemetryLog(
        {"energy_window": table}, tuple(h for h in heading if h not in known), False, read, bad
    )


def _seconds(cell: str) -> str | None:
    """A number that is no energy or time of this world is none."""
    text = cell.strip()
    try:
        value = float(text)
    except ValueError:
        return None
    return text if math.isfinite(value) and 0 <= value < _MOST_S else None


def _ns(seconds: str) -> int:
    """By way of the digits: a float of seconds since 1970 tells no microseconds apart."""
    plain = re.fullmatch(r"(\d+)(?:\.(\d*))?", seconds)
    if plain is None:
        return round(float(seconds) * 1e9)
    return int(plain[1]) * 10**9 + int(((plain[2] or "") + "000000000")[:9])
