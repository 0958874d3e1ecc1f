"""The run directory: one run = one directory, portable, versioned, readable by anyone.

manifest.json                 the whole run (made from the parts)
rank-00000/manifest.json      what this rank says about itself; no rank writes another's file
rank-00000/trace.json.gz      raw kernel trace
rank-00000/<table>.arrow      telemetry and step marks, Arrow IPC streams, flushed batch by batch, each
                              with the checksum of what stands before it
tables/rank-00000/*.parquet   what was derived from the raw files; safe to delete, made again if damaged
attempt-0/                    what was recorded before a restart: a run of its own
process-2/                    what a further process recorded that is no rank: a run of its own
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper._version import __version__
from chopper.errors import ChopperError, InputError, OutputError, RunFormatError, reason_of
from chopper.quantities import digits
from chopper.storage import manifest as m
from chopper.storage.files import (
    ChecksummedSink,
    DamagedStreamError,
    inside,
    one_line,
    read_bytes,
    stream_batches,
    write_atomic,
)
from chopper.tables import TABLES
from chopper.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

MANIFEST = "manifest.json"
EXPERIMENT = "experiment.json"
MOST_RANKS = 1 << 20
_RANK_DIR = re.compile(r"rank-(\d{5,7})$")


def rank_dir_name(rank: int) -> str:
    """Name of a rank's folder inside a run."""
    return f"rank-{rank:05d}"


def is_rank_dir(path: Path) -> bool:
    """Whether a folder of a run is called as a rank's."""
    return _RANK_DIR.match(path.name) is not None


def _in_bounds(ranks: list[int]) -> bool:
    """Whether all ranks are numbers that a job can have."""
    return all(0 <= rank < MOST_RANKS for rank in ranks)


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory, complete or half written."""
    try:
        return path.is_dir() and (
            (path / MANIFEST).is_file() or any(is_rank_dir(p) for p in path.iterdir())
        )
    except (OSError, ValueError):
        return False


def is_experiment(path: Path) -> bool:
    """Whether ``path`` holds the repetitions of a workload's variants, each a run of its own."""
    try:
        return (path / EXPERIMENT).is_file()
    except (OSError, ValueError):
        return False


class RunWriter:
    """One rank's side of a run: its folder, its manifest part, its files.

    Args:
        path: the run directory, created when missing and shared by all ranks.
        rank: global rank.
        manifest: what the rank says about itself so far, where its folder was claimed.
    """

    def __init__(self, path: Path, rank: int, manifest: m.RankManifest | None = None) -> None:
        self.directory = inside(path, rank_dir_name(rank))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OutputError(f"{self.directory}: cannot be created ({exc.strerror})") from exc
        self.manifest = manifest or m.RankManifest(
            rank=rank, chopper_version=__version__, start_ns=time.time_ns(), pid=os.getpid()
        )

    def note(self, code: str, message: str, *, severity: m.Severity = "warning") -> None:
        """Add a finding, once for each code."""
        if all(found.code != code for found in self.manifest.findings):
            self.manifest.findings.append(m.Finding(code=code, severity=severity, message=message))

    def save(self) -> None:
        """Write the part as it stands; called early and often, so that a kill loses little."""
        write_atomic(self.directory / MANIFEST, m.encode(self.manifest))


