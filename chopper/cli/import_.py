"""``chopper import`` and ``chopper gather``: one run of traces, or of what nodes recorded."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli import _shared as shared
from chopper.cli.output import progress

if TYPE_CHECKING:
    from chopper.storage.manifest import RunManifest


@click.command("import", cls=shared.Command, no_args_is_help=True)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", shell_complete=shared.paths)
@shared.run_output("Run directory to create, here or at an address. [default: runs/NAME]")
@shared.force("Replace an existing run.")
@click.option(
    "--time-zone",
    metavar="ZONE",
    help="Time zone of logs that name none: Europe/Berlin, +02:00, UTC, local.",
)
@shared.device_option
@shared.workers
@click.option("--json", "as_json", is_flag=True, help="Print the run's manifest as JSON.")
def command(
    traces: tuple[str, ...],
    output: Path | str | None,
    force: bool,
    time_zone: str | None,
    as_json: bool,
) -> None:
    """Import kernel traces of torch, Nsight Systems, rocprofv3 or rpd as one run.

    TRACE is a file, a glob or a directory; many files become the ranks of one run, and those of one
    process, one window after the other (torch.profiler's schedule with repeat), one rank with more
    steps. Damaged files are read as far as possible, and losses are reported. Every command that
    takes RUN also takes traces directly; importing keeps them together with their tables.

    The format is detected from the contents: Kineto JSON, `nsys export --type sqlite`, rocprofv3's
    rocpd, JSON and CSV (all files of one recording), rocprof's CSV, rpd. A CSV of hardware counters
    (rocprofv3, Nsight Compute) named with a trace, or next to it in a directory, is joined to its
    kernels, as is a CSV log of clocks, power, temperatures or energy (nvidia-smi, rocm-smi,
    amd-smi, Zeus) and a snapshot of torch's allocator; these can also be read alone.

    \b
    Examples:
      chopper import trace.json.gz
      chopper import 'logs/rank*.json.gz' -o runs/imported
      chopper import trace.json.gz counters.csv -o runs/with-counters
      chopper import trace.json.gz nvidia-smi.csv --time-zone local -o runs/clocks
      chopper import report.sqlite -o runs/from-nsys
      chopper import out/run_*.csv -o runs/from-rocprofv3
      chopper import trace.rpd --device mi300x -o runs/from-rpd
      chopper import trace.json.gz snapshot.pickle -o runs/with-memory
      chopper import "s3://bucket/job/rank*.json.gz" -o s3://bucket/runs/job
    """
    from chopper.ingest import find_sources, write_run
    from chopper.ingest.logs import zone_of
    from chopper.storage.caches import cache_folder

    of_device = shared.stated()
    zone = None if time_zone is None else zone_of(time_zone)
    counted: deque[str] = deque([""], maxlen=1)
    with progress("looking for the traces", counted):
        files = find_sources(traces, counted.append)
    target = output or Path("runs") / (
        shared.run_name(files[0]) if len(files) == 1 else files[0].resolve().parent.name
    )
    engine = shared.engine_for(files, counted)

    finished = None
    if len(files) > 1:
        target_key = os.path.realpath(target) if isinstance(target, Path) else target
        finished = cache_folder("imports", target_key)

    def write(directory: Path) -> RunManifest:
        return write_run(
            traces, directory, zone=zone, device=of_device, engine=engine, finished=finished
        )

    with progress(f"importing {len(files)} trace(s)", counted), contextlib.ExitStack() as at_end:
        if finished is not None:
            at_end.callback(shutil.rmtree, finished, ignore_errors=True)
        shared.write_run(write, target, force=force, as_json=as_json)


@click.command("gather", no_args_is_help=True)
@click.argument(
    "nodes", nargs=-1, required=True, metavar="NODE_DIR...", shell_complete=shared.paths
)
@shared.run_output("Run directory to create, here or at an address. [default: runs/NAME-gathered]")
@shared.force("Replace an existing run.")
@click.option("--json", "as_json", is_flag=True, help="Print the run's manifest as JSON.")
def gather(nodes: tuple[str, ...], output: Path | str | None, force: bool, as_json: bool) -> None:
    """Combine the runs of a job's nodes into one.

    NODE_DIR is the run directory of a node, where it was recorded or a copy (rsync, scp), a folder
    of several, or the address of a run. Its contents are not changed. Two recordings of one rank,
    and runs of different jobs, are refused; a recording that occurs twice is taken once; missing
    ranks are listed.

    \b
    Examples:
      chopper gather node0/run node1/run -o runs/gathered
    """
    from chopper.recording import gather as gathering
    from chopper.storage.remote import here

    counted: deque[str] = deque([""], maxlen=1)
    with progress("looking for the runs", counted):
        paths = gathering.node_runs([Path(node) for node in here(nodes, counted.append)])
    target = output or Path("runs") / f"{paths[0].resolve().name}-gathered"
    with progress(f"gathering {len(paths)} runs"):
        shared.write_run(
            lambda folder: gathering.gather(paths, folder),
            target,
            force=force,
            as_json=as_json,
        )
