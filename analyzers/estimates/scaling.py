"""A step of a recorded run on more ranks: weak scaling over a described network."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.estimates.network import Topology, algorithms_of, collective_time_s
from chopper.analyzers.estimates.waiting import Members, Place, expected_maximum, places
from chopper.analyzers.events.collectives import members_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views.collectives import collectives
from chopper.errors import InputError


class AtScale(msgspec.Struct, kw_only=True, frozen=True):
    """One step on so many ranks, by cause; the parts sum to the step."""

    ranks_count: int
    step_ns: int
    compute_ns: int
    idle_ns: int
    copy_ns: int
    waiting_ns: int
    transfer_ns: int
    efficiency_ratio: float
    """Work per rank and time, against the fewest ranks."""
    waiting_always_ns: int = 0
    """Of the waiting, what the recorded ranks that are always late make the mean rank wait."""
    others_differ_step_ns: int = 0
    """The step where ranks beyond the recorded ones differ as much as those do."""


class Collective(Members, kw_only=True, frozen=True):
    """A kind of collective in one step of a rank."""

    name: str
    count: float
    """Of each rank, mean."""
    size_bytes: int


class Waits(msgspec.Struct, kw_only=True, frozen=True):
    """Waiting of the mean rank of a number of ranks, in a step."""

    always_ns: float
    """For ranks that are always late."""
    chance_ns: float
    others_differ_ns: float
    """Both, where ranks beyond the recorded ones differ as much as those do."""
    quicker_ns: float
    """Time by which its own work is shorter than that of the mean recorded rank."""

    @property
    def total_ns(self) -> float:
        """Both."""
        return self.always_ns + self.chance_ns


class Step(msgspec.Struct, kw_only=True, frozen=True):
    """A step of a rank, as far as scaling needs it."""

    ranks_count: int
    compute_ns: float
    compute_spread_ns: float
    """Standard deviation over ranks and steps."""
    recorded_waiting_ns: float | None = None
    """Time that a rank waited for others that came late, beyond all overlap; None where it was
    not seen, and the spread of compute is all that is known."""
    idle_ns: float
    copy_ns: float
    exposed_ns: float
    communication_ns: float
    """All transfer, hidden or not."""
    collectives: tuple[Collective, ...]
    places: tuple[Place, ...] = ()
    """Places at which ranks waited for each other."""
    late_with: tuple[float, float, float] | None = None
    """Shares of a late rank's extra time: compute, idle and copies; they sum to one. Null: no rank
    is always late, or nothing tells with what."""


_NCCL = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000)
_KNEE_RATIO = 0.8


def _fastest_s(of: Collective, ranks: int, recorded: int, topology: Topology) -> float:
    """Its α-β time by the fastest algorithm, in a run of so many ranks."""
    members = of.members_count(ranks, recorded)
    if of.group_count is not None and not of.adjacent:
        apart = of.apart(recorded)
        topology = msgspec.structs.replace(
            topology, ranks_per_node_count=max(1, topology.ranks_per_node_count // apart)
        )
    if members < 2:
        return 0.0
    return min(
        collective_time_s(of.name, of.size_bytes, members, topology, algorithm)
        for algorithm in algorithms_of(of.name)
    )


def waits(step: Step, ranks_count: int) -> Waits:
    """Return how long a rank of so many waits for those that come later, in a step.

    By place, see :mod:`chopper.analyzers.estimates.waiting`; what no place tells of is chance, in a
    group of all. Where waiting was not seen, it is the spread of compute times E[max] of so many
    normal draws.
    """
    recorded, waited = step.ranks_count, step.recorded_waiting_ns
    if waited is None or recorded < 2:
        chance = step.compute_spread_ns * expected_maximum(ranks_count)
        return Waits(always_ns=0, chance_ns=chance, others_differ_ns=chance, quicker_ns=0)
    seen = sum(p.waited_ns * p.share_ratio for p in step.places)
    scale = min(1.0, waited / seen) if seen else 1.0
    chance = differ = max(waited - seen, 0.0) * _growth(recorded, ranks_count)
    always = quicker = 0.0
    for place in step.places:
        count = max(place.members_count(ranks_count, recorded), 1)
        share = place.share_ratio * scale
        by_rank, by_chance = place.waits_ns(count)
        always += share * by_rank
        chance += share * by_chance
        drawn = place.waited_ns * _growth(len(place.late_ns), count)
        # Chance alone grows as much; by what it was measured to be it may come to a little more.
        differ += share * max(drawn, by_rank + by_chance)
        quicker += share * place.quicker_ns(count) if step.late_with else 0.0
    always += quicker
    return Waits(always_ns=always, chance_ns=chance, others_differ_ns=differ, quicker_ns=quicker)


def _growth(recorded_count: int, ranks_count: int) -> float:
    if recorded_count < 2:
        return 1.0
    return expected_maximum(ranks_count) / expected_maximum(recorded_count)


def on_device(step: Step, compute_ratio: float) -> Step:
    """The step where compute takes so many times as long, and with it what it makes ranks wait."""
    waited, longer = step.recorded_waiting_ns, 1.0
    if waited:
        by_compute = min(waited, step.compute_spread_ns * expected_maximum(step.ranks_count))
        longer += by_compute / waited * (compute_ratio - 1)
    return msgspec.structs.replace(
        step,
        compute_ns=step.compute_ns * compute_ratio,
        compute_spread_ns=step.compute_spread_ns * compute_ratio,
        recorded_waiting_ns=None if waited is None else waited * longer,
        places=tuple(
            msgspec.structs.replace(
                place,
                waited_ns=place.waited_ns * longer,
                late_ns=tuple(late * longer for late in place.late_ns),
                chance_ns=place.chance_ns * longer,
            )
            for place in step.places
        ),
    )


def at_scale(
    step: Step, scales_count: tuple[int, ...], topology: Topology
) -> tuple[tuple[AtScale, ...], int | None, str | None]:
    """Return the step on each number of ranks, and the knee.

    Transfer is the sum of the collectives' α-β times by their fastest algorithm, minus what hides
    behind compute. Waiting is that of :func:`waits`. The knee is the
    first size at which efficiency against the fewest ranks falls below 80 %, and its cause what
    grew most until there.

    Raises:
        UsageError: ranks that do not fill nodes.
    """
    hidden = step.communication_ns - step.exposed_ns
    # Where something was exposed, what was hidden is all that can be; else compute is the bound.
    room = hidden if step.exposed_ns > 0.02 * max(step.communication_ns, 1) else step.compute_ns
    rows: list[AtScale] = []
    for ranks in sorted(set(scales_count)):
        transfer = sum(
            of.count * _fastest_s(of, ranks, step.ranks_count, topology) * 1e9
            for of in step.collectives
        )
        exposed = max(0.0, transfer - room)
        waiting = waits(step, ranks)
        own = _own(step, waiting.quicker_ns)
        parts = [round(v) for v in (*own, waiting.total_ns, exposed)]
        total = sum(parts)
        differing = sum(own) + waiting.quicker_ns + waiting.others_differ_ns + exposed
        rows.append(
            AtScale(
                ranks_count=ranks,
                step_ns=total,
                compute_ns=parts[0],
                idle_ns=parts[1],
                copy_ns=parts[2],
                waiting_ns=parts[3],
                transfer_ns=parts[4],
                efficiency_ratio=rows[0].step_ns / total if rows else 1.0,
                waiting_always_ns=round(waiting.always_ns),
                others_differ_step_ns=round(differing),
            )
        )
    knee = next((r for r in rows if r.efficiency_ratio < _KNEE_RATIO), None)
    if knee is None:
        return tuple(rows), None, None
    grown = {
        "exposed transfer": knee.transfer_ns - rows[0].transfer_ns,
        "waiting for the slowest rank": knee.waiting_ns - rows[0].waiting_ns,
    }
    return tuple(rows), knee.ranks_count, max(grown, key=lambda k: grown[k])


def _own(step: Step, quicker_ns: float) -> tuple[float, float, float]:
    """Compute, idle and copies of the mean rank, that has so much less to do."""
    own = step.compute_ns, step.idle_ns, step.copy_ns
    shares = step.late_with or (0.0, 0.0, 0.0)
    compute, idle, copy = (a - quicker_ns * r for a, r in zip(own, shares, strict=True))
    return compute, idle, copy


def late_with(own_ns: np.ndarray, waited_ns: np.ndarray) -> tuple[float, float, float] | None:
    """Return the work that ranks which wait less do longer: least squares through the mean.

    Args:
        own_ns: compute, idle and copies of each rank, (ranks, 3).
        waited_ns: that each rank waited.
    """
    late = waited_ns.mean() - waited_ns
    if len(late) < 2 or not late.any():
        return None
    longer = np.maximum(late @ (own_ns - own_ns.mean(axis=0)), 0.0)
    if not longer.any():
        return None
    compute, idle, copy = (longer / longer.sum()).tolist()
    return compute, idle, copy


def recorded_step(attribution: Attributed) -> Step:
    """The mean step of a run's ranks.

    Raises:
        InputError: the run has no collectives that were matched, with their sizes.
    """
    pieces = attribution.pieces
    codes, causes = strings(pieces, "cause")
    kinds = "compute", "idle", "copy"
    # Null is the last.
    kind = np.array([(*kinds, c.split(".")[0]).index(c.split(".")[0]) for c in causes] + [3])
    waiting = np.array([c == "communication.wait" for c in causes] + [False])
    rank = np.unique(ints(pieces, "rank"), return_inverse=True)[1]
    step, time = ints(pieces, "step_index"), ints(pieces, "time_ns")
    ranks, steps = int(rank.max(initial=-1)) + 1, int(step.max(initial=-1)) + 1
    own = np.stack(
        [np.bincount(rank, time * (kind[codes] == i), minlength=ranks) for i in range(len(kinds))],
        axis=1,
    )
    waited = np.bincount(rank, time * waiting[codes], minlength=ranks)
    computing = kind[codes] == 0
    compute = np.bincount((rank * steps + step)[computing], time[computing])
    return step_of(
        {row.id: row.time_ns for row in attribution.leaves()},
        compute[compute > 0],
        steps_count=max((rank.steps for rank in attribution.ranks), default=1),
        ranks_count=len(attribution.ranks),
        matched=collectives(attribution, members_of(attribution)),
        waits_at=places(attribution),
        late=late_with(own, waited),
    )


def step_of(
    causes_ns: dict[str, int],
    observed_steps: np.ndarray,
    *,
    steps_count: int,
    ranks_count: int,
    matched: pa.Table,
    waits_at: Sequence[Place] = (),
    late: tuple[float, float, float] | None = None,
) -> Step:
    """Return the mean step of an attributed run, as far as scaling needs it.

    Args:
        causes_ns: leaf cause → time over all ranks and steps.
        observed_steps: compute time of each rank's steps, ns, for their spread.
        steps_count: steps of a rank.
        ranks_count: ranks of the run.
        matched: the view `collectives`.
        waits_at: where ranks waited for each other.
        late: as `late_with` of the step.
    """
    per = 1 / (steps_count * ranks_count)

    def under(prefix: str) -> int:
        return sum(t for c, t in causes_ns.items() if c.split(".")[0] == prefix)

    sized: dict[tuple[str, int, int | None, bool], float] = {}
    transfer = 0.0
    for row in matched.to_pylist():
        name = _NCCL.get(row["collective"])
        if name is None or not row["message_bytes"]:
            continue
        members = row["rank_count"]
        within = members < ranks_count
        adjacent = within and "," not in (row["ranks"] or ",")
        key = name, int(row["message_bytes"]), members if within else None, adjacent
        # Of several groups at once, a rank is in one.
        sized[key] = sized.get(key, 0) + members / ranks_count
        transfer += row["transfer_ns"] * members / ranks_count
    if not sized:
        raise InputError(
            "--ranks: the run has no collectives with their sizes over several ranks; record "
            "training on two ranks or more"
        )
    spread = float(np.std(observed_steps)) if len(observed_steps) > 1 else 0.0
    waited_ns = causes_ns.get("communication.wait", 0)
    exposed = per * (under("communication") - waited_ns)
    # Without either, nothing tells waiting from transfer.
    told = waited_ns or any(
        t for c, t in causes_ns.items() if c.startswith("communication.transfer")
    )
    return Step(
        ranks_count=ranks_count,
        compute_ns=per * under("compute"),
        compute_spread_ns=spread,
        recorded_waiting_ns=per * waited_ns if told else None,
        idle_ns=per * under("idle"),
        copy_ns=per * under("copy"),
        exposed_ns=exposed,
        communication_ns=max(transfer / steps_count, exposed),
        collectives=tuple(
            Collective(
                name=name,
                size_bytes=size,
                count=n / steps_count,
                group_count=group,
                adjacent=adjacent,
            )
            for (name, size, group, adjacent), n in sized.items()
        ),
        places=tuple(waits_at),
        late_with=late,
    )
