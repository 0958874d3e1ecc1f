"""NVML through the real binding, against a library that plays a script (tests/native/nvml_shim.c).

Each test runs a process of its own that finds the shim where it would find the driver's library.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pynvml
import pytest

from chopper.collectors._plan import AVAILABLE
from chopper.collectors.nvml._library import ERRORS, FIELD_BYTES, explain
from chopper.tables import TABLES

ONE = """
    gpu 0 GPU-aaaa0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
    set 0 sm 1980
    set 0 mem 2619
    set 0 field:186 650000
    set 0 reasons 4
"""
TWO = (
    ONE
    + """
    gpu 1 GPU-bbbb0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
    set 1 sm 1755
    set 1 reasons 0
    """
)

NATIVE = """
import select, time
from chopper.collectors import _plan
def background(plan, period_ns=3_600_000_000_000):
    started = _plan.Background(plan, period_ns)
    started.start(time.monotonic_ns())
    return started
def until(condition):
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        select.select([], [], [], 0.002)
def taken(started):
    columns = started.take() or {}
    kept = [c.to_pylist() for name, c in columns.items() if name not in ("time_ns", "span_ns")]
    return [list(row) for row in zip(*kept)]
"""
"""What a test in C needs besides: one tick of a plan, awaited, and its rows."""

PRELUDE = """
import ctypes, json, sys
from chopper.collectors.nvml import _library as nvml, _sources
from chopper.collectors.sampler import Sink
shim = ctypes.CDLL("libnvidia-ml.so.1")
def at(ms):
    shim.shim_set_time_ms(ctypes.c_int64(ms))
def rows(source, *times_ms):
    found = []
    for ms in times_ms:
        at(ms)
        sink = Sink()
        try:
            source.sample(sink, 0)
        except RuntimeError as exc:
            found.append(str(exc))
        found += [[table, *values] for table, values in sink.take()]
    return found
def opened(source, ms=0):
    at(ms)
    source.open()
    return source
def native_rows(source, *times_ms):
    found = []
    for ms in times_ms:
        at(ms)
        plan = source.plan()
        if not plan.devices:
            continue
        started = background(plan)
        def read():
            devices, _, _, ticks = started.totals()
            return ticks or all(d.lost for d in devices)
        until(read)
        assert started.stop(10**9) == 0
        source.learn(started.totals()[0])
        found += [[plan.table, *row] for row in taken(started)]
    return found
def stepped_rows(source, *times_ms):
    at(times_ms[0])
    started = background(source.plan(), 2_000_000)
    def ticks():
        return started.totals()[3]
    for ms in times_ms:
        at(ms)
        before = ticks()
        until(lambda: ticks() >= before + 2 or all(d.lost for d in started.totals()[0]))
    assert started.stop(10**9) == 0
    source.learn(started.totals()[0])
    return [[source.tables[0], *row] for row in taken(started)]
