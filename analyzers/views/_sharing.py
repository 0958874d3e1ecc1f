"""Ranks that share a device or a host."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from chopper.analyzers.trace.samples import socket_of
from chopper.storage.run import Run


def ranks_by_socket(recording: Run) -> list[tuple[int, ...]]:
    """Group the ranks that compute on parts of one device."""
    return _grouped(recording.ranks, lambda rank: socket_of(recording, rank))


def ranks_by_host(recording: Run) -> list[tuple[int, ...]]:
    """Group the ranks of a host; a rank whose host is not known stands alone."""

    def host(rank: int) -> Hashable:
        name = recording.part(rank).hostname
        return rank if name is None else name

    return _grouped(recording.ranks, host)


def _grouped(ranks: list[int], key: Callable[[int], Hashable]) -> list[tuple[int, ...]]:
    found: dict[Hashable, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return [tuple(members) for members in found.values()]
