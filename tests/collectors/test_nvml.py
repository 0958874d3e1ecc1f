"""NVML through the real binding, against a library that plays a script (tests/native/nvml_shim.c).

Each test runs a process of its own that finds the shim where it would find the driver's library.
"""

from __future__ import annotations

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

from chopper.collectors.nvml._library import ERRORS, explain

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
"""


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
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
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


def test_a_clock_of_zero_is_unknown(play: Player) -> None:
    found = play(
        ONE + "set 0 sm 0 100\n",
        "print(json.dumps(rows(opened(_sources.ClockSource()), 100)))",
    )
    assert found[0][3] is None


def test_older_drivers_have_power_usage_instead_of_the_instant_field(play: Player) -> None:
    script = ONE.replace("field:186 650000", "power 300000")
    found = play(script, "print(json.dumps(rows(opened(_sources.ClockSource()), 0)))")
    assert found[0][5] == 300.0


def test_reasons_that_this_version_does_not_know_are_kept(play: Player) -> None:
    bits = (1 << 40) | 4
    found = play(
        ONE + f"set 0 reasons {bits} 1\n",
        "print(json.dumps(rows(opened(_sources.ClockSource()), 1)))",
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


def test_a_device_that_falls_off_the_bus_is_left_out_and_the_rest_goes_on(play: Player) -> None:
    found = play(
        TWO + "fail 1 * 15 1000\n",
        """
        s = opened(_sources.ClockSource())
        print(json.dumps([rows(s, 0, 1000, 2000), s.absent]))
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


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_of_the_driver_costs_what_it_should(play: Player, code: int) -> None:
    kind, reason = explain(code)
    found = play(
        TWO + f"fail 0 nvmlDeviceGetClockInfo {code} 100 200\n",
        "s = opened(_sources.ClockSource()); print(json.dumps([rows(s, 100, 300), s.absent]))",
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
        ("GPU-cccc", 1, [0, 1]),
        ("0,7,1", 1, [0]),
        ("MIG-GPU-bbbb0000-0000-0000-0000-000000000000/3/0", 1, [1]),
        ("MIG-12345678-0000", 1, [0, 1]),
        ("", 1, [0, 1]),
    ],
)
def test_the_devices_that_the_job_may_use_are_read(
    play: Player, visible: str | None, ranks: int, expected: list[int]
) -> None:
    environment = {"LOCAL_WORLD_SIZE": str(ranks)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    code = "nvml._binding().nvmlInit(); print(json.dumps([d.index for d in nvml.devices()]))"
    assert play(TWO, code, **environment) == expected


def test_numbers_choose_nothing_where_cudas_order_is_not_nvmls(play: Player) -> None:
    mixed = TWO.replace(
        "bbbb0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3", "bbbb NVIDIA L4"
    )
    code = "nvml._binding().nvmlInit(); print(json.dumps([d.index for d in nvml.devices()]))"
    assert play(mixed, code, CUDA_VISIBLE_DEVICES="1") == [0, 1]
    by_address = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert play(mixed, code, **by_address) == [1]


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
        env=play.environment(TWO + "set 0 max_sm 1980\n"),
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
