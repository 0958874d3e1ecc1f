"""The clock of kernels whose FLOP and bytes are not known, as rpd records them beside sclk."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock_sensitivity import averaged_readings, estimate
from chopper.tables import TABLES
from tests.kineto_writer import Trace

_KERNELS = """
SELECT op.start, op.end FROM rocpd_op AS op
JOIN rocpd_string AS kind ON kind.id = op.opType_id
WHERE kind.string NOT LIKE 'Copy%' AND kind.string NOT IN ('FillBuffer', 'Barrier', 'Marker')
ORDER BY op.start
"""
_SCLK = """
SELECT start, "end", CAST(value AS REAL) * 1e6 FROM rocpd_monitor
WHERE monitorType = 'sclk' AND deviceId = ? ORDER BY start
"""


def raw(file: Path, folder: Path, gpu: int) -> tuple[np.ndarray, np.ndarray]:
    """Kernels (start, end) and sclk intervals (start, end, Hz) straight from a database."""
    path = folder / "raw.rpd"
    path.write_bytes(gzip.decompress(file.read_bytes()))
    with sqlite3.connect(path) as database:
        kernels = np.array(database.execute(_KERNELS).fetchall(), dtype=np.int64)
        clocks = np.array(database.execute(_SCLK, (gpu,)).fetchall())
    return kernels, clocks


def mean_clock(kernels: np.ndarray, clocks: np.ndarray) -> np.ndarray:
    """Mean over each kernel of what held in its parts."""
    low = np.maximum(kernels[:, :1].astype(float), clocks[None, :, 0])
    high = np.minimum(kernels[:, 1:].astype(float), clocks[None, :, 1])
    part = np.maximum(high - low, 0.0)
    mean: np.ndarray = (part * clocks[None, :, 2]).sum(axis=1) / part.sum(axis=1)
    return mean


def seen(run: Attribution) -> tuple[np.ndarray, np.ndarray]:
    """Duration and clock of each kernel by Chopper's own join, in time order."""
    events, factors = run.joined[0].device_event, run.factors[0]
    rows = np.flatnonzero(np.array(events["kind"].to_pylist()) == "kernel")
    start, duration = (events[n].to_numpy()[rows] for n in ("start_ns", "dur_ns"))
    order = np.argsort(start)
    return duration[order], factors.clocks.clock_hz[rows][order]


def test_the_bound_on_a_real_recording_is_that_of_its_raw_intervals(
    traces_dir: Path, tmp_path: Path
) -> None:
    file = traces_dir / "rocmprofiledata/matmul.rpd.gz"
    kernels, clocks = raw(file, tmp_path, 0)
    run = pipeline.attribute(file, device="mi250")
    duration, clock = seen(run)
    assert duration.tolist() == (kernels[:, 1] - kernels[:, 0]).tolist()
    expected = mean_clock(kernels, clocks)
    np.testing.assert_allclose(clock, expected, rtol=1e-5)
    # The product alone: 6.482 ms at 1700 MHz, 8.468 at 1625, 7.416 at 1500 and 3.846 at 1450.
    longest = int(duration.argmax())
    assert expected[longest] == pytest.approx(1.5825e9, rel=1e-4)
    lost_ns = float((duration * np.maximum(1 - expected / 1.7e9, 0.0)).sum())
    assert lost_ns == pytest.approx(1.85e6, rel=0.02)
    (finding,) = [f for f in run.findings if f.code == "compute.clock_bound"]
    said_ms = float(finding.message.partition("at most ")[2].split()[0])
    # Kernels of an unknown kind (4 µs) have no reference clock.
    assert said_ms == pytest.approx(lost_ns / 1e6, rel=0.01)
    # A bound is no claim: one instance does not tell how it depends on the clock.
    assert not any(row.id.startswith("compute.clock") and row.time_ns for row in run.leaves())


