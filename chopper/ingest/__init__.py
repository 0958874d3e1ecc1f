"""From raw traces to a run: which files belong together, which rank each is, tables per rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import InputError
from chopper.ingest.assemble import as_read
from chopper.ingest.recorded import ingest_rank
from chopper.ingest.sources import Found, check_names, find, find_sources
from chopper.ingest.write import write_run
from chopper.storage.run import MANIFEST, Run, is_run

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["find_sources", "import_traces", "ingest_rank", "load", "write_run"]


def load(named: Sequence[str | Path]) -> Run:
    """Open a run directory, or read traces as a run in memory.

    Args:
        named: one run directory, or trace files, globs and directories of traces.

    Raises:
        InputError: what is named is neither; one line says what was found.
    """
    if not named:
        raise InputError("nothing to load: name a run directory or trace files")
    check_names(named)
    if len(named) == 1 and is_run(Path(named[0])):
        return Run.open(Path(named[0]))
    for item in named:
        if is_run(Path(item)):
            raise InputError(
                f"{item}: is a run directory; name it alone, not with other files (`chopper import A B "
                "-o DIR` joins run directories of one run)"
            )
    found = find(named)
    if len(found) == 1 and (file := next(iter(found))).name == MANIFEST and is_run(file.parent):
        return Run.open(file.parent)
    return as_read(found, source=" ".join(str(n) for n in named))


def import_traces(files: Sequence[Path], *, source: str | None = None) -> Run:
    """Read trace files as one run: a rank per file, or several where they were merged.

    Raises:
        InputError: a file is no trace, two files are the same rank, or they are of two runs.
    """
    return as_read(Found(dict.fromkeys(files, True)), source=source)
