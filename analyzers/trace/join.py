"""Join each device event to its launch, operator, annotation, layer, phase and step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.backward import backward_thread, main_thread, node_makers
from chopper.analyzers.trace.columns import dictionary, ints, matching, nullable, strings
from chopper.analyzers.trace.layers import span_layers
from chopper.analyzers.trace.phases import (
    BACKWARD,
    Phases,
    phases_outside_training,
    span_phases,
)
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans
from chopper.analyzers.trace.windows import Steps, Windows, step_of_events
from chopper.tables import TABLES

WORK_CLASSES = ["compute", "communication", "copy"]
COMPUTE, COMMUNICATION, COPY = range(3)
_LAUNCH_TOLERANCE_NS = 100_000
"""A kernel may seem to start this long before its launch when the clocks are fitted badly."""


@dataclass(frozen=True)
class Launches:
    """Launch and operator of each device event: rows of `host_span`, -1 where there is none.

    Attributes:
        launch_row: launching call.
        op_row: innermost operator around the launch.
    """

    launch_row: np.ndarray
    op_row: np.ndarray

    @property
    def has_launch(self) -> np.ndarray:
        """Mask of the events whose launch is in the trace."""
        known: np.ndarray = self.launch_row >= 0
        return known

    @property
    def span(self) -> np.ndarray:
        """Launch of each event, or else its operator."""
        return np.where(self.launch_row >= 0, self.launch_row, self.op_row)

    def launch_ns(self, host: HostSpans, events: DeviceEvents) -> np.ndarray:
        """Return the start of each launch, or of the event itself where there is none."""
        if not len(host):
            return events.start_ns.copy()
        return np.where(self.has_launch, host.start_ns[self.launch_row], events.start_ns)


@dataclass(frozen=True)
class Links:
    """The joined device events of one rank as arrays, one element per event.

    Attributes:
        host, events: the rank's spans and device events.
        steps: that the trace covers.
        launches: launch and operator of each event.
        step: index of its step, -1 before the first, ``len(steps)`` after the last.
        work_class: code into WORK_CLASSES.
        phase: code into ``phases``.
        layer: code into ``layer_names``, -1 for none.
        sharding_copy: launched by a copying operator inside hooks of data parallelism.
        span_phase: phase of each host span, -1 where nothing tells.
        span_layer: layer of each host span, -1 for none.
    """

    host: HostSpans
    events: DeviceEvents
    steps: Steps
    launches: Launches
    step: np.ndarray
    work_class: np.ndarray
    phase: np.ndarray
    phases: list[str]
    layer: np.ndarray
    layer_names: list[str]
    sharding_copy: np.ndarray
    span_phase: np.ndarray
    span_layer: np.ndarray

    @property
    def launch_row(self) -> np.ndarray:
        """Launching call of each event, -1 for none."""
        return self.launches.launch_row

    @property
    def op_row(self) -> np.ndarray:
        """Innermost operator around the launch of each event, -1 for none."""
        return self.launches.op_row

    @cached_property
    def has_launch(self) -> np.ndarray:
        """Mask of the events whose launch is in the trace."""
        return self.launches.has_launch

    @cached_property
    def launch_ns(self) -> np.ndarray:
        """Start of the launch, or of the event itself."""
        return self.launches.launch_ns(self.host, self.events)

    @cached_property
    def returned_ns(self) -> np.ndarray:
        """End of the launching call, in ns; a host operator is its own launch and takes no call."""
        if not len(self.host):
            return self.events.start_ns.copy()
        own = self.events.of("host_op", "host_collective")
        return np.where(
            self.has_launch & ~own, self.host.ends(self.launch_row), self.events.start_ns
        )

    @cached_property
    def thread(self) -> np.ndarray:
        """Launching thread."""
        if not len(self.host):
            return np.full(len(self.events), -1, dtype=np.int64)
        return np.where(self.has_launch, self.host.nesting.thread[self.launch_row], -1)

    @property
    def program(self) -> Phases:
        """The phases of the program at any moment."""
        return Phases(self.host, self.steps.start_ns, self.phases, self.span_phase)

    @cached_property
    def outside_training(self) -> np.ndarray:
        """Mask of the events whose work is no part of a training step."""
        present = {self.phases[code] for code in np.unique(self.phase)}
        outside = phases_outside_training(present)
        return np.array([name in outside for name in self.phases])[self.phase]

    @property
    def layers(self) -> tuple[np.ndarray, list[str]]:
        """Layer of each event as codes into names."""
        return self.layer, self.layer_names

    @cached_property
    def op_names(self) -> tuple[np.ndarray, list[str]]:
        """Name of the operator of each event as codes into names."""
        if not len(self.host):
            return np.full(len(self.events), -1, dtype=np.int64), []
        codes, values = self.host.names
        return np.where(self.op_row >= 0, codes[self.op_row], -1), values

    @cached_property
    def main_thread(self) -> int:
        """Thread number on which the program runs."""
        return main_thread(self.host, self.span_phase == BACKWARD)

    @cached_property
    def backward_thread(self) -> int:
        """Thread number of the autograd engine, -1 where backward runs on the main thread."""
        return backward_thread(self.host, self.main_thread)


def launches_of(
    host: HostSpans, events: DeviceEvents, host_rows: np.ndarray | None = None
) -> Launches:
    """Find the launch and the operator of each device event. HOST_SPAN, DEVICE_EVENT -> rows.

    Args:
        host: spans of the rank.
        events: device events of the rank.
        host_rows: on a host-only trace, the span that each event was made from.
    """
    if host_rows is not None:
        return Launches(host_rows, host_rows)
    launch = _launches(host, events)
    return Launches(launch, _operators(host, events, launch))


def link(
    host: HostSpans,
    events: DeviceEvents,
    launches: Launches,
    steps: Steps,
    collectives: pa.Table,
) -> tuple[Links, int]:
    """Join device events to what the host did. HOST_SPAN, DEVICE_EVENT, COLLECTIVE -> Links.

    Returns:
        The joined events, and how many operators belong to a backward that is differentiated.
    """
    makers = node_makers(host)
    phases = span_phases(host, makers)
    span_layer, layer_names = span_layers(host, makers)
    launch_ns = launches.launch_ns(host, events)
    program = Phases(host, steps.start_ns, phases.names, phases.of_span)
    span = launches.span
    layer = np.full(len(events), -1, dtype=np.int64)
    if len(host):
        layer = np.where(span >= 0, span_layer[span], -1)
    links = Links(
        host,
        events,
        steps,
        launches,
        step_of_events(events, steps, launch_ns, launches.has_launch),
        _work_class(events, collectives),
        program.of_events(span, launch_ns, events.of("host_collective")),
        phases.names,
        layer,
        layer_names,
        _sharding_copy(host, launches.op_row),
        phases.of_span,
        span_layer,
    )
    return links, phases.double_backward_count


def annotation_rows(host: HostSpans, launches: Launches) -> np.ndarray:
    """Return the innermost annotation of the user's around each launch, -1 for none."""
    if not len(host):
        return np.full(len(launches.launch_row), -1, dtype=np.int64)
    users = host.of("annotation") & ~host.named(
        lambda n: n.startswith(("ProfilerStep", "chopper::"))
    )
    nearest = host.nesting.nearest(users)
    span = launches.span
    return np.where(span >= 0, nearest[span], -1)


