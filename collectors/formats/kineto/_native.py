"""The fast way to read a trace: a scanner in C that is fed while the file is decompressed.

Neither the text nor its events are ever held whole. What the scanner refuses, and what it accepts
but this module cannot turn into columns without a doubt, is left to the reader in Python.
"""

from __future__ import annotations

import itertools
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE
from chopper.collectors.formats.cleaning import Counts, clean, number, usable_spans, usable_starts
from chopper.collectors.formats.kineto._columns import CounterBuilder, Rows
from chopper.collectors.formats.kineto._events import (
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    MEMORY_NAME,
    SKIPPED_CATEGORIES,
    SYNCHRONIZATION_CATEGORY,
    Args,
    CounterEvent,
    Event,
    ExactTimes,
    Header,
    Number,
)
from chopper.collectors.formats.kineto._values import (
    Ids,
    Names,
    base_of,
    note_name,
    text_of,
    threshold_of,
)
from chopper.collectors.formats.unpack import DAMAGE, pieces
from chopper.limits import Intake

try:
    from chopper.collectors.formats.kineto._scan import Scanner
except ImportError:  # it was installed without a C compiler
    SCANS = False
else:
    SCANS = True

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from chopper.collectors.formats.kineto._scan import Columns

_HELD_RATIO = 0.5
"""Memory for each byte of text: columns of what is read; the rest is let go of."""

_FIELDS = {field.encode_name: field for field in msgspec.structs.fields(Args)}
_ARGS = tuple(
    (key.encode(), 2 if f.type is msgspec.Raw else 0 if f.type == Number else 1)
    for key, f in _FIELDS.items()
)
_NUMBER_OF = {key: i for i, key in enumerate(_FIELDS)}

# What the rows of each group keep: integers, then texts.
_HOST, _DEVICE, _MEMORY, _SYNCHRONIZATION = range(4)
_HOST_INTS = ("correlation", "External id", "Sequence number", "Fwd thread id")
_HOST_TEXTS = ("Input Dims", "Input dims", "Input type", "Concrete Inputs")
_DEVICE_INTS = (
    "device",
    "stream",
    "correlation",
    "External id",
    "external id",
    "bytes",
    "registers per thread",
    "shared memory",
    "graph id",
    "graph node id",
)
_DEVICE_TEXTS = ("grid", "block", "est. achieved occupancy %")
_MEMORY_INTS = (
    "Device Type",
    "Device Id",
    "Addr",
    "Bytes",
    "Total Allocated",
    "Total Reserved",
)
_SYNCHRONIZATION_INTS = (
    "device",
    "stream",
    "correlation",
    "wait_on_stream",
    "wait_on_cuda_event_record_corr_id",
)
_GROUPS = tuple(
    (tuple(_NUMBER_OF[k] for k in ints), tuple(_NUMBER_OF[k] for k in texts))
    for ints, texts in (
        (_HOST_INTS, _HOST_TEXTS),
        (_DEVICE_INTS, _DEVICE_TEXTS),
        (_MEMORY_INTS, ()),
        (_SYNCHRONIZATION_INTS, ()),
    )
)
_HOST_KINDS = sorted(set(HOST_CATEGORIES.values()))
_DEVICE_KINDS = sorted(set(DEVICE_CATEGORIES.values()))
_OPERATORS = ("cpu_op", "annotation")
_SKIPPED, _REFUSED = -1, -2
# MTIA's rows are told apart by their names; a category cannot be called as the instants are.
_ELSEWHERE = {MEMORY_NAME, *(c for c, kind in DEVICE_CATEGORIES.items() if kind == "mtia")}
_CATEGORIES = (
    *(
        (category.encode(), _HOST, _HOST_KINDS.index(kind) + 1, kind in _OPERATORS)
        for category, kind in HOST_CATEGORIES.items()
    ),
    *(
        (category.encode(), _DEVICE, _DEVICE_KINDS.index(kind) + 1, kind in ("kernel", "memcpy"))
        for category, kind in DEVICE_CATEGORIES.items()
        if category not in _ELSEWHERE
    ),
    (SYNCHRONIZATION_CATEGORY.encode(), _SYNCHRONIZATION, 0, False),
    *((category.encode(), _SKIPPED, 0, False) for category in sorted(SKIPPED_CATEGORIES)),
    *((category.encode(), _REFUSED, 0, False) for category in sorted(_ELSEWHERE)),
)

