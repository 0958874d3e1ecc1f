"""The gate with history: how often it cries wolf, what it finds, and what it calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.compare import history
from chopper.analyzers.compare.history import (
    ERROR_RATE,
    MIN_RUNS,
    Judgement,
    PastRun,
    adds,
    is_new_level,
    judge,
    past_run,
)
from chopper.analyzers.compare.same_work import Work
from chopper.errors import InputError
from chopper.statistics import drift_of, predict_run
from tests.comparing import attribution

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
TRIALS = 20_000
OWN = Path(__file__).resolve().parents[2] / "golden/own"
WORK = Work(
    world_size=1,
    flop=10**9,
    tokens=None,
    operators={"aten::mm": 4.0},
    device="H100",
    dtype="bf16",
    torch="2.13",
)


def _correlated(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    values = rng.standard_normal(shape)
    for i in range(1, shape[1]):
        values[:, i] = 0.5 * values[:, i - 1] + 0.75**0.5 * values[:, i]
    return values


def _drifting(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    walk = np.cumsum(rng.standard_normal(shape) * 0.15, axis=1)
    return 0.9 * rng.standard_normal(shape) + walk


NOISE: dict[str, Noise] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    # Standard deviation 1 each: Student's t of 4 degrees of freedom, gamma of shape 4.
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape) / 2**0.5,
    "skewed": lambda rng, shape: (rng.gamma(4, 1, shape) - 4) / 2,
    "successive runs alike": _correlated,
    "drift": _drifting,
}
"""What runs of one job differ by, over its standard deviation: (jobs, runs)."""


def beyond(noise: str, runs: int, slower: float = 0.0, cv: float = 1.0) -> float:
    """Share of jobs whose next run lies above the interval of the earlier ones."""
    values = cv * NOISE[noise](np.random.default_rng(runs), (TRIALS, runs + 1))
    found = predict_run([values[:, :-1]])
    return float(np.mean(values[:, -1] + np.log1p(slower) - found.level > found.limit(ERROR_RATE)))


@pytest.mark.parametrize("runs", [5, 10, 30])
@pytest.mark.parametrize("noise", NOISE)
def test_at_most_one_unchanged_run_in_a_hundred_is_a_regression(noise: str, runs: int) -> None:
    assert beyond(noise, runs) <= 0.01


@pytest.mark.parametrize("noise", NOISE)
def test_two_percent_are_found_with_ten_runs_that_vary_by_a_quarter_percent(noise: str) -> None:
    assert beyond(noise, 10, slower=0.02, cv=0.0025) >= 0.9


def test_where_runs_vary_more_two_percent_are_not_found() -> None:
    # The limit of what the gate can do; its verdict is then that the machine is noisy.
    assert beyond("normal", 10, slower=0.02, cv=0.006) < 0.4
    assert judge(of(1.002), job(0.006), find_ratio=0.02).verdict == "noisy machine"


def test_one_bad_run_among_ten_hides_nothing() -> None:
    values = 0.002 * np.random.default_rng(0).standard_normal((TRIALS, 11))
    values[:, 4] += 0.1
    found = predict_run([values[:, :-1]])
    assert np.mean(values[:, -1] + 0.02 - found.level > found.limit(ERROR_RATE)) >= 0.9
    assert np.mean(values[:, -1] - found.level > found.limit(ERROR_RATE)) <= 0.01


def test_the_limit_is_that_of_students_t() -> None:
    # Mean 0, standard deviation 1 over 5 runs; t(0.999; 4) = 7.1732, times √(1 + 1/5).
    values = np.array([-1.0, -1.0, 0.0, 1.0, 1.0])
    assert predict_run([values]).limit(0.001) == pytest.approx(7.1732 * 1.2**0.5, rel=1e-4)
    # Two levels: squares 4 and 2 over 4 and 1 degrees of freedom; two runs of the current level.
    both = predict_run([values, np.array([9.0, 11.0])])
    assert (float(both.level), float(both.freedom)) == (10.0, 5.0)
    assert both.error == pytest.approx((6 / 5 * 1.5) ** 0.5)
    assert predict_run([np.array([1.0])]).limit(0.001) == np.inf


def _shared(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    disturbed = rng.random(shape) < 0.2
    return 0.5 * rng.standard_normal(shape) + disturbed * rng.exponential(4, shape)


def _two_speeds(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape) + 20 * (rng.random(shape) < 0.5)


SHARED: dict[str, Noise] = {"shared machine": _shared, "two speeds": _two_speeds}
"""Runs that are now and then slower by far more than the others vary by, and nothing tells."""


@pytest.mark.parametrize("runs", [10, 30, 100])
@pytest.mark.parametrize("noise", [*NOISE, *SHARED])
def test_noise_is_at_most_once_in_a_hundred_a_drift(noise: str, runs: int) -> None:
    values = (NOISE | SHARED)[noise](np.random.default_rng(runs), (1_000, runs))
    found = [drift_of(of) for of in values]
    assert sum(d is not None and d.rise > d.limit for d in found) <= 10


def first_found(cv: float, growth: float, seed: int) -> float:
    """By how much a job has become slower when it is said, each run added as the command does."""
    rng = np.random.default_rng(seed)
    earlier: list[PastRun] = []
    for at in range(200):
        step_ms = (1 + growth) ** at * float(np.exp(cv * rng.standard_normal()))
        now = judge(of(step_ms, at), earlier, find_ratio=0.02)
        if now.verdict == "regression":
            return (1 + growth) ** at - 1
        if adds(now):
            earlier.append(now.run)
    return np.inf


@pytest.mark.parametrize(("cv", "most"), [(0.0001, 0.04), (0.0025, 0.05), (0.01, 0.12)])
def test_runs_each_a_little_slower_than_the_last_become_a_regression(
    cv: float, most: float
) -> None:
    # Each 0.2 % slower than the last: 13 % after 70 runs were never a regression.
    assert max(first_found(cv, 0.002, seed) for seed in range(3)) <= most


def test_a_drift_over_hundreds_of_runs_is_found() -> None:
    slower = [of(1.00015**at, at) for at in range(400)]
    assert [judge(of(1.00015**n), slower[:n], find_ratio=0.02).verdict for n in (100, 399)] == [
        "same",
        "regression",
    ]


def test_a_history_that_has_drifted_is_said_until_its_level_is_accepted() -> None:
    rng = np.random.default_rng(3)
    drifting = [of(1.002**at * float(np.exp(0.0025 * rng.standard_normal())), at)
                for at in range(70)]  # fmt: skip
    found = judge(of(1.002**70), drifting, find_ratio=0.02)
    assert (found.verdict, found.drifted, found.failed) == ("regression", True, True)
    assert found.held_ns == pytest.approx(1e6, rel=0.01)
    assert found.drift_ratio == pytest.approx(0.14, abs=0.01)
    assert "slower little by little: 1.01 ms per step were held" in found.sentence
    assert found.to_dict()["drifted"]
    assert not adds(found)
    assert is_new_level(found)
    after = [of(1.15, 100 + at, accepted=at == 0) for at in range(12)]
    found = judge(of(1.15, 200), [*drifting, *after], find_ratio=0.03)
    assert (found.verdict, found.drifted) == ("same", False)
    # A disturbed run among the latest is no proof, and one that is as quick as before ends it.
    slow = judge(of(1.002**70, other_cores=3.0), drifting, find_ratio=0.02)
    assert (slow.verdict, slow.drifted) == ("noisy machine", True)
    assert verdict(of(1.0), drifting) == "improvement"


def of(step_ms: float, at: int = 10**6, **fields: object) -> PastRun:
    """A run of so many milliseconds a step, all of it user Python but for 0.5 ms of products."""
    step_ns = round(step_ms * 1e6)
    values: dict[str, object] = {
        "id": f"{at}",
        "name": f"run-{at}",
        "time_ns": at,
        "steps": 100,
        "untraced": True,
        "median_ns": step_ns,
        "mean_ns": step_ns,
        "uneven": False,
        "error_ratio": 0.0005,
        "causes_ns": {"compute.ideal": 500_000, "idle.preparation.python": step_ns - 500_000},
        "work": WORK,
        "cores": 8,
        "other_cores": 0.1,
        "clock_hz": 1_980_000_000,
    }
    return PastRun(**(values | fields))  # type: ignore[arg-type]


def job(cv: float, runs: int = 10, seed: int = 1, level_ms: float = 1.0) -> list[PastRun]:
    noise = np.random.default_rng(seed).standard_normal(runs)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    return [of(level_ms * np.exp(cv * x), at) for at, x in enumerate(noise.tolist())]


def verdict(run: PastRun, earlier: Sequence[PastRun], find_ratio: float = 0.02) -> str:
    return judge(run, earlier, find_ratio=find_ratio).verdict


def test_whole_jobs_are_judged_as_rarely_wrong_and_as_often_right() -> None:
    """Runs one after another, each judged and added as the command does: levels included."""
    rng = np.random.default_rng(18)
    judged = regressions = slower = found = 0
    for _ in range(200):
        earlier: list[PastRun] = []
        for at in range(20):
            noise = float(np.exp(0.0025 * rng.standard_t(4) / 2**0.5))
            now = judge(of(noise, at), earlier, find_ratio=0.02)
            judged += len(earlier) >= MIN_RUNS
            regressions += now.verdict == "regression"
            if len(earlier) == 10:
                slower += 1
                slow = of(1.02 * noise, at + 10**6)
                found += judge(slow, earlier, find_ratio=0.02).verdict == "regression"
            if adds(now):
                earlier.append(now.run)
    assert judged > 2_900
    assert regressions <= 0.01 * judged
    assert found >= 0.9 * slower


def test_verdicts() -> None:
    earlier = job(0.002)
    assert verdict(of(1.001), earlier) == "same"
    assert verdict(of(1.03), earlier) == "regression"
    assert verdict(of(0.97), earlier) == "improvement"
    assert verdict(of(1.03), earlier[:4]) == "too few runs"
    assert verdict(of(1.03), []) == "too few runs"
    other = msgspec.structs.replace(WORK, flop=2 * 10**9)
    assert verdict(of(2.0, work=other), earlier) == "changed work"
    # A run that is in the history is not compared with itself.
    assert judge(earlier[3], earlier, find_ratio=0.02).reference == (*earlier[:3], *earlier[4:])


def test_a_regression_names_the_causes_that_grew_beyond_their_own_noise() -> None:
    earlier = job(0.002)
    causes = {"compute.ideal": 501_000, "idle.preparation.python": 529_000}
    found = judge(of(1.03, causes_ns=causes), earlier, find_ratio=0.02)
    assert [c.id for c in found.causes if c.told] == ["idle.preparation.python"]
    assert "user Python by 29.0 µs longer in traced steps" in found.sentence
    assert found.failed
    assert not adds(found)
    older = [msgspec.structs.replace(h, causes_ns=h.causes_ns | {"renamed": 9}) for h in earlier]
    assert judge(of(1.03, causes_ns=causes), older, find_ratio=0.02).causes == found.causes
    none = judge(of(1.03, causes_ns=earlier[0].causes_ns), earlier, find_ratio=0.02)
    assert "no cause grew beyond its own noise" in none.sentence


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"other_cores": 1.6}, "other programs used 1.6 of 8 cores, 0.1 in earlier runs"),
        ({"clock_hz": 1_900_000_000}, "the device's clock was 1.90 GHz, 1.98 GHz in earlier runs"),
    ],
)
def test_a_slow_run_on_a_disturbed_machine_is_no_regression(
    machine: dict[str, Any], said: str
) -> None:
    earlier = job(0.002)
    found = judge(of(1.03, **machine), earlier, find_ratio=0.02)
    assert found.verdict == "noisy machine"
    assert said in found.sentence
    assert found.undecided
    assert not adds(found)
    # Slower by more than the clock explains; in time, it does not matter what else ran.
    if "clock_hz" in machine:
        assert verdict(of(1.3, **machine), earlier) == "regression"
    assert verdict(of(1.0, **machine), earlier) == "same"


def test_noise_that_hides_what_must_be_found_is_said_and_kept() -> None:
    found = judge(of(1.0), job(0.02), find_ratio=0.02)
    assert found.verdict == "noisy machine"
    assert "would be found in 90 % of cases, one of 2.00 % might not" in found.sentence
    assert adds(found)  # else its history would never grow
    assert found.detectable_ratio is not None
    detectable = found.detectable_ratio
    assert verdict(of(1.0), job(0.02), find_ratio=1.01 * detectable) == "same"
    # What it says that it finds, it finds.
    assert beyond("normal", 10, slower=detectable, cv=0.02) == pytest.approx(0.9, abs=0.01)


def test_a_run_of_few_steps_is_less_certain() -> None:
    earlier = job(0.002)
    assert verdict(of(1.02), earlier) == "regression"
    assert verdict(of(1.02, error_ratio=0.02), earlier) == "noisy machine"


def test_other_machines_and_other_work_do_not_count() -> None:
    slow = msgspec.structs.replace(WORK, device="A100")
    elsewhere = [of(2.0, 100 + i, work=slow) for i in range(10)]
    found = judge(of(2.0, work=slow), [*job(0.002), *elsewhere], find_ratio=0.02)
    assert (found.verdict, len(found.reference)) == ("same", 10)
    assert found.notes == ("10 earlier runs not counted: on other machines, or timed with a trace",)
    assert verdict(of(2.0, work=slow), job(0.002)) == "too few runs"
    other = msgspec.structs.replace(WORK, tokens=4096)
    changed = [of(3.0, 200 + i, work=msgspec.structs.replace(WORK, flop=10**10)) for i in range(3)]
    found = judge(of(1.0, work=other), [*job(0.002), *changed], find_ratio=0.02)
    assert found.verdict == "same"  # tokens are unknown in the history, which is no difference
    assert found.notes == ("3 earlier runs not counted: other work",)
    # Another version of PyTorch is judged, and named.
    newer = msgspec.structs.replace(WORK, torch="2.14")
    found = judge(of(1.03, work=newer), job(0.002), find_ratio=0.02)
    assert (found.verdict, [c.id for c in found.checks]) == ("regression", ["torch"])


def levels(found: Judgement) -> float:
    assert found.reference_ns is not None
    return round(found.reference_ns / 1e6, 2)


def test_an_accepted_run_is_a_new_level_with_the_noise_of_the_old_one() -> None:
    earlier = [*job(0.002), of(1.1, 50, accepted=True)]
    found = judge(of(1.102), earlier, find_ratio=0.03)
    assert (found.verdict, levels(found), len(found.reference)) == ("same", 1.1, 1)
    assert verdict(of(1.15), earlier) == "regression"
    assert verdict(of(1.0), earlier) == "improvement"


def test_three_runs_in_a_row_beyond_the_interval_are_a_new_level() -> None:
    earlier = job(0.002)
    faster = [of(0.9 + 0.001 * i, 50 + i) for i in range(3)]
    assert levels(judge(of(0.9), [*earlier, *faster[:2]], find_ratio=0.02)) > 0.97
    found = judge(of(0.902), [*earlier, *faster], find_ratio=0.03)
    assert (found.verdict, levels(found)) == ("same", 0.9)
    assert verdict(of(0.95), [*earlier, *faster]) == "regression"


def test_steps_that_come_in_flights_are_judged_by_their_mean() -> None:
    uneven = [
        msgspec.structs.replace(run, median_ns=run.median_ns // 10, uneven=True)
        for run in job(0.002)
    ]
    found = judge(of(1.03, uneven=True, median_ns=100_000), uneven, find_ratio=0.02)
    assert (found.verdict, found.statistic) == ("regression", "mean")
    # One run whose steps seem even does not change what is compared.
    assert verdict(of(1.0, median_ns=500_000), uneven) == "same"


def test_identical_times_do_not_make_a_nanosecond_a_regression() -> None:
    earlier = [of(1.0, at) for at in range(10)]
    assert verdict(of(1.003), earlier) == "same"
    assert verdict(of(1.01), earlier) == "regression"


def test_absurd_spreads_are_bounded() -> None:
    earlier = [of(1.0, at, median_ns=(1, 2**57)[at % 2]) for at in range(10)]
    found = judge(of(1.0, median_ns=10**6), earlier, find_ratio=0.02)
    assert found.verdict == "noisy machine"
    assert found.limit_ratio == found.detectable_ratio == pytest.approx(2**57)
    assert "a slow-down of >1000000 % would be found in 90 % of cases" in found.sentence
    # The median over steps may say less than nothing about the steps' mean.
    found = judge(of(1.0, error_ratio=1e18), [of(1.0, at) for at in range(10)], find_ratio=0.02)
    assert found.limit_ratio == pytest.approx(2**57)


def test_what_is_kept_of_a_run() -> None:
    times = {
        "compute.ideal": [4_000_000, 4_100_000, 4_200_000],
        "idle.preparation.python": [10] * 3,
    }
    run = attribution(times, ranks=2)
    kept = past_run(run)
    assert (kept.steps, kept.untraced, kept.median_ns) == (3, False, 4_100_010)
    assert kept.causes_ns == {"compute.ideal": 4_100_000, "idle.preparation.python": 10}
    assert kept.work.world_size == 2
    assert (kept.other_cores, kept.clock_hz, kept.cores) == (None, None, None)
    assert msgspec.json.decode(msgspec.json.encode(kept), type=PastRun) == kept
    assert past_run(attribution(times, ranks=2, name="copy")).id == kept.id
    assert kept.schema == history.SCHEMA


def test_the_machine_during_a_recorded_run_is_kept() -> None:
    kept = past_run(pipeline.attribute(OWN / "fsdp2"))
    assert kept.work.world_size == 2
    assert kept.cores is not None
    # Cores that the host's sampler saw busy, less those of both ranks.
    assert kept.other_cores is not None
    assert 0 <= kept.other_cores <= kept.cores


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="no steps with a duration"):
        past_run(attribution({"compute.ideal": [0]}))
