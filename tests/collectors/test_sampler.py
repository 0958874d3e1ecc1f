"""The sampler: exact on a fake clock, and real processes that start, are killed, and lose a parent."""

from __future__ import annotations

import importlib.util
import io
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.collectors.sampler import (
    COMM,
    ClockSource,
    Gone,
    Part,
    Quantiles,
    Sampler,
    SamplerProcess,
    SamplerStatus,
    Sink,
    SourceSpec,
    to_report,
)
from chopper.errors import CaptureError, CollectorUnavailable
from chopper.manifest import CallCost
from chopper.run import read_stream
from chopper.testing import FakeClock
from tests.sanitizing import run_program, skip_without_sanitizers

MS = 1_000_000
SECOND = 1_000_000_000
PATIENCE_S = 20.0


class FakeSource:
    """Writes one nic row per sample and takes as long as told."""

    name: ClassVar[str] = "fake"
    tables: ClassVar[tuple[str, ...]] = ("nic",)

    def __init__(
        self, clock: FakeClock, cost_ns: int = 0, fails: Callable[[int], bool] = lambda _n: False
    ) -> None:
        self.absent: dict[str, str] = {}
        self._clock = clock
        self._cost_ns = cost_ns
        self._fails = fails
        self._calls = 0
        self.closed = False

    def open(self) -> None:
        return

    def sample(self, sink: Sink, now_ns: int) -> None:
        self._calls += 1
        sink.add("nic", "fake0", self._calls, now_ns)
        self._clock.work(self._cost_ns)
        if self._fails(self._calls):
            raise ValueError("no reading")

    def close(self) -> None:
        self.closed = True


def sample_for(
    directory: Path, clock: FakeClock, source: FakeSource, hz: float, duration_ns: int
) -> SamplerStatus:
    sampler = Sampler("test", directory, [(source, hz)], clock)
    clock.stop_after_ns(duration_ns)
    return sampler.run()


def test_two_samplers_never_write_the_same_file(tmp_path: Path) -> None:
    first, second = FakeClock(), FakeClock()
    sample_for(tmp_path, first, FakeSource(first), 10.0, SECOND)
    written = (tmp_path / "nic.arrow").read_bytes()
    status = sample_for(tmp_path, second, FakeSource(second), 10.0, SECOND)
    assert (tmp_path / "nic.arrow").read_bytes() == written
    assert status.state == "complete"
    assert status.files == ()
    assert status.absent == {"nic": "another collector's sampler writes this table"}


def rows(directory: Path, table: str = "nic") -> pa.Table:
    read, finding = read_stream(directory / f"{table}.arrow", table)
    assert finding is None, finding
    return read


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail when it does not come about."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never came about: {what}"
        select.select([], [], [], 0.01)


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


# On a fake clock: what is counted, to the nanosecond.


def test_deadlines_are_kept_exactly(tmp_path: Path) -> None:
    clock = FakeClock()
    source = FakeSource(clock)
    status = sample_for(tmp_path, clock, source, 100.0, SECOND)
    # 0, 10, … 990 ms: the deadline at 1 s is where it is told to stop.
    [kept] = status.sources
    assert (kept.samples_count, kept.late_count, kept.dropped_count) == (100, 0, 0)
    assert kept.elapsed_ns == 990 * MS
    assert kept.achieved_hz == pytest.approx(100.0, rel=1e-12)
    assert (kept.jitter_p50_ns, kept.jitter_p99_ns) == (0, 0)
    assert status.state == "complete"
    assert source.closed
    table = rows(tmp_path)
    times = table["time_ns"].to_pylist()
    assert {b - a for a, b in pairwise(times)} == {10 * MS}


def test_oversleeping_shifts_no_later_deadline(tmp_path: Path) -> None:
    clock = FakeClock(lags_ns=[4 * MS, 6 * MS, 5 * MS])
    [kept] = sample_for(tmp_path, clock, FakeSource(clock), 100.0, 100 * MS).sources
    # The first deadline is now, without a sleep. 4 and 5 ms of 10 are not over half a period.
    assert (kept.samples_count, kept.late_count, kept.dropped_count) == (10, 1, 0)
    times = rows(tmp_path)["time_ns"].to_pylist()
    starts = [t - times[0] for t in times]
    assert starts == [0, 14 * MS, 26 * MS, 35 * MS, *(n * 10 * MS for n in range(4, 10))]


def test_a_reading_longer_than_its_period_drops_samples(tmp_path: Path) -> None:
    clock = FakeClock()
    [kept] = sample_for(
        tmp_path, clock, FakeSource(clock, cost_ns=25 * MS), 100.0, 300 * MS
    ).sources
    # Each reading overruns two deadlines: samples at 0, 30, 60 … 270 ms.
    assert (kept.samples_count, kept.late_count) == (10, 0)
    assert kept.dropped_count == 20
    assert kept.call_p50_ns == pytest.approx(25 * MS, rel=0.04)


