"""A step of a recorded run on more ranks: weak scaling over a described network."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from chopper.analyzers.estimates.network import Topology, collective_time_s
from chopper.errors import InputError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

SCALE_ASSUMPTIONS = (
    "the work per rank is the same at any number of ranks (weak scaling)",
    "groups of adjacent ranks (tensor parallelism, shards of a node) stay as large, others grow with the run",
    "collectives keep their size and number, and take their α-β time on the network given; as much "
    "of it hides behind compute as in the recorded run, or all of it where all of it was hidden",
    "ranks wait for each other, for whatever reason some come late, as in the recorded run, and in a group of N "
    "by the expected largest of N normal draws over that of as many as were recorded; a rank that was always "
    "late is taken for a draw too, and in groups that stay as large waiting stays",
)


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


class Collective(msgspec.Struct, kw_only=True, frozen=True):
    """A kind of collective in one step of a rank."""

    name: str
    count: float
    """Of each rank, mean."""
    size_bytes: int
    group_count: int | None = None
    """Ranks of its group, where these are fewer than the run's."""
    adjacent: bool = False
    """A smaller group of ranks that follow each other (tensor parallelism, shards of a node): it stays as
    large; one of ranks further apart grows with the run."""
    waiting_ratio: float = 0.0
    """Of the waiting that was recorded, what was in front of these."""

    def members_count(self, ranks_count: int, recorded_count: int) -> int:
        """Ranks of its group in a run of so many."""
        if self.group_count is None:
            return ranks_count
        return self.group_count if self.adjacent else ranks_count // self.apart(recorded_count)

    def apart(self, recorded_count: int) -> int:
        """Groups like its own, side by side in the recorded run."""
        return max(1, recorded_count // self.group_count) if self.group_count else 1


class Step(msgspec.Struct, kw_only=True, frozen=True):
    """A step of a rank, as far as scaling needs it."""

    ranks_count: int
    compute_ns: float
    compute_spread_ns: float
    """Standard deviation over ranks and steps."""
    recorded_waiting_ns: float | None = None
    """For how long a rank waited for others that came late, beyond all overlap; None where it was not
    seen, and the spread of compute is all that is known."""
    idle_ns: float
    copy_ns: float
    exposed_ns: float
    communication_ns: float
    """All transfer, hidden or not."""
    collectives: tuple[Collective, ...]


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
    times = []
    for algorithm in ("ring", "tree", "hierarchical"):
        try:
            times.append(collective_time_s(of.name, of.size_bytes, members, topology, algorithm))
        except UsageError:
            if algorithm == "ring":
                raise
    return min(times)


@functools.lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """Expected largest of so many independent standard normal draws.

    ∫ x d(Φ(x)ⁿ) (H. A. David and H. N. Nagaraja, *Order Statistics*, 3rd ed., § 3.1), in parts
    ∫₀^∞ 1 − Φ(x)ⁿ − Φ(−x)ⁿ dx, by the trapezoid rule: 0.564 of 2, 1.424 of 8, 3.241 of 1000.
    """
    x = np.linspace(0.0, 12.0, 2401)
    above = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x.tolist()])
    y = 1 - (1 - above) ** count - above**count
    return float((y.sum() - (y[0] + y[-1]) / 2) * (x[1] - x[0]))


def waiting_ns(step: Step, ranks_count: int) -> float:
    """For how long a rank of so many waits for those that come later, in a step.

    The mean lead of the last one over all is σ·E[max of n] where what makes ranks late is normal and alike
    for all of them, once or several times in a step. So what was recorded on n ranks, whatever the
    reason, goes with E[max of N] ÷ E[max of n], where n and N are the ranks of the group that waits for
    each other, of the run where no group is known. Where it was not seen, σ is the spread of compute.
    """
    recorded = step.ranks_count
    if step.recorded_waiting_ns is None or recorded < 2:
        return step.compute_spread_ns * expected_maximum(ranks_count)
    known = [c for c in step.collectives if c.waiting_ratio]
    growth = max(1 - sum(c.waiting_ratio for c in known), 0.0) * _growth(recorded, ranks_count)
    for of in known:
        members = (of.members_count(count, recorded) for count in (recorded, ranks_count))
        growth += of.waiting_ratio * _growth(*members)
    return step.recorded_waiting_ns * growth


