"""Pipelines: how much of a rank's waiting its schedule makes, and how much uneven work.

The operations of a step (forward and backward of each micro-batch on each stage) are simulated
three times with their recorded order: all stages and micro-batches alike, which leaves the idle
time of the schedule itself; then with each stage as long as it is; then with each micro-batch as
long as it is on all stages that it passes. What a rank waits for its neighbours is given to these
in turn. What is left of it made a single rank late: a straggler, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from chopper.analyzers.causes.core_wait import taken
from chopper.analyzers.causes.idle import Gaps
from chopper.analyzers.causes.states import Shares, States, stacked
from chopper.analyzers.jobs.model import Job, job_of
from chopper.analyzers.jobs.operations import Operations, replicas_of
from chopper.analyzers.jobs.schedules import COMPUTE, FORWARD
from chopper.analyzers.trace.collectives import POINT_TO_POINT
from chopper.analyzers.trace.columns import distinct_rows, ints, strings
from chopper.analyzers.trace.join import COMMUNICATION
from chopper.analyzers.trace.match import StageWaits
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.causes import CODES
from chopper.errors import InputError
from chopper.storage.manifest import RunManifest

_LEAVES = ("warm_up", "steady", "cool_down", "stage_imbalance", "micro_batch_imbalance")
_PHASES = _LEAVES[:3]
_SENT, _IDLE = (
    np.array([CODES[f"{parent}.pipeline.{leaf}"] for leaf in _LEAVES])
    for parent in ("communication", "idle")
)
_MAY_WAIT = [
    CODES[c] for c in ("idle.unlaunched", "idle.no_step", "idle.preparation.collective_wait")
]
"""Idle time for which the host gives no other reason."""


@dataclass(frozen=True, slots=True)
class Actions:
    """Forward and backward passes of one rank, a row per step, stage and micro-batch.

    Attributes:
        action: code into ``COMPUTE``.
        step: number of the step window.
        stage: stage of the model's pipeline; -1 where it is the rank's own place.
        micro_batch: -1 where not known.
        start_ns, end_ns: from the first of its device events to the last, in the rank's clock.
    """

    action: np.ndarray
    step: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.action)


def actions_of(joined: JoinedRank) -> Actions | None:
    """Return the actions of a rank; None where its trace tells none."""
    link = joined.event_link
    if link["action"].null_count == link.num_rows:
        return None
    names, values = strings(link, "action")
    window = ints(link, "step_index", null=-1)
    number = np.append(joined.windows.numbers, -1)[window]
    computes = np.array([v in COMPUTE for v in values] + [False])[names]
    rows = np.flatnonzero(
        computes & (number >= 0) & (strings(link, "work_class")[0] != COMMUNICATION)
    )
    if not len(rows):
        return None
    code = np.array([COMPUTE.index(v) if v in COMPUTE else -1 for v in values])[names[rows]]
    stage, batch = (
        ints(link, name, null=-1)[rows] for name in ("stage_index", "micro_batch_index")
    )
    # Of spans each row is a pass, whether or not the file numbers micro-batches.
    alone = np.arange(len(rows)) if not joined.host_span.num_rows else np.zeros_like(rows)
    first, of = distinct_rows([number[rows], stage, batch, code, alone])
    start = ints(joined.device_event, "start_ns")[rows]
    end = start + ints(joined.device_event, "dur_ns")[rows]
    begin_ns, end_ns = np.full(len(first), np.iinfo(np.int64).max), np.zeros(len(first), np.int64)
    np.minimum.at(begin_ns, of, start)
    np.maximum.at(end_ns, of, end)
    return Actions(code[first], number[rows][first], stage[first], batch[first], begin_ns, end_ns)


class Place(NamedTuple):
    """Where a rank stands: in the pipeline, and in all other dimensions together."""

    pipeline: int
    replica: int


def places_of(manifest: RunManifest, actions: Mapping[int, Actions]) -> dict[int, Place]:
    """Return where ranks stand, by their coordinates, else by the stages that they compute."""
    stages: dict[int, int] = {}
    others: list[tuple[Any, ...]] = []
    for part in sorted(manifest.ranks, key=lambda part: part.rank):
        index = {one.dimension: one.index for one in part.coordinates if one.dimension != "expert"}
        pipeline = index.pop("pipeline", None)
        if pipeline is not None and part.rank in actions:
            stages[part.rank] = pipeline
            others.append(tuple(sorted(index.items())))
    if stages:
        others, _ = replicas_of([*stages.values()], others)
        number = {place: replica for replica, place in enumerate(dict.fromkeys(others))}
        pairs = zip(stages.items(), others, strict=True)
        return {rank: Place(stage, number[place]) for (rank, stage), place in pairs}
    first = {rank: int(of.stage.min()) for rank, of in actions.items()}
    if len({*first.values()}) < len(first) or min(first.values()) < 0:
        return {}
    return {rank: Place(at, 0) for at, rank in enumerate(sorted(first, key=first.__getitem__))}


def stage_waits(
    actions: Mapping[int, Actions], places: Mapping[int, Place], offsets_ns: Mapping[int, int]
) -> dict[int, StageWaits]:
    """Return by rank what it waits for its pipeline; empty for no pipeline, or one not modelled.

    Args:
        actions: by rank.
        places: of all these ranks.
        offsets_ns: lead of each rank's clock over one clock for all.
    """
    actions = {rank: actions[rank] for rank in sorted(actions) if rank in places}
    if len({places[rank].pipeline for rank in actions}) < 2:
        return {}
    simulated: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for job in _jobs(_operations(actions, places)):
        for rank, waits in _waits(job).items():
            simulated.setdefault(rank, []).append((job.steps, *waits))
    numbers, at = np.unique(
        np.concatenate([of.step for of in actions.values()]), return_inverse=True
    )
    starts = [of.start_ns - offsets_ns[rank] for rank, of in actions.items()]
    begins_ns = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(begins_ns, at, np.concatenate(starts))
    stages = {rank: place.pipeline for rank, place in places.items()}
    expected = {}
    for rank, parts in simulated.items():
        steps, bubble, uneven = (np.concatenate(of, axis=-1) for of in zip(*parts, strict=True))
        order = np.argsort(steps)
        steps = steps[order]
        begin_ns = begins_ns[np.searchsorted(numbers, steps)] + offsets_ns[rank]
        turns = _turning_points(actions[rank], steps)
        expected[rank] = StageWaits(
            steps, bubble[:, order], uneven[:, order], begin_ns, *turns, stages
        )
    return expected


_MOST_SHAPES = 64
"""Of steps with unlike numbers of micro-batches: each takes a simulation of its own."""


def _jobs(operations: Operations) -> Iterator[Job]:
    """Yield the job of each shape that steps have, the most common first."""
    left = np.ones(len(operations), dtype=bool)
    for _ in range(_MOST_SHAPES):
        if not left.any():
            return
        try:
            job = job_of(operations.of_rows(left))
        except InputError:
            return
        yield job
        left &= ~np.isin(operations.step, job.steps)


def _waits(job: Job) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return by rank the bubble (phases, steps), and what uneven work adds (2, steps), in ns."""
    tables = _Tables(job)
    phases = _phases(job, tables.even)
    idle = [_idle(job, table) for table in (tables.by_stage, tables.by_batch)]
    waits = {}
    for worker, rank in enumerate(job.nodes.ranks.tolist()):
        alike = phases[:, worker].sum(axis=0)
        by_stage, by_batch = (table[worker] for table in idle)
        more = np.stack([by_stage - alike, by_batch - np.maximum(by_stage, alike)])
        bubble, uneven = (
            np.rint(np.maximum(of, 0)).astype(np.int64) for of in (phases[:, worker], more)
        )
        waits[rank] = bubble, uneven
    return waits


