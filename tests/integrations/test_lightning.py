"""What happens where two callbacks of Lightning are used at once, and where a training fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chopper.storage.run import Run
from tests.integrations.test_examples import EXAMPLES, of_ranks
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.long]
CALLBACK = "            ChopperCallback(output),  # chopper\n"


def run(directory: Path, *edits: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the example of Lightning, changed; its run is ``run``."""
    source = (EXAMPLES / "train_lightning.py").read_text()
    for before, after in edits:
        assert source.count(before) == 1
        source = source.replace(before, after)
    program = directory / "program.py"
    program.write_text(source)
    return subprocess.run(
        [sys.executable, program, "run"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_two_at_once_are_one_line_and_one_run(tmp_path):
    done = run(tmp_path, (CALLBACK, f'{CALLBACK}            ChopperCallback("other"),\n'))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "not recorded" in line]
    assert "the integration of lightning is recording already; use one of the two" in line
    assert not (tmp_path / "other").exists()
    assert len(of_ranks(tmp_path / "run", "step")[0]) == 20


def test_a_training_that_fails_ends_its_run(tmp_path):
    first = "        inputs, targets = batch\n        return"
    failing = first.replace("return", "assert index < 9, 'of the program'\n        return")
    done = run(tmp_path, (first, failing))
    assert done.returncode == 1
    assert "AssertionError: of the program" in done.stderr
    part = Run.open(tmp_path / "run").part(0)
    assert (part.status, part.error) == ("failed", "AssertionError: of the program")
    assert part.steps_count == 4
