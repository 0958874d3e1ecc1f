"""Flows through a fabric, from their first to their last byte: hashing, failures, admission.

Each flow runs from its own port to a receiver's; each of its queue pairs is hashed onto one
uplink in between. Rates are max-min fair over ports and uplinks (the limit of lossless Ethernet
with fair queueing), and change when a flow ends or is admitted, or an uplink fails.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from chopper.errors import UsageError
from chopper.quantities import positive

_MOST_QUEUE_PAIRS = 4_096
_LEAST_DRAWS = 4
_FAIL_AT_RATIO = 0.5
"""In times that even sharing would take."""
_TOGETHER_RATIO = 0.01
"""Share of the shortest possible time; ends within it count as simultaneous."""


class Simulated(msgspec.Struct, kw_only=True, frozen=True):
    """One way of sending, mean over trials; 1 is the time that even sharing would take."""

    queue_pairs_count: int
    receivers_count: int
    failed_count: int
    admitted_count: int | None
    """Flows per receiver at a time; null: all of them."""
    headroom_ratio: float
    """Rate of the uplinks over what all ports can send."""
    finish_ratio: float
    """Until the last flow has ended: what a collective waits for."""
    standard_error_ratio: float
    """Of that, by the draws."""
    mean_finish_ratio: float
    """Of a flow."""
    gain_ratio: float
    """Throughput against one queue pair per flow, failures and admission alike."""
    most_at_once_count: int
    """Flows to one receiver, at the worst moment."""


def too_many(flows_count: int, queue_pairs: tuple[int, ...], uplinks_count: int = 1) -> bool:
    """Return whether so many flows or uplinks would take too long to simulate."""
    pieces = flows_count * max(queue_pairs, default=1)
    return max(pieces, uplinks_count) > _MOST_QUEUE_PAIRS


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


def _one(
    flows: int,
    queue_pairs: int,
    uplinks: int,
    receivers: int,
    headroom_ratio: float,
    failed: int,
    admitted: int | None,
    rng: np.random.Generator,
) -> tuple[float, float, int]:
    """Return the end of the last flow, the mean end, and the most flows at a receiver, of one
    trial.
    """
    of_flow = np.repeat(np.arange(flows), queue_pairs)
    receiver = np.arange(flows) % receivers
    uplink = rng.integers(0, uplinks, flows * queue_pairs)
    # In time 1 each receiver's port takes all that is for it, and so do the uplinks together; a
    # sender's port is as fast as a receiver's.
    port = flows / receivers
    capacity = np.concatenate(
        [
            np.full(flows + receivers, port),
            np.full(uplinks, headroom_ratio * flows / uplinks),
        ]
    )
    left = np.full(flows * queue_pairs, 1.0 / queue_pairs)
    started = np.ones(flows, dtype=bool)
    if admitted is not None:
        started = np.arange(flows) // receivers < admitted
    ended = np.full(flows, np.inf)
    now, most, working = 0.0, 0, True
    while np.isinf(ended).any():
        if working and failed and now >= _FAIL_AT_RATIO:
            working = False
            moved = uplink < failed
            uplink[moved] = rng.integers(failed, uplinks, int(moved.sum()))
        active = started[of_flow] & (left > 0)
        most = max(most, int(np.bincount(receiver[np.unique(of_flow[active])]).max()))
        links = np.stack([of_flow, flows + receiver[of_flow], flows + receivers + uplink], axis=1)
        rates = fair_rates(links, capacity, active)
        need = left[active] / rates[active]
        step = max(float(need.min()), min(float(need.max()), _TOGETHER_RATIO))
        if working and failed:
            step = min(step, max(_FAIL_AT_RATIO - now, 1e-9))
        now += step
        left[active] = np.maximum(left[active] - rates[active] * step, 0)
        left[left < 1e-12] = 0
        remaining = np.bincount(of_flow, weights=left, minlength=flows)
        done = started & (remaining == 0) & np.isinf(ended)
        ended[done] = now
        for at in receiver[done] if admitted is not None else ():
            waiting = np.flatnonzero(~started & (receiver == at))
            started[waiting[:1]] = True
    return float(ended.max()), float(ended.mean()), most


def check_counts(failed_count: int, uplinks_count: int, **counts: int) -> None:
    """Refuse counts below 1, and fabrics of which no uplink is left."""
    for name, value in {"uplinks": uplinks_count, **counts}.items():
        if value < 1:
            raise UsageError(f"{name.replace('_', ' ')}: found {value}, expected 1 or more")
    if not 0 <= failed_count < uplinks_count:
        raise UsageError(
            f"failed uplinks: found {failed_count} of {uplinks_count}; at least one must work"
        )


@functools.lru_cache(maxsize=64)
def simulate(
    flows_count: int,
    uplinks_count: int,
    queue_pairs: tuple[int, ...] = (1, 4, 16),
    *,
    receivers_count: int | None = None,
    headroom_ratio: float = 1.0,
    failed_count: int = 0,
    admitted_count: int | None = None,
    trials_count: int = 128,
    seed: int = 0,
) -> tuple[Simulated, ...]:
    """Send one equal message per flow, for each number of queue pairs.

    Args:
        flows_count: at once.
        uplinks_count: between senders and receivers.
        queue_pairs: of each flow.
        receivers_count: that share the flows evenly; None for one per flow.
        headroom_ratio: uplinks' rate over what all ports can send; 1 is no oversubscription.
        failed_count: uplinks that fail half way; their queue pairs are hashed onto the others.
        admitted_count: flows that a receiver lets send at a time; None for all.
        trials_count: draws with one queue pair; more of them scatter less: fewer draws, 4 at least.
        seed: of the draws.
    """
    receivers = flows_count if receivers_count is None else receivers_count
    positive(headroom_ratio, "headroom")
    check_counts(
        failed_count,
        uplinks_count,
        flows=flows_count,
        receivers=receivers,
        trials=trials_count,
        queue_pairs=min(queue_pairs),
        admitted_flows=1 if admitted_count is None else admitted_count,
    )
    if receivers > flows_count:
        raise UsageError(
            f"receivers: found {receivers} for {flows_count} flows, expected at most as many"
        )
    if too_many(flows_count, queue_pairs, uplinks_count):
        raise UsageError(
            f"flows × queue pairs, and uplinks: found {flows_count * max(queue_pairs)} and "
            f"{uplinks_count}, expected at most {_MOST_QUEUE_PAIRS} of either to be simulated"
        )

    fabric = (uplinks_count, receivers, headroom_ratio, failed_count, admitted_count)

    def run(count: int) -> tuple[float, float, float, int]:
        rng = np.random.default_rng(seed)
        trials = [
            _one(flows_count, count, *fabric, rng)
            for _ in range(max(trials_count // count**2, min(trials_count, _LEAST_DRAWS)))
        ]
        last, mean, most = zip(*trials, strict=True)
        error = float(np.std(last) / np.sqrt(len(last)))
        return float(np.mean(last)), error, float(np.mean(mean)), max(most)

    runs = {count: run(count) for count in {1, *queue_pairs}}
    return tuple(
        Simulated(
            queue_pairs_count=count,
            receivers_count=receivers,
            failed_count=failed_count,
            admitted_count=admitted_count,
            headroom_ratio=headroom_ratio,
            finish_ratio=last,
            standard_error_ratio=error,
            mean_finish_ratio=mean,
            gain_ratio=runs[1][0] / last,
            most_at_once_count=most,
        )
        for count, (last, error, mean, most) in ((count, runs[count]) for count in queue_pairs)
    )
