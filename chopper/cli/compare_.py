"""``chopper compare``: two runs, cause by cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli import _shared as shared
from chopper.cli.output import progress
from chopper.errors import tell
from chopper.storage.layout import is_experiment

if TYPE_CHECKING:
    from chopper.analyzers.compare.gate import Verdict
    from chopper.analyzers.compare.result import Comparison


@click.command("compare", cls=shared.Command)
@click.argument("run_a", metavar="RUN_A", shell_complete=shared.paths)
@click.argument("run_b", metavar="RUN_B", shell_complete=shared.paths)
@shared.engines
@shared.device_option_of_two
@shared.report_output("File to write instead of text")
@shared.as_json
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    metavar="N",
    help="Kernels and operators to print.",
)
@shared.allow_different
@shared.all_steps
def command(
    run_a: str,
    run_b: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    top: int,
    allow_different: bool,
    all_steps: bool,
) -> None:
    """Compare two runs: what changed from A to B, cause by cause, and is it significant?

    RUN_A and RUN_B are run directories, trace files, globs or directories of traces. Chopper first
    checks that both do the same work; then it splits the difference of a step by cause, each with a
    95 % interval from the variation of the steps within each run, and lists kernels and operators
    that appeared, disappeared, slowed down or sped up.

    Of two experiments of one workload (chopper bench), also of two machines, all measures are set
    side by side. To fail when B is slower, in continuous integration: chopper gate.

    \b
    Examples:
      chopper compare runs/before runs/after
      chopper compare before.json.gz after.json.gz -o difference.html
      chopper compare "base/*.json.gz" "new/*.json.gz" --json
      chopper compare runs/grid-cpu runs/grid-mi300x -o machines.html
    """
    if output is not None:
        shared.check_report(output, (run_a, run_b), force=force)
    if is_experiment(Path(run_a)) and is_experiment(Path(run_b)):
        from chopper.experiments.loading import load
        from chopper.reports import experiments as report

        shared.check_of_experiments("run_a", "run_b", "output", "force", "as_json", "top")
        with progress("attributing"):
            pair = report.Experiments(load(Path(run_a)), load(Path(run_b)))
        shared.present(
            lambda: report.page(pair, top=top),
            pair.to_dict,
            as_json=as_json,
            output=output,
            instead=True,
        )
        return
    comparison = compared(run_a, run_b, allow_different=allow_different, all_steps=all_steps)
    show(comparison, None, output, top=top, as_json=as_json)


def compared(run_a: str, run_b: str, *, allow_different: bool, all_steps: bool) -> Comparison:
    """Attribute and compare two runs."""
    sides = [shared.attributed([source], name) for name, source in (("A", run_a), ("B", run_b))]
    # Not before workers are started, who load as much at the same time.
    from chopper.api import compare

    with progress("comparing"):
        return compare(*sides, allow_different=allow_different, all_steps=all_steps)


def show(
    comparison: Comparison,
    gate: Verdict | None,
    output: Path | None,
    *,
    top: int = 15,
    as_json: bool,
) -> None:
    """Print a comparison and what became of its gate, or write it to a file."""
    from chopper.reports import comparison as report
    from chopper.reports.to_text import MARKS

    shared.present(
        lambda: report.page(comparison, gate=gate, top=top),
        lambda: report.to_json(comparison, gate),
        as_json=as_json,
        output=output,
        instead=True,
    )
    if as_json or output is not None:
        tell(comparison.verdict)
        for item in () if gate is None else report.gate_items(gate):
            tell(f"{MARKS[item.mark][0]} {item.text}")