def _read_parts(
    path: Path, exit_code: int | None = None
) -> tuple[list[m.RankManifest], list[m.Finding]]:
    parts: list[m.RankManifest] = []
    findings: list[m.Finding] = []
    try:
        folders = sorted(inside(path, p.name) for p in path.iterdir() if is_rank_dir(p))
    except OSError as exc:
        raise RunFormatError(f"{path}: cannot be read ({reason_of(exc)})") from exc
    for folder in folders:
        file = inside(folder, MANIFEST)
        why = "the rank died before it wrote one"
        try:
            part = (
                m.decode_rank(read_bytes(file, error=RunFormatError), str(file))
                if file.is_file()
                else None
            )
        except m.NewerRunError:
            raise
        except RunFormatError as exc:
            part, why = None, str(exc)
        if part is None:
            findings.append(
                m.Finding(
                    code="run.part_missing",
                    severity="warning",
                    message=f"{folder.name} has no readable manifest: {why}",
                )
            )
            part = m.RankManifest(rank=int(folder.name[5:]), status="running")
            part.traces = tuple(sorted(p.name for p in folder.glob("trace*.json*")))
        if part.status == "running":
            findings.append(
                m.Finding(
                    code="run.rank_died",
                    severity="warning",
                    rank=part.rank,
                    message=f"rank {part.rank} never closed its recording: "
                    f"{_end_of(part, folder, exit_code)}; what it had flushed is used",
                )
            )
        parts.append(part)
    parts, of_older = _latest_attempt(parts)
    dropped = {p.rank for p in of_older}
    findings = [f for f in findings if f.rank not in dropped]
    if of_older:
        names = [rank_dir_name(p.rank) for p in of_older]
        findings.append(
            m.Finding(
                code="run.older_attempt",
                severity="warning",
                count=len(of_older),
                message=f"{some(names)}: recorded before the program was restarted with other "
                "ranks; kept there, but not part of this run",
            )
        )
    return parts, findings


def _end_of(part: m.RankManifest, folder: Path, exit_code: int | None) -> str:
    """What is known of a process that did not close its recording: how it ended, and when.

    Args:
        part: what it said about itself.
        folder: where it recorded.
        exit_code: of the command that was recorded; None where nobody waited for it.
    """
    from chopper.storage.process_identity import ProcessIdentity, runs

    alive = None
    if part.pid is not None:
        alive = runs(ProcessIdentity(part.pid, part.process_started, part.machine))
    known = ["it was killed, or is still running"]
    if alive is not None:
        state = "is still running" if alive else "is gone: killed, or ended by os._exit"
        known = [f"process {part.pid} {state}"]
    with contextlib.suppress(ValueError):
        name = signal.Signals((exit_code or 0) - 128).name
        known.append(f"the command's exit code is {exit_code}, as after {name}")
    step, end_ns = _last_step(folder, "number"), _last_step(folder, "end_ns")
    if step is not None and end_ns is not None:
        known.append(f"the last step on disk is step {step}, which ended at {_moment(end_ns)}")
    else:
        known.append("no step is on disk")
    if (written_s := last_written_s(folder)) is not None:
        known.append(f"{folder.name} was last written to at {_moment(int(written_s * 1e9))}")
    return "; ".join(known)


def last_written_s(folder: Path) -> float | None:
    """When a file of a rank's folder was last written, in Unix time; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return max(p.stat().st_mtime for p in folder.iterdir())
    return None


def _last_step(folder: Path, column: str) -> int | None:
    """The largest value of a column of a rank's steps; None without one that can be read."""
    import pyarrow.compute as pc

    with contextlib.suppress(ChopperError):
        stream = inside(folder, "step.arrow")
        if stream.is_file():
            largest: int | None = pc.max(read_stream(stream, "step")[0][column]).as_py()
            return largest
    return None


def _moment(time_ns: int) -> str:
    import numpy as np

    return f"{np.datetime64(time_ns, 'ns').astype('datetime64[s]')} UTC".replace("T", " ", 1)


def restart_count(part: m.RankManifest) -> int | None:
    """How often torchrun had restarted the program when a part was recorded; None without it."""
    return digits(part.environment.get("TORCHELASTIC_RESTART_COUNT", ""))


def _latest_attempt(
    parts: list[m.RankManifest],
) -> tuple[list[m.RankManifest], list[m.RankManifest]]:
    """Split parts into those of the first rank's attempt, and those left by an earlier one.

    A restart with fewer ranks leaves the folders of the ranks that are no more.
    """
    if not parts:
        return [], []
    latest, older = parts[0], []
    count = restart_count(latest)
    for part in parts[1:]:
        theirs = restart_count(part)
        if count is not None and theirs is not None and count != theirs:
            stale = theirs < count
        else:
            stale = (
                None not in (part.world_size, latest.world_size)
                and part.world_size != latest.world_size
                and part.start_ns is not None
                and latest.start_ns is not None
                and part.start_ns < latest.start_ns
            )
        if stale:
            older.append(part)
    return [p for p in parts if all(p is not o for o in older)], older


