"""Attribute one rank: every nanosecond of its windows to exactly one leaf cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.causes.compute import MATH, ComputeSplit, split_compute
from chopper.analyzers.causes.core_wait import awake, computing_of_steps, taken, wait_of_steps
from chopper.analyzers.causes.event_work import EventWork, event_work
from chopper.analyzers.causes.exposed import (
    Exposed,
    communication_table,
    matched_share,
    split_exposed,
)
from chopper.analyzers.causes.factor_checks import check_factors, clock_coverage
from chopper.analyzers.causes.factors import Factors, measure
from chopper.analyzers.causes.idle import Gaps, grouping_of, split_idle
from chopper.analyzers.causes.quality import check_rank
from chopper.analyzers.causes.states import States, exclusive_states
from chopper.analyzers.trace.collectives import link_peaks
from chopper.analyzers.trace.columns import dictionary, ints, nullable
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.joined import JoinedRank
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.windows import Windows
from chopper.causes import CODES, LEAVES
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.trace.tables import DeviceEvents
    from chopper.storage.manifest import Finding


@dataclass(frozen=True)
class RankResult:
    """The attribution of one rank, as declared tables.

    Attributes:
        observed_ns: length of all windows; ``piece.time_ns`` sums to it exactly.
        coverage: name → (covered, of how much), to be added up over ranks.
        work, factors: of each device event; None when there are no windows.
    """

    rank: int
    event_link: pa.Table
    communication: pa.Table
    piece: pa.Table
    window: pa.Table
    gap: pa.Table
    findings: list[Finding]
    observed_ns: int
    ideal_ns: int
    steps: int
    coverage: dict[str, tuple[float, float]]
    work: EventWork | None = None
    factors: Factors | None = None


def attribute_rank(joined: JoinedRank, matched: Matched | None = None) -> RankResult:
    """Attribute one rank -> PIECE, WINDOW, GAP, EVENT_LINK.

    Args:
        joined: from :func:`join_rank`.
        matched: its collectives matched with the other ranks'; None when it is alone.
    """
    given, windows = joined.inputs, joined.windows
    if not len(windows):
        return _empty(joined)
    states, waiting, gaps, work = _by_host(joined, matched)
    links = joined.links()
    factors = measure(
        links,
        states,
        work,
        joined.ceiling,
        given.device_clock,
        given.kernel_counter,
        given.device_limit,
    )
    compute = split_compute(states, links, work, factors)
    exposed = split_exposed(states, links, joined, matched, waiting)
    piece = _pieces(joined, links, states, compute, exposed, gaps)
    observed = int(windows.bounds_ns[-1] - windows.bounds_ns[0])
    total = int(piece["time_ns"].to_numpy().sum())
    if total != observed:
        raise AssertionError(
            f"rank {given.rank}: causes sum to {total} ns, windows to {observed} ns"
        )
    window = _window_table(given.rank, windows)
    gap = _gap_table(given.rank, gaps)
    if not windows.recorded.all():
        piece, window, gap = (_recorded(table, windows) for table in (piece, window, gap))
    is_ideal = pc.equal(piece["cause"], "compute.ideal")
    lengths = np.diff(windows.bounds_ns)[windows.recorded]
    return RankResult(
        rank=given.rank,
        event_link=joined.event_link,
        communication=_communication(joined, links.events, matched),
        piece=piece,
        window=window,
        gap=gap,
        findings=check_rank(joined, links, compute.too_fast, compute.of_peak_ratio)
        + check_factors(given.rank, links, factors, compute),
        observed_ns=int(lengths.sum()),
        ideal_ns=pc.sum(piece["time_ns"].filter(is_ideal)).as_py() or 0,
        steps=len(lengths),
        coverage={
            **_coverage(links, compute, work, states.event_row[compute.fragment]),
            "collectives_matched_ratio": matched_share(joined.communication, matched),
            "clock_ratio": clock_coverage(links, factors),
        },
        work=work,
        factors=factors,
    )


def _pieces(
    joined: JoinedRank,
    links: Links,
    states: States,
    compute: ComputeSplit,
    exposed: Exposed,
    gaps: Gaps,
) -> pa.Table:
    """Return the `piece` table of one rank: computing, exposed communication and copies, idle."""
    fragment = np.concatenate([compute.fragment, exposed.fragment])
    ran = states.event_row[fragment]
    window = np.concatenate([states.window[fragment], gaps.window])
    event = np.concatenate([ran, gaps.event_row])
    kernel = np.concatenate([ran, np.where(gaps.of_event, gaps.event_row, -1)])
    cause = np.concatenate([compute.cause, exposed.cause, gaps.cause])
    time_ns = np.concatenate([compute.time_ns, exposed.time_ns, gaps.end_ns - gaps.start_ns])
    of_gaps = (gaps.phase, gaps.layer, gaps.op)
    phase, layer, op = (
        np.concatenate(pair) for pair in zip(grouping_of(links, ran), of_gaps, strict=True)
    )
    waited = _without_a_core(joined, window, cause, time_ns)
    if waited is not None:
        # What waiting takes out of a piece is a piece of its own.
        left, took = np.flatnonzero(time_ns > waited), np.flatnonzero(waited)
        rows = np.concatenate([left, took])
        waits = np.where(_COMPUTES[cause[took]], _COMPUTING_WAIT, _PREPARING_WAIT)
        cause = np.concatenate([cause[left], waits])
        time_ns = np.concatenate([(time_ns - waited)[left], waited[took]])
        window, event, kernel = window[rows], event[rows], kernel[rows]
        phase, layer, op = phase[rows], layer[rows], op[rows]
    codes, kernels = links.events.names
    pieces = pa.Table.from_arrays(
        [
            pa.array(np.full(len(event), joined.inputs.rank, dtype=np.int32)),
            pa.array(window.astype(np.int32)),
            dictionary(cause, LEAVES),
            nullable(event),
            dictionary(phase, links.phases),
            dictionary(layer, links.layers[1]),
            dictionary(op, links.op_names[1]),
            dictionary(np.where(kernel >= 0, codes[kernel], -1), kernels),
            pa.array(time_ns),
        ],
        schema=TABLES["piece"].arrow,
    )
    return TABLES["piece"].validate(pieces)


def _by_host(
    joined: JoinedRank, matched: Matched | None
) -> tuple[States, np.ndarray, Gaps, EventWork]:
    """Find what the host's spans tell: idle time by cause, and the work of device events.

    The arrays of all host spans last no longer than this call.
    """
    links = joined.links()
    states, waiting = _states(links, joined.windows, matched)
    return states, waiting, split_idle(states, links), event_work(links, joined.ceiling)


def _recorded(table: pa.Table, windows: Windows) -> pa.Table:
    """The rows of windows in which the trace was being taken, their indices counted anew."""
    step = ints(table, "step_index")
    inside = windows.recorded[step]
    index = (np.cumsum(windows.recorded) - 1)[step[inside]].astype(np.int32)
    place = table.schema.get_field_index("step_index")
    return table.filter(pa.array(inside)).set_column(
        place, table.schema.field(place), pa.array(index)
    )


def _communication(joined: JoinedRank, events: DeviceEvents, matched: Matched | None) -> pa.Table:
    """Return the `communication` table of one rank."""
    peaks = link_peaks(joined.communication.kinds, joined.ceiling)
    return communication_table(joined.inputs.rank, events, joined.communication, matched, peaks)


def _empty(joined: JoinedRank) -> RankResult:
    """Return the attribution of a rank without windows."""
    links = joined.links()
    return RankResult(
        rank=joined.inputs.rank,
        event_link=joined.event_link,
        communication=_communication(joined, links.events, None),
        piece=TABLES["piece"].empty(),
        window=TABLES["window"].empty(),
        gap=TABLES["gap"].empty(),
        findings=check_rank(joined, links),
        observed_ns=0,
        ideal_ns=0,
        steps=0,
        coverage={},
    )


def _states(links: Links, windows: Windows, matched: Matched | None) -> tuple[States, np.ndarray]:
    """Sweep the rank's events, matched collectives cut where the last rank came.

    Returns:
        The states, with ``event_row`` in rows of `device_event`, and per fragment whether it lies
        before the last rank came.
    """
    events, work_class = links.events, links.work_class
    start, end = events.start_ns, events.end_ns
    if matched is None or not (matched.ready_ns >= 0).any():
        states = exclusive_states(start, end, work_class, windows)
        return states, np.zeros(len(states.event_row), dtype=bool)
    ready = np.clip(matched.ready_ns, start, end)
    cut = (matched.ready_ns >= 0) & (ready > start)
    rows = np.flatnonzero(cut)
    # The waiting part stands in the event's place; the transfer comes as a row of its own.
    swept = exclusive_states(
        np.concatenate([start, ready[rows]]),
        np.concatenate([np.where(cut, ready, end), end[rows]]),
        np.concatenate([work_class, work_class[rows]]),
        windows,
    )
    origin = np.concatenate([np.arange(len(events)), rows])
    waits = np.concatenate([cut, np.zeros(len(rows), dtype=bool)])
    return replace(swept, event_row=origin[swept.event_row]), waits[swept.event_row]


def _without_a_core(
    joined: JoinedRank, window: np.ndarray, cause: np.ndarray, time_ns: np.ndarray
) -> np.ndarray | None:
    """Return the nanoseconds of each piece that waited for a core.

    Only without a device: beside one, the host may run ahead, and its waits need not matter.
    """
    numbers = joined.windows.numbers
    wait, sleep = wait_of_steps(joined.inputs.core_wait, numbers)
    if not joined.host_only or not wait.any():
        return None
    hidden = _EXPOSED[cause]
    exposed = np.bincount(window[hidden], time_ns[hidden], len(wait))
    held = awake(window, time_ns, _MAY_SLEEP[cause], exposed, sleep)
    held = np.where(_MAY_WAIT[cause], held, 0)
    computing = computing_of_steps(joined.inputs.core_wait, numbers)
    if computing is None:
        return taken(window, held, wait)
    waited = np.zeros(len(window), dtype=np.int64)
    computes = _COMPUTES[cause]
    for mine, part in ((computes, computing), (~computes, wait - computing)):
        waited[mine] = taken(window[mine], held[mine], part)
    return waited


_COMPUTING_WAIT, _PREPARING_WAIT = CODES["compute.core_wait"], CODES["idle.preparation.core_wait"]
_COMPUTES = np.array([c.startswith("compute.") for c in LEAVES])
_EXPOSED = np.array([c.startswith(("communication.", "copy.")) for c in LEAVES])
_MAY_WAIT = np.array(
    [
        c.startswith(("compute.", "idle.preparation."))
        # What the hardware takes at its peak is not waiting; who waits for another rank does not
        # ask for a core.
        and not c.endswith(("compute.ideal", ".roofline", ".collective_wait"))
        for c in LEAVES
    ]
)
_MAY_SLEEP = np.array(
    [c.endswith((".data", ".synchronization", ".collective_wait")) for c in LEAVES]
)
"""Waiting for somebody else, if it is not working for itself."""


def _window_table(rank: int, windows: Windows) -> pa.Table:
    count = len(windows)
    return pa.Table.from_arrays(
        [
            pa.array(np.full(count, rank, dtype=np.int32)),
            pa.array(np.arange(count, dtype=np.int32)),
            nullable(windows.numbers),
            pa.array(windows.bounds_ns[:-1]),
            pa.array(windows.bounds_ns[1:]),
        ],
        schema=TABLES["window"].arrow,
    )


def _gap_table(rank: int, gaps: Gaps) -> pa.Table:
    return pa.Table.from_arrays(
        [
            pa.array(np.full(len(gaps.start_ns), rank, dtype=np.int32)),
            pa.array(gaps.window.astype(np.int32)),
            pa.array(gaps.start_ns),
            pa.array(gaps.end_ns),
            dictionary(gaps.cause, LEAVES),
            nullable(gaps.event_row),
        ],
        schema=TABLES["gap"].arrow,
    )


def _coverage(
    links: Links, compute: ComputeSplit, work: EventWork, event: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Return what is covered of computing, whose pieces are of ``event``, and of all events."""
    events = float(len(links.events))

    def time_of(mask: np.ndarray) -> float:
        return float(compute.time_ns[mask].sum())

    whole = float(compute.time_ns.sum())
    math = time_of(np.isin(compute.cause, MATH) & work.math[event])
    no_peak = time_of(compute.cause == CODES["compute.no_peak"])
    unmodelled = time_of(compute.cause == CODES["compute.unmodelled"])
    return {
        "compute_modelled_ratio": (whole - unmodelled, whole),
        "work_known_ratio": (time_of(work.known[event]), whole),
        "math_with_peak_ratio": (math, math + no_peak),
        "launch_known_ratio": (float(links.has_launch.sum()), events),
        "operator_known_ratio": (float((links.op_row >= 0).sum()), events),
        "layer_known_ratio": (float((links.layers[0] >= 0).sum()), events),
    }
