"""``chopper doctor`` on this machine, with broken collectors, and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chopper.cli import cli
from chopper.cli.doctor_ import page
from chopper.collectors import registry
from chopper.reports import to_text
from tests.command import Outcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def doctor(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["doctor", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in found["collectors"]}


def test_every_collector_is_answered_for() -> None:
    found = json.loads(doctor("--json"))
    assert found["schema"] == "chopper.doctor/1"
    collectors = by_name(found)
    assert set(collectors) == set(registry.names())
    for collector in collectors.values():
        # What is not available says why.
        assert collector["available"] or collector["reason"]
    host = collectors["host"]
    assert host["available"]
    # What else there is (threads, events) depends on the kernel and on permissions.
    assert set(host["call_costs_ns"]) >= {"cores", "ranks", "machine", "nics", "clock"}
    assert found["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["calibrations"]["stored"] == []


def test_the_text_says_the_same() -> None:
    text = doctor()
    for name in registry.names():
        assert f" {name}: " in text
    assert "chopper calibrate" in text
    assert "one sample costs" in " ".join(text.split())


def test_a_collector_that_raises_is_shown_and_the_rest_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "raising_sensor.py").write_text(
        "class Sensor:\n"
        "    name = 'raising'\n"
        "    scope = 'rank'\n"
        "    def probe(self, context): raise OSError('driver says no')\n"
        "    def start(self, context): ...\n"
        "    def stop(self): ...\n"
    )
    info = tmp_path / "raising-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raising\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[chopper.collectors]\nraising = raising_sensor:Sensor\nabsent = nowhere:Sensor\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = json.loads(doctor("--json"))
    collectors = by_name(found)
    assert collectors["raising"]["reason"] == "its probe failed: OSError: driver says no"
    assert "No module named 'nowhere'" in collectors["absent"]["reason"]
    assert collectors["absent"]["remedy"] == "repair or remove the package that offers it"
    assert collectors["host"]["available"]
    text = to_text.render(page(found))
    assert "✗ raising: not available, off by default" in text
    assert "2 collectors failed, see below." in " ".join(text.split())


def test_a_damaged_calibration_is_shown_not_raised(tmp_path: Path) -> None:
    file = tmp_path / "data/chopper/calibration.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    # However narrow the terminal, nothing of the path is left out.
    assert f"✗{file}:isnotacalibration" in "".join(doctor().split())


def test_devices_with_and_without_known_peaks_are_told_apart() -> None:
    found = json.loads(doctor("--json"))
    found["devices"] = [
        {
            "device": "cuda:0",
            "name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 80 * 2**30,
            "multi_processor_count": 132,
            "peaks": "H100 SXM",
            "bf16_flop_per_s": 989.4e12,
        },
        {
            "device": "cuda:1",
            "name": "Nobody's GPU",
            "memory_bytes": 2**30,
            "multi_processor_count": 1,
            "peaks": None,
            "bf16_flop_per_s": None,
        },
    ]
    text = to_text.render(page(found), width=200)
    assert "✓ cuda:0: NVIDIA H100 80GB HBM3, 80.0 GiB; H100 SXM, bf16 peak 989 TFLOP/s" in text
    assert "- cuda:1: Nobody's GPU, 1.00 GiB; not in the table of peaks" in text


def test_a_machine_without_accelerator_does_not_look_like_a_failure() -> None:
    found = json.loads(doctor("--json"))
    found["devices"] = []
    text = to_text.render(page(found))
    assert "Ready to record programs on the CPU; this machine has no accelerator." in text
    assert "✗" not in text
    assert "· nvml: " in text.partition("Does not apply to this machine")[2]
    found["devices"] = [
        {"device": "cuda:0", "name": "NVIDIA H100", "memory_bytes": 1, "peaks": None}
    ]
    text = to_text.render(page(found))
    assert "Ready to record programs on NVIDIA H100." in text
    attention = text.partition("Needs attention")[2].partition("Does not apply")[0]
    assert "? nvml: " in attention
    assert "amdsmi" not in attention


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of an interpreter that has all our dependencies but torch: links to each."""
    site = tmp_path_factory.mktemp("site")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("torch", "functorch", "__editable__")):
            (site / entry.name).symlink_to(entry)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    return environment | {"PYTHONPATH": f"{ROOT}:{site}"}


def run_without_torch(environment: dict[str, str], *arguments: str) -> Outcome:
    # -S: the environment's own packages, torch among them, stay out.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "chopper", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_it_works_without_torch(without_torch: dict[str, str]) -> None:
    done = run_without_torch(without_torch, "doctor", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["environment"]["torch"] is None
    collectors = by_name(found)
    assert collectors["host"]["available"]
    assert collectors["torch_trace"]["reason"] == "torch is not installed"
    assert collectors["device_memory"]["reason"] == "torch is not installed"


def test_calibrate_without_torch_is_one_clear_line(without_torch: dict[str, str]) -> None:
    done = run_without_torch(without_torch, "calibrate")
    assert (done.code, done.out) == (1, "")
    assert (
        done.line == "chopper: calibration needs torch, which is not installed; pip install torch"
    )
