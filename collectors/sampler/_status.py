"""A sampler's configuration, its status, and the manifest's report of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from chopper.collectors.sampler._source import SourceSpec
from chopper.storage.manifest import CallCost, CollectorReport
from chopper.tables.ranges import Count, Duration, Time

COMM = "chopper-sampler"
"""Name of the sampler's process as the kernel shows it; 15 characters is what fits."""


class SourceStatus(msgspec.Struct):
    """Statistics of one source. Counts are totals since the start."""

    name: str
    requested_hz: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    parts_count: Count = 1
    """Number of parts that are read by themselves (devices); each counts its samples."""
    period_ns: Duration = 0
    """Time between samples now; longer than requested where a reading costs too much, or where the
    sensors are renewed less often."""
    elapsed_ns: Duration = 0
    """From the first to the last sample, summed over the parts."""
    samples_count: Count = 0
    late_count: Count = 0
    """Samples that began more than half a period after their time."""
    dropped_count: Count = 0
    """Samples left out: their time had passed, or the reading failed."""
    jitter_p50_ns: Duration | None = None
    jitter_p99_ns: Duration | None = None
    call_p50_ns: Duration | None = None
    call_p99_ns: Duration | None = None
    notes: dict[str, str] = {}
    """Why it was left out, slowed down, or what last failed; by what it is about, so that one fact
    never stands in for another."""

    def __post_init__(self) -> None:
        self.period_ns = self.period_ns or max(round(1e9 / self.requested_hz), 1)

    def tell(self, jitter: Quantiles, call: Quantiles) -> None:
        """Take over the quantiles of the delays and of the costs of readings, in ns."""
        self.jitter_p50_ns, self.jitter_p99_ns = jitter.at(0.5), jitter.at(0.99)
        self.call_p50_ns, self.call_p99_ns = call.at(0.5), call.at(0.99)

    @property
    def note(self) -> str | None:
        return "; ".join(dict.fromkeys(self.notes.values())) or None

    @property
    def achieved_hz(self) -> float | None:
        """Samples per second of one part; None before its second sample."""
        if self.samples_count <= self.parts_count or self.elapsed_ns <= 0:
            return None
        return (self.samples_count - self.parts_count) / (self.elapsed_ns / 1e9)


class SamplerStatus(msgspec.Struct, kw_only=True):
    """The sampler's own status, written to a file with every fifth flush."""

    collector: str
    state: Literal["running", "complete", "orphaned", "failed"] = "running"
    error: str | None = None
    pid: Count
    start_ns: Time
    wall_ns: Duration = 0
    cpu_ns: Duration = 0
    """CPU time of its whole process in ``wall_ns``, start-up left out."""
    startup_cpu_ns: Duration = 0
    files: tuple[str, ...] = ()
    absent: dict[str, str] = {}
    clock_alignment_error_ns: Time | None = None
    calls: dict[str, CallCost] = {}
    """Each call of the driver, measured at the start."""
    sources: list[SourceStatus] = []


class SamplerConfig(msgspec.Struct, kw_only=True):
    """Configuration of a sampler process: one line of JSON at its start."""

    collector: str
    directory: str
    parent_pid: int
    specs: list[SourceSpec]
    flush_ns: int = 1_000_000_000
    cpu_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Share of a core that it may take."""
    clock_ns: int | None = None
    """The anchor of the recording's clock."""


def status_file(directory: Path, collector: str) -> Path:
    return directory / f"sampler-{collector}.json"


class Quantiles:
    """Quantiles of integers in bounded memory.

    Counts fall into buckets of 1/16 of a power of two: a quantile is within 3.2 % of the truth.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

    def add(self, value: int) -> None:
        """Count a value; negative values count as 0."""
        value = max(value, 0)
        shift = max(value.bit_length() - 5, 0)
        key = (shift << 6) | (value >> shift)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._total += 1

    def at(self, ratio: float) -> int | None:
        """The value below or at which ``ratio`` of all lie; None when nothing was counted."""
        if not self._total:
            return None
        wanted = ratio * self._total
        cumulative = 0
        last = 0
        for key in sorted(self._counts):
            cumulative += self._counts[key]
            shift, mantissa = key >> 6, key & 63
            last = (mantissa << shift) + ((1 << shift) >> 1)
            if cumulative >= wanted:
                break
        return last


def to_report(name: str, status: SamplerStatus | None) -> CollectorReport:
    """A sampler's status as the manifest's report. The rates are those of its fastest source."""
    from chopper.storage.manifest import CollectorReport

    if status is None or not status.sources:
        return CollectorReport(
            name=name, status="failed", reason="the sampler left no status: it died during startup"
        )
    fastest = min(status.sources, key=lambda s: 1 / s.requested_hz)
    notes = [f"{s.name}: {s.note}" for s in status.sources if s.note is not None]
    failed = status.state == "failed"
    if failed and status.error is not None:
        notes.insert(0, status.error)
    return CollectorReport(
        name=name,
        status="failed" if failed else "obtained",
        reason="; ".join(notes) or None,
        files=status.files,
        requested_hz=fastest.requested_hz,
        achieved_hz=fastest.achieved_hz,
        samples_count=sum(s.samples_count for s in status.sources),
        dropped_count=sum(s.dropped_count for s in status.sources),
        late_count=sum(s.late_count for s in status.sources),
        jitter_p50_ns=fastest.jitter_p50_ns,
        jitter_p99_ns=fastest.jitter_p99_ns,
        call_p50_ns=_total(s.call_p50_ns for s in status.sources),
        call_p99_ns=_total(s.call_p99_ns for s in status.sources),
        calls=status.calls,
        cpu_ratio=status.cpu_ns / status.wall_ns if status.wall_ns else None,
        clock_alignment_error_ns=status.clock_alignment_error_ns,
        absent=status.absent,
    )


def _total(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
