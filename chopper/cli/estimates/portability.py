"""One program on several devices: its kernels, its time on each, its portability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

from chopper import wording as fmt
from chopper.analyzers.estimates import Option
from chopper.analyzers.estimates.portability import OnDevice, Portability, of_module, of_run
from chopper.analyzers.estimates.project import Side
from chopper.cli import _options
from chopper.cli._shared import attributed
from chopper.cli.estimates.project import carried, recorded_on
from chopper.errors import UsageError
from chopper.hardware.devices import named, reach_of
from chopper.reports.estimate import estimate_page, listing, stacked_figure
from chopper.reports.page import Column, Figure, Page, Section, Table

DEVICES = ("a100-sxm4-80gb", "h100-sxm", "b200", "mi300x", "mi355x")


class Options(_options.Options, kw_only=True, frozen=True):
    """Show one program on several devices: operators, kernels, time, portability.

    A module is captured once. torch.compile writes its kernels in C++ for this CPU, where they are
    timed, and in Triton, which compiles them for every device ahead of time and runs them in its
    interpreter to check their results. Portability is the harmonic mean of the efficiencies, each
    the roofline's time over the program's.

    \b
    Examples:
      chopper estimate portability --module model:make --sequence 512
      chopper estimate portability h100.json.gz --device mi300x --device b200
    """

    run: Annotated[str | None, Option("", argument=True)] = None
    module: Annotated[
        str | None,
        Option(
            "Your own module instead of a run, small enough to train here: needs torch and triton.",
            metavar="PACKAGE.MODULE:FACTORY",
        ),
    ] = None
    batch_count: Annotated[int, Option("Batch size of the module.")] = 1
    sequence_count: Annotated[int, Option("Sequence length of the module.")] = 256
    precision: Annotated[str, Option("Precision of the module: bf16, fp32, autocast.")] = "bf16"
    device: Annotated[
        tuple[str, ...],
        Option("A device of the table; may be repeated.", metavar="NAME"),
    ] = DEVICES


def estimate(options: Options) -> Portability:
    """Return a run, or a captured module, on several devices."""
    options.exactly_one("run", "module", missing="no program given")
    devices = list({d.id: d for d in map(named, options.device)}.values())
    if options.module is None:
        wrong = options.first_given("batch_count", "sequence_count", "precision")
        if wrong:
            raise UsageError(f"{wrong} needs --module; a run has its own")
        run = options.run or ""
        attribution = attributed([run])
        own = recorded_on(attribution, run)
        others = [device for device in devices if device.id != own.id]
        projections = [carried(attribution, run, device) for device in (own, *others)]
        return of_run(projections, own.label)
    from chopper.cli.output import progress
    from chopper.collectors.compiled_kernels import TARGETS, compiled_kernels

    with progress("capturing and compiling the module, a minute or more"):
        captured = compiled_kernels(
            options.module,
            batch=options.batch_count,
            sequence=options.sequence_count,
            precision=options.precision,
            targets=list(dict.fromkeys(TARGETS[d.id] for d in devices if d.id in TARGETS)),
        )
    sides = [Side(device, reach_of(device)) for device in devices]
    return of_module(captured, module=options.module, sides=sides, architectures=TARGETS)


def page(result: Portability) -> Page:
    """Return the devices, the kernels, and what was measured here."""
    compiled = result.compiled_portability_ratio
    shown = result.eager_portability_ratio if compiled is None else compiled
    worst = min(result.devices, key=lambda d: _efficiency(d) or 0.0)
    captured = result.captured_count is not None
    of = "eager" if captured else ""
    if compiled is not None:
        of = f"compiled; eager {fmt.ratio(result.eager_portability_ratio)}"
    return estimate_page(
        result,
        title="Performance and portability",
        headline=f"{result.run}: {fmt.ratio(shown)} of the roofline over "
        f"{fmt.plural(len(result.devices), 'device')}{of and f' ({of})'}.",
        limit=f"{worst.device}, {_percent(_efficiency(worst))} of its roofline",
        assumes="each operator at the rate that well-shaped work reaches; nothing is calibrated"
        if captured
        else "what the recorded run lost beyond the roofline is lost on each device",
        remedy="a recorded run instead of --module, which calibrates the estimate"
        if captured
        else "chopper estimate project RUN --device NAME --check RUN, for the error",
        facts=_facts(result),
        figures=(_figure(result),),
        sections=(_devices(result), *((_kernels(result),) if result.kernels else ())),
    )


def _efficiency(device: OnDevice) -> float | None:
    return (
        device.compiled_efficiency_ratio if device.architecture else device.eager_efficiency_ratio
    )


def _percent(ratio: float | None) -> str:
    return fmt.UNKNOWN if ratio is None else fmt.ratio(ratio)


def _scientific(ratio: float | None) -> str:
    return fmt.UNKNOWN if ratio is None else f"{ratio:.1e}"


def _facts(result: Portability) -> Iterator[str]:
    if result.captured_count is not None:
        yield (
            f"captured: {fmt.count(result.captured_count)} operators forward and backward; eager "
            f"PyTorch launches {fmt.count(result.eager_call_count or 0)} kernels, torch.compile "
            f"{fmt.count(sum(k.call_count for k in result.kernels))} of its own and "
            f"{fmt.count(result.library_call_count or 0)} of libraries"
        )
    if result.cpu is not None:
        yield (
            f"measured on this CPU: eager {fmt.duration(result.cpu.eager_ns)}, torch.compile "
            f"{fmt.duration(result.cpu.compiled_ns)} with {fmt.count(result.cpu.kernel_count)} "
            f"C++ kernels (medians of {result.cpu.rounds_count} rounds)"
        )
    if (of := result.reference) is not None and of.reason is not None:
        yield f"the Triton kernels could not be held against eager PyTorch: {of.reason}"
    elif of is not None:
        yield (
            "the Triton kernels in Triton's interpreter, on "
            f"{fmt.plural(of.tokens_count or 0, 'token')}: loss differs from eager by "
            f"{_scientific(of.loss_difference_ratio)} of it, gradients by at most "
            f"{_scientific(of.gradient_difference_ratio)}"
        )
    without = [d.device for d in result.devices if d.architecture is None]
    if result.captured_count is not None and without:
        yield f"Triton has no target here for {', '.join(without)}: the compiled time is not known"
    failed = [(k.name, t) for k in result.kernels for t in k.targets if t.reason]
    for name, target in failed[:3]:
        yield f"{name} does not compile for {target.architecture}: {target.reason}"


def _devices(result: Portability) -> Section:
    captured = result.captured_count is not None
    columns: dict[str | Column, str | Callable[[OnDevice], str]] = {
        "device": "device",
        "roofline": "roofline_ns",
        "eager" if captured else "projected": "eager_ns",
        "of it": "eager_efficiency_ratio",
    }
    if captured:
        columns |= {
            "target": lambda d: d.architecture or fmt.UNKNOWN,
            "compiled": "compiled_ns",
            "of roofline": "compiled_efficiency_ratio",
        }
    else:
        columns |= {"recorded": "recorded_ns"}
    return listing("Devices", result.devices, columns)


def _kernels(result: Portability) -> Section:
    names = [target.architecture for target in result.kernels[0].targets]
    rows = [
        (
            kernel.operators or kernel.name,
            fmt.count(kernel.call_count),
            *(
                fmt.UNKNOWN
                if t.code_bytes is None
                else f"{fmt.UNKNOWN if t.registers_count is None else t.registers_count} / "
                f"{t.shared_bytes}"
                for t in kernel.targets
            ),
        )
        for kernel in result.kernels
    ]
    table = Table(
        columns=("operators", "calls", *names),
        rows=rows,
        note="registers of a thread (AMD: vector registers) / bytes of shared memory of the "
        "machine code, in the first configuration that Inductor would try",
    )
    return Section(title="Kernels that torch.compile makes, by architecture", blocks=(table,))


def _figure(result: Portability) -> Figure:
    bars = {}
    for d in result.devices:
        bars[f"{d.device}, roofline"] = {"time": d.roofline_ns / 1e6}
        bars[f"{d.device}, {'projected' if result.captured_count is None else 'eager'}"] = {
            "time": d.eager_ns / 1e6
        }
        if d.compiled_ns is not None:
            bars[f"{d.device}, compiled"] = {"time": d.compiled_ns / 1e6}
    return Figure(name="portability", title="Devices", figure=stacked_figure(bars, x="ms per step"))
