"""Join each device event to its launch, operator, annotation, layer, phase and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import (
    dictionary,
    first_with,
    ints,
    matching,
    nullable,
    pick,
    strings,
)
from chopper.analyzers.trace.phases import (
    BACKWARD,
    Phases,
    backward_thread,
    main_thread,
    node_makers,
    phases_outside_training,
    span_layers,
    span_phases,
)
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans
from chopper.analyzers.trace.windows import Steps, Windows
from chopper.tables import TABLES

WORK_CLASSES = ["compute", "communication", "copy"]
COMPUTE, COMMUNICATION, COPY = range(3)
_LAUNCH_TOLERANCE_NS = 100_000
"""A kernel may seem to start this long before its launch when the clocks are fitted badly."""


@dataclass(frozen=True)
class Links:
    """The joined device events of one rank as arrays, one element per event.

    Attributes:
        host, events: the rank's spans and device events.
        launch_row: launching call, a row of `host_span`; -1 for none.
        op_row: innermost operator around the launch; -1 for none.
        steps: that the trace covers.
        step: index of its step, -1 before the first, ``len(steps)`` after the last.
        work_class: code into WORK_CLASSES.
        phase: code into ``phases``.
        layers: layer as codes (-1 for none) into names.
        sharding_copy: launched by a copying operator inside hooks of data parallelism.
        span_phase, span_layer: of each host span, -1 where nothing tells.
    """

    host: HostSpans
    events: DeviceEvents
    launch_row: np.ndarray
    op_row: np.ndarray
    steps: Steps
    step: np.ndarray
    work_class: np.ndarray
    phase: np.ndarray
    phases: list[str]
    layers: tuple[np.ndarray, list[str]]
    sharding_copy: np.ndarray
    span_phase: np.ndarray
    span_layer: np.ndarray

    @cached_property
    def has_launch(self) -> np.ndarray:
        """Mask of the events whose launch is in the trace."""
        return self.launch_row >= 0

    @property
    def span(self) -> np.ndarray:
        """Launch of each event, or else its operator; -1 for neither."""
        return _span_of(self.host, self.launch_row, self.op_row)

    @cached_property
    def launch_ns(self) -> np.ndarray:
        """Start of the launch, or of the event itself."""
        return pick(self.host.start_ns, self.launch_row, self.events.start_ns)

    @cached_property
    def returned_ns(self) -> np.ndarray:
        """End of the launching call, in ns; a host operator is its own launch and takes no call."""
        is_host_work = self.events.of("host_op", "host_collective")
        rows = np.where(is_host_work, -1, self.launch_row)
        start_ns = pick(self.host.start_ns, rows, self.events.start_ns)
        return start_ns + pick(self.host.dur_ns, rows, 0)

    @cached_property
    def thread(self) -> np.ndarray:
        """Launching thread."""
        return pick(self.host.nesting.thread, self.launch_row)

    @cached_property
    def lost_launches(self) -> np.ndarray:
        """Calls that launched a kernel of which the trace has no record, in order of time."""
        calls, has_kernel = kernel_launches(self.host, self.events)
        lost: np.ndarray = calls[~has_kernel]
        return lost

    @property
    def program(self) -> Phases:
        """The phases of the program at any moment."""
        return Phases(self.host, self.steps.start_ns, self.span_phase)

    @cached_property
    def outside_training(self) -> np.ndarray:
        """Mask of the events whose work does not belong to a training step."""
        present = {self.phases[code] for code in np.unique(self.phase)}
        outside = phases_outside_training(present)
        return np.array([name in outside for name in self.phases])[self.phase]

    @cached_property
    def op_names(self) -> tuple[np.ndarray, list[str]]:
        """Name of the operator of each event as codes into names."""
        return self.host.names_of(self.op_row)

    @cached_property
    def main_thread(self) -> int:
        """Thread number on which the program runs."""
        return main_thread(self.host, self.span_phase == BACKWARD)

    @cached_property
    def backward_thread(self) -> int:
        """Thread number of the autograd engine, -1 where backward runs on the main thread."""
        return backward_thread(self.host, self.main_thread)


def link(
    host: HostSpans,
    events: DeviceEvents,
    launch_row: np.ndarray,
    op_row: np.ndarray,
    steps: Steps,
    step: np.ndarray,
    collectives: pa.Table,
) -> tuple[Links, int]:
    """Join device events to what the host did. HOST_SPAN, DEVICE_EVENT, COLLECTIVE -> Links.

    And count the operators of a backward that is differentiated itself.
    """
    makers = node_makers(host)
    phases, span_phase, double_backward_count = span_phases(host, makers)
    span_layer, layer_names = span_layers(host, makers)
    launch_ns = pick(host.start_ns, launch_row, events.start_ns)
    program = Phases(host, steps.start_ns, span_phase)
    span = _span_of(host, launch_row, op_row)
    links = Links(
        host,
        events,
        launch_row,
        op_row,
        steps,
        step,
        _work_class(events, collectives),
        program.of_events(span, launch_ns, events.of("host_collective")),
        phases,
        (pick(span_layer, span), layer_names),
        _sharding_copy(host, op_row),
        span_phase,
        span_layer,
    )
    return links, double_backward_count


def _span_of(host: HostSpans, launch_row: np.ndarray, op_row: np.ndarray) -> np.ndarray:
    """Return the launch of each event, unless its operator is known and is not around that."""
    both = np.flatnonzero((launch_row >= 0) & (op_row >= 0))
    launch, operator = launch_row[both], op_row[both]
    around = host.nesting.thread[launch] == host.nesting.thread[operator]
    around &= host.start_ns[operator] <= host.start_ns[launch]
    around &= host.ends(operator) >= host.start_ns[launch]
    span = np.where(launch_row >= 0, launch_row, op_row)
    span[both] = np.where(around, launch, operator)
    return span


def annotation_rows(links: Links) -> np.ndarray:
    """Return the innermost annotation of the user's around each launch, -1 for none."""
    host = links.host
    is_step_marker = host.named(lambda n: n.startswith(("ProfilerStep", "chopper::")))
    return pick(host.nesting.nearest(host.of("annotation") & ~is_step_marker), links.span)


