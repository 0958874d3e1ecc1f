from __future__ import annotations

import subprocess

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


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here ({mounted.stderr.strip()})")
    yield disk
    subprocess.run(["umount", disk], check=True)