def test_a_costly_source_is_read_less_often(tmp_path: Path) -> None:
    clock = FakeClock()
    status = sample_for(tmp_path, clock, FakeSource(clock, cost_ns=2 * MS), 100.0, 10 * SECOND)
    [kept] = status.sources
    # 2 ms of every 10 would be a fifth of a core: after 32 samples it is 2 of 40.
    assert kept.period_ns == pytest.approx(40 * MS, rel=0.04)
    assert kept.note is not None
    assert "slowed down from 100 Hz: a reading takes 2 ms" in kept.note
    assert status.cpu_ns / status.wall_ns < 0.06


def test_rows_carry_the_middle_and_the_length_of_the_reading(tmp_path: Path) -> None:
    clock = FakeClock(realtime_ns=5 * SECOND)
    sample_for(tmp_path, clock, FakeSource(clock, cost_ns=3 * MS), 10.0, 50 * MS)
    [row] = rows(tmp_path).to_pylist()
    assert (row["time_ns"], row["span_ns"]) == (5 * SECOND + 3 * MS // 2, 3 * MS)


def test_a_failing_reading_costs_that_sample_only(tmp_path: Path) -> None:
    clock = FakeClock()
    bad = FakeSource(clock, fails=lambda n: n % 2 == 0)
    good = FakeSource(clock)
    sampler = Sampler("test", tmp_path, [(bad, 10.0), (good, 10.0)], clock)
    clock.stop_after_ns(SECOND)
    first, second = sampler.run().sources
    assert (first.samples_count, first.dropped_count) == (5, 5)
    assert first.note == "a reading failed: ValueError: no reading"
    assert (second.samples_count, second.dropped_count) == (10, 0)
    assert rows(tmp_path).num_rows == 15


def test_a_source_that_only_fails_is_left_out_and_said(tmp_path: Path) -> None:
    clock = FakeClock()
    bad = FakeSource(clock, fails=lambda n: n > 5)
    good = FakeSource(clock)
    sampler = Sampler("test", tmp_path, [(bad, 10.0), (good, 10.0)], clock)
    clock.stop_after_ns(10 * SECOND)
    status = sampler.run()
    assert status.sources[0].samples_count == 5
    assert status.sources[1].samples_count == 100
    report = to_report("test", status)
    assert report.status == "obtained"
    assert report.reason == "fake: left out after 20 failures in a row: no reading"


def test_what_cannot_be_opened_is_absent_and_the_rest_goes_on(tmp_path: Path) -> None:
    class Closed(FakeSource):
        name: ClassVar[str] = "closed"
        tables: ClassVar[tuple[str, ...]] = ("host",)

        def open(self) -> None:
            raise CollectorUnavailable("no such thing here")

    clock = FakeClock()
    sources = [(Closed(clock), 10.0), (FakeSource(clock), 10.0)]
    sampler = Sampler("test", tmp_path, sources, clock)
    clock.stop_after_ns(SECOND)
    status = sampler.run()
    assert status.absent == {"host": "no such thing here"}
    assert [s.name for s in status.sources] == ["fake"]
    with pytest.raises(CollectorUnavailable, match="closed: no such thing here"):
        Sampler("test", tmp_path, [(Closed(clock), 10.0)], clock)


def test_a_stepped_wall_clock_shows_in_the_alignment_error(tmp_path: Path) -> None:
    clock = FakeClock(lags_ns=[0])
    source = ClockSource(clock)
    source.open()
    sink = Sink()
    source.sample(sink, 0)
    assert source.error_ns == 0
    clock.advance(SECOND)
    clock.step_wall_clock(-7 * MS)
    source.sample(sink, 0)
    assert source.error_ns == 7 * MS


def test_the_clock_table_joins_the_clocks_of_one_moment(tmp_path: Path) -> None:
    clock = FakeClock(realtime_ns=9 * SECOND, monotonic_ns=4 * SECOND)
    sampler = Sampler("test", tmp_path, [(ClockSource(clock), 1.0)], clock)
    clock.stop_after_ns(3 * SECOND)
    sampler.run()
    for row in rows(tmp_path, "clock").to_pylist():
        assert row["time_ns"] - row["monotonic_ns"] == 5 * SECOND
        assert row["monotonic_raw_ns"] == row["monotonic_ns"]


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantiles_are_within_their_bucket(values: list[int], ratio: float) -> None:
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    # The smallest value below or at which that share of all lies.
    wanted = next(v for n, v in enumerate(sorted(values), start=1) if n >= ratio * len(values))
    found = quantiles.at(ratio)
    assert found is not None
    assert abs(found - wanted) <= wanted * 0.032


def test_quantiles_of_nothing_are_unknown() -> None:
    assert Quantiles().at(0.5) is None


# Real processes.

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
    status = process.stop()
    assert status is not None
    assert status.state == "complete"
    until_gone(process.pid)
    table = rows(tmp_path, "clock")
    [kept] = status.sources
    assert table.num_rows == kept.samples_count >= 50
    # What is missing is counted: nothing is lost without a word.
    expected = kept.elapsed_ns / (SECOND / 100) + 1
    assert kept.samples_count + kept.dropped_count == pytest.approx(expected, abs=2)
    offsets = [r["time_ns"] - r["monotonic_ns"] for r in table.to_pylist()]
    assert status.clock_alignment_error_ns is not None
    assert max(offsets) - min(offsets) < SECOND
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
    status = process.stop()
    assert status is not None
    report = to_report("test", status)
    assert report.status == "failed"
    assert report.reason == ("the sampler process died (signal 9); what it had flushed is kept")
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
    status = process.stop()
    assert status is not None
    assert status.state == "complete"


def test_sigterm_ends_it_in_order(tmp_path: Path, started: Callable[..., SamplerProcess]) -> None:
    process = started(flush_ns=50 * MS)
    assert process.pid is not None
    until(lambda: samples(process) > 0, "a first flush")
    os.kill(process.pid, signal.SIGTERM)
    until_gone_or_zombie(process.pid)
    status = process.stop()
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
    assert "it hangs in the kernel and was left" in status.error
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
    status = process.stop()
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
        factory="chopper.collectors.host:CoreSource", hz=1.0, options={"root": str(tmp_path)}
    )
    process = SamplerProcess("test", tmp_path, [spec])
    with pytest.raises(CollectorUnavailable, match=r"cores: .*/proc/stat: No such file"):
        process.start()
    assert process.stop() is None


