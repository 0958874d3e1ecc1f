"""Which device events are instances of the same work: same operator, shapes, kernel and grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.columns import strings

if TYPE_CHECKING:
    from chopper.analyzers.links import Links


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
    code, count = np.zeros(len(rows), dtype=np.int64), 1
    for part in parts:
        low = int(part.min()) if len(part) else 0
        width = int(part.max()) - low + 1 if len(part) else 1
        if width == 1:
            continue
        # Few distinct values stay few: renumbering keeps the product far from overflowing.
        values, code = np.unique(code * width + (part - low), return_inverse=True)
        count = len(values)
    return code.reshape(-1), count


def grouped_median(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Median of the values of each group, NaN for a group without any."""
    found = np.full(count, np.nan)
    if not len(values):
        return found
    order = np.lexsort((values, group))
    size = np.bincount(group, minlength=count)
    first = np.cumsum(size) - size
    has = size > 0
    ordered = values[order]
    low = ordered[(first + (size - 1) // 2)[has]]
    high = ordered[(first + size // 2)[has]]
    found[has] = (low + high) / 2
    return found
