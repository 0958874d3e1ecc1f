"""Manifests: typed, versioned descriptions of a run and of its ranks.

Each rank writes its own part (``rank-00000/manifest.json``); the run's ``manifest.json`` is made
from the parts when the run is closed, or read on the fly when it never was.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

import msgspec

from chopper.errors import RunFormatError
from chopper.storage.files import decode_json, document, encode_json, json_without_secrets
from chopper.storage.layout import is_upload
from chopper.tables.ranges import (
    MOST_RANKS,
    Count,
    Duration,
    FileName,
    Integer,
    Ordinal,
    Rank,
    Ranks,
    Rate,
    Ratio,
    Share,
    Time,
    Value,
    Version,
)

SCHEMA_VERSION = 1
"""Raised by one when an older chopper could not read what this one writes."""
STORED_VERSION = 2
"""Of ``manifest.json`` at an address, which names the folder of a run."""

_BOOT = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")

Severity = Literal["info", "warning", "error"]


class Finding(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One thing about the data that a reader must know before believing a number."""

    code: str
    """Stable dotted id, for example ``trace.truncated``."""
    severity: Severity
    message: str
    """One line: what was found, where, and what it means for the numbers."""
    rank: Rank | None = None
    count: Count | None = None
    withholds: tuple[str, ...] = ()
    """Claims that this finding withholds, for example ``compute.ideal``."""
    share_ratio: Share | None = None
    """Of the time, or of the events, that it is about; None where it is not about a part."""


