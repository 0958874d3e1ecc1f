"""``chopper compare``: two runs, cause by cause; ``chopper gate``: a run judged, for CI."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from chopper.cli import _shared as shared
from chopper.cli.output import progress
from chopper.errors import InputError, OutputError, UsageError, reason_of, tell
from chopper.storage.files import (
    decode_document,
    encode_json,
    json_without_secrets,
    read_bytes,
    write_atomic,
)
from chopper.storage.layout import is_experiment

if TYPE_CHECKING:
    from chopper.analyzers.compare.gate import Verdict
    from chopper.analyzers.compare.history import Judgement, PastRun
    from chopper.analyzers.compare.result import Comparison


_allow_different = click.option(
    "--allow-different", is_flag=True, help="Give a verdict even if the runs do different work."
)
_all_steps = click.option(
    "--all-steps",
    is_flag=True,
    help="Include leading steps that took much longer than all later ones, and steps of other "
    "kinds.",
)


@click.command("compare", cls=shared.Command)
@click.argument("run_a", metavar="RUN_A", shell_complete=shared.paths)
@click.argument("run_b", metavar="RUN_B", shell_complete=shared.paths)
@shared.engines()
@shared.read_options_of_two
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
@_allow_different
@_all_steps
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
        from chopper.reports import experiment as report

        shared.check_of_experiments("run_a", "run_b", "output", "force", "as_json", "top")
        with progress("attributing"):
            pair = report.Experiments(load(Path(run_a)), load(Path(run_b)))
        shared.present(
            lambda: report.page_of_two(pair, top=top),
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


@click.command("gate", cls=shared.Command)
@click.argument("runs", metavar="[BASE] RUN", nargs=-1, required=True, shell_complete=shared.paths)
@click.option(
    "--history",
    type=shared.NamedPath(),
    metavar="DIR",
    help="Judge RUN by the earlier runs of its job that this directory holds.",
)
@click.option("--add", is_flag=True, help="Add the run to the history, unless it regressed.")
@click.option(
    "--accept", is_flag=True, help="Add the run whatever the verdict: its time is the new level."
)
@click.option(
    "--find",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help='Smallest regression to detect; "noisy machine" if noise may hide it.',
)
@click.option("--strict", is_flag=True, help="Exit with 1 where nothing could be decided, too.")
@click.option(
    "--fail-on",
    metavar="EXPR",
    help="Judge RUN by BASE: fail when a condition holds beyond noise, for example "
    "'step>+5% or idle.preparation.data>+1ms'.",
)
@click.option(
    "--junit",
    type=shared.NamedPath(),
    metavar="FILE",
    help="Write the verdict as JUnit XML; replaces the file.",
)
@shared.report_output("File to write instead of text")
@shared.as_json
@click.option(
    "--fail-on-point",
    is_flag=True,
    help="Judge --fail-on by the differences alone, ignoring their intervals.",
)
@_allow_different
@_all_steps
@shared.engines()
@shared.read_options_of_two
def gate(
    runs: tuple[str, ...],
    history: Path | None,
    add: bool,
    accept: bool,
    find: float,
    strict: bool,
    fail_on: str | None,
    junit: Path | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    fail_on_point: bool,
    allow_different: bool,
    all_steps: bool,
) -> int:
    """Judge a run for continuous integration: the exit code is 1 if it fails.

    With --history, RUN is judged by how much earlier runs of its job vary: same, regression,
    improvement, changed work, noisy machine or too few runs. It fails after a regression or changed
    work.

    With --fail-on, RUN is judged by another run, BASE. Conditions are joined by "or": step, median,
    untraced (the step time without a trace) or the id of a cause (`chopper analyze RUN --csv` and
    the documentation list them), > or <, and a limit for the change from BASE to RUN in percent or
    in ns, us, ms or s. It fails if the whole 95 % interval is beyond the limit, or if the runs do
    different work; with fewer than 3 steps in a run there is no interval, and it does not fail.

    \b
    Examples:
      chopper gate runs/mine --history history --add -o verdict.md
      chopper gate runs/mine --history history --junit junit.xml
      chopper gate "base/*.json.gz" "new/*.json.gz" --fail-on "step>+5%"
    """
    from chopper.analyzers.compare import gate as gates

    _check_gate(runs, history, fail_on, find)
    conditions = gates.parse(fail_on) if fail_on is not None else None
    if output is not None:
        shared.check_report(output, runs, force=force)
    if junit is not None:
        shared.check_file(junit, runs, force=True, option="--junit", example="junit.xml")
    if conditions is None:
        assert history is not None
        judged = _judged(
            runs[0], history, find, output, junit, add=add, accept=accept, as_json=as_json
        )
        return int(not accept and (judged.failed or (strict and judged.undecided)))
    comparison = compared(*runs, allow_different=allow_different, all_steps=all_steps)
    verdict = gates.decide(comparison, conditions, point=fail_on_point)
    show(comparison, verdict, output, as_json=as_json)
    if junit is not None:
        from chopper.reports import comparison as report

        cases = report.cases_of_gate(verdict)
        shared.write_report(junit, report.junit(comparison.b.name, cases, time.time_ns()))
    return int(verdict.failed)


def _check_gate(
    runs: tuple[str, ...], history: Path | None, fail_on: str | None, find: float
) -> None:
    """Refuse what the form of the command cannot use, by a UsageError."""
    for run in runs:
        if is_experiment(Path(run)):
            raise UsageError(f"{run}: is an experiment; name one of its runs")
    if history is not None:
        if find != find:  # nan is in every range
            raise UsageError("--find: nan is no number of percent, for example 2")
        if len(runs) > 1:
            raise UsageError(f"--history judges one run; leave {runs[1]} out")
        if refused := shared.given("fail_on", "fail_on_point", "allow_different", "all_steps"):
            raise UsageError(f"{refused}: of two runs; leave it out with --history")
        return
    if refused := shared.given("add", "accept", "find", "strict"):
        raise UsageError(f"{refused}: needs --history DIR")
    if fail_on is None or len(runs) != 2:
        raise UsageError("give RUN and --history DIR, or BASE, RUN and --fail-on EXPR")


def read_history(folder: Path) -> list[PastRun]:
    """Read all runs of a history; none where it does not exist yet.

    Raises:
        InputError: it is no history, or a file in it is damaged or of a newer version.
    """
    from chopper.analyzers.compare.history import SCHEMA, PastRun

    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise InputError(f"{folder}: cannot be read as a history ({reason_of(exc)})") from exc
    runs = []
    for file in files:
        data = read_bytes(file)
        remedy = "remove the file, or name the directory of a history"
        problem = f"{file}: is not a run of a history"
        runs.append(decode_document(data, PastRun, SCHEMA, problem, remedy=remedy))
    return runs


def add_run(folder: Path, run: PastRun) -> None:
    """Add a run to a history; a run that is in it is replaced.

    Raises:
        InputError: it holds numbers that no history can.
        OutputError: it cannot be written.
    """
    from chopper.analyzers.compare.history import SCHEMA, PastRun

    data = json_without_secrets(encode_json(run)) + b"\n"
    remedy = "its manifest or its tables say what nobody measures"
    decode_document(data, PastRun, SCHEMA, f"{run.name}: fits no history", remedy=remedy)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be made ({reason_of(exc)})") from exc
    write_atomic(folder / f"{run.time_ns}-{run.id}.json", data)


def _judged(
    source: str,
    folder: Path,
    find_percent: float,
    output: Path | None,
    junit: Path | None,
    *,
    add: bool,
    accept: bool,
    as_json: bool,
) -> Judgement:
    """Judge a run by its history, add it where that is asked for, and say so."""
    history = read_history(folder)  # before minutes are spent on the run
    from chopper.analyzers.compare.history import adds, is_new_level, judge, past_run
    from chopper.reports import comparison as report
    from chopper.reports.to_text import MARKS

    run = past_run(shared.attributed([source]))
    judgement = judge(run, history, find_ratio=find_percent / 100)
    new_level = (accept and is_new_level(judgement)) or any(
        earlier.accepted for earlier in history if earlier.id == run.id
    )
    if accept or (add and adds(judgement)):
        add_run(folder, msgspec.structs.replace(run, accepted=new_level))
        outcome = "added to the history" + (" as a new level" if new_level else "")
    elif add or judgement.failed:
        outcome = "not added to the history; --accept adds it, as a new level"
    else:
        outcome = "not added to the history; --add does"
    if junit is not None:
        text = report.junit(run.name, report.cases(judgement), run.time_ns)
        shared.write_report(junit, text)
    shared.present(
        lambda: report.history_page(judgement, outcome=outcome),
        judgement.to_dict,
        as_json=as_json,
        output=output,
        instead=True,
    )
    if as_json or output is not None:
        mark = MARKS["error" if judgement.failed else "unknown" if judgement.undecided else "ok"][0]
        tell(f"{mark} {judgement.sentence}")
        tell(outcome)
    return judgement
