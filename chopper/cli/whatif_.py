"""``chopper whatif``: the effect of a change, predicted by a replay of the run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import click

from chopper.cli import _shared as shared
from chopper.cli.output import progress


def _fixes() -> list[str]:
    """Return the names of causes that can be taken away."""
    from chopper.analyzers.replay.whatif_options import ALIASES, not_fixable
    from chopper.causes import CAUSES

    aliases = [alias.replace("_", "-") for alias in ALIASES]
    return sorted([cause for cause in CAUSES if not not_fixable(cause)] + aliases)


def _schedules() -> list[str]:
    """Return the names of pipeline schedules."""
    from chopper.analyzers.jobs.schedules import SCHEDULES

    return [*SCHEDULES]


@click.command("whatif", cls=shared.Command)
@shared.runs
@shared.read_options
@click.option(
    "--fix",
    multiple=True,
    metavar="CAUSE|PART",
    shell_complete=shared.completing(_fixes),
    help="Remove a cause: an id of `chopper analyze`, its last part (data, dispatch, gc), or "
    "data-wait, launch-gaps, synchronization, straggler, exposed-communication, "
    "recomputation. Or a part of a job, whose operations then take the mean of their type: "
    "stage=3, rank=12, replica=1, op=backward, all; stages, sequence-lengths: all of these alike.",
)
@click.option("--clock", metavar="HZ", help="Device clock: 1980MHz, or `reference`.")
@click.option("--link", metavar="RATE", help="Bandwidth between ranks: 50GB/s, or x2.")
@click.option("--latency", metavar="TIME", help="Latency of that link: 5us, or x0.5.")
@click.option(
    "--faster",
    multiple=True,
    metavar="WHAT=K",
    help="Kernels K times as fast: gemm=2x, sdpa=1.5x, or a regular expression of names.",
)
@click.option("--without", multiple=True, metavar="OP", help="Remove an operator.")
@click.option("--graphs", is_flag=True, help="Launch each step as one CUDA graph.")
@click.option(
    "--overlap",
    is_flag=True,
    help="Perfect overlap: a step waits for communication at its end only.",
)
@click.option(
    "--schedule",
    metavar="NAME",
    shell_complete=shared.completing(_schedules),
    help="Pipeline schedule: 1f1b, gpipe, interleaved, zb1p, dualpipe.",
)
@click.option("--virtual-stages", type=int, metavar="N", help="Stages per pipeline rank.")
@click.option("--micro-batches", metavar="N", help="Micro-batches per step: 16, or x2.")
@shared.as_json
@shared.report_output("Additional file to write")
def command(
    sources: tuple[str, ...],
    fix: tuple[str, ...],
    clock: str | None,
    link: str | None,
    latency: str | None,
    faster: tuple[str, ...],
    without: tuple[str, ...],
    graphs: bool,
    overlap: bool,
    schedule: str | None,
    virtual_stages: int | None,
    micro_batches: str | None,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Predict how long a run would take with something changed.

    Replay the run's dependency graph (host threads, launches, streams, synchronizations,
    collectives that couple the ranks) with changes; several changes combine. Without any, each
    cause is removed in turn, to show its recoverable time.

    Of a job of several ranks, the page also gives its slowdown against the ideal job, whose
    operations each take the mean of their type, and what slowed it: workers, stages, operations.

    \b
    Examples:
      chopper whatif runs/mine
      chopper whatif runs/mine --fix data
      chopper whatif runs/mine --fix straggler --fix gc --json
      chopper whatif trace.json.gz --faster gemm=2x --graphs
      chopper whatif runs/mine --link x2 --latency 5us
      chopper whatif runs/mine --clock 1.2GHz -o slower.html
      chopper whatif job.parquet --fix stage=3 --fix sequence-lengths
      chopper whatif job.parquet --schedule interleaved --virtual-stages 2
    """
    from chopper import pipeline
    from chopper.analyzers.replay.replay import Replay
    from chopper.analyzers.replay.whatif_options import changes_of

    changes = changes_of(
        fix=fix,
        clock=clock,
        link=link,
        latency=latency,
        faster=faster,
        without=without,
        graphs=graphs,
        overlap=overlap,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
    )
    if output is not None:
        shared.check_report(output, force=force)
    attribution = shared.attributed(sources)
    with progress("replaying"):
        replayed = cache(lambda: Replay(attribution))
        answer = pipeline.whatif(attribution, changes, replayed)
    from chopper.reports import whatif

    shared.present(
        lambda: whatif.page(answer, replayed), answer.to_dict, as_json=as_json, output=output
    )
