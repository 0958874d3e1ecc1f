"""Joined ranks of small hand-made traces, for tests of the replay."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.graph import build
from chopper.analyzers.replay.scenario import Base
from chopper.analyzers.trace.rank_join import JoinedRank, join_rank
from chopper.analyzers.trace.tables import RankTables
from chopper.storage.manifest import Measure, RankManifest, RunManifest
from chopper.storage.run import Run
from tests.analyzers import make


def call(start: int, end: int, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return make.span(start, end, name, "runtime", correlation_id=correlation)


def tables(
    spans: list[dict[str, Any]], kernels: list[dict[str, Any]], steps: pa.Table
) -> dict[str, pa.Table]:
    return {
        "host_span": make.spans(*spans),
        "device_event": make.kernels(*kernels),
        "step": steps,
        "collective": make.table("collective", []),
    }


def joined(given: dict[str, pa.Table], rank: int = 0) -> JoinedRank:
    return join_rank(
        RankTables(rank=rank, **given, ceiling=None, no_peak_remedy="", devices_listed=True)
    )


def base(given: dict[str, pa.Table]) -> Base:
    return Base(build([(joined(given), None)]))


def run(given: dict[str, pa.Table]) -> Run:
    manifest = RunManifest(
        chopper_version="0", kind="imported", name="made", ranks=[RankManifest(rank=0)]
    )
    return Run(manifest, None, {(0, name): table for name, table in given.items()}, source="made")


def two_ranks(*ranks: dict[str, pa.Table], link_bytes_per_s: float | None = None) -> Attribution:
    """Attribute the ranks of a job on one host, whose link the program may have stated."""
    parts = [RankManifest(rank=r, world_size=len(ranks), hostname="one") for r in range(len(ranks))]
    if link_bytes_per_s is not None:
        for part in parts:
            part.measures = [Measure(name="link_bytes_per_s", value=link_bytes_per_s)]
    manifest = RunManifest(chopper_version="0", kind="imported", name="made", ranks=parts)
    made = {(rank, name): t for rank, given in enumerate(ranks) for name, t in given.items()}
    return pipeline.attribute(Run(manifest, None, made, source="made"))


def late_second_launch() -> dict[str, pa.Table]:
    """Launches at 0 and 400, 10 long; kernels 20 after them, 100 long. Python in between."""
    return tables(
        [
            make.span(0, 1000, "loop", "python"),
            call(0, 10, 1),
            call(400, 410, 2),
        ],
        [
            make.kernel(20, 120, correlation_id=1),
            make.kernel(420, 520, correlation_id=2),
        ],
        make.steps((0, 1000)),
    )
