"""Views of clocks and factors on a run whose device is throttled in its last two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.detectors.remedies import remedy
from chopper.storage.run import Run
from chopper.views import view
from tests.analyzers.make import table
from tests.analyzers.views.clock_script import Script
from tests.kineto_writer import Trace
from tests.made_runs import put_table

MS = 1_000_000
HIGH, LOW = 1.41e9, 1.005e9
SIDE = 4096
IDEAL_NS = 2 * SIDE**3 / 312e12 * 1e9
"""At the A100's bf16 peak, quoted at 1410 MHz."""
STEPS, PRODUCTS = 4, 100


@pytest.fixture(scope="module")
def attribution(tmp_path_factory: pytest.TempPathFactory) -> Attribution:
    """Four steps of products at 80 % of the peak; the clock falls after the second."""
    run, clocks = throttled(tmp_path_factory.mktemp("clocked"))
    put_table(run, 0, "device_clock", clocks)
    return pipeline.attribute(run)


def throttled(folder: Path, **more: Any) -> tuple[Run, pa.Table]:
    """The run, and what a sampler would have read."""
    begin = 5 * MS
    fall = begin + int(2 * PRODUCTS * IDEAL_NS / 0.8)
    script = Script(((0, HIGH), (fall, LOW)), 1000 * MS)
    needed = np.arange(STEPS * PRODUCTS + 1) * IDEAL_NS / 0.8 * HIGH / 1e9 + begin * HIGH / 1e9
    edges = np.rint(script.ends_ns(needed)).astype(np.int64)
    trace = Trace()
    for i in range(STEPS * PRODUCTS):
        step, place = divmod(i, PRODUCTS)
        at = step * MS + place * 9_000
        if place == 0:
            trace.step(step, at, MS - 1000)
        op = trace.op(
            "aten::mm", at + 10, 5_000, shapes=[[SIDE, SIDE]] * 2, types=["c10::BFloat16"] * 2
        )
        trace.launch(
            "ampere_bf16_s16816gemm",
            at + 100,
            50,
            kernel_at=int(edges[i]),
            kernel_for=int(edges[i + 1] - edges[i]),
            op=op,
            args={"grid": [16, 10, 1]},
        )
    path = folder / "trace.json"
    path.write_bytes(trace.encode())
    run = pipeline.read(path)
    table = script.samples(200, **{"reasons": {HIGH: 0, LOW: 0x4}, "power_w": 390.0, **more})
    moved = table["time_ns"].to_numpy() + trace.base_ns
    return run, table.set_column(0, table.schema.field("time_ns"), [moved])


def rows_at(run: Attribution, level: str) -> list[dict[str, Any]]:
    """Return the rows of one level of the view."""
    rows: list[dict[str, Any]] = view(run, "clocks").to_pylist()
    return [row for row in rows if row["level"] == level]


def test_causes_of_the_run(attribution: Attribution) -> None:
    times = {row.id: row for row in attribution.causes()}
    assert attribution.coverage["clock_ratio"] == 1
    taken = IDEAL_NS / 0.8 * HIGH / LOW
    loss = (taken - IDEAL_NS) * np.log(HIGH / LOW) / np.log(taken / IDEAL_NS) * 2 * PRODUCTS
    assert times["compute.clock.power_cap"].time_ns == pytest.approx(loss, rel=0.01)
    assert "clock samples" in times["compute.clock.power_cap"].basis
    assert "clock not measured" not in times["compute.efficiency.rest"].basis
    assert "no hardware counters" in times["compute.efficiency.rest"].basis


