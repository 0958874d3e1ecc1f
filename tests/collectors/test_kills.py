"""Killed trainers and samplers leave runs that can be read. By hand, 200 of them, and what is lost:

python tests/collectors/kills.py --count 200
"""

from __future__ import annotations

import pytest

from tests.collectors.kills import trial


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.4, 1.3])
@pytest.mark.parametrize("victim", ["trainer", "sampler"])
def test_a_killed_run_can_be_read_and_says_so(victim: str, after_s: float) -> None:
    found = trial(victim, after_s)
    assert found.finding
    # The first flush comes a second after the start.
    assert found.rows > 0 or after_s < 1.0