def test_a_source_that_breaks_the_start_is_a_capture_error(tmp_path: Path) -> None:
    process = SamplerProcess("test", tmp_path, [SourceSpec(factory="no.such:Source", hz=1.0)])
    with pytest.raises(CaptureError, match="ModuleNotFoundError: No module named 'no'"):
        process.start()
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
        process.stop()
    table = rows(tmp_path)
    assert table["rx_bytes"].to_pylist()[:3] == [42, 43, 44]
    assert table["tx_bytes"].null_count == table.num_rows


# Parts of a source, values that do not fit, calls that block: on a fake clock.


class Parted(FakeSource):
    """Three parts, of which one goes for good and one fails now and then."""

    name: ClassVar[str] = "parted"

    def parts(self) -> list[Part]:
        return [Part(f"device {i}", partial(self._read, i)) for i in range(3)]

    def _read(self, number: int, sink: Sink, now_ns: int) -> None:
        self._clock.work(MS)
        self._calls += 1
        if number == 1 and self._calls > 7:
            raise Gone("has fallen off")
        if number == 2 and self._calls % 2:
            raise ValueError("no reading")
        sink.add("nic", f"device{number}", self._calls, now_ns)


def test_each_part_has_a_time_of_its_own_and_fails_alone(tmp_path: Path) -> None:
    clock = FakeClock()
    status = sample_for(tmp_path, clock, Parted(clock), 10.0, SECOND)
    (kept,) = status.sources
    table = rows(tmp_path)
    starts: dict[str, list[int]] = {}
    for row in table.to_pylist():
        starts.setdefault(row["interface"], []).append(row["time_ns"])
    assert [len(starts[f"device{i}"]) for i in range(3)] == [10, 2, kept.samples_count - 12]
    assert starts["device1"][0] - starts["device0"][0] == MS
    # Ten ticks; device 1 is asked a third time and never again.
    assert kept.samples_count + kept.dropped_count == 10 + 3 + 10
    assert kept.parts_count == 3
    assert kept.achieved_hz == pytest.approx(10.0, rel=0.3)


