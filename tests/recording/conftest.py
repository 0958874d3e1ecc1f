from __future__ import annotations

import pytest

from chopper.recording import session
from tests.recording.make import Task


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CHOPPER_OUTPUT", "CHOPPER_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    assert session.active() is None


@pytest.fixture
def task():
    return Task()
