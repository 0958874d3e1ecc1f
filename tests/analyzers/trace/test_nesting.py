from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.trace.nesting import Nesting, activity, cut, innermost_at, nest


def build(rows: list[tuple[int, int, int]]) -> Nesting:
    """(thread, start, end) rows, in any order, as a nesting of rows sorted as tables are."""
    rows = sorted(rows, key=lambda r: (r[1], -(r[2] - r[1])))
    start = np.array([r[1] for r in rows], dtype=np.int64)
    end = np.array([r[2] for r in rows], dtype=np.int64)
    tid = np.array([r[0] for r in rows], dtype=np.int64)
    return nest(start, end - start, np.ones_like(tid), tid)


def test_whole_microseconds_may_hide_that_a_child_ends_first() -> None:
    # Cut to whole µs the child [1, 5] seems to outlive its parent [0, 4] by one.
    n = build([(1, 0, 4000), (1, 1000, 5000)])
    assert n.parent.tolist() == [-1, 0]
    assert n.end_ns.tolist() == [4000, 4000]


def test_spans_that_overlap_in_part_become_siblings() -> None:
    n = build([(1, 0, 50_001), (1, 30_000, 80_000)])
    assert n.parent.tolist() == [-1, -1]
    assert n.end_ns.tolist() == [30_000, 80_000]


def test_activity_and_cut_of_a_hand_built_tree() -> None:
    n = build([(1, 0, 100), (1, 10, 40), (1, 20, 30)])
    acts = activity(n)
    assert acts.start_ns.tolist() == [0, 10, 20, 30, 40, 100]
    assert acts.span.tolist() == [0, 1, 2, 1, 0, -1]
    thread = np.array([0])
    owner, start, end, who = cut(acts, thread, np.array([5]), np.array([120]))
    assert list(zip(start.tolist(), end.tolist(), who.tolist(), strict=True)) == [
        (5, 10, 0),
        (10, 20, 1),
        (20, 30, 2),
        (30, 40, 1),
        (40, 100, 0),
        (100, 120, -1),
    ]
    assert owner.tolist() == [0] * 6
    assert innermost_at(acts, np.array([0, 0]), np.array([20, 99])).tolist() == [2, 0]


_rows = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 60), st.integers(0, 30)).map(
        lambda t: (t[0], t[1], t[1] + t[2])
    ),
    min_size=1,
    max_size=40,
)


@given(_rows)
def test_children_lie_inside_parents_and_siblings_do_not_overlap(
    rows: list[tuple[int, int, int]],
) -> None:
    n = build(rows)
    for i, p in enumerate(n.parent):
        if p >= 0:
            assert n.thread[p] == n.thread[i]
            assert n.start_ns[p] <= n.start_ns[i]
            assert n.end_ns[i] <= n.end_ns[p]
            assert n.depth[i] == n.depth[p] + 1
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            if n.thread[i] == n.thread[j] and n.parent[i] == n.parent[j]:
                overlap = min(n.end_ns[i], n.end_ns[j]) - max(n.start_ns[i], n.start_ns[j])
                assert overlap <= 0


@given(_rows, st.integers(-5, 95), st.integers(0, 60))
def test_cut_tiles_the_interval_and_names_the_deepest_open_span(
    rows: list[tuple[int, int, int]], begin: int, length: int
) -> None:
    n = build(rows)
    acts = activity(n)
    _, start, end, who = cut(acts, np.array([0]), np.array([begin]), np.array([begin + length]))
    assert start[0] == begin
    assert end[-1] == begin + length
    assert (start[1:] == end[:-1]).all()
    for a, b, row in zip(start, end, who, strict=True):
        if a == b:
            continue
        open_ = [
            i
            for i in range(len(rows))
            if n.thread[i] == 0 and n.start_ns[i] <= a and b <= n.end_ns[i]
        ]
        deepest = max(open_, key=lambda i: n.depth[i], default=-1)
        assert row == deepest


@given(_rows, st.integers(1, 50))
def test_activity_is_the_same_when_times_are_far_apart(
    rows: list[tuple[int, int, int]], bits: int
) -> None:
    # Beyond some length of the trace, moments no longer fit into one number.
    n = build(rows)
    far = 1 << bits
    wide = replace(n, start_ns=n.start_ns * far, end_ns=n.end_ns * far)
    near, apart = activity(n), activity(wide)
    assert (near.start_ns * far == apart.start_ns).all()
    assert (near.span == apart.span).all()
    assert (near.first == apart.first).all()
