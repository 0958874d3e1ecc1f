"""Collectives of many ranks: matched group by group, in any order and any tree of ranks."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.collectives_at_scale import (
    BASE_NS,
    DRIFT_RATIO,
    HOST_RANKS,
    JITTER_NS,
    SLOT_NS,
    Job,
)
from chopper.analyzers.trace import match as match_module
from chopper.analyzers.trace.collectives import Communication, Key, Kind
from chopper.analyzers.trace.match import (
    Matched,
    Part,
    match,
    merge,
    participation,
    resolve,
    within,
)
from chopper.storage import results

RANKS = 32
"""Four hosts; tensor 4, context 2, pipeline 4."""


def host_of(rank: int) -> int:
    return rank // HOST_RANKS * HOST_RANKS


def without(communication: Communication, share: float, seed: int) -> Communication:
    """A trace that lost some of its events."""
    stays = np.random.default_rng(seed).random(len(communication.kind)) >= share
    columns = ("event_row", "kind", "sequence", "entered_ns", "left_ns")
    return replace(communication, **{name: getattr(communication, name)[stays] for name in columns})


def plain(matched: Iterable[tuple[int, Matched]]) -> dict[int, list[object]]:
    """Every figure that ranks get back."""
    return {
        rank: [
            m.event_row.tolist(),
            m.event_ready_ns.tolist(),
            m.event_instance.tolist(),
            *(m.device_event_count, m.offset_ns, m.offset_rank, m.misnumbered),
        ]
        for rank, m in matched
    }


def again(part: Part) -> Part:
    """A part written and read back, as between processes."""
    read: Part = results.decode(results.encode(part))
    return read


def told(
    case: str = "numbered", ranks: Iterable[int] = range(RANKS), slots: int = 120, jobs: int = RANKS
) -> tuple[Job, dict[int, Communication]]:
    job = Job(jobs, slots, case)
    return job, {rank: job.communication(rank) for rank in ranks}


def parts_of(communication: dict[int, Communication]) -> dict[int, Part]:
    return {rank: participation(rank, one, host_of(rank)) for rank, one in communication.items()}


def slots_of(job: Job, rank: int, entered_ns: np.ndarray) -> list[int]:
    """In which slots the events of a rank began."""
    since = entered_ns - job.lead_ns[rank // HOST_RANKS] - BASE_NS
    numbers: list[int] = ((since + SLOT_NS // 4) // SLOT_NS).tolist()
    return numbers


def collectives(
    job: Job, communication: dict[int, Communication], matched: dict[int, Matched]
) -> list[tuple[set[int], tuple[int, ...]]]:
    """Slots and ranks of each matched collective, as the job knows them."""
    found: dict[int, set[tuple[int, int]]] = {}
    for rank, one in matched.items():
        told_by = communication[rank]
        rows = np.searchsorted(told_by.event_row, one.event_row)
        slots = slots_of(job, rank, told_by.entered_ns[rows])
        for instance, slot in zip(one.event_instance.tolist(), slots, strict=True):
            found.setdefault(instance, set()).add((slot, rank))
    return [
        ({slot for slot, _ in events}, tuple(sorted(rank for _, rank in events)))
        for events in found.values()
    ]


def members_of(
    job: Job, communication: dict[int, Communication]
) -> dict[int, list[tuple[int, ...]]]:
    """Slot → groups that are at work in it, of the events that are there."""
    groups: dict[int, set[tuple[int, ...]]] = {}
    for rank, one in communication.items():
        slots = slots_of(job, rank, one.entered_ns)
        for slot, kind in zip(slots, one.kind.tolist(), strict=True):
            groups.setdefault(slot, set()).add(one.kinds[kind].members)
    return {number: sorted(of) for number, of in groups.items()}


@settings(max_examples=15, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["numbered", "by time", "one group"]),
    st.sets(st.integers(0, RANKS - 1), max_size=3),
    st.dictionaries(st.integers(0, RANKS - 1), st.sampled_from([0.02, 0.1, 0.9]), max_size=3),
    st.sets(st.integers(0, RANKS - 1), max_size=2),
    st.sampled_from([1, 100, 1 << 16]),
)
def test_any_order_of_ranks_and_any_tree_give_the_same_to_the_nanosecond(
    order: random.Random,
    case: str,
    missing: set[int],
    lost: dict[int, float],
    ahead: set[int],
    events_at_a_time: int,
) -> None:
    # Ranks without a trace, ranks that lost events, ranks that count from elsewhere.
    _, communication = told(case, sorted({*range(RANKS)} - missing), slots=25)
    for rank, one in communication.items():
        if rank in lost:
            one = without(one, lost[rank], rank)
        if rank in ahead:
            one = replace(one, sequence=np.where(one.sequence >= 0, one.sequence + 1, -1))
        communication[rank] = one
    parts = parts_of(communication)
    expected = plain(resolve(merge(parts.values())))
    left = [*parts.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(match_module, "_EVENTS_AT_A_TIME", events_at_a_time)
        while len(left) > 1:
            order.shuffle(left)
            count = order.randint(2, 6)
            left = [again(merge(left[:count])), *left[count:]]
        assert plain(resolve(left[0])) == expected


@pytest.mark.parametrize("case", ["numbered", "one group", "one group, by time"])
def test_matching_takes_little_more_memory_than_its_events(case: str) -> None:
    ranks = 96
    _, communication = told(case, range(ranks), 2000, ranks)
    # Each rank has a clock of its own, as in traces that name no host.
    parts = [participation(rank, one) for rank, one in communication.items()]
    count = sum(len(part.waiting) for part in parts)
    tracemalloc.start()
    try:
        matched = dict(resolve(merge(parts)))
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(one.event_row) for one in matched.values()) == count
    # Beside the ranks' own events, which are there before: their copy, and what was matched.
    assert held_bytes < 20 * count + 500_000
    assert peak_bytes < 100 * count + 5_000_000


@pytest.mark.parametrize("case", ["numbered", "by time"])
def test_groups_of_every_parallel_dimension_are_matched(case: str) -> None:
    job, communication = told(case)
    matched = match(parts_of(communication).values())
    assert all(len(m.event_row) == len(communication[r].event_row) for r, m in matched.items())
    found = collectives(job, communication, matched)
    at_work = members_of(job, communication)
    # Each is of one slot, and holds the ranks of one of its groups.
    assert {len(slots) for slots, _ in found} == {1}
    assert sorted((min(slots), ranks) for slots, ranks in found) == [
        (slot, ranks) for slot in sorted(at_work) for ranks in at_work[slot]
    ]


@pytest.mark.parametrize("case", ["numbered", "by time"])
def test_clocks_of_hosts_are_compared_within_the_known_error(case: str) -> None:
    ranks, slots = 128, 400
    job, communication = told(case, range(ranks), slots, ranks)
    matched = match(parts_of(communication).values())
    # Two hosts are tied over at most three others; ends differ by the jitter, and clocks drift
    # apart from the middle of the trace on.
    drift_ns = 2 * DRIFT_RATIO * slots * SLOT_NS
    bound_ns = 4 * JITTER_NS + drift_ns
    for rank, one in matched.items():
        host = rank // HOST_RANKS
        lead_ns = job.lead_ns[host] - job.lead_ns[0]
        assert abs(one.offset_ns - lead_ns) <= bound_ns
        assert one.offset_rank == 0
        assert one.offset_ns == matched[host_of(rank)].offset_ns
    # So the last arrival is known within that error, wherever it was.
    last: dict[int, int] = {}
    for rank, one in matched.items():
        rows = np.searchsorted(communication[rank].event_row, one.event_row)
        entered = communication[rank].entered_ns[rows] - job.lead_ns[rank // HOST_RANKS]
        for instance, at in zip(one.event_instance.tolist(), entered.tolist(), strict=True):
            last[instance] = max(at, last.get(instance, at))
    for rank, one in matched.items():
        ready = one.event_ready_ns - job.lead_ns[rank // HOST_RANKS]
        truth = np.array([last[instance] for instance in one.event_instance.tolist()])
        assert np.abs(ready - truth).max() <= 2 * bound_ns


def test_a_rank_cut_early_costs_only_what_came_after() -> None:
    job, communication = told()
    half = communication[9].entered_ns < BASE_NS + job.lead_ns[1] + 60 * SLOT_NS
    columns = ("event_row", "kind", "sequence", "entered_ns", "left_ns")
    communication[9] = replace(
        communication[9], **{name: getattr(communication[9], name)[half] for name in columns}
    )
    matched = match(parts_of(communication).values())
    assert len(matched[9].event_row) == int(half.sum())
    for rank, one in matched.items():
        known = communication[rank].entered_ns < BASE_NS + job.lead_ns[rank // 8] + 60 * SLOT_NS
        assert np.isin(communication[rank].event_row[known], one.event_row).all()


def test_groups_only_part_of_whose_ranks_were_recorded_are_not_matched() -> None:
    # The first tensor group alone: its size is 4, all others reach beyond it.
    _, communication = told(ranks=range(4))
    matched = match(parts_of(communication).values())
    for rank, one in matched.items():
        kinds = communication[rank].kinds
        of = [kinds[k].group for k in communication[rank].kind]
        assert len(one.event_row) == of.count("tp") > 0


def group_of(rank: int, ranks: tuple[int, ...], members: tuple[int, ...]) -> Communication:
    """Three all-reduces of a group called ``tp``, 1 ms apart; ranks come 1000 ns one by one."""
    key = Key(members, len(ranks), "tp", "allreduce", 8 if members else None, numbered=True)
    begin = np.arange(3) * SLOT_NS + BASE_NS
    return Communication(
        np.arange(3),
        [Kind("allreduce", "tp", len(ranks), members, 32, key)],
        np.zeros(3, np.int64),
        np.arange(3),
        begin + 1000 * rank,
        begin + 100_000,
        3,
    )


def test_groups_of_one_name_are_told_apart_by_their_members() -> None:
    groups = ((0, 1), (2, 3))
    for known in (True, False):
        communication = {
            rank: group_of(rank, ranks, ranks if known else ())
            for ranks in groups
            for rank in ranks
        }
        matched = match(parts_of(communication).values())
        ready = {rank: (one.event_ready_ns - BASE_NS).tolist() for rank, one in matched.items()}
        if known:
            assert ready[0] == ready[1] == [1000, 1_001_000, 2_001_000]
            assert ready[2] == ready[3] == [3000, 1_003_000, 2_003_000]
            assert {*matched[0].event_instance}.isdisjoint(matched[2].event_instance)
        else:
            # Four ranks say that they are of a group of two, and nobody which.
            assert not any(map(len, ready.values()))


def test_ranks_outside_a_group_take_no_part_in_it() -> None:
    communication = {rank: group_of(rank, (0, 1), (0, 1)) for rank in (0, 1, 2)}
    matched = match(parts_of(communication).values())
    assert [len(matched[rank].event_row) for rank in (0, 1, 2)] == [3, 3, 0]


def test_clocks_tied_by_sends_alone_are_compared_too() -> None:
    # Two hosts, tensor groups inside, sends between: the second host's clock is 7 ms ahead.
    lead_ns = 7_000_000

    def of(rank: int) -> Communication:
        inner = (0, 1) if rank < 2 else (2, 3)
        one = group_of(rank % 2, inner, inner)
        if rank in (1, 2):
            key = Key((1, 2), 2, "pp", "send 1→2", -1)
            kinds = [*one.kinds, Kind("sendrecv", "pp", 2, (1, 2), 8, key)]
            at = one.entered_ns + 500_000
            one = Communication(
                np.arange(6),
                kinds,
                np.repeat([0, 1], 3),
                np.append(one.sequence, [-1] * 3),
                np.append(one.entered_ns, at),
                np.append(one.left_ns, at + 50_000 - 1000 * (rank % 2)),
                6,
            )
        ahead = lead_ns * (rank >= 2)
        return replace(one, entered_ns=one.entered_ns + ahead, left_ns=one.left_ns + ahead)

    communication = {rank: of(rank) for rank in range(4)}
    parts = {rank: participation(rank, c, rank // 2 * 2) for rank, c in communication.items()}
    matched = match(parts.values())
    assert [matched[rank].offset_ns for rank in range(4)] == [0, 0, lead_ns, lead_ns]
    assert [matched[rank].offset_rank for rank in range(4)] == [0, 0, 0, 0]


def test_what_is_matched_within_a_host_travels_no_further() -> None:
    _, communication = told(slots=200)
    parts = parts_of(communication)
    host = merge(parts[rank] for rank in range(8))
    outside = {k.members for one in communication.values() for k in one.kinds} - {
        tuple(range(8)),
        *((first, *range(first + 1, first + 4)) for first in (0, 4)),
    }
    assert {key.members for key, _ in host.kinds} <= outside
    alone = sum(len(results.encode(parts[rank])) for rank in range(8))
    assert len(results.encode(host)) < 0.8 * alone


def test_what_a_rank_gets_back_is_its_own_and_small() -> None:
    _, communication = told(slots=1000)
    parts = parts_of(communication)
    for rank, one in resolve(merge(parts.values())):
        sent, back = len(results.encode(parts[rank])), len(results.encode(one))
        events = len(communication[rank].kind)
        assert sent < 40 * events + 20_000
        assert back < 20 * events + 5_000
        read = results.decode(results.encode(one))
        assert plain([(rank, read)]) == plain([(rank, one)])
        assert len(one.ready_ns) == len(one.instance) == communication[rank].device_event_count


def test_some_ranks_alone_keep_what_they_did_among_themselves() -> None:
    _, communication = told()
    matched = match(parts_of(communication).values())
    some = within(matched, range(4))
    assert [*some] == [0, 1, 2, 3]
    for rank, one in some.items():
        kinds = communication[rank].kinds
        assert len(one.event_row) == sum(kinds[k].group == "tp" for k in communication[rank].kind)
    assert plain(within(matched, range(RANKS)).items()) == plain(matched.items())


def test_no_ranks_and_ranks_without_collectives_match_nothing() -> None:
    assert match([]) == {}
    none = np.zeros(0, np.int64)
    silent = participation(3, Communication(none, [], none, none, none, none, 5))
    (matched,) = match([silent]).values()
    assert matched.ready_ns.tolist() == [-1] * 5
    assert (matched.offset_ns, matched.offset_rank) == (0, 3)
