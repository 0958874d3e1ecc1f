"""The factors of compute on device times whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.attribute import RankResult
from chopper.analyzers.causes.clock import ClockSeries
from chopper.analyzers.causes.clock_sensitivity import ROOFLINE_ERROR, estimate
from chopper.analyzers.causes.compute import apportion, fit
from chopper.analyzers.causes.contention import contend, shared_time
from chopper.analyzers.causes.factors import resident_blocks
from chopper.hardware.ceilings import Ceiling, UnitLimits
from chopper.hardware.devices import DTYPES
from chopper.views import view
from tests.analyzers.make import attributed, by_cause, kernel, kernels, launch, op, spans, table
from tests.analyzers.views.clock_script import Script, samples
from tests.golden.own import OWN

MS = 1_000_000
REFERENCE = 1.98e9
# 1 FLOP per nanosecond at the reference clock; memory out of the way.
CLOCKED = Ceiling(
    flop_per_s=dict.fromkeys(DTYPES, 1e9),
    memory_bytes_per_s=1e18,
    source="test",
    reference_clock_hz=dict.fromkeys(DTYPES, REFERENCE),
    units_count=100,
)
SIDE = 100
FLOP = 2 * SIDE**3
"""2 ms of a product at its peak."""


def products(bounds: list[tuple[int, int]], **more: Any) -> tuple[pa.Table, pa.Table]:
    """One product of 2 ms of FLOP per kernel."""
    host, device = [], []
    for i, (start, end) in enumerate(bounds):
        at = -10 * len(bounds) + 10 * i
        host += [op(at, at + 9, "aten::mm", [SIDE, SIDE], [SIDE, SIDE]), launch(at + 1, i + 1)]
        device.append(kernel(start, end, correlation_id=i + 1, **more))
    return spans(*host), kernels(*device)


def attribute(
    host: pa.Table,
    device: pa.Table,
    clock: pa.Table | None = None,
    ceiling: Ceiling | None = CLOCKED,
    counters: pa.Table | None = None,
) -> tuple[dict[str, int], RankResult]:
    result = attributed(
        host,
        device,
        ceiling=ceiling,
        device_clock=clock,
        kernel_counter=counters,
    )
    return by_cause(result), result


def codes(result: RankResult) -> set[str]:
    return {f.code for f in result.findings}


# Clock ------------------------------------------------------------------------------------------


def stepping(count: int, *, efficiency: float = 1.0, seed: int = 0) -> tuple[Script, list[Any]]:
    """Products back to back on a device that is throttled to 1200 MHz twice, for a second each."""
    del seed
    script = Script(
        (
            (0, 1.98e9),
            (1_004 * MS, 1.2e9),
            (2_009 * MS, 1.98e9),
            (3_013 * MS, 1.2e9),
            (4_017 * MS, 1.98e9),
        ),
        20_000 * MS,
    )
    cycles = np.arange(count + 1) * FLOP * efficiency * REFERENCE / 1e9
    edges = np.rint(script.ends_ns(cycles)).astype(np.int64)
    return script, list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


@pytest.mark.parametrize("hz", [100, 250, 1000])
def test_a_clock_that_steps_is_recovered_within_a_percent(hz: int) -> None:
    # Products at their peak at 1980 MHz: what they take longer at 1200 MHz is the clock's alone.
    script, bounds = stepping(2000)
    clock = script.samples(hz, reasons={1.98e9: 0, 1.2e9: 0x4}, jitter_ns=10**8 // hz)
    times, result = attribute(*products(bounds), clock)
    injected = result.observed_ns - 2000 * FLOP
    assert injected > 750 * MS
    assert times["compute.clock.power_cap"] == pytest.approx(injected, rel=0.01)
    assert times["compute.ideal"] == pytest.approx(2000 * FLOP, rel=1e-6)
    assert times["compute.efficiency.rest"] < 0.01 * injected
    assert not codes(result) & {"telemetry.clock_missing", "telemetry.clock_sparse"}
    assert result.coverage["clock_ratio"][0] == result.coverage["clock_ratio"][1]


@pytest.mark.parametrize("hz", [100, 1000])
def test_beside_inefficiency_the_clock_has_its_logarithmic_share(hz: int) -> None:
    script, bounds = stepping(1500, efficiency=1.4)
    times, _ = attribute(*products(bounds), script.samples(hz))
    start, end = np.array(bounds).T
    taken = (end - start).astype(float)
    truth = np.log(REFERENCE / script.mean_hz(start, end)) / np.log(taken / FLOP) * (taken - FLOP)
    assert times["compute.clock.unlabelled"] == pytest.approx(truth.sum(), rel=0.01)
    assert times["compute.efficiency.rest"] == pytest.approx(
        (taken - FLOP).sum() - truth.sum(), rel=0.01
    )


def test_without_samples_nothing_is_claimed_of_the_clock() -> None:
    _, bounds = stepping(600)
    times, result = attribute(*products(bounds))
    assert not [cause for cause in times if cause.startswith("compute.clock")]
    missing = [f for f in result.findings if f.code == "telemetry.clock_missing"]
    assert [f.withholds for f in missing] == [("compute.clock",)]
    assert result.factors is not None
    assert result.factors.unmeasured["clock"] == "the device's clock was not sampled"
    assert result.coverage["clock_ratio"] == (0.0, 0.0)


@pytest.mark.parametrize("hz", [0.5, 1.0, 1.5])
def test_sparse_samples_are_refused_not_guessed(hz: float) -> None:
    script, bounds = stepping(2000)
    times, result = attribute(*products(bounds), script.samples(hz))
    assert not [cause for cause in times if cause.startswith("compute.clock")]
    sparse = [f for f in result.findings if f.code == "telemetry.clock_sparse"]
    assert sparse
    assert sparse[0].withholds == ("compute.clock",)
    assert "ms apart" in sparse[0].message


def test_a_clock_above_the_reference_claims_nothing_and_excuses_a_fast_kernel() -> None:
    # Hopper's tensor peak is quoted at 1830 MHz; at 1980 a product may be 8 % faster than its peak.
    quoted = Ceiling(
        dict.fromkeys(DTYPES, 1e9), None, "test", reference_clock_hz=dict.fromkeys(DTYPES, 1.83e9)
    )
    taken = int(FLOP * 1.83 / 1.98)
    bounds = [(i * taken, (i + 1) * taken) for i in range(100)]
    clock = samples(np.arange(0, 200 * MS, 10 * MS), [1.98e9] * 20)
    times, result = attribute(*products(bounds), clock, quoted)
    busy = {c: time_ns for c, time_ns in times.items() if not c.startswith("idle.")}
    assert busy == {"compute.ideal": 100 * taken}
    assert "compute.above_peak" not in codes(result)
    slow = samples(np.arange(0, 200 * MS, 10 * MS), [1.83e9] * 20)
    assert "compute.above_peak" in codes(attribute(*products(bounds), slow, quoted)[1])


def test_a_reference_clock_that_is_not_known_claims_nothing() -> None:
    unknown = Ceiling(dict.fromkeys(DTYPES, 1e9), None, "test")
    script, bounds = stepping(600)
    times, result = attribute(*products(bounds), script.samples(100), unknown)
    assert not [cause for cause in times if cause.startswith("compute.clock")]
    assert result.factors is not None
    assert "reference clock" in result.factors.unmeasured["clock"]


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[Attribution, dict[str, Any]]]:
    """The same products on a real H100, on random numbers and on zeros; the clock of each."""
    runs = {data: pipeline.attribute(OWN / f"dvfs_{data}") for data in ("random", "zeros")}
    product = (pc.field("level") == "op") & (pc.field("name") == "aten::mm")
    return {
        data: (run, view(run, "clocks").filter(product).to_pylist()[0])
        for data, run in runs.items()
    }


def readings(data: str) -> tuple[np.ndarray, np.ndarray]:
    """Times and clocks of a recording while it was traced, as recorded: held for 100 ms each."""
    run = pipeline.read(OWN / f"dvfs_{data}")
    traced = [row for row in run.table(0, "step").to_pylist() if row["profiled"]][1:]
    clock = run.table(0, "device_clock")
    time = clock["time_ns"].to_numpy()
    inside = (time >= traced[0]["start_ns"]) & (time <= traced[-1]["end_ns"])
    return time[inside], clock["sm_clock_hz"].to_numpy()[inside]


@pytest.mark.parametrize(
    ("data", "clock_hz", "cause"),
    [("random", 1.40e9, "power_cap"), ("zeros", 1.66e9, "internal_limit")],
)
def test_a_real_clock_that_the_driver_holds_is_recovered(
    data: str, clock_hz: float, cause: str, measured: Any
) -> None:
    # 40 products 8192³ per step at 989.4 TFLOP/s take 44.45 ms. They are compute-bound, so their
    # time is proportional to 1 ÷ clock, and the clock has its logarithmic share of what is above.
    run, row = measured[data]
    assert readings(data)[1].mean() == pytest.approx(clock_hz, rel=0.01)
    assert row["clock_mean_hz"] == pytest.approx(clock_hz, rel=0.01)
    time_ns, ideal_ns = row["time_ns"], 10 * 40 * 2 * 8192**3 / 989.4e12 * 1e9
    share = np.log(1.83e9 / clock_hz) / np.log(time_ns / ideal_ns)
    truth_ns = (time_ns - ideal_ns) * share
    assert row["loss_ns"] == pytest.approx(truth_ns, rel=0.05)
    assert abs(row["loss_ns"] - truth_ns) < row["loss_error_ns"] < 0.5 * row["loss_ns"]
    causes = {leaf.id: leaf.time_ns for leaf in run.leaves()}
    assert causes[f"compute.clock.{cause}"] == row["loss_ns"]
    assert sum(causes.values()) == run.observed_ns
    # The driver names the power cap in both; at 446 of 700 W it is another limit.
    said = [f.message for f in run.findings if f.code == "telemetry.reason_contradicted"]
    of_limit = "the driver reports a power cap at 64.5 % of the limit (451 of 700 W)"
    assert said == ([] if data == "random" else [f"{of_limit}: another internal limit"])


def test_at_the_reference_clock_the_same_real_work_takes_the_same_time(measured: Any) -> None:
    # Per step 64.0 ms on random numbers, 53.3 ms on zeros, at 1.40 and 1.66 of 1.83 GHz.
    of_random, of_zeros = (measured[data][1] for data in ("random", "zeros"))
    assert of_random["time_ns"] / of_zeros["time_ns"] == pytest.approx(1.20, abs=0.01)
    at_reference = of_random["at_reference_ns"] / of_zeros["at_reference_ns"]
    assert at_reference == pytest.approx(1.0, abs=0.03)


def test_a_clock_that_is_told_as_it_is_beside_power_that_is_averaged_counts_each_time() -> None:
    clock_hz = [1.20e9 + 15e6 * (i * 7 % 11) for i in range(300)]
    power = [300.0 + i // 10 for i in range(300)]
    held = [clock_hz[i // 10] for i in range(300)]
    for clocks, count in ((clock_hz, 300), (held, 30)):
        series = ClockSeries.of(
            pa.table(
                {
                    "time_ns": [i * 10 * MS for i in range(300)],
                    "span_ns": [0] * 300,
                    "sm_clock_hz": [int(c) for c in clocks],
                    "power_w": power,
                    "event_reasons": [0] * 300,
                }
            )
        )
        assert series is not None
        assert len(series.time_ns) == count


@pytest.mark.parametrize("data", ["random", "zeros"])
def test_of_a_reading_that_a_driver_holds_the_first_sample_counts(data: str) -> None:
    series = ClockSeries.of(pipeline.read(OWN / f"dvfs_{data}").table(0, "device_clock"))
    assert series is not None
    gap_ms = np.diff(series.time_ns) / 1e6
    assert np.median(gap_ms) == pytest.approx(100, abs=1)
    assert np.percentile(gap_ms, 5) > 85
    assert gap_ms.max() < 115
    time, clock = readings(data)
    kept = np.isin(time, series.time_ns)
    stepped = np.flatnonzero(np.diff(clock)) + 1
    # Where power follows one sample later, both are new in that one.
    assert (kept[stepped] | kept[np.minimum(stepped + 1, len(kept) - 1)]).all()


# Sensitivity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [0.0, 0.35, 1.0])
def test_sensitivity_is_the_slope_with_its_error(truth: float) -> None:
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(200):
        clock = rng.uniform(1.2e9, 1.98e9, 60)
        taken = 1e6 * (clock / 1.98e9) ** -truth * np.exp(rng.normal(0, 0.02, 60))
        found = estimate(
            np.zeros(60, np.int64), 1, taken, clock, np.zeros(60), np.ones(60, bool), np.ones(60)
        )
        assert found.used_count[0] > 50
        assert found.slope[0] == pytest.approx(truth, abs=0.1)
        assert 0 <= found.value[0] <= 1
        inside.append(abs(found.slope[0] - truth) < 2 * found.slope_error[0])
    assert 0.88 < np.mean(inside) < 0.99


def test_without_a_spread_of_clocks_the_roofline_decides() -> None:
    count = 40
    clock = np.full(count, 1.5e9)
    found = estimate(
        np.zeros(count, np.int64),
        1,
        np.full(count, 1e6),
        clock,
        np.zeros(count),
        np.ones(count, bool),
        np.full(count, 0.3),
    )
    assert np.isnan(found.slope[0])
    assert found.value[0] == pytest.approx(0.3)
    assert found.error[0] == pytest.approx(ROOFLINE_ERROR)


def test_a_slope_that_contradicts_the_roofline_outweighs_it() -> None:
    # Near memory's roofline (0.2), yet durations of clock^(-0.9), times factors that no clock
    # explains: 0.9 ± 0.06. The roofline is off by 0.7, so its variance is 0.7² − 0.06² = 0.486
    # where it would have been 0.25², and it weighs an eighth of what it would have.
    clock = np.repeat([1.2e9, 1.98e9], 20)
    taken = 1e6 * (clock / 1.98e9) ** -0.9 * np.tile([1.1, 1 / 1.1], 20)
    found = estimate(
        np.zeros(40, np.int64), 1, taken, clock, np.zeros(40), np.ones(40, bool), np.full(40, 0.2)
    )
    assert found.slope[0] == pytest.approx(0.9)
    error = found.slope_error[0]
    weights = np.array([1 / error**2, 1 / (0.7**2 - error**2)])
    assert weights[1] == pytest.approx(1 / 0.486, rel=0.01)
    assert found.value[0] == pytest.approx((weights @ [0.9, 0.2]) / weights.sum())
    assert found.error[0] == pytest.approx(weights.sum() ** -0.5)


def test_a_roofline_within_the_error_of_the_slope_is_believed_in_full() -> None:
    # Durations of clock^(-0.4) times factors that no clock explains: a slope of 0.4 ± 0.36. The
    # roofline, 0, is off by less than two such errors, so its own error stays: 0.4² − 0.36² is less
    # than 0.25². With the variances added instead it would count for half.
    clock = np.repeat([1.2e9, 1.5e9], 20)
    taken = 1e6 * (clock / 1.98e9) ** -0.4 * np.tile([1.28, 1 / 1.28], 20)
    found = estimate(
        np.zeros(40, np.int64), 1, taken, clock, np.zeros(40), np.ones(40, bool), np.zeros(40)
    )
    slope, error = found.slope[0], found.slope_error[0]
    assert slope == pytest.approx(0.4)
    assert slope**2 - error**2 < ROOFLINE_ERROR**2 < slope**2 + error**2
    weights = np.array([1 / error**2, 1 / ROOFLINE_ERROR**2])
    assert found.value[0] == pytest.approx(slope * weights[0] / weights.sum())
    assert found.error[0] == pytest.approx(weights.sum() ** -0.5)


def test_instances_between_the_same_readings_share_their_error() -> None:
    # Eight readings, each wrong by 3 %, of fifty products each: as sure as eight products, not 400.
    rng = np.random.default_rng(4)
    inside, inside_alone = [], []
    for _ in range(200):
        clock = rng.uniform(1.2e9, 1.8e9, 8)
        taken = 1e6 * 1.98e9 / np.repeat(clock * np.exp(rng.normal(0, 0.03, 8)), 50)
        reading = np.repeat(np.arange(8), 50)
        told, none = np.repeat(clock, 50), np.zeros(400)
        args = (np.zeros(400, np.int64), 1, taken, told, none, none == 0, np.ones(400))
        found, alone = estimate(*args, reading), estimate(*args)
        inside.append(abs(found.slope[0] - 1) < 2 * found.slope_error[0])
        inside_alone.append(abs(alone.slope[0] - 1) < 2 * alone.slope_error[0])
    assert np.mean(inside_alone) < 0.4
    assert np.mean(inside) > 0.8


def test_a_slope_over_three_readings_is_none() -> None:
    clock, reading = np.repeat([1.2e9, 1.5e9, 1.8e9], 10), np.repeat([0, 1, 2], 10)
    none = np.zeros(30)
    args = (np.zeros(30, np.int64), 1, 1e15 / clock, clock, none, none == 0, np.full(30, 0.3))
    assert np.isnan(estimate(*args, reading).slope[0])
    assert estimate(*args).slope[0] == pytest.approx(1)


def test_clocks_that_spread_by_less_than_their_errors_give_no_slope() -> None:
    rng = np.random.default_rng(5)
    clock = rng.normal(1.5e9, 0.02e9, 60)
    taken = 1e6 * 1.98e9 / clock
    args = (np.zeros(60, np.int64), 1, taken, clock)
    more = (np.ones(60, bool), np.full(60, 0.5))
    assert np.isnan(estimate(*args, 0.008 * clock, *more).slope[0])
    sure, loose = (estimate(*args, error * clock, *more) for error in (0.001, 0.004))
    assert sure.slope[0] == loose.slope[0] == pytest.approx(1)
    assert sure.slope_error[0] < 0.03 < loose.slope_error[0] < 0.15


def test_overlapped_unsure_and_odd_instances_do_not_bend_the_slope() -> None:
    rng = np.random.default_rng(2)
    clock = rng.uniform(1.2e9, 1.98e9, 90)
    taken = 1e6 * 1.98e9 / clock
    usable = np.ones(90, bool)
    error = np.zeros(90)
    taken[:20] *= 2
    usable[:20] = False
    taken[20:40] *= 0.5
    error[20:40] = 0.1 * clock[20:40]
    taken[40:42] *= 30
    found = estimate(np.zeros(90, np.int64), 1, taken, clock, error, usable, np.zeros(90))
    assert found.slope[0] == pytest.approx(1.0, abs=0.02)


def test_memory_bound_work_whose_times_do_not_follow_the_clock_loses_nothing_to_it() -> None:
    # Same script, but durations stay: the run itself shows that the clock does not matter.
    script = Script(((0, 1.98e9), (400 * MS, 1.2e9), (900 * MS, 1.98e9)), 3_000 * MS)
    bounds = [(i * 3 * MS, (i + 1) * 3 * MS) for i in range(500)]
    times, result = attribute(*products(bounds), script.samples(100))
    assert result.factors is not None
    assert result.factors.by_signature.value[0] < 0.01
    assert sum(t for c, t in times.items() if c.startswith("compute.clock")) < 0.005 * 500 * MS


# Contention -------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=25))
def test_shared_time_is_that_of_a_brute_force_count(bounds: list[tuple[int, int]]) -> None:
    start = np.array([a for a, _ in bounds])
    end = np.array([a + d for a, d in bounds])
    ticks = np.arange(0, 100)
    running = ((start[:, None] <= ticks) & (ticks < end[:, None])).sum(axis=0)
    expected = [int((running[a : a + d] >= 2).sum()) for a, d in bounds]
    assert shared_time(start, end).tolist() == expected


def nccl(start: int, end: int) -> dict[str, Any]:
    return kernel(start, end, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=20)


def beside(
    slowdown: float,
    *,
    noise: float = 0.0,
    clock: np.ndarray | None = None,
    alone: int = 20,
    overlapped: int = 20,
) -> tuple[list[tuple[int, int]], list[dict[str, Any]], int]:
    """Products of 2 ms of FLOP that take 2.5 ms alone; some of them run beside a collective.

    Returns:
        Bounds, the collectives, and how much longer they took for running beside one.
    """
    rng = np.random.default_rng(3)
    bounds, collectives, lost, now = [], [], 0, 0
    for i in range(alone + overlapped):
        together = i >= alone
        taken = 2.5 * MS * np.exp(rng.normal(0, noise))
        if clock is not None:
            taken *= 1.98e9 / clock[i]
        lost += int(taken * (slowdown - 1)) if together else 0
        taken = int(taken * (slowdown if together else 1))
        bounds.append((now, now + taken))
        if together:
            collectives.append(nccl(now, now + taken))
        now += taken
    return bounds, collectives, lost


def with_collectives(
    bounds: list[tuple[int, int]], others: list[dict[str, Any]]
) -> tuple[pa.Table, pa.Table]:
    host, device = products(bounds)
    return host, kernels(*device.to_pylist(), *others)


@pytest.mark.parametrize("slowdown", [1.05, 1.3, 2.0])
def test_contention_is_recovered(slowdown: float) -> None:
    bounds, collectives, _ = beside(slowdown)
    times, result = attribute(*with_collectives(bounds, collectives))
    taken = 2.5 * MS * slowdown
    truth = 20 * (taken - FLOP) * np.log(slowdown) / np.log(taken / FLOP)
    assert times["compute.contention"] == pytest.approx(truth, rel=1e-3)
    assert result.factors is not None
    assert result.factors.contention.ratio[0] == pytest.approx(slowdown, rel=1e-5)


def test_noise_is_not_contention() -> None:
    bounds, collectives, _ = beside(1.0, noise=0.05, alone=200)
    times, _ = attribute(*with_collectives(bounds, collectives))
    assert times["compute.contention"] == 0


def test_noise_does_not_add_to_contention() -> None:
    bounds, collectives, _ = beside(1.2, noise=0.1, alone=400, overlapped=400)
    times, _ = attribute(*with_collectives(bounds, collectives))
    taken = np.array([b - a for a, b in bounds[400:]], dtype=float)
    truth = ((taken - FLOP) * np.log(1.2) / np.log(taken / FLOP)).sum()
    assert times["compute.contention"] == pytest.approx(truth, rel=0.05)


def test_a_lower_clock_is_not_called_contention() -> None:
    # Alone at 1980 MHz, beside collectives at 1200 MHz, and no slowdown but that of the clock.
    clock = np.where(np.arange(40) < 20, 1.98e9, 1.2e9)
    bounds, collectives, _ = beside(1.0, clock=clock)
    step = bounds[20][0]
    script = Script(((0, 1.98e9), (step, 1.2e9)), bounds[-1][1] + MS)
    times, _ = attribute(*with_collectives(bounds, collectives), script.samples(1000))
    assert times["compute.contention"] < 0.02 * times["compute.clock.unlabelled"]
    without, _ = attribute(*with_collectives(bounds, collectives))
    assert without["compute.contention"] > 10 * MS


def test_too_few_that_ran_alone_are_said_to_be_too_few() -> None:
    host, device = products([(0, 4 * MS), (5 * MS, 9 * MS), (10 * MS, 16 * MS)])
    beside = kernels(kernel(10 * MS, 16 * MS, "ncclDevKernel_AllReduce", stream=9))
    both = pa.concat_tables([device, beside]).unify_dictionaries().combine_chunks()
    times, result = attribute(host, both)
    assert times["compute.contention"] == 0
    assert result.factors is not None
    assert "fewer than 3 instances" in result.factors.unmeasured["contention"]


def test_where_none_ran_alone_contention_is_a_bound_in_a_finding() -> None:
    bounds, collectives, _ = beside(1.3, alone=0)
    # One instance is covered by its collective for a tenth only, and faster.
    first = bounds[0][0]
    bounds[0] = (first, first + 2_600_000)
    collectives[0] = nccl(first, first + 260_000)
    times, result = attribute(*with_collectives(bounds, collectives))
    assert times["compute.contention"] == 0
    found = [f for f in result.findings if f.code == "compute.contention_unknown"]
    assert [f.count for f in found] == [20]
    assert result.factors is not None
    assert result.factors.contention.bound_ns.sum() == pytest.approx(19 * (3_250_000 - 2_600_000))
    assert result.factors.unmeasured["contention"] == "no instance of the same work ran alone"


def test_products_that_divide_the_device_are_not_slower_together() -> None:
    # Side by side each takes twice its time, and each is given half of it.
    alone = [(i * 3 * MS, (i + 1) * 3 * MS) for i in range(5)]
    host, device = products([*alone, (15 * MS, 21 * MS), (15 * MS, 21 * MS)])
    rows = device.to_pylist()
    rows[-1]["stream_id"] = 9
    times, _ = attribute(host, kernels(*rows))
    assert times["compute.contention"] == 0


def test_contention_of_memory_bound_work_leaves_its_excess() -> None:
    ceiling = Ceiling(dict.fromkeys(DTYPES, 1e9), 1e9, "test")
    host, device, at = [], [], 0
    others = []
    for i in range(10):
        host += [
            op(-500 + 10 * i, -492 + 10 * i, "aten::add", [1000], [1000]),
            launch(-499 + 10 * i, i + 1),
        ]
        taken = 15_000 if i < 5 else 30_000
        device.append(kernel(at, at + taken, correlation_id=i + 1))
        if i >= 5:
            others.append(nccl(at, at + taken))
        at += taken
    times, _ = attribute(spans(*host), kernels(*device, *others), None, ceiling)
    # 12 000 ns of bytes, 15 000 ns alone.
    each = 18_000 * np.log(2) / np.log(30 / 12)
    assert times["compute.contention"] == pytest.approx(5 * each, abs=5)
    assert times["compute.vector.roofline"] == 10 * 12_000
    assert times["compute.vector.excess"] == pytest.approx(5 * 3_000 + 5 * (18_000 - each), abs=5)


def test_signatures_do_not_mix_grids_or_shapes() -> None:
    duration = np.array([10.0, 10, 10, 30, 30, 30])
    found = contend(
        np.array([0, 0, 0, 1, 1, 1]),
        2,
        duration * 1e5,
        np.zeros(6),
        np.array([0, 0, 0, 1, 1, 1]) * duration.astype(int) * 10**5,
        np.zeros(6),
    )
    assert found.factor_ln.tolist() == [0] * 6
    assert np.isnan(found.ratio).all()


# Waves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "ratio"),
    [
        ([1, 1, 1], 1),
        ([100, 1, 1], 1),
        ([101, 1, 1], 2 / 1.01),
        ([10, 20, 1], 1),
        ([250, 1, 1], 1.2),
    ],
)
def test_wave_quantization(grid: list[int], ratio: float) -> None:
    host, device = products([(0, 4 * MS)], grid=str(grid), block="[128, 1, 1]", registers_count=64)
    times, _ = attribute(host, device)
    share = 2 * MS * min(np.log(ratio) / np.log(2), 1)
    assert times["compute.efficiency.wave_quantization"] == pytest.approx(share, abs=1)
    assert times["compute.efficiency.rest"] == pytest.approx(2 * MS - share, abs=1)


@pytest.mark.parametrize(("memory_ms", "ratio"), [(4, 1.0), (3, 2 / 1.01 / 1.5), (1, 2 / 1.01)])
def test_a_last_wave_lengthens_the_arithmetic_but_not_the_traffic(
    memory_ms: int, ratio: float
) -> None:
    # Two rounds of 2 ms of arithmetic for 1.01 of blocks, 3.96 ms, beside the traffic's time.
    traffic = 3 * SIDE**2 * 4 / (memory_ms * 1e-3)
    host, device = products([(0, 8 * MS)], grid="[101, 1, 1]", registers_count=64)
    times, _ = attribute(host, device, ceiling=replace(CLOCKED, memory_bytes_per_s=traffic))
    share = 6 * MS * np.log(ratio) / np.log(4)
    assert times["compute.efficiency.wave_quantization"] == pytest.approx(share, abs=2)
    bound_ms = max(memory_ms, 2 * 2 / 1.01)
    assert times["compute.efficiency.rest"] == pytest.approx(
        6 * MS * np.log(8 / bound_ms) / np.log(4), abs=2
    )


def test_grids_in_threads_are_not_taken_for_blocks() -> None:
    # ROCm records no registers, and its grid is in blocks or threads, by the launching call.
    host, device = products([(0, 4 * MS)], grid="[101, 1, 1]", block="[128, 1, 1]")
    times, result = attribute(host, device)
    assert times["compute.efficiency.wave_quantization"] == 0
    assert result.factors is not None
    assert "grid sizes" in result.factors.unmeasured["wave quantization"]


def test_resident_blocks_of_an_h100() -> None:
    h100 = UnitLimits(2048, 32, 65536, 233472)
    threads = np.array([128, 256, 384, 1024, 32, 128])
    registers = np.array([32, 64, 168, 64, 32, 32])
    shared = np.array([0, 0, 200_000, 0, 0, 50_000])
    # 2048/128; 65536/(8·64·32); shared memory; registers (32 warps · 2048); 32 blocks;
    # 233472/51024.
    assert resident_blocks(h100, threads, registers, shared).tolist() == [
        16,
        4,
        1,
        1,
        32,
        4,
    ]


# Counters ---------------------------------------------------------------------------------------


def counters(performed_flop: float | None, busy_percent: float | None) -> pa.Table:
    """One kernel's counters, as ncu names them."""
    values = {
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum": performed_flop,
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": busy_percent,
    }
    return table(
        "kernel_counter",
        [
            {
                "source": "ncu.csv",
                "dispatch_id": 0,
                "kernel": "k",
                "occurrence_id": 0,
                "counter": name,
                "value": value,
            }
            for name, value in values.items()
            if value is not None
        ],
    )


