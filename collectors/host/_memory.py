"""Traffic of the host's memory: its controllers' own counters, and what the kernel monitors."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.base import held
from chopper.collectors.host._processes import open_event, read_event, why_uncounted
from chopper.collectors.procfs import FileSource, KeptFile, counted
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from chopper.collectors.sampler import Sink

_CONTROLLERS = re.compile(r"uncore_imc(_free_running)?(_\d+)?|amd_umc_\d+")
_EVENTS = {
    "read": ("cas_count_read", "data_read"),
    "write": ("cas_count_write", "data_write"),
}
"""Names of the events in ``events``, of which a controller has one or none."""
_UMC_EVENTS = {"read": "event=0x0a,rdwrmask=0x1", "write": "event=0x0a,rdwrmask=0x2"}
"""AMD's driver names no events; perf's own tables have these (umc_cas_cmd.rd and .wr)."""
_LINE_BYTES = 64
"""Bytes of a column access (CAS), where the event has no scale of its own."""
_UNITS = {"MiB": 1 << 20, "": 1}
_HINT = (
    "a virtual machine rarely shows them; on its own hardware run as root, or set "
    "kernel.perf_event_paranoid to 0, or mount resctrl (mount -t resctrl none /sys/fs/resctrl)"
)


class MemorySource(FileSource):
    """Bytes through each memory controller or L3 domain. perf, resctrl -> MEMORY_CONTROLLER."""

    name: ClassVar[str] = "memory"
    tables: ClassVar[tuple[str, ...]] = ("memory_controller",)

    def __init__(self, root: str = "/") -> None:
        super().__init__(root)
        self._events: dict[str, dict[str, tuple[int, float]]] = {}
        """Controller → way → descriptor, and the bytes of one count."""
        self._domains: dict[str, KeptFile] = {}

    def open(self) -> None:
        """Open the counters of each controller, and the totals of each L3 domain."""
        refused: list[str] = []
        devices = self.root / "sys/bus/event_source/devices"
        for folder in sorted(devices.glob("*")):
            if not _CONTROLLERS.fullmatch(folder.name):
                continue
            for cpu in _cpus(folder):
                ways = self._events.setdefault(f"{folder.name}[cpu {cpu}]", {})
                for way in _EVENTS:
                    try:
                        kind, number, count_bytes = _event(folder, way)
                        ways[way] = open_event(kind, number, -1, cpu), count_bytes
                    except OSError as exc:
                        refused.append(f"{folder.name}: {why_uncounted(exc)}")
                    except (KeyError, ValueError):
                        refused.append(f"{folder.name}: has no event for {way} that is known here")
        self._events = {name: ways for name, ways in self._events.items() if ways}
        monitored = self.root / "sys/fs/resctrl/mon_data"
        for file in sorted(monitored.glob("mon_L3_*/mbm_total_bytes")):
            with contextlib.suppress(CollectorUnavailable):
                self._domains[file.parent.name.removeprefix("mon_")] = self.keep(file)
        if not self._events and not self._domains:
            found = refused[:1] or [f"no memory controller counts in {devices}, nor {monitored}"]
            raise CollectorUnavailable(f"{found[0]}: {_HINT}")
        if refused:
            self.absent["memory_controller"] = "; ".join(dict.fromkeys(refused))

    def sample(self, sink: Sink, _now_ns: int) -> None:
        """One row per controller and domain."""
        for name, ways in self._events.items():
            counts = {
                way: held(round(read_event(descriptor) * count_bytes))
                for way, (descriptor, count_bytes) in ways.items()
            }
            sink.add("memory_controller", name, counts.get("read"), counts.get("write"), None)
        for name, file in self._domains.items():
            with contextlib.suppress(OSError):  # a domain went offline; it may come back
                # "Unavailable" and "Error" are no numbers.
                if (total_bytes := counted(file.read())) is not None:
                    sink.add("memory_controller", name, None, None, total_bytes)

    def close(self) -> None:
        """Close the counters and files."""
        super().close()
        for ways in self._events.values():
            for descriptor, _ in ways.values():
                os.close(descriptor)
        self._events = {}


def _cpus(folder: Path) -> list[int]:
    """Return the cores that a controller is counted on: one for each socket."""
    return [int(cpu) for cpu in re.findall(r"\d+", _text(folder / "cpumask"))]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _event(folder: Path, way: str) -> tuple[int, int, float]:
    """Return type, number and bytes per count of a controller's event of a way.

    Raises:
        ValueError, KeyError: it has none, or one in a form or unit that is not known.
    """
    names = [name for name in _EVENTS[way] if _text(folder / "events" / name)]
    text, scale, unit = _UMC_EVENTS[way], "", ""
    if names:
        event = folder / "events" / names[0]
        text, scale, unit = (_text(event.with_suffix(s)) for s in ("", ".scale", ".unit"))
    elif not folder.name.startswith("amd"):
        raise KeyError(way)
    count_bytes = float(scale) * _UNITS[unit] if scale else _LINE_BYTES
    return int(_text(folder / "type")), _number(folder, text), count_bytes


def _number(folder: Path, text: str) -> int:
    """Return an event (``event=0x04,umask=0x03``) as its bits, which ``format`` places."""
    config = 0
    for term in text.split(","):
        name, _, value = term.partition("=")
        # "config:0-7,32" holds the lowest bits first; a part of one bit names it alone.
        _, _, places = _text(folder / "format" / name).partition(":")
        rest = int(value or "1", 0)
        for place in filter(None, places.split(",")):
            low, _, high = place.partition("-")
            width = int(high or low) - int(low) + 1
            config |= (rest & ((1 << width) - 1)) << int(low)
            rest >>= width
    return config
