"""From raw traces to a run: which files belong together, which rank each is, tables per rank."""

from __future__ import annotations

import glob as globbing
import re
from pathlib import Path
from typing import TYPE_CHECKING

from chopper._version import __version__
from chopper.errors import InputError
from chopper.manifest import Finding, RankManifest, RunManifest
from chopper.run import Run, is_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.collectors.kineto import ParsedTrace

_TRACE_NAME = re.compile(r"\.json(\.gz)?$")
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker|gpu)[-_.]?(\d+)(?!\d)", re.IGNORECASE)
_APART_NS = 3600 * 10**9
"""Ranks of one run overlap in time; files an hour apart are two runs."""


def find_sources(named: Sequence[str | Path]) -> list[Path]:
    """Files that the user means by paths, globs and directories, in order, each once.

    Raises:
        InputError: nothing is there, or a directory holds no traces.
    """
    found: dict[Path, None] = {}
    for item in named:
        path = Path(item)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.is_file() and _TRACE_NAME.search(p.name))
            if not inside:
                raise InputError(
                    f"{path}: a directory without traces (no *.json or *.json.gz) and not a run"
                )
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        elif globbing.has_magic(str(item)):
            matches = sorted(Path(p) for p in globbing.glob(str(item), recursive=True))  # noqa: PTH207
            if not matches:
                raise InputError(f"{item}: the pattern matches no file")
            found.update(dict.fromkeys(p for p in matches if p.is_file()))
        else:
            raise InputError(f"{path}: no such file or directory")
    return list(found)


def load(named: Sequence[str | Path]) -> Run:
    """Open a run directory, or read traces as a run in memory.

    Args:
        named: one run directory, or trace files, globs and directories of traces.

    Raises:
        InputError: what is named is neither; one line says what was found.
    """
    if len(named) == 1 and is_run(Path(named[0])):
        return Run.open(Path(named[0]))
    for item in named:
        if is_run(Path(item)):
            raise InputError(f"{item}: is a run directory; name it alone, not with other files")
    return import_traces(find_sources(named), source=" ".join(str(n) for n in named))


def import_traces(files: Sequence[Path], *, source: str | None = None) -> Run:
    """Read trace files as one run, one rank per file (or several, where they were merged).

    Raises:
        InputError: a file is no trace, two files are the same rank, or they are of two runs.
    """
    from chopper.collectors.kineto import read_trace

    traces: list[tuple[Path, ParsedTrace]] = []
    for file in files:
        traces += [(file, trace) for trace in read_trace(file)]
    findings = _check_one_run(traces)
    numbered = _number_ranks(traces)
    worlds = {t.world_size for _, t in traces if t.world_size}
    if worlds and len(numbered) < max(worlds):
        missing = sorted(set(range(max(worlds))) - set(numbered))
        findings.append(_missing_ranks(missing, max(worlds)))
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


def _missing_ranks(missing: list[int], world: int) -> Finding:
    shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return Finding(
        code="run.ranks_missing",
        severity="warning" if len(missing) < world - 1 else "info",
        count=len(missing),
        message=f"{len(missing)} of {world} ranks are not here ({shown}): waiting for them cannot "
        "be told from transfer",
    )


def _part(rank: int, file: Path, trace: ParsedTrace) -> RankManifest:
    span = trace.span_ns
    return RankManifest(
        rank=rank,
        label=None if trace.rank is not None else file.name,
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
    )


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


def _number_ranks(
    traces: list[tuple[Path, ParsedTrace]],
) -> dict[int, tuple[Path, ParsedTrace]]:
    """Ranks as recorded, else from the file's name, else in order."""
    numbered: dict[int, tuple[Path, ParsedTrace]] = {}
    rest: list[tuple[Path, ParsedTrace]] = []
    for file, trace in traces:
        rank = trace.rank
        if rank is None:
            rest.append((file, trace))
            continue
        if rank in numbered:
            raise InputError(
                f"two traces claim rank {rank}: {numbered[rank][0]} and {file}; pass one of them, "
                "or analyze them apart"
            )
        numbered[rank] = (file, trace)
    named: dict[int, tuple[Path, ParsedTrace]] = {}
    for file, trace in rest:
        match = _RANK_IN_NAME.search(file.name)
        rank = int(match.group(1)) if match else None
        if rank is None or rank in named or rank in numbered:
            named = {}
            break
        named[rank] = (file, trace)
    if len(named) == len(rest):
        return numbered | named
    free = (i for i in range(len(traces) + len(numbered)) if i not in numbered)
    return numbered | {next(free): item for item in rest}


def ingest_rank(run: Run, rank: int) -> None:
    """Make the trace tables of one rank of a recorded run from its raw traces."""
    from chopper import cache
    from chopper.collectors.kineto import read_trace
    from chopper.run import rank_dir_name

    part = run.part(rank)
    files = [run.rank_dir(rank) / name for name in part.traces]
    files = [f for f in files if f.is_file()]
    if not files:
        part.findings.append(
            Finding(
                code="trace.absent",
                severity="warning",
                rank=rank,
                message=f"rank {rank} has no kernel trace: nothing to attribute there",
                withholds=("attribution",),
            )
        )
        return
    key = cache.digest(files)
    folder = run.path / "tables" / rank_dir_name(rank) if run.path is not None else None
    tables = cache.read(folder, key) if folder is not None and part.source_digest == key else None
    if tables is None:
        traces = read_trace(files[-1])
        trace = next((t for t in traces if t.host_pid == part.pid), traces[0])
        tables = trace.tables
        known = {(f.code, f.message) for f in part.findings}
        part.findings += [f for f in trace.findings if (f.code, f.message) not in known]
        if part.device_id is None:
            part.device_id = trace.device_id
        if not part.devices:
            part.devices = trace.devices
    for name, table in tables.items():
        if (rank, name) not in run.store:
            run.put(rank, name, table)
