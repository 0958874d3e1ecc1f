"""The step time at the program's own speed, what tracing adds, and kinds of steps."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import chopper
from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.step_time import Outside
from chopper.analyzers.compare.gate import decide, parse
from chopper.analyzers.compare.runs import compare
from chopper.analyzers.findings import of_steps
from chopper.cli.analyze_ import to_csv, to_json
from chopper.reports import comparison, run, story, to_text
from chopper.reports.export import tables
from chopper.storage.manifest import Overhead
from chopper.views import view
from tests.analyzers.make import table
from tests.attributing import again, recoverable_of
from tests.comparing import T0_NS, attribution
from tests.made_runs import put_table

MS = 1_000_000


def recorded(
    lengths_ms: Sequence[float],
    traced: range,
    *,
    profiled: range | None = None,
    phases: Sequence[tuple[str, float, float]] = (),
) -> Attribution:
    """A run whose steps took so long; in the traced ones half of the time was idle."""
    windows = [round(lengths_ms[i] * MS) for i in traced]
    found = attribution(
        {
            "compute.ideal": [w // 2 for w in windows],
            "idle.preparation.python": [w - w // 2 for w in windows],
        },
        first=traced.start,
    )
    at = T0_NS
    rows = []
    for number, length in enumerate(lengths_ms):
        rows.append(
            {
                "number": number,
                "start_ns": at,
                "end_ns": at + round(length * MS),
                "source": "mark",
                "traced": number in traced,
                "profiled": None if profiled is None else number in profiled,
            }
        )
        at += round(length * MS)
    put_table(found.recording, 0, "step", table("step", rows))
    put_table(
        found.recording,
        0,
        "program_phase",
        table(
            "program_phase",
            [
                {
                    "name": n,
                    "tid": 1,
                    "start_ns": T0_NS + round(a * MS),
                    "end_ns": T0_NS + round(b * MS),
                }
                for n, a, b in phases
            ],
        ),
    )
    return again(found)


def codes(found: Attribution) -> dict[str, str]:
    return {f.code: f.message for f in of_steps(found.step_time(), found.findings)}


def test_the_median_of_untraced_steps_is_the_step_time() -> None:
    # Steps 2 to 4 were traced (30 ms), 5 was while the trace was written; the others
    # took 9 to 11 ms.
    found = recorded(
        [10, 9, 30, 30, 30, 90, 11, 10, 9, 10, 11, 10], range(2, 5), profiled=range(2, 6)
    )
    step = found.step_time()
    assert step.untraced is not None
    assert (step.untraced.median_ns, step.untraced.steps_count) == (10 * MS, 8)
    assert (step.traced_mean_ns, step.traced_count) == (30 * MS, 3)
    assert (step.tracing_ns, step.tracing_ratio) == (20 * MS, 2.0)
    low, high = step.tracing_ci95_ns or (0, 0)
    assert low < 20 * MS < high
    assert "200 % longer (30.0 ms instead of 10.0 ms)" in codes(found)["steps.slowed_by_tracing"]
    document = reports.document(found)
    assert document["step_time"]["headline_ns"] == 10 * MS
    assert document["observed_ns"] == sum(r.time_ns for r in found.leaves()) == 90 * MS
    shown = reports.render(found, "txt")
    assert "A step takes 10.0 ms" in shown
    assert "Profiler overhead (tracing)" in shown
    assert "12 steps, 3 traced" in shown
    assert "Step without a trace" in reports.render(found, "md")


def test_where_nothing_says_what_was_traced_the_traced_steps_are_the_step_time() -> None:
    for found in (
        recorded([30, 30, 30], range(3)),
        recorded([10, 30, 30, 30, 10], range(1, 4), profiled=range(1, 4)),
    ):
        step = found.step_time()
        assert step.untraced is None
        assert step.untraced_reason
        assert step.headline_ns == 30 * MS
        assert step.tracing_ns is None
        assert not codes(found)
        assert "A step takes 30.0 ms on average" in reports.render(found, "txt")
        assert "tracing itself" not in reports.render(found, "txt")


def test_steps_that_were_slow_around_the_trace_are_not_blamed_on_tracing() -> None:
    # The window lies in a slow stretch: its neighbours took 28 ms without a trace.
    found = recorded(
        [28, 28, 28, 30, 30, 30, 28, 28, 28] + [10] * 30, range(3, 6), profiled=range(3, 6)
    )
    assert found.step_time().nearby_ns == 28 * MS
    assert "steps.slowed_by_tracing" not in codes(found)
    shown = to_text.render(run.page(found, "txt"), width=300)
    assert "took 28.0 ms, so most of the difference is not due to tracing" in shown
    assert "Profiler overhead (tracing)" not in shown


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            [10, 10.4, 9.8, 10, 10, 10.4, 9.9, 10, 10.3],
            "tracing itself made no significant difference",
        ),
        (
            [20, 90, 10, 20, 40, 80, 30, 40, 60, 70],
            "the steps differ too much to tell what tracing added (95 % interval \u221250.0 ms",
        ),
        ([30, 31, 29, 9, 10, 11, 30, 31, 29], "they were shorter than the others, so the"),
    ],
    ids=["even", "uneven", "shorter"],
)
def test_tracing_that_costs_nothing_is_no_finding_and_no_row(
    lengths: list[float], said: str
) -> None:
    found = recorded(lengths, range(3, 6), profiled=range(3, 6))
    assert "steps.slowed_by_tracing" not in codes(found)
    shown = to_text.render(run.page(found, "txt"), width=400)
    assert said in shown
    assert "Step without a trace" in shown
    assert "Profiler overhead (tracing)" not in shown


def test_steps_that_differ_by_phase_and_that_no_window_caught() -> None:
    # As PPO: a rollout of 160 ms in each fourth step of 10 ms; traced were steps 5 and 6.
    lengths = [10, 10, 10, 170] * 4
    ends = [190, 390, 590, 790]
    found = recorded(
        lengths,
        range(5, 7),
        profiled=range(5, 7),
        phases=[("rollout", e, e + 160) for e in (30, 230, 430, 630)],
    )
    assert ends[0] == 190
    kinds = {k.name: k for k in found.step_time().kinds}
    assert kinds["training + rollout"].steps == (3, 7, 11, 15)
    assert kinds["training + rollout"].share_ratio == pytest.approx(680 / 800)
    assert kinds["training"].traced_steps == (5, 6)
    assert kinds["training"].untraced is not None
    assert kinds["training"].untraced.median_ns == 10 * MS
    said = codes(found)["steps.not_traced"]
    assert said.startswith("4 steps (training + rollout: 3,7,11,15) took 85.0 % of the time")
    assert said.endswith("record with --steps 11:12")
    assert "training + rollout" in reports.render(found, "txt")


def test_long_steps_without_phases_are_a_kind() -> None:
    found = recorded([*[10] * 15, 170] * 3, range(5, 7), profiled=range(5, 7))
    kinds = {k.name: k for k in found.step_time().kinds}
    assert kinds["long steps"].steps == (15, 31, 47)
    said = codes(found)["steps.not_traced"]
    assert said.startswith("3 steps (long steps: 15,31,47) took 53.1 % of the time")
    assert said.endswith("record with --steps 31:32")
    # Long, but little of the time: not a kind.
    few = recorded([10] * 40 + [40] + [10] * 10, range(5, 7), profiled=range(5, 7))
    assert {k.name for k in few.step_time().kinds} == {"training"}


def test_steps_that_come_in_flights_have_their_mean_as_step_time() -> None:
    # Four workers of a loader: three steps of 2 ms, then a wait of 92 ms for the next four batches.
    found = recorded([2, 2, 2, 94] * 6, range(4, 8), profiled=range(4, 8))
    step = found.step_time()
    assert {k.name for k in step.kinds} == {"training"}
    assert step.untraced is not None
    assert (step.untraced.median_ns, step.untraced.statistic) == (2 * MS, "mean")
    assert step.headline_ns == 25 * MS == step.traced_mean_ns
    assert "A step takes 25.0 ms" in reports.render(found, "txt")
    assert "is the mean of 20 steps without a trace, which are uneven" in story.tracing(step)


def test_steps_that_waited_for_a_core_are_not_a_kind() -> None:
    # Each sixteenth step took 60 ms, 50 of which its thread waited for a core.
    lengths = [*[10] * 15, 60] * 3
    found = recorded(lengths, range(5, 7), profiled=range(5, 7))
    assert "long steps" in {k.name for k in found.step_time().kinds}
    found = recorded(lengths, range(5, 7), profiled=range(5, 7))
    ends = found.joined[0].step["end_ns"].to_pylist()
    waited = 0
    rows = [
        {"time_ns": T0_NS, "span_ns": 0, "step": None, "tid": 1, "run_delay_ns": 0, "run_ns": 0}
    ]
    for number, end_ns in enumerate(ends):
        waited += 50 * MS if number % 16 == 15 else 0
        ran = end_ns - T0_NS - waited
        rows.append(
            {
                "time_ns": end_ns,
                "span_ns": 0,
                "step": number,
                "tid": 1,
                "run_delay_ns": waited,
                "run_ns": ran,
            }
        )
    put_table(found.recording, 0, "core_wait", table("core_wait", rows))
    found = again(found)
    step = found.step_time()
    assert {k.name for k in step.kinds} == {"training"}
    assert step.untraced is not None
    assert step.untraced.statistic == "median"


def test_traced_steps_of_several_kinds_are_attributed_by_kind() -> None:
    # Steps 2 to 5 were traced; 4 held an evaluation of 60 ms.
    lengths = [10, 10, 20, 20, 80, 20, 10, 10, 10, 10]
    found = recorded(lengths, range(2, 6), profiled=range(2, 6), phases=[("evaluation", 60, 120)])
    step = found.step_time()
    assert step.kind == "training"
    assert (step.traced_mean_ns, step.traced_count) == (20 * MS, 3)
    kinds = {k.name: k for k in step.kinds}
    assert kinds["training + evaluation"].traced_steps == (4,)
    assert sum(kinds["training + evaluation"].causes_ns.values()) == 80 * MS
    part = found.of_kind()
    assert part.all_steps is found
    assert part.observed_ns == 60 * MS == sum(r.time_ns for r in part.leaves())
    document = reports.document(part)
    assert document["observed_ns"] == 60 * MS
    causes_ns = {"compute.ideal": 70 * MS, "idle.preparation.python": 70 * MS}
    assert document["all_kinds"]["causes_ns"] == causes_ns
    assert document["all_kinds"]["observed_ns"] == 140 * MS
    shown = reports.render(part, "txt")
    assert "Observed" in shown
    row = next(line for line in shown.splitlines() if line.startswith("Observed"))
    assert "20.0 ms" in row
    assert part.of_kind().windows.equals(part.windows)


def test_every_answer_is_of_the_steps_that_the_step_time_is_of(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64)
    with chopper.profile(tmp_path / "run", steps="4:8") as prof:
        for i in range(18):
            if i in (6, 13):
                with prof.phase("evaluation"), torch.no_grad():
                    for _ in range(50):
                        model(torch.randn(256, 64))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    found = pipeline.attribute(tmp_path / "run")
    whole = found.all_steps
    numbers = found.windows["number"].to_pylist()
    assert set(numbers) <= {4, 5, 7}  # a step that lost its core for long is not among them
    assert (found.steps, whole.steps) == (len(numbers), 4)
    assert found.of_kind().windows.equals(found.of_steps(numbers).windows)
    assert found.of_steps(range(8)) is whole
    check_kinds(found)
    check_outside(found)
    # A product for each layer's output and its weight's gradient; the first input has none.
    flop_of_a_step = (3 * 4 - 1) * 2 * 32 * 64 * 64
    row = view(found, "utilization").to_pylist()[0]
    assert row["model_flop"] == len(numbers) * flop_of_a_step
    assert row["observed_ns"] == found.observed_ns
    assert row["time_ns"] == round(found.observed_ns * found.step_time().scale)
    calls = found.links[0]["step_index"].drop_null().unique().to_pylist()
    assert sorted(calls) == sorted(found.windows["step_index"].to_pylist())
    # The causes stand beside the observed time that they sum to, in every form.
    causes = {row.id: row.time_ns for row in found.leaves()}
    document = to_json(found, "phase", None)
    phases = {g["phase"]: g["time_ns"] for g in document["groups"]}
    assert sum(phases.values()) == found.observed_ns
    assert "evaluation" not in phases
    in_all = {g["phase"]: g["time_ns"] for g in document["all_kinds"]["groups"]}
    assert in_all["evaluation"] > 0
    assert sum(in_all.values()) == whole.observed_ns
    rows = csv.DictReader(io.StringIO(to_csv(found, None, None)))
    in_csv = {row["id"]: int(row["time_ns"]) for row in rows if row["id"] in causes}
    assert in_csv == causes
    assert {c["id"]: c["time_ns"] for c in document["causes"] if c["id"] in causes} == causes
    assert sum(causes.values()) == document["observed_ns"] == sum(found.step_time_ns())
    assert sum(document["all_kinds"]["causes_ns"].values()) == whole.observed_ns
    exported = dict(tables(found))
    total = pc.sum(exported["piece"]["time_ns"]).as_py()
    assert total == whole.observed_ns == sum(e - s for s, e in bounds(exported["window"]))
    # In SQL and in files, tables are of all traced steps, and views of those of the selection.
    selected = "FROM piece JOIN selection USING (rank, step_index) WHERE in_step_time"
    sums = chopper.query(found, f"SELECT sum(time_ns) AS time_ns {selected}").arrow().to_pylist()
    assert sums == [{"time_ns": found.observed_ns}]
    joined = """
    SELECT sum(dur_ns) AS time_ns FROM device_event JOIN event_link USING (rank, row)
    JOIN selection USING (rank, step_index)
    """
    kernels = (
        chopper.query(found, "SELECT sum(time_ns) AS time_ns FROM kernels").arrow().to_pylist()
    )
    assert chopper.query(found, f"{joined} WHERE in_step_time").arrow().to_pylist() == kernels
    assert chopper.query(found, joined).arrow().to_pylist()[0]["time_ns"] > kernels[0]["time_ns"]
    assert exported["views/steps"].num_rows == 4
    # The replay is of all steps, since they follow each other; what it answers is of these.
    answer = chopper.whatif(found, fix="idle.preparation")
    assert set(answer.steps) == set(numbers)
    assert answer.observed_step_ns == found.observed_ns / len(numbers)
    assert len(answer.attribution.windows) == len(numbers)
    assert any("not counted" in note for note in answer.notes)
    back = recoverable_of(found)
    assert 0 < (back["compute"].step_ns or 0) <= answer.observed_step_ns
    path_ns = sum(time for _, _, time in chopper.whatif(found).path)
    assert path_ns == pytest.approx(found.observed_ns, rel=0.01)


def bounds(windows: pa.Table) -> Iterator[tuple[int, int]]:
    return zip(*(windows[c].to_pylist() for c in ("start_ns", "end_ns")), strict=True)


def test_one_long_step_does_not_decide_what_tracing_added() -> None:
    """Traced steps of 14, 13, 38, 14 and 15 ms beside ten of 9 to 11.

    The mean of the traced ones, 18.8 ms, has an interval of 13 ms to either side.
    """
    lengths = [10, 9, 11, 10, 10, 14, 13, 38, 14, 15, 10, 9, 11, 10, 10]
    found = recorded(lengths, range(5, 10), profiled=range(5, 10))
    step = found.step_time()
    assert (step.tracing_ns, step.is_slowed_by_tracing) == (4 * MS, True)
    low, high = step.tracing_ci95_ns or (0, 0)
    assert 2 * MS <= low < 4 * MS < high
    assert "40.0 % longer (14.0 ms instead of 10.0 ms)" in codes(found)["steps.slowed_by_tracing"]
    shown = " ".join(to_text.render(run.page(found, "txt"), width=800).split())
    assert "tracing itself added 4.00 ms (40.0 %" in shown
    assert "the rest of the difference is due to single long steps" in shown


def test_the_interval_of_tracing_beside_uneven_steps_is_of_their_mean() -> None:
    # Loader workers deliver four batches at once: the mean of the untraced steps is 25 ms.
    lengths = [10, 10, 10, 70] * 3 + [25, 26, 24, 25] + [10, 10, 10, 70] * 3
    step = recorded(lengths, range(12, 16), profiled=range(12, 16)).step_time()
    assert step.untraced is not None
    assert (step.untraced.statistic, step.tracing_ns) == ("mean", 0)
    low, high = step.tracing_ci95_ns or (0, 0)
    assert low < -5 * MS < 5 * MS < high


def test_first_steps_that_were_slow_are_neither_headline_nor_finding() -> None:
    found = recorded([900, 10, 10, 10, 10, 10, 10, 10], range(4, 6), profiled=range(4, 6))
    step = found.step_time()
    assert step.untraced is not None
    assert step.untraced.median_ns == 10 * MS
    assert {k.name for k in step.kinds} == {"training", "first steps"}
    assert "steps.not_traced" not in codes(found)


def test_kinds_of_steps_of_a_trace_are_judged_by_their_windows() -> None:
    # The host ran ahead: its first step took 60 ms, and each of the device's took 20 ms.
    found = recorded([20] * 6, range(6))
    rows = found.joined[0].step.to_pylist()
    for row, start, end in zip(
        rows, [0, 60, 62, 64, 66, 68], [60, 62, 64, 66, 68, 70], strict=True
    ):
        row["start_ns"], row["end_ns"] = T0_NS + start * MS, T0_NS + end * MS
    put_table(found.recording, 0, "step", table("step", rows))
    found = again(found)
    (kind,) = found.step_time().kinds
    assert (kind.name, kind.time_ns, kind.share_ratio) == ("training", 120 * MS, 1.0)


def test_nested_phases_after_the_last_step_share_their_time() -> None:
    # 100 ms after the last step, all of it rollout; generation takes 60 of it, evaluation 10.
    phases = [("generation", 70, 130), ("evaluation", 110, 120), ("rollout", 55, 160)]
    found = recorded([10] * 6, range(1, 3), profiled=range(1, 3), phases=phases)
    (part,) = found.recording.manifest.ranks
    part.start_ns, part.end_ns = T0_NS, T0_NS + 160 * MS
    found = again(found)
    outside = found.step_time().outside
    assert outside is not None
    assert outside.after_ns == sum(outside.phases_ns.values()) == 100 * MS
    assert outside.phases_ns == {
        "evaluation": 10 * MS,
        "generation": 50 * MS,
        "rollout": 40 * MS,
    }


def test_time_after_the_last_step_is_a_finding_with_its_phases() -> None:
    found = recorded([10] * 8, range(3, 6), profiled=range(3, 6), phases=[("evaluation", 80, 110)])
    part = found.recording.manifest.ranks[0]
    part.start_ns, part.end_ns = T0_NS - 40 * MS, T0_NS + 125 * MS
    part.overhead = Overhead(setup_ns=40 * MS, close_ns=5 * MS)
    found = again(found)
    assert found.step_time().outside == Outside(40 * MS, 45 * MS, 165 * MS, {"evaluation": 30 * MS})
    assert codes(found)["run.outside_steps"] == (
        "40.0 ms of the program's 120 ms (33.3 %) follow the last step (of them evaluation "
        "30.0 ms); another 45.0 ms, in which chopper started, wrote traces and shut down, "
        "are not counted"
    )


def check_outside(found: Attribution) -> None:
    """The steps, what follows the last one, and chopper's own work are all of the recording."""
    (part,) = found.recording.manifest.ranks
    outside, overhead = found.step_time().outside, part.overhead
    assert outside is not None
    assert overhead is not None
    assert outside.recording_ns == (part.end_ns or 0) - (part.start_ns or 0)
    steps_ns = sum(e - s for s, e in bounds(found.joined[0].step))
    assert outside.after_ns + outside.profiler_ns + steps_ns == outside.recording_ns
    assert outside.profiler_ns >= (overhead.close_ns or 0) > 0


