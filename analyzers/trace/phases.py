"""Phases of a training step and layers of the model: of host spans, events and moments."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import first_with, pick, row_set
from chopper.analyzers.trace.nesting import activity, innermost_at
from chopper.analyzers.trace.span_forest import forest
from chopper.analyzers.trace.tables import HostSpans

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
"""Phases that every run may have; those that a program names follow."""
_FORWARD, _RECOMPUTE, BACKWARD, _OPTIMIZER, _DATA, _OTHER, _BETWEEN = range(7)
_EVALUATION, _INFERENCE, _CHECKPOINT = map(PHASES.index, ("evaluation", "inference", "checkpoint"))


def span_phases(host: HostSpans, makers: NodeMakers) -> tuple[list[str], np.ndarray, int]:
    """Find the phase of every host span by what encloses it. HOST_SPAN -> phases.

    Returns:
        All phases (PHASES, then those that only this program has), the code of each span (-1 where
        nothing tells), and the number of operators of a backward that is differentiated itself.
    """
    marked = (names.program_phase_of(name) for name in host.names[1])
    phases = [*PHASES, *dict.fromkeys(n for n in marked if n is not None and n not in PHASES)]
    nesting = host.nesting
    code_of = {name: code for code, name in enumerate(phases)}
    span_phase = host.classified(lambda _, name: _phase_of(name, code_of))
    numbered = numbered_in_backward(host)
    double = double_backward(host, numbered)
    span_phase[numbered & ~double] = _RECOMPUTE
    # What backward differentiates is forward wherever it ran: in a closure inside of the
    # optimizer's step, in a block that the program named, before the first module.
    forward = host.named(names.is_forward)
    nodes = np.unique(makers.operator)
    enclosing = nesting.inherited(np.where(forward, -1, span_phase))
    nodes = nodes[~np.isin(enclosing[nodes], (_RECOMPUTE, BACKWARD))]
    span_phase[nodes] = _FORWARD
    inside = np.zeros(len(host), dtype=bool)
    inside[nodes] = True
    # A checkpointed function runs its forward without gradients.
    unnamed = (span_phase == _EVALUATION) | (span_phase == _INFERENCE)
    span_phase[unnamed & nesting.within(inside)] = -1
    undecided = forward & (enclosing >= _EVALUATION) & ~nesting.containing(inside)
    span_phase[undecided] = -1
    return phases, nesting.inherited(span_phase).astype(np.int16), int(double.sum())


def _phase_of(name: str, code_of: dict[str, int]) -> int:
    """Return the phase that a span's name says, -1 for none."""
    named = names.program_phase_of(name)
    if named is not None:
        return code_of[named]
    if names.is_forward(name):
        return _FORWARD
    if names.is_recomputation(name):
        return _RECOMPUTE
    if names.is_data_loading(name):
        return _DATA
    if names.is_optimizer(name):
        return _OPTIMIZER
    return BACKWARD if names.is_backward(name) or names.is_gradient_reduction(name) else -1


def span_layers(host: HostSpans, makers: NodeMakers) -> tuple[np.ndarray, list[str]]:
    """Find the layer of each host span. HOST_SPAN -> codes into names, -1 for none; names.

    By named regions, else by modules of Python stacks: the outermost one whose class occurs more
    than once. Backward nodes have the layer of the forward operator with their sequence number.
    """
    codes, values = host.names
    layers = [names.layer_of(value) for value in values]
    by_region = any(layer is not None for layer in layers)
    if not by_region:
        layers = [names.module_of(value) for value in values]
    table = {layer: code for code, layer in enumerate(dict.fromkeys(v for v in layers if v))}
    of_name = np.array([table.get(v or "", -1) for v in layers] + [-1], dtype=np.int32)
    if by_region:
        span = host.nesting.inherited(forest.look_up(codes, of_name))
    else:
        classes = [m and (m.rpartition("_")[0] or m) for m in layers]
        occurs = Counter(classes)
        repeated = [c is not None and occurs[c] > 1 for c in classes]
        chosen = repeated if any(repeated) else [m is not None for m in layers]
        top = host.nesting.topmost(forest.look_up(codes, np.array([*chosen, False])))
        span = pick(of_name[codes], top)
    return _with_backward(host, makers, span), list(table)


