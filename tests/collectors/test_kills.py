"""Killed trainers and samplers leave runs that can be read. By hand, 200 of them, and what is lost:

python tests/collectors/kills.py --count 200
"""

from __future__ import annotations

import pytest

from tests.collectors.kills import trial


@pytest.mark.slow
@pytest.mark.parametrize(("after_s", "flushed"), [(0.0, False), (0.4, False), (0.0, True)])
@pytest.mark.parametrize("victim", ["trainer", "sampler"])
def test_a_killed_run_can_be_read_and_says_so(victim: str, after_s: float, flushed: bool) -> None:
    found = trial(victim, after_s, flushed=flushed)
    assert found.finding
    assert found.rows >= found.rows_before >= flushed
