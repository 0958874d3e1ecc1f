"""What slowed a job: the slowdown S, its shares, and the job with a part of it fixed.

Definitions of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(2505.05713): S is the mean simulated step over the mean ideal step, launch delays left out of both;
ideal: each operation at the mean (communication: median transfer) of its type. The slowdown of a
group of operations is that of the step in which only they keep their own durations; it is not
additive and can be below 1. M_W and M_S are the parts of the excess over the ideal that fixing
the worst 3 % of the workers, or the last stage, saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.jobs.model import Job, Nodes
from chopper.analyzers.jobs.operations import P2P
from chopper.analyzers.jobs.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    bubble_bound_ns,
    recognize,
)
from chopper.errors import UsageError

WORST_WORKERS_RATIO = 0.03
"""Workers that M_W is about, rounded up."""
ERROR_RATIO = 0.01
"""An unchanged replay that is further from the recorded steps says nothing about changes."""
_EXPLAINED_RATIO = 0.5
"""Steps of which less is operations and their dependencies are not explained by the model."""
MICRO_BATCH = "micro-batch"
_LEAST_EXCESS_RATIO = 0.01
"""Below this excess over the ideal, its parts are rounding."""


@dataclass(frozen=True)
class Slowdown:
    """Slowdown of the step in which one group of operations alone keeps its own durations."""

    name: str
    slowdown_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {"name": self.name, "slowdown_ratio": self.slowdown_ratio}


@dataclass(frozen=True)
class Bubble:
    """Idle time of the pipeline per rank and step, and what its schedule implies.

    Attributes:
        schedule: name of the schedule, recognized from the order of actions; None for another.
        stages, virtual_stages, micro_batches: its shape.
        recorded_ns: from the first to the last compute of a step, less a rank's own compute.
        ideal_ns: the same in the ideal job.
        bound_ns: closed form for that schedule with mean times; None where there is none.
    """

    schedule: str | None
    stages: int
    virtual_stages: int
    micro_batches: int
    recorded_ns: float
    ideal_ns: float
    bound_ns: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {
            "schedule": self.schedule,
            "stages": self.stages,
            "virtual_stages": self.virtual_stages,
            "micro_batches": self.micro_batches,
            "idle_ns": round(self.recorded_ns),
            "bubble_ns": round(self.ideal_ns),
            "bubble_bound_ns": None if self.bound_ns is None else round(self.bound_ns),
        }


@dataclass(frozen=True)
class JobSlowdown:
    """How much slower a job is than its ideal, and which part of it makes it so.

    Attributes:
        steps_count: modelled steps.
        recorded_step_ns: mean recorded step.
        replayed_step_ns: the same replayed unchanged, launch delays kept.
        simulated_step_ns: replayed without launch delays.
        ideal_step_ns: with each operation at the mean of its type, besides.
        slowdown_ratio: S.
        worst_workers: ranks that M_W is about.
        worst_workers_share_ratio: M_W; None with ``reasons``.
        last_stage_share_ratio: M_S; None with ``reasons``.
        reasons: why a share is None, by its name.
        workers, replicas, stages, types: slowdowns, the largest first; a worker's is the smaller
            of its replica's and its stage's.
        dimensions: slowdown if operations differ along one dimension only.
        bubble: None without a pipeline.
        notes: what limits the model.
    """

    steps_count: int
    recorded_step_ns: float
    replayed_step_ns: float
    replay_error_ratio: float
    simulated_step_ns: float
    ideal_step_ns: float
    worst_workers: list[int]
    worst_workers_share_ratio: float | None
    last_stage_share_ratio: float | None
    reasons: dict[str, str]
    workers: list[Slowdown]
    replicas: list[Slowdown]
    stages: list[Slowdown]
    types: list[Slowdown]
    dimensions: list[Slowdown]
    bubble: Bubble | None
    notes: tuple[str, ...]

    @property
    def slowdown_ratio(self) -> float:
        """S: simulated over ideal."""
        return self.simulated_step_ns / self.ideal_step_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, `job` of ``chopper whatif --json``."""
        names = ("workers", "replicas", "stages", "operation_types", "dimensions")
        lists = (self.workers, self.replicas, self.stages, self.types, self.dimensions)
        return {
            "steps_count": self.steps_count,
            "recorded_step_ns": round(self.recorded_step_ns),
            "replayed_step_ns": round(self.replayed_step_ns),
            "replay_error_ratio": self.replay_error_ratio,
            "simulated_step_ns": round(self.simulated_step_ns),
            "ideal_step_ns": round(self.ideal_step_ns),
            "worst_workers": self.worst_workers,
            "reasons": self.reasons,
            "pipeline": None if self.bubble is None else self.bubble.to_dict(),
            **{name: [one.to_dict() for one in of] for name, of in zip(names, lists, strict=True)},
            "notes": [*self.notes],
        }


