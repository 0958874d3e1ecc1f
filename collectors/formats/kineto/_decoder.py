"""The general way to read a trace: what the scanner in C refuses, or could not be compiled for.

Strict JSON is decoded into typed structures at once; everything else is fixed first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.kineto._events import (
    ARGUMENTS,
    MEMORY_NAME,
    NO_ARGS,
    NOTHING,
    CounterEvent,
    Document,
    Event,
    Header,
    decode_counters,
    decode_events,
)
from chopper.collectors.formats.kineto._groups import (
    DEVICE,
    DEVICE_KINDS,
    GROUPS,
    IN_NS,
    MEMORY,
    MTIA,
    OVERFLOWING_DUR,
    SKIPPED,
    TARGETS,
    WITHOUT_DUR,
    WITHOUT_NAME,
    WITHOUT_TS,
    Scanned,
    Target,
)
from chopper.collectors.formats.kineto._repair import repair
from chopper.collectors.formats.kineto._strict import StrictText
from chopper.collectors.formats.kineto._values import (
    Ids,
    ints,
    note_name,
    threshold_of,
    to_ns,
    unsigned,
)
from chopper.errors import InputError
from chopper.limits import Intake
from chopper.storage.manifest import Finding

_WHOLE_HELD_RATIO = 8
_DAMAGED_HELD_RATIO = 20
"""Memory for each byte of text where all events are decoded at once: as structures, as dicts."""
_NOT_STRICT = (msgspec.MsgspecError, UnicodeError, RecursionError)
_NO_TIME = (NOTHING, msgspec.Raw(b"null"))
_decode_document = msgspec.json.Decoder(Document).decode


def decode(path: Path, text: bytes) -> tuple[Scanned, list[Finding]]:
    """Decode JSON text and report damage.

    Raises:
        InputError: it is no trace, or takes more memory than there is.
    """
    intake = Intake(path, _WHOLE_HELD_RATIO)
    intake.check_memory(len(text))
    try:
        return _decode_whole(path, text), []
    except _NOT_STRICT:
        intake.check_memory(len(text), _DAMAGED_HELD_RATIO)
    strict = StrictText(path.name, text)
    try:
        scanned = _decode_whole(path, strict.text)
    except _NOT_STRICT:
        repaired = repair(path, strict.text)
        strict.findings += repaired.findings
        scanned = _scanned(repaired.header, repaired.events, repaired.counters)
        scanned.counts += repaired.counts
    scanned.counts += strict.counts
    return scanned, strict.findings


def _decode_whole(path: Path, text: bytes) -> Scanned:
    """Read strict JSON: an object with traceEvents, or a list of events."""
    header = Header()
    if text.lstrip()[:1] != b"[":
        header = document = _decode_document(text)
        text = bytes(document.traceEvents)
        if not text:
            raise InputError(
                f"{path}: JSON, but not a trace: no traceEvents; expected a Kineto (Chrome JSON) "
                "trace as torch.profiler exports"
            )
    events = decode_events(text)
    has_counters = any(event.ph == "C" for event in events)
    # Their arguments have names of their own: a second, rare decoding.
    samples = [e for e in decode_counters(text) if e.ph == "C"] if has_counters else []
    return _scanned(header, events, samples)


class _Interner(dict[Any, int]):
    """Codes of values from 1, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self) + 1
        return code


def _scanned(header: Header, events: Sequence[Event], counters: list[CounterEvent]) -> Scanned:
    """Sort decoded events into groups, as the scanner in C does."""
    scanned = Scanned(
        header=header,
        groups=[],
        names=[],
        texts=[],
        collectives=[],
        counters=counters,
        ids=Ids(),
        called={},
        unknown={},
        counts=Counter(),
    )
    ids = scanned.ids
    rows: list[list[tuple[int, int, Event]]] = [[] for _ in GROUPS]
    for position, event in enumerate(_paired(events, scanned)):
        target = _target(event, scanned)
        if target.group == SKIPPED and event.ph != "M":
            continue
        if type(event.pid) is str or type(event.tid) is str:
            # Words are numbered in their order in the file, whoever has them.
            _ = ids[event.pid], ids[event.tid]
        if event.ph == "M":
            note_name(scanned.called, ids, event)
            continue
        group = rows[target.group]
        if target.has_collectives and event.args is not None and event.args.collective is not None:
            scanned.collectives.append((target.group, len(group), event.args))
        group.append((position, target.code, event))
    names, texts = _Interner(), _Interner()
    scanned.groups = [_columns(i, group, scanned, names, texts) for i, group in enumerate(rows)]
    scanned.names = [clean(str(name)) for name in names]
    scanned.texts = list(texts)
    return scanned


