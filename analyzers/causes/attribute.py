"""Attribute one rank: every nanosecond of its windows to exactly one leaf cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.causes.compute import (
    COMPUTE_CAUSES,
    MATH_CAUSES,
    ComputeSplit,
    split_compute,
)
from chopper.analyzers.causes.core_wait import awake, computing_of_steps, taken, wait_of_steps
from chopper.analyzers.causes.event_work import EventWork, event_work
from chopper.analyzers.causes.exposed import (
    EXPOSED_CAUSES,
    Exposed,
    communication_table,
    matched_share,
    split_exposed,
)
from chopper.analyzers.causes.factor_checks import check_factors, clock_coverage
from chopper.analyzers.causes.factors import Factors, measure
from chopper.analyzers.causes.idle import IDLE_CAUSES, Gaps, Grouping, grouping_of, split_idle
from chopper.analyzers.causes.quality import check_rank
from chopper.analyzers.causes.states import States, exclusive_states
from chopper.analyzers.trace.collectives import link_peaks
from chopper.analyzers.trace.columns import dictionary, ints, matching, nullable
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.joined import JoinedRank
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.windows import Windows
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.trace.tables import DeviceEvents
    from chopper.storage.manifest import Finding


@dataclass(frozen=True)
class RankResult:
    """The attribution of one rank, as declared tables.

    Attributes:
        device_event: as given, or made from host spans on a host-only trace.
        observed_ns: length of all windows; ``piece.time_ns`` sums to it exactly.
    """

    rank: int
    device_event: pa.Table
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
    """name → (covered, of how much), to be added up over ranks."""
    work: EventWork | None = None
    """Work of each device event; None when there are no windows."""
    factors: Factors | None = None
    """Measured factors of each device event; None when there are no windows."""


def attribute_rank(joined: JoinedRank, matched: Matched | None = None) -> RankResult:
    """Attribute one rank -> PIECE, WINDOW, GAP, EVENT_LINK.

    Args:
        joined: from :func:`join_rank`.
        matched: its collectives matched with the other ranks'; None when it is alone.
    """
    given, windows = joined.given, joined.windows
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
        device_event=joined.device_event,
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
        coverage=_coverage(
            links,
            compute.cause,
            compute.time_ns,
            work.math[states.event_row[compute.fragment]],
            work.known[states.event_row[compute.fragment]],
        )
        | {
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
    columns = _Columns(links, joined.given.rank)
    computing, preparing = _without_a_core(joined, states, compute, gaps)
    pieces = pa.concat_tables(
        [
            columns.pieces(
                states.window[compute.fragment],
                compute.cause,
                COMPUTE_CAUSES,
                states.event_row[compute.fragment],
                compute.time_ns,
                computing,
                "compute.core_wait",
            ),
            columns.pieces(
                states.window[exposed.fragment],
                exposed.cause,
                EXPOSED_CAUSES,
                states.event_row[exposed.fragment],
                exposed.time_ns,
            ),
            columns.pieces(
                gaps.window,
                gaps.cause,
                IDLE_CAUSES,
                gaps.event_row,
                gaps.end_ns - gaps.start_ns,
                preparing,
                "idle.preparation.core_wait",
                grouping=Grouping(gaps.phase, gaps.layer, gaps.op),
                named=gaps.of_event,
            ),
        ]
    ).unify_dictionaries()
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
    return communication_table(joined.given.rank, events, joined.communication, matched, peaks)


def _empty(joined: JoinedRank) -> RankResult:
    """Return the attribution of a rank without windows."""
    links = joined.links()
    return RankResult(
        rank=joined.given.rank,
        device_event=joined.device_event,
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
    joined: JoinedRank, states: States, compute: ComputeSplit, gaps: Gaps
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the nanoseconds of each piece of computing and of idle time that waited for a core.

    Only without a device: beside one, the host may run ahead, and its waits need not matter.
    """
    wait, sleep = wait_of_steps(joined.given.core_wait, joined.windows.numbers)
    if not joined.host_only or not wait.any():
        return None, None
    window = np.concatenate([states.window[compute.fragment], gaps.window])
    time_ns = np.concatenate([compute.time_ns, gaps.end_ns - gaps.start_ns])
    may_sleep = np.concatenate([np.zeros(len(compute.cause), bool), _MAY_SLEEP[gaps.cause]])
    # The rest of a window is communication that nothing hides.
    exposed = np.diff(joined.windows.bounds_ns) - np.bincount(window, time_ns, len(wait))
    may_wait = np.concatenate([_MAY_WAIT_COMPUTING[compute.cause], _MAY_WAIT_IDLE[gaps.cause]])
    held = awake(window, time_ns, may_sleep, exposed, sleep)
    held = np.where(may_wait, held, 0)
    count = len(compute.cause)
    computing = computing_of_steps(joined.given.core_wait, joined.windows.numbers)
    if computing is not None:
        return (
            taken(window[:count], held[:count], computing),
            taken(window[count:], held[count:], wait - computing),
        )
    found = taken(window, held, wait)
    return found[:count], found[count:]