def slowdown_of(job: Job) -> JobSlowdown | str:
    """Return the slowdown of a job and its parts, or why the model does not support it."""
    replayed = float(job.replayed_ns.mean())
    recorded = float(job.recorded_ns.mean())
    if job.error_ratio > ERROR_RATIO:
        return (
            f"replayed unchanged, its steps are off by {fmt.ratio(job.error_ratio)} (limit "
            f"{fmt.percent(ERROR_RATIO, '.0f')}): the recorded times contradict what waits for "
            "what, as where clocks of ranks disagree"
        )
    groups = _groups(job.nodes)
    own, ideal = job.own_ns, job.ideal_ns
    masks = [mask for named in groups.values() for mask in named.values()]
    varied = dict(_varied(job))
    alone = (np.where(mask[:, None], own, ideal) for mask in masks)
    times = chain((own, ideal), alone, varied.values())
    simulated, ideal_ns, *rest = job.simulated_ns(times).mean(axis=1).tolist()
    if simulated < _EXPLAINED_RATIO * recorded:
        return (
            f"without launch delays its steps take {fmt.ratio(simulated / recorded)} of the "
            "recorded time: what the operations wait for is not recorded"
        )
    slowdowns = iter([value / ideal_ns for value in rest])
    by_group = {name: {key: next(slowdowns) for key in named} for name, named in groups.items()}
    dimensions = {name: next(slowdowns) for name in varied}
    workers = _worker_scores(job.nodes, by_group)
    count = ceil(WORST_WORKERS_RATIO * len(workers))
    worst = sorted(sorted(workers, key=lambda rank: (-workers[rank], rank))[:count])
    share, reasons = _fixed_shares(job, worst, simulated, ideal_ns)
    return JobSlowdown(
        steps_count=len(job.steps),
        recorded_step_ns=recorded,
        replayed_step_ns=replayed,
        replay_error_ratio=job.error_ratio,
        simulated_step_ns=simulated,
        ideal_step_ns=ideal_ns,
        worst_workers=worst,
        worst_workers_share_ratio=share.get("worst_workers_share_ratio"),
        last_stage_share_ratio=share.get("last_stage_share_ratio"),
        reasons=reasons,
        workers=_ranked({f"rank {rank}": score for rank, score in workers.items()}),
        replicas=_ranked({f"replica {key}": value for key, value in by_group["replica"].items()}),
        stages=_ranked({f"stage {key}": value for key, value in by_group["stage"].items()}),
        types=_ranked({str(key): value for key, value in by_group["type"].items()}),
        dimensions=_ranked(dimensions),
        bubble=_bubble(job),
        notes=job.notes,
    )


def _ranked(named: dict[str, float]) -> list[Slowdown]:
    return sorted((Slowdown(*item) for item in named.items()), key=lambda s: -s.slowdown_ratio)


def _groups(nodes: Nodes) -> dict[str, dict[Any, np.ndarray]]:
    """Return masks of the operations of each replica, pipeline rank and type.

    The sends and receives of one direction are one type, as published.
    """
    replica, stage = nodes.replica[nodes.worker], nodes.stage[nodes.worker]
    types: dict[str, np.ndarray] = {}
    for code in np.unique(nodes.type):
        of = nodes.type == code
        role = str(nodes.role[of][0])
        name = f"{role.partition('_')[0]}-send/recv" if role in P2P else nodes.types[code]
        types[name] = types.get(name, False) | of
    return {
        "replica": {int(key): replica == key for key in np.unique(replica)},
        "stage": {int(key): stage == key for key in np.unique(stage)},
        "type": types,
    }


def _worker_scores(nodes: Nodes, slowdowns: dict[str, dict[Any, float]]) -> dict[int, float]:
    """Return the score of each rank: the smaller slowdown of its replica and its stage."""
    places = zip(nodes.ranks.tolist(), nodes.replica.tolist(), nodes.stage.tolist(), strict=True)
    replicas, stages = slowdowns["replica"], slowdowns["stage"]
    return {rank: min(replicas[replica], stages[stage]) for rank, replica, stage in places}


