"""Eager PyTorch beside torch.compile: the same training of a Llama model on one device.

    chopper bench compile
    chopper bench compile -- --size 1b --sequence 2048 --dtype bfloat16

Each block is compiled on its own, so that all blocks share one compilation. ``chopper estimate
portability`` shows the kernels that torch.compile writes for other devices.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from chopper.experiments.declarations import Needs, Variant, Workload, as_program
from chopper.experiments.results import NO_LOSS, Experiment, Headline
from chopper.workloads import training
from chopper.workloads.offload_tables import LOSS_TOLERANCES, worst_loss_ratio

if TYPE_CHECKING:
    import torch
    from torch import nn

    from chopper.statistics import Estimate

WORKLOAD = Workload(
    name="compile",
    summary="Llama training, eager and with torch.compile, on one device: what fused kernels and "
    "fewer launches save, and what compiling costs",
    options=training.OPTIONS,
    variants=(
        Variant("eager", "a kernel for each operator"),
        Variant("compiled", "torch.compile's kernels for each block"),
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
    return training.needs(args, ranks, device)


def main() -> None:
    """Train; what is compiled is this run's alone, else only the first would pay for it."""
    with tempfile.TemporaryDirectory(prefix="chopper-compiled-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        training.run(WORKLOAD, _model)


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
    """Hold the two against each other: untraced steps, what compiling costs, the losses."""
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
    worst = worst_loss_ratio(experiment, ["compiled"])
    if worst is not None:
        apart = worst[1] if math.isfinite(worst[1]) else None
        tolerance = LOSS_TOLERANCES[str(experiment.plan.options.get("dtype", "float32"))]
        kept = "kept" if worst[1] <= tolerance else "exceeded"
        yield Headline(
            system="Compilation",
            claim="largest relative difference of a step's loss, compiled from eager",
            unit="",
            timed=False,
            ours=apart,
            why=NO_LOSS.format("compiled") if apart is None else "",
            configuration=f"{where}; tolerance {tolerance:g}: {kept}",
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
