"""``chopper estimate``: what another size, device, network or scale would give."""

from __future__ import annotations

import importlib

import click

from chopper.quantities import one_of

_COMMANDS = {
    "memory": "Peak memory of a training step, per rank and category.",
    "offload": "Optimizer, parameters or activations on the host.",
    "network": "Collectives by size and algorithm, flows on uplinks, interconnects.",
    "project": "A recorded run on another device, or on more ranks.",
    "limits": "How large a run can get: the data-movement and latency walls.",
    "cost": "Money and energy per token, step and run.",
}


class _Group(click.Group):
    """Loads a subcommand's module only when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"chopper.cli._estimate.{name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

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
