"""Other samplers' logs: what each heading and unit becomes, and what is refused."""

from __future__ import annotations

import random
from datetime import timedelta, timezone

import pytest

from chopper.collectors.formats import telemetry_csv
from chopper.collectors.formats.telemetry_csv import TelemetryLog, sniff
from chopper.errors import InputError


def read_log(text: str, where: str, zone: timezone | None = None) -> TelemetryLog:
    return telemetry_csv.read_log(text.splitlines(keepends=True), where, zone=zone)


NVIDIA = """\
timestamp, index, uuid, clocks.current.sm [MHz], power.draw.instant [W], \
temperature.gpu, memory.used [MiB], utilization.gpu [%], clocks_event_reasons.active, name
2025/06/13 00:27:52.195, 0, GPU-aa, 1980 MHz, 650.25 W, 61, 1024 MiB, 97 %, \
0x0000000000000004, NVIDIA H100
2025/06/13 00:27:52.195, 1, GPU-bb, 1755 MHz, [N/A], [Not Supported], 2 GiB, 0 %, 0x0, NVIDIA H100
"""


def test_nvidia_smi_with_its_units() -> None:
    log = read_log(NVIDIA, "smi.csv")
    first, second = log.tables["device_clock"].to_pylist()
    assert first["sm_clock_hz"] == 1_980_000_000
    assert first["power_w"] == 650.25
    assert first["event_reasons"] == 4
    assert (first["device_id"], first["device_uuid"]) == (0, "GPU-aa")
    assert first["time_ns"] == 1_749_774_472_195_000_000
    assert second["power_w"] is None
    counters = log.tables["device_counter"].to_pylist()
    assert [row["memory_used_bytes"] for row in counters] == [1 << 30, 2 << 30]
    assert [row["temperature_c"] for row in counters] == [61.0, None]
    assert counters[0]["device_utilization_ratio"] == pytest.approx(0.97)
    assert log.local_time
    assert log.ignored == ("name",)


def test_local_times_take_the_zone_that_is_given() -> None:
    zone = timezone(timedelta(hours=2))
    there = read_log(NVIDIA, "smi.csv", zone=zone).tables["device_clock"]["time_ns"][0].as_py()
    assert there == 1_749_774_472_195_000_000 - 2 * 3_600 * 10**9


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1754586662", 1_754_586_662_000_000_000),
        ("1754586662.25", 1_754_586_662_250_000_000),
        ("1754586662250", 1_754_586_662_250_000_000),
        ("1754586662250001", 1_754_586_662_250_001_000),
        ("1754586662250001002", 1_754_586_662_250_001_002),
        ("2025-08-07T17:11:02.25Z", 1_754_586_662_250_000_000),
        ("2025-08-07T19:11:02.250001+02:00", 1_754_586_662_250_001_000),
        ("2025-08-07 17:11:02", 1_754_586_662_000_000_000),
    ],
)
def test_times_keep_every_digit(written: str, expected: int) -> None:
    log = read_log(f"timestamp,gpu,power_w\n{written},0,300\n", "log.csv")
    assert log.tables["device_clock"]["time_ns"].to_pylist() == [expected]


