from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from chopper.analyzers.estimates.clock_schedule import Planner, one_forward_one_backward
from chopper.analyzers.estimates.energy import Energy, energy, fits_of, predicted
from chopper.cli import cli
from chopper.collectors.formats.clock_tables import read_clock_tables
from chopper.errors import InputError, UsageError
from chopper.hardware.clock_tables import ClockTable

ROOT = Path(__file__).resolve().parents[3]
CLOCKS_HZ = np.arange(1400, 700, -50, dtype=np.int64) * 1_000_000


def table(
    stage: int, instruction: str, at_top_ns: float, s: float = 0.8, b: float = 2.0
) -> ClockTable:
    """Time and energy by the laws that are fitted: 400 W at the highest clock."""
    ratio = CLOCKS_HZ / CLOCKS_HZ[0]
    time_ns = np.rint(at_top_ns * ratio**-s).astype(np.int64)
    return ClockTable(stage, instruction, CLOCKS_HZ, time_ns, 400 * ratio**b * time_ns / 1e9)


def pipeline_of(*forward_ns: float, s: float = 0.8, b: float = 2.0) -> list[ClockTable]:
    return [
        table(stage, name, time_ns * factor, s, b)
        for stage, time_ns in enumerate(forward_ns)
        for name, factor in (("forward", 1), ("backward", 2))
    ]


def longest_ns(stages: int, microbatches: int, times: dict[tuple[int, str, int], int]) -> int:
    """Run 1F1B by its definition: each stage takes its next instruction when it can."""
    programs = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        order = [("F", m) for m in range(ahead)]
        for m in range(microbatches):
            order += [("F", m + ahead)] if m + ahead < microbatches else []
            order.append(("B", m))
        programs.append(order)
    ends: dict[tuple[int, str, int], int] = {}
    while len(ends) < 2 * stages * microbatches:
        for stage, order in enumerate(programs):
            left = [one for one in order if (stage, *one) not in ends]
            if not left:
                continue
            name, m = left[0]
            if name == "F":
                needs = [(stage - 1, "F", m)] if stage else []
            else:
                needs = [(stage + 1, "B", m) if stage < stages - 1 else (stage, "F", m)]
            if all(need in ends for need in needs):
                before = [ends[stage, *one] for one in order if (stage, *one) in ends]
                begin = max([ends[need] for need in needs] + before, default=0)
                ends[stage, name, m] = begin + times[stage, name, m]
    return max(ends.values())


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 2), (4, 7), (5, 3)])
def test_the_pipeline_runs_as_1f1b_does(stages: int, microbatches: int) -> None:
    pipeline = one_forward_one_backward(stages, microbatches)
    rng = np.random.default_rng(stages * 10 + microbatches)
    for _ in range(5):
        times = rng.integers(1, 1000, len(pipeline.stage))
        named = zip(pipeline.stage, pipeline.instruction, pipeline.microbatch, times, strict=True)
        by_name = {(int(s), "FB"[i], int(m)): int(t) for s, i, m, t in named}
        assert pipeline.finish_ns(times).max() == longest_ns(stages, microbatches, by_name)
        # What is to spare can be used by any one alone, and not a nanosecond more.
        spare = pipeline.spare_ns(times, limit := int(pipeline.finish_ns(times).max()))
        for at in range(len(times)):
            later = times.copy()
            later[at] += spare[at]
            assert pipeline.finish_ns(later).max() == limit
            later[at] += 1
            assert pipeline.finish_ns(later).max() == limit + 1


def test_a_pipeline_without_waiting_saves_nothing() -> None:
    """One stage, and one microbatch through two: every instruction waits for the one before."""
    for stages, microbatches in (((5e6,), 4), ((5e6, 7e6), 1)):
        found = energy(pipeline_of(*stages), "t", microbatches_count=microbatches)
        assert found.lossless.saved_energy_ratio == pytest.approx(0, abs=1e-9)
        assert found.lossless.time_ns == found.highest.time_ns
        # Energy ∝ clock^(2 − 0.8): least at the lowest clock.
        low = min(found.one_clock, key=lambda point: point.energy_j)
        assert low.clock_hz == CLOCKS_HZ[-1]
        assert low.saved_energy_ratio == pytest.approx(1 - (750 / 1400) ** 1.2, abs=1e-6)
        assert found.frontier[-1].energy_j == pytest.approx(low.energy_j)