def _is_part(data: bytes) -> bool:
    try:
        m.decode_rank(data, "")
    except RunFormatError:
        return False
    return True


def finalize(
    path: Path,
    *,
    command: Iterable[str] | None = None,
    workload: str | None = None,
    exit_code: int | None = None,
) -> m.RunManifest:
    """Make ``manifest.json`` from the ranks' parts; called once, by whoever launched them.

    The runs of further processes inside of it get one each, and its rank goes to one of them when
    the process that holds it took no step.

    Raises:
        RunFormatError: no rank recorded anything.
    """
    from chopper.storage import processes

    processes.yield_ranks(path)
    for inner in processes.sub_runs(path):
        if not processes.recorders(inner):
            with contextlib.suppress(RunFormatError, OutputError):
                finalize(inner)
    parts, findings = _read_parts(path, exit_code)
    if not parts:
        raise RunFormatError(
            f"{path}: no rank recorded anything; did the command import torch and run a step?"
        )
    findings += _missing_ranks(parts)
    _embed_calibration(parts)
    run = m.RunManifest(
        chopper_version=__version__,
        kind="recorded",
        name=path.resolve().name,
        command=tuple(command) if command is not None else parts[0].command,
        workload=workload,
        created_ns=min((p.start_ns for p in parts if p.start_ns), default=None),
        exit_code=exit_code,
        ranks=parts,
        findings=findings,
    )
    write_atomic(path / MANIFEST, m.encode(run))
    return run


def _missing_ranks(parts: list[m.RankManifest]) -> list[m.Finding]:
    """Ranks of the job that left nothing, where all parts agree on how many there were."""
    worlds = {p.world_size for p in parts if p.world_size}
    if len(worlds) != 1 or len(parts) >= max(worlds):
        return []
    missing = sorted(set(range(max(worlds))) - {p.rank for p in parts})
    return [
        m.Finding(
            code="run.ranks_missing",
            severity="warning",
            count=len(missing),
            message=f"{len(missing)} of {max(worlds)} ranks are not in this run: "
            f"{some(missing)}; waiting for them cannot be told from transfer",
        )
    ]


def _embed_calibration(parts: list[m.RankManifest]) -> None:
    """Keep what this machine was measured to achieve with the ranks that computed on it.

    The measured ceiling travels with the run: it can be attributed elsewhere.
    """
    from chopper.hardware import calibration

    here = [p for p in parts if p.hostname == socket.gethostname()]
    on_host = [p for p in here if not p.devices]
    try:
        found = (
            calibration.load(None, cpu_name=on_host[0].environment.get("cpu"), ranks=len(on_host))
            if on_host
            else None
        )
        if found is not None:
            for part in on_host:
                part.calibration = part.calibration or calibration.to_manifest(found)
        for part in here:
            name = next((d.name for d in part.devices if d.device_id == part.device_id), None)
            if name is None or part.calibration is not None:
                continue
            # Devices do not share their units: what one reached alone holds beside others.
            found = calibration.load(name, ranks=len(here)) or calibration.load(name)
            if found is not None:
                part.calibration = calibration.to_manifest(found)
    except InputError:
        # A damaged store is `chopper calibrate`'s to report; the recording is worth more.
        return


