"""The suite end to end: model, traces on disk, the public path, the score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import chopper
from chopper.cli import cli
from chopper.validation import synthetic
from chopper.validation.model.job import simulate
from chopper.validation.model.plan import Plan
from chopper.validation.model.writer import write
from chopper.validation.results import MAGNITUDES, Case


def described(cases: list[Case]) -> str:
    return "\n".join(f"{c.injection} {c.magnitude} {c.flavour}: {c.reason}" for c in cases)


def test_the_quick_subset_reaches_every_bar() -> None:
    names = tuple(synthetic.injections())
    cases = list(synthetic.run_cases(injections=names, magnitudes=MAGNITUDES, quick=True))
    assert len({c.injection for c in cases}) >= 10
    assert {c.flavour for c in cases} == {"cuda", "rocm"}
    missed = [c for c in cases if c.status != "ok"]
    assert not missed, described(missed)
    assert all(c.injected_ns for c in cases if c.injection != "stall_behind_queue")


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("collection_in_data", "rocm"),
        ("straggler_in_two_groups", "cuda"),
        ("python_before_graphs", "rocm"),
        ("copy_partly_hidden", "cuda"),
        ("three_at_one_gap", "rocm"),
        ("mixed_device", "cuda"),
    ],
)
def test_hard_cases(name: str, flavour: str) -> None:
    cases = [
        c
        for c in synthetic.run_cases(injections=[name], magnitudes=["medium"])
        if c.flavour == flavour
    ]
    missed = [c for c in cases if c.status != "ok"]
    assert cases
    assert not missed, described(missed)


def test_dips_that_no_sample_can_resolve_are_refused_and_blamed_on_nothing_else() -> None:
    cases = list(synthetic.run_cases(injections=["clock_dips_unseen"], magnitudes=["large"]))
    assert [c.status for c in cases] == ["refused", "refused"], described(cases)
    assert all("faster than it was sampled" in (c.reason or "") for c in cases)


def test_the_run_is_one_that_every_command_reads(tmp_path: Path) -> None:
    recording = simulate(Plan(flavour="rocm", layers=1, steps=2))
    write(recording, tmp_path)
    run = chopper.load(tmp_path)
    assert run.ranks == [0, 1]
    attribution = chopper.attribute(run)
    assert attribution.steps == 2
    assert attribution.observed_ns == sum(leaf.time_ns for leaf in attribution.leaves())
    assert run.table(1, "device_clock").num_rows > 20
    assert {r.device for r in attribution.ranks} == {"AMD Instinct MI300X"}


def validate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["validate", *arguments])


def test_the_command_prints_its_table_and_writes_reports(tmp_path: Path) -> None:
    page = tmp_path / "validation.html"
    shown = validate(
        "--synthetic", "--causes", "data_stall", "--magnitudes", "large", "-o", str(page)
    )
    assert shown.exit_code == 0, shown.output
    assert "2 of 2 cases within their limits" in shown.stdout
    assert page.read_text().startswith("<!doctype html>")
    again = validate("--synthetic", "--causes", "data_stall", "-o", str(page))
    assert again.exit_code == 1
    assert "exists; pass --force" in str(again.exception)


def test_json_and_causes_by_id() -> None:
    shown = validate(
        "--synthetic", "--causes", "idle.preparation.gc", "--magnitudes", "small", "--json"
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert {c["injection"] for c in found["cases"]} >= {"garbage_collection", "collection_in_data"}
    assert found["score"]["missed"] == 0


def test_a_missed_bar_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Case(
        suite="synthetic",
        injection="data_stall",
        cause="idle.preparation.data",
        magnitude="small",
        flavour="cuda",
        injected_ns=100,
        status="missed",
        reason="recovered 0 %, bar 98 %",
    )

    monkeypatch.setattr(synthetic, "run_cases", lambda **_: iter([lost]))
    shown = validate("--synthetic", "--causes", "data_stall")
    assert shown.exit_code == 1
    assert "missed: data_stall (small cuda): recovered 0 %, bar 98 %" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--causes", "data_stal"], "no injection is called 'data_stal'; did you mean data_stall"),
        (["--causes", "xyzzy"], "no injection is called 'xyzzy'; there are"),
        (["--causes", ","], "none named"),
        (["--magnitudes", "huge"], "there are small, medium, large"),
        (["-o", "report.pdf"], "report.pdf"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(arguments: list[str], message: str) -> None:
    shown = validate("--synthetic", *arguments)
    assert shown.exit_code != 0
    assert message in str(shown.exception)
