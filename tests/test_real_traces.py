"""Real traces from real GPUs: brute-force unions, and a second opinion.

Our own recordings are always there; those of the catalogue skip with their reason where it is not.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.causes.states import copy_direction, exclusive_states
from chopper.analyzers.trace.join import COMMUNICATION, COMPUTE, COPY
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.analyzers.trace.windows import Windows
from chopper.causes import CODES
from chopper.views import view
from tests.analyzers.make import joined as joined_tables
from tests.conftest import find_traces_dir
from tests.golden.own import OWN

_TRACES = find_traces_dir()
_FOLDERS = (
    *("aorta", "hpctrainingexamples", "hta", "kineto", "param", "torch-profiling-tutorial"),
    "tracelens",
)
_NOT_TRACES = {"memory-timeline-raw.json.gz", "rocprofv3-sdk-tool-results.json.gz"}


def real_traces() -> dict[str, Path]:
    """Every trace, our own recordings of devices and the catalogue's, by name."""
    of_devices = ("dvfs_random", "dvfs_zeros", "h100-lead", "model-cuda", "model-rocm")
    ours = [p for name in of_devices for p in sorted((OWN / name).glob("rank-*/trace.json.gz"))]
    found = {str(p.relative_to(OWN)): p for p in ours}
    if _TRACES is not None:
        theirs = sorted(p for f in _FOLDERS for p in (_TRACES / f).rglob("*.json.gz"))
        found |= {str(p.relative_to(_TRACES)): p for p in theirs if p.name not in _NOT_TRACES}
    return found


def _events(path: Path) -> tuple[DeviceEvents, np.ndarray]:
    run = pipeline.read(path)
    rank = run.ranks[0]
    events = DeviceEvents(run.table(rank, "device_event"))
    links = joined_tables(
        run.table(rank, "host_span"),
        events.table,
        run.table(rank, "step"),
        run.table(rank, "collective"),
    ).links()
    return events, links.work_class


def _union(start: np.ndarray, end: np.ndarray) -> int:
    """Length of a union of intervals, the plain way."""
    total, reach = 0, -(2**63)
    for a, b in sorted(zip(start.tolist(), end.tolist(), strict=True)):
        if b > reach:
            total += b - max(a, reach)
            reach = b
    return total


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name)
        for name, path in real_traces().items()
        if "cpu" not in name and "unit-test" not in name
    ],
)
def test_states_equal_a_brute_force_union(path: Path) -> None:
    events, work_class = _events(path)
    if not len(events):
        pytest.skip("a trace without device events")
    start, end = events.start_ns, events.end_ns
    whole = Windows(np.array([start.min(), end.max()]), np.array([-1]), 0, 0)
    states = exclusive_states(start, end, work_class, whole)
    klass = work_class[states.event_row]
    seen: list[np.ndarray] = []
    before = 0
    for wanted in (COMPUTE, COMMUNICATION, COPY):
        seen.append(np.flatnonzero(work_class == wanted))
        rows = np.concatenate(seen)
        busy = _union(start[rows], end[rows])
        assert states.share_ns[klass == wanted].sum() == busy - before
        before = busy
    idle = (states.gap_end_ns - states.gap_start_ns).sum()
    assert idle == end.max() - start.min() - before


# The reports that leave no kernel out (see the catalogue); on CUDA they count memsets as
# computation, which is a copy here.
_AGREEING = [
    "h100-bert-small-inference",
    "mi300x-bert-small-inference",
    "mi210-gpu-only",
    "mi300x-torch-compile-triton",
    "mi300x-sglang-qwen3-8b-decode-hipgraph",
    "mi300x-sglang-qwen3-8b-prefill-decode",
    "mi300x-xdit-flux1-inference-python-stacks-large",
]


@pytest.mark.parametrize("name", _AGREEING)
def test_timeline_equals_the_published_report(traces_dir: Path, name: str) -> None:
    events, work_class = _events(traces_dir / "tracelens" / f"{name}.json.gz")
    # Their computation holds CUDA's memsets, and ROCm's fill kernels.
    theirs = work_class.copy()
    memset = copy_direction(events) == CODES["copy.memset"]
    theirs[memset & (work_class == COPY)] = COMPUTE
    theirs[events.named(lambda n: n.startswith("__amd_rocclr"))] = COMPUTE
    start, end = events.start_ns, events.end_ns
    whole = Windows(np.array([start.min(), end.max()]), np.array([-1]), 0, 0)
    states = exclusive_states(start, end, theirs, whole)
    klass = theirs[states.event_row]
    published = _timeline(traces_dir / "tracelens" / "reference-reports" / name)
    ours = {
        "computation_time": states.share_ns[klass == COMPUTE].sum(),
        "exposed_comm_time": states.share_ns[klass == COMMUNICATION].sum(),
        "exposed_memcpy_time": states.share_ns[klass == COPY].sum(),
        "idle_time": (states.gap_end_ns - states.gap_start_ns).sum(),
        "total_time": end.max() - start.min(),
    }
    for key, time_ns in ours.items():
        assert time_ns / 1e6 == pytest.approx(published[key], abs=2e-4), key


def _timeline(folder: Path) -> dict[str, float]:
    file = folder / "gpu_timeline.csv"
    text = (
        file.read_text()
        if file.is_file()
        else gzip.decompress((folder / "gpu_timeline.csv.gz").read_bytes()).decode()
    )
    rows = csv.DictReader(text.splitlines())
    return {row["type"]: float(row["time ms"]) for row in rows}


def test_collectives_of_eight_ranks_are_matched_and_within_the_link(traces_dir: Path) -> None:
    # The catalogue says of this run: one clock, and rank 7 starts last in 5 of its 8 collectives.
    attribution = pipeline.attribute(traces_dir / "param" / "v100-dlrm-8ranks")
    assert attribution.coverage["collectives_matched_ratio"] == 1.0
    rows = view(attribution, "collectives").to_pylist()
    assert len(rows) == 8
    assert all(row["rank_count"] == 8 for row in rows)
    assert sum(row["straggler_rank"] == 7 for row in rows) == 5
    assert all(0 < row["at_peak_ratio"] < 1 for row in rows)
    wait = sum(c.time_ns for c in attribution.causes() if c.id == "communication.wait")
    assert sum(row["exposed_waiting_ns"] for row in rows) == wait
    exposed = sum(c.time_ns for c in attribution.causes() if c.id == "communication")
    groups = view(attribution, "exposed_communication").to_pylist()
    assert sum(row["exposed_ns"] for row in groups) == exposed
