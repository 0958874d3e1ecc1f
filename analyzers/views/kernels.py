"""Kernels, copies and memsets by name and launching operator, over all ranks and steps."""

from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.events.calls import SHARE, SPREAD, timed_table
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import Groups, text_rows
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "kernels",
    __doc__,
    (
        column("kernel", "Name of the kernel, copy or memset as recorded."),
        optional("op", "Operator that launched it; null where none was recorded."),
        column("call_count", "Number of device events."),
        column("time_ns", "Sum of their durations, including overlap."),
        SHARE,
        column("mean_ns", "Mean duration of a device event."),
        column("work_class", "Class of the work: compute, communication or copy."),
        *SPREAD,
    ),
    title="Kernels",
    section="Operators",
)


def kernels(events: Events) -> pa.Table:
    """DEVICE_EVENT, EVENT_LINK -> KERNELS, most time first."""
    groups = Groups([events.kernel[0], events.op[0]])
    names = ("kernel", "op", "work_class")
    texts = {name: text_rows(getattr(events, name), groups.first) for name in names}
    return timed_table(VIEW, groups, events.dur_ns, texts)
