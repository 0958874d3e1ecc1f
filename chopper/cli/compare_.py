"""``chopper compare``: two runs, cause by cause, and a gate for continuous integration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.analyzers.compare import gate as gates
from chopper.cli import _history
from chopper.cli import _shared as shared
from chopper.cli._devices import device_of_two
from chopper.cli.output import print_json, print_page, progress
from chopper.errors import UsageError, printable
from chopper.storage.layout import is_experiment

if TYPE_CHECKING:
    from chopper.analyzers.compare.result import Comparison

_SHARED = ("output", "force", "as_json", "ranks", "steps", "memory", "workers", "ray", "device")
_OF_TWO = ("run_a", "run_b", "top", "fail_on", "fail_on_point", "allow_different", "all_steps")
_OF_HISTORY = ("history", "add", "accept", "find", "strict", "junit")
"""Parameters of both forms of the command, of two runs, and of one with its history."""


@click.command("compare")
@click.argument("run_a", metavar="RUN_A", shell_complete=shared.paths)
@click.argument("run_b", metavar="[RUN_B]", required=False, shell_complete=shared.paths)
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
    "--history",
    type=shared.NamedPath(),
    metavar="DIR",
    help="Compare one run with the earlier runs of its job that this directory holds.",
)
@click.option(
    "--add", is_flag=True, help="Add the run to the history, unless its time is no noise."
)
@click.option(
    "--accept", is_flag=True, help="Add the run whatever the verdict: its time is the new level."
)
@click.option(
    "--find",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Slow-down that must be found; where noise may hide it, the machine is too noisy.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 where nothing could be decided, too.")
@click.option(
    "--junit",
    type=shared.NamedPath(),
    metavar="FILE",
    help="Write the verdict of --history or --fail-on as JUnit XML; replaces the file.",
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
    run_b: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    top: int,
    fail_on: str | None,
    fail_on_point: bool,
    history: Path | None,
    add: bool,
    accept: bool,
    find: float,
    strict: bool,
    junit: Path | None,
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

    --history judges one run by how much earlier runs of its job vary: same, regression,
    improvement, changed work, noisy machine or too few runs. The exit code is 1 after a regression
    or changed work.

    \b
    Examples:
      chopper compare runs/before runs/after
      chopper compare before.json.gz after.json.gz -o difference.html
      chopper compare "base/*.json.gz" "new/*.json.gz" --fail-on "step>+5%"
      chopper compare runs/mine --history history --add -o verdict.md
      chopper compare runs/grid-cpu runs/grid-mi300x -o machines.html
    """
    sources = [run for run in (run_a, run_b) if run is not None]
    if history is not None:
        _check_one_run(run_a, run_b, find)
    else:
        _check_two_runs(fail_on, junit, point=fail_on_point)
    conditions = gates.parse(fail_on) if fail_on is not None else None
    kind = None if output is None else shared.check_report(output, sources, force=force)
    if junit is not None:
        shared.check_file(junit, sources, force=True, option="--junit", example="junit.xml")
    if history is not None:
        options = _history.Options(history, find, add, accept, strict, junit)
        return _history.judged(run_a, options, output, kind, as_json=as_json)
    if run_b is None:
        raise UsageError("Missing argument 'RUN_B': the run to judge, or --history DIR")
    if is_experiment(Path(run_a)) and is_experiment(Path(run_b)):
        shared.check_of_experiments("run_a", "run_b", "output", "force", "as_json", "top")
        return _experiments((Path(run_a), Path(run_b)), output, kind, top=top, as_json=as_json)
    sides = [shared.attributed([source], name) for name, source in (("A", run_a), ("B", run_b))]
    # Not before workers are started, who load as much at the same time.
    from chopper.api import compare

    with progress("comparing"):
        found = compare(*sides, allow_different=allow_different, all_steps=all_steps)
    verdict = None
    if conditions is not None:
        verdict = gates.decide(found, conditions, point=fail_on_point)
    _show(found, verdict, output, kind, top=top, as_json=as_json)
    if verdict is not None and junit is not None:
        from chopper.reports import history as report

        cases = report.cases_of_gate(verdict)
        shared.write_report(junit, report.junit(found.b.name, cases, time.time_ns()))
    return int(verdict is not None and verdict.failed)


def _show(
    found: Comparison,
    verdict: gates.Verdict | None,
    output: Path | None,
    kind: str | None,
    *,
    top: int,
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


def _check_one_run(run_a: str, run_b: str | None, find: float) -> None:
    """Refuse what --history cannot use."""
    if find != find:  # nan is in every range
        raise UsageError("--find: nan is no number of percent, for example 2")
    if run_b is not None:
        raise UsageError(f"--history judges one run; leave {run_b} out")
    if given := shared.others_given("run_a", *_OF_HISTORY, *_SHARED):
        raise UsageError(f"{given}: of two runs; leave it out with --history")
    if is_experiment(Path(run_a)):
        raise UsageError(f"{run_a}: is an experiment; --history judges one of its runs")


def _check_two_runs(fail_on: str | None, junit: Path | None, *, point: bool) -> None:
    """Refuse what needs a gate or a history."""
    if point and fail_on is None:
        raise UsageError("--fail-on-point needs --fail-on: there is no gate to judge")
    if given := shared.others_given("junit", *_OF_TWO, *_SHARED):
        raise UsageError(f"{given}: needs --history DIR")
    if junit is not None and fail_on is None:
        raise UsageError("--junit: there is no verdict to write; add --history DIR or --fail-on")


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
