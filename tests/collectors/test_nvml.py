"""Readings of NVIDIA's devices, by the real binding, against a library that plays a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from chopper.collectors.base import CollectorContext
from chopper.collectors.nvml import NvmlCollector
from chopper.tables import TABLES
from tests.collectors.nvml_player import ONE, TWO, Player

if TYPE_CHECKING:
    from pathlib import Path


def read(play: Player, script: str, source: str, *times_ms: int) -> list[dict[str, Any]]:
    """Rows of a source, by column, read at these times."""
    found = play(script, f"print(json.dumps(rows(opened(_sources.{source}()), *{times_ms})))")
    return [
        dict(zip([c.name for c in TABLES[table].columns][2:], values, strict=True))
        for table, *values in found
    ]


def test_the_fast_tier_reads_clock_power_and_reasons_of_each_device(play: Player) -> None:
    found = play(
        TWO + "set 0 sm 1200 500\n",
        "s = opened(_sources.ClockSource()); print(json.dumps([rows(s, 0, 500), s.absent]))",
    )
    a, b = "GPU-aaaa0000-0000-0000-0000-000000000000", "GPU-bbbb0000-0000-0000-0000-000000000000"
    assert found[0] == [
        ["device_clock", 0, a, 1_980_000_000, 2_619_000_000, 650.0, 4],
        ["device_clock", 1, b, 1_755_000_000, None, None, 0],
        ["device_clock", 0, a, 1_200_000_000, 2_619_000_000, 650.0, 4],
        ["device_clock", 1, b, 1_755_000_000, None, None, 0],
    ]
    assert found[1] == {
        "device_clock.memory_clock_hz[device 1]": "not supported by this device",
        "device_clock.power_w[device 1]": "not supported by this device",
    }


def test_what_no_device_reaches_is_unknown(play: Player) -> None:
    """Clocks in MHz, power in mW, reasons: blanks, zeros, numbers that wrapped.

    Reasons that this version does not know are kept; older drivers tell the power by another call.
    """
    script = f"""{ONE}
        set 0 sm 4294967295 10
        set 0 sm 25000 20
        set 0 sm 0 30
        set 0 field:186 0 10
        set 0 field:186 4294967000 20
        set 0 reasons 18446744073709551615 10
        set 0 reasons 4 20
        set 0 reasons {1 << 40 | 4} 30
        gpu 1 GPU-bbbb NVIDIA H100 80GB HBM3
        set 1 power 0
        set 1 power 700000 10
        set 1 power 4294967295 20
    """
    found = read(play, script, "ClockSource", 0, 10, 20, 30)
    first, second = ([row for row in found if row["device_id"] == device] for device in (0, 1))
    assert [row["sm_clock_hz"] for row in first] == [1_980_000_000, None, None, None]
    assert [row["power_w"] for row in first] == [650.0, None, None, None]
    assert [row["event_reasons"] for row in first] == [4, None, 4, 1 << 40 | 4]
    # Of the other, nothing but power is told: a reading without a value makes no row.
    assert [row["power_w"] for row in second] == [700.0]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("set 0 field:186 650000\nset 0 capability 90", "instant"),
        ("set 0 power 650000\nset 0 capability 90", "average over 1 s"),
        ("set 0 power 650000\nset 0 capability 86", "average over 1 s"),
        ("set 0 power 650000\nset 0 capability 80", "instant"),
        ("set 0 power 650000", None),
        ("set 0 capability 90", None),
    ],
)
def test_what_power_is_stands_in_the_limits(
    play: Player, script: str, expected: str | None
) -> None:
    code = """
    from chopper.tables import TABLES
    names = [c.name for c in TABLES["device_limit"].columns][2:]
    row = rows(opened(_sources.LimitSource()), 0)[0][1:]
    clocks = opened(_sources.ClockSource())
    print(json.dumps([dict(zip(names, row))["power_basis"], list(clocks.calls())]))
    """
    device = "gpu 0 GPU-aaaa NVIDIA Device\nset 0 sm 1980\n"
    basis, calls = play(device + script, code)
    assert basis == expected
    assert (f"power ({expected})" in calls) == (expected is not None)


def test_temperature_limits_are_those_at_which_the_driver_slows_down(play: Player) -> None:
    """Thresholds 3 (GPU_MAX) and 2 (MEM_MAX); newer devices refuse both."""
    script = TWO + "set 0 threshold:3 87\nset 0 threshold:2 95\nset 0 threshold:1 92\n"
    names = ("temperature_limit_c", "memory_temperature_limit_c")
    found = read(play, script, "LimitSource", 0)
    assert [[row[name] for name in names] for row in found] == [[87.0, 95.0], [None, None]]


def test_all_counters_of_a_device_cost_one_call_of_fields(play: Player) -> None:
    script = ONE + "".join(f"set 0 field:{i} 1\n" for i in (83, 185, 82, 197, 198, 74, 75))
    counts = play(
        script,
        """
        s = opened(_sources.CounterSource())
        rows(s, 0)
        before = shim.shim_calls(); rows(s, 0)
        print(json.dumps(shim.shim_calls() - before))
        """,
    )
    # Temperature, utilization and memory are refused by the script, and not asked again.
    assert counts == 1


def test_a_dear_field_has_a_call_of_its_own_and_devices_take_turns(play: Player) -> None:
    """Average power at 3 ms a call: at each tenth sample, one device at a time; energy at each."""
    script = TWO + "".join(
        f"set {i} field:185 650000\nset {i} field:83 1000\nblock {i} field:185 3\n" for i in (0, 1)
    )
    calls, found = play(
        script,
        """
        source = opened(_sources.CounterSource())
        print(json.dumps([list(source.calls()), rows(source, *range(12))]))
        """,
    )
    assert [name for name in calls if "Field" in name] == [
        "nvmlDeviceGetFieldValues (power_average_w, at each 10th sample)",
        "nvmlDeviceGetFieldValues (23 fields)",
    ]
    names = [column.name for column in TABLES["device_counter"].columns][2:]
    rows = [dict(zip(names, row[1:], strict=True)) for row in found]
    assert {row["energy_j"] for row in rows} == {1.0}
    for device in (0, 1):
        of_one = [row["power_average_w"] for row in rows if row["device_id"] == device]
        assert [i for i, w in enumerate(of_one) if w is not None] == [device, device + 10]


def test_activity_that_is_refused_or_out_of_range_is_unknown(play: Player) -> None:
    """Too short a time, no numbers, shares above the whole, refusals, a device that is lost."""
    script = (
        TWO
        + """
        set 0 gpm 1
        set 1 gpm 1
        set 0 gpm:2 50
        set 0 gpm:5 62.5
        set 0 gpm:10 101
        set 0 gpm:11 -1
        set 0 gpm:12 nan
        set 0 gpm:20 2
        set 0 gpm:60 1e300
        set 1 gpm:3 25
        fail 0 gpm:5 999 350 450
        fail 0 gpm:2 4 550
        fail 1 nvmlGpmSampleGet 15 650
        fail 0 nvmlGpmMetricsGet 10 750 850
    """
    )
    found = play(
        script,
        """
        source = opened(_sources.ActivitySource())
        found = rows(source, 0, 50, 200, 400, 600, 700, 800, 1000)
        print(json.dumps([found, dict(source.absent)]))
        """,
    )
    names = [column.name for column in TABLES["device_activity"].columns][2:]
    rows = [dict(zip(names, row[1:], strict=True)) for row in found[0]]
    first = [row for row in rows if row["device_id"] == 0]
    # At 200, 400, 600, 700 and 1000 ms: what the time-out at 800 kept back, the next row covers.
    assert [row["sm_utilization_ratio"] for row in first] == [0.5, 0.5, None, None, None]
    assert [row["tensor_utilization_ratio"] for row in first] == [0.625, None, 0.625, 0.625, 0.625]
    for column in ("dram", "fp64", "fp32"):
        assert {row[f"{column}_utilization_ratio"] for row in first} == {None}
    assert {row["pcie_tx_bytes_per_s"] for row in first} == {2 * 1024 * 1024}
    assert {row["link_rx_bytes_per_s"] for row in first} == {None}
    assert len(rows) - len(first) == 3  # device 1 is lost at 700 ms
    absent = found[1]
    assert absent["device_activity[device 1]"] == "the device has fallen off the bus"
    assert absent["device_activity.sm_utilization_ratio[device 0]"] == "no permission to read it"


def test_gpm_is_refused_on_devices_without_it(play: Player) -> None:
    found = play(
        ONE,
        """
        from chopper.errors import CollectorUnavailable
        try:
            _sources.ActivitySource().open()
        except CollectorUnavailable as exc:
            print(json.dumps(str(exc)))
        """,
    )
    assert found == "not supported by this device"


def test_what_the_driver_buffers_is_taken_where_it_is_finer(play: Player) -> None:
    script = ONE + "".join(f"sample 0 0 {650000 + i} {20 * i}\n" for i in range(10))
    script += "sample 0 5 1980 0\nsample 0 5 1200 137\nsample 0 5 1410 900\n"
    code = """
    source = _sources.BufferedSource(polled_hz={hz})
    opened(source, 500)
    found = []
    for ms in (600, 1000):
        at(ms)
        sink = Sink()
        source.sample(sink, 0)
        found.append([[*row[2:]] for _, row in sink.take()])
    print(json.dumps([found, source.absent]))
    """
    found, absent = play(script, code.format(hz=100))
    # What lay in the buffer before sampling began is not of this run.
    assert found[0] == []
    assert [row[2:] for row in found[1]] == [["sm_clock_hz", 1.41e9]]
    assert absent["device_buffered.power_w"] == (
        "the driver keeps one every 20 ms: polling is as fine"
    )
    assert absent["device_buffered.memory_clock_hz"] == "not supported by this device"
    _, absent = play(script, code.format(hz=10))
    assert "device_buffered.power_w" not in absent


def test_buffered_samples_have_the_drivers_own_times(play: Player) -> None:
    found = play(
        ONE + "sample 0 5 1980 0\nsample 0 5 1200 700\nsample 0 5 1980 750\n"
        # No clock, one that no device reaches, and one of three days later.
        "sample 0 5 0 710\nsample 0 5 30000 720\nsample 0 5 1500 259200000\n",
        """
        source = opened(_sources.BufferedSource(), 100)
        at(259200000)
        sink = Sink()
        source.sample(sink, 0)
        (_, first), (_, second) = sink.take()
        print(json.dumps([second[0] - first[0], first[1], first[2:], second[2:]]))
        """,
    )
    uuid = "GPU-aaaa0000-0000-0000-0000-000000000000"
    assert found == [
        50_000_000,
        1000,
        [0, uuid, "sm_clock_hz", 1.2e9],
        [0, uuid, "sm_clock_hz", 1.98e9],
    ]


def test_counters_at_the_edges_of_types_and_refused_between(play: Player) -> None:
    """Blanks, counters too large, alternatives, sums, negative temperatures, refusals between."""
    script = TWO + "".join(
        f"set 0 field:{i} {7 * i}\n" for i in (3, 4, 74, 75, 76, 77, 79, 82, 185, 269, 270, 271)
    )
    script += """
        set 0 field:83 12500
        set 0 field:83 18446744073709551615 20
        set 0 field:138:all 10
        set 0 field:138:all 18014398509481984 30
        set 0 field:38 1
        set 0 field:45 2
        set 0 field:52 3
        set 0 temperature -5
        set 0 temperature 71 30
        set 0 utilization 7
        set 0 memory_used 123456789012
        set 1 field:202:all 99
        set 1 memory_used 9223372036854775809
        set 1 field:38 1
        set 1 temperature 60
        set 1 field:94 1 40
        fail 0 field:76 21 10 20
        fail 0 field:77 4 30
        fail 0 nvmlDeviceGetUtilizationRates 999 20 30
        fail 0 nvmlDeviceGetMemoryInfo_v2 4 40
        fail 1 nvmlDeviceGetFieldValues 10 20 30
        fail 1 nvmlDeviceGetTemperatureV 15 50
    """
    rows = read(play, script, "CounterSource", *range(0, 70, 10))
    first = [row for row in rows if row["device_id"] == 0]
    assert len(first) == 7
    assert len(rows) == 7 + 5
    assert [row["temperature_c"] for row in first] == [-5.0] * 3 + [71.0] * 4
    assert [row["energy_j"] for row in first] == [12.5] * 2 + [None] * 5
    assert first[0]["device_utilization_ratio"] == pytest.approx(0.07)
    assert first[0]["link_error_count"] == 6
    assert [row["board_limit_throttle_ns"] for row in first] == [539] * 3 + [None] * 4
    slowed = ("software_thermal_ns", "hardware_thermal_ns", "power_brake_ns")
    assert [first[0][name] for name in slowed] == [7 * 269, 7 * 270, 7 * 271]
    assert rows[1]["link_tx_bytes"] == 99
    assert {row["memory_used_bytes"] for row in rows if row["device_id"] == 1} == {None}


def test_counters_that_are_blank_too_large_or_of_an_unknown_type_are_unknown(play: Player) -> None:
    """Not 0: of an energy counter that would be a step backwards, of a sum of links as well."""
    script = f"""{TWO}
        set 0 field:83 5000
        set 0 field:83:type 3
        set 0 field:83:type 77 100
        set 0 field:74 7
        set 0 field:74 18446744073709551615 100
        set 0 field:138:all 18014398509481984
        set 0 field:139:all 5
        set 0 temperature 50
        set 0 field:38 3
        set 0 field:45 3
        set 0 field:52 3
        set 0 field:52 18446744073709551615 100
        set 0 field:52 3 200
        set 0 field:94 3
        set 0 memory_used 7
        set 0 memory_used 18446744073709551615 100
        set 1 field:83 18446744073709551615
        set 1 field:94 3
    """
    found = read(play, script, "CounterSource", 0, 100, 200)
    first, second = ([row for row in found if row["device_id"] == device] for device in (0, 1))
    assert [row["energy_j"] for row in first] == [5.0, None, None]
    assert [row["energy_j"] for row in second] == [None] * 3
    assert [row["power_throttle_ns"] for row in first] == [7, None, None]
    assert [row["link_tx_bytes"] for row in first] == [None] * 3
    assert [row["link_rx_bytes"] for row in first] == [5 * 1024] * 3
    assert [row["link_error_count"] for row in first] == [9, None, 9]
    assert [row["pcie_replay_count"] for row in first] == [3, 3, 3]
    assert [row["memory_used_bytes"] for row in first] == [7, None, None]


@pytest.mark.parametrize(("refusal", "expected"), [(13, 60.0), (3, 60.0), (999, None)])
def test_older_drivers_have_another_call_for_the_temperature(
    play: Player, refusal: int, expected: float | None
) -> None:
    """Where the newer one is refused for good, not where it fails once."""
    script = ONE + f"set 0 temperature 60\nfail 0 nvmlDeviceGetTemperatureV {refusal}\n"
    script += "set 0 field:83 1\n"
    (row,) = read(play, script, "CounterSource", 0)
    assert row["temperature_c"] == expected
    code = "print(json.dumps(list(opened(_sources.CounterSource()).calls())))"
    assert ("nvmlDeviceGetTemperature" in play(script, code)) == (expected is not None)


def test_what_the_driver_buffers_is_compared_with_the_rate_asked_for(tmp_path: Path) -> None:
    context = CollectorContext(directory=tmp_path, run_path=tmp_path, pid=1)
    specs = NvmlCollector(hz=10.0).specs(context)
    (buffered,) = (spec for spec in specs if spec.factory.endswith(":BufferedSource"))
    assert buffered.options == {"polled_hz": 10.0}
