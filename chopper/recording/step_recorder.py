"""Steps, phases, traces and measures of one recording, and what ends a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from chopper.recording.optimizers import OptimizerWatch, optimizer_was_made
from chopper.recording.phases import PhaseLog
from chopper.recording.step_log import StepLog
from chopper.recording.steps import BackwardSteps, OptimizerCycle
from chopper.storage import clock
from chopper.storage import manifest as m
from chopper.tables.ranges import VALUE_MOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.recording.phases import OpenPhase
    from chopper.recording.windows import TraceWindows
    from chopper.storage.parts import RunWriter

_OPTIMIZER = "optimizer"
"""Phase in which an engine steps its optimizers."""
_MAX_MEASURES = 10_000


class StepRecorder:
    """Ends steps where the program, its optimizers or its backward passes say so.

    Called with the recording's lock held.
    """

    def __init__(
        self,
        part: RunWriter,
        optimizers: OptimizerWatch,
        cycle: OptimizerCycle,
        step_ended: Callable[[int], None],
    ) -> None:
        self._part = part
        self._optimizers = optimizers
        self._cycle = cycle
        self._step_ended = step_ended
        self.log = StepLog(part.directory)
        self.phases = PhaseLog(part.directory, lambda name: self.windows.begin_phase(name))
        self.windows: TraceWindows
        """Takes the traces, if there are to be any."""
        self._backwards: BackwardSteps | None = BackwardSteps(optimizer_was_made)
        """Finds the ends of steps in backward passes, until an optimizer steps."""
        self.infers = False
        """True while a recording that began without a sign of training has seen none."""
        self._inner_optimizers: list[int] = []
        """Optimizers that stepped within a phase of that name that a thread is inside of."""

    @property
    def watches_backward(self) -> bool:
        """True while the end of a backward pass may end a step, or a trace that grew too large."""
        return (self._backwards is not None and self.log.source != "mark") or self.windows.tracing

    def begin(self) -> None:
        """Begin the first step, and a trace if it is to be traced."""
        self.windows.switch()
        self.log.begin()

    def optimizer_stepped(self, optimizer_id: int, began_ns: int) -> None:
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
        self.log.optimizer = self._optimizers.kind_of(self._cycle.leader)
        if ends_ns:
            self.log.source = "optimizer"
            self._end_steps(ends_ns, now_ns, began_ns)

    def backward_ended(self, makes_graph: bool, began_ns: int) -> None:
        """Note that a backward pass ended; chopper's own code began at ``began_ns``."""
        self._training_begins()
        self.windows.check()
        if self._backwards is None or self.log.source == "mark":
            return
        now_ns = clock.now_ns()
        ends_ns = self._backwards.ended(now_ns, makes_graph)
        if ends_ns:
            self.log.source = "backward"
            self._end_steps(ends_ns, now_ns, began_ns)

    def _training_begins(self) -> None:
        """Count steps from here on, where something else was recorded before."""
        if self.infers:
            self.infers = False
            self.windows.start_over(
                "the program called its model before it trained: steps are counted from its first "
                "backward pass"
            )
            self.log.skip()

    def _end_steps(self, ends_ns: list[int], now_ns: int, began_ns: int) -> None:
        for end_ns in ends_ns:
            self._end_step(end_ns, began_ns, late=end_ns < now_ns)
            began_ns = time.perf_counter_ns()

    def marked(self, tokens: int | None, now_ns: int, began_ns: int) -> None:
        """End the step that runs, as the program says; from here on nothing else ends steps."""
        log = self.log
        if log.source != "mark":
            if log.source is not None:
                found_in = "backward passes" if log.source == "backward" else "the optimizer"
                self.windows.start_over(
                    f"the first prof.step() came after {log.number} steps of {found_in}: those "
                    "were one step, and the steps to trace are counted from it"
                )
                log.restart()
            log.source = "mark"
        if tokens is not None:
            number = finite_number(tokens)
            if number is None:
                self._part.note("measures.dropped", f"tokens of a step: {tokens!r} is not a number")
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

    def end_phase(self, entered: list[OpenPhase]) -> list[int]:
        """End the innermost of the phases that one block entered.

        Returns the optimizers that stepped within it, and whose steps count from here on.
        """
        phase = self.phases.end(entered)
        if phase.name != _OPTIMIZER or self.phases.current() == _OPTIMIZER:
            return []
        inner, self._inner_optimizers = self._inner_optimizers, []
        return list(dict.fromkeys(inner))

    def finish(self) -> None:
        """Take the ends that nothing came after to make certain for ends of steps."""
        log = self.log
        ends_ns: list[int] = []
        saw_torch = self._optimizers.saw_torch
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
                "run.no_steps",
                f"no step was detected: {why}; for times of each batch or request, call "
                "prof.step() of chopper.profile after it",
                severity="info" if self.infers and saw_torch else "warning",
            )


def finite_number(value: Any) -> float | int | None:
    """Return a value as the number that a manifest can hold; None when it is no finite number."""
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
    part.note("measures.dropped", f"measure {name!r} {why}: dropped, as are further ones")