def test_counters_split_efficiency_into_instructions_and_tensor_cores() -> None:
    # 2 ms · 1.25 ÷ 0.5 = 5 ms: nothing is left.
    host, device = products([(0, 5 * MS)])
    times, result = attribute(host, device, counters=counters(1.25 * FLOP, 50))
    whole = np.log(2.5)
    assert times["compute.efficiency.instructions"] == pytest.approx(
        3 * MS * np.log(1.25) / whole, abs=1
    )
    assert times["compute.efficiency.tensor_core"] == pytest.approx(
        3 * MS * np.log(2) / whole, abs=1
    )
    assert times["compute.efficiency.rest"] <= 1
    assert result.factors is not None
    assert "instructions and tensor cores" not in result.factors.unmeasured


def test_idle_tensor_cores_are_not_counted_on_top_of_the_last_wave() -> None:
    # 101 blocks on 100 units leave the matrix units idle for almost half of the time.
    host, device = products([(0, 4 * MS)], grid="[101, 1, 1]", registers_count=64)
    times, _ = attribute(host, device, counters=counters(None, 50))
    assert times["compute.efficiency.wave_quantization"] == pytest.approx(
        2 * MS * np.log(2 / 1.01) / np.log(2), abs=1
    )
    assert times["compute.efficiency.tensor_core"] == pytest.approx(
        2 * MS * np.log(1.01) / np.log(2), abs=1
    )


