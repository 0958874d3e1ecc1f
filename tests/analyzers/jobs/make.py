"""Jobs with known truth: a schedule run with given times, and what a perfect recorder saw of it.

The times come from a fixed-point iteration that shares nothing with the model under test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chopper.analyzers.jobs.operations import Operations
from chopper.analyzers.jobs.schedules import FORWARD, PASSING, Action, Order

MS = 1_000_000


class Row(NamedTuple):
    """One recorded operation."""

    role: str
    replica: int
    rank_in_pipeline: int
    step: int
    stage: int
    micro_batch: int
    start_ns: int
    end_ns: int
    instance: int = -1


Duration = Callable[[int, int, int, Action], int]
"""(step, replica, pipeline rank, action) → nanoseconds."""


def run(order: Order, duration: Callable[[int, Action], int]) -> dict[Action, tuple[int, int]]:
    """Return (start, end) of each action of a schedule; transfers take no time.

    Args:
        order: of each pipeline rank.
        duration: of an action on a rank.
    """
    last = max(action.stage for actions in order for action in actions)
    times: dict[Action, tuple[int, int]] = {}
    at, free = [0] * len(order), [0] * len(order)
    while any(position < len(actions) for position, actions in zip(at, order, strict=True)):
        progress = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needed = _needed(action, last)
                ready = [end for other, (_, end) in times.items() if other in needed]
                if needed and not ready:
                    break
                start = max(free[rank], *ready, 0)
                free[rank] = start + duration(rank, action)
                times[action] = start, free[rank]
                at[rank] += 1
                progress = True
        assert progress, "the schedule waits for itself"
    return times


def _needed(action: Action, last: int) -> set[Action]:
    """Return the actions of which one must have ended: a full backward or its input part."""
    if action.kind not in PASSING:
        return set()
    forward = action.kind == FORWARD
    stage = action.stage - 1 if forward else action.stage + 1
    if not 0 <= stage <= last:
        return set()
    kinds = [FORWARD] if forward else PASSING[1:]
    return {Action(kind, stage, action.micro_batch) for kind in kinds}


def recorded(
    order: Order,
    duration: Duration,
    *,
    replicas: int = 1,
    steps: Sequence[int] = (1, 2, 3),
    with_transfers: bool = True,
    tail_ns: int = 5 * MS,
) -> list[Row]:
    """Return what was recorded of a job: computes, transfers, a reduction, the optimizer."""
    last = max(action.stage for actions in order for action in actions)
    rows: list[Row] = []
    for step in steps:
        begun = step * 10**12
        arrivals: dict[int, list[int]] = {}
        for replica in range(replicas):
            times = run(order, partial(duration, step, replica))
            for rank, actions in enumerate(order):
                where = (replica, rank, step)
                rows += [
                    Row(a.kind, *where, a.stage, a.micro_batch, *(begun + t for t in times[a]))
                    for a in actions
                ]
                if with_transfers:
                    rows += _transfers(actions, times, where, begun, last)
                arrivals.setdefault(rank, []).append(times[actions[-1]][1])
        everybody = max(max(ends) for ends in arrivals.values()) + tail_ns
        for rank, ends in arrivals.items():
            for replica, end in enumerate(ends):
                where = (replica, rank, step)
                reduced = max(ends) + tail_ns
                clipped = everybody + tail_ns
                reduction = (rank, -1, begun + end, begun + reduced, step * 100 + rank)
                clipping = (rank, -1, begun + reduced, begun + clipped, step * 100 + 99)
                rows.append(Row("collective", *where, *reduction))
                rows.append(Row("collective", *where, *clipping))
                optimized = clipped + tail_ns
                rows.append(Row("other", *where, rank, -1, begun + clipped, begun + optimized))
    return rows


def _transfers(
    actions: list[Action],
    times: dict[Action, tuple[int, int]],
    where: tuple[int, int, int],
    begun: int,
    last: int,
) -> list[Row]:
    """Return the sends and receives of a rank: received when sent, and posted as Megatron does."""
    rows = []
    previous: dict[bool, int] = {}
    for action in (a for a in actions if a.kind in PASSING):
        forward = action.kind == FORWARD
        direction = "forward" if forward else "backward"
        end = times[action][1]
        needed = _needed(action, last)
        sent = [times[other][1] for other in needed if other in times]
        if needed:
            posted = min(previous.get(forward, 0), *sent)
            row = (action.stage, action.micro_batch, begun + max(posted, 0), begun + max(sent))
            rows.append(Row(f"{direction}_recv", *where, *row))
        if action.stage != (last if forward else 0):
            sends = (action.stage, action.micro_batch, begun + end, begun + end)
            rows.append(Row(f"{direction}_send", *where, *sends))
        previous[forward] = end
    return rows


def operations(rows: Sequence[Row], pipeline_ranks: int, notes: tuple[str, ...] = ()) -> Operations:
    """Return recorded rows as operations; rank = replica * pipeline ranks + pipeline rank."""
    roles = tuple(sorted({row.role for row in rows}))
    columns = {
        name: np.array([getattr(row, name) for row in rows])
        for name in ("replica", "rank_in_pipeline", "step", "stage", "micro_batch")
    }
    rank = columns["replica"] * pipeline_ranks + columns["rank_in_pipeline"]
    replicas = dict(zip(rank.tolist(), columns["replica"].tolist(), strict=True))
    return Operations(
        types=roles,
        roles=roles,
        type=np.array([roles.index(row.role) for row in rows]),
        rank=rank,
        replica=columns["replica"],
        stage=columns["rank_in_pipeline"],
        step=columns["step"],
        global_stage=columns["stage"],
        micro_batch=columns["micro_batch"],
        instance=np.array([row.instance for row in rows]),
        start_ns=np.array([row.start_ns for row in rows]),
        end_ns=np.array([row.end_ns for row in rows]),
        places={"data": replicas},
        notes=notes,
    )


def measured() -> Path | None:
    """Return the directory of measured data; None where CHOPPER_MEASURED is not set."""
    named = os.environ.get("CHOPPER_MEASURED")
    return Path(named) if named else None
