"""What the catalogue of real traces says of each file, held against our tables.

The catalogue's own table (README.md beside the traces) is read, not repeated here. Rules, where
its words and our tables differ: ProfilerStep rows also occur mirrored on the device, ours are the
host's, each number once; MTIA has no category "kernel", its queue rows are our kernels; 2021's
"computeProperties" list is a device list to us.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chopper
from chopper.attribution import LEVELS, Attribution
from chopper.collectors.formats.kineto import ParsedTrace, read_trace
from chopper.errors import InputError
from tests.conftest import find_traces_dir

_TRACES = find_traces_dir()
pytestmark = pytest.mark.skipif(_TRACES is None, reason="real traces not present")


@dataclass
class Claim:
    """One row of the catalogue."""

    file: str
    device: str
    rank: str
    kernels: int
    collectives: int
    what: str
    annotations: str
    odd: str

    def odd_count(self, pattern: str) -> int:
        """The number before a phrase in "odd things", 0 when it is not there."""
        match = re.search(rf"([\d,]+) {pattern}", f"{self.odd}; {self.what}")
        return int(match.group(1).replace(",", "")) if match else 0


def _claims() -> list[Claim]:
    if _TRACES is None:
        return []
    found = []
    for line in (_TRACES / "README.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split(" | ")]
        if len(cells) == 13 and cells[0].startswith("`"):
            file, _, device, rank, _, _, _, kernels, nccl, what, annotations, _, odd = cells
            kernels, nccl = kernels.replace(",", ""), nccl.replace(",", "")
            found.append(
                Claim(
                    file.strip("`"), device, rank, int(kernels), int(nccl), what, annotations, odd
                )
            )
    assert len(found) >= 55
    return found


@pytest.fixture(scope="module", params=_claims(), ids=lambda c: c.file)
def claim(request: pytest.FixtureRequest) -> Claim:
    found: Claim = request.param
    return found


@pytest.fixture(scope="module")
def trace(claim: Claim) -> ParsedTrace:
    assert _TRACES is not None
    (found,) = read_trace(_TRACES / claim.file)
    return found


def strings(trace: ParsedTrace, table: str, column: str) -> np.ndarray:
    return np.array(trace.tables[table][column].to_pylist(), dtype=object)


def test_kernels_and_collectives(claim: Claim, trace: ParsedTrace) -> None:
    kind, name = strings(trace, "device_event", "kind"), strings(trace, "device_event", "name")
    kernels = kind == "kernel"
    if "mtia" in claim.file:
        assert claim.kernels == 0
        assert kernels.sum() == 97
        return
    assert kernels.sum() == claim.kernels
    nccl = [bool(re.search("nccl|rccl", n, re.IGNORECASE)) for n in name[kernels]]
    assert sum(nccl) == claim.collectives
    dur = trace.tables["device_event"]["dur_ns"].to_numpy()
    assert (dur[kernels] == 0).sum() == claim.odd_count("zero-length kernels")


def test_kernels_without_a_launch_row(claim: Claim, trace: ParsedTrace) -> None:
    if "mtia" in claim.file:
        pytest.skip("the catalogue counts only the category kernel")
    calls = np.isin(strings(trace, "host_span", "category"), ["runtime", "driver"])
    launched = set(strings(trace, "host_span", "correlation_id")[calls]) - {None}
    kernels = strings(trace, "device_event", "kind") == "kernel"
    ids = strings(trace, "device_event", "correlation_id")[kernels]
    assert sum(i not in launched for i in ids) == claim.odd_count("kernels without a launch row")


def test_ranks_devices_and_steps(claim: Claim, trace: ParsedTrace) -> None:
    rank, _, world = claim.rank.partition(" (")[0].partition(" of ")
    assert trace.rank == (int(rank) if rank.isdigit() else None)
    assert trace.world_size == (int(world) if world.isdigit() else None)
    if "(" in claim.rank:
        assert trace.backend == claim.rank.partition("(")[2].rstrip(")")
    listed = (
        f"{trace.devices[0].name or '(empty name)'} ×{len(trace.devices)}"
        if trace.devices
        else None
    )
    assert listed == (
        "Tesla V100-DGXS-32GB ×4"
        if "computeProperties" in claim.odd
        else None
        if claim.device == "not listed"
        else claim.device
    )
    match = re.match(r"(no|\d+) ProfilerStep", claim.annotations)
    assert match is not None
    rows = 0 if match.group(1) == "no" else int(match.group(1))
    steps = trace.tables["step"].num_rows
    assert steps == rows if "gpu_user" not in claim.annotations else rows / 2 <= steps <= rows
    assert steps == len(set(trace.tables["step"]["number"].to_pylist()))


def test_what_else_the_catalogue_says(claim: Claim, trace: ParsedTrace) -> None:
    stacks = re.search(r"python stacks \(([\d,]+)\)", claim.what)
    python = strings(trace, "host_span", "category") == "python"
    assert python.sum() == (int(stacks.group(1).replace(",", "")) if stacks else 0)
    assert trace.tables["memory_event"].num_rows >= claim.odd_count("cpu_instant_event")
    dims = trace.tables["host_span"]["input_dims"].combine_chunks()
    assert (dims.null_count < len(dims)) == (
        "shapes" in claim.what and "no shapes" not in claim.odd
    )
    # Nothing in a real trace is repaired or dropped.
    assert [f.code for f in trace.findings] == []


def test_overlaps_on_a_stream_are_found(traces_dir: Path) -> None:
    """v100-recsys counts whole microseconds: 13 of its 31 overlaps are one microsecond, rounding."""
    rounding = {"hta/v100-recsys-rank1of2.json.gz": 13}
    for claim in _claims():
        expected = claim.odd_count("overlaps on one stream") - rounding.get(claim.file, 0)
        if expected > 0:
            findings = chopper.attribute(traces_dir / claim.file).findings
            assert [f.count for f in findings if f.code == "event.stream_overlap"] == [expected]


def test_eight_files_are_one_run(traces_dir: Path) -> None:
    found = chopper.attribute(traces_dir / "param" / "v100-dlrm-8ranks")
    assert [r.rank for r in found.ranks] == list(range(8))
    assert [f.code for f in found.findings if f.code.startswith("run.")] == []
    alone = chopper.attribute(next((traces_dir / "param" / "v100-dlrm-8ranks").glob("worker3*")))
    assert found.ranks[3].observed_ns == alone.observed_ns


# ---------------------------------------------------------------- damaged on purpose

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


def test_every_damaged_file_is_accounted_for(traces_dir: Path) -> None:
    there = {p.name.removesuffix(".json.gz") for p in (traces_dir / "derived-broken").iterdir()}
    assert there == set(SAME) | set(PART) | set(NOTHING)


@pytest.mark.parametrize("name", SAME)
def test_damage_that_loses_nothing(name: str, traces_dir: Path) -> None:
    intact = chopper.attribute(traces_dir / INTACT)
    found = chopper.attribute(traces_dir / "derived-broken" / f"{name}.json.gz")
    assert found.observed_ns == intact.observed_ns
    assert [(c.id, c.time_ns, c.ci95_ns) for c in found.causes()] == [
        (c.id, c.time_ns, c.ci95_ns) for c in intact.causes()
    ]
    assert _said(found) - _said(intact) == SAME[name]


@pytest.mark.parametrize("name", PART)
def test_damage_that_loses_something(name: str, traces_dir: Path) -> None:
    intact = chopper.attribute(traces_dir / INTACT)
    found = chopper.attribute(traces_dir / "derived-broken" / f"{name}.json.gz")
    _closed(found)
    assert 0 < found.observed_ns <= intact.observed_ns
    assert PART[name] <= _said(found)


@pytest.mark.parametrize("name", NOTHING)
def test_damage_that_leaves_nothing(name: str, traces_dir: Path) -> None:
    with pytest.raises(InputError, match=NOTHING[name]):
        chopper.load(traces_dir / "derived-broken" / f"{name}.json.gz")


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


def test_truncated_json_loses_only_its_last_event(traces_dir: Path, tmp_path: Path) -> None:
    path = traces_dir / "derived-broken" / "truncated-json-mid-event.json.gz"
    events = _whole_events(gzip.decompress(path.read_bytes()).decode())
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"traceEvents": events}))
    (cut,), (same,) = read_trace(path), read_trace(whole)
    for name in ("host_span", "device_event", "step"):
        assert cut.tables[name].to_pylist() == same.tables[name].to_pylist()
    (finding,) = cut.findings
    assert f"the {len(events)} events before it are used" in finding.message
