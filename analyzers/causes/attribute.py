"""Attribute one rank: every nanosecond of its windows to exactly one leaf cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.compute import MATH, ComputeSplit, split_compute
from chopper.analyzers.causes.core_wait import (
    awake,
    computing_of_steps,
    taken,
    wait_of_steps,
    waits_within,
)
from chopper.analyzers.causes.event_work import EventWork, event_work
from chopper.analyzers.causes.factors import Factors, measure
from chopper.analyzers.causes.idle import Gaps, grouping_of, split_idle
from chopper.analyzers.causes.pipeline import with_stage_waits
from chopper.analyzers.causes.quality import check_factors, check_rank, clock_coverage
from chopper.analyzers.causes.states import (
    Shares,
    States,
    communication_table,
    exclusive_states,
    split_exposed,
)
from chopper.analyzers.causes.uneven import by_dimension
from chopper.analyzers.trace.columns import dictionary, ints, matching, nullable, pick, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.totals import counted_on
from chopper.analyzers.trace.windows import Windows
from chopper.arrow import with_column
from chopper.causes import CODES, LEAVES
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from chopper.tables import TABLES


@dataclass(frozen=True)
class RankResult:
    """The attribution of one rank, as declared tables.

    Attributes:
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
    coverage: dict[str, tuple[float, float]]
    work: EventWork | None = None
    factors: Factors | None = None

    @property
    def observed_ns(self) -> int:
        """Length of all windows; ``piece.time_ns`` sums to it exactly."""
        return int((ints(self.window, "end_ns") - ints(self.window, "start_ns")).sum())

    def after(self, windows_count: int) -> RankResult:
        """Return the result of some steps that come after so many windows of the rank."""
        names = ("event_link", "piece", "window", "gap")
        tables: dict[str, Any] = {n: counted_on(getattr(self, n), windows_count) for n in names}
        return replace(self, **tables)


def attribute_rank(joined: JoinedRank, matched: Matched | None = None) -> RankResult:
    """Attribute one rank -> PIECE, WINDOW, GAP, EVENT_LINK.

    Args:
        joined: from :func:`join_rank`.
        matched: its collectives matched with the other ranks'; None when it is alone.
    """
    rank, windows = joined.inputs.rank, joined.windows
    if not len(windows):
        links = joined.links()
        return RankResult(
            rank=rank,
            event_link=joined.event_link,
            communication=communication_table(joined, links.events, None),
            piece=TABLES["piece"].empty(),
            window=TABLES["window"].empty(),
            gap=TABLES["gap"].empty(),
            findings=check_rank(joined, links),
            coverage={},
        )
    states, waiting, gaps, work = _by_host(joined, matched)
    links = joined.links()
    factors = measure(joined, links, states, work)
    compute = split_compute(states, links, work, factors)
    exposed = split_exposed(states, links, joined, matched, waiting)
    if matched is not None and matched.stage_waits is not None:
        exposed, gaps = with_stage_waits(matched.stage_waits, joined, states, exposed, gaps)
    if matched is not None:
        exposed = by_dimension(joined, matched, states, exposed)
    piece = _pieces(joined, links, states, compute, exposed, gaps)
    observed = int(windows.bounds_ns[-1] - windows.bounds_ns[0])
    total = int(ints(piece, "time_ns").sum())
    if total != observed:
        raise AssertionError(f"rank {rank}: causes sum to {total} ns, windows to {observed} ns")
    window = TABLES["window"].of(
        {
            "rank": np.full(len(windows), rank),
            "step_index": np.arange(len(windows)),
            "number": nullable(windows.numbers),
            "start_ns": windows.bounds_ns[:-1],
            "end_ns": windows.bounds_ns[1:],
        }
    )
    gap = TABLES["gap"].of(
        {
            "rank": np.full(len(gaps.start_ns), rank),
            "step_index": gaps.window,
            "start_ns": gaps.start_ns,
            "end_ns": gaps.end_ns,
            "cause": dictionary(gaps.cause, LEAVES),
            "event_row": nullable(gaps.event_row),
        }
    )
    # Of a stretch of a trace, other stretches count the other events.
    is_own = _is_own_event(joined, links)
    sent = joined.communication.event_row
    sent = sent[is_own[sent]]
    matched_count = 0 if matched is None else (matched.ready_ns[sent] >= 0).sum()
    if not windows.recorded.all():
        piece, window, gap = (_recorded(table, windows) for table in (piece, window, gap))
    return RankResult(
        rank=rank,
        event_link=joined.event_link,
        communication=communication_table(joined, links.events, matched),
        piece=piece,
        window=window,
        gap=gap,
        findings=check_rank(joined, links, compute.too_fast, compute.of_peak_ratio)
        + check_factors(rank, links, factors, compute)
        + _of_unknown(rank, piece if len(links.events) else piece.slice(0, 0)),
        coverage={
            **_coverage(links, compute, work, states, windows.recorded, is_own),
            "collectives_matched_ratio": (float(matched_count), float(len(sent))),
            "clock_ratio": clock_coverage(links, factors, is_own),
        },
        work=work,
        factors=factors,
    )


def _of_unknown(rank: int, piece: pa.Table) -> list[Finding]:
    """Say for which share of the time the state of the device is unknown, from 1 %."""
    cause, causes = strings(piece, "cause")
    time_ns = ints(piece, "time_ns")
    unknown = matching(cause, causes, lambda c: c == "idle.device_unknown")
    share = float(time_ns[unknown].sum()) / max(float(time_ns.sum()), 1)
    return [finding("device.state_unknown", rank=rank, share=share)] if share >= 0.01 else []


