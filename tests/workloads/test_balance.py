"""The sizes of overlap: products and transfers that balance, in kernels that outlast a launch."""

from __future__ import annotations

import math
from functools import partial

import pytest

from chopper.hardware import calibration
from chopper.hardware.devices import lookup
from chopper.workloads.balance import SHORTEST_S, Rates, balanced, needed_bytes, rates_of
from chopper.workloads.overlap import ON_CPU, SHARDS

H100, MI300X, L40S = "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X", "NVIDIA L40S"


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch):
    monkeypatch.setattr(calibration, "load", lambda _name: None)


@pytest.mark.parametrize(
    ("device", "ranks", "devices", "dtype", "memory_gb", "tflop_per_s", "link_gb_per_s"),
    [
        # 989 TFLOP/s, of which 80.3 % are reached; NVLink 900 GB/s both ways, behind a switch.
        (H100, 8, 8, "bfloat16", 80, 794, 450),
        (H100, 2, 8, "bfloat16", 80, 794, 450),
        (H100, 8, 8, "float32", 80, 53.8, 450),
        # One GPU: PCIe 5.0 from pinned memory, as measured.
        (H100, 1, 1, "bfloat16", 80, 794, 55),
        # 1307 TFLOP/s, of which 51.1 %; seven links of 64 GB/s, of which two ranks share one.
        (MI300X, 8, 8, "bfloat16", 192, 668, 448),
        (MI300X, 2, 8, "bfloat16", 192, 668, 64),
        # No links of its own: PCIe 4.0.
        (L40S, 2, 2, "bfloat16", 48, 290, 27),
    ],
)
def test_on_each_device_both_operations_balance_and_launches_do_not_decide(
    device, ranks, devices, dtype, memory_gb, tflop_per_s, link_gb_per_s
):
    rates = rates_of(device, lookup(device), ranks=ranks, devices_count=devices, dtype=dtype)
    assert rates is not None
    assert rates.flop_per_s / 1e12 == pytest.approx(tflop_per_s, rel=0.02)
    assert rates.link_bytes_per_s / 1e9 == pytest.approx(link_gb_per_s, rel=0.05)
    parts, size = (ranks if ranks > 1 else SHARDS), {"float32": 4, "bfloat16": 2}[dtype]
    sizes, [why] = balanced(
        rates,
        parts=parts,
        chunks=8,
        element_bytes=size,
        memory_bytes=memory_gb * 10**9,
        scatters=ranks > 1,
    )
    m, k, n = sizes
    assert m % (parts * 8) == k % parts == 0
    assert needed_bytes(sizes, parts=parts, element_bytes=size) < 0.75 * memory_gb * 10**9
    assert f"--m {m} --k {k} --n {n}: product and transfer take equally long" in why
    sent, rate, link = (parts - 1) / parts * m * size, rates.flop_per_s, rates.link_bytes_per_s
    operations = [(2 * m * k * n / rate, sent * k / link)]
    inner = k
    if ranks > 1:
        inner = k // parts
        operations.append((2 * m * inner * n / rate, sent * n / link))
    for product_s, transfer_s in operations:
        assert abs(math.log(product_s / transfer_s)) < math.log(1.3)
    # A launch takes some 5 µs; where the memory is too small for more, the choice says so.
    smallest_s = 2 * (m // parts // 8) * inner * n / rate
    assert smallest_s > 28e-6
    assert smallest_s < 1.3 * SHORTEST_S


def test_the_sizes_of_a_cpu_follow_the_same_law():
    # 130 GFLOP/s a core, 1 Gbit/s: n = 130e9 · 4 · 1/2 ÷ (2 · 125e6) = 1040, k = 2·n.
    sizes, _ = balanced(
        Rates(130e9, 125e6, "test"), parts=2, chunks=8, element_bytes=4, memory_bytes=10**10
    )
    assert (sizes.k, sizes.n) == (ON_CPU.k, ON_CPU.n) == (2048, 1024)


def test_a_calibration_of_this_machine_comes_before_the_table(monkeypatch):
    class Calibrated:
        source, link_ranks, link_bytes_per_s = "measured here", 8, 300e9

        def flop_per_s(self, dtype):
            return {"bfloat16": 600e12}.get(dtype)

    monkeypatch.setattr(calibration, "load", lambda _name: Calibrated())
    of = partial(rates_of, devices_count=8, dtype="bfloat16")
    assert of(H100, lookup(H100), ranks=8) == (600e12, 300e9, "measured here")
    # Another number of ranks has another link.
    two = of(H100, lookup(H100), ranks=2)
    assert two is not None
    assert (two.flop_per_s, two.link_bytes_per_s) == (600e12, 450e9)
    assert of("some card", None, ranks=2) is None
    assert of("some card", None, ranks=8) == (600e12, 300e9, "measured here")


def test_a_small_memory_takes_fewer_rows():
    rates = Rates(794e12, 450e9, "test")
    sizes = [
        balanced(rates, parts=8, chunks=8, element_bytes=2, memory_bytes=gb * 10**9)[0]
        for gb in (20, 1000)
    ]
    assert sizes[0].m < sizes[1].m
    assert sizes[0][1:] == sizes[1][1:] == (12288, 1536)