def _growth(recorded_count: int, ranks_count: int) -> float:
    if recorded_count < 2:
        return 1.0
    return expected_maximum(ranks_count) / expected_maximum(recorded_count)


def on_device(step: Step, compute_ratio: float) -> Step:
    """The step where compute takes so many times as long, and with it what it makes ranks wait."""
    spread = step.compute_spread_ns * compute_ratio
    waited = step.recorded_waiting_ns
    if waited is not None:
        by_compute = min(waited, step.compute_spread_ns * expected_maximum(step.ranks_count))
        waited += by_compute * (compute_ratio - 1)
    return msgspec.structs.replace(
        step,
        compute_ns=step.compute_ns * compute_ratio,
        compute_spread_ns=spread,
        recorded_waiting_ns=waited,
    )


def at_scale(
    step: Step, scales_count: tuple[int, ...], topology: Topology
) -> tuple[tuple[AtScale, ...], int | None, str | None]:
    """The step on so many ranks, and the knee.

    Transfer is the sum of the collectives' α-β times by their fastest algorithm, less what hides
    behind compute. Waiting is that of :func:`waiting_ns`. The knee is
    the first size at which efficiency against the fewest ranks falls below 80 %, and its cause what
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
        waiting = waiting_ns(step, ranks)
        parts = [round(v) for v in (step.compute_ns, step.idle_ns, step.copy_ns, waiting, exposed)]
        total = sum(parts)
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


def step_of(
    causes_ns: dict[str, int],
    observed_steps: np.ndarray,
    *,
    steps_count: int,
    ranks_count: int,
    collectives: pa.Table,
) -> Step:
    """What scaling needs of an attributed run.

    Args:
        causes_ns: leaf cause → time over all ranks and steps.
        observed_steps: compute time of each rank's steps, ns, for their spread.
        steps_count: steps of a rank.
        ranks_count: ranks of the run.
        collectives: the view of that name.

    Raises:
        InputError: the run has no collectives that were matched, with their sizes.
    """
    per = 1 / (steps_count * ranks_count)

    def under(prefix: str) -> float:
        return per * sum(t for c, t in causes_ns.items() if c.split(".")[0] == prefix)

    sized: dict[tuple[str, int, int | None, bool], float] = {}
    waited: dict[tuple[str, int, int | None, bool], int] = {}
    transfer = 0.0
    for row in collectives.to_pylist():
        name = _NCCL.get(row["collective"])
        if name is None or not row["message_bytes"]:
            continue
        members = row["rank_count"]
        within = members < ranks_count
        adjacent = within and "," not in (row["ranks"] or ",")
        key = name, int(row["message_bytes"]), members if within else None, adjacent
        # Of several groups at once, a rank is in one.
        sized[key] = sized.get(key, 0) + members / ranks_count
        waited[key] = waited.get(key, 0) + row["exposed_waiting_ns"]
        transfer += row["transfer_ns"] * members / ranks_count
    if not sized:
        raise InputError(
            "--ranks: the run has no collectives with their sizes over several ranks; record "
            "training on two ranks or more"
        )
    spread = float(np.std(observed_steps)) if len(observed_steps) > 1 else 0.0
    exposed = per * sum(
        t
        for c, t in causes_ns.items()
        if c.startswith("communication.") and c != "communication.wait"
    )
    whole = max(causes_ns.get("communication.wait", 0), sum(waited.values()), 1)
    return Step(
        ranks_count=ranks_count,
        compute_ns=under("compute"),
        compute_spread_ns=spread,
        recorded_waiting_ns=_waited(causes_ns, per),
        idle_ns=under("idle"),
        copy_ns=under("copy"),
        exposed_ns=exposed,
        communication_ns=max(transfer / steps_count, exposed),
        collectives=tuple(
            Collective(
                name=name,
                size_bytes=size,
                count=n / steps_count,
                group_count=group,
                adjacent=adjacent,
                waiting_ratio=waited[name, size, group, adjacent] / whole,
            )
            for (name, size, group, adjacent), n in sized.items()
        ),
    )


def _waited(causes_ns: dict[str, int], per: float) -> float | None:
    """Waiting of one rank's step; None where nothing tells it from transfer."""
    waited = causes_ns.get("communication.wait", 0)
    told = waited or any(t for c, t in causes_ns.items() if c.startswith("communication.transfer"))
    return per * waited if told else None
