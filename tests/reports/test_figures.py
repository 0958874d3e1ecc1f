from __future__ import annotations

import json

import numpy as np
import pytest

from chopper.reports import figures, series
from chopper.reports.series import Series
from chopper.reports.story import Story
from chopper.storage import manifest as m
from chopper.storage.run import Run
from tests.analyzers.make import table as made_table
from tests.made_runs import put_table
from tests.reports.make import Shape, make

EXACT = make()
STORY = Story(EXACT)


def test_waterfall_begins_at_the_ideal_and_steps_up_to_the_observed() -> None:
    trace = figures.waterfall(STORY)["data"][0]
    base, length = trace["base"], trace["x"]
    assert trace["y"][0].startswith("Ideal")
    assert trace["y"][-1] == "Observed"
    assert base[0] == 0
    for i in range(1, len(base) - 1):
        assert base[i] == pytest.approx(base[i - 1] + length[i - 1], rel=1e-5)
    assert base[-2] + length[-2] == pytest.approx(length[-1], rel=1e-5)
    assert length[-1] == pytest.approx(STORY.observed_per_window_ns / 1e6, rel=1e-5)


def test_waterfall_without_an_ideal_begins_at_zero() -> None:
    attribution = make(Shape(peak=False))
    trace = figures.waterfall(Story(attribution))["data"][0]
    assert not trace["y"][0].startswith("Ideal")
    assert trace["base"][0] == 0


def test_steps_stack_to_each_steps_mean_over_ranks() -> None:
    figure = figures.steps(STORY)
    heights = np.array([t["y"] for t in figure["data"]]).sum(axis=0)
    windows = EXACT.windows.to_pydict()
    for i in range(4):
        times = [
            e - s
            for e, s, k in zip(
                windows["end_ns"], windows["start_ns"], windows["step_index"], strict=True
            )
            if k == i
        ]
        assert heights[i] == pytest.approx(np.mean(times) / 1e9, rel=1e-4)
    for rank in ("0", "1"):
        assert len(figure["views"][rank]) == len(figure["data"])
    both = np.array([figure["views"]["0"], figure["views"]["1"]]).mean(axis=0)
    assert both == pytest.approx(np.array([t["y"] for t in figure["data"]]), rel=1e-4, abs=1e-9)


def test_many_steps_are_averaged_in_bins() -> None:
    attribution = make(Shape(ranks=1, steps=700, layers=1, host=False, telemetry=False))
    figure = figures.steps(Story(attribution))
    assert figure["binned"] == 700
    assert len(figure["data"][0]["x"]) == figures.MAX_BARS
    sizes = np.diff(np.linspace(0, 700, figures.MAX_BARS + 1).round())
    total = sum((np.array(t["y"]) * sizes).sum() for t in figure["data"])
    assert total == pytest.approx(attribution.observed_ns / 1e9, rel=1e-4)


def test_labels_from_traces_are_escaped_for_plotly() -> None:
    one = Series(
        "<b>x</b>", "<a href='javascript:1'>y</a>", "", 0, np.arange(5) * 10**9, np.arange(5.0)
    )
    figure = figures.telemetry([one], EXACT)
    # The legend is the only place with markup, and it is ours.
    assert "<a" not in json.dumps(figure)
    assert "&lt;b&gt;x" in figure["layout"]["annotations"][0]["text"]


def test_what_the_units_of_a_device_did_is_shown() -> None:
    part = m.RankManifest(rank=0, device_id=0, devices=[m.Device(device_id=0)])
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, {}, "made")
    rows = [
        {
            "time_ns": 10**18 + i * 110_000_000,
            "span_ns": 0,
            "device_id": 0,
            "sm_utilization_ratio": 0.9,
            "tensor_utilization_ratio": i / 8,
        }
        for i in range(3)
    ]
    put_table(run, 0, "device_activity", made_table("device_activity", rows))
    found = {s.label: s.value.tolist() for s in series.collect(run)}
    assert found == {"rank 0 SMs": [0.9] * 3, "rank 0 tensor cores": [0.0, 0.125, 0.25]}


def test_what_the_driver_sampled_itself_is_shown_and_holds_until_the_next() -> None:
    part = m.RankManifest(rank=0, device_id=0, devices=[m.Device(device_id=0)])
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, {}, "made")
    rows = [
        {"time_ns": 10**18 + at, "span_ns": 1000, "device_id": 0, "quantity": name, "value": value}
        for at, name, value in (
            (0, "sm_clock_hz", 1.98e9),
            (0, "power_w", 600.0),
            (20_000_000, "power_w", 640.0),
            (3_000_000, "sm_clock_hz", 1.2e9),
            (9_000_000_000, "sm_clock_hz", 1.98e9),
        )
    ]
    put_table(run, 0, "device_buffered", made_table("device_buffered", rows))
    found = {s.panel: (s.time_ns - 10**18).tolist() for s in series.collect(run)}
    assert found == {
        "SM clock, driver's own samples": [0, 3_000_000, 9_000_000_000],
        "Board power, driver's own samples": [0, 20_000_000],
    }


def test_series_of_the_synthetic_run() -> None:
    found = series.collect(EXACT.recording)
    panels = {s.panel for s in found}
    assert {
        "CPU",
        "CPU of ranks",
        "Memory of ranks",
        "Device memory",
        "Network",
        "Pressure",
        "Host memory available",
    } == panels
    cpu = next(s for s in found if s.label == "mean of cores")
    table = EXACT.recording.table(0, "cpu_core").to_pydict()
    at = table["time_ns"][0]
    mean = np.mean(
        [b for b, t in zip(table["busy_ratio"], table["time_ns"], strict=True) if t == at]
    )
    assert cpu.value[0] == pytest.approx(mean)
    received = next(s for s in found if s.label == "eth0 received")
    nic = EXACT.recording.table(0, "nic").to_pydict()
    # 10 ms apart: the difference of two totals, per second.
    assert received.value[0] == pytest.approx((nic["rx_bytes"][1] - nic["rx_bytes"][0]) / 0.01)


def test_a_counter_that_was_reset_is_unknown_not_negative() -> None:
    at, rate = series.growth(np.array([0, 10, 20, 30]), np.array([100.0, 200.0, 50.0, 70.0]))
    assert at.tolist() == [10, 20, 30]
    assert np.isnan(rate[1])
    assert rate[[0, 2]].tolist() == [10.0, 2.0]


@pytest.mark.parametrize("n", [2, 10, 99, 100, 101, 5000])
def test_thinning_keeps_the_extremes(n) -> None:
    rng = np.random.default_rng(n)
    one = Series("p", "l", "", None, np.arange(n), rng.standard_normal(n))
    thin = series.thin(one, 100)
    assert len(thin.time_ns) <= max(n if n <= 100 else 101, 2)
    assert thin.value.max() == one.value.max()
    assert thin.value.min() == one.value.min()
    assert (np.diff(thin.time_ns) > 0).all()
