"""``chopper run``: a reference workload, recorded and attributed."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import sys
from pathlib import Path

import click

from chopper.cli._complete import workloads
from chopper.cli._progress import progress
from chopper.errors import ChopperError, printable


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            hint = "Options of the workload go behind --, see: chopper workloads"
            raise click.UsageError(f"{exc.format_message()} {hint}", ctx) from exc


@click.command("run", cls=_Command, short_help="Record a reference workload and attribute it.")
@click.argument("workload", shell_complete=workloads)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORKLOAD OPTIONS]")
@click.option(
    "--ranks", type=int, metavar="N", help="Processes. [default: one per GPU, or 2 without GPUs]"
)
@click.option("--steps", type=int, metavar="N", help="Optimizer steps. [default: the workload's]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory of the run. [default: runs/<time>-<workload>]",
)
@click.option("--force", is_flag=True, help="Replace the run in the output directory.")
@click.option("--json", "as_json", is_flag=True, help="Print the attribution as JSON.")
def command(
    workload: str,
    options: tuple[str, ...],
    ranks: int | None,
    steps: int | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Record a reference workload, attribute it, show where the time went.

    The workload's own output goes to stderr, the attribution to stdout; with --json in the form
    that "chopper analyze --json" prints. The exit code is the workload's own.

    \b
    Examples:
      chopper run fsdp2 --ranks 2
      chopper run fsdp1 --ranks 2 --steps 12 -o runs/fsdp1 --force
      chopper run fsdp2 --ranks 8 -- --size 8b --sequence 8192 --dtype bfloat16 --checkpoint full
    """
    from chopper._workloads import prepare
    from chopper.run import new_output

    with progress("looking at this machine"):
        launch = prepare(workload, ranks=ranks, steps=steps, options=options)
    # After all checks: --force replaces the run that is there.
    path = output or Path("runs") / f"{dt.datetime.now():%Y%m%d-%H%M%S}-{workload}"
    with new_output(
        path, force=force, say=lambda line: click.echo(f"chopper: {line}", err=True)
    ) as place:
        for note in launch.notes:
            click.echo(f"chopper: {note}", err=True)
        click.echo(f"chopper: recording {workload} with {launch.ranks} ranks into {path}", err=True)
        exit_code = launch.run(place)
        if exit_code:
            click.echo(
                f"chopper: {workload} ended with exit code {exit_code}; what was recorded until "
                f"then is kept in {path}",
                err=True,
            )
        try:
            _show(path, workload, exit_code, as_json=as_json)
        except ChopperError as exc:
            # Nothing usable was recorded: of a run that failed, its own code says more.
            if not exit_code:
                raise
            click.echo(f"chopper: {printable(str(exc))}", err=True)
    return exit_code


def _show(path: Path, workload: str, exit_code: int, *, as_json: bool) -> None:
    """Close the run, print its attribution, name the next commands."""
    from chopper.api import attribute, load
    from chopper.cli.analyze_ import print_text
    from chopper.run import finalize

    finalize(path, command=["chopper", *sys.argv[1:]], workload=workload, exit_code=exit_code)
    with progress("attributing"):
        attribution = attribute(load(path))
    if as_json:
        click.echo(json.dumps(attribution.to_dict(), indent=2, ensure_ascii=False))
    else:
        print_text(attribution, None, None)
    run = shlex.quote(str(path))
    click.echo(f"next: chopper report {run} -o report.html", err=True)
    click.echo(f"      chopper analyze {run} --by layer", err=True)
