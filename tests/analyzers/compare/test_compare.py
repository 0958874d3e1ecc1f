from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chopper
from chopper import pipeline
from chopper.analyzers.causes.step_time import warm_up_steps
from chopper.analyzers.compare.gate import decide, parse
from chopper.analyzers.compare.runs import apportion, compare
from chopper.causes import LEAVES
from tests.comparing import attribution, trace

_SOME = ["compute.ideal", "compute.optimizer", "communication.wait", "idle.preparation.data"]


@st.composite
def _runs(draw):
    causes = draw(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=5, unique=True))
    steps = draw(st.integers(1, 6))
    time_ns = st.integers(0, 10**9)
    times = {c: draw(st.lists(time_ns, min_size=steps, max_size=steps)) for c in causes}
    return attribution(times, ranks=draw(st.integers(1, 3)))


@settings(max_examples=60)
@given(_runs(), _runs(), st.booleans())
def test_the_leaf_causes_sum_to_the_difference_of_the_step_exactly(a, b, all_steps) -> None:
    found = compare(a, b, all_steps=all_steps)
    assert sum(c.difference_ns for c in found.leaves()) == found.step.difference_ns
    assert sum(c.a_ns for c in found.leaves()) == found.step.a_ns
    for change in found.changes:
        below = [c for c in found.leaves() if c.id == change.id or c.id.startswith(change.id + ".")]
        assert change.difference_ns == sum(c.difference_ns for c in below)
    turned = compare(b, a, all_steps=all_steps)
    assert turned.step.difference_ns == -found.step.difference_ns
    assert {c.id: -c.difference_ns for c in turned.changes} == {
        c.id: c.difference_ns for c in found.changes
    }


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=40), st.integers(1, 1000))
def test_a_mean_in_whole_nanoseconds_sums_and_is_right_to_one(totals, windows) -> None:
    shares = apportion(np.array(totals), windows)
    assert shares.sum() == sum(totals) // windows
    assert all(abs(s * windows - t) < windows for s, t in zip(shares.tolist(), totals, strict=True))


def test_steps_of_which_most_take_no_time_have_no_factor() -> None:
    run = attribution({"compute.ideal": [0, 0, 0, 0, 9]}, ranks=1)
    assert not [n for n in compare(run, run, all_steps=True).notes if "times the median" in n]


def test_means_are_per_rank_window() -> None:
    # Two ranks, steps of 10 and 20: the mean window is 15 whatever the number of ranks and steps.
    a = attribution({"compute.ideal": [10, 20]}, ranks=2)
    b = attribution({"compute.ideal": [18, 18, 18, 18]})
    found = compare(a, b, allow_different=True)
    assert (found.step.a_ns, found.step.b_ns, found.step.difference_ns) == (15, 18, 3)
    assert found.step.ratio == pytest.approx(0.2)
    assert (found.a.windows, found.a.steps, found.b.windows) == (4, 2, 4)


def _noisy(rng: np.random.Generator, kind: str, n: int, mean: float) -> np.ndarray:
    if kind == "normal":
        factor = 1 + 0.03 * rng.standard_normal(n)
    else:  # one step in ten takes up to 60 % longer
        factor = 1 + 0.01 * rng.standard_normal(n) + (rng.random(n) < 0.1) * 0.6 * rng.random(n)
    return (mean * factor).astype(np.int64)


def _run_of(rng, kind, n, *, data=5e6, compute=50e6):
    return attribution(
        {
            "compute.ideal": _noisy(rng, kind, n, compute),
            "idle.preparation.data": _noisy(rng, kind, n, data),
        }
    )


def test_a_gate_survives_noise() -> None:
    rng = np.random.default_rng(11)
    gate = parse("step>0% or idle.preparation.data>+50%")
    failed = sum(
        decide(compare(_run_of(rng, "normal", 8), _run_of(rng, "normal", 8)), gate).failed
        for _ in range(60)
    )
    assert failed <= 6


