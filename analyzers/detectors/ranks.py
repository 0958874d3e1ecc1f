"""Patterns of communication: ranks that wait for one, and collectives that cost too much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution, is_staged
from chopper.analyzers.detectors import Sighting, limits_of
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.events.groups import reals
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.views.ranks import Uneven
from chopper.causes import CAUSES


def late_rank(run: Attribution, uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind not in ("late_rank", "late_entry"):
        return
    worst, run_ns = uneven.worst, {}
    mine = (events.rank == worst.rank) & of_class(events, "communication")
    late, reason = (
        "enters late",
        (
            f"{fmt.ratio(worst.entered_ratio)} of the waiting has no cause in it: it had begun the "
            "step, or left the collective before, later than others"
        ),
    )
    if uneven.kind == "late_rank" and worst.cause is not None:
        late = "is a straggler"
        reason = f"it spends more time than others on {fmt.inside(CAUSES[worst.cause].label)}"
    if uneven.peers_ratio is not None:
        of_peers = fmt.factor(uneven.peers_ratio)
        reason = f"it computes {of_peers} as long as the others of its stage, and all stages wait"
        # Without any waiting the schedule's bubble would be gone, too.
        mine = (events.rank == worst.rank) & of_class(events, "compute")
        as_peers_ns = np.rint(events.dur_ns[mine] / uneven.peers_ratio).astype(np.int64)
        run_ns = {worst.rank: (events.row[mine], as_peers_ns)}
    yield Sighting(
        events={worst.rank: events.row[mine]},
        run_ns=run_ns,
        changes=None if run_ns else Changes(fix=("communication.wait",)),
        evidence={
            "rank": worst.rank,
            "named": run.recording.part(worst.rank).name,
            "late": late,
            "late_ratio": worst.late_ratio,
            "share_ratio": worst.share_ratio,
            "own_ns": uneven.own_ns[worst.rank],
            "others_ns": uneven.others_ns,
            "cause": worst.cause,
            "reason": reason,
        },
    )


_MORE = "rank {rank} has {factor} the work of the others"
_UNEVEN = {
    "uneven_work": (
        f"Uneven work: {_MORE}",
        "Give each rank a batch of equal cost (tokens counted instead of samples, lengths in "
        "buckets), or divide parameters and layers by their time",
    ),
    "experts": (
        f"Uneven experts: {_MORE}",
        "Balance the experts: an auxiliary loss or a bias of the router, a limit on the tokens of "
        "an expert, or popular experts on several ranks",
    ),
    "ring": (
        f"Uneven ring: {_MORE}",
        "Give each rank an early and a late part of the sequence (zigzag or striped ring "
        "attention), so that a causal mask leaves all the same work",
    ),
    "pipeline": (
        "Pipeline bubbles: stages wait for each other",
        "More micro-batches per step, or an interleaved or zero-bubble schedule, shorten filling "
        "and draining; stages of equal time the rest",
    ),
}
"""Kind of unevenness: its title, and what mends it."""


def uneven_work(run: Attribution, uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind not in _UNEVEN:
        return
    what, remedy = _UNEVEN[uneven.kind]
    run_ns = _balanced(events)
    rank = uneven.worst.rank
    named = run.recording.part(rank).name
    yield Sighting(
        events={rank: run_ns[rank][0]},
        run_ns=run_ns,
        changes=Changes(fix=("communication.wait",))
        if uneven.kind == "pipeline" and not is_staged(run)
        else None,
        evidence={
            "what": what.format(rank=named, factor=fmt.factor(uneven.work_ratio)),
            "rank": rank,
            "work_factor": uneven.work_ratio,
            "wait_ratio": uneven.wait_ratio,
            "own_ns": uneven.own_ns[rank],
            "others_ns": uneven.others_ns,
            "remedy": remedy,
        },
    )


def _balanced(events: Events) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the computing events of each rank, and their times if all ranks computed as long.

    Each operator takes as long on all ranks that have it, as far as that makes their sums equal.
    """
    at = np.flatnonzero(of_class(events, "compute"))
    ranks, rank = np.unique(events.rank[at], return_inverse=True)
    name = events.op[0][at] + 1
    spent_ns = np.zeros((len(ranks), len(events.op[1]) + 1))
    np.add.at(spent_ns, (rank, name), events.dur_ns[at])
    mean_ns = (spent_ns > 0) * (spent_ns.sum(axis=0) / np.maximum((spent_ns > 0).sum(axis=0), 1))
    total_ns = mean_ns.sum(axis=1, keepdims=True)
    factor = mean_ns / np.maximum(spent_ns, 1) * total_ns.mean() / np.maximum(total_ns, 1)
    run_ns = np.rint(events.dur_ns[at] * factor[rank, name]).astype(np.int64)
    mine = [(number, rank == position) for position, number in enumerate(ranks.tolist())]
    return {number: (events.row[at][of], run_ns[of]) for number, of in mine}


