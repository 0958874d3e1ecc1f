"""Readings of AMD's devices, by the real binding, against a library that plays a script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.collectors.amd import ERRORS
from tests.collectors.amd_player import ONE, Player, needs_amdsmi, run_in
from tests.waiting import PATIENT_SAMPLERS


@pytest.fixture
def play(amd_library: tuple[Path, dict[str, list[int]]], tmp_path: Path) -> Player:
    return Player(*amd_library, tmp_path)


def read(play: Player, lines: list[str], source: str, *times_ns: int) -> list[dict[str, Any]]:
    """Rows of a source, by column, read at these times."""
    code = f"print(json.dumps(rows(opened(_sources.{source}()), *{times_ns})))"
    found: list[dict[str, Any]] = play(lines, code)
    return found


@needs_amdsmi
def test_the_clock_is_the_mean_over_the_dies_that_report_one(play: Player) -> None:
    lines = [
        ONE,
        play.set(0, "current_gfxclks", 2100, item=0),
        play.set(0, "current_gfxclks", 1900, item=1),
        play.set(0, "current_uclk", 1300),
        play.set(0, "current_socket_power", 640),
    ]
    (row,) = read(play, lines, "ClockSource", 0)
    assert row["sm_clock_hz"] == 2_000_000_000
    assert row["memory_clock_hz"] == 1_300_000_000
    assert row["power_w"] == 640.0
    assert row["device_uuid"] == "GPU-e1e8b5c8c3a9f2d1"
    assert row["event_reasons"] is None


@needs_amdsmi
def test_sentinels_are_unknown_and_named(play: Player) -> None:
    code = "s = opened(_sources.ClockSource()); print(json.dumps([rows(s, 0), s.absent]))"
    (row,), absent = play([ONE], code)
    assert [row[n] for n in ("sm_clock_hz", "memory_clock_hz", "power_w")] == [None] * 3
    assert absent["device_clock.sm_clock_hz"] == "not available on this device"


@needs_amdsmi
def test_reasons_come_from_what_the_residencies_grew_by(play: Player) -> None:
    accumulators = ("prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
    lines = [ONE, *(play.set(0, f"{name}_residency_acc", 100) for name in accumulators)]
    # Reading 0 is that of open(); then: start, nothing grew, power cap, power cap and memory hot.
    lines += [play.set(0, "accumulation_counter", 1000 + 10 * n, n) for n in range(6)]
    lines += [play.set(0, "ppt_residency_acc", 105, 3), play.set(0, "ppt_residency_acc", 115, 4)]
    lines += [play.set(0, "hbm_thm_residency_acc", 101, 4)]
    found = read(play, lines, "ClockSource", 1, 2, 3, 4)
    assert [row["event_reasons"] for row in found] == [0, 0, 0x4, 0x24]


@needs_amdsmi
def test_time_under_a_cap_adds_up_from_residencies(play: Player) -> None:
    """A quarter of the ticks; three sensors that were hot at once are not more than all of them."""
    lines = [ONE, play.set(0, "ppt_residency_acc", 100), play.set(0, "accumulation_counter", 1000)]
    lines += [play.set(0, "accumulation_counter", 1100, 2)]
    lines += [play.set(0, "accumulation_counter", 1200, 3)]
    lines += [play.set(0, "ppt_residency_acc", 125, 2)]
    for name in ("socket_thm", "vr_thm", "hbm_thm"):
        lines += [play.set(0, f"{name}_residency_acc", acc, n) for acc, n in ((0, 0), (90, 3))]
    found = read(play, lines, "CounterSource", 0, 1_000_000_000, 2_000_000_000)
    assert [row["power_throttle_ns"] for row in found[1:]] == [250_000_000] * 2
    assert [row["thermal_throttle_ns"] for row in found[1:]] == [0, 10**9]


@needs_amdsmi
def test_counters_have_their_units(play: Player) -> None:
    lines = [
        ONE,
        play.set(0, "energy_accumulator", 1_000_000),
        play.set(0, "temperature_hotspot", 71),
        play.set(0, "average_gfx_activity", 88),
        play.set(0, "average_umc_activity", 40_000),
        play.set(0, "xgmi_read_data_acc", 3, item=0),
        play.set(0, "xgmi_read_data_acc", 4, item=1),
    ]
    (row,) = read(play, lines, "CounterSource", 0)
    assert row["energy_j"] == pytest.approx(15.259)
    assert row["temperature_c"] == 71.0
    assert row["device_utilization_ratio"] == 0.88
    assert row["memory_utilization_ratio"] is None
    assert row["link_rx_bytes"] == 7 * 1024
    assert row["memory_used_bytes"] is None


@needs_amdsmi
def test_bytes_over_pcie_come_from_the_rate_that_the_firmware_adds_up(play: Player) -> None:
    """GB/s summed over ticks: a reading that is not refreshed, one without a value, a reset."""
    ticks = (100, 100, 200, 200, 300, 400, 50, 150)
    sums = (7, 7, 2007, 2007, (1 << 64) - 1, 4007, 0, 500)
    lines = [ONE]
    for n, (tick, total) in enumerate(zip(ticks, sums, strict=True)):
        lines += [play.set(0, "accumulation_counter", tick, n)]
        lines += [play.set(0, "pcie_bandwidth_acc", total, n)]
    lines += [play.set(0, "pcie_nak_sent_count_acc", 3), play.set(0, "pcie_nak_rcvd_count_acc", 4)]
    lines += [play.set(0, "pcie_l0_to_recov_count_acc", 5)]
    lines += [play.set(0, "pcie_nak_sent_count_acc", 0xFFFFFFFF, 7)]
    found = read(play, lines, "CounterSource", *(n * 10**9 for n in range(7)))
    # Readings 1 to 7, a second apart: 20 GB/s over the second in which the ticks moved, 10 GB/s
    # over the three since then, nothing known around the reset, 5 GB/s after it.
    told = [0, 20, 20, None, 50 + 0, None, 55]
    assert [row["pcie_bytes"] for row in found] == [
        None if gigabytes is None else gigabytes * 10**9 for gigabytes in told
    ]
    assert [row["pcie_nak_count"] for row in found] == [7] * 6 + [None]
    assert found[0]["pcie_recovery_count"] == 5


@needs_amdsmi
def test_a_rate_that_no_link_carries_is_no_traffic(play: Player) -> None:
    lines = [ONE]
    for n, total in enumerate((0, 0, 10**12, 10**12 + 100)):
        lines += [play.set(0, "accumulation_counter", 10 * n, n)]
        lines += [play.set(0, "pcie_bandwidth_acc", total, n)]
    found = read(play, lines, "CounterSource", 0, 10**9, 2 * 10**9)
    assert [row["pcie_bytes"] for row in found] == [0, None, 10 * 10**9]


@needs_amdsmi
def test_a_link_that_does_not_answer_makes_no_smaller_sum(play: Player) -> None:
    blank = (1 << 64) - 1
    lines = [ONE, *(play.set(0, "xgmi_read_data_acc", 10, item=i) for i in range(3))]
    lines += [play.set(0, "xgmi_read_data_acc", blank, 2, item=1)]
    lines += [play.set(0, "xgmi_read_data_acc", 12, 3, item=1)]
    lines += [play.set(0, "xgmi_read_data_acc", 500, 3, item=7)]  # not among those of the start
    found = read(play, lines, "CounterSource", 1, 2, 3)
    assert [row["link_rx_bytes"] for row in found] == [30 * 1024, None, 32 * 1024]


@needs_amdsmi
@pytest.mark.parametrize(
    ("powers", "expected"),
    [
        (("current_socket_power", "average_socket_power"), "instant"),
        (("average_socket_power",), "average"),
        ((), None),
    ],
)
def test_what_power_is_stands_in_the_limits(
    play: Player, powers: tuple[str, ...], expected: str | None
) -> None:
    lines = [ONE, *(play.set(0, name, 500) for name in powers)]
    code = """
    limits = rows(opened(_sources.LimitSource()), 0)
    print(json.dumps([limits, list(opened(_sources.ClockSource()).calls())]))
    """
    (row,), (call,) = play(lines, code)
    assert row["power_basis"] == expected
    power = "" if expected is None else f" (power: {expected})"
    assert call == f"amdsmi_get_gpu_metrics_info{power}"


@needs_amdsmi
def test_devices_are_numbered_as_hip_does(play: Player) -> None:
    lines = ["gpu 0 1 GPU-b SPX", "gpu 1 0 GPU-a SPX"]
    lines += [play.set(0, "current_gfxclk", 1000), play.set(1, "current_gfxclk", 2000)]
    found = read(play, lines, "ClockSource", 0)
    assert [(r["device_id"], r["device_uuid"], r["sm_clock_hz"]) for r in found] == [
        (0, "GPU-a", 2_000_000_000),
        (1, "GPU-b", 1_000_000_000),
    ]


VISIBLE = """
ok, reason, _ = probed()
with_devices = []
if ok:
    with amd.session() as wrapper:
        with_devices = [d.uuid for d in amd.devices(wrapper)]
