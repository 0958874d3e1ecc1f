"""The operations of a job, derived from an attribution, whatever was recorded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.events.groups import rows_of
from chopper.analyzers.jobs.operations import COLLECTIVE, GATHER, OTHER, Operations, replicas_of
from chopper.analyzers.jobs.schedules import PASSING
from chopper.analyzers.trace.columns import (
    distinct_rows,
    ints,
    matching,
    row_set,
    strings,
)

if TYPE_CHECKING:
    from chopper.analyzers.attribution import Attribution

_PIPELINE = "pipeline"
_COMMUNICATION, _WAIT = "communication", "communication.wait"
_SAID_SKEW_NS = 1_000_000
_CLOSED_RATIO = 0.01
"""A step that its slowest rank's work does not explain to this share is not modelled by phases."""
_is_gather = re.compile(r"all[-_ ]?gather").search
_PASSES = {"forward": "forward", "fwd": "forward", "backward": "backward", "bwd": "backward"}
_TRANSFER = re.compile(
    r"(forward|fwd|backward|bwd)[-_ ]?(send|recv)|(send|recv)[-_ ]?(forward|fwd|backward|bwd)"
)
"""Megatron-LM's timers (forward-send, and forward-send-backward-recv for two at once) and its
functions (send_forward)."""


def operations_of(run: Attribution) -> Operations | str:
    """Return the operations of all traced steps of a job; or why none can be derived.

    Spans of other tools are operations as they are. Of kernels that belong to an action of a
    pipeline, an operation is all work of one action. Without actions, a step of a rank is its
    forward, backward and other work, and then the communication that ends it.
    """
    whole = run.detail.all_steps
    ranks = sorted(whole.joined)
    if len(ranks) < 2:
        return "it has one rank: there are no peers to compare it with"
    if run.part is not None:
        covered, option = run.covered()
        return f"it needs all ranks and steps, and {covered} are looked at closely ({option})"
    if all(not whole.joined[rank].host_span.num_rows for rank in ranks):
        return _joined(whole, ranks, {rank: _of_spans(_Events(whole, rank)) for rank in ranks})
    if all(whole.links[rank]["action"].null_count < len(whole.links[rank]) for rank in ranks):
        return _joined(whole, ranks, {rank: _of_actions(_Events(whole, rank)) for rank in ranks})
    if len({run.places(_PIPELINE).get(rank) for rank in ranks} - {None}) > 1:
        return "neither annotations nor sends between stages tell its micro-batches apart"
    by_phase = _of_phases(whole, ranks)
    return by_phase if isinstance(by_phase, str) else _joined(whole, ranks, by_phase)


class _Part(NamedTuple):
    """Operations of one rank; -1 for a stage, micro-batch or communication that is not told."""

    kinds: list[tuple[str, str]]
    """(name, role) that occur."""
    kind: np.ndarray
    step: np.ndarray
    stage: np.ndarray
    micro_batch: np.ndarray
    instance: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray


class _Events:
    """Device events of one rank, with what is known of each."""

    def __init__(self, run: Attribution, rank: int) -> None:
        joined, links = run.joined[rank], run.links[rank]
        events = joined.device_event
        self.rank = rank
        self.name, self.names = strings(events, "name")
        self.action, self.actions = strings(links, "action")
        self.phase, self.phases = strings(links, "phase")
        work_class, classes = strings(links, "work_class")
        self.communicates = matching(work_class, classes, "communication".__eq__)
        self.stage = ints(links, "stage_index")
        self.micro_batch = ints(links, "micro_batch_index")
        # Times since the begin of each step are the file's own; its model bears their errors.
        is_of_job = "span" in strings(joined.step, "source")[1]
        matched = None if is_of_job else run.matched.get(rank)
        self.start_ns = ints(events, "start_ns") - (matched.offset_ns if matched else 0)
        self.end_ns = self.start_ns + ints(events, "dur_ns")
        windows = run.windows.filter(pc.equal(run.windows["rank"], rank))
        index, number = ints(windows, "step_index"), ints(windows, "number", null=0)
        of = np.full(int(index.max(initial=-1)) + 2, -1, dtype=np.int64)
        of[index] = number
        self.step = of[ints(links, "step_index")]
        communication = run.communication.filter(pc.equal(run.communication["rank"], rank))
        self.instance = np.full(len(self.name), -1, dtype=np.int64)
        self.instance[ints(communication, "event_row")] = ints(communication, "instance_id")
        code, collectives = strings(communication, "collective")
        pairs = ints(communication, "event_row")[matching(code, collectives, "sendrecv".__eq__)]
        self.transfers = row_set(pairs, len(self.name))

    def part(self, rows: np.ndarray, kind: np.ndarray, kinds: list[tuple[str, str]]) -> _Part:
        """Return events as operations."""
        names = ("step", "stage", "micro_batch", "instance", "start_ns", "end_ns")
        return _Part(kinds, kind, *(getattr(self, name)[rows] for name in names))