_MAY_WAIT_COMPUTING = np.array(
    [not c.endswith(("compute.ideal", ".roofline")) for c in COMPUTE_CAUSES]
)
"""What the hardware takes at its peak is not waiting."""
_MAY_WAIT_IDLE = np.array(
    [c.startswith("idle.preparation.") and not c.endswith(".collective_wait") for c in IDLE_CAUSES]
)
"""Who waits for another rank does not ask for a core."""
_MAY_SLEEP = np.array(
    [c.endswith((".data", ".synchronization", ".collective_wait")) for c in IDLE_CAUSES]
)
"""Waiting for somebody else, if it is not working for itself."""


class _Columns:
    """Makes `piece` tables from codes."""

    def __init__(self, links: Links, rank: int) -> None:
        self.links = links
        self.rank = rank

    def pieces(
        self,
        window: np.ndarray,
        cause: np.ndarray,
        causes: list[str],
        event: np.ndarray,
        time_ns: np.ndarray,
        taken_ns: np.ndarray | None = None,
        taken_by: str = "",
        *,
        grouping: Grouping | None = None,
        named: np.ndarray | None = None,
    ) -> pa.Table:
        """Pieces, and out of each what another cause takes of it as a piece of its own.

        Args:
            grouping: of each piece; its event's where it is None.
            named: mask of the pieces that belong to the event's kernel; None for all.
        """
        links = self.links
        if grouping is None:
            grouping = grouping_of(links, event)
        kernel = event if named is None else np.where(named, event, -1)
        if taken_ns is not None:
            kept, took = np.flatnonzero(time_ns > taken_ns), np.flatnonzero(taken_ns)
            rows = np.concatenate([kept, took])
            causes = [*causes, taken_by]
            cause = np.concatenate([cause[kept], np.full(len(took), len(causes) - 1)])
            time_ns = np.concatenate([(time_ns - taken_ns)[kept], taken_ns[took]])
            window, event, kernel = window[rows], event[rows], kernel[rows]
            grouping = Grouping(*(column[rows] for column in grouping))
        codes, kernels = links.events.names
        name = np.where(kernel >= 0, codes[kernel], -1) if len(codes) else kernel
        return pa.Table.from_arrays(
            [
                pa.array(np.full(len(event), self.rank, dtype=np.int32)),
                pa.array(window.astype(np.int32)),
                dictionary(cause, causes),
                nullable(event),
                dictionary(grouping.phase, links.phases),
                dictionary(grouping.layer, links.layers[1]),
                dictionary(grouping.op, links.op_names[1]),
                dictionary(name, kernels),
                pa.array(time_ns.astype(np.int64)),
            ],
            schema=TABLES["piece"].arrow,
        )


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
            dictionary(gaps.cause, IDLE_CAUSES),
            nullable(gaps.event_row),
        ],
        schema=TABLES["gap"].arrow,
    )


def _coverage(
    links: Links,
    cause: np.ndarray,
    time_ns: np.ndarray,
    math_work: np.ndarray,
    known_work: np.ndarray,
) -> dict[str, tuple[float, float]]:
    compute = float(time_ns.sum())
    unmodelled = float(time_ns[cause == COMPUTE_CAUSES.index("compute.unmodelled")].sum())
    split = [COMPUTE_CAUSES.index(c) for c in MATH_CAUSES]
    math = float(time_ns[np.isin(cause, split) & math_work].sum())
    no_peak = float(time_ns[cause == COMPUTE_CAUSES.index("compute.no_peak")].sum())
    events = float(len(links.events))
    layered = matching(*links.layers, lambda _: True) if len(links.layers[1]) else np.zeros(0)
    return {
        "compute_modelled_ratio": (compute - unmodelled, compute),
        "work_known_ratio": (float(time_ns[known_work].sum()), compute),
        "math_with_peak_ratio": (math, math + no_peak),
        "launch_known_ratio": (float(links.has_launch.sum()), events),
        "operator_known_ratio": (float((links.op_row >= 0).sum()), events),
        "layer_known_ratio": (float(layered.sum()), events),
    }
