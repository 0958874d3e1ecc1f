"""The first sentence names the planted cause, and is the same wherever it is read."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.step_time import FIRST, Outside, StepKind
from chopper.causes import LEAVES
from chopper.reports import render
from chopper.reports.story import Story
from chopper.reports.verdict import class_of, verdict
from tests.attributing import verdict_of
from tests.kineto_writer import Trace
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Dose, Plan
from tests.known_causes.model.writer import write

MS = 1_000_000
OWN = Path(__file__).parents[1] / "golden" / "own"


def modelled(folder: Path, plan: Plan) -> Attribution:
    write(simulate(plan), folder)
    return pipeline.attribute(folder)


@pytest.mark.parametrize(
    ("name", "plan", "start"),
    [
        ("compute", Plan(), "Compute-bound: "),
        ("memory", Plan(vector=Dose(20)), "Memory-bound: "),
        ("data", Plan(data=Dose(30 * MS)), "Data-bound: "),
        ("launches", Plan(dispatch=Dose(MS)), "Launch-bound: "),
        ("host_python", Plan(python=Dose(10 * MS)), "Host-bound: "),
        ("garbage_collection", Plan(collection=Dose(10 * MS)), "Bound by garbage collection: "),
        ("allocator", Plan(allocator=Dose(10 * MS)), "Bound by memory allocation: "),
        ("straggler", Plan(slow=Dose(8, ranks=(1,))), "Straggler-bound: "),
        ("communication", Plan(link=Dose(40)), "Communication-bound: "),
        ("copies", Plan(copy=Dose(20 * MS)), "Transfer-bound: "),
    ],
)
def test_the_planted_cause_comes_first(tmp_path: Path, name: str, plan: Plan, start: str) -> None:
    found = verdict_of(modelled(tmp_path / "run", plan))
    assert (found.name, found.unit) == (name, "step")
    assert found.sentence.startswith(start)
    assert (found.share_ratio or 0) > 1 / 3


def test_a_third_of_the_time_that_can_be_got_back_comes_before_compute(tmp_path: Path) -> None:
    """Data takes 12 ms beside 18 ms of the same job: compute takes longer, and is no bound."""
    found = verdict_of(modelled(tmp_path / "run", Plan(data=Dose(12 * MS))))
    assert found.sentence.startswith("Data-bound: ")
    assert " is computing" in found.sentence


def test_good_news_are_a_verdict(tmp_path: Path) -> None:
    sentence = verdict_of(modelled(tmp_path / "run", Plan(ahead=True))).sentence
    assert "of the step is spent computing" in sentence
    assert "of the communication is hidden" in sentence
    assert "at peak, model math would take" in sentence


def test_every_leaf_belongs_to_a_class() -> None:
    assert all(class_of(leaf) for leaf in LEAVES)
    assert class_of("compute.vector.excess") == "memory"
    assert class_of("communication.wait") == "straggler"
    assert class_of("idle.preparation.gc") == "garbage_collection"


def test_all_forms_say_the_same(tmp_path: Path) -> None:
    run = modelled(tmp_path / "run", Plan(data=Dose(30 * MS)))
    sentence = verdict_of(run).sentence
    assert json.loads(render(run, "json"))["verdict"]["sentence"] == sentence
    assert reports.document(run)["verdict"]["largest_causes"][0]["cause"] == "idle.preparation.data"
    one_line = {format: " ".join(render(run, format).split()) for format in ("txt", "md")}
    assert sentence in one_line["txt"]
    assert sentence in one_line["md"]
    assert sentence in render(run, "html")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("random", "The power limit is already the largest that the board allows (700 W)"),
        ("zeros", "What the driver names stayed below its limit (see the findings)"),
    ],
)
def test_advice_that_the_recording_rules_out_is_in_no_form(data: str, said: str) -> None:
    """At 707 of 700 W there is no higher limit to set; at 446 W it is not the limit that holds."""
    run = pipeline.attribute(OWN / f"dvfs_{data}")
    for format in ("txt", "md", "html", "json"):
        text = " ".join(html.unescape(render(run, format)).split())
        assert said in text, format
        assert "Raise the power limit" not in text, format
        assert ("power cap at 64.5 % of the limit" in text) == (data == "zeros"), format


def test_where_no_action_is_certain_the_largest_causes_follow(tmp_path: Path) -> None:
    """One step: waiting for the host may be its first iteration's alone."""
    trace = Trace()
    trace.step(0, 0, 10 * MS)
    op = trace.op("aten::mm", 1 * MS, 9 * MS)
    for at in (2 * MS, 8 * MS):
        trace.launch("gemm", at, 10_000, kernel_at=at + 20_000, kernel_for=100_000, op=op)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    text = " ".join(render(pipeline.attribute(tmp_path / "trace.json"), "txt").split())
    assert "No known pattern" not in text
    assert "The largest causes - Framework dispatch" in text


def _loop(run: Attribution, **of_loop: Any) -> str:
    """Return the sentence about a run whose loop has other steps and phases."""
    story = Story(run)
    story.step = replace(story.step, **of_loop)
    return verdict(story, "not replayed").sentence


def _kind(name: str, steps: int, time_ns: int, **causes_ns: int) -> StepKind:
    return StepKind(
        name=name,
        steps=tuple(range(steps)),
        traced_steps=(),
        untraced=None,
        traced_mean_ns=None,
        time_ns=time_ns,
        share_ratio=0.0,
        causes_ns=causes_ns,
    )


