"""What stands below the verdict: a ratio to the ideal only where most of the math is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.reports.story import Story, step_sentences
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Plan
from tests.known_causes.model.writer import write


@pytest.mark.parametrize(("covered", "told"), [(0.81, True), (0.79, False), (None, True)])
def test_a_ratio_to_the_ideal_needs_most_of_the_math(
    tmp_path: Path, covered: float | None, told: bool
) -> None:
    write(simulate(Plan()), tmp_path / "run")
    run = pipeline.attribute(tmp_path / "run")
    run = replace(run, coverage=run.coverage | {"math_with_peak_ratio": covered})
    headline, detail = step_sentences(Story(run))
    assert ("× the ideal" in detail) == told
    assert ("known for 79.0 % of its math" in headline) == (not told)
    assert "at peak" in (headline if told else detail)


@pytest.mark.parametrize(("share", "told"), [(0.011, True), (0.009, False)])
def test_a_step_of_hardly_any_math_has_no_ratio(tmp_path: Path, share: float, told: bool) -> None:
    write(simulate(Plan()), tmp_path / "run")
    story = Story(pipeline.attribute(tmp_path / "run"))
    story.ideal_per_window_ns = round(share * story.observed_per_window_ns)
    headline, detail = step_sentences(story)
    assert "at peak, its math would take" in headline
    assert ("× the ideal" in detail) == told
    assert ("no ratio to the ideal is shown" in detail) == (not told)


def test_a_trace_whose_math_is_mostly_unknown_has_no_ratio(traces_dir: Path) -> None:
    run = pipeline.attribute(
        traces_dir / "tracelens/mi300x-xdit-flux1-inference-python-stacks-large.json.gz"
    )
    story = Story(run)
    headline, detail = step_sentences(story)
    assert "known for 12.2 % of its math" in headline
    assert "×" not in headline + detail
    assert story.ceilings[1].startswith("MFU at least 1.8 %")
