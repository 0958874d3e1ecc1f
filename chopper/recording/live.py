"""A run while it is being recorded: what its ranks and devices do now, and an endpoint for that.

Everything is read from the files that ranks and samplers flush about once a second, so that
watching costs the training nothing but the reader's own time.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper.errors import ChopperError, RunFormatError, UsageError
from chopper.quantities import digits
from chopper.storage import clock
from chopper.storage import manifest as m
from chopper.storage.files import read_bytes
from chopper.storage.layout import rank_dirs
from chopper.storage.streams import DamagedStreamError, arrow_errors, check_batch
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

_STEPS_SHOWN = 50
"""Steps whose median is the step time now."""


class StreamTail:
    """Reads an Arrow stream as it grows; the file need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: Any = None
        self._file: Any = None
        self._inode: int | None = None
        self._read_count = 0

    def poll(self) -> list[pa.RecordBatch]:
        """Batches that were written since the last call."""
        import pyarrow as pa

        batches: list[pa.RecordBatch] = []
        try:
            if self.path.stat().st_ino != self._inode:
                # Written anew, as a whole.
                self.close()
                self._read_count = 0
            if self._reader is None:
                self._file = self.path.open("rb")
                self._inode = os.fstat(self._file.fileno()).st_ino
                self._reader = pa.ipc.open_stream(self._file)
                if not self._reader.schema.equals(TABLES[self.path.stem].arrow):
                    raise DamagedStreamError("its header is damaged")
                for _ in range(self._read_count):
                    self._reader.read_next_batch()
            while True:
                batch = self._reader.read_next_batch()
                check_batch(batch)
                batches.append(batch)
                self._read_count += 1
        except (StopIteration, FileNotFoundError):
            return batches
        except arrow_errors():
            # The end of the file was being written: begin again at the next call.
            self.close()
            return batches

    def close(self) -> None:
        """Close the file; the next poll goes on where this one ended."""
        if self._file is not None:
            self._file.close()
        self._file = self._reader = None


@dataclass
class LiveRank:
    """Latest readings of one rank; None for values that are not known (yet).

    Attributes:
        step: number of the last step that ended.
        step_ns: median duration of the last steps.
        cpu_ratio: CPU time over wall time, children included.
    """

    rank: int
    step: int | None = None
    step_ns: int | None = None
    cpu_ratio: float | None = None
    rss_bytes: int | None = None
    device_allocated_bytes: int | None = None
    durations_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_STEPS_SHOWN))


@dataclass
class LiveDevice:
    """Latest readings of one device; None for unknown values."""

    hostname: str
    device_id: int
    uuid: str | None = None
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    power_w: float | None = None
    event_reasons: int | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    energy_j: float | None = None


@dataclass
class Snapshot:
    """A run at one moment.

    Attributes:
        time_ns: when it was taken.
        traces: kernel traces that are finished by now.
    """

    time_ns: int
    ranks: list[LiveRank]
    devices: list[LiveDevice]
    traces: list[Path]


_RANK_TABLES = ("step", "process", "device_memory")
_DEVICE_TABLES = ("device_clock", "device_counter")


class LiveRun:
    """Follows a run directory, which may still be empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tails: dict[Path, StreamTail] = {}
        self._ranks: dict[int, LiveRank] = {}
        self._devices: dict[tuple[str, int], LiveDevice] = {}
        self._hosts: dict[str, str] = {}
        self._read_ns: dict[tuple[str, int, str], int] = {}
        """Host, device and table → its newest row."""
        self._newest_ns: dict[str, int] = {}
        """Host → its newest row of any kind of telemetry."""

    def poll(self) -> Snapshot:
        """Read the rows that were flushed since the last call."""
        for folder in rank_dirs(self.path):
            number = digits(folder.name.partition("-")[2])
            if number is None:
                continue
            self._ranks.setdefault(number, LiveRank(number))
            for table in (*_RANK_TABLES, *_DEVICE_TABLES):
                path = folder / f"{table}.arrow"
                for batch in self._tails.setdefault(path, StreamTail(path)).poll():
                    self._take(table, number, self._host(folder), batch)
        return Snapshot(
            clock.now_ns(),
            [self._ranks[rank] for rank in sorted(self._ranks)],
            [self._known_now(self._devices[key]) for key in sorted(self._devices)],
            sorted(self.path.glob("rank-*/trace*.json*")),
        )

    def _known_now(self, device: LiveDevice) -> LiveDevice:
        """Return the device without readings much older than the newest of its host."""
        host, number = device.hostname, device.device_id
        gone = {
            name: None
            for table, names in _DEVICE_COLUMNS.items()
            if self._newest_ns[host] - self._read_ns.get((host, number, table), 0) > _STALE_NS
            for name in names
        }
        return dataclasses.replace(device, **gone)  # type: ignore[arg-type]

    def _host(self, folder: Path) -> str:
        if folder.name not in self._hosts:
            try:
                data = read_bytes(folder / "manifest.json", error=RunFormatError)
                part = m.decode_rank(data, folder.name)
            except (OSError, RunFormatError):
                return ""
            self._hosts[folder.name] = part.hostname or ""
        return self._hosts[folder.name]

    def _take(self, table: str, rank: int, host: str, batch: pa.RecordBatch) -> None:
        if table == "step":
            live = self._ranks[rank]
            starts, ends = batch["start_ns"].to_pylist(), batch["end_ns"].to_pylist()
            live.durations_ns.extend(e - s for s, e in zip(starts, ends, strict=True))
            if starts:
                live.step = batch["number"][-1].as_py()
                live.step_ns = round(statistics.median(live.durations_ns))
            return
        # Of the telemetry only the newest row of each device or rank is shown.
        for row in batch.slice(max(batch.num_rows - _NEWEST, 0)).to_pylist():
            self._newest_ns[host] = max(self._newest_ns.get(host, 0), row["time_ns"])
            if table == "process":
                owner = self._ranks.setdefault(row["rank"], LiveRank(row["rank"]))
                owner.cpu_ratio, owner.rss_bytes = row["cpu_ratio"], row["rss_bytes"]
            elif table == "device_memory":
                self._ranks[rank].device_allocated_bytes = row["allocated_bytes"]
            else:
                key = (host, row["device_id"])
                device = self._devices.setdefault(key, LiveDevice(*key))
                device.uuid = row["device_uuid"]
                self._read_ns[*key, table] = row["time_ns"]
                for name in _SHOWN & row.keys():
                    setattr(device, name, row[name])

    def close(self) -> None:
        """Close all files."""
        for tail in self._tails.values():
            tail.close()


_NEWEST = 64
"""Rows at a batch's end in which every device of a host occurs."""
_SHOWN = frozenset(LiveDevice.__dataclass_fields__) - {"hostname", "device_id", "uuid"}
_DEVICE_COLUMNS = {
    table: _SHOWN & {column.name for column in TABLES[table].columns} for table in _DEVICE_TABLES
}
_STALE_NS = 10_000_000_000
"""A device that fell off the bus is not shown as it last was."""

