"""Workloads of one dimension of parallelism: right results, known loads, theory, attribution."""

from __future__ import annotations

from statistics import fmean

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from chopper.errors import UsageError  # noqa: E402
from chopper.experiments.loading import load  # noqa: E402
from chopper.experiments.prepare import prepare  # noqa: E402
from chopper.experiments.results import Experiment  # noqa: E402
from chopper.workloads import dimensions, ring, training  # noqa: E402
from chopper.workloads.timeline import Timeline  # noqa: E402
from tests.workloads.test_headlines import measured  # noqa: E402


@pytest.mark.parametrize(
    ("name", "ranks", "options", "message"),
    [
        ("pipeline", 1, [], "--ranks 1: one rank has no other to share the work with"),
        ("pipeline", 2, ["--blocks", "3"], "--blocks 3: do not divide into 2 stages of inter"),
        ("pipeline", 2, ["--micro-batches", "5"], "--micro-batches 5: is not a multiple of 2"),
        ("experts", 1, [], "--ranks 1: one rank has no other to share the work with"),
        ("experts", 3, [], "--experts 4: do not divide among 3 ranks"),
        ("experts", 2, ["--hot", "5"], "--hot 5: 4 experts have as many even shares in all"),
        ("context", 1, [], "--ranks 1: one rank has no other to share the work with"),
        ("context", 2, ["--tiles", "3"], "--tiles 3: is odd, a zigzag has two halves"),
        ("context", 2, ["--sequence", "100"], "does not divide into 2 ranks of 8 tiles"),
        ("tensor", 1, [], "--ranks 1: one rank has no other to share the work with"),
        ("tensor", 3, [], "--ranks 3: do not divide 2 heads of keys and values and an inner"),
    ],
)
def test_impossible_layouts_are_refused_in_one_line(name, ranks, options, message):
    with pytest.raises(UsageError, match=message) as refused:
        prepare(name, ranks=ranks, options=[*options, "--device", "cpu"])
    assert "\n" not in str(refused.value)


def test_a_schedule_with_too_few_micro_batches_is_left_out():
    launch = prepare(
        "pipeline", variants="all", options=["--micro-batches", "2", "--device", "cpu"]
    )
    assert "dualpipev" not in [variant.name for variant in launch.variants]
    assert any("dualpipev: needs a micro-batch for each of its 4 stages" in n for n in launch.notes)


@pytest.mark.parametrize(
    ("variant", "weight_ns", "share"),
    [
        # m = 4 micro-batches on p = 2 ranks, F = 1 and B = 2 in a stage: 12 of work a stage.
        ("gpipe", 0.0, 3 / 15),
        ("1f1b", 0.0, 3 / 15),
        # Two stages on each rank: 24 of work, the same bubble.
        ("interleaved", 0.0, 3 / 27),
        ("looped-bfs", 0.0, 3 / 27),
        ("zero-bubble", 1.0, 1 / 25),  # F + B − 2W
        ("zero-bubble", 1.8, 0.0),
        ("zbv", 1.0, 0.0),
        ("dualpipev", 1.0, 2 / 26),  # F + 2B − 3W
    ],
)
def test_the_bubble_of_each_schedule_is_that_of_its_publication(variant, weight_ns, share):
    numbers: list[tuple[str, str, float, dict[str, object]]] = [
        ("forward_ns", variant, 1.0, {}),
        ("backward_ns", variant, 2.0, {}),
        ("weight_ns", variant, weight_ns, {}),
        ("bubble_ratio", variant, 0.3, {"rank": 0}),
        ("bubble_ratio", variant, 0.2, {"rank": 1}),
    ]
    options = {"micro_batches": 4, "virtual": 2, "extra": 0}
    ours, attributed = measured("pipeline", numbers, **options).headlines
    assert ours.ours == pytest.approx(25)
    assert ours.stated == pytest.approx(100 * share)
    assert "rank 0 30.0 %, rank 1 20.0 %" in ours.configuration
    assert (attributed.ours, attributed.why) == (None, "nothing was attributed")
    assert attributed.stated == pytest.approx(25)
    # Of unequal stages the formula says nothing.
    uneven, _ = measured("pipeline", numbers, **options | {"extra": 2}).headlines
    assert uneven.stated is None


