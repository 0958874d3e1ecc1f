"""What each collective was, how long its ranks waited, how fast it ran, and what hid it.

With arrivals a_r and ends e_r of the ranks r of a collective, in one clock:

    ready = max a_r                      the last rank, the straggler, is there
    waiting = Σ_r (min(ready, e_r) − a_r)     rank-time
    transfer = max e_r − ready
    algbw = S / transfer,  busbw = algbw · bus factor    (nccl-tests, PERFORMANCE.md)

A rank with e_r well before ready (the root of a broadcast) waited for nobody. S is the whole array:
what one rank puts into an all-reduce, what comes out of an all-gather, what goes into a
reduce-scatter. The bus factor is 2(n−1)/n for all-reduce, (n−1)/n for reduce-scatter,
all-gather, all-to-all, gather and scatter, 1 for broadcast, reduce and a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.collectives import LEFT_EARLY_NS
from chopper.analyzers.trace.columns import dictionary, distinct_rows, ints, nullable, strings
from chopper.analyzers.trace.intervals import union
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

_ABOVE_LINK = "withheld: more than the link can carry; its peak, the size or the times are wrong"
_WAIT = "communication.wait"
_CAUSES = (
    "communication.wait",
    "communication.transfer.at_peak",
    "communication.transfer.below_peak",
    "communication.transfer.no_peak",
    "communication.unseparated",
)


class Members:
    """The matched rows of the `communication` table, collective by collective.

    Attributes:
        table: those rows, sorted by collective, then rank.
        first: first row of each collective.
        of: collective of each row, dense.
        rank, arrival_ns, left_ns, ready_ns: columns.
        wait_ns: how long each rank waited; 0 for one that left before the last rank came.
        straggler: row of the rank that came last, per collective.
    """

    def __init__(self, table: pa.Table) -> None:
        matched = table.filter(table["instance_id"].is_valid())
        order = np.lexsort((ints(matched, "rank"), ints(matched, "instance_id")))
        self.table = matched.take(pa.array(order)).combine_chunks()
        instance = ints(self.table, "instance_id")
        new = np.ones(len(instance), dtype=bool)
        new[1:] = instance[1:] != instance[:-1]
        self.first = np.flatnonzero(new)
        self.of = np.cumsum(new) - 1
        self.rank = ints(self.table, "rank")
        self.arrival_ns = ints(self.table, "arrival_ns")
        self.left_ns = ints(self.table, "left_ns")
        self.ready_ns = ints(self.table, "ready_ns")
        until = np.minimum(self.ready_ns, self.left_ns)
        stayed = self.left_ns >= self.ready_ns - LEFT_EARLY_NS
        self.wait_ns = np.where(stayed, np.maximum(until - self.arrival_ns, 0), 0)
        by_arrival = np.lexsort((self.arrival_ns, self.of))
        last = np.append(self.first[1:], len(instance))[: len(self.first)] - 1
        self.straggler = by_arrival[last]

    def __len__(self) -> int:
        return len(self.first)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum of a column of the rows per collective."""
        return np.add.reduceat(values, self.first) if len(self) else values[:0]


def members(attribution: Attribution) -> Members:
    """The matched collectives of a run, sorted once."""
    cache = attribution._cache
    if "analyzers.members" not in cache:
        cache["analyzers.members"] = Members(attribution.communication)
    found: Members = cache["analyzers.members"]
    return found


def time_of_events(attribution: Attribution, rank: np.ndarray, row: np.ndarray) -> pa.Table:
    """Time in each leaf of `communication` of the given events; one int64 column per cause."""
    pieces = attribution.pieces
    codes, values = strings(pieces, "cause")
    width = np.int64(1) << 40
    wanted = rank * width + row
    order = np.argsort(wanted, kind="stable")
    keys = wanted[order]
    number = {value: i for i, value in enumerate(values)}
    columns = {}
    for cause in _CAUSES:
        total = np.zeros(len(wanted), dtype=np.int64)
        mine = np.flatnonzero(codes == number.get(cause, -2))
        if len(mine) and len(keys):
            taken = pieces.select(["rank", "event_row", "time_ns"]).take(pa.array(mine))
            key = ints(taken, "rank") * width + ints(taken, "event_row")
            at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            hit = keys[at] == key
            np.add.at(total, order[at[hit]], ints(taken, "time_ns")[hit])
        columns[cause] = pa.array(total)
    return pa.table(columns)


