"""From raw traces to a run: which files belong together, which rank each is, tables per rank."""

from __future__ import annotations

import glob as globbing
import os
import re
import shutil
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from chopper import _beside, _logs, _snapshots, manifest
from chopper._version import __version__
from chopper.errors import InputError, OutputError
from chopper.manifest import Finding, RankManifest, RunManifest
from chopper.run import (
    MANIFEST,
    MOST_RANKS,
    Run,
    StreamWriter,
    is_experiment,
    is_run,
    rank_dir_name,
    write_atomic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo

    import pyarrow as pa

    from chopper.collectors.kineto import ParsedTrace

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker|gpu)[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
_HANDLER_NAME = re.compile(r"(.+)_(\d{1,10})\.\d+\.pt\.trace\.json")
"""As ``torch.profiler.tensorboard_trace_handler`` names files: host, process, milliseconds."""
_APART_NS = 3600 * 10**9
"""Ranks of one run overlap in time; files an hour apart are two runs."""
_SLOW_S = 2.0
"""Foreign traces that took longer to read are kept as tables for the next time."""
_QUICK_BYTES = 1 << 20
"""Smaller files are read faster than that in any case, so nobody looks for their tables."""


class _Found(dict[Path, bool]):
    """Trace files in order → whether the user named the very file."""

    def __init__(self, files: dict[Path, bool] | None = None) -> None:
        super().__init__(files or {})
        self.parts: dict[Path, list[Path]] = {}
        """All files of a recording that is several, by its first."""
        self.counters: list[Path] = []
        """Tables of hardware counters beside them."""
        self.logs: list[Path] = []
        """Logs of clocks, power and the like beside them."""
        self.snapshots: list[Path] = []
        """Snapshots of the allocator beside them."""
        self._groups: dict[str, Path] = {}

    def add(self, file: Path, *, named: bool) -> None:
        """Take a file for what it is.

        Raises:
            InputError: a CSV that the user named is none that anybody reads, or a report that only
                its own tool can.
        """
        from chopper.collectors import readers

        try:
            reader = readers.reader_of(file)
        except InputError:
            if named:
                raise
            return
        if reader is None:
            if named:
                raise InputError(
                    f"{file}: a CSV of no kind that is known{readers.what_else(file)}; expected a "
                    "trace or counters of kernels (rocprofv3 --output-format csv, ncu --csv), or a "
                    "log with a time, a device and clocks, power or energy (nvidia-smi --format=csv)"
                )
            return
        beside = {"counters": self.counters, "log": self.logs, "memory": self.snapshots}
        if reader.kind != "trace":
            kept = beside[reader.kind]
            if file not in kept:
                kept.append(file)
        elif reader.grouped:
            self._add_part(reader.load().group_of(file), file, named=named)
        else:
            self[file] = named or self.get(file, False)

    def _add_part(self, group: str, file: Path, *, named: bool) -> None:
        first = self._groups.setdefault(group, file)
        parts = self.parts.setdefault(first, [])
        if file not in parts:
            parts.append(file)
        self[first] = named or self.get(first, False)

    def files(self, file: Path) -> list[Path]:
        """All files of the recording that one stands for."""
        return self.parts.get(file, [file])

    def take_times(self) -> None:
        """Where there is no trace, counters that say when their kernels ran are one."""
        from chopper.collectors import readers

        if not self:
            for file in self.counters:
                if readers.has_times(file):
                    self._add_part(str(file), file, named=True)


def find_sources(named: Sequence[str | Path]) -> list[Path]:
    """Files that the user means by paths, globs and directories, in order, each once.

    Raises:
        InputError: nothing is there, or a directory holds no traces.
    """
    found = _find(named)
    return list(found) or found.logs or found.snapshots


def _find(named: Sequence[str | Path]) -> _Found:
    found = _Found()
    _check_names(named)
    for item in named:
        path = Path(item)
        try:
            if is_run(path):
                raise InputError(
                    f"{path}: is a run directory already; expected trace files, or a directory or "
                    "pattern of them (`chopper import` joins run directories of one run)"
                )
            if path.is_dir():
                for file in _in_directory(path):
                    found.add(file, named=False)
            elif path.exists():
                found.add(path, named=True)
            elif globbing.has_magic(str(item)):
                matches = globbing.glob(str(item), recursive=True)  # noqa: PTH207
                files = [p for p in map(Path, sorted(matches)) if p.is_file()]
                if not files:
                    raise InputError(f"{item}: the pattern matches no file")
                for file in files:
                    found.add(file, named=True)
            else:
                raise InputError(f"{path}: no such file or directory")
        except ValueError as exc:
            raise InputError(f"{str(item)!r}: no file can have this name ({exc})") from exc
        except OSError as exc:
            raise InputError(f"{item}: cannot be read ({exc.strerror})") from exc
    found.take_times()
    if found.counters and not found:
        raise InputError(
            f"{found.counters[0]}: counters of kernels alone say nothing of time; name the kernel "
            "trace of the same steps too"
        )
    return found


def _check_names(named: Sequence[str | Path]) -> None:
    # As a path, an empty name would be the current directory.
    if any(item == "" for item in named):
        raise InputError("'': an empty name (an unset variable?); name a run or trace files")


def _in_directory(path: Path) -> list[Path]:
    """The traces of a directory.

    Raises:
        InputError: there are none; says what is there instead.
    """
    from chopper.collectors import readers

    entries = sorted(path.iterdir())
    if is_experiment(path):
        first = next((p for p in entries if p.is_dir() and is_run(p)), None)
        hint = "" if first is None else f"pass one of them: {first}; or: "
        raise InputError(
            f"{path}: the runs of an experiment, not one run; {hint}chopper report {path}"
        )
    files = [p for p in entries if not p.name.startswith(".") and p.is_file()]
    inside = [p for p in files if readers.may_hold_traces(p)]
    tables = [p for p in files if readers.is_csv(p)]
    if inside or any(_says_when(p) for p in tables):
        return inside + tables
    runs = [p.name for p in entries if p.is_dir() and (p / MANIFEST).is_file()]
    message = (
        f"{path}: a directory without traces (no *.json or *.json.gz, *.sqlite, *.rpd, *.db or "
        "rocprof *.csv) and not a run"
    )
    if runs:
        message += f"; it holds runs, pass one of them: {path / runs[-1]}"
    elif any(readers.may_hold_traces(p) for p in path.glob("*/*")):
        message += f"; there are traces deeper in it, pass '{path}/*/*.json*'"
    raise InputError(message)


def _says_when(table: Path) -> bool:
    """Whether a CSV can be read without a trace."""
    from chopper.collectors import readers

    reader = readers.reader_of(table)
    return reader is not None and (reader.kind != "counters" or readers.has_times(table))


def load(named: Sequence[str | Path]) -> Run:
    """Open a run directory, or read traces as a run in memory.

    Args:
        named: one run directory, or trace files, globs and directories of traces.

    Raises:
        InputError: what is named is neither; one line says what was found.
    """
    if not named:
        raise InputError("nothing to load: name a run directory or trace files")
    _check_names(named)
    if len(named) == 1 and is_run(Path(named[0])):
        return Run.open(Path(named[0]))
    for item in named:
        if is_run(Path(item)):
            raise InputError(
                f"{item}: is a run directory; name it alone, not with other files (`chopper import A B "
                "-o DIR` joins run directories of one run)"
            )
    found = _find(named)
    if len(found) == 1 and (file := next(iter(found))).name == MANIFEST and is_run(file.parent):
        return Run.open(file.parent)
    return _import(found, source=" ".join(str(n) for n in named))


def import_traces(files: Sequence[Path], *, source: str | None = None) -> Run:
    """Read trace files as one run: a rank per file, or several where they were merged.

    Raises:
        InputError: a file is no trace, two files are the same rank, or they are of two runs.
    """
    return _import(_Found(dict.fromkeys(files, True)), source=source)


def _import(found: _Found, *, source: str | None) -> Run:
    if not found:
        return _alone(found, source)
    began = time.perf_counter()
    numbered, findings, fresh = _collect(found)
    run = _as_run(numbered, findings, source)
    _attach(run, found)
    if fresh and time.perf_counter() - began > _SLOW_S:
        # When the run is let go of, so that results come first.
        weakref.finalize(run, _keep, fresh)
    return run


def _alone(found: _Found, source: str | None, zone: tzinfo | None = None) -> Run:
    """What stands without a trace, as a run: looked at, not attributed."""
    files = [*found.logs, *found.snapshots]
    part = RankManifest(rank=0, label=files[0].name, status="imported")
    run = Run(
        RunManifest(kind="imported", name=files[0].name, ranks=[part]),
        None,
        source=source or str(files[0]),
    )
    _attach(run, found, zone)
    rows = sum(table.num_rows for table in run.store.values())
    run.manifest.findings.append(
        Finding(
            code="run.no_trace",
            severity="info",
            message=f"{files[0].name}: no kernel trace, so nothing is attributed; {rows} rows of "
            f"{', '.join(sorted({name for _, name in run.store}))} are here (chopper export, or "
            "chopper analyze --view memory_segments for a snapshot)",
        )
    )
    return run


def _attach(run: Run, found: _Found, zone: tzinfo | None = None) -> None:
    """Join to a run what was found beside its traces.

    Raises:
        InputError: a file cannot be read, or nobody can tell which rank it is of.
    """
    _attach_counters(run, found.counters)
    if found.logs:
        _logs.attach(run, found.logs, zone)
    ranks = {file: _rank_in(file, run.ranks) for file in found.snapshots}
    _snapshots.attach(run, ranks)


def write_run(
    found: Sequence[str | Path], directory: Path, *, zone: tzinfo | None = None
) -> RunManifest:
    """Read traces and write them, with their tables, as a run directory.

    Args:
        found: files, globs and directories.
        directory: an empty directory that exists.
        zone: time zone of logs whose times name none.

    Raises:
        InputError: as :func:`import_traces`.
        OutputError: it cannot be written; what was written is the caller's to remove.
    """
    from chopper import cache

    files = _find(found)
    if not files:
        return _write_alone(_alone(files, None, zone), directory)
    numbered, findings, _ = _collect(files)
    run = _as_run(numbered, findings, None)
    _attach(run, files, zone)
    run.manifest.name = directory.resolve().name
    run.manifest.created_ns = time.time_ns()
    raw: dict[Path, Path] = {}
    try:
        (directory / "tables").mkdir()
        for part in run.manifest.ranks:
            file, trace = numbered[part.rank]
            folder = directory / rank_dir_name(part.rank)
            folder.mkdir()
            copies = []
            for source in files.files(file):
                kept = folder / _kept_name(source)
                _copy(raw.setdefault(source, kept), kept, source)
                copies.append(kept)
            part.traces = tuple(kept.name for kept in copies)
            part.source_digest = cache.digest(copies)
            write_atomic(folder / MANIFEST, manifest.encode(part))
            _write_counters(run, part.rank, folder)
            _logs.write(run, part.rank, folder)
            _snapshots.write(run, part.rank, folder)
            cache.write(
                directory / "tables" / folder.name, part.source_digest, trace.tables, _head(trace)
            )
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({exc.strerror})") from exc
    write_atomic(directory / MANIFEST, manifest.encode(run.manifest))
    return run.manifest


def _write_alone(run: Run, directory: Path) -> RunManifest:
    run.manifest.name = directory.resolve().name
    run.manifest.created_ns = time.time_ns()
    folder = directory / rank_dir_name(0)
    try:
        folder.mkdir()
        write_atomic(folder / MANIFEST, manifest.encode(run.part(0)))
        _logs.write(run, 0, folder)
        _snapshots.write(run, 0, folder)
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({exc.strerror})") from exc
    write_atomic(directory / MANIFEST, manifest.encode(run.manifest))
    return run.manifest


def _write_counters(run: Run, rank: int, folder: Path) -> None:
    table = run.table(rank, "kernel_counter")
    if table.num_rows:
        writer = StreamWriter(folder / "kernel_counter.arrow", "kernel_counter")
        try:
            writer.write(table.to_pydict())
        finally:
            writer.close()


def _attach_counters(run: Run, files: Sequence[Path]) -> None:
    """Give each rank the counters that are its own.

    Raises:
        InputError: a file cannot be read, or nobody can tell which rank it is of.
    """
    if not files:
        return
    import pyarrow as pa

    from chopper.collectors.counters import read_counters

    of_rank: dict[int, list[pa.Table]] = {}
    for file in files:
        rank = _rank_of_counters(run, file)
        table, odd = read_counters(file)
        of_rank.setdefault(rank, []).append(table)
        run.part(rank).findings += [
            Finding(code="counters.damaged", severity="warning", rank=rank, message=line)
            for line in odd
        ]
    for rank, tables in of_rank.items():
        run.put(rank, "kernel_counter", pa.concat_tables(tables).unify_dictionaries())


def _rank_of_counters(run: Run, file: Path) -> int:
    ranks = run.ranks
    named = _rank_in(file, ranks)
    if named is not None:
        return named
    if len(ranks) == 1:
        return ranks[0]
    raise InputError(
        f"{file}: counters of which rank? The traces are of {len(ranks)} ranks "
        f"({_some(ranks)}); put its number into the file's name, as counters-rank{ranks[0]}.csv"
    )


def _rank_in(file: Path, ranks: Sequence[int]) -> int | None:
    """The rank that a file's name says, where there is that rank."""
    match = _RANK_IN_NAME.search(file.name)
    return int(match.group(1)) if match and int(match.group(1)) in ranks else None


def _copy(first: Path, kept: Path, file: Path) -> None:
    """Copy a raw trace; further ranks of the same file share the first copy where links work."""
    if first != kept:
        try:
            os.link(first, kept)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(file, kept)


def _kept_name(file: Path) -> str:
    """What a raw trace is called within a run: Kineto's as those that chopper records."""
    from chopper.collectors import readers

    if readers.reader_of(file) is readers.KINETO:
        return "trace.json.gz" if _is_gzip(file) else "trace.json"
    return f"trace-{file.name}"


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


_Numbered = dict[int, "tuple[Path, ParsedTrace]"]


def _collect(
    found: _Found,
) -> tuple[_Numbered, list[Finding], list[tuple[list[Path], list[ParsedTrace]]]]:
    """The traces of files by rank, what is odd about them, and which were read afresh."""
    traces: list[tuple[Path, ParsedTrace]] = []
    fresh: list[tuple[list[Path], list[ParsedTrace]]] = []
    findings: list[Finding] = []
    refused: InputError | None = None
    for file, is_named in found.items():
        try:
            files = found.files(file)
            kept = _from_cache(files)
            read = kept or _read(files)
        except InputError as exc:
            if is_named or len(found) == 1:
                raise
            # One bad file in a directory must not hide the others.
            refused = refused or exc
            findings.append(
                Finding(code="run.file_left_out", severity="warning", message=f"left out: {exc}")
            )
            continue
        findings += _credible(read)
        traces += [(file, trace) for trace in read]
        if kept is None:
            fresh.append((files, read))
    if refused is not None and not traces:
        raise refused
    traces, left_out = _beside.joined(traces, found)
    findings += [*left_out, *_check_one_run(traces)]
    numbered = _number_ranks(traces)
    return numbered, findings + _check_ranks(numbered), fresh


def _credible(traces: list[ParsedTrace]) -> list[Finding]:
    """Forget ranks and job sizes that no job has: all that counts ranks would believe them."""
    findings: list[Finding] = []
    for trace in traces:
        if trace.rank is not None and trace.rank >= MOST_RANKS:
            findings.append(
                Finding(
                    code="run.rank_number",
                    severity="warning",
                    message=f"{trace.source}: says it is rank {trace.rank}; not believed",
                )
            )
            trace.rank = None
        if trace.world_size is not None and trace.world_size > MOST_RANKS:
            findings.append(
                Finding(
                    code="run.world_size",
                    severity="warning",
                    message=f"{trace.source}: says it is of a job of {trace.world_size} ranks; "
                    "not believed",
                )
            )
            trace.world_size = None
    return findings


def _as_run(numbered: _Numbered, findings: list[Finding], source: str | None) -> Run:
    files = list(dict.fromkeys(file for file, _ in numbered.values()))
    run = Run(
        RunManifest(
            chopper_version=__version__,
            kind="imported",
            name=files[0].name if len(files) == 1 else f"{len(files)} traces",
            ranks=[_part(rank, file, trace) for rank, (file, trace) in sorted(numbered.items())],
            findings=findings,
        ),
        None,
        source=source or " ".join(str(f) for f in files),
    )
    for rank, (_, trace) in numbered.items():
        for name, table in trace.tables.items():
            run.put(rank, name, table)
    return run


def _read(files: Sequence[Path]) -> list[ParsedTrace]:
    """The traces of one recording.

    Raises:
        InputError: it cannot be read.
    """
    from chopper.collectors import readers

    try:
        reader = readers.reader_of(files[0])
    except OSError as exc:
        raise InputError(f"{files[0]}: cannot be read ({exc.strerror or exc})") from exc
    if reader is not None and reader.kind == "counters":
        reader = next(r for r in readers.READERS if r.grouped)
    return (reader or readers.KINETO).read(files)


def _from_cache(files: Sequence[Path]) -> list[ParsedTrace] | None:
    """The traces of a recording as an earlier run kept them, or None."""
    from chopper import cache

    file = files[0]
    try:
        if file.stat().st_size < _QUICK_BYTES:
            return None
        base = cache.directory("")
        if base is None or not base.is_dir():
            return None
        key = cache.digest(list(files))
    except OSError:
        return None
    folder = base / key
    traces: list[ParsedTrace] = []
    count = 1
    while len(traces) < count:
        kept = cache.read(folder / str(len(traces)), key)
        if kept is None:
            return None
        tables, about = kept
        count = about.count
        trace = _rebuilt(about.head, tables)
        if trace is None:
            return None
        trace.source = file.name
        traces.append(trace)
    cache.prune(folder)
    return traces


def _rebuilt(head: bytes, tables: dict[str, pa.Table]) -> ParsedTrace | None:
    import msgspec

    from chopper.collectors.kineto import ParsedTrace, TraceHead

    try:
        known = msgspec.json.decode(head, type=TraceHead)
    except msgspec.MsgspecError:
        return None
    return ParsedTrace(**vars(known), tables=tables)


def _keep(fresh: list[tuple[list[Path], list[ParsedTrace]]]) -> None:
    """Write what was read to the user's cache; best effort."""
    from chopper import cache

    kept = {table.name for table in cache.KEPT_TABLES}
    for files, traces in fresh:
        if any(not trace.tables.keys() <= kept for trace in traces):
            continue
        try:
            if files[0].stat().st_size < _QUICK_BYTES:
                continue
            key = cache.digest(files)
            folder = cache.directory(key)
            if folder is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        for i, trace in enumerate(traces):
            written = cache.write(
                folder / str(i), key, trace.tables, _head(trace), count=len(traces)
            )
            if not written:
                return
        cache.prune(folder)


def _head(trace: ParsedTrace) -> bytes:
    import msgspec

    return msgspec.json.encode(trace.head())


def _check_ranks(numbered: _Numbered) -> list[Finding]:
    """What the ranks that are there say about those that should be."""
    findings: list[Finding] = []
    main = {rank: item for rank, item in numbered.items() if item[1].main}
    worlds = {t.world_size for _, t in main.values() if t.world_size}
    if not worlds:
        return findings
    world = max(worlds)
    unknown = [file.name for file, t in main.values() if t.rank is None]
    if unknown and len(main) > 1:
        findings.append(
            Finding(
                code="run.rank_unknown",
                severity="warning",
                count=len(unknown),
                message=f"{_some(unknown)} do not say which rank they are, beside files of a job "
                f"of {world}: they may be of another run, and their numbers are guessed",
            )
        )
    beyond = [rank for rank in main if rank >= world]
    if beyond:
        findings.append(
            Finding(
                code="run.rank_beyond_world",
                severity="warning",
                count=len(beyond),
                message=f"rank {_some(beyond)} of a job of {world}: ranks count from 0 to "
                f"{world - 1}",
            )
        )
    missing = sorted(set(range(world)) - set(main))
    if missing:
        findings.append(_missing_ranks(missing, world))
    return findings


def _some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:8])) + (" …" if len(values) > 8 else "")


