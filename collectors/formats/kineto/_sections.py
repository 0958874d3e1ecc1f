"""Sections of a text: each is scanned by a scanner of its own, several at a time.

Where a section begins is a guess: before an event, after a comma. The guess holds if the scanner of
the section before stands at this byte just as this one began. Else that one reads on here too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chopper.collectors.formats.kineto._events import (
    CounterEvent,
    Event,
    decode_counters,
    decode_events,
)
from chopper.collectors.formats.kineto._strict import end_of_broken, fix_event

if TYPE_CHECKING:
    from chopper.collectors.formats.kineto._groups import Marked
    from chopper.collectors.formats.kineto._scan import Scanner

_TEXT_BYTES = 1 << 24
"""Of a section that is scanned beside others."""
_ALONE_BYTES = 1 << 28
"""Of a section where one is scanned after another: about a million rows."""
_TAIL_BYTES = 1 << 16
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")


@dataclass
class Section:
    """A scanner with the results from its part of the text.

    Attributes:
        metadata, counters, collectives: events that are decoded here.
        counts: broken events, by the code of their finding.
        text_bytes: that were scanned.
    """

    scanner: Scanner
    metadata: list[Event] = field(default_factory=list)
    counters: list[CounterEvent] = field(default_factory=list)
    collectives: Marked = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0
    _rest: bytes = b""
    _wanted_bytes: int = 0

    def feed(self, piece: bytes = b"") -> None:
        """Scan the next piece; an empty one is the end.

        Raises:
            ValueError: the decoder in Python has to decide.
        """
        rest = self._rest + piece if self._rest else piece
        if piece and len(rest) < self._wanted_bytes:
            self._rest = rest
            return
        done = self._scan(rest, is_end=not piece)
        # Where not one event was whole, twice the text comes before the next attempt.
        self._wanted_bytes = 0 if done else 2 * len(rest)
        self._rest = rest[done:]
        self.text_bytes += done
        (called, _), (samples, _), (events, places) = self.scanner.take()
        self.metadata += decode_events(b"[%b]" % called)
        self.counters += decode_counters(b"[%b]" % samples)
        self.collectives += [
            (group, row, event.args)
            for (group, row), event in zip(places, decode_events(b"[%b]" % events), strict=True)
            if event.args is not None
        ]

    def _scan(self, text: bytes, *, is_end: bool) -> int:
        """Scan text, fix broken events, and return how many of its bytes are done with."""
        view, at = memoryview(text), 0
        while True:
            try:
                return at + self.scanner.feed(view[at:])
            except ValueError:
                if self.scanner.refused_at < 0:
                    raise
                at += self.scanner.refused_at
                end = end_of_broken(text, at)
                if end is None:
                    if is_end:
                        raise
                    return at
            event, code = fix_event(text[at:end].decode())
            self.scanner.feed(event.encode())
            self.counts[code] += 1
            at = end

    def stands_at(self, state: int) -> bool:
        """Return whether all of its text was read, and it stands there."""
        return not self._rest and self.scanner.state == state

    def following(self, scanner: Scanner) -> Section:
        """Return the section that goes on where this one stands."""
        return Section(scanner, _rest=self._rest, _wanted_bytes=self._wanted_bytes)


def sections(
    content: Iterator[bytes], new_scanner: Callable[[int], Scanner], threads: int
) -> Iterator[Section]:
    """Yield the sections of a text in their order.

    Args:
        content: the text, in pieces.
        new_scanner: makes one that goes on at a state.
        threads: how many scan at a time.

    Raises:
        ValueError: the decoder in Python has to decide.
    """
    section = Section(new_scanner(0))
    if threads > 1:
        yield from _beside_each_other(section, content, new_scanner, threads)
        return
    for piece in content:
        section.feed(piece)
        if section.text_bytes >= _ALONE_BYTES:
            yield section
            section = section.following(new_scanner(section.scanner.state))
    section.feed()
    yield section


def _beside_each_other(
    section: Section,
    content: Iterator[bytes],
    new_scanner: Callable[[int], Scanner],
    threads: int,
) -> Iterator[Section]:
    def scanned(text: list[bytes], state: int) -> Section | None:
        last = Section(new_scanner(state))
        try:
            for piece in text:
                last.feed(piece)
        except ValueError:  # it does not begin where that was guessed, or is damaged
            return None
        return last

    texts = _cut(content)
    for piece in next(texts):
        section.feed(piece)
    guess = section.scanner.state
    with ThreadPoolExecutor(threads) as pool:
        ahead = ((text, guess, pool.submit(scanned, text, guess)) for text in texts)
        waiting = deque(itertools.islice(ahead, threads))
        while waiting:
            text, state, future = waiting.popleft()
            following = future.result()
            waiting.extend(itertools.islice(ahead, 1))
            if following is not None and section.stands_at(state):
                yield section
                section = following
                continue
            for piece in text:
                section.feed(piece)
            guess = section.scanner.state
    section.feed()
    yield section


def _cut(content: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yield texts, in pieces, that end where an event begins, as far as one can see."""
    text: list[bytes] = []
    text_bytes = 0
    for piece in content:
        text.append(piece)
        text_bytes += len(piece)
        if text_bytes < _TEXT_BYTES:
            continue
        ends = [m.end() for m in _BETWEEN.finditer(piece, max(0, len(piece) - _TAIL_BYTES))]
        if ends:
            text[-1] = piece[: ends[-1]]
            yield text
            text = [piece[ends[-1] :]]
            text_bytes = len(text[0])
    yield text
