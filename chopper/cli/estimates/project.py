"""A recorded run on another device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.estimates import Option
from chopper.analyzers.estimates.project import (
    Projection,
    Side,
    between_ns,
    project,
)
from chopper.cli import _options
from chopper.cli._shared import attributed
from chopper.errors import UsageError
from chopper.hardware.devices import DevicePeaks, lookup, named, reach_of
from chopper.quantities import between
from chopper.reports.estimate import estimate_page, stacked_figure
from chopper.reports.page import Figure, Page, Section, Table
from chopper.views import view


class Options(_options.Options, kw_only=True, frozen=True):
    """Project a recorded run onto another device.

    Each operator's recorded time is split into a fixed part and work; work scales with the rates
    that the devices reach. With --check, a run of the same work on the target shows the error per
    class and in total, and that of the uncalibrated roofline.

    \b
    Examples:
      chopper estimate project h100.json.gz --device mi300x --check mi300x.json.gz
      chopper estimate project runs/mine --device b200
    """

    run: Annotated[str | None, Option("", argument=True)] = None
    device: Annotated[
        str | None,
        Option("Target device, of the table. [default: the recorded one]", metavar="NAME"),
    ] = None
    clock_mhz: Annotated[
        float | None, Option("Clock of the target's SMs or CUs.", "clock", metavar="MHZ")
    ] = None
    from_device: Annotated[
        str | None, Option("The recorded device, if the run does not name it.", metavar="NAME")
    ] = None
    check: Annotated[
        str | None,
        Option("The same work recorded on the target: print the error.", metavar="RUN"),
    ] = None


def estimate(options: Options) -> Projection:
    """Return a run on another device."""
    if options.clock_mhz is not None:
        between(options.clock_mhz, 1, 1e4, "--clock in MHz")
    if not options.run:
        raise UsageError("nothing to project given; give RUN")
    if options.device is None:
        raise UsageError("nothing to project onto; give --device")
    run, target = options.run, named(options.device)
    attribution = attributed([run])
    _check_device_events(attribution, run)
    recorded = recorded_on(attribution, run, options.from_device)
    checked: dict[str, Any] = {}
    if options.check is not None:
        other = attributed([options.check])
        _check_device_events(other, f"--check {options.check}")
        theirs = recorded_on(other, options.check)
        if theirs.id != target.id:
            raise UsageError(
                f"--check {options.check}: was recorded on {theirs.label}, not on {target.label}"
            )
        operations = view(other, "operations")
        checked["checked"] = options.check, operations, _causes_ns(other)
        checked["checked_windows_count"] = _windows_count(other)
    clock_hz = options.clock_mhz and options.clock_mhz * 1e6
    return carried(attribution, run, target, here=recorded, clock_hz=clock_hz, **checked)


def carried(
    attribution: Attribution,
    run: str,
    target: DevicePeaks,
    *,
    here: DevicePeaks | None = None,
    clock_hz: float | None = None,
    **checked: Any,
) -> Projection:
    """Return a run on another device; `here` is the recorded one where the run names none."""
    here = here or recorded_on(attribution, run)
    return project(
        run=run,
        operations=view(attribution, "operations"),
        causes_ns=_causes_ns(attribution),
        windows_count=_windows_count(attribution),
        here=Side(here, reach_of(here)),
        there=Side(target, reach_of(target), clock_hz),
        **checked,
    )


def _causes_ns(attribution: Attribution) -> dict[str, int]:
    return {row.id: row.time_ns for row in attribution.leaves()}


def _windows_count(attribution: Attribution) -> int:
    return max(1, sum(rank.steps for rank in attribution.ranks))


def _check_device_events(attribution: Attribution, source: str) -> None:
    """Refuse a run whose operators have the host's time only, whatever device it names."""
    ranks = [rank.rank for rank in attribution.ranks]
    without = [rank for rank in ranks if attribution.joined[rank].host_only]
    if without:
        where = "" if len(without) == len(ranks) else f" of rank {without[0]}"
        raise UsageError(
            f"{source}: found operators{where} timed on the CPU only, expected device events; "
            "record on a device"
        )


def recorded_on(attribution: Attribution, source: str, stated: str | None = None) -> DevicePeaks:
    """Return the one device of a run, or the stated one, unless the run says another."""
    names = sorted({rank.device for rank in attribution.ranks if rank.device})
    known = [device for device in map(lookup, names) if device is not None]
    if stated is not None:
        device = named(stated)
        other = next((d for d in known if d.id != device.id), None)
        if other is not None:
            raise UsageError(
                f"--from-device {stated}: {source} was recorded on {other.label}; omit the option"
            )
        return device
    if len(names) == 1 and known:
        return known[0]
    device_text = f"several devices ({', '.join(names)})" if names else "no known device"
    if len(names) == 1:
        device_text = f"{names[0]} is not in the table of devices"
    raise UsageError(f"{source}: {device_text}; specify --from-device, or its closest relative")


_NEGLIGIBLE_RATIO = 0.02
"""Share of operators' time: where less than this has no model, it needs no range."""


