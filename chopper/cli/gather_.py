"""``chopper gather``: one run of those that the nodes of a job recorded."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import click

from chopper.cli import _shared as shared
from chopper.cli.output import progress


@click.command(no_args_is_help=True)
@click.argument(
    "nodes", nargs=-1, required=True, metavar="NODE_DIR...", shell_complete=shared.paths
)
@shared.run_output("Run directory to create, here or at an address. [default: runs/NAME-gathered]")
@shared.force("Replace an existing run.")
@click.option("--json", "as_json", is_flag=True, help="Print the run's manifest as JSON.")
def command(nodes: tuple[str, ...], output: Path | str | None, force: bool, as_json: bool) -> None:
    """Combine the runs of a job's nodes into one.

    NODE_DIR is the run directory of a node, where it was recorded or a copy (rsync, scp), a folder
    of several, or the address of a run. Its contents are not changed. Two recordings of one rank,
    and runs of different jobs, are refused; a recording that occurs twice is taken once; missing
    ranks are listed.

    \b
    Examples:
      chopper gather node0/run node1/run -o runs/gathered
    """
    from chopper.recording.gather import gather, node_runs
    from chopper.storage.remote import here

    counted: deque[str] = deque([""], maxlen=1)
    with progress("looking for the runs", counted):
        paths = node_runs([Path(node) for node in here(nodes, counted.append)])
    target = output or Path("runs") / f"{paths[0].resolve().name}-gathered"
    with progress(f"gathering {len(paths)} runs"):
        shared.write_run(lambda folder: gather(paths, folder), target, force=force, as_json=as_json)
