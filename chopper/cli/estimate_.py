"""``chopper estimate``: what another size, device, network or scale would give."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.cli import LazyGroup
from chopper.cli import _shared as shared

if TYPE_CHECKING:
    from chopper.analyzers.estimates import Estimate

_ESTIMATES = {
    "memory": "Peak memory of a training step, per rank and category.",
    "offload": "Optimizer, parameters or activations on the host.",
    "network": "Collectives by size and algorithm, and flows on uplinks.",
    "project": "A recorded run on another device.",
    "limits": "Largest size of a run: the data-movement and latency walls.",
    "cost": "Money and energy per token, step and run.",
}


class _Group(LazyGroup):
    noun = "estimate"
    summaries = _ESTIMATES

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Make the command of an estimate; None when there is none of this name."""
        return _command(name, _ESTIMATES[name]) if name in _ESTIMATES else None


def _command(name: str, summary: str) -> click.Command:
    """Return the command that an estimate's module declares."""
    from chopper.cli import _options

    module = importlib.import_module(f"chopper.cli.estimates.{name}")

    @click.command(name, cls=shared.Command, help=module.Options.__doc__, short_help=summary)
    @click.option("--details", is_flag=True, help="Show tables, and all assumptions.")
    @shared.as_json
    @shared.report_output("Additional file to write (.html with figures)")
    def run(details: bool, as_json: bool, output: Path | None, force: bool, **values: Any) -> None:
        from chopper.reports.estimate import brief

        if output is not None:
            shared.check_report(output, force=force)
        result: Estimate = module.estimate(_options.read(module.Options, values))
        shared.present(
            lambda: module.page(result),
            result.to_dict,
            as_json=as_json,
            output=output,
            brief=None if details else brief,
        )

    run.params[:0] = _options.parameters(module.Options)
    return run


@click.command("estimate", cls=_Group)
def command() -> None:
    """Estimate what another model, device, network or scale would give, from sourced formulas.

    Each estimate answers in five lines: the number, what limits it, what it assumes, and what to
    try. --details shows tables and all assumptions, --json has every field, and -o writes a page
    with figures.

    \b
    Examples:
      chopper estimate memory llama3-8b --strategy fsdp2 --ranks 8 --device b200
      chopper estimate cost --device h100-sxm --tokens-per-s 728 --against gb200
      chopper estimate limits -o limits.html
    """
