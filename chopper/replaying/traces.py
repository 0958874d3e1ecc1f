"""Traces that are replayed: which cannot be, and the one that a replay leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from chopper.analyzers.replay.schedule import tables
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import row_set
from chopper.errors import InputError
from chopper.storage.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from chopper.analyzers.replay.scenario import Outcome
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.replaying.replay import Replay

_LAUNCHED_RATIO = 0.5


def check_launches(source: str, joined: Sequence[JoinedRank]) -> None:
    """Refuse traces whose device events hang on nothing."""
    beside = [j for j in joined if not j.host_only]
    events = sum(len(j.links.events) for j in beside)
    launched = sum(int(j.links.has_launch.sum()) for j in beside)
    if events and launched < _LAUNCHED_RATIO * events:
        raise InputError(
            f"{source}: cannot be replayed: {launched} of {events} device events have a recorded "
            "launch; record the host's runtime calls too (CPU activities)"
        )
    for j in beside:
        host = j.links.host
        if not len(host):
            continue
        graphs = host.named(names.is_graph_launch)
        if not graphs.any():
            continue
        empty = np.flatnonzero(graphs & ~row_set(j.links.launch_row, len(host)))
        # The last launches of a trace may have run after it.
        if len(empty) > 0.1 * int(graphs.sum()) and len(empty) > 1:
            raise InputError(
                f"{source}: cannot be replayed: {len(empty)} of {graphs.sum()} graph launches of rank "
                f"{j.given.rank} have no kernels in the trace; record graphs node by node"
            )


def replayed(replay: Replay, outcome: Outcome, alike: int | None) -> Run:
    """The replayed schedule as a run in memory."""
    run = replay.attribution.run
    ranks = replay.base.graph.ranks
    parts = {part.rank: part for part in run.manifest.ranks}
    manifest = msgspec.structs.replace(
        run.manifest,
        ranks=[msgspec.structs.replace(parts[node.rank], findings=[]) for node in ranks],
        findings=[],
    )
    found: dict[tuple[int, str], pa.Table] = {}
    made: dict[int, dict[str, pa.Table]] = {}
    for place, node in enumerate(ranks):
        source = place if alike is None else alike
        if source not in made:
            made[source] = tables(outcome, source)
        for name, table in made[source].items():
            found[node.rank, name] = table
        counters = run.table(node.rank, "kernel_counter")
        if counters.num_rows:
            found[node.rank, "kernel_counter"] = counters
    return Run(manifest, None, found, source=f"{run.source} (replayed)")


__all__ = ["check_launches", "replayed"]
