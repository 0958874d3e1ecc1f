"""The allocator's counters: real refusals here, a scripted allocator for the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chopper.collectors import device_memory
from chopper.collectors.base import Collector, CollectorContext, StepListener
from chopper.collectors.device_memory import DeviceMemoryCollector
from chopper.errors import CollectorUnavailable
from chopper.storage.streams import read_stream


def context(directory: Path, device: str | None = None) -> CollectorContext:
    return CollectorContext(directory=directory, run_path=directory, pid=os.getpid(), device=device)


def use_allocator(monkeypatch: pytest.MonkeyPatch, read: Callable[[], dict[str, Any]]) -> None:
    monkeypatch.setattr(device_memory, "_allocator", lambda _device: (3, read))


def test_a_rank_on_the_host_is_refused_with_the_reason(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        answer = DeviceMemoryCollector().probe(context(tmp_path, "cpu"))
        assert answer.reason == "this rank computes on the host"
    else:
        answer = DeviceMemoryCollector().probe(context(tmp_path))
        assert answer.reason == "torch sees no accelerator: the run computes on the host"
    assert not answer.ok
    assert answer.remedy is not None
    with pytest.raises(CollectorUnavailable):
        DeviceMemoryCollector().start(context(tmp_path, "cpu"))
    assert not list(tmp_path.iterdir())


def test_each_step_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(100))

    def read() -> dict[str, Any]:
        n = next(readings)
        return {
            "allocated_bytes.all.current": n,
            "reserved_bytes.all.current": n + 100,
            "allocated_bytes.all.peak": n + 200,
            # Peak of the reserved bytes: this allocator does not say.
        }

    use_allocator(monkeypatch, read)
    collector = DeviceMemoryCollector()
    assert isinstance(collector, Collector)
    assert isinstance(collector, StepListener)
    collector.start(context(tmp_path))
    for step in (5, 6):
        collector.on_step(step)
    report = collector.stop()
    table, finding = read_stream(tmp_path / "device_memory.arrow", "device_memory")
    assert finding is None
    assert table["step"].to_pylist() == [None, 5, 6, None]
    assert table["allocated_bytes"].to_pylist() == [0, 1, 2, 3]
    assert table["reserved_bytes"].to_pylist() == [100, 101, 102, 103]
    assert table["max_allocated_bytes"].to_pylist() == [200, 201, 202, 203]
    assert table["max_reserved_bytes"].null_count == 4
    assert set(table["device_id"].to_pylist()) == {3}
    assert (report.status, report.samples_count) == ("obtained", 4)
    assert report.files == ("device_memory.arrow",)
    assert report.call_p99_ns is not None


def test_a_lost_device_ends_the_readings_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([{"allocated_bytes.all.current": 7}])

    def read() -> dict[str, Any]:
        try:
            return next(calls)
        except StopIteration:
            raise RuntimeError("CUDA error: the GPU is lost\nCompile with …") from None

    use_allocator(monkeypatch, read)
    collector = DeviceMemoryCollector()
    collector.start(context(tmp_path))
    for step in range(3):
        collector.on_step(step)
    report = collector.stop()
    assert report.status == "failed"
    assert report.reason == (
        "the allocator's counters could not be read: CUDA error: the GPU is lost"
    )
    table, _ = read_stream(tmp_path / "device_memory.arrow", "device_memory")
    assert table["allocated_bytes"].to_pylist() == [7]


@pytest.mark.gpu
def test_a_real_allocator(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.accelerator.is_available():
        pytest.skip("torch sees no accelerator here")
    collector = DeviceMemoryCollector()
    assert collector.probe(context(tmp_path)).ok
    collector.start(context(tmp_path))
    device = torch.accelerator.current_accelerator()
    held = torch.empty(64 * 1024**2, dtype=torch.uint8, device=device)
    collector.on_step(0)
    report = collector.stop()
    table, _ = read_stream(tmp_path / "device_memory.arrow", "device_memory")
    before, after, _ = table["allocated_bytes"].to_pylist()
    assert after - before >= held.numel()
    assert report.status == "obtained"
