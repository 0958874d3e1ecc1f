"""The parts that chopper ships for other packages' tests."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from chopper.collectors.base import Collector, CollectorContext
from chopper.collectors.sampler import SystemClock
from chopper.errors import CollectorUnavailable, SchemaError
from chopper.storage.streams import read_stream
from chopper.tables import TABLES
from chopper.testing import FakeClock, ReplayCollector


def context(directory: Path) -> CollectorContext:
    return CollectorContext(directory=directory, run_path=directory, pid=os.getpid())


def nic_table() -> pa.Table:
    rows = [
        {"time_ns": 1, "span_ns": 0, "interface": "eth0", "rx_bytes": 5, "tx_bytes": None},
        {"time_ns": 2, "span_ns": 0, "interface": "eth0", "rx_bytes": 6, "tx_bytes": 7},
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["nic"].arrow)


def test_a_replayed_table_reads_as_recorded(tmp_path: Path) -> None:
    collector = ReplayCollector({"nic": nic_table()})
    assert isinstance(collector, Collector)
    assert collector.probe(context(tmp_path)).ok
    collector.start(context(tmp_path))
    report = collector.stop()
    assert (report.status, report.samples_count, report.files) == ("obtained", 2, ("nic.arrow",))
    table, finding = read_stream(tmp_path / "nic.arrow", "nic")
    assert finding is None
    assert table.to_pylist() == nic_table().to_pylist()


def test_a_table_that_is_not_as_declared_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    tables = {"nic": nic_table(), "host": nic_table()}
    with pytest.raises(SchemaError, match="table host: column memory_available_bytes is missing"):
        ReplayCollector(tables).start(context(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_refusal_is_as_told(tmp_path: Path) -> None:
    collector = ReplayCollector({}, refuse="the bus is on fire")
    assert collector.probe(context(tmp_path)).reason == "the bus is on fire"
    with pytest.raises(CollectorUnavailable, match="the bus is on fire"):
        collector.start(context(tmp_path))


def test_the_clock_does_as_it_is_told() -> None:
    clock: SystemClock = FakeClock(realtime_ns=100, monotonic_ns=10, lags_ns=[3])
    assert isinstance(clock, FakeClock)
    assert not clock.wait_until(20)
    assert (clock.monotonic_ns(), clock.time_ns(), clock.cpu_ns()) == (23, 113, 0)
    assert not clock.wait_until(15)  # long past: no sleep, no lag
    assert clock.monotonic_ns() == 23
    clock.work(7)
    assert (clock.monotonic_ns(), clock.cpu_ns()) == (30, 7)
    clock.step_wall_clock(-50)
    assert (clock.monotonic_ns(), clock.monotonic_raw_ns(), clock.time_ns()) == (30, 30, 70)
    clock.stop_after_ns(10)
    assert not clock.wait_until(39)
    assert clock.wait_until(45)
    assert clock.monotonic_ns() == 40
    with pytest.raises(ValueError, match="cannot advance by -1 ns"):
        clock.advance(-1)


def test_an_orphaned_clock_stops() -> None:
    clock = FakeClock()
    clock.orphaned = True
    assert clock.wait_until(clock.monotonic_ns())
