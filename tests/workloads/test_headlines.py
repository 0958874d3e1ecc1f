"""The table of headlines, and the page that it is written into."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from chopper.experiments import results as ex
from chopper.experiments.prepare import program
from chopper.experiments.results import Headline
from chopper.reports import experiment as report
from chopper.reports import to_markdown
from chopper.reports.experiment import headline_table
from chopper.reports.page import Facts, Figure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def headlines():
    spec = importlib.util.spec_from_file_location("headlines", ROOT / "benchmarks/headlines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headline(**changes):
    said = {
        "system": "S",
        "claim": "c",
        "published": "9×",
        "primary": None,
        "unit": "×",
        "ours": 4.5,
    }
    return Headline(**(said | changes))


def test_a_row_holds_what_is_stated_what_is_here_the_ratio_and_the_interval():
    shown = headline_table(
        (
            headline(stated=9.0, ci95=(4.0, 5.0), configuration="here", chosen="to fit"),
            headline(unit="points", ours=-0.1534, ci95=(-1.0, 0.25)),
            headline(ours=None, why="no clock was sampled", stated=9.0),
            headline(unit="MB", ours=123456.0, basis="recorded"),
        )
    )
    head, _, *rows = to_markdown.table(shown)[0].split("\n")
    assert (
        "| published | primary source | here | 95 % | ratio | verdict | basis | configuration |"
        in head
    )
    assert rows == [
        "| S | c | 9× | – | 4.5× | 4 … 5 | 0.50× | differs | measured | here; chosen to fit |",
        "| S | c | 9× | – | −0.153 points | −1 … 0.25 | – | – | measured |  |",
        "| S | c | 9× | – | no clock was sampled | – | – | not shown here | – |  |",
        "| S | c | 9× | – | 123456 MB | – | – | – | recorded |  |",
    ]


def test_each_page_holds_what_is_written_from_the_experiments(headlines, tmp_path):
    """Headlines, intervals and command; nothing else of the page changes."""
    for page in (ROOT / "docs/workloads").glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text())
    made = measured(
        "gemm",
        [
            ("median_flop_per_s", variant, rate, {"dtype": "float32", "shape": "8x8x8"})
            for variant, rates in (("random", (1.0e9, 1.02e9)), ("zeros", (2.0e9, 2.04e9)))
            for rate in rates
        ],
        seed=0,
    )
    took = dict.fromkeys(headlines.EXPERIMENTS, "the machine lacks it") | {"gemm": 61.4}
    assert not [*headlines.unmarked(tmp_path)]
    headlines.write(tmp_path, [made], took, "python -m benchmarks.headlines")

    parts = {name: marked(headlines, tmp_path, name) for name in headlines.EXPERIMENTS}
    assert parts.pop("gemm") == "\n".join(headlines.measured(made, 61.4)).strip()
    assert set(parts.values()) == {"Not measured: the machine lacks it."}
    of_gemm = marked(headlines, tmp_path, "gemm")
    assert of_gemm.startswith("Measured 1970-01-01 on cpu, of a machine that is not known, in 61 s")
    assert "    chopper bench gemm --seed 7\n" in of_gemm  # without where it was kept
    assert "| 2× | 1.88 … 2.12 |" in of_gemm
    table = marked(headlines, tmp_path, "headlines")
    assert "in 1 min 01 s: gemm 61 s." in table
    assert "float32 products on zeros" not in table  # nothing published compares with it
    assert "Not measured: overlap (the machine lacks it)." in table
    for page in (ROOT / "docs/workloads").glob("*.md"):
        assert unmarked(page.read_text()) == unmarked((tmp_path / page.name).read_text())


def test_what_the_documentation_says_was_measured_comes_from_the_same_experiments(headlines):
    """A headline with a published number on a workload's page stands in the table, too."""
    docs = ROOT / "docs/workloads"
    table = marked(headlines, docs, "headlines").splitlines()
    for name in headlines.EXPERIMENTS:
        part = marked(headlines, docs, name)
        assert part.startswith(("Measured ", "Not measured: ")), name
        head = (
            "| system | number | published | primary source | here | 95 % | ratio | verdict "
            "| basis | configuration |"
        )
        lines = iter(part.splitlines())
        if head in lines:
            drawn = itertools.takewhile(lambda line: line.startswith("|"), lines)
            stated = {line for line in drawn if line.split(" | ")[2:4] != ["–", "–"]}
            assert {line for line in stated if not line.startswith("| ---")} <= set(table), name


def marked(headlines, docs, name):
    text = headlines.page_of(docs, name).read_text()
    return text.partition(headlines.begin(name))[2].partition(headlines.END)[0].strip()