def event_link_table(links: Links, annotation_row: np.ndarray, windows: Windows) -> pa.Table:
    """Return the declared `event_link` table, whose steps are windows.

    Args:
        links: the joined events.
        annotation_row: of each event, from :func:`annotation_rows`.
        windows: of the rank.
    """
    steps = len(links.steps)
    step = np.where((links.step < 0) | ((links.step >= steps) & (steps > 0)), -1, links.step)
    codes, values = links.host.names
    marks = annotation_row
    if len(links.host):
        marks = np.where(annotation_row >= 0, codes[annotation_row], -1)
    return pa.Table.from_arrays(
        [
            nullable(links.launch_row),
            nullable(links.op_row),
            dictionary(*links.op_names),
            dictionary(marks, values if len(links.host) else []),
            dictionary(*links.layers),
            dictionary(links.phase, links.phases),
            nullable(windows.of_steps(step)).cast(pa.int32()),
            dictionary(links.work_class, WORK_CLASSES),
        ],
        schema=TABLES["event_link"].arrow,
    )


def _work_class(events: DeviceEvents, collectives: pa.Table) -> np.ndarray:
    """Return what level 1 sees of each event: compute, communication or copy."""
    source, sources = strings(collectives, "source")
    rows = ints(collectives, "row")[matching(source, sources, lambda s: s == "device_event")]
    classes = np.full(len(events), COMPUTE, dtype=np.int64)
    classes[events.of("memcpy", "memset") | events.named(names.is_copy_kernel)] = COPY
    communicates = events.named(names.is_communication) & ~events.of("memcpy", "memset")
    communicates[rows] = ~events.of("memset")[rows]
    communicates |= events.of("host_collective")
    classes[communicates] = COMMUNICATION
    return classes


