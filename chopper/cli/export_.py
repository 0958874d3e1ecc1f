"""``chopper export``: an attributed run for other tools."""

from __future__ import annotations

import re
from pathlib import Path

import click

from chopper.cli import _shared as shared
from chopper.cli._devices import device
from chopper.cli.output import progress
from chopper.reports.export import KINDS, Kind


@click.command("export")
@shared.runs
@device
@click.option(
    "--to",
    "kind",
    type=click.Choice(KINDS),
    required=True,
    help="parquet or csv: one file per table and view; perfetto: one timeline of all ranks.",
)
@shared.output("Directory to write to.  [default: <name of the run>-<kind>, here]")
@shared.force("Write into a directory that is not empty.")
def command(sources: tuple[str, ...], kind: Kind, output: Path | None, force: bool) -> None:
    """Write an attributed run for other tools.

    RUN is a run directory, a trace file, a glob, or a directory of traces; several traces of the
    same run are joined.

    The tables are those of `chopper schema`. The timeline opens in ui.perfetto.dev and in
    chrome://tracing: host threads and device streams of all ranks, the steps and causes of idle
    time of each rank, and the cause, phase, operator and layer of each device event. It carries the
    run: every command reads it in place of RUN, with the same attribution.

    \b
    Examples:
      chopper export runs/mine --to parquet            # into mine-parquet
      chopper export runs/mine --to perfetto -o timeline
    """
    from chopper.reports.export import check_directory, export

    if output is None:
        output = Path(f"{_name(sources[0])}-{kind}")
    check_directory(output, force=force)
    attribution = shared.attributed(sources)
    with progress("writing"):
        written = export(attribution, kind, output, force=force)
    for path in written:
        click.echo(path)
    if kind == "perfetto":
        click.echo("open it in https://ui.perfetto.dev", err=True)


def _name(source: str) -> str:
    """Return a name for what is made of a run, a trace or a pattern."""
    name = shared.run_name(Path(source).resolve())
    return re.sub(r"[^\w.-]+", "", name).strip(".-_") or "export"
