"""A Prometheus endpoint for a run that is being recorded, for long runs without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.errors import ChopperError, UsageError
from chopper.quantities import digits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chopper.recording.live import Snapshot

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
