"""What the catalogue says of recordings that are not Kineto's, held against what is read of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest

import chopper
from chopper.attribution import LEVELS
from chopper.errors import InputError

TRACES: dict[str, dict[str, int]] = {
    "pipit-nsys/nsys-export-a100.sqlite.gz": {"kernel": 1312, "memcpy": 279, "runtime": 3047},
    "rocmprofiledata/pytorch-rpd-trace.rpd.gz": {"kernel": 8948, "memcpy": 1176},
    "rocmprofiledata/matmul.rpd.gz": {"kernel": 29, "memcpy": 55, "memset": 1, "runtime": 125},
    "tracelens/rocprofv3-sdk-tool-results.json.gz": {"kernel": 43_915},
    "hpctrainingexamples/rocprofv1-results.csv.gz": {"kernel": 1004},
    "rocprofiler-sdk/docs-sample-kernel_trace.csv": {"kernel": 7},
    "rocprofiler-sdk/docs-sample-memory_copy_trace.csv": {"memcpy": 2},
    "rocprofiler-compute/mi300x-dispatch0-timestamps.csv.gz": {"kernel": 3},
    "rocprofiler-compute/mi300x-dispatch0-SQ_LEVEL_WAVES.csv.gz": {"kernel": 3},
    "rocprofiler-compute/mi300x-dispatch0-SQ_IFETCH_LEVEL.csv.gz": {"kernel": 3},
    "rocprofiler-compute/mi300x-dispatch0-pmc_perf.csv.gz": {"kernel": 3},
}
"""Rows by kind of device event and category of host span, as the catalogue counts them.