def test_clocks_by_step(attribution: Attribution) -> None:
    rows = rows_at(attribution, "step")
    assert [row["number"] for row in rows] == [0, 1, 2, 3]
    assert [row["clock_mean_hz"] for row in rows] == pytest.approx([HIGH, HIGH, LOW, LOW], rel=0.01)
    windows = attribution.windows.to_pylist()
    for row, window in zip(rows, windows, strict=True):
        assert row["observed_ns"] == window["end_ns"] - window["start_ns"]
    # At 1410 MHz the throttled steps would take as long as the others.
    assert rows[3]["at_reference_ns"] == pytest.approx(PRODUCTS * IDEAL_NS / 0.8, rel=0.01)
    assert rows[3]["observed_ns"] == pytest.approx(PRODUCTS * IDEAL_NS / 0.8 * HIGH / LOW, rel=0.01)
    assert rows[3]["power_cap_ratio"] == pytest.approx(1)
    assert rows[0]["host_limited_ratio"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("level", "name"),
    [
        ("rank", None),
        ("phase", "forward"),
        ("layer", None),
        ("op", "aten::mm"),
        ("kernel", "ampere_bf16_s16816gemm"),
    ],
)
def test_clocks_of_all_time(attribution: Attribution, level: str, name: str | None) -> None:
    (row,) = rows_at(attribution, level)
    assert row["name"] == name
    assert row["rank"] == (0 if level in ("rank", "phase") else None)
    assert row["observed_ns"] is None
    compute = {c.id: c.time_ns for c in attribution.causes()}
    assert row["time_ns"] == compute["compute"]
    assert row["loss_ns"] == compute["compute.clock"]
    assert 0 < row["loss_error_ns"] < 0.05 * row["loss_ns"]
    assert row["known_ratio"] == 1
    assert row["clock_p5_hz"] == pytest.approx(LOW, rel=1e-3)
    assert row["clock_p95_hz"] == pytest.approx(HIGH, rel=1e-3)
    # More than half of the time is at the lower clock.
    assert row["clock_median_hz"] == pytest.approx(LOW, rel=1e-3)
    assert row["power_mean_w"] == pytest.approx(390)
    assert row["sensitivity_ratio"] == pytest.approx(1, abs=0.01)
    # Measured on 400 instances at two clocks; from the roofline alone it would be 0.25.
    assert 0 < row["sensitivity_error_ratio"] < 0.01
    assert row["at_reference_ns"] == pytest.approx(STEPS * PRODUCTS * IDEAL_NS / 0.8, rel=0.01)


def test_kernels_are_told_apart_by_operator_and_shapes(attribution: Attribution) -> None:
    (row,) = rows_at(attribution, "kernel")
    assert row["op"] == "aten::mm"
    assert row["input_dims"].replace(" ", "") == f"[[{SIDE},{SIDE}],[{SIDE},{SIDE}]]"


NAMED = ("power_cap", "thermal", "application", "idle_ramp", "host_limited", "internal_limit")


def test_a_log_without_reasons_claims_none(tmp_path: Path) -> None:
    run, clocks = throttled(tmp_path, reasons=None)
    put_table(run, 0, "device_clock", clocks)
    attribution = pipeline.attribute(run)
    for row in view(attribution, "clocks").to_pylist():
        assert [row[f"{label}_ratio"] for label in NAMED] == [None] * len(NAMED)
        assert row["unlabelled_ratio"] == 1
    times = {c.id: c.time_ns for c in attribution.causes() if c.id.startswith("compute.clock.")}
    assert [c for c, time_ns in times.items() if time_ns] == ["compute.clock.unlabelled"]


def test_shares_of_reasons_are_of_the_time_that_has_some(tmp_path: Path) -> None:
    """Reasons are read of the throttled steps only: of those all was the power cap."""
    run, clocks = throttled(tmp_path, reasons={LOW: 0x4})
    put_table(run, 0, "device_clock", clocks)
    (row,) = rows_at(pipeline.attribute(run), "phase")
    fast, slow = IDEAL_NS / 0.8, IDEAL_NS / 0.8 * HIGH / LOW
    assert row["unlabelled_ratio"] == pytest.approx(fast / (fast + slow), rel=0.02)
    assert row["power_cap_ratio"] == pytest.approx(1)
    assert row["thermal_ratio"] == 0


def test_steps_that_nobody_sampled_have_no_loss(tmp_path: Path) -> None:
    run, clocks = throttled(tmp_path)
    third = pipeline.attribute(run).windows.to_pylist()[2]
    put_table(run, 0, "device_clock", clocks.filter(pc.less(clocks["time_ns"], third["start_ns"])))
    rows = rows_at(pipeline.attribute(run), "step")
    unknown = ("loss_ns", "loss_error_ns", "at_reference_ns", "clock_mean_hz")
    for name in unknown:
        assert [row[name] is None for row in rows] == [False, False, False, True]
    assert rows[3]["known_ratio"] == 0
    assert rows[3]["observed_ns"] > 0


def test_counters_of_one_step_explain_each_traced_step(tmp_path: Path) -> None:
    """Tensor cores were busy for half of each product; 160 blocks on 108 SMs explain a part."""
    run, _ = throttled(tmp_path)
    row = {
        "source": "step 8",
        "device": "0",
        "step": 8,
        "kernel": "ampere_bf16_s16816gemm",
        "counter": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "value": 50.0,
    }
    rows = [row | {"dispatch_id": i, "occurrence_id": i} for i in range(PRODUCTS)]
    put_table(run, 0, "kernel_counter", table("kernel_counter", rows))
    attribution = pipeline.attribute(run)
    found = attribution.factors[0].tensor_ln
    assert found == pytest.approx(np.full(STEPS * PRODUCTS, np.log(2) - np.log(2 / (160 / 108))))
    times = {row.id: row.time_ns for row in attribution.causes()}
    assert times["compute.efficiency.tensor_core"] > 0