def _sharding_copy(host: HostSpans, op_row: np.ndarray) -> np.ndarray:
    """Return a mask of the events whose operator copies inside hooks of data parallelism."""
    copies = np.zeros(len(op_row), dtype=bool)
    regions = host.named(names.is_sharding_region) if len(host) else copies
    if not regions.any():
        return copies
    copying = host.named(names.is_sharding_copy) & host.nesting.within(regions)
    has = op_row >= 0
    copies[has] = copying[op_row[has]]
    return copies


def _launches(host: HostSpans, events: DeviceEvents) -> np.ndarray:
    """Row of the launching call: same correlation id, the latest one before the event."""
    found = np.full(len(events), -1, dtype=np.int64)
    if not len(host) or not len(events):
        return found
    correlation = ints(host.table, "correlation_id")
    # Id 0 is what recorders write where they know none.
    calls = np.flatnonzero((correlation > 0) & host.of("runtime", "driver"))
    if not len(calls):
        return found
    # Sorted by id, then time (rows are in time order already, the sort is stable).
    calls = calls[np.argsort(correlation[calls], kind="stable")]
    keys = correlation[calls]
    wanted = ints(events.table, "correlation_id")
    low = np.searchsorted(keys, wanted)
    pick = np.minimum(low, len(keys) - 1)
    has = (keys[pick] == wanted) & (wanted > 0)
    again = np.append(keys[1:] == keys[:-1], False)
    reused = np.flatnonzero(has & again[pick])
    if len(reused):
        pick[reused] = np.maximum(
            latest_before(keys, host.start_ns[calls], wanted[reused], events.start_ns[reused]),
            low[reused],
        )
    row = calls[pick]
    causal = host.start_ns[row] <= events.start_ns + _LAUNCH_TOLERANCE_NS
    ok = has & causal
    found[ok] = row[ok]
    return found


def latest_before(
    keys: np.ndarray, times: np.ndarray, wanted: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """For each wanted key, the last position whose (key, time) is at or before (wanted, at).

    Args:
        keys, times: sorted by key, then time.
    """
    merged_key = np.concatenate([keys, wanted])
    merged_time = np.concatenate([times, at])
    asks = np.concatenate([np.zeros(len(keys), np.int8), np.ones(len(wanted), np.int8)])
    order = np.lexsort((asks, merged_time, merged_key))
    position = np.where(asks[order] == 0, order, -1)
    latest = np.maximum.accumulate(position)
    found = np.empty(len(wanted), dtype=np.int64)
    asking = asks[order] == 1
    found[order[asking] - len(keys)] = latest[asking]
    return found


def _operators(host: HostSpans, events: DeviceEvents, launch: np.ndarray) -> np.ndarray:
    """Innermost operator around each launch; by the recorded id where there is no launch."""
    found = np.full(len(events), -1, dtype=np.int64)
    if not len(host):
        return found
    operators = host.of("cpu_op") & ~host.named(lambda n: n.startswith("chopper::"))
    has = launch >= 0
    found[has] = host.nesting.nearest(operators)[launch[has]]
    external = ints(events.table, "external_id")
    open_ = np.flatnonzero(~has & (external > 0))
    # Where runtime rows count their own ids as external ids, the numbers mean no operator.
    correlation = ints(events.table, "correlation_id")
    open_ = open_[external[open_] != correlation[open_]]
    if len(open_):
        ids = ints(host.table, "external_id")
        rows = np.flatnonzero(operators & (ids > 0))
        rows = rows[np.argsort(ids[rows], kind="stable")]
        at = np.searchsorted(ids[rows], external[open_])
        safe = np.minimum(at, max(len(rows) - 1, 0))
        hit = (at < len(rows)) & (ids[rows[safe]] == external[open_]) if len(rows) else None
        if hit is not None:
            found[open_[hit]] = rows[safe[hit]]
    return found
