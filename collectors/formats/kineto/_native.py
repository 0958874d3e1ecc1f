"""The fast way to read a trace: a scanner in C that is fed while the file is decompressed.

Neither the text nor its events are ever held whole. What the scanner refuses is left to the decoder
in Python.
"""

from __future__ import annotations

import itertools
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.kineto._events import (
    ARGUMENTS,
    MEMORY_NAME,
    Args,
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
    Scanned,
    Target,
)
from chopper.collectors.formats.kineto._values import Ids, Names, note_name, threshold_of
from chopper.collectors.formats.unpack import DAMAGE, pieces
from chopper.limits import Intake

try:
    from chopper.collectors.formats.kineto._scan import Scanner
except ImportError:  # it was installed without a C compiler
    SCANS = False
else:
    SCANS = True


_HELD_RATIO = 0.5
"""Memory for each byte of text: columns of what is read; the rest is let go of."""
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


def scan_file(path: Path) -> Scanned | None:
    """Read a file; None when it is to be read another way, for whatever reason."""
    if not SCANS:
        return None
    try:
        # A pipe can be read only once.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb", buffering=0) as file:
            return scan_pieces(pieces(file, Intake(path, _HELD_RATIO)))
    except (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError, *DAMAGE):
        return None


def scan_pieces(content: Iterator[bytes]) -> Scanned:
    """Read a text that comes in pieces.

    Raises:
        ValueError: the decoder in Python has to decide.
    """
    scanner = new_scanner()
    metadata: list[Event] = []
    counters: list[CounterEvent] = []
    collectives: list[tuple[int, int, Args]] = []
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
        (called, _), (samples, _), (events, rows) = scanner.take()
        metadata += decode_events(b"[%b]" % called)
        counters += decode_counters(b"[%b]" % samples)
        collectives += [
            (group, row, event.args)
            for (group, row), event in zip(rows, decode_events(b"[%b]" % events), strict=True)
            if event.args is not None
        ]
    text, columns, names, texts, words, (categories, seen), without_category = scanner.finish()
    header = _decode_header(b"{%b}" % text)
    ids = Ids()
    number_by_word = np.array([-1, *(ids[_decode(word)] for word in words)], dtype=np.int64)
    groups = [[np.asarray(column) for column in group] for group in columns]
    for start, _, pid, tid, *_ in groups:
        if len(start) and int(np.abs(start).max()) >= int(threshold_of(header)) * 1000:
            raise ValueError("nanoseconds where microseconds belong")
        for recorded in (pid, tid):
            is_word = recorded < _FIRST_ID
            if is_word.any():
                recorded[is_word] = number_by_word[recorded[is_word] - _ID_STRINGS]
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
    )


def _decode(raw: bytes) -> str:
    """Decode what stands between the quotes of a string."""
    if b"\\" not in raw:
        return raw.decode()
    return clean(str(msgspec.json.decode(b'"%b"' % raw)))
