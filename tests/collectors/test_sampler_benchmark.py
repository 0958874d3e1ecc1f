"""What the benchmark of the sampler says of its measurements."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks/sampler.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_the_sampler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ([n / 1000 for n in range(-20, 20)], ("not told apart from none", "cannot be told")),
        ([0.001 + n / 1e6 for n in range(40)], ("adds 0.10% to 0.10%", "at most 0.5%")),
        ([0.02 + n / 1e6 for n in range(40)], ("adds 2.00%", "more than 0.5%")),
        ([0.02, 0.021, 0.019], ("not told apart from none", "cannot be told")),
    ],
)
def test_the_benchmark_says_what_its_pairs_cannot_tell(
    benchmark: Any, ratios: list[float], says: tuple[str, str]
) -> None:
    said = benchmark.verdict({"way": "chopper", **benchmark.added(ratios)})
    assert all(words in said for words in says), said


def test_the_median_of_pairs_lies_in_its_interval_as_often_as_is_said(benchmark: Any) -> None:
    """Of 12 ordered pairs the 3rd and the 10th: 1 − 2 · (1 + 12 + 66) / 4096 = 96 %."""
    found = benchmark.added([float(n) for n in range(1, 13)])
    assert found["added_interval_share"] == [3.0, 10.0]
    assert found["added_median_share"] == 6.5
