"""Calls of operators that return only when the device has done something."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.causes.idle import blocking_copies
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import row_set
from chopper.analyzers.trace.join import Links


@dataclass(frozen=True)
class Waiting:
    """Waiting calls of one rank.

    Attributes:
        rows: of `host_span`.
        operator: outermost operator around each.
        to_device: mask of the calls in an operator that copies to the device.
    """

    rows: np.ndarray
    operator: np.ndarray
    to_device: np.ndarray


def waiting_calls(links: Links, inside: np.ndarray) -> Waiting:
    """Return the calls of a rank's operators that waited for the device.

    Args:
        links: the rank's joined events.
        inside: mask of the host spans that are looked at.
    """
    host, nesting = links.host, links.host.nesting
    waiting = host.of("runtime", "driver") & host.named(names.is_synchronizing_call)
    waiting[links.launch_row[blocking_copies(links)]] = True
    operator = nesting.topmost(host.where(lambda c, n: c == "cpu_op" and n.startswith("aten::")))
    rows = np.flatnonzero(waiting & (operator >= 0) & inside)
    copies = links.events.named(names.is_copy_to_device) & links.has_launch
    copying = row_set(operator[links.launch_row[copies]], len(host))
    return Waiting(rows, operator[rows], copying[operator[rows]])
