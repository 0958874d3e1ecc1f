"""Telemetry as series over time: one list for the figure of the run and the strips of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace.samples import per_device
from chopper.analyzers.views.queue_depth import depths as depths_of

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.storage.run import Run


@dataclass(frozen=True, slots=True)
class Series:
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


def collect(run: Run) -> list[Series]:
    """All telemetry of a run, host-wide first."""
    series: list[Series] = []
    for rank in run.ranks:
        series += _device(run, rank)
    for rank in run.ranks:
        series += _cpu(run.table(rank, "cpu_core"), rank, run)
        series += _host(run.table(rank, "host"), rank, run)
        series += _nic(run.table(rank, "nic"), rank, run)
    for rank in run.ranks:
        series += _process(run.table(rank, "process"))
        series += _device_memory(run.table(rank, "device_memory"), rank)
        series += _allocator(run.table(rank, "memory_event"), rank)
        series += _counters(run.table(rank, "counter"), rank)
    series.sort(key=_place)
    return [with_gaps(s) for s in series if len(s.time_ns) > 1 and np.isfinite(s.value).any()]


_FIRST = (
    *("SM clock", "SM clock, driver's own samples", "Memory clock, driver's own samples"),
    *("Board power", "Board power, driver's own samples"),
    *("Temperature", "Device busy", "Device units"),
    *("NVLink, XGMI", "PCIe"),
)
"""Panels of devices come first: they explain the kernels above them."""


def _place(series: Series) -> int:
    return _FIRST.index(series.panel) if series.panel in _FIRST else len(_FIRST)


_GAP_FACTOR = 4
_LEAST_GAP_NS = 2_000_000


def with_gaps(series: Series) -> Series:
    """A series with NaN where samples are missing, so that no line is drawn across a hole."""
    if len(series.time_ns) < 3:
        return series
    span = np.diff(series.time_ns)
    hole = np.flatnonzero(span > max(_GAP_FACTOR * float(np.median(span)), _LEAST_GAP_NS))
    if not len(hole) or series.panel not in SAMPLED:
        return series
    return Series(
        series.panel,
        series.label,
        series.unit,
        series.rank,
        np.insert(series.time_ns, hole + 1, series.time_ns[hole] + span[hole] // 2),
        np.insert(series.value, hole + 1, np.nan),
    )


_BUFFERED = {
    "sm_clock_hz": ("SM clock, driver's own samples", "hz"),
    "memory_clock_hz": ("Memory clock, driver's own samples", "hz"),
    "power_w": ("Board power, driver's own samples", "w"),
}
"""What ``device_buffered`` holds; clocks are written when they change."""

SAMPLED = frozenset((*_FIRST, "CPU", "CPU of ranks", "Pressure", "Network", "Memory of ranks")) - {
    panel for panel, _ in _BUFFERED.values()
}
"""Panels of what is read at a rate; what is said at events (allocations) holds until the next."""


_DEVICE_CLOCK = (("sm_clock_hz", "SM clock", "hz", ""), ("power_w", "Board power", "w", ""))
_DEVICE_COUNTER = (
    ("temperature_c", "Temperature", "c", ""),
    ("memory_temperature_c", "Temperature", "c", " memory"),
    ("device_utilization_ratio", "Device busy", "ratio", ""),
)
_DEVICE_ACTIVITY = (
    ("sm_utilization_ratio", "Device units", "ratio", " SMs"),
    ("tensor_utilization_ratio", "Device units", "ratio", " tensor cores"),
    ("dram_utilization_ratio", "Device units", "ratio", " memory"),
)
_DEVICE_TABLES = (
    ("device_clock", _DEVICE_CLOCK),
    ("device_counter", _DEVICE_COUNTER),
    ("device_activity", _DEVICE_ACTIVITY),
)
_DEVICE_RATES = (
    ("link_tx_bytes", "NVLink, XGMI", " sent"),
    ("link_rx_bytes", "NVLink, XGMI", " received"),
    ("pcie_tx_bytes", "PCIe", " sent"),
    ("pcie_rx_bytes", "PCIe", " received"),
    ("pcie_bytes", "PCIe", " both ways"),
)


def _device(run: Run, rank: int) -> list[Series]:
    """Clock, power, temperature, use, units and links of the device that a rank computes on.

    Of a log without a trace, those of each device in it.
    """
    import pyarrow.compute as pc

    found: list[Series] = []
    for name, columns in _DEVICE_TABLES:
        for number, table in per_device(run, rank, name):
            who, times = _device_name(rank, number), _times(table)
            for column, panel, unit, of in columns:
                values = _numbers(table, column)
                found.append(Series(panel, f"{who}{of}", unit, rank, times, values))
    for number, table in per_device(run, rank, "device_buffered"):
        for quantity, (panel, unit) in _BUFFERED.items():
            of_it = table.filter(pc.equal(table["quantity"], quantity))
            who, values = _device_name(rank, number), _numbers(of_it, "value")
            found.append(Series(panel, who, unit, rank, _times(of_it), values))
    for number, table in per_device(run, rank, "device_counter"):
        for column, panel, way in _DEVICE_RATES:
            at, per_ns = _derivative(_times(table), _numbers(table, column))
            if np.nanmax(per_ns, initial=0) > 0:
                label = f"{_device_name(rank, number)}{way}"
                found.append(Series(panel, label, "bytes_per_s", rank, at, per_ns * 1e9))
    return found


def _device_name(rank: int, number: int | None) -> str:
    return f"rank {rank}" if number is None else f"device {number}"


def _numbers(table: pa.Table, column: str) -> np.ndarray:
    values: np.ndarray = table[column].to_numpy().astype(np.float64)
    return values


def _times(table: pa.Table) -> np.ndarray:
    values: np.ndarray = table["time_ns"].to_numpy()
    return values


def _whose(run: Run, rank: int) -> str:
    """A host's name where there are several, so that their series are told apart."""
    hosts = {p.hostname for p in run.manifest.ranks}
    name = run.part(rank).hostname
    return f" {name}" if len(hosts) > 1 and name else ""


