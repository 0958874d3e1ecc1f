"""Runs that the nodes of one job recorded, each into a directory of its own: made one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from chopper.errors import InputError, OutputError, reason_of
from chopper.recording.finish import OF_WHOLE_RUN, finalize
from chopper.storage import manifest as m
from chopper.storage.files import check_links, inside, write_atomic
from chopper.storage.findings import finding
from chopper.storage.layout import MANIFEST, is_run, rank_dir_name
from chopper.storage.parts import read_manifest
from chopper.storage.processes import recorder_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Runs = dict[Path, m.RunManifest]

_APART_NS = 3600 * 10**9
"""Nodes of one run record at the same time; an hour between them is two runs."""


def node_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the named run directories, and those in named folders.

    Raises:
        InputError: a path is neither, or there is only one run.
    """
    runs: dict[Path, Path] = {}
    for path in paths:
        inner = [path] if is_run(path) else sorted(p for p in _entries(path) if is_run(p))
        if not inner:
            raise InputError(
                f"{path}: is not a run directory, and holds none; traces are imported (`chopper "
                "import`)"
            )
        runs |= {run.resolve(): run for run in inner}
    if len(runs) < 2:
        raise InputError(
            f"{paths[0]}: is one run directory; name those of the job's other nodes too"
        )
    return [*runs.values()]


def _entries(path: Path) -> list[Path]:
    try:
        return [*path.iterdir()]
    except NotADirectoryError:
        return []
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({reason_of(exc)})") from exc


def gather(paths: Sequence[Path], directory: Path) -> m.RunManifest:
    """Copy the ranks of several run directories into one, an empty directory that exists.

    Raises:
        InputError: two of them hold different recordings of a rank, they are of different runs, or
            one of them is being recorded.
        RunFormatError: one of them cannot be read, or holds a link.
        OutputError: it cannot be written; what was written is the caller's to remove.
    """
    runs = {path: read_manifest(path) for path in paths}
    _check_one_run(runs)
    holders, findings = _holders(runs)
    try:
        for rank, (path, part) in sorted(holders.items()):
            name = rank_dir_name(rank)
            check_links(inside(path, name))
            shutil.copytree(path / name, directory / name, symlinks=True, copy_function=_copy)
            if not (path / name / MANIFEST).is_file():
                write_atomic(directory / name / MANIFEST, m.encode(part))
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({reason_of(exc)})") from exc
    codes = [run.exit_code for run in runs.values() if run.exit_code is not None]
    first = runs[holders[min(holders)][0]]
    gathered = finalize(
        directory,
        command=first.command,
        workload=first.workload,
        exit_code=next(filter(None, codes), 0) if codes else None,
    )
    gathered.kind = (
        "imported" if {run.kind for run in runs.values()} == {"imported"} else "recorded"
    )
    known = [(f.code, f.message) for f in gathered.findings]
    remade = OF_WHOLE_RUN | {"run.manifest_missing"}
    findings += [f for run in runs.values() for f in run.findings if f.code not in remade]
    gathered.findings += [f for f in findings if (f.code, f.message) not in known]
    write_atomic(directory / MANIFEST, m.encode(gathered))
    return gathered


def _copy(source: str, target: str) -> None:
    """Copy a file; the first that fails ends the copy of its folder."""
    try:
        shutil.copy2(source, target)
    except OSError as exc:
        raise OutputError(f"{source}: cannot be copied to {target} ({reason_of(exc)})") from exc


def _parts(runs: Runs) -> Iterator[tuple[Path, m.RankManifest]]:
    """Yield the ranks of runs, each with its run's directory."""
    for path, run in runs.items():
        for part in run.ranks:
            yield path, part


def _holders(run_by_path: Runs) -> tuple[dict[int, tuple[Path, m.RankManifest]], list[m.Finding]]:
    """Return the directory that each rank is taken from, and which recordings are there twice."""
    holders: dict[int, tuple[Path, m.RankManifest]] = {}
    findings: list[m.Finding] = []
    for path, part in _parts(run_by_path):
        if part.status == "running" and recorder_runs(part):
            raise InputError(
                f"{path}: process {part.pid} is recording into it ({rank_dir_name(part.rank)}); "
                "gather when it has ended"
            )
        if part.rank not in holders:
            holders[part.rank] = path, part
            continue
        first, other = holders[part.rank]
        if part.pid is None or _recording(part) != _recording(other):
            raise InputError(
                f"two recordings of rank {part.rank}: {first} (host {other.hostname}) and {path} "
                f"(host {part.hostname}); name one directory for each node of one job, whose "
                "launcher counts the ranks of all nodes"
            )
        if other.status == "running" != part.status:  # copied before it had ended
            holders[part.rank] = path, part
        findings.append(finding("run.gathered_twice", rank=part.rank, first=first, second=path))
    return holders, findings


def _recording(part: m.RankManifest) -> tuple[object, ...]:
    """Return what tells one recording of a rank from another."""
    return part.hostname, part.machine, part.pid, part.process_started, part.start_ns


def _check_one_run(runs: Runs) -> None:
    _same(runs, "the job's size", lambda p: f"{p.world_size} ranks" if p.world_size else None)
    # torchrun without a rendezvous calls every run "none".
    _same(runs, "the launcher's run id", lambda p: p.environment.get("TORCHELASTIC_RUN_ID"))
    _same(runs, "the job", lambda p: None if (p.job or "parent ").startswith("parent ") else p.job)
    spans = []
    for path, run in runs.items():
        known = [ns for p in run.ranks for ns in (p.start_ns, p.end_ns) if ns is not None]
        spans.append((min(known, default=0), max(known, default=1 << 62), path))
    spans.sort(key=lambda span: span[:2])
    _, end_ns, last = spans[0]
    for start_ns, this_end_ns, path in spans[1:]:
        if start_ns - end_ns > _APART_NS:
            hours = (start_ns - end_ns) / 3.6e12
            raise InputError(
                f"directories of different runs: {path} began {hours:.1f} h after {last} ended; "
                "name those of one run"
            )
        if this_end_ns > end_ns:
            end_ns, last = this_end_ns, path


def _same(runs: Runs, what: str, of: Callable[[m.RankManifest], str | None]) -> None:
    """Refuse directories whose ranks differ in a property that all ranks of a run share."""
    holder: dict[str, Path] = {}
    for path, part in _parts(runs):
        value = of(part)
        if value is not None:
            holder.setdefault(value, path)
    if len(holder) > 1:
        statements = ", ".join(f"{path} says {value}" for value, path in holder.items())
        raise InputError(
            f"directories of different runs: {what} differs ({statements}); name those of one run"
        )
