"""Eager PyTorch beside torch.compile: the same training of a Llama model on one device.

    chopper bench compile
    chopper bench compile -- --size 1b --sequence 2048 --dtype bfloat16
    chopper bench compile --variants ahead,interpreted --repeats 1

Each block is compiled on its own, so that all blocks share one compilation. The variants ``ahead``
and ``interpreted`` show how portable one block is: captured once, compiled ahead of time for each
device's architecture, run in Triton's interpreter, and projected onto each device.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from chopper.errors import UsageError
from chopper.experiments.declarations import Needs, Option, Variant, Workload, as_program
from chopper.experiments.results import Experiment, Headline
from chopper.workloads import training

if TYPE_CHECKING:
    import torch
    from torch import nn

    import chopper
    from chopper.hardware.devices import DevicePeaks
    from chopper.statistics import Estimate
    from chopper.workloads.compiled_kernels import Compiled, Pass

TARGETS = {
    "nvidia-a100-sxm4-80gb": "sm_80",
    "nvidia-h100-sxm": "sm_90",
    "nvidia-h200-sxm": "sm_90",
    "nvidia-b200": "sm_100",
    "amd-mi250x": "gfx90a",
    "amd-mi300x": "gfx942",
    "amd-mi325x": "gfx942",
    "amd-mi355x": "gfx950",
}
"""Device → the architecture that Triton compiles for."""
_DEVICES = "a100-sxm4-80gb,h100-sxm,b200,mi300x,mi355x"
_INTERPRETED_TOKENS = 16
"""The interpreter runs a kernel's programs one by one in Python: shorter sequences suffice."""

