"""Steps of one recording: where they begin and end, whoever says so.

The program (``prof.step()``, integrations of trainers) is believed first, then its optimizers, then
its backward passes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chopper.recording.logs import Phase, PhaseLog, Source, StepLog
from chopper.recording.optimizers import OptimizerWatch, optimizer_was_made
from chopper.recording.trainers import Evaluations, TrainerPhases
from chopper.storage import clock
from chopper.storage import manifest as m
from chopper.tables.ranges import VALUE_MOST
from chopper.wording import some

if TYPE_CHECKING:
    from chopper.recording.logs import OpenPhase
    from chopper.recording.windows import TraceWindows
    from chopper.storage.parts import RunWriter

_OPTIMIZER = "optimizer"
"""Phase in which an engine steps its optimizers."""
_MAX_MEASURES = 10_000
_STALE_AFTER = 8
"""Steps of another optimizer, without one of the leader's, after which the leader is replaced."""
_CONTEXTS = (1, 2, 4, 8, 16, 32)
"""Lengths of the rows of optimizers whose successor is kept."""
_MOST_CONTEXTS = 1 << 14
_BACKWARD_PASSES = 4
"""Backward passes, without an optimizer of torch, after which each of them ends a step."""
_ACCUMULATED_PASSES = 1024
"""The same where there is such an optimizer, that did not step so far."""


