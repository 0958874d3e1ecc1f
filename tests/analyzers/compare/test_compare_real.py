"""Comparisons of real traces: two devices, two cycles, sets of ranks, before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

import chopper
from tests.golden.own import OWN

_T = "tracelens"
_PAIRS = [
    (f"{_T}/h100-qwen1.5-0.5b-inference.json.gz", f"{_T}/mi300x-qwen1.5-0.5b-inference.json.gz"),
    (f"{_T}/h100-bert-small-inference.json.gz", f"{_T}/mi300x-bert-small-inference.json.gz"),
    (
        "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz",
        "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-b.json.gz",
    ),
    (
        "kineto/v100-resnet50-dataloader0-2021.json.gz",
        "kineto/v100-resnet50-dataloader4-2021.json.gz",
    ),
    ("hta/v100-recsys-rank1of2.json.gz", "hta/a100-recsys-rank3of8.json.gz"),
    ("param/v100-dlrm-8ranks", "param/v100-dlrm-8ranks"),
]


def _compare(traces_dir: Path, a: str, b: str) -> chopper.Comparison:
    for path in (a, b):
        if not (traces_dir / path).exists():
            pytest.skip(f"{path} is not in the catalogue")
    return chopper.compare(traces_dir / a, traces_dir / b)


def check_closure(found: chopper.Comparison) -> None:
    assert found.step.a_ns > 0
    assert sum(c.difference_ns for c in found.leaves()) == found.step.difference_ns
    assert sum(c.b_ns for c in found.leaves()) == found.step.b_ns
    for item in (*found.kernels, *found.operations):
        assert item.by_count_ns + item.by_duration_ns == item.difference_ns


@pytest.mark.parametrize(
    ("a", "b"), [("model-cuda", "model-rocm"), ("dvfs_random", "dvfs_zeros"), ("fsdp2", "loading")]
)
def test_the_difference_of_our_recordings_is_closed(a, b) -> None:
    check_closure(chopper.compare(OWN / a, OWN / b))


@pytest.mark.parametrize(("a", "b"), _PAIRS)
def test_the_difference_is_closed(traces_dir, a, b) -> None:
    check_closure(_compare(traces_dir, a, b))


@pytest.mark.parametrize(("a", "b"), _PAIRS[:2])
def test_the_same_model_on_two_devices_does_the_same_math(traces_dir, a, b) -> None:
    checks = {c.id: c for c in _compare(traces_dir, a, b).checks}
    assert checks["flop"].status == "pass"
    assert checks["dtype"].status == "pass"
    assert checks["device"].status == "differs"


def test_the_data_loader_is_found(traces_dir) -> None:
    found = _compare(traces_dir, *_PAIRS[3])
    assert "faster" in found.verdict
    assert "because data stall fell by 58" in found.verdict


def test_other_models_get_no_verdict(traces_dir) -> None:
    found = _compare(traces_dir, _PAIRS[0][0], _PAIRS[1][0])
    assert {c.id for c in found.refused} == {"flop", "tokens"}


def test_a_run_equals_itself() -> None:
    found = chopper.compare(OWN / "fsdp2", OWN / "fsdp2")
    assert found.a.ranks == 2
    assert found.step.difference_ns == 0
    assert all(not c.difference_ns for c in found.changes)
    statuses = {c.status for c in found.checks}
    assert "differs" not in statuses
