"""The sampler on a fake clock: what is counted, to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.collectors.devices import Device, DeviceReader, Errors, Getter
from chopper.collectors.sampler import (
    ClockSource,
    Gone,
    Part,
    Quantiles,
    Sampler,
    SamplerStatus,
    Sink,
    _loop,
    to_report,
)
from chopper.errors import CollectorUnavailable
from chopper.storage.manifest import CallCost
from chopper.testing import FakeClock
from tests.collectors.sampled import MS, SECOND, rows


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


def test_no_note_of_a_source_stands_in_for_another(tmp_path: Path) -> None:
    clock = FakeClock()
    source = FakeSource(clock, cost_ns=2 * MS, fails=lambda n: n == 3)
    status = sample_for(tmp_path, clock, source, 100.0, 10 * SECOND)
    both = (
        "fake: a reading failed: ValueError: no reading; "
        "slowed down from 100 Hz: a reading takes 2 ms"
    )
    assert to_report("test", status).reason == both
    status.state, status.error = "failed", "the disk is full"
    assert to_report("test", status).reason == f"the disk is full; {both}"


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


class Sensor(FakeSource):
    """A device whose power is renewed every 100 ms."""

    renewed_ns = 100 * MS

    def __init__(self, clock: FakeClock, cost_ns: int = 0) -> None:
        super().__init__(clock, cost_ns)
        self.reader = DeviceReader(Device(None, 0), "device_clock", Errors("NVML"))
        self.reader.add(Getter("power", "power_w", self._power))
        self.refresh_ns = self.reader.refresh_ns

    def _power(self) -> int:
        return self._clock.monotonic_ns() // self.renewed_ns

    def sample(self, sink: Sink, now_ns: int) -> None:
        super().sample(sink, now_ns)
        self.reader.read(now_ns)


def test_a_sensor_is_read_at_twice_its_own_rate_at_most(tmp_path: Path) -> None:
    clock = FakeClock()
    [kept] = sample_for(tmp_path, clock, Sensor(clock), 100.0, 10 * SECOND).sources
    assert kept.period_ns == 50 * MS
    assert kept.note == "slowed down from 100 Hz: the sensors are renewed every 100 ms"
    # Until eight changes were seen it was read at the rate that was asked for.
    assert 180 + 80 <= kept.samples_count <= 180 + 120


def test_a_sensor_that_is_renewed_sooner_later_is_read_more_often_again(tmp_path: Path) -> None:
    clock = FakeClock()
    source = Sensor(clock)
    sampler = Sampler("test", tmp_path, [(source, 100.0)], clock)
    clock.stop_after_ns(5 * SECOND)
    sample = source.sample

    def until_it_runs_faster(sink: Sink, now_ns: int) -> None:
        if source._calls == 150:
            source.renewed_ns = 10 * MS
        sample(sink, now_ns)

    sampler._readers[0].parts[0].read = until_it_runs_faster
    [kept] = sampler.run().sources
    assert kept.period_ns == 10 * MS


def test_a_sensor_that_never_changes_is_read_as_often_as_was_asked(tmp_path: Path) -> None:
    clock = FakeClock()
    source = Sensor(clock)
    source.renewed_ns = 1 << 62
    [kept] = sample_for(tmp_path, clock, source, 100.0, 5 * SECOND).sources
    assert (kept.samples_count, kept.note) == (500, None)


@pytest.mark.parametrize(("cost_ms", "hz"), [(0.05, 100), (0.2, 50), (3.0, 8.4)])
def test_a_sampler_takes_its_share_of_a_core(tmp_path: Path, cost_ms: float, hz: float) -> None:
    """0.2 ms are read at 50 Hz, for 1 %; 3 ms at half the 17 Hz that their cost allows."""
    clock = FakeClock()
    source = FakeSource(clock, cost_ns=round(cost_ms * MS))
    sampler = Sampler("test", tmp_path, [(source, 100.0)], clock, cpu_ratio=0.01)
    clock.stop_after_ns(60 * SECOND)
    [kept] = sampler.run().sources
    assert SECOND / kept.period_ns == pytest.approx(hz, rel=0.02)
    assert (kept.note is None) == (hz == 100)


def test_what_is_stopped_is_not_asked_again_what_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is inside a call when sampling ends answers no more: what it was stays said."""
    monkeypatch.setattr(_loop, "WATCH_S", 0.001)
    clock = FakeClock()
    sampler = Sampler("test", tmp_path, [(FakeSource(clock), 10.0)], clock)
    hangs = Part("device 0", lambda _sink, _now: None, alone=True)
    taken_over: list[object] = []
    hangs.since_ns = clock.monotonic_ns()
    sampler._readers[0].parts.append(hangs)
    monkeypatch.setattr(sampler, "_take_over", taken_over.append)
    clock.stop_after_ns(SECOND)
    status = sampler.run_watched(lambda _code: None)
    assert status.absent == {"nic[device 0]": "a call of the driver has not returned for 1.0 s"}
    assert sampler._stuck