class StepTracker:
    """Finds where steps begin and end; traces start and stop between them.

    Args:
        part: the rank's part of the run.
        safely: calls a function with the recording's lock held while something is recorded.
        phase: returns the block of a phase.
        step_ended: called with the number of each step that ended.
    """

    def __init__(
        self,
        part: RunWriter,
        safely: Callable[..., Any],
        phase: Callable[[str], Phase],
        step_ended: Callable[[int], None],
    ) -> None:
        self._part = part
        self._safely = safely
        self._phase = phase
        self._step_ended = step_ended
        self._cycle = OptimizerCycle()
        self.optimizers = OptimizerWatch(
            self._optimizer_stepped,
            self._in_backward,
            functools.partial(phase, _OPTIMIZER),
            self._backward_ended,
            self._cycle.dropped,
        )
        self._trainers = TrainerPhases(phase, self.micro_step)
        self.log = StepLog(part.directory)
        self.phases = PhaseLog(part.directory, lambda name: self.windows.begin_phase(name))
        self._evaluations = Evaluations(
            lambda *span: safely(self.phases.record, "evaluation", *span),
            lambda: self.phases.current() is not None,
        )
        self.windows: TraceWindows
        """Takes the traces, if there are to be any."""
        self._backwards: BackwardSteps | None = BackwardSteps(optimizer_was_made)
        """Finds the ends of steps in backward passes, until an optimizer steps."""
        self.infers = False
        """True while a recording that began without a sign of training has seen none."""
        self._inner_optimizers: list[int] = []
        """Optimizers that stepped within a phase of that name that a thread is inside of."""

    def watch(self) -> None:
        """Watch optimizers, backward passes and trainers, from their import on."""
        self.optimizers.begin()
        self._trainers.begin()
        self._evaluations.begin()

    def unwatch(self) -> None:
        """Watch no longer. Idempotent."""
        self.optimizers.end()
        self._trainers.end()
        self._evaluations.end()

    def begin(self) -> None:
        """Begin the first step, and a trace if it is to be traced."""
        self.windows.switch()
        self.log.begin()

    def _optimizer_stepped(self, optimizer_id: int) -> None:
        self._evaluations.trained()
        if self.log.source != "mark":
            self._safely(self._note_optimizer, optimizer_id, time.perf_counter_ns())

    def _note_optimizer(self, optimizer_id: int, began_ns: int) -> None:
        """Note that an optimizer stepped; chopper's own code began at ``began_ns``."""
        self._training_begins()
        self._backwards = None  # from here on optimizers end steps
        if self.phases.current() == _OPTIMIZER:
            # DeepSpeed's engine steps torch's optimizer once for each group of parameters, and
            # gathers the parameters after it: the step ends when the engine returns.
            self._inner_optimizers.append(optimizer_id)
            return
        now_ns = clock.now_ns()
        ends_ns = self._cycle.stepped(optimizer_id, now_ns)
        self.log.optimizer = self.optimizers.kind_of(self._cycle.leader)
        self._end_steps("optimizer", ends_ns, now_ns, began_ns)

    def _in_backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the block that a backward pass runs in: a phase, of which only traces tell."""
        return self._phase("backward") if self.windows.tracing else contextlib.nullcontext()

    def _backward_ended(self, makes_graph: bool) -> None:
        self._evaluations.trained()
        # It may end a step, or a trace that grew too large.
        if self.windows.tracing or (self._backwards is not None and self.log.source != "mark"):
            self._safely(self._note_backward, makes_graph, time.perf_counter_ns())

    def _note_backward(self, makes_graph: bool, began_ns: int) -> None:
        """Note that a backward pass ended; chopper's own code began at ``began_ns``."""
        self._training_begins()
        self.windows.check()
        if self._backwards is not None and self.log.source != "mark":
            now_ns = clock.now_ns()
            ends_ns = self._backwards.ended(now_ns, makes_graph)
            self._end_steps("backward", ends_ns, now_ns, began_ns)

    def micro_step(self) -> None:
        """Note that a trainer begins a backward pass."""
        self._safely(self.log.micro_step)

    def _training_begins(self) -> None:
        """Count steps from here on, where something else was recorded before."""
        if self.infers:
            self.infers = False
            if self.windows.start_over():
                self._part.note("run.steps_recounted", "inference_first")
            self.log.skip()

    def _end_steps(self, source: Source, ends_ns: list[int], now_ns: int, began_ns: int) -> None:
        for end_ns in ends_ns:
            self.log.source = source
            self._end_step(end_ns, began_ns, late=end_ns < now_ns)
            began_ns = time.perf_counter_ns()

    def marked(self, tokens: int | None, now_ns: int, began_ns: int) -> None:
        """End the step that runs, as the program says; from here on nothing else ends steps."""
        log = self.log
        if log.source != "mark":
            if log.source is not None:
                marks = "backward passes" if log.source == "backward" else "the optimizer"
                if self.windows.start_over():
                    self._part.note("run.steps_recounted", steps=log.number, marks=marks)
                log.restart()
            log.source = "mark"
        if tokens is not None:
            number = finite_number(tokens)
            if number is None:
                self._part.note("measures.dropped", "tokens", tokens=tokens)
            tokens = None if number is None else int(number)
        self._end_step(now_ns, began_ns, tokens)

    def _end_step(
        self, end_ns: int, began_ns: int, tokens: int | None = None, *, late: bool = False
    ) -> None:
        """End the step that runs; chopper's own code began at ``began_ns``.

        Late, the next step runs already, and no trace can begin or end at its start.
        """
        log, windows = self.log, self.windows
        traced, profiled = windows.step_ended()
        length_ns = log.end(end_ns, traced=traced, profiled=profiled, tokens=tokens)
        windows.note_length(log.number - 1, length_ns, profiled)
        self._step_ended(log.number - 1)
        if not late and windows.switch():
            log.skip()  # starting, stopping and writing a trace belongs to no step
        else:
            log.own_costs_ns.append(time.perf_counter_ns() - began_ns)
        windows.begin_span()
        # Also while a trace is taken: a process that is killed then leaves nothing else.
        if log.due(end_ns):
            self.phases.flush()
            log.flush()

    def end_phase(self, entered: list[OpenPhase]) -> None:
        """End the innermost of the phases that one block entered."""
        for optimizer_id in self._safely(self._end_phase, entered) or ():
            self._optimizer_stepped(optimizer_id)

    def _end_phase(self, entered: list[OpenPhase]) -> list[int]:
        """Return the optimizers that stepped within it, and whose steps count from here on."""
        phase = self.phases.end(entered)
        if phase.name != _OPTIMIZER or self.phases.current() == _OPTIMIZER:
            return []
        inner, self._inner_optimizers = self._inner_optimizers, []
        return list(dict.fromkeys(inner))

    def finish(self) -> None:
        """Take the ends that nothing came after to make certain for ends of steps."""
        self.unwatch()
        if self._trainers.unseen:
            self._part.note("run.phases_unseen", calls=some(self._trainers.unseen))
        log = self.log
        ends_ns: list[int] = []
        saw_torch = self.optimizers.saw_torch
        if log.source != "mark" and self._cycle.tentative_ns is not None:
            log.source, ends_ns = "optimizer", [self._cycle.tentative_ns]
        elif log.source is None and self._backwards is not None and saw_torch:
            ends_ns = [] if optimizer_was_made() else self._backwards.take()
            log.source = "backward" if ends_ns else None
        for end_ns in ends_ns:
            # Not traced, until the trace is kept.
            log.end(end_ns, traced=False, profiled=self.windows.profiled)
        if log.number == 0:
            why = "no optimizer of torch stepped" if saw_torch else "torch was never imported"
            self._part.note(
                "run.no_steps", severity="info" if self.infers and saw_torch else None, why=why
            )