class Run:
    """A recorded or imported run, read lazily.

    Attributes:
        manifest: what the run says about itself.
        path: its directory, or None for traces that were loaded without one.
    """

    def __init__(
        self,
        manifest: m.RunManifest,
        path: Path | None,
        tables: dict[tuple[int, str], pa.Table] | None = None,
        source: str | None = None,
    ) -> None:
        self.manifest = manifest
        self.path = path
        self.source = source or str(path)
        """What the user named: shown in messages and next commands."""
        self._tables: dict[tuple[int, str], pa.Table] = tables if tables is not None else {}

    @classmethod
    def open(cls, path: Path) -> Run:
        """Open a run directory; a run that was never closed is read from its parts.

        Raises:
            RunFormatError: not a run, damaged, or written by a newer version.
        """
        from chopper.storage import processes

        if not is_run(path):
            raise RunFormatError(f"{path}: not a chopper run: no {MANIFEST} and no rank-* folder")
        file = inside(path, MANIFEST)
        damage: m.Finding | None = None
        if file.is_file():
            data = read_bytes(file, error=RunFormatError)
            try:
                found = m.decode_run(data, str(file))
                ranks = [part.rank for part in found.ranks]
                if not ranks or len(set(ranks)) < len(ranks) or not _in_bounds(ranks):
                    raise RunFormatError(
                        f"{file}: damaged manifest (ranks {some(ranks) or 'none'})"
                    )
                found.findings += processes.findings(path)
                return cls(found, path)
            except m.NewerRunError:
                raise
            except RunFormatError as exc:
                if _is_part(data):
                    raise RunFormatError(
                        f"{path}: is the folder of one rank; pass the run: {path.resolve().parent}"
                    ) from exc
                if not any(is_rank_dir(p) for p in path.iterdir()):
                    raise
                damage = m.Finding(
                    code="run.manifest_damaged",
                    severity="warning",
                    message=f"{exc}; the ranks' own manifests are used",
                )
        parts, findings = _read_parts(path)
        if damage is None:
            findings.append(
                m.Finding(
                    code="run.manifest_missing",
                    severity="info",
                    message=f"{path}: no {MANIFEST}, which whoever started the ranks writes at "
                    "their end; the ranks' own manifests are used",
                )
            )
        else:
            findings.insert(0, damage)
        findings += _missing_ranks(parts) + processes.findings(path)
        return cls(
            m.RunManifest(
                chopper_version=__version__,
                kind="recorded",
                name=path.resolve().name,
                command=parts[0].command,
                created_ns=min((p.start_ns for p in parts if p.start_ns), default=None),
                ranks=parts,
                findings=findings,
            ),
            path,
        )

    @property
    def ranks(self) -> list[int]:
        """Ranks in the run, ascending."""
        return sorted(part.rank for part in self.manifest.ranks)

    def part(self, rank: int) -> m.RankManifest:
        """The manifest part of one rank."""
        return next(part for part in self.manifest.ranks if part.rank == rank)

    def rank_dir(self, rank: int) -> Path:
        """Folder of one rank.

        Raises:
            RunFormatError: the run is in memory only, or the folder is a link.
        """
        if self.path is None:
            raise RunFormatError(f"{self.source}: was loaded from traces and has no directory")
        return inside(self.path, rank_dir_name(rank))

    def table(self, rank: int, name: str) -> pa.Table:
        """A table of one rank, empty when nothing was recorded for it.

        Trace tables are made from the raw trace at the first call and kept in ``tables/``.

        Raises:
            KeyError: no table of this name is declared.
        """
        declared = TABLES[name]
        key = (rank, name)
        if key not in self._tables:
            self._load(rank, name)
        return self._tables.get(key, declared.empty())

    def put(self, rank: int, name: str, table: pa.Table) -> None:
        """Hold a derived table in memory, validated against its declaration."""
        self._tables[rank, name] = TABLES[name].validate(table)

    def _load(self, rank: int, name: str) -> None:
        if self.path is None:
            return
        stream = inside(self.rank_dir(rank), f"{name}.arrow")
        if stream.is_file():
            table, finding = read_stream(stream, name)
            self._tables[rank, name] = table
            if finding is not None:
                self.part(rank).findings.append(finding)
            return
        if name in _TRACE_TABLE_NAMES:
            from chopper.ingest import ingest_rank

            ingest_rank(self, rank)

    @property
    def store(self) -> dict[tuple[int, str], pa.Table]:
        """All tables in memory, by (rank, name)."""
        return self._tables

    def to_pandas(self, rank: int, name: str) -> Any:
        """A table of one rank as a pandas DataFrame."""
        return self.table(rank, name).to_pandas()

    def __repr__(self) -> str:
        return f"<chopper.Run {self.source!r}: {len(self.manifest.ranks)} rank(s)>"


