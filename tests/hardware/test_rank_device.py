"""The device that the user names for recordings that name none, or another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.errors import UsageError
from chopper.hardware.ceilings import device_of, with_devices
from chopper.storage.manifest import Device, RankManifest, StatedDevice
from chopper.storage.run import Run
from tests import recordings
from tests.kineto_writer import small_trace

H100 = "NVIDIA H100 SXM 80 GB"


def without_devices(traces: Path, name: str, folder: Path) -> Path:
    """A real trace without its list of devices, as some recorders leave it out."""
    document = json.loads(gzip.decompress((traces / name).read_bytes()))
    del document["deviceProperties"]
    path = folder / "unnamed.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz", "h100"),
        ("tracelens/mi300x-torch-compile-triton.json.gz", "mi300x"),
        ("tracelens/mi300x-bert-small-inference.json.gz", "AMD Instinct MI300X"),
    ],
)
def test_a_named_device_gives_what_the_trace_gives_with_its_name(
    name: str, device: str, traces_dir: Path, tmp_path: Path
) -> None:
    recorded = pipeline.attribute(traces_dir / name)
    unnamed = without_devices(traces_dir, name, tmp_path)
    assert pipeline.attribute(unnamed).ranks[0].peak_source is None
    stated = pipeline.attribute(unnamed, device=device)
    assert stated.ranks[0].peak_source == recorded.ranks[0].peak_source
    assert stated.causes() == recorded.causes()
    assert stated.ranks[0].device_reason == "named by the user; the trace names no device"
    assert recorded.ranks[0].device_reason is None


NAMED_BY_NOTHING = {
    "hta/hand-trimmed-backward-thread.json.gz": "a100",
    "hta/mi250-minitoy-train-rocm62.json.gz": "mi250",
    "kineto/v100-resnet50-no-deviceproperties-2021.json.gz": "v100-dgxs-32gb",
    "hpctrainingexamples/rocprofv1-results.csv.gz": "mi300x",
    "rocmprofiledata/matmul.rpd.gz": "mi250",
    "rocmprofiledata/pytorch-rpd-trace.rpd.gz": "mi300x",
    "rocprofiler-compute/mi300x-dispatch0-timestamps.csv.gz": "mi300x",
    "rocprofiler-sdk/docs-sample-kernel_trace.csv": "mi300x",
    "tracelens/mi300x-vllm-graph-capture.json.gz": "mi300x",
}
"""Public recordings that name no device of the table → the one that is named for them."""


@pytest.mark.parametrize(("name", "device"), NAMED_BY_NOTHING.items())
def test_recordings_that_name_none_get_their_ceilings(
    name: str, device: str, traces_dir: Path
) -> None:
    run = pipeline.read(traces_dir / name)
    for without, stated in ((True, None), (False, device)):
        found = pipeline.attribute(run, device=stated)
        codes = {f.code for f in found.findings}
        assert ("device.no_peak" in codes) == without
        assert ("device.stated" in codes) == (not without)
        assert "device.contradicted" not in codes
        (both,) = found.ceilings.values()
        assert (both.theoretical is None) == without
    assert sum(found.by("rank")[0].causes.values()) == found.observed_ns


def test_bytes_become_time_at_bandwidth_under_a_named_device(traces_dir: Path) -> None:
    """vLLM under ROCm records shapes and an empty device name."""
    run = pipeline.read(traces_dir / "tracelens/mi300x-vllm-graph-capture.json.gz")
    causes = {row.id: row.time_ns for row in pipeline.attribute(run).leaves()}
    assert causes["compute.vector.no_bytes"] == 841_097
    named = {row.id: row.time_ns for row in pipeline.attribute(run, device="mi300x").leaves()}
    assert named["compute.vector.roofline"] > 400_000
    assert named["compute.vector.no_bytes"] < 10_000
    assert sum(named.values()) == sum(causes.values())


def test_a_variant_that_the_table_lacks_is_told_from_the_device_that_is_named(
    traces_dir: Path,
) -> None:
    """An H100 with 95 GiB, which no product of the table has."""
    name = "kineto/unit-test-h100-out-of-order-after-fix.json.gz"
    found = pipeline.attribute(traces_dir / name, device="h100")
    (said,) = [f.message for f in found.findings if f.code == "device.contradicted"]
    assert "NVIDIA H100 with 132 units and 95.1 GiB of memory" in said
    assert H100 in (found.ranks[0].peak_source or "")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "trace.json"
    path.write_bytes(small_trace().encode())
    return path


def one(trace: Path, **header: Any) -> Run:
    """A small trace as a run, its listed device changed."""
    run = pipeline.read(trace)
    (part,) = run.manifest.ranks
    part.devices = [Device(device_id=part.device_id or 0, **header)] if header else []
    return run


@pytest.mark.parametrize(
    ("listed", "contradicts"),
    [
        ({}, False),
        ({"name": "NVIDIA H100 80GB HBM3", "multiprocessor_count": 132}, False),
        ({"name": "", "multiprocessor_count": 132}, False),
        # The table has no device of this name: it may be this one.
        ({"name": "NVIDIA H100"}, False),
        ({"name": "AMD Instinct MI300X"}, True),
        ({"name": "NVIDIA H100 PCIe"}, True),
        ({"name": "", "multiprocessor_count": 304}, True),
        # A part of the device (MIG).
        ({"name": "NVIDIA H100 80GB HBM3", "multiprocessor_count": 16}, True),
        ({"name": "NVIDIA H100", "memory_bytes": 40 * 10**9}, True),
    ],
)
def test_a_contradiction_names_both_and_the_user_wins(
    listed: dict[str, Any], contradicts: bool, small: Path
) -> None:
    run = one(small, **listed)
    stated = with_devices(run, "h100")
    (finding,) = [f for f in stated.part(0).findings if f.code.startswith("device.")]
    assert finding.code == ("device.contradicted" if contradicts else "device.stated")
    assert finding.severity == ("warning" if contradicts else "info")
    assert H100 in finding.message
    assert (listed.get("name") or "device") in finding.message
    answer = pipeline.attribute(stated)
    assert answer.ranks[0].device == H100
    assert H100 in (answer.ranks[0].peak_source or "")
    assert finding.message in {f.message for f in answer.findings}
    # What the trace said stays.
    assert stated.part(0).devices == run.part(0).devices
    assert run.part(0).stated_device is None


def test_what_the_trace_says_of_the_named_device_is_kept() -> None:
    """Its memory, which memory's detectors hold peaks against."""
    listed = Device(device_id=3, name="NVIDIA H100", memory_bytes=85 * 10**9, uuid="GPU-1")
    stated = StatedDevice(name=H100, reason="")
    part = RankManifest(rank=0, devices=[listed], device_id=3, stated_device=stated)
    kept = device_of(part)
    assert kept is not None
    assert (kept.name, kept.memory_bytes, kept.uuid) == (H100, 85 * 10**9, "GPU-1")
    part.devices = [Device(device_id=3, name="AMD Instinct MI300X", memory_bytes=206 * 10**9)]
    assert device_of(part) == Device(device_id=3, name=H100)


