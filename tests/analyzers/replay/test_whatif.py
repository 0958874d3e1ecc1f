"""``chopper.whatif`` and its command: what is asked, what comes back, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import chopper
from benchmarks.predictions import synthetic_cases
from benchmarks.replay import table
from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.replay.whatif_options import causes_named, changes_of
from chopper.cli import cli
from chopper.errors import InputError, UsageError
from tests.analyzers import make
from tests.analyzers.replay.make import call, run, tables
from tests.attributing import recoverable_of
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Clock, Dose, Plan
from tests.known_causes.model.writer import write
from tests.test_real_traces import real_traces


@pytest.fixture(scope="module")
def slow_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    write(simulate(Plan(data=Dose(10e6))), folder)
    return folder


@pytest.fixture(scope="module")
def attribution(slow_data: Path) -> Attribution:
    return pipeline.attribute(slow_data)


def test_the_causes_of_the_changed_run_are_its_step_time(attribution: Attribution) -> None:
    found = chopper.whatif(attribution, fix="data")
    steps = found.attribution.step_time_ns()
    assert sum(steps) / len(steps) == pytest.approx(found.predicted_step_ns, rel=1e-6)
    left = {c.id: c.time_ns for c in found.attribution.causes()}
    assert left.get("idle.preparation.data", 0) < 0.01 * attribution.observed_ns
    assert sum(c.time_ns for c in found.attribution.leaves()) == found.attribution.observed_ns
    assert 0.25 < found.saved_ratio < 0.4  # 10 ms of some 32
    assert found.next_bottleneck is not None


def test_unchanged_is_what_was_observed(attribution: Attribution) -> None:
    found = chopper.whatif(attribution)
    assert found.predicted_step_ns == found.observed_step_ns
    before = {c.id: c.time_ns for c in attribution.leaves()}
    after = {c.id: c.time_ns for c in found.attribution.leaves()}
    assert after == before


def test_what_data_loading_gives_back_is_in_the_json(attribution: Attribution) -> None:
    causes = {c["id"]: c for c in reports.document(attribution)["causes"]}
    data = causes["idle.preparation.data"]
    assert data["recoverable_step_ns"] == pytest.approx(
        data["time_ns"] / attribution.windows.num_rows, rel=0.05
    )
    ideal = causes["compute.ideal"]
    assert ideal["recoverable_step_ns"] is None
    assert "peak" in ideal["recoverable_reason"]


def test_a_parent_gives_back_at_least_what_its_children_do(
    attribution: Attribution,
) -> None:
    back = recoverable_of(attribution)
    for row in attribution.causes():
        mine, above = back[row.id].step_ns, back[row.parent].step_ns if row.parent else None
        if mine is not None and above is not None:
            assert above >= mine, row.id


def test_recoverable_time_is_what_whatif_predicts(attribution: Attribution) -> None:
    back = recoverable_of(attribution)
    for cause in ("idle.preparation.data", "idle", "communication", "compute.efficiency"):
        found = chopper.whatif(attribution, fix=cause)
        saved_ns = found.observed_step_ns - found.predicted_step_ns
        assert back[cause].step_ns == round(saved_ns) == found.to_dict()["saved_step_ns"]
        assert found.saved_ci95_ns is not None
        assert back[cause].ci95_ns == tuple(round(v) for v in found.saved_ci95_ns)


def test_a_clock_at_half_its_frequency_is_slower(attribution: Attribution) -> None:
    peak = chopper.whatif(attribution, clock="reference")
    assert peak.saved_ratio == pytest.approx(0.0, abs=0.01)
    assert chopper.whatif(attribution, clock="990MHz").saved_ratio < -0.1


def test_a_step_at_another_clock_lies_in_its_interval(tmp_path: Path) -> None:
    """The truth is the same job simulated at that clock."""

    def job(name: str, *clocks: Clock, steps: int = 4) -> Attribution:
        plan = Plan(slow=Dose(2.0), clocks=clocks, steps=steps)
        write(simulate(plan), tmp_path / name)
        return pipeline.attribute(tmp_path / name)

    application_clock, level_ns = 2, 150_000_000  # NVML's reason; some three steps
    truth = job("truth", Clock(0.8, application_clock)).step_time_ns()
    levels = [
        Clock(ratio, application_clock, (i + 1) * level_ns, (i + 2) * level_ns)
        for i, ratio in enumerate((0.9, 0.85, 0.7))
    ]
    half_ratio = []
    for recorded in (job("steady"), job("levels", *levels, steps=12)):
        found = chopper.whatif(recorded, clock="1464MHz")
        assert found.predicted_step_ns == pytest.approx(sum(truth) / len(truth), rel=0.002)
        assert found.predicted_ci95_ns is not None
        low, high = found.predicted_ci95_ns
        assert low < sum(truth) / len(truth) < high
        half_ratio.append((high - low) / 2 / found.predicted_step_ns)
    # One clock in the run: the sensitivity is the roofline's, so the interval is wide.
    assert half_ratio[0] > 0.02 > half_ratio[1]


def test_an_operator_that_is_not_called_takes_its_kernels_along(
    attribution: Attribution,
) -> None:
    found = chopper.whatif(attribution, without="mm")
    assert found.saved_ratio > 0.1
    ops = {group.key for group in found.attribution.by("op") if group.time_ns}
    assert "aten::mm" not in ops


def test_launched_as_a_graph_each_event_is_still_its_operators(
    attribution: Attribution,
) -> None:
    found = chopper.whatif(attribution, graphs=True).attribution

    def computing(of: Attribution) -> dict[str, int]:
        return {c.id: c.time_ns for c in of.leaves() if c.id.startswith("compute.")}

    assert "compute.efficiency.rest" in computing(attribution)
    assert computing(found) == pytest.approx(computing(attribution), rel=0.02)
    # A copy may be hidden now; none is without its operator.
    ops = {group.key for group in attribution.by("op")}
    assert {group.key for group in found.by("op")} <= ops


def test_graphs_overlap_and_links_are_accepted(attribution: Attribution) -> None:
    for change in ({"graphs": True}, {"overlap": True}, {"link": "x2"}, {"link": "900GB/s"}):
        assert chopper.whatif(attribution, **change).saved_ratio >= 0, change


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("data", ("idle.preparation.data",)),
        ("idle.preparation.data", ("idle.preparation.data",)),
        ("straggler", ("communication.wait",)),
        ("garbage-collection", ("idle.preparation.gc",)),
        ("recomputation", ("compute.recompute",)),
        (
            "launch gaps",
            (
                "idle.call",
                "idle.launch_latency",
                "idle.preparation.dispatch",
                "idle.preparation.runtime",
            ),
        ),
    ],
)
def test_causes_go_by_id_end_or_plain_name(name: str, found: tuple[str, ...]) -> None:
    assert causes_named(name) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fix": ["stragler"]}, "did you mean straggler"),
        ({"fix": ["compute.ideal"]}, "cannot be removed"),
        ({"clock": "fast"}, "is not a number"),
        ({"clock": "-3MHz"}, "more than zero"),
        ({"link": "50"}, "no unit"),
        ({"link": "x0"}, "more than zero"),
        ({"faster": ["gemm"]}, "WHAT=FACTOR"),
        ({"faster": ["gemm=0x"]}, "more than zero"),
        ({"fix": ["communication"], "link": "x2"}, "nothing would be transferred"),
        ({"fix": ["communication"], "overlap": True}, "nothing would be left to overlap"),
        ({"fix": [""]}, "no cause named"),
        ({"fix": ["data,"]}, "no cause named"),
        ({"fix": ["compute.clock.thermal"], "clock": "1GHz"}, "both change the clock"),
        ({"fix": ["compute"], "clock": "reference"}, "both change the clock"),
        ({"faster": ["gemm=2x", "gemm=3x"]}, "specified twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        changes_of(**change)
    assert "\n" not in str(refused.value)


def test_what_this_run_has_no_data_for_is_refused(attribution: Attribution) -> None:
    for change, message in (
        ({"without": "aten::mmm"}, "did you mean aten::mm"),
        ({"faster": "nosuchkernel=2x"}, "matches no kernel"),
        ({"faster": "(=2x"}, "regular expression"),
    ):
        with pytest.raises(UsageError, match=message):
            chopper.whatif(attribution, **change)  # type: ignore[arg-type]


def test_device_events_without_launches_cannot_be_replayed() -> None:
    given = tables([], [make.kernel(0, 10), make.kernel(20, 30)], make.steps())
    attribution = pipeline.attribute(run(given))
    with pytest.raises(InputError, match="0 of 2 device events have a recorded launch"):
        Replay(attribution)
    back = recoverable_of(attribution)
    assert all(one.step_ns is None and "launch" in str(one.reason) for one in back.values())


def test_graphs_without_their_kernels_cannot_be_replayed() -> None:
    spans = [call(0, 10, 1)]
    spans += [call(at, at + 10, 10 + at, "cudaGraphLaunch") for at in (20, 40, 60)]
    given = tables(spans, [make.kernel(20, 30, correlation_id=1)], make.steps((0, 100)))
    with pytest.raises(InputError, match="3 of 3 graph launches of rank 0 have no kernels"):
        Replay(pipeline.attribute(run(given)))


def test_operators_left_out_together_all_stop_waiting() -> None:
    # Without both, the host takes 10 + 10, 30, 10 + 30, 20 and launches at 0, 50, 110: kernels of
    # 500, 540 and 100 follow each other. With one left it waits until 1070, 20 more to the launch,
    # 20 to the start.
    spans = [
        make.span(0, 2000, "loop", "python"),
        call(0, 10, 1),
        make.span(20, 530, "aten::item"),
        call(30, 530, 11, "cudaStreamSynchronize"),
        call(560, 570, 2),
        make.span(600, 1130, "aten::nonzero"),
        call(610, 1130, 12, "cudaStreamSynchronize"),
        call(1150, 1160, 3),
    ]
    kernels = [
        make.kernel(20, 520, correlation_id=1),
        make.kernel(580, 1120, correlation_id=2),
        make.kernel(1170, 1270, correlation_id=3),
    ]
    attribution = pipeline.attribute(run(tables(spans, kernels, make.steps((0, 2000)))))
    found = {
        names: chopper.whatif(attribution, without=list(names)).predicted_step_ns
        for names in [("item",), ("nonzero", "item"), ("item", "nonzero")]
    }
    assert found == {("item",): 1210, ("nonzero", "item"): 1160, ("item", "nonzero"): 1160}


def test_what_was_launched_before_the_trace_stays_before_its_steps() -> None:
    # The kernel of unknown launch ends at 200, where the window begins; the other follows its
    # launch, at 510, and without the wait for data at 10: until 420 instead of 920.
    spans = [
        make.span(0, 500, "enumerate(DataLoader)#_Iter.__next__", "annotation"),
        call(510, 520, 1),
    ]
    kernels = [make.kernel(100, 200, stream=8), make.kernel(520, 920, correlation_id=1)]
    attribution = pipeline.attribute(run(tables(spans, kernels, make.steps((0, 1000)))))
    found = chopper.whatif(attribution, fix="data")
    assert (found.observed_step_ns, found.predicted_step_ns) == (720, 220)
    assert found.attribution.step_time_ns() == [220]


def test_causes_of_other_steps_than_predicted_are_said_with_the_number() -> None:
    # Python gone, the second step begins at 20 and ends at 190. What nobody launched stays at 900:
    # of the first step by its recorded place, after the second one by its new one.
    spans = [make.span(0, 4000, "loop", "python")]
    spans += [call(at, at + 10, number) for number, at in enumerate((0, 990, 1010, 1900), start=1)]
    kernels = [
        make.kernel(start, end, correlation_id=number)
        for number, (start, end) in enumerate(
            ((20, 120), (1010, 1030), (1040, 1140), (1920, 1990)), start=1
        )
    ]
    unlaunched = make.kernel(900, 950, stream=8)
    given = tables(spans, [*kernels, unlaunched], make.steps((0, 1005), (1005, 2000)))
    found = chopper.whatif(pipeline.attribute(run(given)), fix="python")
    off = sum(found.attribution.step_time_ns()) / len(found.steps) / found.predicted_step_ns - 1
    said = [note for note in found.notes if note.startswith("the causes of the changed run")]
    assert off < -0.01
    assert len(said) == 1
    assert f"{-off:.1%} shorter".replace("%", " %") in said[0]


@pytest.mark.parametrize(
    "change",
    [{"fix": "compute"}, {"fix": "idle", "overlap": True}, {"faster": "gemm=3x", "overlap": True}],
)
def test_without_a_device_the_causes_are_of_the_steps_that_were_predicted(
    traces_dir: Path, change: dict[str, Any]
) -> None:
    """What runs beside the program is of the step that it begins in, in both."""
    found = chopper.whatif(traces_dir / "hta/cpu-only-gloo-rank34of300.json.gz", **change)
    steps = found.attribution.step_time_ns()
    assert sum(steps) / len(found.steps) == pytest.approx(found.predicted_step_ns, rel=1e-4)
    assert not [note for note in found.notes if note.startswith("the causes of the changed run")]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["whatif", *arguments], catch_exceptions=False)


def test_the_command_says_observed_predicted_and_what_is_next(slow_data: Path) -> None:
    shown = invoke(str(slow_data), "--fix", "data")
    assert shown.exit_code == 0, shown.output
    assert "predicted" in shown.stdout
    assert "Next bottleneck: " in shown.stdout
    assert "Critical path of the prediction" in shown.stdout


def test_the_command_without_changes_lists_what_each_cause_gives_back(slow_data: Path) -> None:
    shown = invoke(str(slow_data)).stdout
    assert "Savings overlap" in shown
    assert "idle.preparation.data" in shown


def test_json_has_the_documented_form(slow_data: Path) -> None:
    found = json.loads(invoke(str(slow_data), "--fix", "data", "--json").stdout)
    assert found["schema"] == "chopper.whatif/3"
    assert found["predicted_step_ns"] < found["observed_step_ns"]
    assert len(found["predicted_ci95_ns"]) == 2
    assert sum(p["share_ratio"] for p in found["critical_path"]) == pytest.approx(1.0)


def test_the_model_agrees_with_what_was_predicted() -> None:
    cases = list(
        synthetic_cases(
            magnitudes=("medium",),
            names=(
                "data_stall",
                "synchronization",
                "straggler",
                "slow_link",
                "recomputation",
                "clock_power_cap",
            ),
        )
    )
    assert len(cases) == 12
    missed = [f"{c.name} {c.flavour}: {c.error_ratio:+.2%}" for c in cases if not c.ok]
    assert not missed, missed
    assert table(cases).count("\n") == 14


@pytest.mark.parametrize("path", [pytest.param(p, id=n) for n, p in real_traces().items()])
def test_real_traces_are_given_back_within_one_percent(path: Path) -> None:
    run = pipeline.attribute(pipeline.read(path))
    if any(f.code == "trace.no_kernels" for f in run.findings):
        with pytest.raises(InputError, match="kernel records of rank 0 were lost"):
            Replay(run)
        return
    replay = Replay(run)
    assert replay.error_ratio <= 0.01
    found = pipeline.whatif(run, changes_of(fix=["idle.preparation"]), lambda: replay)
    assert 0 <= found.saved_ratio <= 1