def _of_spans(events: _Events) -> _Part:
    """Return the spans of a rank as operations, as another tool recorded them."""
    rows = np.flatnonzero(events.step >= 0)
    columns = [events.name[rows], events.action[rows], events.communicates[rows].astype(np.int64)]
    first, code = distinct_rows(columns) if len(rows) else (rows, rows)
    kinds: list[tuple[str, str]] = []
    kinds_of: list[list[int]] = []
    for row in rows[first].tolist():
        name, action = events.names[events.name[row]], int(events.action[row])
        transfers = _transfers_of(name)
        if transfers:
            is_one = len(transfers) == 1
            of = [(name if is_one else role.replace("_", "-"), role) for role in transfers]
        elif events.communicates[row]:
            of = [(name, GATHER if _is_gather(name.lower()) else COLLECTIVE)]
        else:
            of = [(name, events.actions[action] if action >= 0 else OTHER)]
        kinds_of.append([*range(len(kinds), len(kinds) + len(of))])
        kinds += of
    count = np.array([len(of) for of in kinds_of], dtype=np.int64)
    begin = np.cumsum(count) - count
    repeated = np.repeat(np.arange(len(rows)), count[code])
    nth = np.arange(len(repeated)) - np.repeat(np.cumsum(count[code]) - count[code], count[code])
    return events.part(rows[repeated], begin[code[repeated]] + nth, kinds)


def _transfers_of(name: str) -> tuple[str, ...]:
    """Return the roles of the transfers that a name tells, in order; one span may be several."""
    found = _TRANSFER.findall(name.lower())
    return tuple(f"{_PASSES[first or last]}_{way or other}" for first, way, other, last in found)


def _of_actions(events: _Events) -> _Part:
    """Return the work of each action of a pipeline as one operation.

    Other work counts where it follows the last action of its step, by phase: the optimizer. Sends
    and receives do not: backends show them for as long as nobody waits for them, or several as one.
    """
    inside = (events.step >= 0) & ~events.transfers
    kinds: list[tuple[str, str]] = [(action, action) for action in events.actions]
    other, collective = len(kinds), len(kinds) + len(events.phases)
    kinds += [*((phase, OTHER) for phase in events.phases), (COLLECTIVE, COLLECTIVE)]
    last_ns = np.full(int(events.step.max(initial=0)) + 1, -1, dtype=np.int64)
    acts = inside & (events.action >= 0) & ~events.communicates
    np.maximum.at(last_ns, events.step[acts], events.end_ns[acts])
    after = inside & (events.action < 0) & (events.start_ns >= last_ns[events.step])
    kind = np.full(len(inside), -1, dtype=np.int64)
    kind[acts] = events.action[acts]
    kind[after] = np.where(events.communicates, collective, other + events.phase)[after]
    rows = np.flatnonzero(kind >= 0)
    alone = np.where(events.communicates, np.arange(len(kind)), -1)
    keys = (events.step, kind, events.stage, events.micro_batch, alone)
    first, number = distinct_rows([key[rows] for key in keys]) if len(rows) else (rows, rows)
    start, end = events.start_ns[rows[first]], events.end_ns[rows[first]]
    np.minimum.at(start, number, events.start_ns[rows])
    np.maximum.at(end, number, events.end_ns[rows])
    part = events.part(rows[first], kind[rows[first]], kinds)
    return part._replace(start_ns=start, end_ns=end)


