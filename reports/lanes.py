"""One window of the timeline as lanes: rows of events that do not overlap, as packed columns.

Phases, layers, what the device's time counts as, the critical path, each stream, each host thread
level by level. An event is a start, a duration and a *kind*: its name, operator, layer, phase and
causes, of which a training run has few. Drawing, searching and tooltips need nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import CLOCK_LABELS, ClockSeries
from chopper.analyzers.replay.replay import Replay, lanes_of
from chopper.analyzers.trace.columns import distinct_rows, ints, pick, row_set, strings
from chopper.causes import CAUSES, LEAVES
from chopper.reports.series import LARGEST_DRAWN, SAMPLED, Series, thin
from chopper.reports.to_html import compact_json, deflate_text, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.replay.path import Lane
    from chopper.analyzers.trace.rank_join import JoinedRank
Column = tuple[np.ndarray, np.ndarray]
"""Codes of rows, and the number of the name that each code stands for."""


MAX_THREADS = 12
MAX_DEPTH = 48
_MAX_SHORT = 20_000
"""Names beyond these are shown as recorded; no program has as many kernels."""
_STATES = ("compute", "communication", "copy")
_HOLE_FACTOR = 4
_EVENT_DETAILS = (
    *("grid", "block", "registers_count", "shared_memory_bytes", "occupancy_ratio"),
    *("bytes_count", "graph_id"),
)
_OP_DETAILS = ("input_dims", "input_types")
_MAX_VARIANTS = 20_000
_MAX_CHARACTERS = 400
_HELD_LABELS = ("power_cap", "thermal", "application", "idle_ramp", "internal_limit")
_HELD = [CLOCK_LABELS.index(name) for name in _HELD_LABELS]
HELD_CAUSES = [f"compute.clock.{CLOCK_LABELS[column]}" for column in _HELD]
"""Causes that held a clock, the first of several at once; the host is none of them."""


class Window(msgspec.Struct, frozen=True):
    """A step of a rank, in its clock."""

    rank: int
    step_index: int
    number: int | None
    start_ns: int
    end_ns: int

    @property
    def dur_ns(self) -> int:
        """Return its length."""
        return self.end_ns - self.start_ns


class LaneColumns:
    """One rank's tables as numpy columns."""

    def __init__(self, run: Attribution, trace: JoinedRank, rank: int) -> None:
        self.events = trace.device_event
        self.host_only = trace.host_only
        self.links = run.links[rank]
        matched = run.matched.get(rank)
        self.offset_ns = 0 if matched is None else matched.offset_ns
        self.start = self.events["start_ns"].to_numpy()
        self.dur = self.events["dur_ns"].to_numpy()
        self._longest = int(self.dur.max(initial=0))
        self._pieces = run.pieces.filter(pc.field("rank") == rank)
        self.gaps = run.gaps.filter(pc.field("rank") == rank)
        self.spans = trace.host_span
        self.span_start = self.spans["start_ns"].to_numpy()
        self.span_dur = self.spans["dur_ns"].to_numpy()
        threads = run.recording.table(rank, "thread")
        names = zip(threads["tid"].to_pylist(), threads["thread_name"].to_pylist(), strict=True)
        self.thread_labels = {tid: _thread_label(tid, name) for tid, name in names}
        factors = run.factors.get(rank)
        self.readers = factors.clocks.readers if factors is not None else {}

    def ops(self, rows: np.ndarray) -> pa.Table:
        """Return shapes and data types of operators, null for row -1."""
        return self.spans.select(_OP_DETAILS).take(pa.array(rows, mask=rows < 0))

    def rows(self, window: Window) -> np.ndarray:
        """Return the device events that overlap the window."""
        first = int(np.searchsorted(self.start, window.start_ns - self._longest))
        last = int(np.searchsorted(self.start, window.end_ns))
        overlap = self.start[first:last] + self.dur[first:last] > window.start_ns
        return first + np.flatnonzero(overlap)

    def count(self, window: Window) -> int:
        """Return about how many device events overlap the window: those that start in it."""
        first, last = np.searchsorted(self.start, [window.start_ns, window.end_ns])
        return int(last - first)

    def host_rows(self, window: Window) -> np.ndarray:
        """Return the host spans that overlap the window."""
        last = int(np.searchsorted(self.span_start, window.end_ns))
        return np.flatnonzero(self.span_start[:last] + self.span_dur[:last] > window.start_ns)

    @cached_property
    def causes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
        """Each device event's two largest causes and the share of the first.

        Returns:
            first and second: (events,) codes into the names, -1 for none; share: (events,) in
            255ths; names of causes. Idle is left out: it is before an event.
        """
        codes, names = strings(self._pieces, "cause")
        row, time_ns = ints(self._pieces, "event_row"), ints(self._pieces, "time_ns")
        idle = np.array([*(n.startswith("idle") for n in names), True])
        mine = (row >= 0) & ~idle[codes] & (time_ns > 0)
        pairs, inverse = np.unique(row[mine] * len(names) + codes[mine], return_inverse=True)
        spent = np.bincount(inverse, time_ns[mine])
        event, code = np.divmod(pairs, max(len(names), 1))
        order = np.lexsort((-spent, event))
        event, code, spent = event[order], code[order], spent[order]
        first, second = (np.full(len(self.start), -1, dtype=np.int64) for _ in range(2))
        share = np.zeros(len(self.start), dtype=np.int64)
        largest = np.flatnonzero(np.diff(event, prepend=-1))
        if len(largest):
            first[event[largest]] = code[largest]
            share[event[largest]] = np.round(255 * spent[largest] / np.add.reduceat(spent, largest))
            several = largest[np.diff(largest, append=len(event)) > 1]
            second[event[several]] = code[several + 1]
        return first, second, share, names