_TRACE_TABLE_NAMES = frozenset(
    (
        "host_span",
        "thread",
        "device_event",
        "collective",
        "step",
        "memory_event",
        "counter",
        "synchronization",
    )
)


_TIME_MOST_NS = 1 << 61


def read_stream(path: Path, name: str) -> tuple[pa.Table, m.Finding | None]:
    """Read an Arrow IPC stream up to its last whole batch.

    A killed writer leaves an open end; the batches before it are returned with a finding.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    declared = TABLES[name]
    batches: list[pa.RecordBatch] = []
    problem: str | None = None
    try:
        for batch in stream_batches(read_bytes(path)):
            batches.append(batch)
    except (DamagedStreamError, InputError, MemoryError) as exc:
        problem = one_line(exc)
    table = declared.completed(pa.Table.from_batches(batches) if batches else declared.empty())
    finding = None
    rows_count = table.num_rows
    for column in {"time_ns", "start_ns", "end_ns"} & set(table.column_names):
        # Differences of times must fit into 64 bits.
        early = pc.less(table[column], -_TIME_MOST_NS)
        late = pc.greater(table[column], _TIME_MOST_NS)
        table = table.filter(pc.invert(pc.fill_null(pc.or_(early, late), fill_value=False)))
    if table.num_rows < rows_count:
        finding = m.Finding(
            code="telemetry.rows_lost",
            severity="warning",
            count=rows_count - table.num_rows,
            message=f"{path.name}: {rows_count - table.num_rows} of {rows_count} rows hold times "
            "that no clock shows, and are left out",
        )
    if problem is not None:
        finding = m.Finding(
            code="telemetry.truncated",
            severity="warning",
            message=f"{path.name}: damaged, or ends in the middle of a batch ({problem}); "
            f"{table.num_rows} rows before it are used",
        )
    return table.unify_dictionaries(), finding


class StreamWriter:
    """Writes one table as an Arrow IPC stream; every ``write`` is flushed to the file.

    Args:
        path: file to create, ``<table name>.arrow``.
        name: a declared table.
        exclusive: the file must not be there yet.

    Raises:
        FileExistsError: it is, and ``exclusive`` was asked for.
        OutputError: it cannot be created.
    """

    def __init__(self, path: Path, name: str, *, exclusive: bool = False) -> None:
        import pyarrow as pa

        self._declared = TABLES[name]
        self.path = path
        try:
            self._sink = ChecksummedSink(path.open("xb" if exclusive else "wb"))
        except FileExistsError:
            raise
        except OSError as exc:
            raise OutputError(f"{path}: cannot be written ({exc.strerror})") from exc
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        # Writes nothing yet: the schema goes out with the first batch.
        self._writer = pa.ipc.new_stream(self._sink, self._declared.arrow, options=options)

    def write(self, columns: dict[str, Any]) -> None:
        """Append one batch; ``columns`` maps every declared column to a sequence.

        Raises:
            OutputError: the disk is full or the file vanished.
        """
        import pyarrow as pa

        from chopper.arrow import to_arrow

        schema = self._declared.arrow
        batch = pa.record_batch([to_arrow(columns[f.name], f.type) for f in schema], schema=schema)
        try:
            self._writer.write_batch(batch, self._sink.batch_metadata())
            self._sink.flush()
        except OSError as exc:
            raise OutputError(f"{self.path}: cannot be written ({exc.strerror})") from exc

    def close(self) -> None:
        """End the stream; safe to call twice.

        Raises:
            OutputError: its end cannot be written; the batches before it are readable.
        """
        if self._sink.closed:
            return
        try:
            self._writer.close()
            self._sink.write_trailer()
            self._sink.close()
        except OSError as exc:
            raise OutputError(f"{self.path}: cannot be written ({exc.strerror})") from exc
        finally:
            with contextlib.suppress(OSError):
                self._sink.close()
