"""One rank of a run, its device events joined to the host: what every later stage is fed from.

Without a device, host operators become device events (kind `host_op`), spans of a CPU communication
backend become `host_collective`. An operator counts when it, with what it calls, is one piece of
work: a matrix product, convolution or attention with all its helpers, or an operator that contains
no other working one (views and allocations do not work). A `linear` that calls `addmm` is dispatch
around the `addmm`; a `sort` that calls `copy_` and then sorts by itself is one piece again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import Communication, describe
from chopper.analyzers.trace.columns import dictionary, ints, pick, row_set, strings
from chopper.analyzers.trace.graphs import GraphEvents, replays_of
from chopper.analyzers.trace.join import (
    Links,
    annotation_rows,
    event_link_table,
    kernel_launches,
    launches_of,
    link,
    operators_of,
)
from chopper.analyzers.trace.pipeline_actions import no_columns, pipeline_actions, with_phases
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans, RankTables
from chopper.analyzers.trace.windows import (
    Windows,
    cut_windows,
    lost_steps,
    step_of_events,
    traced_steps,
)
from chopper.analyzers.work import MATH_FAMILIES, family
from chopper.arrow import with_column
from chopper.hardware.ceilings import Ceiling, Ceilings, Link
from chopper.tables import TABLES


@dataclass(frozen=True)
class JoinedRank:
    """One rank with its device events joined to the host.

    Attributes:
        inputs: what was joined; steps that hold no work of their own are none.
        host_only: host times stand in for a device that was not recorded.
        device_event: as recorded, or derived from host spans on a host-only trace.
        event_link: the declared table, row by row with ``device_event``.
        event_step, sharding_copy, span_phase, span_layer: as in :class:`join.Links`.
        double_backward_count: operators of a backward that is differentiated itself.
        of_graphs: how many events graphs ran; None without a device.
    """

    inputs: RankTables
    host_only: bool
    device_event: pa.Table
    event_link: pa.Table
    event_step: np.ndarray
    sharding_copy: np.ndarray
    span_phase: np.ndarray
    span_layer: np.ndarray
    double_backward_count: int
    windows: Windows
    communication: Communication
    of_graphs: GraphEvents | None = None

    def stored(self) -> JoinedRank:
        """Return it without the tables that it was joined from, which ``restored`` puts back."""
        names = (field.name for field in fields(self.inputs) if field.name != "step")
        held = (name for name in names if isinstance(getattr(self.inputs, name), pa.Table))
        without: dict[str, Any] = dict.fromkeys(held)
        derived = self.device_event if self.host_only else self.device_event.slice(0, 0)
        return replace(self, inputs=replace(self.inputs, **without), device_event=derived)

    def restored(self, inputs: RankTables) -> JoinedRank:
        """Reverse ``stored``, given the input tables."""
        events = self.device_event if self.host_only else inputs.device_event
        return replace(self, inputs=replace(inputs, step=self.inputs.step), device_event=events)

    @property
    def host_span(self) -> pa.Table:
        """Spans of the host."""
        return self.inputs.host_span

    @property
    def step(self) -> pa.Table:
        """Steps, on the host."""
        return self.inputs.step

    @property
    def ceiling(self) -> Ceiling | None:
        """Peaks; None if host times replace those of a listed device that was not recorded."""
        return None if self.host_only and self.inputs.devices_listed else self.inputs.ceiling

    @property
    def link(self) -> Link:
        """The link between the ranks."""
        return (self.inputs.ceilings or Ceilings(None, None)).link

    def links(self) -> Links:
        """Return the joined events as arrays, which last as long as a caller keeps them."""
        held: Links | None = self.__dict__.get("_links", lambda: None)()
        if held is None:
            held = self._made_links()
            object.__setattr__(self, "_links", weakref.ref(held))
        return held

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _made_links(self) -> Links:
        table = self.event_link
        return Links(
            HostSpans(self.inputs.host_span),
            DeviceEvents(self.device_event),
            ints(table, "launch_row"),
            ints(table, "op_row"),
            traced_steps(self.inputs.step),
            self.event_step.astype(np.int64),
            strings(table, "work_class")[0],
            *strings(table, "phase"),
            strings(table, "layer"),
            self.sharding_copy,
            self.span_phase,
            self.span_layer,
        )


def _recorded_ns(host: HostSpans, events: DeviceEvents) -> tuple[int, int] | None:
    """Return the start of the first event of host or device, and the end of the last.

    What ends the trace is none of the program's.
    """
    timed = [table for table in (host, events) if len(table)]
    if not timed:
        return None
    ends = [int(t.end_ns.max()) for t in timed]
    ending = host.start_ns[host.named(names.is_end_of_trace)]
    if len(ending):
        ends[0] = min(ends[0], int(ending[-1]))
    return min(int(t.start_ns[0]) for t in timed), max(ends)


def join_rank(inputs: RankTables) -> JoinedRank:
    """Join one rank's device events. HOST_SPAN, DEVICE_EVENT, STEP, COLLECTIVE -> JoinedRank."""
    host = HostSpans(inputs.host_span)
    events = DeviceEvents(inputs.device_event)
    calls, has_kernel = kernel_launches(host, events)
    # Launches without any event are of a device that was not recorded.
    host_only = not len(events) and not len(calls)
    replays = None
    if host_only:
        device_event, launch_row = host_as_device(host)
        events, op_row = DeviceEvents(device_event), launch_row
    else:
        launch_row = launches_of(host, events)
        replays = replays_of(host, events, launch_row)
        op_row = operators_of(host, events, np.where(replays.call >= 0, replays.call, launch_row))
    steps = traced_steps(inputs.step)
    launch_ns = pick(host.start_ns, launch_row, events.start_ns)
    step = step_of_events(events, steps, launch_ns, launch_row >= 0)
    span = inputs.span
    lost = lost_steps(steps, host.start_ns[calls], has_kernel)
    if span is not None:
        # Of later steps, a stretch has launches without their kernels.
        lost &= (steps.start_ns >= span.own_ns[0]) & (steps.start_ns < span.own_ns[1])
    windows = cut_windows(
        events,
        steps,
        step,
        None if span is None else span.device_begin_ns,
        lost,
        _recorded_ns(host, events) if len(events) or len(calls) else None,
    )
    if len(steps) and len(windows) and windows.numbers[0] < 0:
        # No step holds work of its own: the trace is one window, and its work belongs to that.
        untraced = pa.array(np.zeros(inputs.step.num_rows, dtype=bool))
        inputs = replace(inputs, step=with_column(inputs.step, "traced", untraced))
        steps, step = traced_steps(inputs.step), np.zeros(len(events), dtype=np.int64)
    if span is not None:
        windows = windows.of_span(steps, span)
    links, double_backward_count = link(
        host, events, launch_row, op_row, steps, step, inputs.collective
    )
    annotation_row = annotation_rows(links)
    communication = describe(links, annotation_row, inputs)
    actions = pipeline_actions(links, communication, inputs)
    columns = no_columns(len(events)) if actions is None else actions.columns()
    if actions is not None and not len(host):
        links = with_phases(links, actions)
    return JoinedRank(
        inputs=inputs,
        host_only=host_only,
        device_event=events.table,
        event_link=event_link_table(links, annotation_row, windows, columns),
        event_step=step.astype(np.int32),
        sharding_copy=links.sharding_copy,
        span_phase=links.span_phase,
        span_layer=links.span_layer,
        double_backward_count=double_backward_count,
        windows=windows,
        communication=communication,
        of_graphs=None if replays is None else replays.counts,
    )


