"""Names of files and folders of run directories and experiments.

manifest.json                 the whole run (made from the parts)
rank-00000/manifest.json      what this rank says about itself; no rank writes another's file
rank-00000/trace.json.gz      raw kernel trace
rank-00000/<table>.arrow      telemetry and step marks, Arrow IPC streams, flushed batch by batch,
                              each with the checksum of what stands before it
rank-00000/<table>.parquet    tables of an imported run
attempt-0/                    what was recorded before a restart: a run of its own
process-2/                    what a further process recorded that is no rank: a run of its own
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path

MANIFEST = "manifest.json"
EXPERIMENT = "experiment.json"
_RANK_DIR = re.compile(r"rank-([0-9]{5,7})")
_SUB_RUN = re.compile(r"process-([0-9]{1,7})")
_UPLOAD = re.compile(r"upload-[0-9a-f]{16}")
_FILE = re.compile(
    r"(?:(?:attempt|process)-[0-9]{1,7}/){0,4}"
    r"(?:manifest\.json|\.claim|\.chopper-probe|\.hook-notes(?:\.[^/]{1,250})?"
    r"|\.manifest\.json\.[0-9]{1,10}\.tmp|tables/(?:rank-[0-9]{5,7}/)?[a-z0-9_]{1,80}\.parquet"
    r"|(?:rank-[0-9]{5,7}|\.rank-[0-9]{5,7}\.[^/]{1,200}\.new)/"
    r"(?:manifest\.json|sampler-[a-z0-9_-]{1,80}\.json|trace(?:-[0-9]{1,7})?\.json(?:\.[a-z0-9]{1,4})?"
    r"|[a-z0-9_]{1,80}\.(?:arrow|parquet)|\.[^/]{1,250}\.(?:tmp|part)))"
)
"""Files to which chopper gives names of its own."""


def rank_dir_name(rank: int) -> str:
    """Return the name of a rank's folder inside a run."""
    return f"rank-{rank:05d}"


def is_rank_dir(path: Path) -> bool:
    """Return whether a folder of a run has the name of a rank's."""
    return _RANK_DIR.fullmatch(path.name) is not None


def is_upload(name: str) -> bool:
    """Return whether a folder at an address has the name of a run's that was copied there."""
    return _UPLOAD.fullmatch(name) is not None


def is_file_of(name: str) -> bool:
    """Return whether chopper gives this name to a file of a run; it is the path in the run."""
    return _FILE.fullmatch(name) is not None


def foreign_files(names: Iterable[str], named: Collection[str] = ()) -> list[str]:
    """Return which paths in a run are not its files: neither named by it, nor as chopper does.

    Such files are never removed, here and at addresses.
    """
    return sorted(name for name in names if name not in named and not is_file_of(name))


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run directory, complete or half written."""
    try:
        return path.is_dir() and (
            (path / MANIFEST).is_file() or any(is_rank_dir(p) for p in path.iterdir())
        )
    except (OSError, ValueError):
        return False


def is_experiment(path: Path) -> bool:
    """Return whether ``path`` holds the repetitions of a workload's variants, each a run."""
    try:
        return (path / EXPERIMENT).is_file()
    except (OSError, ValueError):
        return False


def rank_dirs(path: Path) -> list[Path]:
    """Return the folders of a run's ranks, ascending; empty without such a run."""
    try:
        return sorted(p for p in path.iterdir() if is_rank_dir(p) and not p.is_symlink())
    except OSError:
        return []


def sub_run(path: Path, number: int) -> Path:
    """Return the directory of the n-th process outside the job of a run (n >= 2)."""
    return path / f"process-{number}"


def sub_runs(path: Path) -> list[Path]:
    """Return the runs inside of a run, by number."""
    numbered = []
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            match = _SUB_RUN.fullmatch(entry.name)
            if match is not None and not entry.is_symlink() and is_run(entry):
                numbered.append((int(match[1]), entry))
    return [entry for _, entry in sorted(numbered)]


def last_written_s(folder: Path) -> float | None:
    """Return when a file of a rank's folder was last written, in Unix time; None without files."""
    with contextlib.suppress(OSError, ValueError):
        return max(p.stat().st_mtime for p in folder.iterdir())
    return None
