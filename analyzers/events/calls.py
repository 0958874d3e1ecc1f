"""Calls of operators, and the time of each.

A call's time is the time in which device events that it launched itself (as their innermost
operator) ran: their union, as TraceLens' *direct kernel time* has it. What others ran beside them
counts in full, so the sums over calls can exceed the attributed time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import Groups, busy_of


@dataclass(frozen=True)
class Calls:
    """Calls of operators: the call of each event, and the time of each call."""

    groups: Groups
    busy_ns: np.ndarray


def calls_of(events: Events) -> Calls:
    """Group events by operator call; an event without an operator is a call of its own."""
    alone = events.op_row < 0
    groups = Groups([events.rank, np.where(alone, -1 - events.row, events.op_row)])
    return Calls(groups, busy_of(groups.of_row, len(groups), events.start_ns, events.dur_ns))