HOST_KINDS = ("host_op", "host_collective")
_OWN_NS = (50_000, 200_000)
_WRAPPERS = 10
"""An operator works itself from this multiple of what operators take around those they call, within
these bounds."""


def host_as_device(host: HostSpans) -> tuple[pa.Table, np.ndarray]:
    """Derive device events from host spans. HOST_SPAN -> DEVICE_EVENT.

    Returns:
        The table, sorted by start then longest first, and the host row of each event.
    """
    declared = TABLES["device_event"]
    if not len(host):
        return declared.empty(), np.zeros(0, np.int64)
    collective = _collective_spans(host)
    rows = np.flatnonzero(_working_operators(host, collective) | collective)
    start = host.nesting.start_ns[rows]
    end = host.nesting.end_ns[rows]
    order = np.lexsort((-(end - start), start))
    rows, start, end = rows[order], start[order], end[order]
    count = len(rows)
    name_codes, name_values = host.names
    columns = {
        "start_ns": pa.array(start),
        "dur_ns": pa.array(end - start),
        "device_id": pa.array(np.full(count, -1, dtype=np.int32)),
        "stream_id": pa.array(host.nesting.thread_keys[host.nesting.thread[rows], 1]),
        "kind": dictionary(collective[rows].astype(np.int64), HOST_KINDS),
        "name": dictionary(name_codes[rows], name_values),
    }
    arrays = [columns.get(f.name, pa.nulls(count, f.type)) for f in declared.arrow]
    return pa.Table.from_arrays(arrays, schema=declared.arrow), rows