def _pieces(
    joined: JoinedRank,
    links: Links,
    states: States,
    compute: ComputeSplit,
    exposed: Shares,
    gaps: Gaps,
) -> pa.Table:
    """Return the `piece` table of one rank: computing, exposed communication and copies, idle."""
    fragment, cause, time_ns = map(np.concatenate, zip(compute.shares, exposed, strict=True))
    ran = states.event_row[fragment]
    window = np.concatenate([states.window[fragment], gaps.window])
    event = np.concatenate([ran, gaps.event_row])
    kernel = np.concatenate([ran, np.where(gaps.of_event, gaps.event_row, -1)])
    cause = np.concatenate([cause, gaps.cause])
    time_ns = np.concatenate([time_ns, gaps.end_ns - gaps.start_ns])
    of_gaps = (gaps.phase, gaps.layer, gaps.op)
    phase, layer, op = map(np.concatenate, zip(grouping_of(links, ran), of_gaps, strict=True))
    events, bounds = links.events, joined.windows.bounds_ns
    first, last = bounds[:-1][states.window[fragment]], bounds[1:][states.window[fragment]]
    start = np.concatenate([np.clip(events.start_ns[ran], first, last), gaps.start_ns])
    end = np.concatenate([np.clip(events.end_ns[ran], first, last), gaps.end_ns])
    waited = _without_a_core(joined, window, cause, time_ns, start, end)
    if waited is not None:
        # What waiting takes out of a piece is a piece of its own.
        unwaited, took = np.flatnonzero(time_ns > waited), np.flatnonzero(waited)
        rows = np.concatenate([unwaited, took])
        waits = np.where(_COMPUTES[cause[took]], _COMPUTING_WAIT, _PREPARING_WAIT)
        cause = np.concatenate([cause[unwaited], waits])
        time_ns = np.concatenate([(time_ns - waited)[unwaited], waited[took]])
        window, event, kernel = window[rows], event[rows], kernel[rows]
        phase, layer, op = phase[rows], layer[rows], op[rows]
    codes, kernels = links.events.names
    return TABLES["piece"].of(
        {
            "rank": np.full(len(event), joined.inputs.rank),
            "step_index": window,
            "cause": dictionary(cause, LEAVES),
            "event_row": nullable(event),
            "phase": dictionary(phase, links.phases),
            "layer": dictionary(layer, links.layers[1]),
            "op": dictionary(op, links.op_names[1]),
            "kernel": dictionary(pick(codes, kernel), kernels),
            "time_ns": time_ns,
        }
    )


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
    return with_column(table.filter(pa.array(inside)), "step_index", pa.array(index))


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
    joined: JoinedRank,
    window: np.ndarray,
    cause: np.ndarray,
    time_ns: np.ndarray,
    start_ns: np.ndarray,
    end_ns: np.ndarray,
) -> np.ndarray | None:
    """Return the nanoseconds of each piece that waited for a core.

    A piece has its share of what the thread waited between its start and end, if that was sampled.
    Only without a device: beside one, the host may run ahead, and its waits need not matter.
    """
    numbers = joined.windows.numbers
    wait, sleep = wait_of_steps(joined.inputs.core_wait, numbers)
    if not joined.host_only or not wait.any():
        return None
    hidden = _EXPOSED[cause]
    exposed = np.bincount(window[hidden], time_ns[hidden], len(wait))
    held = awake(window, time_ns, _MAY_SLEEP[cause], exposed, sleep, _MAY_SLEEP_TOO[cause])
    within = waits_within(joined.inputs.python_sample, start_ns, end_ns)
    share = within / np.maximum(end_ns - start_ns, 1)
    held = np.where(within < 0, held, np.rint(time_ns * share).astype(np.int64))
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
_MAY_SLEEP_TOO = np.array([c.endswith((".python", ".unobserved")) for c in LEAVES])
"""The program's own code, which may sleep or read files."""


def _is_own_event(joined: JoinedRank, links: Links) -> np.ndarray:
    """Return the mask of the device events that no other stretch of the trace counts as its own."""
    start_ns, span = links.events.start_ns, joined.inputs.span
    if span is None:
        return np.ones(len(start_ns), dtype=bool)
    first, after = span.own_ns if joined.host_only else span.device_ns
    return (start_ns >= first) & (start_ns < after)


def _coverage(
    links: Links,
    compute: ComputeSplit,
    work: EventWork,
    states: States,
    recorded: np.ndarray,
    is_own: np.ndarray,
) -> dict[str, tuple[float, float]]:
    """Return covered and total amounts: of computing time in recorded windows, of own events."""
    events = float(is_own.sum())
    inside = recorded[states.window[compute.shares.fragment]]
    fragment, cause, time_ns = (values[inside] for values in compute.shares)
    event = states.event_row[fragment]

    def time_of(mask: np.ndarray) -> float:
        return float(time_ns[mask].sum())

    computing_ns = float(time_ns.sum())
    math = time_of(np.isin(cause, MATH) & work.math[event])
    no_peak = time_of(cause == CODES["compute.no_peak"])
    unmodelled = time_of(cause == CODES["compute.unmodelled"])
    return {
        "compute_modelled_ratio": (computing_ns - unmodelled, computing_ns),
        "work_known_ratio": (time_of(work.known[event]), computing_ns),
        "math_with_peak_ratio": (math, math + no_peak),
        "launch_known_ratio": (float(links.has_launch[is_own].sum()), events),
        "operator_known_ratio": (float((links.op_row >= 0)[is_own].sum()), events),
        "layer_known_ratio": (float((links.layers[0] >= 0)[is_own].sum()), events),
    }