def _fixed_shares(
    job: Job, worst: Sequence[int], simulated_ns: float, ideal_ns: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Return M_W and M_S by name, or the reason."""
    nodes = job.nodes
    names = ("worst_workers_share_ratio", "last_stage_share_ratio")
    excess = simulated_ns - ideal_ns
    if abs(excess) < _LEAST_EXCESS_RATIO * ideal_ns:
        return {}, dict.fromkeys(names, "the job is within 1 % of its ideal: too little to divide")
    masks = {names[0]: np.isin(nodes.ranks, worst)[nodes.worker]}
    reasons = {}
    if nodes.stages_count > 1:
        masks[names[1]] = nodes.stage[nodes.worker] == nodes.stages_count - 1
    else:
        reasons[names[1]] = "the job has one pipeline stage"
    fixed = job.simulated_ns(
        np.where(mask[:, None], job.ideal_ns, job.own_ns) for mask in masks.values()
    ).mean(axis=1)
    shares = (simulated_ns - fixed) / excess
    return dict(zip(masks, shares.tolist(), strict=True)), reasons


def _varied(job: Job) -> Iterator[tuple[str, np.ndarray]]:
    """Yield, by dimension, times that differ from the ideal along it alone.

    Each is the mean over all other dimensions. For micro-batches: over the stages that a
    micro-batch passes, less what its replica differs by in that step.
    """
    nodes, own, ideal = job.nodes, job.own_ns, job.ideal_ns
    replica = nodes.replica[nodes.worker]
    places = {**nodes.places, "pipeline": nodes.stage}
    for name, place in places.items():
        if len(np.unique(place)) > 1:
            of_place = _mean_by(own, nodes.type, place[nodes.worker])
            yield name, of_place.mean(axis=1, keepdims=True)
    if len(job.steps) > 1:
        yield "step", _mean_by(own, nodes.type)
    batch = np.where(nodes.is_compute, nodes.turn, -1)
    if batch.max(initial=0) > 0:
        of_batch = _mean_by(own, nodes.type, replica, batch) - _mean_by(own, nodes.type, replica)
        yield MICRO_BATCH, np.where(nodes.is_compute[:, None], ideal + of_batch, ideal)


def _mean_by(values: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Replace the rows of (nodes, steps) by the mean of those that agree in all keys."""
    _, number = np.unique(np.stack(keys), axis=1, return_inverse=True)
    number = number.ravel()
    total = np.zeros((int(number.max(initial=-1)) + 1, values.shape[1]))
    np.add.at(total, number, values)
    means: np.ndarray = (total / np.bincount(number)[:, None])[number]
    return means


def schedule_of(job: Job) -> str | None:
    """Return the name of the schedule that all replicas ran; None for none that is known."""
    nodes = job.nodes
    names = set()
    for replica in np.unique(nodes.replica):
        workers = np.flatnonzero(nodes.replica == replica)
        workers = workers[np.argsort(nodes.stage[workers], kind="stable")]
        if nodes.stage[workers].tolist() != [*range(nodes.stages_count)]:
            return None
        ran = [
            [
                (str(nodes.role[node]), int(nodes.global_stage[node]))
                for node in job.orders[worker].compute
                if nodes.role[node] in COMPUTE
            ]
            for worker in workers
        ]
        names.add(recognize(ran, nodes.virtual_stages))
    return names.pop() if len(names) == 1 else None


def micro_batches_of(nodes: Nodes) -> int:
    """Return how many micro-batches pass a stage in a step."""
    forwards = int((nodes.role == FORWARD).sum())
    return round(forwards / max(len(nodes.ranks) * nodes.virtual_stages, 1))


def weight_ratio(job: Job, times: np.ndarray) -> float | None:
    """Return the part of a backward that is weight gradients; None where no backward is split.

    Of the first stage both parts may be recorded as one.
    """
    role = np.where(job.nodes.global_stage > 0, job.nodes.role, "")
    parts = {kind: float(times[role == kind].sum()) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)}
    if not parts[BACKWARD_WEIGHT]:
        return None
    return parts[BACKWARD_WEIGHT] / sum(parts.values())