_FORWARD = "DistributedDataParallel.forward"
_UPDATE = "Optimizer.step#"
_REDUCTIONS = ("allreduce", "reducescatter")


def repeated_reductions(
    run: Attribution, events: Events, links: Mapping[int, Links]
) -> Iterator[Sighting]:
    """HOST_SPAN, COMMUNICATION -> at most one sighting."""
    if run.windows["number"].null_count:
        return  # A window without steps holds any number of whole iterations.
    gone: dict[int, np.ndarray] = {}
    passes = reductions = needed = 0
    for rank, link in links.items():
        forward = link.host.named(_FORWARD.__eq__)
        forward &= link.host.nesting.topmost(forward) == np.arange(len(link.host))
        start_ns = link.host.start_ns[forward]
        table = run.communication.filter(ints(run.communication, "rank") == rank)
        codes, names = strings(table, "collective")
        reduces = np.isin(codes, [i for i, name in enumerate(names) if name in _REDUCTIONS])
        row = ints(table, "event_row")[reduces]
        size = ints(table, "message_bytes")[reduces]
        begin_ns = link.launch_ns[row]
        order = np.argsort(begin_ns, kind="stable")
        row, size, begin_ns = row[order], size[order], begin_ns[order]
        inside = np.isin(row, events.row[events.rank == rank])
        row, size, begin_ns = row[inside], size[inside], begin_ns[inside]
        step, of_pass = link.step[row], np.searchsorted(start_ns, begin_ns, side="right")
        updates_ns = _updates_ns(link)
        removable = [np.zeros(0, np.int64)]
        steps = np.unique(step).tolist()
        if len(steps) == 1 and not len(updates_ns):
            return
        for one in steps:
            mine = np.flatnonzero(step == one)
            each = np.split(size[mine], np.flatnonzero(np.diff(of_pass[mine])) + 1)
            if len(each) < 2 or any(not np.array_equal(each[0], part) for part in each[1:]):
                return
            first, last = start_ns[np.maximum(of_pass[mine[[0, -1]]] - 1, 0)]
            if ((updates_ns >= first) & (updates_ns < last)).any():
                return  # Each pass has an optimizer of its own: several models, or iterations.
            removable.append(row[mine[: -len(each[0])]])
            passes, needed, reductions = len(each), len(each[0]), len(mine)
        gone[rank] = np.sort(np.concatenate(removable))
    if any(len(rows) for rows in gone.values()):
        yield Sighting(
            events=gone,
            gone=gone,
            phase="backward",
            evidence={"passes": passes, "reductions": reductions, "needed": needed},
        )


def _updates_ns(links: Links) -> np.ndarray:
    """Return when the optimizer ran: starts of its spans, and launches of its device events."""
    spans = links.host.start_ns[links.host.named(lambda name: name.startswith(_UPDATE))]
    rows = links.phase == links.phases.index("optimizer")
    return np.concatenate([spans, links.launch_ns[rows]])


_LARGER_FACTOR = 10
_BUCKET_BYTES = 25_000_000
_SMALL_BYTES = 250_000


