"""``chopper validate``: injections whose truth is known, against what the attribution finds."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli import _shared as shared
from chopper.errors import UsageError
from chopper.validation.results import MAGNITUDES

if TYPE_CHECKING:
    from chopper.validation.results import Case

_SUITES = ("synthetic", "real")


@click.command("validate", short_help="Prove the attribution's accuracy on known causes.")
@click.option("--synthetic", "suite", flag_value="synthetic", help="Only the synthetic suite.")
@click.option("--real", "suite", flag_value="real", help="Only injections into real training here.")
@click.option(
    "--causes",
    metavar="A,B",
    help="Only these injections, by their name or by the id of their cause or of its parent.",
)
@click.option("--magnitudes", metavar="A,B", help=f"Only these of {', '.join(MAGNITUDES)}.")
@click.option("--seed", type=int, default=0, show_default=True, help="Noise and order.")
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

    Causes are injected, one at a time and together, into a model of a training job that keeps its
    own books to the nanosecond (--synthetic), and into real training on this machine (--real). The
    table shows for each what was injected, what the attribution found, and what leaked into other
    causes. Exit code 1 when a bar is missed.

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
    wanted = _magnitudes(magnitudes)
    chosen = _injections(causes, (suite,) if suite else _SUITES)
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
        click.echo("\r\x1b[K", nl=False, err=True)
    shared.present(
        lambda: validation.page(done),
        lambda: to_dict(done, seed=seed),
        as_json=as_json,
        output=output,
    )
    if any(case.status == "missed" for case in done):
        sys.exit(1)


def _magnitudes(named: str | None) -> tuple[str, ...]:
    if named is None:
        return MAGNITUDES
    found = tuple(n.strip() for n in named.split(",") if n.strip())
    unknown = [n for n in found if n not in MAGNITUDES]
    if unknown or not found:
        raise UsageError(
            f"--magnitudes {named!r}: {', '.join(unknown) or 'none named'}; "
            f"expected of {', '.join(MAGNITUDES)}"
        )
    return found


def _injections(named: str | None, suites: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return suite → its injections to run, in order; suites without any are left out."""
    known: dict[str, dict[str, str]] = {
        suite: importlib.import_module(f"chopper.validation.{suite}").injections()
        for suite in suites
    }
    if named is None:
        return {suite: tuple(names) for suite, names in known.items()}
    wanted = [n.strip() for n in named.split(",") if n.strip()]
    chosen: dict[str, tuple[str, ...]] = {}
    matched: set[str] = set()
    for suite, names in known.items():
        for name, cause in names.items():
            fits = {w for w in wanted if w in (name, cause) or cause.startswith(w + ".")}
            if fits:
                matched |= fits
                chosen[suite] = (*chosen.get(suite, ()), name)
    unknown = [w for w in wanted if w not in matched]
    if unknown or not wanted:
        raise UsageError(
            f"--causes {named!r}: no injection of {', '.join(unknown) or 'no name'}; "
            + _instead(unknown, known)
        )
    return chosen


def _instead(unknown: list[str], known: dict[str, dict[str, str]]) -> str:
    """Suggest names close to the unknown ones, else say where names are listed."""
    from difflib import get_close_matches

    every = {name for names in known.values() for pair in names.items() for name in pair}
    close = [c for u in unknown for c in get_close_matches(u, every, n=2, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    some = ", ".join(sorted(names)[0] for names in known.values())
    return (
        f"expected the name of one ({some} …: the docs' pages on validation list them), or a "
        "cause's id such as idle.preparation"
    )


def _show_progress(case: Case, count: int, seconds: float) -> None:
    line = f"{count} cases, {seconds:.0f} s: {case.injection} {case.magnitude} {case.flavour}"
    if sys.stderr.isatty():
        click.echo(f"\r{line}\x1b[K", nl=False, err=True)
    elif case.status == "missed" or count % 25 == 0:
        shared.say(f"{line}: {case.status}")