@pytest.mark.parametrize(
    ("chip_c", "memory_c", "cause"),
    [(84, 92, "internal_limit"), (85, 92, "thermal"), (84, None, "thermal")],
)
def test_heat_of_a_cool_device_is_another_limit(
    tmp_path: Path, chip_c: int, memory_c: int | None, cause: str
) -> None:
    """3 °C below 87 and 95 °C at most; an absent sensor rules nothing out."""
    run, clocks = throttled(tmp_path, reasons={HIGH: 0, LOW: 0x20})
    put_table(run, 0, "device_clock", clocks)
    measured = {"temperature_c": chip_c, "memory_temperature_c": memory_c}
    limits = {"temperature_limit_c": 87, "memory_temperature_limit_c": 95}
    for name, values in (("device_counter", measured), ("device_limit", limits)):
        row = {"time_ns": clocks["time_ns"][0].as_py(), "span_ns": 0, "device_id": 0, **values}
        put_table(run, 0, name, table(name, [row]))
    attribution = pipeline.attribute(run)
    times = {c.id: c.time_ns for c in attribution.causes() if c.id.startswith("compute.clock.")}
    assert [c for c, time_ns in times.items() if time_ns] == [f"compute.clock.{cause}"]
    said = [f.message for f in attribution.findings if f.code == "telemetry.reason_contradicted"]
    heat = "the driver reports heat while chip and memory are below their limits"
    assert said == ([f"{heat}: another internal limit"] if cause == "internal_limit" else [])


@pytest.mark.parametrize(
    ("cause", "bits", "limits", "said"),
    [
        ("power_cap", 0x4, {"power_limit_w": 400.0, "power_limit_max_w": 400.0}, "(400 W), so"),
        ("power_cap", 0x4, {"power_limit_w": 300.0, "power_limit_max_w": 400.0}, "300 W to 400 W"),
        ("power_cap", 0x4, {"power_limit_w": 300.0}, "Raise the power limit (nvidia-smi -pl"),
        ("power_cap", 0x80, {"power_limit_w": 300.0, "power_limit_max_w": 400.0}, "power supplies"),
        (
            "application",
            0x2,
            {"sm_clock_application_hz": 1_410_000_000, "sm_clock_max_hz": 1_410_000_000},
            "already the largest (1.41 GHz)",
        ),
        (
            "application",
            0x2,
            {"sm_clock_application_hz": 1_005_000_000, "sm_clock_max_hz": 1_410_000_000},
            "`nvidia-smi -rac` and",
        ),
        ("host_limited", 0x0, {"sm_clock_max_hz": 1_980_000_000}, "(to 1.98 GHz at most)"),
        ("host_limited", 0x0, {}, "compare the clock limit"),
        ("unlabelled", 0x8, {}, "(bits 0x8)"),
        ("unlabelled", None, {}, "Record the throttle reasons"),
        ("idle_ramp", 0x1, {"power_limit_w": 400.0, "power_limit_max_w": 400.0}, "goes idle"),
    ],
)
def test_advice_on_the_clock_holds_in_the_recording(
    tmp_path: Path, cause: str, bits: int | None, limits: dict[str, Any], said: str
) -> None:
    run, clocks = throttled(tmp_path, reasons={HIGH: bits, LOW: bits})
    put_table(run, 0, "device_clock", clocks)
    row = {"time_ns": clocks["time_ns"][0].as_py(), "span_ns": 0, "device_id": 0, **limits}
    put_table(run, 0, "device_limit", table("device_limit", [row]))
    attribution = pipeline.attribute(run)
    (lost,) = (c for c in attribution.leaves() if c.id.startswith("compute.clock.") and c.time_ns)
    assert lost.id == f"compute.clock.{cause}"
    assert said in remedy(attribution, lost.id)


def test_last_waves(attribution: Attribution) -> None:
    (row,) = view(attribution, "wave_quantization").to_pylist()
    assert (row["blocks_count"], row["units_count"], row["resident_count"]) == (160, 108, 16)
    assert row["slowdown_ratio"] == pytest.approx(2 / (160 / 108))
    compute = {c.id: c.time_ns for c in attribution.causes()}
    assert row["loss_ns"] == compute["compute.efficiency.wave_quantization"]


def test_nothing_ran_beside_anything(attribution: Attribution) -> None:
    assert view(attribution, "contention").num_rows == 0


def test_without_samples_there_are_no_clocks(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch("k", 0, 10, kernel_at=100, kernel_for=50)
    path = tmp_path / "trace.json"
    path.write_bytes(trace.encode())
    bare = pipeline.attribute(path)
    assert view(bare, "clocks").num_rows == 0