def _missing_ranks(missing: list[int], world: int) -> Finding:
    return Finding(
        code="run.ranks_missing",
        severity="warning" if len(missing) < world - 1 else "info",
        count=len(missing),
        message=f"{len(missing)} of {world} ranks are not here ({_some(missing)}): waiting for them cannot "
        "be told from transfer",
    )


def _part(rank: int, file: Path, trace: ParsedTrace) -> RankManifest:
    span = trace.span_ns
    return RankManifest(
        rank=rank,
        label=_label(rank, file, trace),
        world_size=trace.world_size,
        start_ns=span[0] if span else None,
        end_ns=span[1] if span else None,
        status="imported",
        backend=trace.backend,
        process_groups=trace.process_groups,
        environment=trace.environment,
        devices=trace.devices,
        device_id=trace.device_id,
        traces=(str(file.resolve()),),
        findings=trace.findings,
        pid=trace.host_pid,
        hostname=_host(file, trace),
    )


def _host(file: Path, trace: ParsedTrace) -> str | None:
    """The host that a trace was recorded on, by its header or by the name torch gives the file."""
    named = trace.environment.get("host_name")
    if named is None:
        match = _HANDLER_NAME.match(file.name)
        if match is not None and int(match[2]) == trace.host_pid:
            return match[1]
    return named


