"""Time and energy at another clock and under a power cap, against the simulated job run so."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import chopper
from chopper.analyzers.replay.whatif_options import changes_of
from chopper.cli import cli
from chopper.errors import InputError, UsageError
from chopper.storage.run import Run
from chopper.validation.model.job import simulate
from chopper.validation.model.plan import Clock, Dose, Plan
from chopper.validation.model.writer import write
from chopper.views import view
from tests.analyzers.make import table
from tests.made_runs import put_table

S = 1_000_000_000
REFERENCE_HZ = 1.83e9
EXPONENT = 1.8
APPLICATION, POWER_CAP = 2, 4
"""NVML's reasons of a clock."""


def power_w(hz: np.ndarray | float) -> np.ndarray:
    """The law of the simulated devices."""
    return np.asarray(500 * (np.asarray(hz) / REFERENCE_HZ) ** EXPONENT)


def job(folder: Path, *clocks: Clock, steps: int = 6) -> Run:
    """Two ranks whose steps take a second, with power by the law and its counter of energy."""
    plan = Plan(slow=Dose(60.0), clocks=clocks, steps=steps, telemetry_hz=100)
    write(simulate(plan), folder)
    run = chopper.load(folder)
    for rank in run.ranks:
        samples = run.table(rank, "device_clock")
        drawn = power_w(samples["sm_clock_hz"].to_numpy())
        at = samples.schema.get_field_index("power_w")
        field = samples.schema.field("power_w")
        put_table(run, rank, "device_clock", samples.set_column(at, field, pa.array(drawn)))
        time_ns = samples["time_ns"].to_numpy()
        joules = 1e6 + np.cumsum((drawn[1:] + drawn[:-1]) / 2 * np.diff(time_ns) / 1e9)
        rows = [
            {"time_ns": int(t), "span_ns": 0, "device_id": rank, "energy_j": float(e)}
            for t, e in zip(time_ns[1::10], joules[::10], strict=True)
        ]
        put_table(run, rank, "device_counter", table("device_counter", rows))
    return run


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> chopper.Attribution:
    """At the reference clock throughout."""
    return chopper.attribute(job(tmp_path_factory.mktemp("steady") / "run"))


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """Step in ns and energy of a step in J of the same job at 0.8 of that clock."""
    folder = tmp_path_factory.mktemp("truth") / "run"
    run = chopper.attribute(job(folder, Clock(0.8, APPLICATION, 0, 10**12)))
    steps = run.step_time_ns()
    (row,) = (r for r in view(run, "energy").to_pylist() if r["source"] == "all devices")
    return sum(steps) / len(steps), row["energy_per_step_j"]


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> chopper.Attribution:
    """At four levels of the clock, three of them set, each for two seconds."""
    clocks = [
        Clock(ratio, APPLICATION, (i + 1) * 2 * S, (i + 2) * 2 * S)
        for i, ratio in enumerate((0.9, 0.85, 0.7))
    ]
    return chopper.attribute(job(tmp_path_factory.mktemp("levels") / "run", *clocks, steps=9))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of that kind of device: two instructions whose exponents lie around the law's."""
    path = tmp_path_factory.mktemp("table") / "device.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["stage", "instruction", "frequency", "time", "energy"])
        for instruction, exponent in (("forward", 1.79), ("backward", 1.81)):
            for mhz in range(1830, 1100, -15):
                time_s = 0.1 * (1830 / mhz) ** 0.9
                rows.writerow(
                    [0, instruction, mhz, time_s, 500 * (mhz / 1830) ** exponent * time_s]
                )
    return path


def test_the_levels_of_a_runs_own_clock_predict_time_and_energy(
    levels: chopper.Attribution, truth: tuple[float, float]
) -> None:
    found = chopper.whatif(levels, clock="1464MHz")
    energy = found.energy
    assert energy is not None
    assert energy.reason is None
    assert energy.power_exponent_ratio == pytest.approx(EXPONENT, abs=1e-3)
    assert energy.power_source == "this run, 4 levels of its clock"
    assert found.predicted_ci95_ns is not None
    assert found.predicted_ci95_ns[0] < truth[0] < found.predicted_ci95_ns[1]
    assert energy.predicted_ci95_j is not None
    assert energy.predicted_ci95_j[0] < truth[1] < energy.predicted_ci95_j[1]
    assert energy.predicted_j == pytest.approx(truth[1], rel=0.003)
    assert energy.predicted_power_w == pytest.approx(2 * power_w(1464e6), rel=0.01)
    clocks, times, joules = np.array(energy.frontier).T
    assert clocks[0] == pytest.approx(0.7 * REFERENCE_HZ, rel=1e-3)
    # Energy ∝ clock^(1.8 − 0.99): less at each lower clock, in longer steps.
    assert (np.diff(times) < 0).all()
    assert (np.diff(joules) > 0).all()


