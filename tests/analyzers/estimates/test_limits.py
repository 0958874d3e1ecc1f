from __future__ import annotations

import math

import pytest

from chopper.cli.estimates.limits import DAY_S, PUBLISHED, Hardware, at_size, limits, model_of
from chopper.errors import UsageError


@pytest.mark.parametrize(("flop", "utilization"), PUBLISHED.items())
def test_the_published_table_is_reproduced(flop: float, utilization: float | None) -> None:
    point = at_size(flop)
    if utilization is None:
        assert point.utilization_ratio is None
        assert point.devices_count is None
    else:
        assert point.utilization_ratio is not None
        assert round(point.utilization_ratio, 2) == utilization


def test_both_headlines() -> None:
    result = limits()
    assert result.data_wall_flop == pytest.approx(2e28, rel=0.05)
    assert result.latency_wall_flop == pytest.approx(2.8e31, rel=0.02)
    assert result.last_feasible_flop == pytest.approx(2.7e31, rel=0.02)


def test_the_latency_wall_fills_the_time() -> None:
    wall = model_of(limits((1e28,)).latency_wall_flop)
    steps = 20 * wall.parameters_count / wall.batch_tokens_count
    # (D / B) steps of L layers of 400 µs are 90 days.
    assert steps * wall.layers_count * 400e-6 == pytest.approx(90 * DAY_S)


def test_the_layout_fits() -> None:
    point = at_size(2e28)
    assert point.data_parallel_count is not None
    assert point.tensor_parallel_count is not None
    assert point.pipeline_parallel_count is not None
    product = (
        point.data_parallel_count * point.tensor_parallel_count * point.pipeline_parallel_count
    )
    assert product == pytest.approx(point.devices_count)
    assert point.pipeline_parallel_count <= model_of(2e28).layers_count


def test_a_faster_network_moves_the_wall_out() -> None:
    sizes = (1e27, 1e28, 1e29, 1e30)
    slow = limits(sizes).data_wall_flop
    fast = limits(
        sizes, hardware=Hardware(network_bytes_per_s=500e9, node_link_bytes_per_s=4500e9)
    ).data_wall_flop
    assert slow is not None
    assert fast is None or fast > slow


@pytest.mark.parametrize("flop", [0.0, -1e28, math.nan, math.inf, 1e41])
def test_impossible_budgets_are_refused(flop: float) -> None:
    with pytest.raises(UsageError, match="FLOP of the run"):
        at_size(flop)
