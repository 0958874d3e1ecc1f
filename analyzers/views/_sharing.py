"""Ranks that share a device or a host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from chopper.analyzers.trace.samples import socket_of
from chopper.storage.run import Run


def ranks_by_socket(recording: Run) -> list[tuple[int, ...]]:
    """Group the ranks that compute on parts of one device."""
    return _grouped((rank, socket_of(recording, rank)) for rank in recording.ranks)


def ranks_by_host(recording: Run) -> list[tuple[int, ...]]:
    """Group the ranks of a host; a rank whose host is not known stands alone."""
    return _grouped((rank, recording.part(rank).hostname or rank) for rank in recording.ranks)


def _grouped(keys: Iterable[tuple[int, Hashable]]) -> list[tuple[int, ...]]:
    ranks_by_key: dict[Hashable, list[int]] = {}
    for rank, key in keys:
        ranks_by_key.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in ranks_by_key.values()]
