"""Results that cannot be, or show nothing, are withheld with the reason."""

from __future__ import annotations

import html
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from chopper.cli.bench_ import _show_experiment
from chopper.experiments import results as ex
from chopper.experiments.declarations import Bound
from chopper.experiments.judgement import others_while, tolerated_cores
from chopper.experiments.loading import load
from chopper.reports import experiment as report
from tests.experiments.test_experiment import recorded


def experiment(path, workload, values, *, other_cores=None, repeats=3):
    """Measures by variant, each repeated: a number, or a function of the repetition."""
    path.mkdir()
    variants = []
    for name, measures in values.items():
        runs = [f"{name}-{repeat + 1}" for repeat in range(repeats)]
        for repeat, run in enumerate(runs):
            recorded(
                path / run,
                [
                    (measure, value(repeat) if callable(value) else value, dict(labels))
                    for (measure, *labels), value in measures.items()
                ],
            )
        variants.append(ex.VariantPlan(name=name, summary=name, runs=runs))
    plan = ex.Plan(
        chopper_version="0",
        workload=workload,
        summary="made by hand",
        command=["chopper", "run", workload],
        created_ns=1,
        ranks=2,
        device="cpu",
        options={"fits": ""},
        steps=False,
        baseline=next(iter(values)),
        variants=variants,
    )
    if other_cores is not None:
        plan.machine_cores = 2
        plan.other_cores = {run: other_cores for v in variants for run in v.runs}
    ex.write_plan(path, plan)
    return path


def everywhere(path, capsys):
    """The text, the page, Markdown and the JSON of an experiment, as a user sees them."""
    _show_experiment(path, as_json=True)
    document = json.loads(capsys.readouterr().out)
    _show_experiment(path, as_json=False)
    found = load(path)
    shown = [report.render(found, format) for format in ("txt", "md")]
    shown.append((path / "report.html").read_text())
    return document, [" ".join(html.unescape(s).replace("\\", "").split()) for s in shown]


OPERATION = ("operation", "all_gather_matmul")


def overlap(bound_over_time):
    measures = {("compute_ns", OPERATION): 4e6, ("transfer_ns", OPERATION): 4e6}
    return {
        "sequential": {
            **measures,
            ("time_ns", OPERATION): 9e6,
            ("bound_over_time_ratio", OPERATION): 0.5,
        },
        "chunked": {
            **measures,
            ("time_ns", OPERATION): 4.5e6 / bound_over_time,
            ("bound_over_time_ratio", OPERATION): bound_over_time,
        },
    }


def test_no_operation_beats_its_bound(tmp_path, capsys):
    document, shown = everywhere(experiment(tmp_path / "e", "overlap", overlap(1.12)), capsys)
    (headline,) = document["headlines"]
    reason = (
        "bound over time of chunked (all_gather_matmul) is 112 %, but at most 100 % is possible: "
        "an operation cannot end before its product or its transfer does"
    )
    assert (headline["ours"], headline["why"]) == (None, f"withheld: {reason}")
    assert all(reason in text for text in shown)
    # Neither the ratio to the bound nor the time that it was made of is among the numbers.
    # Their rows stay, with the reason.
    rows = {(m["measure"], m["variant"]): m for m in document["measures"]}
    for measure in ("time_ns", "bound_over_time_ratio"):
        row = rows[measure, "chunked"]
        assert (row["value"], row["values"], row["withheld"]) == (None, [], reason)
    assert rows["time_ns", "sequential"]["value"] == 9e6
    assert not any("2.24×" in text for text in shown)
    assert document["findings"][0]["code"] == "experiment.impossible"


def test_what_can_be_is_shown(tmp_path, capsys):
    document, shown = everywhere(
        experiment(tmp_path / "e", "overlap", overlap(0.9), other_cores=0.1), capsys
    )
    (headline,) = document["headlines"]
    assert headline["ours"] == pytest.approx(9 / 5)
    assert document["findings"] == []
    assert all("other programs used at most 0.1 of 2 cores" in text for text in shown[1:])
    assert not any("withheld" in text for text in shown)