def _of_phases(run: Attribution, ranks: list[int]) -> dict[int, _Part] | str:
    """Return each step of a rank as its own work by phase, then the communication that ends it.

    Time that waits for other ranks is no one's work. This is right where a step lasts as long as
    its slowest rank works and communicates; where it does not, the reason is returned.
    """
    pieces, windows = run.pieces, run.windows
    cause, causes = strings(pieces, "cause")
    waits = matching(cause, causes, lambda name: name.startswith(_WAIT))
    communicates = matching(cause, causes, lambda name: name.startswith(_COMMUNICATION))
    phase, phases = strings(pieces, "phase")
    kinds = [(name, name if name in PASSING else OTHER) for name in phases]
    kinds.append((_COMMUNICATION, COLLECTIVE))
    window = rows_of(*([ints(of, "rank"), ints(of, "step_index")] for of in (windows, pieces)))
    time_ns = np.zeros((windows.num_rows, len(kinds)), dtype=np.int64)
    kind = np.where(communicates, len(kinds) - 1, phase)
    np.add.at(time_ns, (window[~waits], kind[~waits]), ints(pieces, "time_ns")[~waits])
    rank, step = ints(windows, "rank"), ints(windows, "number", null=0)
    length = ints(windows, "end_ns") - ints(windows, "start_ns")
    own = time_ns[:, :-1].sum(axis=1)
    steps, at = np.unique(step, return_inverse=True)
    slowest = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(slowest, at, own)
    off = np.abs(slowest[at] + time_ns[:, -1] - length).sum() / max(int(length.sum()), 1)
    if off > _CLOSED_RATIO:
        return (
            "without a pipeline, a step is modelled as the work of its slowest rank and then the "
            f"communication: {fmt.ratio(float(off))} off here (limit "
            f"{fmt.percent(_CLOSED_RATIO, '.0f')})"
        )
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(begin, at, ints(windows, "start_ns"))
    ends = begin[at][:, None] + np.cumsum(time_ns, axis=1)
    ends[:, -1] = begin[at] + length
    starts = np.hstack([begin[at][:, None], ends[:, :-1]])
    ends[:, -1] = np.maximum(ends[:, -1], starts[:, -1])
    parts = {}
    for one in ranks:
        of = np.flatnonzero(rank == one)
        column = np.tile(np.flatnonzero(time_ns.any(axis=0)), len(of))
        of = np.repeat(of, len(column) // max(len(of), 1))
        nothing = np.full(len(of), -1)
        instance = np.where(column == len(kinds) - 1, at[of], -1)
        times = (starts[of, column], ends[of, column])
        parts[one] = _Part(kinds, column, step[of], nothing, nothing, instance, *times)
    return parts


def _joined(run: Attribution, ranks: list[int], parts: Mapping[int, _Part]) -> Operations:
    """Return the operations of all ranks, each at its place in the job."""
    stage_of = _stages_of(run, ranks, parts)
    places = {str(name): run.places(name) for name in run.dimensions if name != _PIPELINE}
    others = [tuple(index.get(rank, -1) for index in places.values()) for rank in ranks]
    others, are_known = replicas_of([stage_of[rank] for rank in ranks], others)
    notes = []
    if not are_known:
        notes.append("nothing tells the replicas of a stage apart: they are in the order of ranks")
        places = {"data": {rank: other[0] for rank, other in zip(ranks, others, strict=True)}}
    replica = {other: number for number, other in enumerate(sorted({*others}))}
    kinds = {kind: None for part in parts.values() for kind in part.kinds}
    code_of = {kind: code for code, kind in enumerate(kinds)}
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    for rank, other in zip(ranks, others, strict=True):
        part = parts[rank]
        codes = np.array([code_of[kind] for kind in part.kinds], dtype=np.int64)
        size = len(part.kind)
        columns["type"].append(codes[part.kind])
        columns["rank"].append(np.full(size, rank))
        columns["replica"].append(np.full(size, replica[other]))
        columns["stage"].append(np.full(size, stage_of[rank]))
        columns["global_stage"].append(np.where(part.stage >= 0, part.stage, stage_of[rank]))
        for name in ("step", "micro_batch", "instance", "start_ns", "end_ns"):
            columns[name].append(getattr(part, name))
    skew_ns = max((abs(one.offset_ns) for one in run.matched.values()), default=0)
    if skew_ns > _SAID_SKEW_NS and all(not of.host_span.num_rows for of in run.joined.values()):
        notes.append(
            f"clocks of ranks differ by up to {fmt.duration(skew_ns)}: transfers include that"
        )
    stacked: dict[str, Any] = {name: np.concatenate(values) for name, values in columns.items()}
    return Operations(
        types=tuple(name for name, _ in kinds),
        roles=tuple(role for _, role in kinds),
        places=places,
        notes=tuple(notes),
        **stacked,
    )


def _stages_of(
    run: Attribution, ranks: list[int], parts: Mapping[int, _Part | _Events]
) -> dict[int, int]:
    """Return the pipeline rank of each rank: its coordinate, else by the stages that it runs."""
    known = run.places(_PIPELINE)
    if all(rank in known for rank in ranks):
        return {rank: known[rank] for rank in ranks}
    lowest = {
        rank: int(part.stage[part.stage >= 0].min(initial=np.iinfo(np.int64).max))
        for rank, part in parts.items()
    }
    order = sorted({*lowest.values()})
    return {rank: order.index(lowest[rank]) for rank in ranks}
