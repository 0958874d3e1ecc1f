"""Arguments, options and steps that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chopper.cli._complete import paths
from chopper.cli._path import NamedPath
from chopper.cli._progress import progress
from chopper.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chopper.api import AttributedRun

    _Command = TypeVar("_Command", bound=Callable[..., Any])

runs = click.argument("sources", metavar="RUN...", nargs=-1, required=True, shell_complete=paths)
"""Argument ``sources``: what every command that reads one run takes."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print the documented JSON form.")


def report_output(help: str, *, default: Path | None = None) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``-o`` and ``--force`` for a report.

    Args:
        help: of ``-o``; the formats are added.
        default: file that is written without ``-o``.
    """

    def decorated(command: _Command) -> _Command:
        force = click.option("--force", is_flag=True, help="Replace the file when it exists.")
        output = click.option(
            "-o",
            "--output",
            type=NamedPath(),
            default=default,
            show_default=default is not None,
            help=f"{help}; .html, .md, .json or .txt chooses the format.",
        )
        return output(force(command))

    return decorated


def check_report(output: Path, sources: Sequence[str] = (), *, force: bool) -> str:
    """Return the format of a report that can be written, before minutes are spent on its run.

    Raises:
        UsageError: no report has this extension.
        OutputError: it cannot be written, or would harm what is read.
    """
    from chopper.ingest import check_page
    from chopper.reports import format_of

    format = format_of(output)
    if output.is_dir():
        raise OutputError(
            f"{output}: is a directory; give a file, for example {output}/report.html"
        )
    if not output.parent.is_dir():
        raise OutputError(
            f"{output}: the directory {output.parent} does not exist; create it or choose another "
            "-o"
        )
    if output.exists() and not force:
        raise OutputError(f"{output}: exists; pass --force to replace it, or choose another -o")
    if sources:
        check_page(output, sources)
    if format == "html":
        from chopper.reports import plotly_script

        # Compressing Plotly takes as long as reading a trace and needs nothing of it.
        plotly_script.prefetch()
    return format


def write_report(output: Path, text: str) -> int:
    """Write a report at once or not at all; return its size in bytes."""
    from chopper.storage.files import write_atomic

    data = text.encode("utf-8", "replace")
    write_atomic(output, data)
    return len(data)


def attributed(sources: Sequence[str], name: str = "") -> AttributedRun:
    """Load and attribute a run while the terminal shows that something happens.

    Args:
        sources: as the user named them.
        name: of the run among several.
    """
    from chopper.api import attribute, load

    with progress(f"reading {name or 'the run'}"):
        run = load(list(sources))
    with progress(f"attributing {name}".rstrip()):
        return attribute(run)
