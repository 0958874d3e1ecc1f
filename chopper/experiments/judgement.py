"""Results of an experiment that cannot be, or show nothing, and are withheld with the reason.

A number is held against the bounds that its workload declares, a headline against its own bound,
the spread of its repetitions, and what other programs did meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.experiments.declarations import Bound
from chopper.storage.findings import finding

if TYPE_CHECKING:
    from chopper.storage.manifest import Finding

MOST_SPREAD = 0.25
"""Largest coefficient of variation of repetitions with a headline."""
_NEVER_NEGATIVE = ("_ns", "_per_s", "_bytes", "_hz", "_w", "_j", "_count")
_SIGNED = {"beyond", "change", "difference", "excess", "growth"}
"""Words in the name of a measure that is a difference: it may be less than nothing."""
_ROUNDING = 1e-9
BUSY_CORES = 0.3
"""Other programs that use this many cores, or `BUSY_RATIO` of a large machine's, disturb."""
BUSY_RATIO = 0.05


def natural_bounds(measure: str) -> tuple[Bound, ...]:
    """Return the bounds that a measure's unit sets."""
    if not measure.endswith(_NEVER_NEGATIVE) or _SIGNED.intersection(measure.split("_")):
        return ()
    return (Bound(measure=measure, least=0.0, why="there is no less than nothing"),)


def beyond(
    bound: Bound, variant: str, labels: Iterable[tuple[str, object]], value: float
) -> Finding | None:
    """Return what says that a measured value cannot be; None where it can."""
    measure = bound.measure
    limit = _limit(value, bound.least, bound.most, lambda v: fmt.cell(measure, v))
    if limit is None:
        return None
    text, label_text = fmt.cell(measure, value), ", ".join(str(value) for _, value in labels)
    return finding(
        "experiment.impossible",
        what=f"{fmt.heading(measure)} of {variant}" + (f" ({label_text})" if label_text else ""),
        # Just beyond, it would read as the limit itself.
        found=f"{value:.6g}" if f" {text} is" in limit else text,
        limit=limit,
        why=bound.why,
    )


def _limit(
    value: float, least: float | None, most: float | None, format_value: Callable[[float], str]
) -> str | None:
    """Return in words which limit a value is beyond; None where it is within both."""
    if least is not None and value < least - _ROUNDING * abs(least):
        return f"at least {format_value(least)} is possible"
    if most is not None and value > most + _ROUNDING * abs(most):
        return f"at most {format_value(most)} is possible"
    return None


def disturbances(other_cores: Mapping[str, float], machine_cores: int | None) -> list[Finding]:
    """Return what spoils all that was timed: other programs, in the run where they did most.

    Args:
        other_cores: run → cores that they used; empty where that is unknown.
        machine_cores: of the machine, None where unknown.
    """
    if machine_cores is None or not other_cores:
        return []
    run, cores = max(other_cores.items(), key=lambda item: item[1])
    if cores < tolerated_cores(machine_cores):
        return []
    busy, cores_text = "experiment.busy_machine", f"{cores:.1f}"
    return [finding(busy, cores=cores_text, machine_cores=machine_cores, run=run)]


def too_far_apart(spread_ratio: float | None) -> list[Finding]:
    """Return what says that repetitions disagree; they agree where there is only one."""
    if spread_ratio is None or spread_ratio <= MOST_SPREAD:
        return []
    limit = fmt.ratio(MOST_SPREAD)
    return [finding("experiment.scattered", share=spread_ratio, limit=limit)]


def beyond_limits(
    value: float, unit: str, least: float | None, most: float | None, why: str
) -> list[Finding]:
    """Return what says that a headline cannot be."""

    def format_value(value: float) -> str:
        return f"{value:.4g} {unit}".strip().replace(" ×", "×")

    limit = _limit(value, least, most, format_value)
    if limit is None:
        return []
    return [
        finding("experiment.impossible", what="it", found=format_value(value), limit=limit, why=why)
    ]


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
        machine, process = psutil.cpu_times(), psutil.Process().cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)
        # Linux counts a guest's time as user time, too.
        guests_s = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return (
            sum(machine) - idle_s - guests_s,
            process.user + process.system + process.children_user + process.children_system,
        )

    usage = OtherPrograms()
    began, (machine_before_s, own_before_s) = time.monotonic(), used()
    yield usage
    machine_s, own_s = used()
    taken_s = machine_s - machine_before_s - own_s + own_before_s
    # The two clocks tick apart, so that a quiet machine may seem to have used a little less.
    usage.cores = max(0.0, taken_s / (time.monotonic() - began))
