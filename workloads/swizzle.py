"""Orders in which ranks exchange pieces and visit tiles, and how each loads a fabric.

    rows    peers by number, which is the same order on every rank: no swizzle
    ring    peer after peer, each rank from its own neighbour on: the swizzle of Triton-distributed
            (arXiv 2504.19442), ``pid_m = (pid_m + rank · pid_ms_per_rank) mod num_pid_m``
    mesh    the first piece of every peer, then the second of every peer, and so on

Through a switch (NVSwitch) a rank reaches any peer at the rate of its port: an order is free of
contention where in each round no port has to take more than the others. In a full mesh (eight GPUs
with a link for each pair, as MI300X) a link carries 1 / (ranks − 1) of a rank's bandwidth, so each
round must use all of them. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import numpy as np

Order = Literal["rows", "ring", "mesh"]
Fabric = Literal["switch", "mesh"]
ORDERS: tuple[Order, ...] = get_args(Order)
FABRICS: tuple[Fabric, ...] = get_args(Fabric)

KERNELS: dict[str, Order] = {"triton": "ring", "triton-mesh": "mesh", "triton-unswizzled": "rows"}
"""Variant of `workloads.overlap` that is one kernel → order of what it sends and of its tiles."""

Piece = tuple[int, int]
"""(rank that it goes to or comes from, which of its pieces)."""


def turns(order: Order, rank: int, ranks: int, pieces: int, *, to: bool = True) -> list[Piece]:
    """Return what a rank exchanges with all others, in order.

    Args:
        to: whom it sends to; else whom it hears from, in the order in which they send to it.
    """
    if order == "rows":
        return [(peer, p) for peer in range(ranks) if peer != rank for p in range(pieces)]
    peers = [(rank + (i if to else -i)) % ranks for i in range(1, ranks)]
    if order == "ring":
        return [(peer, p) for peer in peers for p in range(pieces)]
    return [(peer, p) for p in range(pieces) for peer in peers]


def visits(order: Order, rank: int, ranks: int, tiles: int, *, own_first: bool) -> list[Piece]:
    """Return a rank's row tiles of all ranks, in order.

    Args:
        own_first: tiles that wait for others begin with those that need not; tiles that others
            wait for end with the rank's own.
    """
    if order == "rows":
        return [(owner, tile) for owner in range(ranks) for tile in range(tiles)]
    own = [(rank, tile) for tile in range(tiles)]
    others = turns(order, rank, ranks, tiles, to=not own_first)
    return own + others if own_first else others + own


def rounds(order: Order, ranks: int, pieces: int, lanes: int) -> Iterator[np.ndarray]:
    """Count the pieces of each round, [sender, receiver]; each rank moves ``lanes`` at a time."""
    import numpy as np

    sent = [turns(order, rank, ranks, pieces) for rank in range(ranks)]
    for first in range(0, len(sent[0]), lanes):
        counts = np.zeros((ranks, ranks), dtype=np.int64)
        for rank, of_rank in enumerate(sent):
            np.add.at(counts[rank], [peer for peer, _ in of_rank[first : first + lanes]], 1)
        yield counts


class Load(NamedTuple):
    """Load that an order puts on a fabric, 1 being that of the best order."""

    busiest_ratio: float
    """Load of the busiest port or link of a round over the load if all shared evenly, averaged."""
    finish_ratio: float
    """Time of the exchange over that of a fabric that is busy everywhere, ranks running freely."""


def load(order: Order, fabric: Fabric, ranks: int, pieces: int, lanes: int) -> Load:
    """Calculate the load of an order: counted in rounds, and timed by a model.

    The model moves pieces of one size at max-min fair rates, each rank's ``lanes`` taking turns as
    `workloads.tiles` does; it knows no latency, and no product between the pieces.
    """
    most = even = 0
    for counts in rounds(order, ranks, pieces, lanes):
        sent = int(counts.sum(1).max())
        if fabric == "switch":
            most += max(sent, int(counts.sum(0).max()))
        else:
            most += int(counts.max()) * (ranks - 1)
        even += sent
    return Load(most / even, _finish(order, fabric, ranks, pieces, lanes))


def _finish(order: Order, fabric: Fabric, ranks: int, pieces: int, lanes: int) -> float:
    import numpy as np

    from chopper.analyzers.estimates.flows import fair_rates

    queues = [
        [(rank, peer) for peer, _ in turns(order, rank, ranks, pieces)[lane::lanes]]
        for rank in range(ranks)
        for lane in range(lanes)
    ]
    queues = [queue[::-1] for queue in queues if queue]
    left, now = np.ones(len(queues)), 0.0
    if fabric == "switch":
        capacity = np.ones(2 * ranks)  # of what each rank sends, and of what it receives
    else:
        capacity = np.full(ranks * ranks, 1 / (ranks - 1))
    while queues:
        sender, receiver = np.array([queue[-1] for queue in queues]).T
        if fabric == "switch":
            links = np.stack([sender, ranks + receiver], axis=1)
        else:
            links = (sender * ranks + receiver)[:, None]
        rates = fair_rates(links, capacity, np.ones(len(queues), dtype=bool))
        step = float((left / rates).min())
        now += step
        left -= rates * step
        done = left < 1e-9
        for queue in (queues[i] for i in np.flatnonzero(done)):
            queue.pop()
        left[done] = 1.0
        left = left[[bool(queue) for queue in queues]]
        queues = [queue for queue in queues if queue]
    return now / ((ranks - 1) * pieces)
