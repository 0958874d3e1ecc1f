"""``chopper sweep``: a command at several clocks or power caps, set back under every exit."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from chopper import wording as fmt
from chopper.addresses import without_secrets
from chopper.cli import _shared as shared
from chopper.cli.output import print_json, print_page, progress
from chopper.errors import ChopperError, CollectorUnavailable, UsageError, printable, say, tell

if TYPE_CHECKING:
    from chopper.collectors.knobs import Knob
    from chopper.experiments.results import Plan


@click.group("sweep")
def command() -> None:
    """Measure a command at several settings of the machine, and set it back."""


@command.command("clock", cls=shared.Command, context_settings={"allow_interspersed_args": False})
@click.option(
    "--what",
    type=click.Choice(("clock", "power", "host")),
    default="clock",
    show_default=True,
    help="What is set: the devices' clock, their power cap, or the host's clock (cpufreq).",
)
@click.option("--values", metavar="A,B", help="Settings, such as 1200MHz,1980MHz or 350W,700W.")
@click.option(
    "--points",
    type=click.IntRange(2, 64),
    default=5,
    show_default=True,
    help="Settings over the supported range, without --values.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs per setting."
)
@click.option("--device", metavar="N,M", help="Devices to set.  [default: all that are visible]")
@click.option("--apply", is_flag=True, help="Do it. Without, only the plan is shown.")
@click.option("--sysfs", default="/sys", hidden=True)
@shared.output("Directory of the sweep.  [default: runs/<time>-sweep]")
@shared.force("Replace the sweep in the output directory.")
@shared.as_json
@click.argument("command_line", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def clock(
    what: str,
    values: str | None,
    points: int,
    repeats: int,
    device: str | None,
    apply: bool,
    sysfs: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> int:
    """Record a command at several clocks or power caps: step time, power, energy, and their fit.

    Without --apply nothing is set and nothing runs: the plan is shown. Runs of all settings take
    turns. What was before is recorded before anything is set, and brought back by a process of its
    own however this one ends, by kill -9 too. Setting needs permission: root, in most places.

    \b
    Examples:
      chopper sweep clock -- torchrun --nproc-per-node 8 train.py
      chopper sweep clock --values 1200MHz,1980MHz --apply -- python train.py
      chopper sweep clock --what power --points 4 --apply -- python train.py
      chopper sweep clock --what host --apply -- python train.py
    """
    from chopper.experiments.launch import runnable
    from chopper.experiments.sweep import name_of, values_of

    if not command_line:
        raise click.UsageError("no command; use: chopper sweep clock -- python train.py")
    command_line = runnable(command_line)
    knobs = _knobs(what, sysfs, device)
    chosen = values_of(knobs, _read(values, knobs[0].unit), points)
    settings = {name_of(value, knobs[0].unit): value for value in chosen}
    if len(settings) < len(chosen):
        raise UsageError("--values: settings closer than 1 MHz or 1 W; name fewer")
    if not apply:
        _show_plan(knobs, settings, repeats, command_line, as_json=as_json)
        return 0
    path = output or Path("runs") / f"{dt.datetime.now():%Y%m%d-%H%M%S}-sweep"
    return _measure(knobs, settings, repeats, command_line, path=path, force=force, as_json=as_json)


def _knobs(what: str, root: str, device: str | None) -> list[Knob]:
    """Return the knobs to turn; of the first vendor whose devices are there.

    Raises:
        UsageError: a device that is named is not there.
        CollectorUnavailable: nothing can be set here.
    """
    from chopper.collectors.knobs import driver

    reasons = []
    for vendor in ("cpufreq",) if what == "host" else ("nvml", "amdsmi"):
        try:
            knobs = driver(vendor).knobs(what, root)  # type: ignore[arg-type]
        except CollectorUnavailable as exc:
            reasons.append(f"{vendor}: {exc}" if what != "host" else str(exc))
            continue
        if device is None:
            return knobs
        if what == "host":
            raise UsageError("--device: the host's clock is set for all of its cores")
        wanted = [part.strip() for part in device.split(",")]
        by_number = {knob.label.split()[1].rstrip(","): knob for knob in knobs}
        for part in wanted:
            if part not in by_number:
                raise UsageError(f"--device {part}: not there; found {', '.join(by_number)}")
        return [by_number[part] for part in dict.fromkeys(wanted)]
    raise CollectorUnavailable(f"nothing can be set here: {'; '.join(reasons)}")


def _read(values: str | None, unit: str) -> list[float] | None:
    from chopper.quantities import frequency_hz, power_w

    if values is None:
        return None
    read = frequency_hz if unit == "Hz" else power_w
    return [read(part.strip(), "--values") for part in values.split(",")]


def _show_plan(
    knobs: Sequence[Knob],
    settings: dict[str, float],
    repeats: int,
    words: Sequence[str],
    *,
    as_json: bool,
) -> None:
    from chopper.experiments.sweep import shown

    if as_json:
        print_json(
            {
                "schema": "chopper.sweep_plan/1",
                "command": [*words],
                "repeats": repeats,
                "unit": knobs[0].unit,
                "settings": [*settings.values()],
                "devices": [
                    {"label": k.label, "before": k.before, "note": k.note or None} for k in knobs
                ],
            }
        )
        return
    unit = knobs[0].unit
    lines = [
        f"Would run {fmt.plural(repeats * len(settings), 'time')}: {shlex.join(words)}",
        f"at {', '.join(shown(value, unit) for value in settings.values())}, in turn, by setting",
    ]
    for knob in knobs:
        least, most = (shown(knob.allowed[i] * knob.scale, unit) for i in (0, -1))
        lines.append(f"  {knob.label} (supports {least} to {most})")
    lines += [f"Note: {note}" for note in dict.fromkeys(knob.note for knob in knobs) if note]
    lines.append("Nothing was set and nothing ran; --apply does both.")
    click.echo("\n".join(printable(without_secrets(line)) for line in lines))


def _measure(
    knobs: Sequence[Knob],
    settings: dict[str, float],
    repeats: int,
    words: Sequence[str],
    *,
    path: Path,
    force: bool,
    as_json: bool,
) -> int:
    """Run all, interleaved; show what there is."""
    from chopper.experiments import results as ex
    from chopper.experiments.guardian import guarded, lock_path
    from chopper.experiments.judgement import machine_cores
    from chopper.experiments.sweep import WORKLOAD, shown
    from chopper.storage.destination import new_output
    from chopper.version import __version__

    unit = knobs[0].unit
    plan = ex.Plan(
        chopper_version=__version__,
        workload=WORKLOAD,
        summary=f"{shlex.join(words)} at several settings",
        command=["chopper", *sys.argv[1:]],
        created_ns=time.time_ns(),
        ranks=0,
        device=knobs[0].vendor,
        options={"what": knobs[0].what},
        steps=True,
        baseline=next(iter(settings)),
        variants=[
            ex.VariantPlan(name=name, summary=shown(value, unit))
            for name, value in settings.items()
        ],
        machine_cores=machine_cores(),
    )
    with new_output(path, force=force, say=say) as folder:
        ex.write_plan(folder, plan)
        with guarded(knobs, lock_path()):
            exit_code = _runs(folder, plan, knobs, settings, repeats, words)
        say("all settings are as before")
        if exit_code and not any(variant.runs for variant in plan.variants):
            return exit_code
        try:
            _show(folder, path, settings, unit, as_json=as_json)
        except ChopperError as exc:
            if not exit_code:
                raise
            say(str(exc))
    return exit_code


def _runs(
    folder: Path,
    plan: Plan,
    knobs: Sequence[Knob],
    settings: dict[str, float],
    repeats: int,
    words: Sequence[str],
) -> int:
    """Record the command at each setting in turn; stop at the first that fails."""
    from chopper.collectors.knobs import driver
    from chopper.experiments import results as ex
    from chopper.experiments.judgement import others_while
    from chopper.experiments.launch import launch
    from chopper.fresh_python import own_python

    total = repeats * len(settings)
    for done in range(total):
        planned = plan.variants[done % len(settings)]
        name = f"{planned.name}-{done // len(settings) + 1}"
        say(f"{done + 1} of {total}: {name}")
        for knob in knobs:
            number = knob.nearest(settings[planned.name])
            assert number is not None
            driver(knob.vendor).put(knob, number)
        record = own_python("chopper", "record", "-o", str(folder / name), "--", *words)
        with others_while() as other_load:
            exit_code = launch(record, env=os.environ, output=_to_stderr)
        plan.other_cores[name] = other_load.cores
        if (folder / name / "manifest.json").is_file():
            planned.runs.append(name)
        ex.write_plan(folder, plan)
        if exit_code:
            say(f"{name} ended with exit code {exit_code}")
            return exit_code
    return 0


def _to_stderr(pipe: IO[bytes]) -> None:
    """Pass on what the command writes; stdout is for the result."""

    def copy() -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            shutil.copyfileobj(pipe, sys.stderr.buffer)

    threading.Thread(target=copy, daemon=True).start()


def _show(
    folder: Path, path: Path, settings: dict[str, float], unit: str, *, as_json: bool
) -> None:
    import msgspec

    from chopper.experiments.loading import load
    from chopper.experiments.sweep import swept
    from chopper.reports import formatted
    from chopper.reports.experiment import sweep_page
    from chopper.storage.files import write_atomic

    with progress("attributing"):
        result = swept(load(folder), settings, unit)
    if as_json:
        print_json(msgspec.to_builtins(result))
    else:
        print_page(sweep_page(result))
    text = formatted(lambda: sweep_page(result), lambda: msgspec.to_builtins(result), "html")
    write_atomic(folder / "report.html", text.encode("utf-8", "replace"))
    tell(f"report: {path / 'report.html'}")
