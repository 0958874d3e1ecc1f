from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper import pipeline
from chopper.collectors.torch_trace import alignment_error_ns

BASE = 1_790_857_026_000_000_000


def trace(*spans: tuple[str, int], base: int = BASE, padding: int = 0) -> bytes:
    """A trace as torch writes it; times in nanoseconds of the wall clock."""
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": name,
            "pid": 1,
            "tid": 2,
            "ts": f"@{(at - base) // 1000}.{(at - base) % 1000:03d}@",
            "dur": 1.5,
            "args": {"x": "y" * padding},
        }
        for name, at in spans
    ]
    text = json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}, indent=2)
    return text.replace('"@', "").replace('@"', "").encode()


@given(st.integers(0, 3000))
def test_the_mark_that_was_clocked_most_tightly_tells_the_error(padding: int) -> None:
    text = trace(
        ("ProfilerStep#1", BASE + 10_250), ("ProfilerStep#12", BASE + 99_000), padding=padding
    )
    marks = [
        ("ProfilerStep#1", BASE + 10_000, BASE + 10_400),
        ("ProfilerStep#12", BASE + 98_000, BASE + 98_500),
        ("ProfilerStep#2", 0, 0),
    ]
    assert alignment_error_ns(text, marks) == 250


def test_nothing_clocked_is_nothing_known() -> None:
    assert alignment_error_ns(trace(("ProfilerStep#1", BASE)), []) is None


def test_a_recorded_trace_is_aligned_to_the_wall_clock(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    import chopper

    with chopper.profile(tmp_path / "run", steps=(1, 4)) as prof:
        for _ in range(5):
            torch.ones(8) @ torch.ones(8)
            prof.step()
    manifest = pipeline.read(tmp_path / "run").manifest
    (report,) = [c for c in manifest.ranks[0].collectors if c.name == "torch_trace"]
    assert report.clock_alignment_error_ns is not None
    # A trace that was off by a clock's base, or by a unit, would be off by far more.
    assert report.clock_alignment_error_ns < 1_000_000
