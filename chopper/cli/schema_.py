"""``chopper schema``: the tables that a run holds, printed from their declarations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from chopper.cli._complete import tables
from chopper.cli._output import print_json
from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.tables import Table

SCHEMA = "chopper.tables/1"


@click.command("schema", short_help="Print the tables that a run holds, or one of them.")
@click.argument("table", required=False, shell_complete=tables)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(table: str | None, as_json: bool) -> None:
    """Print the tables that a run holds, or the columns of one of them.

    \b
    Examples:
      chopper schema
      chopper schema device_event
      chopper schema --json | jq '.tables[].name'
    """
    from chopper.tables import TABLES
    from chopper.views import in_sections

    every = [*TABLES.values(), *in_sections()] if table is None else []
    chosen = every or [_find(str(table))]
    if as_json:
        document = {"schema": SCHEMA, "tables": [to_json(t) for t in chosen]}
        print_json(document)
    elif table is not None:
        click.echo(to_text(chosen[0]), nl=False)
    else:
        out = click.HelpFormatter(width=100)
        out.write_dl([(t.name, t.doc) for t in chosen])
        click.echo(out.getvalue(), nl=False)
        click.echo(f"next: chopper schema {chosen[0].name}", err=True)


def _find(name: str) -> Table:
    from difflib import get_close_matches

    from chopper.tables import TABLES
    from chopper.views import VIEWS

    if name in TABLES:
        return TABLES[name]
    if name in VIEWS:
        return VIEWS[name]
    names = [*TABLES, *VIEWS]
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
    raise UsageError(f"no table is called {name!r}; {hint}")


def to_json(table: Table) -> dict[str, Any]:
    """A table's declaration as data."""
    return {
        "name": table.name,
        "version": table.version,
        "doc": table.doc,
        "columns": [
            {
                "name": column.name,
                "type": column.type,
                "unit": column.unit,
                "nullable": column.nullable,
                "doc": column.doc,
            }
            for column in table.columns
        ],
    }


def to_text(table: Table) -> str:
    """A table's declaration for people."""
    out = click.HelpFormatter(width=100)
    out.write_text(f"{table.name}, version {table.version}. {table.doc}")
    out.write_paragraph()
    rows = []
    for column in table.columns:
        kind = column.type + (f" ({column.unit})" if column.unit else "")
        null = " Null: unknown." if column.nullable else ""
        rows.append((f"{column.name}  {kind}", column.doc + null))
    out.write_dl(rows, col_max=46)
    return out.getvalue()
