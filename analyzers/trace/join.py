"""Join each device event to its launch, operator, annotation, layer, phase and step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import dictionary, ints, matching, nullable, strings
from chopper.analyzers.trace.nesting import activity, innermost_at
from chopper.analyzers.trace.passes import passes
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans
from chopper.analyzers.trace.windows import Windows, holes
from chopper.tables import TABLES

PHASES = [
    "forward",
    "recompute",
    "backward",
    "optimizer",
    "data",
    "other",
    "between",
    "evaluation",
    "generation",
    "rollout",
    "inference",
    "checkpoint",
]
"""Phases that every run may have; those that a program names follow (`Links.phases`)."""
_FORWARD, _RECOMPUTE, _BACKWARD, _OPTIMIZER, _DATA, _OTHER, _BETWEEN = range(7)
_EVALUATION, _INFERENCE, _CHECKPOINT = map(PHASES.index, ("evaluation", "inference", "checkpoint"))
WORK_CLASSES = ["compute", "communication", "copy"]
COMPUTE, COMMUNICATION, COPY = range(3)
_LAUNCH_TOLERANCE_NS = 100_000
"""A kernel may seem to start this long before its launch when the clocks are fitted badly."""


@dataclass
class Links:
    """Per device event, in its order. Rows are -1 where there is none.

    Attributes:
        launch_row: launching call in `host_span`.
        launch_ns: its start; the event's own start where there is no launch.
        op_row: innermost operator around the launch.
        thread: thread number (of the host's nesting) that launched, -1 unknown.
        phase, work_class: codes into ``phases`` and WORK_CLASSES.
        layer: codes into ``layer_names``, -1 none.
        step: index into the steps, -1 before the first, ``steps`` after the last.
    """

    host: HostSpans
    events: DeviceEvents
    steps_start_ns: np.ndarray
    steps_end_ns: np.ndarray
    step_numbers: np.ndarray
    launch_row: np.ndarray
    op_row: np.ndarray
    collective_rows: np.ndarray

    def forget(self, *columns: str) -> None:
        """Let go of what was computed; it is computed again when asked for."""
        for column in columns:
            self.__dict__.pop(column, None)

    @cached_property
    def has_launch(self) -> np.ndarray:
        """Mask of the events whose launch is in the trace."""
        return self.launch_row >= 0

    @cached_property
    def launch_ns(self) -> np.ndarray:
        """Start of the launch, or of the event itself."""
        return (
            np.where(self.has_launch, self.host.start_ns[self.launch_row], self.events.start_ns)
            if len(self.host)
            else self.events.start_ns.copy()
        )

    @cached_property
    def returned_ns(self) -> np.ndarray:
        """When the launching call returned; a host operator is its own launch and takes no call."""
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

    @cached_property
    def work_class(self) -> np.ndarray:
        """What level 1 sees: compute, communication or copy."""
        events = self.events
        found = np.full(len(events), COMPUTE, dtype=np.int64)
        found[events.of("memcpy", "memset") | events.named(names.is_copy_kernel)] = COPY
        communicates = events.named(names.is_communication) & ~events.of("memcpy", "memset")
        communicates[self.collective_rows] = ~events.of("memset")[self.collective_rows]
        communicates |= events.of("host_collective")
        found[communicates] = COMMUNICATION
        return found

    @cached_property
    def phases(self) -> list[str]:
        """Names of all phases: PHASES, then those that only this program has."""
        marked = (names.program_phase_of(name) for name in self.host.names[1])
        return [*PHASES, *dict.fromkeys(n for n in marked if n is not None and n not in PHASES)]

    @cached_property
    def outside_training(self) -> np.ndarray:
        """Mask of the events whose work is no part of a training step."""
        present = {self.phases[code] for code in np.unique(self.phase)}
        outside = phases_outside_training(present)
        return np.array([name in outside for name in self.phases])[self.phase]

    @cached_property
    def span_phase(self) -> np.ndarray:
        """Phase of every host span by what encloses it; -1 where nothing tells."""
        host, nesting = self.host, self.host.nesting
        code_of = {name: code for code, name in enumerate(self.phases)}
        own = host.classified(lambda _, name: _phase_of(name, code_of))
        own[self._numbered_in_backward & ~self.double_backward] = _RECOMPUTE
        # What backward differentiates is forward wherever it ran: in a closure inside of the
        # optimizer's step, in a block that the program named, before the first module.
        forward = host.named(names.is_forward)
        nodes = self._differentiated
        enclosing = nesting.inherited(np.where(forward, -1, own))
        nodes = nodes[~np.isin(enclosing[nodes], (_RECOMPUTE, _BACKWARD))]
        own[nodes] = _FORWARD
        inside = np.zeros(len(host), dtype=bool)
        inside[nodes] = True
        # A checkpointed function runs its forward without gradients.
        unnamed = (own == _EVALUATION) | (own == _INFERENCE)
        own[unnamed & nesting.within(inside)] = -1
        undecided = forward & (enclosing >= _EVALUATION) & ~nesting.containing(inside)
        own[undecided] = -1
        return nesting.inherited(own)

    @cached_property
    def _numbered_in_backward(self) -> np.ndarray:
        """Operators within backward that took a sequence number: grad mode was on for them."""
        host = self.host
        found = host.where(
            lambda category, name: category == "cpu_op" and not names.is_backward(name)
        )
        found &= host.sequence_id >= 0
        found &= host.forward_tid <= 0
        if found.any():
            found &= host.nesting.within(host.named(names.is_backward))
        return found

    @cached_property
    def double_backward(self) -> np.ndarray:
        """Operators of a backward that records a graph of its own (``create_graph=True``).

        Within backward, grad mode is on where the forward is run again, and where the backward
        itself is to be differentiated. There, all operators of a node take sequence numbers; a
        node that runs the forward again computes its own gradient without any, or is named after
        checkpointing. Factory functions never take numbers.
        """
        host, nesting = self.host, self.host.nesting
        numbered = self._numbered_in_backward
        if not numbered.any():
            return numbered
        backward = host.named(names.is_backward)
        operator = host.of("cpu_op") & ~backward
        node = nesting.nearest(backward)
        above = nesting.nearest(operator)[nesting.parent]
        above[nesting.parent < 0] = -1
        top = (
            operator
            & (node >= 0)
            & ((above < 0) | (nesting.depth[above] < nesting.depth[node]))
            & ~host.named(names.is_factory)
        )
        computes_without = np.zeros(len(host), dtype=bool)
        computes_without[node[top & (host.sequence_id < 0)]] = True
        again = host.named(lambda n: n.startswith("chopper::recompute::"))
        computes_without[node[again & (node >= 0)]] = True
        computes_without |= host.named(lambda n: "Checkpoint" in n)
        return numbered & ~computes_without[node]

    @cached_property
    def phase(self) -> np.ndarray:
        """Phase of each event."""
        row = np.where(self.launch_row >= 0, self.launch_row, self.op_row)
        known = row >= 0
        found = np.full(len(self.events), -1, dtype=np.int64)
        if len(self.host):
            found[known] = self.span_phase[row[known]]
            open_ = found < 0
            # A CPU backend runs collectives on threads of its own: they are of the phase that
            # the program was in.
            foreign = open_ & self.events.of("host_collective")
            found[foreign] = self._issuing_phase(self.launch_ns[foreign])
        unknown = found < 0
        found[unknown] = self.unmarked_phase(self.launch_ns[unknown])
        found[~known & unknown] = _OTHER
        return found

    def _issuing_phase(self, time_ns: np.ndarray) -> np.ndarray:
        """Phase that the program was in when another thread began a collective; -1 for none.

        The last gradients are reduced after the last node of backward.
        """
        found = self._phase_at(time_ns)
        before, behind = self._neighbours(time_ns)
        last = (found < 0) & (before == _BACKWARD)
        last &= (behind == _BACKWARD) | (behind == _OPTIMIZER)
        return np.where(last, _BACKWARD, found)

    def unmarked_phase(self, time_ns: np.ndarray) -> np.ndarray:
        """Phase of work at a time for which no span tells it.

        Where forwards are marked, by what is marked before and after it: a loss follows a forward,
        clipping of gradients follows backward, and what precedes a forward is between the phases.
        Elsewhere all is forward before the end of the step's backward, and other after it.
        """
        if not self._marks_forward:
            after = time_ns >= self._backward_end(time_ns)
            return np.where(after, _OTHER, _FORWARD)
        before, behind = self._neighbours(time_ns)
        in_backward = (before == _BACKWARD) | (before == _RECOMPUTE)
        resumes = (behind == _FORWARD) | (behind == _DATA)
        return np.select([before == _FORWARD, in_backward & ~resumes], [_FORWARD, _OTHER], _BETWEEN)

    @cached_property
    def _marks_forward(self) -> bool:
        return bool(len(self.host) and self.host.named(names.is_forward).any())

    @cached_property
    def _tops(self) -> np.ndarray:
        """Outermost spans that have a phase, of all threads, in order of time."""
        host = self.host
        rows = np.flatnonzero((self.span_phase >= 0) & (host.dur_ns > 0))
        parent = host.nesting.parent[rows]
        return rows[(parent < 0) | (self.span_phase[np.maximum(parent, 0)] < 0)]

    def _neighbours(self, time_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Phases of the last marked span that began by each time, and of the next; -1 for none."""
        tops = self._tops
        at = np.searchsorted(self.host.start_ns[tops], time_ns, side="right")
        phase = np.concatenate([[-1], self.span_phase[tops], [-1]])
        return phase[at], phase[at + 1]

    def idle_phase(self, span: np.ndarray, operator: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """Phase of time in which a device waited for the host: of what the host did.

        Args:
            span: innermost span that was open on the host, -1 for none.
            operator: innermost operator that was, -1 for none.
            time_ns: start of the time.

        Returns:
            Codes into ``phases``; ``between`` where the host was in none.
        """
        if not len(self.host):
            return np.full(len(span), _BETWEEN, dtype=np.int64)
        found = np.where(span >= 0, self.span_phase[span], -1).astype(np.int64)
        rows = np.flatnonzero(found < 0)
        found[rows] = self._phase_at(time_ns[rows])
        rows = rows[found[rows] < 0]
        works = operator[rows] >= 0
        found[rows[works]] = self.unmarked_phase(time_ns[rows[works]])
        rows = rows[~works]
        before, behind = self._sides(time_ns[rows])
        found[rows] = np.where((before == behind) & (before >= 0), before, _BETWEEN)
        return found

    def _sides(self, time_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Phases of what the host did before and after each time; -1 for nothing.

        Before a time between two steps it did nothing: the end of an optimizer's step and the
        zeroing of gradients that begins the next one enclose what the program does between them.
        """
        if self._marks_forward:
            before, behind = self._neighbours(time_ns)
            before[(before == _FORWARD) | self._steps_between(self._tops, time_ns)] = -1
            return before, behind
        host, nesting = self.host, self.host.nesting
        operators = host.of("cpu_op")
        top = nesting.parent < 0
        rows = np.flatnonzero(
            operators & (top | (nesting.nearest(operators)[np.maximum(nesting.parent, 0)] < 0))
        )
        own = self.span_phase[rows].astype(np.int64)
        open_ = own < 0
        own[open_] = self.unmarked_phase(host.start_ns[rows[open_]])
        at = np.searchsorted(host.start_ns[rows], time_ns, side="right")
        phase = np.concatenate([[-1], own, [-1]])
        before, behind = phase[at], phase[at + 1]
        before[self._steps_between(rows, time_ns)] = -1
        return before, behind

    def _steps_between(self, rows: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """Mask of the times whose last span before and next one after begin in different steps.

        Args:
            rows: host spans, in order of time.
            time_ns: the times.
        """
        start_ns = self.host.start_ns[rows]
        step = np.searchsorted(self.steps_start_ns, start_ns, side="right")
        step = np.concatenate([step[:1], step, step[-1:]])
        at = np.searchsorted(start_ns, time_ns, side="right")
        if not len(rows):
            return np.zeros(len(time_ns), dtype=bool)
        crossed: np.ndarray = step[at] != step[at + 1]
        return crossed

    def _phase_at(self, time_ns: np.ndarray) -> np.ndarray:
        """Phase that any marked span had at each time, innermost in time order; -1 none."""
        host, tops = self.host, self._tops
        if not len(tops):
            return np.full(len(time_ns), -1, dtype=np.int64)
        at = np.searchsorted(host.start_ns[tops], time_ns, side="right") - 1
        row = tops[np.maximum(at, 0)]
        # Of spans that overlap, the later one takes over: the profiler's next step begins before
        # the optimizer's step that ended the last one returns.
        inside = (at >= 0) & (host.nesting.end_ns[row] > time_ns)
        phase = np.where(inside, self.span_phase[row], -1)
        if self._phases_within_phases and inside.any():
            thread = host.nesting.thread[row[inside]]
            innermost = innermost_at(activity(host.nesting), thread, time_ns[inside])
            phase[inside] = self.span_phase[innermost]
        return phase

    @cached_property
    def _phases_within_phases(self) -> bool:
        """Whether a phase runs within another, as what a closure of an optimizer does."""
        parent = self.host.nesting.parent
        around = np.where(parent >= 0, self.span_phase[np.maximum(parent, 0)], -1)
        return bool(((around >= 0) & (around != self.span_phase)).any())

    def _backward_end(self, time_ns: np.ndarray) -> np.ndarray:
        """End of the last backward activity in the step around each time."""
        never = np.iinfo(np.int64).max
        steps = len(self.steps_start_ns)
        ends = np.full(max(steps, 1) + 2, never, dtype=np.int64)
        if len(self.host):
            spans = np.flatnonzero(self.host.named(names.is_backward))
            if len(spans):
                index = (
                    np.searchsorted(self.steps_start_ns, self.host.start_ns[spans], side="right")
                    if steps
                    else np.ones(len(spans), dtype=np.int64)
                )
                latest = np.full(len(ends), -1, dtype=np.int64)
                np.maximum.at(latest, index, self.host.ends(spans))
                ends = np.where(latest >= 0, latest, never)
        if not steps:
            return np.full(len(time_ns), ends[1], dtype=np.int64)
        index = np.searchsorted(self.steps_start_ns, time_ns, side="right")
        return ends[index]

    @cached_property
    def step(self) -> np.ndarray:
        """Step that holds the launch; without a launch, that of the event before on the stream."""
        steps = len(self.steps_start_ns)
        if not steps:
            return np.zeros(len(self.events), dtype=np.int64)
        by_launch = np.searchsorted(self.steps_start_ns, self.launch_ns, side="right") - 1
        after = self.launch_ns >= self.steps_end_ns[-1]
        for i in holes(self.step_numbers, self.steps_start_ns, self.steps_end_ns).tolist():
            # Launched when the trace was ending or beginning again, within no step.
            end_ns, start_ns = self.steps_end_ns[i - 1], self.steps_start_ns[i]
            after |= (self.launch_ns >= end_ns) & (self.launch_ns < start_ns)
        by_launch[after] = steps
        if self.has_launch.all():
            return by_launch
        if not self.has_launch.any():
            return by_launch
        return self._fill_by_stream(by_launch)

    def _fill_by_stream(self, by_launch: np.ndarray) -> np.ndarray:
        found = by_launch.copy()
        place = self.events.device_id * (1 << 40) + self.events.stream_id
        order = np.argsort(place, kind="stable")
        known = self.has_launch[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = place[order][1:] != place[order][:-1]
        index = np.where(known, np.arange(len(order)), -1)
        group_start = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        previous = np.maximum.accumulate(index)
        previous = np.where(previous >= group_start, previous, -1)
        # Before anything that was launched inside the trace, it was launched before that began.
        # Later, with no launch before it on its stream, only its own time can tell.
        first = self.events.start_ns[self.has_launch].min()
        filled = np.where(
            previous >= 0,
            by_launch[order[np.maximum(previous, 0)]],
            np.where(self.events.start_ns[order] < first, -1, by_launch[order]),
        )
        found[order] = np.where(known, by_launch[order], filled)
        return found

    @cached_property
    def layers(self) -> tuple[np.ndarray, list[str]]:
        """Layer of each event as codes into names."""
        span_codes, layer_names = self.span_layers
        if not len(self.host):
            return np.full(len(self.events), -1, dtype=np.int64), []
        row = np.where(self.launch_row >= 0, self.launch_row, self.op_row)
        return np.where(row >= 0, span_codes[row], -1), layer_names

    @cached_property
    def span_layers(self) -> tuple[np.ndarray, list[str]]:
        """Layer of each host span as codes into names."""
        host = self.host
        if not len(host):
            return np.zeros(0, np.int64), []
        codes, values = host.names
        table: dict[str, int] = {}
        of_name = np.full(len(values) + 1, -1, dtype=np.int32)
        for i, value in enumerate(values):
            layer = names.layer_of(value)
            if layer is not None:
                of_name[i] = table.setdefault(layer, len(table))
        if table:
            span = host.nesting.inherited(passes.look_up(codes, of_name))
        else:
            span = self._module_layers(table)
        return self._inherit_backward(span), list(table)

    def _module_layers(self, table: dict[str, int]) -> np.ndarray:
        """Layers from Python stacks: the outermost module whose class occurs more than once."""
        host = self.host
        codes, values = host.names
        modules = {i: m for i, v in enumerate(values) if (m := names.module_of(v)) is not None}
        if not modules:
            return np.full(len(host), -1, dtype=np.int32)
        classes: dict[str, int] = {}
        for module in modules.values():
            name = module.rpartition("_")[0] or module
            classes[name] = classes.get(name, 0) + 1
        repeated = {i for i, m in modules.items() if classes[m.rpartition("_")[0] or m] > 1} or set(
            modules
        )
        mask = matching(codes, values, lambda v: names.module_of(v) is not None)
        chosen = np.isin(codes, list(repeated)) & mask
        top = host.nesting.topmost(chosen)
        of_name = np.full(len(values) + 1, -1, dtype=np.int32)
        for i, module in modules.items():
            of_name[i] = table.setdefault(module, len(table))
        return np.where(top >= 0, of_name[codes[top]], -1)

    def _inherit_backward(self, span: np.ndarray) -> np.ndarray:
        """Give backward nodes the layer of the forward operator with their sequence number."""
        if not (span >= 0).any():
            return span
        nodes, makers = self._node_makers
        given = np.full(len(self.host), -1, dtype=np.int32)
        given[nodes] = span[makers]
        return np.where(span < 0, self.host.nesting.inherited(given), span)

    @cached_property
    def _node_makers(self) -> tuple[np.ndarray, np.ndarray]:
        """Backward nodes, and the forward operators that recorded them: rows in pairs."""
        host = self.host
        sequence = host.sequence_id
        node = np.flatnonzero((sequence >= 0) & host.named(names.is_backward))
        numbered = (sequence >= 0) & (host.forward_tid <= 0)
        numbered[node] = False
        forward = np.flatnonzero(numbered)
        if not len(node) or not len(forward):
            return node[:0], forward[:0]
        # Operators that make no node share the next one's number: the last one made the node.
        by_sequence = forward[np.argsort(sequence[forward], kind="stable")]
        keys = sequence[by_sequence]
        at = np.searchsorted(keys, sequence[node], side="right") - 1
        hit = (at >= 0) & (keys[np.maximum(at, 0)] == sequence[node])
        return node[hit], by_sequence[at[hit]]

    @cached_property
    def _differentiated(self) -> np.ndarray:
        """Rows of the forward operators that a backward of this trace went through."""
        return np.unique(self._node_makers[1])

    @cached_property
    def op_names(self) -> tuple[np.ndarray, list[str]]:
        """Name of the operator of each event as codes into names."""
        if not len(self.host):
            return np.full(len(self.events), -1, dtype=np.int64), []
        codes, values = self.host.names
        return np.where(self.op_row >= 0, codes[self.op_row], -1), values

    @cached_property
    def sharding_copy(self) -> np.ndarray:
        """Mask of the events launched by a copying operator inside hooks of data parallelism."""
        host = self.host
        found = np.zeros(len(self.events), dtype=bool)
        regions = host.named(names.is_sharding_region) if len(host) else found
        if not regions.any():
            return found
        copying = host.named(names.is_sharding_copy) & host.nesting.within(regions)
        has = self.op_row >= 0
        found[has] = copying[self.op_row[has]]
        return found

    @cached_property
    def annotation_row(self) -> np.ndarray:
        """Row of the innermost annotation of the user's around the launch, -1 for none."""
        host = self.host
        if not len(host):
            return np.full(len(self.events), -1, dtype=np.int64)
        users = host.of("annotation") & ~host.named(
            lambda n: n.startswith(("ProfilerStep", "chopper::"))
        )
        nearest = host.nesting.nearest(users)
        row = np.where(self.launch_row >= 0, self.launch_row, self.op_row)
        return np.where(row >= 0, nearest[row], -1)

    @cached_property
    def annotations(self) -> tuple[np.ndarray, list[str]]:
        """Its name, as codes into names."""
        if not len(self.host):
            return np.full(len(self.events), -1, dtype=np.int64), []
        codes, values = self.host.names
        at = self.annotation_row
        return np.where(at >= 0, codes[at], -1), values

    def table(self, windows: Windows) -> pa.Table:
        """The declared `event_link` table, whose steps are windows."""
        declared = TABLES["event_link"]
        steps = len(self.steps_start_ns)
        step = np.where((self.step < 0) | ((self.step >= steps) & (steps > 0)), -1, self.step)
        step = windows.of_steps(step)
        return pa.Table.from_arrays(
            [
                nullable(self.launch_row),
                nullable(self.op_row),
                dictionary(*self.op_names),
                dictionary(*self.annotations),
                dictionary(*self.layers),
                dictionary(self.phase, self.phases),
                nullable(step).cast(pa.int32()),
                dictionary(self.work_class, WORK_CLASSES),
            ],
            schema=declared.arrow,
        )


def _phase_of(name: str, code_of: dict[str, int]) -> int:
    """The phase that a span's name says, -1 for none."""
    named = names.program_phase_of(name)
    if named is not None:
        return code_of[named]
    if names.is_forward(name):
        return _FORWARD
    if name.startswith("chopper::recompute::"):
        return _RECOMPUTE
    if names.is_data_loading(name):
        return _DATA
    if names.is_optimizer(name):
        return _OPTIMIZER
    return _BACKWARD if names.is_backward(name) or names.is_gradient_reduction(name) else -1


def phases_outside_training(present: set[str]) -> set[str]:
    """Phases whose work is no part of a training step, among those that are present.

    Where nothing is trained, forwards without gradients are the program's work.
    """
    outside = present.difference(PHASES[:_EVALUATION])
    trains = not present.isdisjoint(("recompute", "backward", "optimizer"))
    return outside if trains else outside.difference(PHASES[:_CHECKPOINT])


def link(
    host: HostSpans,
    events: DeviceEvents,
    steps: pa.Table,
    collectives: pa.Table,
    host_rows: np.ndarray | None = None,
) -> Links:
    """Join device events to host spans. HOST_SPAN, DEVICE_EVENT, STEP, COLLECTIVE -> Links.

    Args:
        host_rows: on a host-only trace, the span that each event was made from.
    """
    if host_rows is not None:
        launch = host_rows
        op_row = host_rows.copy()
    else:
        launch = _launches(host, events)
        op_row = _operators(host, events, launch)
    traced = steps.filter(steps["traced"]) if steps.num_rows else steps
    source, source_names = strings(collectives, "source")
    rows = ints(collectives, "row")[matching(source, source_names, lambda s: s == "device_event")]
    return Links(
        host,
        events,
        ints(traced, "start_ns"),
        ints(traced, "end_ns"),
        ints(traced, "number"),
        launch,
        op_row,
        rows,
    )


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


def main_thread(links: Links) -> int:
    """Thread number on which the program runs: the one with the steps, else the busiest."""
    host = links.host
    if not len(host):
        return -1
    steps = host.named(lambda n: n.startswith("ProfilerStep"))
    if steps.any():
        return int(np.bincount(host.nesting.thread[steps]).argmax())
    working = host.of("cpu_op", "python", "runtime") & (links.span_phase != _BACKWARD)
    if not working.any():
        working = np.ones(len(host), dtype=bool)
    return int(np.bincount(host.nesting.thread[working]).argmax())


def backward_thread(links: Links, main: int) -> int:
    """Thread number of the autograd engine, -1 when backward runs on the main thread."""
    host = links.host
    nodes = host.named(names.is_backward) & (host.nesting.thread != main) if len(host) else None
    if nodes is None or not nodes.any():
        return -1
    return int(np.bincount(host.nesting.thread[nodes]).argmax())


__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "COPY",
    "PHASES",
    "WORK_CLASSES",
    "Links",
    "backward_thread",
    "link",
    "main_thread",
    "phases_outside_training",
]
