"""Time that other programs took of this machine's cores while something was measured on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

BUSY_CORES = 0.3
"""Other programs that use this many cores, or `BUSY_RATIO` of a large machine's, disturb."""
BUSY_RATIO = 0.05


@dataclass(slots=True)
class OtherPrograms:
    """Cores that programs other than this one and its children used while a block ran."""

    cores: float = 0.0


def tolerated_cores(machine_cores: int) -> float:
    """Return how many cores other programs may use before a measurement shows nothing."""
    return max(BUSY_CORES, BUSY_RATIO * machine_cores)


def machine_cores() -> int:
    """Return the number of cores that the machine's own count of busy time is about."""
    return os.cpu_count() or 1


@contextlib.contextmanager
def others_while() -> Iterator[OtherPrograms]:
    """Measure the cores that other programs use while the block runs.

    Busy time of the whole machine, time stolen by other virtual machines included, less that of
    this process and of the children that it has waited for.
    """
    import psutil

    def used() -> tuple[float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)
        # Linux counts a guest's time as user time, too.
        guests_s = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return (
            sum(machine) - idle_s - guests_s,
            own.user + own.system + own.children_user + own.children_system,
        )

    others = OtherPrograms()
    began, (machine_before, own_before) = time.monotonic(), used()
    yield others
    machine, own = used()
    taken_s = machine - machine_before - own + own_before
    # The two clocks tick apart, so that a quiet machine may seem to have used a little less.
    others.cores = max(0.0, taken_s / (time.monotonic() - began))
