"""Work after a wait that is gone: as quick as later in the same steps, where the run shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chopper
from chopper.analyzers.replay.scenario import Scenario
from chopper.api import AttributedRun
from tests.analyzers import make
from tests.analyzers.replay.make import run, tables

US = 1_000
MS = 1_000_000
OPS = 20
"""Of each step: 0.2 ms of nothing and 0.8 ms of an operator, each."""


def trained(
    steps: int = 12,
    *,
    wait_ns: int = 20 * MS,
    cold: float = 1.5,
    jitter: Any = None,
    made: Callable[..., dict[str, Any]] = make.op,
    sizes: Callable[[int], list[list[int]]] = lambda _: [[64, 64], [64, 64]],
) -> AttributedRun:
    """Steps that wait for a batch, and whose first 2 ms of work after that take longer.

    Args:
        made: what writes an operator.
        sizes: of the inputs of each operator of a step.
    """
    spans, bounds, now = [], [], 0
    for step in range(steps):
        begin = now
        if wait_ns:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            spans.append(make.span(now, now + wait_ns, name, "annotation"))
        now += wait_ns
        for number in range(OPS):
            slower = cold if number < 2 else 1.0
            if jitter is not None:
                slower *= jitter[step * OPS + number]
            now += round(200 * US * slower)
            length = round(800 * US * slower)
            spans.append(made(now, now + length, "aten::mm", *sizes(number)))
            now += length
        bounds.append((begin, now))
    return chopper.attribute(run(tables(spans, [], make.steps(*bounds))))


def predicted_ms(of: AttributedRun) -> float:
    return chopper.whatif(of, fix="data").predicted_step_ns / MS


def test_work_after_a_wait_is_as_quick_without_it_as_later() -> None:
    # 2 of 20 ms took 3: without the wait the step takes 20, not 21.
    found = chopper.whatif(trained(), fix="data")
    assert found.observed_step_ns == 41 * MS
    assert found.predicted_step_ns == pytest.approx(20 * MS, abs=0.1 * MS)
    assert any("12 waits" in note for note in found.notes)
    assert sum(c.time_ns for c in found.attribution.leaves()) == pytest.approx(
        12 * found.predicted_step_ns, rel=1e-6
    )


def test_what_took_no_longer_stays() -> None:
    warm = trained(cold=1.0)
    assert predicted_ms(warm) == pytest.approx(20, abs=1e-3)
    assert not any("waits" in note for note in chopper.whatif(warm, fix="data").notes)


@pytest.mark.parametrize(("steps", "wait_ms"), [(7, 20), (12, 4)])
def test_few_waits_and_short_ones_tell_nothing(steps: int, wait_ms: int) -> None:
    assert predicted_ms(trained(steps, wait_ns=wait_ms * MS)) == pytest.approx(21, abs=1e-3)


def test_a_wait_that_stays_keeps_what_follows() -> None:
    assert chopper.whatif(trained(), fix="gc").saved_ratio == 0


def test_quicker_work_after_a_wait_is_not_made_slower() -> None:
    assert predicted_ms(trained(cold=0.5)) == pytest.approx(19, abs=1e-3)


def test_other_sizes_of_the_same_operator_are_other_work() -> None:
    # The first two are larger, not slower: 1 ms more, with and without the wait.
    of = trained(sizes=lambda number: [[96, 64], [64, 64]] if number < 2 else [[64, 64], [64, 64]])
    assert predicted_ms(of) == pytest.approx(21, abs=1e-3)


def test_operators_of_unknown_sizes_tell_nothing() -> None:
    assert predicted_ms(
        trained(made=lambda start, end, name, *_: make.span(start, end, name))
    ) == pytest.approx(21, abs=1e-3)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.floats(0.8, 2.0))
def test_nothing_comes_later_whatever_varies(seed: int, cold: float) -> None:
    jitter = np.random.default_rng(seed).lognormal(0.0, 0.2, 10 * OPS)
    of = trained(10, cold=cold, jitter=jitter)
    from chopper.analyzers.replay.replay import Replay

    replay = Replay(of)
    scenario = Scenario(replay.base)
    parts = scenario.ranks[0].program.parts
    long = parts.end_ns - parts.start_ns >= 20 * MS
    scenario.without_host(0, long)
    plain = replay.base.graph.time_ns
    solved = scenario.solve()
    assert (solved.time_ns <= plain).all()
    assert (np.diff(solved.windows(0)) >= 0).all()


def test_variation_alone_is_seldom_taken_for_cold_caches() -> None:
    rng = np.random.default_rng(0)
    off = []
    for _ in range(20):
        of = trained(10, cold=1.0, jitter=rng.lognormal(0.0, 0.2, 10 * OPS))
        own = chopper.whatif(of).observed_step_ns - 20 * MS
        off.append(chopper.whatif(of, fix="data").predicted_step_ns / own - 1)
    assert np.mean(off) == pytest.approx(0, abs=0.003)
