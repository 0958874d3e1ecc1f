"""The fast way to read a trace: a scanner in C that is fed while the file is decompressed.

Neither the text nor its events are ever held whole. What the scanner refuses is left to the decoder
in Python.
"""

from __future__ import annotations

import itertools
import re
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from chopper import limits
from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.kineto._decoder import end_of_broken, fix_event
from chopper.collectors.formats.kineto._events import (
    ARGUMENTS,
    GROUPS,
    MEMORY,
    MEMORY_NAME,
    MTIA,
    REFUSED,
    TARGETS,
    Columns,
    CounterEvent,
    Event,
    Header,
    Ids,
    Marked,
    Names,
    Number,
    Scanned,
    Target,
    decode_counters,
    decode_events,
    note_name,
    threshold_of,
    unsigned,
)
from chopper.collectors.formats.unpack import DAMAGE, ahead, pieces
from chopper.limits import Intake

if TYPE_CHECKING:
    from chopper.collectors.formats.kineto._events import Marked
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


try:
    from chopper.collectors.formats.kineto._scan import Scanner
except ImportError:  # it was installed without a C compiler
    SCANS = False
else:
    SCANS = True


_HELD_RATIO = 0.5
"""Memory for each byte of text: columns of what is read; the rest is let go of."""
_MOST_EVENTS = 2**31 - 1
"""Places are numbers of 32 bits."""
_KNOWN = {**TARGETS, MTIA: Target(REFUSED)}

# As in _scan.c.
_ID_STRINGS = -(2**63) + 1
_FIRST_ID = -(2**63) + (1 << 32)
_PID, _TID, _NAME, _PLACE = 2, 3, 4, 7

_decode_header = msgspec.json.Decoder(Header).decode


def new_scanner(state: int = 0) -> Scanner:
    """Make a scanner of a text, or one that continues from another scanner's state."""
    number_of = {key: i for i, key in enumerate(ARGUMENTS)}
    return Scanner(
        args=tuple(
            (key.encode(), 2 if f.type is msgspec.Raw else 0 if f.type == Number else 1)
            for key, f in ARGUMENTS.items()
        ),
        groups=tuple(
            (
                tuple(number_of[key] for key in group.ints.values()),
                tuple(number_of[key] for key in group.texts.values()),
            )
            for group in GROUPS
        ),
        categories=tuple((category.encode(), *target) for category, target in _KNOWN.items()),
        marked=number_of["Collective name"],
        instant=MEMORY_NAME.encode(),
        instant_group=MEMORY,
        state=state,
    )


class RowTaker(Protocol):
    """Takes the rows of a text that is too large for its rows to be held."""

    def take(self, columns: Columns, collectives: Marked) -> None:
        """Take the next rows; those of collectives count from the first of them."""


def scan_file(path: Path, taker: RowTaker | None = None, threads: int = 1) -> Scanned | None:
    """Read a file; None when it is to be read another way, for whatever reason.

    Args:
        path: the file.
        taker: takes the rows of a large one, which then has none in what is returned.
        threads: how many scan at a time.
    """
    if not SCANS:
        return None
    try:
        # A pipe can be read only once.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        held_ratio = _HELD_RATIO if taker is None else 0.0
        with path.open("rb", buffering=0) as file:
            content = pieces(file, Intake(path, held_ratio))
            return scan_pieces(content if taker is None else ahead(content), taker, threads)
    except (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError, *DAMAGE):
        return None


def scan_pieces(
    content: Iterator[bytes], taker: RowTaker | None = None, threads: int = 1
) -> Scanned:
    """Read a text that comes in pieces.

    Args:
        content: the text.
        taker, threads: as in :func:`scan_file`.

    Raises:
        ValueError: the decoder in Python has to decide.
    """
    text = _Text(taker)
    read = sections(content, new_scanner, threads)
    section = next(read)
    for following in read:
        text.add(section, is_part=True)
        section = following
    text.add(section, is_part=False)
    return text.scanned()