def _operations(actions: Mapping[int, Actions], places: Mapping[int, Place]) -> Operations:
    """Return the actions of all ranks as operations of a job, without communication."""
    ranks = np.repeat([*actions], [len(of) for of in actions.values()])
    columns = {
        name: np.concatenate([getattr(of, name) for of in actions.values()])
        for name in Actions.__slots__
    }
    pipeline, replica = (np.array([places[rank][at] for rank in ranks.tolist()]) for at in range(2))
    stage = columns["stage"]
    return Operations(
        types=COMPUTE,
        roles=COMPUTE,
        type=columns["action"],
        rank=ranks,
        replica=replica,
        stage=pipeline,
        step=columns["step"],
        global_stage=np.where(stage >= 0, stage, pipeline),
        micro_batch=columns["micro_batch"],
        instance=np.full(len(ranks), -1),
        start_ns=columns["start_ns"],
        end_ns=columns["end_ns"],
    )


def _turning_points(actions: Actions, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when the first backward of each step began, and when its last forward ended."""
    first = np.full(len(steps), np.iinfo(np.int64).max)
    last = np.full(len(steps), np.iinfo(np.int64).min)
    at = np.searchsorted(steps, actions.step)
    inside = (at < len(steps)) & (steps[np.minimum(at, len(steps) - 1)] == actions.step)
    forward = actions.action == COMPUTE.index(FORWARD)
    np.minimum.at(first, at[inside & ~forward], actions.start_ns[inside & ~forward])
    np.maximum.at(last, at[inside & forward], actions.end_ns[inside & forward])
    return first, last


class _Tables:
    """Durations of a job's operations if some of their differences were gone; (nodes, steps)."""

    def __init__(self, job: Job) -> None:
        nodes, own = job.nodes, job.own_ns
        of_worker, mean = _grouped(_mean, own, nodes.type, nodes.worker)
        kind, even = _grouped(_middle, mean, nodes.type[of_worker.first])
        self.even: np.ndarray = even[kind.number][of_worker.number]
        """Each operation as long as those of its type on the rank in the middle."""
        of_stage, middle = _grouped(
            _middle, mean, nodes.type[of_worker.first], nodes.global_stage[of_worker.first]
        )
        ratio = np.median(
            middle / np.maximum(even[kind.number][of_stage.first], 1), axis=1, keepdims=True
        )
        self.by_stage: np.ndarray = self.even * ratio[of_stage.number][of_worker.number]
        replica = nodes.replica[nodes.worker]
        batch, typical = _grouped(
            _middle, own / np.maximum(self.by_stage, 1), nodes.type, replica, nodes.turn
        )
        self.by_batch: np.ndarray = self.by_stage * typical[batch.number]


def _idle(job: Job, time_ns: np.ndarray) -> np.ndarray:
    """Return the time in which each worker does nothing while a step lasts; (workers, steps)."""
    end = job.graph.simulate(time_ns)
    return np.asarray(end.max(axis=0) - _sum(job, time_ns))


def _phases(job: Job, time_ns: np.ndarray) -> np.ndarray:
    """Return that time before the first backward, between, and after the last forward."""
    nodes, end = job.nodes, job.graph.simulate(time_ns)
    start, whole = end - time_ns, end.max(axis=0)
    first, last = np.tile(whole, (len(nodes.ranks), 1)), np.zeros((len(nodes.ranks), len(whole)))
    forward = nodes.role == FORWARD
    np.minimum.at(first, nodes.worker[~forward], start[~forward])
    np.maximum.at(last, nodes.worker[forward], end[forward])
    last = np.maximum(last, first)  # where all forwards come first
    warm_up = first - _sum(job, np.where(end <= first[nodes.worker], time_ns, 0))
    cool_down = whole - last - _sum(job, np.where(start >= last[nodes.worker], time_ns, 0))
    steady = whole - _sum(job, time_ns) - warm_up - cool_down
    return np.asarray(np.maximum(np.stack([warm_up, steady, cool_down]), 0))


def _sum(job: Job, time_ns: np.ndarray) -> np.ndarray:
    """Add up the operations of each worker; (workers, steps)."""
    total = np.zeros((len(job.nodes.ranks), time_ns.shape[1]))
    np.add.at(total, job.nodes.worker, time_ns)
    return total


class _Groups(NamedTuple):
    """Rows that agree in some keys: the group of each row, and the first row of each group."""

    number: np.ndarray
    first: np.ndarray


def _grouped(
    reduced: Callable[[np.ndarray], np.ndarray], values: np.ndarray, *keys: np.ndarray
) -> tuple[_Groups, np.ndarray]:
    """Reduce the rows of (rows, steps) that agree in all keys to one each."""
    first, number = distinct_rows([*keys])
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(number))[:-1])
    return _Groups(number, first), np.stack([reduced(values[rows]) for rows in parts])


