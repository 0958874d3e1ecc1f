from __future__ import annotations

import contextlib
import html
import json

import pytest

from chopper import pipeline
from chopper.errors import InputError, OutputError
from chopper.experiments import results as ex
from chopper.experiments.loading import load
from chopper.recording.finish import finalize
from chopper.reports import experiment as report
from chopper.storage import manifest as m
from chopper.storage.destination import check_output, new_output
from chopper.storage.parts import RunWriter
from chopper.storage.streams import StreamWriter
from chopper.tables import TABLES
from chopper.views import VIEWS
from tests.kineto_writer import small_trace


def recorded(path, measures, *, ranks=1):
    """A run of an experiment in which each rank measured the same."""
    for rank in range(ranks):
        part = RunWriter(path, rank)
        part.manifest.world_size = ranks
        part.manifest.status = "complete"
        part.manifest.measures = [
            m.Measure(name=name, value=value, labels=labels) for name, value, labels in measures
        ]
        part.save()
    finalize(path, workload="made")


@pytest.fixture
def made(tmp_path):
    """Two variants, three repetitions: b is twice as fast as a, on each of two sizes."""
    path = tmp_path / "made"
    path.mkdir()
    variants = []
    for name, factor in (("a", 1.0), ("b", 2.0)):
        runs = []
        for repeat in range(3):
            runs.append(f"{name}-{repeat + 1}")
            noise = 1 + 0.01 * repeat
            recorded(
                path / runs[-1],
                [
                    ("tokens_per_s", 1000 * factor * noise, {}),
                    *(
                        ("time_ns", size / factor * noise, {"size_bytes": size, "op": "copy"})
                        for size in (1024, 4096, 16384)
                    ),
                ],
                ranks=2,
            )
        variants.append(ex.VariantPlan(name=name, summary=f"variant {name}", runs=runs))
    ex.write_plan(
        path,
        ex.Plan(
            chopper_version="0",
            workload="gemm",
            summary="made by hand",
            command=["chopper", "run", "gemm"],
            created_ns=1,
            ranks=2,
            device="cpu",
            options={"seed": 0},
            steps=False,
            baseline="a",
            variants=variants,
        ),
    )
    return path


def test_measures_are_joined_over_ranks_and_repetitions(made):
    found = load(made)
    assert found.variants == ("a", "b")
    row = found.find("tokens_per_s", "b")
    assert row is not None
    assert row.values == pytest.approx((2000, 2020, 2040))
    assert row.estimate.value == pytest.approx(2020)
    assert row.ratio is not None
    assert row.ratio.value == pytest.approx(2)
    assert row.ratio.ci95 is not None
    assert row.ratio.ci95[0] < 2 < row.ratio.ci95[1]
    baseline = found.find("tokens_per_s", "a")
    assert baseline is not None
    assert baseline.ratio is None
    half = found.ratio("time_ns", "b", "a", size_bytes=4096)
    assert half is not None
    assert half.value == pytest.approx(0.5)
    assert found.ratio("time_ns", "b", "a", size_bytes=5) is None


def test_repetitions_within_a_run_count_where_it_is_the_only_one(made):
    plan = ex.read_plan(made)
    for variant, rates in zip(plan.variants, ((1000, 1010, 1020), (4000, 4040)), strict=True):
        variant.runs = [f"{variant.name}-alone"]
        measured = [("rate_per_s", rate, {ex.REPETITION: k}) for k, rate in enumerate(rates)]
        recorded(made / variant.runs[0], measured, ranks=2)
    ex.write_plan(made, plan)
    found = load(made).find("rate_per_s", "b")
    assert found is not None
    assert list(found.values) == [4000, 4040]
    assert list(found.labels) == []
    assert found.ratio is not None
    assert found.ratio.ci95 is not None
    # With several runs, a run's own are one value: they are not independent of each other.
    plan.variants[1].runs = ["b-alone", "b-1"]
    recorded(made / "b-1", [("rate_per_s", 4060, {})], ranks=2)
    ex.write_plan(made, plan)
    found = load(made).find("rate_per_s", "b")
    assert found is not None
    assert found.values == (4020, 4060)


@pytest.mark.parametrize("format", ["txt", "md", "json", "html"])
def test_every_format_shows_what_was_measured(made, format):
    shown = report.render(load(made), format)
    assert "gemm" in shown
    if format == "json":
        document = json.loads(shown)
        assert document["schema"] == "chopper.experiment/1"
        assert {row["measure"] for row in document["measures"]} == {"tokens_per_s", "time_ns"}
    else:
        assert "4.00 KiB" in shown
        assert "2.00×, 1.96 … 2.05" in shown
        assert "0.50×, 0.49 … 0.51" in shown


def test_what_intervals_are_of_is_said(made):
    plan = ex.read_plan(made)
    for runs, said in (
        (3, "Student's t over repetitions; for ratios, on logarithms"),
        (1, "One repetition: no spread and no interval; --repeats 3 adds both"),
    ):
        for variant in plan.variants:
            variant.runs = variant.runs[:runs]
        ex.write_plan(made, plan)
        for format in ("txt", "md", "html"):
            shown = html.unescape(" ".join(report.render(load(made), format).split()))
            assert said in shown
    measured = [("rate_per_s", 5.0 + k, {ex.REPETITION: k}) for k in range(2)]
    recorded(made / "a-1", measured)
    assert "Student's t over parts of a single run" in report.intervals(load(made))


