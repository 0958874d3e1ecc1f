"""A run while it goes on, as a panel for a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chopper import wording as fmt
from chopper.errors import printable
from chopper.recording.live import Snapshot

_RANKS, _DEVICES = 8, 8
# Bits of NVML's clocks event reasons, worst first.
_REASONS = (
    (0x8, "hardware slowdown"),
    (0x80, "power brake"),
    (0x40, "hardware thermal"),
    (0x20, "thermal"),
    (0x4, "power cap"),
    (0x10, "sync boost"),
    (0x2, "application clock"),
    (0x1, "idle"),
)


def reasons_text(bits: int | None) -> str:
    """Return event reasons in words, worst first; unnamed ones as bits."""
    if bits is None:
        return fmt.UNKNOWN
    named = [text for bit, text in _REASONS if bits & bit]
    rest = bits & ~sum(bit for bit, _ in _REASONS)
    return ", ".join([*named, *([hex(rest)] if rest else [])]) or "none"


def _grid(*columns: str) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def panel(snapshot: Snapshot, title: str, verdict: str = "") -> Panel:
    """Return ranks, devices, and what bounds the run so far."""
    parts: list[Table | Text] = []
    ranks = _grid("rank", "step", "step time", "CPU", "memory", "device memory")
    slowest = sorted(snapshot.ranks, key=lambda r: -(r.step_ns or 0))[:_RANKS]
    for rank in sorted(slowest, key=lambda r: r.rank):
        ranks.add_row(
            str(rank.rank),
            fmt.UNKNOWN if rank.step is None else fmt.count(rank.step),
            fmt.duration(rank.step_ns),
            fmt.ratio(rank.cpu_ratio),
            fmt.bytes_(rank.rss_bytes),
            fmt.bytes_(rank.device_allocated_bytes),
        )
    parts.append(ranks if snapshot.ranks else Text("no rank has started yet", style="dim"))
    if len(snapshot.ranks) > _RANKS:
        parts.append(Text(f"the slowest {_RANKS} of {len(snapshot.ranks)} ranks", style="dim"))
    if snapshot.devices:
        parts.append(Text())
        devices = _grid("device", "clock", "power", "temperature", "memory", "driver's reasons")
        several = len({device.hostname for device in snapshot.devices}) > 1
        for device in snapshot.devices[:_DEVICES]:
            number = str(device.device_id)
            devices.add_row(
                f"{printable(device.hostname)} {number}" if several else number,
                fmt.hertz(device.sm_clock_hz),
                fmt.cell("power_w", device.power_w),
                fmt.cell("temperature_c", device.temperature_c),
                fmt.bytes_(device.memory_used_bytes),
                reasons_text(device.event_reasons),
            )
        parts.append(devices)
        if len(snapshot.devices) > _DEVICES:
            parts.append(Text(f"{_DEVICES} of {len(snapshot.devices)} devices", style="dim"))
    if verdict:
        parts += [Text(), Text(printable(verdict))]
    return Panel(Group(*parts), title=Text(printable(title)), title_align="left", expand=True)