def _label(rank: int, file: Path, trace: ParsedTrace) -> str | None:
    """What is shown instead of a rank's number, where the number alone says too little."""
    if trace.rank is not None:
        named = f"rank {trace.rank}"
    else:
        named = f"{file.name} {trace.process}" if trace.process else file.name
    if not trace.main:
        return f"{named} device {trace.device_id}"
    return named if trace.rank != rank else None


def _check_one_run(traces: list[tuple[Path, ParsedTrace]]) -> list[Finding]:
    """Refuse files that cannot be of one run."""
    if len(traces) < 2:
        return []
    worlds: dict[int, Path] = {}
    for file, trace in traces:
        if trace.world_size is not None:
            worlds.setdefault(trace.world_size, file)
    if len(worlds) > 1:
        told = ", ".join(f"{file.name} says {world}" for world, file in sorted(worlds.items()))
        raise InputError(
            f"traces of different runs: world sizes differ ({told}); pass the files of one run"
        )
    spans = sorted(
        ((trace.span_ns, file) for file, trace in traces if trace.span_ns), key=lambda s: s[0]
    )
    if not spans:
        return []
    end, last = spans[0][0][1], spans[0][1]
    for (start, this_end), file in spans[1:]:
        if start - end > _APART_NS:
            hours = (start - end) / 3.6e12
            raise InputError(
                f"traces of different runs: {file.name} starts {hours:.1f} h after {last.name} "
                "ended; pass the files of one run"
            )
        if this_end > end:
            end, last = this_end, file
    overlap = max(s[0] for s, _ in spans) < min(s[1] for s, _ in spans)
    if overlap:
        return []
    return [
        Finding(
            code="run.no_common_time",
            severity="warning",
            message="the ranks' traces share no moment in time: their clocks disagree, or they "
            "are different windows; ranks are attributed alone",
        )
    ]


