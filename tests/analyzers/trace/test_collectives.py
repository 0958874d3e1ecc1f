from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chopper.analyzers.causes.attribute import attribute_rank
from chopper.analyzers.trace.match import Matched, match, participation
from chopper.analyzers.trace.rank_join import JoinedRank, join_rank
from chopper.analyzers.trace.tables import RankTables
from chopper.hardware.ceilings import Ceiling, Ceilings, Link
from chopper.tables import TABLES
from tests.analyzers.make import kernel, kernels, span, spans, table


def joined(
    rank: int,
    *events: dict[str, Any],
    metadata: list[dict[str, Any]] | None = None,
    world: int = 2,
    link: float | None = None,
    host: pa.Table | None = None,
) -> JoinedRank:
    if host is None:
        first = min((event["start_ns"] for event in events), default=0)
        host = spans(span(first, first + 1, "aten::empty"))
    return join_rank(
        RankTables(
            rank=rank,
            host_span=host,
            device_event=kernels(*events),
            step=TABLES["step"].empty(),
            collective=table("collective", metadata or []),
            ceiling=Ceiling({}, None, "test"),
            ceilings=Ceilings(None, None, link=Link(link, "test")),
            no_peak_remedy="",
            devices_listed=True,
            world_size=world,
        )
    )


def matched_of(ranks: list[JoinedRank], *, one_clock: bool = False) -> dict[int, Matched]:
    parts = {j.inputs.rank: participation(j.inputs.rank, j.communication) for j in ranks}
    return match(parts.values(), clocks=dict.fromkeys(parts, 0) if one_clock else None)


def times(ranks: list[JoinedRank], *, one_clock: bool = True) -> list[dict[str, int]]:
    matched = matched_of(ranks, one_clock=one_clock)
    found = []
    for j in ranks:
        sums: dict[str, int] = {}
        for row in attribute_rank(j, matched[j.inputs.rank]).piece.to_pylist():
            sums[row["cause"]] = sums.get(row["cause"], 0) + row["time_ns"]
        found.append(sums)
    return found


def nccl(
    start: int, end: int, name: str = "ncclDevKernel_AllReduce_Sum_f32", **more: Any
) -> dict[str, Any]:
    return kernel(start, end, name, stream=20, **more)