def _collective_spans(host: HostSpans) -> np.ndarray:
    """Outermost spans of a CPU backend's collectives, whichever category recorded them."""
    marked = host.named(names.is_collective_span) & host.of("annotation", "cpu_op")
    return marked & (host.nesting.topmost(marked) == np.arange(len(host)))


def _working_operators(host: HostSpans, collective: np.ndarray) -> np.ndarray:
    """Mask of the operators that are one piece of work each; they do not nest."""
    nesting = host.nesting
    lasting = nesting.end_ns > nesting.start_ns
    operators = host.of("cpu_op") & lasting
    for no_work in (names.is_metadata_operator, names.is_wrapper, names.is_host_communication):
        operators &= ~host.named(no_work)
    # Own Functions and compiled graphs have no operators of their own: they are the work.
    any_operator = host.of("cpu_op") & ~host.named(lambda n: n.startswith("chopper::"))
    leaves = host.of("cpu_op", "annotation") & host.named(names.is_leaf_work) & lasting
    operators |= leaves & ~nesting.containing(any_operator)
    # Work of data loading, what a backend computes inside its collective, and the operators that
    # torch.compile runs on tensors without data, are not the model's.
    excluded = host.named(names.is_data_loading) | host.named(names.is_compilation) | collective
    operators &= ~nesting.within(excluded)
    # A matrix product, convolution or attention is one piece whatever it calls to get ready.
    math = operators & host.named(lambda n: family(n) in MATH_FAMILIES)
    math &= ~nesting.containing(math)
    works_itself = (
        _working_themselves(host, operators) & ~nesting.containing(math) & ~nesting.within(math)
    )
    math |= works_itself & (nesting.topmost(works_itself) == np.arange(len(host)))
    remaining = operators & ~nesting.within(math) & ~nesting.containing(math)
    # Filling and copying inside another operator is part of its work, unless it does nothing else.
    helpers = host.named(names.is_helper_operator)
    remaining &= ~nesting.containing(remaining & ~helpers)
    composites = host.named(names.is_copying_composite)
    childless = ~row_set(nesting.parent, len(host))
    remaining &= ~(composites & (childless | nesting.containing(remaining & helpers)))
    return math | (remaining & (nesting.topmost(remaining) == np.arange(len(host))))


def _working_themselves(host: HostSpans, operators: np.ndarray) -> np.ndarray:
    """Mask of the operators that take most of their time outside of what they call.

    An operator is told by its name: single calls of others may have lost the core meanwhile.
    """
    nesting = host.nesting
    dur_ns = nesting.end_ns - nesting.start_ns
    inner = nesting.parent >= 0
    called_ns = np.bincount(nesting.parent[inner], dur_ns[inner], len(host))
    own_ns = dur_ns - called_ns
    callers = (
        operators & row_set(nesting.parent, len(host)) & ~nesting.containing(host.of("python"))
    )
    if not callers.any():
        return callers
    least_ns = np.clip(_WRAPPERS * np.median(own_ns[callers]), *_OWN_NS)
    working = callers & (own_ns > np.maximum(least_ns, dur_ns / 2))
    codes, values = host.names
    all_calls, so_many = (np.bincount(codes[m], minlength=len(values)) for m in (callers, working))
    return working & (2 * so_many >= all_calls)[codes]