@pytest.mark.parametrize("waiting_w", [0.0, 90.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_schedule_against_all_schedules(seed: int, waiting_w: float) -> None:
    """Two stages, two microbatches, two clocks: all 256 schedules tried one by one."""
    rng = np.random.default_rng(seed)
    tables = []
    for stage, instruction in itertools.product(range(2), ("forward", "backward")):
        fast = int(rng.integers(1_000_000, 3_000_000))
        time_ns = np.array([fast, round(fast * rng.uniform(1.1, 1.5))])
        energy_j = time_ns / 1e9 * np.array([400.0, rng.uniform(150, 240)])
        tables.append(ClockTable(stage, instruction, CLOCKS_HZ[[0, 4]], time_ns, energy_j))
    planner = Planner(one_forward_one_backward(2, 2), tables, waiting_w)
    highest = planner.at_clock(int(CLOCKS_HZ[0]))
    kind = planner.pipeline.kind
    for limit_ns in (highest.time_ns, round(highest.time_ns * 1.1)):
        best = np.inf
        for picked in itertools.product((0, 1), repeat=len(kind)):
            times = np.array([tables[k].time_ns[c] for k, c in zip(kind, picked, strict=True)])
            joules = sum(tables[k].energy_j[c] for k, c in zip(kind, picked, strict=True))
            step_ns = planner.pipeline.finish_ns(times).max()
            if step_ns <= limit_ns:
                best = min(best, joules + waiting_w * (2 * step_ns - times.sum()) / 1e9)
        found = planner.within(limit_ns)
        assert found.time_ns <= limit_ns
        assert found.bound_j - 1e-9 <= best <= found.energy_j + 1e-9
        assert found.energy_j <= highest.energy_j + 1e-9
        fixed = planner.within(limit_ns, fixed=True)
        assert fixed.time_ns <= limit_ns
        assert found.bound_j <= fixed.bound_j + 1e-9


def test_an_uneven_pipeline_slows_the_quick_stage() -> None:
    """The last stage takes twice as long: the others wait for it, and need not hurry."""
    found = energy(pipeline_of(4e6, 4e6, 8e6), "t", microbatches_count=16)
    assert found.lossless.time_ns <= found.highest.time_ns
    assert found.lossless.saved_energy_ratio > 0.15
    last, first = found.schedule[-1], found.schedule[0]
    assert set(last.clock_hz) == {CLOCKS_HZ[0]}
    assert np.mean(first.clock_hz) < 0.65 * CLOCKS_HZ[0]
    assert first.order[:3] == ("F0", "F1", "F2")
    # Beyond that, longer steps save more: never less, as they may be scheduled alike.
    saved = [point.saved_energy_ratio for point in found.frontier]
    assert saved == sorted(saved)


def test_fits_recover_the_laws_and_tell_stages_that_are_alike() -> None:
    tables = [*pipeline_of(5e6, 5e6, s=0.6, b=1.5), table(2, "forward", 9e6, 0.3, 2.5)]
    fits = fits_of(tables, "t")
    assert [(fit.stages, fit.instruction) for fit in fits] == [
        ("0-1", "forward"),
        ("0-1", "backward"),
        ("2", "forward"),
    ]
    for fit, s, b in zip(fits, (0.6, 0.6, 0.3), (1.5, 1.5, 2.5), strict=True):
        assert fit.sensitivity_ratio == pytest.approx(s, abs=1e-6)
        assert fit.sensitivity_ci95[0] <= fit.sensitivity_ratio <= fit.sensitivity_ci95[1]
        assert fit.power_exponent_ratio == pytest.approx(b, abs=1e-6)
        assert fit.worst_time_error_ratio < 1e-6
        assert fit.worst_energy_error_ratio < 1e-6


def test_another_table_is_predicted_from_its_highest_clock() -> None:
    """A sensitivity that is off by 0.1 is off by half the range of clocks to that power."""
    tables, other = pipeline_of(5e6, s=0.6, b=2.0), pipeline_of(3e6, 9e6, s=0.7, b=2.0)
    found = predicted(tables, other, "other")
    lowest = CLOCKS_HZ[-1] / CLOCKS_HZ[0]
    assert found.points_count == 4 * (len(CLOCKS_HZ) - 1)
    assert found.worst_time_error_ratio == pytest.approx(1 - lowest**0.1, abs=1e-5)
    assert found.worst_energy_error_ratio == pytest.approx(1 - lowest**0.1, abs=1e-5)


# ---------------------------------------------------------------- Zeus' tables

GPT3_A100 = "stage-frequency-time-energy-gpt3-175b+a100_sxm_bf16.csv.gz"
BLOOM_A100 = "stage-frequency-time-energy-bloom+a100_sxm_bf16.csv.gz"
GPT3_A40 = "stage-frequency-time-energy-gpt3-175b+a40_bf16.csv.gz"
SAVED = {
    (GPT3_A100, 12): (0.1547, 0.1559),
    (GPT3_A100, 48): (0.1321, 0.1333),
    (BLOOM_A100, 12): (0.1210, 0.1236),
    (BLOOM_A100, 48): (0.0645, 0.0655),
    (GPT3_A40, 12): (0.1239, 0.1293),
    (GPT3_A40, 48): (0.0917, 0.1009),
}
"""(table, microbatches) → energy saved at no loss of time: by the schedule, by the bound. The
bounds were computed apart from the product, by another program with the simplex method."""


@pytest.mark.parametrize(("name", "microbatches"), SAVED)
def test_what_perseus_tables_let_save(name: str, microbatches: int, traces_dir: Path) -> None:
    tables = read_clock_tables(traces_dir / "zeus" / name)
    planner = Planner(one_forward_one_backward(8, microbatches), tables, 0.0)
    highest = planner.at_clock(int(tables[0].clock_hz[0]))
    found = planner.within(highest.time_ns)
    saved, bound = SAVED[name, microbatches]
    assert found.time_ns <= highest.time_ns
    assert 1 - found.bound_j / highest.energy_j == pytest.approx(bound, abs=5e-5)
    assert 1 - found.energy_j / highest.energy_j == pytest.approx(saved, abs=1e-3)


def test_fits_of_zeus_tables_are_held_against_what_was_kept_back(traces_dir: Path) -> None:
    gpt3, bloom, a40 = (
        read_clock_tables(traces_dir / "zeus" / name) for name in (GPT3_A100, BLOOM_A100, GPT3_A40)
    )
    for fit in fits_of(gpt3, "gpt3"):
        assert fit.stages in ("0-6", "7")
        assert 0.84 < fit.sensitivity_ci95[0] < fit.sensitivity_ci95[1] < 0.94
        assert fit.time_error_ratio < 0.012
        assert fit.worst_time_error_ratio < 0.05
        assert fit.energy_error_ratio < 0.03
    same_device = predicted(gpt3, bloom, "bloom")
    assert same_device.worst_time_error_ratio < 0.055
    assert same_device.energy_error_ratio < 0.02
    # A sensitivity is a device's and a kernel's: of another device it tells nothing.
    assert predicted(gpt3, a40, "a40").time_error_ratio > 0.2


# ---------------------------------------------------------------- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "measured.csv"
    with path.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["stage", "instruction", "frequency", "time", "energy"])
        for one in pipeline_of(4e6, 4e6, 8e6):
            for hz, ns, joules in zip(one.clock_hz, one.time_ns, one.energy_j, strict=True):
                rows.writerow([one.stage, one.instruction, hz / 1e6, ns / 1e9, joules])
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["estimate", "energy", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_answers_and_writes_its_page(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "energy.html"
    lines = run(str(file), "--microbatches", "6", "-o", str(page)).splitlines()
    assert "less energy at no loss of time" in lines[0]
    assert [line.split(":")[0] for line in lines[1:5]] == [
        "- Limit",
        "- Assumes",
        "- Try",
        "- More",
    ]
    text = page.read_text(encoding="utf-8")
    assert 'data-figure="energy"' in text
    assert 'data-figure="clocks"' in text
    details = run(str(file), "--microbatches", "6", "--kept-back", str(file), "--details")
    assert "Fits: t ∝ clock^(−s)" in details
    assert "predicted by these fits" in details


def test_every_field_of_the_json_is_documented(file: Path) -> None:
    document = json.loads(run(str(file), "--microbatches", "4", "--waiting-power", "80W", "--json"))
    assert document["schema"] == Energy.SCHEMA
    assert document["waiting_power_w"] == 80
    page = (ROOT / "docs" / "concepts" / "estimates" / "energy.md").read_text(encoding="utf-8")
    assert not [field for field in document if f"`{field}`" not in page]


def test_what_cannot_be_planned_is_refused(file: Path) -> None:
    tables = read_clock_tables(file)
    with pytest.raises(UsageError, match="specify at most 1365"):
        energy(tables, "t", microbatches_count=2000)
    with pytest.raises(UsageError, match="microbatches: found 0"):
        energy(tables, "t", microbatches_count=0)
    few = [ClockTable(t.stage, t.instruction, *(c[:5] for c in columns(t))) for t in tables]
    with pytest.raises(InputError, match="measured at 5 clocks; expected at least 8"):
        energy(few, "t")
    first = tables[0]
    without_top = ClockTable(first.stage, first.instruction, *(c[1:] for c in columns(first)))
    with pytest.raises(InputError, match="1400 MHz, the highest clock, was not measured for every"):
        energy([without_top, *tables[1:]], "t")


def columns(one: ClockTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return one.clock_hz, one.time_ns, one.energy_j
