"""The operations of a job: one row per operation, rank and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

P2P = ("forward_send", "forward_recv", "backward_send", "backward_recv")
"""Roles of transfers between stages."""
GATHER, COLLECTIVE = "gather", "collective"
COLLECTIVES = (GATHER, COLLECTIVE)
"""Roles of other communication; a gather of parameters comes before the chunk that needs them."""
OTHER = "other"
"""Role of work that is neither: data, loss, optimizer, garbage collection."""


def replicas_of(
    stages: Sequence[int], others: Sequence[tuple[Any, ...]]
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return where each rank stands in all dimensions but the pipeline, and whether that is known.

    Ranks of one stage that nothing tells apart are numbered in their order.

    Args:
        stages: pipeline rank of each.
        others: its place in all other dimensions, as far as it is known.
    """
    if len({*zip(stages, others, strict=True)}) == len(stages):
        return [*others], True
    turns: Counter[int] = Counter()
    numbered: list[tuple[Any, ...]] = []
    for stage in stages:
        numbered.append((turns[stage],))
        turns[stage] += 1
    return numbered, False


@dataclass(frozen=True, eq=False)
class Operations:
    """Operations of a job, one row each, in any order; all arrays have one length.

    Attributes:
        types: names of operation types, as recorded where the recording names them.
        roles: of each type: one of ``COMPUTE``, ``P2P``, ``COLLECTIVES`` or ``OTHER``.
        type: code into ``types``.
        rank: global rank.
        replica: its place in all dimensions but the pipeline (0 … replicas - 1).
        stage: its pipeline rank.
        step: number of the step.
        global_stage: stage of the model's pipeline, virtual stages counted.
        micro_batch: -1 where not known.
        instance: number of the communication, the same on all members; -1 where not matched.
        start_ns, end_ns: on one clock for all ranks.
        places: dimension besides the pipeline (``data``, ``tensor`` …) → rank → index.
        notes: what was left out, in words.
    """

    types: tuple[str, ...]
    roles: tuple[str, ...]
    type: np.ndarray
    rank: np.ndarray
    replica: np.ndarray
    stage: np.ndarray
    step: np.ndarray
    global_stage: np.ndarray
    micro_batch: np.ndarray
    instance: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    places: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rank)

    def of_rows(self, mask: np.ndarray) -> Self:
        """Return some of the operations."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: a[mask] for n, a in arrays.items() if isinstance(a, np.ndarray)})

    @property
    def role(self) -> np.ndarray:
        """Role of each operation."""
        return np.asarray(np.array(self.roles)[self.type])