DEFAULT_HOST = "127.0.0.1"

# Name → (help, attribute of LiveRank or LiveDevice, scale to Prometheus' base unit).
_RANK_METRICS: dict[str, tuple[str, str, float]] = {
    "chopper_step": ("Number of the last step that ended", "step", 1),
    "chopper_step_seconds": ("Median duration of the last steps", "step_ns", 1e-9),
    "chopper_rank_cpu_ratio": ("CPU time over wall time, children included", "cpu_ratio", 1),
    "chopper_rank_resident_bytes": ("Resident memory, children included", "rss_bytes", 1),
    "chopper_rank_device_allocated_bytes": (
        "Device memory held by tensors",
        "device_allocated_bytes",
        1,
    ),
}
_DEVICE_METRICS: dict[str, tuple[str, str, float]] = {
    "chopper_device_sm_clock_hertz": ("SM (gfx) clock", "sm_clock_hz", 1),
    "chopper_device_memory_clock_hertz": ("Memory clock", "memory_clock_hz", 1),
    "chopper_device_power_watts": ("Board power", "power_w", 1),
    "chopper_device_energy_joules_total": ("Energy since the driver was loaded", "energy_j", 1),
    "chopper_device_temperature_celsius": ("Temperature of the chip", "temperature_c", 1),
    "chopper_device_memory_used_bytes": ("Device memory in use", "memory_used_bytes", 1),
    "chopper_device_clock_event_reasons": (
        "Bits as NVML's clocks event reasons",
        "event_reasons",
        1,
    ),
}


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of ``PORT``, ``:PORT``, ``HOST:PORT`` or ``[HOST]:PORT``; loopback by default.

    Raises:
        UsageError: no such address.
    """
    host, _, written = text.rpartition(":")
    port = digits(written)
    if port is None or port >= 1 << 16:
        raise UsageError(f"{text!r}: not an address; expected PORT or HOST:PORT, for example 9400")
    return host.strip("[]") or DEFAULT_HOST, port


class _Collector:
    def __init__(self, latest: Callable[[], Snapshot]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._latest()
        for metrics, items, labels, of in (
            (_RANK_METRICS, snapshot.ranks, ["rank"], lambda r: [str(r.rank)]),
            (
                _DEVICE_METRICS,
                snapshot.devices,
                ["host", "device", "uuid"],
                lambda d: [d.hostname, str(d.device_id), d.uuid or ""],
            ),
        ):
            for name, (text, attribute, scale) in metrics.items():
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(name, text, labels=labels)
                for item in items:
                    value = getattr(item, attribute)
                    # What is not known has no sample: Prometheus has no null.
                    if value is not None:
                        family.add_metric(of(item), value * scale)
                yield family


def serve(
    address: tuple[str, int], latest: Callable[[], Snapshot]
) -> tuple[int, Callable[[], None]]:
    """Serve ``/metrics`` from a thread of its own; return the port, and a function that ends it.

    Port 0 takes a free one; ``latest`` is called by the server's threads.

    Raises:
        ChopperError: prometheus-client is missing, or the address cannot be taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as exc:
        raise ChopperError(
            "prometheus-client is not installed: pip install 'chopper-profiler[prometheus]'"
        ) from exc
    registry = CollectorRegistry()
    registry.register(_Collector(latest))
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        raise ChopperError(
            f"{host}:{port}: cannot serve metrics there ({exc.strerror or exc}); "
            "choose another port"
        ) from exc

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
