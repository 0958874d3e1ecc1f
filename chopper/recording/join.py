"""Parts of one run that were recorded into several directories, one per node: made one again."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from chopper.errors import InputError, OutputError
from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.files import check_links, inside, write_atomic
from chopper.storage.layout import MANIFEST, is_run, rank_dir_name
from chopper.storage.parts import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Runs = dict[Path, m.RunManifest]

_APART_NS = 3600 * 10**9
"""Nodes of one run record at the same time; an hour between them is two runs."""
_OF_WHOLE_RUN = frozenset(("run.ranks_missing", "run.part_missing", "run.rank_died"))
"""Findings that are made anew of the joined run."""


def join_runs(paths: Sequence[Path], directory: Path) -> m.RunManifest:
    """Copy the ranks of several run directories into one, an empty directory that exists.

    Raises:
        InputError: a path is not a run directory, or there is only one; two of them hold the same
            rank, or they are of different runs.
        RunFormatError: one of them cannot be read, or holds a link.
        OutputError: it cannot be written; what was written is the caller's to remove.
    """
    paths = list({path.resolve(): path for path in paths}.values())
    if len(paths) < 2:
        raise InputError(
            f"{paths[0]}: is a run directory already; name those of the run's other nodes too to "
            "join them, or traces to import"
        )
    for path in paths:
        if not is_run(path):
            raise InputError(
                f"{path}: is not a run directory; run directories are joined with each other only, "
                "traces are imported without them"
            )
    runs = {path: read_manifest(path) for path in paths}
    first = runs[paths[0]]
    _check_ranks(runs)
    _check_one_run(runs)
    kinds = {run.kind for run in runs.values()}
    try:
        for path, run in runs.items():
            for part in run.ranks:
                name = rank_dir_name(part.rank)
                check_links(inside(path, name))
                shutil.copytree(path / name, directory / name, symlinks=True)
                if not (path / name / MANIFEST).is_file():
                    write_atomic(directory / name / MANIFEST, m.encode(part))
    except (OSError, shutil.Error) as exc:
        raise OutputError(f"{directory}: cannot be written ({exc})") from exc
    codes = [run.exit_code for run in runs.values() if run.exit_code is not None]
    joined = finalize(
        directory,
        command=first.command,
        workload=first.workload,
        exit_code=next(filter(None, codes), 0) if codes else None,
    )
    joined.kind = "imported" if kinds == {"imported"} else "recorded"
    known = [(f.code, f.message) for f in joined.findings]
    for run in runs.values():
        joined.findings += [
            f
            for f in run.findings
            if f.code not in _OF_WHOLE_RUN and (f.code, f.message) not in known
        ]
    write_atomic(directory / MANIFEST, m.encode(joined))
    return joined


def _check_ranks(runs: Runs) -> None:
    holder: dict[int, Path] = {}
    for path, run in runs.items():
        for part in run.ranks:
            if part.rank in holder:
                raise InputError(
                    f"two of the runs hold rank {part.rank}: {holder[part.rank]} and {path}; name "
                    "one directory per node, all of one run"
                )
            holder[part.rank] = path


def _check_one_run(runs: Runs) -> None:
    _same(runs, "the job's size", lambda p: f"{p.world_size} ranks" if p.world_size else None)
    # torchrun without a rendezvous calls every run "none".
    _same(runs, "the launcher's run id", lambda p: p.environment.get("TORCHELASTIC_RUN_ID"))
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
    for path, run in runs.items():
        for part in run.ranks:
            value = of(part)
            if value is not None:
                holder.setdefault(value, path)
    if len(holder) > 1:
        said = ", ".join(f"{path} says {value}" for value, path in holder.items())
        raise InputError(
            f"directories of different runs: {what} differs ({said}); name those of one run"
        )
