"""``chopper bench``: a reference workload, recorded and attributed; ``chopper workloads``."""

from __future__ import annotations

import datetime as dt
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper import wording as fmt
from chopper.cli import _shared as shared
from chopper.cli.output import print_json, print_page, progress
from chopper.errors import ChopperError, say, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chopper.experiments.declarations import Variant, Workload
    from chopper.experiments.prepare import Launch


_INTERRUPTED = 130


def _known() -> Iterable[str]:
    from chopper.experiments.prepare import workloads

    return workloads()


_names = shared.completing(_known)
"""Completes the names of the reference workloads."""


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not {"--help", "-h"}.isdisjoint(args):
            from chopper.experiments.prepare import program

            # The first that can be one: an output's directory may be called like a workload.
            named = next((word for word in args if program(word)), None)
            if named is not None:
                click.echo(described(named), nl=False)
                ctx.exit()
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            hint = "Options of the workload go behind --, see: chopper bench WORKLOAD --help"
            raise click.UsageError(f"{exc.format_message()} {hint}", ctx) from exc


@click.command("bench", cls=_Command)
@click.argument("workload", shell_complete=_names)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORKLOAD OPTIONS]")
@click.option(
    "--ranks", type=int, metavar="N", help="Processes.  [default: one per GPU, or 2 without GPUs]"
)
@click.option("--steps", type=int, metavar="N", help="Steps.  [default: the workload's]")
@click.option(
    "--variants",
    metavar="A,B",
    help="Which of the workload's variants to run, or all.  [default: the workload's]",
)
@click.option(
    "--repeats",
    type=int,
    metavar="N",
    help="Times each variant runs, in turn.  [default: the workload's]",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Run all variants and compare them; workloads with variants always do.",
)
@click.option(
    "--stacks", is_flag=True, help="Trace Python's call stacks too, which slows steps down."
)
@shared.output("Directory of the run.  [default: runs/<time>-<workload>]")
@shared.force("Replace the run in the output directory.")
@shared.as_json
def command(
    workload: str,
    options: tuple[str, ...],
    ranks: int | None,
    steps: int | None,
    variants: str | None,
    repeats: int | None,
    compare: bool,
    stacks: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Record a reference workload, attribute it, show where the time went.

    A workload with variants runs each in turn, several times, and shows their measurements and the
    causes of the difference; every repetition is a separate run in the output directory.

    What each workload runs, how long it takes and its options: chopper bench WORKLOAD --help.

    The workload's own output goes to stderr, the result to stdout; with --json in the form that
    "chopper analyze --json" prints, or schema chopper.experiment/1 for workloads that measure. The
    exit code is the workload's own.

    \b
    Examples:
      chopper bench fsdp2 --ranks 2
      chopper bench fsdp1 --ranks 2 --steps 12 -o runs/fsdp1 --force
      chopper bench fsdp --compare
      chopper bench gemm --variants random -- --dtypes float32
      chopper bench fsdp2 --ranks 8 -- --size 8b --sequence 8192 --dtype bfloat16
    """
    from chopper.errors import UsageError
    from chopper.experiments.launch import is_program
    from chopper.experiments.prepare import WorkloadUnavailable, find, prepare, program
    from chopper.recording.signals import interrupts_end_at_once
    from chopper.storage.destination import new_output

    if program(workload) is None and is_program(workload):
        record = f"chopper record -- {fmt.quoted(workload, *options)}"
        raise UsageError(f"{workload}: is a program, not a workload; record it: {record}")
    if compare and not find(workload).variants:
        raise UsageError(
            f"--compare: {workload} has no variants; see chopper bench {workload} --help"
        )
    # Nothing has begun. Libraries that are being loaded lose an exception, or fail of it.
    try:
        with interrupts_end_at_once(), progress("probing this machine"):
            launch = prepare(
                workload,
                ranks=ranks,
                steps=steps,
                options=options,
                variants=variants,
                repeats=repeats,
                stacks=stacks,
            )
    except WorkloadUnavailable as exc:
        _show_model(workload, str(exc), as_json=as_json)
        raise
    # After all checks: --force replaces the run that is there.
    path = output or Path("runs") / f"{dt.datetime.now():%Y%m%d-%H%M%S}-{workload}"
    with new_output(path, force=force, say=say) as folder:
        for note in launch.notes:
            say(note)
        if launch.workload.experiment:
            return _experiment(launch, path, folder, as_json=as_json)
        return _single(launch, path, folder, as_json=as_json)


def _show_model(workload: str, reason: str, *, as_json: bool) -> None:
    """Show the headlines that a workload calculates without running, where it has any."""
    from chopper.experiments import results as ex
    from chopper.experiments.prepare import program
    from chopper.reports.experiment import headlines_page

    entry = program(workload)
    if entry is None or entry.model is None:
        return
    headlines = [*entry.model()]
    if as_json:
        document = {
            "schema": "chopper.headlines/1",
            "headlines": [ex.headline_to_dict(h) for h in headlines],
            "absent": {workload: reason},
        }
        print_json(document)
    else:
        print_page(headlines_page(workload, headlines))


def _single(launch: Launch, path: Path, folder: Path, *, as_json: bool) -> int:
    """One recorded run."""
    from chopper.storage.destination import holds_recording

    say(f"recording {launch.name} with {launch.ranks} ranks into {path}")
    exit_code = launch.run(folder)
    if exit_code and not _ended(launch.name, exit_code, path, kept=holds_recording(folder)):
        return exit_code
    _show_what_there_is(exit_code, lambda: _show(path, launch.name, exit_code, as_json=as_json))
    return exit_code


def _show_what_there_is(exit_code: int, show: Callable[[], None]) -> None:
    """Show a result; a failed run's exit code matters more than missing parts of it."""
    try:
        show()
    except ChopperError as exc:
        if not exit_code:
            raise
        if exit_code != _INTERRUPTED:
            say(str(exc))


def _ended(what: str, exit_code: int, path: Path, *, kept: bool) -> bool:
    """Say how it ended, and whether anything is kept; returns that."""
    how = "was interrupted" if exit_code == _INTERRUPTED else f"ended with exit code {exit_code}"
    rest = f"what was recorded until then is kept in {path}" if kept else "nothing was recorded"
    say(f"{what} {how}; {rest}")
    return kept


def _show(path: Path, workload: str, exit_code: int, *, as_json: bool) -> None:
    """Close the run, print its attribution, name the next commands."""
    from chopper import pipeline
    from chopper.cli.analyze_ import print_text
    from chopper.recording.finish import finalize
    from chopper.reports import document

    finalize(path, command=["chopper", *sys.argv[1:]], workload=workload, exit_code=exit_code)
    with progress("attributing"):
        attribution = pipeline.attribute(path)
    if as_json:
        print_json(document(attribution))
    else:
        print_text(attribution, None, None)
    command = fmt.next_command("chopper report {RUN} -o report.html", RUN=[path])
    tell(f"next: {command}")


def _experiment(launch: Launch, path: Path, folder: Path, *, as_json: bool) -> int:
    """All repetitions of all variants, in turn, so that a change of the machine hits all alike."""
    from chopper.experiments import results as ex
    from chopper.experiments.declarations import Variant
    from chopper.experiments.judgement import machine_cores, others_while
    from chopper.recording.finish import finalize
    from chopper.storage.destination import holds_recording
    from chopper.version import __version__

    alone = Variant(name=launch.name, summary=launch.workload.summary, words=())
    variants = launch.variants or (alone,)
    names = {v.name for v in variants}
    baseline = launch.workload.baseline if launch.workload.baseline in names else None
    plan = ex.Plan(
        chopper_version=__version__,
        workload=launch.name,
        summary=launch.workload.summary,
        command=["chopper", *sys.argv[1:]],
        created_ns=time.time_ns(),
        ranks=launch.ranks,
        device=launch.device,
        options=launch.options,
        steps="steps" in launch.options,
        baseline=baseline,
        machine_cores=machine_cores(),
        variants=[ex.VariantPlan(name=v.name, summary=v.summary) for v in variants],
    )
    ex.write_plan(folder, plan)
    say(
        f"recording {launch.name}: {fmt.plural(len(variants), 'variant')} × "
        f"{fmt.plural(launch.repeats, 'repetition')} with {fmt.plural(launch.ranks, 'rank')} into "
        f"{path}"
    )
    exit_code = 0
    runs = [
        (f"{variant.name}-{repeat + 1}", variant, planned)
        for repeat in range(launch.repeats)
        for variant, planned in zip(variants, plan.variants, strict=True)
    ]
    started_s = time.monotonic()
    for done, (name, variant, planned) in enumerate(runs):
        remaining = _left(done, len(runs), time.monotonic() - started_s, launch.expected_s)
        say(f"{done + 1} of {len(runs)}: {name}{remaining}")
        (folder / name).mkdir()
        with others_while() as other_load:
            exit_code = launch.run(folder / name, variant)
        plan.other_cores[name] = other_load.cores
        if not exit_code or holds_recording(folder / name):
            try:
                finalize(
                    folder / name,
                    command=plan.command,
                    workload=f"{launch.name} {variant.name}",
                    exit_code=exit_code,
                )
                planned.runs.append(name)
            except ChopperError as exc:
                say(str(exc))
        else:
            shutil.rmtree(folder / name, ignore_errors=True)
        ex.write_plan(folder, plan)
        if exit_code:
            break
    if exit_code and not _ended(name, exit_code, path, kept=holds_recording(folder)):
        return exit_code
    _show_what_there_is(exit_code, lambda: _show_experiment(path, as_json=as_json))
    return exit_code


def _left(done: int, total: int, spent_s: float, expected_s: float | None) -> str:
    """Say how long the remaining runs should take, by the finished ones or else as expected."""
    left_s = spent_s / done * (total - done) if done else (expected_s or 0) - spent_s
    if left_s < 1:
        return ""
    return f", about {f'{left_s:.0f} s' if left_s < 60 else fmt.duration(left_s * 1e9)} left"


def _show_experiment(path: Path, *, as_json: bool) -> None:
    """Print the measurements, write the page to the same folder, name the next commands."""
    from chopper.experiments.loading import load
    from chopper.reports import experiment as report
    from chopper.storage.files import write_atomic

    with progress("attributing"):
        result = load(path)
    if as_json:
        print_json(result.to_dict())
    else:
        print_page(report.page(result))
    page = path / "report.html"
    with progress("writing the report"):
        write_atomic(page, report.render(result, "html").encode("utf-8", "replace"))
    tell(f"report: {page}")
    # What an interruption left out cannot be compared.
    runs = {v.name: path / v.runs[0] for v in result.plan.variants if v.runs}
    base = runs.pop(result.plan.baseline or "", None)
    if base is not None and runs:
        other = next(iter(runs.values()))
        command = fmt.next_command("chopper compare {A} {B}", A=[base], B=[other])
    else:
        first = base or next(iter(runs.values()))
        command = fmt.next_command("chopper report {RUN} -o report.html", RUN=[first])
    tell(f"next: {command}")


_WIDTH = 100


@click.command("workloads")
@click.argument("workload", required=False, shell_complete=_names)
@shared.as_json
def workloads(workload: str | None, as_json: bool) -> None:
    """List the reference workloads, or describe one with its variants and options.

    \b
    Examples:
      chopper workloads
      chopper workloads overlap
      chopper workloads --json | jq '.workloads[].name'
    """
    from chopper.experiments import prepare

    if workload is not None:
        prepare.find(workload)
    if as_json:
        names = [*prepare.workloads()] if workload is None else [workload]
        print_json({"schema": "chopper.workloads/1", "workloads": [_to_dict(n) for n in names]})
    elif workload is not None:
        click.echo(described(workload), nl=False)
    else:
        out = click.HelpFormatter(width=_WIDTH)
        out.write_dl(
            [(name, f"{w.summary}. {_facts(w)}.") for name, w in prepare.workloads().items()]
        )
        click.echo(out.getvalue(), nl=False)
        tell("next: chopper bench fsdp2 --help")


def described(name: str) -> str:
    """One workload for people: its program, its cost, its options."""
    from chopper.experiments.prepare import find, options_of

    workload = find(name)
    out = click.HelpFormatter(width=_WIDTH)
    out.write_usage("chopper bench", f"{name} [OPTIONS] [-- WORKLOAD OPTIONS]")
    out.write_paragraph()
    with out.indentation():
        out.write_text(f"{workload.summary[:1].upper()}{workload.summary[1:]}.")
        out.write_paragraph()
        out.write_text(f"{_facts(workload)}.")
    if workload.variants:
        with out.section("Variants, chosen by --variants A,B or --variants all"):
            out.write_dl([(v.name, _summary(workload, v)) for v in workload.variants])
    with out.section("Options of the workload, behind --"):
        out.write_dl(
            [
                (
                    f"--{o.name} " + ("|".join(o.choices) if o.choices else "N"),
                    o.help if o.default is None else f"{o.help} [default: {o.default}]",
                )
                for o in options_of(name)
            ]
        )
    out.write_paragraph()
    out.write_text("Options before the --: chopper bench --help")
    return out.getvalue()


def _facts(workload: Workload) -> str:
    """Return time, memory and ranks at its default size, in one line."""
    variants = [v for v in workload.variants if v.default and not v.needs_gpu]
    parts = [fmt.plural(workload.ranks, "rank") + " without GPUs"]
    if workload.experiment:
        times = fmt.plural(workload.repeats, "time")
        parts.append(f"{fmt.plural(len(variants), 'variant')}, {times} each" if variants else times)
    parts.append(f"about {workload.seconds} s on two cores")
    return "; ".join(parts)


def _summary(workload: Workload, variant: Variant) -> str:
    marks = ["the baseline"] * (variant.name == workload.baseline)
    marks += ["needs a GPU"] * variant.needs_gpu
    marks += ["only when named"] * (not variant.default)
    return variant.summary + (f" ({', '.join(marks)})" if marks else "")


def _to_dict(name: str) -> dict[str, Any]:
    from chopper.experiments.prepare import find, options_of

    workload = find(name)
    fields = ("summary", "module", "ranks", "repeats", "seconds", "baseline")
    of_variant = ("name", "summary", "needs_gpu", "default")
    return {
        "name": name,
        **{field: getattr(workload, field) for field in fields},
        "variants": [{f: getattr(v, f) for f in of_variant} for v in workload.variants],
        "options": [
            {"name": f"--{o.name}", "help": o.help, "default": o.default, "choices": o.choices}
            for o in options_of(name)
        ],
    }
