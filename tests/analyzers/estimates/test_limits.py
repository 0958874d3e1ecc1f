from __future__ import annotations

import math

import pytest

from chopper.analyzers.estimates.limits import (
    DAY_S,
    PUBLISHED,
    Hardware,
    Laws,
    at_size,
    latency_wall_flop,
    limits,
    shape_of,
)
from chopper.errors import UsageError


@pytest.mark.parametrize(("flop", "utilization"), PUBLISHED.items())
def test_the_published_table_is_reproduced(flop: float, utilization: float | None) -> None:
    point = at_size(flop)
    if utilization is None:
        assert not point.feasible
        assert point.devices_count is None
    else:
        assert point.utilization_ratio is not None
        assert round(point.utilization_ratio, 2) == utilization


def test_both_headlines() -> None:
    found = limits()
    assert found.data_wall_flop == pytest.approx(2e28, rel=0.05)
    assert found.latency_wall_flop == pytest.approx(2.8e31, rel=0.02)


def test_the_latency_wall_fills_the_time() -> None:
    wall = shape_of(latency_wall_flop())
    # (D / B) steps of L layers of 400 µs are 90 days.
    assert wall.steps_count * wall.layers_count * 400e-6 == pytest.approx(90 * DAY_S)


@pytest.mark.parametrize(("batch", "layers"), [(0.2, 0.5), (1 / 3, 1 / 3), (0.6, 0.1)])
def test_the_latency_wall_follows_the_laws(batch: float, layers: float) -> None:
    laws = Laws(batch_exponent=batch, layers_exponent=layers)
    wall = shape_of(latency_wall_flop(laws=laws), laws)
    assert wall.steps_count * wall.layers_count * 400e-6 == pytest.approx(90 * DAY_S)


def test_a_shape_spends_its_budget() -> None:
    shape = shape_of(1e28)
    assert 6 * shape.parameters_count * shape.tokens_count == pytest.approx(1e28)
    assert 12 * shape.width**2 * shape.layers_count == pytest.approx(shape.parameters_count)


def test_the_layout_fits_and_finishes() -> None:
    point = at_size(2e28)
    assert point.devices_count is not None
    assert point.time_s is not None
    assert point.time_s <= 90 * DAY_S
    assert point.data_parallel_count is not None
    assert point.tensor_parallel_count is not None
    assert point.pipeline_parallel_count is not None
    product = (
        point.data_parallel_count * point.tensor_parallel_count * point.pipeline_parallel_count
    )
    assert product == pytest.approx(point.devices_count)
    assert point.pipeline_parallel_count <= point.shape.layers_count


def test_a_finer_search_needs_no_more_devices() -> None:
    coarse, fine = at_size(1e28), at_size(1e28, devices_step_ratio=1.005)
    assert coarse.devices_count is not None
    assert fine.devices_count is not None
    assert fine.devices_count <= coarse.devices_count * 1.005


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


def test_laws_without_a_wall_are_refused() -> None:
    with pytest.raises(UsageError, match="above zero"):
        latency_wall_flop(laws=Laws(layers_exponent=0.1, batch_exponent=1.5))
