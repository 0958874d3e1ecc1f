"""NVIDIA's devices read by the thread in C: the same rows, and devices that block."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pynvml
import pytest

from chopper.collectors._plan import FIELD_BYTES, ring_records
from chopper.tables import TABLES
from tests.collectors.nvml_player import NATIVE, ONE, PRELUDE, TWO, Player, needs_native


@needs_native
def test_python_and_c_read_the_same_activity(play: Player) -> None:
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
        times = (0, 50, 200, 400, 600, 700, 800, 1000)
        python, native = opened(_sources.ActivitySource()), opened(_sources.ActivitySource())
        print(json.dumps([
            [rows(python, *times), dict(python.absent)],
            [stepped_rows(native, *times), dict(native.absent)],
        ]))
        """,
    )
    assert found[0] == found[1]
    names = [column.name for column in TABLES["device_activity"].columns][2:]
    rows = [dict(zip(names, row[1:], strict=True)) for row in found[1][0]]
    first = [row for row in rows if row["device_id"] == 0]
    # At 200, 400, 600, 700 and 1000 ms: what the time-out at 800 kept back, the next row covers.
    assert [row["sm_utilization_ratio"] for row in first] == [0.5, 0.5, None, None, None]
    assert [row["tensor_utilization_ratio"] for row in first] == [0.625, None, 0.625, 0.625, 0.625]
    for column in ("dram", "fp64", "fp32"):
        assert {row[f"{column}_utilization_ratio"] for row in first} == {None}
    assert {row["pcie_tx_bytes_per_s"] for row in first} == {2 * 1024 * 1024}
    assert {row["link_rx_bytes_per_s"] for row in first} == {None}
    assert len(rows) - len(first) == 3  # device 1 is lost at 700 ms
    absent = found[1][1]
    assert absent["device_activity[device 1]"] == "the device has fallen off the bus"
    assert absent["device_activity.sm_utilization_ratio[device 0]"] == "no permission to read it"


@needs_native
def test_python_and_c_read_the_same_rows(play: Player) -> None:
    """Numbers at the edges of types, blanks, infinities, unknown bits, refusals, a lost device."""
    script = (
        TWO
        + """
        gpu 2 GPU-cccc0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
        set 2 sm 4294967295
        set 2 power 700123
        set 2 reasons 9223372036854775807
        set 0 field:186 4294967295 30
        set 0 field:186 0 40
        set 0 sm 0 40
        fail 0 field:186 3 50
        fail 0 nvmlDeviceGetCurrentClocksEventReasons 10 60 70
        fail 1 nvmlDeviceGetClockInfo 999 20 30
        fail 1 * 15 60
        fail 2 nvmlDeviceGetClockInfo 4 80
    """
    )
    found = play(
        script,
        """
        times = range(0, 100, 10)
        python, native = opened(_sources.ClockSource()), opened(_sources.ClockSource())
        print(json.dumps([
            [rows(python, *times), dict(python.absent)],
            [native_rows(native, *times), dict(native.absent)],
        ]))
        """,
    )
    assert found[0] == found[1]
    rows, absent = found[1]
    assert len(rows) == 10 + 6 + 10
    assert absent["device_clock[device 1]"] == "the device has fallen off the bus"
    assert absent["device_clock.sm_clock_hz[device 2]"] == "no permission to read it"


def test_a_field_value_is_as_long_as_the_bindings() -> None:
    assert ctypes.sizeof(pynvml.c_nvmlFieldValue_t) == FIELD_BYTES


def test_a_metric_lies_where_c_reads_it() -> None:
    metric = pynvml.c_nvmlGpmMetric_t
    assert (metric.nvmlReturn.offset, metric.value.offset, ctypes.sizeof(metric)) == (4, 8, 40)


@needs_native
def test_python_and_c_read_the_same_counters(play: Player) -> None:
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
    found = play(
        script,
        """
        times = range(0, 70, 10)
        python, native = opened(_sources.CounterSource()), opened(_sources.CounterSource())
        print(json.dumps([
            [rows(python, *times), dict(python.absent)],
            [native_rows(native, *times), dict(native.absent)],
        ]))
        """,
    )
    assert found[0] == found[1]
    names = [column.name for column in TABLES["device_counter"].columns][2:]
    rows = [dict(zip(names, row[1:], strict=True)) for row in found[1][0]]
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


@needs_native
def test_a_call_that_blocks_holds_up_no_other_device(play: Player) -> None:
    """Device 0 does not answer for an hour: device 1 is read on, at its deadlines."""
    found = play(
        TWO + "block 0 nvmlDeviceGetClockInfo 3600000 1\n",
        """
        import os
        shim.shim_set_time_ms(ctypes.c_int64(0))
        source = opened(_sources.ClockSource())
        shim.shim_set_time_ms(ctypes.c_int64(1))
        started = background(source.plan(), 1_000_000)
        until(lambda: started.relieve(20_000_000) != [])
        until(lambda: started.totals()[0][1].samples >= 100)
        blocked = started.relieve(20_000_000)
        devices = started.totals()[0]
        # The one that reads device 1 ends when it finds a core, the other one never.
        until(lambda: started.stop(50_000_000) == 1)
        rows = taken(started)
        print(json.dumps([[d for d, _ in blocked], [d.samples for d in devices], devices[1].dropped,
                          sorted({row[0] for row in rows})]), flush=True)
        os._exit(0)
        """,
    )
    blocked, samples, dropped, devices = found
    assert 0 in blocked
    assert devices == [1]
    assert samples[0] == 0
    assert samples[1] >= 100
    # While nobody knew yet, its deadlines passed: they are counted.
    assert dropped >= 19


