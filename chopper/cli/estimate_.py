"""``chopper estimate``: what another size, device, network or scale would give."""

from __future__ import annotations

import click

from chopper.cli._lazy import LazyGroup
from chopper.quantities import one_of

_COMMANDS = {
    "memory": "Peak memory of a training step, per rank and category.",
    "offload": "Optimizer, parameters or activations on the host.",
    "network": "Collectives by size and algorithm, flows on uplinks, interconnects.",
    "project": "A recorded run on another device, or on more ranks.",
    "limits": "How large a run can get: the data-movement and latency walls.",
    "cost": "Money and energy per token, step and run.",
}


class _Group(LazyGroup):
    summaries = _COMMANDS
    module = "chopper.cli._estimate.{}"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-"):
            args = [one_of("estimate", args[0], _COMMANDS), *args[1:]]
        return super().resolve_command(ctx, args)


@click.command(
    "estimate", cls=_Group, short_help="Estimate memory, networks, limits and cost from formulas."
)
def command() -> None:
    """Estimate what another model, device, network or scale would give, from sourced formulas.

    Each estimate prints its assumptions, has --json, and writes a page with figures with -o.

    \b
    Examples:
      chopper estimate memory llama3-8b --strategy fsdp2 --ranks 8 --device h100-sxm
      chopper estimate cost --device h100-sxm --tokens-per-s 728 --against gb200
      chopper estimate limits -o limits.html
    """
