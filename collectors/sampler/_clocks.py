"""Time as a sampler sees it, and the source that reads the host's clocks."""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from chopper.collectors.sampler._source import Sink


class Clock(Protocol):
    """Time as the sampler sees it; :class:`chopper.testing.FakeClock` is another one."""

    def time_ns(self) -> int:
        """CLOCK_REALTIME."""
        ...

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        ...

    def monotonic_raw_ns(self) -> int | None:
        """CLOCK_MONOTONIC_RAW, None where there is none."""
        ...

    def cpu_ns(self) -> int:
        """CPU time of this process."""
        ...

    def wait_until(self, deadline_ns: int) -> bool:
        """Sleep until CLOCK_MONOTONIC reads ``deadline_ns``; True when told to stop instead."""
        ...


class ClockSource:
    """Reads the host's clocks together. -> CLOCK."""

    name: ClassVar[str] = "clock"
    tables: ClassVar[tuple[str, ...]] = ("clock",)

    def __init__(self, clock: Clock | None = None) -> None:
        self.absent: dict[str, str] = {}
        self._clock = clock or SystemClock()
        self._offset_ns: int | None = None
        self.error_ns: int | None = None
        """Largest error in placing a monotonic time on the wall clock that was seen: half the time
        that reading both took, plus by how much the wall clock was stepped between readings."""

    def open(self) -> None:
        """Note which clocks there are."""
        if self._clock.monotonic_raw_ns() is None:
            self.absent["clock.monotonic_raw_ns"] = "no CLOCK_MONOTONIC_RAW on this system"

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Read the triple: the wall clock between two readings of the monotonic one."""
        del now_ns
        clock = self._clock
        # The tightest of three: the first may have been interrupted.
        best: tuple[int, int, int] | None = None
        for _ in range(3):
            before_ns = clock.monotonic_ns()
            real_ns = clock.time_ns()
            after_ns = clock.monotonic_ns()
            if best is None or after_ns - before_ns < best[2]:
                best = (real_ns, (before_ns + after_ns) // 2, after_ns - before_ns)
        assert best is not None
        real_ns, mono_ns, width_ns = best
        raw_ns = clock.monotonic_raw_ns()
        if raw_ns is not None:
            # Read a little later than the pair: bring it back to the pair's moment.
            raw_ns -= clock.monotonic_ns() - mono_ns
        offset_ns = real_ns - mono_ns
        step_ns = abs(offset_ns - self._offset_ns) if self._offset_ns is not None else 0
        self._offset_ns = offset_ns
        self.error_ns = max(self.error_ns or 0, width_ns // 2 + step_ns)
        sink.add("clock", mono_ns, raw_ns)

    def close(self) -> None:
        """Nothing to close."""


class SystemClock:
    """The real clocks. Waits on a pipe, so that word to stop is heard while asleep.

    Args:
        stop_fd: a descriptor that becomes readable when the sampler must stop.
        parent_pid: process without which it must stop.
    """

    def __init__(self, stop_fd: int | None = None, parent_pid: int | None = None) -> None:
        self._stop_fds = [] if stop_fd is None else [stop_fd]
        self._parent_pid = parent_pid
        self.stop_requested = False
        self.orphaned = False

    def time_ns(self) -> int:
        """CLOCK_REALTIME."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def monotonic_raw_ns(self) -> int | None:
        """CLOCK_MONOTONIC_RAW."""
        raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
        return None if raw is None else time.clock_gettime_ns(raw)

    def cpu_ns(self) -> int:
        """CPU time of this process."""
        return time.process_time_ns()

    def wait_until(self, deadline_ns: int) -> bool:
        """Sleep until a moment, or until the pipe speaks or the parent is gone."""
        while not self.stop_requested:
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self.orphaned = True
                return True
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                return False
            # The remainder is computed from the deadline each time, so that errors do not add up.
            # At most a second, so that a parent that vanished silently is noticed.
            readable, _, _ = select.select(self._stop_fds, [], [], min(left_ns / 1e9, 1.0))
            if readable and self._heard_stop(readable[0]):
                return True
        return True

    def _heard_stop(self, fd: int) -> bool:
        try:
            heard = os.read(fd, 64)
        except BlockingIOError:
            return False
        if not heard:  # end of file: whoever held the other end has gone
            self.orphaned = True
            return True
        # A signal's handler may have set it just now: never unset it.
        self.stop_requested = self.stop_requested or b"stop" in heard
        return self.stop_requested