class Device(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A device as the run saw it. Peaks are joined by name when the run is analyzed."""

    device_id: Ordinal
    name: str | None = None
    memory_bytes: Count | None = None
    multiprocessor_count: Count | None = None
    uuid: str | None = None
    pci_address: str | None = None
    """Domain:bus:device; what tells the device that a part of one (MIG) belongs to."""


class StatedDevice(msgspec.Struct, kw_only=True, frozen=True):
    """A device that the user named for a rank; it counts in place of what the trace says."""

    name: str
    """As the table of devices calls it."""
    reason: str
    """Who named it, and what the trace says."""


Dimension = Literal["pipeline", "data", "expert", "context", "tensor"]
"""Ways of dividing a training over ranks, from the outermost to the innermost in most layouts."""
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)


class Coordinate(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A rank's place in one dimension of parallelism."""

    dimension: Dimension
    index: Rank
    """From 0 up to ``size``."""
    size: Ranks
    """Ranks along this dimension."""
    source: str
    """What told it, in words."""
    stages: tuple[Rank, ...] = ()
    """Stages of the model that the rank holds, of ``pipeline``; empty where unknown."""
    stages_count: Ranks | None = None
    """Stages of the whole model, virtual ones counted."""


class CallCost(msgspec.Struct, kw_only=True, frozen=True):
    """Cost of one call of a driver, measured when sampling began."""

    p50_ns: Duration
    p99_ns: Duration
    """The largest where fewer than 100 calls were made."""
    count: Count
    """Calls that were timed."""


class CollectorReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result of one collector on one rank."""

    name: str
    status: Literal["obtained", "refused", "failed"]
    reason: str | None = None
    """Why it was refused or failed."""
    remedy: str | None = None
    files: tuple[FileName, ...] = ()
    """Paths relative to the rank's directory."""
    requested_hz: Rate | None = None
    achieved_hz: Rate | None = None
    samples_count: Count | None = None
    dropped_count: Count | None = None
    late_count: Count | None = None
    jitter_p50_ns: Duration | None = None
    jitter_p99_ns: Duration | None = None
    call_p50_ns: Duration | None = None
    call_p99_ns: Duration | None = None
    calls: dict[str, CallCost] = {}
    """Each call of the driver that sampling makes, calibrated at the start."""
    cpu_ratio: Ratio | None = None
    """CPU time of the sampler over wall time."""
    clock_alignment_error_ns: Time | None = None
    absent: dict[str, str] = {}
    """Table or ``table.column`` that stays null on this machine, and why."""


class Overhead(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Cost of chopper itself for the rank, measured with the run's own clock."""

    setup_ns: Duration | None = None
    per_step_ns: Duration | None = None
    """Median time that chopper's own code took inside a step (marks, hooks)."""
    export_ns: Duration | None = None
    """Writing the trace, outside the steps."""
    close_ns: Duration | None = None
    """Ending the recording after the program's own end: its last trace, collectors and files."""
    traced_step_ns: Duration | None = None
    """Median duration of traced steps."""
    untraced_step_ns: Duration | None = None
    """Median duration of steps recorded without a trace."""


class Measure(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One number that the program itself measured and wants kept with the run."""

    name: str
    """With its unit as suffix, like every column: ``step_ns``, ``peak_bytes``."""
    value: Value | Integer
    labels: dict[str, str | Integer | Value] = {}
    """Object of the measurement: ``{"collective": "all_reduce", "size_bytes": 1048576}``."""


class ClockAnchor(msgspec.Struct, kw_only=True, frozen=True):
    """Clocks of one host read at the same moment."""

    realtime_ns: Time
    monotonic_ns: Time
    monotonic_raw_ns: Time | None = None


class RankManifest(msgspec.Struct, kw_only=True):
    """One rank's part."""

    schema_version: Version = SCHEMA_VERSION
    chopper_version: str | None = None
    rank: Rank
    """Global rank; 0 when not distributed."""
    label: str | None = None
    """Shown instead of the number where ranks are not known, for example a file name."""
    world_size: Ranks | None = None
    local_rank: Rank | None = None
    hostname: str | None = None
    node: Rank | None = None
    """Number of the rank's node in the job, as the launcher says; None where it says none."""
    pid: Count | None = None
    process_started: Integer | None = None
    """Start of the process, in units of its machine; with ``pid`` and ``machine`` unique."""
    machine: str | None = None
    """Host name, boot id and PID namespace within which ``pid`` means this process."""
    loopback: str | None = None
    """Network namespace, whose processes exchange over its loopback; None where the loopback has a
    queue that may slow it down, or where this is unknown."""
    job: str | None = None
    """Text that the processes of one distributed job have in common; None for a process that had no
    rank when it began to record, and is recorded as rank 0 of a run of its own."""
    command: tuple[str, ...] | None = None
    start_ns: Time | None = None
    end_ns: Time | None = None
    status: Literal["running", "complete", "interrupted", "failed", "imported"] = "running"
    """``running`` in a run that is over means that the process died without a word."""
    error: str | None = None
    backend: str | None = None
    """Communication backend: nccl, gloo …"""
    process_groups: list[dict[str, Any]] = []
    coordinates: list[Coordinate] = []
    """Place in each dimension of parallelism that is known; two of one dimension contradict."""
    environment: dict[str, str] = {}
    devices: list[Device] = []
    device_id: Ordinal | None = None
    """The device that this rank computes on; None when it computes on the host."""
    stated_device: StatedDevice | None = None
    """The device that the user named, whose ceilings count; None where the trace decides."""
    traces: tuple[FileName, ...] = ()
    """Raw kernel traces, relative to the rank's directory (recorded) or absolute (imported)."""
    collectors: list[CollectorReport] = []
    clock_anchors: list[ClockAnchor] = []
    steps_source: str | None = None
    traced_steps: tuple[Integer, Integer] | None = None
    """First whole step of the trace, and the one after its last; equal without any.

    None without a trace, and in an import.
    """
    steps_count: Count | None = None
    """Steps that were seen; None in a recording that was never closed."""
    overhead: Overhead | None = None
    measures: list[Measure] = []
    """Numbers that the program measured, in the order of its calls (``prof.measure``)."""
    calibration: dict[str, Any] | None = None
    """Peaks that ``chopper calibrate`` measured on this machine, with the date."""
    findings: list[Finding] = []

    @property
    def host(self) -> str | None:
        """The machine, whose clock its ranks share: by its boot, else by its name.

        Containers of one machine have names of their own, and two machines may have the same.
        """
        boot = _BOOT.search(self.machine or "")
        return boot[0] if boot else self.hostname

    @property
    def name(self) -> str:
        """The rank with its place where dimensions divide the job: ``13 (pipeline 3, data 1)``."""
        several = [one for one in self.coordinates if one.size > 1]
        if {one.dimension for one in several} <= {"data"}:
            return str(self.rank)
        return f"{self.rank} ({', '.join(f'{one.dimension} {one.index}' for one in several)})"


class EngineChoice(msgspec.Struct, kw_only=True, frozen=True):
    """The engine that read the files of an imported run."""

    name: str
    """``serial``, ``processes`` or ``ray``."""
    workers: Count
    reason: str
    """Why this engine was chosen."""


class RunManifest(msgspec.Struct, kw_only=True):
    """The whole run."""

    schema_version: Version = SCHEMA_VERSION
    chopper_version: str | None = None
    kind: Literal["recorded", "imported"]
    name: str
    command: tuple[str, ...] | None = None
    workload: str | None = None
    created_ns: Time | None = None
    exit_code: Integer | None = None
    """Exit code of the recorded command; None when it was not launched by chopper."""
    engine: EngineChoice | None = None
    """Of an import; None for a recorded run."""
    addresses: tuple[str, ...] = ()
    """Of what was imported from elsewhere, without passwords and signatures."""
    ranks: list[RankManifest] = []
    findings: list[Finding] = []
    """Findings about the run as a whole (missing ranks, mixed runs)."""


class Upload(msgspec.Struct, kw_only=True, frozen=True):
    """A run at an address, as its ``manifest.json`` there says it."""

    folder: str
    """Name of the folder, beside the manifest, that holds the run."""
    files: dict[FileName, Count]
    """Each file's path in it, and its bytes."""


class _Stored(msgspec.Struct):
    schema_version: Version
    upload: Upload


class NewerRunError(RunFormatError):
    """The run was written by a newer chopper: nothing in it may be guessed."""


class _Versioned(msgspec.Struct):
    schema_version: Version


class _Counted(msgspec.Struct):
    ranks: list[msgspec.Raw] = []
    """As text: a million ranks take a gigabyte as objects."""


def encode(manifest: RankManifest | RunManifest) -> bytes:
    """Serialize a manifest."""
    return document(manifest)


def decode_rank(data: bytes, where: str) -> RankManifest:
    """Read a rank's part. ``where`` names the file in errors."""
    _check_version(data, where)
    data = json_without_secrets(data)
    return decode_json(data, RankManifest, f"{where}: damaged manifest", error=RunFormatError)


def decode_run(data: bytes, where: str) -> RunManifest:
    """Read a run's manifest. ``where`` names the file in errors."""
    _check_version(data, where)
    damaged = f"{where}: damaged manifest"
    count = len(decode_json(data, _Counted, damaged, error=RunFormatError).ranks)
    if count > MOST_RANKS:
        raise RunFormatError(
            f"{where}: names {count} ranks, expected at most {MOST_RANKS}; record the run again"
        )
    return decode_json(json_without_secrets(data), RunManifest, damaged, error=RunFormatError)


def named_by(part: RankManifest) -> set[str]:
    """Return the files that a rank's part names, in the rank's folder."""
    return {*part.traces, *(name for report in part.collectors for name in report.files)}


def encode_stored(upload: Upload) -> bytes:
    """Serialize what names a run at an address."""
    return encode_json(_Stored(STORED_VERSION, upload)) + b"\n"


def decode_stored(data: bytes, where: str) -> Upload | RunManifest:
    """Read the manifest of a run at an address; of an earlier version it is the run's own."""
    problem = f"{where}: not a chopper manifest"
    version = decode_json(data, _Versioned, problem, error=RunFormatError).schema_version
    if version != STORED_VERSION:
        return decode_run(data, where)
    upload = decode_json(data, _Stored, problem, error=RunFormatError).upload
    paths = map(PurePosixPath, upload.files)
    if not is_upload(upload.folder) or any(p.is_absolute() or ".." in p.parts for p in paths):
        raise RunFormatError(f"{problem} (it names files outside of its folder)")
    return upload


def _check_version(data: bytes, where: str) -> None:
    """Refuse a manifest of another schema, or of a newer chopper: nothing else of it is read."""
    problem = f"{where}: not a chopper manifest"
    version = decode_json(data, _Versioned, problem, error=RunFormatError).schema_version
    if version > SCHEMA_VERSION:
        raise NewerRunError(
            f"{where}: written by a newer chopper (schema {version}, this one reads up to "
            f"{SCHEMA_VERSION}); upgrade chopper-profiler"
        )
