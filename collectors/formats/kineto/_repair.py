"""Traces that no strict parser reads: damaged, truncated, or with the wrong types.

The events are scanned one by one up to the first that cannot be read; each is made into the same
typed structure as on the fast path. What was repaired or lost is counted and said.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import msgspec

from chopper.collectors.formats.cleaning import Counts, clean
from chopper.collectors.formats.kineto._events import Args, CounterEvent, Event, ExactTimes, Header

_ARGUMENTS = {field.encode_name: field.name for field in msgspec.structs.fields(Args)}
_RAW = frozenset(
    field.encode_name for field in msgspec.structs.fields(Args) if field.type is msgspec.Raw
)
_HEADER = frozenset(
    msgspec.structs.fields(Header)[i].name for i in range(len(msgspec.structs.fields(Header)))
)
_SPACE = re.compile(r"[\s,]*")
_NOT_A_NUMBER = re.compile(r"[:\[,]\s*-?(?:NaN|Infinity)\b")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
# Floats keep their digits until it is known which of them are times.
_scanner = json.JSONDecoder(parse_float=Decimal)


def _skip(source: str, at: int) -> int:
    """Where space and commas that begin at a place end."""
    found = _SPACE.match(source, at)
    return at if found is None else found.end()


def _decode_at(source: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends.

    Raises:
        ValueError: there is none, or it is nested deeper than any trace.
    """
    try:
        return _scanner.raw_decode(source, at)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


class Repaired(msgspec.Struct):
    """What could be read of a damaged text."""

    header: Header
    events: list[Event]
    stamps: list[ExactTimes]
    """The times of the events as their digits."""
    counters: list[CounterEvent]
    counter_stamps: list[ExactTimes]
    counts: dict[str, int]
    """Events that could not be used, by code."""
    notes: list[tuple[str, str]]
    """(code, message) for each kind of damage."""
    is_trace: bool
    why: str
    """What was found instead of a trace."""


def repair(text: bytes) -> Repaired:
    """Read what can be read of JSON text, or of what remains of it."""
    counts = Counts()
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
    at = _skip(source, 0)
    is_trace = False
    why = "no JSON in it"
    while at < len(source):
        try:
            document, end = _decode_at(source, at)
        except ValueError:
            found = _scan_open_document(source, at)
            if found is None:
                if documents == 0:
                    why = _where(source, at)
                else:
                    notes.append(
                        (
                            "trace.trailing_text",
                            f"{len(source) - at} characters after the JSON are no JSON; ignored",
                        )
                    )
                break
            part_header, part_events, message = found
            # A list cut off before its first whole event may be anything.
            is_trace = is_trace or source[at] == "{" or any(_is_event(e) for e in part_events)
            why = "a list that is cut off and holds no event"
            documents += 1
            _merge(header, part_header)
            raw_events += part_events
            notes.append(message)
            break
        at = _skip(source, end)
        documents += 1
        if isinstance(document, list):
            why = "JSON of another kind: a list without trace events"
            is_trace = is_trace or not document or any(_is_event(e) for e in document)
            raw_events += document
        elif isinstance(document, dict):
            listed = document.get("traceEvents")
            if isinstance(listed, list):
                is_trace = True
                raw_events += listed
                _merge(header, document)
            elif "traceEvents" in document:
                why = f"traceEvents is {_KINDS.get(type(listed), 'a number')}, not a list"
            else:
                why = "JSON, but not a trace: no traceEvents"
        else:
            why = f"JSON of another kind: {_KINDS.get(type(document), 'a number')}"
    if documents > 1 and is_trace:
        notes.append(
            (
                "trace.concatenated",
                f"{documents} JSON documents in one file; their events are taken together",
            )
        )
    if _NOT_A_NUMBER.search(source):
        notes.append(("trace.nan", "holds NaN or Infinity, which are not JSON; taken as unknown"))
    events: list[Event] = []
    stamps: list[ExactTimes] = []
    counters: list[CounterEvent] = []
    counter_stamps: list[ExactTimes] = []
    for raw in raw_events:
        if not isinstance(raw, dict):
            counts.add("event.not_an_object")
            continue
        if raw.get("ph") == "C":
            if isinstance(raw.get("args"), dict):
                counter_stamps.append(_stamp(raw))
                counters.append(
                    CounterEvent(
                        ph="C",
                        name=raw["name"] if isinstance(raw.get("name"), str) else None,
                        pid=_scalar(raw.get("pid")),
                        ts=_scalar(raw.get("ts")),
                        args=raw["args"],
                    )
                )
            continue
        try:
            event = _event(raw)
        except RecursionError:
            counts.add("event.nested_too_deep")
            continue
        if event is not None:
            events.append(event)
            stamps.append(_stamp(raw))
        elif raw:
            counts.add("event.without_ph")
    return Repaired(
        header=_header(header),
        events=events,
        stamps=stamps,
        counters=counters,
        counter_stamps=counter_stamps,
        counts=counts.values,
        notes=notes,
        is_trace=is_trace,
        why=why,
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
    position = _skip(source, start)
    while position < len(source) and source[position] != "]":
        try:
            event, position = _decode_at(source, position)
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
        position = _skip(source, position)
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
            value, _ = _decode_at(body + closing, 0)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _scalar(value: Any) -> int | float | str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return None


def _stamp(raw: dict[str, Any]) -> ExactTimes:
    return ExactTimes(ts=_digits(raw.get("ts")), dur=_digits(raw.get("dur")))


def _digits(value: Any) -> msgspec.Raw:
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        return msgspec.Raw(b"null")
    try:
        return msgspec.Raw(str(value).encode("ascii", "replace"))
    except ValueError:  # an integer of thousands of digits
        return msgspec.Raw(b"null")


def _header(members: dict[str, Any]) -> Header:
    try:
        return Header(**{k: _plain(v) for k, v in members.items() if k in _HEADER})
    except RecursionError:
        return Header()


def _plain(value: Any) -> Any:
    """A decoded value with floats as floats, and text that UTF-8 can hold."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _event(raw: dict[str, Any]) -> Event | None:
    ph = raw.get("ph")
    if not isinstance(ph, str):
        return None
    args = raw.get("args")
    category = raw.get("cat")
    name = raw.get("name")
    return Event(
        ph=ph,
        cat=clean(category) if isinstance(category, str) else None,
        name=None if name is None else clean(str(name)),
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
            values[name] = msgspec.Raw(json.dumps(_plain(value)).encode())
        elif key == "Collective name":
            values[name] = clean(str(value))
        else:
            values[name] = _scalar(value)
    return Args(**values)
