"""Recorded arguments of the operators that launched events."""

from __future__ import annotations

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import Texts
from chopper.analyzers.trace.columns import strings


def arguments(run: Attributed, events: Events, rows: np.ndarray, name: str) -> Texts:
    """Return a column of `host_span` of the operators of events, -1 for none."""
    found = np.full(len(rows), -1, dtype=np.int64)
    number: dict[str, int] = {}
    for rank in np.unique(events.rank[rows]).tolist():
        codes, values = strings(run.joined[rank].host_span, name)
        at = np.flatnonzero((events.rank[rows] == rank) & (events.op_row[rows] >= 0))
        if len(at) and values:
            common = np.array([number.setdefault(v, len(number)) for v in values] + [-1])
            found[at] = common[codes[events.op_row[rows[at]]]]
    return found, list(number)
