"""The graph and its replay: answers worked by hand, and laws that hold for any trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.analyzers.replay.graph import EVENT, Graph, levels_of_ties
from chopper.analyzers.replay.path import critical_path
from chopper.analyzers.replay.scenario import Base, Scenario, in_python, solve
from chopper.causes import CODES
from tests.analyzers import make
from tests.analyzers.replay.make import base, call, late_second_launch, tables

PYTHON = CODES["idle.preparation.python"]


def test_unchanged_gives_the_observed_times_back() -> None:
    found = base(late_second_launch())
    assert (found.time_ns == found.graph.time_ns).all()
    assert Scenario(found).solve().windows(0).tolist() == [0, 520]


def test_without_python_the_second_kernel_queues_behind_the_first() -> None:
    # Calls at 0 and 10, so kernels could start at 20 and 30; the first runs until 120. What a
    # stream takes between two kernels was never seen, and counts nothing: the second runs 120 to
    # 220.
    scenario = Scenario(base(late_second_launch()))
    parts = scenario.ranks[0].program.parts
    scenario.without_host(0, parts.cause == PYTHON)
    assert scenario.solve().windows(0).tolist() == [0, 220]


def test_faster_kernels_do_not_help_a_late_host() -> None:
    # Half as long: the second still starts at 420 and ends at 470.
    scenario = Scenario(base(late_second_launch()))
    scenario.scale(0, np.array([0.5, 0.5]))
    assert scenario.solve().windows(0).tolist() == [0, 470]


def test_launching_calls_that_take_no_time_come_off_host_and_latency() -> None:
    # The second call comes at 390 and its kernel follows 10 later, at 400: 500.
    scenario = Scenario(base(late_second_launch()))
    scenario.calls = True
    assert scenario.solve().windows(0).tolist() == [0, 500]


def synchronized() -> Base:
    """A kernel of 500 after a launch at 0; the host waits for it until 530 and launches again."""
    return base(
        tables(
            [
                make.span(0, 1000, "loop", "python"),
                call(0, 10, 1),
                call(20, 530, 3, "cudaStreamSynchronize"),
                call(550, 560, 2),
            ],
            [
                make.kernel(20, 520, correlation_id=1),
                make.kernel(570, 670, correlation_id=2),
            ],
            make.steps((0, 1000)),
        )
    )


def test_a_synchronization_ends_after_what_it_waited_for() -> None:
    # The kernel ends at 270 instead of 520: everything after it comes 250 earlier.
    scenario = Scenario(synchronized())
    scenario.scale(0, np.array([0.5, 1.0]))
    assert scenario.solve().windows(0).tolist() == [0, 420]


def test_a_host_that_waits_for_room_in_the_queue_goes_on_with_faster_kernels() -> None:
    # 700 kernels of 100 us launched in 5 us each; from the 300th in the queue on, a call returns
    # once the kernel 300 before it is done.
    spans: list[dict[str, Any]] = []
    kernels: list[dict[str, int]] = []
    now = free = 0
    for i in range(700):
        returned = max(now + 5_000, kernels[i - 300]["end"] if i >= 300 else 0)
        start = max(returned, free)
        free = start + 100_000
        spans.append(call(now, returned, i + 1))
        kernels.append({"start": start, "end": free, "correlation_id": i + 1})
        now = returned + 1_000
    made = [make.kernel(k["start"], k["end"], correlation_id=k["correlation_id"]) for k in kernels]
    scenario = Scenario(base(tables(spans, made, make.steps((0, now + 1)))))
    [begin, end] = scenario.solve().windows(0).tolist()
    assert end - begin == free
    scenario.scale(0, np.full(700, 0.25))
    [begin, end] = scenario.solve().windows(0).tolist()
    assert end - begin == pytest.approx(700 * 25_000, rel=0.01)


def test_without_synchronization_the_host_runs_ahead() -> None:
    # 10 of call, 10 of Python, 20 of Python: launched at 40 instead of 550, the second kernel could
    # start at 60 and waits for the first: 520 to 620.
    scenario = Scenario(synchronized())
    scenario.synchronization = True
    parts = scenario.ranks[0].program.parts
    sync = CODES["idle.preparation.synchronization"]
    scenario.without_host(0, parts.cause == sync)
    assert scenario.solve().windows(0).tolist() == [0, 620]


def test_a_stream_that_was_told_to_wait_does() -> None:
    # Stream 9's kernel was launched after a call for an event, with stream 7's kernel launched
    # before: it waits for that, and when it takes twice as long, so much longer.
    found = base(
        tables(
            [
                make.span(0, 1000, "loop", "python"),
                call(0, 10, 1),
                call(20, 22, 3, "cudaStreamWaitEvent"),
                call(30, 40, 2),
            ],
            [
                make.kernel(20, 220, correlation_id=1),
                make.kernel(230, 330, stream=9, correlation_id=2),
            ],
            make.steps((0, 1000)),
        )
    )
    scenario = Scenario(found)
    scenario.scale(0, np.array([2.0, 1.0]))
    assert scenario.solve().windows(0).tolist() == [0, 530]


def test_a_call_for_an_event_that_no_launch_follows_tells_nothing() -> None:
    found = base(
        tables(
            [
                make.span(0, 1000, "loop", "python"),
                call(0, 10, 1),
                call(30, 40, 2),
                call(50, 52, 3, "cudaStreamWaitEvent"),
            ],
            [
                make.kernel(20, 220, correlation_id=1),
                make.kernel(230, 330, stream=9, correlation_id=2),
            ],
            make.steps((0, 1000)),
        )
    )
    assert Scenario(found).solve().windows(0).tolist() == [0, 330]


def test_the_critical_path_leads_back_to_the_program() -> None:
    found = base(late_second_launch())
    end = int(found.graph.ranks[0].end[1])
    path = critical_path(found.graph, found.decided, end)
    assert path[-1] == end
    assert (np.diff(found.time_ns[path]) >= 0).all()
    assert found.time_ns[path[0]] == 0


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    """A program that launches on two streams, waits for events and synchronizes."""
    now, correlation = 0, 0
    spans = []
    kernels = []
    free = {7: 0, 9: 0}
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.integers(0, 50))
        correlation += 1
        what = draw(st.sampled_from(["launch", "launch", "launch", "wait", "sync", "python"]))
        if what == "launch":
            length = draw(st.integers(0, 20))
            stream = draw(st.sampled_from([7, 9]))
            begin = max(now + draw(st.integers(0, 30)), free[stream] + draw(st.integers(0, 5)))
            end = begin + draw(st.integers(0, 200))
            spans.append(call(now, now + length, correlation))
            kernels.append(make.kernel(begin, end, stream=stream, correlation_id=correlation))
            free[stream] = end
            now += length
        elif what == "wait":
            spans.append(call(now, now + 2, correlation, "cudaStreamWaitEvent"))
            free[9] = max(free.values())
            now += 2
        elif what == "sync":
            end = max(now, *free.values()) + draw(st.integers(1, 20))
            spans.append(call(now, end, correlation, "cudaDeviceSynchronize"))
            now = end
        else:
            length = draw(st.integers(1, 40))
            spans.append(make.span(now, now + length, "work", "python"))
            now += length
    correlation += 1
    spans.append(call(now, now + 5, correlation))
    begin = max(now + 5, free[7])
    kernels.append(make.kernel(begin, begin + 50, correlation_id=correlation))
    return tables(spans, kernels, make.steps((0, now + 10)))


@settings(max_examples=120)
@given(traces())
def test_any_trace_is_given_back_and_less_work_is_never_later(trace: dict[str, Any]) -> None:
    found = base(trace)
    graph = found.graph
    assert (found.time_ns == graph.time_ns).all()
    assert (graph.lag_ns >= 0).all()
    observed = graph.ranks[0].joined.windows.bounds_ns
    assert (Scenario(found).solve().windows(0) == observed).all()
    for change in ("calls", "latency", "dependency", "synchronization", "overlap", "python", "run"):
        scenario = Scenario(found)
        if change == "python":
            parts = scenario.ranks[0].program.parts
            scenario.without_host(0, parts.cause == PYTHON)
        elif change == "run":
            scenario.scale(0, np.full(len(graph.ranks[0].start), 0.5))
        else:
            setattr(scenario, change, True)
        assert (scenario.solve().time_ns <= graph.time_ns).all(), change


@settings(max_examples=60)
@given(traces())
def test_both_passes_agree(trace: dict[str, Any]) -> None:
    graph = base(trace).graph
    time, decided = solve(graph, graph.weight_ns, graph.lag_ns)
    plain, by = np.empty_like(time), np.empty_like(decided)
    in_python(graph.first, graph.source, graph.weight_ns, graph.lag_ns, graph.time_ns, plain, by)
    assert (plain == time).all()
    assert (by == decided).all()


def test_an_edge_to_an_earlier_moment_is_refused() -> None:
    compiled = pytest.importorskip("chopper.analyzers.replay._longest")
    graph: Graph = base(late_second_launch()).graph
    source = graph.source.copy()
    source[0] = len(graph.time_ns) - 1
    with pytest.raises(ValueError, match="earlier moment"):
        compiled.longest(
            graph.first,
            source,
            graph.weight_ns,
            graph.lag_ns,
            graph.time_ns,
            np.empty_like(graph.time_ns),
            None,
        )


def test_a_launch_that_took_longer_keeps_it_whatever_ended_just_before() -> None:
    # The second kernel follows its call of 100 by 110, and the first kernel, which ended by chance
    # just before, by 5. The others show that the stream itself takes nothing.
    found = base(
        tables(
            [
                make.span(0, 1000, "loop", "python"),
                call(0, 10, 1),
                call(20, 120, 2),
                call(130, 140, 3),
                call(150, 160, 4),
            ],
            [
                make.kernel(10, 125, correlation_id=1),
                make.kernel(130, 230, correlation_id=2),
                make.kernel(230, 330, correlation_id=3),
                make.kernel(330, 430, correlation_id=4),
            ],
            make.steps((0, 1000)),
        )
    )
    scenario = Scenario(found)
    scenario.calls = True
    outcome, node = scenario.solve(), scenario.ranks[0]
    assert outcome.time_ns[node.start[1]] == outcome.time_ns[node.end[0]]


def test_what_a_slow_launch_explains_is_no_dependency() -> None:
    # Stream 9's kernel begins 6 after stream 7's has ended, and 110 after a call of 100.
    found = base(
        tables(
            [
                make.span(0, 1000, "loop", "python"),
                call(0, 10, 1),
                call(20, 120, 2),
            ],
            [
                make.kernel(10, 124, correlation_id=1),
                make.kernel(130, 230, stream=9, correlation_id=2),
            ],
            make.steps((0, 1000)),
        )
    )
    assert not len(found.edges(EVENT))


def test_what_lies_before_the_first_step_stays() -> None:
    # The first window begins when what was launched before the step is done: at 520, whatever
    # becomes faster after that; 100 of the step's own kernel become 50.
    found = base(
        tables(
            [
                make.span(0, 1000, "loop", "python"),
                call(0, 10, 1),
                call(510, 515, 2),
            ],
            [
                make.kernel(20, 520, correlation_id=1),
                make.kernel(520, 620, correlation_id=2),
            ],
            make.steps((500, 1000)),
        )
    )
    scenario = Scenario(found)
    scenario.scale(0, np.array([0.5, 0.5]))
    scenario.without_host(0, np.ones(len(found.graph.ranks[0].program.parts.owner), dtype=bool))
    assert scenario.solve().windows(0).tolist() == [520, 570]


def test_a_long_chain_at_one_time_is_ordered_and_a_circle_opened_once() -> None:
    # Kernels of one time stamp follow each other in their stream: 0 → 1 → … → 19 999.
    chain = np.arange(20_000)
    level, cyclic = levels_of_ties(20_000, chain[:-1], chain[1:], chain[:-1])
    assert level.tolist() == chain.tolist()
    assert not len(cyclic)
    # 50 → 51 → … → 99 → 50 and on to 100: one edge of the circle is left out, none of the chain.
    source, target = np.append(chain[:200], 99), np.append(chain[1:201], 50)
    level, cyclic = levels_of_ties(201, source, target, np.arange(201))
    assert cyclic.tolist() == [200]
    assert level.tolist() == [*range(201)]
