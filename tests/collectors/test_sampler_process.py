"""Samplers as real processes: they start, are killed, and lose a parent."""

from __future__ import annotations

import io
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from chopper.collectors.sampler import COMM, SamplerProcess, Sink, SourceSpec, to_report
from chopper.errors import CaptureError, CollectorUnavailable
from chopper.storage.streams import read_stream
from tests.collectors.sampled import MS, SECOND, rows
from tests.waiting import PATIENCE_S, until


def until_gone(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([descriptor], [], [], PATIENCE_S)
        assert readable, f"process {pid} is still there"
    finally:
        os.close(descriptor)


CLOCK_SPEC = SourceSpec(factory="chopper.collectors.sampler:ClockSource", hz=100.0)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., SamplerProcess]]:
    """Starts samplers that end with the test, whatever happens."""
    processes: list[SamplerProcess] = []

    def start(**options: Any) -> SamplerProcess:
        process = SamplerProcess("test", tmp_path, [CLOCK_SPEC], **options)
        processes.append(process)
        process.start()
        return process

    yield start
    for process in processes:
        process.stop()


def samples(process: SamplerProcess) -> int:
    status = process.status()
    return 0 if status is None or not status.sources else status.sources[0].samples_count


def test_a_real_sampler_keeps_its_rate_and_ends_when_told(
    tmp_path: Path, started: Callable[..., SamplerProcess]
) -> None:
    process = started(flush_ns=100 * MS)
    assert process.pid is not None
    until(lambda: samples(process) >= 50, "50 samples")
    seen = psutil.Process(process.pid)
    assert seen.name() == COMM
    assert seen.nice() > psutil.Process().nice()
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libarrow" in maps
    assert not [lib for lib in ("torch", "numpy", "pandas") if f"/{lib}/" in maps]
    status = process.stop(timeout_s=PATIENCE_S)
    assert status is not None
    assert status.state == "complete"
    until_gone(process.pid)
    table = rows(tmp_path, "clock")
    [kept] = status.sources
    assert table.num_rows == kept.samples_count >= 50
    # What is missing is counted: nothing is lost without a word.
    counted = kept.samples_count + kept.dropped_count
    assert kept.elapsed_ns / kept.period_ns - 1 <= counted <= status.wall_ns / kept.period_ns + 1
    assert status.clock_alignment_error_ns is not None
    # A reading that was interrupted says so: its clocks are that far apart at most.
    offsets = [(r["time_ns"] - r["monotonic_ns"], 2 * r["span_ns"]) for r in table.to_pylist()]
    assert max(at - span for at, span in offsets) - min(at + span for at, span in offsets) < SECOND
    report = to_report("test", status)
    assert report.status == "obtained"
    assert report.files == ("clock.arrow",)
    assert report.cpu_ratio is not None
    assert 0 < report.cpu_ratio < 1


def test_a_killed_sampler_loses_at_most_one_flush(
    tmp_path: Path, started: Callable[..., SamplerProcess]
) -> None:
    process = started(flush_ns=100 * MS)
    until(lambda: samples(process) >= 20, "20 samples")
    flushed = samples(process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    status = process.stop(timeout_s=PATIENCE_S)
    assert status is not None
    report = to_report("test", status)
    assert report.status == "failed"
    assert report.reason == (
        "the sampler process died (signal 9); samples flushed before that are kept"
    )
    assert (report.samples_count or 0) >= flushed
    table, _ = read_stream(tmp_path / "clock.arrow", "clock")
    # The batch is written before the status that counts it.
    assert table.num_rows >= (report.samples_count or 0) >= 20


def test_ctrl_c_does_not_end_the_sampler(started: Callable[..., SamplerProcess]) -> None:
    process = started(flush_ns=50 * MS)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    before = samples(process)
    until(lambda: samples(process) > before, "samples after SIGINT")
    assert os.getpgid(process.pid) != os.getpgid(0)
    status = process.stop(timeout_s=PATIENCE_S)
    assert status is not None
    assert status.state == "complete"


def test_sigterm_ends_it_in_order(tmp_path: Path, started: Callable[..., SamplerProcess]) -> None:
    process = started(flush_ns=50 * MS)
    assert process.pid is not None
    until(lambda: samples(process) > 0, "a first flush")
    os.kill(process.pid, signal.SIGTERM)
    until_gone_or_zombie(process.pid)
    status = process.stop(timeout_s=PATIENCE_S)
    assert status is not None
    assert status.state == "complete"
    rows(tmp_path, "clock")


def until_gone_or_zombie(pid: int) -> None:
    until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie",
        f"the end of {pid}",
    )