@pytest.mark.parametrize("change", [{"clock": "1464MHz"}, {"power_cap": f"{power_w(1464e6):.2f}W"}])
def test_a_table_of_the_device_predicts_a_steady_run(
    change: dict[str, str], steady: chopper.Attribution, measured: Path, truth: tuple[float, float]
) -> None:
    """A cap that the law reaches at 0.8 of the clock is that clock."""
    found = chopper.whatif(steady, power_table=measured, **change)  # type: ignore[arg-type]
    energy = found.energy
    assert energy is not None
    assert energy.reason is None
    assert energy.predicted_clock_hz == pytest.approx(1464e6, rel=0.005)
    assert found.predicted_ci95_ns is not None
    assert energy.predicted_ci95_j is not None
    assert found.predicted_ci95_ns[0] < truth[0] < found.predicted_ci95_ns[1]
    assert energy.predicted_ci95_j[0] < truth[1] < energy.predicted_ci95_j[1]
    assert energy.predicted_j == pytest.approx(truth[1], rel=0.02)
    # One clock in the run: the sensitivity is the roofline's, so the interval is wide.
    half = (found.predicted_ci95_ns[1] - found.predicted_ci95_ns[0]) / 2
    assert half > 0.02 * found.predicted_step_ns
    # H100, 2 devices at 1.42 USD an hour.
    assert energy.predicted_cost == pytest.approx(found.predicted_step_ns / 3.6e12 * 2 * 1.42)


def test_a_cap_above_what_is_drawn_changes_nothing(
    steady: chopper.Attribution, measured: Path
) -> None:
    found = chopper.whatif(steady, power_cap="520W", power_table=measured)
    assert found.predicted_step_ns == pytest.approx(found.observed_step_ns, rel=1e-6)
    assert found.energy is not None
    assert found.energy.predicted_j == pytest.approx(found.energy.observed_j, rel=1e-3)


def test_what_power_depends_on_is_withheld_where_nothing_shows_it(
    steady: chopper.Attribution, measured: Path, tmp_path: Path
) -> None:
    found = chopper.whatif(steady, clock="1464MHz").energy
    assert found is not None
    assert found.predicted_j is None
    assert found.reason is not None
    assert "was at 1 level (1.83 GHz); expected three" in found.reason
    assert found.observed_j == pytest.approx(2 * 500 * 1.016, rel=0.01)
    for change, message in (
        ({"clock": "600MHz"}, "600 MHz is not one of 1.11 GHz to 1.83 GHz"),
        ({"clock": "reference"}, "name a clock"),
        ({"clock": "1464MHz", "faster": "gemm=2x"}, "changes beside the clock"),
    ):
        withheld = chopper.whatif(steady, power_table=measured, **change).energy  # type: ignore[arg-type]
        assert withheld is not None
        assert withheld.predicted_j is None
        assert message in str(withheld.reason)
    # A cap held the clock: power is the cap's at each.
    held = [Clock(r, POWER_CAP, (i + 1) * S, (i + 2) * S) for i, r in enumerate((0.9, 0.8, 0.7))]
    capped = chopper.attribute(job(tmp_path / "run", *held, steps=6))
    energy = chopper.whatif(capped, clock="1464MHz").energy
    assert energy is not None
    assert energy.predicted_j is None


def test_what_cannot_be_meant_is_refused(steady: chopper.Attribution, measured: Path) -> None:
    with pytest.raises(UsageError, match="--clock with --power-cap: both change the clock"):
        changes_of(clock="1GHz", power_cap="300W")
    with pytest.raises(UsageError, match="--power-cap with --fix compute: both change"):
        changes_of(power_cap="300W", fix=["compute"])
    with pytest.raises(UsageError, match="no unit; 300W or 300kW"):
        changes_of(power_cap="300")
    with pytest.raises(UsageError, match=r"the clock under a cap is unknown.*--power-table FILE"):
        chopper.whatif(steady, power_cap="300W")
    with pytest.raises(UsageError, match=r"a device takes about 2.. W; expected a cap above that"):
        chopper.whatif(steady, power_cap="100W", power_table=measured)
    with pytest.raises(UsageError, match="--power-table: no --clock"):
        chopper.whatif(steady, power_table=measured)
    with pytest.raises(InputError, match="cannot be read"):
        chopper.whatif(steady, clock="1GHz", power_table="missing.csv")


def test_the_command_shows_energy_and_the_frontier(tmp_path: Path, measured: Path) -> None:
    job(tmp_path / "run")
    page = tmp_path / "energy.html"
    arguments = [
        "whatif",
        str(tmp_path / "run"),
        "--clock",
        "1.5GHz",
        "--power-table",
        str(measured),
    ]
    shown = CliRunner().invoke(cli, [*arguments, "-o", str(page)], catch_exceptions=False)
    assert "Energy and cost of a step, all devices" in shown.stdout
    assert "Time and energy by clock" in shown.stdout
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert found["energy"]["currency"] == "USD"
    # Without its counter, energy is that of the recorded power: 570 W of each device.
    assert found["energy"]["observed_power_w"] == pytest.approx(2 * 570, rel=0.01)
    assert found["energy"]["predicted_j"] < found["energy"]["observed_j"]
    assert 'data-figure="frontier"' in page.read_text(encoding="utf-8")