def _bubble(job: Job) -> Bubble | None:
    """Return the idle time of the pipeline; None for jobs without one, or without compute."""
    nodes = job.nodes
    compute = np.flatnonzero(nodes.is_compute)
    if nodes.stages_count == 1 or not len(compute):
        return None
    schedule, virtual = schedule_of(job), nodes.virtual_stages
    workers, batches = len(nodes.ranks), micro_batches_of(nodes)

    def idle_ns(times: np.ndarray, end: np.ndarray) -> float:
        length = end[compute].max(axis=0) - (end - times)[compute].min(axis=0)
        busy = times[compute].sum(axis=0) / workers
        return float((length - busy).mean())

    recorded_end = job.graph.simulate(job.own_ns, job.delay_ns)
    ideal = np.broadcast_to(job.ideal_ns, (len(nodes), 1))
    forward, backward = (
        float(job.ideal_ns[np.isin(nodes.role, roles)].sum()) / (workers * max(batches, 1))
        for roles in (COMPUTE[:1], COMPUTE[1:])
    )
    weight = weight_ratio(job, job.ideal_ns)
    bound = None
    if schedule is not None:
        bound = bubble_bound_ns(
            schedule,
            nodes.stages_count,
            virtual,
            forward_ns=forward,
            backward_ns=backward,
            weight_ns=None if weight is None else weight * backward,
        )
    return Bubble(
        schedule=schedule,
        stages=nodes.stages_count,
        virtual_stages=virtual,
        micro_batches=batches,
        recorded_ns=idle_ns(job.own_ns, recorded_end),
        ideal_ns=idle_ns(ideal, job.graph.simulate(ideal)),
        bound_ns=bound,
    )


def fixed_ns(job: Job, parts: Sequence[tuple[str, str | int]]) -> np.ndarray:
    """Return the recorded times with parts of the job at their ideal; (nodes, steps).

    Args:
        job: the model.
        parts: (what, which), see :class:`~chopper.analyzers.replay.whatif_options.Changes`.

    Raises:
        UsageError: a stage, rank or operation that the job does not have.
    """
    times = job.own_ns
    if any(what == "stages" for what, _ in parts):
        by_stage = (job.nodes.type, job.nodes.global_stage)
        times = times * _mean_by(times, job.nodes.type) / np.maximum(_mean_by(times, *by_stage), 1)
    if any(what == "sequence-lengths" for what, _ in parts):
        times = _with_even_batches(job, times)
    fixed = np.zeros(len(job.nodes), dtype=bool)
    for what, which in parts:
        if what not in ("stages", "sequence-lengths"):
            fixed |= _mask_of(job.nodes, what, which)
    return np.where(fixed[:, None], job.ideal_ns, times)


def _mask_of(nodes: Nodes, what: str, which: str | int) -> np.ndarray:
    if what == "all":
        return np.ones(len(nodes), dtype=bool)
    if what == "op":
        named = {**_groups(nodes)["type"]}
        for role in np.unique(nodes.role):
            named.setdefault(str(role), nodes.role == role)
        wanted = str(which).replace("_", "-")
        known = {name.replace("_", "-"): mask for name, mask in named.items()}
    else:
        places = {
            "rank": nodes.ranks,
            "stage": nodes.stage,
            "replica": nodes.replica,
        }[what][nodes.worker]
        wanted = str(which)
        known = {str(key): places == key for key in np.unique(places).tolist()}
    if wanted not in known:
        raise UsageError(
            f"--fix {what}={which}: the job has no such {'operation' if what == 'op' else what}; "
            f"it has {fmt.some([*known])}"
        )
    return known[wanted]


def _with_even_batches(job: Job, own: np.ndarray) -> np.ndarray:
    """Return times (nodes, steps) with every micro-batch of a step as long as their mean.

    How long a micro-batch is, relative to the others of its stage, is the same on all stages that
    it passes: the median of these ratios tells sequences from a slow worker. With fewer than three
    stages nothing tells them apart, and a rank's own micro-batches are evened.

    Raises:
        UsageError: a step has one micro-batch.
    """
    nodes = job.nodes
    if micro_batches_of(nodes) < 2:
        raise UsageError("--fix sequence-lengths: the steps have fewer than two micro-batches")
    times = own.copy()
    compute = np.flatnonzero(nodes.is_compute)
    times_of = own[compute]
    keys = [nodes.type[compute], nodes.global_stage[compute]]
    if nodes.stages_count < 3:
        times[compute] = _mean_by(times_of, nodes.worker[compute], *keys)
        return times
    ratio = times_of / np.maximum(_mean_by(times_of, *keys), 1.0)
    replica = nodes.replica[nodes.worker[compute]]
    batch = np.stack([nodes.type[compute], replica, nodes.turn[compute]])
    _, number, count = np.unique(batch, axis=1, return_inverse=True, return_counts=True)
    by_batch = np.argsort(number.ravel(), kind="stable")
    for rows in np.split(by_batch, np.cumsum(count)[:-1]):
        times[compute[rows]] /= np.maximum(np.median(ratio[rows], axis=0), 1e-9)
    return times