def span_modules(host: HostSpans, makers: NodeMakers) -> tuple[np.ndarray, list[str]]:
    """Find the innermost module around each host span, by named regions. HOST_SPAN -> as above."""
    codes, values = host.names
    paths = [names.operation_of(value) for value in values]
    table = {path: code for code, path in enumerate(dict.fromkeys(p for p in paths if p))}
    of_name = np.array([table.get(path or "", -1) for path in paths] + [-1], dtype=np.int32)
    span = host.nesting.inherited(forest.look_up(codes, of_name))
    return _with_backward(host, makers, span), list(table)


def _with_backward(host: HostSpans, makers: NodeMakers, span: np.ndarray) -> np.ndarray:
    """Let spans inside a backward node inherit from its forward operator if they have no value."""
    if not (span >= 0).any():
        return span
    forward = np.full(len(host), -1, dtype=np.int32)
    forward[makers.node] = span[makers.operator]
    return np.where(span < 0, host.nesting.inherited(forward), span)


def phases_outside_training(present: set[str]) -> set[str]:
    """Return those of the present phases whose work does not belong to a training step.

    Where nothing is trained, forwards without gradients are the program's work.
    """
    outside = present.difference(PHASES[:_EVALUATION])
    trains = not present.isdisjoint(("recompute", "backward", "optimizer"))
    return outside if trains else outside.difference(PHASES[:_CHECKPOINT])