def meta(
    row: int,
    sequence: int | None = None,
    elements: int = 250,
    what: str = "allreduce",
    size: int = 2,
) -> dict[str, Any]:
    return {
        "source": "device_event",
        "row": row,
        "collective": what,
        "in_elements_count": elements,
        "out_elements_count": elements,
        "dtype": "Float",
        "group_size_count": size,
        "group_name": "0",
        "group_ranks": str(list(range(size))),
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


@pytest.mark.parametrize(
    ("hidden", "elements", "at_peak", "below_peak"),
    [
        # 500 floats need 2000 bytes / (100 bytes/ns) = 20 ns of the 40 ns of the transfer.
        (None, 500, 20, 20),
        # Exposed: [160, 170] and [190, 200], half of the transfer: 10 of the 20 ns.
        ((170, 190), 500, 10, 10),
        # Exposed: [160, 164] and [184, 200]: the same half, of which 2 ns and 8 ns.
        ((164, 184), 500, 10, 10),
        # Exposed: [160, 168], a fifth of the transfer: 4 of the 20 ns.
        ((168, 210), 500, 4, 4),
        # The kernel ended before the last rank came: it hides waiting only.
        ((100, 160), 500, 20, 20),
        # 2500 floats need 100 ns, more than there is: half of that would be 50 of 20 ns.
        ((170, 190), 2500, 20, 0),
        # No part of the transfer is exposed.
        ((150, 210), 500, 0, 0),
    ],
)
def test_a_partly_hidden_transfer_needs_the_link_for_its_exposed_part(
    hidden: tuple[int, int] | None, elements: int, at_peak: int, below_peak: int
) -> None:
    # Both ranks leave at 200; rank 1 comes last, at 160: the transfer is [160, 200].
    ranks = []
    for rank, start in ((0, 100), (1, 160)):
        before = hidden is not None and hidden[0] < start
        events = [nccl(start, 200), *([] if hidden is None else [kernel(*hidden, "gemm")])]
        metadata = [meta(int(before), elements=elements)]
        ranks.append(joined(rank, *events, metadata=metadata, link=100e9))
    for found in times(ranks):
        assert found.get("communication.transfer.at_peak", 0) == at_peak
        assert found.get("communication.transfer.below_peak", 0) == below_peak


def test_a_rank_that_left_before_the_last_one_came_did_not_wait_for_it() -> None:
    # The root of a broadcast hands its data over and goes on.
    bounds = ((0, 400_000), (100_000, 600_000), (500_000, 600_000))
    ranks = [
        joined(r, nccl(*at), metadata=[meta(0, 1, what="broadcast", size=3)], world=3)
        for r, at in enumerate(bounds)
    ]
    root, waiting, last = times(ranks)
    assert root == {"communication.unseparated": 400_000}
    assert waiting == {"communication.wait": 400_000, "communication.transfer.no_peak": 100_000}
    assert last == {"communication.transfer.no_peak": 100_000}


def test_a_part_of_a_mesh_is_not_held_against_all_its_links() -> None:
    mesh = Ceilings(None, None, link=Link(100e9, "test", group_count=8))
    ranks = []
    for rank, start in ((0, 100), (1, 160)):
        one = joined(rank, nccl(start, 200), metadata=[meta(0)])
        ranks.append(replace(one, inputs=replace(one.inputs, ceilings=mesh)))
    assert times(ranks)[1] == {"communication.transfer.no_peak": 40}
    matched = matched_of(ranks, one_clock=True)
    told = attribute_rank(ranks[0], matched[0]).communication
    assert told["link_bytes_per_s"].to_pylist() == [None]
    assert told["link_source"].to_pylist() == [
        "groups of fewer than 8 ranks have some of the links only"
    ]


@pytest.mark.parametrize(
    ("operator", "dims", "kernel_name"),
    [
        ("c10d::_allgather_base_", [[500], [250], []], "ncclDevKernel_AllGather_RING_LL"),
        ("_c10d_functional::all_gather_into_tensor", [[250]], "ncclDevKernel_AllGather_RING_LL"),
        ("c10d::_reduce_scatter_base_", [[250], [500], []], "ncclDevKernel_ReduceScatter_Sum_f32"),
        ("_c10d_functional::reduce_scatter_tensor", [[500]], "ncclDevKernel_ReduceScatter_Sum_f32"),
    ],
)
def test_a_message_is_the_whole_array_whichever_side_the_operator_takes_first(
    operator: str, dims: list[list[int]], kernel_name: str
) -> None:
    # 500 elements of 4 bytes, half of them each rank's; half of them cross a link of 1 byte/ns.
    host = spans(
        span(0, 10, operator, input_dims=json.dumps(dims), input_types='["float", "float", ""]'),
        span(2, 3, "cudaLaunchKernel", "runtime", correlation_id=1),
    )
    event = {**nccl(100, 2100, kernel_name), "correlation_id": 1}
    ranks = [joined(rank, event, host=host, link=1e9) for rank in (0, 1)]
    assert [kind.message_bytes for kind in ranks[0].communication.kinds] == [2000]
    for sums in times(ranks):
        assert sums["communication.transfer.at_peak"] == 1000
        assert sums["communication.transfer.below_peak"] == 1000


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


def launched(*numbers: int, told: str) -> dict[str, Any]:
    """Host spans and metadata of collectives whose number only their operator tells.

    Collective n is launched at n µs and runs from n·100 on; device events carry the metadata that
    PyTorch 2.4 gave them: all but the number.
    """
    host, metadata = [], []
    for row, n in enumerate(numbers):
        given = {"input_types": '["TensorList","Scalar"]', "concrete_inputs": f'["","{n}"]'}
        first = {"input_types": '["Scalar",""]', "concrete_inputs": f'["{n}","x"]'}
        inputs = {"tensors first": given, "number first": first, "metadata": {}}[told]
        host.append(span(n, n + 9, "record_param_comms", **inputs))
        host.append(span(n + 1, n + 2, "cudaLaunchKernel", "runtime", correlation_id=row + 1))
        metadata.append(meta(row))
        if told == "metadata":
            metadata.append(meta(2 * row, n) | {"source": "host_span"})
    return {"host": spans(*host), "metadata": metadata}


@pytest.mark.parametrize("told", ["metadata", "tensors first", "number first"])
def test_the_operators_number_counts_where_the_device_event_has_none(told: str) -> None:
    # Rank 1 lost its first collective, and its second overlaps with both of rank 0's in time.
    first = (nccl(100, 200, correlation_id=1), nccl(200, 400, correlation_id=2))
    ranks = [
        joined(0, *first, **launched(10, 20, told=told)),
        joined(1, nccl(150, 400, correlation_id=1), **launched(20, told=told)),
    ]
    assert ranks[0].communication.sequence.tolist() == [10, 20]
    lost, transferred = "communication.unseparated", "communication.transfer.no_peak"
    found = times(ranks)
    assert (found[0][lost], found[0][transferred]) == (100, 200)
    assert (found[1]["communication.wait"], found[1][transferred]) == (50, 200)


@pytest.mark.parametrize("given", ['["","many"]', "[]", "{", '["",""]'])
def test_inputs_that_are_no_number_tell_none(given: str) -> None:
    host = spans(
        span(
            10,
            19,
            "record_param_comms",
            input_types='["TensorList","Scalar"]',
            concrete_inputs=given,
        ),
        span(11, 12, "cudaLaunchKernel", "runtime", correlation_id=1),
    )
    one = joined(0, nccl(100, 200, correlation_id=1), host=host, metadata=[meta(0)])
    assert one.communication.sequence.tolist() == [-1]


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
    matched = matched_of(ranks)
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


def instances(ranks: list[JoinedRank], *, one_clock: bool = True) -> list[list[tuple[int, int]]]:
    """Matched collectives as sorted lists of (rank, event), by their first event."""
    matched = matched_of(ranks, one_clock=one_clock)
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, m in matched.items():
        for event in np.flatnonzero(m.instance >= 0):
            found.setdefault(int(m.instance[event]), []).append((rank, int(event)))
    return sorted(sorted(parts) for parts in found.values())


def test_coalesced_collectives_share_a_number() -> None:
    # Two reduce-scatters launched as one: the first of one rank is the first of the other.
    def part(rank: int, start: int) -> JoinedRank:
        entries = [meta(i, 4, what="reduce_scatter_tensor_coalesced") for i in range(2)]
        events = [nccl(start, start + 50), nccl(start + 50, start + 90)]
        return joined(rank, *events, metadata=entries)

    assert instances([part(0, 100), part(1, 900)]) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_a_send_is_matched_with_its_receive() -> None:
    # Rank 0 sends to 1, rank 1 to 2; each rank's other neighbour is of another pair.
    def pair(row: int, what: str, **peer: int) -> dict[str, Any]:
        return meta(row, row, what=what, size=3) | peer

    name = "ncclDevKernel_SendRecv"
    ranks = [
        joined(0, nccl(100, 200, name), metadata=[pair(0, "send", target_rank_id=1)], world=3),
        joined(
            1,
            nccl(150, 200, name),
            nccl(300, 400, name),
            metadata=[pair(0, "recv", source_rank_id=0), pair(1, "send", target_rank_id=2)],
            world=3,
        ),
        joined(2, nccl(330, 400, name), metadata=[pair(0, "recv", source_rank_id=1)], world=3),
    ]
    assert instances(ranks) == [[(0, 0), (1, 0)], [(1, 1), (2, 0)]]
    assert times(ranks)[0]["communication.wait"] == 50
    assert times(ranks)[1]["communication.wait"] == 30


def test_the_backends_span_tells_the_peer() -> None:
    def part(rank: int, start: int, span_name: str) -> JoinedRank:
        host = spans(
            span(0, 90, span_name, "annotation"),
            span(10, 20, "cudaLaunchKernel", "runtime", correlation_id=5),
        )
        event = kernel(start, 200, "ncclDevKernel_SendRecv", stream=20, correlation_id=5)
        return joined(rank, event, host=host)

    ranks = [part(0, 100, "nccl:send 0->1"), part(1, 160, "nccl:recv 1<-0")]
    assert times(ranks)[0]["communication.wait"] == 60


def test_evenly_spaced_groups_need_no_list_of_ranks() -> None:
    # Ranks 1 and 3 of a world of four; long lists are cut short in traces.
    spaced = {"group_ranks": "[1, ...]", "first_rank_id": 1, "rank_stride_count": 2}
    ranks = [
        joined(r, nccl(s, 200), metadata=[meta(0) | spaced], world=4)
        for r, s in ((1, 100), (3, 170))
    ]
    assert instances(ranks) == [[(1, 0), (3, 0)]]


def test_numbered_groups_of_unknown_members_are_matched_by_name() -> None:
    # As many ranks name the group as it has members: these are its members.
    hidden = {"group_ranks": None, "group_name": "tp"}
    pair = [
        joined(r, nccl(s, 200), metadata=[meta(0, 3) | hidden], world=8)
        for r, s in ((0, 9), (5, 99))
    ]
    assert instances(pair) == [[(0, 0), (5, 0)]]
    crowd = [joined(r, nccl(r, 200), metadata=[meta(0, 3) | hidden], world=8) for r in range(3)]
    assert instances(crowd) == []


def test_different_sizes_of_one_number_are_one_collective() -> None:
    ranks = [
        joined(r, nccl(s, 200), metadata=[meta(0, 1, elements=e)])
        for r, s, e in ((0, 100, 250), (1, 160, 999))
    ]
    assert instances(ranks) == [[(0, 0), (1, 0)]]


def counted(
    rank: int, first: int, what: list[tuple[str, int]], world: int = 2, **more: Any
) -> JoinedRank:
    """A rank that gave the n-th collective, 1 ms after the one before, the number ``first + n``."""
    ms = 1_000_000
    events = [nccl(n * ms + 1000 * rank, n * ms + 500_000) for n in range(len(what))]
    entries = [meta(n, first + n, elements=e, what=w) | more for n, (w, e) in enumerate(what)]
    return joined(rank, *events, metadata=entries, world=world)


MIXED = [("allgather", 100), ("allgather", 100), ("reducescatter", 100), ("allreduce", 7)] * 3
ALIKE = [("allreduce", 250)] * 12


@pytest.mark.parametrize("one_clock", [True, False])
@pytest.mark.parametrize(
    ("what", "differing"),
    # Of eleven numbers that both use: those where the neighbour is of another kind or size. On one
    # clock all are, as no two were under way together.
    [(MIXED, 8), ([("allreduce", 100 + n) for n in range(12)], 11)],
)
def test_a_rank_that_counts_from_elsewhere_is_found_and_matched_by_time(
    what: list[tuple[str, int]], differing: int, one_clock: bool
) -> None:
    ranks = [counted(0, 0, what), counted(1, 1, what)]
    assert instances(ranks, one_clock=one_clock) == [[(0, n), (1, n)] for n in range(12)]
    matched = matched_of(ranks, one_clock=one_clock)
    (found,) = matched[1].misnumbered
    assert (found.group, found.size, found.ranks) == ("0", 2, (0, 1))
    assert (found.differing_count, found.compared_count) == (11 if one_clock else differing, 11)


def test_on_one_clock_collectives_of_one_kind_tell_it_too() -> None:
    ranks = [counted(0, 0, ALIKE), counted(1, 1, ALIKE)]
    assert instances(ranks) == [[(0, n), (1, n)] for n in range(12)]
    # Of clocks that are not known to agree, nothing tells.
    matched = matched_of(ranks)
    assert matched[0].misnumbered == ()


def test_ranks_that_count_alike_are_not_blamed_for_a_damaged_record() -> None:
    damaged = [*MIXED]
    damaged[5] = ("allreduce", 3)
    matched = matched_of([counted(0, 0, MIXED), counted(1, 0, damaged)], one_clock=True)
    assert matched[0].misnumbered == ()
    assert int((matched[0].instance >= 0).sum()) == 11


def test_groups_of_unknown_members_that_count_differently_are_not_matched() -> None:
    hidden = {"group_ranks": None, "group_name": "tp"}
    ranks = [counted(0, 0, MIXED, world=8, **hidden), counted(5, 1, MIXED, world=8, **hidden)]
    assert instances(ranks) == []


def test_other_steps_are_not_taken_for_a_shifted_clock() -> None:
    # As many collectives, seconds later, at other distances: the ends do not agree.
    second = 10**9
    here, there = [0, 10**6, 3 * 10**6], [0, 2 * 10**6, 3 * 10**6]
    ranks = [
        joined(0, *(nccl(b, b + 500_000) for b in here)),
        joined(1, *(nccl(b + 5 * second, b + 5 * second + 500_000) for b in there)),
    ]
    assert instances(ranks, one_clock=False) == []


def test_clocks_are_compared_through_common_partners() -> None:
    # 0 and 1 share collectives, 1 and 2 others: rank 2 is 70 ahead of rank 1, that 30 of rank 0.
    def entry(row: int, number: int, ranks: list[int]) -> dict[str, Any]:
        return meta(row, number) | {"group_ranks": str(ranks), "group_name": str(ranks)}

    ranks = [
        joined(0, nccl(0, 100), metadata=[entry(0, 1, [0, 1])], world=3),
        joined(
            1,
            nccl(30, 130),
            nccl(230, 330),
            metadata=[entry(0, 1, [0, 1]), entry(1, 1, [1, 2])],
            world=3,
        ),
        joined(2, nccl(300, 400), metadata=[entry(0, 1, [1, 2])], world=3),
    ]
    matched = matched_of(ranks)
    assert [matched[r].offset_ns for r in range(3)] == [0, 30, 100]
    assert [matched[r].offset_rank for r in range(3)] == [0, 0, 0]


def test_clocks_of_groups_that_share_nothing_are_each_their_own() -> None:
    def entry(ranks: list[int]) -> dict[str, Any]:
        return meta(0, 1) | {"group_ranks": str(ranks), "group_name": str(ranks)}

    lead = {0: 0, 1: 30, 2: -500, 3: 900}
    ranks = [
        joined(r, nccl(by, by + 100), metadata=[entry([0, 1] if r < 2 else [2, 3])], world=4)
        for r, by in lead.items()
    ]
    matched = matched_of(ranks)
    assert {r: (m.offset_ns, m.offset_rank) for r, m in matched.items()} == {
        0: (0, 0),
        1: (30, 0),
        2: (0, 2),
        3: (1400, 2),
    }


def test_more_elements_than_can_be_are_no_size() -> None:
    ranks = [joined(r, nccl(100, 200), metadata=[meta(0, 1, elements=1 << 62)]) for r in (0, 1)]
    matched = matched_of(ranks)
    told = attribute_rank(ranks[0], matched[0]).communication
    assert told["message_bytes"].to_pylist() == [None]
    assert told["instance_id"].to_pylist() == [0]


def test_many_ranks_and_collectives_all_find_each_other() -> None:
    # One collective of 64 is lost on one rank: all others are matched, numbered or not.
    for numbered in (True, False):
        ranks = []
        for rank in range(64):
            kept = [n for n in range(100) if not (rank == 63 and n == 17)]
            events = [nccl(10_000 * n + rank, 10_000 * n + 5000) for n in kept]
            entries = [meta(i, n if numbered else None, size=64) for i, n in enumerate(kept)]
            ranks.append(joined(rank, *events, metadata=entries, world=64))
        found = instances(ranks)
        assert len(found) == 99
        assert all(len(parts) == 64 for parts in found)