def _paired(events: Sequence[Event], scanned: Scanned) -> Sequence[Event]:
    """Return events with a complete one in place of each begin, and nothing in place of its end.

    Of a thread's begins that are open, the last one of that name ends. Halves are counted.
    """
    at = [i for i, event in enumerate(events) if event.ph in ("B", "E")]
    if not at:
        return events
    time_ns, _, in_ns = to_ns([events[i].ts for i in at], threshold_of(scanned.header))
    paired = [*events]
    open_at: dict[Any, list[int]] = {}
    for row in np.argsort(time_ns, kind="stable").tolist():
        event = events[at[row]]
        begun = open_at.setdefault((event.pid, event.tid), [])
        if event.ph == "B":
            begun.append(row)
            continue
        names = (events[at[i]].name for i in reversed(begun))
        behind = next((n for n, name in enumerate(names) if event.name in (None, name)), None)
        if behind is None:
            scanned.counts["event.unpaired"] += 1
            continue
        first = begun.pop(-1 - behind)
        dur_ns = int(time_ns[row] - time_ns[first])
        dur = f"{dur_ns}" if in_ns[first] else f"{dur_ns // 1000}.{dur_ns % 1000:03d}"
        begin = paired[at[first]]
        paired[at[first]] = msgspec.structs.replace(
            begin, ph="X", dur=msgspec.Raw(dur.encode()), args=begin.args or event.args
        )
    scanned.counts["event.unpaired"] += sum(map(len, open_at.values()))
    return paired


def _target(event: Event, scanned: Scanned) -> Target:
    """Return where an event goes; count a span that goes nowhere."""
    if event.ph == "i" and event.name == MEMORY_NAME:
        return Target(MEMORY)
    if event.ph != "X":
        return Target(SKIPPED)
    if event.cat is None:
        scanned.counts["event.without_category"] += 1
    elif event.cat == MTIA:
        # Its queue rows hold waits and marks too, which are no work of the device.
        name = str(event.name)
        if not name.startswith("event_"):
            if event.args is not None and event.args.bytes is None:
                event.args.bytes = event.args.size
            kind = "memcpy" if "dma" in name else "kernel"
            return Target(DEVICE, DEVICE_KINDS.index(kind) + 1)
    elif event.cat in TARGETS:
        return TARGETS[event.cat]
    else:
        scanned.unknown[event.cat] = scanned.unknown.get(event.cat, 0) + 1
    return Target(SKIPPED)


def _columns(
    group: int,
    rows: list[tuple[int, int, Event]],
    scanned: Scanned,
    names: _Interner,
    texts: _Interner,
) -> list[np.ndarray]:
    """Return the columns of a group's rows: (place, code, event)."""
    ids = scanned.ids
    events = [event for _, _, event in rows]
    args = [event.args or NO_ARGS for event in events]
    start, has_start, in_ns = to_ns([e.ts for e in events], threshold_of(scanned.header))
    dur, has_dur, _ = to_ns([e.dur for e in events], in_ns)
    no_dur = np.array([e.dur in _NO_TIME for e in events], dtype=bool)
    no_name = np.array([e.name is None for e in events], dtype=bool)
    flags = (
        ~has_start * WITHOUT_TS
        | no_dur * WITHOUT_DUR
        | (~has_dur & ~no_dur) * OVERFLOWING_DUR
        | no_name * WITHOUT_NAME
        | in_ns * IN_NS
    )
    columns = [
        start,
        dur,
        _integers(ids[e.pid] for e in events),
        _integers(ids[e.tid] for e in events),
        _integers(0 if e.name is None else names[e.name] for e in events),
        _integers(code for _, code, _ in rows),
        flags,
        _integers(position for position, _, _ in rows),
    ]
    for column, key in GROUPS[group].ints.items():
        values = [getattr(a, ARGUMENTS[key].name) for a in args]
        if group == DEVICE and column in ("device_id", "stream_id"):
            values = [None if v is None else ids[v] for v in values]
        columns.append(unsigned(ints(values)) if column == "correlation_id" else ints(values))
    for key in GROUPS[group].texts.values():
        raw = (getattr(a, ARGUMENTS[key].name) for a in args)
        columns.append(_integers(0 if v is None or v is NOTHING else texts[_json(v)] for v in raw))
    return columns


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _json(value: Any) -> bytes:
    return bytes(value) if isinstance(value, msgspec.Raw) else json.dumps(value).encode()