"""

needs_native = pytest.mark.skipif(not AVAILABLE, reason="the extension in C is not built")
EITHER = pytest.mark.parametrize("rows", ["rows", pytest.param("native_rows", marks=needs_native)])
"""The same readings in Python, and by the thread in C."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libnvidia-ml.so.1")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent.parent / "native" / "nvml_shim.c"
    subprocess.run(
        [
            *(compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *("-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1", source),
        ],
        check=True,
    )
    return folder


class Player:
    """Runs code in a process that sees the scripted devices."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self._folder = folder

    def environment(self, script: str) -> dict[str, str]:
        path = self._folder / "script.txt"
        path.write_text("".join(f"{line.strip()}\n" for line in script.splitlines()))
        return {
            **{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
            "LD_LIBRARY_PATH": str(self._library),
            "NVML_SHIM_SCRIPT": str(path),
        }

    def __call__(self, script: str, code: str, **environment: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", NATIVE + PRELUDE + textwrap.dedent(code)],
            env={**self.environment(script), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def play(library: Path, tmp_path: Path) -> Player:
    return Player(library, tmp_path)


@EITHER
def test_the_fast_tier_reads_clock_power_and_reasons_of_each_device(
    play: Player, rows: str
) -> None:
    found = play(
        TWO + "set 0 sm 1200 500\n",
        f"s = opened(_sources.ClockSource()); print(json.dumps([{rows}(s, 0, 500), s.absent]))",
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


@EITHER
def test_a_clock_of_zero_is_unknown(play: Player, rows: str) -> None:
    found = play(
        ONE + "set 0 sm 0 100\n",
        f"print(json.dumps({rows}(opened(_sources.ClockSource()), 100)))",
    )
    assert found[0][3] is None


@EITHER
def test_what_no_device_reaches_is_unknown(play: Player, rows: str) -> None:
    """Clocks in MHz, power in mW, reasons: blanks, zeros, numbers that wrapped."""
    script = (
        ONE
        + """
        set 0 sm 4294967295 10
        set 0 sm 25000 20
        set 0 field:186 0 10
        set 0 field:186 4294967000 20
        set 0 reasons 18446744073709551615 10
        set 0 reasons 4 20
        gpu 1 GPU-bbbb NVIDIA H100 80GB HBM3
        set 1 power 0
        set 1 power 700000 10
        set 1 power 4294967295 20
    """
    )
    found = play(script, f"print(json.dumps({rows}(opened(_sources.ClockSource()), 0, 10, 20)))")
    first, second = ([row for row in found if row[1] == device] for device in (0, 1))
    assert [row[3] for row in first] == [1_980_000_000, None, None]
    assert [row[5] for row in first] == [650.0, None, None]
    assert [row[6] for row in first] == [4, None, 4]
    # Of the other, nothing but power is told: a reading without a value makes no row.
    assert [row[5] for row in second] == [700.0]


@EITHER
def test_older_drivers_have_power_usage_instead_of_the_instant_field(
    play: Player, rows: str
) -> None:
    script = ONE.replace("field:186 650000", "power 300000")
    found = play(script, f"print(json.dumps({rows}(opened(_sources.ClockSource()), 0)))")
    assert found[0][5] == 300.0


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


@EITHER
def test_reasons_that_this_version_does_not_know_are_kept(play: Player, rows: str) -> None:
    bits = (1 << 40) | 4
    found = play(
        ONE + f"set 0 reasons {bits} 1\n",
        f"print(json.dumps({rows}(opened(_sources.ClockSource()), 1)))",
    )
    assert found[0][6] == bits


def test_link_bytes_are_summed_over_all_links(play: Player) -> None:
    # A bare field id means link 0 alone: the script tells the two apart.
    script = ONE + "set 0 field:138 10\nset 0 field:138:all 180\nset 0 field:83 12500\n"
    found = play(
        script,
        """
        from chopper.tables import TABLES
        names = [c.name for c in TABLES["device_counter"].columns][2:]
        row = rows(opened(_sources.CounterSource()), 0)[0][1:]
        print(json.dumps(dict(zip(names, row))))
        """,
    )
    assert found["link_tx_bytes"] == 180 * 1024
    assert found["energy_j"] == 12.5
    assert found["link_rx_bytes"] is None


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


@pytest.mark.parametrize("read", ["rows", pytest.param("in_c", marks=needs_native)])
def test_a_dear_field_has_a_call_of_its_own_and_devices_take_turns(play: Player, read: str) -> None:
    """Average power at 3 ms a call: at each tenth sample, of one device at a time; energy at each."""
    script = TWO + "".join(
        f"set {i} field:185 650000\nset {i} field:83 1000\nblock {i} field:185 3\n" for i in (0, 1)
    )
    calls, plan, found = play(
        script,
        f"""
        source = opened(_sources.CounterSource())
        def in_c(source, *times):
            started = background(source.plan(), 20_000_000)
            until(lambda: started.totals()[3] >= len(times))
            assert started.stop(10**9) == 0
            count = 2 * len(times)
            return [["", *row] for row in taken(started)][:count]
        found = {read}(source, *range(12))
        plan = [[[call.argument, call.every, call.turn] for call in device.calls]
                for device in source.plan().devices]
        print(json.dumps([list(source.calls()), plan, found]))
        """,
    )
    assert plan == [[[23, 1, 0], [1, 10, turn]] for turn in (0, 1)]
    assert [name for name in calls if "Field" in name] == [
        "nvmlDeviceGetFieldValues (23 fields)",
        "nvmlDeviceGetFieldValues (power_average_w, at each 10th sample)",
    ]
    names = [column.name for column in TABLES["device_counter"].columns][2:]
    rows = [dict(zip(names, row[1:], strict=True)) for row in found]
    assert {row["energy_j"] for row in rows} == {1.0}
    for device in (0, 1):
        of_one = [row["power_average_w"] for row in rows if row["device_id"] == device]
        assert [i for i, w in enumerate(of_one) if w is not None] == [device, device + 10]


def test_a_field_is_dear_by_what_it_costs_alone(play: Player) -> None:
    planned = play(
        ONE + "set 0 field:82 60\nset 0 field:83 1000\nset 0 field:185 650000\n",
        """
        def plan(dear):
            cost = lambda device, ids: 500_001 if ids[0][0] in dear else 500_000
            source = opened(_sources.CounterSource(cost))
            calls = source.plan().devices[0].calls
            return sorted([call.argument, call.every] for call in calls)
        print(json.dumps([plan(()), plan((185,)), plan((83, 185))]))
        """,
    )
    assert planned == [[[24, 1]], [[1, 10], [23, 1]], [[1, 10], [1, 10], [22, 1]]]


def test_gpm_gives_no_row_before_its_interval_has_passed(play: Player) -> None:
    found = play(
        ONE + "set 0 gpm 1\nset 0 gpm:5 62.5\nset 0 gpm:20 2\n",
        """
        from chopper.tables import TABLES
        names = [c.name for c in TABLES["device_activity"].columns][2:]
        s = opened(_sources.ActivitySource())
        found = rows(s, 0, 50, 200)
        print(json.dumps([dict(zip(names, row[1:])) for row in found]))
        """,
    )
    assert len(found) == 1
    assert found[0]["tensor_utilization_ratio"] == 0.625
    assert found[0]["pcie_tx_bytes_per_s"] == 2 * 1024 * 1024
    assert found[0]["sm_utilization_ratio"] is None


def test_a_device_whose_support_could_not_be_asked_says_why(play: Player) -> None:
    script = TWO + "set 0 gpm 1\nset 1 gpm 1\nfail 1 nvmlGpmQueryDeviceSupport 999\n"
    found = play(script, "print(json.dumps(opened(_sources.ActivitySource()).absent))")
    assert found["device_activity.sm_utilization_ratio[device 1]"] == "unknown error of the driver"


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


@EITHER
def test_a_device_that_falls_off_the_bus_is_left_out_and_the_rest_goes_on(
    play: Player, rows: str
) -> None:
    found = play(
        TWO + "fail 1 * 15 1000\n",
        f"""
        s = opened(_sources.ClockSource())
        print(json.dumps([{rows}(s, 0, 1000, 2000), s.absent]))
        """,
    )
    assert [row[1] for row in found[0]] == [0, 1, 0, 0]
    assert found[1]["device_clock[device 1]"] == "the device has fallen off the bus"


def test_when_the_last_device_is_lost_each_reading_fails(play: Player) -> None:
    found = play(
        ONE + "fail 0 * 15 1000\n",
        "print(json.dumps(rows(opened(_sources.ClockSource()), 0, 1000)))",
    )
    assert found[1:] == ["the device has fallen off the bus"]


@EITHER
@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_of_the_driver_costs_what_it_should(play: Player, rows: str, code: int) -> None:
    kind, reason = explain(code)
    found = play(
        TWO + f"fail 0 nvmlDeviceGetClockInfo {code} 100 200\n",
        f"s = opened(_sources.ClockSource()); print(json.dumps([{rows}(s, 100, 300), s.absent]))",
    )
    of_device = [row for row in found[0] if row[1] == 0]
    if kind == "moment":
        assert of_device[0][3:5] == [None, None]
        assert of_device[1][3] == 1_980_000_000
        assert "device_clock.sm_clock_hz[device 0]" not in found[1]
    elif kind == "sensor":
        assert [row[3] for row in of_device] == [None, None]
        assert [row[5] for row in of_device] == [650.0, 650.0]
        assert found[1]["device_clock.sm_clock_hz[device 0]"] == reason
    else:
        assert of_device == []
        assert found[1]["device_clock[device 0]"] == reason
    assert len([row for row in found[0] if row[1] == 1]) == 2


def test_every_code_of_the_binding_is_known() -> None:
    codes = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_ERROR_") and isinstance(value, int)
    }
    assert codes == set(ERRORS)
    assert explain(31337) == ("moment", "NVML error 31337, which this version does not know")


@pytest.mark.parametrize("code", [9, 12, 17, 18])
def test_a_driver_that_does_not_start_is_refused_with_the_reason(play: Player, code: int) -> None:
    found = play(
        f"init {code}\n",
        """
        from pathlib import Path
        from chopper.collectors.base import CollectorContext
        from chopper.collectors.nvml import NvmlCollector
        answer = NvmlCollector().probe(CollectorContext(directory=Path(), run_path=Path(), pid=1))
        print(json.dumps([answer.ok, answer.reason, answer.remedy]))
        """,
    )
    assert found[0] is False
    assert found[1] == ERRORS[code][1]
    assert found[2]


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        (None, 0, [0, 1]),
        ("1", 1, [1]),
        ("1", 2, [0, 1]),  # each rank sees its own device: the leader reads all
        ("GPU-bbbb", 1, [1]),
        ("0,7,1", 1, [0]),
        ("0,-1,1", 1, [0]),
        ("0,1", "two", [0, 1]),
        ("MIG-GPU-bbbb0000-0000-0000-0000-000000000000/3/0", 1, [1]),
        ("MIG-12345678-0000", 1, [0, 1]),  # the driver does not know whose part it is
        ("MIG-dddd0000-0000", 1, [1]),
    ],
)
def test_the_devices_that_the_job_may_use_are_read(
    play: Player, visible: str | None, ranks: int | str, expected: list[int]
) -> None:
    environment = {"LOCAL_WORLD_SIZE": str(ranks)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    code = "nvml._binding().nvmlInit(); print(json.dumps([d.index for d in nvml.devices()]))"
    assert play(TWO + "mig 1 MIG-dddd0000-0000\n", code, **environment) == expected


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles", "GPU-cccc", "7", "-1,0", "GPU-"])
def test_where_cuda_sees_no_device_none_is_read_and_that_is_said(
    play: Player, visible: str
) -> None:
    code = """
    from pathlib import Path
    from chopper.collectors.base import CollectorContext
    from chopper.collectors.nvml import NvmlCollector
    answer = NvmlCollector().probe(CollectorContext(directory=Path(), run_path=Path(), pid=1))
    print(json.dumps([answer.ok, answer.reason, answer.remedy]))
    """
    ok, reason, remedy = play(TWO, code, CUDA_VISIBLE_DEVICES=visible, LOCAL_WORLD_SIZE="2")
    given = (
        f"CUDA_VISIBLE_DEVICES={visible}" if visible.strip() else "CUDA_VISIBLE_DEVICES is empty"
    )
    assert (ok, reason) == (False, f"{given}: CUDA sees no device in this process")
    assert remedy.endswith("else unset CUDA_VISIBLE_DEVICES")


def test_a_launcher_that_counts_no_ranks_is_named_and_costs_nothing(play: Player) -> None:
    code = """
    from pathlib import Path
    from chopper.collectors.base import CollectorContext
    from chopper.collectors.nvml import NvmlCollector
    answer = NvmlCollector().probe(CollectorContext(directory=Path(), run_path=Path(), pid=1))
    print(json.dumps([answer.ok, answer.reason]))
    """
    ok, reason = play(TWO, code, LOCAL_WORLD_SIZE="two")
    assert ok
    assert reason.startswith("LOCAL_WORLD_SIZE='two' is no number: ")


def test_numbers_choose_nothing_where_cudas_order_is_not_nvmls(play: Player) -> None:
    mixed = TWO.replace(
        "bbbb0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3", "bbbb NVIDIA L4"
    )
    code = "nvml._binding().nvmlInit(); print(json.dumps([d.index for d in nvml.devices()]))"
    assert play(mixed, code, CUDA_VISIBLE_DEVICES="1") == [0, 1]
    by_address = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert play(mixed, code, **by_address) == [1]


@needs_native
def test_python_and_c_read_the_same_rows(play: Player) -> None:
    """Numbers at the edges of their types, blanks, infinities, unknown bits, refusals, a lost device."""
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
    """Blanks, counters too large, alternatives, sums, negative temperatures, refusals in between."""
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
    """Device 0 does not answer for two minutes: device 1 is read on, at its deadlines."""
    found = play(
        TWO + "block 0 nvmlDeviceGetClockInfo 120000 1\n",
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
        stuck = started.stop(50_000_000)
        rows = taken(started)
        print(json.dumps([blocked[0][0], [d.samples for d in devices], devices[1].dropped, stuck,
                          sorted({row[0] for row in rows})]), flush=True)
        os._exit(0)
        """,
    )
    blocked, samples, dropped, stuck, devices = found
    assert (blocked, stuck, devices) == (0, 1, [1])
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
        print(json.dumps([started.stop(10**9), len(taken(started)) >= 40]))
        """,
    )
    assert found == [0, True]


@needs_native
def test_a_full_ring_counts_what_it_loses(play: Player) -> None:
    found = play(
        ONE,
        """
        started = background(opened(_sources.ClockSource()).plan(), 100_000)
        until(lambda: started.totals()[0][0].overflowed > 100)
        started.stop(10**9)
        device = started.totals()[0][0]
        kept = len(taken(started))
        print(json.dumps([kept, device.samples - device.overflowed, taken(started)]))
        """,
    )
    assert found[0] == found[1] >= 8 * 10_000
    assert found[2] == []


@needs_native
def test_late_and_missed_deadlines_are_counted(play: Player) -> None:
    """A reading of 30 ms at 100 Hz: each overruns two or three deadlines, and none is lost to view."""
    found = play(
        ONE + "block 0 nvmlDeviceGetCurrentClocksEventReasons 30 1\n",
        """
        source = opened(_sources.ClockSource())
        at(1)
        started = background(source.plan(), 10_000_000)
        until(lambda: started.totals()[0][0].samples >= 10)
        started.stop(10**9)
        device = started.totals()[0][0]
        print(json.dumps([device.samples, device.dropped, device.elapsed_ns]))
        """,
    )
    samples, dropped, elapsed_ns = found
    # Every deadline between first and last was sampled or is counted; the last tick's are counted
    # after it.
    due = round(elapsed_ns / 10_000_000) + 1
    assert 0 <= samples + dropped - due <= 4
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
        from chopper.run import read_stream
        try:
            return {
                name: read_stream(folder / f"{name}.arrow", name)[0]["device_id"].to_pylist()
                for name in ("device_clock", "device_counter")
            }
        except FileNotFoundError:
            return {}
    until(lambda: all(v.count(1) > 30 for v in samples().values()) and len(samples()) == 2)
    def grown():
        before = samples()
        until(lambda: all(samples()[name].count(1) > n.count(1) for name, n in before.items()))
    for _ in range(5):
        grown()
    status = process.stop(timeout_s=10)
    found = samples()
    print(json.dumps([status.state, {k: [v.count(0), v.count(1)] for k, v in found.items()},
                      status.absent, [s.note for s in status.sources], [s.native for s in status.sources]]))
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
    assert sum("a thread of its own reads it since" in (note or "") for note in notes) == 2


def without_native(folder: Path) -> Path:
    """A folder that, on the path, makes the extension in C look as if it had not been built."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['chopper.collectors._fast'] = None\n"
    )
    return folder


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
        found.append([[*row[2:]] for _, row in sink.take_timed()])
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
        (_, first), (_, second) = sink.take_timed()
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


