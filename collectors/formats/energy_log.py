"""Energy of measured windows as Zeus logs it, as CSV: ``ZeusMonitor(log_file=…)``.

A row for each window, a column for each GPU: ``start_time,window_name,elapsed_time,gpu0_energy,…``,
in seconds and joules. Older versions take ``start_time`` from a clock that counts from the host's
start; such windows have a length and an energy, and no place in a trace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import tzinfo

from chopper.collectors.formats.parsed import table_of_rows
from chopper.collectors.formats.telemetry_csv import TelemetryLog
from chopper.collectors.formats.unpack import cells_of
from chopper.errors import InputError
from chopper.tables import TABLES

_REQUIRED = ("start_time", "window_name", "elapsed_time")
_GPU = re.compile(r"gpu(\d{1,4})_energy")
_MOST_S = 1e10


def sniff(head: bytes) -> bool:
    """Return whether a file is such a log, by its first line."""
    return _is_log(_stripped(head.decode("utf-8-sig", "replace")))


def _stripped(line: str) -> list[str]:
    return [cell.strip() for cell in cells_of(line)]


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
    heading = _stripped(next(content, ""))
    if not _is_log(heading):
        raise InputError(f"{where}: no energy log: expected {', '.join(_REQUIRED)}, gpu0_energy …")
    gpus = [(int(m[1]), i) for i, name in enumerate(heading) if (m := _GPU.fullmatch(name))]
    rows: list[tuple[object, ...]] = []
    bad = read = 0
    for line in filter(str.strip, content):
        cells = _stripped(line)
        # Of columns of one name the first counts.
        values = zip(reversed(heading), reversed(cells), strict=False)
        row = dict(values) if len(cells) == len(heading) else {}
        start_s, elapsed_s = (_seconds(row.get(n, "")) for n in ("start_time", "elapsed_time"))
        if start_s is None or elapsed_s is None:
            bad += 1
            continue
        read += 1
        span_ns = _ns(elapsed_s)
        time_ns = _ns(start_s) + span_ns // 2
        window = row["window_name"] or "(no name)"
        for device, column in gpus:
            energy_j = _seconds(cells[column])
            if energy_j is not None:
                rows.append((time_ns, span_ns, device, None, window, float(energy_j)))
    if not rows:
        raise InputError(f"{where}: an energy log without a readable row ({bad} could not be read)")
    table = TABLES["energy_window"].validate(table_of_rows("energy_window", rows))
    table = table.sort_by("time_ns")
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