class OptimizerCycle:
    """Finds the ends of steps in the sequence of optimizers that stepped.

    A step begins with the optimizer that stepped first in the program, the leader, and holds those
    that follow until the leader comes round again: with a critic C and an actor A that steps every
    other time, C C A C C A is the steps C, C A, C, C A. A step ends after the last of them. Which
    one is the last is told from what followed the same optimizers before; where nothing did, the
    end is certain only when the leader steps again, which is a step late.

    A leader that steps no more, while others go round, is replaced by the first of those; one that
    the program has dropped, as soon as another one steps.
    """

    def __init__(self) -> None:
        self.leader: int | None = None
        """The optimizer that steps begin with."""
        self._dropped: set[int] = set()
        """Optimizers that are no more."""
        self._unit: list[tuple[int, int]] = []
        """Optimizers of the step that runs, with the times at which they had stepped."""
        self._ended = False
        """True once the end of the step that runs was returned."""
        self._most: dict[int, int] = {}
        """Optimizer → most often that it stepped within one step."""
        self._recent: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """Optimizers that stepped in a row → the one that stepped after them last time."""
        self._alone: int | None = None
        """The only optimizer that stepped for so long that nothing more is learned from it."""

    @property
    def tentative_ns(self) -> int | None:
        """End of the last step, if it was not returned and no optimizer is missing."""
        if self._ended or not self._unit or self._expected() not in (None, self.leader):
            return None
        return self._unit[-1][1]

    def dropped(self, optimizer_id: int) -> None:
        """Note that an optimizer was deleted; called in any thread."""
        self._dropped.add(optimizer_id)

    def stepped(self, optimizer_id: int, now_ns: int) -> list[int]:
        """Note that an optimizer stepped; return the ends of steps that this made certain."""
        self._dropped.discard(optimizer_id)  # another one may have its id
        if optimizer_id == self._alone:
            self._unit = [(optimizer_id, now_ns)]
            return [now_ns]
        self._learn(optimizer_id)
        ends: list[int] = []
        if self.leader is None:
            self.leader = optimizer_id
        elif optimizer_id == self.leader:
            self._finish_unit(ends)
        self._unit.append((optimizer_id, now_ns))
        if optimizer_id != self.leader and self._leader_is_gone(optimizer_id):
            self._replace_leader(ends)
        while self.leader in self._dropped and len(self._unit) > 1:
            self._replace_leader(ends)
        if not self._ended and self._expected() == self.leader:
            self._ended = True
            ends.append(now_ns)
        known = _CONTEXTS[-1] + 1  # all rows of it alone were seen
        alone = len(self._unit) == 1 and self._recent[-known:].count(optimizer_id) == known
        self._alone = optimizer_id if alone else None
        return ends

    def _finish_unit(self, ends: list[int]) -> None:
        if not self._ended:
            ends.append(self._unit[-1][1])
        if len(self._unit) > 1:
            for which, count in Counter(which for which, _ in self._unit).items():
                self._most[which] = max(count, self._most.get(which, 0))
        self._unit = []
        self._ended = False

    def _leader_is_gone(self, optimizer_id: int) -> bool:
        most = max(_STALE_AFTER, 4 * self._most.get(optimizer_id, 0))
        if len(self._unit) <= most:
            return False
        return sum(which == optimizer_id for which, _ in self._unit) > most

    def _replace_leader(self, ends: list[int]) -> None:
        """Divide the step that runs into those of the leader that took over."""
        unit, self._most = self._unit, {}
        self.leader = unit[1][0]
        self._unit = unit[:1]
        for which, at_ns in unit[1:]:
            if which == self.leader:
                self._finish_unit(ends)
            self._unit.append((which, at_ns))

    def _learn(self, optimizer_id: int) -> None:
        """Keep what came after the optimizers that stepped last."""
        recent = self._recent
        if len(self._next) > _MOST_CONTEXTS:
            self._next.clear()
        for length in _CONTEXTS:
            if length > len(recent):
                break
            self._next[tuple(recent[-length:])] = optimizer_id
        recent.append(optimizer_id)
        if len(recent) > 2 * _CONTEXTS[-1]:
            del recent[: _CONTEXTS[-1]]

    def _expected(self) -> int | None:
        """The optimizer that steps next, by the longest row that was seen before; None: unknown."""
        for length in reversed(_CONTEXTS):
            if length <= len(self._recent):
                follower = self._next.get(tuple(self._recent[-length:]))
                if follower is not None and follower not in self._dropped:
                    return follower
        return None


