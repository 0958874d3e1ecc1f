"""``chopper analyze``: the attribution on the terminal, as JSON or as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.causes import LEVELS
from chopper.cli import _shared as shared
from chopper.cli.output import print_json, print_page
from chopper.errors import UsageError, csv_text, tell
from chopper.views import VIEWS, own_view, view
from chopper.wording import next_command

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.views import View
    from chopper.causes import Level


class _ViewName(shared.OneOf):
    """The name of a view, or the path of an SQL file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name or the path as it is."""
        return value if str(value).endswith(".sql") else super().convert(value, param, ctx)


def _list_views(context: click.Context, _: click.Parameter, name: str | None) -> str | None:
    """Print all views and end, for ``--view list``."""
    if name == "list" and not context.resilient_parsing:
        formatter = context.make_formatter()
        formatter.write_dl([(view.name, view.summary) for view in VIEWS.values()])
        click.echo(formatter.getvalue(), nl=False)
        context.exit()
    return name


@click.command("analyze", cls=shared.Command)
@shared.runs
@shared.read_options
@click.option(
    "--by",
    type=shared.OneOf("level", LEVELS),
    metavar="LEVEL",
    help="Regroup the same nanoseconds by cause (default), step, phase, layer, op, kernel or rank; "
    "or by pipeline, data, expert, context or tensor parallelism, summed over the ranks of one "
    "place. With `--view clocks`: print the rows of this level.",
)
@click.option(
    "--view",
    "view_name",
    type=_ViewName("view", (*VIEWS, "list")),
    metavar="NAME|FILE.sql",
    is_eager=True,
    callback=_list_views,
    help="Print one detailed table instead, see above, or that of your own SQL file; "
    "`chopper schema NAME` lists the columns of a view.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="Rows of --by or --view to print. [default: 20]",
)
@shared.as_json
@click.option("--csv", "as_csv", is_flag=True, help="Print a CSV table.")
def command(
    sources: tuple[str, ...],
    by: Level | None,
    view_name: str | None,
    top: int | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Attribute a run: where did every millisecond go?

    RUN is a run directory, a trace file, a glob, or a directory of traces; several traces of the
    same run are joined.

    With --by, --json adds "level" and "groups", the rows that --csv prints: one per value of the
    level (null for what has none), with "step_ns", the mean over ranks and steps, its part by leaf
    cause, "own_step_ns" (how long its device events themselves ran, without the waiting before
    them; null for steps, ranks and dimensions) and "time_ns", summed over ranks and steps.
    Where steps of several kinds were traced, all values
    cover those that the step time is taken from, and "all_kinds" in --json covers all of them.

    \b
    Views, the rest by --view list:
      steps, operators, operations, kernels, launches, collectives,
      exposed_communication, stragglers, memory, utilization

    \b
    Examples:
      chopper analyze runs/mine
      chopper analyze trace.json.gz --by kernel --top 40
      chopper analyze "traces/*.json.gz" --by rank
      chopper analyze "traces/*.json.gz" --layout tp=1,pp=2 --by pipeline
      chopper analyze trace.rpd --device mi300x
      chopper analyze runs/mine --by layer --json | jq .groups[0]
      chopper analyze runs/mine --view operations --csv > operations.csv
      chopper analyze runs/mine --view my_view.sql
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv are mutually exclusive: choose one")
    is_file = view_name is not None and view_name.endswith(".sql")
    own = own_view(Path(str(view_name))) if is_file else None
    declared = own or (None if view_name is None else VIEWS[view_name])
    if by is not None and declared is not None and "level" not in declared.arrow.names:
        raise UsageError(f"--by does not apply to --view {view_name}: choose one")
    kind = "json" if as_json else "csv" if as_csv else "text"
    attribution = shared.attributed(sources)
    if by is not None:
        attribution.check_level(by)
    if own is not None:
        from chopper.sql import run_view

        _print_view(*run_view(attribution, own, str(view_name)), by, top, kind)
    elif view_name is not None:
        _print_view(VIEWS[view_name], view(attribution, view_name), by, top, kind)
    elif as_json:
        print_json(to_json(attribution, by, top))
    elif as_csv:
        click.echo(to_csv(attribution, by, top), nl=False)
    else:
        print_text(attribution, by, top)
        command = next_command("chopper report {RUN}", RUN=[*sources, *shared.typed_read_options()])
        tell(f"next: {command}")


def _print_view(
    declared: View, table: pa.Table, level: Level | None, top: int | None, kind: str
) -> None:
    """Print a view, or its rows of one level; JSON and CSV hold all unless told, text 20."""
    if level is not None:
        import pyarrow.compute as pc

        of_level = table.filter(pc.field("level") == level)
        if table.num_rows and not of_level.num_rows:
            raise UsageError(f"--view {declared.name} has no rows by {level}")
        table = of_level
    if kind == "text":
        from chopper.reports.sections import view_page

        print_page(view_page(declared, table, top=top))
        return
    rows = (table if top is None else table.slice(0, top)).to_pylist()
    if kind == "csv":
        click.echo(_csv([table.column_names, *(row.values() for row in rows)]), nl=False)
        return
    document = {"schema": f"chopper.view.{declared.name}/{declared.version}", "rows": rows}
    if not rows:
        document["reason"] = declared.needs or None
    print_json(document)


def to_json(attribution: Attribution, by: Level | None, top: int | None) -> dict[str, Any]:
    """Return the documented form; with a level, its groups in their order."""
    from chopper.reports import document

    out = document(attribution)
    if by is not None:
        out["level"] = by
        out["groups"] = _table(attribution, by).slice(0, top).to_pylist()
        if out["all_kinds"] is not None:
            out["all_kinds"]["groups"] = _table(attribution.all_steps, by).slice(0, top).to_pylist()
    return out


def to_csv(attribution: Attribution, by: Level | None, top: int | None) -> str:
    """Return causes, a row each; with a level, a row per value and a column per leaf cause."""
    table = _table(attribution, by).slice(0, top)
    return _csv([table.column_names, *(row.values() for row in table.to_pylist())])


def _table(attribution: Attribution, by: Level | None) -> pa.Table:
    """Return the causes; with a level, the time by it."""
    from chopper.analyzers.replay.replay import recoverable, replay_or_reason
    from chopper.reports import tables

    if by is not None and by != "cause":
        return tables.by(attribution, by)[1]
    saving = recoverable(attribution, replay_or_reason(attribution))
    return tables.causes(attribution, saving, leaves=by == "cause")


def _csv(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV; control characters are escaped: it may go to a terminal."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow([_csv_cell(value) for value in row])
    return out.getvalue()


def _csv_cell(value: object) -> object:
    """Return a value as CSV shows it, in exports as well: ``true``, and no formula."""
    if isinstance(value, bool):
        return str(value).lower()
    return csv_text(value) if isinstance(value, str) else value


def print_text(attribution: Attribution, by: Level | None, top: int | None) -> None:
    """Write the attribution to stdout as text, as wide as the terminal."""
    from chopper.reports import run

    if by is None or by == "cause":
        print_page(run.page(attribution, "txt"))
    else:
        print_page(run.grouped(attribution, by, top=top))
