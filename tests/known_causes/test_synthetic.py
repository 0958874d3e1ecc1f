"""The suite end to end: model, traces on disk, the public path, the score."""

from __future__ import annotations

from pathlib import Path

import pytest

from chopper import pipeline
from tests.known_causes import synthetic
from tests.known_causes.__main__ import main
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Plan
from tests.known_causes.model.writer import write
from tests.known_causes.results import MAGNITUDES, Case


def described(cases: list[Case]) -> str:
    return "\n".join(f"{c.injection} {c.magnitude} {c.flavour}: {c.reason}" for c in cases)


def test_the_quick_subset_reaches_every_bar() -> None:
    names = tuple(synthetic.injections())
    cases = list(synthetic.run_cases(injections=names, magnitudes=MAGNITUDES, quick=True))
    assert len({c.injection for c in cases}) >= 8
    assert {c.flavour for c in cases} == {"cuda", "rocm"}
    missed = [c for c in cases if c.status != "ok"]
    assert not missed, described(missed)
    assert all(c.injected_ns for c in cases if c.injection != "stall_behind_queue")


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("straggler_in_two_groups", "cuda"),
        ("copy_partly_hidden", "cuda"),
        ("three_at_one_gap", "rocm"),
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
    run = pipeline.read(tmp_path)
    assert run.ranks == [0, 1]
    attribution = pipeline.attribute(run)
    assert attribution.steps == 2
    assert attribution.observed_ns == sum(leaf.time_ns for leaf in attribution.leaves())
    assert run.table(1, "device_clock").num_rows > 20
    assert {r.device for r in attribution.ranks} == {"AMD Instinct MI300X"}


def test_the_command_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--synthetic", "--causes", "idle.preparation.gc", "--magnitudes", "small"]
    assert main(chosen) == 0
    said = capsys.readouterr().out
    assert "cases within their limits, " in said
    assert "garbage_collection" in said
    assert "collection_in_data" in said


def test_a_missed_bar_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert main(["--synthetic", "--causes", "data_stall"]) == 1
    assert "missed: data_stall (small cuda): recovered 0 %, bar 98 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--causes", "data_stal"], "no injection or cause is called data_stal"),
        (["--magnitudes", "huge"], "no magnitude is called huge"),
    ],
)
def test_what_is_unknown_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--synthetic", *arguments])
    assert message in capsys.readouterr().err