def _number_ranks(traces: list[tuple[Path, ParsedTrace]]) -> _Numbered:
    """Ranks as recorded, else from the file's name, else in order.

    Further devices of a process come after all ranks.
    """
    numbered: _Numbered = {}
    main = [item for item in traces if item[1].main]
    others = [item for item in traces if not item[1].main]
    rest: list[tuple[Path, ParsedTrace]] = []
    for file, trace in main:
        rank = trace.rank
        if rank is None:
            rest.append((file, trace))
            continue
        if rank in numbered:
            raise InputError(
                f"two traces claim rank {rank}: {numbered[rank][0]} and {file}; pass one of them "
                "(they may be two windows of that rank, or two runs), or analyze them apart"
            )
        numbered[rank] = (file, trace)
    named: _Numbered = {}
    for file, trace in rest:
        match = _RANK_IN_NAME.search(file.name)
        rank = int(match.group(1)) if match else None
        if rank is None or rank in named or rank in numbered:
            named = {}
            break
        named[rank] = (file, trace)
    if len(named) == len(rest):
        numbered |= named
    else:
        free = (i for i in range(len(main) + len(numbered)) if i not in numbered)
        numbered |= {next(free): item for item in rest}
    first = max([*numbered, *(t.world_size - 1 for _, t in main if t.world_size), -1]) + 1
    return numbered | {first + i: item for i, item in enumerate(others)}