def unmarked(text):
    return re.sub(r"(<!-- measured: .*? -->).*?(<!-- end -->)", r"\1\2", text, flags=re.DOTALL)


def test_the_law_of_the_link_is_drawn_through_all_repetitions():
    # T = 0.5 s + 40 MB / B, once 10 ms more and once less.
    at = {"unshaped": None, "1gbit": 1.25e8, "100mbit": 1.25e7}
    numbers: list[tuple[str, str, float, dict[str, str]]] = []
    for variant, rate in at.items():
        numbers += [("link_bytes_per_s", variant, rate, {})] if rate else []
        exact_ns = 1e9 * (0.5 + (40e6 / rate if rate else 0.0))
        numbers += [("median_step_ns", variant, exact_ns + off_ns, {}) for off_ns in (-1e7, 1e7)]
    made = measured("interconnect", numbers)
    blocks = [block for section in report.page(made).sections for block in section.blocks]
    [figure] = [b.figure for b in blocks if isinstance(b, Figure) and b.name == "sweep-0"]
    *points, line = figure["data"]
    assert [(t["name"], t["mode"], t["x"]) for t in points] == [
        (name, "markers", pytest.approx([x, x]))
        for name, x in (("unshaped", 0.0), ("1gbit", 0.008), ("100mbit", 0.08))
    ]
    assert (line["mode"], line["name"][:24]) == ("lines", "T = 0.50 s + 40.0 MB / B")
    assert line["y"] == pytest.approx([0.5, 3.7])
    two = measured("interconnect", [n for n in numbers if n[1] != "1gbit"])
    assert two.fits == ()  # a line through two rates fits anything


def test_where_the_link_cannot_be_made_the_model_alone_is_in_the_table(headlines):
    absent = {"interconnect": "shaping a link needs root", "gemm": "no torch"}
    rows = [h for h in headlines.rows([], absent) if h.system == "Interconnect"]
    assert [(h.stated, round(h.ours, 1), h.verdict) for h in rows] == [
        (39.8, 40.3, "consistent"),
        (4.4, 4.4, "by choice"),
    ]
    assert [h.chosen for h in rows] == ["in T_c to fit the row of 4.4 s", "in T_c to fit this row"]
    assert {h.basis for h in rows} == {"model"}


def test_each_estimate_is_held_against_the_number_that_is_stated(headlines, monkeypatch):
    monkeypatch.delenv("CHOPPER_TRACES", raising=False)
    rows = headlines.rows([], {})
    clocks = [h for h in rows if h.system == "Chopper: DVFS" and h.ours is not None]
    assert [h.basis for h in clocks] == ["recorded", "recorded"]
    assert all(h.chosen for h in rows if h.ours is not None)
    # Random numbers and zeros, one H100: as the recordings' own test works out by hand.
    assert [h.ours for h in clocks] == pytest.approx([14.4, 4.8], rel=0.05)
    assert {h.system: h.verdict for h in rows} == {
        "Meta RoCE: E-ECMP": "by choice",  # of the number of flows
        "Data-movement wall": "by choice",  # two thirds is our definition
        "Latency wall": "differs",  # 2.8e31 by the publication's own constants
        "VRAM rule": "differs",
        "Cost of ownership": "by choice",  # the price list is of the same source
        "Chopper: DVFS": "not shown here",
        "UniOrch": "not shown here",
    }


@pytest.mark.parametrize(
    ("headline", "verdict"),
    [
        (Headline(system="a", claim="b", ours=1.0), ""),
        (Headline(system="a", claim="b", stated=2.0), "not shown here"),
        (Headline(system="a", claim="b", ours=1.85, stated=2.0), "reproduced"),
        (Headline(system="a", claim="b", ours=1.85, stated=2.0, basis="model"), "consistent"),
        (Headline(system="a", claim="b", ours=1.5, stated=2.0, ci95=(1.1, 1.9)), "reproduced"),
        # A factor that was chosen is neither, whatever comes out on this machine.
        (Headline(system="a", claim="b", ours=1.85, stated=2.0, by_choice=True), "by choice"),
        (Headline(system="a", claim="b", ours=9.0, stated=2.0, by_choice=True), "by choice"),
        (Headline(system="a", claim="b", stated=2.0, by_choice=True), "not shown here"),
        (Headline(system="a", claim="b", ours=1.5, stated=2.0, ci95=(1.4, 1.6)), "differs"),
    ],
)
def test_a_verdict_is_of_the_interval_and_a_tenth(headline, verdict):
    assert headline.verdict == verdict


