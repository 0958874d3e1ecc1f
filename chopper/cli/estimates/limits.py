"""Largest size that a run can reach: the data-movement and latency walls."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from chopper.analyzers.estimates import Option, OptionsOf
from chopper.analyzers.estimates.limits import DAY_S, PUBLISHED, Hardware, Laws, Limits, limits
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.reports.estimates.limits import page

__all__ = ["Options", "estimate", "page"]


class Options(_options.Options, kw_only=True, frozen=True):
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

    flop: Annotated[
        tuple[float, ...],
        Option("FLOP of a run, may be repeated.  [default: the published table]", metavar="C"),
    ] = tuple(PUBLISHED)
    time_s: Annotated[float, Option("Time that a run may take.")] = 90 * DAY_S
    device: Annotated[
        str | None,
        Option(
            "Take peak, memory and link rates of this device of the table instead.", metavar="NAME"
        ),
    ] = None
    hardware: Annotated[dict[str, Any], OptionsOf(Hardware)] = msgspec.field(default_factory=dict)
    laws: Annotated[dict[str, Any], OptionsOf(Laws)] = msgspec.field(default_factory=dict)
    wall_utilization_ratio: Annotated[
        float, Option("Utilization that the data-movement wall is defined by.  [default: 2/3]")
    ] = 2 / 3
    search_step_ratio: Annotated[float, Option("Factor by which the count of devices climbs.")] = (
        1.04
    )


def estimate(options: Options) -> Limits:
    """Return utilization by size, and both walls."""
    for rate in ("flop_per_s", "memory_bytes_per_s", "node_link_bytes_per_s"):
        options.contradict("device", rate)
    of_device = _of_device(options.device) if options.device else {}
    return limits(
        options.flop,
        hardware=Hardware(**options.hardware, **of_device),
        laws=Laws(**options.laws),
        time_allowed_s=options.time_s,
        devices_step_ratio=options.search_step_ratio,
        data_wall_utilization_ratio=options.wall_utilization_ratio,
    )


def _of_device(name: str) -> dict[str, float]:
    """Return a device's peak, its memory's rate, and one direction of its links."""
    from chopper.hardware.devices import named

    device = named(name)
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    memory = device.memory_bandwidth_bytes_per_s.value
    link = device.link_bytes_per_s.value
    known = {"peak for bf16": peak, "memory bandwidth": memory, "link rate": link}
    unknown = [what for what, rate in known.items() if rate is None]
    if peak is None or memory is None or link is None:
        raise UsageError(
            f"--device {name}: {device.label} has no known {' and '.join(unknown)}; "
            "give --peak, --memory-bandwidth and --node-link instead"
        )
    # Links are quoted as the sum of both directions.
    return {
        "flop_per_s": float(peak),
        "memory_bytes_per_s": float(memory),
        "node_link_bytes_per_s": float(link) / 2,
    }
