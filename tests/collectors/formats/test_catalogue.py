"""Files of the catalogue that are one run, or damaged on purpose."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.causes import LEVELS
from chopper.collectors.formats.kineto import read_trace
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


def _closed(found: Attribution) -> None:
    for level in LEVELS:
        groups = found.by(level)
        assert sum(g.time_ns for g in groups) == found.observed_ns


@pytest.fixture
def damaged(traces_dir: Path) -> Path:
    directory = traces_dir / "derived-broken"
    if not directory.is_dir():
        pytest.skip("the damaged copies are made by hand: `make traces` does not download them")
    return directory


def test_every_damaged_file_is_accounted_for(damaged: Path) -> None:
    there = {p.name.removesuffix(".json.gz") for p in damaged.iterdir()}
    assert there == set(SAME) | set(PART) | set(NOTHING)


@pytest.mark.parametrize("name", SAME)
def test_damage_that_loses_nothing(name: str, traces_dir: Path, damaged: Path) -> None:
    intact = pipeline.attribute(traces_dir / INTACT)
    found = pipeline.attribute(damaged / f"{name}.json.gz")
    assert found.observed_ns == intact.observed_ns
    assert [(c.id, c.time_ns, c.ci95_ns) for c in found.causes()] == [
        (c.id, c.time_ns, c.ci95_ns) for c in intact.causes()
    ]
    assert _said(found) - _said(intact) == SAME[name]


@pytest.mark.parametrize("name", PART)
def test_damage_that_loses_something(name: str, traces_dir: Path, damaged: Path) -> None:
    intact = pipeline.attribute(traces_dir / INTACT)
    found = pipeline.attribute(damaged / f"{name}.json.gz")
    _closed(found)
    assert 0 < found.all_steps.observed_ns <= intact.all_steps.observed_ns
    assert PART[name] <= _said(found)


@pytest.mark.parametrize("name", NOTHING)
def test_damage_that_leaves_nothing(name: str, damaged: Path) -> None:
    with pytest.raises(InputError, match=NOTHING[name]):
        pipeline.read(damaged / f"{name}.json.gz")


def _whole_events(text: str) -> list[Any]:
    """Events of a cut text, the plain way: as many as decode one after the other."""
    decoder = json.JSONDecoder()
    events: list[Any] = []
    at = re.compile(r"\s*,?\s*")
    position = text.index("[", text.index('"traceEvents"')) + 1
    while True:
        match = at.match(text, position)
        assert match is not None
        try:
            event, position = decoder.raw_decode(text, match.end())
        except ValueError:
            return events
        events.append(event)


def test_truncated_json_loses_only_its_last_event(damaged: Path, tmp_path: Path) -> None:
    path = damaged / "truncated-json-mid-event.json.gz"
    events = _whole_events(gzip.decompress(path.read_bytes()).decode())
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"traceEvents": events}))
    (cut,), (same,) = read_trace(path), read_trace(whole)
    for name in ("host_span", "device_event", "step"):
        assert cut.tables[name].to_pylist() == same.tables[name].to_pylist()
    (finding,) = (f for f in cut.findings if f.code != "trace.steps_from")
    assert f"the {len(events)} events before it are used" in finding.message