def test_the_cost_of_each_call_is_measured_at_the_start(play: Player) -> None:
    costs = play(
        TWO + "set 0 temperature 60\nset 0 gpm 1\n",
        """
        from chopper.collectors.sampler import SystemClock, call_costs
        found = {}
        for kind in (_sources.ClockSource, _sources.CounterSource, _sources.ActivitySource):
            found |= call_costs(opened(kind()), SystemClock())
        import msgspec
        print(json.dumps(msgspec.to_builtins(found)))
        """,
    )
    assert set(costs) == {
        "nvmlDeviceGetClockInfo (SM)",
        "nvmlDeviceGetClockInfo (memory)",
        "power (instant)",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues (24 fields)",
        "nvmlDeviceGetTemperatureV",
        "nvmlGpmSampleGet, nvmlGpmMetricsGet",
    }
    assert all(
        0 < cost["p50_ns"] <= cost["p99_ns"] and cost["count"] >= 3 for cost in costs.values()
    )


def test_doctor_shows_what_a_sample_and_each_call_costs(play: Player) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "doctor"],
        env=play.environment(TWO + "set 0 temperature 60\n"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # However the lines are broken: up to the next collector.
    told = " ".join(done.stdout.partition("✓ nvml: available")[2].partition(" ✓ ")[0].split())
    costs, _, calls = told.partition("calls of the driver: ")
    assert costs.startswith("one sample costs")
    assert "nvml_clock" in costs
    assert "nvmlDeviceGetClockInfo (SM)" in calls
    assert calls.count("(p99 ") == 6


def test_counters_that_are_blank_or_do_not_fit_are_unknown(play: Player) -> None:
    script = ONE + "set 0 field:83 18446744073709551615\n"
    script += "set 0 field:138:all 18014398509481984\nset 0 field:139:all 5\n"
    script += "set 0 field:74 18446744073709551615 100\nset 0 field:74 7\n"
    found = play(
        script,
        """
        from chopper.tables import TABLES
        names = [c.name for c in TABLES["device_counter"].columns][2:]
        found = rows(opened(_sources.CounterSource()), 0, 100, 200)
        print(json.dumps([dict(zip(names, row[1:])) for row in found]))
        """,
    )
    assert [row["energy_j"] for row in found] == [None] * 3
    assert [row["link_tx_bytes"] for row in found] == [None] * 3
    assert [row["link_rx_bytes"] for row in found] == [5 * 1024] * 3
    assert [row["power_throttle_ns"] for row in found] == [7, None, None]


@EITHER
def test_a_value_of_a_type_that_nobody_knows_is_unknown(play: Player, rows: str) -> None:
    """Not 0: of an energy counter that would be a step backwards, of a sum of links as well."""
    script = ONE + "set 0 field:83 5000\nset 0 temperature 50\nset 0 memory_used 7\n"
    script += "".join(f"set 0 field:{i} 3\n" for i in (38, 45, 52, 94))
    script += "set 0 field:83:type 3\nset 0 field:83:type 77 100\n"
    script += "set 0 field:52 18446744073709551615 100\nset 0 field:52 3 200\n"
    script += "set 0 memory_used 18446744073709551615 100\n"
    found = play(
        script,
        f"""
        from chopper.tables import TABLES
        names = [c.name for c in TABLES["device_counter"].columns][2:]
        found = {rows}(opened(_sources.CounterSource()), 0, 100, 200)
        print(json.dumps([dict(zip(names, row[1:])) for row in found]))
        """,
    )
    assert [row["energy_j"] for row in found] == [5.0, None, None]
    assert [row["link_error_count"] for row in found] == [9, None, 9]
    assert [row["pcie_replay_count"] for row in found] == [3, 3, 3]
    assert [row["memory_used_bytes"] for row in found] == [7, None, None]


@EITHER
@pytest.mark.parametrize(("refusal", "expected"), [(13, 60.0), (3, 60.0), (999, None)])
def test_older_drivers_have_another_call_for_the_temperature(
    play: Player, rows: str, refusal: int, expected: float | None
) -> None:
    """Where the newer one is refused for good, not where it fails once."""
    script = ONE + f"set 0 temperature 60\nfail 0 nvmlDeviceGetTemperatureV {refusal}\n"
    code = f"""
    from chopper.tables import TABLES
    names = [c.name for c in TABLES["device_counter"].columns][2:]
    s = opened(_sources.CounterSource())
    print(json.dumps([[dict(zip(names, row[1:])) for row in {rows}(s, 0)], list(s.calls())]))
    """
    ((row,), calls) = play(script + "set 0 field:83 1\n", code)
    assert row["temperature_c"] == expected
    assert ("nvmlDeviceGetTemperature" in calls) == (expected is not None)


def test_newer_devices_count_link_bytes_under_other_fields(play: Player) -> None:
    found = play(
        ONE + "set 0 field:202:all 12345\n",
        """
        from chopper.tables import TABLES
        names = [c.name for c in TABLES["device_counter"].columns][2:]
        (row,) = rows(opened(_sources.CounterSource()), 0)
        print(json.dumps(dict(zip(names, row[1:]))))
        """,
    )
    assert found["link_tx_bytes"] == 12345
    assert found["link_rx_bytes"] is None


def test_a_partitioned_device_says_whose_clock_it_is(play: Player) -> None:
    code = "nvml._binding().nvmlInit(); print(json.dumps(nvml.devices()[0].note))"
    assert "those of the whole device" in play(ONE + "set 0 mig 1\n", code)


def test_a_recorded_run_has_the_devices_tables(play: Player, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import chopper, time
            with chopper.profile({str(out)!r}, trace=False, collect=("host", "nvml")) as prof:
                for _ in range(3):
                    end = time.monotonic() + 0.1
                    while time.monotonic() < end:
                        sum(range(1000))
                    prof.step()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, program],
        env=play.environment(TWO + "set 0 max_sm 1980\nset 0 mig 1\n")
        | {"LOCAL_WORLD_SIZE": "two"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    import chopper

    run = chopper.load(out)
    report = next(c for c in run.part(0).collectors if c.name == "nvml")
    assert report.status == "obtained"
    assert report.call_p50_ns is not None
    assert "power (instant)" in report.calls
    assert report.reason is not None
    assert "LOCAL_WORLD_SIZE='two' is no number" in report.reason
    assert "device 0 is partitioned (MIG)" in report.reason
    clocks = run.table(0, "device_clock")
    assert set(clocks["sm_clock_hz"].to_pylist()) == {1_980_000_000, 1_755_000_000}
    assert run.table(0, "device_limit")["sm_clock_max_hz"].to_pylist() == [1_980_000_000, None]
    # Both samplers read the host's clocks; one of them writes them.
    assert run.table(0, "clock").num_rows >= 1
    assert not [f for f in run.part(0).findings if f.code == "telemetry.truncated"]
    writers = [c.name for c in run.part(0).collectors if "clock.arrow" in c.files]
    assert len(writers) == 1
    samplers = [c for c in run.part(0).collectors if c.status == "obtained"]
    assert [c.name for c in samplers] == ["host", "nvml"]
    assert all(c.clock_alignment_error_ns is not None for c in samplers)


def test_a_driver_that_hangs_at_its_start_holds_up_no_training(play: Player) -> None:
    found = play(
        ONE,
        """
        import select, threading
        from pathlib import Path
        from chopper.collectors import nvml as collector
        from chopper.collectors.base import CollectorContext
        never = threading.Event()
        nvml._binding().nvmlInit = lambda: never.wait()
        collector.DRIVER_S = 0.2
        context = CollectorContext(directory=Path("."), run_path=Path("."), pid=1)
        answer = collector.NvmlCollector().probe(context)
        print(json.dumps([answer.ok, answer.reason, answer.remedy]))
        """,
    )
    assert found[0] is False
    assert found[1] == "NVIDIA's driver has not answered for 0.2 s"
    assert "nvidia-smi" in found[2]