def _thread_label(tid: int, name: str | None) -> str:
    """Return a thread's name and number, ``python 3358``."""
    # Kineto names threads "thread 3358 (python)".
    kineto = re.fullmatch(r"thread -?\d+ \((.*)\)", name or "")
    brief = kineto[1] if kineto else name
    if not brief:
        return f"thread {tid}"
    return brief if str(tid) in brief else f"{brief} {tid}"


class Kinds:
    """Distinct names, and distinct (name, operator, layer, phase, causes, category) of them."""

    _FIELDS = ("name", "op", "layer", "phase", "first", "second", "category")

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._kinds: dict[tuple[int, ...], int] = {}
        self._variants: dict[int, dict[tuple[Any, ...], int]] = {}
        self._variants_count = 0

    @property
    def names(self) -> list[str]:
        """Return the names, by number."""
        return [*self._names]

    def numbers(self, names: Iterable[str]) -> np.ndarray:
        """Return the numbers of names, and -1 behind them, for none."""
        return np.array([*(self._names.setdefault(n, len(self._names)) for n in names), -1])

    def column(self, table: pa.Table, name: str) -> Column:
        """Return a dictionary column as codes, and the number of each."""
        codes, values = strings(table, name)
        return codes, self.numbers(values)

    def one(self, name: str, category: str, *, cause: str | None = None) -> int:
        """Return the number of a kind without operator, layer and phase."""
        number, of_category = self.numbers([name, category])[:2].tolist()
        of_cause = -1 if cause is None else int(self.numbers([cause])[0])
        key = (number, -1, -1, -1, of_cause, -1, of_category)
        return self._kinds.setdefault(key, len(self._kinds))

    def many(self, count: int, **columns: Column) -> np.ndarray:
        """Return the numbers of the kinds of `count` rows; omitted fields are none."""
        none = np.zeros(count, dtype=np.int64), np.array([-1])
        fields = [columns.get(field, none) for field in self._FIELDS]
        combined = np.zeros(count, dtype=np.int64)
        for codes, of_code in fields:
            combined = combined * len(of_code) + codes % len(of_code)
        distinct, inverse = np.unique(combined, return_inverse=True)
        keys = []
        for _, of_code in reversed(fields):
            distinct, codes = np.divmod(distinct, len(of_code))
            keys.append(of_code[codes].tolist())
        rows = zip(*reversed(keys), strict=True)
        numbers = [self._kinds.setdefault(key, len(self._kinds)) for key in rows]
        return np.array(numbers, dtype=np.int64)[inverse]

    def variants(self, kind: np.ndarray, events: pa.Table, ops: pa.Table) -> np.ndarray:
        """Return, for each event, the number of its launch and shapes among those of its kind.

        Most kinds have one variant, so that the numbers are nearly all 0 and take no room.
        """
        details = [
            _detail(t, n) for t, of in ((events, _EVENT_DETAILS), (ops, _OP_DETAILS)) for n in of
        ]
        first, number = distinct_rows([kind, *(codes for codes, _ in details)])
        of_number = np.zeros(len(first), dtype=np.int64)
        for i, row in enumerate(first.tolist()):
            mine = self._variants.setdefault(int(kind[row]), {})
            key = tuple(values[codes[row]] for codes, values in details)
            if key not in mine and self._variants_count < _MAX_VARIANTS:
                mine[key] = len(mine)
                self._variants_count += 1
            of_number[i] = mine.get(key, 0)
        numbers: np.ndarray = of_number[number]
        return numbers

    def dump(self) -> str:
        """Return deflated JSON: ``names``, ``short`` (where it differs), and a column per field.

        ``variants``: kind → launch and shapes of each variant; kinds without any are left out.
        """
        names = self.names
        short = {str(i): fmt.kernel_name(name) for i, name in enumerate(names[:_MAX_SHORT])}
        fields = zip(*self._kinds, strict=True) if self._kinds else ((),) * len(self._FIELDS)
        document = {
            "names": names,
            "short": {i: brief for i, brief in short.items() if brief != names[int(i)]},
            "kinds": dict(zip(self._FIELDS, fields, strict=True)),
            "details": (*_EVENT_DETAILS, *_OP_DETAILS),
            "variants": {kind: [*of] for kind, of in self._variants.items() if any(map(any, of))},
        }
        return deflate_text(compact_json(document).encode())


