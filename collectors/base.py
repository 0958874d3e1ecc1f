"""Protocol of a collector: a source of telemetry or traces, started and stopped by a rank or host.

A collector never harms the program that it watches. Whatever it raises is caught by the profile
that runs it and noted in the manifest; the rest goes on.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from chopper.storage import clock
from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chopper.storage.streams import RowLog

_T = TypeVar("_T")
Scope = Literal["rank", "host"]
"""``rank``: runs in every rank. ``host``: runs once per host, in local rank 0."""
_TRIALS = 25


@dataclass(frozen=True, slots=True)
class Availability:
    """Answer of a collector that was asked to run: yes or no, why, and what would change that."""

    ok: bool
    reason: str | None = None
    """Why not, in words a user understands; for ``ok`` what limits it, if anything does."""
    remedy: str | None = None
    """Advice to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorContext:
    """The rank that a collector runs in, and the folders that it writes to."""

    directory: Path
    """The rank's own folder in the run. Files are named ``<table>.arrow`` or ``trace*.json.gz``."""
    run_path: Path
    """The run directory, shared by all ranks."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    pid: int
    """Process of the rank: the one that trains, not a sampler."""
    device: str | None = None
    """``torch.device`` that the rank computes on, for example ``cuda:0``; None for the host."""
    hostname: str = ""


@runtime_checkable
class Collector(Protocol):
    """One source of data.

    ``probe`` is cheap, has no lasting effect and may be called without ``start``; ``start`` is
    called at most once, ``stop`` at most once and only after ``start`` was entered. All three are
    called by the thread that trains, outside of steps.

    A collector may also have ``on_step`` (see :class:`StepListener`), and for ``chopper doctor``
    ``call_costs_ns(context) -> dict[str, int]``: the median cost of one reading of each source.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope]

    def probe(self, context: CollectorContext) -> Availability:
        """Say whether it can run here."""
        ...

    def start(self, context: CollectorContext) -> None:
        """Start to collect; return quickly.

        Raises:
            CollectorUnavailable: it cannot run here after all; the message says why.
        """
        ...

    def stop(self) -> CollectorReport:
        """Stop, write the remaining data, leave no thread or process behind, and report."""
        ...


@runtime_checkable
class StepListener(Protocol):
    """Optional method of a collector: called at the end of each step.

    A profile calls ``on_step`` on every started collector that has it, on the thread that trains,
    between two steps. It must cost microseconds.
    """

    def on_step(self, step: int) -> None:
        """Read the values of the step that has just ended."""
        ...


def held(count: int | None) -> int | None:
    """Return a count, or None if it exceeds the 63 bits of a table."""
    return count if count is not None and count < 1 << 63 else None


DRIVER_TIMEOUT_S = 5.0
"""A driver that takes longer to list its devices hangs."""


def call_within(timeout_s: float, call: Callable[[], _T]) -> _T:
    """Call a function in another thread; raise TimeoutError if it takes too long.

    Raises:
        TimeoutError: the call still runs; its daemon thread does not keep the process alive.
    """
    results: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that waits
            problems.append(exc)

    thread = threading.Thread(target=run, daemon=True, name="call")
    thread.start()
    thread.join(timeout_s)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError(f"a call has not returned for {timeout_s:g} s")
    return results[0]


class StepCollector(ABC):
    """Base of collectors that read at the end of each step, in the process that trains.

    Rows of one table are on disk about once a second, with the cost of each reading.

    ``name`` is that of the table and its file, too. A reading that fails is the last one.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope] = "rank"
    source: ClassVar[str]
    """Name of what is read, for ``chopper doctor``."""

    def __init__(self) -> None:
        self._subject = self.source
        """Subject of the message that a reading failed."""
        self._problem: str | None = None
        self._log: RowLog
        self._costs_ns: list[int] = []

    @abstractmethod
    def _prepare(self, context: CollectorContext) -> None:
        """Open the source; CollectorUnavailable where there is none."""

    @abstractmethod
    def _read(self) -> tuple[int, tuple[int | None, ...]]:
        """Return thread or device, and the values of the table's columns after ``step``."""

    def start(self, context: CollectorContext) -> None:
        """Take the first reading."""
        from chopper.storage.streams import RowLog

        self._prepare(context)
        self._log = RowLog(context.directory / f"{self.name}.arrow")
        self.on_step(None)

    def on_step(self, step: int | None) -> None:
        """Read once, at the end of a step; None: before the first or after the last one."""
        if self._problem is not None:
            return
        before_ns = time.monotonic_ns()
        time_ns = clock.now_ns()
        try:
            owner, values = self._read()
        except (OSError, RuntimeError, ValueError) as exc:
            # A lost device fails the program soon enough; this must not be what fails it.
            self._problem = f"{self._subject} could not be read: {exc}".splitlines()[0]
            return
        span_ns = time.monotonic_ns() - before_ns
        self._costs_ns.append(span_ns)
        self._log.rows.append((time_ns + span_ns // 2, span_ns, owner, step, *values))
        if self._log.due(before_ns):
            self._log.flush(before_ns)

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:
        """Return the median cost of a reading."""
        self._prepare(context)
        costs_ns = []
        for _ in range(_TRIALS):
            before_ns = time.monotonic_ns()
            self._read()
            costs_ns.append(time.monotonic_ns() - before_ns)
        return {self.source: sorted(costs_ns)[len(costs_ns) // 2]}

    def stop(self) -> CollectorReport:
        """Write the remaining rows and close the file."""
        self._log.close()
        costs_ns = sorted(self._costs_ns)
        return CollectorReport(
            name=self.name,
            status="obtained" if self._problem is None else "failed",
            reason=self._problem,
            files=(f"{self.name}.arrow",) if costs_ns else (),
            samples_count=len(costs_ns),
            dropped_count=0,
            call_p50_ns=costs_ns[len(costs_ns) // 2] if costs_ns else None,
            call_p99_ns=costs_ns[len(costs_ns) * 99 // 100] if costs_ns else None,
        )
