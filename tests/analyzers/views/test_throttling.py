"""Throttle episodes of runs whose clock follows a script: when, why, how long, whom they hit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import chopper
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.views import view
from tests.analyzers.make import kernel, kernels, spans, table
from tests.made_runs import put_table

MS = 1_000_000
S = 1_000 * MS
BASE = 1_700_000_000 * S


def readings(*levels: tuple[float, int | None], every_ms: int = 10) -> pa.Table:
    """(until when in seconds, reasons): a reading every 10 ms."""
    rows: list[dict[str, Any]] = []
    at = 0
    for until, reasons in levels:
        while at * MS < until * S:
            low = reasons is not None and reasons & 0x64
            rows.append(
                {
                    "time_ns": BASE + at * MS,
                    "span_ns": 0,
                    "device_id": 3,
                    "sm_clock_hz": 1_200_000_000 if low else 1_980_000_000,
                    "power_w": 700.0 if low else 400.0,
                    "event_reasons": reasons,
                }
            )
            at += every_ms
    return table("device_clock", rows)


def counters(*totals: dict[str, int]) -> pa.Table:
    """One reading of the driver's totals of throttled time every 100 ms."""
    return table(
        "device_counter",
        [
            {"time_ns": BASE + i * 100 * MS, "span_ns": 0, "device_id": 3, **total}
            for i, total in enumerate(totals)
        ],
    )


def episodes(clock: pa.Table, counter: pa.Table | None = None, *, events: bool = True) -> Any:
    part = m.RankManifest(rank=0, device_id=3, devices=[m.Device(device_id=3)], hostname="node")
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, {}, "made")
    rows = [
        kernel(BASE + i * 100 * MS, BASE + (i + 1) * 100 * MS, f"k{i % 2}", device_id=3)
        for i in range(10)
    ]
    put_table(run, 0, "host_span", spans())
    put_table(run, 0, "device_event", kernels(*(rows if events else [])))
    put_table(run, 0, "device_clock", clock)
    if counter is not None:
        put_table(run, 0, "device_counter", counter)
    return view(chopper.attribute(run), "throttle_episodes").to_pylist()


def test_each_reason_has_its_episode_with_start_length_and_kernels() -> None:
    found = episodes(readings((0.3, 0), (0.5, 0x4), (0.7, 0x20), (1.0, 0)))
    assert [(e["reason"], e["device_id"]) for e in found] == [("power_cap", 3), ("thermal", 3)]
    power, heat = found
    assert power["start_ns"] == BASE + 295 * MS  # half-way between readings at 290 and 300 ms
    assert power["dur_ns"] == 200 * MS
    assert heat["start_ns"] == power["start_ns"] + power["dur_ns"]
    assert power["clock_mean_hz"] == power["clock_low_hz"] == 1_200_000_000
    assert power["power_mean_w"] == pytest.approx(700)
    # Kernels 3 and 4: their middles are at 350 and 450 ms; no peak is known, so nothing was lost.
    assert power["kernel_count"] == 2
    assert power["time_ns"] == 200 * MS
    assert sorted(power["kernels"].split("; ")) == ["k0 50.0 %", "k1 50.0 %"]
    assert power["source"] == "reasons"
    assert power["held_ns"] is None


def test_the_drivers_own_count_stands_beside_it() -> None:
    clock = readings((0.3, 0), (0.5, 0x4), (1.0, 0))
    counted = counters(
        *({"power_throttle_ns": 7 * S + max(0, min(i - 3, 2)) * 90 * MS} for i in range(11))
    )
    (episode,) = episodes(clock, counted)
    # 90 of 100 ms in each of two periods; the half reading before 300 ms counted nothing.
    assert episode["held_ns"] == pytest.approx(180 * MS, rel=0.05)


