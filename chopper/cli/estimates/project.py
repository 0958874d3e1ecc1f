"""A recorded run on another device, or on more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chopper.analyzers.estimates import Option
from chopper.analyzers.estimates.network import Topology
from chopper.analyzers.estimates.project import Projection, project, project_captured
from chopper.analyzers.estimates.scaling import SCALES, recorded_step
from chopper.cli import _options
from chopper.cli._shared import attributed
from chopper.cli.estimates.network import read_topology
from chopper.errors import UsageError
from chopper.hardware.devices import DevicePeaks, lookup, named, reach_of
from chopper.quantities import between
from chopper.reports.estimates.project import page
from chopper.views import view

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed

__all__ = ["Options", "estimate", "page"]


class Options(_options.Options, kw_only=True, frozen=True):
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

    run: Annotated[str | None, Option("", argument=True)] = None
    module: Annotated[
        str | None,
        Option(
            "Your own module instead of a run, captured under fake tensors: needs torch.",
            metavar="PACKAGE.MODULE:FACTORY",
        ),
    ] = None
    batch_count: Annotated[int, Option("Of the module.")] = 1
    sequence_count: Annotated[int, Option("Of the module.")] = 2048
    precision: Annotated[str, Option("Of the module: bf16, fp32, autocast.")] = "bf16"
    device: Annotated[
        str | None, Option("Target, of the table.  [default: the recorded one]", metavar="NAME")
    ] = None
    clock_mhz: Annotated[
        float | None, Option("At which the target's units run.", "clock", metavar="MHZ")
    ] = None
    from_device: Annotated[
        str | None, Option("The recorded device, where the run does not tell it.", metavar="NAME")
    ] = None
    check: Annotated[
        str | None,
        Option("The same work recorded on the target: print the error.", metavar="RUN"),
    ] = None
    ranks_count: Annotated[
        tuple[int, ...],
        Option(
            "Carry training to N ranks; may be repeated. 0 < N ≤ 100000; "
            "give 100000 for all scales.",
            metavar="N",
        ),
    ] = ()
    topology: Annotated[
        Path | None,
        Option(
            "The network, .json or .yaml.  [default: HGX H100, 400 Gb/s per GPU]", metavar="FILE"
        ),
    ] = None


_OF_A_RUN = ("from_device", "check", "ranks_count", "topology")
_OF_A_MODULE = ("batch_count", "sequence_count", "precision")


def estimate(options: Options) -> Projection:
    """Return a run, or a captured module, on another device or more ranks."""
    for option, name in (("--device", options.device), ("--from-device", options.from_device)):
        if name is not None and name.strip().lower() in ("cpu", "host"):
            raise UsageError(
                f"{option} {name}: found a CPU, expected an accelerator of the table, which has no "
                "peaks of CPUs; carry a CPU run to more ranks with --ranks alone, or project the "
                "module that it runs with --module"
            )
    if options.clock_mhz is not None:
        between(options.clock_mhz, 1, 1e4, "--clock in MHz")
    options.exactly_one("run", "module", missing="nothing to project given")
    if options.module is not None:
        return _captured(options.module, options)
    return _recorded(options.run or "", options)


def _clock_hz(options: Options) -> float | None:
    return options.clock_mhz * 1e6 if options.clock_mhz else None


def _captured(module: str, options: Options) -> Projection:
    from chopper.cli._progress import progress
    from chopper.collectors.fake_ops import capture_operators

    wrong = options.first_given(*_OF_A_RUN)
    if wrong:
        raise UsageError(f"{wrong} contradicts --module, which never ran; give a RUN")
    if options.device is None:
        raise UsageError("--module needs a device to be projected onto; give --device")
    target = named(options.device)
    with progress("capturing the module"):
        captured = capture_operators(
            module,
            batch=options.batch_count,
            sequence=options.sequence_count,
            precision=options.precision,
        )
    return project_captured(
        module=module,
        operators=captured["operators"],
        element_bytes=captured["element_bytes"],
        target=target,
        target_reach=reach_of(target),
        target_clock_hz=_clock_hz(options),
    )


def _recorded(run: str, options: Options) -> Projection:
    ranks = options.ranks_count
    wrong = options.first_given(*_OF_A_MODULE)
    if wrong:
        raise UsageError(f"{wrong} needs --module; a run has its own")
    if options.device is None and not ranks:
        raise UsageError("nothing to project onto; give --device, --ranks, or both")
    if options.topology is not None and not ranks:
        raise UsageError("--topology needs --ranks, the number of them on that network")
    if options.check is not None and options.device is None:
        raise UsageError("--check needs --device, the device of that run")
    if max(ranks, default=0) > SCALES[-1]:
        raise UsageError(f"--ranks: found {max(ranks)}, expected at most {SCALES[-1]}")
    topology = read_topology(options.topology) if options.topology else Topology()
    target = named(options.device) if options.device is not None else None
    attribution = attributed([run])
    recorded = None
    if target is not None or options.from_device is not None:
        _check_device_events(attribution, run)
    if options.from_device is not None:
        recorded = _stated_device(attribution, run, options.from_device)
    elif target is not None:
        # Scaling alone needs no device: the operators stay as they are.
        recorded = _device_of(attribution, run)
    target = target or recorded
    checked = None
    checked_windows_count = 1
    if options.check is not None and target is not None:
        other = attributed([options.check])
        _check_device_events(other, f"--check {options.check}")
        theirs = _device_of(other, options.check)
        if theirs.id != target.id:
            raise UsageError(
                f"--check {options.check}: was recorded on {theirs.label}, not on {target.label}"
            )
        checked = options.check, view(other, "operations"), _causes_ns(other)
        checked_windows_count = _windows_count(other)
    scales = (*(n for n in SCALES if n < ranks[0]), ranks[0]) if len(ranks) == 1 else ranks
    return project(
        run=run,
        operations=view(attribution, "operations"),
        causes_ns=_causes_ns(attribution),
        windows_count=_windows_count(attribution),
        recorded=recorded,
        target=target,
        recorded_reach=reach_of(recorded) if recorded else None,
        target_reach=reach_of(target) if target else None,
        target_clock_hz=_clock_hz(options),
        checked=checked,
        checked_windows_count=checked_windows_count,
        step=recorded_step(attribution) if ranks else None,
        scales_count=scales,
        topology=topology,
    )


def _causes_ns(attribution: Attributed) -> dict[str, int]:
    return {row.id: row.time_ns for row in attribution.leaves()}


def _windows_count(attribution: Attributed) -> int:
    return max(1, sum(rank.steps for rank in attribution.ranks))


def _check_device_events(attribution: Attributed, source: str) -> None:
    """Refuse a run whose operators have the host's time only, whatever device it names."""
    ranks = [rank.rank for rank in attribution.ranks]
    without = [rank for rank in ranks if attribution.joined[rank].host_only]
    if without:
        where = "" if len(without) == len(ranks) else f" of rank {without[0]}"
        raise UsageError(
            f"{source}: found operators{where} timed on the CPU only, expected device events; "
            f"record "
            "on a device, project the module captured (--module), or carry the run to more ranks "
            "without a device (--ranks)"
        )


def _device_of(attribution: Attributed, source: str) -> DevicePeaks:
    """Return the one device of a run, which has to be in the table."""
    names = sorted({rank.device for rank in attribution.ranks if rank.device})
    if len(names) != 1:
        said = f"several devices ({', '.join(names)})" if names else "no device that is known"
        raise UsageError(f"{source}: {said}; give --from-device")
    device = lookup(names[0])
    if device is None:
        raise UsageError(
            f"{source}: {names[0]} is not in the table of devices; give --from-device, its "
            f"nearest kin"
        )
    return device


def _stated_device(attribution: Attributed, source: str, name: str) -> DevicePeaks:
    """Return the device that the user says a run was recorded on, unless the run says another."""
    stated = named(name)
    own = [lookup(rank.device) for rank in attribution.ranks if rank.device]
    other = next((d for d in own if d is not None and d.id != stated.id), None)
    if other is not None:
        raise UsageError(
            f"--from-device {name}: {source} was recorded on {other.label}; leave the option away"
        )
    return stated
