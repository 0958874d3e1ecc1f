"""Parts of one run that were recorded into several directories, one per node: made one again."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from chopper.errors import InputError, OutputError
from chopper.storage import manifest as m
from chopper.storage.files import check_links, inside, write_atomic
from chopper.storage.run import MANIFEST, Run, finalize, is_run, rank_dir_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_APART_NS = 3600 * 10**9
"""Nodes of one run record at the same time; an hour between them is two runs."""
_OF_WHOLE_RUN = frozenset(("run.ranks_missing", "run.part_missing", "run.rank_died"))
"""Findings that are made anew of the joined run."""


def join_runs(paths: Sequence[Path], directory: Path) -> m.RunManifest:
    """Copy the ranks of several run directories into one.

    Args:
        paths: run directories, two at least, of distinct ranks of one run.
        directory: an empty directory that exists.

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
    runs = [Run.open(path) for path in paths]
    _check_ranks(runs)
    _check_one_run(runs)
    kinds = {run.manifest.kind for run in runs}
    try:
        for path, run in zip(paths, runs, strict=True):
            for part in run.manifest.ranks:
                name = rank_dir_name(part.rank)
                check_links(inside(path, name))
                shutil.copytree(path / name, directory / name, symlinks=True)
                if not (path / name / MANIFEST).is_file():
                    write_atomic(directory / name / MANIFEST, m.encode(part))
    except (OSError, shutil.Error) as exc:
        raise OutputError(f"{directory}: cannot be written ({exc})") from exc
    joined = finalize(
        directory,
        command=runs[0].manifest.command,
        workload=runs[0].manifest.workload,
        exit_code=_exit_code(runs),
    )
    joined.kind = "imported" if kinds == {"imported"} else "recorded"
    known = [(f.code, f.message) for f in joined.findings]
    for run in runs:
        joined.findings += [
            f
            for f in run.manifest.findings
            if f.code not in _OF_WHOLE_RUN and (f.code, f.message) not in known
        ]
    write_atomic(directory / MANIFEST, m.encode(joined))
    return joined


def _check_ranks(runs: list[Run]) -> None:
    holder: dict[int, Run] = {}
    for run in runs:
        for rank in run.ranks:
            if rank in holder:
                raise InputError(
                    f"two of the runs hold rank {rank}: {holder[rank].path} and {run.path}; name "
                    "one directory per node, all of one run"
                )
            holder[rank] = run


def _check_one_run(runs: list[Run]) -> None:
    """Refuse directories that cannot be of one run."""
    _same(runs, "the job's size", lambda p: f"{p.world_size} ranks" if p.world_size else None)
    # torchrun without a rendezvous calls every run "none".
    _same(runs, "the launcher's run id", lambda p: p.environment.get("TORCHELASTIC_RUN_ID"))
    spans = sorted((*_span_ns(run), str(run.path)) for run in runs)
    end_ns, last = spans[0][1:]
    for start_ns, this_end_ns, path in spans[1:]:
        if start_ns - end_ns > _APART_NS:
            hours = (start_ns - end_ns) / 3.6e12
            raise InputError(
                f"directories of different runs: {path} began {hours:.1f} h after {last} ended; "
                "name those of one run"
            )
        if this_end_ns > end_ns:
            end_ns, last = this_end_ns, path


def _same(runs: list[Run], what: str, of: Callable[[m.RankManifest], str | None]) -> None:
    said: dict[str, Run] = {}
    for run in runs:
        for part in run.manifest.ranks:
            value = of(part)
            if value is not None:
                said.setdefault(value, run)
    if len(said) > 1:
        told = ", ".join(f"{run.path} says {value}" for value, run in said.items())
        raise InputError(
            f"directories of different runs: {what} differs ({told}); name those of one run"
        )


def _span_ns(run: Run) -> tuple[int, int]:
    """From the first rank's start to the last rank's end, as far as the parts say."""
    starts = [p.start_ns for p in run.manifest.ranks if p.start_ns is not None]
    ends = [p.end_ns for p in run.manifest.ranks if p.end_ns is not None]
    known = starts + ends
    return (min(known), max(known)) if known else (0, 1 << 62)


def _exit_code(runs: list[Run]) -> int | None:
    """The first that is not 0; None where no run says."""
    codes = [run.manifest.exit_code for run in runs if run.manifest.exit_code is not None]
    return next((code for code in codes if code), 0) if codes else None
