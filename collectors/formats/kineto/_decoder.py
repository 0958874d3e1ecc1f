"""The general way to read a trace: what the scanner in C refuses, or could not be compiled for.

Strict JSON is decoded into typed structures at once; everything else is fixed first.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.kineto._events import (
    ARGUMENTS,
    DEVICE,
    DEVICE_KINDS,
    GROUPS,
    IN_NS,
    MEMORY,
    MEMORY_NAME,
    MTIA,
    NO_ARGS,
    NOTHING,
    OVERFLOWING_DUR,
    SKIPPED,
    TARGETS,
    WITHOUT_DUR,
    WITHOUT_NAME,
    WITHOUT_TS,
    Args,
    CounterEvent,
    Document,
    Event,
    Header,
    Ids,
    Scanned,
    Target,
    decode_counters,
    decode_events,
    ints,
    note_name,
    threshold_of,
    to_ns,
    unsigned,
)
from chopper.errors import InputError
from chopper.limits import Intake
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding

_SPACE = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_HEADER = frozenset(field.name for field in msgspec.structs.fields(Header))
_MEMBER = re.compile(rf'"({"|".join(sorted(_HEADER))})"\s*:\s*')
_NEXT_EVENT = r'(?<=[,}])[ \t\r\n]*(?=\{[ \t\r\n]*"(?:ph|cat|name|pid|tid|ts|args)"[ \t\r\n]*:)'
_NEXT_EVENT_BYTES = re.compile(_NEXT_EVENT.encode())
_NEXT_EVENT_TEXT = re.compile(_NEXT_EVENT)
_BETWEEN = " \t\r\n,"
_LAST_EVENT = re.compile(r'\}(?=\s*\]\s*(?:\}|,\s*"|$))')
_LIST_END = re.compile(r"\](?!\s*,\s*\{)")

_NAME = (
    re.compile(r'"name"\s*+:\s*+"'),
    re.compile(
        r'"\s*+(?:,\s*+"(?:ph|cat|pid|tid|ts|dur|id|args|s|bp)"\s*+:|\}[}\s]*+$|$)',
    ),
)
_TEXT = (
    re.compile(r'"(?!ph"|cat")[^"\\]++"\s*+:\s*+"'),
    re.compile(r'"\s*+(?:,\s*+"[^"\\]++"\s*+:|\}[}\s]*+(?:,|$))'),
)
"""Where the text of the name, and of other members, opens and closes."""
_TOKEN = re.compile(
    r'"|(?<![\w.])[-+]?(?:nan(?:\(\w*+\))?|inf(?:inity)?|\d\.#\w+)(?!\w)|,(?=\s*+[,}\]])',
    re.IGNORECASE,
)
"""Where a string opens, C's text of a number that JSON has not, or a comma before nothing."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_ESCAPED = re.compile(r'(?:[^\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*', re.DOTALL)
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Floats keep their digits until it is known which of them are times.
_decoder = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)


def decode_at(source: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``at``, and where it ends.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    try:
        return _decoder.raw_decode(source, at)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


def skip(source: str, at: int) -> int:
    """Return the end of space and commas that begin at a place."""
    blank = _SPACE.match(source, at)
    return at if blank is None else blank.end()


def end_of_broken(text: bytes, at: int) -> int | None:
    """Return the end of a broken event: before the next one; None if none follows."""
    following = _NEXT_EVENT_BYTES.search(text, at + 1)
    if following is None:
        return None
    return at + len(text[at : following.end()].rstrip(_BETWEEN.encode()))


def fix_event(event: str) -> tuple[str, str]:
    """Return a broken event as JSON, and the code of the finding.

    Raises:
        ValueError: it is JSON.
    """
    if _length_of(event):
        raise ValueError("the event is JSON")

    def known(token: str) -> str:
        return token if token[0] in '",' else "null"

    def valid_token(token: str) -> str:
        if token[0] == '"':
            closed = len(token) > 1 and token[-1] == '"'
            return f'"{_escaped(token[1:-1])}"' if closed else token
        return "" if token == "," else "null"

    if _length_of(text := _with_tokens(event, known)) == len(text):
        return text, "trace.nan"
    for quoted in (_NAME, _TEXT):
        text = _requoted(event, *quoted)
        if _length_of(text := _with_tokens(text, valid_token)) == len(text):
            return text, "event.repaired"
    return "{}", "event.not_json"


def _with_tokens(event: str, changed: Callable[[str], str]) -> str:
    """Replace strings, numbers that JSON has not, and commas before nothing."""
    parts: list[str] = []
    position = 0
    while (match := _TOKEN.search(event, position)) is not None:
        token = match if match[0] != '"' else _STRING.match(event, match.start()) or match
        parts += [event[position : token.start()], changed(token[0])]
        position = token.end()
    return "".join(parts) + event[position:]


def _requoted(event: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> str:
    """Escape what stands bare in the strings that open and close in these ways."""
    parts: list[str] = []
    position = 0
    while (begin := opening.search(event, position)) is not None:
        if (end := closing.search(event, begin.end())) is None:
            break
        string = event[begin.end() : end.start()]
        parts += [event[position : begin.end()], _escaped(string)]
        position = end.start()
    return "".join(parts) + event[position:]


def _length_of(text: str) -> int:
    """Return the length of the JSON object that a text begins with; 0 for none."""
    try:
        value, end = decode_at(text, 0)
    except ValueError:
        return 0
    return end if isinstance(value, dict) else 0


def _escaped(string: str) -> str:
    """Escape what stands bare in a string; one invalid escape means that none is meant as such."""
    if not _ESCAPED.fullmatch(string):
        string = string.replace("\\", "\\\\")
    string = _ESCAPE_OR_QUOTE.sub(lambda one: one[0] if one[0] != '"' else '\\"', string)
    return _CONTROL.sub(lambda char: f"\\u{ord(char[0]):04x}", string)


@dataclass
class StrictText:
    """Text of a file, as strict JSON if it could be made so."""

    source_name: str
    text: bytes
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Events that were broken, by code."""

    def __post_init__(self) -> None:
        if self.text.startswith(b"\xef\xbb\xbf"):
            self.findings.append(finding("trace.byte_order_mark", source=self.source_name))
            self.text = self.text[3:]
        try:
            source = self.text.decode("utf-8")
        except UnicodeDecodeError as exc:
            source = self.text.decode("utf-8", "replace")
            self.findings.append(
                finding("trace.invalid_utf8", source=self.source_name, position=exc.start)
            )
        at = first = skip(source, 0)
        while at < len(source):
            try:
                _, end = decode_at(source, at)
            except ValueError:
                if source[at] in "[{":
                    source = source[:at] + self._closed(source, at)
                elif at > first:
                    rest = len(source) - at
                    self.findings.append(
                        finding("trace.trailing_text", source=self.source_name, characters=rest)
                    )
                    source = source[:at]
                break
            at = skip(source, end)
        self.text = source.encode()

    def _closed(self, source: str, at: int) -> str:
        """Return a damaged or open document from ``at`` on as JSON; as it is if it has no events.

        What follows an event that is cut off is lost.
        """
        opening = _EVENTS.search(source, at) if source[at] == "{" else None
        if opening is None and source[at] == "{":
            return source[at:]
        events: list[str] = []
        position = skip(source, at + 1 if opening is None else opening.end())
        while position < len(source) and not _LIST_END.match(source, position):
            try:
                _, end = decode_at(source, position)
                event = source[position:end]
            except ValueError as exc:
                following = _NEXT_EVENT_TEXT.search(source, position + 1)
                last = following or _LAST_EVENT.search(source, position)
                if last is None:
                    note = finding(
                        "trace.truncated",
                        "within_event",
                        source=self.source_name,
                        event=len(events) + 1,
                        position=position,
                        events=len(events),
                        characters=len(source) - position,
                    )
                    self.findings.append(note)
                    break
                end = position + len(source[position : last.end()].rstrip(_BETWEEN))
                event, code = fix_event(source[position:end])
                self.counts["event.nested_too_deep" if "too deep" in str(exc) else code] += 1
            events.append(event)
            position = skip(source, end)
        else:
            count = len(events)
            if position == len(source):
                note = finding("trace.truncated", source=self.source_name, events=count)
                self.findings.append(note)
            elif not self.counts:
                note = finding("trace.not_strict", source=self.source_name, events=count)
                self.findings.append(note)
        listed = f"[{','.join(events)}]"
        if opening is None:
            is_trace = any('"ph"' in event or '"ts"' in event for event in events)
            return listed if is_trace else source[at:]
        members = _members(source[position:]) | _members(source[at : opening.start()])
        texts = [f'"{key}":{value}' for key, value in members.items()]
        return "{" + ",".join([*texts, f'"traceEvents":{listed}']) + "}"


def _members(source: str) -> dict[str, str]:
    """Return the members of a header that are JSON, as text; the first of several counts."""
    members: dict[str, str] = {}
    for key in _MEMBER.finditer(source):
        try:
            _, end = decode_at(source, key.end())
        except ValueError:
            continue
        members.setdefault(key[1], source[key.end() : end])
    return members


_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def _repaired(path: Path, text: bytes, findings: list[Finding]) -> Scanned:
    """Read the events of JSON text, whatever their types; what cannot be used is counted.

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
    events: list[Event] = []
    counters: list[CounterEvent] = []
    counts: Counter[str] = Counter()
    for raw in documents.events:
        if not isinstance(raw, dict):
            counts["event.not_an_object"] += 1
        elif raw.get("ph") == "C":
            counters += _counter_event(raw)
        elif isinstance(raw.get("ph"), str):
            try:
                events.append(_event(raw))
            except RecursionError:
                counts["event.nested_too_deep"] += 1
        elif raw:
            counts["event.without_ph"] += 1
    if documents.count > 1:
        note = finding("trace.concatenated", source=path.name, documents=documents.count)
        findings.append(note)
    scanned = _scanned(Header(**members), events, counters)
    scanned.counts += counts
    return scanned


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


def _counter_event(raw: dict[str, Any]) -> list[CounterEvent]:
    """Return a sample, none if it has no values."""
    if not isinstance(raw.get("args"), dict):
        return []
    name = raw.get("name")
    return [
        CounterEvent(
            ph="C",
            name=name if isinstance(name, str) else None,
            pid=_scalar(raw.get("pid")),
            ts=_digits(raw.get("ts")),
            args=raw["args"],
        )
    ]


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
        scanned = _repaired(path, strict.text, strict.findings)
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
