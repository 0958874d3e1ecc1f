"""Processes that share symmetric memory, for the tests of what runs on it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

from tests.workloads.forked import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if sys.platform != "linux":
        pytest.skip("ranks on CPUs share memory by Linux's memfd")
    with Ranks() as server:
        yield server
