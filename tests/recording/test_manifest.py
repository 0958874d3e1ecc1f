"""What a recording says of itself: collectors, findings, measures."""

from __future__ import annotations

import os
import sys
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

import chopper
from chopper.collectors import registry
from chopper.collectors.sampler import SamplerProcess
from chopper.storage.run import Run
from tests.recording.make import TRACE_ONLY, steps_of, traced_of
from tests.waiting import PATIENCE_S

FAKE = """
from chopper.collectors.base import Availability
from chopper.storage.manifest import CollectorReport

class Fake:
    name = "fake"
    scope = "rank"
    raises = None

    def _maybe(self, stage):
        if stage == type(self).raises:
            raise RuntimeError(f"no {stage} today")

    def __init__(self): self._maybe("making it")
    def probe(self, context):
        self._maybe("probe")
        return Availability(ok=True)
    def start(self, context): self._maybe("start")
    def on_step(self, step): self._maybe("on_step")
    def stop(self):
        self._maybe("stop")
        return CollectorReport(name="fake", status="obtained", samples_count=3)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A collector of another package, found through its entry point."""
    site = tmp_path / "site"
    info = site / "fake_sensor-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "fake_sensor.py").write_text(FAKE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-sensor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chopper.collectors]\nfake = fake_sensor:Fake\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "fake_sensor", raising=False)
    yield registry.get("fake")
    sys.modules.pop("fake_sensor", None)


def report_of(path, name):
    return next(r for r in Run.open(Path(path)).part(0).collectors if r.name == name)


def test_a_collector_of_another_package(task, fake):
    with chopper.profile("run", collect="torch_trace,fake"):
        for _ in range(3):
            task.step()
    report = report_of("run", "fake")
    assert (report.status, report.samples_count) == ("obtained", 3)


@pytest.mark.parametrize("stage", ["making it", "probe", "start", "on_step", "stop"])
def test_a_collector_that_raises_harms_nothing_else(task, fake, monkeypatch, stage, capfd):
    monkeypatch.setattr(fake, "raises", stage)
    with chopper.profile("run", collect=["fake", "torch_trace"]):
        for _ in range(4):
            task.step()
    report = report_of("run", "fake")
    assert report.status == "failed"
    assert report.reason == f"{stage}: RuntimeError: no {stage} today"
    assert report_of("run", "torch_trace").status == "obtained"
    assert traced_of("run") == [2, 3]
    assert Run.open(Path("run")).part(0).status == "complete"
    assert capfd.readouterr().err.splitlines() == [
        "chopper: recorded 1 rank, 4 steps; next: chopper analyze run",
        f"chopper: collector fake failed: {stage}: RuntimeError: no {stage} today",
    ]


def test_without_a_trace_steps_remain(task):
    with chopper.profile("run", collect=TRACE_ONLY, trace=False):
        for _ in range(3):
            task.step()
    assert len(steps_of("run")) == 3
    assert traced_of("run") == []
    assert not list(Path("run/rank-00000").glob("trace*"))
    assert report_of("run", "torch_trace").status == "refused"


def test_the_manifest_says_what_there_was(task, monkeypatch):
    patient = partialmethod(SamplerProcess.stop, timeout_s=PATIENCE_S)
    monkeypatch.setattr(SamplerProcess, "stop", patient)
    begin_ns = (time.time_ns(), time.monotonic_ns())
    with chopper.profile("run", name="digits") as prof:
        running = Run.open(Path("run"))
        assert running.part(0).status == "running"
        assert [f.code for f in running.manifest.findings] == [
            "run.rank_died",
            "run.manifest_missing",
        ]
        for _ in range(10):
            task.step()
    run = Run.open(Path("run"))
    part = run.part(0)
    assert run.manifest.workload == "digits"
    assert part.status == "complete"
    assert part.command == tuple(sys.orig_argv)
    assert part.environment["torch"] == torch.__version__
    assert part.environment["cores"] == str(os.cpu_count())
    assert part.steps_source == "optimizer"
    assert part.start_ns is not None
    assert part.end_ns is not None
    anchors = part.clock_anchors
    assert len(anchors) == 2
    now_ns = (time.time_ns(), time.monotonic_ns())
    for begin, first, last, now in zip(
        begin_ns,
        *((anchor.realtime_ns, anchor.monotonic_ns) for anchor in anchors),
        now_ns,
        strict=True,
    ):
        assert begin <= first < last <= now
    assert part.overhead is not None
    for value in (
        part.overhead.setup_ns,
        part.overhead.per_step_ns,
        part.overhead.export_ns,
        part.overhead.traced_step_ns,
        part.overhead.untraced_step_ns,
    ):
        assert value is not None
        assert value > 0
    by_name = {report.name: report for report in part.collectors}
    assert by_name["host"].status == "obtained"
    assert by_name["torch_trace"].files == ("trace.json.gz",)
    if not torch.accelerator.is_available():
        assert by_name["device_memory"].status == "refused"
        assert by_name["device_memory"].reason
    assert repr(prof) == "<chopper.Profile not recording; output run>"


def test_whatever_the_program_measures_the_run_is_kept_and_can_be_read(task):
    prof: Any
    with chopper.profile("run", trace=False, collect=()) as prof:
        task.step()
        prof.step(tokens="many")
        task.step()
        prof.step(tokens=torch.tensor(12))
        prof.measure("rate", 2.5, dtype=torch.bfloat16, size=1 << 20, fused=True, part=float("nan"))
        prof.measure("count", True)
        prof.measure("rates", torch.ones(2))
        prof.measure("wide", 1 << 70)
    part = Run.open(Path("run")).part(0)
    assert part.status == "complete"
    assert [(found.name, found.value) for found in part.measures] == [
        ("rate", 2.5),
        ("count", 1.0),
        ("wide", float(1 << 70)),
    ]
    assert part.measures[0].labels == {
        "dtype": "torch.bfloat16",
        "size": 1 << 20,
        "fused": "True",
        "part": "nan",
    }
    # Said once, by the first.
    (finding,) = [found for found in part.findings if found.code == "measures.dropped"]
    assert finding.message == "tokens of a step: 'many' is not a number"
    assert Run.open(Path("run")).table(0, "step_work")["tokens_count"].to_pylist() == [12]


def test_a_rank_writes_its_own_part_only(task, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with chopper.profile("run") as prof:
        task.step()
    assert prof.output == Path("run")
    assert [p.name for p in Path("run").iterdir()] == ["rank-00003"]
    part = Run.open(Path("run")).part(3)
    assert (part.world_size, part.local_rank) == (4, 1)
    # The host is recorded once, by its first rank.
    assert "host" not in {report.name for report in part.collectors}
