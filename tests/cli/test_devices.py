"""``--device``: the device that a run was recorded on, by the user's word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chopper.cli import cli
from chopper.errors import ChopperError, UsageError
from tests import recordings
from tests.kineto_writer import small_trace

SXM, MI300X = "NVIDIA H100 SXM 80 GB", "AMD Instinct MI300X"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


def document(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


@pytest.fixture(scope="module")
def rpd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording that names no device."""
    return recordings.write_rpd(tmp_path_factory.mktemp("rpd") / "trace.rpd", recordings.small())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(4):
        trace = small_trace(rank=rank, world=4, pid=100 + rank, device=rank)
        (folder / f"rank{rank}.json").write_bytes(trace.encode())
    return folder


def test_the_report_and_its_json_say_who_named_the_device(rpd: Path) -> None:
    shown = run("analyze", rpd, "--device", "h100-sxm")
    assert f"{SXM} (named by the user)" in shown.stdout.splitlines()[0]
    assert f"chopper report {rpd} --device h100-sxm" in shown.stderr
    found = document("analyze", rpd, "--device", "h100-sxm")
    assert found["ranks"][0]["device"] == SXM
    assert found["ranks"][0]["device_reason"] == "named by the user; the trace names no device"
    assert "device.stated" in [f["code"] for f in found["quality"]]
    without = document("analyze", rpd)
    assert without["ranks"][0]["device"] is None
    assert without["ranks"][0]["device_reason"] is None
    remedies = [f["message"] for f in without["quality"] if f["code"] == "device.no_peak"]
    assert "--device" in remedies[0]


def test_an_import_keeps_it(rpd: Path, tmp_path: Path) -> None:
    made = run("import", rpd, "--device", "mi300x", "-o", tmp_path / "run")
    assert f"info: the device is {MI300X}, as the user says" in made.stderr
    for manifest in ("manifest.json", "rank-00000/manifest.json"):
        text = (tmp_path / "run" / manifest).read_text()
        assert MI300X in text
        assert "named by the user; the trace names no device" in text
    found = document("analyze", tmp_path / "run")
    assert found["ranks"][0]["device"] == MI300X
    shown = document("analyze", rpd, "--device", "mi300x")
    for part in (found, shown):
        del part["run"]
    assert found == shown
    # The next user may know better.
    again = document("analyze", tmp_path / "run", "--device", "h100")
    assert again["ranks"][0]["device"] == SXM
    listed = run("query", tmp_path / "run", "SELECT device FROM ranks", "--format", "csv")
    assert listed.stdout.splitlines() == ["device", MI300X]


def test_every_command_that_takes_a_run_takes_it(rpd: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run("report", rpd, "--device", "mi300x", "-o", page).exit_code == 0
    assert f"{MI300X} (named by the user)" in page.read_text()
    assert run("whatif", rpd, "--device", "mi300x").exit_code == 0
    target = tmp_path / "tables"
    assert run("export", rpd, "--device", "mi300x", "--to", "csv", "-o", target).exit_code == 0
    assert MI300X in (target / "ranks.csv").read_text()
    sql = "SELECT device FROM ranks"
    listed = run("query", rpd, sql, "--device", "mi300x", "--format", "csv")
    assert listed.stdout.splitlines() == ["device", MI300X]


def test_ranks_have_devices_of_their_own(ranks: Path) -> None:
    found = document("analyze", ranks, "--device", "0-1,3=mi300x", "--device", "h100")
    assert [r["device"] for r in found["ranks"]] == [MI300X, MI300X, SXM, MI300X]


def test_each_of_two_runs_has_its_own(rpd: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.rpd"
    other.write_bytes(rpd.read_bytes())

    def devices(*options: str) -> Any:
        found = document("compare", rpd, other, *options)
        (check,) = [c for c in found["checks"] if c["id"] == "device"]
        return check["a"], check["b"]

    assert devices("--device", "mi300x") == (MI300X, MI300X)
    assert devices("--device", "A:mi300x", "--device", "B:h100") == (MI300X, SXM)
    assert devices("--device", "mi300x", "--device", "B:0=h100") == (MI300X, SXM)
    assert devices("--device", "B:h100") == (None, SXM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["h900"], "no device is called 'h900'"),
        (["x=h100"], "--device: ranks 'x': not a list"),
        (["7=h100"], "rank 7, and the run has 0"),
        (["A:h100"], "expected NAME or RANK=NAME"),
        (["h100", "mi300x"], "two devices, h100-sxm and mi300x; name one"),
        (["0=h100", "0=mi300x"], "two devices of rank 0"),
        (["0="], "no device is called ''"),
    ],
)
def test_what_is_refused(options: list[str], message: str, rpd: Path) -> None:
    words = [word for option in options for word in ("--device", option)]
    with pytest.raises(UsageError) as caught:
        run("analyze", rpd, *words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_side_is_a_or_b(rpd: Path) -> None:
    with pytest.raises(ChopperError, match="expected A:NAME or B:NAME"):
        run("compare", rpd, rpd, "--device", "C:h100")