def _detail(table: pa.Table, name: str) -> tuple[np.ndarray, list[Any]]:
    """Return a column as codes and what each says; null is code -1, the last value."""
    column = table[name].combine_chunks()
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes = ints(pa.table({"codes": column.indices}), "codes")
    used, code = np.unique(codes, return_inverse=True)
    values = [None if c < 0 else column.dictionary[c].as_py() for c in used.tolist()]
    if name in _OP_DETAILS:
        values = [v and fmt.ellipsize(fmt.cell(name, v), _MAX_CHARACTERS) for v in values]
    return code, values


def levels_of(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Row of each span so that no two of a row overlap; nested spans go below their parent.

    Args:
        start, end: spans of one lane, sorted by start, then longest first.
    """
    n = len(start)
    if n < 2 or not (start[1:] < np.maximum.accumulate(end)[:-1]).any():
        return np.zeros(n, dtype=np.int64)
    # Depth is how many spans before this one are still open; a span without length is open at
    # its own start.
    closed = np.sort(np.maximum(end, start + 1))
    levels: np.ndarray = np.arange(n) - np.searchsorted(closed, start, side="right")
    order = np.argsort(levels, kind="stable")
    same = levels[order][1:] == levels[order][:-1]
    if (same & (start[order][1:] < end[order][:-1])).any():
        # Spans that cross instead of nesting: the first row that is free.
        free: list[int] = []
        ends = end.tolist()
        for i, at in enumerate(start.tolist()):
            level = next((k for k, e in enumerate(free) if e <= at), len(free))
            if level == len(free):
                free.append(0)
            free[level] = ends[i]
            levels[i] = level
    return levels


class Packer:
    """Rows of one window."""

    def __init__(
        self, window: Window, rank: LaneColumns, kinds: Kinds, lane: Lane | None = None
    ) -> None:
        self.window = window
        self.rank = rank
        self.kinds = kinds
        self.lane = lane
        self._rows: list[dict[str, Any]] = []
        self._parts: list[tuple[np.ndarray, ...]] = []

    @property
    def events(self) -> int:
        """Return how many events are in the pack."""
        return sum(row["n"] for row in self._rows)

    def _add(
        self,
        group: str,
        type: str,
        start: np.ndarray,
        end: np.ndarray,
        kind: np.ndarray,
        *,
        share: np.ndarray | int = 0,
        path: np.ndarray | int = 0,
        launch: np.ndarray | int = -1,
        span: np.ndarray | int = -1,
        variant: np.ndarray | int = 0,
        **row: Any,
    ) -> None:
        self._rows.append({"group": group, "type": type, "depth": 0, "n": len(start)} | row)
        # Starts are coded as differences within each row.
        begins = np.diff(start - self.window.start_ns, prepend=0)
        columns = (share, path, launch, span, variant)
        of_each = (np.broadcast_to(v, len(start)).astype(np.int64) for v in columns)
        self._parts.append((begins, end - start, kind, *of_each))

    def _add_levels(
        self, label: str, start: np.ndarray, end: np.ndarray, *, levels: int, **more: Any
    ) -> int:
        """Add spans that may nest, a row for each level; return how many are in those rows."""
        level = levels_of(start, end)
        for depth in range(min(int(level.max(initial=0)) + 1, levels)):
            at = level == depth
            of_level = {k: v[at] if isinstance(v, np.ndarray) else v for k, v in more.items()}
            self._add(label, start=start[at], end=end[at], depth=depth, **of_level)
        return int((level < levels).sum())

    def path(self, limit: int) -> None:
        """Add the critical path: what lies on this rank, the longest, and where it is elsewhere."""
        lane, window = self.lane, self.window
        if lane is None:
            return
        here = np.flatnonzero((lane.end_ns > window.start_ns) & (lane.start_ns < window.end_ns))
        here = _longest(here, (lane.end_ns - lane.start_ns)[here], limit)
        kinds = self.kinds.many(
            len(here),
            name=self._coded(lane.name[here], lane.names),
            first=self._coded(lane.cause[here], LEAVES),
            category=(np.zeros(len(here), np.int64), self.kinds.numbers(["path"])),
        )
        away = np.flatnonzero(
            (lane.away_end_ns > window.start_ns) & (lane.away_start_ns < window.end_ns)
        )
        ranks, which = np.unique(lane.away_rank[away], return_inverse=True)
        elsewhere = [self.kinds.one(f"on rank {rank}", "path") for rank in ranks.tolist()]
        start = np.concatenate([lane.start_ns[here], lane.away_start_ns[away]])
        end = np.concatenate([lane.end_ns[here], lane.away_end_ns[away]])
        kind = np.concatenate([kinds, np.array(elsewhere, dtype=np.int64)[which]])
        order = np.argsort(start, kind="stable")
        self._add(
            *("Critical path", "path"),
            np.clip(start, window.start_ns, window.end_ns)[order],
            np.clip(end, window.start_ns, window.end_ns)[order],
            kind[order],
            path=(np.arange(len(start)) < len(here))[order],
        )

    def _coded(self, codes: np.ndarray, values: Sequence[str]) -> Column:
        """Return codes into values that may be many, as codes into those that occur."""
        used, code = np.unique(codes, return_inverse=True)
        return code, self.kinds.numbers(values[i] for i in used.tolist())

    def device(self) -> None:
        """Add phases, layers, states and streams."""
        rank, lane, rows = self.rank, self.lane, self.rank.rows(self.window)
        start = rank.start[rows]
        end = start + rank.dur[rows]
        events = rank.events.take(pa.array(rows))
        links = rank.links.take(pa.array(rows))
        columns = {name: self.kinds.column(links, name) for name in ("op", "layer", "phase")}
        codes, classes = strings(links, "work_class")
        first, second, share, causes = rank.causes
        of_cause = self.kinds.numbers(causes)
        kind = self.kinds.many(
            len(rows),
            name=self.kinds.column(events, "name"),
            first=(first[rows], of_cause),
            second=(second[rows], of_cause),
            category=(codes, self.kinds.numbers(classes)),
            **columns,
        )
        variant = self.kinds.variants(kind, events, rank.ops(ints(links, "op_row")))
        launch = ints(links, "launch_row")
        on_path = np.zeros(len(rows), dtype=bool)
        if lane is not None:
            on_path = row_set(lane.event[lane.runs], len(rank.start))[rows]
        for name in ("phase", "layer"):
            self._runs(start, end, columns[name], codes, classes, name)
        self._states(start, end, codes, classes)
        device, stream = ints(events, "device_id"), ints(events, "stream_id")
        several = len(np.unique(device)) > 1
        for dev, number in _pairs(device, stream):
            mine = np.flatnonzero((device == dev) & (stream == number))
            label = f"stream {number}"
            if rank.host_only:
                label = rank.thread_labels.get(number, f"thread {number}")
            if several:
                label = f"{fmt.device_name(dev)} {label}"
            busy_ns = np.bincount(codes[mine], weights=end[mine] - start[mine])
            self._add_levels(
                label,
                start[mine],
                end[mine],
                levels=len(mine),
                type="device",
                kind=kind[mine],
                share=share[rows][mine],
                path=on_path[mine],
                launch=launch[mine],
                variant=variant[mine],
                note=classes[int(busy_ns.argmax())],
            )

    def _runs(
        self,
        start: np.ndarray,
        end: np.ndarray,
        column: Column,
        class_codes: np.ndarray,
        classes: list[str],
        label: str,
    ) -> None:
        """Add stretches of computing with the same value of a column."""
        codes, numbers = column
        use = numbers[codes] >= 0
        if "compute" in classes:
            computing = use & (class_codes == classes.index("compute"))
            use = computing if computing.any() else use
        at = np.flatnonzero(use)
        if not len(at):
            return
        value = numbers[codes[at]]
        change = np.flatnonzero(np.concatenate([[True], value[1:] != value[:-1]]))
        first = start[at][change]
        last = np.maximum.reduceat(end[at], change)
        last = np.minimum(last, np.append(first[1:], np.iinfo(np.int64).max))
        distinct, which = np.unique(value[change], return_inverse=True)
        names = self.kinds.names
        kinds = [self.kinds.one(names[v], label) for v in distinct.tolist()]
        self._add(label.capitalize(), label, first, last, np.array(kinds)[which])

    def _states(
        self, start: np.ndarray, end: np.ndarray, class_codes: np.ndarray, classes: list[str]
    ) -> None:
        """Add the lane that shows each moment as a busy state, or as a gap with its cause."""
        window = self.window
        gaps = self.rank.gaps
        gaps = gaps.filter(pc.field("step_index") == window.step_index)
        codes, causes = strings(gaps, "cause")
        edges, state = exclusive(start, end, class_codes, classes, window.start_ns, window.end_ns)
        busy = np.flatnonzero(state >= 0)
        kinds = [
            self.kinds.one(CAUSES[c].label if c in CAUSES else c, "state", cause=c)
            for c in (*_STATES, *causes)
        ]
        first = np.concatenate([gaps["start_ns"].to_numpy(), edges[busy]])
        last = np.concatenate([gaps["end_ns"].to_numpy(), edges[busy + 1]])
        kind = np.array(kinds)[np.concatenate([codes + len(_STATES), state[busy]])]
        order = np.argsort(first, kind="stable")
        self._add("Device time", "state", first[order], last[order], kind[order])

    def host(self, limit: int) -> tuple[int, int]:
        """Add host threads, level by level.

        Returns:
            How many spans were left out for being short, and how many for lying too deep or on
            too quiet a thread.
        """
        rank, lane = self.rank, self.lane
        overlapping = rank.host_rows(self.window)
        rows = _longest(overlapping, rank.span_dur[overlapping], limit)
        spans = rank.spans.select(["name", "category", "pid", "tid"]).take(pa.array(rows))
        columns = {name: self.kinds.column(spans, name) for name in ("name", "category")}
        kind = self.kinds.many(len(rows), **columns)
        start = rank.span_start[rows]
        end = start + rank.span_dur[rows]
        on_path = np.zeros(len(rows), dtype=bool)
        if lane is not None:
            on_path = row_set(lane.span, len(rank.span_start))[rows]
        pid, tid = ints(spans, "pid"), ints(spans, "tid")
        threads = {key: (pid == key[0]) & (tid == key[1]) for key in _pairs(pid, tid)}
        shown = 0
        for key in sorted(threads, key=lambda k: -int(threads[k].sum()))[:MAX_THREADS]:
            mine = threads[key]
            shown += self._add_levels(
                rank.thread_labels.get(key[1], f"thread {key[1]}"),
                start[mine],
                end[mine],
                levels=MAX_DEPTH,
                type="host",
                kind=kind[mine],
                path=on_path[mine],
                span=rows[mine],
                note="host",
            )
        return len(overlapping) - len(rows), len(rows) - shown

    def clock(self) -> None:
        """Add a lane per device of what held its clock."""
        window = self.window
        for device, series_of_device in sorted(self.rank.readers.items()):
            series = series_of_device.around(window.start_ns, window.end_ns)
            if series is None:
                continue
            start, end, cause = held_clocks(series)
            start, end = np.maximum(start, window.start_ns), np.minimum(end, window.end_ns)
            visible = end > start
            if not visible.any():
                continue
            kinds = [self.kinds.one(CAUSES[c].label, "state", cause=c) for c in HELD_CAUSES]
            several = f" {device}" if len(self.rank.readers) > 1 else ""
            kind = np.array(kinds)[cause[visible]]
            self._add(f"Clock held by{several}", "clock", start[visible], end[visible], kind)

    def finish(self) -> str:
        """Return the pack."""
        names = ("start", "dur", "kind", "share", "path", "launch", "span", "variant")
        columns = zip(*self._parts, strict=True) if self._parts else ([np.zeros(0, int)],) * 8
        arrays = {n: np.concatenate(parts) for n, parts in zip(names, columns, strict=True)}
        self._number_launches(arrays)
        return pack({"rows": self._rows}, arrays)

    def _number_launches(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace rows of host spans by numbers that take little room.

        A span that launched has the share 1. Launching spans are numbered from 1, by start, then
        as they stand; an event's ``launch`` is its number, 0 for none, as a difference from the
        event before it: 1 or 0 nearly always.
        """
        span, launch = arrays.pop("span"), arrays["launch"]
        at = np.flatnonzero(row_set(launch, len(self.rank.span_start) + 1)[span] & (span >= 0))
        at = at[np.lexsort((at, self.rank.span_start[span[at]]))]
        arrays["share"][at] = 1
        number = np.zeros(len(self.rank.span_start) + 1, dtype=np.int64)
        number[span[at]] = np.arange(1, len(at) + 1)
        arrays["launch"] = np.diff(pick(number, launch, 0), prepend=0)


def held_clocks(series: ClockSeries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when something held a clock: (start_ns, end_ns, index into `HELD_CAUSES`).

    A reading stands half-way to the next; across a hole in the readings nothing held.
    """
    labels = series.labels[:, _HELD]
    held = np.where(labels.any(axis=1), labels.argmax(axis=1), -1)
    time, gap = series.time_ns, series.gap_ns
    median = int(np.median(gap)) if len(gap) else 0
    hole = gap > _HOLE_FACTOR * median
    reach = np.where(hole, median, gap) // 2
    begins = np.flatnonzero(np.concatenate([[True], (held[1:] != held[:-1]) | hole]))
    ends = np.append(begins[1:], len(time)) - 1
    start = time[begins] - np.append(0, reach)[begins]
    end = time[ends] + np.append(reach, 0)[ends]
    is_held = (held[begins] >= 0) & (end > start)
    return start[is_held], end[is_held], held[begins][is_held]


def _longest(rows: np.ndarray, length: np.ndarray, limit: int) -> np.ndarray:
    """Return the longest rows, at most `limit`, in their order."""
    if len(rows) <= limit:
        return rows
    return rows[np.sort(np.argpartition(length, len(rows) - limit)[len(rows) - limit :])]


def _pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
    """Return the distinct pairs, ascending."""
    first, _ = distinct_rows([a, b])
    return list(zip(a[first].tolist(), b[first].tolist(), strict=True))


def exclusive(
    start: np.ndarray,
    end: np.ndarray,
    class_codes: np.ndarray,
    classes: list[str],
    low: int,
    high: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Level 1 of the attribution as intervals: compute over communication over copy.

    Returns:
        edges: (k + 1,) times; state: (k,) index into ``_STATES``, -1 where nothing runs.
    """
    clipped_start, clipped_end = np.clip(start, low, high), np.clip(end, low, high)
    times = np.concatenate([clipped_start, clipped_end, [low, high]])
    edges, at = np.unique(times, return_inverse=True)
    n = len(start)
    state = np.full(len(edges), -1, dtype=np.int64)
    for code in reversed(range(len(_STATES))):
        if _STATES[code] not in classes:
            continue
        mine = np.flatnonzero(class_codes == classes.index(_STATES[code]))
        change = np.bincount(at[mine], minlength=len(edges)) - np.bincount(
            at[n + mine], minlength=len(edges)
        )
        state[np.cumsum(change) > 0] = code
    state = state[:-1]
    if not len(state):
        return edges, state
    keep = np.concatenate([[True], state[1:] != state[:-1]])
    return np.concatenate([edges[:-1][keep], edges[-1:]]), state[keep]


DEVICE_BUDGET = 320_000
"""Device events embedded in one report, over all ranks and steps."""
HOST_BUDGET = 240_000
"""Host spans embedded in one report."""
MAX_WINDOWS = 400
_POINTS_PER_SERIES = 6_000
_PATH_BUDGET = 100_000


class Timeline(msgspec.Struct, frozen=True):
    """Windows, packed columns and names from which the page draws timelines.

    Attributes:
        windows: one entry per embedded window: rank, step, times, id of its pack, what was kept.
        packs: id → packed columns.
        names: deflated JSON of names and kinds.
        telemetry: packed series.
        notes: what was left out and why, one sentence each.
        path: whether the critical path is marked.
    """

    windows: list[dict[str, Any]]
    packs: dict[str, str]
    names: str
    telemetry: str
    notes: list[str]
    path: bool = False


def build_timeline(
    run: Attribution,
    series: Iterable[Series] = (),
    *,
    replay: Replay | str = "it was not replayed",
    device_budget: int = DEVICE_BUDGET,
    host_budget: int = HOST_BUDGET,
) -> Timeline:
    """Choose the windows and pack them.

    Args:
        run: whose; of all kinds of steps.
        series: telemetry to stand below the lanes.
        replay: has the critical path; a reason where there is none.
        device_budget: device events in all packs.
        host_budget: host spans in all packs.
    """
    fields = ("rank", "step_index", "number", "start_ns", "end_ns")
    rows = zip(*(run.windows[field].to_pylist() for field in fields), strict=True)
    windows = [window for window in (Window(*row) for row in rows) if window.dur_ns > 0]
    ranks = {r: LaneColumns(run, run.joined[r], r) for r in dict.fromkeys(w.rank for w in windows)}
    chosen, notes = _chosen_windows(windows, ranks, device_budget)
    lanes = {} if isinstance(replay, str) else lanes_of(replay.counting(run))
    spans = {w: len(ranks[w.rank].host_rows(w)) for w in chosen}
    # Each window keeps spans in proportion to what it has.
    kept_ratio = min(host_budget / max(sum(spans.values()), 1), 1.0)
    kinds = Kinds()
    packs: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    short = deep = 0
    for window in chosen:
        rank = ranks[window.rank]
        packer = Packer(window, rank, kinds, lanes.get(window.rank))
        packer.path(_PATH_BUDGET // len(chosen))
        packer.device()
        limit = max(int(spans[window] * kept_ratio), min(spans[window], 500))
        dropped, hidden = packer.host(limit)
        packer.clock()
        key = f"w{len(packs)}"
        packs[key] = packer.finish()
        short += dropped
        deep += hidden
        entries.append(
            {
                "id": key,
                "rank": window.rank,
                "step": window.number,
                "index": window.step_index,
                "start_ns": str(window.start_ns),
                "offset_ns": rank.offset_ns,
                "dur_ns": window.dur_ns,
                "events": packer.events,
                "host_dropped": dropped + hidden,
            }
        )
    if short:
        notes.append(
            f"{fmt.plural(short, 'host span')} are left out: the shortest of their step, to "
            "limit the size of the page. No device event is left out for being short."
        )
    if deep:
        notes.append(
            f"{fmt.plural(deep, 'host span')} are not drawn: nested more than {MAX_DEPTH} levels "
            f"deep, or on threads other than the {MAX_THREADS} busiest."
        )
    if isinstance(replay, str):
        notes.append(f"The critical path is not marked: {replay.rpartition('replayed: ')[2]}.")
    telemetry = _packed_series(series, entries)
    return Timeline(entries, packs, kinds.dump(), telemetry, notes, path=bool(lanes))


def _chosen_windows(
    windows: list[Window], ranks: dict[int, LaneColumns], budget: int
) -> tuple[list[Window], list[str]]:
    """All windows when they fit, else the median and the slowest step of each rank.

    A first round takes each rank's median step, a second its slowest, as long as events fit; when
    not even the first round fits, ranks are taken slowest and fastest first.
    """
    size = {w: ranks[w.rank].count(w) for w in windows}
    if sum(size.values()) <= budget and len(windows) <= MAX_WINDOWS:
        return windows, []
    windows_by_length = sorted(windows, key=lambda w: w.dur_ns)
    by_rank: dict[int, list[Window]] = {}
    for window in windows_by_length:
        by_rank.setdefault(window.rank, []).append(window)
    medians = sorted((of[len(of) // 2] for of in by_rank.values()), key=lambda w: w.dur_ns)
    # Slowest, fastest, second slowest … : the spread of ranks is what one looks for.
    first = [w for pair in zip(reversed(medians), medians, strict=True) for w in pair]
    slowest = [by_rank[w.rank][-1] for w in first]
    chosen: dict[Window, None] = {}
    used = 0
    for window in (*first, *slowest, *reversed(windows_by_length)):
        if window in chosen or len(chosen) >= MAX_WINDOWS:
            continue
        if chosen and used + size[window] > budget:
            continue
        chosen[window] = None
        used += size[window]
    if len(chosen) == len(windows):
        return windows, []
    kept_ranks = len({w.rank for w in chosen})
    note = (
        f"{len(chosen)} of {fmt.plural(len(windows), 'step window')} are embedded event by "
        "event: the median step of each rank, then its slowest, then other slow steps"
    )
    if kept_ranks < len(by_rank):
        note += f"; {kept_ranks} of {len(by_rank)} ranks, slowest and fastest first"
    note += ". All figures and tables cover every step of every rank."
    return sorted(chosen, key=lambda w: (w.rank, w.step_index)), [note]


def _packed_series(series: Iterable[Series], entries: list[dict[str, Any]]) -> str:
    """Return the series near the windows, times as differences in µs from the first sample."""
    described: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    low = min((int(e["start_ns"]) for e in entries), default=0)
    high = max((int(e["start_ns"]) + e["dur_ns"] for e in entries), default=0)
    for one in series:
        first = max(int(np.searchsorted(one.time_ns, low)) - 1, 0)
        near = slice(first, int(np.searchsorted(one.time_ns, high, side="right")) + 1)
        value = np.where(np.abs(one.value[near]) < LARGEST_DRAWN, one.value[near], np.nan)
        if len(value) < 2 or not np.isfinite(value).any():
            continue
        cut = thin(replace(one, time_ns=one.time_ns[near], value=value), _POINTS_PER_SERIES)
        arrays[f"t{len(described)}"] = np.diff((cut.time_ns - cut.time_ns[0]) // 1000, prepend=0)
        arrays[f"v{len(described)}"] = cut.value.astype(np.float32)
        described.append(
            {
                "panel": cut.panel,
                "label": cut.label,
                "unit": cut.unit,
                "rank": cut.rank,
                "sampled": cut.panel in SAMPLED,
                "start_ns": str(int(cut.time_ns[0])),
            }
        )
    return pack({"series": described}, arrays)