def measured(workload, numbers, *, ranks=2, device="cpu", **options):
    """An experiment whose variants measured (name, variant, value, labels); nothing was traced."""
    rows = [(variant, name, tuple(labels.items()), v) for name, variant, v, labels in numbers]
    names = dict.fromkeys(variant for variant, *_ in rows)
    plan = ex.Plan(
        chopper_version="0",
        workload=workload,
        summary="made by hand",
        command=["chopper", "bench", workload, "-o", "kept/here", "--force", "--seed", "7"],
        created_ns=1,
        ranks=ranks,
        device=device,
        options=options,
        steps=False,
        baseline=next(iter(names)),
        variants=[ex.VariantPlan(name=name, summary="") for name in names],
    )
    drawn = tuple(ex.rows_of(rows, plan.baseline))
    return ex.Experiment(Path("made"), plan, drawn, {}, program=program(workload))


def test_a_configuration_says_what_it_was_chosen_for_unless_the_user_chose_it():
    losses = [("loss", variant, 2.0, {"step": 0}) for variant in ("fsdp1", "fsdp2")]
    sentences = [
        {h.chosen for h in measured("fsdp", losses, **options).headlines if h.ours is not None}
        for options in ({}, {"steps": 100})
    ]
    assert sentences == [{"to end within minutes on two cores"}, {""}]
    # What was left open is kept as the workload filled it in; only the command tells who did.
    numbers: list[tuple[str, str, float, dict[str, str]]] = [
        (name, variant, value, {"operation": "all_gather_matmul"})
        for variant in ("sequential", "chunked")
        for name, value in (
            ("time_ns", 1e9),
            ("compute_ns", 7e8),
            ("transfer_ns", 7e8),
            ("bound_over_time_ratio", 1),
        )
    ]
    filled_in = measured("overlap", numbers, m=1024, k=2048, n=1024)
    plan = replace(filled_in.plan, command=[*filled_in.plan.command, "--m=1024"])
    asked_for = ex.Experiment(filled_in.path, plan, filled_in.rows, {}, program=filled_in.program)
    said = [[h.chosen[:12] for h in e.headlines] for e in (filled_in, asked_for)]
    assert said == [["so that prod"], [""]]


def test_a_terminal_says_what_a_number_rests_on_and_what_it_was_chosen_for():
    rows = [
        headline(configuration="so", chosen="to fit"),
        headline(basis="model"),
        headline(basis="recorded"),
        headline(ours=None, why="no clock was sampled", basis="recorded"),
    ]
    blocks = report.headlines_page("made", rows).sections[0].blocks
    shown = [block.facts[-1] for block in blocks if isinstance(block, Facts)]
    assert [(fact.label, fact.value, fact.note) for fact in shown] == [
        ("here", "4.5×", "so; chosen to fit"),
        ("by a model", "4.5×", ""),
        ("recorded elsewhere", "4.5×", ""),
        ("here", "no clock was sampled", ""),
    ]


def test_losses_agree_only_where_each_step_has_one():
    losses = [("loss", "fsdp1", 2.0, {"step": 0}), ("loss", "fsdp1", 1.0, {"step": 1})]
    losses.append(("loss", "fsdp2", 2.0, {"step": 0}))
    complete = [*losses, ("loss", "fsdp2", 1.25, {"step": 1})]

    def found(numbers):
        drawn = measured("fsdp", numbers).headlines
        return next(h for h in drawn if "difference of a loss" in h.claim)

    assert found(complete).ours == 0.25
    assert found(losses).ours is None
    assert found(losses).why.startswith("fsdp2 has no loss at some steps")


@pytest.mark.parametrize(
    ("device", "similar", "why"),
    [
        ("cpu", ([0.5, 0.51], [0.9, 0.91]), "a CPU's memory has none"),
        ("cuda", ([0.5, 0.9], [0.6, 0.91]), "the repetitions show no difference"),
        ("cuda", ([0.5, 0.51], [0.9, 0.91]), ""),
    ],
)
def test_allocations_are_held_against_the_claim_only_where_they_can_show_it(
    monkeypatch, device, similar, why
):
    of = dict(zip(("fsdp1", "fsdp2"), similar, strict=True))
    monkeypatch.setattr("chopper.workloads.fsdp._means", lambda *words: of[words[3]])
    numbers: list[tuple[str, str, float, dict[str, object]]] = [
        ("step_ns", variant, 1e8, {}) for variant in of
    ]
    drawn = measured("fsdp", numbers, device=device).headlines
    headline = next(h for h in drawn if h.claim.startswith("steps' allocations alike"))
    assert (headline.ours is None) == bool(why)
    assert why in headline.why
    assert headline.verdict == ("not shown here" if why else "")
    assert ("fsdp1" in headline.configuration) == (not why)


