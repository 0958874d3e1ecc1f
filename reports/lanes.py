"""One window of the timeline as lanes: rows of events that do not overlap, as packed columns.

Phases, layers, what the device's time counts as, the critical path, each stream, each host thread
level by level. An event is a start, a duration and a *kind*: its name, operator, layer, phase and
causes, of which a training run has few. Drawing, searching and tooltips need nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.reports.pack import deflate_text, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.replay.path import Lane
    from chopper.analyzers.trace.joined import JoinedRank

MAX_THREADS = 12
MAX_DEPTH = 48
# Fast compression for much data: 3 costs a third of 6's time for a tenth more bytes.
_LEVEL = 4

_MAX_SHORT = 20_000
"""Names beyond these are shown as recorded; no program has as many kernels."""

_STATES = ("compute", "communication", "copy")
_HOLE_FACTOR = 4
_HELD = [CLOCK_LABELS.index(name) for name in ("power_cap", "thermal", "application", "idle_ramp")]


@dataclass
class Names:
    """Strings by number, in order of first use."""

    index: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str | None) -> int:
        """Number of a string, -1 for none."""
        if text is None:
            return -1
        return self.index.setdefault(text, len(self.index))

    def of(self, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Codes of a dictionary column, and the global number of each code (last: null)."""
        values, codes = dictionary(array)
        numbers = np.array([self(v) for v in values] + [-1], dtype=np.int64)
        return codes, numbers


def dictionary(column: Any) -> tuple[list[str], np.ndarray]:
    """Values and codes of a string column; null is the code past the end."""
    if isinstance(column, pa.ChunkedArray):
        column = (
            column.unify_dictionaries().combine_chunks()
            if column.num_chunks != 1
            else column.chunk(0)
        )
    values = column.dictionary.to_pylist()
    indices = column.indices
    if indices.null_count:
        indices = indices.fill_null(len(values))
    return values, indices.to_numpy(zero_copy_only=False).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Window:
    """A step of a rank, in its clock."""

    rank: int
    step_index: int
    number: int | None
    start_ns: int
    end_ns: int

    @property
    def dur_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


class RankColumns:
    """One rank's tables as numpy columns."""

    def __init__(self, run: Attributed, trace: JoinedRank, rank: int) -> None:
        self.rank = rank
        self.events = trace.device_event
        self.host_only = trace.host_only
        self.links = run.links[rank]
        self.start = self.events["start_ns"].to_numpy()
        self.dur = self.events["dur_ns"].to_numpy()
        self.longest = int(self.dur.max(initial=0))
        self.pieces = run.pieces.filter(pc.equal(run.pieces["rank"], rank))
        self.gaps = run.gaps.filter(pc.equal(run.gaps["rank"], rank))
        self.spans = trace.host_span
        self.span_start = self.spans["start_ns"].to_numpy()
        self.span_dur = self.spans["dur_ns"].to_numpy()
        self.threads = run.recording.table(rank, "thread")
        factors = run.factors.get(rank)
        self.readers = factors.clocks.readers if factors is not None else {}
        self._causes: tuple[np.ndarray, np.ndarray, np.ndarray, list[str]] | None = None

    def rows(self, window: Window) -> np.ndarray:
        """Device events that overlap the window."""
        first = int(np.searchsorted(self.start, window.start_ns - self.longest))
        last = int(np.searchsorted(self.start, window.end_ns))
        overlap = self.start[first:last] + self.dur[first:last] > window.start_ns
        return first + np.flatnonzero(overlap)

    def count(self, window: Window) -> int:
        """Return about how many device events overlap the window: those that start in it."""
        return int(
            np.searchsorted(self.start, window.end_ns)
            - np.searchsorted(self.start, window.start_ns)
        )

    def host_rows(self, window: Window) -> np.ndarray:
        """Host spans that overlap the window."""
        last = int(np.searchsorted(self.span_start, window.end_ns))
        return np.flatnonzero(self.span_start[:last] + self.span_dur[:last] > window.start_ns)

    def host_count(self, window: Window) -> int:
        """Return how many host spans overlap the window."""
        return len(self.host_rows(window))

    def causes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
        """For each device event its two largest causes and the share of the first.

        Returns:
            first and second: (events,) codes into the names, -1 for none; share: (events,) in
            255ths; names of causes. Idle is left out: it is before an event, not in it.
        """
        if self._causes is None:
            self._causes = self._rank_causes()
        return self._causes

    def _rank_causes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
        count = len(self.start)
        names, codes = dictionary(self.pieces["cause"])
        rows = self.pieces["event_row"]
        valid = pc.is_valid(rows).to_numpy()
        row = pc.fill_null(rows, 0).to_numpy()
        time_ns = self.pieces["time_ns"].to_numpy()
        used = [i for i, n in enumerate(names) if not n.startswith("idle")]
        first = np.full(count, -1, dtype=np.int64)
        second = np.full(count, -1, dtype=np.int64)
        best = np.zeros(count)
        next_best = np.zeros(count)
        total = np.zeros(count)
        for code in used:
            mine = valid & (codes == code) & (time_ns > 0)
            spent = np.bincount(row[mine], time_ns[mine], minlength=count)
            total += spent
            beats = spent > best
            middle = ~beats & (spent > next_best)
            next_best = np.where(beats, best, np.where(middle, spent, next_best))
            second = np.where(beats, first, np.where(middle, code, second))
            best = np.where(beats, spent, best)
            first = np.where(beats, code, first)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.nan_to_num(np.round(255 * best / total)).astype(np.int64)
        return first, second, share, names


