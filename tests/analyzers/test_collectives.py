from __future__ import annotations

from typing import Any

import pyarrow as pa

from chopper.analyzers.attribute import JoinedRank, RankInput, attribute_rank, join_rank
from chopper.analyzers.collectives import match
from chopper.analyzers.compute import Ceiling
from chopper.tables import TABLES
from tests.analyzers.make import kernel, kernels, span, spans, table


def joined(
    rank: int,
    *events: dict[str, Any],
    metadata: list[dict[str, Any]] | None = None,
    world: int = 2,
    link: float | None = None,
) -> JoinedRank:
    host: pa.Table = spans(span(0, 1, "aten::empty"))
    return join_rank(
        RankInput(
            rank=rank,
            host_span=host,
            device_event=kernels(*events),
            step=TABLES["step"].empty(),
            collective=table("collective", metadata or []),
            ceiling=Ceiling(lambda _: None, None, "test", link),
            no_peak_remedy="",
            devices_listed=True,
            world_size=world,
        )
    )


def times(ranks: list[JoinedRank], *, one_clock: bool = True) -> list[dict[str, int]]:
    matched = match([(j.given.rank, j.links, j.communication) for j in ranks], one_clock=one_clock)
    found = []
    for j in ranks:
        sums: dict[str, int] = {}
        for row in attribute_rank(j, matched[j.given.rank]).piece.to_pylist():
            sums[row["cause"]] = sums.get(row["cause"], 0) + row["time_ns"]
        found.append(sums)
    return found


def nccl(start: int, end: int, name: str = "ncclDevKernel_AllReduce_Sum_f32") -> dict[str, Any]:
    return kernel(start, end, name, stream=20)


def meta(row: int, sequence: int | None = None, elements: int = 250, what: str = "allreduce"):
    return {
        "source": "device_event",
        "row": row,
        "collective": what,
        "in_elements_count": elements,
        "out_elements_count": elements,
        "dtype": "Float",
        "group_size_count": 2,
        "group_name": "0",
        "group_ranks": "[0, 1]",
        "sequence_id": sequence,
    }


def test_waiting_ends_when_the_last_rank_comes() -> None:
    # Rank 1 comes at 160, 60 ns after rank 0; both leave at 200.
    assert times([joined(0, nccl(100, 200)), joined(1, nccl(160, 200))]) == [
        {"communication.wait": 60, "communication.transfer.no_peak": 40},
        {"communication.transfer.no_peak": 40},
    ]


def test_the_transfer_is_held_against_the_link() -> None:
    # 250 floats all-reduced over 2 ranks: 1000 bytes times 2(n-1)/n = 1; 100 bytes/ns -> 10 ns.
    ranks = [
        joined(r, nccl(start, 200), metadata=[meta(0)], link=100e9)
        for r, start in ((0, 100), (1, 160))
    ]
    assert times(ranks)[1] == {
        "communication.transfer.at_peak": 10,
        "communication.transfer.below_peak": 30,
    }


def test_what_compute_hides_is_not_exposed() -> None:
    ranks = [
        joined(0, nccl(100, 200), kernel(100, 130, "gemm"), kernel(150, 170, "gemm")),
        joined(1, nccl(160, 200)),
    ]
    # Waiting [100, 160] shows in [130, 150]; the transfer [160, 200] in [170, 200].
    assert times(ranks)[0] == {
        "compute.no_peak": 50,
        "communication.wait": 20,
        "communication.transfer.no_peak": 30,
    }


def test_a_dropped_event_shifts_nothing() -> None:
    # Rank 1's trace lost its second collective: the third still finds its partner.
    ranks = [
        joined(0, nccl(100, 200), nccl(300, 400), nccl(500, 600)),
        joined(1, nccl(150, 200), nccl(560, 600)),
    ]
    assert times(ranks)[0] == {
        "communication.wait": 50 + 60,
        "communication.transfer.no_peak": 50 + 40,
        "communication.unseparated": 100,
        "idle.unlaunched": 200,
    }


def test_the_sequence_number_decides_where_it_is_recorded() -> None:
    # The same three, numbered; without overlap in time nothing but the number could match them.
    ranks = [
        joined(0, nccl(100, 200), nccl(300, 400), metadata=[meta(0, 7), meta(1, 8)]),
        joined(1, nccl(390, 400), metadata=[meta(0, 8)]),
    ]
    assert times(ranks)[0] == {
        "communication.unseparated": 100,
        "communication.wait": 90,
        "communication.transfer.no_peak": 10,
        "idle.unlaunched": 100,
    }


def test_a_missing_rank_leaves_its_collectives_unseparated() -> None:
    ranks = [joined(0, nccl(100, 200), world=4), joined(1, nccl(160, 200), world=4)]
    assert times(ranks) == [
        {"communication.unseparated": 100},
        {"communication.unseparated": 40},
    ]


def test_uneven_all_to_alls_match_whatever_their_sizes() -> None:
    # NCCL runs them as sends and receives: only the metadata says what they are.
    name = "ncclDevKernel_SendRecv"
    ranks = [
        joined(r, nccl(start, 200, name), metadata=[meta(0, None, elements, "all_to_allv")])
        for r, start, elements in ((0, 100, 10), (1, 160, 99))
    ]
    assert times(ranks)[0]["communication.wait"] == 60


def test_clocks_that_disagree_match_nothing() -> None:
    second = 10**9
    ranks = [joined(0, nccl(100, 200)), joined(1, nccl(160 + 5 * second, 200 + 5 * second))]
    assert times(ranks)[0] == {"communication.unseparated": 100}


def test_a_constant_clock_offset_is_no_straggler() -> None:
    # Rank 1's clock is 30 ns ahead; both enter together each time, but the third: 50 ns late.
    plain = [(100, 200), (300, 400), (500, 600)]
    ranks = [
        joined(0, *(nccl(a, b) for a, b in plain)),
        joined(1, nccl(130, 230), nccl(330, 430), nccl(580, 630)),
    ]
    matched = match([(j.given.rank, j.links, j.communication) for j in ranks])
    assert [matched[r].offset_ns for r in (0, 1)] == [0, 30]
    assert times(ranks, one_clock=False)[0]["communication.wait"] == 50
    assert "communication.wait" not in times(ranks, one_clock=False)[1]


def test_groups_of_unknown_members_are_not_matched() -> None:
    # Two pairs of a world of four, sizes recorded, members not: nobody can say who waits for whom.
    def part(rank: int, start: int) -> JoinedRank:
        known = meta(0)
        known["group_ranks"] = "[0, 1, ...]"
        return joined(rank, nccl(start, 200), metadata=[known], world=4)

    assert all(
        set(sums) == {"communication.unseparated"}
        for sums in times([part(r, 100 + 10 * r) for r in range(4)])
    )


def test_point_to_point_is_no_collective() -> None:
    ranks = [joined(r, nccl(s, 200, "ncclDevKernel_SendRecv")) for r, s in ((0, 100), (1, 160))]
    assert times(ranks)[0] == {"communication.unseparated": 100}
