"""``chopper compare``: two runs, cause by cause, and a gate for continuous integration."""

from __future__ import annotations

from pathlib import Path

import click

from chopper.analyzers.compare import gate as gates
from chopper.cli import _shared as shared
from chopper.cli._devices import device_of_two
from chopper.cli.output import print_json, print_page, progress
from chopper.errors import UsageError, printable
from chopper.storage.layout import is_experiment


@click.command("compare")
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
@click.option(
    "--fail-on",
    metavar="EXPR",
    help="Exit with 1 when a condition holds beyond noise, for example "
    "'step>+5% or idle.preparation.data>+1ms'.",
)
@click.option(
    "--fail-on-point",
    is_flag=True,
    help="Judge --fail-on by the differences alone, ignoring their intervals.",
)
@click.option(
    "--allow-different",
    is_flag=True,
    help="Give a verdict even if the runs do different work.",
)
@click.option(
    "--all-steps",
    is_flag=True,
    help="Include leading steps that took much longer than all later ones, and steps of other "
    "kinds.",
)
def command(
    run_a: str,
    run_b: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    top: int,
    fail_on: str | None,
    fail_on_point: bool,
    allow_different: bool,
    all_steps: bool,
) -> int:
    """Compare two runs: what changed from A to B, cause by cause, and is it significant?

    RUN_A and RUN_B are run directories, trace files, globs or directories of traces. Chopper first
    checks that both do the same work; then it splits the difference of a step by cause, each with a
    95 % interval from the variation of the steps within each run, and lists kernels and operators
    that appeared, disappeared, slowed down or sped up.

    Of two experiments of one workload (chopper run), also of two machines, all measures are set
    side by side.

    --fail-on takes conditions joined by "or": step, median, untraced (the step time without a
    trace) or the id of a cause (`chopper analyze RUN --csv` and the documentation list them), > or
    <, and a limit for the change from A to B in percent or in ns, us, ms or s. The gate fails if
    the whole 95 % interval is beyond the limit; with fewer than 3 steps in a run there is no
    interval, and it does not fail. It fails if the runs do different work.

    \b
    Examples:
      chopper compare runs/before runs/after
      chopper compare before.json.gz after.json.gz -o difference.html
      chopper compare "base/*.json.gz" "new/*.json.gz" --fail-on "step>+5%"
      chopper compare runs/grid-cpu runs/grid-mi300x -o machines.html
    """
    if fail_on_point and fail_on is None:
        raise UsageError("--fail-on-point needs --fail-on: there is no gate to judge")
    conditions = gates.parse(fail_on) if fail_on is not None else None
    kind = None
    if output is not None:
        kind = shared.check_report(output, (run_a, run_b), force=force)
    if is_experiment(Path(run_a)) and is_experiment(Path(run_b)):
        shared.check_of_experiments("run_a", "run_b", "output", "force", "as_json", "top")
        return _experiments((Path(run_a), Path(run_b)), output, kind, top=top, as_json=as_json)
    sides = [shared.attributed([source], name) for name, source in (("A", run_a), ("B", run_b))]
    # Not before workers are started, who load as much at the same time.
    from chopper import wording as fmt
    from chopper.api import compare
    from chopper.reports import comparison as report
    from chopper.reports.to_text import MARKS

    with progress("comparing"):
        found = compare(*sides, allow_different=allow_different, all_steps=all_steps)
    verdict = None
    if conditions is not None:
        verdict = gates.decide(found, conditions, point=fail_on_point)
    if output is not None and kind is not None:
        with progress("writing the comparison"):
            size_bytes = shared.write_report(output, report.render(found, kind, gate=verdict))
        click.echo(output)
        click.echo(f"{fmt.bytes_(size_bytes)} written: {found.verdict}", err=True)
    if as_json:
        print_json(report.to_json(found, verdict))
    elif output is None:
        print_page(report.page(found, gate=verdict, top=top))
    if verdict is None:
        return 0
    if as_json or output is not None:
        for item in report.gate_items(verdict):
            click.echo(f"{MARKS[item.mark][0]} {printable(item.text)}", err=True)
    return int(verdict.failed)


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