def _cpu(table: pa.Table, rank: int, run: Run) -> list[Series]:
    if not table.num_rows:
        return []
    times, busy = _times(table), _numbers(table, "busy_ratio")
    instants, codes = np.unique(times, return_inverse=True)
    valid = np.isfinite(busy)
    counts = np.bincount(codes[valid], minlength=len(instants))
    with np.errstate(invalid="ignore"):
        mean = np.bincount(codes[valid], busy[valid], len(instants)) / np.where(
            counts, counts, np.nan
        )
    highest = np.full(len(instants), -np.inf)
    np.maximum.at(highest, codes[valid], busy[valid])
    highest[~np.isfinite(highest)] = np.nan
    whose = _whose(run, rank)
    return [
        Series("CPU", f"mean of cores{whose}", "ratio", None, instants, mean),
        Series("CPU", f"busiest core{whose}", "ratio", None, instants, highest),
    ]


def _host(table: pa.Table, rank: int, run: Run) -> list[Series]:
    if not table.num_rows:
        return []
    times, whose = _times(table), _whose(run, rank)
    found = [
        Series(
            "Host memory available",
            f"available{whose}",
            "bytes",
            None,
            times,
            _numbers(table, "memory_available_bytes"),
        )
    ]
    for column, label in (
        ("pressure_cpu_some_ns", "waiting for a core"),
        ("pressure_memory_some_ns", "waiting for memory"),
        ("pressure_io_some_ns", "waiting for I/O"),
        ("cgroup_throttled_ns", "throttled by quota"),
    ):
        if column in table.column_names:
            at, share = _derivative(times, _numbers(table, column))
            if np.nanmax(share, initial=0) > 0:
                found.append(Series("Pressure", f"{label}{whose}", "ratio", None, at, share))
    return found