class _Text:
    """The content of a text's sections; rows are handed on once it turns out to be large."""

    def __init__(self, taker: RowTaker | None) -> None:
        self._taker = taker
        self._blocks: list[tuple[Columns, Marked]] = []
        self._text_bytes = self._largest_start = self._events_count = 0
        self._header: list[bytes] = []
        self._metadata: list[Event] = []
        self._counters: list[CounterEvent] = []
        self._names: dict[bytes, int] = {}
        self._texts: dict[bytes, int] = {}
        self._ids = Ids()
        self._unknown: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, section: Section, *, is_part: bool) -> None:
        """Add the next section.

        Raises:
            ValueError: the text ends in it, and not as one should; or has too many events.
        """
        if self._events_count + section.scanner.events_count > _MOST_EVENTS:
            raise ValueError("more events than are counted here")
        text, columns, *codes, (categories, counts), without = section.scanner.finish(is_part)
        block = [[np.asarray(column) for column in group] for group in columns]
        self._number(block, *codes)
        self._events_count += section.scanner.events_count
        self._text_bytes += section.text_bytes
        self._header += [text] if text else []
        self._metadata += section.metadata
        self._counters += section.counters
        unknown = [category.decode() for category in categories[len(_KNOWN) :]]
        times = np.asarray(counts)[len(_KNOWN) :].tolist()
        self._unknown.update(dict(zip(unknown, times, strict=True)))
        self._counts += section.counts
        self._counts["event.without_category"] += without
        for start, *_ in block:
            self._largest_start = max(self._largest_start, int(np.abs(start).max(initial=0)))
        self._blocks.append((block, section.collectives))
        if self._taker is not None and self._text_bytes >= limits.LARGE_TRACE_BYTES:
            for one in self._blocks:
                self._taker.take(*one)
            self._blocks.clear()

    def _number(
        self, block: Columns, names: list[bytes], texts: list[bytes], words: list[bytes]
    ) -> None:
        """Number the names, texts, ids and places of a section as those of the whole text."""
        number_by_word = np.array([-1, *(self._ids[_decode(w)] for w in words)], dtype=np.int64)
        name_codes, text_codes = _numbered(self._names, names), _numbered(self._texts, texts)
        for group, columns in zip(GROUPS, block, strict=True):
            for recorded in columns[_PID], columns[_TID]:
                is_word = recorded < _FIRST_ID
                if is_word.any():
                    recorded[is_word] = number_by_word[recorded[is_word] - _ID_STRINGS]
            columns[_PLACE] += self._events_count
            if "correlation_id" in group.ints:
                at = _PLACE + 1 + [*group.ints].index("correlation_id")
                columns[at] = unsigned(columns[at])
            if name_codes is not None:
                columns[_NAME] = name_codes[columns[_NAME]]
            if text_codes is not None and group.texts:
                of_texts = slice(len(columns) - len(group.texts), None)
                columns[of_texts] = [text_codes[column] for column in columns[of_texts]]

    def scanned(self) -> Scanned:
        """Return the contents of the text.

        Raises:
            ValueError: some times count in nanoseconds.
        """
        header = _decode_header(b"{%b}" % b",".join(self._header))
        if self._largest_start >= int(threshold_of(header)) * 1000:
            raise ValueError("nanoseconds where microseconds belong")
        groups, collectives = stacked(self._blocks)
        name_by_id: Names = {}
        for event in self._metadata:
            note_name(name_by_id, self._ids, event)
        return Scanned(
            header=header,
            groups=groups,
            names=[_decode(name) for name in self._names],
            texts=[*self._texts],
            collectives=collectives,
            counters=self._counters,
            ids=self._ids,
            called=name_by_id,
            unknown=dict(self._unknown),
            counts=self._counts,
        )


def _numbered(number_by_text: dict[bytes, int], of_section: list[bytes]) -> np.ndarray | None:
    """Return the number of each text by its code in a section; None where that is the same."""
    first = not number_by_text
    numbers = [number_by_text.setdefault(text, len(number_by_text) + 1) for text in of_section]
    return None if first else np.array([0, *numbers], dtype=np.int32)


def stacked(blocks: list[tuple[Columns, Marked]]) -> tuple[Columns, Marked]:
    """Return the rows of all, one block after another; the blocks lose theirs meanwhile."""
    if len(blocks) == 1:
        return blocks[0]
    marked: Marked = []
    first = [0] * len(GROUPS)
    for block, block_marked in blocks:
        marked += [(group, row + first[group], args) for group, row, args in block_marked]
        first = [n + len(group[0]) for n, group in zip(first, block, strict=True)]
    columns: Columns = []
    for group in range(len(GROUPS) if blocks else 0):
        columns.append([])
        while blocks[0][0][group]:
            parts = [block[group].pop(0) for block, _ in blocks]
            columns[group].append(np.concatenate(parts))
    return columns, marked


def _decode(raw: bytes) -> str:
    """Decode what stands between the quotes of a string."""
    if b"\\" not in raw:
        return raw.decode()
    return clean(str(msgspec.json.decode(b'"%b"' % raw)))
