"""``chopper estimate offload``: states or activations on the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper.cli._estimate.common import COUNT, NUMBER, RATE, SIZE, check, show, shown
from chopper.cli._path import NamedPath
from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.analyzers.estimates.offload import Machine

# Host to device and back of PCIe 5.0 x16, measured; each generation before has half.
PCIE5_BYTES_PER_S = (54.8e9, 46.8e9)


@click.command("offload", short_help="Optimizer, parameters or activations on the host.")
@click.argument("model", required=False)
@click.option("--config", type=NamedPath(), metavar="FILE", help="A Hugging Face config.json.")
@click.option("--device", default="h100-sxm", show_default=True, help="Of the table of devices.")
@click.option(
    "--efficiency",
    type=NUMBER,
    default="0.5",
    show_default=True,
    help="Share of the peak that products reach.",
)
@click.option("--batch", type=COUNT, default="1", show_default=True, help="Sequences per rank.")
@click.option("--sequence", type=COUNT, default="2048", show_default=True, help="Tokens of each.")
@click.option("--ranks", type=COUNT, default="1", show_default=True, help="Ranks of the node.")
@click.option("--link", type=RATE, help="To the device and back.  [default: by PCIe generation]")
@click.option(
    "--host-bandwidth",
    type=RATE,
    default="200GB/s",
    show_default=True,
    help="DRAM bandwidth of the node, shared by its ranks.",
)
@click.option("--host-memory", type=SIZE, help="DRAM of the node.  [default: as much as is needed]")
@shown
def command(
    model: str | None,
    config: Path | None,
    device: str,
    efficiency: float,
    batch: int,
    sequence: int,
    ranks: int,
    link: float | None,
    host_bandwidth: float,
    host_memory: int | None,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Show what offloading to the host saves and costs: ZeRO-Offload's variants, and activations.

    \b
    Examples:
      chopper estimate offload llama2-13b --device v100-sxm2-32gb --batch 8
      chopper estimate offload llama3-8b --link 50GB/s --sequence 8192 --json
    """
    from chopper.analyzers.estimates.offload import offload
    from chopper.models.architectures import named
    from chopper.models.configs import read_config
    from chopper.reports.estimates.offload import page

    check(output, force=force)
    if (model is None) == (config is None):
        said = "MODEL and --config contradict each other" if model else "no model given"
        raise UsageError(f"{said}; give one of MODEL and --config")
    architecture = read_config(config) if config else named(model or "")
    found = offload(
        architecture,
        _machine(device, efficiency, link, host_bandwidth / ranks, host_memory),
        batch_count=batch,
        sequence_count=sequence,
        ranks_count=ranks,
    )
    show(found, page, as_json=as_json, output=output)


def _machine(
    name: str, efficiency: float, link: float | None, host: float, host_memory: int | None
) -> Machine:
    """The device of the table with its link.

    Raises:
        UsageError: unknown, or one of its rates is; an efficiency above 1.
    """
    from chopper.analyzers.estimates.offload import Machine
    from chopper.hardware.devices import named
    from chopper.quantities import between

    between(efficiency, 0.001, 1, "--efficiency")
    device = named(name)
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    known = {
        "peak for 16 bits": peak,
        "memory": device.memory_bytes.value,
        "memory bandwidth": device.memory_bandwidth_bytes_per_s.value,
    }
    missing = [what for what, value in known.items() if value is None]
    if missing:
        raise UsageError(
            f"--device {name}: {device.label} has no known {missing[0]}; choose another"
        )
    generation = device.pcie_generation.value
    if link is not None:
        rates, source = (link, link), "link as given"
    elif generation is None:
        raise UsageError(f"--device {name}: PCIe of {device.label} is not known; give --link")
    else:
        scale = 2.0 ** (int(generation) - 5)
        rates = PCIE5_BYTES_PER_S[0] * scale, PCIE5_BYTES_PER_S[1] * scale
        source = "measured on PCIe 5.0 x16"
        if scale != 1:
            source += f", scaled to PCIe {generation}"
    return Machine(
        device=device.label,
        flop_per_s=float(peak or 0) * efficiency,
        memory_bytes=int(device.memory_bytes.value or 0),
        memory_bytes_per_s=float(device.memory_bandwidth_bytes_per_s.value or 0),
        to_device_bytes_per_s=rates[0],
        to_host_bytes_per_s=rates[1],
        host_bytes_per_s=host,
        host_memory_bytes=host_memory,
        source=source,
    )