def event_link_table(
    links: Links,
    annotation_row: np.ndarray,
    windows: Windows,
    of_pipeline: Mapping[str, pa.Array],
) -> pa.Table:
    """Return the declared `event_link` table, whose steps are windows."""
    steps = len(links.steps)
    step = np.where((links.step < 0) | ((links.step >= steps) & (steps > 0)), -1, links.step)
    return TABLES["event_link"].of(
        {
            "launch_row": nullable(links.launch_row),
            "op_row": nullable(links.op_row),
            "op": dictionary(*links.op_names),
            "annotation": dictionary(*links.host.names_of(annotation_row)),
            "layer": dictionary(*links.layers),
            "phase": dictionary(links.phase, links.phases),
            "step_index": nullable(windows.of_steps(step)),
            "work_class": dictionary(links.work_class, WORK_CLASSES),
            **of_pipeline,
        }
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
    regions = host.named(names.is_sharding_region)
    if not regions.any():
        return np.zeros(len(op_row), dtype=bool)
    copying = host.named(names.is_sharding_copy) & host.nesting.within(regions)
    return np.append(copying, False)[op_row]


def launches_of(host: HostSpans, events: DeviceEvents) -> np.ndarray:
    """Row of the launching call: same correlation id, the latest one before the event."""
    correlation = ints(host.table, "correlation_id")
    # Id 0 is what recorders write where they know none.
    calls = np.flatnonzero((correlation > 0) & host.of("runtime", "driver"))
    if not len(calls):
        return np.full(len(events), -1, dtype=np.int64)
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
    return np.where(has & causal, row, -1)


def kernel_launches(host: HostSpans, events: DeviceEvents) -> tuple[np.ndarray, np.ndarray]:
    """Return the calls that launch kernels, and a mask of those with an event in the trace.

    Not of what is captured into a graph, which runs when that is launched. A call of the runtime
    and that of the driver within it share an id, and count once. Without any device event, calls
    without an id count too.
    """
    correlation = ints(host.table, "correlation_id")
    launches = host.of("runtime", "driver") & host.named(names.is_kernel_launch)
    calls = np.flatnonzero(launches & ((correlation > 0) | (len(events) == 0)))
    begun, ended = (
        np.searchsorted(host.start_ns[host.named(name)], host.start_ns[calls], side="right")
        for name in (names.is_capture_begin, names.is_capture_end)
    )
    calls = calls[begun <= ended]
    ids, first = np.unique(correlation[calls], return_index=True)
    calls = np.sort(np.append(calls[first[ids > 0]], calls[correlation[calls] <= 0]))
    return calls, np.isin(correlation[calls], ints(events.table, "correlation_id"))


def latest_before(
    keys: np.ndarray, times: np.ndarray, wanted: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """For each wanted key, the last position whose (key, time) is at or before (wanted, at).

    Keys are sorted, and the times of each.
    """
    asks = np.repeat([False, True], [len(keys), len(wanted)])
    order = np.lexsort((asks, np.concatenate([times, at]), np.concatenate([keys, wanted])))
    asking = asks[order]
    latest = np.maximum.accumulate(np.where(asking, -1, order))
    position = np.empty(len(wanted), dtype=np.int64)
    position[order[asking] - len(keys)] = latest[asking]
    return position


def operators_of(host: HostSpans, events: DeviceEvents, launch_row: np.ndarray) -> np.ndarray:
    """Innermost operator around each launch; by the recorded id where no launch is inside one."""
    operators = host.of("cpu_op") & ~host.named(lambda n: n.startswith("chopper::"))
    op_row = pick(host.nesting.nearest(operators), launch_row)
    ids = ints(host.table, "external_id")
    # Some recorders write the operator's id beside the launch only.
    external = ints(events.table, "external_id")
    external = np.where(external > 0, external, pick(ids, launch_row))
    # Where runtime rows count their own ids as external ids, the numbers mean no operator.
    numbers_itself = external == ints(events.table, "correlation_id")
    lacking = np.flatnonzero((op_row < 0) & (external > 0) & ~numbers_itself)
    if len(lacking):
        rows = np.flatnonzero(operators & (ids > 0))
        candidates = pick(rows, first_with(ids[rows], external[lacking]))
        start_ns = events.start_ns[lacking] + _LAUNCH_TOLERANCE_NS
        op_row[lacking] = np.where(pick(host.start_ns, candidates, 0) <= start_ns, candidates, -1)
    return op_row
