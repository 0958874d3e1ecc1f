"""The events of a trace file as they were written, for tools that show all of them.

Text is passed on in blocks of whole events; neither the file nor its events are ever held whole,
unless the file is damaged: then what could be repaired of it is passed on.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from chopper.collectors.formats.kineto._decoder import StrictText, decode_at, skip
from chopper.collectors.formats.kineto._events import NOTHING, Header, base_of, threshold_of, to_ns
from chopper.collectors.formats.unpack import DAMAGE, read_bytes, salvaged
from chopper.errors import JSON_ERRORS, InputError, reason_of
from chopper.limits import Intake

_HELD_RATIO = 0.1
"""Memory for each byte of text: a block at a time is held."""
_BLOCK_BYTES = 1 << 22
_TRIES = 8
_TAIL_BYTES = 1 << 16
_EVENTS_KEY = "traceEvents"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")

_BEHIND = re.compile(rb'\]\s*,(?=\s*")')

_Members = dict[str, msgspec.Raw]
decode_events = msgspec.json.Decoder(list[_Members]).decode
_decode_document = msgspec.json.Decoder(_Members).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def encode_event(event: _Members) -> bytes:
    """Return an event as text; its values are passed on as they were written."""
    return msgspec.json.encode(event)


def microseconds(time_ns: int) -> msgspec.Raw:
    """Return nanoseconds as JSON of microseconds, exact to the digit."""
    whole, rest = divmod(abs(time_ns), 1000)
    return msgspec.Raw(f"{'-' * (time_ns < 0)}{whole}.{rest:03d}".encode())


def moved(time_us: msgspec.Raw, by_ns: int) -> msgspec.Raw:
    """Return a time in microseconds that lies so much later; what is no time stays as it is."""
    at_ns, known, _ = to_ns([time_us], float("inf"))
    return microseconds(int(at_ns[0]) + by_ns) if known[0] else time_us


class _Event(msgspec.Struct, gc=False):
    pid: msgspec.Raw = NOTHING
    ts: msgspec.Raw = NOTHING


_decode_typed = msgspec.json.Decoder(list[_Event]).decode


class OriginalTrace:
    """A trace file, to be read in order.

    Attributes:
        path: the file.
        header: members beside the events, name to JSON text.
        pids: process ids of the events that were read, as JSON.

    Raises:
        InputError: the file cannot be read, or is larger than the limits allow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: _Members = {}
        self.pids: set[bytes] = set()
        self._is_list = False
        self._begin: int | None = None
        head, tail = b"", b""
        for piece in _pieces(path):
            if self._begin is not None:
                tail = (tail + piece)[-_TAIL_BYTES:]
            elif len(head) < _BLOCK_BYTES:
                head += piece
                self._begin = self._find_events(head)
                tail = b"" if self._begin is None else head[self._begin :]
        if self._begin is not None and not self._is_list:
            self.header |= _members_behind(tail)

    @property
    def base_ns(self) -> int:
        """What is to be added to every recorded time, in ns; 0 where the header has no base."""
        return base_of(self._typed_header()) or 0

    def blocks(self) -> Iterator[bytes]:
        """Yield the events as JSON objects with commas between them; times are microseconds."""
        if self._begin is None:
            yield from map(self._block, self._last(read_bytes(self.path)[0]))
            return
        rest, unread, wanted = bytearray(), self._begin, _BLOCK_BYTES
        for piece in _pieces(self.path):
            rest += piece[unread:]
            unread = max(0, unread - len(piece))
            if len(rest) < wanted:
                continue
            cut = self._cut(rest)
            # If no event ends, twice the text comes before the next attempt.
            wanted = _BLOCK_BYTES if cut else 2 * len(rest)
            if cut:
                yield self._block(bytes(rest[:cut]))
                del rest[: cut + 1]
        opening = b"[" if self._is_list else b'{"traceEvents":['
        yield from map(self._block, self._last(opening + rest))

    def _find_events(self, head: bytes) -> int | None:
        """Return where the first event is expected, None if that is not seen yet."""
        text = head.removeprefix(codecs.BOM_UTF8).lstrip()
        before = len(head) - len(text)
        if text.startswith(b"["):
            self._is_list = True
            return before + 1
        for found in _EVENTS.finditer(text):
            try:
                self.header = _decode_document(_utf8(text[: found.end()]) + b"]}")
            except JSON_ERRORS:
                continue
            del self.header[_EVENTS_KEY]
            return before + found.end()
        return None

    def _typed_header(self) -> Header:
        header = b"{%b}" % b",".join(b'"%b":%b' % (k.encode(), v) for k, v in self.header.items())
        return msgspec.json.decode(header, type=Header)

    def _cut(self, text: bytearray) -> int | None:
        """Return the end of the last event in a text where one can be found quickly.

        A list that ends there is JSON only if it is the list of events that ends there.
        """
        tail = max(0, len(text) - _TAIL_BYTES)
        for found in reversed([*_BETWEEN.finditer(text, tail)][-_TRIES:]):
            try:
                _decode_list(b"[%b]" % bytes(text[: found.end() - 1]))
            except JSON_ERRORS:
                continue
            return found.end() - 1
        return None

    def _block(self, text: bytes) -> bytes:
        """Return events with text and times that every viewer reads alike."""
        text = _utf8(text)
        try:
            events = _decode_typed(b"[%b]" % text)
        except JSON_ERRORS:  # entries that are no events
            text = _objects(_decode_list(b"[%b]" % text))
            events = _decode_typed(b"[%b]" % text)
        self.pids.update(bytes(event.pid) for event in events)
        timed = [event.ts for event in events if event.ts]
        threshold = threshold_of(self._typed_header())
        if not timed or not to_ns(timed, threshold)[2].any():
            return text
        members = decode_events(b"[%b]" % text)
        for event in members:
            at, _, in_ns = to_ns([event.get("ts", NOTHING)], threshold)
            if in_ns[0]:
                event["ts"] = microseconds(int(at[0]))
                dur, known, _ = to_ns([event.get("dur", NOTHING)], in_ns)
                if known[0]:
                    event["dur"] = microseconds(int(dur[0]))
        return msgspec.json.encode(members)[1:-1]

    def _last(self, text: bytes) -> Iterator[bytes]:
        """Yield the events of the rest of a file, repaired where it is damaged."""
        source = StrictText(self.path.name, text).text.decode()
        at = skip(source, 0)
        while at < len(source):
            try:
                _, end = decode_at(source, at)
                document = source[at:end].encode()
                if document.startswith(b"{"):
                    header = _decode_document(document)
                    document = bytes(header.pop(_EVENTS_KEY, msgspec.Raw(b"[]")))
                    # The first of several counts.
                    self.header = header | self.header
                events = _decode_list(document)
            except (ValueError, *JSON_ERRORS):
                return
            yield _objects(events)
            at = skip(source, end)


def _utf8(text: bytes) -> bytes:
    """Return a text with what is no UTF-8 replaced."""
    return text.decode(errors="replace").encode()


def _members_behind(tail: bytes) -> _Members:
    """Return the members of an object that stand behind its list of events, in its last bytes."""
    for found in _BEHIND.finditer(tail):
        try:
            return _decode_document(b"{" + _utf8(tail[found.end() :]))
        except JSON_ERRORS:
            continue
    return {}


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file up to where it is damaged."""
    try:
        with path.open("rb") as file:
            yield from salvaged(file, Intake(path, _HELD_RATIO))
    except DAMAGE:
        return
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({reason_of(exc)})") from exc


def _objects(entries: list[msgspec.Raw]) -> bytes:
    """Return the entries of a list that are objects, with commas between them."""
    return b",\n".join(entry for entry in map(bytes, entries) if entry.startswith(b"{"))