def test_a_busy_machine_withholds_what_was_timed(tmp_path, capsys):
    path = experiment(tmp_path / "e", "overlap", overlap(0.9), other_cores=1.4)
    document, shown = everywhere(path, capsys)
    reason = (
        "other programs used 1.4 of 2 cores during sequential-1; run it again on a quiet machine"
    )
    (headline,) = document["headlines"]
    assert (headline["ours"], headline["why"]) == (None, f"withheld: {reason}")
    assert headline["withheld"] == ["experiment.busy_machine"]
    assert headline["configuration"] == ""
    assert all(reason in text and "1.8×" not in text for text in shown)


def test_a_workload_that_measures_other_programs_knows_better(tmp_path):
    # Ray's processes, say, which nobody waits for, are no other programs.
    name = ("other_programs_ratio",)
    measures = {
        "tuned": {name: lambda repeat: 0.05 * repeat / 2},
        "balanced": {name: lambda repeat: 0.1 * repeat / 2},
    }
    found = load(experiment(tmp_path / "e", "dataloader", measures, other_cores=1.4))
    assert found.other_cores["balanced-1"] == pytest.approx(0.2)
    assert found.disturbances == ()
    measures["tuned"] = {name: lambda _: 0.2}
    found = load(experiment(tmp_path / "f", "dataloader", measures, other_cores=0.0))
    assert "0.4 of 2 cores during tuned-1" in found.disturbances[0].message


def test_a_step_saves_no_more_than_the_update(tmp_path, capsys):
    step = ("median_step_ns",)
    measures = {
        "ddp": {step: 100e6, ("update_ns",): 10e6},
        "zero2-offload": {step: 62e6, ("update_ns",): 1e6},
    }
    document, shown = everywhere(experiment(tmp_path / "e", "offload", measures), capsys)
    why = {h["claim"]: (h["ours"], h["why"]) for h in document["headlines"]}
    ours, reason = why["zero2-offload: step over that of ddp"]
    assert ours is None
    assert reason == (
        "withheld: it is 0.62×, but at least 0.9× is possible: no placement saves more than all of "
        "ddp's update"
    )
    assert all(reason in text for text in shown)


def test_a_difference_of_bytes_may_be_negative_and_a_size_keeps_its_row_without_a_number(
    tmp_path, capsys
):
    measures = {
        "ddp": {("memory_growth_bytes",): -7.75 * 2**20, ("peak_bytes",): -1.0, ("update_ns",): 1.0}
    }
    document, shown = everywhere(experiment(tmp_path / "e", "offload", measures), capsys)
    rows = {m["measure"]: m for m in document["measures"]}
    assert rows["memory_growth_bytes"]["value"] == -7.75 * 2**20
    assert rows["memory_growth_bytes"]["withheld"] is None
    assert rows["peak_bytes"]["value"] is None
    assert "there is no less than nothing" in rows["peak_bytes"]["withheld"]
    for text in shown:
        assert "7.75 MiB" in text
        assert "withheld" in text


def test_repetitions_that_disagree_make_no_headline(tmp_path, capsys):
    steps = {"fsdp1": 1e8, "fsdp2": lambda repeat: (1e8, 1e8, 1e10)[repeat]}
    measures = {v: {("step_ns",): s, ("median_step_ns",): 1e8} for v, s in steps.items()}
    document, _ = everywhere(experiment(tmp_path / "e", "fsdp", measures), capsys)
    step = next(h for h in document["headlines"] if h["claim"].startswith("step of fsdp1"))
    assert step["ours"] is None
    assert step["withheld"] == ["experiment.impossible", "experiment.scattered"]
    assert "but at least 0.5× is possible: untraced steps differ by 1.0×" in step["why"]
    assert "more than 25.0 %" in step["why"]


