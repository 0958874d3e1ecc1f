"""``chopper schema`` and ``chopper completion``: what is declared, for people and for shells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from chopper.cli import _shared as shared
from chopper.cli.output import print_json, terminal_width
from chopper.errors import UsageError, tell

if TYPE_CHECKING:
    from chopper.tables import Table

SCHEMA = "chopper.tables/1"


@click.command("schema")
@click.argument("table", required=False, shell_complete=shared.completing(lambda: _tables()))
@shared.as_json
def command(table: str | None, as_json: bool) -> None:
    """Print the tables that a run holds, or the columns of one of them.

    \b
    Examples:
      chopper schema
      chopper schema device_event
      chopper schema --json | jq '.tables[].name'
    """
    from chopper.tables import TABLES

    tables = TABLES if table in TABLES else _tables()
    if table is not None and table not in tables:
        from difflib import get_close_matches

        close = get_close_matches(table, tables, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "`chopper schema` lists them"
        raise UsageError(f"no table is called {table!r}; {hint}")
    chosen = [*tables.values()] if table is None else [tables[table]]
    if as_json:
        print_json({"schema": SCHEMA, "tables": [to_json(t) for t in chosen]})
    elif table is not None:
        click.echo(to_text(chosen[0]), nl=False)
    else:
        out = click.HelpFormatter(width=terminal_width())
        out.write_dl([(t.name, t.summary) for t in chosen])
        click.echo(out.getvalue(), nl=False)
        tell(f"next: chopper schema {chosen[0].name}")


def _tables() -> dict[str, Table]:
    """Return the tables of a run and of its views, by name."""
    from chopper.tables import TABLES
    from chopper.views import in_sections

    return {**TABLES, **{view.name: view for view in in_sections()}}


def to_json(table: Table) -> dict[str, Any]:
    """Return a table's declaration as data."""
    fields = ("name", "type", "unit", "nullable", "doc")
    columns = [{field: getattr(c, field) for field in fields} for c in table.columns]
    return {"name": table.name, "version": table.version, "doc": table.doc, "columns": columns}


def to_text(table: Table) -> str:
    """Return a table's declaration for people."""
    out = click.HelpFormatter(width=terminal_width())
    out.write_text(f"{table.name}, version {table.version}. {table.doc}")
    out.write_paragraph()
    rows = []
    for column in table.columns:
        kind = column.type + (f" ({column.unit})" if column.unit else "")
        null = " Null if unknown." if column.nullable else ""
        rows.append((f"{column.name}  {kind}", column.doc + null))
    out.write_dl(rows, col_max=46)
    return out.getvalue()


_INSTALL = {
    "bash": """add to ~/.bashrc:  eval "$(chopper completion bash)\"""",
    "zsh": """add to ~/.zshrc:  eval "$(chopper completion zsh)\"""",
    "fish": "chopper completion fish > ~/.config/fish/completions/chopper.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def completion(shell: str) -> None:
    """Print the shell completion script for bash, zsh or fish.

    \b
    Examples:
      eval "$(chopper completion bash)"        in ~/.bashrc
      eval "$(chopper completion zsh)"         in ~/.zshrc
      chopper completion fish > ~/.config/fish/completions/chopper.fish
    """
    from click.shell_completion import get_completion_class

    from chopper.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "chopper", "_CHOPPER_COMPLETE")
    # Not source(): for bash it runs bash to look at its version, and warns where there is none.
    click.echo(script.source_template % script.source_vars())
    tell(f"to install: {_INSTALL[shell]}")