print(json.dumps([ok, reason, with_devices]))
"""


@needs_amdsmi
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["GPU-a"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["GPU-c"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-c,0"}, ["GPU-a", "GPU-c"]),
        ({"ROCR_VISIBLE_DEVICES": "2,9,0"}, ["GPU-c"]),
        ({"HIP_VISIBLE_DEVICES": "1", "LOCAL_WORLD_SIZE": "3"}, ["GPU-a", "GPU-b", "GPU-c"]),
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES is empty"),
        ({"ROCR_VISIBLE_DEVICES": "-1"}, "ROCR_VISIBLE_DEVICES=-1"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES=1"),
        ({"LOCAL_WORLD_SIZE": "-2"}, ["GPU-a", "GPU-b", "GPU-c"]),
    ],
)
def test_the_devices_that_hip_sees_are_read(
    play: Player, environment: dict[str, str], expected: list[str] | str
) -> None:
    lines = [f"gpu {i} {i} GPU-{name} SPX" for i, name in enumerate("abc")]
    ok, reason, uuids = play(lines, VISIBLE, **environment)
    if isinstance(expected, list):
        assert (ok, uuids) == (True, expected)
        assert (reason is None) == (environment.get("LOCAL_WORLD_SIZE") != "-2")
    else:
        assert (ok, reason) == (False, f"{expected}: HIP sees no device in this process")


@needs_amdsmi
def test_every_status_costs_what_it_should(play: Player) -> None:
    """On a device for each status, and on a last one that has none."""
    codes = [*sorted(ERRORS), None]
    lines = []
    for number, code in enumerate(codes):
        lines += [f"gpu {number} {number} GPU-{number} SPX"]
        lines += [play.set(number, "current_gfxclk", 2100)]
        if code is not None:
            signed = code - (1 << 32) if code >= 1 << 31 else code
            lines.append(f"fail {number} amdsmi_get_gpu_metrics_info {signed} 1 2")
    found, absent = play(
        lines, "s = opened(_sources.ClockSource()); print(json.dumps([rows(s, 1, 2), s.absent]))"
    )
    for number, code in enumerate(codes):
        clocks = [row["sm_clock_hz"] for row in found if row["device_id"] == number]
        kind, reason = ("none", "") if code is None else ERRORS.explain(code)
        if kind in ("none", "moment"):
            assert clocks == [2_100_000_000] * (2 if kind == "none" else 1), code
        else:
            assert clocks == [], code
            assert absent[f"device_clock[device {number}]"] == reason


@needs_amdsmi
def test_without_the_library_it_is_refused_in_one_line_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    code = """
    ok, reason, _ = probed()
    left = [n for n in sys.modules if n.partition(".")[0] == "amdsmi"]
    print(json.dumps([ok, reason, left]))
    """
    found = run_in(tmp_path, {}, code)
    assert found == [False, "AMD's library is not installed (libamd_smi.so)", []]


@needs_amdsmi
def test_a_library_that_lacks_symbols_is_refused_with_the_reason(
    amd_library: tuple[Path, dict[str, list[int]]], tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "old.c").write_text("int amdsmi_init(void) { return 0; }\n")
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "lib/libamd_smi.so", tmp_path / "old.c"],
        check=True,
    )
    code = """
    from chopper.errors import CollectorUnavailable
    try:
        amd.load()
    except CollectorUnavailable as exc:
        print(json.dumps([str(exc), [n for n in sys.modules if n.startswith("amdsmi")]]))
    """
    message, left = run_in(tmp_path, {}, code)
    assert message.startswith("amdsmi and libamd_smi.so do not fit together (AttributeError: ")
    assert left == []


@needs_amdsmi
def test_residencies_that_stand_still_or_step_back_tell_nothing(play: Player) -> None:
    """A reading that was not refreshed, an accumulator that was reset, ticks that are unknown."""
    lines = [ONE]
    for n, ticks in enumerate((100, 110, 110, 120, 130, (1 << 64) - 1, 140)):
        lines.append(play.set(0, "accumulation_counter", ticks, n))
        lines.append(play.set(0, "ppt_residency_acc", (0, 5, 5, 9, 2, 2, 3)[n], n))
    found = read(play, lines, "ClockSource", *range(1, 7))
    assert [row["event_reasons"] for row in found] == [0x4, None, 0x4, None, None, 0x4]


@needs_amdsmi
def test_a_binding_that_lacks_fields_leaves_their_columns_out(play: Player) -> None:
    """Metrics as older versions declare them, without dies, residencies and XGMI."""
    lines = [ONE, play.set(0, "current_gfxclk", 1500), play.set(0, "current_socket_power", 640)]
    code = """
    wrapper = amd.load()
    kept = [f for f in wrapper.amdsmi_gpu_metrics_t._fields_]
    lacking = ("current_gfxclks", "accumulation_counter", "xgmi_read_data_acc", "xgmi_link_status")
    renamed = [(f"other_{n}" if n in lacking else n, *rest) for n, *rest in kept]
    older = type("Older", (ctypes.Structure,), {"_pack_": 1, "_fields_": renamed})
    call = wrapper.amdsmi_get_gpu_metrics_info
    call.argtypes = [call.argtypes[0], ctypes.POINTER(older)]
    wrapper.amdsmi_gpu_metrics_t = older
    counters = opened(_sources.CounterSource())
    clocks = rows(opened(_sources.ClockSource()), 0)
    print(json.dumps([clocks, rows(counters, 0), counters.absent]))
    """
    (clock,), counters, absent = play(lines, code)
    assert (clock["sm_clock_hz"], clock["power_w"]) == (1_500_000_000, 640.0)
    assert clock["event_reasons"] is None
    assert counters[0]["link_rx_bytes"] is None
    assert absent["device_counter.link_rx_bytes"] == "not available on this device"


@needs_amdsmi
def test_dies_and_links_one_by_one(play: Player) -> None:
    lines = [
        ONE,
        play.set(0, "current_gfxclks", 2100, item=0),
        play.set(0, "current_gfxclks", 1900, item=3),
        play.set(0, "current_socclks", 1200, item=1),
        play.set(0, "xgmi_read_data_acc", 3, item=0),
        play.set(0, "xgmi_write_data_acc", 4, item=0),
        play.set(0, "xgmi_write_data_acc", 1 << 60, item=2),
        play.set(0, "xgmi_link_status", 1, item=0),
    ]
    code = "s = opened(_sources.PartSource()); print(json.dumps([rows(s, 0), s.absent]))"
    found, absent = play(lines, code)
    uuid = "GPU-e1e8b5c8c3a9f2d1"
    assert [list(row.values()) for row in found] == [
        [0, uuid, "gfx", 0, 2_100_000_000],
        [0, uuid, "gfx", 3, 1_900_000_000],
        [0, uuid, "soc", 1, 1_200_000_000],
        [0, uuid, 0, 4 * 1024, 3 * 1024, True],
        # More than any count can be is no count; no status is no status.
        [0, uuid, 2, None, None, None],
    ]
    assert absent == {}


@needs_amdsmi
def test_devices_that_tell_nothing_apart_are_refused(play: Player) -> None:
    code = """
    from chopper.errors import CollectorUnavailable
    try:
        _sources.PartSource().open()
    except CollectorUnavailable as exc:
        print(json.dumps(str(exc)))
    """
    assert play([ONE], code) == "no device reports its dies or links separately"


@needs_amdsmi
def test_partitions_are_listed_with_their_socket(play: Player) -> None:
    lines = ["gpu 0 0 GPU-a CPX", "gpu 1 1 GPU-b CPX"]
    first, second = read(play, lines, "PartitionSource", 0)
    assert (first["device_uuid"], second["device_uuid"]) == ("GPU-a", "GPU-b")
    assert first["compute_partition"] == "CPX"
    # This library does not answer for these: unknown, not zero.
    assert first["memory_partition"] is None
    assert first["partition_id"] is None
    assert first["pci_address"]


@needs_amdsmi
def test_partitions_say_whose_power_it_is(play: Player) -> None:
    ok, reason, _ = play([ONE.replace("SPX", "CPX")], "print(json.dumps(probed()))")
    assert ok
    assert "power, energy and temperature are those of the whole socket" in reason


@needs_amdsmi
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
            clocks = StreamTail(Path({str(out)!r}, "rank-00000", "device_clock.arrow"))
            with chopper.profile({str(out)!r}, trace=False, collect=("amdsmi",)) as prof:
                while not clocks.poll():
                    time.sleep(0.02)
                    prof.step()
            """
        )
    )
    lines = [ONE, play.set(0, "current_gfxclks", 2100, item=0)]
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, **play.environment(*lines)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    run = pipeline.read(out)
    report = next(c for c in run.part(0).collectors if c.name == "amdsmi")
    assert report.status == "obtained", report.reason
    assert set(run.table(0, "device_clock")["sm_clock_hz"].to_pylist()) == {2_100_000_000}
