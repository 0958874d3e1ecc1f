"""Which of NVIDIA's devices are read, what a driver's errors cost, and whole runs with them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pynvml
import pytest

from chopper import pipeline
from chopper.collectors.nvml import ERRORS
from tests.collectors.nvml_player import ONE, PRELUDE, TWO, WAITING, Player
from tests.waiting import PATIENT_SAMPLERS


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


def test_every_error_of_the_driver_costs_what_it_should(play: Player) -> None:
    """On a device for each error, and on a last one that has none."""
    codes = [*sorted(ERRORS), None]
    script = ""
    for number, code in enumerate(codes):
        script += (
            f"gpu {number} GPU-{number:08}-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3\n"
        )
        script += f"set {number} sm 1980\nset {number} field:186 650000\n"
        if code is not None:
            script += f"fail {number} nvmlDeviceGetClockInfo {code} 100 200\n"
    found, absent = play(
        script,
        "s = opened(_sources.ClockSource()); print(json.dumps([rows(s, 100, 300), s.absent]))",
    )
    for number, code in enumerate(codes):
        of_device = [row for row in found if row[1] == number]
        clocks, powers = [row[3] for row in of_device], [row[5] for row in of_device]
        kind, reason = ("none", "") if code is None else ERRORS.explain(code)
        assert powers == ([] if kind in ("device", "library") else [650.0, 650.0]), code
        if kind in ("none", "moment"):
            assert clocks == [None if kind == "moment" else 1_980_000_000, 1_980_000_000], code
            assert f"device_clock.sm_clock_hz[device {number}]" not in absent
        elif kind == "sensor":
            assert clocks == [None, None], code
            assert absent[f"device_clock.sm_clock_hz[device {number}]"] == reason
        else:
            assert absent[f"device_clock[device {number}]"] == reason


def test_every_code_of_the_binding_is_known() -> None:
    codes = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_ERROR_") and isinstance(value, int)
    }
    assert codes == set(ERRORS)
    assert ERRORS.explain(31337) == ("moment", "NVML error 31337, which this version does not know")


@pytest.mark.parametrize("code", [9, 12, 17, 18])
def test_a_driver_that_does_not_start_is_refused_with_the_reason(play: Player, code: int) -> None:
    found = play(f"init {code}\n", "print(json.dumps(probed()))")
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
    code = "nvml.binding().nvmlInit(); print(json.dumps([d.index for d in nvml.devices()]))"
    assert play(TWO + "mig 1 MIG-dddd0000-0000\n", code, **environment) == expected


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles", "GPU-cccc", "7", "-1,0", "GPU-"])
def test_where_cuda_sees_no_device_none_is_read_and_that_is_said(
    play: Player, visible: str
) -> None:
    code = "print(json.dumps(probed()))"
    ok, reason, remedy = play(TWO, code, CUDA_VISIBLE_DEVICES=visible, LOCAL_WORLD_SIZE="2")
    given = (
        f"CUDA_VISIBLE_DEVICES={visible}" if visible.strip() else "CUDA_VISIBLE_DEVICES is empty"
    )
    assert (ok, reason) == (False, f"{given}: CUDA sees no device in this process")
    assert remedy.endswith("else unset CUDA_VISIBLE_DEVICES")


def test_numbers_choose_nothing_where_cudas_order_is_not_nvmls(play: Player) -> None:
    mixed = TWO.replace(
        "bbbb0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3", "bbbb NVIDIA L4"
    )
    code = "nvml.binding().nvmlInit(); print(json.dumps([d.index for d in nvml.devices()]))"
    assert play(mixed, code, CUDA_VISIBLE_DEVICES="1") == [0, 1]
    by_address = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert play(mixed, code, **by_address) == [1]


def test_doctor_shows_what_a_sample_and_each_call_costs(play: Player) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "doctor", "--json"],
        env=play.environment(TWO + "set 0 temperature 60\nset 0 field:83 1\n"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [nvml] = [c for c in json.loads(done.stdout)["collectors"] if c["name"] == "nvml"]
    assert "nvml_clock" in nvml["call_costs_ns"]
    assert "nvmlDeviceGetClockInfo (SM)" in nvml["driver_calls"]
    assert all(call["p50_ns"] <= call["p99_ns"] for call in nvml["driver_calls"].values())


def test_a_recorded_run_has_the_devices_tables(play: Player, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(
        PATIENT_SAMPLERS
        + textwrap.dedent(
            f"""
            import chopper, time
            from pathlib import Path
            from chopper.recording.live import StreamTail
            rank = Path({str(out)!r}, "rank-00000")
            host, clocks = (StreamTail(rank / f"{{t}}.arrow") for t in ("host", "device_clock"))
            hosts, devices = [], set()
            with chopper.profile({str(out)!r}, trace=False, collect=("host", "nvml")) as prof:
                while not hosts or devices != {{0, 1}}:
                    time.sleep(0.02)
                    prof.step()
                    hosts += host.poll()
                    devices.update(
                        d for rows in clocks.poll() for d in rows["device_id"].to_pylist()
                    )
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

    run = pipeline.read(out)
    report = next(c for c in run.part(0).collectors if c.name == "nvml")
    assert report.status == "obtained"
    assert report.call_p50_ns is not None
    assert "power (instant)" in report.calls
    assert report.reason is not None
    assert "LOCAL_WORLD_SIZE='two' is not a number" in report.reason
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
        import threading
        nvml.binding().nvmlInit = threading.Event().wait
        nvml.NvmlCollector.timeout_s = 0.2
        print(json.dumps(probed()))
        """,
    )
    assert found[0] is False
    assert found[1] == "NVIDIA's driver has not answered for 0.2 s"
    assert "nvidia-smi" in found[2]


def test_a_run_survives_a_device_that_blocks(play: Player, tmp_path: Path) -> None:
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
                      status.absent, {s.name: s.note for s in status.sources}]))
    """
    start = tmp_path / "code.py"
    start.write_text(WAITING + PRELUDE + textwrap.dedent(code))
    script = TWO + "set 0 temperature 50\nset 1 temperature 60\n"
    script += (
        "block 0 nvmlDeviceGetClockInfo 600000 500\nblock 0 nvmlDeviceGetTemperatureV 600000 500\n"
    )
    environment = play.environment(script)
    done = subprocess.run(
        [sys.executable, start, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state, counts, absent, notes = json.loads(done.stdout)
    assert state == "complete"
    for of_first, of_second in counts.values():
        assert of_second > of_first
    for table in ("device_clock", "device_counter"):
        assert "a call of the driver has not returned for" in absent[f"{table}[device 0]"]
    for source in ("nvml_clock", "nvml_counter"):
        assert "a separate thread reads it from now on" in notes[source]