@pytest.mark.parametrize("kind", ["normal", "stalls"])
def test_a_gate_catches_what_was_injected(kind) -> None:
    """Data loading of 10 instead of 5 ms: the step is 9 % slower, and the cause is named."""
    rng = np.random.default_rng(7)
    gate = parse("step>+2% or idle.preparation.data>+3ms")
    cases, failed, named, covered = 40, 0, 0, 0
    for _ in range(cases):
        found = compare(_run_of(rng, kind, 12), _run_of(rng, kind, 12, data=10e6))
        failed += decide(found, gate).failed
        change = next(c for c in found.changes if c.id == "idle.preparation.data")
        assert change.ci95_ns is not None
        named += "data stall rose by" in found.verdict
        covered += change.ci95_ns[0] <= 5e6 <= change.ci95_ns[1]
    assert failed >= 0.95 * cases
    assert named >= 0.9 * cases
    # Where one step in ten stalls, twelve steps may hold none: no interval can know of it then.
    assert kind == "stalls" or covered >= 0.88 * cases


def test_the_same_run_has_no_difference() -> None:
    a = attribution({c: [100 + i * 7 for i in range(6)] for c in _SOME})
    found = compare(a, a)
    assert found.step.difference_ns == 0
    assert found.verdict.startswith("No significant difference")
    assert not any(c.told for c in found.changes)
    # A run without any noise at all has intervals of no width.
    same = attribution({"compute.ideal": [100] * 5})
    slower = attribution({"compute.ideal": [110] * 5})
    sure = compare(same, slower)
    assert sure.step.ci95_ns == (10, 10)
    assert sure.verdict.startswith("B is 10.0 % slower (95 %: +10.0 … +10.0 %): 100 ns to 110 ns")


def test_what_moved_under_a_noisy_step_is_still_named() -> None:
    rng = np.random.default_rng(1)
    noise = (50e6 + 8e6 * rng.standard_normal(10)).astype(int).tolist()
    other = (50e6 + 8e6 * rng.standard_normal(10)).astype(int).tolist()
    data = [5_000_000 + 1000 * i for i in range(10)]
    a = attribution({"compute.ideal": noise, "idle.preparation.data": data})
    slower = [d + 1_000_000 for d in data]
    b = attribution({"compute.ideal": other, "idle.preparation.data": slower})
    verdict = compare(a, b).verdict
    assert verdict.startswith("No significant difference")
    assert verdict.endswith("; yet data stall rose by 1.00 ms.")


def test_few_steps_give_no_interval_and_no_verdict() -> None:
    a = attribution({"compute.ideal": [100, 100, 100]})
    b = attribution({"compute.ideal": [200, 200]})
    found = compare(a, b)
    assert found.step.ci95_ns is None
    assert found.median.ci95_ns is None
    assert found.changes[0].told is None
    assert found.verdict == "No verdict: B has 2 steps, and fewer than 3 give no interval."
    gate = decide(found, parse("step>+5%"))
    assert not gate.failed
    assert gate.decisions[0].outcome == "undecided"
    assert "--fail-on-point" in gate.decisions[0].reason
    assert decide(found, parse("step>+5%"), point=True).failed


def test_an_empty_run_gives_no_verdict() -> None:
    a = attribution({"compute.ideal": [0, 0, 0]})
    b = attribution({"compute.ideal": [200, 200, 200]})
    assert "nothing ran on the device in A" in compare(a, b).verdict


def test_warm_up_is_left_out_and_named() -> None:
    # 100 > 1.2 · 10, > 10 + 5 · 1.4826 · 0.5 and > every later step; 90 likewise; then 10, 11 stay.
    assert warm_up_steps(np.array([100.0, 90, 10, 11, 10, 11])) == 2
    # A first step like a later one stays, and so do the last three whatever they are.
    assert warm_up_steps(np.array([100.0, 10, 10, 100, 10])) == 0
    assert warm_up_steps(np.array([100.0, 10, 10])) == 0
    assert warm_up_steps(np.array([12.0, 10, 11, 10, 11, 10])) == 0
    a = attribution({"compute.ideal": [1000, 100, 100, 100, 100]}, first=7)
    b = attribution({"compute.ideal": [100, 100, 100, 100]})
    found = compare(a, b)
    assert found.a.left_out == (7,)
    assert "A: step 7 excluded as warm-up" in found.notes[0]
    assert found.step.difference_ns == 0
    assert compare(a, b, all_steps=True).step.a_ns == 280