# As in _scan.c.
_ID_STRINGS = -(2**63) + 1
_FIRST_ID = -(2**63) + (1 << 32)
_WITHOUT_TS, _WITHOUT_DUR, _OVERFLOWING_DUR, _WITHOUT_NAME = 1, 2, 4, 8

_decode_events = msgspec.json.Decoder(list[Event]).decode
_decode_counters = msgspec.json.Decoder(list[CounterEvent]).decode
_decode_times = msgspec.json.Decoder(list[ExactTimes]).decode
_decode_header = msgspec.json.Decoder(Header).decode


class _Doubt(ValueError):
    """Something that the reader in Python has to decide."""


@dataclass
class Scanned:
    """Contents of a file; the attributes are those of ``FileReader``."""

    header: Header
    host: Rows
    device: Rows
    memory: dict[str, Any]
    synchronization: Rows
    counters: tuple[np.ndarray, list[tuple[str, str, float | None]]]
    counts: Counts
    ids: Ids
    names: Names
    unknown: dict[str, int]


def scan_file(path: Path) -> Scanned | None:
    """Read a file; None when it is to be read another way, for whatever reason."""
    if not SCANS:
        return None
    try:
        # A pipe can be read only once.
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb", buffering=0) as file:
            return _scan_pieces(pieces(file, Intake(path, _HELD_RATIO)))
    except (OSError, EOFError, ValueError, RecursionError, msgspec.MsgspecError, *DAMAGE):
        return None


def _scan_pieces(content: Iterator[bytes]) -> Scanned:
    scanner = Scanner(
        args=_ARGS,
        groups=_GROUPS,
        categories=_CATEGORIES,
        marked=_NUMBER_OF["Collective name"],
        instant=MEMORY_NAME.encode(),
        instant_group=_MEMORY,
    )
    metadata: list[bytes] = []
    counters: list[bytes] = []
    marked: list[tuple[int, int, Args]] = []
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
        (names, _), (samples, _), (events, rows) = scanner.take()
        if names:
            metadata.append(names)
        if samples:
            counters.append(samples)
        if events:
            decoded = _decode_events(b"[%b]" % events)
            marked += [
                (group, row, event.args)
                for (group, row), event in zip(rows, decoded, strict=True)
                if event.args is not None
            ]
    return _Conversion(scanner.finish(), metadata, counters, marked).found


# ------------------------------------------------------------------ columns


