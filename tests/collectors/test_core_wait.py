"""The kernel's run delays: this machine's own, and files that say what they should not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from chopper.collectors.base import Collector, CollectorContext, StepListener
from chopper.collectors.core_wait import SCHEDSTAT, CoreWaitCollector
from chopper.storage.streams import read_stream


def context(directory: Path) -> CollectorContext:
    return CollectorContext(directory=directory, run_path=directory, pid=os.getpid())


def rows(directory: Path) -> list[tuple[int, int | None, int]]:
    table, finding = read_stream(directory / "core_wait.arrow", "core_wait")
    assert finding is None
    columns = (table[c].to_pylist() for c in ("tid", "step", "run_delay_ns"))
    return list(zip(*columns, strict=True))


def test_each_step_is_a_row_of_what_the_kernel_says(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("1000 25 3\n")
    collector = CoreWaitCollector(schedstat)
    assert isinstance(collector, Collector)
    assert isinstance(collector, StepListener)
    assert collector.probe(context(tmp_path)).ok
    collector.start(context(tmp_path))
    for step, delay in ((4, 30), (5, 75)):
        schedstat.write_text(f"1000 {delay} 3\n")
        collector.on_step(step)
    report = collector.stop()
    assert (report.status, report.files, report.samples_count) == (
        "obtained",
        ("core_wait.arrow",),
        3,
    )
    tid = threading.get_native_id()
    assert rows(tmp_path) == [(tid, None, 25), (tid, 4, 30), (tid, 5, 75)]


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason=f"{SCHEDSTAT}: not there")
def test_the_thread_that_ends_the_step_is_read(tmp_path: Path) -> None:
    collector = CoreWaitCollector()
    collector.start(context(tmp_path))
    collector.on_step(0)
    thread = threading.Thread(target=collector.on_step, args=(1,))
    thread.start()
    thread.join()
    assert collector.stop().status == "obtained"
    own, again, other = (tid for tid, _, _ in rows(tmp_path))
    assert own == again == threading.get_native_id() != other


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "No such file or directory"), ("0\n", "counts no run delays")]
)
def test_a_kernel_without_the_count_is_refused_with_the_reason(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    schedstat = tmp_path / "schedstat"
    if text is not None:
        schedstat.write_text(text)
    answer = CoreWaitCollector(schedstat).probe(context(tmp_path))
    assert not answer.ok
    assert reason in str(answer.reason)


def test_a_count_that_fails_ends_the_readings_and_not_the_program(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("1000 25 3\n")
    collector = CoreWaitCollector(schedstat)
    collector.start(context(tmp_path))
    schedstat.write_text("\n")
    collector.on_step(0)
    collector.on_step(1)
    report = collector.stop()
    assert report.status == "failed"
    assert "could not be read" in str(report.reason)
    assert len(rows(tmp_path)) == 1
