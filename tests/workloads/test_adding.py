"""A workload is one file in the folder: listed, described, checked, run and drawn by it alone."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import chopper.workloads
from chopper.cli import cli
from chopper.errors import UsageError
from chopper.experiments import prepare as preparing
from chopper.experiments.prepare import prepare
from tests.workloads.test_headlines import measured

DOUBLE = '''
"""Double a number."""

from __future__ import annotations

import argparse

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import Needs, Variant, Workload
from chopper.experiments.declarations import DEVICE, SEED, Option, positive
from chopper.experiments.results import Experiment, Headline

WORKLOAD = Workload(
    name="double",
    summary="a number, doubled",
    options=(Option("count", "to double", 21, positive), SEED, DEVICE),
    variants=(Variant("added", "to itself"), Variant("shifted", "by one bit", default=False)),
    baseline="added",
    ranks=1,
    measures=True,
    seconds=1,
)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    if args.count > 1000:
        raise UsageError(f"--count {args.count}: at most 1000")
    return Needs(memory_bytes=8, what=f"--count {args.count}", remedy="take a smaller one")


def main() -> None:
    args = WORKLOAD.parse()
    with chopper.profile(args.output) as prof:
        doubled = args.count << 1 if args.variant == "shifted" else args.count + args.count
        prof.measure("doubled_count", doubled)


def headlines(experiment: Experiment) -> tuple[Headline, ...]:
    ratio = experiment.ratio("doubled_count", "shifted", "added")
    return (Headline.of(ratio, system="Double", claim="shifted over added"),)
'''


@pytest.fixture
def double(monkeypatch, tmp_path):
    (tmp_path / "double.py").write_text(DOUBLE)
    (tmp_path / "helper.py").write_text("raise SystemExit('a module beside the workloads')")
    monkeypatch.setattr(chopper.workloads, "__path__", [*chopper.workloads.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    preparing.program.cache_clear()
    preparing.workloads.cache_clear()
    yield "double"
    sys.modules.pop("chopper.workloads.double", None)
    preparing.program.cache_clear()
    preparing.workloads.cache_clear()


def test_it_is_described_with_its_options_and_variants(double):
    shown = CliRunner().invoke(cli, ["bench", double, "--help"], catch_exceptions=False).stdout
    assert "--count N" in shown
    assert "to double [default: 21]" in shown
    assert "shifted  by one bit (only when named)" in shown
    assert "about 1 s on two cores" in shown
    assert "--output" not in shown.partition("Options of the workload")[2]


def test_it_is_checked_before_anything_is_started(double):
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match="--count 1001: at most 1000"):
        prepare(double, options=["--count", "1001"])
    launch = prepare(double, variants="all", options=["--count", "5", "--device", "cpu"])
    assert launch.options == {"count": 5, "seed": 0}
    first, second = (launch.command(variant) for variant in launch.variants)
    words = ["--count", "5", "--device", "cpu", "--device", "cpu"]
    assert first[-8:] == ["--variant", "added", *words]
    assert second[-7] == "shifted"
    assert "chopper.workloads.double" in first


def test_its_program_measures_what_its_headlines_are_drawn_from(double, monkeypatch):
    kept = {}
    prof = SimpleNamespace(measure=lambda name, value: kept.update({name: value}))
    monkeypatch.setattr(chopper, "profile", lambda *_: nullcontext(prof))
    monkeypatch.setattr(sys, "argv", [double, "--count", "4", "--variant", "shifted"])
    importlib.import_module("chopper.workloads.double").main()
    assert kept == {"doubled_count": 8}
    variants = ("added", "added", "shifted", "shifted")
    numbers: list[tuple[str, str, float, dict[str, object]]]
    numbers = [("doubled_count", variant, 8.0, {}) for variant in variants]
    [headline] = measured(double, numbers).headlines
    assert (headline.claim, headline.ours) == ("shifted over added", 1.0)
