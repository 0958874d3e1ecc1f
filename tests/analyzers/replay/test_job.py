"""Predictions of jobs of many ranks, as of one graph of all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay import job
from chopper.analyzers.replay.changes import CauseTimes, change_rank
from chopper.analyzers.replay.contraction import Case, contract, couple
from chopper.analyzers.replay.graph import build
from chopper.analyzers.replay.job import RankTimes, alike, predicted_of
from chopper.analyzers.replay.replay import Replay, recoverable
from chopper.analyzers.replay.scenario import Base, Scenario
from chopper.analyzers.replay.whatif_options import Changes
from chopper.engines.processes import Processes
from tests.analyzers.replay import make
from tests.analyzers.replay.test_combined import KNOBS
from tests.analyzers.replay.test_graph import traces
from tests.golden.own import OWN
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Dose, Plan
from tests.known_causes.model.writer import write

passes = pytest.importorskip(
    "chopper.analyzers.replay._longest", reason="contractions need the extension"
)
RANKS = 4
CHANGES: list[dict[str, Any]] = [
    {"fix": "straggler"},
    {"fix": ["idle", "compute.contention"]},
    {"fix": "communication.transfer"},
    {"link": "x3"},
    {"faster": "gemm=2x", "graphs": True},
    {"clock": "1200MHz"},
    {"without": "aten::mm"},
    {"overlap": True},
]


def plan(seed: int, ranks: int = RANKS, **more: Any) -> Plan:
    """Every rank has another trouble, in every step or in every second one."""
    rng = random.Random(seed)
    knobs = rng.sample(sorted(KNOBS), ranks)
    turned: dict[str, Any] = {
        knob: Dose(KNOBS[knob][1] * rng.uniform(0.05, 0.4), ranks=(rank,), every=rng.choice((1, 2)))
        for rank, knob in enumerate(knobs)
    }
    return Plan(layers=1, seed=seed, ranks=ranks, **(turned | more))


def whole_and_contracted(
    folder: Path, patch: pytest.MonkeyPatch
) -> tuple[Attribution, Attribution]:
    """Attribute a run with one graph of all ranks, and as one that is too large for that."""
    run = pipeline.read(folder)
    whole = pipeline.attribute(run)
    patch.setattr(pipeline, "MOST_ROWS", 0)
    return whole, pipeline.attribute(run, ranks=run.ranks[:1])


@settings(max_examples=60, deadline=None)
@given(traces())
def test_the_contraction_of_any_rank_has_the_windows_of_its_graph(trace: dict[str, Any]) -> None:
    run = pipeline.attribute(make.run(trace))
    joined, factors = run.joined[0], run.factors.get(0)
    fixes = ("idle", "idle.preparation.synchronization", "compute", "idle.launch_latency")
    changes = [Changes(), Changes(graphs=True), *(Changes(fix=(cause,)) for cause in fixes)]
    part = contract(joined, None, run.pieces, factors, [Case(change) for change in changes])
    base = Base(build([(joined, None)]))
    for at, change in enumerate(changes):
        scenario = Scenario(base)
        change_rank(scenario, CauseTimes(base.graph.ranks[0], run.pieces, factors), change)
        [(_, bounds)] = couple([part], at, {})
        assert (bounds == scenario.solve().windows(0)).all(), change


def test_ranks_that_meet_in_contradicting_orders_do_not_wait_forever() -> None:
    # Two records each, the last arrivals at collectives 0 and 1, in either order. Each rank arrives
    # 5 after its first meeting, which begins without the other: at 10, the earlier of both.
    ready, time_ns = np.zeros(2, np.int64), np.zeros(4, np.int64)
    each = np.array([0, 1, 2, 3, 4])
    basis, weight = np.array([0, 1, 0, 1], np.int32), np.array([10, 5, 20, 5])
    instance = np.array([0, 1, 1, 0], np.int32)
    of_rank, late = np.array([0, 2, 4]), np.zeros(4, np.int64)
    left = passes.couple(of_rank, each, basis, weight, instance, late, ready, time_ns)
    assert left == 1
    assert time_ns.tolist() == [10, 20, 20, 25]
    basis[1] = 3
    with pytest.raises(ValueError, match="not in order"):
        passes.couple(of_rank, each, basis, weight, instance, late, ready, time_ns)


def test_workers_predict_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(simulate(plan(0)), tmp_path / "run")
    monkeypatch.setattr(pipeline, "MOST_ROWS", 0)
    here = pipeline.attribute(str(tmp_path / "run"), ranks=[1])
    with Processes(2, "a test") as engine:
        apart = pipeline.attribute(str(tmp_path / "run"), engine, ranks=[1])
    assert predicted_of(here) is not None
    assert recoverable(apart, Replay(apart)) == recoverable(here, Replay(here))


def test_a_host_that_tracing_slowed_is_as_fast_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(simulate(plan(0)), tmp_path / "run")
    monkeypatch.setattr(job, "ALIKE_RATIO", -1)
    monkeypatch.setattr(Replay, "pace", 0.5)
    monkeypatch.setattr(pipeline, "_pace", lambda run: Replay(run).pace)
    whole, large = whole_and_contracted(tmp_path / "run", monkeypatch)
    predicted = predicted_of(large)
    assert predicted is not None
    assert predicted.pace == 0.5
    assert recoverable(large, Replay(large)) == recoverable(whole, Replay(whole))
    found, wanted = (chopper.whatif(run, fix="straggler") for run in (large, whole))
    assert found.steps == wanted.steps
    assert found.observed_step_ns < sum(whole.step_time_ns()) / len(whole.step_time_ns())


def test_without_a_device_predictions_are_of_the_ranks_in_detail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "MOST_ROWS", 0)
    run = pipeline.attribute(OWN / "fsdp2", ranks=[1])
    assert predicted_of(run) is None
    [said] = [f.message for f in run.findings if f.code == "run.some_closely"]
    assert said.startswith("details, predictions and the timeline cover 1 of 2 ranks (1)")
    assert chopper.whatif(run, fix="idle").ranks_count == 1


@pytest.mark.parametrize("seed", range(3))
def test_without_groups_every_number_is_that_of_the_whole_graph(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(simulate(plan(seed, ahead=bool(seed % 2), hybrid=seed == 2)), tmp_path / "run")
    monkeypatch.setattr(job, "ALIKE_RATIO", -1)
    whole, large = whole_and_contracted(tmp_path / "run", monkeypatch)
    predicted = predicted_of(large)
    assert predicted is not None
    assert [group.ranks for group in predicted.groups] == [(rank,) for rank in range(RANKS)]
    assert predicted.grouping_error_ratio == 0
    one, other = Replay(whole), Replay(large)
    assert other.job is predicted
    assert recoverable(large, other) == recoverable(whole, one)
    for change in CHANGES:
        found, wanted = chopper.whatif(large, **change), chopper.whatif(whole, **change)
        assert found.reference_rank == wanted.reference_rank, change
        if "link" in change:  # which is estimated from the ranks in detail
            assert found.predicted_step_ns == pytest.approx(wanted.predicted_step_ns, rel=0.01)
        else:
            assert found.steps == wanted.steps, change
        assert (found.ranks_count, found.replayed_ranks_count) == (RANKS, RANKS)


@pytest.mark.parametrize("seed", range(2))
def test_a_job_of_ranks_that_are_alike_is_predicted_within_one_percent(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Six ranks differ by noise; two are late, each for another reason.
    some = plan(seed, ranks=2, noise_ratio=0.0003)
    write(simulate(replace(some, ranks=8)), tmp_path / "run")
    monkeypatch.setattr(job, "ALIKE_RATIO", 0.02)
    whole, large = whole_and_contracted(tmp_path / "run", monkeypatch)
    predicted = predicted_of(large)
    assert predicted is not None
    assert len(predicted.groups) < 8
    assert {0, 1} <= {group.leader for group in predicted.groups if len(group.ranks) == 1}
    assert 0 < predicted.grouping_error_ratio <= 0.02
    step_ns = sum(whole.step_time_ns()) / len(whole.step_time_ns())
    exact, grouped = recoverable(whole, Replay(whole)), recoverable(large, Replay(large))
    for cause, saving in exact.items():
        if saving.step_ns is not None:
            off_ns = abs(saving.step_ns - (grouped[cause].step_ns or 0))
            assert off_ns <= 0.01 * step_ns, cause
    for change in CHANGES:
        found, wanted = chopper.whatif(large, **change), chopper.whatif(whole, **change)
        assert found.predicted_step_ns == pytest.approx(wanted.predicted_step_ns, rel=0.01), change
    document = chopper.whatif(large, fix="straggler").to_dict()
    assert document["ranks_count"] == 8
    assert document["replayed_ranks_count"] == len(predicted.groups)
    assert document["grouping_error_ratio"] == predicted.grouping_error_ratio
    assert any("of all 8 ranks" in note for note in document["notes"])


def of_rank(rank: int, entered_ns: list[int], data_ns: list[int]) -> RankTimes:
    """A rank of two steps of 1000 ns, with a collective in the first and two in the second."""
    starts = np.array([0, 1000])
    causes_ns = np.stack([np.array(data_ns), 1000 - np.array(data_ns)], axis=1)
    instance, entered = np.array([3, 5, 8]), np.array(entered_ns)
    return RankTimes(rank, 7, np.array([0, 1]), starts, starts + 1000, instance, entered, causes_ns)


def test_ranks_are_grouped_by_arrivals_and_causes() -> None:
    # 0 and 1 differ by 3 and 1 ns in the second step, of 1000: 0.4 %. 2 is 20 late once, and 3
    # loses 10 elsewhere, on both sides of the balance: 2 %.
    groups = alike(
        [
            of_rank(0, [100, 1100, 1500], [0, 0]),
            of_rank(1, [100, 1103, 1499], [0, 0]),
            of_rank(2, [100, 1120, 1500], [0, 0]),
            of_rank(3, [100, 1100, 1500], [10, 0]),
        ]
    )
    assert [group.ranks for group in groups] == [(0, 1), (2,), (3,)]
    first = groups[0]
    assert (first.leader, first.error_ratio) == (0, 0.004)
    assert dict(zip(first.instance.tolist(), first.late_ns.tolist(), strict=True)) == {5: 3}


def test_a_real_job_of_eight_ranks_is_predicted_as_by_one_graph(
    traces_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, large = whole_and_contracted(traces_dir / "param/v100-dlrm-8ranks", monkeypatch)
    predicted = predicted_of(large)
    assert predicted is not None
    assert len(predicted.groups) == 8
    assert recoverable(large, Replay(large)) == recoverable(whole, Replay(whole))
    changes: list[dict[str, Any]] = [{"fix": "straggler"}, {"fix": "idle"}, {"faster": "gemm=2x"}]
    for change in changes:
        found, wanted = chopper.whatif(large, **change), chopper.whatif(whole, **change)
        assert found.steps == wanted.steps, change