def of_links(attribution: Attribution, rank: np.ndarray, row: np.ndarray) -> pa.Table:
    """Phase, layer, operator and step number of events. -> phase, layer, op, step."""
    parts, places = [], []
    for one in np.unique(rank):
        at = np.flatnonzero(rank == one)
        links = attribution.links[int(one)].select(["phase", "layer", "op"])
        parts.append(links.take(pa.array(row[at])))
        places.append(at)
    if not parts:
        empty = TABLES["event_link"].empty().select(["phase", "layer", "op"])
        return empty.append_column("step", pa.array([], pa.int64()))
    place = np.concatenate(places)
    back = np.empty(len(place), dtype=np.int64)
    back[place] = np.arange(len(place))
    found = pa.concat_tables(parts).unify_dictionaries().take(pa.array(back)).combine_chunks()
    return found.append_column("step", nullable(_step_numbers(attribution, rank, row)))


def _step_numbers(attribution: Attribution, rank: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Number of the step window that holds each event's start, -1 for none."""
    windows = attribution.windows
    ranks, start = ints(windows, "rank"), ints(windows, "start_ns")
    end, number = ints(windows, "end_ns"), ints(windows, "number")
    found = np.full(len(rank), -1, dtype=np.int64)
    for one in np.unique(rank):
        at = np.flatnonzero(rank == one)
        mine = np.flatnonzero(ranks == one)
        if not len(mine):
            continue
        begun = ints(attribution.run.table(int(one), "device_event"), "start_ns")[row[at]]
        place = np.searchsorted(start[mine], begun, side="right") - 1
        safe = mine[np.maximum(place, 0)]
        found[at] = np.where((place >= 0) & (begun < end[safe]), number[safe], -1)
    return found


def collectives(attribution: Attribution) -> pa.Table:
    """One row per matched collective, the most exposed first. COMMUNICATION -> COLLECTIVES."""
    found = members(attribution)
    table = found.table
    if not len(found):
        return TABLES["collectives"].empty()
    row = ints(table, "event_row")
    time = time_of_events(attribution, found.rank, row)
    exposed = sum((time[c].to_numpy() for c in _CAUSES[1:]), time[_WAIT].to_numpy())
    ready = found.ready_ns[found.first]
    left = np.maximum.reduceat(found.left_ns, found.first)
    transfer = np.maximum(left - ready, 0)
    one = table.take(pa.array(found.first))
    size = _floats(one, "message_bytes")
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(transfer > 0, size / transfer * 1e9, np.nan)
    bus = rate * _floats(one, "bus_factor")
    at_peak = bus / _floats(one, "link_bytes_per_s")
    beyond = at_peak > MOST_OF_A_PEAK
    at_peak[beyond] = np.nan
    links = of_links(attribution, found.rank[found.straggler], row[found.straggler])
    total = found.total(exposed)
    columns = {
        "collective": one["collective"],
        "ranks": one["ranks"],
        "group": one["group"],
        "sequence_id": one["sequence_id"],
        "step": links["step"],
        "waiting_ns": pa.array(found.total(found.wait_ns)),
        "straggler_rank": pa.array(found.rank[found.straggler].astype(np.int32)),
        "exposed_waiting_ns": pa.array(found.total(time[_WAIT].to_numpy())),
        "exposed_ns": pa.array(total),
        "transfer_ns": pa.array(transfer),
        "message_bytes": one["message_bytes"],
        "algorithm_bytes_per_s": _nan_is_null(rate),
        "bus_bytes_per_s": _nan_is_null(bus),
        "at_peak_ratio": _nan_is_null(at_peak),
        "phase": links["phase"],
        "layer": links["layer"],
        "op": links["op"],
        "rank_count": pa.array(np.diff(np.append(found.first, len(found.of)))),
        "first_arrival_ns": pa.array(np.minimum.reduceat(found.arrival_ns, found.first)),
        "last_arrival_ns": pa.array(ready),
        "last_end_ns": pa.array(left),
        "reason": pa.array([_ABOVE_LINK if b else None for b in beyond.tolist()], pa.string()),
    }
    order = np.lexsort((ready, -transfer, -total))
    declared = TABLES["collectives"].arrow
    made = pa.table({f.name: columns[f.name] for f in declared}, schema=declared)
    return made.take(pa.array(order)).combine_chunks()


def exposed_communication(attribution: Attribution) -> pa.Table:
    """Exposed and hidden time by group, collective, phase and layer, the most exposed first.

    COMMUNICATION, PIECE, EVENT_LINK -> EXPOSED_COMMUNICATION.
    """
    table = attribution.communication.combine_chunks()
    rank, row = ints(table, "rank"), ints(table, "event_row")
    ran, hidden = _hidden(attribution, rank, row)
    inside = ran >= 0
    if not inside.any():
        return TABLES["exposed_communication"].empty()
    table, rank, row = table.filter(pa.array(inside)), rank[inside], row[inside]
    ran, hidden = ran[inside], hidden[inside]
    time = time_of_events(attribution, rank, row)
    links = of_links(attribution, rank, row)
    named = [(table, "ranks"), (table, "group"), (table, "collective")]
    named += [(links, "phase"), (links, "layer")]
    keys = [strings(*key) for key in named]
    first, group = distinct_rows([codes for codes, _ in keys])

    def total(values: np.ndarray) -> np.ndarray:
        out = np.zeros(len(first), dtype=np.int64)
        np.add.at(out, group, values)
        return out

    parts = {cause: total(time[cause].to_numpy()) for cause in _CAUSES}
    exposed = sum(parts.values(), np.zeros(len(first), dtype=np.int64))
    elapsed, under = total(ran), total(hidden)
    order = np.lexsort((-elapsed, -exposed))
    columns = {
        name: dictionary(codes[first][order], values)
        for (_, name), (codes, values) in zip(named, keys, strict=True)
    }
    columns |= {
        "event_count": pa.array(np.bincount(group, minlength=len(first))[order]),
        "exposed_ns": pa.array(exposed[order]),
        "share_ratio": pa.array(exposed[order] / max(attribution.observed_ns, 1)),
        "hidden_ns": pa.array(under[order]),
        "elapsed_ns": pa.array(elapsed[order]),
        "waiting_ns": pa.array(parts[_CAUSES[0]][order]),
        "at_peak_ns": pa.array(parts[_CAUSES[1]][order]),
        "below_peak_ns": pa.array(parts[_CAUSES[2]][order]),
        "no_peak_ns": pa.array(parts[_CAUSES[3]][order]),
        "unseparated_ns": pa.array(parts[_CAUSES[4]][order]),
    }
    declared = TABLES["exposed_communication"].arrow
    return pa.table({f.name: columns[f.name] for f in declared}, schema=declared)


def _hidden(
    attribution: Attribution, rank: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Time that each event ran inside the windows, -1 outside of them, and of it under computing."""
    windows = attribution.windows
    ranks = ints(windows, "rank")
    ran = np.full(len(rank), -1, dtype=np.int64)
    hidden = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank):
        mine = ranks == one
        if not mine.any():
            continue
        low = int(ints(windows, "start_ns")[mine].min())
        high = int(ints(windows, "end_ns")[mine].max())
        events = attribution.run.table(int(one), "device_event")
        start = ints(events, "start_ns")
        end = start + ints(events, "dur_ns")
        codes, values = strings(attribution.links[int(one)], "work_class")
        computing = np.array([v == "compute" for v in values] + [False])[codes]
        at = np.flatnonzero(rank == one)
        begin = np.clip(start[row[at]], low, high)
        stop = np.clip(end[row[at]], low, high)
        seen = (end[row[at]] > low) & (start[row[at]] < high)
        ran[at] = np.where(seen, stop - begin, -1)
        hidden[at] = union(start[computing], end[computing]).within(begin, stop)
    return ran, hidden


def _floats(table: pa.Table, name: str) -> np.ndarray:
    """A numeric column as float64, NaN for null."""
    column = table[name].cast(pa.float64()).fill_null(float("nan"))
    return np.asarray(column, dtype=np.float64)


def _nan_is_null(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))
