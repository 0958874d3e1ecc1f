"""Injections into real training: scoring by hand-made numbers, ranks and link as they are."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from chopper import pipeline
from chopper.causes import LEAVES
from chopper.errors import CaptureError
from chopper.recording.finish import finalize
from chopper.statistics import bootstrap
from chopper.storage.run import Run
from chopper.workloads import link
from tests.known_causes import real, recordings
from tests.known_causes.injections.plan import (
    ARRIVAL,
    BASELINE,
    WARM_UP_STEPS,
    Job,
    Plan,
    Truth,
)
from tests.known_causes.real import Expected, Injection, trimmed_limit, trimmed_mean
from tests.known_causes.results import Case
from tests.waiting import PATIENCE_S, until

MS = 1_000_000


def plan(pairs_count: int = 10, amounts: tuple[float, ...] = (1.0,)) -> Plan:
    return Plan(injection="slow_rank", amounts=amounts, pairs_count=pairs_count, seed=3)


def test_every_injected_step_has_a_neighbour_without() -> None:
    made = plan(amounts=(1.0, 2.0, 3.0))
    levels = made.levels()
    assert levels[:WARM_UP_STEPS] == [BASELINE] * WARM_UP_STEPS
    pairs = made.pairs()
    assert len(pairs) == 30
    for level, injected, base in pairs:
        assert levels[injected] == level != BASELINE
        assert levels[base] == BASELINE
        assert abs(injected - base) == 1
    used = sorted(step for _, *steps in pairs for step in steps)
    assert used == list(range(WARM_UP_STEPS, len(levels)))
    # Neither comes first more often than by chance: drift within a pair cancels too.
    assert 5 < sum(injected < base for _, injected, base in pairs) < 25


Injected = dict[tuple[int, str], int]
"""(rank, cause) → ms that were injected."""


def attributed(made: Plan, injected: Injected, noise_ns: int = 0, seed: int = 1) -> np.ndarray:
    """All causes alike in all steps, give or take the noise, and what was injected."""
    rng = np.random.default_rng(seed)
    shape = (recordings.RANKS, len(made.levels()), len(LEAVES))
    table = 50 * MS + rng.integers(-noise_ns, noise_ns + 1, shape)
    for (rank, cause), time_ms in injected.items():
        for _, step, _ in made.pairs():
            table[rank, step, LEAVES.index(cause)] += time_ms * MS
    return table


def truth(made: Plan, time_ns: int, name: str = "own") -> Truth:
    return Truth(injected_ns={name: [0 if n == BASELINE else time_ns for n in made.levels()]})


AMOUNTS = (1.0, 2.0, 3.0)
SLOW_RANK = Injection(
    Expected("communication.wait", {0: 1}),
    AMOUNTS,
    also=(Expected("idle.preparation.python", {1: 1}),),
)
SLOWED: Injected = {(0, "communication.wait"): 20, (1, "idle.preparation.python"): 20}


def score(made: Plan, table: np.ndarray) -> Case:
    """Score a rank 1 that was 20 ms slow."""
    truths = [Truth(), truth(made, 20 * MS)]
    (case,) = real.score(made, SLOW_RANK, table, truths, ["large"])
    return case


def test_what_was_injected_is_recovered() -> None:
    made = plan()
    case = score(made, attributed(made, SLOWED))
    assert case.status == "ok"
    assert (case.injected_ns, case.recovered_ns) == (200 * MS, 200 * MS)
    assert case.ci95_ns == (200 * MS, 200 * MS)
    assert case.leaked_ns == {}


def test_a_leak_is_told_and_a_missing_side_effect_is_one() -> None:
    made = plan()
    leaking = {(0, "communication.wait"): 20, (0, "compute.optimizer"): 3}
    case = score(made, attributed(made, leaking))
    assert case.status == "missed"
    assert case.leaked_ns == {
        "idle.preparation.python": -200 * MS,
        "compute.optimizer": 30 * MS,
    }


def test_noise_seldom_looks_like_a_leak() -> None:
    made = plan(pairs_count=12)
    leaking = sum(
        bool(score(made, attributed(made, SLOWED, noise_ns=10 * MS, seed=seed)).leaked_ns)
        for seed in range(200)
    )
    # One in twenty by design; trimmed means of twelve pairs have somewhat heavier tails than that.
    assert 0 < leaking <= 24


@pytest.mark.parametrize(
    ("injected", "expected", "truths_ms", "recovered_ms"),
    [
        (
            {
                (0, "communication.transfer.at_peak"): 5,
                (0, "communication.transfer.below_peak"): 15,
            },
            Expected("communication.transfer"),
            (20, 0),
            200,
        ),
        (
            {
                (0, "idle.preparation.gc"): 20,
                (1, "idle.preparation.gc"): 26,
                (0, "communication.wait"): 6,
            },
            Expected("idle.preparation.gc"),
            (20, 26),
            460,
        ),
        (
            {(0, "compute.core_wait"): 15, (0, "idle.preparation.core_wait"): 5},
            Expected("compute.core_wait", {0: 0}, shared_with=("idle.preparation.core_wait",)),
            (20, 0),
            200,
        ),
    ],
    ids=("parents gather their leaves", "the rank held up less waits", "causes that share it"),
)
def test_all_of_an_injection_is_recovered(
    injected: Injected, expected: Expected, truths_ms: tuple[int, int], recovered_ms: int
) -> None:
    made = plan()
    (case,) = real.score(
        made,
        Injection(expected, AMOUNTS),
        attributed(made, injected),
        [truth(made, time_ms * MS) for time_ms in truths_ms],
        ["small"],
    )
    assert (case.status, case.recovered_ns, case.leaked_ns) == ("ok", recovered_ms * MS, {})


def test_a_miss_on_a_busy_machine_shows_nothing() -> None:
    made = plan()
    missed = score(made, attributed(made, {}))
    assert missed.status == "missed"
    assert real._excused(missed, 0.1) == missed
    excused = real._excused(missed, 1.7)
    assert excused.status == "refused"
    assert "other programs used 1.7 cores" in str(excused.reason)


def test_the_rank_that_came_later_is_waited_for_by_as_much() -> None:
    made = plan()
    came = [[0 if n == BASELINE else 20 * MS for n in made.levels()], [MS] * len(made.levels())]
    # Rank 0 is late by 19 ms where something is injected, else rank 1 by one.
    table = attributed(made, {(1, "communication.wait"): 19, (0, "communication.wait"): -1})
    (case,) = real.score(
        made,
        Injection(Expected("communication.wait", {0: 1, 1: 0}, measured=ARRIVAL), AMOUNTS),
        table,
        [Truth(injected_ns={ARRIVAL: at}) for at in came],
        ["small"],
    )
    assert (case.injected_ns, case.recovered_ns, case.leaked_ns) == (180 * MS, 180 * MS, {})


@pytest.mark.parametrize(("right", "status"), [(10, "ok"), (9, "ok"), (8, "missed")])
def test_the_late_rank_must_be_named(right: int, status: str) -> None:
    case = Case(suite="real", injection="a", cause="idle", magnitude="small", flavour="cpu")
    named = real._named_right(case, 1, [1] * right + [0, None][: 10 - right])
    assert named.status == status
    assert status == "ok" or named.reason == "rank 1 was late, and named in 8 of 10 steps"
    assert real._named_right(case, None, [0, 0]) == case


def test_no_link_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    cases = list(real.run_cases(injections=["slow_link"], magnitudes=["small", "large"]))
    assert [(c.status, c.reason) for c in cases] == [
        ("skipped", "shaping a link needs root"),
        ("skipped", "shaping a link needs root"),
    ]


@pytest.fixture
def has_link() -> None:
    reason = link.unavailable()
    if reason:
        pytest.skip(reason)


def programs(parents: Container[int]) -> list[psutil.Process]:
    """Ranks that run now and that these processes started; other tests have others."""
    found = []
    for process in psutil.process_iter():
        try:
            _, *words = process.cmdline()
            program = "tests.known_causes.injections.program"
            if program in words and int(words[words.index(program) - 1]) in parents:
                found.append(process)
        except (psutil.Error, ValueError):
            continue
    return found


@pytest.fixture
def parents() -> Iterator[list[int]]:
    """Processes that start ranks; none of these stays behind, and no end of their link."""
    starters = [os.getpid()]
    yield starters
    until(lambda: not programs(starters), "the end of all ranks")
    assert link.INTERFACE not in {name for _, name in socket.if_nameindex()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["slow_dataset", "garbage_collection"], marks=pytest.mark.long),
        # tests/collectors measures what waits for a core.
        pytest.param(["busy_neighbour"], marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("parents")
def test_real_injections_are_found(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """In one job, whose ranks load torch once. How well they are is for `chopper validate`: here
    the machine is shared, and only what others cannot undo holds.
    """
    if "busy_neighbour" in names and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks on one core are each other's neighbours")
    score, scored = real.score, []

    def seen(
        made: Plan,
        injection: Injection,
        found: np.ndarray,
        truths: Sequence[Truth],
        levels: Sequence[str],
    ) -> list[Case]:
        scored.append((made, found, truths))
        return score(made, injection, found, truths, levels)

    monkeypatch.setattr(real, "score", seen)
    monkeypatch.setattr(real, "_QUICK_PAIRS", 3)
    monkeypatch.setattr(recordings, "_START_LIMIT_S", PATIENCE_S)
    cases = list(real.run_cases(injections=names, magnitudes=["large"], quick=True))
    assert {case.injection for case in cases} == set(names)
    assert {case.status for case in cases} <= {"ok", "missed", "refused"}
    for made, found, truths in scored:
        cause = real.injections()[made.injection]
        # What a thread waited for a core is taken out of wherever it was; in a collective it waits
        # for the other rank anyhow.
        holds = [cause, "compute.core_wait", "idle.preparation.core_wait"]
        if made.injection == "busy_neighbour":
            holds.append("communication")
        codes = [i for i, leaf in enumerate(LEAVES) if leaf.startswith(tuple(holds))]
        for _, step, _ in made.pairs():
            for rank, measured in enumerate(truths):
                injected_ns = measured.injected_ns["own"][step]
                if made.injection == "slow_dataset":
                    injected_ns = round(made.amounts[0] * 1e9)  # the sleep, without the item
                assert found[rank, step, codes].sum() >= injected_ns > 0, (made.injection, step)


def reductions(run: Run, rank: int, number: int) -> list[dict[str, Any]]:
    """The gradients' collectives of a step."""
    (step,) = [s for s in run.table(rank, "step").to_pylist() if s["number"] == number]
    return [
        span
        for span in run.table(rank, "host_span").to_pylist()
        if span["name"] == "gloo:all_reduce"
        and step["start_ns"] <= span["start_ns"] < step["end_ns"]
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("parents")
def test_a_rank_that_fails_is_named_and_the_other_ended(tmp_path: Path) -> None:
    broken = Plan(injection="no_such_injection", amounts=(1.0,), pairs_count=1)
    job = Job(directory=str(tmp_path), plans=(broken,))
    with pytest.raises(CaptureError, match=r"rank \d ended with exit code 1: .*no_such_injection"):
        recordings.run(job, timeout_s=PATIENCE_S)


_RUNS = """
import sys
import msgspec
from tests.known_causes import recordings
from tests.known_causes.injections.plan import Job
recordings.run(msgspec.json.decode(sys.argv[1], type=Job), timeout_s=600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    # Nothing of ours runs on SIGKILL: tests/workloads/test_processes.py shows that ranks end then.
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)],
)
@pytest.mark.usefixtures("has_link")
def test_a_shaped_link_is_slow_and_nothing_is_left_after_a_signal(
    tmp_path: Path, number: signal.Signals, parents: list[int]
) -> None:
    import msgspec

    shaped, endless = (
        Plan(injection=injection, amounts=(amount,), pairs_count=pairs_count)
        for injection, amount, pairs_count in (("slow_link", 5e7, 2), ("slow_dataset", 0.001, 200))
    )
    job = Job(directory=str(tmp_path), plans=(shaped, endless), linked=True)
    running = subprocess.Popen(
        [sys.executable, "-c", _RUNS, msgspec.json.encode(job).decode()],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    parents.append(running.pid)

    def training() -> bool:
        # Both ranks have recorded the first plan, and train the second, over the link.
        assert running.poll() is None
        return all((tmp_path / "slow_dataset" / f"rank-{rank:05}").exists() for rank in range(2))

    try:
        until(training, "two ranks that train")
        mine = [p.pid for p in programs(parents)]
        assert len(mine) >= recordings.RANKS
        assert {network_of(pid) for pid in mine}.isdisjoint({network_of(os.getpid())})
        running.send_signal(number)
        assert running.wait(PATIENCE_S) != 0
    finally:
        running.kill()
        running.wait()
    finalize(tmp_path / "slow_link")
    run = pipeline.read(tmp_path / "slow_link")
    for _, injected, _ in shaped.pairs():
        reduced = [span for rank in run.ranks for span in reductions(run, rank, injected)]
        assert len(reduced) == recordings.RANKS
        sent_bytes = 4 * json.loads(reduced[0]["input_dims"])[0][0]
        took_ns = max(r["start_ns"] + r["dur_ns"] for r in reduced) - min(
            r["start_ns"] for r in reduced
        )
        # Each sends all of its gradients; no more than the burst comes faster than the link is.
        assert took_ns >= (sent_bytes - 65_536) * 8 / shaped.amounts[0] * 1e9


def network_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def test_a_trimmed_mean_leaves_out_hiccups_and_its_limit_holds() -> None:
    assert trimmed_mean(np.array([[10.0], [11.0], [12.0], [13.0], [900.0]])).tolist() == [12.0]
    values = np.random.default_rng(2).standard_normal((12, 2000))
    beyond = [abs(trimmed_mean(v)) > trimmed_limit(v, 0.05) for v in values.T]
    assert 0.035 <= np.mean(beyond) <= 0.065
    assert trimmed_limit(np.array([3.0]), 0.05) == math.inf
    resampled = bootstrap(values[:, 0], trimmed_mean)
    assert resampled.std() == pytest.approx(trimmed_limit(values[:, 0], 0.05) / 2.4, rel=0.4)
