"""``chopper validate``: injections whose truth is known, against what the attribution finds."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

from chopper.causes import parents
from chopper.cli import _shared as shared
from chopper.cli.output import show_status
from chopper.errors import UsageError, say
from chopper.quantities import one_of
from chopper.validation.results import MAGNITUDES, Case

_SUITES = ("synthetic", "real")


def _names(suites: Iterable[str] = _SUITES) -> dict[tuple[str, str], set[str]]:
    """Return suite and injection → its names: its own, those of its cause and of the parents."""
    known: dict[str, dict[str, str]] = {
        suite: importlib.import_module(f"chopper.validation.{suite}").injections()
        for suite in suites
    }
    return {
        (suite, name): {name, cause, *parents(cause)}
        for suite, causes in known.items()
        for name, cause in causes.items()
    }


def _distinct(names: dict[tuple[str, str], set[str]]) -> list[str]:
    return sorted(set().union(*names.values()))


@click.command("validate", cls=shared.Command)
@click.option("--synthetic", "suite", flag_value="synthetic", help="Synthetic suite only.")
@click.option(
    "--real", "suite", flag_value="real", help="Injections into real training on this machine only."
)
@click.option(
    "--causes",
    metavar="A,B",
    shell_complete=shared.completing(lambda: _distinct(_names())),
    help="Only these injections, by name, by the id of their cause or of its parent.",
)
@click.option(
    "--magnitudes",
    metavar="A,B",
    shell_complete=shared.completing(lambda: MAGNITUDES),
    help=f"Only these magnitudes, of {', '.join(MAGNITUDES)}.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of noise and order.")
@click.option("--quick", is_flag=True, help="A small subset: seconds instead of minutes.")
@shared.as_json
@shared.report_output("File to write besides")
def command(
    suite: str | None,
    causes: str | None,
    magnitudes: str | None,
    seed: int,
    quick: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Prove the attribution's accuracy on known causes.

    Causes are injected, one at a time and combined, into a model of a training job that accounts
    for every nanosecond (--synthetic), and into real training on this machine (--real). The table
    shows for each what was injected, what the attribution found, and what leaked into other causes.
    The exit code is 1 if a limit is missed.

    \b
    Examples:
      chopper validate --quick
      chopper validate --synthetic -o validation.html
      chopper validate --causes data_stall,idle.preparation --magnitudes large
      chopper validate --json | jq .score
    """
    from chopper.reports import validation
    from chopper.validation.results import to_dict

    if output is not None:
        shared.check_report(output, force=force)
    wanted: tuple[str, ...] = MAGNITUDES
    if magnitudes is not None:
        wanted = tuple(_named("magnitude", "--magnitudes", magnitudes, MAGNITUDES))
    chosen = _injections(causes, (suite,) if suite else _SUITES)
    if chosen.get("real") and importlib.util.find_spec("torch") is None:
        raise UsageError(
            "injections into real training need PyTorch, which is not installed: pip install "
            "'chopper-profiler[torch]'; --synthetic needs none"
        )
    started = time.perf_counter()
    done: list[Case] = []

    for name, injections in chosen.items():
        module = importlib.import_module(f"chopper.validation.{name}")
        for case in module.run_cases(
            injections=injections, magnitudes=wanted, seed=seed, quick=quick
        ):
            done.append(case)
            _show_progress(case, len(done), time.perf_counter() - started)
    if sys.stderr.isatty():
        show_status("")
    shared.present(
        lambda: validation.page(done),
        lambda: to_dict(done, seed=seed),
        as_json=as_json,
        output=output,
    )
    if any(case.status == "missed" for case in done):
        sys.exit(1)


def _named(kind: str, option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in a list with commas.

    Raises:
        UsageError: one is not known, or there is none.
    """
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise UsageError(f"{option} {text!r}: none named; expected of {', '.join(known)}")
    return [one_of(kind, name, known) for name in names]


def _injections(named: str | None, suites: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return suite → its injections to run, in order; suites without any are left out."""
    names = _names(suites)
    every = _distinct(names)
    wanted = {*(every if named is None else _named("injection", "--causes", named, every))}
    chosen: dict[str, tuple[str, ...]] = {}
    for (suite, name), names_of in names.items():
        if wanted & names_of:
            chosen[suite] = (*chosen.get(suite, ()), name)
    return chosen


def _show_progress(case: Case, count: int, seconds: float) -> None:
    line = f"{count} cases, {seconds:.0f} s: {case.injection} {case.magnitude} {case.flavour}"
    if sys.stderr.isatty():
        show_status(line)
    elif case.status == "missed" or count % 25 == 0:
        say(f"{line}: {case.status}")
