"""Ranks that a workload starts itself: what is said and left when one of them ends early."""

from __future__ import annotations

import contextlib

import psutil
import pytest

pytest.importorskip("torch")

from chopper.workloads.processes import run_ranks

RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {ending}
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended first, by SIGKILL"),
        ("sys.exit(3)", 3, "ended first, with exit code 3"),
        ("sys.exit(130)", 130, None),
    ],
)
def test_a_rank_that_ends_early_is_named_and_the_others_are_ended(
    tmp_path, monkeypatch, capsys, ending, code, said
):
    (tmp_path / "ranks_of_a_test.py").write_text(RANK.format(ending=ending))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        run_ranks("ranks_of_a_test", 2, linked=False)
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert error == "" if said is None else said in error and error.startswith("chopper: rank 1 (")
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one of another test, that ends just now
            assert "ranks_of_a_test" not in process.cmdline()


def test_ranks_that_all_end_well_are_waited_for(tmp_path, monkeypatch):
    (tmp_path / "ranks_of_a_test.py").write_text(
        "import os, pathlib\n"
        "def main():\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_ranks("ranks_of_a_test", 3, linked=False)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3", "3", "3"]