@pytest.mark.parametrize(
    ("heading", "cell", "table", "column", "expected"),
    [
        ("sclk", "2100Mhz", "device_clock", "sm_clock_hz", 2_100_000_000),
        ("gfx_clk [MHz]", "1321", "device_clock", "sm_clock_hz", 1_321_000_000),
        ("sclk clock speed:", "(1321Mhz)", "device_clock", "sm_clock_hz", 1_321_000_000),
        ("Average Graphics Package Power (W)", "302.0", "device_clock", "power_w", 302.0),
        ("Temperature (Sensor junction) (C)", "51.0", "device_counter", "temperature_c", 51.0),
        ("GPU use (%)", "97", "device_counter", "device_utilization_ratio", 0.97),
        ("clocks.sm", "0", "device_clock", "sm_clock_hz", None),
        ("power_mW", "650000", "device_clock", "power_w", 650.0),
        ("power_usage", "N/A", "device_clock", "power_w", None),
        ("power_watts", "12 V", "device_clock", "power_w", None),
        ("temp_junction_celsius", "52.5", "device_counter", "temperature_c", 52.5),
        ("gpu_use_percent", "50", "device_counter", "device_utilization_ratio", 0.5),
        ("vram_used_bytes", "1000", "device_counter", "memory_used_bytes", 1000),
        ("memory.used", "1000", "device_counter", "memory_used_bytes", None),
        ("energy_mJ", "2500", "device_counter", "energy_j", 2.5),
        ("clocks.sm", "65535 MHz", "device_clock", "sm_clock_hz", None),
        ("power_w", "65535", "device_clock", "power_w", None),
        ("power_w", "0", "device_clock", "power_w", None),
        ("GPU use (%)", "65535", "device_counter", "device_utilization_ratio", None),
        ("GPU use (%)", "100", "device_counter", "device_utilization_ratio", 1.0),
    ],
)
def test_a_cell_takes_its_unit_from_itself_or_from_its_heading(
    heading: str, cell: str, table: str, column: str, expected: float | None
) -> None:
    # A second sensor, so that a row remains where the first says nothing.
    text = (
        f"timestamp,device,{heading},memory_clock [MHz],mem_temp\n1754586662,card3,{cell},1000,40\n"
    )
    row = read_log(text, "log.csv").tables[table].to_pylist()[0]
    assert row[column] == expected
    assert row["device_id"] == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_instant_power_counts_where_both_powers_stand(order: tuple[int, int]) -> None:
    names, cells = ("power.draw [W]", "power.draw.instant [W]"), ("500", "650")
    heading, row = (", ".join(given[i] for i in order) for given in (names, cells))
    log = read_log(f"timestamp, index, {heading}\n1754586662, 0, {row}\n", "log.csv")
    assert log.tables["device_clock"]["power_w"].to_pylist() == [650.0]
    assert log.ignored == ("power.draw [W]",)


def test_rows_that_cannot_be_read_are_counted_and_the_rest_is_kept() -> None:
    text = (
        "timestamp,gpu,power_w,temp_c\n"
        "soon,0,300,1\n1754586662,0,300\n1754586663,total,9,9\n1,2,3,4,5\n\n"
    )
    log = read_log(text, "log.csv")
    assert log.rows_count == 1
    assert log.bad_rows_count == 3
    assert log.tables["device_clock"]["power_w"].to_pylist() == [300.0]
    assert "device_counter" not in log.tables


def test_rows_of_a_time_that_passed_twice_are_left_out() -> None:
    """A row a minute from 02:50 to 02:59, then an hour back to 02:00, as summer time ends."""
    minutes = [*range(50, 60), *range(60), *range(60, 70)]
    lines = [
        f"2025-10-26 0{2 + m // 60}:{m % 60:02}:00, {gpu}, {100 + i}"
        for i, m in enumerate(minutes)
        for gpu in (0, 1)
    ]
    log = read_log("timestamp,gpu,power_w\n" + "\n".join(lines) + "\n", "log.csv")
    clocks = log.tables["device_clock"].to_pylist()
    # From 02:00 to 02:59 nobody knows which hour it was.
    assert [r["power_w"] for r in clocks if r["device_id"] == 1] == [170.0 + i for i in range(10)]
    assert log.repeated_count == 2 * 70


@pytest.mark.parametrize("rows", [2, 3, 6, 500])
@pytest.mark.parametrize("listing", ["descending", "shuffled", "second half first"])
def test_rows_may_be_listed_in_any_order(rows: int, listing: str) -> None:
    order = list(range(rows))
    if listing == "descending":
        order.reverse()
    elif listing == "shuffled":
        random.Random(rows).shuffle(order)
    else:
        order = order[rows // 2 :] + order[: rows // 2]
    lines = [
        f"{1_754_586_662 + i}.5, {gpu}, {100 + i}, {50 + gpu}" for i in order for gpu in (0, 1)
    ]
    log = read_log("timestamp,gpu,power_w,temp_c\n" + "\n".join(lines) + "\n", "log.csv")
    assert log.repeated_count == log.bad_rows_count == 0
    for device in (0, 1):
        mine = [r for r in log.tables["device_clock"].to_pylist() if r["device_id"] == device]
        assert [r["power_w"] for r in mine] == [100.0 + i for i in range(rows)]
    assert log.tables["device_counter"].num_rows == 2 * rows


@pytest.mark.parametrize("descending", [False, True])
def test_a_clock_set_back_is_said_in_either_order(descending: bool) -> None:
    """Minutes 0 to 59, then back to 30, on to 99: minutes 30 to 59 passed twice."""
    minutes = [*range(60), *range(30, 100)]
    values = list(enumerate(minutes))
    lines = [f"{1_754_586_600 + 60 * m},0,{100 + i}" for i, m in values]
    if descending:
        lines.reverse()
    log = read_log("timestamp,gpu,power_w\n" + "\n".join(lines) + "\n", "log.csv")
    assert log.repeated_count == 60
    kept = log.tables["device_clock"]["power_w"].to_pylist()
    assert kept == [100.0 + i for i, m in values if not 30 <= m < 60]


def test_uuids_in_place_of_numbers_are_devices_of_their_own() -> None:
    text = "timestamp,uuid,power_w\n1754586662,GPU-aa,1\n1754586662,GPU-bb,2\n"
    clocks = read_log(text, "log.csv").tables["device_clock"]
    assert clocks["device_id"].to_pylist() == [0, 1]
    assert clocks["device_uuid"].to_pylist() == ["GPU-aa", "GPU-bb"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", "a,b,c\n1,2,3\n", "Kernel Name,Counter\nk,1\n", "timestamp,gpu,fan\n1,0,3\n"),
        'timestamp,"gpu,power_w\n1,0,3\n',  # a quote that ends nowhere: one cell, no device
    ],
)
def test_other_tables_are_no_logs(text: str) -> None:
    assert not sniff(text.encode())
    with pytest.raises(InputError, match=r"^x\.csv: not a telemetry log: expected a heading with"):
        read_log(text, "x.csv")


