"""Three of the clients that ``make clients`` records; no busy machine can fail what is held here."""

from __future__ import annotations

import pytest

from tests.clients.expected import CLIENTS
from tests.clients.runner import judge

pytestmark = pytest.mark.slow

FAST = ("accelerate_loop.py", "lightning_trainer.py", "joblib_sweep.py")
NOT_OF_A_BUSY_MACHINE = ("steps", "phases", "losses", "exit")


@pytest.mark.parametrize(
    "client", [c for c in CLIENTS if c.program in FAST], ids=lambda client: client.program
)
def test_recording_agrees_with_a_witness_inside(client, tmp_path):
    pytest.importorskip(client.library)
    verdict = judge(client, tmp_path)
    wrong = {c: verdict.failures[c] for c in NOT_OF_A_BUSY_MACHINE if c in verdict.failures}
    assert wrong == {}, verdict.cells
