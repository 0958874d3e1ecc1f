"""Traces with the wrong types, or of several JSON documents.

Each event is made into the same typed structure as where the types are right. What cannot be used
is counted and said.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.kineto._events import ARGUMENTS, Args, CounterEvent, Event, Header
from chopper.collectors.formats.kineto._strict import decode_at, skip
from chopper.errors import InputError
from chopper.storage.manifest import Finding, add_finding

_HEADER = frozenset(field.name for field in msgspec.structs.fields(Header))
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


@dataclass
class Repaired:
    """Contents of a text, as far as they could be used."""

    header: Header
    events: list[Event] = field(default_factory=list)
    counters: list[CounterEvent] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Events that could not be used, by code."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, raw: Any) -> None:
        """Take an entry of ``traceEvents``; count one that cannot be used."""
        if not isinstance(raw, dict):
            self.counts["event.not_an_object"] += 1
        elif raw.get("ph") == "C":
            if isinstance(raw.get("args"), dict):
                name = raw.get("name")
                self.counters.append(
                    CounterEvent(
                        ph="C",
                        name=name if isinstance(name, str) else None,
                        pid=_scalar(raw.get("pid")),
                        ts=_digits(raw.get("ts")),
                        args=raw["args"],
                    )
                )
        elif isinstance(raw.get("ph"), str):
            try:
                self.events.append(_event(raw))
            except RecursionError:
                self.counts["event.nested_too_deep"] += 1
        elif raw:
            self.counts["event.without_ph"] += 1


def repair(path: Path, text: bytes) -> Repaired:
    """Read the events of JSON text, whatever their types.

    Raises:
        InputError: it is no trace.
    """
    documents = _Documents()
    documents.read(text.decode())
    if not documents.is_trace:
        raise InputError(
            f"{path}: {documents.why}; expected a Kineto (Chrome JSON) trace as torch.profiler "
            "exports"
        )
    try:
        members = {k: _plain(v) for k, v in documents.header.items() if k in _HEADER}
    except RecursionError:
        members = {}
    repaired = Repaired(Header(**members))
    for raw in documents.events:
        repaired.add(raw)
    if documents.count > 1:
        message = f"{documents.count} JSON documents in one file; their events are merged"
        add_finding(repaired.findings, "trace.concatenated", f"{path.name}: {message}")
    return repaired


@dataclass
class _Documents:
    """JSON documents of a text, as far as they could be read."""

    header: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    count: int = 0
    is_trace: bool = False
    why: str = "no JSON in it"
    """Description of what was found instead of a trace."""

    def read(self, source: str) -> None:
        """Read one document after the other, up to the first invalid JSON."""
        at = skip(source, 0)
        while at < len(source):
            try:
                document, end = decode_at(source, at)
            except ValueError:
                sample = source[at : at + 40].replace("\n", " ")
                self.why = f"not JSON: found {sample!r} at character {at}, expected {{ or ["
                if source[at] == "[":
                    self.why = "a list that is cut off and holds no event"
                break
            at = skip(source, end)
            self._add(document)

    def _add(self, document: Any) -> None:
        """Take what a whole document holds."""
        self.count += 1
        if isinstance(document, list):
            self.why = "JSON, but a list without trace events"
            self.is_trace = self.is_trace or not document or any(map(_is_event, document))
            self.events += document
        elif not isinstance(document, dict):
            self.why = f"JSON, but not a trace: {_KINDS.get(type(document), 'a number')}"
        elif isinstance(document.get("traceEvents"), list):
            self.is_trace = True
            self.events += document["traceEvents"]
            # The first of several counts.
            self.header = {**document, **self.header}
        elif "traceEvents" in document:
            kind = _KINDS.get(type(document["traceEvents"]), "a number")
            self.why = f"traceEvents is {kind}, not a list"
        else:
            self.why = "JSON, but not a trace: no traceEvents"


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and ("ph" in value or "ts" in value)


def _scalar(value: Any) -> int | float | str | None:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Decimal | float):
        real = float(value)
        return real if math.isfinite(real) else None
    return value if type(value) is int else None


def _digits(value: Any) -> msgspec.Raw:
    """Return a time as it was written."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        return msgspec.Raw(b"null")
    try:
        return msgspec.Raw(str(value).encode("ascii", "replace"))
    except ValueError:  # an integer of thousands of digits
        return msgspec.Raw(b"null")


def _plain(value: Any) -> Any:
    """Return a decoded value with floats as floats, and text that UTF-8 can hold."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _event(raw: dict[str, Any]) -> Event:
    args, category, name = raw.get("args"), raw.get("cat"), raw.get("name")
    return Event(
        ph=raw["ph"],
        cat=clean(category) if isinstance(category, str) else None,
        name=None if name is None else clean(str(name)),
        pid=_scalar(raw.get("pid")),
        tid=_scalar(raw.get("tid")),
        ts=_digits(raw.get("ts")),
        dur=_digits(raw.get("dur")),
        args=_args(args) if isinstance(args, dict) else None,
    )


def _args(raw: dict[str, Any]) -> Args:
    values: dict[str, Any] = {}
    for key, value in raw.items():
        known = ARGUMENTS.get(key)
        if known is None or value is None:
            continue
        if known.type is msgspec.Raw:
            values[known.name] = msgspec.Raw(json.dumps(_plain(value)).encode())
        else:
            values[known.name] = clean(str(value)) if key == "Collective name" else _scalar(value)
    return Args(**values)
