"""The training that `make demo` records, with its faults and with the action taken."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.reports import comparison as comparison_report
from tests import command

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_the_action_that_the_report_suggests_removes_what_it_says(tmp_path: Path) -> None:
    runs: list[Attribution] = []
    printed: list[list[str]] = []
    for options in ((), ("--fixed",)):
        run = tmp_path / f"run{len(runs)}"
        done = command.process(
            *("record", "-o", run, "--", *TORCHRUN, ROOT / "examples" / "demo.py", *options),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.code == 0, done.err
        runs.append(pipeline.attribute(run))
        printed.append(re.findall(r"step +\d+ +mean loss \d\.\d+", done.out))
    assert len(printed[0]) == 3
    assert printed[0] == printed[1], "taking the action changes what is learned"
    document: Any = comparison_report.to_json(chopper.compare(*runs), None)
    assert "data_loading" in [p["detector"] for p in document["predictions"]]
    (stall,) = (c for c in document["causes"] if c["id"] == "idle.preparation.data")
    assert stall["b_ns"] < 0.05 * stall["a_ns"]
    assert stall["told"]
