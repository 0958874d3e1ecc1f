"""Max-min fair rates of flows that share links."""

from __future__ import annotations

import numpy as np


def fair_rates(links: np.ndarray, capacity: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Max-min fair rates, by progressive filling: the tightest link settles its queue pairs first.

    Args:
        links: of each queue pair, the links that it goes through, [queue pairs, links of each].
        capacity: of each link.
        active: queue pairs that send.
    """
    rates = np.zeros(len(links))
    free = capacity.astype(np.float64)
    waiting = np.flatnonzero(active)
    through = links[waiting]
    while len(waiting):
        using = np.bincount(through.ravel(), minlength=len(free))
        share = np.where(using > 0, free / np.maximum(using, 1), np.inf)
        least = share.min()
        settled = share[through].min(1) <= least * (1 + 1e-9)
        rates[waiting[settled]] = least
        free -= least * np.bincount(through[settled].ravel(), minlength=len(free))
        np.maximum(free, 0, out=free)
        waiting, through = waiting[~settled], through[~settled]
    return rates
