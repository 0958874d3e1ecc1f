"""The same question has one answer, whatever command is asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.step_time import Spread, StepTime
from chopper.analyzers.compare.runs import compare
from chopper.analyzers.replay.replay import Replay
from chopper.reports import comparison as comparison_report
from chopper.reports import run as run_report
from chopper.reports import to_text
from chopper.reports.page import Page
from chopper.views import view
from tests.kineto_writer import Trace
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Dose, Plan
from tests.known_causes.model.writer import write

OWN = sorted(path for path in (Path(__file__).parent / "golden" / "own").iterdir() if path.is_dir())


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_the_step_time_is_the_same_in_all_results(path: Path) -> None:
    """Of analyze, whatif, compare and JSON; of unequal ranks and of several kinds of steps."""
    run = pipeline.attribute(path)
    time = run.step_time()
    windows = run.windows.num_rows
    assert time.traced_mean_ns == pytest.approx(run.observed_ns / windows, abs=1)
    beside = compare(run, run)
    assert beside.step.a_ns == run.observed_ns // windows
    if time.untraced is not None:
        assert beside.untraced is not None
        assert beside.untraced.a_ns == time.headline_ns
        assert beside.unit == "traced step"
    try:
        predicted = chopper.whatif(run)
    except chopper.ChopperError as exc:
        pytest.skip(str(exc))
    if predicted.pace == 1:
        assert predicted.observed_step_ns == pytest.approx(time.traced_mean_ns, abs=1)
    else:
        # Of a step without a trace: the pages say so.
        assert time.untraced is not None
        assert predicted.untraced_step_ns == time.untraced.value_ns
        assert predicted.observed_step_ns <= (time.traced_mean_ns or 0)
    document = json.loads(json.dumps(predicted.to_dict()))
    assert document["observed_step_ns"] == pytest.approx(predicted.observed_step_ns, abs=1)


def test_compare_says_what_to_try_and_what_the_pattern_costs_the_other_run(tmp_path: Path) -> None:
    runs = []
    for name, stall_ns in (("a", 2_000_000), ("b", 5_000_000), ("none", 0)):
        write(simulate(Plan(data=Dose(stall_ns))), tmp_path / name)
        runs.append(pipeline.attribute(tmp_path / name))
    of_a, of_b = (_tried(runs[0], runs[i])[0] for i in (0, 1))
    assert of_b["detector"] == "data_loading"
    assert (
        of_b["recoverable_step_a_ns"] == of_a["recoverable_step_ns"] == pytest.approx(2e6, rel=0.03)
    )
    text = _text(comparison_report.page(compare(runs[0], runs[1])))
    assert text.index("What to try first in B") < text.index("Where the runs differ")
    assert "; in A 2.0" in text
    text = _text(comparison_report.page(compare(runs[2], runs[1])))
    assert "; not seen in A" in text
    assert _tried(runs[1], runs[2]) == []


def test_compare_sets_what_a_replay_predicted_beside_what_was_measured(tmp_path: Path) -> None:
    runs = []
    for name, stall_ns in (("5 ms", 5_000_000), ("2 ms", 2_000_000), ("none", 0)):
        write(simulate(Plan(data=Dose(stall_ns))), tmp_path / name)
        runs.append(pipeline.attribute(tmp_path / name))
    taken = compare(runs[0], runs[2])
    document: Any = comparison_report.to_json(taken, None)
    prediction = document["predictions"][0]
    assert prediction["detector"] == "data_loading"
    assert prediction["predicted_difference_ns"] == pytest.approx(-5e6, rel=0.03)
    assert document["step"]["difference_ns"] == pytest.approx(-5e6, rel=0.03)
    text = " ".join(_text(comparison_report.page(taken)).split())
    assert re.search(
        r"Predicted by a replay of A: −(4\.[89]|5\.[01])\d? ms \(.*\)\. Measured: −", text
    )
    # Neither a pattern that is still there was taken, nor one that A never had.
    for a, b in ((runs[0], runs[1]), (runs[2], runs[0])):
        document = comparison_report.to_json(compare(a, b), None)
        assert document["predictions"] == []
        assert "Predicted by" not in _text(comparison_report.page(compare(a, b)))


def _tried(a: Attribution, b: Attribution) -> list[dict[str, Any]]:
    tried: Any = comparison_report.to_json(compare(a, b), None)["actions"]
    return [*tried]


def _text(page: Page) -> str:
    """Return a page as text in one line."""
    return " ".join(to_text.render(page, width=100).split())


def _slowed(run: Attribution, tracing_ratio: float) -> Attribution:
    """The run, with untraced steps that its traced ones are so much longer than."""
    traced = run.step.traced_mean_ns
    assert traced is not None
    untraced_ns = round(traced / (1 + tracing_ratio))
    lengths = tuple(untraced_ns + i for i in (-1, 0, 0, 1))
    spread = Spread(untraced_ns, untraced_ns, lengths[0], lengths[-1], 4, lengths, "median")
    step: StepTime = replace(
        run.step,
        untraced=spread,
        untraced_reason=None,
        tracing_ns=traced - untraced_ns,
        tracing_ci95_ns=(traced - untraced_ns - 10, traced - untraced_ns + 10),
    )
    return replace(run, step=step)


def test_uneven_steps_are_compared_by_the_means_of_both_runs(tmp_path: Path) -> None:
    write(simulate(Plan(data=Dose(5_000_000))), tmp_path)
    run = _slowed(pipeline.attribute(tmp_path), 0.25)
    even = run.step.untraced
    assert even is not None
    lengths = (100, 100, 100, 190, 100, 100, 100, 190)
    even = replace(even, median_ns=100, mean_ns=122, lengths_ns=lengths)
    uneven = replace(even, statistic="mean")
    runs = [replace(run, step=replace(run.step, untraced=spread)) for spread in (even, uneven)]
    found = compare(*runs)
    assert found.untraced is not None
    # Of the same steps: no change, though the step times are 100 and 122.
    assert found.untraced.difference_ns == 0
    assert not found.untraced.told
    assert "A: its untraced steps are compared by their mean" in found.notes[0]


def test_times_are_scaled_where_tracing_slows_the_steps(tmp_path: Path) -> None:
    write(simulate(Plan(data=Dose(5_000_000))), tmp_path)
    run = pipeline.attribute(tmp_path)
    slowed, hardly = _slowed(run, 0.25), _slowed(run, 0.09)
    assert slowed.step.is_slowed_by_tracing
    assert not hardly.step.is_slowed_by_tracing
    text = _text(run_report.page(slowed, "txt"))
    assert "Scaled" in text
    # 5.05 ms of a traced step, scaled by 1/1.25.
    assert "5.05 ms recoverable" in text
    assert "4.04 ms without tracing" in text
    assert "Scaled" not in _text(run_report.page(hardly, "txt"))


def _mixed_ranks(folder: Path) -> None:
    """Write traces of three ranks, the last of which has no step mark."""
    folder.mkdir()
    for rank in range(3):
        made = Trace(rank=rank, world=3)
        for step in range(4):
            at = 40_000 * step
            if rank < 2:
                made.step(step, at, 40_000)
            op = made.op("aten::mm", at + 1_000, 1_000, shapes=[[64, 32], [32, 64]])
            made.launch("gemm", at + 1_200, 200, kernel_at=at + 2_000, kernel_for=38_000, op=op)
        (folder / f"rank{rank}.json").write_bytes(made.encode())


def test_a_rank_without_numbered_steps_is_left_out_of_every_step_time(tmp_path: Path) -> None:
    _mixed_ranks(tmp_path / "mixed")
    run = pipeline.attribute(tmp_path / "mixed")
    numbered = run.windows["number"].to_pylist()
    assert numbered == [0, 1, 2, 3] * 2
    step_ns = round(run.observed_ns / 8)
    # The first step begins with the host, 2 µs before its kernel.
    assert step_ns == 40_000
    time = run.step_time()
    assert time.traced_mean_ns == step_ns
    assert time.kind == "training"
    assert chopper.whatif(run).observed_step_ns == pytest.approx(step_ns, abs=1)
    replay = Replay(run)
    scenario = replay.scenario()
    scenario.uncoupled = True
    # The quicker of two: a rank without counted windows is no measure of the others.
    assert replay.reference(scenario.solve()) in (0, 1)
    assert any("ranks without numbered steps" in note for note in replay.notes)
    for all_steps in (False, True):
        beside = compare(run, run, all_steps=all_steps)
        assert beside.step.a_ns == step_ns
        assert beside.a.windows == 8
    assert sum(run.step_time_ns()) == 4 * step_ns
    rows = [r for r in view(run, "utilization").to_pylist() if r["ceiling"] == "theoretical"]
    assert {r["rank"] for r in rows} == {None, 0, 1}
    assert all(r["mfu_ratio"] for r in rows)
    path = view(run, "critical_path").to_pylist()
    assert sum(row["time_ns"] for row in path) == pytest.approx(4 * step_ns, rel=0.01)
    # It is named, and its nanoseconds are closed.
    left_out = [f for f in run.findings if f.code == "steps.unnumbered"]
    assert [f.rank for f in left_out] == [2]
    whole = run.all_steps
    window = {w["rank"]: w for w in whole.windows.to_pylist()}[2]
    assert window["number"] is None
    alone = {rank.rank: rank for rank in whole.ranks}[2]
    assert alone.observed_ns == window["end_ns"] - window["start_ns"]
    assert sum(row.time_ns for row in whole.leaves()) == run.observed_ns + alone.observed_ns
    assert sum(row.time_ns for row in run.leaves()) == run.observed_ns
    text = _text(run_report.page(run, "txt"))
    assert "left out of the step time" in text
    assert "rank 2 0 ns" not in text
    assert _text(run_report.page(run, "html"))
