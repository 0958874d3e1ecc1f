"""Instances of the same work among device events: same operator, shapes, kernel and grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace.columns import distinct_rows, strings

if TYPE_CHECKING:
    from chopper.analyzers.trace.join import Links


def signatures(links: Links, rows: np.ndarray, op: np.ndarray) -> tuple[np.ndarray, int]:
    """Number the distinct works among some device events.

    The signature is the operator's name, shapes, types and scalar inputs, the kernel's name, its
    grid and block, and the device.

    Args:
        rows: device events.
        op: the host row of each one's operator, -1 where it has none.

    Returns:
        One code per row, and how many there are.
    """
    events, host = links.events, links.host
    parts = [
        events.names[0][rows],
        strings(events.table, "grid")[0][rows],
        strings(events.table, "block")[0][rows],
        events.device_id[rows],
    ]
    if len(host):
        for codes, _ in (host.names, host.input_dims, host.input_types, host.concrete_inputs):
            parts.append(np.where(op >= 0, codes[op], -1))
    first, number = distinct_rows(parts)
    return number, len(first)


def grouped_median(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Median of the values of each group, NaN for a group without any.

    Args:
        values: finite.
        group: below ``count``.
    """
    found = np.full(count, np.nan)
    if not len(values):
        return found
    # One sort of group + place in (0, 1) is several times faster than one by two keys; 30 bits are
    # left for the place among a million groups.
    low, width = float(values.min()), float(np.ptp(values)) or 1.0
    key = np.sort(group + (values - low) / width * 0.999)
    size = np.bincount(group, minlength=count)
    begin = np.cumsum(size) - size
    has = np.flatnonzero(size)
    at = (key[(begin + (size - 1) // 2)[has]] + key[(begin + size // 2)[has]]) / 2
    found[has] = (at - has) / 0.999 * width + low
    return found