# All together -----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 2**50), st.lists(st.floats(0, 1e6), min_size=4, max_size=4)),
        min_size=1,
        max_size=20,
    )
)
def test_apportioned_parts_sum_exactly_and_are_within_one(
    rows: list[tuple[int, list[float]]],
) -> None:
    total = np.array([t for t, _ in rows])
    weights = np.array([w for _, w in rows]).T
    parts = np.stack(apportion(total, list(weights)))
    assert (parts.sum(axis=0) == total).all()
    assert (parts >= 0).all()
    whole = weights.sum(axis=0)
    some = whole > 0
    exact = total[some] * (weights[:, some] / whole[some])
    assert (np.abs(parts[:, some] - exact) <= 1 + 1e-9 * total[some]).all()


@given(
    st.floats(0, 20),
    st.lists(st.floats(0, 10), max_size=4),
    st.lists(st.floats(0, 10), max_size=3),
)
def test_factors_never_explain_more_than_was_observed(
    seen: float, measured: list[float], modelled: list[float]
) -> None:
    rest, first, second = fit(
        np.array([seen]), [np.array([f]) for f in measured], [np.array([f]) for f in modelled]
    )
    explained = first[0] * sum(measured) + second[0] * sum(modelled)
    assert rest[0] >= 0
    assert 0 <= first[0] <= 1
    assert 0 <= second[0] <= 1
    assert explained + rest[0] == pytest.approx(seen, abs=1e-9)
    if sum(measured) < seen:
        assert first[0] == 1