WORKLOAD = Workload(
    name="compile",
    chosen="to end within minutes on two cores",
    summary="Llama training, eager and with torch.compile, on one device: what fused kernels and "
    "fewer launches save, and what compiling costs",
    options=(
        *training.OPTIONS,
        Option(
            "devices",
            "comma-separated devices of the variant ahead",
            _DEVICES,
        ),
    ),
    variants=(
        Variant("eager", "a kernel for each operator"),
        Variant("compiled", "torch.compile's kernels for each block"),
        Variant(
            "ahead",
            "one block's kernels in Triton, compiled ahead of time for each device, and its time "
            "there, projected",
            default=False,
        ),
        Variant(
            "interpreted",
            "the same kernels in Triton's interpreter, compared with eager PyTorch",
            default=False,
        ),
    ),
    baseline="eager",
    ranks=1,
    repeats=3,
    seconds=240,
    position=4,
)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Estimate the memory; ValueError for more than the one rank that this is about."""
    if ranks != 1:
        raise ValueError(f"compile trains on one rank, found --ranks {ranks}")
    _devices(args)
    needed = training.needs(args, ranks, device)
    if importlib.util.find_spec("triton") is not None:
        return needed
    why = "needs triton, which is not installed: pip install triton"
    return replace(needed, absent=dict.fromkeys(("ahead", "interpreted"), why))


def _devices(args: argparse.Namespace) -> list[DevicePeaks]:
    """Devices of the variant ``ahead``; UsageError for one that Triton has no target for."""
    from chopper.hardware.devices import named

    devices = [named(name.strip()) for name in args.devices.split(",")]
    for device in devices:
        if device.id not in TARGETS:
            raise UsageError(
                f"--devices: {device.label} has no target here: one of {', '.join(TARGETS)}"
            )
    return devices


def main() -> None:
    """Train with compiler caches of this run's own, so that every run pays for compiling."""
    with tempfile.TemporaryDirectory(prefix="chopper-compiled-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        args = WORKLOAD.parse()
        if args.variant in ("ahead", "interpreted"):
            _portable(args)
        else:
            training.run(WORKLOAD, _model)


def _portable(args: argparse.Namespace) -> None:
    """Capture one block and compile it for devices that are not here, or interpret its kernels."""
    interpreted = args.variant == "interpreted"
    os.environ["TRITON_INTERPRET"] = str(int(interpreted))  # before triton is imported
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Inductor's, of a driver that is not there; nothing runs on it.
    warnings.filterwarnings("ignore", message="Could not find an active CPU backend")
    import chopper
    from chopper.workloads.compiled_kernels import compile_kernels, interpreter_errors

    if interpreted:
        loss_ratio, gradient_ratio = interpreter_errors(
            _block(args, batch=1, sequence=min(args.sequence, _INTERPRETED_TOKENS))
        )
        with chopper.profile(args.output, trace=False) as prof:
            prof.measure("loss_difference_ratio", loss_ratio)
            prof.measure("gradient_difference_ratio", gradient_ratio)
        return
    captured = compile_kernels(_block(args, batch=args.batch, sequence=args.sequence))
    sizes_bytes = {target: _code_bytes(captured, target) for target in _targets(args)}
    with chopper.profile(args.output, trace=False) as prof:
        _measure(prof, args, captured, sizes_bytes)


def _block(args: argparse.Namespace, *, batch: int, sequence: int) -> Pass:
    import torch

    from chopper.workloads.compiled_kernels import Pass
    from chopper.workloads.llama import SIZES, Block, rotary_table

    torch.manual_seed(args.seed)
    config, dtype = SIZES[args.size], getattr(torch, args.dtype)
    cos, sin = rotary_table(config, sequence, device=torch.device("cpu"), dtype=dtype)
    inputs = torch.randn(batch, sequence, config.width, dtype=dtype)
    return Pass(Block(config).to(dtype), inputs, cos, sin)


def _targets(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(TARGETS[device.id] for device in _devices(args)))


def _code_bytes(captured: Compiled, target: str) -> int | None:
    """Machine code of all kernels for a target; None, with the reason printed, if one fails."""
    from chopper.errors import CaptureError

    try:
        return sum(kernel.code_bytes(target) for kernel in captured.kernels.values())
    except CaptureError as exc:
        print(exc, flush=True)
        return None


def _measure(
    prof: chopper.Profile,
    args: argparse.Namespace,
    captured: Compiled,
    sizes_bytes: dict[str, int | None],
) -> None:
    """Count kernels, project the block onto each device, and compute its portability."""
    from chopper.analyzers.estimates.project import Side, captured_ns
    from chopper.hardware.devices import reach_of

    forms = {"eager": captured.eager, "compiled": captured.compiled}
    prof.measure("captured_operator_count", captured.captured_count)
    prof.measure("triton_kernel_count", len(captured.kernels))
    for form, calls in forms.items():
        prof.measure("launch_count", sum(row["call_count"] for row in calls), form=form)
    for target, size_bytes in sizes_bytes.items():
        if size_bytes is not None:
            prof.measure("code_bytes", size_bytes, target=target)
    efficiencies: dict[str, list[float | None]] = {form: [] for form in forms}
    for device in _devices(args):
        side = Side(device, reach_of(device))
        width = 2 if args.dtype == "bfloat16" else 4
        times = {form: captured_ns(calls, width, side) for form, calls in forms.items()}
        # Both forms are held against the roofline of the one that needs less.
        roofline_ns = min(of_form for _, of_form in times.values())
        prof.measure("roofline_ns", roofline_ns, device=device.id)
        for form, (projected_ns, _) in times.items():
            if form == "compiled" and sizes_bytes[TARGETS[device.id]] is None:
                efficiencies[form].append(None)
                continue
            efficiency = roofline_ns / projected_ns
            efficiencies[form].append(efficiency)
            prof.measure("projected_ns", projected_ns, device=device.id, form=form)
            prof.measure("efficiency_ratio", efficiency, device=device.id, form=form)
    for form, ratios in efficiencies.items():
        prof.measure("portability_ratio", portability_ratio(ratios), form=form)


def portability_ratio(efficiencies: Iterable[float | None]) -> float:
    """Return the harmonic mean of efficiencies; zero where one is None: it does not run there.

    Pennycook, Sewall and Lee, arXiv 1611.07409.
    """
    values = [*efficiencies]
    if not values or not all(values):
        return 0.0
    return len(values) / sum(1 / value for value in values if value)


def _model(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torch

    from chopper.workloads.llama import adamw, initial_value, unbuilt

    model = unbuilt(args).to_empty(device=device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                initial_value(name, weight.shape, model.config, seed=args.seed, device=device)
            )
    model.to(getattr(torch, args.dtype))
    if args.variant == "compiled":
        from torch._inductor import config

        # Kernels in C++ are functions that no trace shows unless they are recorded one by one.
        config.cpp.enable_kernel_profile = device.type == "cpu"
        for block in model.layers:
            block.compile()
    return model, adamw(model)


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Compare the two trainings, and say how portable the block is."""
    yield from _portability(experiment)
    if not {"eager", "compiled"} <= set(experiment.variants):
        return
    where = f"{experiment.plan.options.get('size')} model on {experiment.plan.device}"
    faster = experiment.ratio("median_step_ns", "eager", "compiled")
    yield Headline.of(
        faster,
        system="Compilation",
        claim="untraced step, eager over compiled",
        configuration=where,
        why="no step was measured",
    )
    steps = _steps_to_pay(experiment, faster)
    yield Headline(
        system="Compilation",
        claim="steps after which compiling has paid for itself",
        unit="",
        ours=steps and steps[0],
        ci95=steps and (steps[1], steps[2]),
        why="" if steps else "compiled steps are not faster beyond noise here",
        configuration=where,
    )
    losses = training.loss_headline(experiment, "Compilation", ["compiled"], where)
    if losses is not None:
        yield losses


def _portability(experiment: Experiment) -> Iterator[Headline]:
    size = f"one block of the {experiment.plan.options.get('size')} model"
    devices = experiment.plan.options.get("devices")
    for form in ("eager", "compiled"):
        row = experiment.find("portability_ratio", "ahead", form=form)
        if row is not None:
            yield Headline(
                system="UniOrch",
                claim=f"performance and portability of {size}, {form}",
                unit="%",
                ours=row.estimate.value * 100,
                basis="model",
                timed=False,
                configuration=f"projected onto {devices}; not run",
                chosen="to have both vendors' generations" if devices == _DEVICES else "",
            )
    for part in ("loss", "gradient"):
        row = experiment.find(f"{part}_difference_ratio", "interpreted")
        if row is not None:
            yield Headline(
                system="UniOrch",
                claim=f"largest relative difference of {size}'s {part}, its Triton kernels "
                "interpreted from eager",
                unit="",
                ours=row.estimate.value if math.isfinite(row.estimate.value) else None,
                why="it was not a finite number",
                timed=False,
                configuration=f"one sequence of at most {_INTERPRETED_TOKENS} tokens",
            )


def _steps_to_pay(
    experiment: Experiment, faster: Estimate | None
) -> tuple[float, float, float] | None:
    """Return by how many steps of the difference the first compiled step is longer.

    With the ends of its interval, which is that of the difference; None unless all of it is a gain.
    """
    first, first_compiled = (
        experiment.value("first_step_ns", variant) for variant in ("eager", "compiled")
    )
    eager = experiment.value("median_step_ns", "eager")
    if not (faster and faster.ci95 and eager and first and first_compiled):
        return None
    ratios = (faster.value, faster.ci95[1], faster.ci95[0])
    if min(ratios) <= 1:
        return None
    now, most, least = ((first_compiled - first) / (eager * (1 - 1 / ratio)) for ratio in ratios)
    return now, most, least


if __name__ == "__main__":
    as_program(main)
