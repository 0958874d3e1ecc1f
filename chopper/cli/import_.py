"""``chopper import``: traces of other tools as a run directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli import _shared as shared
from chopper.cli.output import progress
from chopper.errors import OutputError, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.storage.manifest import RunManifest


@click.command(name="import", no_args_is_help=True)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", shell_complete=shared.paths)
@shared.output("Run directory to create. [default: runs/NAME]")
@shared.force("Replace an existing run.")
@click.option(
    "--time-zone",
    metavar="ZONE",
    help="Time zone of logs that name none: Europe/Berlin, +02:00, UTC, local.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the run's manifest as JSON.")
def command(
    traces: tuple[str, ...],
    output: Path | None,
    force: bool,
    time_zone: str | None,
    as_json: bool,
) -> None:
    """Import kernel traces of torch, Nsight Systems, rocprofv3 or rpd as one run; join runs of
    nodes.

    TRACE is a file, a glob or a directory; many files become the ranks of one run, and those of one
    process, one window after the other (torch.profiler's schedule with repeat), one rank with more
    steps. Damaged files are read as far as possible, and losses are reported. Every command that
    takes RUN also takes traces directly; importing keeps them together with their tables.

    The format is detected from the contents: Kineto JSON, `nsys export --type sqlite`, rocprofv3's
    rocpd, JSON and CSV (all files of one recording), rocprof's CSV, rpd. A CSV of hardware counters
    (rocprofv3, Nsight Compute) named with a trace, or next to it in a directory, is joined to its
    kernels, as is a CSV log of clocks, power, temperatures or energy (nvidia-smi, rocm-smi,
    amd-smi, Zeus) and a snapshot of torch's allocator; these can also be read alone.

    Run directories with ranks of one run, recorded on nodes without a shared disk, are joined into
    one run directory.

    \b
    Examples:
      chopper import trace.json.gz
      chopper import 'logs/rank*.json.gz' -o runs/imported
      chopper import trace.json.gz counters.csv -o runs/with-counters
      chopper import trace.json.gz nvidia-smi.csv --time-zone local -o runs/with-clocks
      chopper import report.sqlite -o runs/from-nsys
      chopper import out/run_*.csv -o runs/from-rocprofv3
      chopper import trace.json.gz snapshot.pickle -o runs/with-memory
      chopper import node0/run node1/run -o runs/joined
    """
    from chopper.ingest import find_sources, write_run
    from chopper.ingest.logs import zone_of
    from chopper.recording.join import join_runs
    from chopper.storage import manifest
    from chopper.storage.layout import is_run

    runs = [Path(named) for named in traces if is_run(Path(named))]
    if runs:
        target = output or Path("runs") / f"{runs[0].resolve().name}-joined"
        with progress(f"joining {len(traces)} runs"):
            made = _write(lambda place: join_runs([Path(t) for t in traces], place), target, force)
    else:
        zone = None if time_zone is None else zone_of(time_zone)
        files = find_sources(traces)
        first = files[0].resolve()
        target = output or Path("runs") / (
            shared.run_name(files[0]) if len(files) == 1 else first.parent.name
        )
        with progress(f"importing {len(files)} trace(s)"):
            made = _write(lambda place: write_run(traces, place, zone=zone), target, force)
    if as_json:
        click.echo(manifest.encode(made), nl=False)
    else:
        click.echo(str(target))
    for finding in [*made.findings, *(f for p in made.ranks for f in p.findings)]:
        click.echo(f"{finding.severity}: {printable(finding.message)}", err=True)
    named = shared.quoted(target)
    click.echo(f"next: chopper analyze {named}", err=True)
    click.echo(f"      chopper report {named} -o report.html", err=True)


def _write(make: Callable[[Path], RunManifest], target: Path, force: bool) -> RunManifest:
    """Write the run beside its place, and move it there when it is whole.

    The run that is there may be what the new one is made of.

    Raises:
        InputError: a trace cannot be read.
        OutputError: another command writes a run there, or it cannot be written; nothing of it is
            left.
    """
    from chopper.storage import manifest
    from chopper.storage.destination import check_output, new_output, prepare_output, working_dir
    from chopper.storage.files import write_atomic
    from chopper.storage.layout import MANIFEST

    check_output(target, force=force)
    place = Path(os.path.realpath(target))
    fresh = working_dir(place, "new")
    try:
        made = make(prepare_output(fresh))
        made.name = place.name
        write_atomic(fresh / MANIFEST, manifest.encode(made))
        with new_output(target, force=force, say=shared.say) as run_dir:
            for entry in fresh.iterdir():
                entry.replace(run_dir / entry.name)
    except OutputError as exc:
        raise OutputError(str(exc).replace(str(fresh), str(target))) from exc
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return made