def test_what_lies_between_the_steps_is_of_the_loop(tmp_path: Path) -> None:
    """40 steps of the model's length, and evaluation that takes three times as long as they."""
    run = modelled(tmp_path / "run", Plan())
    step_ns = run.step_time().headline_ns or 0
    training = _kind("training", 40, 40 * step_ns)
    said = _loop(run, kinds=(training,), phases_ns={}, outside=Outside(0, 0, 0, {}))
    assert said.startswith("Compute-bound: ")
    outside = Outside(120 * step_ns, 0, 200 * step_ns, {"evaluation": 120 * step_ns})
    said = _loop(run, kinds=(training,), outside=outside)
    assert said.startswith("Evaluation takes 75.0 % of the recorded loop, which needs ")
    assert "Compute-bound: " in said
    within = _kind("training + checkpoint", 40, 100 * step_ns)
    said = _loop(run, kinds=(within,), phases_ns={"checkpoint": 60 * step_ns}, outside=None)
    assert said.startswith("Checkpoints take 60.0 % of the recorded loop, ")


@pytest.mark.parametrize(("steps", "begins"), [(39, "Start-up takes 6"), (5, "Compute-bound: ")])
def test_start_up_counts_in_recordings_of_more_than_a_few_steps(
    tmp_path: Path, steps: int, begins: str
) -> None:
    run = modelled(tmp_path / "run", Plan())
    step_ns = run.step_time().headline_ns or 0
    training = _kind("training", steps, steps * step_ns)
    first = _kind(FIRST, 1, 2 * steps * step_ns, **{"idle.preparation.compile": 9, "copy.other": 1})
    said = _loop(run, kinds=(training, first), phases_ns={}, outside=None)
    assert said.startswith(begins)
    assert ("90.0 % of it compilation" in said) == (steps == 39)


def test_long_steps_that_were_not_traced_are_named_with_what_to_record(tmp_path: Path) -> None:
    run = modelled(tmp_path / "run", Plan())
    step_ns = run.step_time().headline_ns or 0
    kinds = (_kind("training", 36, 36 * step_ns), _kind("long steps", 4, 160 * step_ns))
    said = _loop(run, kinds=kinds, phases_ns={}, outside=None)
    assert said.startswith("Cannot be told: 79.6 % of the recorded loop is in long steps")
    assert "`--steps`" in said


def test_what_makes_steps_long_is_said_where_one_was_traced(tmp_path: Path) -> None:
    run = modelled(tmp_path / "run", Plan())
    step_ns = run.step_time().headline_ns or 0
    training = _kind("training", 36, 36 * step_ns)
    long = _kind("long steps", 4, 160 * step_ns, **{"idle.preparation.python": 9, "copy.other": 1})
    alike = replace(long, traced_steps=(3,), traced_mean_ns=41 * step_ns)
    said = _loop(run, kinds=(training, alike), phases_ns={}, outside=None)
    assert said.startswith("Single long steps take 79.6 % of the recorded loop: 4 of 40, ")
    assert "90.0 % of it user Python" in said
    short = replace(long, traced_steps=(3,), traced_mean_ns=4 * step_ns)
    said = _loop(run, kinds=(training, short), phases_ns={}, outside=None)
    assert said.startswith("Cannot be told: ")


def test_a_checkpoint_is_not_blamed_for_what_else_its_step_does(tmp_path: Path) -> None:
    run = modelled(tmp_path / "run", Plan())
    step_ns = run.step_time().headline_ns or 0
    kinds = (
        _kind("training", 36, 36 * step_ns),
        _kind("training + checkpoint", 4, 164 * step_ns),
    )
    said = _loop(run, kinds=kinds, phases_ns={"checkpoint": 10 * step_ns}, outside=None)
    assert said.startswith("Cannot be told: 75.0 % of the recorded loop is in long steps")


def test_one_long_call_of_the_driver_is_start_up(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1_000 * MS)
    op = trace.op("aten::mm", MS, 990 * MS)
    for index in range(20):
        at, long = (10 + 40 * index) * MS, 700 * MS if index == 3 else 10_000
        if index > 3:
            at += 150 * MS // 20 * index + 660 * MS - 120 * MS
        trace.launch("gemm", at, long, kernel_at=at + long, kernel_for=MS, op=op)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    found = verdict_of(pipeline.attribute(tmp_path / "trace.json"))
    assert found.name == "startup"
    assert "one cudaLaunchKernel call of 700 ms" in found.sentence
    assert "of the rest" in found.sentence


def test_a_trace_that_is_cut_says_so_first(tmp_path: Path) -> None:
    trace = Trace()
    for number in range(3):
        at = number * 10 * MS
        trace.step(number, at, 10 * MS)
        op = trace.op("aten::mm", at + MS, 8 * MS)
        trace.launch("gemm", at + 2 * MS, 9_000, kernel_at=at + 3 * MS, kernel_for=MS, op=op)
    whole = trace.encode()
    (tmp_path / "trace.json").write_bytes(whole[: whole.rindex(b'"dur"')])
    sentence = verdict_of(pipeline.attribute(tmp_path / "trace.json")).sentence
    assert sentence.startswith("The trace is cut short and lost kernel records of whole steps; ")


def test_a_run_without_a_trace_cannot_be_told(tmp_path: Path) -> None:
    log = "timestamp, index, power.draw [W]\n2026/11/27 10:00:00.000, 0, 300.00 W\n"
    (tmp_path / "power.csv").write_text(log)
    found = verdict_of(pipeline.attribute(tmp_path / "power.csv"))
    assert (found.name, found.share_ratio) == ("unknown", None)
    assert found.sentence.startswith("Cannot be told: there is telemetry but no kernel trace.")
