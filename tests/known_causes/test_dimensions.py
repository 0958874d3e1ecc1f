"""Jobs of four ranks along one dimension of parallelism, of which every wait is known. In ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.analyzers.make import kernel, kernels, span, spans
from tests.analyzers.views.test_communication import GEMM, recorded, tables

RANKS = 4
US = 1_000
Event = tuple[str, int, dict[str, Any]]
"""Kernel, when the rank comes to its end by itself, and what is recorded of a collective."""


class Clock:
    """Ranks that compute for some time, and meet in collectives that take a fixed time."""

    def __init__(self) -> None:
        self.now = [0] * RANKS
        self.events: list[list[tuple[int, int, str, dict[str, Any] | None]]] = [
            [] for _ in range(RANKS)
        ]

    def compute(self, rank: int, calls: int, each_ns: int) -> None:
        for _ in range(calls):
            begin = self.now[rank]
            self.events[rank].append((begin, begin + each_ns, GEMM, None))
            self.now[rank] += each_ns

    def meet(self, what: str, took_ns: int, sent: Sequence[int] = (1000,) * RANKS) -> list[int]:
        """Enter a collective of all ranks; return what each waited for the last."""
        ready = max(self.now)
        waited = [ready - now for now in self.now]
        for rank, now in enumerate(self.now):
            fields = {"collective": what, "in_elements_count": sent[rank], "group_name": "7"}
            fields["out_elements_count"] = 1000
            self.events[rank].append((now, ready + took_ns, f"ncclDevKernel_{what}", fields))
            self.now[rank] = ready + took_ns
        return waited

    def hop(self, took_ns: int) -> list[int]:
        """Pass a block on in a ring; return what each waited for its neighbours."""
        begin, waited = [*self.now], []
        for rank in range(RANKS):
            before, after = (rank - 1) % RANKS, (rank + 1) % RANKS
            for source, target in ((rank, after), (before, rank)):
                way = "send" if source == rank else "recv"
                fields = {"collective": way, "source_rank_id": source, "target_rank_id": target}
                fields["group_name"] = "7"
                end = max(begin[source], begin[target]) + took_ns
                self.events[rank].append((begin[rank], end, "ncclDevKernel_SendRecv", fields))
                self.now[rank] = max(self.now[rank], end)
            waited.append(self.now[rank] - took_ns - begin[rank])
        return waited

    def attributed(self, name: str) -> Attribution:
        """Attribute the job; ``name`` is that of its process group."""
        parts = [
            m.RankManifest(
                rank=rank,
                world_size=RANKS,
                hostname="one",
                status="imported",
                process_groups=[
                    {"pg_name": "7", "pg_desc": name, "pg_size": RANKS, "ranks": [*range(RANKS)]}
                ],
            )
            for rank in range(RANKS)
        ]
        made: dict[tuple[int, str], pa.Table] = {}
        for rank, of in enumerate(self.events):
            events = sorted(of, key=lambda event: (event[0], -event[1]))  # as tables are
            rows = [kernel(a, b, what, 7 if f is None else 20) for a, b, what, f in events]
            entries = [recorded(row, size=RANKS, **f) for row, (*_, f) in enumerate(events) if f]
            host = spans(span(0, 1, "aten::empty"))
            of_rank = tables(host, kernels(*rows), TABLES["step"].empty(), entries)
            made |= {(rank, table): of_rank[table] for table in of_rank}
        manifest = m.RunManifest(chopper_version="0", kind="imported", name="known", ranks=parts)
        return pipeline.attribute(Run(manifest, None, made, source="known"))


def times(run: Attribution) -> dict[str, int]:
    found = {row.id: row.time_ns for row in run.leaves()}
    assert sum(found.values()) == run.observed_ns
    return found


def layers(
    tokens: Sequence[Sequence[int]], slow: Sequence[float] = (1,) * RANKS
) -> tuple[Attribution, int]:
    """Layers of experts: all ranks work, tokens go to the experts, are worked on and come back.

    Returns:
        The attribution, and what is waited for in all when no rank is slow.
    """
    waited = []
    for speeds in ((1,) * RANKS, slow):
        job, waits = Clock(), 0
        for of_layer in tokens:
            for rank in range(RANKS):
                job.compute(rank, 2, round(50 * US * speeds[rank]))
            waits += sum(job.meet("all_to_all", 10 * US))
            for rank, count in enumerate(of_layer):
                job.compute(rank, 1, round(count * 100 * speeds[rank]))
            waits += sum(job.meet("all_to_all", 10 * US, of_layer))
        waited.append(waits)
    return job.attributed("EXPERT_MODEL_PARALLEL_GROUP"), waited[0]


def test_waiting_for_ranks_with_more_tokens_is_imbalance() -> None:
    run, waited_ns = layers([[1000, 1000, 1000, 3000], [2000, 1000, 1000, 1000]])
    found = times(run)
    assert found["communication.expert.imbalance"] == pytest.approx(waited_ns, rel=0.02)
    assert found.get("communication.wait", 0) <= 0.01 * waited_ns
    assert found["communication.expert.no_peak"] == 4 * RANKS * 10 * US


def test_a_slow_rank_among_experts_is_a_straggler() -> None:
    run, _ = layers([[1000] * RANKS] * 3, slow=(1, 1, 1.5, 1))
    found = times(run)
    assert "communication.expert.imbalance" not in found
    # The others wait for half of 100 µs of both kinds of work, in each layer.
    assert found["communication.wait"] == 3 * (RANKS - 1) * 2 * 50 * US


def test_more_tokens_on_a_slow_rank_are_told_from_its_slowness() -> None:
    run, waited_ns = layers([[1000, 1000, 1000, 2000]] * 3, slow=(1, 1, 1, 1.5))
    found = times(run)
    assert found["communication.expert.imbalance"] == pytest.approx(waited_ns, rel=0.02)
    slow_ns = 3 * (RANKS - 1) * (50 * US + 100 * US)
    assert found["communication.wait"] == pytest.approx(slow_ns, rel=0.02)


def ring(blocks: Sequence[int], slow: Sequence[float] = (1,) * RANKS) -> tuple[Attribution, int]:
    """Two layers of ring attention; of its hops a rank works in as many as it has blocks."""
    job, waits = Clock(), 0
    for _ in range(2):
        for hop in range(RANKS):
            waits += sum(job.hop(US))
            for rank in range(RANKS):
                job.compute(rank, hop < blocks[rank], round(100 * US * slow[rank]))
        waits += sum(job.meet("all_gather", 5 * US))
    return job.attributed("mesh_cp"), waits


def test_a_contiguous_causal_ring_is_uneven() -> None:
    run, waited_ns = ring([1, 2, 3, 4])
    found = times(run)
    assert found["communication.context.imbalance"] == pytest.approx(waited_ns, rel=0.02)
    assert found.get("communication.wait", 0) <= 0.01 * waited_ns


def test_a_slow_rank_in_an_even_ring_is_a_straggler() -> None:
    run, waited_ns = ring([4] * RANKS, slow=(1, 1, 2, 1))
    found = times(run)
    assert found.get("communication.context.imbalance", 0) <= 0.01 * waited_ns
    assert found["communication.wait"] == pytest.approx(waited_ns, rel=0.02)


@pytest.mark.parametrize("name", ["TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp", "tp"])
def test_exposed_transfers_of_tensor_parallelism_are_its_own(name: str) -> None:
    job = Clock()
    for _ in range(3):
        for rank in range(RANKS):
            job.compute(rank, 1, 100 * US + rank * US)
        job.meet("all_reduce", 20 * US)
    found = times(job.attributed(name))
    assert found["communication.tensor.no_peak"] == 3 * RANKS * 20 * US
    assert found["communication.wait"] == 3 * (1 + 2 + 3) * US
