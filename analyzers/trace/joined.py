"""One rank of a run, its device events joined to the host: what every later stage is fed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.collectives import Communication, describe
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.host_device import host_as_device
from chopper.analyzers.trace.join import (
    Links,
    annotation_rows,
    event_link_table,
    launch_times,
    launches_of,
    link,
    operators_of,
)
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans
from chopper.analyzers.trace.windows import (
    Windows,
    cut_windows,
    step_of_events,
    traced_steps,
)
from chopper.hardware.ceilings import Ceiling, Ceilings


@dataclass(frozen=True)
class RankInput:
    """The input of an attribution: declared tables of one rank, and what is known of its device.

    Attributes:
        ceiling, ceilings: peaks that count, and all that are known: theoretical and measured.
        no_peak_remedy: what to do when there are none, for the message.
        devices_listed: the trace names devices, so that a lack of device events is a lack.
        world_size: ranks of the run, None when not known.
        process_groups: name → global ranks, as far as the trace lists them.
        recorded: chopper took the trace.
    """

    rank: int
    host_span: pa.Table
    device_event: pa.Table
    step: pa.Table
    collective: pa.Table
    ceiling: Ceiling | None
    no_peak_remedy: str
    devices_listed: bool
    world_size: int | None = None
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    device_clock: pa.Table | None = None
    device_limit: pa.Table | None = None
    kernel_counter: pa.Table | None = None
    core_wait: pa.Table | None = None
    synchronization: pa.Table | None = None
    recorded: bool = False
    ceilings: Ceilings | None = None


@dataclass(frozen=True)
class JoinedRank:
    """One rank with its device events joined to the host.

    Attributes:
        given: what was joined; steps that hold no work of their own are none.
        host_only: host times stand in for a device that was not recorded.
        device_event: as given, or derived from host spans on a host-only trace.
        event_link: the declared table, row by row with ``device_event``.
        event_step, sharding_copy, span_phase, span_layer: as in :class:`join.Links`.
        double_backward_count: operators of a backward that is differentiated itself.
    """

    given: RankInput
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

    @property
    def host_span(self) -> pa.Table:
        """Spans of the host."""
        return self.given.host_span

    @property
    def step(self) -> pa.Table:
        """Steps, on the host."""
        return self.given.step

    @property
    def ceiling(self) -> Ceiling | None:
        """Peaks, unless host times stand in for a device that was not recorded."""
        return None if self.host_only and self.given.devices_listed else self.given.ceiling

    def links(self) -> Links:
        """Return the joined events as arrays, which last as long as the caller keeps them."""
        table = self.event_link
        return Links(
            HostSpans(self.given.host_span),
            DeviceEvents(self.device_event),
            ints(table, "launch_row"),
            ints(table, "op_row"),
            traced_steps(self.given.step),
            self.event_step.astype(np.int64),
            strings(table, "work_class")[0],
            *strings(table, "phase"),
            strings(table, "layer"),
            self.sharding_copy,
            self.span_phase,
            self.span_layer,
        )


def join_rank(given: RankInput) -> JoinedRank:
    """Join one rank's device events. HOST_SPAN, DEVICE_EVENT, STEP, COLLECTIVE -> JoinedRank."""
    host = HostSpans(given.host_span)
    host_only = given.device_event.num_rows == 0
    if host_only:
        device_event, launch_row = host_as_device(host)
        events, op_row = DeviceEvents(device_event), launch_row
    else:
        events = DeviceEvents(given.device_event)
        launch_row = launches_of(host, events)
        op_row = operators_of(host, events, launch_row)
    steps = traced_steps(given.step)
    launch_ns = launch_times(host, events, launch_row)
    step = step_of_events(events, steps, launch_ns, launch_row >= 0)
    windows = cut_windows(events, steps, step)
    if len(steps) and len(windows) and windows.numbers[0] < 0:
        # No step holds work of its own: the trace is one window, and its work belongs to that.
        untraced = pa.array(np.zeros(given.step.num_rows, dtype=bool))
        at = given.step.schema.get_field_index("traced")
        given = replace(
            given, step=given.step.set_column(at, given.step.schema.field(at), untraced)
        )
        steps, step = traced_steps(given.step), np.zeros(len(events), dtype=np.int64)
    links, double_backward_count = link(
        host, events, launch_row, op_row, steps, step, given.collective
    )
    annotation_row = annotation_rows(links)
    return JoinedRank(
        given,
        host_only,
        events.table,
        event_link_table(links, annotation_row, windows),
        step.astype(np.int32),
        links.sharding_copy,
        links.span_phase,
        links.span_layer,
        double_backward_count,
        windows,
        describe(
            links,
            annotation_row,
            given.collective,
            given.rank,
            given.world_size,
            given.process_groups,
        ),
    )
