"""``chopper estimate memory``: peak memory of a training step, per rank and category."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.cli._estimate.common import COUNT, SIZE, check, contradict, given, show, shown
from chopper.cli._path import NamedPath
from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.analyzers.estimates.memory import Memory
    from chopper.models.architectures import Architecture

_USABLE_RATIO = 0.95


@click.command("memory", short_help="Peak memory of a training step, per rank and category.")
@click.argument("model", required=False)
@click.option("--config", type=NamedPath(), metavar="FILE", help="A Hugging Face config.json.")
@click.option(
    "--module",
    metavar="PACKAGE.MODULE:FACTORY",
    help="Your own module, captured under fake tensors: needs torch, no memory.",
)
@click.option("--batch", type=COUNT, default="1", show_default=True, help="Sequences per rank.")
@click.option("--sequence", type=COUNT, default="2048", show_default=True, help="Tokens of each.")
@click.option(
    "--strategy",
    default="single",
    show_default=True,
    help="single, ddp, zero1, zero2, zero3 (DeepSpeed), zero1-torch, fsdp1 or fsdp2.",
)
@click.option("--ranks", type=COUNT, default="1", show_default=True, help="Data-parallel ranks.")
@click.option("--tp", type=COUNT, default="1", show_default=True, help="Tensor-parallel ranks.")
@click.option("--sp", is_flag=True, help="Sequence parallelism beside --tp.")
@click.option(
    "--ep",
    type=COUNT,
    default="1",
    show_default=True,
    help="Expert-parallel ranks, out of --ranks: each has a part of the experts.",
)
@click.option(
    "--imbalance",
    type=float,
    default=1.0,
    show_default=True,
    metavar="RATIO",
    help="Rows that come to the busiest rank's experts, of an even share.",
)
@click.option(
    "--checkpoint",
    default="none",
    show_default=True,
    help="Recomputation: none, selective (every other product kept) or full.",
)
@click.option(
    "--precision",
    help="bf16, fp32, autocast, mixed, or mixed-fp32-grads.  [default: mixed; of a module bf16]",
)
@click.option("--optimizer", default="adamw", show_default=True, help="adamw or sgd.")
@click.option(
    "--optimizer-kind",
    type=click.Choice(["fused", "foreach", "loop"]),
    default="fused",
    show_default=True,
    help="How the update runs; foreach holds a copy of a moment.",
)
@click.option(
    "--offload",
    multiple=True,
    metavar="WHAT",
    help="optimizer, parameters or activations to the host; may be repeated.",
)
@click.option(
    "--loss",
    default="fp32",
    show_default=True,
    help="Cross-entropy in native precision, fp32, or chunked (8 parts, fp32).",
)
@click.option(
    "--gathered-logits",
    is_flag=True,
    help="Beside --tp: each rank gathers all logits for its loss, as without loss_parallel().",
)
@click.option(
    "--keeps-logits", is_flag=True, help="The program holds its logits until after the backward."
)
@click.option(
    "--attention",
    type=click.Choice(["flash", "math"]),
    default="flash",
    show_default=True,
    help="Fused, or with its matrix of scores.",
)
@click.option(
    "--kernels",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    show_default=True,
    help="Whose operators; on a CPU, norms and dropout keep more.",
)
@click.option(
    "--fragmentation",
    type=float,
    default=0.15,
    show_default=True,
    help="Share of what comes and goes that the allocator holds besides.",
)
@click.option("--workspace", type=SIZE, help="Of libraries and the context, per rank.")
@click.option(
    "--bucket",
    type=COUNT,
    default="500M",
    show_default=True,
    metavar="ELEMENTS",
    help="DeepSpeed's reduce_bucket_size.",
)
@click.option("--device", metavar="NAME", help="Find what fits this device.")
@click.option("--capacity", type=SIZE, metavar="SIZE", help="Find what fits this much memory.")
@shown
def command(
    model: str | None,
    config: Path | None,
    module: str | None,
    device: str | None,
    capacity: int | None,
    workspace: int | None,
    as_json: bool,
    output: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Show the peak memory of one rank in a training step, by category.

    MODEL is a model of the catalogue (llama3-8b, gpt3-175b, mixtral-8x7b, deepseek-v3 …). The step is
    run symbolically, operator by operator: nothing is allocated, and torch is needed for --module
    only. With --device or --capacity, the largest batch, sequence and model that fit are found.

    --config reads dense models and mixtures of experts of some 40 families; one of another is refused, with
    the list of those that are read.

    \b
    Examples:
      chopper estimate memory mixtral-8x7b --strategy fsdp2 --ranks 64 --ep 8 --checkpoint full
      chopper estimate memory llama3-8b --strategy fsdp2 --ranks 8 --sequence 8192 --device h100-sxm
      chopper estimate memory --config config.json --checkpoint full --json
      chopper estimate memory --module mypackage.model:make --batch 4 --sequence 1024
    """
    from chopper.reports.estimates.memory import page

    check(output, force=force)
    sources = [n for n, v in (("MODEL", model), ("--config", config), ("--module", module)) if v]
    if len(sources) != 1:
        said = " and ".join(sources) + " contradict each other" if sources else "no model given"
        raise UsageError(f"{said}; give one of MODEL, --config and --module")
    contradict("device", "capacity")
    room = _capacity(device) if device else capacity
    if module is not None:
        found = _of_module(module, room, workspace or 0, options)
    else:
        found = _of_shapes(_architecture(model, config), room, workspace or 0, options)
    show(found, page, as_json=as_json, output=output)


