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


_NO_CLOCKS = (
    "no clock of a device that computed was sampled (the collectors `nvml` and `amdsmi` do), or at "
    "another time"
)

_VIEWS: tuple[View, ...] = (
    View(
        "operations",
        "Operations by arguments",
        "Operators by shapes, types and phase: time, rates, roofline.",
        "chopper.analyzers.views.operations:operations",
    ),
    View(
        "operators",
        "Operators",
        "Operators by name: calls, kernels, time, rates.",
        "chopper.analyzers.views.operations:operators",
    ),
    View(
        "kernels",
        "Kernels",
        "Kernels, copies and memsets by name and launching operator.",
        "chopper.analyzers.views.operations:kernels",
    ),
    View(
        "unmodelled",
        "Unmodelled kernels",
        "Kernels without model, FLOP, bytes or peak: how long they ran, and why.",
        "chopper.analyzers.views.unmodelled:unmodelled",
        "every kernel that computed has a model, and the device its peaks",
    ),
    View(
        "launches",
        "Launch overhead",
        "By operator and phase: what the host did before the launch, and the launching call.",
        "chopper.analyzers.views.launches:launches",
    ),
    View(
        "queue_depth",
        "Queue depth",
        "How many launches wait or run on each stream, for how long, by phase.",
        "chopper.analyzers.views.queue_depth:queue_depth",
        "no event's launch was recorded, or the host ran everything itself",
    ),
    View(
        "cpu_use",
        "CPU use",
        "Active and minimum cores, and each rank's own, per phase and step.",
        "chopper.analyzers.views.cpu_use:cpu_use",
        "the host's cores were not sampled (the collector `host` does in recorded runs)",
    ),
    View(
        "utilization",
        "Utilization",
        "MFU and HFU against the theoretical and the achievable ceiling.",
        "chopper.analyzers.views.utilization:utilization",
    ),
    View(
        "steps",
        "Steps",
        "Observed, ideal and the exclusive states of each step; outliers.",
        "chopper.analyzers.views.steps:steps",
    ),
    View(
        "memory",
        "Memory",
        "Peaks, fragmentation and allocator calls, by rank, device and phase.",
        "chopper.analyzers.views.memory_timeline:memory",
        "neither the allocator's events were recorded (profile with memory=True) nor its totals read",
    ),
    View(
        "memory_over_time",
        "Memory over time",
        "Most memory of each step: allocator, device and host.",
        "chopper.analyzers.views.memory:memory_over_time",
        "no memory was sampled (the collectors `device_memory` and `host` do) and no snapshot given",
    ),
    View(
        "memory_segments",
        "Memory segments",
        "What the allocator held from the driver, and how fragmented it was.",
        "chopper.analyzers.views.memory:memory_segments",
        "no snapshot of the allocator (record with memory=True, or import one beside the trace)",
    ),
    View(
        "memory_holders",
        "Who holds memory",
        "Memory in use by the line of Python that allocated it.",
        "chopper.analyzers.views.memory:memory_holders",
        "no snapshot of the allocator (record with memory=True, or import one beside the trace)",
    ),
    View(
        "memory_determinism",
        "Memory determinism",
        "How alike steps allocate, and whether clocks vary where they do not.",
        "chopper.analyzers.views.memory_determinism:memory_determinism",
        "the allocator's events of steps were not recorded (profile with memory=True)",
    ),
    View(
        "memory_steps",
        "Memory, step by step",
        "Each step's allocations: likeness to the step before, sizes, peaks, clock.",
        "chopper.analyzers.views.memory_determinism:memory_steps",
        "the allocator's events of steps were not recorded (profile with memory=True)",
    ),
    View(
        "collectives",
        "Collectives",
        "Each matched collective: waiting, who came last, transfer, bandwidths.",
        "chopper.analyzers.views.communication:collectives",
        "no collective was seen on all ranks of its group (give the traces of all ranks)",
    ),
    View(
        "stragglers",
        "Stragglers",
        "Who made the others wait at collectives, and what it was late with.",
        "chopper.analyzers.views.stragglers:stragglers",
        "no collective was seen on all ranks of its group, or nobody waited",
    ),
    View(
        "exposed_communication",
        "Exposed and hidden communication",
        "By collective, group, phase and layer: what no computing hid.",
        "chopper.analyzers.views.communication:exposed_communication",
        "nothing communicated",
    ),
    View(
        "overlap",
        "Overlap with communication",
        "By operator, shapes and kernel: time beside communication, and its price.",
        "chopper.analyzers.views.overlap:overlap",
        "nothing communicated, or nothing computed",
    ),
    View(
        "critical_path",
        "Critical path",
        "What everything waited for, from the first step to the end of the last: by cause and name.",
        "chopper.replaying:critical_path",
        "the run cannot be replayed: it has no device events, or their launches were not recorded",
    ),
    View(
        "critical_path_timeline",
        "Critical path in time",
        "What everything waited for, in order of time: rank, cause and name of each stretch.",
        "chopper.replaying:critical_path_timeline",
        "the run cannot be replayed: it has no device events, or their launches were not recorded",
    ),
    View(
        "lead",
        "Lead of ranks",
        "How long before the last rank each rank begins, by step.",
        "chopper.analyzers.views.overlap:lead",
        "one rank only, or ranks that ran nothing in common",
    ),
    View(
        "clock_by_phase",
        "Clocks by phase",
        "SM clock, power, and what held the clock down, by rank and phase.",
        "chopper.analyzers.views.clocks:clock_by_phase",
        _NO_CLOCKS,
    ),
    View(
        "clock_by_operator",
        "Clocks by operator",
        "SM clock, power, and what held the clock down, by operator.",
        "chopper.analyzers.views.clocks:clock_by_operator",
        _NO_CLOCKS,
    ),
    View(
        "clock_by_kernel",
        "Clocks by kernel",
        "SM clock, power, and what held the clock down, by operator, shapes and kernel.",
        "chopper.analyzers.views.clocks:clock_by_kernel",
        _NO_CLOCKS,
    ),
    View(
        "clock_by_step",
        "Clocks by step",
        "SM clock by step, and what the step would take at the reference clock.",
        "chopper.analyzers.views.clocks:clock_by_step",
        _NO_CLOCKS,
    ),
    View(
        "throttle_episodes",
        "Throttle episodes",
        "When the clock was held down, why, and which kernels it hit.",
        "chopper.analyzers.views.throttling:throttle_episodes",
        "no clock reading names a reason that held it (power, heat, a set clock), or none was "
        "recorded with its reasons",
    ),
    View(
        "energy",
        "Energy",
        "Energy per step, token and phase, by device and host domain.",
        "chopper.analyzers.views.energy:energy",
        "neither energy nor power of a device or of the host's processors was sampled",
    ),
    View(
        "scheduling",
        "Waiting for cores",
        "Running and waiting of each rank and its threads; throttling, steal, switches, faults.",
        "chopper.analyzers.views.scheduling:scheduling",
        "neither threads nor the host were sampled (the collector `host` does in recorded runs)",
    ),
    View(
        "links",
        "Links",
        "What ports, interfaces and device links carried, and signs of congestion, by step.",
        "chopper.analyzers.views.links:links",
        "no link's counters were sampled (the collectors `host`, `fabric`, `nvml`, `amdsmi` do)",
    ),
    View(
        "clock_sensitivity",
        "Dependence on the clock",
        "How much kernels slow down as the SM clock falls, with its error.",
        "chopper.analyzers.views.factors:clock_sensitivity",
        _NO_CLOCKS,
    ),
    View(
        "contention",
        "Contention",
        "Kernels that ran beside others, against the same work alone.",
        "chopper.analyzers.views.factors:contention",
        "no kernel whose ideal time is known ran beside another one",
    ),
    View(
        "wave_quantization",
        "Last waves",
        "Products whose blocks do not fill the device's units.",
        "chopper.analyzers.views.factors:wave_quantization",
        "no product's grid was recorded in blocks, the device is unknown, or all rounds are full",
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
