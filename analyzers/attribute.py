"""Attribute one rank: every nanosecond of its windows to exactly one leaf cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers import names
from chopper.analyzers.columns import dictionary, ints, matching, nullable
from chopper.analyzers.compute import (
    COMPUTE_CAUSES,
    Ceiling,
    event_work,
    split_compute,
)
from chopper.analyzers.host_device import host_as_device
from chopper.analyzers.idle import IDLE_CAUSES, Gaps, split_idle
from chopper.analyzers.links import COMMUNICATION, COPY, PHASES, Links, link
from chopper.analyzers.quality import check_rank
from chopper.analyzers.states import States, exclusive_states
from chopper.analyzers.trace import DeviceEvents, HostSpans
from chopper.analyzers.windows import Windows, cut_windows
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.manifest import Finding

_COPY_CAUSES = [
    "copy.host_to_device",
    "copy.device_to_host",
    "copy.device_to_device",
    "copy.memset",
    "copy.other",
]
_H2D, _D2H, _D2D, _MEMSET, _OTHER_COPY = range(len(_COPY_CAUSES))
_EXPOSED = ["communication.unseparated"]


@dataclass(frozen=True)
class RankInput:
    """What is attributed: the trace tables of one rank, and what is known of its device.

    Attributes:
        host_span, device_event, step, collective: declared tables.
        ceiling: peaks, None when they are not known.
        no_peak_remedy: what to do when they are not, for the message.
        devices_listed: the trace names devices, so that a lack of device events is a lack.
    """

    rank: int
    host_span: pa.Table
    device_event: pa.Table
    step: pa.Table
    collective: pa.Table
    ceiling: Ceiling | None
    no_peak_remedy: str
    devices_listed: bool


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
    piece: pa.Table
    window: pa.Table
    gap: pa.Table
    findings: list[Finding]
    observed_ns: int
    ideal_ns: int
    steps: int
    coverage: dict[str, tuple[float, float]]
    """name → (covered, of how much), to be added up over ranks."""


def attribute_rank(given: RankInput) -> RankResult:
    """HOST_SPAN, DEVICE_EVENT, STEP, COLLECTIVE of one rank -> PIECE, WINDOW, GAP, EVENT_LINK."""
    host = HostSpans(given.host_span)
    host_only = given.device_event.num_rows == 0
    host_rows = None
    device_table = given.device_event
    if host_only:
        device_table, host_rows = host_as_device(host)
    events = DeviceEvents(device_table)
    # Host times of a program that computes elsewhere say nothing about its operators' peaks.
    ceiling = None if host_only and given.devices_listed else given.ceiling
    links = link(host, events, given.step, given.collective, host_rows)
    traced = given.step.filter(given.step["traced"]) if given.step.num_rows else given.step
    windows = cut_windows(links, ints(traced, "number"))
    declared = TABLES["piece"]
    if not len(windows):
        return _empty(given, device_table, links, windows, host_only)
    states = exclusive_states(events.start_ns, events.end_ns, links.work_class, windows)
    gaps = split_idle(states, links)
    work = event_work(links, ceiling)
    compute = split_compute(states, links, work)
    names_of, fragment, codes, time_ns = _exposed(states, links)
    columns = _Columns(links, given.rank)
    piece = pa.concat_tables(
        [
            columns.pieces(
                states.window[compute.fragment],
                compute.cause,
                COMPUTE_CAUSES,
                states.event_row[compute.fragment],
                compute.time_ns,
            ),
            columns.pieces(
                states.window[fragment], codes, names_of, states.event_row[fragment], time_ns
            ),
            columns.pieces(
                gaps.window, gaps.cause, IDLE_CAUSES, gaps.event_row, gaps.end_ns - gaps.start_ns
            ),
        ]
    ).unify_dictionaries()
    observed = int(windows.bounds_ns[-1] - windows.bounds_ns[0])
    total = int(piece["time_ns"].to_numpy().sum())
    if total != observed:
        raise AssertionError(
            f"rank {given.rank}: causes sum to {total} ns, windows to {observed} ns"
        )
    is_ideal = compute.cause == COMPUTE_CAUSES.index("compute.ideal")
    return RankResult(
        rank=given.rank,
        device_event=device_table,
        event_link=links.table(),
        piece=declared.validate(piece),
        window=_window_table(given.rank, windows),
        gap=_gap_table(given.rank, gaps),
        findings=check_rank(
            given.rank,
            links,
            windows,
            no_peak_remedy=given.no_peak_remedy,
            devices_listed=given.devices_listed,
            host_only=host_only,
            ceiling=ceiling,
            too_fast=compute.too_fast,
        ),
        observed_ns=observed,
        ideal_ns=int(compute.time_ns[is_ideal].sum()),
        steps=len(windows),
        coverage=_coverage(links, compute.cause, compute.time_ns),
    )


def _empty(
    given: RankInput, device_table: pa.Table, links: Links, windows: Windows, host_only: bool
) -> RankResult:
    return RankResult(
        rank=given.rank,
        device_event=device_table,
        event_link=links.table(),
        piece=TABLES["piece"].empty(),
        window=TABLES["window"].empty(),
        gap=TABLES["gap"].empty(),
        findings=check_rank(
            given.rank,
            links,
            windows,
            no_peak_remedy=given.no_peak_remedy,
            devices_listed=given.devices_listed,
            host_only=host_only,
            ceiling=None,
            too_fast=0,
        ),
        observed_ns=0,
        ideal_ns=0,
        steps=0,
        coverage={},
    )


def _exposed(states: States, links: Links) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Exposed communication and copies: (cause names, fragment, cause code, time)."""
    klass = links.work_class[states.event_row]
    fragment = np.flatnonzero(((klass == COMMUNICATION) | (klass == COPY)) & (states.share_ns > 0))
    event = states.event_row[fragment]
    direction = copy_direction(links.events)[event]
    codes = np.where(links.work_class[event] == COPY, len(_EXPOSED) + direction, 0)
    return _EXPOSED + _COPY_CAUSES, fragment, codes, states.share_ns[fragment]