def test_a_slow_step_inside_is_kept_and_mentioned() -> None:
    a = attribution({"compute.ideal": [100, 100, 500, 100, 100]})
    found = compare(a, a)
    assert found.step.a_ns == 180
    assert found.median.a_ns == 100
    assert "step 2 took 5.0 times the median" in found.notes[0]


def test_the_verdict_names_what_made_the_difference_and_what_worked_against_it() -> None:
    a = attribution(
        {
            "compute.optimizer": [1000, 1001, 1002, 1001],
            "communication.wait": [5000, 5010, 5000, 5010],
            "idle.preparation.data": [100, 101, 100, 101],
        }
    )
    b = attribution(
        {
            "compute.optimizer": [1001, 1002, 1000, 1001],
            "communication.wait": [1000, 1010, 1000, 1010],
            "idle.preparation.data": [1100, 1101, 1100, 1101],
        }
    )
    found = compare(a, b)
    assert "49.1 % faster" in found.verdict
    assert "because straggler wait fell by 4.00 µs" in found.verdict
    assert found.verdict.endswith("; against it, data stall rose by 1.00 µs.")


def test_kernels_are_cut_into_count_and_duration(tmp_path) -> None:
    a = pipeline.attribute(trace(tmp_path / "a.json", adds=1, extra="old"))
    b = pipeline.attribute(trace(tmp_path / "b.json", adds=3, extra="new", matmul_ns=(5_000,)))
    found = compare(a, b)
    kernels = {k.name: k for k in found.kernels}
    assert (kernels["old"].status, kernels["old"].difference_ns) == ("vanished", -500)
    assert (kernels["new"].status, kernels["new"].by_count_ns) == ("appeared", 500)
    # Three additions of 1 µs instead of one.
    assert kernels["add"].by_count_ns == 2_000
    assert kernels["add"].by_duration_ns == 0
    assert (kernels["add"].a_count, kernels["add"].b_count) == (1, 3)
    assert (kernels["gemm"].by_count_ns, kernels["gemm"].by_duration_ns) == (0, 1_000)
    assert [k.name for k in found.kernels[:2]] == ["add", "gemm"]
    assert all(k.told for k in found.kernels)
    operations = {o.name: o for o in found.operations}
    assert operations["aten::add"].difference_ns == 2_000
    assert operations["aten::relu"].difference_ns == 0
    for item in (*found.kernels, *found.operations):
        assert item.by_count_ns + item.by_duration_ns == item.difference_ns


def test_an_operator_counts_its_calls_not_its_kernels(tmp_path) -> None:
    from tests.kineto_writer import Trace

    made = Trace()
    for s in range(3):
        t = 10_000 * s
        made.step(s, t, 10_000)
        op = made.op("aten::mm", t + 1_000, 2_000, shapes=[[8, 8], [8, 8]])
        made.launch("gemm", t + 1_100, 100, kernel_at=t + 3_000, kernel_for=1_000, op=op)
        made.launch("reduce", t + 1_400, 100, kernel_at=t + 4_000, kernel_for=500, op=op)
    path = tmp_path / "t.json"
    path.write_bytes(made.encode())
    found = chopper.compare(path, path)
    assert [(o.name, o.a_count, o.a_ns) for o in found.operations] == [("aten::mm", 1, 1_500)]


def test_kernels_after_a_step_without_any_are_of_their_own_steps(tmp_path) -> None:
    from tests.kineto_writer import Trace

    made = Trace()
    for s in range(5):
        made.step(s, 10_000 * s, 10_000)
        if s != 1:
            op = made.op("aten::mm", 10_000 * s + 1_000, 2_000, shapes=[[8, 8], [8, 8]])
            at = 10_000 * s + 3_000
            made.launch("gemm", at - 1_900, 100, kernel_at=at, kernel_for=1_000, op=op)
    path = tmp_path / "t.json"
    path.write_bytes(made.encode())
    found = chopper.compare(path, path)
    # Step 1 without a kernel stays a step: four kernels of 1000 ns in five steps.
    assert [(k.name, k.a_count, k.a_ns) for k in found.kernels] == [("gemm", 0.8, 800)]
