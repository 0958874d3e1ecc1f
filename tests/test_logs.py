"""Logs of other samplers: beside a trace, for several ranks, alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import chopper
from chopper.cli import cli
from chopper.errors import InputError
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


def trace(path: Path, rank: int = 0, world: int | None = None) -> Path:
    """Five steps of 20 ms, each with a product of 10 ms that a device at its peak does in 0.9 ms."""
    made = Trace(rank=rank, world=world, device=rank, pid=4711 + rank, tid=4711 + rank)
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
    found = chopper.attribute(chopper.load([*sources]))
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


def test_a_log_of_another_time_gives_nothing(tmp_path: Path) -> None:
    kernels = trace(tmp_path / "trace.json")
    clocks = log(tmp_path / "smi.csv", BASE_NS - 7_200 * 10**9)
    assert clock_ns(kernels, clocks) == {0: 0}


def test_each_rank_takes_its_own_device(tmp_path: Path) -> None:
    for rank in range(2):
        trace(tmp_path / f"rank{rank}.json", rank, 2)
    log(tmp_path / "smi.csv", BASE_NS - 20 * MS, devices=2)
    run = chopper.load([tmp_path])
    assert set(run.table(0, "device_clock")["sm_clock_hz"].to_pylist()) == {1_200_000_000}
    assert set(run.table(1, "device_clock")["sm_clock_hz"].to_pylist()) == {1_201_000_000}


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
    run = chopper.load(clocks)
    assert run.table(0, "device_clock").num_rows == 50
    assert chopper.attribute(run).observed_ns == 0
    done = CliRunner().invoke(cli, ["import", str(clocks), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert chopper.load(tmp_path / "run").table(0, "device_clock").num_rows == 50


def test_times_without_a_zone_and_lost_rows_are_said(tmp_path: Path) -> None:
    file = tmp_path / "smi.csv"
    file.write_text(HEADING + "2025/07/01 22:00:00.000, 0, 1200, 600, 0x0\nsoon, 0, 1, 1, 0x0\n")
    findings = {f.code: f.message for f in chopper.load(file).manifest.findings}
    assert "were read as UTC" in findings["telemetry.time_zone"]
    assert "1 of 2 rows" in findings["telemetry.rows_lost"]


def test_another_csv_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "numbers.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(
        InputError,
        match=r"no kind that is known .*'a,b'.* or a log with a time, a device and clocks",
    ):
        chopper.load(file)
