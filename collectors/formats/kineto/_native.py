"""The fast way to read a trace: a scanner in C that is fed while the file is decompressed.

Neither the text nor its events are ever held whole. What the scanner refuses is left to the decoder
in Python.
"""

from __future__ import annotations

import itertools
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from chopper import limits
from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.kineto._events import (
    ARGUMENTS,
    MEMORY_NAME,
    CounterEvent,
    Event,
    Header,
    Number,
    decode_counters,
    decode_events,
)
from chopper.collectors.formats.kineto._groups import (
    GROUPS,
    MEMORY,
    MTIA,
    REFUSED,
    TARGETS,
    Columns,
    Marked,
    Scanned,
    Target,
)
from chopper.collectors.formats.kineto._values import Ids, Names, note_name, threshold_of
from chopper.collectors.formats.unpack import DAMAGE, ahead, pieces
from chopper.limits import Intake

try:
    from chopper.collectors.formats.kineto._scan import Scanner
except ImportError:  # it was installed without a C compiler
    SCANS = False
else:
    SCANS = True


_HELD_RATIO = 0.5
"""Memory for each byte of text: columns of what is read; the rest is let go of."""
_BLOCK_BYTES = 1 << 28
"""Of text whose rows are handed on together: about a million."""
_KNOWN = {**TARGETS, MTIA: Target(REFUSED)}

# As in _scan.c.
_ID_STRINGS = -(2**63) + 1
_FIRST_ID = -(2**63) + (1 << 32)

_decode_header = msgspec.json.Decoder(Header).decode


def new_scanner() -> Scanner:
    """Make a scanner of one text."""
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
    )


class RowTaker(Protocol):
    """Takes the rows of a text that is too large for its rows to be held."""

    def take(self, columns: Columns, collectives: Marked) -> None:
        """Take the next rows; those of collectives count from the first of them."""


def scan_file(path: Path, taker: RowTaker | None = None) -> Scanned | None:
    """Read a file; None when it is to be read another way, for whatever reason.

    Args:
        path: the file.
        taker: takes the rows of a large one, which then has none in what is returned.
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
            return scan_pieces(content if taker is None else ahead(content), taker)
    except (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError, *DAMAGE):
        return None


class _Rows:
    """Rows of a text as they come: held, or handed on once it turns out to be large."""

    def __init__(self, scanner: Scanner, taker: RowTaker | None) -> None:
        self._scanner, self._taker = scanner, taker
        self._blocks: list[tuple[Columns, Marked]] = []
        self._marked: Marked = []
        self._text_bytes = self._block_bytes = self._largest_start = 0

    def add(self, text_bytes: int, marked: Marked) -> None:
        """Note what was scanned."""
        self._text_bytes += text_bytes
        self._block_bytes += text_bytes
        self._marked += marked
        if self._taker is not None and self._block_bytes >= _BLOCK_BYTES:
            self._close_block(self._scanner.rows())

    def _close_block(self, columns: tuple[Any, ...]) -> None:
        block = [[np.asarray(column) for column in group] for group in columns]
        for start, *_ in block:
            if len(start):
                self._largest_start = max(self._largest_start, int(np.abs(start).max()))
        self._blocks.append((block, self._marked))
        self._marked, self._block_bytes = [], 0
        if self._taker is not None and self._text_bytes >= limits.LARGE_TRACE_BYTES:
            for one in self._blocks:
                self._taker.take(*one)
            self._blocks.clear()

    def held(self, last: tuple[Any, ...], threshold_us: float) -> tuple[Columns, Marked]:
        """Return the rows that are held, given the last of them.

        Raises:
            ValueError: some count in nanoseconds.
        """
        self._close_block(last)
        if self._largest_start >= int(threshold_us) * 1000:
            raise ValueError("nanoseconds where microseconds belong")
        return stacked(self._blocks)


def stacked(blocks: Sequence[tuple[Columns, Marked]]) -> tuple[Columns, Marked]:
    """Return the rows of all, one block after another."""
    if len(blocks) == 1:
        return blocks[0]
    columns = [
        [np.concatenate(parts) for parts in zip(*of_group, strict=True)]
        for of_group in zip(*(columns for columns, _ in blocks), strict=True)
    ]
    marked: Marked = []
    first = [0] * len(columns)
    for block, own in blocks:
        marked += [(group, row + first[group], args) for group, row, args in own]
        first = [n + len(group[0]) for n, group in zip(first, block, strict=True)]
    return columns, marked


def with_ids(columns: Columns, number_by_word: np.ndarray) -> None:
    """Put the numbers of process and thread ids that are words in their place."""
    for _, _, pid, tid, *_ in columns:
        for recorded in (pid, tid):
            is_word = recorded < _FIRST_ID
            if is_word.any():
                recorded[is_word] = number_by_word[recorded[is_word] - _ID_STRINGS]


def scan_pieces(content: Iterator[bytes], taker: RowTaker | None = None) -> Scanned:
    """Read a text that comes in pieces.

    Args:
        content: the text.
        taker: as in :func:`scan_file`.

    Raises:
        ValueError: the decoder in Python has to decide.
    """
    scanner = new_scanner()
    metadata: list[Event] = []
    counters: list[CounterEvent] = []
    rows = _Rows(scanner, taker)
    rest, wanted = b"", 0
    for piece in itertools.chain(content, (None,)):
        if piece is not None:
            rest = rest + piece if rest else piece
            if len(rest) < wanted:
                continue
        done = scanner.feed(rest)
        # Where not one event was whole, twice the text comes before the next attempt.
        wanted = 0 if done else 2 * len(rest)
        rest = rest[done:]
        (called, _), (samples, _), (events, places) = scanner.take()
        metadata += decode_events(b"[%b]" % called)
        counters += decode_counters(b"[%b]" % samples)
        collectives = [
            (group, row, event.args)
            for (group, row), event in zip(places, decode_events(b"[%b]" % events), strict=True)
            if event.args is not None
        ]
        rows.add(done, collectives)
    text, columns, names, texts, words, (categories, seen), without_category = scanner.finish()
    header = _decode_header(b"{%b}" % text)
    ids = Ids()
    number_by_word = np.array([-1, *(ids[_decode(word)] for word in words)], dtype=np.int64)
    groups, collectives = rows.held(columns, threshold_of(header))
    with_ids(groups, number_by_word)
    name_by_id: Names = {}
    for event in metadata:
        note_name(name_by_id, ids, event)
    times = np.asarray(seen).tolist()
    return Scanned(
        header=header,
        groups=groups,
        names=[_decode(name) for name in names],
        texts=texts,
        collectives=collectives,
        counters=counters,
        ids=ids,
        called=name_by_id,
        unknown={
            category.decode(): count
            for category, count in zip(categories[len(_KNOWN) :], times[len(_KNOWN) :], strict=True)
        },
        counts=Counter({"event.without_category": without_category}),
        number_by_word=number_by_word,
    )


def _decode(raw: bytes) -> str:
    """Decode what stands between the quotes of a string."""
    if b"\\" not in raw:
        return raw.decode()
    return clean(str(msgspec.json.decode(b'"%b"' % raw)))