def test_when_all_parts_are_gone_the_source_is_read_no_more(tmp_path: Path) -> None:
    class Leaving(FakeSource):
        name: ClassVar[str] = "leaving"

        def parts(self) -> list[Part]:
            return [Part("device 0", self._gone)]

        def _gone(self, sink: Sink, now_ns: int) -> None:
            self._calls += 1
            raise Gone("has fallen off the bus")

    clock = FakeClock()
    source = Leaving(clock)
    sampler = Sampler("test", tmp_path, [(source, 10.0), (FakeSource(clock), 10.0)], clock)
    clock.stop_after_ns(SECOND)
    first, second = sampler.run().sources
    assert source._calls == 1
    assert (first.samples_count, first.note) == (0, "device 0: has fallen off the bus")
    assert second.samples_count == 10


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "many", float("nan")])
def test_a_value_that_does_not_fit_costs_its_row_only(tmp_path: Path, value: object) -> None:
    class Odd(FakeSource):
        def sample(self, sink: Sink, now_ns: int) -> None:
            self._calls += 1
            sink.add("nic", "fake0", value if self._calls == 3 else self._calls, now_ns)

    clock = FakeClock()
    status = sample_for(tmp_path, clock, Odd(clock), 10.0, SECOND)
    assert status.state == "complete"
    assert rows(tmp_path)["rx_bytes"].to_pylist() == [1, 2, *range(4, 11)]
    assert status.absent["nic[some rows]"].startswith("a value does not fit the table: ")


def test_a_clock_step_within_a_reading_does_not_lengthen_it(tmp_path: Path) -> None:
    class Stepped(FakeSource):
        def sample(self, sink: Sink, now_ns: int) -> None:
            super().sample(sink, now_ns)
            if self._calls == 2:
                self._clock.step_wall_clock(-3600 * SECOND)

    clock = FakeClock()
    sample_for(tmp_path, clock, Stepped(clock, cost_ns=2 * MS), 10.0, 300 * MS)
    found = rows(tmp_path).to_pylist()
    assert [row["span_ns"] for row in found] == [2 * MS] * 3
    # The reading keeps the time at which it began; what follows is on the new time.
    times = [row["time_ns"] for row in found]
    assert times[1] - times[0] == 100 * MS
    assert times[2] - times[1] == 100 * MS - 3600 * SECOND


def test_what_is_no_longer_absent_is_no_longer_named(tmp_path: Path) -> None:
    class Returning(FakeSource):
        def sample(self, sink: Sink, now_ns: int) -> None:
            super().sample(sink, now_ns)
            self.absent.clear()

    clock = FakeClock()
    source = Returning(clock)
    source.absent["nic.rx_bytes"] = "not yet"
    sampler = Sampler("test", tmp_path, [(source, 10.0)], clock)
    sampler.flush()
    assert sampler.status.absent == {"nic.rx_bytes": "not yet"}
    clock.stop_after_ns(SECOND)
    assert sampler.run().absent == {}


def test_calls_are_timed_when_sampling_begins_and_stand_in_the_report(tmp_path: Path) -> None:
    clock = FakeClock()

    class Called(FakeSource):
        def calls(self) -> dict[str, Callable[[], object]]:
            def refused() -> None:
                raise OSError("no permission")

            return {"quick": lambda: clock.work(1000), "slow": slow, "refused": refused}

    def slow() -> None:
        clock.work(6 * MS)

    status = sample_for(tmp_path, clock, Called(clock), 10.0, SECOND)
    report = to_report("test", status)
    assert report.calls == {
        "quick": CallCost(p50_ns=1000, p99_ns=1000, count=50),
        # What is slow is not called more often than it must be.
        "slow": CallCost(p50_ns=6 * MS, p99_ns=6 * MS, count=3),
    }
    # It is no part of the time that is sampled.
    assert status.wall_ns == SECOND


def test_sanitized_build_survives_plans_of_all_kinds(tmp_path: Path) -> None:
    """Out-of-bounds access, undefined behaviour and leaks; a loop without a plan cannot be made."""
    skip_without_sanitizers(tmp_path)
    done = run_program("tests/collectors/fuzz_fast.py", "--sanitize", "--count", "300")
    assert done.returncode == 0, done.stderr[-5000:]
    assert "300 rounds" in done.stdout


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks/sampler.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_the_sampler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ([n / 1000 for n in range(-20, 20)], ("not told apart from none", "cannot be told")),
        ([0.001 + n / 1e6 for n in range(40)], ("adds 0.10% to 0.10%", "at most 0.5%")),
        ([0.02 + n / 1e6 for n in range(40)], ("adds 2.00%", "more than 0.5%")),
        ([0.02, 0.021, 0.019], ("not told apart from none", "cannot be told")),
    ],
)
def test_the_benchmark_says_what_its_pairs_cannot_tell(
    benchmark: Any, ratios: list[float], says: tuple[str, str]
) -> None:
    said = benchmark.verdict({"way": "chopper", **benchmark.added(ratios)})
    assert all(words in said for words in says), said


def test_the_median_of_pairs_lies_in_its_interval_as_often_as_is_said(benchmark: Any) -> None:
    """Of 12 ordered pairs the 3rd and the 10th: 1 − 2 · (1 + 12 + 66) / 4096 = 96 %."""
    found = benchmark.added([float(n) for n in range(1, 13)])
    assert found["added_interval_share"] == [3.0, 10.0]
    assert found["added_median_share"] == 6.5
