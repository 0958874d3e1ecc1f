"""Values that no axis can span are holes in the page's curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bad_input.make import GOOD, write
from tests.command import run


@pytest.mark.parametrize("value", [1e308, -1e308])
def test_counters_of_any_size_are_reported(value: float, tmp_path: Path) -> None:
    trace = json.loads(GOOD)
    first = next(event for event in trace["traceEvents"] if "ts" in event)
    for i in range(5):
        counter = {"ph": "C", "name": "large", "pid": first["pid"], "tid": 0}
        counter |= {"ts": first["ts"] + i, "args": {"value": value if i % 2 else i}}
        trace["traceEvents"].append(counter)
    path = write(tmp_path / "t.json", json.dumps(trace).encode())
    for kind in ("html", "md", "json"):
        outcome = run("report", path, "-o", tmp_path / f"r.{kind}")
        assert outcome.code == 0, outcome