def test_without_reasons_the_counters_tell_the_episodes() -> None:
    clock = readings((1.0, None))
    counted = counters(
        *({"thermal_throttle_ns": max(0, min(i - 4, 3)) * 50 * MS} for i in range(11))
    )
    (episode,) = episodes(clock, counted)
    assert (episode["reason"], episode["source"]) == ("thermal", "counters")
    assert (episode["start_ns"], episode["dur_ns"]) == (BASE + 400 * MS, 300 * MS)
    assert episode["held_ns"] == 150 * MS
    assert episode["clock_mean_hz"] == 1_980_000_000
    assert episode["clock_low_hz"] is None
    assert episode["kernel_count"] == 3


def test_counts_that_run_at_once_are_not_added_up() -> None:
    totals = [
        dict.fromkeys(("power_throttle_ns", "board_limit_throttle_ns", "power_brake_ns"), v * MS)
        for v in (0, 0, 100, 200, 200, 200)
    ]
    (episode,) = episodes(readings((1.0, None)), counters(*totals))
    assert (episode["reason"], episode["dur_ns"], episode["held_ns"]) == (
        "power_cap",
        200 * MS,
        200 * MS,
    )


@pytest.mark.parametrize("name", ["software_thermal_ns", "hardware_thermal_ns"])
def test_each_count_of_heat_tells_episodes(name: str) -> None:
    (episode,) = episodes(readings((1.0, None)), counters({name: 0}, {name: 0}, {name: 50 * MS}))
    assert (episode["reason"], episode["held_ns"]) == ("thermal", 50 * MS)


def test_a_counter_that_was_reset_makes_no_episode() -> None:
    totals = [{"power_throttle_ns": v * MS} for v in (900, 900, 0, 0, 0)]
    assert episodes(readings((1.0, None)), counters(*totals)) == []


def test_episodes_are_told_without_a_trace_too() -> None:
    (episode,) = episodes(readings((0.5, 0), (1.0, 0x40)), events=False)
    assert (episode["reason"], episode["kernel_count"], episode["op"]) == ("thermal", 0, None)


def test_what_was_not_read_is_no_part_of_an_episode() -> None:
    rows = [
        r for r in readings((1.0, 0x4)).to_pylist() if not 300 <= (r["time_ns"] - BASE) // MS < 700
    ]
    found = sorted(episodes(table("device_clock", rows)), key=lambda e: e["start_ns"])
    assert [((e["start_ns"] - BASE) // MS, e["dur_ns"] // MS) for e in found] == [
        (0, 295),
        (695, 295),
    ]
    assert [e["kernel_count"] for e in found] == [3, 3]
    assert {e["clock_mean_hz"] for e in found} == {1_200_000_000}


def test_readings_that_tell_no_reason_interrupt_nothing() -> None:
    rows = readings((0.4, 0x4), (0.8, 0), (1.0, None)).to_pylist()
    for row in rows[1::2]:
        row["event_reasons"] = None
    (episode,) = episodes(table("device_clock", rows))
    assert (episode["start_ns"], episode["dur_ns"]) == (BASE, 390 * MS)
    assert episode["clock_mean_hz"] == 1_200_000_000


def test_one_reading_alone_has_its_own_clock() -> None:
    (episode,) = episodes(readings((0.01, 0x4)))
    assert (episode["dur_ns"], episode["clock_mean_hz"], episode["power_mean_w"]) == (
        0,
        1_200_000_000,
        700.0,
    )


def test_each_device_of_a_log_has_its_own_episodes() -> None:
    both = readings((1.0, 0x4)).to_pylist() + readings((0.5, 0), (1.0, 0x20)).to_pylist()
    rows = [row | {"device_id": i // 100} for i, row in enumerate(both)]
    run = Run(
        m.RunManifest(kind="imported", name="log", ranks=[m.RankManifest(rank=0)]), None, {}, "log"
    )
    put_table(run, 0, "device_clock", table("device_clock", rows))
    found = view(chopper.attribute(run), "throttle_episodes").to_pylist()
    assert {(e["device_id"], e["reason"]) for e in found} == {(0, "power_cap"), (1, "thermal")}


def test_unknown_bits_hold_nothing() -> None:
    assert episodes(readings((1.0, 0x10000))) == []