def test_names_from_a_run_cannot_break_out_of_the_page(made):
    recorded(made / "a-1", [("tokens_per_s", 1.0, {"op": "<script>alert(1)</script>"})])
    page = report.render(load(made), "html")
    assert "<script>alert(1)" not in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not an experiment"),
        (b"[]", "is not an experiment"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_experiment_is_one_line(made, content, message):
    file = made / "experiment.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message) as refused:
        load(made)
    assert "\n" not in str(refused.value)


def test_a_newer_schema_is_refused(made):
    file = made / "experiment.json"
    file.write_text(file.read_text().replace("chopper.experiment/1", "chopper.experiment/9"))
    with pytest.raises(InputError, match=r"has schema 'chopper\.experiment/9'"):
        load(made)


def test_what_others_put_into_an_experiment_is_never_removed(made):
    (made / "a-1" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="that chopper did not write"):
        check_output(made, force=True)


def test_an_experiment_that_records_nothing_brings_the_old_one_back(made):
    with new_output(made, force=True) as place:
        assert not any(place.iterdir())
    assert ex.read_plan(made).workload == "gemm"


def test_where_a_run_is_wanted_an_experiment_says_which_it_holds(made):

    with pytest.raises(InputError) as refused:
        pipeline.read(made)
    assert f"pass one of them: {made / 'a-1'}; or: chopper report {made}" in str(refused.value)


@pytest.fixture
def traced(made):
    """Two steps of 10 µs in each variant; on the device gemm 2 µs, add 3 µs and a copy of 1 µs."""
    plan = ex.read_plan(made)
    plan.workload, plan.steps = "fsdp", True
    ex.write_plan(made, plan)
    for variant in plan.variants:
        for name in variant.runs:
            for rank in (0, 1):
                folder = made / name / f"rank-{rank:05d}"
                (folder / "trace.json").write_bytes(small_trace(rank=rank, world=2).encode())
                part = json.loads((folder / "manifest.json").read_bytes())
                part["traces"] = ["trace.json"]
                (folder / "manifest.json").write_text(json.dumps(part))
            finalize(made / name, workload="made")
    return made


def test_the_steps_causes_stand_beside_each_other_and_add_up(traced):
    found = load(traced)
    assert {row.variant for row in found.causes} == {"a", "b"}
    for variant in ("a", "b"):
        of = [row for row in found.causes if row.variant == variant]
        assert all(row.estimate.repeats_count == 3 for row in of)
        # Two ranks, two steps.
        step_ns = found.attributions[variant][0].observed_ns / 4
        assert sum(row.estimate.value for row in of) == pytest.approx(step_ns)
        assert step_ns == pytest.approx(10_000, rel=0.1)
    same = {row.ratio.value for row in found.causes if row.ratio is not None}
    assert same == {1.0}
    [grid] = [g for g in report.tables(found) if g.title == "Where a step's time goes"]
    assert [c.heading for c in grid.typed_columns()] == ["Cause", "a", "b"]
    assert grid.rows[-1] == ("Step", "9.50 µs", "9.50 µs")
    document = found.to_dict()
    assert {row["measure"] for row in document["causes"]} == {row.measure for row in found.causes}


def test_views_that_a_workload_wants_stand_there_or_say_why_not(traced):
    found = load(traced)
    notes = {g.title: g.note for g in report.tables(found) if not g.rows}
    for name in ("clocks", "memory_determinism"):
        assert notes[VIEWS[name].title] == f"Unknown here: {VIEWS[name].needs}."
    page = report.render(found, "html")
    assert page.count("Unknown here: ") >= 2
    assert found.to_dict()["views"]["clocks"] == []


def test_clocks_and_power_that_were_sampled_stand_beside_the_rates(traced):
    plan = ex.read_plan(traced)
    for variant, clock_hz in zip(plan.variants, (1_000_000_000, 1_500_000_000), strict=True):
        for name in variant.runs:
            for rank in (0, 1):
                file = traced / name / f"rank-{rank:05d}" / "device_clock.arrow"
                with contextlib.closing(StreamWriter(file, "device_clock")) as out:
                    rows = len(steady_w := [300.0, None, 500.0])
                    out.write(
                        {column: [None] * rows for column in TABLES["device_clock"].arrow.names}
                        | {
                            "time_ns": [1, 2, 3],
                            "span_ns": [0] * rows,
                            "device_id": [0] * rows,
                            "sm_clock_hz": [clock_hz] * rows,
                            "power_w": steady_w,
                        }
                    )
    found = load(traced)
    clock = found.ratio("sm_clock_hz", "b", "a")
    assert clock is not None
    assert clock.value == pytest.approx(1.5)
    power = found.find("power_w", "b")
    assert power is not None
    assert power.values == (400.0, 400.0, 400.0)
    # Where the workload says when it measured, only that time counts: 500 W at 3 ns.
    for name in plan.variants[1].runs:
        file = traced / name / "rank-00000" / "program_phase.arrow"
        with contextlib.closing(StreamWriter(file, "program_phase")) as out:
            of = {"name": ["measured", "measured", "other"], "tid": [1, 1, 1]}
            out.write(of | {"start_ns": [0, 3, 1], "end_ns": [1, 4, 3]})
    power = load(traced).find("power_w", "b")
    assert power is not None
    assert power.values == (450.0, 450.0, 450.0)