def page(result: Projection) -> Page:
    """Return the page: time by class on both devices, and the error against a run there."""
    longest = max(result.classes, key=lambda c: c.projected_ns)
    return estimate_page(
        result,
        title="Projection",
        headline=_headline(result),
        limit=f"{longest.operator_class}, {fmt.duration(longest.projected_ns)} "
        f"({fmt.duration(longest.recorded_ns)} now)",
        assumes="same operators and idle time"
        + ("; range: errors of ten projections" if result.error_ratio is None else ""),
        remedy="--check RUN, the same work recorded there, for the error"
        if result.error_ratio is None
        else "--details, for the error of each class of operators",
        facts=_facts(result),
        figures=(_classes_figure(result),),
        sections=(_classes(result),),
    )


def _headline(result: Projection) -> str:
    if result.error_ratio is not None:
        return (
            f"{fmt.duration(result.projected_ns)} on {result.target_device}; recorded there "
            f"{fmt.duration(result.checked_ns)} ({fmt.percent(result.error_ratio, '+.1f')})."
        )
    return (
        f"{fmt.duration(result.projected_ns)} ({fmt.interval(between_ns(result))}) on "
        f"{result.target_device}; recorded {fmt.duration(result.recorded_ns)}."
    )


def _facts(result: Projection) -> Iterator[str]:
    reached = {"recorded on": result.recorded_reach, "target": result.target_reach}
    devices = {"recorded on": result.recorded_device, "target": result.target_device}
    for what, reach in reached.items():
        yield (
            f"{what} {devices[what]}: products reach {fmt.ratio(reach.products)}, memory "
            f"{fmt.ratio(reach.memory)} of the peak ({reach.source})"
        )
    if result.unmodelled_ratio:
        yield _unmodelled(result)
    if result.checked_ns is not None:
        error, roofline = result.error_ratio or 0.0, result.roofline_error_ratio or 0.0
        # Nearer than a tenth of a per cent is luck.
        yield (
            f"against {result.checked_run}: {fmt.percent(error, '+.1f')}; the uncalibrated "
            f"roofline {fmt.percent(roofline, '+.1f')}, "
            f"{abs(roofline) / max(abs(error), 1e-3):.1f} times as far off"
        )


def _unmodelled(result: Projection) -> str:
    """Return the sentence about operators without a model."""
    matters = result.unmodelled_ratio >= _NEGLIGIBLE_RATIO
    text = f"{fmt.ratio(result.unmodelled_ratio)} of operators' time has no model"
    if result.unmodelled_operators and matters:
        text += f" ({', '.join(result.unmodelled_operators)})"
    if result.projected_between_ns and matters:
        low, high = map(fmt.duration, result.projected_between_ns)
        text += (
            f" and is scaled as the rest: {low} to {high} in total, should it go with memory or "
            "with products"
        )
    return text


def _classes(result: Projection) -> Section:
    rows: list[tuple[str, str, list[int | None], float | None]] = []
    for c in result.classes:
        error = c.projected_ns / c.checked_ns - 1 if c.checked_ns else None
        times: list[int | None] = [c.recorded_ns, c.projected_ns, c.roofline_ns, c.checked_ns]
        rows.append((c.operator_class, fmt.count(c.calls_count), times, error))
    if result.operators_error_ratio is not None:
        sums: list[int | None] = [
            sum(time_ns or 0 for time_ns in column)
            for column in zip(*(times for _, _, times, _ in rows), strict=True)
        ]
        rows.append(("all operators", "", sums, result.operators_error_ratio))
    for name, here_ns, there_ns in (
        ("idle, as recorded", result.idle_ns, result.idle_ns),
        ("exposed copies", result.copy_ns, result.projected_copy_ns),
        ("exposed communication", result.communication_ns, result.projected_communication_ns),
    ):
        if here_ns:
            rows.append((name, "", [here_ns, there_ns, None, None], None))
    total = [result.recorded_ns, result.projected_ns, result.roofline_ns, result.checked_ns]
    rows.append(("in total", "", total, result.error_ratio))
    shown = 7 if result.checked_ns is not None else 5
    cells = [
        (
            name,
            calls,
            *map(fmt.duration, times),
            fmt.UNKNOWN if error is None else fmt.percent(error, "+.1f"),
        )
        for name, calls, times, error in rows
    ]
    table = Table(
        columns=("class", "calls", "recorded", "projected", "roofline", "there", "error")[:shown],
        rows=[row[:shown] for row in cells],
        totals=1,
        note="roofline: uncalibrated, the target's datasheet peaks and nothing else. Classes are "
        "sums over operators; concurrent kernels count in full, so classes can exceed the total",
    )
    return Section(title="Time by class of operators, per step or trace", blocks=(table,))


def _classes_figure(result: Projection) -> Figure:
    """Return the time of each class, and beside it the rest, on both devices."""
    bars = {}
    for name, of, whole_ns in (
        (f"recorded, {result.recorded_device}", "recorded_ns", result.recorded_ns),
        (f"projected, {result.target_device}", "projected_ns", result.projected_ns),
        ("recorded there", "checked_ns", result.checked_ns),
    ):
        if whole_ns is not None:
            times = {c.operator_class: (getattr(c, of) or 0) / 1e6 for c in result.classes}
            rest = max(0.0, whole_ns / 1e6 - sum(times.values()))
            bars[name] = times | {"not computing": rest}
    figure = stacked_figure(bars, x="ms per step or trace")
    return Figure(name="project", title="By class", figure=figure)