def _architecture(model: str | None, config: Path | None) -> Architecture:
    from chopper.models.architectures import named
    from chopper.models.configs import read_config

    return named(model or "") if config is None else read_config(config)


def _capacity(name: str) -> int:
    """What a process can have of a device's memory.

    Raises:
        UsageError: the device, or its memory, is not known.
    """
    from chopper.hardware.devices import named

    device = named(name)
    if device.memory_bytes.value is None:
        raise UsageError(f"--device {name}: memory of {device.label} is not known; use --capacity")
    return int(device.memory_bytes.value * _USABLE_RATIO)


def _of_shapes(
    architecture: Architecture, room: int | None, workspace: int, options: dict[str, Any]
) -> Memory:
    import msgspec

    from chopper.analyzers.estimates.memory import Training, fit, memory
    from chopper.models.architectures import CATALOGUE

    if given("bucket") and options["strategy"] not in ("zero1", "zero2", "zero3"):
        raise UsageError(
            f"--bucket is DeepSpeed's; it contradicts --strategy {options['strategy']}; "
            "choose zero1, zero2 or zero3, or leave it out"
        )
    training = Training(
        architecture=architecture,
        batch_count=options["batch"],
        sequence_count=options["sequence"],
        strategy=options["strategy"],
        ranks_count=options["ranks"],
        tensor_parallel_count=options["tp"],
        sequence_parallel=options["sp"],
        expert_parallel_count=options["ep"],
        imbalance_ratio=options["imbalance"],
        checkpoint=options["checkpoint"],
        precision=options["precision"] or "mixed",
        optimizer=options["optimizer"],
        optimizer_kind=options["optimizer_kind"],
        offload=tuple(dict.fromkeys(options["offload"])),
        loss=options["loss"],
        gathers_logits=options["gathered_logits"],
        keeps_logits=options["keeps_logits"],
        attention=options["attention"],
        kernels=options["kernels"],
        fragmentation_ratio=options["fragmentation"],
        workspace_bytes=workspace,
        bucket_count=options["bucket"],
    )
    found = memory(training)
    if room is not None:
        found = msgspec.structs.replace(found, fit=fit(training, room, CATALOGUE))
    return found


_NOT_CAPTURED = (
    "tp",
    "sp",
    "ep",
    "imbalance",
    "optimizer_kind",
    "offload",
    "loss",
    "gathered_logits",
    "keeps_logits",
    "attention",
    "kernels",
    "bucket",
)


def _of_module(module: str, room: int | None, workspace: int, options: dict[str, Any]) -> Memory:
    from chopper.analyzers.estimates.memory import of_capture
    from chopper.collectors.fake_memory import capture

    wrong = [name for name in _NOT_CAPTURED if given(name)]
    if wrong or room is not None:
        names = ["device or capacity"] if not wrong else [w.replace("_", "-") for w in wrong]
        raise UsageError(
            f"--{names[0]} contradicts --module: a captured module runs as it is; "
            "leave it out, or give MODEL or --config"
        )
    request = {
        name: options[name]
        for name in ("batch", "sequence", "strategy", "ranks", "checkpoint", "optimizer")
    }
    precision = options["precision"] or ("mixed" if options["strategy"] == "fsdp2" else "bf16")
    found = capture(module, precision=precision, **request)
    return of_capture(
        found,
        {"module": module, "precision": precision, **request},
        fragmentation_ratio=options["fragmentation"],
        workspace_bytes=workspace,
    )
