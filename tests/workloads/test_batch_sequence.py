"""The batch × sequence grid: its sizes, what is drawn from it, and two experiments side by side."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.errors import InputError
from chopper.reports import experiment as report
from chopper.reports import to_text
from chopper.reports.experiments import Experiments
from chopper.reports.experiments import page as page_of_two
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


def test_memory_is_that_of_the_largest_variant():
    args = batch_sequence.WORKLOAD.parse([])

    def needed(*variants):
        args.variants = variants
        return batch_sequence.needs(args, 8, "cuda")

    alone, both = needed("b1s4-fsdp2"), needed("b1s4-fsdp2", "b2s8-fsdp2")
    assert both.memory_bytes == needed("b2s8-fsdp2").memory_bytes > alone.memory_bytes
    assert "batch 2, sequence 8192" in both.what


def made(slower=1.0, clocked=True, **options):
    """Two cells of two shardings; each operation's factors multiply to what was observed."""
    numbers = []
    for batch, cell in ((1, "b1s4"), (2, "b2s4")):
        for sharding, factor in (("fsdp1", 1.5), ("fsdp2", 1.2)):
            variant = f"{cell}-{sharding}"
            for noise in (1.0, 1.01, 0.99):
                clock = factor * slower * noise
                of = {"ideal_ns": 1e6 * batch, "clock_ratio": clock, "rest_ratio": 1.1}
                of["observed_ns"] = math.prod(of.values())
                of["idle_before_ns"] = 0.0
                if not clocked:
                    del of["clock_ratio"]
                numbers += [(name, variant, value, OPERATION) for name, value in of.items()]
                numbers.append(("tokens_per_s", variant, 1000.0 / clock, {}))
    return measured("batch_sequence", numbers, **options)


def test_each_sharding_has_a_table_whose_factors_multiply_to_the_observed_time():
    first, second = made().exhibits
    assert [e.title[-5:] for e in (first, second)] == ["fsdp1", "fsdp2"]
    assert first.headings[3:] == ("ideal", "clock", "rest", "observed", "idle before")
    # 1 ms · 1.5 · 1.1, and twice that: the geometric mean of 1, 1.01 and 0.99 is 0.99993.
    assert [row[2:7] for row in first.rows] == [
        ("b1s4", "1.00 ms", "1.50×", "1.10×", "1.65 ms"),
        ("b2s4", "2.00 ms", "1.50×", "1.10×", "3.30 ms"),
    ]
    assert "Not measured, and part of the rest: memory bound, instructions" in first.note


def test_the_clock_is_held_against_the_paper_only_where_it_was_sampled():
    clock, *throughputs = made().headlines
    assert clock.ours == pytest.approx(math.sqrt(1.5 * 1.2), rel=1e-3)
    assert "clock 1.34×, rest 1.10×" in clock.configuration
    assert [h.ours for h in throughputs] == pytest.approx([1.25, 1.25])
    unknown = made(clocked=False).headlines[0]
    assert (unknown.ours, unknown.why) == (None, "no clock was sampled")


def test_throughput_is_drawn_over_the_grid():
    throughput, _ = made().charts
    assert throughput.places == ("b1s4", "b2s4")
    assert [*throughput.series] == ["fsdp1", "fsdp2"]
    assert throughput.series["fsdp2"] == pytest.approx([1000 / 1.2] * 2, rel=1e-3)
    page = report.render(made(), "html")
    assert "Throughput over batch × sequence" in page
    assert '"barmode":"group"' in page.replace(" ", "")


def test_two_experiments_are_set_side_by_side_and_their_settings_named():
    found = Experiments(made(ranks=2, size=None), made(slower=2.0, ranks=8, size="8b"))
    assert found.differences == ["ranks: 2 and 8", "--size: None and 8b"]
    document = found.to_dict()
    clocks = [m for m in document["measures"] if m["measure"] == "clock_ratio"]
    assert len(clocks) == 4
    for clock in clocks:
        assert clock["labels"] == OPERATION
        assert clock["ratio"] == pytest.approx(2.0)
        assert clock["told"] is True
    ideal = next(m for m in document["measures"] if m["measure"] == "ideal_ns")
    assert (ideal["ratio"], ideal["told"]) == (1.0, False)
    idle = next(m for m in document["measures"] if m["measure"] == "idle_before_ns")
    assert (idle["a"], idle["ratio"], idle["told"]) == (0.0, None, None)
    text = to_text.render(page_of_two(found))
    # 4 variants · (5 of the operation + 1); clock, observed time and throughput differ.
    assert "24 numbers measured in both; 12 of them differ" in " ".join(text.split())


def test_experiments_of_two_workloads_are_not_compared():
    other = measured("gemm", [("median_flop_per_s", "random", 1e9, {})])
    with pytest.raises(InputError, match=r"is an experiment of batch_sequence, .* of gemm"):
        _ = Experiments(made(), other)
    nothing = measured("batch_sequence", [("tokens_per_s", "b4s4-fsdp1", 1.0, {})])
    with pytest.raises(InputError, match="have no variant and measure in common"):
        _ = Experiments(made(), nothing)


@pytest.mark.long
def test_a_variant_runs_and_is_compared_with_itself(tmp_path):
    words = ["bench", "batch_sequence", "--variants", "b1s4-fsdp2"]
    words += ["--repeats", "1", "--steps", "5"]
    place = tmp_path / "grid"
    done = CliRunner().invoke(cli, [*words, "-o", str(place), "--json", "--", "--kilo", "16"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    by_label: dict[tuple[str, str], dict[str, float]] = {}
    for row in document["measures"]:
        if "operation" in row["labels"]:
            key = (row["labels"]["operation"], row["labels"]["phase"])
            by_label.setdefault(key, {})[row["measure"]] = row["value"]
    of = by_label["layers.*.ffn.w1 mm", "forward"]
    factors = [value for name, value in of.items() if name.endswith("_ratio")]
    assert of["ideal_ns"] * math.prod(factors) == pytest.approx(of["observed_ns"], rel=0.01)
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