@pytest.mark.parametrize(
    ("ranks", "linked", "said"),
    [
        (2, True, "2 ranks on cpu, each end of their link sends at most 125 MB/s"),
        # No root, or more than two: the rate that was asked for is nobody's.
        (2, False, "2 ranks on cpu, no shaped link"),
        (1, False, "one cpu, shards from pinned host memory"),
    ],
)
def test_overlap_says_what_chunks_travelled_over(ranks, linked, said):
    numbers = []
    for variant, time_ns in (("sequential", 2e9), ("chunked", 1e9), ("library", 2e9)):
        keep = {"time_ns": time_ns, "compute_ns": 1e9, "transfer_ns": 5e8}
        keep |= {"bound_over_time_ratio": 0.9, "cores_busy_ratio": 0.95}
        labels = {"operation": "all_gather_matmul"}
        numbers += [(name, variant, value, labels) for name, value in keep.items()]
        numbers += [("link_bytes_per_s", variant, 1.25e8, {})] if linked else []
    headline, of_library = measured("overlap", numbers, ranks=ranks, rate="1gbit").headlines
    assert of_library.ours is not None
    assert of_library.published is None  # NCCL's, between GPUs
    assert headline.ours == pytest.approx(2)
    assert headline.configuration.startswith(
        "90.0 % of max(T_compute, T_transfer) + first chunk, its cores busy for 95.0 % of the "
    )
    assert headline.configuration.endswith(said)


def test_zeros_are_held_against_random_numbers_where_both_are_quick():
    rates = {
        # Quickest on zeros, of which half is luck: on random numbers it was slow.
        "64x64x64": {"random": 2e9, "zeros": 6e9},
        "512x512x512": {"random": 5e9, "zeros": 5.5e9},
    }
    numbers = [
        ("median_flop_per_s", variant, rate, {"dtype": "float32", "shape": shape})
        for shape, of in rates.items()
        for variant, rate in of.items()
    ]
    (headline,) = measured("gemm", numbers).headlines
    assert headline.claim.endswith("512x512x512")
    assert headline.ours == pytest.approx(1.1)


def test_each_ratio_of_loaders_names_the_workers_that_it_is_held_against():
    numbers: list[tuple[str, str, float, dict[str, object]]] = []
    for variant, rate, memory in (
        ("loader", 1.0, 4e9),
        ("tuned", 3.0, 13e9),
        ("balanced", 12.0, 1e9),
    ):
        numbers += [
            ("samples_per_s", variant, rate, {}),
            ("loader_memory_bytes", variant, memory, {}),
        ]
    drawn = measured("dataloader", numbers, **asked(latency=0)).headlines
    found = {(round(h.ours, 3), h.configuration) for h in drawn if h.ours is not None}
    where = "workers, 5 sources of 12 MB"
    assert found == {
        (4.0, f"2 ranks × 24 {where}"),
        (4.0, f"2 ranks × 8 {where}"),
        (12.0, f"2 ranks × 8 {where}"),
        (13.0, f"2 ranks × 24 {where}"),
    }


def asked(**changes):
    """Options of a run of the data loader: 100 reads under way at most, from 2 actors."""
    options = {"workers": 8, "tuned": 24, "sources": 5, "state": 12, "latency": 150, "rate": 0}
    options |= {"batch": 4, "tensor": 1, "threads": 50, "loaders": 2, "prefetch": 64}
    return options | {"tokens": 40, "longest": 256} | changes


def of_loaders(actors_per_s, **changes):
    """Headlines of a tuned DataLoader, its control and actors, by their number."""
    numbers: list[tuple[str, str, float, dict[str, object]]] = []
    for variant, rate, memory in (
        ("tuned", 100.0, 400e6),
        ("concurrent", 200.0, 300e6),
        ("balanced", actors_per_s, 100e6),
    ):
        numbers += [
            ("samples_per_s", variant, rate, {}),
            ("loader_memory_bytes", variant, memory, {}),
            ("own_programs_ratio", variant, 0.25, {}),
        ]
    drawn = measured("dataloader", numbers, **asked(**changes)).headlines
    return [h for h in drawn if "balanced actors" in h.claim]


