"""A file's events, decoded in chunks and sorted into columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from chopper.collectors.formats.cleaning import Counts
from chopper.collectors.formats.json_text import read_bytes
from chopper.collectors.formats.kineto._columns import (
    CounterBuilder,
    DeviceBuilder,
    HostBuilder,
    MemoryBuilder,
    SynchronizationBuilder,
)
from chopper.collectors.formats.kineto._events import (
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    MEMORY_NAME,
    NOTHING,
    SKIPPED_CATEGORIES,
    SYNCHRONIZATION_CATEGORY,
    CounterEvent,
    Document,
    Event,
    ExactTimes,
    Header,
)
from chopper.collectors.formats.kineto._native import scan_file
from chopper.collectors.formats.kineto._repair import repair
from chopper.collectors.formats.kineto._values import (
    EXACT_FLOAT_US,
    Ids,
    Names,
    base_of,
    note_name,
    threshold_of,
)
from chopper.errors import InputError
from chopper.limits import Intake
from chopper.storage.manifest import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CHUNK_BYTES = 8 << 20
_WHOLE_HELD_RATIO = 8
_DAMAGED_HELD_RATIO = 20
"""Memory for each byte of text where all events are decoded at once: as structures, as dicts."""
_EVENT_BREAK = b"\n  },\n  {"
_decode_events = msgspec.json.Decoder(list[Event]).decode
_decode_times = msgspec.json.Decoder(list[ExactTimes]).decode
_decode_counters = msgspec.json.Decoder(list[CounterEvent]).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_document = msgspec.json.Decoder(Document).decode


class FileReader:
    """Reads one file.

    What is whole and strict is read by the scanner in C; what that refuses, and everything where
    it could not be compiled, is read here. Both give the same.

    Attributes:
        header: what the file says about itself.
        host, device: spans and device events, in the order of the file.
        memory: columns of the allocator's instants.
        synchronization: what was waited for, in the order of the file.
        counters: times, and (track, name, value) of each sample.
        ids: process and thread ids that were recorded as words.
        names: of processes and threads.
        findings: what was damaged.
        counts: single events that were repaired or dropped, by code.
        unknown: events of categories nobody knows, by category.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = Counts()
        self.ids = Ids()
        self.names: Names = {}
        self.unknown: dict[str, int] = {}
        self.findings: list[Finding] = []
        scanned = scan_file(path)
        if scanned is not None:
            self.header = scanned.header
            self.host, self.device = scanned.host, scanned.device
            self.memory, self.counters = scanned.memory, scanned.counters
            self.synchronization = scanned.synchronization
            self.counts, self.ids = scanned.counts, scanned.ids
            self.names, self.unknown = scanned.names, scanned.unknown
        else:
            self._read()
        base = self.header.baseTimeNanoseconds
        if base is not None and base_of(self.header) is None and base != 0:
            self.findings.append(
                Finding(
                    code="trace.base_time",
                    severity="warning",
                    message=f"{path.name}: baseTimeNanoseconds is {_shown(base)}, expected Unix "
                    "nanoseconds; times are taken without it",
                )
            )

    def _read(self) -> None:
        text, self.findings = read_bytes(self.path)
        self._start(Header())
        intake = Intake(self.path, _WHOLE_HELD_RATIO)
        for attempt, held_ratio in (
            (self._read_chunks, 0),
            (self._read_whole, _WHOLE_HELD_RATIO),
            (self._read_damaged, _DAMAGED_HELD_RATIO),
        ):
            intake.check_memory(len(text), held_ratio)
            try:
                if attempt(text):
                    break
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                continue
        self.host, self.device = self._host.rows(), self._device.rows()
        self.memory, self.counters = self._memory.finish(), self._counters.finish()
        self.synchronization = self._synchronization.rows()

    def _start(self, header: Header) -> None:
        """Begin with empty builders, whatever an earlier attempt left."""
        self.header = header
        self.counts.values.clear()
        self.unknown.clear()
        self.names.clear()
        self.ids = Ids()
        self._position = 0
        how = (self.counts, self.base_ns, threshold_of(header))
        self._host = HostBuilder(*how)
        self._device = DeviceBuilder(*how)
        self._memory = MemoryBuilder(*how)
        self._synchronization = SynchronizationBuilder(*how)
        self._counters = CounterBuilder(*how)

    def _read_chunks(self, text: bytes) -> bool:
        """Kineto's own layout, in pieces: never more than one piece is held decoded."""
        chunks = _chunks(text)
        if chunks is None:
            return False
        header, ranges = chunks
        self._start(_decode_header(header))
        for start, end in ranges:
            piece = b"[%b]" % text[start:end]
            self._add(_decode_events(piece), piece)
        return True

    def _read_whole(self, text: bytes) -> bool:
        """Any strict JSON: an object with traceEvents, or a list of events."""
        if text.lstrip()[:1] == b"[":
            self._start(Header())
            self._add(_decode_events(text), text)
            return True
        document = _decode_document(text)
        if document.traceEvents is NOTHING:
            raise InputError(
                f"{self.path}: JSON, but not a trace: no traceEvents; expected a Kineto (Chrome "
                "JSON) trace as torch.profiler exports"
            )
        self._start(document)
        piece = bytes(document.traceEvents)
        self._add(_decode_events(piece), piece)
        return True

    def _read_damaged(self, text: bytes) -> bool:
        """Read what a strict parser refuses, event by event."""
        self._start(Header())
        repaired = repair(text)
        if not repaired.is_trace:
            raise InputError(
                f"{self.path}: {repaired.why}; expected a Kineto (Chrome JSON) trace as "
                "torch.profiler exports"
            )
        self._start(repaired.header)
        for code, count in repaired.counts.items():
            self.counts.add(code, count)
        self._add(repaired.events, None, repaired.stamps)
        if repaired.counters:
            self._counters.add(repaired.counters, repaired.counter_stamps)
        self.findings += [
            Finding(
                code=code,
                severity="info" if code in ("trace.byte_order_mark",) else "warning",
                message=f"{self.path.name}: {message}",
            )
            for code, message in repaired.notes
        ]
        return True

    def _add(
        self,
        events: Sequence[Event],
        piece: bytes | None,
        exact: Sequence[ExactTimes] | None = None,
    ) -> None:
        """Sort one chunk of events into the builders.

        Args:
            events: decoded.
            piece: their text, where there is one.
            exact: their times as digits, where they are known already.
        """
        if piece is not None and _needs_exact_times(events):
            exact = _decode_times(piece)
        groups: dict[str | None, list[int]] = {}
        has_counters = False
        ids = self.ids
        for i, event in enumerate(events):
            ph = event.ph
            if ph == "X":
                key = event.cat
            elif ph == "i" and event.name == MEMORY_NAME:
                key = MEMORY_NAME
            elif ph == "M":
                key = None
            elif ph == "C":
                has_counters = True
                continue
            else:
                continue
            if (type(event.pid) is str or type(event.tid) is str) and (
                ph != "X"
                or key in HOST_CATEGORIES
                or key in DEVICE_CATEGORIES
                or key == SYNCHRONIZATION_CATEGORY
            ):
                # Words are numbered in their order in the file, whoever has them.
                _ = ids[event.pid], ids[event.tid]
            if ph == "M":
                note_name(self.names, ids, event)
                continue
            at = groups.get(key)
            if at is None:
                at = groups[key] = []
            at.append(i)
        if has_counters and piece is not None:
            # Their arguments have names of their own: a second, rare decoding.
            samples = [(i, e) for i, e in enumerate(_decode_counters(piece)) if e.ph == "C"]
            self._counters.add(
                [e for _, e in samples],
                None if exact is None else [exact[i] for i, _ in samples],
            )
        for category, at in groups.items():
            group = [events[i] for i in at]
            stamps = None if exact is None else [exact[i] for i in at]
            places = np.array(at) + self._position
            if category in HOST_CATEGORIES:
                self._host.add(group, HOST_CATEGORIES[category], stamps, ids, places)
            elif category in DEVICE_CATEGORIES:
                self._device.add(group, DEVICE_CATEGORIES[category], stamps, ids, places)
            elif category == SYNCHRONIZATION_CATEGORY:
                self._synchronization.add(group, stamps, ids, places)
            elif category == MEMORY_NAME:
                self._memory.add(group, stamps, ids)
            elif category is None:
                self.counts.add("event.without_category", len(group))
            elif category not in SKIPPED_CATEGORIES:
                self.unknown[category] = self.unknown.get(category, 0) + len(group)
        self._position += len(events)

    @property
    def base_ns(self) -> int:
        """Return what is added to every recorded time, in ns."""
        return base_of(self.header) or 0


def _shown(value: Any) -> str:
    """A value of a file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _needs_exact_times(events: Sequence[Event]) -> bool:
    return any(
        type(e.ts) is str or (type(e.ts) is float and abs(e.ts) > EXACT_FLOAT_US) for e in events
    )


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
