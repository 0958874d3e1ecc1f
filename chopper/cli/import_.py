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
from chopper.cli.output import print_path, progress
from chopper.errors import say, tell
from chopper.wording import next_command

if TYPE_CHECKING:
    from collections.abc import Callable

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
@shared.read_options
@shared.engines("workers", "ray", "memory")
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
    amd-smi, Zeus) and a snapshot of torch's allocator; these can also be read alone. Spans of other
    tools (timers of a pipeline, one row per operation of a worker) come as Parquet, CSV or, with
    --map, Chrome JSON.

    \b
    Examples:
      chopper import trace.json.gz
      chopper import 'logs/rank*.json.gz' -o runs/imported
      chopper import trace.json.gz counters.csv -o runs/with-counters
      chopper import trace.json.gz nvidia-smi.csv --time-zone local -o runs/clocks
      chopper import report.sqlite -o runs/from-nsys
      chopper import out/run_*.csv -o runs/from-rocprofv3
      chopper import spans.parquet
      chopper import trace.rpd --device mi300x -o runs/from-rpd
      chopper import trace.json.gz snapshot.pickle -o runs/with-memory
      chopper import "s3://bucket/job/rank*.json.gz" -o s3://bucket/runs/job
    """
    from chopper.analyzers.coordinates import with_coordinates
    from chopper.ingest import find_sources, write_run
    from chopper.ingest.attachments import zone_of
    from chopper.storage.caches import cache_folder

    facts = shared.read_facts()
    layout = facts.pop("layout")
    zone = None if time_zone is None else zone_of(time_zone)
    counted: deque[str] = deque([""], maxlen=1)
    with progress("looking for the traces", counted):
        files = find_sources(traces, counted.append, facts["columns"])
    target = output or Path("runs") / (
        shared.run_name(files[0]) if len(files) == 1 else files[0].resolve().parent.name
    )
    engine = shared.engine_for(files, counted)

    finished = None
    if len(files) > 1:
        target_key = os.path.realpath(target) if isinstance(target, Path) else target
        finished = cache_folder("imports", target_key)

    def write(directory: Path) -> RunManifest:
        written = write_run(traces, directory, zone=zone, **facts, engine=engine, finished=finished)
        return with_coordinates(written, layout)

    with progress(f"importing {len(files)} trace(s)", counted), contextlib.ExitStack() as at_end:
        if finished is not None:
            at_end.callback(shutil.rmtree, finished, ignore_errors=True)
        _write_run(write, target, force=force, as_json=as_json)


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
        _write_run(
            lambda folder: gathering.gather(paths, folder),
            target,
            force=force,
            as_json=as_json,
        )


def _write_run(
    make: Callable[[Path], RunManifest], output: Path | str, *, force: bool, as_json: bool
) -> None:
    """Write a run to a temporary name, move it into place when it is complete, print its findings.

    A run for an address is made among the temporary files and copied there, its manifest last.

    The run that is there may be what the new one is made of.

    Raises:
        InputError: what it is made of cannot be read.
        OutputError: another command writes a run there, or it cannot be written; nothing of it is
            left.
    """
    from chopper.storage import manifest, remote
    from chopper.storage.caches import scratch

    if isinstance(output, Path):
        result = _placed(make, output, force=force)
    else:
        remote.check_upload(output, force=force)
        with scratch("upload") as folder:
            result = _placed(make, folder / remote.name_of(output), force=False)
            remote.upload(folder / result.name, output, force=force)
    if as_json:
        click.echo(manifest.encode(result), nl=False)
    else:
        print_path(output)
    for finding in [*result.findings, *(f for p in result.ranks for f in p.findings)]:
        tell(f"{finding.severity}: {finding.message}")
    tell(f"next: {next_command('chopper analyze {RUN}', RUN=[output])}")


def _placed(make: Callable[[Path], RunManifest], target: Path, *, force: bool) -> RunManifest:
    """Write a run beside its place and move it there when it is whole."""
    from chopper.storage import manifest
    from chopper.storage.destination import check_output, new_output, written_beside
    from chopper.storage.files import write_atomic
    from chopper.storage.layout import MANIFEST

    check_output(target, force=force)
    with written_beside(target) as fresh:
        result = make(fresh)
        result.name = Path(os.path.realpath(target)).name
        write_atomic(fresh / MANIFEST, manifest.encode(result))
        is_named = target.is_dir() and not any(target.iterdir())  # it may be the current one
        with new_output(target, force=force, say=say) as run_dir:
            if not is_named:
                fresh.replace(run_dir)  # which is empty: in one step
                return result
            # The manifest last: without it, what is there is not a whole run.
            for entry in sorted(fresh.iterdir(), key=lambda entry: entry.name == MANIFEST):
                entry.replace(run_dir / entry.name)
    return result
