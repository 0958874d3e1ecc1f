"""``chopper export``: an attributed run for other tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from chopper.addresses import without_secrets
from chopper.cli import _shared as shared
from chopper.cli.output import print_path, progress
from chopper.errors import tell
from chopper.integrations import TRACKERS
from chopper.reports.export import KINDS

if TYPE_CHECKING:
    from chopper.reports.export import Kind


@click.command("export", cls=shared.Command)
@shared.runs
@shared.read_options
@click.option(
    "--to",
    "kind",
    type=click.Choice((*KINDS, *TRACKERS)),
    required=True,
    help="parquet or csv: one file per table and view; perfetto: one timeline of the original "
    "traces and Chopper's tracks; chakra: an execution trace of each rank, for simulators; wandb, "
    "mlflow or tensorboard: metrics of each step, and the "
    "report.",
)
@shared.output(
    "Directory to write to.  [default: <name of the run>-<kind>, here; of wandb and mlflow their "
    "own]"
)
@shared.force("Write into a directory that is not empty.")
def command(sources: tuple[str, ...], kind: str, output: Path | None, force: bool) -> None:
    """Write an attributed run for other tools.

    RUN is a run directory, a trace file, a glob, or a directory of traces; several traces of the
    same run are joined.

    The tables are those of `chopper schema`. The timeline opens in ui.perfetto.dev and in
    chrome://tracing. It holds all events of the original traces as they were written, arrows,
    instants and counters included, and beside them a process for each rank with its steps, its
    time by cause, what held the clock, and counters of clock, power, temperature, other telemetry
    and the launch queue. It carries the run, with its command, host names and environment: every
    command reads it in place of RUN, with the same attribution.

    An experiment tracker gets the causes of each step in ms, the step times, the shares of the
    causes and the HTML report. Project, experiment, run and server are those of its own environment
    variables (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME …); with -o,
    MLflow's store is a database there.

    \b
    Examples:
      chopper export runs/mine --to parquet            # into mine-parquet
      chopper export runs/mine --to perfetto -o timeline
      WANDB_MODE=offline chopper export runs/mine --to wandb
    """
    if kind in TRACKERS:
        _track(sources, kind, output, force=force)
        return
    from chopper.reports.export import check_directory, export

    if output is None:
        output = Path(f"{_name(sources[0])}-{kind}")
    check_directory(output, force=force)
    attribution = shared.attributed(sources)
    with progress("writing"):
        written = export(attribution, cast("Kind", kind), output, force=force)
    for path in written:
        print_path(path)
    if kind == "perfetto":
        from chopper.reports.export import note

        if said := note(attribution):
            tell(said)
        tell("open it in https://ui.perfetto.dev")


def _track(sources: tuple[str, ...], tracker: str, output: Path | None, *, force: bool) -> None:
    """Log a run into an experiment tracker."""
    from chopper.integrations.trackers import check, log_run
    from chopper.reports.export import check_directory

    if tracker == "tensorboard":
        # A second export would be drawn over the first.
        output = check_directory(output or Path(f"{_name(sources[0])}-{tracker}"), force=force)
    check(tracker, directory=output)
    attribution = shared.attributed(sources)
    with progress("logging"):
        where = log_run(attribution, tracker, directory=output)
    print_path(where)


def _name(source: str) -> str:
    """Return a file name for the export of a run, a trace or a pattern."""
    name = shared.run_name(Path(without_secrets(source)).resolve())
    return re.sub(r"[^\w.-]+", "", name).strip(".-_") or "export"
