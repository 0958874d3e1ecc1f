from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.trace.rank_join import host_as_device
from chopper.analyzers.trace.tables import HostSpans, _lanes
from tests.analyzers.make import span, spans

intervals = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), max_size=30)


def events(*rows):
    table, _ = host_as_device(HostSpans(spans(*rows)))
    return [
        (e["name"], e["kind"], e["start_ns"], e["start_ns"] + e["dur_ns"])
        for e in table.to_pylist()
    ]


def test_work_between_a_send_and_its_wait_is_work():
    """Gloo's spans of isend and irecv last until wait, on the thread that goes on computing."""
    found = events(
        span(0, 100, "gloo:send", "annotation"),
        span(5, 105, "gloo:recv", "annotation"),
        span(10, 60, "aten::mm"),
        span(20, 130, "gloo:send", "annotation"),
        span(110, 125, "aten::mm"),
    )
    assert found == [
        ("gloo:send", "host_collective", 0, 100),
        ("gloo:recv", "host_collective", 5, 105),
        ("aten::mm", "host_op", 10, 60),
        ("gloo:send", "host_collective", 20, 130),
        ("aten::mm", "host_op", 110, 125),
    ]


def test_what_a_backend_computes_within_its_collective_is_not_the_models():
    found = events(
        span(0, 100, "gloo:all_reduce", "annotation", tid=2), span(10, 20, "aten::add_", tid=2)
    )
    assert [e[0] for e in found] == ["gloo:all_reduce"]


def _sort(at: int):
    return (
        span(at, at + 900_000, "aten::sort"),
        span(at + 10_000, at + 20_000, "aten::copy_"),
        span(at + 20_000, at + 21_000, "aten::arange"),
    )


def _linear(at: int, overhead: int = 4_000):
    return span(at, at + 100_000 + overhead, "aten::linear"), span(at, at + 100_000, "aten::addmm")


def test_an_operator_that_takes_most_of_its_time_itself_is_one_piece_of_work():
    found = events(*_sort(0), *_linear(1_000_000), *_sort(2_000_000))
    assert [e[0] for e in found] == ["aten::sort", "aten::addmm", "aten::sort"]


def test_an_operator_that_lost_the_core_once_stays_dispatch():
    calls = [_linear(1_000_000 * i, 500_000 if i == 3 else 4_000) for i in range(8)]
    found = events(*(one for call in calls for one in call))
    assert {e[0] for e in found} == {"aten::addmm"}


@given(intervals)
def test_lanes_hold_no_two_at_once_and_are_as_few_as_can_be(found):
    found.sort()
    start = np.array([s for s, _ in found], dtype=np.int64)
    end = start + np.array([d for _, d in found], dtype=np.int64)
    lanes = _lanes(start, end)
    for lane in set(lanes.tolist()):
        mine = lanes == lane
        assert (start[mine][1:] >= end[mine][:-1]).all()
    most = max((int(((start <= at) & (end > at)).sum()) for at in start), default=0)
    assert len(set(lanes.tolist())) == most
