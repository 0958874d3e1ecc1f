"""A file's events, decoded in chunks and sorted into columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.collectors.kineto._bytes import read_bytes
from chopper.collectors.kineto._columns import (
    EXACT_FLOAT_US,
    Counts,
    DeviceBuilder,
    HostBuilder,
    Ids,
    MemoryBuilder,
    number,
)
from chopper.collectors.kineto._events import (
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    MEMORY_NAME,
    NOTHING,
    SKIPPED_CATEGORIES,
    CounterEvent,
    Document,
    Event,
    ExactTimes,
    Header,
)
from chopper.collectors.kineto._repair import repair
from chopper.errors import InputError
from chopper.manifest import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_CHUNK_BYTES = 8 << 20
_EVENT_BREAK = b"\n  },\n  {"
_RELATIVE_NS_THRESHOLD = 1e14
"""With a base, ``ts`` counts from it, less than a few months (8e12 µs); more is nanoseconds."""
_ABSOLUTE_NS_THRESHOLD = 9.2e15
"""Without a base, ``ts`` may be Unix microseconds (1.8e15); more is nanoseconds."""

_decode_events = msgspec.json.Decoder(list[Event]).decode
_decode_times = msgspec.json.Decoder(list[ExactTimes]).decode
_decode_counters = msgspec.json.Decoder(list[CounterEvent]).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_document = msgspec.json.Decoder(Document).decode


class FileReader:
    """Reads one file; afterwards its builders hold the columns.

    Attributes:
        header: what the file says about itself.
        host, device, memory: builders of columns.
        counters: (ts in recorded microseconds, track, name, value).
        names: (pid, tid or None, "process_name" | "thread_name") → name.
        findings: what was damaged.
        counts: single events that were repaired or dropped, by code.
        unknown: events of categories nobody knows, by category.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = Counts()
        self.ids = Ids()
        self.counters: list[tuple[float, str, str, float | None]] = []
        self.names: dict[tuple[int, int | None, str], str] = {}
        self.unknown: dict[str, int] = {}
        text, self.findings = read_bytes(path)
        self.header = Header()
        self._start_builders()
        try:
            self._read_strict(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._read_damaged(text)

    def _start_builders(self) -> None:
        based = _base_ns(self.header) is not None
        threshold = _RELATIVE_NS_THRESHOLD if based else _ABSOLUTE_NS_THRESHOLD
        self.counts.values.clear()
        self.unknown.clear()
        self.counters.clear()
        self.host = HostBuilder(self.counts, threshold)
        self.device = DeviceBuilder(self.counts, threshold)
        self.memory = MemoryBuilder(self.counts, threshold)

    def _read_strict(self, text: bytes) -> None:
        chunks = _chunks(text)
        if chunks is not None:
            header, ranges = chunks
            self.header = _decode_header(header)
            self._start_builders()
            for start, end in ranges:
                piece = b"[%b]" % text[start:end]
                self._add(_decode_events(piece), piece)
            return
        if text.lstrip()[:1] == b"[":
            self._add(_decode_events(text), text)
            return
        document = _decode_document(text)
        self.header = document
        if document.traceEvents is NOTHING:
            raise InputError(
                f"{self.path}: JSON, but not a trace: no traceEvents; expected a Kineto (Chrome "
                "JSON) trace as torch.profiler exports"
            )
        self._start_builders()
        piece = bytes(document.traceEvents)
        self._add(_decode_events(piece), piece)

    def _read_damaged(self, text: bytes) -> None:
        self._start_builders()
        found = repair(text, self.counts)
        if not found.is_trace:
            why = next((m for c, m in found.notes if c == "trace.not_json"), None)
            raise InputError(
                f"{self.path}: {why}"
                if why
                else f"{self.path}: JSON of another kind ({found.top_level} without trace events); "
                "expected a Kineto (Chrome JSON) trace as torch.profiler exports"
            )
        self.header = found.header
        kept = dict(self.counts.values)
        self._start_builders()
        self.counts.values.update(kept)
        self._add(found.events, None)
        self._add_counters(found.counters)
        self.findings += [
            Finding(
                code=code,
                severity="info" if code in ("trace.byte_order_mark",) else "warning",
                message=f"{self.path.name}: {message}",
            )
            for code, message in found.notes
        ]

    def _add(self, events: Sequence[Event], piece: bytes | None) -> None:
        """Sort one chunk of events into the builders."""
        exact: Sequence[ExactTimes] | None = None
        if piece is not None and _needs_exact_times(events):
            exact = _decode_times(piece)
        groups: dict[str | None, list[Event]] = {}
        times: dict[str | None, list[ExactTimes]] = {}
        has_counters = False
        for i, event in enumerate(events):
            ph = event.ph
            if ph == "X":
                key = event.cat
            elif ph == "i" and event.name == MEMORY_NAME:
                key = MEMORY_NAME
            elif ph == "M":
                self._metadata(event)
                continue
            elif ph == "C":
                has_counters = True
                continue
            else:
                continue
            group = groups.get(key)
            if group is None:
                group = groups[key] = []
                times[key] = []
            group.append(event)
            if exact is not None:
                times[key].append(exact[i])
        if has_counters and piece is not None:
            # Their arguments have names of their own: a second, rare decoding.
            self._add_counters(_decode_counters(piece))
        for category, group in groups.items():
            stamps = times[category] if exact is not None else None
            if category in HOST_CATEGORIES:
                self.host.add(group, HOST_CATEGORIES[category], stamps, self.ids)
            elif category in DEVICE_CATEGORIES:
                self.device.add(group, DEVICE_CATEGORIES[category], stamps, self.ids)
            elif category == MEMORY_NAME:
                self.memory.add(group, stamps, self.ids)
            elif category is None:
                self.counts.add("event.without_category", len(group))
            elif category not in SKIPPED_CATEGORIES:
                self.unknown[category] = self.unknown.get(category, 0) + len(group)

    def _add_counters(self, events: Iterable[CounterEvent]) -> None:
        for event in events:
            at = number(event.ts)
            if event.ph != "C" or not event.args or at is None:
                continue
            for key, value in event.args.items():
                name = key if event.name in (None, key) else f"{event.name}.{key}"
                self.counters.append((at, str(event.pid), name, number(value)))

    def _metadata(self, event: Event) -> None:
        if event.name not in ("process_name", "thread_name"):
            return
        if event.args is None or event.args.name is NOTHING:
            return
        try:
            text = str(msgspec.json.decode(event.args.name))
        except msgspec.DecodeError:
            return
        tid = None if event.name == "process_name" else self.ids[event.tid]
        self.names[self.ids[event.pid], tid, str(event.name)] = text

    @property
    def base_ns(self) -> int:
        """What is added to every recorded time."""
        return _base_ns(self.header) or 0


def _base_ns(header: Header) -> int | None:
    value: Any = header.baseTimeNanoseconds
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value else None


def _needs_exact_times(events: Sequence[Event]) -> bool:
    return any(type(e.ts) is float and e.ts > EXACT_FLOAT_US for e in events)


def _chunks(text: bytes) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Cut Kineto's own layout (one field per line) into ranges of whole events.

    Returns:
        The header (everything but the events) and byte ranges that hold events without their
        outer brackets, or None when the layout is another.
    """
    opening = re.compile(rb'"traceEvents":\s*\[\s*').search(text, 0, 4 << 20)
    if opening is None or text[opening.end() : opening.end() + 1] != b"{":
        return None
    first = opening.end()
    closing = max(text.rfind(b"\n  }]"), text.rfind(b"\n  }\n"))
    after = text.find(b"]", closing)
    if closing < first or after < 0:
        return None
    last = closing + 4
    ranges: list[tuple[int, int]] = []
    at = first
    while last - at > _CHUNK_BYTES:
        cut = text.find(_EVENT_BREAK, at + _CHUNK_BYTES, last)
        if cut < 0:
            break
        ranges.append((at, cut + 4))
        at = cut + 5
    ranges.append((at, last))
    return text[:first] + text[after:], ranges
