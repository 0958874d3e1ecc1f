"""The catalogue's word on recordings that are not Kineto's, held against what is read of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest

from chopper import pipeline
from chopper.collectors.formats.readers import KINETO, READERS, reader_of
from chopper.errors import InputError
from tests.golden.fetch import catalogue
from tests.golden.numbers import EXPECTED

WITH_LAUNCHES = (
    "pipit-nsys/nsys-export-a100.sqlite.gz",
    "rocmprofiledata/pytorch-rpd-trace.rpd.gz",
    "rocmprofiledata/matmul.rpd.gz",
)
"""Recordings in which every kernel has the call that launched it, graphs' included."""
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
    "rocprofiler-sdk/docs-sample-counter_collection.csv": "alone contain no times",
    "rocprofiler-compute/mi300x-dispatch0-sysinfo.csv.gz": "an unknown kind",
    "pipit-nsys/nsys-stats-nvtx-pushpop-trace.csv": "nsys export --type sqlite",
    "zeus/power-limit-sweep-v100.csv.gz": "an unknown kind",
    "zeus/stage-frequency-time-energy-bloom+a100_sxm_bf16.csv.gz": "an unknown kind",
    "zeus/stage-frequency-time-energy-gpt3-175b+a100_sxm_bf16.csv.gz": "an unknown kind",
    "zeus/stage-frequency-time-energy-gpt3-175b+a40_bf16.csv.gz": "an unknown kind",
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-cpu.csv.gz": "an unknown kind",
    "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-memory.csv.gz": "an unknown kind",
}
"""What one line is said of instead."""


@pytest.mark.parametrize("file", LOGS)
def test_what_stands_alone(file: str, traces_dir: Path) -> None:
    table, rows = LOGS[file]
    assert pipeline.read(traces_dir / file).table(0, table).num_rows == rows


@pytest.mark.parametrize("file", REFUSED)
def test_what_is_refused(file: str, traces_dir: Path) -> None:
    with pytest.raises(InputError, match=REFUSED[file]) as caught:
        pipeline.read(traces_dir / file)
    assert "\n" not in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize("file", WITH_LAUNCHES)
def test_kernels_find_their_launches(file: str, traces_dir: Path) -> None:
    attribution = pipeline.attribute(traces_dir / file)
    assert attribution.links[0]["launch_row"].null_count == 0
    assert attribution.by("op")


READ_BY: dict[str, tuple[str, ...]] = {
    "kineto": (
        "tracelens/b300-moe-unit.json.gz",
        "aorta/mi350x-rocprofiler-sdk-backend-train-step",
    ),
    "sqlite": ("pipit-nsys/nsys-export-a100", "rocmprofiledata/matmul.rpd"),
    "rocprof_json": ("tracelens/rocprofv3-sdk-tool-results",),
    "rocprof_csv": ("rocprofiler-sdk/docs-sample-kernel_trace", "hpctrainingexamples/rocprofv1"),
    "counters": ("rocprofiler-sdk/docs-sample-counter", "rocprofiler-compute/mi300x-dispatch0-pmc"),
    "telemetry_csv": (
        "telemetry-nvidia/nvidia-8gpu",
        "amd-mi300x-ml-benchmarks/mi300x-8gpu-llama31-8b-gpu_power",
    ),
    "snapshot": ("memory-snapshots/cuda-memory-snapshot-transformer",),
}
"""Reader → recordings of real devices, by the beginnings of their names."""


def test_every_reader_has_recordings_of_real_devices(traces_dir: Path) -> None:
    # Published spans and graphs are not in the catalogue of traces: see test_spans, test_chakra.
    of_others = [r for r in READERS if ".spans." not in r.module and "chakra" not in r.module]
    foreign = [r for r in (*of_others, KINETO) if r.kind != "run"]
    assert {r.module.rpartition(".")[2] for r in foreign} == set(READ_BY)
    for module, names in READ_BY.items():
        for name in names:
            (file,) = traces_dir.glob(f"{name}*")
            reader = reader_of(file)
            assert reader is not None, file
            assert reader.module.rpartition(".")[2] == module, file


def test_every_file_of_the_catalogue_is_accounted_for() -> None:
    names = {row["name"] for row in catalogue() if "reference-reports" not in row["name"]}
    attributed = {n for n in names if (EXPECTED / f"{n}.csv").exists()}
    runs = {n for n in names if (EXPECTED / f"{n.rpartition('/')[0]}.csv").exists()}
    assert names - attributed - runs == {*LOGS, *REFUSED}


def test_clocks_of_the_only_monitored_gpu_are_joined(traces_dir: Path) -> None:
    run = pipeline.read(traces_dir / "rocmprofiledata/matmul.rpd.gz")
    clocks = run.table(0, "device_clock")
    assert clocks.num_rows == 2 * 15
    assert set(clocks["sm_clock_hz"].to_pylist()) >= {800_000_000, 1_700_000_000}


def test_what_a_snapshot_of_a_real_model_held(traces_dir: Path) -> None:
    run = pipeline.read(traces_dir / "memory-snapshots/cuda-memory-snapshot-transformer.pickle.gz")
    segments, events = run.table(0, "allocator_segment"), run.table(0, "allocator_event")
    assert segments.num_rows == 96
    # The history, counted backwards from the end, never goes below nothing or above what is held.
    assert pc.min(events["allocated_bytes"]).as_py() >= 0
    over = pc.greater(events["allocated_bytes"], events["reserved_bytes"])
    assert not pc.any(over).as_py()
    assert events["allocated_bytes"][-1].as_py() == pc.sum(segments["allocated_bytes"]).as_py()
