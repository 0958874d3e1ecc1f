"""``chopper import``: traces of other tools as a run directory."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click

from chopper.errors import OutputError


@click.command(name="import", no_args_is_help=True)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Run directory to make [runs/NAME]."
)
@click.option("--force", is_flag=True, help="Replace the run that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the run's manifest as JSON.")
def command(traces: tuple[str, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Import kernel traces (Kineto JSON from CUDA, ROCm or CPU) as one run.

    TRACE is a file, a glob or a directory; many files become the ranks of one run. Damaged files
    are read as far as they go, and what was lost is said. Every command that takes RUN also takes
    traces directly; importing keeps them together with their tables.

    \b
    Examples:
      chopper import trace.json.gz
      chopper import 'logs/rank*.json.gz' -o runs/imported
    """
    from chopper import cache, manifest
    from chopper.cli._progress import progress
    from chopper.ingest import find_sources, import_traces
    from chopper.run import MANIFEST, prepare_output, rank_dir_name, write_atomic

    files = find_sources(traces)
    with progress(f"reading {len(files)} trace(s)"):
        run = import_traces(files, source=" ".join(traces))
    target = output or Path("runs") / _name(files)
    prepare_output(target, force=force)
    try:
        for part in run.manifest.ranks:
            folder = target / rank_dir_name(part.rank)
            folder.mkdir(parents=True)
            raw = Path(part.traces[0])
            kept = folder / ("trace.json.gz" if _is_gzip(raw) else "trace.json")
            shutil.copyfile(raw, kept)
            part.traces = (kept.name,)
            part.source_digest = cache.digest([kept])
            write_atomic(folder / MANIFEST, manifest.encode(part))
            cache.write(
                target / "tables" / rank_dir_name(part.rank),
                part.source_digest,
                {name: table for (rank, name), table in run.store.items() if rank == part.rank},
            )
    except OSError as exc:
        raise OutputError(f"{target}: cannot be written ({exc.strerror})") from exc
    run.manifest.name = target.resolve().name
    run.manifest.created_ns = time.time_ns()
    write_atomic(target / MANIFEST, manifest.encode(run.manifest))
    if as_json:
        click.echo(manifest.encode(run.manifest), nl=False)
    else:
        click.echo(str(target))
    for finding in [*run.manifest.findings, *(f for p in run.manifest.ranks for f in p.findings)]:
        click.echo(f"{finding.severity}: {finding.message}", err=True)
    click.echo(f"next: chopper analyze {target}", err=True)
    click.echo(f"      chopper report {target} -o report.html", err=True)


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _name(files: list[Path]) -> str:
    if len(files) == 1:
        name = files[0].name
        for suffix in (".gz", ".json", ".trace", ".pt"):
            name = name.removesuffix(suffix)
        return name
    return files[0].resolve().parent.name
