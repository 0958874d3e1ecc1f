"""``chopper estimate limits``: the data-movement wall and the latency wall."""

from __future__ import annotations

from pathlib import Path

import click

from chopper.cli._estimate.common import NUMBER, RATE, TIME, check, contradict, show, shown


@click.command("limits", short_help="How large a run can get: data-movement and latency walls.")
@click.option(
    "--flop",
    "sizes",
    type=NUMBER,
    multiple=True,
    metavar="C",
    help="FLOP of a run, may be repeated.  [default: the published table]",
)
@click.option(
    "--time",
    "time_s",
    type=TIME,
    default="90d",
    show_default=True,
    help="Time that a run may take.",
)
@click.option(
    "--peak",
    type=NUMBER,
    default="989e12",
    show_default=True,
    metavar="FLOP/S",
    help="Of one device.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="Take peak, memory and link rates of this device of the table instead.",
)
@click.option(
    "--memory-bandwidth", type=RATE, default="3350GB/s", show_default=True, help="Of one device."
)
@click.option(
    "--node-link", type=RATE, default="450GB/s", show_default=True, help="One direction, in a node."
)
@click.option(
    "--network", type=RATE, default="50GB/s", show_default=True, help="One direction, per device."
)
@click.option(
    "--kernel-latency", type=TIME, default="4.5us", show_default=True, help="Of one kernel."
)
@click.option(
    "--layer-latency",
    type=TIME,
    default="400us",
    show_default=True,
    help="Forward and backward of one layer, in the latency wall's closed form.",
)
@click.option("--tokens-per-parameter", type=NUMBER, default="20", show_default=True, help="D ÷ N.")
@click.option(
    "--batch-at-reference",
    type=NUMBER,
    default="6e7",
    show_default=True,
    help="Tokens of a batch of the model of 1.8e12 parameters.",
)
@click.option(
    "--batch-exponent",
    type=NUMBER,
    default="0.333333333333333",
    help="Power of N by which the batch grows.  [default: 1/3]",
)
@click.option(
    "--layers-exponent",
    type=NUMBER,
    default="0.333333333333333",
    help="Power of N by which layers grow.  [default: 1/3]",
)
@click.option(
    "--wall-utilization",
    type=NUMBER,
    default="0.6666666667",
    help="Utilization that the data-movement wall is defined by.  [default: 2/3]",
)
@click.option(
    "--search-step",
    type=NUMBER,
    default="1.04",
    show_default=True,
    help="Factor by which the count of devices climbs.",
)
@shown
def command(
    sizes: tuple[float, ...],
    time_s: float,
    peak: float,
    device: str | None,
    memory_bandwidth: float,
    node_link: float,
    network: float,
    kernel_latency: float,
    layer_latency: float,
    tokens_per_parameter: float,
    batch_at_reference: float,
    batch_exponent: float,
    layers_exponent: float,
    wall_utilization: float,
    search_step: float,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Show how large a training run can get before data movement and latency stop it.

    For each budget of FLOP the fewest devices are searched that finish in time, over all layouts
    of data, tensor and pipeline parallelism. The laws of model and batch, the device and the
    network are options.

    \b
    Examples:
      chopper estimate limits
      chopper estimate limits --device b200 --network 100GB/s
      chopper estimate limits --flop 1e27 --flop 1e28 --time 180d --json
    """
    from chopper.analyzers.estimates.limits import PUBLISHED, Hardware, Laws, limits

    check(output, force=force)
    for rate in ("peak", "memory_bandwidth", "node_link"):
        contradict("device", rate)
    if device is not None:
        peak, memory_bandwidth, node_link = _of_device(device)
    found = limits(
        sizes or tuple(PUBLISHED),
        hardware=Hardware(
            flop_per_s=peak,
            memory_bytes_per_s=memory_bandwidth,
            node_link_bytes_per_s=node_link,
            network_bytes_per_s=network,
            kernel_latency_s=kernel_latency,
            layer_latency_s=layer_latency,
        ),
        laws=Laws(
            tokens_per_parameter_ratio=tokens_per_parameter,
            reference_batch_tokens_count=batch_at_reference,
            batch_exponent=batch_exponent,
            layers_exponent=layers_exponent,
        ),
        time_allowed_s=time_s,
        devices_step_ratio=search_step,
        data_wall_utilization_ratio=wall_utilization,
    )

    from chopper.reports.estimates.limits import page

    show(found, page, as_json=as_json, output=output)


def _of_device(name: str) -> tuple[float, float, float]:
    """Peak, memory rate, and one direction of its links.

    Raises:
        UsageError: unknown, or one of them is.
    """
    from chopper.errors import UsageError
    from chopper.hardware.devices import named

    device = named(name)
    rates = (
        device.flop_per_s("bf16") or device.flop_per_s("fp16"),
        device.memory_bandwidth_bytes_per_s.value,
        device.link_bytes_per_s.value,
    )
    what = ("peak for bf16", "memory bandwidth", "link rate")
    unknown = [w for w, rate in zip(what, rates, strict=True) if rate is None]
    if unknown:
        raise UsageError(
            f"--device {name}: {device.label} has no known {' and '.join(unknown)}; "
            "give --peak, --memory-bandwidth and --node-link instead"
        )
    # Links are quoted as the sum of both directions.
    return float(rates[0] or 0), float(rates[1] or 0), float(rates[2] or 0) / 2