def test_the_last_name_counts(small: Path) -> None:
    run = with_devices(with_devices(one(small), "mi300x"), "h100")
    assert [f.code for f in run.part(0).findings].count("device.stated") == 1
    assert pipeline.attribute(run).ranks[0].device == H100


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("h10", "h100-sxm"),
        ("tpu", "there are NVIDIA"),
        ({3: "h100"}, "rank 3, and the run has 0"),
        ("cpu", "found a CPU"),
    ],
)
def test_what_is_no_device(stated: Any, message: str, small: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        with_devices(one(small), stated)
    assert "\n" not in str(caught.value)


def test_each_rank_may_have_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        trace = small_trace(rank=rank, world=2, pid=100 + rank, device=rank)
        (tmp_path / f"rank{rank}.json").write_bytes(trace.encode())
    run = pipeline.read(tmp_path, device={1: "mi300x", None: "h100"})
    names = [part.stated_device and part.stated_device.name for part in run.manifest.ranks]
    assert names == [H100, "AMD Instinct MI300X"]
    some = pipeline.read(tmp_path, device={1: "mi300x"})
    assert some.part(0).stated_device is None


def test_a_recording_without_device_events_says_that_nothing_changes(tmp_path: Path) -> None:
    path = recordings.write_rpd(
        tmp_path / "empty.rpd", recordings.Recording(recordings.small().calls)
    )
    run = pipeline.read(path, device="mi300x")
    (finding,) = [f for f in run.part(0).findings if f.code == "device.stated"]
    assert finding.message.endswith("no device event was recorded, so this changes nothing")
