"""Slowdown of kernels as the SM clock falls, with its error.

Duration grows with the clock to the power of minus the sensitivity. If the same work ran at several
clocks, the sensitivity is their slope, otherwise it follows from the roofline.
"""

from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.groups import real_or_null, whole_or_null
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views._clocks import NO_CLOCKS
from chopper.analyzers.views._works import COLUMNS, Columns, Works, works_table

VIEW = View(
    "clock_sensitivity",
    __doc__,
    (
        *COLUMNS,
        column("time_ns", "Device time of all instances."),
        column("sensitivity_ratio", "Sensitivity that the attribution uses, 0 to 1."),
        column("sensitivity_error_ratio", "Standard error of that sensitivity."),
        optional("slope_ratio", "Sensitivity measured from instances at several clocks."),
        optional("slope_error_ratio", "Standard error of the measured sensitivity."),
        column(
            "roofline_ratio", "Ideal over roofline time: the sensitivity if it was not measured."
        ),
        column("count", "Number of instances."),
        column("used_count", "Number of instances that ran alone at a known clock."),
        optional("clock_low_hz", "Lowest clock of these instances; null where there are none."),
        optional("clock_high_hz", "Highest clock of these instances; null where there are none."),
    ),
    title="Sensitivity to the clock",
    section="Clocks",
    needs=NO_CLOCKS,
)


def clock_sensitivity(run: Attributed) -> pa.Table:
    """DEVICE_EVENT, DEVICE_CLOCK -> CLOCK_SENSITIVITY, most time first."""
    return works_table(VIEW, run, _columns).sort_by([("time_ns", "descending")])


def _columns(works: Works) -> Columns | None:
    of = works.factors.by_signature
    if not works.factors.clocks.readers:
        return None
    return works.count > 0, {
        "sensitivity_ratio": of.value,
        "sensitivity_error_ratio": of.error,
        "slope_ratio": real_or_null(of.slope),
        "slope_error_ratio": real_or_null(of.slope_error),
        "roofline_ratio": of.roofline,
        "used_count": of.used_count,
        "clock_low_hz": whole_or_null(of.clock_low_hz),
        "clock_high_hz": whole_or_null(of.clock_high_hz),
    }
