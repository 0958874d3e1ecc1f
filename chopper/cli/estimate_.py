"""``chopper estimate``: what another size, device, network or scale would give."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.cli import LazyGroup, estimates
from chopper.cli import _shared as shared

if TYPE_CHECKING:
    from chopper.analyzers.estimates import Estimate

_FIRST = ("memory", "offload", "network", "project", "limits", "cost")
"""The order in which they are listed; others follow."""


def _summaries() -> dict[str, str]:
    """Return the first line of each estimate's module, read without importing it."""
    lines = {}
    for module in pkgutil.iter_modules(estimates.__path__):
        (folder,) = (p for p in estimates.__path__ if (Path(p) / f"{module.name}.py").is_file())
        with (Path(folder) / f"{module.name}.py").open(encoding="utf-8") as file:
            lines[module.name] = file.readline().strip().strip('"')
    known = [name for name in _FIRST if name in lines]
    return {name: lines[name] for name in (*known, *sorted(set(lines) - set(known)))}


class _Group(LazyGroup):
    noun = "estimate"

    @property
    def summaries(self) -> dict[str, str]:  # type: ignore[override]
        return _summaries()

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Make the command of an estimate; None when there is none of this name."""
        summary = self.summaries.get(name)
        return None if summary is None else _command(name, summary)


def _command(name: str, summary: str) -> click.Command:
    """Return the command that an estimate's module declares."""
    from chopper.cli import _options

    module = importlib.import_module(f"{estimates.__name__}.{name}")

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
