"""Replays of runs without a device: waits for collectives, barriers, waits for a core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.graph import COLLECTIVE_WAIT
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.replay.scenario import Base, Scenario
from tests.analyzers import make
from tests.analyzers.replay.make import base, run, tables, two_ranks
from tests.attributing import recoverable_of

MS = 1_000_000


def op(start: int, end: int, name: str = "aten::mm") -> dict[str, Any]:
    return make.span(start * MS, end * MS, name)


def collective(start: int, end: int, name: str = "gloo:all_reduce") -> dict[str, Any]:
    return make.span(start * MS, end * MS, name, "annotation", tid=9)


def issue(start: int, name: str = "c10d::allreduce_") -> dict[str, Any]:
    return make.span(start * MS, start * MS + 1000, name)


def given(*spans: dict[str, Any], until: int = 200) -> dict[str, pa.Table]:
    return tables(list(spans), [], make.steps((0, until * MS)))


def waited_for(found: Base) -> list[str]:
    """Names of the collectives that the program waits for."""
    node = found.graph.ranks[0]
    codes, values = node.links.events.names
    return [values[codes[row]] for row in node.program.waits_for if row >= 0]


def test_a_collective_that_was_issued_last_is_waited_for_however_long_it_takes_to_wake() -> None:
    # It ends at 60, and the program goes on at 90: 30 ms of it are the program's own.
    found = base(given(op(0, 10), issue(10), collective(11, 60), op(90, 100)))
    assert waited_for(found) == ["gloo:all_reduce"]
    scenario = Scenario(found)
    scenario.run_ns[0] = np.array([-1, 9 * MS, -1])
    # 10 ms from 11 on instead of 49: everything after it comes 40 ms earlier.
    assert scenario.solve().windows(0)[-1] == 60 * MS


def test_one_that_ends_while_the_program_does_something_unseen_is_not() -> None:
    # Issued long before; 40 ms of nothing, in the first 10 of which it ends.
    found = base(given(op(0, 10), issue(10), op(11, 20), collective(11, 30), op(60, 70)))
    assert not len(found.edges(COLLECTIVE_WAIT))


def test_a_barrier_follows_the_call_that_issues_it() -> None:
    # Without 30 ms of Python before it, the barrier comes 30 ms earlier too.
    found = base(
        given(
            op(0, 10),
            issue(10),
            collective(11, 20),
            op(21, 30),
            issue(60, "c10d::barrier"),
            collective(61, 70, "gloo:barrier"),
            op(71, 80),
        )
    )
    assert waited_for(found) == ["gloo:all_reduce", "gloo:barrier"]
    scenario = Scenario(found)
    parts = scenario.ranks[0].program.parts
    scenario.without_host(0, (parts.start_ns >= 30 * MS) & (parts.end_ns <= 60 * MS))
    assert scenario.solve().windows(0)[-1] == 50 * MS


@pytest.mark.parametrize("stamped", [60, 65, 69])
def test_a_worker_that_stamps_the_end_late_hides_no_wait(stamped: int) -> None:
    # Rank 0 waits from 11 until rank 1 comes at 51, and goes on at 60; its backend's thread gets a
    # core for the stamp when the program computes already.
    quick = [op(0, 10), issue(10), collective(11, stamped), op(60, 70)]
    slow = [op(0, 50), issue(50), collective(51, 60), op(60, 70)]
    attribution = two_ranks(given(*quick, until=70), given(*slow, until=70))
    replay = Replay(attribution)
    assert waited_for(replay.base) == ["gloo:all_reduce"]
    assert replay.error_ratio == 0
    # 10 to compute, 9 to transfer, 10 to compute, and what issuing took.
    found = chopper.whatif(attribution, fix="straggler")
    assert found.predicted_step_ns == pytest.approx(30 * MS, rel=1e-3)
    assert found.observed_step_ns == 70 * MS


def test_what_a_change_leaves_alone_takes_no_longer_for_it() -> None:
    # Rank 0 asks at 0, rank 1 sends at 30; their spans begin at 20 and 40, so that of the 20 ms
    # from 30 on only 10 lie after the later one.
    def transfer(name: str, call: str, asked: int, start: int, peer: int) -> list[dict[str, Any]]:
        asks = make.span(asked * MS, 50 * MS, call, concrete_inputs=f'["", "", "{peer}", "0"]')
        return [asks, make.span(start * MS, 50 * MS, name, "annotation")]

    receives = [
        *transfer("gloo:recv", "c10d::recv_", 0, 20, 1),
        op(60, 90),
        op(90, 100, "aten::add"),
    ]
    sends = [op(0, 30), *transfer("gloo:send", "c10d::send", 30, 40, 0), op(60, 100)]
    attribution = two_ranks(given(*receives, until=100), given(*sends, until=100))
    replay = Replay(attribution)
    assert [node.coupled.sum() for node in replay.base.graph.ranks] == [1, 1]
    scenario = replay.scenario()
    scenario.scale(0, np.where(replay.base.graph.ranks[0].links.events.dur_ns == 10 * MS, 0.0, 1.0))
    assert scenario.solve().windows(0)[-1] == 90 * MS + replay.unmodified.windows(0)[0]


def test_a_collective_that_ends_while_the_program_computes_is_no_wait() -> None:
    # The last rank comes at 21, in the middle of an operator that was begun at 12.
    overlapped = [op(0, 10), issue(10), collective(11, 30), op(12, 40), op(60, 70)]
    other = [op(0, 20), issue(20), collective(21, 30), op(60, 70)]
    attribution = two_ranks(given(*overlapped, until=70), given(*other, until=70))
    assert waited_for(Replay(attribution).base) == []


def test_perfect_overlap_hides_no_more_than_the_link_carries() -> None:
    # Two transfers of 40 ms on threads of their own, waited for one after the other: issued 1 ms
    # apart they still take turns, and the step's last 8 ms wait for the second.
    first, second = collective(11, 51), collective(62, 102) | {"tid": 10}
    of_rank = given(op(0, 10), issue(10), first, op(51, 61), issue(61), second, op(102, 110))
    attribution = two_ranks(of_rank, of_rank)
    replay = Replay(attribution)
    scenario = replay.scenario()
    assert scenario.solve().windows(0)[-1] == replay.unmodified.windows(0)[-1]
    scenario.overlap = True
    begin, *_, end = scenario.solve().windows(0).tolist()
    assert 99 * MS <= end - begin <= 101 * MS


def test_loading_in_the_training_process_takes_its_waits_for_a_core_along() -> None:
    # 80 ms of loading and 20 of computing share 60 ms of waiting for a core: 48 go with loading,
    # and 12 of the 20 ms that are left stay waiting, as they were.
    loading = make.span(0, 80 * MS, "enumerate(DataLoader)#_Iter.__next__", "annotation")
    told = given(loading, op(80, 100), until=100)
    told["core_wait"] = core_wait((None, 0, 0, 0), (0, 100, 60, 40))
    before = pipeline.attribute(run(told))
    assert times(before)["compute.no_peak"] == 8 * MS
    after = times(chopper.whatif(before, fix="data").attribution)
    assert after["compute.no_peak"] == pytest.approx(8 * MS, rel=1e-3)
    assert after["compute.core_wait"] == pytest.approx(12 * MS, rel=1e-3)


def core_wait(*steps: tuple[int | None, int, int, int]) -> pa.Table:
    rows = [
        {"time_ns": at * MS, "span_ns": 0, "tid": 1, "step": step, "run_delay_ns": delay * MS}
        | {"run_ns": ran * MS}
        for step, at, delay, ran in steps
    ]
    return make.table("core_wait", rows)


@pytest.fixture
def contended() -> Attribution:
    """100 ms of which the thread ran 80 and waited 20 for a core; half of it between operators."""
    told = given(op(0, 30), op(80, 100), until=100)
    told["core_wait"] = core_wait((None, 0, 0, 0), (0, 100, 20, 80))
    return pipeline.attribute(run(told))


def times(attribution: Attribution) -> dict[str, int]:
    return {c.id: c.time_ns for c in attribution.leaves()}


def test_waits_for_a_core_keep_their_label(contended: Attribution) -> None:
    found = chopper.whatif(contended)
    assert times(found.attribution) == times(contended)
    assert times(contended)["idle.preparation.core_wait"] == 10 * MS


def test_what_is_gone_takes_its_share_of_the_waiting_along(
    contended: Attribution,
) -> None:
    # 50 of 100 ms are gone, and with them half of the waiting.
    found = chopper.whatif(contended, fix="unobserved")
    left = times(found.attribution)
    assert left["compute.core_wait"] == pytest.approx(10 * MS, rel=1e-3)
    assert "idle.preparation.core_wait" not in left
    both = chopper.whatif(contended, fix=["idle.preparation.core_wait", "unobserved"])
    assert both.predicted_step_ns == found.predicted_step_ns


def test_with_a_core_at_once_nothing_waits_for_one(contended: Attribution) -> None:
    # Of 20 ms, 10 lengthened operators and 10 what lies between them.
    found = chopper.whatif(contended, fix="core-wait")
    assert found.predicted_step_ns == pytest.approx(80 * MS, rel=1e-3)
    assert not {c for c in times(found.attribution) if c.endswith("core_wait")}
    for alone, other in (
        ("idle.preparation.core_wait", "compute.core_wait"),
        ("compute.core_wait", "idle.preparation.core_wait"),
    ):
        one = chopper.whatif(contended, fix=alone)
        assert one.predicted_step_ns == pytest.approx(90 * MS, rel=1e-3)
        left = times(one.attribution)
        assert alone not in left
        assert left[other] == pytest.approx(10 * MS, rel=1e-3)
        assert left["compute.no_peak"] == pytest.approx(40 * MS, rel=1e-3)
    assert recoverable_of(contended)["idle.preparation.core_wait"].step_ns == pytest.approx(
        10 * MS, rel=1e-3
    )


@pytest.mark.parametrize(("waited", "ran"), [(50, 50), (50, 10), (30, 20)])
def test_loading_data_waits_for_a_core_where_it_is_no_sleep(waited: int, ran: int) -> None:
    # 40 of 100 ms for a batch, 40 of operators, 20 between them. The thread slept for what it
    # neither ran nor waited for a core: nothing, the 40, or 50.
    loading = make.span(0, 40 * MS, "enumerate(DataLoader)#_Iter.__next__", "annotation")
    told = given(loading, op(50, 70), op(80, 100), until=100)
    told["core_wait"] = core_wait((None, 0, 0, 0), (0, 100, waited, ran))
    found = chopper.whatif(pipeline.attribute(run(told)), fix="core-wait")
    assert found.predicted_step_ns == pytest.approx((100 - waited) * MS, rel=1e-3)


def test_nothing_left_of_a_rank_is_refused(contended: Attribution) -> None:
    with pytest.raises(chopper.errors.UsageError, match="nothing that rank 0 ran would be left"):
        chopper.whatif(contended, without="mm")
    assert Replay(contended).error_ratio == 0
