"""Where a report may be written: nowhere that would harm what it is made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import InputError, OutputError
from chopper.storage.outputs import run_around

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_page(output: Path, sources: Iterable[str | Path]) -> None:
    """Refuse a file inside a run, or one that the report is made from.

    Args:
        output: the file to write.
        sources: runs, traces, globs or directories that it is made from.

    Raises:
        OutputError: it is one of these.
    """
    run = run_around(output)
    if run is not None:
        raise OutputError(
            f"{output}: lies inside the run {run}, which chopper may replace or read as traces; "
            "choose another -o"
        )
    if output.exists() and any(_is_in(output, source) for source in sources):
        raise OutputError(f"{output}: is what the report is made from; choose another -o")


def _is_in(output: Path, source: str | Path) -> bool:
    from chopper.ingest import find_sources

    try:
        return any(output.samefile(file) for file in find_sources([source]))
    except (InputError, OSError):  # a run; or said better by load()
        return False