def test_readings_that_contradict_the_kernels_are_no_clock_of_theirs(
    traces_dir: Path, tmp_path: Path
) -> None:
    """A driver's average: sclk rises for half a second while products take the same time."""
    file = traces_dir / "rocmprofiledata/pytorch-rpd-trace.rpd.gz"
    kernels, clocks = raw(file, tmp_path, 0)
    duration = (kernels[:, 1] - kernels[:, 0]).astype(float)
    clock = mean_clock(kernels, clocks)
    # By hand: the longest kernels, a product of 8-bit floats, at less and more than 600 MHz.
    longest = duration > 1.6e6
    slow, fast = longest & (clock < 6e8), longest & (clock > 1e9)
    assert min(slow.sum(), fast.sum()) > 8
    ratio = np.median(clock[fast]) / np.median(clock[slow])
    assert ratio > 2
    assert np.median(duration[slow]) / np.median(duration[fast]) < 1.1
    run = pipeline.attribute(file, device="mi300x")
    np.testing.assert_allclose(seen(run)[1], clock, rtol=1e-3)
    (finding,) = [f for f in run.findings if f.code == "telemetry.clock_averaged"]
    assert finding.severity == "warning"
    assert run.withholds("compute.clock")
    assert not any(row.id.startswith("compute.clock") and row.time_ns for row in run.leaves())


def recorded(folder: Path, dependence: float) -> Attribution:
    """Twenty products at half the reference clock, then twenty at all of it; no shapes."""
    trace = Trace(platform="rocm", device_name="AMD Instinct MI300X")
    at, base_ns = 1_000_000, 1_000_000
    clocks = []
    for i in range(40):
        hz = 1_050_000_000 if i < 20 else 2_100_000_000
        dur = round(base_ns * (2.1e9 / hz) ** dependence)
        trace.launch(
            "Cijk_Ailk_Bljk_SB_MT128x64x16", at - 50_000, 5_000, kernel_at=at, kernel_for=dur
        )
        clocks += [(at + 1, hz), (at + dur - 1, hz)]
        at += dur
    path = folder / "trace.json"
    path.write_bytes(trace.encode())
    run = pipeline.read(path)
    rows = [
        {
            "time_ns": trace.base_ns + time_ns,
            "span_ns": 0,
            "device_id": 0,
            "sm_clock_hz": hz,
        }
        for time_ns, hz in clocks
    ]
    run = run.with_tables({(0, "device_clock"): TABLES["device_clock"].of_rows(rows)})
    return pipeline.attribute(run, device="mi300x")


def test_work_of_unknown_amount_loses_to_the_clock_what_its_own_slope_says(tmp_path: Path) -> None:
    run = recorded(tmp_path, 1.0)
    causes = {row.id: row.time_ns for row in run.leaves()}
    # 20 × (2 ms − 1 ms) at half the clock, nothing at all of it.
    lost_ns = sum(ns for id, ns in causes.items() if id.startswith("compute.clock."))
    assert lost_ns == pytest.approx(20e6, rel=0.02)
    assert causes["compute.no_peak"] == pytest.approx(40e6, rel=0.01)
    assert lost_ns + causes["compute.no_peak"] == 60_000_000


def test_half_of_the_dependence_is_half_of_the_logarithm(tmp_path: Path) -> None:
    run = recorded(tmp_path, 0.5)
    lost_ns = sum(r.time_ns for r in run.leaves() if r.id.startswith("compute.clock."))
    assert lost_ns == pytest.approx(20 * 1e6 * (2**0.5 - 1), rel=0.03)


def test_kernels_that_no_clock_moves_refute_the_readings(tmp_path: Path) -> None:
    run = recorded(tmp_path, 0.0)
    assert "telemetry.clock_averaged" in {f.code for f in run.findings}
    assert run.withholds("compute.clock")
    assert {r.id for r in run.leaves() if r.id.startswith("compute") and r.time_ns} == {
        "compute.no_peak"
    }


def test_a_range_below_a_doubling_refutes_nothing() -> None:
    clock = np.repeat([1.0e9, 1.9e9], 10)
    group, duration = np.zeros(20, dtype=np.int64), np.full(20, 1e6)
    usable, roofline = np.ones(20, dtype=bool), np.full(20, np.nan)
    fit = estimate(group, 1, duration, clock, np.zeros(20), usable, roofline)
    assert averaged_readings([(fit, group, duration)]) is None
    wide = estimate(group, 1, duration, np.repeat([1.0e9, 2e9], 10), clock * 0, usable, roofline)
    found = averaged_readings([(wide, group, duration)])
    assert found is not None
    assert found.slope == pytest.approx(0.0, abs=1e-9)


def test_without_a_slope_or_a_roofline_the_sensitivity_is_unknown() -> None:
    clock = np.full(4, 1e9)
    fit = estimate(
        np.zeros(4, dtype=np.int64),
        1,
        np.full(4, 1e6),
        clock,
        clock * 0,
        np.ones(4, dtype=bool),
        np.full(4, np.nan),
    )
    assert np.isnan(fit.value).all()
    assert np.isnan(fit.error).all()