def test_factors_that_exceed_the_observed_are_scaled_and_counted() -> None:
    # Seen 1.25 × the ideal, while the grid alone would explain 1.98 ×.
    host, device = products(
        [(0, 2_500_000)], grid="[101, 1, 1]", block="[128, 1, 1]", registers_count=64
    )
    times, result = attribute(host, device)
    assert times["compute.efficiency.wave_quantization"] == 500_000
    assert times["compute.efficiency.rest"] == 0
    assert [f.count for f in result.findings if f.code == "compute.factors_exceed"] == [1]


@settings(max_examples=40)
@given(st.data())
def test_causes_close_whatever_the_factors(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 25))
    now, bounds, others = 0, [], []
    for _ in range(count):
        now += data.draw(st.integers(0, 200_000))
        taken = data.draw(st.integers(1, 6_000_000))
        bounds.append((now, now + taken))
        if data.draw(st.booleans()):
            others.append(nccl(now, now + data.draw(st.integers(1, taken))))
        now += data.draw(st.integers(0, taken))
    clocks = data.draw(
        st.lists(st.one_of(st.none(), st.integers(0, 2_500)), min_size=2, max_size=30)
    )
    period = data.draw(st.integers(1, 300)) * 100_000
    bits = data.draw(
        st.lists(
            st.one_of(st.none(), st.integers(0, 0x1FF)), min_size=len(clocks), max_size=len(clocks)
        )
    )
    table = samples(
        np.arange(len(clocks)) * period, [None if c is None else c * 1e6 for c in clocks], bits
    )
    host, device = products(
        bounds, grid=f"[{data.draw(st.integers(1, 999))}, 1, 1]", registers_count=32
    )
    rows = device.to_pylist()
    for row in rows:
        row["stream_id"] = data.draw(st.integers(7, 9))
    ceiling = Ceiling(
        dict.fromkeys(DTYPES, 1e9),
        data.draw(st.sampled_from([None, 1e7, 1e9, 1e12])),
        "test",
        reference_clock_hz=dict.fromkeys(DTYPES, 1.5e9),
        units_count=data.draw(st.one_of(st.none(), st.integers(1, 200))),
    )
    times, result = attribute(host, kernels(*rows, *others), table, ceiling)
    assert min(times.values()) >= 0
    assert sum(times.values()) == result.observed_ns