def test_uneven_loads_cost_the_busiest_ranks_excess():
    numbers: list[tuple[str, str, float, dict[str, object]]] = []
    for variant, step_ns, experts_ns in (
        ("balanced", 100e6, (40e6, 40e6)),
        ("skewed", 120e6, (60e6, 20e6)),
    ):
        numbers.append(("traced_step_ns", variant, step_ns, {}))
        for rank, ns in enumerate(experts_ns):
            numbers.append(("experts_ns", variant, ns, {"rank": rank}))
            numbers.append(("exchange_ratio", variant, 0.1, {"rank": rank}))
            numbers.append(("tokens_count", variant, ns / 1e4, {"layer": 0, "expert": rank}))
    cost = next(h for h in measured("experts", numbers).headlines if h.unit == "ms")
    assert (cost.ours, cost.stated) == (20, 20)
    assert "busiest expert 1.5× the mean" in cost.configuration


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_causal_ring_gives_rank_i_its_odd_part_and_a_zigzag_all_the_same(monkeypatch, ranks):
    tiles, n = 64, ranks
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    shares = {}
    for zigzag in (False, True):
        work = []
        for rank in range(ranks):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            place = ring.Ring(tiles, tiles, zigzag=zigzag, timeline=Timeline(torch.device("cpu")))
            work.append(sum(pair.keys.stop for turn in range(n) for pair in place.pairs(turn)))
        shares[zigzag] = [each / sum(work) for each in work]
    assert shares[False] == pytest.approx([(2 * i + 1) / n**2 for i in range(n)], abs=0.01)
    assert shares[True] == pytest.approx([1 / n] * n, abs=1e-9)


CASES = "tests.workloads.dimension_cases"


@pytest.mark.parametrize("of", [2, 3])
def test_a_ring_computes_what_whole_attention_does(ranks, of):
    assert max(map(max, ranks.run(CASES, "ring_errors", of))) < 1e-6


