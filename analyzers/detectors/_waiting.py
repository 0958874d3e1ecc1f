"""Calls of operators that return only when the device has done something."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.causes.idle import blocking_copies
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import row_set

TO_DEVICE = re.compile(r"HtoD|HostToDevice")


@dataclass(frozen=True)
class Waiting:
    """Waiting calls of one rank.

    Attributes:
        rows: of `host_span`.
        operator: outermost operator around each that is not data loading, -1 for none.
        to_device: mask of the calls in an operator that copies to the device.
    """

    rows: np.ndarray
    operator: np.ndarray
    to_device: np.ndarray


def waiting_calls(run: Attributed, rank: int) -> Waiting:
    """Return the calls in a rank's steps that waited for the device."""
    links = run.joined[rank].links()
    host, nesting = links.host, links.host.nesting
    waiting = host.of("runtime", "driver") & host.named(names.is_synchronizing_call)
    waiting[links.launch_row[blocking_copies(links)]] = True
    operator = nesting.topmost(host.where(lambda c, n: c == "cpu_op" and n.startswith("aten::")))
    rows = np.flatnonzero(waiting & (operator >= 0) & spans_in_steps(run, rank)[0])
    copies = links.events.named(TO_DEVICE.search) & links.has_launch
    copying = row_set(operator[links.launch_row[copies]], len(host))
    return Waiting(rows, operator[rows], copying[operator[rows]])
