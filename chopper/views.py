"""Tables that look at an attributed run from one side: operations, launches, stragglers …

Each is made by a pure function of an :class:`~chopper.attribution.Attribution`, loaded when it is
asked for. ``chopper analyze RUN --view NAME`` prints one, the HTML report shows all that have rows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chopper.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.attribution import Attribution


@dataclass(frozen=True, slots=True)
class View:
    """One view of a run.

    Attributes:
        name: what ``--view`` takes; also the name of its declared table.
        title: heading in reports.
        doc: what it shows, one line.
        target: ``module:function`` that makes the table from an attribution, sorted by importance.
        needs: why it has no rows where it has none.
    """

    name: str
    title: str
    doc: str
    target: str
    needs: str = ""


_VIEWS: tuple[View, ...] = (
    View(
        "operations",
        "Operations by unique arguments",
        "Operators by shapes, types and phase: time, rates, roofline.",
        "chopper.analyzers.operations:operations",
    ),
    View(
        "operators",
        "Operators",
        "Operators by name: calls, kernels, time, rates.",
        "chopper.analyzers.operations:operators",
    ),
    View(
        "kernels",
        "Kernels",
        "Kernels, copies and memsets by name and launching operator.",
        "chopper.analyzers.operations:kernels",
    ),
    View(
        "unmodelled",
        "Unmodelled kernels",
        "Kernels without model, FLOP, bytes or peak: how long they ran, and why.",
        "chopper.analyzers.work.unmodelled:unmodelled",
        "every kernel that computed has a model, and the device its peaks",
    ),
    View(
        "launches",
        "Launch overhead",
        "By operator and phase: what the host did before the launch, and the launching call.",
        "chopper.analyzers.launches:launches",
    ),
    View(
        "queue_depth",
        "Queue depth",
        "How many launches wait or run on each stream, for how long, by phase.",
        "chopper.analyzers.queue:queue_depth",
        "no event's launch was recorded, or the host ran everything itself",
    ),
    View(
        "cpu_use",
        "CPU use",
        "Active and minimum cores, and each rank's own, per phase and step.",
        "chopper.analyzers.cpu_use:cpu_use",
        "the host's cores were not sampled (the collector `host` does in recorded runs)",
    ),
    View(
        "utilization",
        "Utilization",
        "MFU and HFU against the theoretical and the achievable ceiling.",
        "chopper.analyzers.utilization:utilization",
    ),
    View(
        "steps",
        "Steps",
        "Observed, ideal and the exclusive states of each step; outliers.",
        "chopper.analyzers.step_states:steps",
    ),
    View(
        "memory",
        "Memory",
        "Peaks, fragmentation and allocator calls, by rank, device and phase.",
        "chopper.analyzers.memory:memory",
        "neither the allocator's events were recorded (profile with memory=True) nor its totals read",
    ),
    View(
        "memory_determinism",
        "Memory determinism",
        "How alike steps allocate, and whether clocks vary where they do not.",
        "chopper.analyzers.determinism:memory_determinism",
        "the allocator's events of steps were not recorded (profile with memory=True)",
    ),
    View(
        "memory_steps",
        "Memory, step by step",
        "Each step's allocations: likeness to the step before, sizes, peaks, clock.",
        "chopper.analyzers.determinism:memory_steps",
        "the allocator's events of steps were not recorded (profile with memory=True)",
    ),
)

VIEWS: dict[str, View] = {view.name: view for view in _VIEWS}


def view(attribution: Attribution, name: str) -> pa.Table:
    """One view of an attributed run, as the declared table of the same name.

    Raises:
        UsageError: no such view.
    """
    from chopper.tables import TABLES

    if name not in VIEWS:
        raise UsageError(f"view {name!r} unknown: one of {', '.join(sorted(VIEWS))}")
    module, _, function = VIEWS[name].target.partition(":")
    made = getattr(importlib.import_module(module), function)(attribution)
    return TABLES[name].validate(made)
