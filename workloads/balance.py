"""Sizes of products and transfers that take as long as each other on the device at hand.

Overlap shows nothing where one of the two is short, or where launches decide how long both take.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from chopper import wording as fmt
from chopper.hardware import calibration
from chopper.hardware.devices import DevicePeaks, host_rates_of, reach_of

SHORTEST_S = 50e-6
"""A chunk's product lasts so long: some ten times as long as its launch."""
_TILE = 128
_INNER = 4096
"""Inner dimension where no transfer depends on it."""


class Rates(NamedTuple):
    """What a device computes, and what a rank receives meanwhile."""

    flop_per_s: float
    link_bytes_per_s: float
    source: str


class Sizes(NamedTuple):
    """X [m, k] · W [k, n]."""

    m: int
    k: int
    n: int


def needed_bytes(sizes: Sizes, *, parts: int, element_bytes: int) -> int:
    """Return about what one rank needs: both operations, and float64 to check them.

    X is held twice, and one part of it in float64.
    """
    (m, k, n), size = sizes, element_bytes
    gathered = m * k * 2 * size + m * k // parts * (size + 24)
    return gathered + 2 * k * n * (size + 8) + m * n * (3 * size + 24)


def balanced(
    rates: Rates,
    *,
    parts: int,
    chunks: int,
    element_bytes: int,
    memory_bytes: int,
    scatters: bool = True,
) -> tuple[Sizes, list[str]]:
    """Choose sizes with which operations balance, and chunks last long enough; and say why.

    Of s parts all but one travel. With F FLOP/s, B bytes/s and e bytes an element,

        gather:   2·m·k·n / F = (s − 1)/s · m·k·e / B          n = F·e·(s − 1) / (2·s·B)
        scatter:  2·m·(k/s)·n / F = (s − 1)/s · m·n·e / B      k = s·n

    whatever m is. It makes the smallest product of a chunk last ``SHORTEST_S``, as far as all fits
    in three quarters of the memory.
    """
    travelling = (parts - 1) / parts * element_bytes / rates.link_bytes_per_s
    n = max(round(rates.flop_per_s * travelling / 2 / _TILE), 1) * _TILE
    k, inner = (parts * n, n) if scatters else (_INNER, _INNER)
    tiles = math.ceil(SHORTEST_S * rates.flop_per_s / (2 * inner * n) / _TILE)
    rows = parts * chunks * _TILE
    each_bytes = needed_bytes(Sizes(rows, k, n), parts=parts, element_bytes=element_bytes)
    tiles = max(min(tiles, memory_bytes * 3 // 4 // each_bytes), 1)
    shortest_s = 2 * tiles * _TILE * inner * n / rates.flop_per_s
    why = (
        f"--m {tiles * rows} --k {k} --n {n}: product and transfer take equally long at "
        f"{fmt.flops(rates.flop_per_s)} and {fmt.rate(rates.link_bytes_per_s)} ({rates.source}), "
        f"and a chunk's product {fmt.duration(shortest_s * 1e9)} at least"
    )
    return Sizes(tiles * rows, k, n), [why]


def rates_of(
    device_name: str, peaks: DevicePeaks | None, *, ranks: int, devices_count: int, dtype: str
) -> Rates | None:
    """Return a device's rates as calibrated here, else by the table; None where one is unknown.

    Args:
        device_name, peaks: of the device; None where the table has none.
        ranks: on one host; one alone takes its parts from the host's memory.
        devices_count: of the host.
        dtype: as torch names it.
    """
    measured = calibration.load(device_name)
    flop_per_s = None if measured is None else measured.flop_per_s(dtype)
    link = measured.link_bytes_per_s if measured and measured.link_ranks == ranks > 1 else None
    sources = [measured.source] if measured and (flop_per_s or link) else []
    if peaks is not None and None in (flop_per_s, link):
        by_table = peaks.flop_per_s(calibration.DTYPE_NAMES[dtype])
        flop_per_s = flop_per_s or (by_table and by_table * reach_of(peaks).products)
        link = link or _link_bytes_per_s(peaks, ranks, devices_count)
        sources.append(f"{peaks.label}, table of devices")
    return Rates(flop_per_s, link, "; ".join(sources)) if flop_per_s and link else None


def _link_bytes_per_s(peaks: DevicePeaks, ranks: int, devices_count: int) -> float | None:
    """Return the rate of a device's own links in one direction, else of its link to the host.

    On a mesh a group uses the links to its members: one to each.
    """
    host, own = host_rates_of(peaks), peaks.link_bytes_per_s.value
    least = peaks.least_group_count(devices_count)
    if ranks > 1 and own and least is not None:
        return own / 2 * min((ranks - 1) / (least - 1), 1)
    return None if host is None else host.to_device_bytes_per_s