@dataclass(frozen=True)
class Phases:
    """The phases of one rank's program at any moment.

    Attributes:
        host: its spans.
        steps_start_ns: starts of its steps on the host.
        of_span: phase of each span, -1 where nothing tells.
    """

    host: HostSpans
    steps_start_ns: np.ndarray
    of_span: np.ndarray

    def of_events(
        self, span: np.ndarray, launch_ns: np.ndarray, is_host_collective: np.ndarray
    ) -> np.ndarray:
        """Return the phase of each device event.

        Args:
            span: its launch, or else its operator; -1 for neither.
            launch_ns: start of its launch.
            is_host_collective: mask of the collectives of a CPU backend.
        """
        phase = pick(self.of_span, span).astype(np.int64)
        # A CPU backend runs collectives on threads of its own: they are of the phase that the
        # program was in. The last gradients are reduced after the last node of backward.
        foreign = np.flatnonzero((phase < 0) & is_host_collective)
        phase[foreign] = self._at(launch_ns[foreign])
        before, behind = self._neighbours(launch_ns[foreign])
        last = (phase[foreign] < 0) & (before == BACKWARD)
        phase[foreign[last & np.isin(behind, (BACKWARD, _OPTIMIZER))]] = BACKWARD
        unknown = phase < 0
        phase[unknown] = np.where(span[unknown] < 0, _OTHER, self.unmarked(launch_ns[unknown]))
        return phase

    def unmarked(self, time_ns: np.ndarray) -> np.ndarray:
        """Phase of work at a time for which no span tells it.

        Where forwards are marked, by what is marked before and after it: a loss follows a forward,
        clipping of gradients follows backward, and what precedes a forward is between the phases.
        Elsewhere all is forward before the end of the step's backward, and other after it.
        """
        if not self._marks_forward:
            after = time_ns >= self._backward_end(time_ns)
            return np.where(after, _OTHER, _FORWARD)
        before, behind = self._neighbours(time_ns)
        in_backward = (before == BACKWARD) | (before == _RECOMPUTE)
        resumes = (behind == _FORWARD) | (behind == _DATA)
        return np.select([before == _FORWARD, in_backward & ~resumes], [_FORWARD, _OTHER], _BETWEEN)

    @cached_property
    def _marks_forward(self) -> bool:
        return bool(self.host.named(names.is_forward).any())

    @cached_property
    def _tops(self) -> np.ndarray:
        """Outermost spans that have a phase, of all threads, in order of time."""
        host = self.host
        rows = np.flatnonzero((self.of_span >= 0) & (host.dur_ns > 0))
        return rows[pick(self.of_span, host.nesting.parent[rows]) < 0]

    def _neighbours(self, time_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Phases of the last marked span that began by each time, and of the next; -1 for none."""
        return self._around(self._tops, self.of_span[self._tops], time_ns)

    def _around(
        self, rows: np.ndarray, phase: np.ndarray, time_ns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Phases of the last of some spans that began by each time, and of the next; -1 none."""
        at = np.searchsorted(self.host.start_ns[rows], time_ns, side="right")
        padded = np.concatenate([[-1], phase, [-1]])
        return padded[at], padded[at + 1]

    def idle(self, span: np.ndarray, operator: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """Phase of time in which a device waited for the host: of what the host did.

        Args:
            span, operator: innermost ones that were open on the host, -1 for none.
            time_ns: start of the time.
        """
        phase = pick(self.of_span, span).astype(np.int64)
        rows = np.flatnonzero(phase < 0)
        phase[rows] = self._at(time_ns[rows])
        rows = rows[phase[rows] < 0]
        works = operator[rows] >= 0
        phase[rows[works]] = self.unmarked(time_ns[rows[works]])
        rows = rows[~works]
        before, behind = self._sides(time_ns[rows])
        phase[rows] = np.where((before == behind) & (before >= 0), before, _BETWEEN)
        return phase

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
        above = pick(nesting.nearest(operators), nesting.parent)
        rows = np.flatnonzero(operators & (above < 0))
        phase = self.of_span[rows].astype(np.int64)
        open_ = phase < 0
        phase[open_] = self.unmarked(host.start_ns[rows[open_]])
        before, behind = self._around(rows, phase, time_ns)
        before[self._steps_between(rows, time_ns)] = -1
        return before, behind

    def _steps_between(self, rows: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """Mask of the times whose last span before and next one after begin in different steps."""
        start_ns = self.host.start_ns[rows]
        step = np.searchsorted(self.steps_start_ns, start_ns, side="right")
        at = np.searchsorted(start_ns, time_ns, side="right")
        begins = np.concatenate([[False], step[1:] != step[:-1], [False]])
        return begins[at] if len(rows) else np.zeros(len(time_ns), dtype=bool)

    def _at(self, time_ns: np.ndarray) -> np.ndarray:
        """Phase that any marked span had at each time, innermost in time order; -1 none."""
        host, tops = self.host, self._tops
        if not len(tops):
            return np.full(len(time_ns), -1, dtype=np.int64)
        at = np.searchsorted(host.start_ns[tops], time_ns, side="right") - 1
        row = tops[np.maximum(at, 0)]
        # Of spans that overlap, the later one takes over: the profiler's next step begins before
        # the optimizer's step that ended the last one returns.
        inside = (at >= 0) & (host.nesting.end_ns[row] > time_ns)
        phase = np.where(inside, self.of_span[row], -1)
        # A phase may run within another, as what a closure of an optimizer does.
        around = pick(self.of_span, host.nesting.parent)
        if inside.any() and ((around >= 0) & (around != self.of_span)).any():
            thread = host.nesting.thread[row[inside]]
            innermost = innermost_at(activity(host.nesting), thread, time_ns[inside])
            phase[inside] = self.of_span[innermost]
        return phase

    def _backward_end(self, time_ns: np.ndarray) -> np.ndarray:
        """End of the last backward activity in the step around each time."""
        steps_ns = self.steps_start_ns
        spans = np.flatnonzero(self.host.named(names.is_backward))
        latest = np.full(len(steps_ns) + 1, -1, dtype=np.int64)
        step = np.searchsorted(steps_ns, self.host.start_ns[spans], side="right")
        np.maximum.at(latest, step, self.host.ends(spans))
        latest[latest < 0] = np.iinfo(np.int64).max
        return latest[np.searchsorted(steps_ns, time_ns, side="right")]


class NodeMakers(NamedTuple):
    """Backward nodes, and the forward operators that recorded them: rows of `host_span`."""

    node: np.ndarray
    operator: np.ndarray


def node_makers(host: HostSpans) -> NodeMakers:
    """Pair backward nodes with the forward operators of the same sequence number."""
    sequence = host.sequence_id
    node = np.flatnonzero((sequence >= 0) & host.named(names.is_backward))
    numbered = (sequence >= 0) & (host.forward_tid <= 0)
    numbered[node] = False
    # Operators that make no node share the next one's number: the last one made the node.
    forward = np.flatnonzero(numbered)[::-1]
    maker = pick(forward, first_with(sequence[forward], sequence[node]))
    return NodeMakers(node[maker >= 0], maker[maker >= 0])


def numbered_in_backward(host: HostSpans) -> np.ndarray:
    """Return a mask of the operators within backward that ran with gradients recorded.

    Such an operator has a sequence number. The ``apply`` of a custom function always has one, so it
    counts only if another operator of its backward node has one too, or if torch.compile made it.
    """
    backward = host.named(names.is_backward)
    numbered = host.of("cpu_op") & ~backward & (host.sequence_id >= 0) & (host.forward_tid <= 0)
    if not numbered.any():
        return numbered
    node = host.nesting.nearest(backward)
    numbered &= node >= 0
    sure = numbered & host.named(lambda name: "::" in name or name.startswith("CompiledFunction"))
    return numbered & row_set(node[sure], len(host))[node]


def double_backward(host: HostSpans, numbered: np.ndarray) -> np.ndarray:
    """Return a mask of the operators of a backward that is differentiated (``create_graph=True``).

    Within backward, grad mode is on where the forward is run again, and where the backward
    itself is to be differentiated. There, all operators of a node take sequence numbers; a
    node that runs the forward again computes its own gradient without any, or is named after
    checkpointing. Factory functions never take numbers.

    Args:
        host: the spans of one rank.
        numbered: from :func:`numbered_in_backward`.
    """
    nesting = host.nesting
    if not numbered.any():
        return numbered
    backward = host.named(names.is_backward)
    operator = host.of("cpu_op") & ~backward
    node = nesting.nearest(backward)
    above = pick(nesting.nearest(operator), nesting.parent)
    top = (
        operator
        & (node >= 0)
        & ((above < 0) | (nesting.depth[above] < nesting.depth[node]))
        & ~host.named(names.is_factory)
    )
    again = host.named(names.is_recomputation)
    computes_without = row_set(node[(top & (host.sequence_id < 0)) | again], len(host))
    computes_without |= host.named(lambda n: "Checkpoint" in n)
    return numbered & ~computes_without[node]


def main_thread(host: HostSpans, in_backward: np.ndarray) -> int:
    """Return the thread number on which the program runs: the one with the steps, else the busiest.

    Args:
        host: the spans of one rank.
        in_backward: mask of the spans whose phase is backward.
    """
    steps = host.named(lambda n: n.startswith("ProfilerStep"))
    working = host.of("cpu_op", "python", "runtime") & ~in_backward
    anything = np.ones(len(host), dtype=bool)
    return next((_busiest(host, m) for m in (steps, working, anything) if m.any()), -1)


def backward_thread(host: HostSpans, main: int) -> int:
    """Return the thread number of the autograd engine, -1 when backward runs on the main thread."""
    nodes = host.named(names.is_backward) & (host.nesting.thread != main)
    return _busiest(host, nodes) if nodes.any() else -1


def _busiest(host: HostSpans, marked: np.ndarray) -> int:
    """Return the thread with most of the marked spans."""
    return int(np.bincount(host.nesting.thread[marked]).argmax())
