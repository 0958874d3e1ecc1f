"""``chopper compare``: two runs, cause by cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli import _shared as shared
from chopper.cli._devices import device_of_two
from chopper.cli.output import print_json, print_page, progress
from chopper.errors import printable
from chopper.storage.layout import is_experiment

if TYPE_CHECKING:
    from chopper.analyzers.compare.gate import Verdict
    from chopper.analyzers.compare.result import Comparison


@click.command("compare", cls=shared.Command)
@click.argument("run_a", metavar="RUN_A", shell_complete=shared.paths)
@click.argument("run_b", metavar="RUN_B", shell_complete=shared.paths)
@shared.engines
@device_of_two
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
@shared.comparing
def command(
    run_a: str,
    run_b: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    top: int,
    allow_different: bool,
    all_steps: bool,
) -> int:
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
    kind = None if output is None else shared.check_report(output, (run_a, run_b), force=force)
    if is_experiment(Path(run_a)) and is_experiment(Path(run_b)):
        shared.check_of_experiments("run_a", "run_b", "output", "force", "as_json", "top")
        return _experiments((Path(run_a), Path(run_b)), output, kind, top=top, as_json=as_json)
    found = compared(run_a, run_b, allow_different=allow_different, all_steps=all_steps)
    show(found, None, output, kind, top=top, as_json=as_json)
    return 0


def compared(run_a: str, run_b: str, *, allow_different: bool, all_steps: bool) -> Comparison:
    """Attribute and compare two runs."""
    sides = [shared.attributed([source], name) for name, source in (("A", run_a), ("B", run_b))]
    # Not before workers are started, who load as much at the same time.
    from chopper.api import compare

    with progress("comparing"):
        return compare(*sides, allow_different=allow_different, all_steps=all_steps)


def show(
    found: Comparison,
    verdict: Verdict | None,
    output: Path | None,
    kind: str | None,
    *,
    top: int = 15,
    as_json: bool,
) -> None:
    """Print a comparison and what became of its gate, or write it to a file."""
    from chopper import wording as fmt
    from chopper.reports import comparison as report
    from chopper.reports.to_text import MARKS

    if output is not None and kind is not None:
        with progress("writing the comparison"):
            size_bytes = shared.write_report(output, report.render(found, kind, gate=verdict))
        click.echo(output)
        click.echo(f"{fmt.bytes_(size_bytes)} written: {found.verdict}", err=True)
    if as_json:
        print_json(report.to_json(found, verdict))
    elif output is None:
        print_page(report.page(found, gate=verdict, top=top))
    if verdict is not None and (as_json or output is not None):
        for item in report.gate_items(verdict):
            click.echo(f"{MARKS[item.mark][0]} {printable(item.text)}", err=True)


def _experiments(
    paths: tuple[Path, Path], output: Path | None, kind: str | None, *, top: int, as_json: bool
) -> int:
    """Compare two experiments of one workload."""
    from chopper import wording as fmt
    from chopper.experiments.loading import load
    from chopper.reports import experiments as report

    with progress("attributing"):
        found = report.Experiments(*map(load, paths))
    if output is not None and kind is not None:
        with progress("writing the comparison"):
            size_bytes = shared.write_report(output, report.render(found, kind))
        click.echo(output)
        click.echo(f"{fmt.bytes_(size_bytes)} written", err=True)
    if as_json:
        print_json(found.to_dict())
    elif output is None:
        print_page(report.page(found, top=top))
    return 0