class Kinds:
    """Distinct (name, operator, layer, phase, causes, category), numbered over the report."""

    _FIELDS = ("name", "op", "layer", "phase", "first", "second", "category")

    def __init__(self, names: Names) -> None:
        self.names = names
        self._index: dict[tuple[int, ...], int] = {}

    def one(self, name: str, category: str, *, cause: str | None = None) -> int:
        """Number of a kind without operator, layer and phase."""
        key = (self.names(name), -1, -1, -1, self.names(cause), -1, self.names(category))
        return self._index.setdefault(key, len(self._index))

    def many(self, columns: tuple[tuple[np.ndarray, np.ndarray], ...]) -> np.ndarray:
        """Numbers of rows given as (codes, number of each code) per field."""
        combined = np.zeros(len(columns[0][0]), dtype=np.int64)
        for codes, of_code in columns:
            combined = combined * len(of_code) + codes
        encoded = pc.dictionary_encode(pa.array(combined))
        distinct = encoded.dictionary.to_numpy()
        local = np.empty(len(distinct), dtype=np.int64)
        fields = []
        for _, of_code in reversed(columns):
            distinct, codes = np.divmod(distinct, len(of_code))
            fields.append(of_code[codes].tolist())
        for i, key in enumerate(zip(*reversed(fields), strict=True)):
            local[i] = self._index.setdefault(key, len(self._index))
        numbers: np.ndarray = local[encoded.indices.to_numpy(zero_copy_only=False)]
        return numbers

    def dump(self) -> str:
        """Deflated JSON: ``names``, ``short`` (where it differs) and one column per field."""
        names = list(self.names.index)
        short = {}
        for i, name in enumerate(names[:_MAX_SHORT]):
            brief = fmt.kernel_name(name)
            if brief != name:
                short[str(i)] = brief
        keys = list(self._index)
        columns = {f: [key[i] for key in keys] for i, f in enumerate(self._FIELDS)}
        text = json.dumps(
            {"names": names, "short": short, "kinds": columns}, separators=(",", ":")
        ).encode("utf-8", "replace")
        return deflate_text(text)


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
        self, window: Window, rank: RankColumns, kinds: Kinds, lane: Lane | None = None
    ) -> None:
        self.window = window
        self.rank = rank
        self.kinds = kinds
        self.lane = lane
        self._path: list[np.ndarray] = []
        self.rows: list[dict[str, Any]] = []
        self._start: list[np.ndarray] = []
        self._dur: list[np.ndarray] = []
        self._kind: list[np.ndarray] = []
        self._share: list[np.ndarray] = []

    @property
    def events(self) -> int:
        """Events in the pack."""
        return sum(len(part) for part in self._start)

    def _add(
        self,
        row: dict[str, Any],
        start: np.ndarray,
        end: np.ndarray,
        kind: np.ndarray,
        share: np.ndarray | None = None,
        path: np.ndarray | None = None,
    ) -> None:
        self._path.append(np.zeros(len(start), np.int64) if path is None else path.astype(np.int64))
        self.rows.append({**row, "n": len(start)})
        self._start.append(start - self.window.start_ns)
        self._dur.append(end - start)
        self._kind.append(kind)
        self._share.append(np.zeros(len(start), np.int64) if share is None else share)

    def path(self, keep: int) -> None:
        """The critical path in this window: what lies on this rank, and where it is elsewhere."""
        lane, window = self.lane, self.window
        if lane is None:
            return
        here = np.flatnonzero((lane.end_ns > window.start_ns) & (lane.start_ns < window.end_ns))
        if len(here) > keep:
            length = (lane.end_ns - lane.start_ns)[here]
            here = np.sort(here[np.argpartition(length, len(here) - keep)[len(here) - keep :]])
        none = np.zeros(len(here), np.int64), np.array([-1])
        kinds = self.kinds.many(
            (
                self._numbered(lane.name[here], lane.names),
                none,
                none,
                none,
                self._numbered(lane.cause[here], lane.causes),
                none,
                (none[0], np.array([self.kinds.names("path")])),
            )
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
            {"group": "Critical path", "type": "path", "depth": 0},
            np.clip(start, window.start_ns, window.end_ns)[order],
            np.clip(end, window.start_ns, window.end_ns)[order],
            kind[order],
            path=np.concatenate([np.ones(len(here)), np.zeros(len(away))])[order],
        )

    def _numbered(self, codes: np.ndarray, values: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Codes into values that may be many, as codes into the numbers of those that occur."""
        used, code = np.unique(codes, return_inverse=True)
        return code, np.array([self.kinds.names(values[i]) for i in used.tolist()], dtype=np.int64)

    def _marked(self, count: int, rows: Callable[[Lane], np.ndarray]) -> np.ndarray:
        """Mask of what lies on the critical path, of so many events or spans."""
        mask = np.zeros(count, dtype=bool)
        if self.lane is not None:
            found = rows(self.lane)
            mask[found[found >= 0]] = True
        return mask

    def device(self) -> None:
        """Phases, layers, states and streams."""
        rank, rows = self.rank, self.rank.rows(self.window)
        start = rank.start[rows]
        end = start + rank.dur[rows]
        names = self.kinds.names
        taken = rank.events.select(["name", "device_id", "stream_id"]).take(pa.array(rows))
        name = names.of(taken["name"])
        first, second, share, cause_names = rank.causes()
        cause_numbers = np.array([names(c) for c in cause_names] + [-1], dtype=np.int64)
        none = len(cause_names)
        if rank.links is not None and len(rows):
            wanted = ["op", "layer", "phase", "work_class"]
            links = rank.links.select(wanted).take(pa.array(rows))
            op, layer, phase = (names.of(links[c]) for c in ("op", "layer", "phase"))
            classes, class_codes = dictionary(links["work_class"])
        else:
            empty = np.zeros(len(rows), np.int64), np.array([-1])
            op = layer = phase = empty
            classes, class_codes = ["compute"], np.zeros(len(rows), np.int64)
        category = class_codes, np.array([names(c) for c in classes] + [-1], dtype=np.int64)
        kind = self.kinds.many(
            (
                name,
                op,
                layer,
                phase,
                (np.where(first[rows] < 0, none, first[rows]), cause_numbers),
                (np.where(second[rows] < 0, none, second[rows]), cause_numbers),
                category,
            )
        )
        share = share[rows]
        on_path = self._marked(len(rank.start), lambda lane: lane.event[lane.runs])
        self._runs(start, end, phase, class_codes, classes, "Phase", "phase")
        self._runs(start, end, layer, class_codes, classes, "Layer", "layer")
        self._states(start, end, class_codes, classes)
        device = taken["device_id"].to_numpy()
        stream = taken["stream_id"].to_numpy()
        several = len(np.unique(device)) > 1
        host = rank.host_only
        thread_names = _thread_names(rank.threads) if host else {}
        for dev, lane in _pairs(device, stream):
            mine = np.flatnonzero((device == dev) & (stream == lane))
            label = thread_names.get(lane, f"thread {lane}") if host else f"stream {lane}"
            if several:
                label = f"{fmt.device_name(dev)} {label}"
            held = np.bincount(class_codes[mine], weights=end[mine] - start[mine])
            what = classes[int(held.argmax())] if len(held) else "compute"
            level = levels_of(start[mine], end[mine])
            for depth in range(int(level.max(initial=0)) + 1):
                at = mine[level == depth]
                self._add(
                    {"group": label, "note": what, "type": "device", "depth": depth},
                    start[at],
                    end[at],
                    kind[at],
                    share[at],
                    path=on_path[rows[at]],
                )

    def _runs(
        self,
        start: np.ndarray,
        end: np.ndarray,
        column: tuple[np.ndarray, np.ndarray],
        class_codes: np.ndarray,
        classes: list[str],
        label: str,
        category: str,
    ) -> None:
        """Stretches of computing with the same value of a column."""
        codes, numbers = column
        names = list(self.kinds.names.index)
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
        last = np.minimum(last, np.concatenate([first[1:], [np.iinfo(np.int64).max]]))
        numbered = {v: self.kinds.one(names[v], category) for v in np.unique(value).tolist()}
        kinds = np.array([numbered[v] for v in value[change].tolist()], dtype=np.int64)
        self._add({"group": label, "type": category, "depth": 0}, first, last, kinds)

    def _states(
        self, start: np.ndarray, end: np.ndarray, class_codes: np.ndarray, classes: list[str]
    ) -> None:
        """Add the lane that shows each moment as a busy state, or as a gap with its cause."""
        window = self.window
        gaps = self.rank.gaps
        mine = pc.equal(gaps["step_index"], window.step_index)
        gaps = gaps.filter(mine)
        gap_causes, gap_codes = dictionary(gaps["cause"])
        from chopper.causes import CAUSES

        def label(cause: str) -> str:
            return CAUSES[cause].label if cause in CAUSES else cause

        gap_kind = np.array(
            [self.kinds.one(label(c), "state", cause=c) for c in gap_causes] + [0], dtype=np.int64
        )
        starts, ends, kinds = (
            [gaps["start_ns"].to_numpy()],
            [gaps["end_ns"].to_numpy()],
            [gap_kind[gap_codes]],
        )
        edges, state = exclusive(start, end, class_codes, classes, window.start_ns, window.end_ns)
        for code, cause in enumerate(_STATES):
            busy = np.flatnonzero(state == code)
            starts.append(edges[busy])
            ends.append(edges[busy + 1])
            kinds.append(
                np.full(len(busy), self.kinds.one(label(cause), "state", cause=cause), np.int64)
            )
        first, last, kind = np.concatenate(starts), np.concatenate(ends), np.concatenate(kinds)
        order = np.argsort(first, kind="stable")
        self._add(
            {"group": "Device time", "type": "state", "depth": 0},
            first[order],
            last[order],
            kind[order],
        )

    def host(self, keep: int) -> tuple[int, int]:
        """Host threads, level by level.

        Returns:
            How many spans were left out for being short, and how many for lying too deep or on
            too quiet a thread.
        """
        rank = self.rank
        rows = rank.host_rows(self.window)
        if not len(rows):
            return 0, 0
        available = len(rows)
        if available > keep:
            long = np.argpartition(rank.span_dur[rows], available - keep)[available - keep :]
            rows = np.sort(rows[long])
        wanted = ["name", "category", "pid", "tid"]
        spans = rank.spans.select(wanted).take(pa.array(rows))
        names = self.kinds.names
        category = names.of(spans["category"])
        none = np.zeros(len(rows), np.int64), np.array([-1])
        kind = self.kinds.many((names.of(spans["name"]), none, none, none, none, none, category))
        start = rank.span_start[rows]
        end = start + rank.span_dur[rows]
        on_path = self._marked(len(rank.span_start), lambda lane: lane.span)
        pid, tid = spans["pid"].to_numpy(), spans["tid"].to_numpy()
        labels = _thread_names(rank.threads)
        lanes: dict[tuple[int, int], np.ndarray] = {}
        for lane in _pairs(pid, tid):
            lanes[lane] = np.flatnonzero((pid == lane[0]) & (tid == lane[1]))
        busiest = sorted(lanes, key=lambda k: -len(lanes[k]))
        shown = 0
        for lane in busiest[:MAX_THREADS]:
            mine = lanes[lane]
            level = levels_of(start[mine], end[mine])
            label = labels.get(lane[1], f"thread {lane[1]}")
            for depth in range(min(int(level.max(initial=0)) + 1, MAX_DEPTH)):
                at = mine[level == depth]
                shown += len(at)
                self._add(
                    {"group": label, "note": "host", "type": "host", "depth": depth},
                    start[at],
                    end[at],
                    kind[at],
                    path=on_path[rows[at]],
                )
        return available - len(rows), len(rows) - shown

    def clock(self) -> None:
        """Add a lane per device of what held its clock; a reading stands half-way to the next."""
        from chopper.causes import CAUSES

        window = self.window
        for device, whole in sorted(self.rank.readers.items()):
            series = whole.around(window.start_ns, window.end_ns)
            if series is None:
                continue
            held = np.where(
                series.labels[:, _HELD].any(axis=1), series.labels[:, _HELD].argmax(axis=1), -1
            )
            time, gap = series.time_ns, series.gap_ns
            # Across a hole in the readings nothing is said to have held.
            median = int(np.median(gap))
            hole = gap > _HOLE_FACTOR * median
            reach = np.where(hole, median, gap) // 2
            begins = np.flatnonzero(np.concatenate([[True], (held[1:] != held[:-1]) | hole]))
            ends = np.append(begins[1:], len(time)) - 1
            start = time[begins] - np.concatenate([[0], reach])[begins]
            end = time[ends] + np.concatenate([reach, [0]])[ends]
            start, end = np.maximum(start, window.start_ns), np.minimum(end, window.end_ns)
            kept = np.flatnonzero((held[begins] >= 0) & (end > start))
            if not len(kept):
                continue
            kinds = []
            for column in _HELD:
                cause = f"compute.clock.{CLOCK_LABELS[column]}"
                kinds.append(self.kinds.one(CAUSES[cause].label, "state", cause=cause))
            several = f" {device}" if len(self.rank.readers) > 1 else ""
            self._add(
                {"group": f"Clock held by{several}", "type": "clock", "depth": 0},
                start[kept],
                end[kept],
                np.array(kinds, dtype=np.int64)[held[begins][kept]],
            )

    def finish(self) -> str:
        """The pack: ``start`` is coded as differences within each row."""
        coded = [np.diff(part, prepend=0) for part in self._start]
        arrays = {
            "start": _join(coded),
            "dur": _join(self._dur),
            "kind": _join(self._kind),
            "share": _join(self._share),
            "path": _join(self._path),
        }
        return pack({"rows": self.rows}, arrays, level=_LEVEL)


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _pairs(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
    """Distinct pairs, ascending."""
    found: set[tuple[int, int]] = set()
    for one in pc.unique(pa.array(a)).to_pylist():
        found.update((one, other) for other in pc.unique(pa.array(b[a == one])).to_pylist())
    return sorted(found)


def _thread_names(threads: pa.Table) -> dict[int, str]:
    """Labels of threads: their name and number, ``python 3358``."""
    found = {}
    for tid, name in zip(
        threads["tid"].to_pylist(), threads["thread_name"].to_pylist(), strict=True
    ):
        # Kineto names threads "thread 3358 (python)".
        kineto = re.fullmatch(r"thread -?\d+ \((.*)\)", name or "")
        brief = kineto[1] if kineto else name
        found[tid] = (
            f"{brief} {tid}" if brief and str(tid) not in brief else brief or f"thread {tid}"
        )
    return found


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


__all__ = [
    "MAX_DEPTH",
    "MAX_THREADS",
    "Kinds",
    "Names",
    "Packer",
    "RankColumns",
    "Window",
    "dictionary",
    "exclusive",
    "levels_of",
]
