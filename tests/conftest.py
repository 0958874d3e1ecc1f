from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def find_traces_dir() -> Path | None:
    """The optional catalogue of real traces: CHOPPER_TRACES, or a sibling folder of the clone."""
    named = os.environ.get("CHOPPER_TRACES")
    for candidate in ([Path(named)] if named else []) + [ROOT.parent / "shared" / "traces"]:
        if candidate.is_dir():
            return candidate
    return None


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    found = find_traces_dir()
    if found is None:
        pytest.skip("real traces not present: set CHOPPER_TRACES to a directory that holds them")
    return found