def ingest_rank(run: Run, rank: int) -> None:
    """Make the trace tables of one rank of a run directory from its raw traces.

    Tables that an earlier call left in ``tables/`` are used when they were made from these very
    files; else they are made and, when the run is let go of, left there.
    """
    import msgspec

    from chopper import cache

    part = run.part(rank)
    directory = run.rank_dir(rank)
    files = [f for f in (directory / name for name in part.traces) if f.is_file()]
    if not files:
        _note(
            run,
            rank,
            Finding(
                code="trace.absent",
                severity="warning",
                rank=rank,
                message=f"rank {rank} has no kernel trace: nothing to attribute there",
                withholds=("attribution",),
            ),
        )
        return
    try:
        key = cache.digest(files)
    except OSError as exc:
        raise InputError(f"{files[-1]}: cannot be read ({exc.strerror})") from exc
    folder = directory.parent / "tables" / rank_dir_name(rank)
    kept = cache.read(folder, key)
    trace = None if kept is None else _rebuilt(kept[1].head, kept[0])
    if trace is None:
        try:
            traces = _read_kept(files)
        except InputError as exc:
            # A rank that was killed while it wrote leaves a file without events.
            _note(
                run,
                rank,
                Finding(
                    code="trace.unreadable",
                    severity="warning",
                    rank=rank,
                    message=f"rank {rank}: {exc}",
                    withholds=("attribution",),
                ),
            )
            return
        trace = _of_part(traces, part)
        weakref.finalize(run, _keep_in_run, folder.absolute(), key, trace)
    for finding in trace.findings:
        # Each rank's file has the same name: without the rank nobody could tell which is meant.
        _note(run, rank, msgspec.structs.replace(finding, rank=rank))
    if part.device_id is None:
        part.device_id = trace.device_id
    if not part.devices:
        part.devices = trace.devices
    for name, table in trace.tables.items():
        # What was recorded beside the trace knows better: it goes on where the trace stops.
        if (rank, name) not in run.store and not (directory / f"{name}.arrow").is_file():
            run.put(rank, name, table)


