"""Traces that no strict parser reads: damaged, truncated, or with the wrong types.

The events are scanned one by one up to the first that cannot be read; each is made into the same
typed structure as on the fast path. What was repaired or lost is counted and said.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from chopper.collectors.kineto._columns import Counts
from chopper.collectors.kineto._events import Args, CounterEvent, Event, Header

_ARGUMENTS = {field.encode_name: field.name for field in msgspec.structs.fields(Args)}
_RAW = frozenset(
    field.encode_name for field in msgspec.structs.fields(Args) if field.type is msgspec.Raw
)
_HEADER = frozenset(
    msgspec.structs.fields(Header)[i].name for i in range(len(msgspec.structs.fields(Header)))
)
_SPACE = re.compile(r"[\s,]*")
_scanner = json.JSONDecoder()


class Repaired(msgspec.Struct):
    """What could be read of a damaged text."""

    header: Header
    events: list[Event]
    counters: list[CounterEvent]
    notes: list[tuple[str, str]]
    """(code, message) for each kind of damage."""
    documents: int = 1
    is_trace: bool = True
    top_level: str = "object"


def repair(text: bytes, counts: Counts) -> Repaired:
    """Read what can be read.

    Args:
        text: JSON text, or what remains of it.
        counts: repairs of single events are counted here.
    """
    notes: list[tuple[str, str]] = []
    if text.startswith(b"\xef\xbb\xbf"):
        notes.append(("trace.byte_order_mark", "starts with a UTF-8 byte order mark; skipped"))
        text = text[3:]
    try:
        source = text.decode("utf-8")
    except UnicodeDecodeError as exc:
        source = text.decode("utf-8", "replace")
        notes.append(
            (
                "trace.invalid_utf8",
                f"invalid UTF-8 (first at byte {exc.start}); shown as \N{REPLACEMENT CHARACTER}",
            )
        )
    header: dict[str, Any] = {}
    raw_events: list[Any] = []
    documents = 0
    at = _SPACE.match(source).end()  # type: ignore[union-attr]
    is_trace = False
    top_level = "nothing"
    while at < len(source):
        try:
            document, end = _scanner.raw_decode(source, at)
        except ValueError:
            found = _scan_open_document(source, at)
            if found is None:
                if documents == 0:
                    notes.append(("trace.not_json", _where(source, at)))
                break
            part_header, part_events, message = found
            is_trace = True
            documents += 1
            top_level = "object" if source[at] == "{" else "list"
            _merge(header, part_header)
            raw_events += part_events
            notes.append(message)
            break
        at = _SPACE.match(source, end).end()  # type: ignore[union-attr]
        documents += 1
        if isinstance(document, list):
            top_level = "list"
            is_trace = is_trace or not document or any(_is_event(e) for e in document)
            raw_events += document
        elif isinstance(document, dict):
            top_level = "object"
            events = document.get("traceEvents")
            if isinstance(events, list):
                is_trace = True
                raw_events += events
                _merge(header, document)
        else:
            top_level = type(document).__name__
    if documents > 1:
        notes.append(
            (
                "trace.concatenated",
                f"{documents} JSON documents in one file; their events are taken together",
            )
        )
    if "NaN" in source or "Infinity" in source:
        notes.append(("trace.nan", "holds NaN or Infinity, which are not JSON; taken as unknown"))
    events = []
    counters = []
    for raw in raw_events:
        if not isinstance(raw, dict):
            counts.add("event.not_an_object")
            continue
        if raw.get("ph") == "C":
            if isinstance(raw.get("args"), dict):
                counters.append(
                    CounterEvent(
                        ph="C",
                        name=str(raw.get("name")),
                        pid=_scalar(raw.get("pid")),
                        ts=_scalar(raw.get("ts")),
                        args=raw["args"],
                    )
                )
            continue
        event = _event(raw)
        if event is not None:
            events.append(event)
        elif raw:
            counts.add("event.without_ph")
    return Repaired(
        header=Header(**{k: v for k, v in header.items() if k in _HEADER}),
        events=events,
        counters=counters,
        notes=notes,
        documents=documents,
        is_trace=is_trace,
        top_level=top_level,
    )


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and ("ph" in value or "ts" in value)


def _merge(into: dict[str, Any], document: dict[str, Any]) -> None:
    for key, value in document.items():
        if key != "traceEvents":
            into.setdefault(key, value)


def _where(source: str, at: int) -> str:
    sample = source[at : at + 40].replace("\n", " ")
    return f"not JSON: found {sample!r} at character {at}, expected {{ or ["


def _scan_open_document(
    source: str, at: int
) -> tuple[dict[str, Any], list[Any], tuple[str, str]] | None:
    """Events of a document that does not parse as a whole, up to the first unreadable one."""
    if source[at] == "[":
        start = at + 1
        header: dict[str, Any] = {}
    else:
        found = re.compile(r'"traceEvents"\s*:\s*\[').search(source, at)
        if source[at] != "{" or found is None:
            return None
        start = found.end()
        header = _open_header(source[at : found.start()])
    events: list[Any] = []
    position = _SPACE.match(source, start).end()  # type: ignore[union-attr]
    while position < len(source) and source[position] != "]":
        try:
            event, position = _scanner.raw_decode(source, position)
        except ValueError:
            lost = len(source) - position
            return (
                header,
                events,
                (
                    "trace.truncated",
                    f"JSON ends or breaks in the middle of event {len(events) + 1} (character "
                    f"{position}); the {len(events)} events before it are used, {lost} characters "
                    "after are lost",
                ),
            )
        events.append(event)
        position = _SPACE.match(source, position).end()  # type: ignore[union-attr]
    if position < len(source):
        _merge(header, _open_header("{" + source[position + 1 :].lstrip().lstrip(",")))
        return (
            header,
            events,
            (
                "trace.not_strict",
                "JSON is not strict (for example a comma after the last event); all "
                f"{len(events)} events were read",
            ),
        )
    return (
        header,
        events,
        (
            "trace.truncated",
            f"JSON ends after event {len(events)} without closing; those events are used",
        ),
    )


def _open_header(source: str) -> dict[str, Any]:
    """The members of an object that is not closed, as far as they are whole."""
    body = source.rstrip().rstrip(",").rstrip()
    for closing in ("", "}"):
        try:
            value, _ = _scanner.raw_decode(body + closing)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _scalar(value: Any) -> int | float | str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return None


def _event(raw: dict[str, Any]) -> Event | None:
    ph = raw.get("ph")
    if not isinstance(ph, str):
        return None
    args = raw.get("args")
    category = raw.get("cat")
    name = raw.get("name")
    return Event(
        ph=ph,
        cat=category if isinstance(category, str) else None,
        name=name if isinstance(name, str) else None if name is None else str(name),
        pid=_scalar(raw.get("pid")),
        tid=_scalar(raw.get("tid")),
        ts=_scalar(raw.get("ts")),
        dur=_scalar(raw.get("dur")),
        args=_args(args) if isinstance(args, dict) else None,
    )


def _args(raw: dict[str, Any]) -> Args:
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = _ARGUMENTS.get(key)
        if name is None or value is None:
            continue
        if key in _RAW:
            values[name] = msgspec.Raw(json.dumps(value).encode())
        elif key == "Collective name":
            values[name] = str(value)
        else:
            values[name] = _scalar(value)
    return Args(**values)
