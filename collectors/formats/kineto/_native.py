"""The fast way to read a trace: a scanner in C that is fed while the file is decompressed.

Neither the text nor its events are ever held whole. What the scanner refuses is left to the decoder
in Python.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

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
from chopper.collectors.formats.kineto._sections import Section, sections
from chopper.collectors.formats.kineto._values import Ids, Names, note_name, threshold_of, unsigned
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
