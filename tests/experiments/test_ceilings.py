"""What the microbenchmarks measured becomes the ceilings of stored calibrations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.errors import InputError, UsageError
from chopper.experiments import ceilings
from chopper.experiments import results as ex
from chopper.experiments.loading import load
from chopper.hardware import calibration
from chopper.hardware.calibration import Calibration, Measured, load_all, save
from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.parts import RunWriter

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def recorded(
    path: Path,
    workload: str,
    repeats: list[list[tuple[str, float, dict[str, Any]]]],
    *,
    ranks: int = 1,
    threads: int = 2,
    variant: str = "random",
    hostname: str = "box",
) -> Path:
    """An experiment of one variant; in each repetition all ranks measured the same."""
    names = [f"{variant}-{i + 1}" for i in range(len(repeats))]
    path.mkdir()
    for name, measures in zip(names, repeats, strict=True):
        for rank in range(ranks):
            part = RunWriter(path / name, rank)
            part.manifest.world_size = ranks
            part.manifest.status = "complete"
            part.manifest.hostname = hostname
            part.manifest.backend = "gloo" if ranks > 1 else None
            part.manifest.environment = {
                "cpu": "A Processor",
                "cores_allowed": "2",
                "torch_threads": str(threads),
                "torch": "2.13.0",
            }
            part.manifest.measures = [
                m.Measure(name=n, value=value, labels=labels) for n, value, labels in measures
            ]
            part.save()
        finalize(path / name, workload=workload)
    plan = ex.Plan(
        chopper_version="0",
        workload=workload,
        summary="made by hand",
        command=["chopper", "run", workload],
        created_ns=2_000_000_000_000_000_000,
        ranks=ranks,
        device="cpu",
        options={},
        steps=False,
        baseline=None,
        variants=[ex.VariantPlan(name=variant, summary="", runs=names)],
    )
    ex.write_plan(path, plan)
    return path


def gemm(path: Path, **how: Any) -> Path:
    def repeat(best: float, median: float) -> list[tuple[str, float, dict[str, Any]]]:
        at = {"dtype": "float32", "shape": "512x512x512"}
        return [("best_flop_per_s", best, at), ("median_flop_per_s", median, at)]

    return recorded(path, "gemm", [repeat(9e10, 8e10), repeat(10e10, 6e10)], **how)


def membw(path: Path, largest: int = GIB, **how: Any) -> Path:
    found = [
        (name, rate * factor, {"kernel": "triad", "array_bytes": size})
        for size, rate in ((1 << 18, 90e9), (largest, 9e9))
        for name, factor in (("best_bandwidth_bytes_per_s", 1.0), ("bandwidth_bytes_per_s", 0.8))
    ]
    return recorded(path, "membw", [found], **how)


def collectives(path: Path, **how: Any) -> Path:
    found = [
        (name, rate, {"collective": collective, "size_bytes": 1 << 20})
        for collective, best, median in (("all_reduce", 2e9, 1.5e9), ("broadcast", 5e9, 4e9))
        for name, rate in (
            ("best_bus_bandwidth_bytes_per_s", best),
            ("bus_bandwidth_bytes_per_s", median),
        )
    ]
    return recorded(path, "collectives", [found], **{"ranks": 2, "threads": 1, **how})


def stored(store: Path, *, ranks: int, threads: int, **changes: Any) -> Calibration:
    def rate(what: str, per_s: float) -> Measured:
        return Measured(
            what=what, best_per_s=per_s, median_per_s=per_s, spread_ratio=0.0, repeats_count=3
        )

    said: dict[str, Any] = {
        "kind": "full",
        "created_ns": 1_000_000_000_000_000_000,
        "chopper_version": "0",
        "torch_version": "2.13.0",
        "hostname": "box",
        "device_type": "cpu",
        "device_name": "A Processor",
        "ranks": ranks,
        "threads": threads,
        "cores": 2,
        "gemm": {"fp32": [rate("fp32 1x1x1", 1.0)], "bf16": [rate("bf16 1x1x1", 5.0)]},
        "memory": [rate("copy", 2.0)],
        "link": [rate("all_reduce 1 MiB", 3.0)],
        "launch_ns": 900,
        "absent": {"link": "left out"},
    }
    made = Calibration(**(said | changes))
    save(made, store)
    return made


def test_gemm_and_membw_alone_make_a_calibration(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    [made] = ceilings.feed([gemm(tmp_path / "gemm"), membw(tmp_path / "membw")], store)
    assert (made.hostname, made.device_name, made.ranks, made.threads) == (
        "box",
        "A Processor",
        1,
        2,
    )
    # The fastest repeat of all repetitions, and the middle of their medians.
    assert made.flop_per_s("float32") == 10e10
    [product] = made.gemm["fp32"]
    assert product.what == "fp32 512x512x512"
    assert product.median_per_s == 7e10
    assert product.spread_ratio == pytest.approx(1e10 / 7e10)
    # The small array lies in a cache: it is no ceiling of memory.
    assert made.memory_bytes_per_s == 9e9
    assert [(r.what, r.size_bytes) for r in made.memory] == [("triad", 3 * GIB)]
    assert made.link_bytes_per_s is None
    assert not store.exists()


def test_what_was_not_measured_stays(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    stored(store, ranks=1, threads=2)
    other = stored(store, ranks=2, threads=1, hostname="elsewhere")
    paths = [collectives(tmp_path / "link"), gemm(tmp_path / "gemm")]
    [made] = ceilings.feed(paths, store)
    assert made.flop_per_s("fp32") == 10e10
    assert made.flop_per_s("bf16") == 5.0
    assert made.memory_bytes_per_s == 2.0
    assert made.launch_ns == 900
    # A rank alone has no link: that between two is kept with it.
    assert (made.link_bytes_per_s, made.link_ranks, made.link_backend) == (2e9, 2, "gloo")
    assert made.absent == {}
    assert set(made.fed) == {"gemm", "link"}
    assert other in load_all(store)


def test_a_link_completes_the_calibration_of_its_ranks(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    stored(store, ranks=2, threads=1)
    stored(store, ranks=2, threads=2)
    stored(store, ranks=4, threads=1)
    [made] = ceilings.feed([collectives(tmp_path / "link")], store)
    assert (made.ranks, made.threads, made.link_bytes_per_s) == (2, 1, 2e9)


def test_products_of_two_ranks_are_the_middle_ranks(tmp_path: Path) -> None:
    paths = [gemm(tmp_path / "a", ranks=2), membw(tmp_path / "b", ranks=2)]
    [made] = ceilings.feed(paths, tmp_path / "store.json")
    assert made.ranks == 2
    assert made.flop_per_s("fp32") == 10e10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: recorded(p, "fsdp", [[("loss", 1.0, {})]]),
            "is an experiment of fsdp; ceilings",
        ),
        (lambda p: gemm(p, variant="zeros"), "zeros are no ceiling"),
        (lambda p: membw(p, 1 << 20), "largest array of 1 MiB may lie in a cache"),
        (lambda p: recorded(p, "gemm", [[("loss", 1.0, {})]]), "holds no rates"),
        (collectives, "with --ranks 2 --threads 1 is stored that this could complete"),
        (gemm, "first `chopper calibrate --ranks 1 --threads 2`"),
        (lambda p: p, r"experiment\.json: cannot be read"),
    ],
)
def test_what_is_no_ceiling_is_refused_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        ceilings.feed([make(tmp_path / "made")], tmp_path / "store.json")
    assert "\n" not in str(refused.value)


def test_the_command_stores_shows_and_says_where_from(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    words = ["calibrate", "-o", str(store)]
    for path in (gemm(tmp_path / "a"), membw(tmp_path / "b"), collectives(tmp_path / "c")):
        words += ["--from", str(path)]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "matrix products from chopper bench gemm, 2 repetitions" in shown.stdout
    assert "link from chopper bench collectives, 1 repetition" in shown.stdout
    [kept] = load_all(store)
    assert (kept.flop_per_s("fp32"), kept.memory_bytes_per_s, kept.link_bytes_per_s) == (
        10e10,
        9e9,
        2e9,
    )
    again = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    document = json.loads(again.stdout)
    assert document == {
        "schema": "chopper.calibration/1",
        "calibrations": [calibration.to_manifest(kept)],
    }


@pytest.mark.parametrize("word", ["--quick", "--ranks=2", "--force"])
def test_how_to_measure_is_no_matter_when_nothing_is_measured(tmp_path: Path, word: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined with --from"):
        CliRunner().invoke(
            cli, ["calibrate", word, "--from", str(tmp_path)], catch_exceptions=False
        )


@pytest.mark.slow
@pytest.mark.long
def test_what_the_microbenchmarks_really_measure_becomes_the_ceilings(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    tiny = {
        "gemm": ["--variants", "random", "--", "--shapes", "64x64x64", "--dtypes", "float32"],
        "membw": [
            "--",
            "--smallest",
            str(128 << 20),
            "--largest",
            str(128 << 20),
            "--repeats",
            "2",
        ],
        "collectives": ["--", "--smallest", "65536", "--largest", "65536", "--repeats", "3"],
    }
    words = ["calibrate", "-o", str(tmp_path / "store.json"), "--json"]
    for name, options in tiny.items():
        at = options.index("--")
        before = ["run", name, "-o", str(tmp_path / name), "--repeats", "1", *options[:at]]
        done = CliRunner().invoke(
            cli, [*before, *options[at:], "--device", "cpu"], standalone_mode=False
        )
        assert done.return_value == 0, done.output
        words += ["--from", str(tmp_path / name)]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    [made] = json.loads(shown)["calibrations"]
    assert (tmp_path / "gemm" / "report.html").is_file()
    assert (tmp_path / "gemm" / "random-1" / "manifest.json").is_file()
    measured = load(tmp_path / "gemm").find("best_flop_per_s", dtype="float32", shape="64x64x64")
    assert measured is not None
    assert 0 < measured.values[0] < 1e13
    assert made["gemm"]["fp32"][0]["best_per_s"] == measured.values[0]
    assert {rate["what"] for rate in made["memory"]} == {"copy", "scale", "add", "triad"}
    assert {rate["what"] for rate in made["link"]} == {
        f"{name} 0.0625 MiB"
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive")
    }
    assert (made["ranks"], made["link_ranks"], made["link_backend"]) == (1, 2, "gloo")