def _mean(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.mean(axis=0))


def _middle(values: np.ndarray) -> np.ndarray:
    """Return the lower median: of two, the smaller, since lateness only makes times longer."""
    return np.asarray(np.sort(values, axis=0)[(len(values) - 1) // 2])


def with_stage_waits(
    expected: StageWaits, joined: JoinedRank, states: States, exposed: Shares, gaps: Gaps
) -> tuple[Shares, Gaps]:
    """Give exposed waits and idle time to the causes of pipelines, as far as these explain them.

    Args:
        expected: of the rank.
        joined: the rank.
        states: its exclusive states, whose fragments are shared out.
        exposed: of communication and copies.
        gaps: idle time.
    """
    event = states.event_row[exposed.fragment]
    events, bounds = DeviceEvents(joined.device_event), joined.windows.bounds_ns
    window = np.concatenate([states.window[exposed.fragment], gaps.window])
    waits = (exposed.cause == CODES["communication.wait"]) & _between_stages(expected, joined)[
        event
    ]
    time_ns = np.concatenate([exposed.time_ns, gaps.end_ns - gaps.start_ns])
    may_wait = np.concatenate([waits, np.isin(gaps.cause, _MAY_WAIT)])
    begin_ns = np.maximum(events.start_ns[event], bounds[states.window[exposed.fragment]])
    middle_ns = np.concatenate(
        [begin_ns + exposed.time_ns // 2, (gaps.start_ns + gaps.end_ns) // 2]
    )
    held_ns = np.where(may_wait, time_ns, 0)
    # Before any rank has begun its step, nobody waits for its pipeline.
    steps = np.minimum(
        np.searchsorted(expected.steps, joined.windows.numbers), len(expected.steps) - 1
    )
    after_ns = gaps.end_ns - expected.begin_ns[steps][gaps.window]
    held_ns[len(event) :] = np.clip(after_ns, 0, held_ns[len(event) :])
    parts = _shared_out(expected, joined.windows.numbers, window, held_ns, middle_ns)
    sent, idle = np.split(parts, [len(event)], axis=1)
    return _of_shares(exposed, sent), _of_gaps(gaps, idle)


def _between_stages(expected: StageWaits, joined: JoinedRank) -> np.ndarray:
    """Return a mask of the device events that are transfers between stages.

    They are sends and receives, and collectives whose ranks stand in several stages.
    """
    communication, stages = joined.communication, expected.stages
    between = [
        kind.what == POINT_TO_POINT or len({stages[r] for r in kind.members if r in stages}) > 1
        for kind in communication.kinds
    ]
    mask = np.zeros(joined.device_event.num_rows, dtype=bool)
    mask[communication.event_row] = np.array([*between, False])[communication.kind]
    return mask


def _shared_out(
    expected: StageWaits,
    numbers: np.ndarray,
    window: np.ndarray,
    held_ns: np.ndarray,
    middle_ns: np.ndarray,
) -> np.ndarray:
    """Return the nanoseconds of each piece that each leaf takes -> (leaves, pieces).

    In a window the bubble takes first, at most what the schedule alone would leave idle; then
    unequal stages, then unequal micro-batches.

    Args:
        expected: of the rank.
        numbers: of each window.
        window: of each piece.
        held_ns: time of the pieces that may be waits for other stages; 0 for others.
        middle_ns: middle of each piece, in the clock of the rank.
    """
    last = len(expected.steps) - 1
    at = np.minimum(np.searchsorted(expected.steps, numbers), last)
    known = expected.steps[at] == numbers
    first_ns, last_ns = expected.first_backward_ns[at], expected.last_forward_ns[at]
    late = middle_ns >= np.maximum(last_ns, first_ns)[window]
    phase = np.where(late, 2, np.where(middle_ns < first_ns[window], 0, 1))
    in_phase = [np.where(phase == number, held_ns, 0) for number in range(len(_PHASES))]
    room = np.stack([np.bincount(window, of, len(numbers)) for of in in_phase]).astype(np.int64)
    bubble = np.where(known, expected.bubble_ns[:, at], 0)
    wanted = np.minimum(room, bubble)
    # What the schedule leaves idle in one phase may have been waited for in another.
    rest = (bubble - wanted).sum(axis=0)
    for number in range(len(_PHASES)):
        more = np.minimum(rest, room[number] - wanted[number])
        wanted[number] += more
        rest -= more
    parts = [taken(window, of, most) for of, most in zip(in_phase, wanted, strict=True)]
    for most in np.where(known, expected.uneven_ns[:, at], 0):
        parts.append(taken(window, held_ns - sum(parts), most))
    return np.stack(parts)


def _of_shares(shares: Shares, parts: np.ndarray) -> Shares:
    """Return shares of which each leaf has taken its part."""
    rest = (shares.fragment, shares.cause, shares.time_ns - parts.sum(axis=0))
    return stacked(
        [rest, *((shares.fragment, code, of) for code, of in zip(_SENT, parts, strict=True))]
    )


def _of_gaps(gaps: Gaps, parts: np.ndarray) -> Gaps:
    """Return gaps cut where each leaf has taken its part: first the rest, then one by one."""
    rest = gaps.end_ns - gaps.start_ns - parts.sum(axis=0)
    lengths = np.vstack([rest, parts]).T
    row, leaf = np.nonzero(lengths)
    until = np.cumsum(lengths, axis=1)[row, leaf]
    columns = {f.name: getattr(gaps, f.name)[row] for f in fields(gaps)}
    cause = np.where(leaf > 0, np.append(-1, _IDLE)[leaf], columns["cause"])
    times = {
        "start_ns": columns["start_ns"] + until - lengths[row, leaf],
        "end_ns": columns["start_ns"] + until,
    }
    return Gaps(**columns | times | {"cause": cause})
