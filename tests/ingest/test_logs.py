"""Logs of other samplers: beside a trace, for several ranks, alone."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner

from chopper import pipeline
from chopper.cli import cli
from chopper.errors import InputError, UsageError
from tests import recordings
from tests.kineto_writer import BASE_NS, Trace

HEADING = "timestamp, index, clocks.current.sm [MHz], power.draw [W], clocks_event_reasons.active\n"


def log(path: Path, start_ns: int, *, devices: int = 1, rows: int = 50, sm: int = 1200) -> Path:
    lines = [
        f"{start_ns + i * 10_000_000}, {device}, {sm + device} MHz, 600 W, 0x4\n"
        for i in range(rows)
        for device in range(devices)
    ]
    path.write_text(HEADING + "".join(lines))
    return path


MS = 1_000_000


def trace(path: Path, rank: int = 0, world: int | None = None, device: int | None = None) -> Path:
    """Five steps of 20 ms, each with a product of 10 ms that a device's peak does in 0.9 ms."""
    device = rank if device is None else device
    made = Trace(rank=rank, world=world, device=device, pid=4711 + rank, tid=4711 + rank)
    side = [2048, 2048]
    for step in range(5):
        at = step * 20 * MS
        made.step(step, at, 20 * MS)
        op = made.op("aten::mm", at + MS, MS, shapes=[side, side])
        made.launch("gemm", at + MS, MS // 2, kernel_at=at + 3 * MS, kernel_for=10 * MS, op=op)
    path.write_bytes(made.encode())
    return path


def clock_ns(*sources: Path) -> dict[int, int]:
    """Time below the reference clock by rank; the causes sum to the observed time."""
    found = pipeline.attribute(pipeline.read([*sources]))
    assert sum(cause.time_ns for cause in found.leaves()) == found.observed_ns
    return {
        int(group.key or 0): sum(
            ns for cause, ns in group.causes.items() if cause.startswith("compute.clock")
        )
        for group in found.by("rank")
    }


def test_a_log_beside_a_trace_gives_its_kernels_their_clock(tmp_path: Path) -> None:
    kernels = trace(tmp_path / "trace.json")
    clocks = log(tmp_path / "smi.csv", BASE_NS - 20 * MS)
    assert clock_ns(kernels) == {0: 0}
    joined = clock_ns(kernels, clocks)
    assert joined[0] > 0
    # A directory that holds both is the same run.
    assert clock_ns(tmp_path) == joined


def test_each_rank_takes_its_own_device(tmp_path: Path) -> None:
    for rank in range(2):
        trace(tmp_path / f"rank{rank}.json", rank, 2)
    log(tmp_path / "smi.csv", BASE_NS - 20 * MS, devices=2)
    run = pipeline.read([tmp_path])
    assert set(run.table(0, "device_clock")["sm_clock_hz"].to_pylist()) == {1_200_000_000}
    assert set(run.table(1, "device_clock")["sm_clock_hz"].to_pylist()) == {1_201_000_000}


def test_ranks_that_call_their_devices_alike_get_no_clock_of_anothers(tmp_path: Path) -> None:
    """Each rank sees one device and calls it 0; the log calls them 0 and 1."""
    for rank in range(2):
        trace(tmp_path / f"rank{rank}.json", rank, 2, device=0)
    log(tmp_path / "smi.csv", BASE_NS - 20 * MS, devices=2)
    run = pipeline.read([tmp_path])
    assert [run.table(rank, "device_clock").num_rows for rank in range(2)] == [0, 0]
    (said,) = [f for f in run.manifest.findings if f.code == "telemetry.device_unknown"]
    assert said.message.startswith("ranks 0-1 use the same device number")


def test_logs_of_two_hosts_are_not_mixed(tmp_path: Path) -> None:
    """Both call a device 0: nobody can tell which of them a rank computed on."""
    kernels = trace(tmp_path / "trace.json")
    here = log(tmp_path / "here.csv", BASE_NS - 20 * MS)
    there = log(tmp_path / "there.csv", BASE_NS - 20 * MS)
    with pytest.raises(InputError, match=r"there.csv: reports sm_clock_hz of device 0 at the same"):
        pipeline.read([kernels, here, there])
    # A log that goes on where another ended is one with it.
    later = log(tmp_path / "later.csv", BASE_NS + 3_600 * 10**9)
    assert pipeline.read([kernels, here, later]).table(0, "device_clock").num_rows == 100


def test_what_is_imported_keeps_its_clocks(tmp_path: Path) -> None:
    kernels = trace(tmp_path / "trace.json")
    clocks = log(tmp_path / "smi.csv", BASE_NS - 20 * MS)
    before = clock_ns(kernels, clocks)
    done = CliRunner().invoke(
        cli, ["import", str(kernels), str(clocks), "-o", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    kernels.unlink()
    clocks.unlink()
    assert clock_ns(tmp_path / "run") == before


def test_a_log_alone_is_telemetry_without_an_attribution(tmp_path: Path) -> None:
    clocks = log(tmp_path / "smi.csv", BASE_NS)
    run = pipeline.read(clocks)
    assert run.table(0, "device_clock").num_rows == 50
    assert pipeline.attribute(run).observed_ns == 0
    done = CliRunner().invoke(cli, ["import", str(clocks), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert pipeline.read(tmp_path / "run").table(0, "device_clock").num_rows == 50


def test_times_without_a_zone_and_lost_rows_are_said(tmp_path: Path) -> None:
    file = tmp_path / "smi.csv"
    file.write_text(HEADING + "2025/07/01 22:00:00.000, 0, 1200, 600, 0x0\nsoon, 0, 1, 1, 0x0\n")
    findings = {f.code: f.message for f in pipeline.read(file).manifest.findings}
    assert "were read as UTC" in findings["telemetry.time_zone"]
    assert "1 of 2 rows" in findings["telemetry.rows_lost"]


def test_another_csv_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "numbers.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(
        InputError,
        match=r"an unknown kind .*'a,b'.* or a log with a time, a device and clocks",
    ):
        pipeline.read(file)


# ---------------------------------------------------------------- whose clock


LOCAL = "timestamp, index, clocks.current.sm [MHz]\n"


def local_log(path: Path, hours: int) -> Path:
    """A log in the local time of a place so many hours east of Greenwich, as by nvidia-smi."""
    lines = [
        datetime.fromtimestamp(
            (BASE_NS + i * 10 * MS) / 1e9, timezone(timedelta(hours=hours))
        ).strftime("%Y/%m/%d %H:%M:%S.%f, 0, 1200 MHz\n")
        for i in range(-5, 20)
    ]
    path.write_text(LOCAL + "".join(lines))
    return path


def test_times_without_a_zone_are_joined_only_when_the_zone_is_said(tmp_path: Path) -> None:
    kernels = trace(tmp_path / "trace.json")
    clocks = local_log(tmp_path / "smi.csv", 2)
    with pytest.raises(InputError, match=r"name no time zone.*--time-zone Europe/Berlin"):
        pipeline.read([kernels, clocks])
    for i, zone in enumerate(("+02:00", "UTC+2", "Etc/GMT-2")):
        target = tmp_path / f"run{i}"
        asked = ["import", str(kernels), str(clocks), "--time-zone", zone, "-o", str(target)]
        done = CliRunner().invoke(cli, asked)
        assert done.exit_code == 0, done.output
        assert clock_ns(target)[0] > 0
    wrong = ["import", str(kernels), str(clocks), "--time-zone", "UTC", "-o", str(tmp_path / "w")]
    done = CliRunner().invoke(cli, wrong)
    assert "does not overlap the trace in time (7,200 s after it)" in done.output
    done = CliRunner().invoke(cli, [*wrong[:4], "Mars/Base", "-o", str(tmp_path / "m")])
    assert isinstance(done.exception, UsageError)
    assert "unknown time zone 'Mars/Base'" in str(done.exception)


def test_clocks_of_different_origins_are_not_joined(tmp_path: Path) -> None:
    recorded = recordings.write_rpd(tmp_path / "t.rpd", recordings.small())
    clocks = log(tmp_path / "smi.csv", BASE_NS)
    with pytest.raises(InputError, match="the trace's times count from the start of a host"):
        pipeline.read([recorded, clocks])


# ---------------------------------------------------------------- AMD's tools, and Zeus


def test_amd_smi_monitor(tmp_path: Path) -> None:
    file = tmp_path / "amd.csv"
    file.write_text(
        "timestamp,gpu,power_usage,hotspot_temperature,memory_temperature,gfx_clk,gfx,mem,"
        "mem_clock,vram_used\n"
        f"{BASE_NS // 10**9},0,740,71,55,1890,99,40,1300,N/A\n"
        f"{BASE_NS // 10**9},1,N/A,N/A,N/A,132,0,0,900,N/A\n"
    )
    run = pipeline.read(file)
    first, second = run.table(0, "device_clock").to_pylist()
    assert (first["sm_clock_hz"], first["memory_clock_hz"]) == (1_890_000_000, 1_300_000_000)
    assert (first["power_w"], second["power_w"]) == (740.0, None)
    counters = run.table(0, "device_counter").to_pylist()
    assert (counters[0]["temperature_c"], counters[0]["memory_temperature_c"]) == (71.0, 55.0)
    assert counters[0]["device_utilization_ratio"] == pytest.approx(0.99)


def zeus(path: Path, start_s: float) -> Path:
    path.write_text(
        "start_time,window_name,elapsed_time,gpu0_energy,gpu1_energy\n"
        f"{start_s:.6f},epoch,0.050000,12.5,nan\n"
        f"{start_s + 1:.6f},epoch,oops,1,1\n"
    )
    return path


def test_energy_windows_of_zeus_alone_and_beside_a_trace(tmp_path: Path) -> None:
    file = zeus(tmp_path / "energy.csv", BASE_NS / 1e9)
    run = pipeline.read(file)
    (window,) = run.table(0, "energy_window").to_pylist()
    assert (window["device_id"], window["window"], window["energy_j"]) == (0, "epoch", 12.5)
    assert window["span_ns"] == 50 * MS
    assert window["time_ns"] == BASE_NS + 25 * MS
    assert [f.count for f in run.manifest.findings if f.code == "telemetry.rows_lost"] == [1]
    joined = pipeline.read([trace(tmp_path / "trace.json"), file])
    assert joined.table(0, "energy_window").num_rows == 1
    # Older versions count from the start of the host: such windows have no place in a trace.
    old = zeus(tmp_path / "old.csv", 13_586_410.5)
    assert pipeline.read(old).table(0, "energy_window")["energy_j"].to_pylist() == [12.5]
    with pytest.raises(InputError, match="the log's times count from the start of a host"):
        pipeline.read([tmp_path / "trace.json", old])
