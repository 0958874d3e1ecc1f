"""Damaged JSON as strict JSON: broken events, cut-off files, NaN, stray commas.

Damage stays with the event that has it. Events that cannot be fixed become ``{}``, which no
reader uses; all are counted by the code of their finding.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from chopper.collectors.formats.kineto._events import Header
from chopper.storage.manifest import Finding, Severity, add_finding

_SPACE = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_HEADER = "|".join(field.name for field in msgspec.structs.fields(Header))
_MEMBER = re.compile(rf'"({_HEADER})"\s*:\s*')
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

    def _note(self, code: str, message: str, severity: Severity = "warning") -> None:
        message = f"{self.source_name}: {message}"
        add_finding(self.findings, code, message, severity=severity)

    def __post_init__(self) -> None:
        if self.text.startswith(b"\xef\xbb\xbf"):
            message = "starts with a UTF-8 byte order mark; skipped"
            self._note("trace.byte_order_mark", message, "info")
            self.text = self.text[3:]
        try:
            source = self.text.decode("utf-8")
        except UnicodeDecodeError as exc:
            source = self.text.decode("utf-8", "replace")
            self._note(
                "trace.invalid_utf8",
                f"invalid UTF-8 (first at byte {exc.start}); shown as \N{REPLACEMENT CHARACTER}",
            )
        at = first = skip(source, 0)
        while at < len(source):
            try:
                _, end = decode_at(source, at)
            except ValueError:
                if source[at] in "[{":
                    source = source[:at] + self._closed(source, at)
                elif at > first:
                    rest = f"{len(source) - at} characters after the JSON are not JSON; ignored"
                    self._note("trace.trailing_text", rest)
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
                    self._note(
                        "trace.truncated",
                        f"JSON ends or breaks in the middle of event {len(events) + 1} (character "
                        f"{position}); the {len(events)} events before it are used, "
                        f"{len(source) - position} characters after are lost",
                    )
                    break
                end = position + len(source[position : last.end()].rstrip(_BETWEEN))
                event, code = fix_event(source[position:end])
                self.counts["event.nested_too_deep" if "too deep" in str(exc) else code] += 1
            events.append(event)
            position = skip(source, end)
        else:
            if position == len(source):
                many = len(events)
                message = f"JSON ends after event {many} without closing; those events are used"
                self._note("trace.truncated", message)
            elif not self.counts:
                self._note(
                    "trace.not_strict",
                    "JSON is not strict (for example a comma after the last event, or quotes in "
                    f"its header); all {len(events)} events were read",
                )
        listed = f"[{','.join(events)}]"
        if opening is None:
            return listed if any('"ph"' in event for event in events) else source[at:]
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