def test_a_factor_of_loaders_is_of_a_choice_whatever_the_machine():
    # 10 readers that wait 100 ms: 100 a second. Actors have 100 under way: the rate of 400.
    choice = {"tuned": 5, "latency": 100, "rate": 400}
    for actors_per_s in (370.0, 400.0, 1000.0):
        tuned, control, memory = of_loaders(actors_per_s, **choice)
        assert [h.verdict for h in (tuned, control, memory)] == ["by choice"] * 3
        assert tuned.ours == pytest.approx(actors_per_s / 100)
        assert control.ours == pytest.approx(actors_per_s / 200)
        # At half the latency readers get 200; at twice actors wait, too: 500 are more than 400.
        assert "give 4.00×; by the same model 2.00× at half the latency, 8.00× at twice" in (
            tuned.chosen
        )
        assert "cores used 25.0 % by tuned, cores used 25.0 % by balanced" in tuned.configuration
        # 60 MB of state in each of 10 readers, and in actors of 100 MB.
        assert "1.4× with half of it, 6.2× with twice" in memory.chosen
    farther, *_ = of_loaders(320.0, **choice | {"latency": 300})
    # 100 under way at 300 ms are 333 a second, less than the rate; 10 readers get 33.
    assert farther.ours == pytest.approx(3.2)
    assert "give 10.00×" in farther.chosen


def test_actors_that_the_machine_limits_show_nothing():
    for headline in of_loaders(350.0, tuned=5, latency=100, rate=400)[:2]:
        assert (headline.ours, headline.verdict) == (None, "not shown here")
        assert headline.why.startswith("actors got 350 of the 400 requests per second")
    assert of_loaders(350.0, latency=0)[0].chosen == ""  # the disk's own, which nobody knows


def rates_of_collectives():
    """Two repetitions of each, at two sizes, by α = 100 µs and the link's 1 GB/s each way."""
    times_ns = {"all_reduce": 2.2e6, "all_gather": 1e6, "reduce_scatter": 3e6, "send_receive": 1e6}
    factors = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "send_receive": 1.0}
    numbers: list[tuple[str, str, float, dict[str, object]]] = []
    for name, time_ns in times_ns.items():
        numbers += [("latency_ns", "c", 1e5 * n, {"collective": name}) for n in (0.9, 1.1)]
        rate = 1.1 * (1 << 20) / time_ns * 1e9 * factors[name]
        numbers.append(("fitted_bus_bandwidth_bytes_per_s", "c", rate, {"collective": name}))
        for size, n in ((1 << 10, 0.1), (1 << 20, 1.0)):
            labels = {"collective": name, "size_bytes": size}
            rate = size / (time_ns * n) * 1e9 * factors[name]
            numbers += [
                ("time_ns", "c", time_ns * n, labels),
                ("bus_bandwidth_bytes_per_s", "c", rate, labels),
            ]
    return numbers


def test_collectives_are_held_against_the_link_and_against_their_laws():
    alpha, link, parts, fit = measured("collectives", rates_of_collectives()).headlines
    assert (alpha.unit, alpha.ours) == ("µs", pytest.approx(100))
    # 8.4 µs and two steps of 3.4 or 9.6 µs between two ranks.
    assert alpha.primary is None  # gloo's says nothing of NCCL's 15.2 µs over NVLink
    assert alpha.ci95 is not None
    assert link.claim.endswith("send and receive, 1 MiB")  # not the small message
    assert link.ours == pytest.approx(1 / 2.2)
    assert "all_gather 0.50×, reduce_scatter 0.17×" in link.configuration
    assert parts.ours == pytest.approx(2.2 / (1 + 3))
    assert fit.ours == pytest.approx(1 / 1.1)
    assert (link.stated, parts.stated, alpha.stated, fit.stated) == (1.0, 1.0, None, None)


def test_memory_is_that_of_the_largest_array_and_its_peak_stays_unknown():
    numbers = []
    for size, scale in ((1 << 20, 10), (1 << 28, 1)):
        for kernel, rate in (("copy", 20e9), ("scale", 19e9), ("add", 22.5e9), ("triad", 22e9)):
            for variant, n in (("random", 1.0), ("zeros", 1.25)):
                labels = {"array_bytes": size, "kernel": kernel}
                numbers.append(("bandwidth_bytes_per_s", variant, rate * scale * n, labels))
    triad, scale_over, add_over, zeros = measured("membw", numbers, ranks=1).headlines
    assert (triad.ours, triad.unit, triad.primary, triad.ratio) == (22.0, "GB/s", None, None)
    assert "arrays of 256 MiB; the peak memory bandwidth is unknown for" in (triad.configuration)
    assert scale_over.ours == pytest.approx(0.95)
    assert add_over.ours == pytest.approx(1.125)
    assert zeros.ours == pytest.approx(1.25)
    assert zeros.configuration.endswith("no clock was sampled, no power was sampled")
    random = [n for n in numbers if n[1] == "random"]
    assert len(measured("membw", random, ranks=1).headlines) == 3