class _Conversion:
    """From what the scanner found to what the reader has."""

    def __init__(
        self,
        found: tuple[Any, ...],
        metadata: list[bytes],
        counters: list[bytes],
        marked: list[tuple[int, int, Args]],
    ) -> None:
        header, groups, names, texts, ids, (categories, seen), without_category = found
        self.header = _decode_header(b"{%b}" % header)
        self.base_ns = base_of(self.header) or 0
        self.threshold = threshold_of(self.header)
        self.counts = Counts()
        self.counts.add("event.without_category", without_category)
        self.ids = Ids()
        words = [self.ids[_decode(raw)] for raw in ids]
        self.words = np.array([-1, *words], dtype=np.int64)
        self.marked = marked
        self.names = [None, *map(_decode, names)]
        self.raw_texts = [None, *texts]
        self.texts = [None, *map(text_of, texts)]
        called: Names = {}
        for piece in metadata:
            for event in _decode_events(b"[%b]" % piece):
                note_name(called, self.ids, event)
        times = np.asarray(seen)
        self.found = Scanned(
            header=self.header,
            host=self._host(groups[_HOST]),
            device=self._device(groups[_DEVICE]),
            memory=self._memory(groups[_MEMORY]),
            synchronization=self._synchronization(groups[_SYNCHRONIZATION]),
            counters=self._counters(counters),
            counts=self.counts,
            ids=self.ids,
            names=called,
            unknown={
                raw.decode(): int(times[i])
                for i, raw in enumerate(categories)
                if i >= len(_CATEGORIES)
            },
        )

    def _starts(self, start: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Mask of the usable starts."""
        if len(start) and int(np.abs(start).max()) >= int(self.threshold) * 1000:
            raise _Doubt("nanoseconds where microseconds belong")
        return usable_starts(self.counts, self.base_ns, start, flags & _WITHOUT_TS == 0, None)

    def _ids(self, recorded: np.ndarray) -> np.ndarray:
        """Process or thread ids; words are looked up."""
        is_word = recorded < _FIRST_ID
        if is_word.any():
            recorded[is_word] = self.words[recorded[is_word] - _ID_STRINGS]
        return recorded

    def _rows(self, group: int, columns: Columns) -> tuple[_Spans, list[np.ndarray]]:
        """The usable rows of a group: what all spans have, and the group's own columns."""
        start, dur, pid, tid, name, code, flags, place, *own = map(np.asarray, columns)
        ok, dur = usable_spans(
            self.counts,
            self._starts(start, flags),
            named=flags & _WITHOUT_NAME == 0,
            dur=dur,
            dur_ok=flags & (_WITHOUT_DUR | _OVERFLOWING_DUR) == 0,
            missing=flags & _WITHOUT_DUR != 0,
        )
        marked = [(row, args) for of, row, args in self.marked if of == group]
        spans = _Spans(start, dur, self._ids(pid), self._ids(tid), name, code, place, marked)
        if ok.all():
            return spans, own
        return spans.only(ok), [column[ok] for column in own]

    def _host(self, columns: Columns) -> Rows:
        rows, own = self._rows(_HOST, columns)
        correlation, external, sequence, forward, dims, dims_2021, types, concrete = own
        # Only operators carry shapes and sequence numbers, only calls carry correlations.
        is_kind = {kind: rows.code == i + 1 for i, kind in enumerate(_HOST_KINDS)}
        operator = np.logical_or.reduce([is_kind[kind] for kind in _OPERATORS])
        correlation[operator | is_kind["python"]] = NO_VALUE
        external[is_kind["python"]] = NO_VALUE
        for column in (sequence, forward):
            column[~operator] = NO_VALUE
        dims = np.where(dims == 0, dims_2021, dims)
        for column in (dims, types, concrete):
            column[~operator] = 0
        return Rows(
            {
                "start_ns": rows.start,
                "dur_ns": rows.dur,
                "pid": rows.pid,
                "tid": rows.tid,
                "category": (rows.code, [None, *_HOST_KINDS]),
                "name": (rows.name, self.names),
                "correlation_id": correlation,
                "external_id": external,
                "sequence_id": sequence,
                "forward_tid": forward,
                "input_dims": (dims, self.texts),
                "input_types": (types, self.texts),
                "concrete_inputs": (concrete, self.texts),
            },
            rows.marked,
            rows.place,
        )

    def _device(self, columns: Columns) -> Rows:
        rows, own = self._rows(_DEVICE, columns)
        device, stream, correlation, external, external_2021 = own[:5]
        bytes_count, registers, shared_memory, graph, graph_node = own[5:10]
        grid, block, occupancy = own[10:]
        device = np.where(device == NO_VALUE, rows.pid, device)
        return Rows(
            {
                "start_ns": rows.start,
                "dur_ns": rows.dur,
                "pid": rows.pid,
                "device_id": np.where(np.abs(device) < 1 << 31, device, -1),
                "stream_id": np.where(stream == NO_VALUE, rows.tid, stream),
                "kind": (rows.code, [None, *_DEVICE_KINDS]),
                "name": (rows.name, self.names),
                "correlation_id": correlation,
                "external_id": np.where(external == NO_VALUE, external_2021, external),
                "bytes_count": bytes_count,
                "registers_count": registers,
                "shared_memory_bytes": shared_memory,
                "graph_id": graph,
                "graph_node_id": graph_node,
                "grid": (grid, self.texts),
                "block": (block, self.texts),
                "occupancy_ratio": self._numbers(occupancy) / 100,
            },
            rows.marked,
            rows.place,
        )

    def _synchronization(self, columns: Columns) -> Rows:
        rows, own = self._rows(_SYNCHRONIZATION, columns)
        device, stream, correlation, event_stream, event_correlation = own
        device = np.where(device == NO_VALUE, rows.pid, device)
        return Rows(
            {
                "start_ns": rows.start,
                "dur_ns": rows.dur,
                "device_id": np.where(np.abs(device) < 1 << 31, device, -1),
                "stream_id": np.where(stream == NO_VALUE, rows.tid, stream),
                "name": (rows.name, self.names),
                "correlation_id": correlation,
                "event_stream_id": event_stream,
                "event_correlation_id": event_correlation,
            },
            [],
            rows.place,
        )

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        """Texts as float64, NaN for none."""
        values = np.full(len(self.raw_texts), np.nan)
        for code in np.unique(codes[codes > 0]).tolist():
            value = msgspec.json.decode(self.raw_texts[code])
            if isinstance(value, str):
                raise _Doubt("a number in quotes")
            parsed = number(value)
            if parsed is None:
                raise _Doubt("no finite number")
            values[code] = parsed
        found_at: np.ndarray = values[codes]
        return found_at

    def _memory(self, columns: Columns) -> dict[str, Any]:
        start, _, pid, tid, _, _, flags, _, *own = map(np.asarray, columns)
        ok = self._starts(start, flags)
        pid, tid = self._ids(pid), self._ids(tid)
        names = (
            "device_type",
            "device_id",
            "address_id",
            "bytes_count",
            "allocated_bytes",
            "reserved_bytes",
        )
        columns_of = {
            "time_ns": start,
            "pid": pid,
            "tid": tid,
            **dict(zip(names, own, strict=True)),
        }
        if not ok.all():
            columns_of = {name: column[ok] for name, column in columns_of.items()}
        return columns_of

    def _counters(
        self, pieces: list[bytes]
    ) -> tuple[np.ndarray, list[tuple[str, str, float | None]]]:
        builder = CounterBuilder(self.counts, self.base_ns, self.threshold)
        for piece in pieces:
            text = b"[%b]" % piece
            builder.add(_decode_counters(text), _decode_times(text))
        return builder.finish()


@dataclass
class _Spans:
    """Columns that all spans have."""

    start: np.ndarray
    dur: np.ndarray
    pid: np.ndarray
    tid: np.ndarray
    name: np.ndarray
    code: np.ndarray
    place: np.ndarray
    marked: list[tuple[int, Args]]

    def only(self, ok: np.ndarray) -> _Spans:
        """Those of a mask."""
        moved = np.cumsum(ok) - 1
        return _Spans(
            self.start[ok],
            self.dur[ok],
            self.pid[ok],
            self.tid[ok],
            self.name[ok],
            self.code[ok],
            self.place[ok],
            [(int(moved[row]), args) for row, args in self.marked if ok[row]],
        )


def _decode(raw: bytes) -> str:
    """Decode what stands between the quotes of a string."""
    if b"\\" not in raw:
        return raw.decode()
    return clean(str(msgspec.json.decode(b'"%b"' % raw)))
