"""Peak memory of a training step, per rank and category."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from chopper.analyzers.estimates import Option, OptionsOf
from chopper.analyzers.estimates.memory import Memory, fit, memory, of_capture
from chopper.analyzers.estimates.training import Training
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.models.architectures import CATALOGUE, named
from chopper.models.configs import read_config
from chopper.reports.estimates.memory import page

__all__ = ["Options", "estimate", "page"]

_USABLE_RATIO = 0.95
_OF_A_MODULE = ("batch_count", "sequence_count", "strategy", "ranks_count", "checkpoint")
_OF_BOTH = (*_OF_A_MODULE, "optimizer", "precision", "fragmentation_ratio", "workspace_bytes")


class Options(_options.Options, kw_only=True, frozen=True):
    """Show the peak memory of one rank in a training step, by category.

    MODEL is a model of the catalogue (llama3-8b, gpt3-175b, mixtral-8x7b, deepseek-v3 …). The step
    is run symbolically, operator by operator: nothing is allocated, and torch is needed for
    --module only. With --device or --capacity, the largest batch, sequence and model that fit are
    found.

    --config reads dense models and mixtures of experts of some 40 families; one of another is
    refused, with the list of those that are read.

    \b
    Examples:
      chopper estimate memory mixtral-8x7b --strategy fsdp2 --ranks 64 --ep 8 --checkpoint full
      chopper estimate memory llama3-8b --strategy fsdp2 --ranks 8 --sequence 8192 --device h100-sxm
      chopper estimate memory --config config.json --checkpoint full --json
      chopper estimate memory --module mypackage.model:make --batch 4 --sequence 1024
    """

    model: Annotated[str | None, Option("", argument=True)] = None
    config: Annotated[Path | None, Option("A Hugging Face config.json.", metavar="FILE")] = None
    module: Annotated[
        str | None,
        Option(
            "Your own module, captured under fake tensors: needs torch, no memory.",
            metavar="PACKAGE.MODULE:FACTORY",
        ),
    ] = None
    training: Annotated[dict[str, Any], OptionsOf(Training)] = msgspec.field(default_factory=dict)
    device: Annotated[str | None, Option("Find what fits this device.", metavar="NAME")] = None
    capacity_bytes: Annotated[
        int | None, Option("Find what fits this much memory.", metavar="SIZE")
    ] = None


def estimate(options: Options) -> Memory:
    """Return the peak of a model's step, or of a module that is captured."""
    options.exactly_one("model", "config", "module", missing="no model given")
    options.contradict("device", "capacity_bytes")
    capacity_bytes = _usable_bytes(options.device) if options.device else options.capacity_bytes
    if options.module is not None:
        return _captured(options.module, options)
    strategy = options.training.get("strategy", "single")
    if "bucket_count" in options.given and strategy not in ("zero1", "zero2", "zero3"):
        raise UsageError(
            f"--bucket is DeepSpeed's; it contradicts --strategy {strategy}; "
            "choose zero1, zero2 or zero3, or leave it out"
        )
    architecture = read_config(options.config) if options.config else named(options.model or "")
    fields = {
        **options.training,
        "offload": tuple(dict.fromkeys(options.training.get("offload", ()))),
    }
    training = Training(architecture=architecture, **fields)
    result = memory(training)
    if capacity_bytes is None:
        return result
    return msgspec.structs.replace(result, fit=fit(training, capacity_bytes, CATALOGUE))


def _usable_bytes(name: str) -> int:
    """Return what a process can have of a device's memory."""
    from chopper.hardware.devices import named

    device = named(name)
    if device.memory_bytes.value is None:
        raise UsageError(f"--device {name}: memory of {device.label} is not known; use --capacity")
    return int(device.memory_bytes.value * _USABLE_RATIO)


def _captured(module: str, options: Options) -> Memory:
    from chopper.collectors.fake_memory import capture

    wrong = options.first_given(
        *(field for field in Training.__struct_fields__ if field not in _OF_BOTH),
        "device",
        "capacity_bytes",
    )
    if wrong:
        raise UsageError(
            f"{wrong} contradicts --module: a captured module runs as it is; "
            "leave it out, or give MODEL or --config"
        )
    asked = {field.name: field.default for field in msgspec.structs.fields(Training)}
    asked |= options.training
    request = {name.removesuffix("_count"): asked[name] for name in (*_OF_A_MODULE, "optimizer")}
    usual = "mixed" if asked["strategy"] == "fsdp2" else "bf16"
    precision = options.training.get("precision", usual)
    return of_capture(
        capture(module, precision=precision, **request),
        {"module": module, "precision": precision, **request},
        fragmentation_ratio=asked["fragmentation_ratio"],
        workspace_bytes=asked["workspace_bytes"],
    )