class BackwardSteps:
    """Takes the ends of backward passes for the ends of steps, where no optimizer steps.

    Those that make a graph of their own count until one comes that does not: before that one they
    are a part of the forward pass.

    Args:
        optimizer_was_made: whether the program has an optimizer of torch, which may step yet:
            gradients are accumulated over many passes, but hardly over more than a thousand.
    """

    def __init__(self, optimizer_was_made: Callable[[], bool]) -> None:
        self._optimizer_was_made = optimizer_was_made
        self._pending_ns: list[int] = []
        self._count = 0
        self._all_make_graphs = True

    def ended(self, now_ns: int, makes_graph: bool) -> list[int]:
        """Note that a backward pass ended; return the ends of steps that this made certain."""
        if not makes_graph and self._all_make_graphs:
            self._all_make_graphs = False
            self._pending_ns, self._count = [], 0
        elif makes_graph and not self._all_make_graphs:
            return []
        self._count += 1
        self._pending_ns.append(now_ns)
        if self._count < _BACKWARD_PASSES:
            return []
        if self._count < _ACCUMULATED_PASSES and self._optimizer_was_made():
            return []
        if self._count == _BACKWARD_PASSES:
            self._count = _ACCUMULATED_PASSES
        return self.take()

    def take(self) -> list[int]:
        """The ends of steps that were not certain."""
        ends, self._pending_ns = self._pending_ns, []
        return ends


def finite_number(value: Any) -> float | int | None:
    """Return a value as a number that a manifest can hold; None if it is not a finite number."""
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several values
        return None
    return number if abs(number) <= VALUE_MOST else None


def _label(value: Any) -> str | int | float:
    """Return a label as a manifest can hold it: anything but a finite number as text."""
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    number = finite_number(value)
    return str(value) if number is None else number


def keep_measure(
    part: RunWriter, name: str, value: float, labels: dict[str, str | int | float]
) -> None:
    """Keep a number with its labels, or note why it is dropped."""
    number = finite_number(value)
    measures = part.manifest.measures
    if number is not None and len(measures) < _MAX_MEASURES:
        texts = {str(key): _label(label) for key, label in labels.items()}
        measures.append(m.Measure(name=str(name), value=number, labels=texts))
        return
    why = "is not a number" if number is None else f"exceeds the limit of {_MAX_MEASURES}"
    part.note("measures.dropped", name=name, why=why)
