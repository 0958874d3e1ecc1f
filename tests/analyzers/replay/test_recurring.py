"""Waits for collectives that show in some steps and hold in all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import chopper
from chopper.analyzers.replay.graph import COLLECTIVE_WAIT
from chopper.analyzers.replay.scenario import Base, Scenario
from tests.analyzers import make
from tests.analyzers.replay.make import base, run, tables
from tests.analyzers.replay.test_on_host import MS, collective, issue, op

HIDDEN = 2
STEPS = 4


def step(number: int, *, early: bool = False, long: bool = False) -> list[dict[str, Any]]:
    """100 ms: 10 of work, a collective of 30 from there on, 20 of work, then its result is used.

    Its wait shows, but where it ended early: 5 ms after its call, while the host was at work. A
    long one ends after what waits for it elsewhere.
    """
    at = 100 * number
    until = at + (16 if early else 95 if long else 42)
    return [
        op(at, at + 10),
        issue(at + 10),
        collective(at + 11, until),
        op(at + 11, at + 31, "aten::add"),
        op(at + 43, at + 90, "aten::_fused_adamw_"),
    ]


def given(*odd: int, **how: bool) -> dict[str, pa.Table]:
    spans = [s for n in range(STEPS) for s in step(n, **(how if n in odd else {}))]
    bounds = [(100 * n * MS, 100 * (n + 1) * MS) for n in range(STEPS)]
    return tables(spans, [], make.steps(*bounds))


def waits(found: Base) -> list[float]:
    """When the host goes on after each wait, in ms."""
    graph = found.graph
    return sorted((graph.time_ns[found.target[found.edges(COLLECTIVE_WAIT)]] / MS).tolist())


def test_a_wait_that_did_not_show_is_known_from_other_steps() -> None:
    found = base(given(HIDDEN, early=True))
    assert waits(found) == [43, 143, 243, 343]
    node = found.graph.ranks[0]
    assert np.count_nonzero(node.program.waits_for >= 0) == STEPS - 1
    # The result comes 50 ms later, so what uses it can no longer begin at 243.
    scenario = Scenario(found)
    late = np.flatnonzero(node.links.events.start_ns == 211 * MS)
    run_ns = np.full(len(node.start), -1)
    run_ns[late[node.links.events.of("host_collective")[late]]] = 55 * MS
    scenario.run_ns[0] = run_ns
    outcome = scenario.solve()
    assert outcome.windows(0).tolist() == [0, 90 * MS, 190 * MS, 313 * MS, 413 * MS]


def test_what_once_came_before_the_end_never_waits() -> None:
    assert waits(base(given(HIDDEN, long=True))) == [43, 143, 343]
    both = given(HIDDEN, early=True)
    odd = tables(
        [s for n in range(STEPS) for s in step(n, early=n == 2, long=n == 1)], [], both["step"]
    )
    assert waits(base(odd)) == [43, 343]


def test_a_wait_that_was_seen_once_is_none_elsewhere() -> None:
    assert waits(base(given(0, 1, 2, early=True))) == [343]


def test_without_its_computing_a_step_still_ends_with_its_own_collectives() -> None:
    """The causes of the changed run are of the steps that were predicted."""
    found = chopper.whatif(chopper.attribute(run(given(HIDDEN, early=True))), fix="compute")
    steps = found.attribution.step_time_ns()
    # An operator that takes no time is written with a nanosecond.
    assert sum(steps) / len(steps) == pytest.approx(found.predicted_step_ns, abs=10)
    assert not [note for note in found.notes if "of steps" in note]
