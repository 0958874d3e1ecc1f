"""The batch × sequence grid: its sizes, what is drawn from it, and two experiments side by side."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.reports import to_text
from chopper.reports.experiment import Experiments, page_of_two
from chopper.workloads import batch_sequence
from tests.command import run
from tests.docs.blocks import ROOT
from tests.workloads.test_headlines import measured

OPERATION = {"operation": "layers.*.ffn.w1 mm", "phase": "forward"}


@pytest.mark.parametrize(
    ("variant", "device", "words", "expected"),
    [
        ("b2s4-fsdp2", "cuda", [], ("8b", "bfloat16", 2, 4096, "fsdp2")),
        ("b1s8-fsdp1", "cuda", ["--kilo", "1000"], ("8b", "bfloat16", 1, 8000, "fsdp1")),
        ("b4s4-fsdp1", "cpu", [], ("debug", "float32", 4, 128, "fsdp1")),
        ("b2s8-fsdp2", "cpu", ["--size", "1b"], ("1b", "float32", 2, 256, "fsdp2")),
    ],
)
def test_the_grid_is_the_papers_on_gpus_and_small_on_cpus(variant, device, words, expected):
    args = batch_sequence.WORKLOAD.parse(["--variant", variant, *words])
    found = batch_sequence.settled(args, device)
    assert (found.size, found.dtype, found.batch, found.sequence, found.sharding) == expected


def made(slower=1.0, **options):
    """Two cells of two shardings, three repetitions each."""
    numbers = [
        ("tokens_per_s", f"{cell}-{sharding}", 1000.0 / (factor * slower * noise), labels)
        for cell in ("b1s4", "b2s4")
        for sharding, factor in (("fsdp1", 1.5), ("fsdp2", 1.2))
        for noise in (1.0, 1.01, 0.99)
        for labels in ({}, OPERATION)
    ]
    return measured("batch_sequence", numbers, **options)


def overheads(op, clock, time_ns=1000.0, module="layers.*.ffn.w1"):
    """A row of the view `overheads`: 1 ms of ideal time, and the factors that were measured."""
    unknown = dict.fromkeys(batch_sequence.FACTORS)
    known = {"module": module, "op": op, "ideal_ns": 1e6, "time_ns": time_ns, "rest_ratio": 1.1}
    return {**unknown, **known, "clock_ratio": clock}


def test_factors_are_geometric_means_over_the_larger_products():
    runs = [
        [
            overheads("aten::mm", 1.5),
            overheads("aten::mm", 9.0, time_ns=1.0),  # less than half a percent of the time
            overheads("aten::mul", 9.0),
            overheads("aten::mm", 9.0, module=None),
        ],
        [overheads("aten::_scaled_dot_product_flash_attention", 1.2)],
    ]
    found = batch_sequence.product_factors(runs)
    assert found == pytest.approx({"clock_ratio": math.sqrt(1.5 * 1.2), "rest_ratio": 1.1})
    assert "clock_ratio" not in batch_sequence.product_factors([[overheads("aten::mm", None)]])


def test_the_clock_and_throughput_are_headlines():
    clock, *throughputs = made().headlines
    assert (clock.ours, clock.why) == (None, "no product has an ideal time")
    assert [h.ours for h in throughputs] == pytest.approx([1.25, 1.25])


def test_two_experiments_are_set_side_by_side_and_their_settings_named():
    found = Experiments(made(ranks=2, size=None), made(slower=2.0, ranks=8, size="8b"))
    assert found.differences == ["ranks: 2 and 8", "--size: None and 8b"]
    document = found.to_dict()
    rates = document["measures"]
    assert len(rates) == 8
    for rate in rates:
        assert rate["labels"] in ({}, OPERATION)
        assert (rate["ratio"], rate["told"]) == (pytest.approx(0.5), True)
    text = to_text.render(page_of_two(found))
    assert "8 numbers measured in both; 8 of them differ" in " ".join(text.split())


@pytest.mark.long
def test_a_variant_runs_and_is_compared_with_itself(tmp_path):
    words = ["bench", "batch_sequence", "--variants", "b1s4-fsdp2"]
    words += ["--repeats", "1", "--steps", "5"]
    place = tmp_path / "grid"
    done = CliRunner().invoke(cli, [*words, "-o", str(place), "--json", "--", "--kilo", "16"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {row["measure"] for row in document["measures"]} >= {"tokens_per_s", "step_ns"}
    compared = CliRunner().invoke(cli, ["compare", str(place), str(place)])
    assert compared.exit_code == 0, compared.output
    assert "one repetition gives no interval" in " ".join(compared.stdout.split())


def test_options_of_runs_are_refused_for_experiments():
    """They would be left unused without a word."""
    overlap = str(ROOT / "docs/recordings/overlap")
    for words, named in (
        (
            ["compare", overlap, overlap, "--device", "A:h100-sxm", "--all-steps"],
            "--device, --all-steps",
        ),
        (["gate", overlap, overlap, "--fail-on", "step>+5%"], "is an experiment"),
        (["report", overlap, "--device", "h100-sxm", "-o", "-.html"], "--device"),
    ):
        line = run(*words).line
        assert named in line
        assert line.endswith("an experiment; name one of its runs")
