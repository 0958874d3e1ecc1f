"""Which code a Python that chopper starts may import, and which one its user's may."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from chopper.fresh_python import own_python
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("chopper", "collectors", "analyzers", "reports", "workloads")


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_every_python_that_chopper_starts_leaves_the_current_directory_out() -> None:
    unsafe = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in file.read_text().splitlines()
        if re.search(r"sys\.executable,(?! \"-P\")", line)
        and '"executable": sys.executable' not in line
        and "(sys.executable, *command)" not in line  # the user's program, as `python train.py`
    ]
    assert unsafe == []


def test_a_module_of_ours_is_run_as_by_m(hostile_directory: Path) -> None:
    done = run(own_python("chopper", "--version"), hostile_directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("chopper, version ")
    done = run(own_python("chopper", "doctor", "--json"), hostile_directory)
    assert done.returncode == 0, done.stderr


def test_what_is_installed_wins_when_python_itself_adds_the_directory(
    hostile_directory: Path,
) -> None:
    (hostile_directory / "chopper.py").unlink()
    done = run([sys.executable, "-m", "chopper", "doctor", "--json"], hostile_directory)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["main.py"], ["-m", "main"], ["-c", "import main"]])
def test_a_recorded_program_imports_as_without_chopper(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "helper.py").write_text("print('the one beside it')\n")
    (tmp_path / "main.py").write_text("import sys, helper; print(sys.flags.safe_path)\n")
    command = [sys.executable, *words]
    alone = run(command, tmp_path)
    assert alone.stdout == "the one beside it\nFalse\n"
    assert run(own_python("chopper", "record", "--", *command), tmp_path).stdout == alone.stdout
