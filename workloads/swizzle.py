"""Orders in which ranks exchange chunks and visit tiles.

    rows    peers by number, which is the same order on every rank: no swizzle
    ring    peer after peer, each rank from its own neighbour on: the swizzle of Triton-distributed
            (arXiv 2504.19442), ``pid_m = (pid_m + rank · pid_ms_per_rank) mod num_pid_m``

Free of torch.
"""

from __future__ import annotations

from typing import Literal

Order = Literal["rows", "ring"]

KERNELS: dict[str, Order] = {"triton": "ring", "triton-unswizzled": "rows"}
"""Variant of `workloads.overlap` that is one kernel → order of what it sends and of its tiles."""

Piece = tuple[int, int]
"""(rank that it goes to or comes from, which of its pieces)."""


def turns(order: Order, rank: int, ranks: int, pieces: int, *, to: bool = True) -> list[Piece]:
    """Return what a rank exchanges with all others, in order.

    Args:
        to: True: pieces that it sends; False: pieces that it receives, in the order of arrival.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    if order == "ring":
        peers = [(rank + (i if to else -i)) % ranks for i in range(1, ranks)]
    return [(peer, piece) for peer in peers for piece in range(pieces)]


def visits(order: Order, rank: int, ranks: int, tiles: int, *, own_first: bool) -> list[Piece]:
    """Return a rank's row tiles of all ranks, in order.

    Args:
        own_first: True: tiles that need no other rank come first; False: tiles that other ranks
            wait for come first.
    """
    if order == "rows":
        return [(owner, tile) for owner in range(ranks) for tile in range(tiles)]
    own = [(rank, tile) for tile in range(tiles)]
    others = turns(order, rank, ranks, tiles, to=not own_first)
    return own + others if own_first else others + own