def _derivative(times: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rate of a running total, per unit of time (ns/ns is a ratio); a reset counter is unknown."""
    valid = np.isfinite(total)
    times, total = times[valid], total[valid]
    if len(times) < 2:
        return times[:0], total[:0]
    span = np.diff(times).astype(np.float64)
    change = np.diff(total)
    keep = span > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(change >= 0, change / span, np.nan)
    return times[1:][keep], rate[keep]


def _nic(table: pa.Table, rank: int, run: Run) -> list[Series]:
    found: list[Series] = []
    if not table.num_rows:
        return found
    names = table["interface"].to_numpy(zero_copy_only=False)
    times, whose = _times(table), _whose(run, rank)
    for name in dict.fromkeys(names.tolist()):
        mine = names == name
        for column, label in (("rx_bytes", "received"), ("tx_bytes", "sent")):
            at, per_ns = _derivative(times[mine], _numbers(table, column)[mine])
            if np.nanmax(per_ns, initial=0) > 0:
                found.append(
                    Series(
                        "Network", f"{name} {label}{whose}", "bytes_per_s", None, at, per_ns * 1e9
                    )
                )
    return found


def _process(table: pa.Table) -> list[Series]:
    if not table.num_rows:
        return []
    # The sampler of one rank may have watched all ranks of its host.
    found = []
    owner = table["rank"].to_numpy()
    times, cpu, rss = _times(table), _numbers(table, "cpu_ratio"), _numbers(table, "rss_bytes")
    for r in np.unique(owner):
        mine = owner == r
        found += [
            Series("CPU of ranks", f"rank {r}", "ratio", int(r), times[mine], cpu[mine]),
            Series("Memory of ranks", f"rank {r}", "bytes", int(r), times[mine], rss[mine]),
        ]
    return found


def _device_memory(table: pa.Table, rank: int) -> list[Series]:
    if not table.num_rows:
        return []
    times = _times(table)
    return [
        Series(
            "Device memory",
            f"rank {rank} {label}",
            "bytes",
            rank,
            times,
            _numbers(table, column),
        )
        for column, label in (("allocated_bytes", "in tensors"), ("reserved_bytes", "reserved"))
    ]


_HOST_DEVICE_TYPE = 0


def _allocator(table: pa.Table, rank: int) -> list[Series]:
    """Totals after each allocator event of a trace, per device."""
    found: list[Series] = []
    if not table.num_rows:
        return found
    kind = _numbers(table, "device_type")
    device = _numbers(table, "device_id")
    times = _times(table)
    on_device = kind != _HOST_DEVICE_TYPE
    for number in np.unique(device[on_device & np.isfinite(device)]):
        mine = on_device & (device == number)
        for column, label in (("allocated_bytes", "in tensors"), ("reserved_bytes", "reserved")):
            values = _numbers(table, column)[mine]
            order = np.argsort(times[mine], kind="stable")
            found.append(
                Series(
                    "Device memory",
                    f"rank {rank} {label}",
                    "bytes",
                    rank,
                    times[mine][order],
                    values[order],
                )
            )
    return found


def _counters(table: pa.Table, rank: int) -> list[Series]:
    found: list[Series] = []
    if not table.num_rows:
        return found
    track = np.array(table["track"].to_pylist(), dtype=object)
    name = np.array(table["name"].to_pylist(), dtype=object)
    times, values = _times(table), _numbers(table, "value")
    for key in dict.fromkeys(zip(track.tolist(), name.tolist(), strict=True)):
        mine = (track == key[0]) & (name == key[1])
        order = np.argsort(times[mine], kind="stable")
        found.append(
            Series(
                f"Counter {key[1]}", str(key[0]), "", rank, times[mine][order], values[mine][order]
            )
        )
    return found


_QUEUE_RANKS = 8
LARGEST_DRAWN = 1e30
"""Values beyond are holes in curves: the page draws with 32 bits, and an axis spans them all."""


def queues(run: Attributed) -> list[Series]:
    """Launches that wait or run, all streams of a rank together; of the first few ranks."""
    found = []
    for rank in list(run.joined)[:_QUEUE_RANKS]:
        depths = depths_of(run, rank)
        if not depths:
            continue
        time = np.concatenate([d.time_ns for d in depths])
        change = np.concatenate([np.diff(d.count, prepend=0) for d in depths])
        order = np.argsort(time, kind="stable")
        entries = np.cumsum(change[order]).astype(np.float64)
        found.append(Series("Launch queue", f"rank {rank}", "", rank, time[order], entries))
    return [s for s in found if len(s.time_ns) > 1]


def thin(series: Series, points: int) -> Series:
    """At most about ``points`` samples: the extremes of each bin, so that no peak is lost."""
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
    found = [first + low.reshape(rows, size).argmin(1), first + high.reshape(rows, size).argmax(1)]
    # Holes stay holes: the first unknown of each run of them is kept, too.
    unknown = np.isnan(series.value)
    found.append(np.flatnonzero(unknown & ~np.concatenate([[False], unknown[:-1]])))
    index = np.unique(np.concatenate(found))
    return Series(
        series.panel,
        series.label,
        series.unit,
        series.rank,
        series.time_ns[index],
        series.value[index],
    )