def test_a_log_without_a_row_says_so() -> None:
    with pytest.raises(InputError, match=r"x\.csv: .* without a readable row \(1 could not be"):
        read_log("timestamp,gpu,power_w\nnever,0,1\n", "x.csv")


@pytest.mark.parametrize(
    ("cells", "bad"),
    [
        ("2024/01/02 03:04:06, 0, 1e999 MHz, 1e999 W, 1e30 MiB, 0x1FFFFFFFFFFFFFFFF", 0),
        ("2024/01/02 03:04:06, 0, -5, -300, -100, -1", 0),
        (f"2024/01/02 03:04:06, 0, {'9' * 5000}, {'9' * 5000}, {'9' * 5000}, {'9' * 5000}", 0),
        ("2024/01/02 03:04:06, 99999999999, 1, 1, 1, 1", 1),
        (f"2024/01/02 03:04:06, {'1' * 5000}, 1, 1, 1, 1", 1),
        ("9999/12/31 23:59:59, 0, 1, 1, 1, 1", 1),
        ("0001-01-01 00:00:00, 0, 1, 1, 1, 1", 1),
        ("9" * 19 + ", 0, 1, 1, 1, 1", 1),
        ("1" * 5000 + ", 0, 1, 1, 1, 1", 1),
    ],
)
def test_numbers_that_no_table_holds_are_unknown(cells: str, bad: int) -> None:
    heading = "timestamp, index, clocks.sm [MHz], power.draw [W], memory.used [MiB], "
    heading += "clocks_event_reasons.active\n"
    log = read_log(f"{heading}2024/01/02 03:04:05, 0, 1980, 300, 100, 4\n{cells}\n", "x.csv")
    assert log.bad_rows_count == bad
    assert log.tables["device_clock"]["sm_clock_hz"].to_pylist() == [1_980_000_000]
    assert log.tables["device_clock"]["power_w"].to_pylist() == [300.0]
    assert log.tables["device_counter"]["memory_used_bytes"].to_pylist() == [100 << 20]


@pytest.mark.parametrize(
    ("heading", "cell", "column", "value"),
    [
        ("power [kW]", "0.3", "power_w", 300.0),
        ("power_kw", "0.3", "power_w", 300.0),
        ("energy [Wh]", "5", "energy_j", 18_000.0),
        ("clocks.sm [KHz]", "1980000", "sm_clock_hz", 1_980_000_000),
        ("temperature [K]", "330", "temperature_c", None),
        ("power [dBm]", "5", "power_w", None),
        ("memory.used [pages]", "5", "memory_used_bytes", None),
        ("temperature [W]", "5", "temperature_c", None),
    ],
)
def test_a_number_of_an_unknown_unit_is_not_taken_for_the_usual_one(
    heading: str, cell: str, column: str, value: float | None
) -> None:
    """330 K are not 330 °C, and 0.3 kW not 0.3 W."""
    text = f"timestamp,gpu,utilization.gpu,{heading}\n1754586662,0,50,{cell}\n"
    log = read_log(text, "log.csv")
    rows = {c: v for table in log.tables.values() for c, v in table.to_pylist()[0].items()}
    assert rows.get(column) == value
    assert log.ignored == (() if value is not None else (heading,))
