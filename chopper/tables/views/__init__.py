"""Tables of the views: one declaration per entry of :mod:`chopper.views`.

Columns stand in order of importance: a narrow terminal shows the first ones.
"""

from __future__ import annotations

from chopper.tables._base import Table
from chopper.tables.views.clocks import (
    CLOCK_BY_KERNEL,
    CLOCK_BY_OPERATOR,
    CLOCK_BY_PHASE,
    CLOCK_BY_STEP,
    CLOCK_SENSITIVITY,
    CONTENTION,
    ENERGY,
    THROTTLE_EPISODES,
    WAVE_QUANTIZATION,
)
from chopper.tables.views.communication import (
    COLLECTIVES,
    EXPOSED_COMMUNICATION,
    LEAD,
    LINKS,
    OVERLAP,
    STRAGGLERS,
)
from chopper.tables.views.memory import (
    MEMORY,
    MEMORY_DETERMINISM,
    MEMORY_HOLDERS,
    MEMORY_OVER_TIME,
    MEMORY_SEGMENTS,
    MEMORY_STEPS,
)
from chopper.tables.views.operations import (
    CPU_USE,
    CRITICAL_PATH,
    CRITICAL_PATH_TIMELINE,
    KERNELS,
    LAUNCHES,
    OPERATIONS,
    OPERATORS,
    QUEUE_DEPTH,
    SCHEDULING,
    STEPS,
    UNMODELLED,
    UTILIZATION,
)

VIEW_TABLES: tuple[Table, ...] = (
    OPERATIONS,
    OPERATORS,
    KERNELS,
    UNMODELLED,
    LAUNCHES,
    QUEUE_DEPTH,
    CPU_USE,
    UTILIZATION,
    STEPS,
    MEMORY,
    MEMORY_OVER_TIME,
    MEMORY_SEGMENTS,
    MEMORY_HOLDERS,
    MEMORY_STEPS,
    MEMORY_DETERMINISM,
    COLLECTIVES,
    STRAGGLERS,
    EXPOSED_COMMUNICATION,
    OVERLAP,
    CRITICAL_PATH,
    CRITICAL_PATH_TIMELINE,
    LEAD,
    CLOCK_BY_PHASE,
    CLOCK_BY_OPERATOR,
    CLOCK_BY_KERNEL,
    CLOCK_BY_STEP,
    CLOCK_SENSITIVITY,
    CONTENTION,
    WAVE_QUANTIZATION,
    THROTTLE_EPISODES,
    ENERGY,
    SCHEDULING,
    LINKS,
)

__all__ = ["VIEW_TABLES"]
