"""A group of commands of which only the one that is named is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from chopper.quantities import one_of


class LazyGroup(click.Group):
    """Commands by name, each the ``command`` of a module of its own.

    Set ``noun`` (what they are called), ``summaries`` (name → one line), ``module`` (of a name,
    with ``{}`` in its place) and ``first_count`` (how many the first list of the help shows).
    """

    noun: str
    summaries: Mapping[str, str]
    module: str
    first_count: int | None = None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; a name that there is not is one line with those that are near."""
        if not args[0].startswith("-") and not ctx.resilient_parsing:  # as completion parses
            args = [one_of(self.noun, args[0], self.summaries), *args[1:]]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order of their declaration."""
        return list(self.summaries)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        """Load a command; None when there is none of this name."""
        if name not in self.summaries:
            return None
        command: click.Command = importlib.import_module(self.module.format(name)).command
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands without loading any, then the options."""
        listed = [*self.summaries.items()]
        first = listed[: self.first_count]
        for title, rows in (("Commands", first), ("More commands", listed[len(first) :])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        click.Command.format_options(self, ctx, formatter)