PARENT = """
    import os, sys, time
    from pathlib import Path
    from chopper.collectors.sampler import SamplerProcess, SourceSpec
    spec = SourceSpec(factory="chopper.collectors.sampler:ClockSource", hz=50.0)
    process = SamplerProcess("test", Path(sys.argv[1]), [spec], flush_ns=50_000_000)
    process.start()
    if sys.argv[2] == "fork" and os.fork() == 0:
        # Holds the sampler's pipe open, like a data loader worker; and must not stop it.
        assert process.stop() is None
        time.sleep(60)
    print(process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("forks", ["alone", "fork"])
def test_it_never_outlives_its_parent(tmp_path: Path, forks: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path), forks],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        sampler_pid = int(parent.stdout.readline())
        status = tmp_path / "sampler-test.json"
        until(status.exists, "a first status")
        until(lambda: b'"samples_count":0' not in status.read_bytes(), "a first flush")
        parent.kill()
        until_gone(sampler_pid)
        assert b'"state":"orphaned"' in status.read_bytes()
        assert rows(tmp_path, "clock").num_rows > 0
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


class InTheKernel:
    """A process in a driver that hangs: not even SIGKILL ends it."""

    returncode = None

    def __init__(self) -> None:
        self.stdin, self.stdout = io.BytesIO(), io.BytesIO()
        self.killed = False

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            raise AssertionError("would wait for ever")
        raise subprocess.TimeoutExpired("sampler", timeout)

    def kill(self) -> None:
        self.killed = True


def test_a_sampler_that_cannot_be_killed_holds_up_nobody(
    started: Callable[..., SamplerProcess],
) -> None:
    process = started()
    until(lambda: process.status() is not None, "its first status")
    real = process._process
    assert real is not None
    process._process = hanging = InTheKernel()  # type: ignore[assignment]
    status = process.stop(timeout_s=0.01)
    assert hanging.killed
    assert status is not None
    assert status.error is not None
    assert "it hangs in the kernel and was abandoned" in status.error
    real.communicate()  # with the end of its pipe it ends, too


class HangingSource:
    """A driver that does not come back from being opened."""

    name: ClassVar[str] = "hanging"
    tables: ClassVar[tuple[str, ...]] = ("nic",)
    absent: ClassVar[dict[str, str]] = {}

    def open(self) -> None:
        select.select([], [], [])

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Never reached."""

    def close(self) -> None:
        """Nothing to close."""


def test_a_driver_that_hangs_at_the_start_does_not_keep_it_alive(tmp_path: Path) -> None:
    spec = f'factory="{__name__}:HangingSource", hz=1.0'
    code = textwrap.dedent(PARENT).replace(
        'factory="chopper.collectors.sampler:ClockSource", hz=50.0', spec
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code.replace(".start()", ".start(ready_timeout_s=0.5)"),
            str(tmp_path),
            "alone",
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert parent.stdout is not None
        sampler_pid = int(parent.stdout.readline())
        assert psutil.pid_exists(sampler_pid)
        parent.kill()
        until_gone_or_zombie(sampler_pid)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_a_full_disk_is_said_and_what_was_written_is_kept(
    tmp_path: Path, started: Callable[..., SamplerProcess]
) -> None:
    process = started(flush_ns=50 * MS)
    assert process.pid is not None
    until(lambda: samples(process) > 0, "a first flush")
    # The kernel refuses to let files grow further, as a full disk would; the status stays small.
    room = (tmp_path / "clock.arrow").stat().st_size + 4096
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
    until_gone_or_zombie(process.pid)
    status = process.stop(timeout_s=PATIENCE_S)
    assert status is not None
    report = to_report("test", status)
    assert report.status == "failed"
    assert report.reason is not None
    assert "clock.arrow: cannot be written (File too large)" in report.reason
    table, finding = read_stream(tmp_path / "clock.arrow", "clock")
    assert table.num_rows > 0
    assert finding is None or finding.code == "telemetry.truncated"


def test_a_sampler_that_cannot_read_anything_says_so_at_its_start(tmp_path: Path) -> None:
    spec = SourceSpec(
        factory="chopper.collectors.host._machine:CoreSource",
        hz=1.0,
        options={"root": str(tmp_path)},
    )
    process = SamplerProcess("test", tmp_path, [spec])
    with pytest.raises(CollectorUnavailable, match=r"cores: .*/proc/stat: No such file"):
        process.start(ready_timeout_s=PATIENCE_S)
    assert process.stop() is None


def test_a_source_that_breaks_the_start_is_a_capture_error(tmp_path: Path) -> None:
    process = SamplerProcess("test", tmp_path, [SourceSpec(factory="no.such:Source", hz=1.0)])
    with pytest.raises(CaptureError, match="ModuleNotFoundError: No module named 'no'"):
        process.start(ready_timeout_s=PATIENCE_S)
    report = to_report("test", process.stop())
    assert report.status == "failed"


def test_another_packages_source_plugs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sensor.py").write_text(
        textwrap.dedent(
            """
            class Sensor:
                name = "sensor"
                tables = ("nic",)
                def __init__(self, first): self.absent = {}; self.value = first
                def open(self): pass
                def sample(self, sink, now_ns):
                    self.value += 1
                    sink.add("nic", "mine", self.value, None)
                def close(self): pass
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = SourceSpec(factory="my_sensor:Sensor", hz=200.0, options={"first": 41})
    process = SamplerProcess("mine", tmp_path, [spec], flush_ns=20 * MS)
    process.start()
    try:
        until(lambda: samples(process) > 3, "samples of the sensor")
    finally:
        process.stop(timeout_s=PATIENCE_S)
    table = rows(tmp_path)
    assert table["rx_bytes"].to_pylist()[:3] == [42, 43, 44]
    assert table["tx_bytes"].null_count == table.num_rows
