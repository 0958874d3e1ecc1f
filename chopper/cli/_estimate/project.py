"""``chopper estimate project``: a recorded run on another device, and on more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli._complete import paths
from chopper.cli._estimate.common import COUNT, NUMBER, check, given, show, shown
from chopper.cli._path import NamedPath
from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.analyzers.estimates.project import Projection
    from chopper.attribution import Attribution
    from chopper.hardware.devices import DevicePeaks


@click.command("project", short_help="A recorded run on another device, or on more ranks.")
@click.argument("run", required=False, shell_complete=paths)
@click.option(
    "--module",
    metavar="PACKAGE.MODULE:FACTORY",
    help="Your own module instead of a run, captured under fake tensors: needs torch.",
)
@click.option("--batch", type=COUNT, default="1", show_default=True, help="Of the module.")
@click.option("--sequence", type=COUNT, default="2048", show_default=True, help="Of the module.")
@click.option(
    "--precision", default="bf16", show_default=True, help="Of the module: bf16, fp32, autocast."
)
@click.option("--device", metavar="NAME", help="Target, of the table.  [default: the recorded one]")
@click.option("--clock", type=NUMBER, metavar="MHZ", help="At which the target's units run.")
@click.option(
    "--from-device", metavar="NAME", help="The recorded device, where the run does not tell it."
)
@click.option(
    "--check",
    "against",
    metavar="RUN",
    help="The same work recorded on the target: print the error.",
)
@click.option(
    "--ranks",
    type=COUNT,
    multiple=True,
    metavar="N",
    help="Carry training to N ranks; may be repeated. 0 < N ≤ 100000; give 100000 for all scales.",
)
@click.option(
    "--topology",
    type=NamedPath(),
    metavar="FILE",
    help="The network, .json or .yaml.  [default: HGX H100, 400 Gb/s per GPU]",
)
@shown
def command(
    run: str | None,
    module: str | None,
    batch: int,
    sequence: int,
    precision: str,
    device: str | None,
    clock: float | None,
    from_device: str | None,
    against: str | None,
    ranks: tuple[int, ...],
    topology: Path | None,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Carry a recorded run to another device, and to more ranks.

    Each operator's recorded time is cut into a fixed part and work; work goes with the rates that
    the devices reach. With --check, a run of the same work on the target shows the error per class
    and in total, and that of the uncalibrated roofline.

    \b
    Examples:
      chopper estimate project h100.json.gz --device mi300x --check mi300x.json.gz
      chopper estimate project runs/mine --device b200
      chopper estimate project --module mypackage.model:make --sequence 8192 --device mi300x
      chopper estimate project runs/mine --ranks 8 --ranks 1024 --ranks 100000
    """
    from chopper.analyzers.estimates.network import Topology
    from chopper.analyzers.estimates.project import project
    from chopper.analyzers.estimates.scaling import SCALES, recorded_step
    from chopper.cli._estimate.network import read_topology
    from chopper.hardware import reach
    from chopper.hardware.devices import named
    from chopper.quantities import between
    from chopper.reports.estimates.project import page
    from chopper.views import view

    check(output, force=force)
    for option, name in (("--device", device), ("--from-device", from_device)):
        if name is not None and name.strip().lower() in ("cpu", "host"):
            raise UsageError(
                f"{option} {name}: found a CPU, expected an accelerator of the table, which has no "
                "peaks of CPUs; carry a CPU run to more ranks with --ranks alone, or project the "
                "module that it runs with --module"
            )
    if clock is not None:
        between(clock, 1, 1e4, "--clock in MHz")
    if run is not None and module is not None:
        raise UsageError("RUN and --module contradict each other; give one of them")
    if module is not None:
        for option in ("from_device", "against", "ranks", "topology"):
            if given(option):
                name = {"against": "check"}.get(option, option.replace("_", "-"))
                raise UsageError(f"--{name} contradicts --module, which never ran; give a RUN")
        if device is None:
            raise UsageError("--module needs a device to be projected onto; give --device")
        captured = _captured(module, batch, sequence, precision, named(device), clock)
        show(captured, page, as_json=as_json, output=output)
        return
    if run is None:
        raise UsageError("nothing to project given; give one of RUN and --module")
    for option in ("batch", "sequence", "precision"):
        if given(option):
            raise UsageError(f"--{option} needs --module; a run has its own")
    if device is None and not ranks:
        raise UsageError("nothing to project onto; give --device, --ranks, or both")
    if topology is not None and not ranks:
        raise UsageError("--topology needs --ranks, the number of them on that network")
    if against is not None and device is None:
        raise UsageError("--check needs --device, the device of that run")
    if max(ranks, default=0) > SCALES[-1]:
        raise UsageError(f"--ranks: found {max(ranks)}, expected at most {SCALES[-1]}")
    network = read_topology(topology) if topology else Topology()
    target = named(device) if device is not None else None
    attribution = _attributed(run)
    if target is not None or from_device is not None:
        _has_device_events(attribution, run)
    if from_device is not None:
        recorded: DevicePeaks | None = _told(attribution, run, from_device)
    else:
        # Scaling alone needs no device: the operators stay as they are.
        recorded = _device_of(attribution, run) if target else None
    target = target or recorded
    checked = None
    windows = 1
    if against is not None:
        other = _attributed(against)
        _has_device_events(other, f"--check {against}")
        theirs = _device_of(other, against)
        if target is None or theirs.id != target.id:
            named_there = target.label if target else "the target"
            raise UsageError(
                f"--check {against}: was recorded on {theirs.label}, not on {named_there}"
            )
        checked = (against, view(other, "operations"), _causes(other))
        windows = _windows(other)
    scales = (*(n for n in SCALES if n < ranks[0]), ranks[0]) if len(ranks) == 1 else ranks
    found = project(
        run=run,
        operations=view(attribution, "operations"),
        causes_ns=_causes(attribution),
        windows_count=_windows(attribution),
        recorded=recorded,
        target=target,
        recorded_reach=reach.of(recorded) if recorded else None,
        target_reach=reach.of(target) if target else None,
        target_clock_hz=clock * 1e6 if clock else None,
        checked=checked,
        checked_windows_count=windows,
        step=recorded_step(attribution) if ranks else None,
        scales_count=scales,
        topology=network,
    )
    show(found, page, as_json=as_json, output=output)


