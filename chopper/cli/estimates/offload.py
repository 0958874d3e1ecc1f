"""Optimizer, parameters or activations on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from chopper.analyzers.estimates import Option
from chopper.analyzers.estimates.offload import Machine, Offload, offload
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.hardware.devices import named as device_named
from chopper.models.architectures import named
from chopper.models.configs import read_config
from chopper.quantities import between
from chopper.reports.estimates.offload import page

__all__ = ["Options", "estimate", "page"]

# Host to device and back of PCIe 5.0 x16, measured; each generation before has half.
PCIE5_BYTES_PER_S = (54.8e9, 46.8e9)


class Options(_options.Options, kw_only=True, frozen=True):
    """Show what offloading to the host saves and costs: ZeRO-Offload's variants, and activations.

    \b
    Examples:
      chopper estimate offload llama2-13b --device v100-sxm2-32gb --batch 8
      chopper estimate offload llama3-8b --link 50GB/s --sequence 8192 --json
    """

    model: Annotated[str | None, Option("", argument=True)] = None
    config: Annotated[Path | None, Option("A Hugging Face config.json.", metavar="FILE")] = None
    device: Annotated[str, Option("Of the table of devices.")] = "h100-sxm"
    efficiency_ratio: Annotated[float, Option("Share of the peak that products reach.")] = 0.5
    batch_count: Annotated[int, Option("Sequences per rank.")] = 1
    sequence_count: Annotated[int, Option("Tokens of each.")] = 2048
    ranks_count: Annotated[int, Option("Ranks of the node.")] = 1
    link_bytes_per_s: Annotated[
        float | None, Option("To the device and back.  [default: by PCIe generation]")
    ] = None
    host_bandwidth_bytes_per_s: Annotated[
        float, Option("DRAM bandwidth of the node, shared by its ranks.")
    ] = 200e9
    host_memory_bytes: Annotated[
        int | None, Option("DRAM of the node.  [default: as much as is needed]")
    ] = None


def estimate(options: Options) -> Offload:
    """Return time and memory of each variant for a model on a machine."""
    options.exactly_one("model", "config", missing="no model given")
    architecture = read_config(options.config) if options.config else named(options.model or "")
    return offload(
        architecture,
        _machine(options),
        batch_count=options.batch_count,
        sequence_count=options.sequence_count,
        ranks_count=options.ranks_count,
    )


def _machine(options: Options) -> Machine:
    """Return the device of the table with its link, per rank."""
    between(options.efficiency_ratio, 0.001, 1, "--efficiency")
    device = device_named(options.device)
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    known = {
        "peak for 16 bits": peak,
        "memory": device.memory_bytes.value,
        "memory bandwidth": device.memory_bandwidth_bytes_per_s.value,
    }
    missing = [what for what, value in known.items() if value is None]
    if missing:
        raise UsageError(
            f"--device {options.device}: {device.label} has no known {missing[0]}; choose another"
        )
    to_device, to_host = PCIE5_BYTES_PER_S
    generation = device.pcie_generation.value
    if options.link_bytes_per_s is not None:
        to_device = to_host = options.link_bytes_per_s
        source = "link as given"
    elif generation is None:
        raise UsageError(
            f"--device {options.device}: PCIe of {device.label} is not known; give --link"
        )
    else:
        scale = 2.0 ** (int(generation) - 5)
        to_device, to_host = to_device * scale, to_host * scale
        source = "measured on PCIe 5.0 x16"
        if scale != 1:
            source += f", scaled to PCIe {generation}"
    return Machine(
        device=device.label,
        flop_per_s=float(peak or 0) * options.efficiency_ratio,
        memory_bytes=int(device.memory_bytes.value or 0),
        memory_bytes_per_s=float(device.memory_bandwidth_bytes_per_s.value or 0),
        to_device_bytes_per_s=to_device,
        to_host_bytes_per_s=to_host,
        host_bytes_per_s=options.host_bandwidth_bytes_per_s / options.ranks_count,
        host_memory_bytes=options.host_memory_bytes,
        source=source,
    )
