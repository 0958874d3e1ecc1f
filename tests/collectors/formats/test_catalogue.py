"""Files of the catalogue that are one run, or damaged on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.causes import LEVELS
from chopper.errors import InputError


def test_eight_files_are_one_run(traces_dir: Path) -> None:
    found = pipeline.attribute(traces_dir / "param" / "v100-dlrm-8ranks")
    assert [r.rank for r in found.ranks] == list(range(8))
    assert [f.code for f in found.findings if f.code.startswith("run.")] == []
    alone = pipeline.attribute(next((traces_dir / "param" / "v100-dlrm-8ranks").glob("worker3*")))
    assert found.ranks[3].observed_ns == alone.observed_ns


INTACT = "hta/gp100-train-gpu-user-annotation.json.gz"
SAME: dict[str, set[str]] = {
    "all-numbers-as-strings": set(),
    "duplicated-events": {"event.duplicate"},
    "events-in-shuffled-order": set(),
    "invalid-utf8-in-a-name": {"trace.invalid_utf8"},
    "trailing-comma-after-last-event": {"trace.not_strict"},
    "two-gzip-members": set(),
    "utf8-bom": {"trace.byte_order_mark"},
}
"""Damage that loses nothing → what is said of it."""
PART: dict[str, set[str]] = {
    "concatenated-json-documents": {"trace.concatenated", "event.duplicate"},
    "missing-fields-and-non-object-events": {
        "event.not_an_object",
        "event.without_dur",
        "event.without_name",
        "event.without_ph",
        "event.without_ts",
        "event.without_category",
    },
    "nan-and-infinity-tokens": {"trace.nan", "event.without_dur", "event.without_ts"},
    "negative-and-zero-durations": {"event.negative_duration"},
    "plain-json-named-gz": set(),
    "truncated-gzip-stream": {"trace.truncated_gzip", "trace.truncated"},
    "truncated-json-mid-event": {"trace.truncated"},
}
"""Damage that loses something, or a cut of the intact file → what is said of it."""
NOTHING = {
    "empty-traceevents": "without a single usable event",
    "not-a-trace": "not a trace: no traceEvents",
    "zero-bytes": r"is empty \(0 bytes\)",
}


def _said(found: Attribution) -> set[str]:
    return {f.code for f in found.findings if f.code.startswith(("event.", "trace."))}


def test_damaged_copies_of_one_recording(traces_dir: Path) -> None:
    folder = traces_dir / "derived-broken"
    if not folder.is_dir():
        pytest.skip("the damaged copies are made by hand: `make traces` does not download them")
    intact = pipeline.attribute(traces_dir / INTACT)
    for file in folder.iterdir():
        name = file.name.removesuffix(".json.gz")
        if name in NOTHING:
            with pytest.raises(InputError, match=NOTHING[name]):
                pipeline.read(file)
            continue
        found = pipeline.attribute(file)
        if name in SAME:
            assert found.observed_ns == intact.observed_ns
            assert found.causes() == intact.causes()
            assert _said(found) - _said(intact) == SAME[name]
        else:
            for level in LEVELS:
                assert sum(g.time_ns for g in found.by(level)) == found.observed_ns
            assert 0 < found.all_steps.observed_ns <= intact.all_steps.observed_ns
            assert PART[name] <= _said(found)
