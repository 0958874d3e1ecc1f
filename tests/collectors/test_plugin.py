"""A collector of another package (tests/plugin), installed by pip, found by its entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chopper import pipeline
from tests.waiting import PATIENT_SAMPLERS

EXAMPLE = Path(__file__).parent.parent / "plugin"

PROGRAM = (
    PATIENT_SAMPLERS
    + """
import sys, time
from pathlib import Path
import chopper
from chopper.recording.live import StreamTail
rows = StreamTail(Path(sys.argv[1], "rank-00000", "device_counter.arrow"))
seen = set()
with chopper.profile(sys.argv[1], trace=False, collect=("weather",)) as prof:
    while seen != {0, 1}:
        time.sleep(0.05)
        prof.step()
        seen.update(device for batch in rows.poll() for device in batch["device_id"].to_pylist())
"""
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which the example package is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    # pip builds inside the source folder.
    source = shutil.copytree(EXAMPLE, folder / "source")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-index", "--no-deps", "--no-build-isolation"),
            *("--target", folder / "site", source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"pip cannot build a package here: {done.stderr.strip().splitlines()[-1]}")
    return {**os.environ, "PYTHONPATH": str(folder / "site")}


def run(arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_doctor_shows_it_with_what_it_costs(installed: dict[str, str]) -> None:
    found = json.loads(run(["-m", "chopper", "doctor", "--json"], installed))
    (weather,) = [c for c in found["collectors"] if c["name"] == "weather"]
    assert weather["available"]
    assert not weather["default"]
    assert set(weather["call_costs_ns"]) == {"thermometers", "clock"}
    assert weather["driver_calls"]["look"]["count"] >= 3


def test_it_records_beside_the_others(installed: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run([str(program), str(tmp_path / "run")], installed)
    recorded = pipeline.read(tmp_path / "run")
    (report,) = [c for c in recorded.part(0).collectors if c.name == "weather"]
    assert report.status == "obtained", report.reason
    assert report.requested_hz == 50.0
    assert set(report.files) == {"device_counter.arrow", "clock.arrow"}
    assert report.absent["device_counter.energy_j"] == "a thermometer counts no energy"
    assert set(report.calls) == {"look"}
    assert report.clock_alignment_error_ns is not None
    table = recorded.table(0, "device_counter")
    assert set(table["temperature_c"].to_pylist()) == {21.5, 22.5}
    assert table["energy_j"].null_count == table.num_rows >= 2