@needs_native
def test_a_device_that_answers_again_is_read_again_by_its_own_thread(play: Player) -> None:
    found = play(
        TWO + "block 0 nvmlDeviceGetClockInfo 40 1 2\n",
        """
        source = opened(_sources.ClockSource())
        at(1)
        started = background(source.plan(), 1_000_000)
        until(lambda: started.relieve(10_000_000) != [])
        at(3)
        until(lambda: started.totals()[0][0].samples >= 20)
        until(lambda: started.totals()[0][1].samples >= 20)
        print(json.dumps([started.stop(PATIENCE_NS), len(taken(started)) >= 40]))
        """,
    )
    assert found == [0, True]


def test_a_ring_holds_the_rows_of_eight_seconds() -> None:
    assert ring_records(100_000) >= 8 * 10_000
    assert ring_records(10**9) >= 8


@needs_native
def test_a_full_ring_counts_what_it_loses(play: Player) -> None:
    found = play(
        ONE,
        """
        _plan.ring_records = lambda period_ns: 1024
        started = background(opened(_sources.ClockSource()).plan(), 100_000)
        until(lambda: started.totals()[0][0].overflowed > 100)
        started.stop(PATIENCE_NS)
        device = started.totals()[0][0]
        kept = len(taken(started))
        print(json.dumps([kept, device.samples - device.overflowed, taken(started)]))
        """,
    )
    assert found == [1024, 1024, []]


@needs_native
def test_late_and_missed_deadlines_are_counted(play: Player) -> None:
    """A reading of 30 ms at 100 Hz: each overruns two or three deadlines, none is lost to view."""
    found = play(
        ONE + "block 0 nvmlDeviceGetCurrentClocksEventReasons 30 1\n",
        """
        source = opened(_sources.ClockSource())
        at(1)
        begun_ns = time.monotonic_ns()
        started = background(source.plan(), 10_000_000)
        until(lambda: started.totals()[0][0].samples >= 10)
        started.stop(PATIENCE_NS)
        device = started.totals()[0][0]
        print(json.dumps([device.samples, device.dropped, device.elapsed_ns,
                          time.monotonic_ns() - begun_ns]))
        """,
    )
    samples, dropped, elapsed_ns, wall_ns = found
    # Every deadline between the first and the last sample was sampled or is counted, and none that
    # was not due yet.
    assert elapsed_ns / 10_000_000 <= samples + dropped <= wall_ns / 10_000_000 + 1
    assert dropped >= 2 * (samples - 1)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
def test_a_run_survives_a_device_that_blocks(play: Player, tmp_path: Path, native: bool) -> None:
    """The real process: every tier of device 0 blocks for good; device 1 is read to the end."""
    code = """
    import os
    from pathlib import Path
    from chopper.collectors import sampler
    from chopper.collectors.nvml import NvmlCollector
    folder = Path(sys.argv[1])
    specs = NvmlCollector(hz=200.0).specs(None)
    process = sampler.SamplerProcess("nvml", folder, specs, flush_ns=50_000_000)
    process.start()
    def samples():
        from chopper.storage.run import read_stream
        try:
            return {
                name: read_stream(folder / f"{name}.arrow", name)[0]["device_id"].to_pylist()
                for name in ("device_clock", "device_counter")
            }
        except FileNotFoundError:
            return {}
    until(lambda: all(v.count(1) > 12 for v in samples().values()) and len(samples()) == 2)
    def grown():
        before = samples()
        until(lambda: all(samples()[name].count(1) > n.count(1) for name, n in before.items()))
    for _ in range(5):
        grown()
    status = process.stop(timeout_s=600)
    found = samples()
    print(json.dumps([status.state, {k: [v.count(0), v.count(1)] for k, v in found.items()},
                      status.absent, {s.name: s.note for s in status.sources},
                      [s.native for s in status.sources]]))
    """
    start = tmp_path / "code.py"
    start.write_text(NATIVE + PRELUDE + textwrap.dedent(code))
    script = TWO + "set 0 temperature 50\nset 1 temperature 60\n"
    script += (
        "block 0 nvmlDeviceGetClockInfo 600000 500\nblock 0 nvmlDeviceGetTemperatureV 600000 500\n"
    )
    environment = play.environment(script)
    if not native:
        environment["PYTHONPATH"] = str(without_native(tmp_path))
    done = subprocess.run(
        [sys.executable, start, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state, counts, absent, notes, natives = json.loads(done.stdout)
    assert state == "complete"
    assert any(natives) == native
    for of_first, of_second in counts.values():
        assert of_second > of_first
    for table in ("device_clock", "device_counter"):
        assert "a call of the driver has not returned for" in absent[f"{table}[device 0]"]
    for source in ("nvml_clock", "nvml_counter"):
        assert "a separate thread reads it from now on" in notes[source]


def without_native(folder: Path) -> Path:
    """A folder that, on the path, makes the extension in C look as if it had not been built."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['chopper.collectors._fast'] = None\n"
    )
    return folder