@pytest.mark.parametrize(("compiled_ns", "pays"), [(50e6, True), (98e6, False)])
def test_compiling_pays_only_where_its_steps_are_faster_for_certain(
    tmp_path, capsys, compiled_ns, pays
):
    measures = {
        "eager": {("median_step_ns",): 100e6, ("first_step_ns",): 2e8},
        "compiled": {
            ("median_step_ns",): lambda repeat: compiled_ns + 4e6 * (repeat - 1),
            ("first_step_ns",): 10.2e9,
        },
    }
    document, _ = everywhere(experiment(tmp_path / "e", "compile", measures), capsys)
    paid = next(h for h in document["headlines"] if "paid for itself" in h["claim"])
    if pays:  # 10 s more at first, 50 ms less in each later step
        assert paid["ours"] == pytest.approx(200, rel=0.02)
        assert paid["ci95"][0] < paid["ours"] < paid["ci95"][1]
    else:
        assert paid["ours"] is None
        assert "not faster beyond noise" in paid["why"]


def test_one_repetition_is_judged_by_its_bounds(tmp_path, capsys):
    """fsdp's 0.01×: a single traced repetition that stood still; untraced steps were alike."""
    measures = {
        "fsdp1": {("step_ns",): 1e8, ("median_step_ns",): 1e8},
        "fsdp2": {("step_ns",): 1e10, ("median_step_ns",): 1e8},
    }
    path = experiment(tmp_path / "e", "fsdp", measures, repeats=1)
    document, _ = everywhere(path, capsys)
    step = next(h for h in document["headlines"] if h["claim"].startswith("step of fsdp1"))
    assert (step["ours"], step["withheld"]) == (None, ["experiment.impossible"])


@pytest.mark.parametrize(
    ("value", "kept"), [(1.0, True), (0.5, True), (1.0 + 1e-12, True), (1.001, False), (-1, False)]
)
def test_a_bound_holds_to_the_last_digit(value, kept):
    rows = ex.rows_of([("a", "of_all_ratio", (), value)], None)
    bound = Bound(measure="of_all_ratio", least=0.0, most=1.0, why="it is a part")
    possible, impossible = ex.sorted_out(rows, (bound,))
    assert (len(possible), len(impossible)) == ((1, 0) if kept else (0, 1))
    if value == 1.001:
        assert "is 1.001, but at most 100 % is possible" in impossible[0][1].message


def test_no_time_is_negative_and_what_is_compared_with_it_has_no_ratio():
    rows = ex.rows_of([("a", "time_ns", (), -1.0), ("b", "time_ns", (), 2.0)], "a")
    possible, impossible = ex.sorted_out(rows, ())
    assert [(row.variant, row.ratio) for row in possible] == [("b", None)]
    assert "there is no less than nothing" in impossible[0][1].message


def test_the_machine_of_an_older_experiment_is_unknown(tmp_path):
    found = load(experiment(tmp_path / "e", "overlap", overlap(0.9)))
    assert found.disturbances == ()
    assert not any("other programs" in fact for fact in report.facts(found))


def test_what_another_program_uses_is_seen_and_what_children_use_is_not(tmp_path):
    """A program that nobody has waited for burns a core; what was waited for is not others'."""
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    with others_while() as own:
        subprocess.run([sys.executable, "-c", burn.format(0.5)], check=True)
    other = subprocess.Popen([sys.executable, "-c", burn.format(600)])
    try:
        with others_while() as others:
            subprocess.run([sys.executable, "-c", burn.format(0.5)], check=True)
    finally:
        other.kill()
        other.wait()
    # Not yet waited for, it counts as another program. On a busy machine, both have more.
    assert others.cores > 0.1
    assert own.cores >= 0


def test_a_real_experiment_says_what_the_machine_did(tmp_path):
    """The command itself: whatever this machine does meanwhile is in the plan and the JSON."""
    from chopper.cli.bench_ import command

    words = ["membw", "-o", str(tmp_path / "run"), "--repeats", "1", "--json", "--"]
    words += ["--largest", "262144", "--repeats", "1", "--device", "cpu"]
    done = CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    assert set(document["other_cores"]) == {"random-1"}
    assert document["machine_cores"] >= 1
    busy = document["other_cores"]["random-1"] >= tolerated_cores(document["machine_cores"])
    codes = {finding["code"] for finding in document["findings"]}
    assert ("experiment.busy_machine" in codes) == busy
    for headline in document["headlines"]:
        assert (headline["ours"] is None) == bool(headline["why"])
        assert not busy or "other programs used" in headline["why"]
