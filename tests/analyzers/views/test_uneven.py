"""Why ranks wait for each other, on runs worked out by hand. Times in nanoseconds."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from chopper.analyzers.events.collectives import members_of
from chopper.analyzers.events.device import events_of
from chopper.analyzers.views.ranks import Uneven, uneven
from chopper.tables import TABLES
from tests.analyzers.make import kernel, kernels, span, spans
from tests.analyzers.views.test_communication import (
    ALL_REDUCE,
    GEMM,
    attributed,
    loading_rank,
    recorded,
    tables,
)

SEND_RECEIVE = "ncclDevKernel_SendRecv"
Event = tuple[int, int, dict[str, Any] | None]
"""Start and end of a kernel, and what it communicates; None for one that computes."""


def alone(*events: Event) -> dict[str, pa.Table]:
    """One rank of one window, without steps: from its first event to its last."""
    sent = [(i, more) for i, (_, _, more) in enumerate(events) if more is not None]
    device = [
        kernel(start, end, GEMM) if more is None else kernel(start, end, more.pop("kernel"), 20)
        for start, end, more in events
    ]
    entries = [recorded(row, **more) for row, more in sent]
    begin = min(start for start, _, _ in events)
    host = spans(span(begin, begin + 1, "aten::empty"))
    return tables(host, kernels(*device), TABLES["step"].empty(), entries)


def reduced(start: int, end: int) -> Event:
    return start, end, {"kernel": ALL_REDUCE, "sequence": 1}


def to_all(start: int, end: int, sent: int, received: int, group: str = "0") -> Event:
    counts = {"in_elements_count": sent, "out_elements_count": received, "group_name": group}
    return start, end, {"kernel": "ncclDevKernel_AllToAll", "collective": "all_to_all"} | counts


def pair(start: int, end: int, sender: int, receiver: int, rank: int) -> Event:
    way = "send" if rank == sender else "recv"
    ends = {"source_rank_id": sender, "target_rank_id": receiver}
    return start, end, {"kernel": SEND_RECEIVE, "collective": way} | ends


def kind_of(*ranks: dict[str, pa.Table]) -> Uneven:
    run = attributed([*ranks])
    found = uneven(run, members_of(run), events_of(run))
    assert found is not None
    return found


MM = (0, 100, None)
FOUR = [(100 * i, 100 * (i + 1), None) for i in range(4)]


def test_a_rank_that_takes_longer_for_the_same_work_is_late() -> None:
    found = kind_of(alone(MM, reduced(100, 410)), alone((0, 400, None), reduced(400, 410)))
    # Without waiting, steps of 110 and 410: of the first, 100 to 400 is waiting.
    assert (found.kind, found.worst.rank, found.own_ns) == ("late_rank", 1, {0: 110, 1: 410})
    assert found.others_ns == 110
    assert found.work_ratio == 1.0
    assert found.wait_ratio == pytest.approx(300 / 820)


def test_a_rank_with_more_work_is_not_slow() -> None:
    found = kind_of(alone(MM, reduced(100, 410)), alone(*FOUR, reduced(400, 410)))
    assert (found.kind, found.worst.rank, found.work_ratio) == ("uneven_work", 1, 4.0)


def test_exchanges_of_unequal_sizes_are_those_of_experts() -> None:
    """Tokens go to the experts and come back; the rank with four times as many works as long."""

    def experts(few: int, many: int) -> Uneven:
        return kind_of(
            *(
                alone(
                    to_all(0, 10, 1000, tokens),
                    *((a + 10, b + 10, c) for a, b, c in work),
                    to_all(10 + len(work) * 100, 420, tokens, 1000),
                )
                for tokens, work in ((few, [MM]), (many, FOUR))
            )
        )

    assert experts(400, 1600).kind == "experts"
    assert experts(1000, 1000).kind == "uneven_work"


def test_a_ring_sends_before_it_works_and_a_pipeline_after() -> None:
    """The same exchange of two ranks; one of them computes between receiving and sending."""

    def ring(rank: int) -> dict[str, pa.Table]:
        work = [(a + 30, b + 30, c) for a, b, c in (FOUR if rank else [MM])]
        out, back = pair(0, 10, rank, 1 - rank, rank), pair(10, 20, 1 - rank, rank, rank)
        return alone(out, back, *work, reduced(430 if rank else 130, 440))

    assert kind_of(ring(0), ring(1)).kind == "ring"
    first = alone(MM, pair(100, 110, 0, 1, 0), pair(110, 220, 1, 0, 0))
    last = alone(pair(0, 110, 0, 1, 1), (110, 210, None), pair(210, 220, 1, 0, 1))
    found = kind_of(first, last)
    # Each stage works 100 of 220, and waits while the other does.
    assert (found.kind, found.work_ratio) == ("pipeline", 1.0)
    assert found.wait_ratio == pytest.approx(200 / 440)


def test_where_each_rank_is_last_in_turn_none_is_late() -> None:
    ranks = [
        alone(
            (0, 100 if even else 400, None),
            reduced(100 if even else 400, 410),
            (410, 810 if even else 510, None),
            (*reduced(810 if even else 510, 820)[:2], {"kernel": ALL_REDUCE, "sequence": 2}),
        )
        for even in (True, False)
    ]
    assert kind_of(*ranks).kind == "taking_turns"


def test_a_rank_that_began_late_is_no_slower() -> None:
    found = kind_of(alone(MM, reduced(100, 410)), alone((300, 400, None), reduced(400, 410)))
    assert (found.kind, found.worst.rank, found.worst.entered_ratio) == ("late_entry", 1, 1.0)
    assert found.own_ns == {0: 110, 1: 110}


def test_ranks_that_do_not_wait_are_of_no_kind() -> None:
    run = attributed([loading_rank(0), loading_rank(0)])
    assert uneven(run, members_of(run), events_of(run)) is None
