"""A command is started as a shell would start it, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from chopper.experiments import launch

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
LEAVES = """
import pathlib, subprocess, sys
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(left.pid))
"""


def test_what_the_command_left_is_ended_and_what_ran_before_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    resource_tracker.ensure_running()
    note = tmp_path / "left"
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as before:
        assert before.stdout is not None
        before.stdout.readline()
        try:
            command = [sys.executable, "-c", LEAVES, str(note)]
            assert launch.launch(command, env=os.environ) == 0
            assert before.poll() is None
            assert not psutil.pid_exists(int(note.read_text()))
            resource_tracker.ensure_running()  # which warns where it was ended
        finally:
            before.kill()