Of nsys' 3,048 calls one is the driver's; rpd's 10,124 operations are kernels and copies.
"""
LOGS: dict[str, tuple[str, int]] = {
    "telemetry-nvidia/nvidia-8gpu-power-temp-util.csv.gz": ("device_clock", 5112),
    "telemetry-nvidia/nvidia-smi-v100s-query-csv-with-units.csv.gz": ("device_counter", 107),
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-gpu_power.csv.gz": ("device_clock", 3128),
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-gpu_temp.csv.gz": ("device_counter", 3104),
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-gpu_usage.csv.gz": ("device_counter", 3120),
    "zeus/nvml-energy-windows-a40-resnet50-4gpus.csv": ("energy_window", 9 * 4),
    "zeus/nvml-energy-windows-v100-resnet50-2gpus.csv": ("energy_window", 7 * 2),
    "memory-snapshots/cuda-memory-snapshot-transformer.pickle.gz": ("allocator_event", 6486),
}
"""What stands alone: a table that it becomes, and how many rows that has."""
REFUSED: dict[str, str] = {
    "hta/memory-timeline-raw.json.gz": "a list without trace events",
    "rocmprofiledata/matmul-chrome-json-sclk-counters.json.gz": "without a category",
    "rocprofiler-sdk/docs-sample-counter_collection.csv": "alone say nothing of time",
    "rocprofiler-compute/mi300x-dispatch0-sysinfo.csv.gz": "no kind that is known",
    "pipit-nsys/nsys-stats-nvtx-pushpop-trace.csv": "nsys export --type sqlite",
    "zeus/power-limit-sweep-v100.csv.gz": "no kind that is known",
    "zeus/stage-frequency-time-energy-bloom+a100_sxm_bf16.csv.gz": "no kind that is known",
    "zeus/stage-frequency-time-energy-gpt3-175b+a100_sxm_bf16.csv.gz": "no kind that is known",
    "zeus/stage-frequency-time-energy-gpt3-175b+a40_bf16.csv.gz": "no kind that is known",
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-cpu.csv.gz": "no kind that is known",
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-memory.csv.gz": "no kind that is known",
}
"""What one line is said of instead."""
HOST_ONLY = (
    "rocprofiler-sdk/docs-sample-hsa_api_trace.csv",
    "rocprofiler-sdk/docs-sample-marker_api_trace.csv",
)
_KINETO_FOLDERS = {"hta", "kineto", "param", "torch-profiling-tutorial", "tracelens", "aorta"}


def test_every_file_that_is_not_kinetos_is_accounted_for(traces_dir: Path) -> None:
    there = {
        str(p.relative_to(traces_dir))
        for p in traces_dir.rglob("*")
        if p.is_file() and p.parent != traces_dir
    }
    known = {*TRACES, *LOGS, *REFUSED, *HOST_ONLY}
    assert known <= there
    others = {f for f in there - known if f.split("/")[0] not in _KINETO_FOLDERS}
    assert others - {f for f in others if f.startswith("derived-broken/")} == {
        "hpctrainingexamples/mi300x-op-replay.json.gz"
    }


@pytest.mark.parametrize("file", TRACES)
def test_a_recording_holds_what_the_catalogue_says_and_closes(file: str, traces_dir: Path) -> None:
    found = chopper.attribute(traces_dir / file)
    (rank,) = found.run.ranks
    device, host = found.run.table(rank, "device_event"), found.run.table(rank, "host_span")
    counts = {
        str(v["values"]): v["counts"]
        for column in (device["kind"], host["category"])
        for v in pc.value_counts(column.combine_chunks().cast("string")).to_pylist()
    }
    assert {kind: counts.get(kind) for kind in TRACES[file]} == TRACES[file]
    assert sum(cause.time_ns for cause in found.leaves()) == found.observed_ns > 0
    for level in LEVELS:
        groups = found.by(level)
        assert sum(g.time_ns for g in groups) == found.observed_ns
    # Nothing in a real recording is repaired or dropped.
    assert not [f.code for f in found.findings if "damaged" in f.code or f.code.endswith("_dur")]


@pytest.mark.parametrize("file", LOGS)
def test_what_stands_alone(file: str, traces_dir: Path) -> None:
    table, rows = LOGS[file]
    assert chopper.load(traces_dir / file).table(0, table).num_rows == rows


@pytest.mark.parametrize("file", REFUSED)
def test_what_is_refused(file: str, traces_dir: Path) -> None:
    with pytest.raises(InputError, match=REFUSED[file]) as caught:
        chopper.load(traces_dir / file)
    assert "\n" not in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize("file", HOST_ONLY)
def test_calls_alone_are_read_and_nothing_is_attributed(file: str, traces_dir: Path) -> None:
    found = chopper.attribute(traces_dir / file)
    assert found.run.table(0, "host_span").num_rows > 0
    assert found.observed_ns == 0
    assert "trace.no_events" in {f.code for f in found.findings}


def test_kernels_find_their_launches(traces_dir: Path) -> None:
    """Every kernel of nsys and rpd has the call that launched it, graphs' included."""
    for file in list(TRACES)[:3]:
        found = chopper.attribute(traces_dir / file)
        assert found.links[0]["launch_row"].null_count == 0
    launched = {g.key for g in found.by("op")}
    assert launched


def test_clocks_of_the_only_monitored_gpu_are_joined(traces_dir: Path) -> None:
    run = chopper.load(traces_dir / "rocmprofiledata/matmul.rpd.gz")
    clocks = run.table(0, "device_clock")
    assert clocks.num_rows == 2 * 15
    assert set(clocks["sm_clock_hz"].to_pylist()) >= {800_000_000, 1_700_000_000}


def test_what_a_snapshot_of_a_real_model_held(traces_dir: Path) -> None:
    run = chopper.load(traces_dir / "memory-snapshots/cuda-memory-snapshot-transformer.pickle.gz")
    segments, events = run.table(0, "allocator_segment"), run.table(0, "allocator_event")
    assert segments.num_rows == 96
    # The history, counted backwards from the end, never goes below nothing or above what is held.
    assert pc.min(events["allocated_bytes"]).as_py() >= 0
    over = pc.greater(events["allocated_bytes"], events["reserved_bytes"])
    assert not pc.any(over).as_py()
    assert events["allocated_bytes"][-1].as_py() == pc.sum(segments["allocated_bytes"]).as_py()
