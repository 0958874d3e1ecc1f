"""The collectors of one recording: started, told of steps, stopped; none harms another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.recording import signals
from chopper.recording.finish import exception_text
from chopper.storage import manifest as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.collectors.base import Collector, CollectorContext
    from chopper.recording.options import Options

_TRACE = "torch_trace"
_HISTORY = "allocator_history"
"""Comes with ``memory=True``, which asks for each allocation."""


class Collecting:
    """Collectors between ``start`` and ``stop``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._running: list[Collector] = []
        self._on_step: list[tuple[str, Callable[[int], None]]] = []
        self._reports: dict[str, m.CollectorReport] = {}
        self.trace: Any = None
        """The collector of traces, where it was obtained."""

    def start(self, context: CollectorContext) -> None:
        """Start those that can be had here."""
        from chopper.collectors import registry

        names = self._options.collect
        if names is None:
            names = registry.defaults()
        if self._options.memory:
            names = tuple(dict.fromkeys((*names, _HISTORY)))
        if not self._options.trace:
            self._refused(_TRACE, "not requested (trace=False)")
        elif _TRACE in names and signals.cannot_trace():
            self._refused(
                _TRACE,
                "this process was forked from one that had traced, and no trace can be taken in it",
                'start it with another method ("spawn")',
            )
        classes, unloadable = registry.load_all(n for n in names if n not in self._reports)
        for name, reason in unloadable.items():
            self._refused(name, reason)
        # Samplers of the host first: their start is no part of what a rank's collectors read.
        for name, kind in sorted(classes.items(), key=lambda item: item[1].scope):
            if kind.scope == "rank" or context.local_rank == 0:
                self._start(name, kind, context)

    def _start(self, name: str, kind: type[Collector], context: CollectorContext) -> None:
        stage = "making it"
        try:
            options = self._options
            traced = {"shapes": options.shapes, "stacks": options.stacks, "memory": options.memory}
            collector = kind(**traced if name == _TRACE else {})
            stage = "probe"
            available = collector.probe(context)
            if not available.ok:
                self._refused(name, available.reason, available.remedy)
                return
            stage = "start"
            collector.start(context)
        except Exception as exc:  # noqa: BLE001 - a collector must not harm the program
            self._failed(name, stage, exc)
            return
        self._running.append(collector)
        self._reports[name] = m.CollectorReport(name=name, status="obtained")
        if hasattr(collector, "on_step"):
            self._on_step.append((name, collector.on_step))
        if name == _TRACE:
            self.trace = collector

    def step_ended(self, number: int) -> None:
        """Tell those that want to know."""
        for name, on_step in self._on_step:  # replaced below, never changed
            try:
                on_step(number)
            except Exception as exc:  # noqa: BLE001 - a collector must not harm the program
                self._failed(name, "on_step", exc)
                self._on_step = [entry for entry in self._on_step if entry[0] != name]

    def stop(self) -> None:
        """Stop all, and take their reports."""
        for collector in self._running:
            try:
                report = collector.stop()
            except Exception as exc:  # noqa: BLE001 - a collector must not harm the program
                self._failed(collector.name, "stop", exc)
                continue
            if self._reports[collector.name].status == "obtained":
                self._reports[collector.name] = report

    def say_of_trace(self, files: tuple[str, ...], why_none: str) -> None:
        """Complete the report on the trace: which files, or why there are none."""
        report = self._reports.get(_TRACE)
        if self.trace is not None and report is not None and report.status == "obtained":
            report.files = files
            if not files:
                report.reason = why_none

    def reports(self) -> list[m.CollectorReport]:
        """One for each collector that was asked for."""
        return list(self._reports.values())

    def _refused(self, name: str, reason: str | None, remedy: str | None = None) -> None:
        self._reports[name] = m.CollectorReport(
            name=name, status="refused", reason=reason, remedy=remedy
        )

    def _failed(self, name: str, stage: str, exc: BaseException) -> None:
        self._reports[name] = m.CollectorReport(
            name=name, status="failed", reason=f"{stage}: {exception_text(exc)}"
        )
