"""Logs of other samplers as device tables, as CSV: nvidia-smi, rocm-smi, amd-smi, Zeus.

A log has a row per device and moment, with a heading that says what each column is, by name and
by unit: ``clocks.current.sm [MHz]``, ``power_watts``, ``temp_junction_celsius``. Columns are
recognized by these two; what is not recognized is named, not guessed.

Zeus (``ZeusMonitor(log_file=…)``) writes a row for each measured window and a column for each GPU:
``start_time,window_name,elapsed_time,gpu0_energy,…``, in seconds and joules. Older versions take
``start_time`` from a clock that counts from the host's start; such windows have a length and an
energy, and no place in a trace.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from itertools import pairwise
from math import isfinite, nan
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from chopper.arrow import to_arrow
from chopper.collectors.formats.parsed import table_of_rows
from chopper.collectors.formats.unpack import cells_of
from chopper.errors import InputError
from chopper.storage.clock import in_order
from chopper.tables import TABLES

_MEGA = 1_000_000
_MIB = 1 << 20
_MOST_DEVICES = 4096


@dataclass(slots=True)
class TelemetryLog:
    """Contents of a log.

    Attributes:
        tables: device tables by name, each sorted by time.
        ignored: headings that no column of ours takes.
        local_time: its times name no zone, so they were read as UTC or as the zone that was given.
        rows_count, bad_rows_count: rows read, and rows left out because they could not be.
        repeated_count: rows left out because the clock was set back over their time.
    """

    tables: dict[str, pa.Table] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    local_time: bool = False
    rows_count: int = 0
    bad_rows_count: int = 0
    repeated_count: int = 0


# Table → column → pattern of a heading without its unit. Looked for in this order.
_HEADINGS = {
    "device_clock": {
        "sm_clock_hz": r"clocks\.(current\.)?(sm|gr|graphics)|(sm|gfx|gpu|core)_?cl(oc)?k"
        r"|sclk(_clock_speed:?)?|gfx_0_clk",
        "memory_clock_hz": r"clocks\.(current\.)?(mem|memory)|mem(ory)?_?cl(oc)?k"
        r"|mclk(_clock_speed:?)?|uclk|mem_0_clk",
        "event_reasons": r"clocks_(event|throttle)_reasons\.active",
        "power_w": r"power\.draw(\.instant)?|power|socket_power|(current_|gpu_)?power_usage"
        r"|power_(watts?|w)|average_graphics_package_power|current_socket_graphics_package_power",
    },
    "device_counter": {
        "power_average_w": r"power\.draw\.average",
        "temperature_c": r"temperature\.gpu|temperature|temp|gpu_temp(erature)?|temp_junction"
        r"|hotspot(_temperature)?|temperature_.{0,40}junction.{0,40}",
        "memory_temperature_c": r"temperature\.memory|mem(ory)?_temp(erature)?|temp_mem(ory)?"
        r"|temperature_.{0,40}memory.{0,40}",
        "device_utilization_ratio": r"utilization\.gpu|gpu_use|utilization_gpu"
        r"|gpu_util(ization)?|gfx_activity_percent|gfx|gpu_use_",
        "memory_utilization_ratio": r"utilization\.memory|utilization_memory"
        r"|mem(ory)?_util(ization)?|umc_activity",
        "memory_used_bytes": r"memory\.used|vram_used|memory_used|vram_total_used_memory|used_vram",
        "energy_j": r"energy|total_energy(_consumption)?|energy_consumption",
    },
}
_COLUMNS = tuple(
    (re.compile(pattern), table, column)
    for table, patterns in _HEADINGS.items()
    for column, pattern in patterns.items()
)

_INSTANT = "power.draw.instant"
"""On newer devices power.draw is an average: where both are listed, this counts."""

# Unit as a heading or a cell writes it → factor to the table's unit, by what the unit measures.
_UNITS: dict[str, tuple[str, float]] = {
    "mhz": ("hz", _MEGA), "ghz": ("hz", 1e9), "khz": ("hz", 1e3), "hz": ("hz", 1),
    "w": ("w", 1), "watt": ("w", 1), "watts": ("w", 1), "mw": ("w", 1e-3), "uw": ("w", 1e-6),
    "kw": ("w", 1e3), "kj": ("j", 1e3), "wh": ("j", 3600), "kwh": ("j", 3.6e6),
    "j": ("j", 1), "mj": ("j", 1e-3), "uj": ("j", 1e-6),
    "c": ("c", 1), "celsius": ("c", 1), "°c": ("c", 1),
    "%": ("ratio", 0.01), "percent": ("ratio", 0.01),
    "mib": ("bytes", _MIB), "mb": ("bytes", _MIB),
    "gib": ("bytes", 1 << 30), "gb": ("bytes", 1 << 30),
    "kib": ("bytes", 1024), "b": ("bytes", 1), "bytes": ("bytes", 1),
}  # fmt: skip
_PLAIN_UNIT = {"hz": _MEGA, "w": 1.0, "j": 1.0, "c": 1.0, "ratio": 0.01}
"""What a number without a unit is, as these tools print it; bytes always come with one."""

_TIME_NAMES = ("timestamp", "time", "date", "datetime")
_DEVICE_NAMES = (
    "index",
    "gpu_index",
    "gpu",
    "device",
    "gpu_id",
    "card",
    "device_id",
    "uuid",
    "gpu_uuid",
    "pci.bus_id",
)
_ABSENT = frozenset(
    ("", "n/a", "[n/a]", "[not supported]", "[unknown error]", "not active", "none", "nan")
)


def sniff(head: bytes) -> bool:
    """Return whether a file is such a log, by its first line."""
    heading = cells_of(head.decode("utf-8-sig", "replace"))
    return _is_log(list(map(_plain, heading))) or _is_energy_log(heading)


def _is_energy_log(heading: list[str]) -> bool:
    names = [cell.strip() for cell in heading]
    return set(_WINDOW) <= set(names) and any(map(_GPU_ENERGY.fullmatch, names))


def _is_log(columns: list[tuple[str, str | None]]) -> bool:
    return (
        any(name in _TIME_NAMES for name, _ in columns)
        and any(_column_of(name) for name, _ in columns)
        # nvidia-smi's names tell its log, also of one device without a column that says so.
        and any(name in _DEVICE_NAMES or ("." in name and _column_of(name)) for name, _ in columns)
    )


def _plain(heading: str) -> tuple[str, str | None]:
    """(name, unit) of a heading: ``power.draw [W]``, ``temp_junction_celsius``, ``power_W``."""
    text = heading.strip().strip('"').lower()
    at = max(text.rfind("["), text.rfind("("))
    unit = text[at + 1 : -1].strip()
    if at >= 0 and text.endswith(("]", ")")) and unit and not {*unit} & {*"])"}:
        return text[:at].strip().replace(" ", "_"), unit
    name = text.replace(" ", "_")
    stem, _, last = name.rpartition("_")
    if stem and last in _UNITS:
        return stem, last
    return name, None


def _column_of(name: str) -> tuple[str, str] | None:
    for pattern, table, column in _COLUMNS:
        if pattern.fullmatch(name):
            return table, column
    return None


def read_log(lines: Iterable[str], where: str, *, zone: tzinfo | None = None) -> TelemetryLog:
    """Read a log. -> DEVICE_CLOCK, DEVICE_COUNTER; ENERGY_WINDOW of one of Zeus.

    Args:
        lines: of the file.
        where: its name, for messages.
        zone: time zone of times that name none (nvidia-smi's are local); None for UTC.

    Raises:
        InputError: no such log, or not a row of it can be read.
    """
    content = iter(lines)
    first = next(content, "")
    heading = cells_of(first)
    columns = [_plain(cell) for cell in heading]
    if _is_log(columns):
        log = _device_log(content, heading, columns, where, zone)
    elif _is_energy_log(heading):
        log = _energy_log(content, [cell.strip() for cell in heading])
    else:
        raise InputError(
            f"{where}: not a telemetry log: expected a heading with a time, a device and clocks, "
            "power or the like; found " + (repr(first.rstrip()[:80]) if first else "an empty file")
        )
    if not log.tables:
        raise InputError(
            f"{where}: a telemetry log without a readable row ({log.bad_rows_count} could not be "
            "read)"
        )
    return log


_WINDOW = ("start_time", "window_name", "elapsed_time")
_GPU_ENERGY = re.compile(r"gpu(\d{1,4})_energy")
_MOST_WINDOW = 1e10
"""Seconds or joules that no window has."""


def _energy_log(content: Iterable[str], heading: list[str]) -> TelemetryLog:
    """Read the windows of a log of Zeus."""
    log = TelemetryLog()
    gpus = [(int(m[1]), i) for i, name in enumerate(heading) if (m := _GPU_ENERGY.fullmatch(name))]
    rows: list[tuple[object, ...]] = []
    for line in filter(str.strip, content):
        cells = [cell.strip() for cell in cells_of(line)]
        # Of columns of one name the first counts.
        values = zip(reversed(heading), reversed(cells), strict=False)
        row = dict(values) if len(cells) == len(heading) else {}
        start_s, elapsed_s = (_decimal(row.get(n, "")) for n in ("start_time", "elapsed_time"))
        if start_s is None or elapsed_s is None:
            log.bad_rows_count += 1
            continue
        log.rows_count += 1
        span_ns = _seconds_ns(elapsed_s)
        time_ns = _seconds_ns(start_s) + span_ns // 2
        window = row["window_name"] or "(no name)"
        for device, column in gpus:
            energy_j = _decimal(cells[column])
            if energy_j is not None:
                rows.append((time_ns, span_ns, device, None, window, float(energy_j)))
    if rows:
        table = TABLES["energy_window"].validate(table_of_rows("energy_window", rows))
        log.tables["energy_window"] = table.sort_by("time_ns")
    known = {*_WINDOW, *(heading[i] for _, i in gpus)}
    log.ignored = tuple(name for name in heading if name not in known)
    return log


def _decimal(text: str) -> str | None:
    """Parse a number; None if it is not a plausible energy or time."""
    try:
        value = nan if "_" in text else float(text)
    except ValueError:
        return None
    return text if isfinite(value) and 0 <= value < _MOST_WINDOW else None


def _seconds_ns(seconds: str) -> int:
    """By way of the digits: a float of seconds since 1970 tells no microseconds apart."""
    plain = re.fullmatch(r"(\d+)(?:\.(\d*))?", seconds)
    if plain is None:
        return round(float(seconds) * 1e9)
    return int(plain[1]) * 10**9 + int(((plain[2] or "") + "000000000")[:9])


def _device_log(
    content: Iterable[str],
    heading: list[str],
    columns: list[tuple[str, str | None]],
    where: str,
    zone: tzinfo | None,
) -> TelemetryLog:
    """Read the rows of devices, each at a moment."""
    rows = _Rows(columns, where, zone)
    log = rows.log
    try:
        for cells in csv.reader(content, skipinitialspace=True):
            if cells:
                rows.add(cells)
        rows.check_device()
    except csv.Error as exc:
        raise InputError(f"{where}: a telemetry log that is not CSV ({exc})") from exc
    for name, listed in rows.rows.items():
        if listed:
            log.tables[name] = table = _by_device(name, rows.placed[name], listed)
            log.repeated_count = max(log.repeated_count, len(listed) - table.num_rows)
    log.ignored = tuple(cell.strip() for i, cell in enumerate(heading) if i not in rows.used)
    return log


_EVERY_ROW = ("time_ns", "span_ns", "device_id", "device_uuid")


class _Rows:
    """Rows of a log on their way into tables.

    Attributes:
        placed: (position, column, unit) of what is read of a row, by table.
        rows: of each table: what :data:`_EVERY_ROW` names, then the placed columns.
        used: columns of the log that are read.
        times_ns: of each row.
        log: what is counted of them.
    """

    def __init__(
        self, columns: list[tuple[str, str | None]], where: str, zone: tzinfo | None
    ) -> None:
        self._width = len(columns)
        self._where = where
        self._zone = zone
        self._time, self._device, self._uuid = (
            next((i for i, (name, _) in enumerate(columns) if name in names), -1)
            for names in (_TIME_NAMES, _DEVICE_NAMES, ("uuid", "gpu_uuid"))
        )
        self._uuids: dict[str, int] = {}
        self._devices: set[int] = set()
        placed = _placed(columns, (self._time, self._device))
        self.placed: dict[str, list[tuple[int, str, str | None]]] = {}
        for i, (table, column, unit) in placed.items():
            self.placed.setdefault(table, []).append((i, column, unit))
        self.rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in self.placed}
        self.used = {self._time, self._device, self._uuid, *placed}
        self.log = TelemetryLog()
        self.times_ns: list[int] = []

    def check_device(self) -> None:
        """Refuse rows that come several at a time if none says which device it is of."""
        gaps = sorted(b - a for a, b in pairwise(sorted(self.times_ns)))
        if self._device < 0 and gaps and gaps[len(gaps) // 4] * 10 < gaps[len(gaps) * 9 // 10]:
            raise InputError(
                f"{self._where}: rows of several devices, and no column says which (index, uuid or "
                "pci.bus_id); record again with nvidia-smi --query-gpu=index,timestamp,…"
            )

    def add(self, cells: list[str]) -> None:
        """Take a row, or count it as one that cannot be read."""
        # Some loggers leave out what a device does not tell, at the end of the row.
        is_complete = max(self._time, self._device) < len(cells) <= self._width
        moment = _time_ns(cells[self._time], self._zone) if is_complete else None
        device = None
        if moment is not None:
            device = 0 if self._device < 0 else _device(cells[self._device], self._uuids)
        if moment is None or device is None:
            self.log.bad_rows_count += 1
            return
        self._devices.add(device)
        if len(self._devices) > _MOST_DEVICES:
            raise InputError(
                f"{self._where}: rows of more than {_MOST_DEVICES} devices, more than any host has"
            )
        time_ns, named_zone = moment
        self.times_ns.append(time_ns)
        self.log.local_time |= not named_zone
        self.log.rows_count += 1
        uuid = cells[self._uuid].strip() if 0 <= self._uuid < len(cells) else None
        for table, placed in self.placed.items():
            values = [
                _value(cells[i], column, unit) if i < len(cells) else None
                for i, column, unit in placed
            ]
            if any(value is not None for value in values):
                self.rows[table].append((time_ns, 0, device, uuid, *values))


def _placed(
    columns: list[tuple[str, str | None]], taken: tuple[int, ...]
) -> dict[int, tuple[str, str, str | None]]:
    """(table, column, unit) of each column of a log that is read; the first of several alike."""
    placed: dict[int, tuple[str, str, str | None]] = {}
    for i, (name, unit) in enumerate(columns):
        target = _column_of(name) if i not in taken else None
        # A number of another unit is another number: temperatures in K, sizes in pages.
        if target is not None and unit is not None:
            measured = _UNITS.get(unit, ("",))[0]
            target = target if measured == target[1].rpartition("_")[2] else None
        earlier = next((at for at, known in placed.items() if known[:2] == target), None)
        if earlier is not None and name == _INSTANT:
            del placed[earlier]
        if target is not None and (earlier is None or name == _INSTANT):
            placed[i] = (*target, unit)
    return placed


def _by_device(
    name: str, placed: list[tuple[int, str, str | None]], rows: list[tuple[Any, ...]]
) -> pa.Table:
    """The rows as a table sorted by time, each device's without times that passed twice."""
    declared = TABLES[name]
    names = (*_EVERY_ROW, *(column for _, column, _ in placed))
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    arrays = [to_arrow(columns.get(f.name, [None] * len(rows)), f.type) for f in declared.arrow]
    table = pa.Table.from_arrays(arrays, schema=declared.arrow)
    parts = [
        in_order(table.filter(pc.equal(table["device_id"], device)))
        for device in pc.unique(table["device_id"])
    ]
    return declared.validate(pa.concat_tables(parts).unify_dictionaries().sort_by("time_ns"))


def _device(cell: str, uuids: dict[str, int]) -> int | None:
    """``3``, ``card3``, ``GPU[3]``; UUIDs and PCI addresses are numbered as they come."""
    text = cell.strip()
    if text.upper().startswith("GPU-") or ":" in text:
        return uuids.setdefault(text, len(uuids))
    match = re.fullmatch(r"(?:[A-Za-z]*\[?)([0-9]{1,9})\]?", text)
    return int(match[1]) if match else None


def _value(cell: str, column: str, unit: str | None) -> Any:
    """Parse a cell in its column's unit; None if it is a placeholder for a missing value."""
    # rocm-smi writes clocks in brackets: (1321Mhz).
    text = cell.strip().strip("()").lower()
    if text in _ABSENT:
        return None
    if column == "event_reasons":
        try:
            bits = int(text, 0)
        except ValueError:
            return None
        return bits if 0 <= bits < _BEYOND else None
    match = re.fullmatch(r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([a-z°%]*)", text)
    if not match:
        return None
    wanted = column.rpartition("_")[2]
    written = match[2] or unit
    plain = wanted, _PLAIN_UNIT.get(wanted)
    kind, factor = _UNITS.get(written, ("", None)) if written else plain
    if kind != wanted or factor is None:
        return None
    value = float(match[1]) * factor
    # A sensor may stand below 0 °C; nothing else may, and no counter of ours holds 2^63.
    if not isfinite(value) or value >= _BEYOND or (value < 0 and wanted != "c"):
        return None
    if value > _MOST.get(wanted, value) or (not value and wanted in ("hz", "w")):
        return None
    return round(value) if wanted in ("hz", "bytes") else value


_MOST = {"hz": 2e10, "w": 1e4, "ratio": 1.0}
"""What no device reaches: blanks that a tool printed as a number."""
_BEYOND = 1 << 63
"""What a column of whole numbers does not hold."""


def _time_ns(cell: str, zone: tzinfo | None) -> tuple[int, bool] | None:
    """Parse (Unix time, whether the text names its zone); None outside 1970 to 2262."""
    text = cell.strip()
    number = re.fullmatch(r"([0-9]{1,19})(?:\.([0-9]{1,9})[0-9]*)?", text)
    if number:
        # Seconds, ms, µs or ns since 1970, told apart by magnitude.
        digits = len(number[1])
        scale = 10 ** max(0, 9 - max(0, (digits - 10) // 3 * 3))
        fraction = int((number[2] or "0").ljust(9, "0")) * scale // 10**9
        time_ns = int(number[1]) * scale + fraction
        return (time_ns, True) if time_ns < _BEYOND else None
    try:
        moment = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        return None
    named = moment.tzinfo is not None
    aware = moment if named else moment.replace(tzinfo=zone or UTC)
    since = aware - datetime(1970, 1, 1, tzinfo=UTC)
    time_ns = (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000
    return (time_ns, named) if 0 <= time_ns < _BEYOND else None