def small_collectives(run: Attribution) -> Iterator[Sighting]:
    """COMMUNICATION -> a sighting for each kind of collective."""
    table = run.communication
    if not table.num_rows:
        return
    fewest = limits_of("small_collectives")["fewest"]
    rank, row = ints(table, "rank"), ints(table, "event_row")
    kind, kinds = strings(table, "collective")
    size, took = reals(table, "message_bytes"), _transfer_ns(table)
    factor = reals(table, "bus_factor")
    link = np.nan_to_num(reals(table, "link_bytes_per_s")) / 1e9
    for code, name in enumerate(kinds):
        rows, run_ns, many = {}, {}, []
        for one in np.unique(rank[kind == code]).tolist():
            known = (rank == one) & ~np.isnan(size)
            bus = np.where(known, size * np.nan_to_num(factor, nan=1.0), 0.0)
            dur = ints(run.joined[one].device_event, "dur_ns")
            merged, lengths = [], []
            for at in _in_steps(run, one, np.flatnonzero(known & (kind == code))):
                buckets = math.ceil(size[at].sum() / _BUCKET_BYTES) or 1
                quickest = at[took[at].argmin()]
                rate = _rate(bus[known], took[known], link[known], bus[quickest])
                latency_ns = took[quickest] - bus[quickest] / rate if rate else 0.0
                fits = len(at) >= fewest and buckets <= len(at) / 2
                if not fits or latency_ns * len(at) <= took[at].sum() / 2:
                    continue
                bucketed_ns = dur[row[at]] - latency_ns * (1 - buckets / len(at))
                merged.append(row[at])
                lengths.append(np.maximum(np.rint(bucketed_ns), 1).astype(np.int64))
                many.append((len(at), size[at].sum(), latency_ns * len(at)))
            if merged:
                rows[one] = np.concatenate(merged)
                run_ns[one] = (rows[one], np.concatenate(lengths))
        if rows:
            calls, sent, latency_ns = np.sum(many, axis=0).tolist()
            yield Sighting(
                events=rows,
                run_ns=run_ns,
                evidence={
                    "count": round(calls / len(many)),
                    "collective": name,
                    "bytes": sent / calls,
                    "latency_ns": round(latency_ns / calls),
                },
            )


def _rate(sizes: np.ndarray, took_ns: np.ndarray, link: np.ndarray, size: float) -> float:
    """Return the bytes per nanosecond that are surely not slower by latency; 0 for unknown."""
    largest = (sizes >= sizes.max()) & (took_ns > 0)
    if sizes.max() >= _LARGER_FACTOR * size and largest.any():
        return float(np.median(sizes[largest] / took_ns[largest]))
    return float(link.max()) / _LARGER_FACTOR if size <= _SMALL_BYTES else 0.0


def _in_steps(run: Attribution, rank: int, at: np.ndarray) -> list[np.ndarray]:
    """Split rows of `communication` of one rank by step and group; without those in no step."""
    table = run.communication
    row, group = ints(table, "event_row"), strings(table, "group")[0]
    links = run.links[rank]
    at = at[links["step_index"].is_valid().to_numpy()[row[at]]]
    step = ints(links, "step_index")[row[at]]
    order = np.lexsort((group[at], step))
    new = (np.diff(step[order]) != 0) | (np.diff(group[at][order]) != 0)
    return [part for part in np.split(at[order], np.flatnonzero(new) + 1) if len(part)]


def _transfer_ns(table: pa.Table) -> np.ndarray:
    """Return how long each collective took from the last rank's arrival, its own if not matched."""
    arrival, left_ns = ints(table, "arrival_ns"), ints(table, "left_ns")
    ready = np.where(table["ready_ns"].is_valid().to_numpy(), ints(table, "ready_ns"), arrival)
    begin = np.where(ready <= left_ns, np.maximum(ready, arrival), arrival)
    took: np.ndarray = left_ns - begin
    return took
