"""Products that wait for other ranks, between processes in Triton's interpreter; their orders."""

from __future__ import annotations

import itertools

import pytest

from chopper.workloads.tiles import turns, visits

CASES = "tests.workloads.tile_cases"
GATHER = {"operation": "gather", "rows": 20, "k": 24, "n": 20, "chunk": 6}
SCATTER = {"operation": "scatter", "rows": 21, "k": 20, "n": 20}


@pytest.mark.parametrize(
    ("case", "order", "of"),
    [
        (GATHER, "ring", 3),
        (SCATTER, "rows", 2),
        pytest.param(GATHER, "rows", 4, marks=pytest.mark.long),
        pytest.param(SCATTER, "ring", 4, marks=pytest.mark.long),
    ],
)
def test_products_are_those_of_torch_in_every_order(ranks, case, order, of):
    assert ranks.run(CASES, "repeat", of, steps=3, order=order, **case) == [[True] * 3] * of


def test_the_workload_runs_them_as_variants(ranks):
    for errors in ranks.run(CASES, "as_variants", 2):
        assert len(errors) == 6
        assert all(error < 1e-6 for error in errors)  # NaN is not; max could hide it


@pytest.mark.parametrize("order", ["ring"])
def test_tiles_begin_with_rows_that_are_here_and_wait_for_those_that_are_brought(ranks, order):
    (ready,) = ranks.run(CASES, "brought", 1, order=order, shards=3, rows=20, k=12, n=9, chunk=6)
    assert ready == 20 * 9


@pytest.mark.parametrize("case", [GATHER | {"order": "ring"}, SCATTER | {"order": "ring"}])
def test_nothing_is_read_before_it_is_there(ranks, case):
    assert ranks.run(CASES, "last_is_late", 3, waits=True, **case) == [True] * 3
    # Without its wait each operation would be wrong, so the above shows that it waits.
    *early, _ = ranks.run(CASES, "last_is_late", 3, waits=False, **case)
    assert early == [False] * 2


@pytest.mark.parametrize("order", ["rows", "ring"])
@pytest.mark.parametrize("of", [2, 3, 8])
def test_every_order_has_all_pieces_once_and_what_is_sent_is_heard(order, of):
    for rank in range(of):
        others = {(peer, piece) for peer in range(of) if peer != rank for piece in range(4)}
        for to in (True, False):
            found = turns(order, rank, of, 4, to=to)
            assert len(found) == len(others)
            assert {*found} == others
        for own_first in (True, False):
            found = visits(order, rank, of, 4, own_first=own_first)
            assert sorted(found) == [*itertools.product(range(of), range(4))]
            own = {peer for peer, _ in (found[:4] if own_first else found[-4:])}
            assert own == {rank} or order == "rows"
        if order != "rows":  # whoever is heard first has sent here first
            for heard, (source, piece) in enumerate(turns(order, rank, of, 4, to=False)):
                assert turns(order, source, of, 4)[heard] == (rank, piece)