def check_kinds(found: Attribution) -> None:
    step = found.step_time()
    kinds = {k.name: k for k in step.kinds}
    assert kinds["training + evaluation"].steps == (6, 13)
    assert step.kind == "training"
    assert step.traced_count == 3
    assert step.untraced is not None
    assert step.untraced.steps_count >= 5
    lengths = [e - s for s, e in bounds(found.joined[0].step)]
    untraced = [lengths[n] for n in kinds["training"].steps if not 3 <= n <= 8]
    assert min(untraced) <= step.untraced.median_ns <= max(untraced)
    assert kinds["training + evaluation"].time_ns == lengths[6] + lengths[13]


def test_runs_that_traced_an_evaluation_are_compared_by_their_training_steps() -> None:
    # The step with the evaluation is A's first traced one and B's last.
    lengths_ms = [10, 10, 80, 20, 20, 20, 80, 10, 10, 10]
    a = recorded(lengths_ms, range(2, 6), profiled=range(2, 6), phases=[("evaluation", 30, 90)])
    b = recorded(lengths_ms, range(3, 7), profiled=range(3, 7), phases=[("evaluation", 170, 230)])
    found = compare(a, b)
    assert (found.step.a_ns, found.step.b_ns) == (20 * MS, 20 * MS)
    assert (found.a.steps, found.b.steps) == (3, 3)
    assert [note for note in found.notes if "evaluation" in note] == [
        "A: 1 traced step (training + evaluation: 2) excluded: the compared steps are of training",
        "B: 1 traced step (training + evaluation: 6) excluded: the compared steps are of training",
    ]
    whole = compare(a, b, all_steps=True)
    assert (whole.a.steps, whole.step.a_ns) == (4, 35 * MS)
    # Where the step times are of different kinds, their medians say nothing of each other.
    only = recorded([10, 10, 80, 80, 10, 80, 80, 80], range(2, 4), profiled=range(2, 4),
                    phases=[("evaluation", 20, 180), ("evaluation", 190, 430)])  # fmt: skip
    assert only.step_time().kind == "training + evaluation"
    other = compare(a, only)
    assert other.untraced is None
    assert (
        "the compared steps are of training in A and of training + evaluation in B" in other.notes
    )


def test_runs_are_compared_by_their_steps_without_a_trace_as_well() -> None:
    # Traced steps of A and B take the same; without a trace B takes twice as long.
    a, b = (
        recorded(
            [n, n + 1, n - 1, n, 30, 30, 30, n, n + 1, n - 1],
            range(4, 7),
            profiled=range(4, 7),
        )
        for n in (10, 20)
    )
    found = compare(a, b, allow_different=True)
    assert found.untraced is not None
    assert (found.untraced.a_ns, found.untraced.b_ns) == (10 * MS, 20 * MS)
    assert found.step.difference_ns == 0
    assert decide(found, parse("untraced>+50%")).failed
    assert not decide(found, parse("untraced>+150% or step>+5%")).failed
    assert "The step time, without a trace, went from 10.0 ms to 20.0 ms" in comparison.render(
        found, "txt"
    )
    without = compare(a, recorded([30, 30, 30], range(3)), allow_different=True)
    assert without.untraced is None
    assert decide(without, parse("untraced>+5%")).decisions[0].outcome == "undecided"
