"""Energy from counters: known powers over known steps, and what must be refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.meter import Meter, meter_of, meter_of_power
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.views import VIEWS, view
from chopper.wording import ranges
from tests.analyzers.make import kernel, kernels, spans, table
from tests.made_runs import put_table

S = 1_000_000_000
BASE = 1_700_000_000 * S


def counter(
    rank: int = 0,
    *,
    power_w: float = 400.0,
    until_s: float = 30.0,
    every_s: float = 0.1,
    **more: Any,
) -> pa.Table:
    """A counter of a device at constant power."""
    time_s = np.arange(-1, until_s + 1, every_s)
    return table(
        "device_counter",
        [
            {
                "time_ns": BASE + round(t * S),
                "span_ns": 0,
                "device_id": rank,
                "energy_j": 1e6 + power_w * (t + 1),
                **more,
            }
            for t in time_s.tolist()
        ],
    )


def tokens(count: int) -> pa.Table:
    """So many in each of 30 steps, as the program says."""
    return table(
        "step_work",
        [
            {"time_ns": BASE + i * S, "span_ns": 0, "step": i, "tokens_count": count}
            for i in range(30)
        ],
    )


def a_run(
    *,
    step_s: float = 1.0,
    steps: int = 30,
    ranks: int = 1,
    **more: pa.Table,
) -> Run:
    """Ranks that take steps one after the other; a kernel fills each step."""
    parts = [
        m.RankManifest(
            rank=r, device_id=r, hostname="node", devices=[m.Device(device_id=r)], status="complete"
        )
        for r in range(ranks)
    ]
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=parts), None, {}, "made")
    edges = [BASE + round(i * step_s * S) for i in range(steps + 1)]
    for r in range(ranks):
        put_table(run, r, "host_span", spans())
        rows = [kernel(a, b, device_id=r) for a, b in pairwise(edges)]
        put_table(run, r, "device_event", kernels(*rows))
        put_table(
            run,
            r,
            "step",
            table(
                "step",
                [
                    {"number": i, "start_ns": a, "end_ns": b, "source": "mark", "traced": True}
                    for i, (a, b) in enumerate(pairwise(edges))
                ],
            ),
        )
        for name, one in more.items():
            put_table(run, r, name, one)
    return run


def energy_of(run: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = view(pipeline.attribute(run), "energy").to_pylist()
    return rows


def test_energy_of_steps_and_tokens_at_a_known_power() -> None:
    work = tokens(4096)
    rows = energy_of(a_run(device_counter=counter(), step_work=work))
    whole = rows[0]
    assert (whole["scope"], whole["source"], whole["ranks"]) == ("run", "device 0", "0")
    assert whole["step_count"] == 30
    assert whole["energy_j"] == pytest.approx(400 * 30)
    assert whole["energy_per_step_j"] == pytest.approx(400)
    assert whole["energy_per_token_j"] == pytest.approx(400 / 4096)
    assert (whole["tokens_count"], whole["tokens_from"]) == (30 * 4096, "program")
    assert whole["power_mean_w"] == pytest.approx(400)
    assert whole["basis"] == "counter"
    assert whole["energy_error_j"] == pytest.approx(6 * 2 * 0.1 * 400)  # six groups' edges
    groups = [row for row in rows if row["scope"] == "steps"]
    assert [(g["first_step"], g["last_step"]) for g in groups] == [
        (0, 4), (5, 9), (10, 14), (15, 19), (20, 24), (25, 29),
    ]  # fmt: skip
    assert all(g["span_ns"] == 5 * S for g in groups)
    # A phase that alternates with nothing lasts from first to last: 30 s.
    (phase,) = [row for row in rows if row["scope"] == "phase"]
    assert phase["energy_j"] == pytest.approx(400 * 30)


def test_of_a_phase_that_goes_on_after_the_readings_what_was_read_counts() -> None:
    read = counter(until_s=20)
    phase = next(r for r in energy_of(a_run(device_counter=read)) if r["scope"] == "phase")
    last_s = (read["time_ns"][-1].as_py() - BASE) / S
    assert phase["span_ns"] == pytest.approx(last_s * S)
    assert phase["energy_j"] == pytest.approx(400 * last_s)
    short = counter(until_s=2)
    phase = next(r for r in energy_of(a_run(device_counter=short)) if r["scope"] == "phase")
    assert phase["energy_j"] is None
    assert phase["reason"] == "samples cover no uninterrupted 5 s of it"


def test_a_run_shorter_than_five_seconds_is_refused_with_the_reason() -> None:
    rows = energy_of(a_run(steps=4, device_counter=counter(until_s=4)))
    assert rows[0]["energy_j"] is None
    assert "4 s of consecutive steps were sampled" in rows[0]["reason"]
    phase = next(r for r in rows if r["scope"] == "phase")
    assert phase["energy_j"] is None
    assert "5 s" in phase["reason"]


def test_steps_around_a_counter_that_went_backwards_are_left_out() -> None:
    reset = counter()
    values = reset["energy_j"].to_numpy().copy()
    at = int(np.searchsorted(reset["time_ns"].to_numpy(), BASE + 12 * S + 1))
    values[at:] -= values[at]  # within step 12
    reset = reset.set_column(
        reset.schema.get_field_index("energy_j"), reset.schema.field("energy_j"), [values]
    )
    rows = energy_of(a_run(device_counter=reset))
    groups = [r for r in rows if r["scope"] == "steps"]
    assert rows[0]["energy_per_step_j"] == pytest.approx(400)
    assert all(not g["first_step"] <= 12 <= g["last_step"] for g in groups)
    assert rows[0]["step_count"] == 29


def jumped(by_j: float, *, at_s: float = 12.0, only_once: bool = False) -> pa.Table:
    """A counter that steps up; for one reading, or from there on."""
    readings = counter()
    values = readings["energy_j"].to_numpy().copy()
    at = int(np.searchsorted(readings["time_ns"].to_numpy(), BASE + round(at_s * S) + 1))
    values[at : at + 1 if only_once else len(values)] += by_j
    return readings.set_column(
        readings.schema.get_field_index("energy_j"), readings.schema.field("energy_j"), [values]
    )


# A board of 700 W: in 0.1 s, and the counter's own 0.1 s twice, 2 × 700 W are 420 J.
@pytest.mark.parametrize(("by_j", "left_out"), [(370.0, 0), (390.0, 1), (1e15, 1)])
def test_a_counter_that_jumps_up_is_no_energy(by_j: float, left_out: int) -> None:
    run = a_run(device_counter=jumped(by_j))
    limit = {"time_ns": BASE, "span_ns": 0, "device_id": 0, "power_limit_w": 700.0}
    put_table(run, 0, "device_limit", table("device_limit", [limit]))
    whole = energy_of(run)[0]
    assert whole["step_count"] == 30 - left_out
    assert whole["energy_per_step_j"] == pytest.approx(400 if left_out else 400 + by_j / 30)


def test_without_a_limit_only_what_no_device_draws_is_a_jump() -> None:
    assert energy_of(a_run(device_counter=jumped(1000.0)))[0]["step_count"] == 30
    assert energy_of(a_run(device_counter=jumped(1e6, only_once=True)))[0][
        "energy_per_step_j"
    ] == pytest.approx(400)


def test_a_counter_that_jumps_all_the_time_is_refused_with_the_reason() -> None:
    readings = counter(power_w=50_000)
    whole = energy_of(a_run(device_counter=readings))[0]
    assert whole["energy_j"] is None
    assert "jumped by more than the device can draw" in whole["reason"]


def test_readings_far_apart_are_refused() -> None:
    rows = energy_of(a_run(steps=6, device_counter=counter(every_s=0.9, until_s=6)))
    assert rows[0]["energy_j"] is None
    assert "too far apart" in rows[0]["reason"]


def test_a_counter_that_stands_still_is_no_energy_of_zero() -> None:
    still = counter(power_w=0)
    rows = energy_of(a_run(device_counter=still))
    assert rows[0]["energy_j"] is None
    assert rows[0]["reason"] == (
        "neither a changing energy counter nor more than one power reading was recorded"
    )


def test_tokens_that_nobody_counted_are_said_to_be_unknown() -> None:
    whole = energy_of(a_run(device_counter=counter()))[0]
    assert whole["energy_per_step_j"] == pytest.approx(400)
    assert whole["energy_per_token_j"] is None
    assert whole["reason"].startswith("no energy per token")


def power_log(every_s: list[float]) -> Run:
    """A log of power alone, at 300 W, read so far apart."""
    time_s = np.cumsum([0.0, *every_s])
    rows = [
        {"time_ns": BASE + round(t * S), "span_ns": 0, "device_id": 0, "power_w": 300.0}
        for t in time_s.tolist()
    ]
    part = m.RankManifest(rank=0)
    run = Run(m.RunManifest(kind="imported", name="log", ranks=[part]), None, {}, "log")
    put_table(run, 0, "device_clock", table("device_clock", rows))
    return run


def test_of_a_log_with_a_break_the_stretches_on_either_side_count() -> None:
    (row,) = energy_of(power_log([0.25] * 40 + [4.0] + [0.25] * 24 + [4.0] + [0.25] * 8))
    assert row["span_ns"] == 16 * S  # 10 s and 6 s; the last 2 s are too short
    assert row["energy_j"] == pytest.approx(300 * 16)


def test_power_read_too_rarely_says_how_rarely() -> None:
    (row,) = energy_of(power_log([5.0] * 30))
    assert row["energy_j"] is None
    assert row["reason"].startswith(
        "power was sampled every 5 s; it is unknown between samples more than 1.5 s"
    )


def test_windows_of_another_tool_are_rows_of_their_own() -> None:
    """Two devices over 8 s, then over 2 s, which an energy counter cannot tell."""
    rows = [
        {"time_ns": BASE + s * S, "span_ns": n * S, "device_id": d, "window": w, "energy_j": e * n}
        for s, n, w in ((4, 8, "epoch"), (20, 2, "step"))
        for d, e in ((0, 100.0), (1, 150.0))
    ]
    part = m.RankManifest(rank=0)
    run = Run(m.RunManifest(kind="imported", name="log", ranks=[part]), None, {}, "log")
    put_table(run, 0, "energy_window", table("energy_window", rows))
    found = {(r["window"], r["source"]): r for r in energy_of(run)}
    assert {r["scope"] for r in found.values()} == {"window"}
    assert found["epoch", "all devices"]["energy_j"] == 2000
    assert found["epoch", "all devices"]["power_mean_w"] == 250
    assert found["epoch", "device 1"]["energy_j"] == 1200
    assert found["epoch", "device 1"]["start_ns"] == BASE
    for source in ("all devices", "device 0"):
        assert found["step", source]["energy_j"] is None
        assert "2 s" in found["step", source]["reason"]


def test_power_is_integrated_where_there_is_no_counter() -> None:
    time_s = np.arange(-1, 31, 0.25)
    clocks = table(
        "device_clock",
        [
            {"time_ns": BASE + round(t * S), "span_ns": 0, "device_id": 0, "power_w": 300.0}
            for t in time_s.tolist()
        ],
    )
    rows = energy_of(a_run(device_clock=clocks))
    assert rows[0]["basis"] == "power"
    assert rows[0]["energy_per_step_j"] == pytest.approx(300)


def test_devices_add_up_and_hosts_stand_apart() -> None:
    run = a_run(ranks=2)
    put_table(run, 0, "device_counter", counter(0, power_w=400))
    put_table(run, 1, "device_counter", counter(1, power_w=500))
    rapl = table(
        "host_energy",
        [
            {
                "time_ns": BASE + round(t * S),
                "span_ns": 0,
                "domain": domain,
                "energy_j": watts * (t + 1),
            }
            for t in np.arange(-1, 31, 0.1).tolist()
            for domain, watts in (("package-0", 90.0), ("package-0/dram", 12.0))
        ],
    )
    put_table(run, 0, "host_energy", rapl)
    for rank in range(2):
        put_table(
            run,
            rank,
            "step_work",
            tokens(1000),
        )
    rows = {r["source"]: r for r in energy_of(run) if r["scope"] == "run"}
    assert list(rows) == ["all devices", "device 0", "device 1", "package-0", "package-0/dram"]
    assert rows["all devices"]["energy_per_step_j"] == pytest.approx(900)
    assert rows["all devices"]["energy_per_token_j"] == pytest.approx(900 / 2000)
    assert rows["all devices"]["ranks"] == "0-1"
    assert rows["package-0"]["energy_per_step_j"] == pytest.approx(90)
    assert rows["package-0"]["energy_per_token_j"] == pytest.approx(90 / 2000)
    assert rows["package-0/dram"]["power_mean_w"] == pytest.approx(12)


def test_devices_of_a_tensor_parallel_group_work_on_the_same_tokens() -> None:
    run = a_run(ranks=4)
    for rank in range(4):
        group = {"pg_desc": "mesh_tp", "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
        run.part(rank).process_groups.append(group)
        put_table(run, rank, "device_counter", counter(rank, power_w=400))
        put_table(run, rank, "step_work", tokens(1000))
    rows = {r["source"]: r for r in energy_of(run) if r["scope"] == "run"}
    assert rows["device 1"]["energy_per_token_j"] == pytest.approx(400 / 1000)
    whole = rows["all devices"]
    assert whole["tokens_count"] == 2000 * whole["step_count"]
    assert whole["energy_per_token_j"] == pytest.approx(4 * 400 / 2000)


@pytest.mark.parametrize(("dead", "said"), [((1,), "device 1: "), ((0, 1), "")])
def test_of_all_devices_those_without_energy_are_named(dead: tuple[int, ...], said: str) -> None:
    run = a_run(ranks=2)
    for rank in range(2):
        put_table(run, rank, "device_counter", counter(rank, power_w=0 if rank in dead else 400))
    whole = next(r for r in energy_of(run) if r["source"] == "all devices")
    assert whole["energy_j"] is None
    assert whole["reason"].startswith(f"{said}neither a changing energy counter")


def test_ranks_on_parts_of_one_socket_share_its_energy() -> None:
    run = a_run(ranks=2)
    limits = [
        {"time_ns": BASE, "span_ns": 0, "device_id": r, "pci_address": f"0000:05:00.{r}"}
        for r in range(2)
    ]
    for rank in range(2):
        put_table(run, rank, "device_counter", counter(rank))
        put_table(run, rank, "device_limit", table("device_limit", [limits[rank]]))
    (row,) = [r for r in energy_of(run) if r["scope"] == "run"]
    assert row["ranks"] == "0-1"
    assert row["energy_per_step_j"] == pytest.approx(400)


def test_time_in_which_a_trace_was_written_belongs_to_no_step() -> None:
    """Steps 0-9 and, 20 s later, 10-19: the pause between costs no step its energy."""
    run = a_run(steps=20, device_counter=counter(until_s=60))
    steps = run.table(0, "step").to_pylist()
    for step in steps[10:]:
        step["start_ns"] += 20 * S
        step["end_ns"] += 20 * S
    put_table(run, 0, "step", table("step", steps))
    row = energy_of(run)[0]
    assert row["step_count"] == 20
    assert row["energy_per_step_j"] == pytest.approx(400)
    assert row["span_ns"] == 20 * S


@given(
    st.lists(st.floats(50, 700), min_size=3, max_size=40),
    st.integers(0, 2**40),
    st.data(),
)
def test_energy_of_parts_adds_up_whatever_the_power(
    watts: list[float], base: int, data: st.DataObject
) -> None:
    time = base + np.arange(len(watts) + 1, dtype=np.int64) * S
    total = np.concatenate([[0.0], np.cumsum(watts)])
    meter = meter_of(time, total)
    assert meter is not None
    middle = data.draw(st.integers(int(time[0]), int(time[-1])))
    starts = np.array([time[0], time[0], middle])
    whole, *parts = meter.growth(starts, np.array([time[-1], middle, time[-1]])).tolist()
    assert whole == pytest.approx(sum(watts))
    assert sum(parts) == pytest.approx(whole)
    assert min(parts) >= 0


def test_absent_readings_are_skipped_and_gaps_in_power_are_not_bridged() -> None:
    meter = meter_of(np.arange(5) * S, np.array([0.0, np.nan, 20, np.nan, 40]))
    assert isinstance(meter, Meter)
    assert meter.growth(np.array([0]), np.array([1 * S]))[0] == 10
    power = meter_of_power(np.array([0, S, 4 * S]), np.array([100.0, 100, 100]))
    assert power is not None
    assert power.usable(np.array([0, 0]), np.array([S, 2 * S])).tolist() == [True, False]
    assert meter_of(np.zeros(0, np.int64), np.zeros(0)) is None


def test_ranks_are_written_as_ranges() -> None:
    assert ranges([3, 0, 1, 7]) == "0-1,3,7"


def test_a_log_without_steps_has_the_energy_of_all_its_readings() -> None:
    part = m.RankManifest(rank=0)
    run = Run(m.RunManifest(kind="imported", name="log", ranks=[part]), None, {}, "log")
    put_table(
        run, 0, "device_counter", counter(until_s=19)
    )  # from 1 s before to 20 s after: 20.9 s
    (row,) = energy_of(run)
    assert row["step_count"] == 0
    assert row["energy_j"] == pytest.approx(400 * row["span_ns"] / S)
    assert row["energy_per_step_j"] is None
    put_table(run, 0, "device_counter", counter(until_s=1))
    (row,) = energy_of(run)
    assert row["energy_j"] is None
    assert "samples span" in row["reason"]


def test_a_run_without_telemetry_has_no_energy() -> None:
    attribution: Attribution = pipeline.attribute(a_run())
    assert view(attribution, "energy").schema.names == VIEWS["energy"].arrow.names
    assert view(attribution, "energy").num_rows == 0
