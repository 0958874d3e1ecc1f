"""Traces that no strict parser reads: damaged, truncated, or with the wrong types.

The events are scanned one by one up to the first that cannot be read; each is made into the same
typed structure as on the fast path. What was repaired or lost is counted and said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from chopper.collectors.formats.cleaning import Counts, clean
from chopper.collectors.formats.kineto._events import Args, CounterEvent, Event, ExactTimes, Header

_ARGUMENTS = {field.encode_name: field.name for field in msgspec.structs.fields(Args)}
_RAW = frozenset(
    field.encode_name for field in msgspec.structs.fields(Args) if field.type is msgspec.Raw
)
_HEADER = frozenset(field.name for field in msgspec.structs.fields(Header))
_SPACE = re.compile(r"[\s,]*")
_NOT_A_NUMBER = re.compile(r"[:\[,]\s*-?(?:NaN|Infinity)\b")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
# Floats keep their digits until it is known which of them are times.
_scanner = json.JSONDecoder(parse_float=Decimal)


def _skip(source: str, at: int) -> int:
    """Return the end of space and commas that begin at a place."""
    blank = _SPACE.match(source, at)
    return at if blank is None else blank.end()


def _decode_at(source: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends.

    Raises:
        ValueError: there is none, or it is nested deeper than any trace.
    """
    try:
        return _scanner.raw_decode(source, at)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


class Repaired(msgspec.Struct, kw_only=True):
    """Events of a damaged text, as far as they could be read."""

    header: Header
    events: list[Event] = []
    stamps: list[ExactTimes] = []
    """The times of the events as their digits."""
    counters: list[CounterEvent] = []
    counter_stamps: list[ExactTimes] = []
    counts: dict[str, int] = {}
    """Events that could not be used, by code."""
    notes: list[tuple[str, str]]
    """(code, message) for each kind of damage."""
    is_trace: bool
    why: str
    """Description of what was found instead of a trace."""


@dataclass
class _Documents:
    """JSON documents of a text, as far as they could be read."""

    header: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    count: int = 0
    is_trace: bool = False
    why: str = "no JSON in it"

    def add(self, document: Any) -> None:
        """Take what a whole document holds."""
        self.count += 1
        if isinstance(document, list):
            self.why = "JSON of another kind: a list without trace events"
            self.is_trace = self.is_trace or not document or any(map(_is_event, document))
            self.events += document
        elif isinstance(document, dict):
            listed = document.get("traceEvents")
            if isinstance(listed, list):
                self.is_trace = True
                self.events += listed
                _merge(self.header, document)
            elif "traceEvents" in document:
                kind = _KINDS.get(type(listed), "a number")
                self.why = f"traceEvents is {kind}, not a list"
            else:
                self.why = "JSON, but not a trace: no traceEvents"
        else:
            self.why = f"JSON of another kind: {_KINDS.get(type(document), 'a number')}"

    def add_open(self, source: str, at: int) -> None:
        """Take the events of a document that is damaged or not closed."""
        opened = _scan_open_document(source, at)
        if opened is not None:
            header, events, message = opened
            # A list cut off before its first whole event may be anything.
            self.is_trace = self.is_trace or source[at] == "{" or any(map(_is_event, events))
            self.why = "a list that is cut off and holds no event"
            self.count += 1
            _merge(self.header, header)
            self.events += events
            self.notes.append(message)
        elif self.count:
            rest = len(source) - at
            self.notes.append(
                (
                    "trace.trailing_text",
                    f"{rest} characters after the JSON are no JSON; ignored",
                )
            )
        else:
            self.why = _where(source, at)


def _documents_of(source: str) -> _Documents:
    """Read one document after the other, up to the first that is damaged."""
    documents = _Documents()
    at = _skip(source, 0)
    while at < len(source):
        try:
            document, end = _decode_at(source, at)
        except ValueError:
            documents.add_open(source, at)
            break
        at = _skip(source, end)
        documents.add(document)
    return documents


def repair(text: bytes) -> Repaired:
    """Read what can be read of JSON text, or of what remains of it."""
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
    documents = _documents_of(source)
    notes += documents.notes
    if documents.count > 1 and documents.is_trace:
        notes.append(
            (
                "trace.concatenated",
                f"{documents.count} JSON documents in one file; their events are taken together",
            )
        )
    if _NOT_A_NUMBER.search(source):
        notes.append(("trace.nan", "holds NaN or Infinity, which are not JSON; taken as unknown"))
    repaired = Repaired(
        header=_header(documents.header),
        notes=notes,
        is_trace=documents.is_trace,
        why=documents.why,
    )
    counts = Counts()
    for raw in documents.events:
        _take(repaired, counts, raw)
    repaired.counts = counts.values
    return repaired


def _take(repaired: Repaired, counts: Counts, raw: Any) -> None:
    """Add an entry of ``traceEvents`` to what was read; count one that cannot be used."""
    if not isinstance(raw, dict):
        counts.add("event.not_an_object")
    elif raw.get("ph") == "C":
        if isinstance(raw.get("args"), dict):
            repaired.counter_stamps.append(_stamp(raw))
            repaired.counters.append(
                CounterEvent(
                    ph="C",
                    name=raw["name"] if isinstance(raw.get("name"), str) else None,
                    pid=_scalar(raw.get("pid")),
                    ts=_scalar(raw.get("ts")),
                    args=raw["args"],
                )
            )
    else:
        try:
            event = _event(raw)
        except RecursionError:
            counts.add("event.nested_too_deep")
            return
        if event is not None:
            repaired.events.append(event)
            repaired.stamps.append(_stamp(raw))
        elif raw:
            counts.add("event.without_ph")


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
        opening = re.compile(r'"traceEvents"\s*:\s*\[').search(source, at)
        if source[at] != "{" or opening is None:
            return None
        start = opening.end()
        header = _open_header(source[at : opening.start()])
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