def copy_direction(events: DeviceEvents) -> np.ndarray:
    """Direction of each event as a copy, by its name."""
    name_codes, values = events.names

    def direction(name: str) -> int:
        if names.is_fill(name):
            return _MEMSET
        if "HtoD" in name or "HostToDevice" in name:
            return _H2D
        if "DtoH" in name or "DeviceToHost" in name:
            return _D2H
        if "DtoD" in name or "PtoP" in name or "DeviceToDevice" in name:
            return _D2D
        return _OTHER_COPY

    table = np.array([direction(v) for v in values] + [_OTHER_COPY], dtype=np.int64)
    return np.where(events.of("memset"), _MEMSET, table[name_codes])


class _Columns:
    """Makes `piece` tables from codes, taking phase, layer, operator and name from the event."""

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
    ) -> pa.Table:
        links = self.links
        known = event >= 0

        def of_event(column: tuple[np.ndarray, list[str]]) -> pa.Array:
            codes, values = column
            if not len(codes):
                return dictionary(np.full(len(event), -1), values)
            return dictionary(np.where(known, codes[event], -1), values)

        phase = np.where(known, links.phase[event], PHASES.index("other"))
        return pa.Table.from_arrays(
            [
                pa.array(np.full(len(event), self.rank, dtype=np.int32)),
                pa.array(window.astype(np.int32)),
                dictionary(cause, causes),
                nullable(event),
                dictionary(phase, PHASES),
                of_event(links.layers),
                of_event(links.op_names),
                of_event(links.events.names),
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
    links: Links, cause: np.ndarray, time_ns: np.ndarray
) -> dict[str, tuple[float, float]]:
    compute = float(time_ns.sum())
    unmodelled = float(time_ns[cause == COMPUTE_CAUSES.index("compute.unmodelled")].sum())
    math = float(
        time_ns[
            np.isin(
                cause,
                [COMPUTE_CAUSES.index(f"compute.{c}") for c in ("ideal", "roofline", "efficiency")],
            )
        ].sum()
    )
    no_peak = float(time_ns[cause == COMPUTE_CAUSES.index("compute.no_peak")].sum())
    events = float(len(links.events))
    layered = matching(*links.layers, lambda _: True) if len(links.layers[1]) else np.zeros(0)
    return {
        "compute_modelled_ratio": (compute - unmodelled, compute),
        "math_with_peak_ratio": (math, math + no_peak),
        "launch_known_ratio": (float(links.has_launch.sum()), events),
        "operator_known_ratio": (float((links.op_row >= 0).sum()), events),
        "layer_known_ratio": (float(layered.sum()), events),
    }