def _captured(
    module: str,
    batch: int,
    sequence: int,
    precision: str,
    target: DevicePeaks,
    clock_mhz: float | None,
) -> Projection:
    from chopper.analyzers.estimates.project import project_captured
    from chopper.cli._progress import progress
    from chopper.collectors.fake_ops import capture_operators
    from chopper.hardware import reach

    with progress("capturing the module"):
        found = capture_operators(module, batch=batch, sequence=sequence, precision=precision)
    return project_captured(
        module=module,
        operators=found["operators"],
        element_bytes=found["element_bytes"],
        target=target,
        target_reach=reach.of(target),
        target_clock_hz=clock_mhz * 1e6 if clock_mhz else None,
    )


def _attributed(source: str) -> Attribution:
    from chopper.api import attribute, load
    from chopper.cli._progress import progress

    with progress("attributing"):
        return attribute(load([source]))


def _has_device_events(attribution: Attribution, source: str) -> None:
    """Refuse a run whose operators have the host's time only, whatever device it names.

    Raises:
        UsageError: no rank, or not each, has device events.
    """
    from chopper.analyzers.trace.host_device import is_host_timeline

    ranks = [rank.rank for rank in attribution.ranks]
    without = []
    for rank in ranks:
        events = attribution.run.table(rank, "device_event")
        # Where there is no device, the host's operators stand in for one.
        if not events.num_rows or is_host_timeline(events):
            without.append(rank)
    if without:
        where = "" if len(without) == len(ranks) else f" of rank {without[0]}"
        raise UsageError(
            f"{source}: found operators{where} timed on the CPU only, expected device events; record "
            "on a device, project the module captured (--module), or carry the run to more ranks "
            "without a device (--ranks)"
        )


def _device_of(attribution: Attribution, source: str) -> DevicePeaks:
    """The one device of a run.

    Raises:
        UsageError: it has none, several kinds, or one that is not in the table.
    """
    from chopper.hardware.devices import lookup

    names = sorted({rank.device for rank in attribution.ranks if rank.device})
    if len(names) != 1:
        said = f"several devices ({', '.join(names)})" if names else "no device that is known"
        raise UsageError(f"{source}: {said}; give --from-device")
    found = lookup(names[0])
    if found is None:
        raise UsageError(
            f"{source}: {names[0]} is not in the table of devices; give --from-device, its nearest kin"
        )
    return found


def _told(attribution: Attribution, source: str, name: str) -> DevicePeaks:
    """The device that the user says a run was recorded on.

    Raises:
        UsageError: unknown, or the run itself says another.
    """
    from chopper.hardware.devices import lookup, named

    told = named(name)
    found = [lookup(rank.device) for rank in attribution.ranks if rank.device]
    other = next((d for d in found if d is not None and d.id != told.id), None)
    if other is not None:
        raise UsageError(
            f"--from-device {name}: {source} was recorded on {other.label}; leave the option away"
        )
    return told


def _causes(attribution: Attribution) -> dict[str, int]:
    return {row.id: row.time_ns for row in attribution.leaves()}


def _windows(attribution: Attribution) -> int:
    return max(1, sum(rank.steps for rank in attribution.ranks))
