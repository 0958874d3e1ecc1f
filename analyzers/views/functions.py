"""Functions of the program by the time of the steps that they hold, over all ranks and steps.

On a device, the time in which it waited for the host; without one, the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.places import functions_in
from chopper.analyzers.trace.join import Links
from chopper.analyzers.views import View, column
from chopper.causes import LEAVES

VIEW = View(
    "functions",
    __doc__,
    (
        column("function", "File, line and name of the function, as the Python stacks have it."),
        column("time_ns", "Time in the function and in what it calls."),
        column("own_ns", "Time in the function and in the libraries that it calls."),
        column("share_ratio", "Time in the function as a share of the observed time."),
    ),
    title="Functions of the program",
    section="Operators",
    needs="no Python stacks of the program's own functions were recorded (with_stack=True)",
)
_IDLE = tuple(cause for cause in LEAVES if cause.startswith("idle."))


def functions(run: Attribution, links: Mapping[int, Links]) -> pa.Table:
    """GAP, HOST_SPAN -> FUNCTIONS, most time first."""
    on_host = all(joined.host_only for joined in run.joined.values())
    found = functions_in(run, links, None if on_host else _IDLE)
    names = sorted(found.total, key=lambda name: (-found.total[name], name))
    time_ns = np.array([found.total[name] for name in names], dtype=np.int64)
    return VIEW.of(
        {
            "function": names,
            "time_ns": time_ns,
            "own_ns": np.array([found.own[name] for name in names], dtype=np.int64),
            "share_ratio": time_ns / max(run.observed_ns, 1),
        }
    )
