"""The table of device peaks: arithmetic, sources, and a lookup that never guesses."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.errors import UsageError
from chopper.hardware.ceilings import ceilings_of
from chopper.hardware.devices import (
    DTYPES,
    DevicePeaks,
    Sourced,
    known_devices,
    lookup,
    named,
    why_unknown,
)
from chopper.storage.manifest import Device, RankManifest, RunManifest
from chopper.storage.run import Run

GIB = 2**30


def values(device: DevicePeaks) -> dict[str, Sourced]:
    """Every sourced value of a device by its path."""
    found: dict[str, Sourced] = {}
    for field in device.__struct_fields__:
        value = getattr(device, field)
        if isinstance(value, Sourced):
            found[field] = value
        elif isinstance(value, dict):
            found |= {f"{field}.{key}": item for key, item in value.items()}
    return found


by_device = pytest.mark.parametrize("device", known_devices(), ids=lambda d: d.id)


@by_device
def test_peak_is_units_times_rate_times_clock(device: DevicePeaks) -> None:
    compared = 0
    for dtype in DTYPES:
        peak = device.flop_per_s(dtype)
        clock = device.reference_clock_hz[dtype].value
        if peak is None or clock is None:
            continue
        at_clock = device.flop_per_s(dtype, clock_hz=clock)
        assert at_clock == pytest.approx(peak, rel=0.01), dtype
        compared += 1
    assert compared >= 4


@by_device
def test_every_value_has_a_source_and_every_gap_a_reason(device: DevicePeaks) -> None:
    found = values(device)
    assert set(device.peak_flop_per_s) == set(DTYPES)
    assert len(found.keys() - {"reported_memory_bytes"}) == 13 + 3 * len(DTYPES)
    for path, item in found.items():
        assert item.source.strip(), path
        if item.value is None:
            assert item.note, path
        else:
            assert item.value > 0, path


@by_device
def test_every_peak_rate_is_from_somewhere_that_can_be_looked_up(device: DevicePeaks) -> None:
    rates = [*device.peak_flop_per_s.values(), device.memory_bandwidth_bytes_per_s]
    known = [item.source for item in rates if item.value is not None]
    assert known
    assert not [s for s in known if "memory, arithmetic" in s or s == "from memory"]


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "AMD Instinct MI300X"])
def test_a_ceiling_names_the_sources_of_its_rates(name: str) -> None:
    peaks = lookup(name)
    assert peaks is not None
    part = RankManifest(rank=0, device_id=0, devices=[Device(device_id=0, name=name)])
    run = Run(RunManifest(kind="imported", name="made", ranks=[part]), None)
    ceiling = ceilings_of(run, part, part.devices[0], on_host=False).theoretical
    assert ceiling is not None
    rates = {item.source for item in peaks.peak_flop_per_s.values() if item.value is not None}
    assert any(source in ceiling.source for source in rates)
    assert peaks.memory_bandwidth_bytes_per_s.source in ceiling.source


@by_device
def test_a_type_has_all_of_rate_clock_and_peak_or_none(device: DevicePeaks) -> None:
    for dtype in DTYPES:
        known = {
            table[dtype].value is not None
            for table in (
                device.flop_per_clock_per_unit,
                device.reference_clock_hz,
                device.peak_flop_per_s,
            )
        }
        assert len(known) == 1, dtype


@by_device
def test_orders_of_magnitude(device: DevicePeaks) -> None:
    """Units slips (GB for GiB, TFLOP for FLOP, MHz for Hz) would show here."""
    assert 1e9 < device.memory_bytes.value < 1e12  # type: ignore[operator]
    assert 1e11 < device.memory_bandwidth_bytes_per_s.value < 1e13  # type: ignore[operator]
    assert device.l2_bytes.value is None or 1e6 < device.l2_bytes.value < 1e9
    reported = device.reported_memory_bytes
    assert reported is None or 0.9 < reported.value / device.memory_bytes.value < 0.95  # type: ignore[operator]
    assert device.pcie_generation.value in (3, 4, 5, 6)
    for clock in device.reference_clock_hz.values():
        assert clock.value is None or 1e9 < clock.value < 3e9
    for power in (device.board_power_w.value,):
        assert power is None or 50 < power < 2000
    # A narrower type is never slower in matrix products.
    for slow, fast in (("fp64", "fp16"), ("tf32", "fp16"), ("fp16", "fp8"), ("fp8", "fp4")):
        rates = device.flop_per_s(slow), device.flop_per_s(fast)
        assert None in rates or rates[0] <= rates[1]  # type: ignore[operator]


def test_ids_and_labels_are_unique() -> None:
    for field in ("id", "label"):
        names = [getattr(device, field) for device in known_devices()]
        assert len(names) == len(set(names))


# Peaks per (name, dtype) worked out from the vendors' public figures, not from the table.
QUOTED = {
    ("Tesla V100-SXM2-32GB", "fp64"): 7.8e12,
    ("NVIDIA A100-SXM4-80GB", "bf16"): 312e12,
    ("NVIDIA A100-SXM4-40GB", "tf32"): 156e12,
    ("NVIDIA H100 80GB HBM3", "bf16"): 989.4e12,
    ("NVIDIA H100 80GB HBM3", "fp8"): 1979e12,
    ("NVIDIA H100 80GB HBM3", "fp64"): 66.9e12,
    ("NVIDIA H100 80GB HBM3", "fp64_vector"): 33.5e12,
    ("NVIDIA H100 PCIe", "bf16"): 756.5e12,
    ("NVIDIA H200", "bf16"): 989.4e12,
    ("NVIDIA B200", "fp4"): 9000e12,
    ("NVIDIA GB200", "fp8"): 5000e12,
    ("NVIDIA L40S", "bf16"): 366.4e12,
    ("NVIDIA GeForce RTX 4090", "bf16"): 165.2e12,
    ("NVIDIA A10G", "bf16"): 70e12,
    ("NVIDIA H800", "fp64"): 1e12,
    ("NVIDIA H20", "bf16"): 148e12,
    ("NVIDIA A30", "bf16"): 165e12,
    ("NVIDIA RTX A4500", "bf16"): 189.2e12 / 2,  # the datasheet's tensor figure counts sparsity
    ("NVIDIA RTX 6000 Ada Generation", "fp8"): 1457e12 / 2,
    ("NVIDIA GeForce RTX 5080", "fp4"): 1801e12 / 2,  # "1801 AI TOPS" count sparsity
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "fp4"): 4030e12 / 2,
    ("Quadro RTX 8000", "fp16"): 130.5e12,
    ("AMD Radeon RX 9070 XT", "fp8"): 389e12,
    ("AMD Instinct MI250X", "bf16"): 383e12 / 2,
    ("AMD Instinct MI300X", "bf16"): 1307.4e12,
    ("AMD Instinct MI300X", "tf32"): 653.7e12,
    ("AMD Instinct MI325X", "fp8"): 2614.9e12,
    ("AMD Instinct MI355X", "fp4"): 10066e12,
}


@pytest.mark.parametrize(("name", "dtype"), QUOTED)
def test_quoted_peaks(name: str, dtype: str) -> None:
    device = lookup(name)
    assert device is not None
    assert device.flop_per_s(dtype) == pytest.approx(QUOTED[name, dtype], rel=0.005)


def test_the_peak_moves_with_the_clock() -> None:
    device = lookup("NVIDIA H100 80GB HBM3")
    assert device is not None
    # 132 SMs x 4096 FLOP/clk: at the maximum boost of 1980 MHz more than the quoted 989.4e12.
    assert device.flop_per_s("bf16", clock_hz=1.98e9) == 132 * 4096 * 1.98e9
    assert device.flop_per_s("fp4") is None
    assert device.flop_per_s("fp4", clock_hz=1e9) is None
    assert device.flop_per_s("no such type") is None
    assert device.flop_per_s("no such type", clock_hz=1e9) is None


def test_volta_has_no_bf16_and_says_why() -> None:
    device = lookup("Tesla V100-SXM2-32GB")
    assert device is not None
    assert device.flop_per_s("bf16") is None
    assert "fp16" in (device.peak_flop_per_s["bf16"].note or "")
    assert "fp16" in (device.source("bf16") or "")


# As the traces and drivers spell them: name, count, memory as reported -> id.
REPORTED = [
    ("AMD Instinct MI350X", 256, 309220868096, "amd-mi350x"),
    ("AMD Instinct MI300X", 304, 206141652992, "amd-mi300x"),
    ("AMD Instinct MI210", 104, 68702699520, "amd-mi210"),
    ("NVIDIA A100-PG509-200", 108, 42297524224, "nvidia-a100-pg509-200"),
    ("Quadro GP100", 56, 17069309952, "nvidia-quadro-gp100"),
    ("Tesla V100-SXM2-32GB", 80, 34089730048, "nvidia-v100-sxm2-32gb"),
    ("Tesla V100-DGXS-32GB", 80, 34084028416, "nvidia-v100-dgxs-32gb"),
    ("NVIDIA GeForce RTX 2080 Ti", 68, 11554586624, "nvidia-rtx-2080-ti"),
    ("NVIDIA H100 80GB HBM3", 132, 85045477376, "nvidia-h100-sxm"),
    ("NVIDIA B300 SXM6 AC", 148, 287431131136, "nvidia-b300"),
    ("AMD Instinct MI250X / MI250", 104, None, "amd-mi250"),
    ("AMD Instinct MI250X / MI250", 110, None, "amd-mi250x"),
    ("A100-SXM4", None, 42 * 10**9, "nvidia-a100-sxm4-40gb"),
    ("Tesla V100-SXM2", None, 16 * GIB, "nvidia-v100-sxm2-16gb"),
    ("NVIDIA GH200 480GB", 132, 96 * GIB, "nvidia-gh200-96gb"),
    ("  nvidia  h200 ", None, None, "nvidia-h200-sxm"),
    # Boards that keep ECC in their own memory: the driver reports up to 9 % less than the label.
    ("Tesla T4", 40, 15637086208, "nvidia-t4"),
    ("NVIDIA L40S", 142, 45589 * 2**20, "nvidia-l40s"),
    ("NVIDIA A10G", 80, 22587 * 2**20, "nvidia-a10g"),
    ("NVIDIA H20", 78, 97285 * 2**20, "nvidia-h20"),
    ("NVIDIA GB300", 152, 284208 * 2**20, "nvidia-gb300"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        188,
        97250 * 2**20,
        "nvidia-rtx-pro-6000-server",
    ),
    ("NVIDIA GeForce RTX 5090", 170, 33677180928, "nvidia-rtx-5090"),
    ("NVIDIA GeForce RTX 3060", 28, 12044 * 2**20, "nvidia-rtx-3060"),
    ("NVIDIA GeForce RTX 4060 Ti", 34, 16 * GIB, "nvidia-rtx-4060-ti-16gb"),
]


@pytest.mark.parametrize(("name", "count", "memory", "want"), REPORTED)
def test_names_as_drivers_report_them(
    name: str, count: int | None, memory: int | None, want: str
) -> None:
    device = lookup(name, multi_processor_count=count, memory_bytes=memory)
    assert device is not None
    assert device.id == want


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ARTEMIS",
        "AMD Radeon Graphics",
        "NVIDIA H100",
        "NVIDIA H100 Foo",
        "NVIDIA A1000",
        "NVIDIA RTX A1000",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA GeForce RTX 4060 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300",
        "AMD Instinct MI250X Foo",
        "xNVIDIA B200",
        "NVIDIA B200\nNVIDIA B300",
        "A100-SXM4",
        "AMD Instinct MI250X / MI250",
        "NVIDIA GH200 480GB",
        ".*",
    ],
)
def test_unknown_and_ambiguous_names_are_nothing(name: str) -> None:
    assert lookup(name) is None


@pytest.mark.parametrize(
    ("name", "count", "memory"),
    [
        ("AMD Instinct MI300X", 38, None),  # one partition of eight (CPX)
        ("NVIDIA A100-SXM4-40GB", 124, None),  # another product on the same chip
        ("NVIDIA A100-SXM4-40GB", None, 80 * GIB),
        ("NVIDIA H100 80GB HBM3", None, 10 * GIB),  # a MIG slice
        ("AMD Instinct MI250X", 104, None),
    ],
)
def test_a_known_name_with_other_hardware_is_nothing(
    name: str, count: int | None, memory: int | None
) -> None:
    assert lookup(name, multi_processor_count=count, memory_bytes=memory) is None


@given(st.sampled_from(known_devices()), st.text(string.ascii_letters + string.digits, min_size=1))
def test_a_longer_name_is_another_device(device: DevicePeaks, more: str) -> None:
    spelled = re.sub(r"\(([^()]*)\)\?", r"\1", device.names[0])
    if not re.fullmatch(r"[A-Za-z0-9 -]+", spelled):
        return
    found = lookup(f"{spelled} x{more}")
    assert found is None


@given(st.text())
def test_lookup_takes_any_text(name: str) -> None:
    found = lookup(name)
    assert found is None or any(c.isdigit() for c in name)


@pytest.mark.parametrize(
    ("name", "devices", "least"),
    [
        ("NVIDIA H100 80GB HBM3", 8, 2),  # NVSwitch
        ("NVIDIA H100 80GB HBM3", 4, 4),  # HGX with four: a mesh
        ("Tesla V100-SXM2-16GB", 8, 8),
        ("AMD Instinct MI300X", 8, 8),  # xGMI mesh: two of eight share one link of seven
        ("NVIDIA GeForce RTX 3090", 2, 2),  # an NVLink bridge
        ("NVIDIA GeForce RTX 3090", 4, None),
        ("NVIDIA H100 NVL", 8, None),
    ],
)
def test_groups_that_have_all_links(name: str, devices: int, least: int | None) -> None:
    found = lookup(name)
    assert found is not None
    assert found.least_group_count(devices) == least


@pytest.mark.parametrize(
    ("name", "units", "memory", "reason"),
    [
        ("Tomorrow 1", 8, None, "is not in the table of peaks"),
        (
            "AMD Instinct MI300X",
            38,
            None,
            "reports 38 units and the table of peaks has it with 304",
        ),
        ("NVIDIA H100 80GB HBM3", 132, 20 * 10**9, "reports 20 GB of memory"),
        ("NVIDIA A100-SXM4", None, None, "is several products in the table of peaks"),
    ],
)
def test_what_keeps_a_device_from_having_peaks_is_said(
    name: str, units: int | None, memory: int | None, reason: str
) -> None:
    assert lookup(name, multi_processor_count=units, memory_bytes=memory) is None
    told = why_unknown(name, multi_processor_count=units, memory_bytes=memory)
    assert f"device {name!r} {reason}" in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100", "h100-sxm"),
        ("H100 SXM5", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("h100_nvl", "h100-nvl"),
        ("mi300", "mi300x"),
        ("Instinct MI300A", "mi300a"),
        ("4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("GeForce RTX 2080Ti", "rtx-2080-ti"),
        ("a100", "a100-sxm4-80gb"),
        ("A100 40GB", "a100-sxm4-40gb"),
        ("l40", "l40"),
        ("Tesla V100", "v100-sxm2-32gb"),
        ("4070", "rtx-4070"),
        ("RTX 4070 SUPER", "rtx-4070-super"),
        ("4080super", "rtx-4080-super"),
        ("rtx pro 6000", "rtx-pro-6000"),
        ("7900xtx", "rx-7900-xtx"),
        ("9070", "rx-9070"),
    ],
)
def test_a_person_names_a_device_as_usual(text: str, expected: str) -> None:
    assert named(text).id.partition("-")[2] == expected


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("a100 pcie", "choose a100-pcie-40gb or a100-pcie-80gb"),
        ("gh200", "choose gh200-144gb or gh200-96gb"),
        ("rtx", "there are NVIDIA"),
        ("3080", "choose rtx-3080-10gb or rtx-3080-12gb"),
        ("titan", "choose titan-rtx or titan-v"),
        ("nvidia", "there are NVIDIA"),
        ("h1000", "did you mean h100-sxm"),
        ("100", "did you mean mi100 or "),
        ("4090ti", r"did you mean rtx-4090"),
        *((name, "there are NVIDIA quadro-…, p100, ") for name in ("6090", "9170xt", "b100", "4")),
    ],
)
def test_a_name_of_several_devices_is_refused_with_the_choices(text: str, choices: str) -> None:
    with pytest.raises(UsageError, match=choices):
        named(text)


def test_usable_memory_is_no_more_than_cuda_reports() -> None:
    board, server = lookup("Tesla T4"), lookup("NVIDIA H100 80GB HBM3")
    assert board is not None
    assert server is not None
    assert board.usable_bytes == 15637086208  # 95 % of 16 GiB would be 16.3e9
    assert server.usable_bytes == int(0.95 * 80 * GIB)
