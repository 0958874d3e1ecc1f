"""The model itself: its books close, and what it injects costs what the books say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from chopper.causes import LEAVES
from tests.known_causes.model.injections import INJECTIONS, MIXES
from tests.known_causes.model.job import simulate
from tests.known_causes.model.ledger import ledger, window
from tests.known_causes.model.plan import Clock, Dose, Plan
from tests.known_causes.model.records import Recording

SMALL = Plan(layers=1, steps=2)


def windows_ns(recording: Recording) -> int:
    return sum(end - begin for begin, end in (window(r) for r in recording.ranks))


@pytest.mark.parametrize("flavour", ["cuda", "rocm"])
def test_the_books_close(flavour: str) -> None:
    recording = simulate(replace(SMALL, flavour=flavour))
    books = ledger(recording)
    # Each cause is rounded to a nanosecond.
    assert abs(sum(books.values()) - windows_ns(recording)) <= len(books)
    assert set(books) <= set(LEAVES)
    assert all(spent > 0 for spent in books.values())


def test_ranks_leave_a_collective_together_and_none_before_the_last_came() -> None:
    recording = simulate(replace(SMALL, slow=Dose(0.3, ranks=(1,))))
    first = {
        (t.collective.group, t.collective.sequence): t
        for t in recording.ranks[0].tasks
        if t.collective is not None
    }
    compared = 0
    for task in recording.ranks[1].tasks:
        if task.collective is None:
            continue
        other = first[task.collective.group, task.collective.sequence]
        assert other.collective is task.collective
        assert task.collective.ready_ns == max(task.start_ns, other.start_ns)
        assert abs(task.end_ns - other.end_ns) < 1000
        assert min(task.end_ns, other.end_ns) >= task.collective.ready_ns + 1
        compared += 1
    assert compared == 9


def test_half_the_clock_is_twice_the_time_of_a_kernel_that_depends_on_it() -> None:
    recording = simulate(replace(SMALL, clocks=(Clock(0.5, reason=4),), ranks=1))
    alone = [t for t in recording.ranks[0].tasks if t.account == "math"]
    assert alone
    for task in alone:
        assert task.end_ns - task.start_ns == pytest.approx(2 * task.alone_ns, abs=2)
    books = ledger(recording)
    assert books["compute.clock.power_cap"] > 0
    assert "compute.clock.thermal" not in books


def test_a_stall_behind_a_queue_costs_nothing_in_the_books_either() -> None:
    injection = INJECTIONS["stall_behind_queue"]
    without, stalled = injection.plans("large", flavour="cuda", seed=0)
    assert windows_ns(simulate(without)) == windows_ns(simulate(stalled))
    assert ledger(simulate(without)) == ledger(simulate(stalled))


@cache
def books_of(plan: Plan) -> tuple[dict[str, int], int]:
    recording = simulate(plan)
    return ledger(recording), windows_ns(recording)


IN_SHORT = ("data_stall", "slow_link", "clock_power_cap", "stall_behind_queue", "mixed_host")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.long)
        for name in (*INJECTIONS, *MIXES)
    ],
)
def test_each_injection_adds_to_the_windows_what_it_adds_to_the_books(name: str) -> None:
    injection = (INJECTIONS | MIXES)[name]
    (a, before_ns), (b, after_ns) = (
        books_of(plan) for plan in injection.plans("medium", flavour="cuda", seed=0)
    )
    booked = sum(b.values()) - sum(a.values())
    assert abs(booked - (after_ns - before_ns)) <= len(a) + len(b)
    if name not in MIXES and name != "stall_behind_queue":
        cause = INJECTIONS[name].cause
        own = [c for c in LEAVES if c == cause or c.startswith(cause + ".")]
        assert sum(b.get(c, 0) - a.get(c, 0) for c in own) > 100_000


def test_the_model_knows_nothing_of_the_analyzers() -> None:
    program = (
        "import sys; from tests.known_causes.model import injections, job, ledger, writer; "
        "print([m for m in sys.modules if m.startswith('chopper.analyzers')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "[]\n", shown.stderr