@pytest.mark.parametrize("shares", [[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [1.0, 0.0, 0.0, 0.0]])
def test_experts_on_other_ranks_answer_as_on_one(ranks, shares):
    assert max(map(max, ranks.run(CASES, "mixture_errors", 2, shares=shares))) < 1e-5
    counts = [
        count
        for of_rank in ranks.run(CASES, "mixture_loads", 2, shares=shares)
        for count in of_rank
    ]
    assert sum(counts) == 1024
    assert [count / 1024 for count in counts] == pytest.approx(shares, abs=0.02)


def test_blocks_that_are_cut_compute_as_whole_ones(ranks):
    assert max(map(max, ranks.run(CASES, "cut_errors", 2))) < 1e-5


DIMENSIONS = {
    "pipeline": "pipeline",
    "experts": "expert",
    "context": "context",
    "tensor": "tensor",
}


def bench(output, name: str, *options: str, variants: str | None = None) -> Experiment:
    """Run a workload at a small size in two ranks, and load it."""
    from chopper.cli.bench_ import command

    words = [name, "-o", str(output), "--ranks", "2", "--repeats", "1", "--steps", "6", "--json"]
    words += ["--variants", variants] if variants else []
    done = CliRunner().invoke(
        command,
        [*words, "--", *options, "--device", "cpu"],
        standalone_mode=False,
        catch_exceptions=False,
    )
    assert done.return_value == 0, done.output
    found = load(output)
    for attributions in found.attributions.values():
        for rank in attributions[0].recording.manifest.ranks:
            [place] = rank.coordinates
            assert (place.index, place.size) == (rank.rank, 2)
            assert place.dimension == DIMENSIONS[name]
    return found


def attributed_alike(found: Experiment, variant: str, measure: str) -> None:
    """Hold the attribution's share of the steps against the workload's own.

    Gaps between operators count as work in the workload's, and on a busy machine they are long. So
    what the workload calls waiting lies within exposed communication and idle time.
    """
    own, communication, idle = (
        fmean(dimensions.over_ranks(shares))
        for shares in (
            dimensions.measured_by_rank(found, variant, measure),
            dimensions.attributed_by_rank(found, variant),
            dimensions.attributed_by_rank(found, variant, "idle"),
        )
    )
    assert 0 < own < 1
    assert own - 0.05 < communication + idle < own + 0.35
    assert communication > own / 2


@pytest.mark.slow
@pytest.mark.long
def test_every_schedule_trains_alike_and_an_imbalanced_stage_shows(tmp_path):
    size = ["--sequence", "64", "--batch", "1"]
    found = bench(tmp_path / "a", "pipeline", *size, variants="all")
    assert len(found.variants) == 7
    worst = training.worst_loss_ratio(found, found.variants)
    assert worst is not None
    assert worst[1] < 1e-5
    for variant in found.variants:
        attributed_alike(found, variant, "bubble_ratio")
    # As large as by default: on a busy machine, small stages mostly wait for a core.
    uneven = bench(tmp_path / "b", "pipeline", "--extra", "4", variants="1f1b")
    for by_rank in (
        dimensions.measured_by_rank(uneven, "1f1b", "bubble_ratio"),
        dimensions.attributed_by_rank(uneven, "1f1b"),
    ):
        assert by_rank[0][0] > by_rank[1][0] + 0.1  # rank 0 waits for the heavy last stage
    [attribution] = uneven.attributions["1f1b"]
    assert [rank.steps for rank in attribution.ranks] == [4, 4]
    [imbalance] = uneven.share("communication.pipeline.stage_imbalance", "1f1b")
    assert imbalance > 0.02


@pytest.mark.slow
@pytest.mark.long
def test_uneven_experts_are_waited_for(tmp_path):
    found = bench(tmp_path / "run", "experts", "--tokens", "512", "--layers", "1", "--hot", "3")
    for variant in ("balanced", "skewed"):
        attributed_alike(found, variant, "exchange_ratio")
    first, second = dimensions.measured_by_rank(found, "skewed", "experts_ns").values()
    # Of the tokens, rank 0's experts have 3/4 + 1/12, rank 1's 1/6.
    assert first[0] > 2 * second[0]
    tokens = found.find("tokens_count", "skewed", layer=0, expert=0)
    assert tokens is not None
    assert tokens.estimate.value == pytest.approx(3 / 4 * 1024, rel=0.02)


@pytest.mark.slow
@pytest.mark.long
def test_a_zigzag_evens_a_causal_ring_out(tmp_path):
    found = bench(tmp_path / "run", "context", "--sequence", "1024", "--layers", "1")
    first, second = (
        dimensions.measured_by_rank(found, variant, "attention_ns")
        for variant in ("contiguous", "zigzag")
    )
    # Of 136 tiles the last rank has 100, or 68.
    assert first[1][0] > 1.5 * first[0][0]
    assert second[1][0] / second[0][0] < 0.75 * first[1][0] / first[0][0]
    attributed_alike(found, "contiguous", "waiting_ratio")


@pytest.mark.slow
@pytest.mark.long
def test_all_reduces_over_a_slow_link_are_exposed(tmp_path):
    options = ["--blocks", "2", "--sequence", "64", "--rate", "100mbit"]
    found = bench(tmp_path / "run", "tensor", *options)
    assert found.value("all_reduces_count") == 4 * 2  # two per block and direction
    assert found.value("all_reduce_bytes") == 4 * 64 * 256 * 4
    attributed = dimensions.attributed_by_rank(found, "tensor")
    assert all(0.2 < share < 1 for [share] in attributed.values())
    if found.value("link_bytes_per_s") is not None:
        # 8 all-reduces of 262 kB at 12.5 MB/s take 168 ms, products a tenth of that.
        step_ns = found.value("traced_step_ns")
        assert step_ns is not None
        assert step_ns > 150e6
