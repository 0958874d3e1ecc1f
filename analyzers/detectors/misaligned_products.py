"""Products whose dimensions miss the multiples that matrix units want."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events

_FEWEST = 3
_MISALIGNED = re.compile(r"align[12](?!\d)")
DETECTOR = detector("misaligned_products", fewest=_FEWEST)


def misaligned_products(events: Events) -> Iterator[Sighting]:
    """DEVICE_EVENT -> a sighting for each data type."""
    codes, names = events.kernel
    small = np.array([is_misaligned(name) for name in names] + [False])[codes]
    known = events.math & (events.ideal_ns > 0) & (events.dur_ns > 0)
    reached = np.where(known, events.ideal_ns / np.maximum(events.dur_ns, 1), np.nan)
    for code in range(len(events.dtype[1])):
        alike = known & (events.dtype[0] == code)
        bad, good = alike & small, alike & ~small
        if not bad.any() or good.sum() < _FEWEST:
            continue
        usual = float(np.median(reached[good]))
        chosen = bad & (reached < usual)
        if not chosen.any():
            continue
        quick = np.rint(events.ideal_ns[chosen] / usual).astype(np.int64)
        ranks = events.rank[chosen]
        rows = {int(r): events.row[chosen][ranks == r] for r in np.unique(ranks)}
        yield Sighting(
            detector="misaligned_products",
            events=rows,
            run_ns={rank: (rank_rows, quick[ranks == rank]) for rank, rank_rows in rows.items()},
            evidence={
                "kernels": int(chosen.sum()),
                "now_ratio": float(np.median(reached[chosen])),
                "other_ratio": usual,
            },
        )


def is_misaligned(kernel: str) -> bool:
    """Tell whether a name says so; kernels without matrix units (simt) always take single elements.

    The ``1x1x1`` in a name is the shape of a cluster.
    """
    return "simt" not in kernel and bool(_MISALIGNED.search(kernel))
