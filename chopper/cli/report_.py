"""``chopper report``: write a run's report; the format follows the extension."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from chopper.cli._complete import paths
from chopper.cli._path import NamedPath
from chopper.cli._progress import progress
from chopper.errors import OutputError, printable
from chopper.ingest import check_page
from chopper.storage.layout import is_experiment


@click.command("report", short_help="Write the report of a run: .html, .md, .json or .txt.")
@click.argument("sources", metavar="RUN...", nargs=-1, required=True, shell_complete=paths)
@click.option(
    "-o",
    "--output",
    type=NamedPath(),
    default=Path("report.html"),
    show_default=True,
    help="File to write; .html, .md, .json or .txt chooses the format.",
)
@click.option("--force", is_flag=True, help="Replace the file when it exists.")
@click.option("--open", "open_it", is_flag=True, help="Open the report in the browser.")
def command(sources: tuple[str, ...], output: Path, force: bool, open_it: bool) -> None:
    """Write the report of a run as one file that needs no network.

    RUN is a run directory, a trace file, a glob, or a directory of traces; several traces of the
    same run make one. Of an experiment that "chopper run" recorded, it is what the variants measured.

    \b
    Examples:
      chopper report runs/mine
      chopper report runs/mine -o mine.html --force --open
      chopper report "traces/rank*.json.gz" -o summary.md
    """
    from chopper import reports

    kind = reports.format_of(output)
    _check(output, sources, force=force)
    if kind == "html":
        from chopper.reports import plotly_script

        # Compressing Plotly takes as long as reading a trace and needs nothing of it.
        plotly_script.prefetch()
    shown = _rendered(sources, kind)
    with progress("writing the report"):
        from chopper.storage.files import write_atomic

        data = shown.encode("utf-8", "replace")
        write_atomic(output, data)
    click.echo(output)
    click.echo(_closing(output, len(data), sources, open_it), err=True)
    if open_it:
        click.launch(output.resolve().as_uri())


def _rendered(sources: tuple[str, ...], kind: str) -> str:
    """The report of a run, or of an experiment."""
    if len(sources) == 1 and is_experiment(Path(sources[0])):
        from chopper.experiments import loading
        from chopper.reports import experiment as page

        with progress("attributing"):
            found = loading.load(Path(sources[0]))
        return page.render(found, kind)
    from chopper import reports
    from chopper.api import attribute, load

    with progress("reading the run"):
        run = load(list(sources))
    with progress("attributing"):
        attribution = attribute(run)
    with progress("rendering"):
        return reports.render(attribution, kind)


def _check(output: Path, sources: tuple[str, ...], *, force: bool) -> None:
    """Refuse what cannot work, or would harm what is read, before minutes are spent on the run."""
    if output.is_dir():
        raise OutputError(
            f"{output}: is a directory; give a file, for example {output}/report.html"
        )
    if not output.parent.is_dir():
        raise OutputError(
            f"{output}: the directory {output.parent} does not exist; create it or choose another -o"
        )
    if output.exists() and not force:
        raise OutputError(f"{output}: exists; pass --force to replace it, or choose another -o")
    check_page(output, sources)


def _closing(output: Path, size: int, sources: tuple[str, ...], opened: bool) -> str:
    from chopper import wording as fmt

    named = printable(" ".join(shlex.quote(s) for s in sources))
    line = f"{fmt.bytes_(size)} written"
    if output.suffix.lower() in (".html", ".htm") and not opened:
        return (
            f"{line}; open it in a browser, or: "
            f"chopper report {named} -o {shlex.quote(str(output))} --force --open"
        )
    return f"{line}; next: chopper analyze {named} --by kernel"
