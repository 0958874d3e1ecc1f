"""Calibrations: how they are kept and chosen, and real measurements on this machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.cli.calibrate_ import page
from chopper.collectors import calibration as measuring
from chopper.collectors.calibration import ROUNDS, Plan
from chopper.errors import CollectorUnavailable, InputError, OutputError, UsageError
from chopper.hardware import calibration
from chopper.hardware.calibration import Calibration, Measured, from_manifest, load, load_all, save
from chopper.reports import to_text


def rate(what: str, best_per_s: float, spread_ratio: float = 0.01) -> Measured:
    return Measured(
        what=what,
        best_per_s=best_per_s,
        median_per_s=best_per_s * 0.9,
        spread_ratio=spread_ratio,
        repeats_count=5,
    )


def made(**changes: Any) -> Calibration:
    plain = Calibration(
        kind="full",
        created_ns=1_700_000_000_000_000_000,
        chopper_version="0.1.0",
        torch_version="2.13.0",
        hostname=socket.gethostname(),
        device_type="cpu",
        device_name="A Processor",
        ranks=2,
        threads=1,
        cores=2,
        gemm={"fp32": [rate("fp32 256x256x256", 90e9), rate("fp32 512x512x512", 100e9)]},
        memory=[rate("copy", 9e9), rate("triad", 10e9)],
        link=[rate("all_reduce 1 MiB", 1e9), rate("all_gather 1 MiB", 2e9)],
        link_ranks=2,
        link_backend="gloo",
        launch_ns=900,
        roundtrip_ns=1300,
    )
    return msgspec.structs.replace(plain, **changes)


# Keeping.


def test_the_default_file_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert calibration.default_path() == tmp_path / "chopper/calibration.json"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.default_path() == tmp_path / ".local/share/chopper/calibration.json"


def test_ceilings_are_the_best_of_each_kind() -> None:
    result = made()
    for name in ("fp32", "float32", "torch.float32"):
        assert result.flop_per_s(name) == 100e9
    assert result.flop_per_s("bf16") is None
    assert result.memory_bytes_per_s == 10e9
    assert result.link_bytes_per_s == 2e9
    assert made(memory=[], link=[]).memory_bytes_per_s is None
    assert made(memory=[], link=[]).link_bytes_per_s is None


def test_a_file_of_an_older_version_loads_without_its_source_of_rates(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(made(), path)
    document = json.loads(path.read_text())
    document["calibrations"][0]["fed"] = {"gemm": "chopper bench gemm, 3 repetitions"}
    path.write_text(json.dumps(document))
    assert load_all(path) == [made()]


def test_conditions_are_kept_apart_and_the_same_ones_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/calibration.json"
    save(made(ranks=2, threads=1), path)
    save(made(ranks=1, threads=2, launch_ns=1), path)
    save(made(ranks=2, threads=1, launch_ns=2, created_ns=1_800_000_000_000_000_000), path)
    save(made(device_type="cuda", device_name="A GPU", launch_ns=3), path)
    assert len(load_all(path)) == 3
    newest = load(None, path=path)
    assert newest is not None
    assert newest.launch_ns == 2
    chosen = load(None, ranks=1, threads=2, path=path)
    assert chosen is not None
    assert chosen.launch_ns == 1
    on_gpu = load("A GPU", path=path)
    assert on_gpu is not None
    assert on_gpu.launch_ns == 3
    assert load("Another GPU", path=path) is None
    assert load(None, "another-host", path=path) is None
    assert load(None, ranks=8, path=path) is None


def test_nothing_stored_is_nothing(tmp_path: Path) -> None:
    assert load(None, path=tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a calibration"),
        ("[1]", "is not a calibration"),
        ("{}", "is not a calibration (has schema '', expected 'chopper.calibration/1')"),
        (
            '{"schema": "chopper.calibration/2"}',
            "is not a calibration (has schema 'chopper.calibration/2'",
        ),
        (
            '{"schema": "chopper.calibration/1", "calibrations": [{"kind": "full"}]}',
            "is not a calibration",
        ),
    ],
)
def test_a_damaged_file_is_one_clear_line_and_is_not_lost(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(None, path=path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError):
        save(made(), path)
    assert path.read_text() == text
    save(made(), path, replace_damaged=True)
    assert load(None, path=path) == made()


def test_an_unwritable_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file/calibration.json"
    with pytest.raises(OutputError, match="cannot be created"):
        save(made(), place)
    # The command says so before it measures.
    with pytest.raises(OutputError, match="cannot be created"):
        CliRunner().invoke(cli, ["calibrate", "-o", str(place)], catch_exceptions=False)


def test_a_manifest_carries_it_whole() -> None:
    kept = calibration.to_manifest(made())
    assert from_manifest(json.loads(json.dumps(kept))) == made()
    assert from_manifest(kept | {"schema": "chopper.calibration/99"}) is None
    assert from_manifest({}) is None


@pytest.mark.parametrize("field", [{"ranks": "two"}, {"ranks": 0}, {"launch_ns": 2**62}])
def test_a_damaged_one_in_a_manifest_is_said(field: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"the calibration in the run's manifest is damaged \("):
        from_manifest(calibration.to_manifest(made()) | field)


def test_the_source_says_the_conditions() -> None:
    assert made(hostname="box").source == (
        "measured on A Processor (box) with 2 processes of 1 thread, 2023-11-14"
    )


# Measuring. The plan is small, everything else is real.

TINY = Plan(
    gemm_sizes=(32, 64),
    gemm_s=0.01,
    memory_bytes=2 * 1024**2,
    memory_s=0.01,
    link_bytes=(64 * 1024,),
    link_s=0.01,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "plan_of", lambda *_, **__: TINY)


@pytest.mark.long
def test_two_ranks_measure_together(tiny: None) -> None:
    result = measuring.calibrate(device="cpu", ranks=2, threads=1, quick=True)
    assert (result.ranks, result.threads, result.kind) == (2, 1, "quick")
    assert result.hostname == socket.gethostname()
    assert set(result.gemm) == {"fp32", "bf16", "fp16", "fp64"}
    for dtype, rates in result.gemm.items():
        assert rates[0].what == f"{dtype} 32x32x32"
        # Both ranks' repeats count.
        assert rates[0].repeats_count >= 2 * ROUNDS
        assert all(r.best_per_s >= r.median_per_s > 0 for r in rates)
    assert [m.what for m in result.memory] == ["copy", "triad"]
    assert {m.what.split()[0] for m in result.link} == {"all_reduce", "all_gather"}
    assert (result.link_ranks, result.link_backend) == (2, "gloo")
    assert result.launch_ns is not None
    assert result.roundtrip_ns is not None
    assert min(result.launch_ns, result.roundtrip_ns) > 0
    assert result.absent == {"transfer": "no accelerator"}


@pytest.mark.slow
def test_the_command_measures_once_and_shows_it_again(tiny: None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    arguments = ["calibrate", "--device", "cpu", "-o", str(path)]
    first = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert first.exit_code == 0
    document = json.loads(first.stdout)
    assert document["schema"] == "chopper.calibration/1"
    # One rank: a second process stood by for the link.
    assert (document["ranks"], document["link_ranks"]) == (1, 2)
    assert f"stored in {path}" in first.stderr
    again = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert json.loads(again.stdout) == document
    assert "measure again with --force" in again.stderr
    [stored] = load_all(path)
    assert msgspec.to_builtins(stored) | {"schema": calibration.SCHEMA} == document


def test_the_text_shows_each_kind_once() -> None:
    text = to_text.render(page(made(hostname="box", absent={"transfer": "no accelerator"})))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "matrix product, fp32 100 GFLOP/s 512x512x512, 5 repeats within 1.0 %" in lines
    assert "memory, triad 10.0 GB/s 5 repeats within 1.0 %" in lines
    assert "all_gather, 2 ranks, gloo 2.00 GB/s 1 MiB, 5 repeats within 1.0 %" in lines
    assert "launching an operator 900 ns" in lines
    assert "- no transfer: no accelerator" in lines


def test_a_device_that_is_not_there_is_a_usage_error() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA or ROCm device")
    with pytest.raises(UsageError, match="--device cuda: torch sees no such device, only cpu"):
        measuring.calibrate(device="cuda")


def test_senseless_conditions_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        measuring.calibrate(device="cpu", ranks=0)


@pytest.mark.long
def test_a_worker_that_fails_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny: None
) -> None:
    broken = msgspec.structs.replace(TINY, link_bytes=(1 << 62,))
    monkeypatch.setattr(measuring, "plan_of", lambda *_, **__: broken)
    with pytest.raises(CollectorUnavailable, match=r"calibration failed: .*[Mm]emory") as caught:
        measuring.calibrate(device="cpu", ranks=2, threads=1, quick=True)
    assert "\n" not in str(caught.value)
