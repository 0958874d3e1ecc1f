"""Hardware counters of single steps, by torch's own profiler, beside the steps that are traced."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from chopper.errors import CaptureError
from chopper.storage.streams import StreamWriter

if TYPE_CHECKING:
    from chopper.storage.parts import RunWriter

_TENSOR = "sm__ops_path_tensor_src_{}_dst_fp32.sum"
SETS = (
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    tuple(_TENSOR.format(dtype) for dtype in ("bf16", "fp16", "tf32")),
    ("dram__bytes_read.sum", "dram__bytes_write.sum"),
)
"""Each is measured in a step of its own, and so small that a device counts it in one pass: of a set
that needs several, CUPTI runs each kernel several times. A device that lacks one of a set's
counters measures none of that set."""
_TABLE = "kernel_counter"
_NAMELESS = "__missing__"
_SEVERAL_RANKS = (
    "they are measured in programs of one rank, as a collective that has to be repeated for a "
    "counter would wait for ever"
)
_ENDED = (
    "they are measured in steps after a traced window, and the program ended after {steps} steps"
)


class CounterSteps:
    """Measures the sets of counters, each in one step.

    Called as :class:`TraceWindows` is, which says when a step is free. Not of several ranks: CUPTI
    runs kernels one after the other, and a collective that it has to repeat would wait for ever.
    """

    def __init__(self, trace: Any, part: RunWriter, *, wanted: bool, alone: bool) -> None:
        self._trace = trace
        self._part = part
        self._alone = alone
        self._sets = deque(SETS if wanted else ())
        self._rows: list[tuple[Any, ...]] = []
        self.step: int | None = None
        """The step that is being measured."""

    def ready(self) -> bool:
        """Return whether a set is still to be measured; note why torch's profiler counts none."""
        if self._sets:
            reason = self._trace.uncountable() or (None if self._alone else _SEVERAL_RANKS)
            if reason is not None:
                self._give_up(reason)
        return bool(self._sets)

    def _give_up(self, reason: str) -> None:
        self._sets.clear()
        self._part.note("run.no_counters", reason=reason)

    def begin(self, number: int) -> bool:
        """Measure the next set in the step that begins; return whether that is so."""
        try:
            self._trace.begin(self._sets[0])
        except (AssertionError, RuntimeError, TypeError) as exc:  # options that torch has no more
            self._trace.forget()
            self._give_up(f"{type(exc).__name__}: {exc}")
            return False
        self.step = number
        return True

    def end(self) -> None:
        """The step has ended: keep its counters."""
        step, metrics, self.step = self.step, self._sets.popleft(), None
        try:
            self._trace.end()
            kernels = self._trace.counted()
        except (CaptureError, RuntimeError) as exc:
            self._give_up(str(exc))
            return
        # What torch could not name has the number of its range as its name: the names before it
        # are then not of the kernels that they stand at.
        unnamed = sum(name.isdigit() or name == _NAMELESS for _, name, _ in kernels)
        whole, first = len(kernels), metrics[0]
        if unnamed:
            self._part.note(
                "run.no_counters", "unnamed", count=unnamed, whole=whole, step=step, metrics=first
            )
            return
        if not kernels:
            self._part.note("run.no_counters", "empty", step=step, metrics=first)
            return
        seen: Counter[str] = Counter()
        for dispatch, (device, name, counters) in enumerate(kernels):
            head = (f"step {step}: {metrics[0]}", dispatch, name, seen[name], str(device))
            seen[name] += 1
            self._rows += [
                (*head, metric, float(value), None, step)
                for metric, value in counters.items()
                if metric in metrics
            ]
        path = self._part.directory / f"{_TABLE}.arrow"
        with contextlib.closing(StreamWriter(path, _TABLE)) as writer:
            writer.write_rows(self._rows)

    def abort(self) -> None:
        """Another trace begins, or the step will not end here: measure the set no more."""
        if self.step is None:
            return
        self.step = None
        self._sets.popleft()
        if self._trace.mine:
            with contextlib.suppress(CaptureError):
                self._trace.end()
            self._trace.drop()
        else:
            self._trace.abandon()

    def close(self, steps: int) -> None:
        """At the recording's end, after so many steps: say why nothing was measured."""
        self.abort()
        if self.ready() and not self._rows:
            self._give_up(_ENDED.format(steps=steps))
