"""Some of the clients that ``make clients`` records; no busy machine can fail what is held here."""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.clients.expected import CLIENTS
from tests.clients.runner import judge

pytestmark = pytest.mark.slow

ALWAYS = ("gan.py",)
WITH_THE_LONG_ONES = (
    *("lightning_trainer.py", "accelerate_loop.py", "ignite_engine.py", "joblib_sweep.py"),
    "loader_slow_workers.py",
)
NOT_OF_A_BUSY_MACHINE = ("steps", "phases", "losses", "exit", "verdict")


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(
            client,
            id=client.program,
            marks=() if client.program in ALWAYS else pytest.mark.long,
        )
        for client in CLIENTS
        if client.program in ALWAYS + WITH_THE_LONG_ONES
    ],
)
def test_recording_agrees_with_a_witness_inside(client, tmp_path):
    if client.library and not any(metadata.distributions(name=client.library)):
        pytest.skip(f"{client.library} is not installed")
    verdict = judge(client, tmp_path)
    wrong = {c: verdict.failures[c] for c in NOT_OF_A_BUSY_MACHINE if c in verdict.failures}
    assert wrong == {}, verdict.cells
