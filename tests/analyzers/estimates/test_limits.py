"""The walls of training runs: the published table, its laws by hand, and a layout's step."""

from __future__ import annotations

import numpy as np
import pytest

from chopper.cli.estimates import limits
from chopper.cli.estimates.limits import DAY_S, SIZES_FLOP, Hardware, Options, at_size, estimate

PUBLISHED = (0.92, 0.85, 0.76, 0.65, 0.51, 0.18, 0.11, None)


def test_the_published_table_and_both_headlines() -> None:
    result = estimate(Options())
    found = [point.utilization_ratio for point in result.points]
    assert [ratio and round(ratio, 2) for ratio in found] == [*PUBLISHED]
    assert [point.flop for point in result.points] == [*SIZES_FLOP]
    assert result.points[-1].devices_count is None
    assert result.data_wall_flop == pytest.approx(2e28, rel=0.05)
    assert result.last_feasible_flop == pytest.approx(2.7e31, rel=0.02)
    # N = 7.776e6 s · 6e7 ÷ (20 · 120 · 400 µs) = 4.86e14; 120 N² = 2.834e31.
    assert result.latency_wall_flop == pytest.approx(2.834e31, rel=1e-3)


def test_the_layout_fits() -> None:
    point = at_size(2e28, Hardware(), 90 * DAY_S)
    pipeline = point.pipeline_parallel_count or 0
    devices = (point.data_parallel_count or 0) * (point.tensor_parallel_count or 0) * pipeline
    assert devices == pytest.approx(point.devices_count)
    assert 0 < pipeline <= limits.model_of(2e28).layers_count


def test_a_faster_network_moves_the_wall_out() -> None:
    sizes = (1e27, 1e28, 1e29, 1e30)
    links = {"network_bytes_per_s": 500e9, "node_link_bytes_per_s": 4500e9}
    slow = estimate(Options(flop=sizes)).data_wall_flop
    fast = estimate(Options(flop=sizes, hardware=links)).data_wall_flop
    assert slow is not None
    assert fast is None or fast > slow


def test_a_given_rate_replaces_the_devices() -> None:
    """An H200 has 989 TFLOP/s, 4.8 TB/s and 900 GB/s of links in both directions."""
    found = estimate(Options(flop=(1e27,), device="h200-sxm", hardware={"flop_per_s": 2e15}))
    rates = Hardware(
        flop_per_s=2e15, memory_bytes_per_s=4.8e12, node_link_bytes_per_s=450e9
    )  # and the default network
    assert found.hardware == rates


def test_the_laws_at_their_reference() -> None:
    """1.8e12 parameters: 3.6e13 tokens, 120 · 1.8e12² FLOP, 120 layers, batches of 6e7."""
    found = limits.model_of(3.888e26)
    assert found.parameters_count == pytest.approx(1.8e12)
    assert found.layers_count == pytest.approx(120)
    assert found.batch_tokens_count == pytest.approx(6e7)
    # √(1.8e12 ÷ (12 · 120))
    assert found.width == pytest.approx(35_355, rel=1e-4)
    # 8 times the parameters: twice the layers, twice the batch.
    larger = limits.model_of(64 * 3.888e26)
    assert larger.layers_count == pytest.approx(240)
    assert larger.batch_tokens_count == pytest.approx(1.2e8)


LAYOUT = limits.Model(parameters_count=1.0, layers_count=100.0, width=1e4, batch_tokens_count=1e6)
ROUND = Hardware(
    flop_per_s=1e15, memory_bytes_per_s=1e12, node_link_bytes_per_s=1e11, network_bytes_per_s=1e10
)


@pytest.mark.parametrize(
    ("tp", "compute", "memory", "tensor", "hop_us"),
    [
        # mℓ = 160, b = 12500, bh = 1.25e8: 160·72e8·12500 ÷ 1e15 = 14.4 s of compute, 160·(72e8 +
        # 3e10) ÷ 1e12 = 5.952 s of memory over tp.
        (1, 14.4, 5.952, 0.0, 0.0),
        # 160·16·1.25e8·3/4 ÷ 1e11
        (4, 3.6, 1.488, 2.4, 9.2),
        # 160·96·1.25e8 ÷ 8 · ½(1e−11 + 1e−10); 3 + 2(1.65 + 5·log₂(8/2.75))
        (64, 0.225, 0.093, 13.2, 21.706),
    ],
)
def test_a_layouts_step_by_hand(
    tp: int, compute: float, memory: float, tensor: float, hop_us: float
) -> None:
    """100 layers of 1e4 over 5 stages, 8 microbatches, 10 data parallel, 1e6 tokens."""
    step, parts = limits.step_times(LAYOUT, ROUND, np.array([[10.0], [tp], [5.0], [8.0]]))
    # 8·20·4·1.25e8 ÷ 1e10 between stages, 48·1e8·100 ÷ (5·1e10) of gradients, both over tp.
    network_s = tensor + (8.0 + 9.6) / tp
    latency = 160 * 8 * (4.5 + hop_us) * 1e-6
    assert parts[:, 0] == pytest.approx([compute, memory, network_s, latency], rel=1e-4)
    # The bubble: 4 of 160.
    assert step[0] == pytest.approx(max(compute, memory, network_s) * 1.025, rel=1e-4)


def test_a_step_is_no_shorter_than_its_layers() -> None:
    """8 · 100 · (4.5 + 9.2 µs), however the layers are cut: 24 of them would do otherwise."""
    thin = LAYOUT._replace(width=1.0, batch_tokens_count=10.0)
    step, _ = limits.step_times(thin, ROUND, np.array([[10.0], [4.0], [5.0], [1.0]]))
    assert step[0] == pytest.approx(0.01096)