def _read_kept(files: Sequence[Path]) -> list[ParsedTrace]:
    """The traces of a rank's raw files: of all where they are one recording, else of the last.

    Raises:
        InputError: they cannot be read.
    """
    from chopper.collectors import readers

    return _read(files if all(readers.is_csv(file) for file in files) else files[-1:])


def _of_part(traces: list[ParsedTrace], part: RankManifest) -> ParsedTrace:
    """The trace in a file that is this part's: its process and its device."""
    mine = [t for t in traces if t.host_pid == part.pid] or traces
    # The main device comes first.
    return next((t for t in mine if t.device_id == part.device_id), mine[0])


def _note(run: Run, rank: int, finding: Finding) -> None:
    """Add a finding to a rank, once."""
    findings = run.part(rank).findings
    # An imported run has it from the import, under the file's first name.
    if all((f.code, f.count) != (finding.code, finding.count) for f in findings):
        findings.append(finding)


def _keep_in_run(folder: Path, key: str, trace: ParsedTrace) -> None:
    """Leave tables in a run directory that is still there; best effort."""
    from chopper import cache

    try:
        if not folder.parent.parent.is_dir():
            return
        folder.parent.mkdir(exist_ok=True)
    except OSError:
        return
    cache.write(folder, key, trace.tables, _head(trace))
