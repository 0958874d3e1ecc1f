"""``chopper query``: SQL over the tables and views of a run."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
import threading
from collections import deque
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

import click

from chopper.addresses import is_address
from chopper.cli import _shared as shared
from chopper.cli._options import Quantity
from chopper.cli.output import progress, terminal_width
from chopper.errors import (
    InputError,
    OutputError,
    UsageError,
    csv_text,
    json_text,
    printable,
    reason_of,
    say,
    tell,
)
from chopper.quantities import seconds, size_bytes
from chopper.wording import next_command, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from msgspec.json import Encoder

    from chopper.engines import Engine
    from chopper.sql import Query

    _Format = Literal["table", "csv", "json", "parquet"]

_Result = TypeVar("_Result")
_SUFFIXES: dict[str, _Format] = {
    ".txt": "table",
    ".csv": "csv",
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    ".parquet": "parquet",
}
_ROWS = 100
_GRACE_S = 1.0
"""Time in which a statement that was interrupted ends by itself; few functions look up."""
_SLACK_BYTES = 512 << 20
"""What Arrow and the interpreter may take next to DuckDB."""


@click.command("query", cls=shared.Command)
@click.argument(
    "sources", metavar="RUN... [SQL]", nargs=-1, required=True, shell_complete=shared.paths
)
@shared.read_options
@click.option("--file", "file", metavar="FILE", help="Read the SQL from a file; - is stdin.")
@click.option(
    "--format",
    "kind",
    type=shared.OneOf("format", dict.fromkeys(_SUFFIXES.values())),
    metavar="[table|csv|json|parquet]",
    help="json prints one object per line.  [default: as -o ends, else table]",
)
@shared.output("File for the result: .txt, .csv, .json, .jsonl or .parquet.")
@shared.force("Replace the file when it exists.")
@click.option(
    "--top", type=click.IntRange(min=1), metavar="N", help=f"Rows of a table.  [default: {_ROWS}]"
)
@shared.engines("workers", "ray")
@click.option(
    "--memory",
    "memory_bytes",
    type=Quantity("size", size_bytes, str),
    metavar="SIZE",
    default="2GB",
    show_default=True,
    help="Memory of the SQL engine.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Quantity("time", seconds, str),
    metavar="TIME",
    default="10min",
    show_default=True,
    help="Time for the SQL; reading traces does not count.",
)
def command(
    sources: tuple[str, ...],
    file: str | None,
    kind: _Format | None,
    output: Path | None,
    force: bool,
    top: int | None,
    memory_bytes: int,
    timeout_s: float,
) -> None:
    """Run SQL over the recorded tables and the views of a run; without SQL, list them.

    RUN is a run directory, a trace file, a glob, or a directory of traces. SQL is one statement
    that reads, in DuckDB's dialect; it can neither read nor write files. Only the tables that it
    names are read or computed. Tables of single ranks have the columns rank and row before their
    own (`chopper schema NAME`). Tables cover all traced steps; views cover those that the
    step time is taken from, which `selection` names.

    \b
    Examples:
      chopper query runs/mine
      chopper query runs/mine "SELECT rank, count(*) FROM device_event GROUP BY 1"
      chopper query trace.json.gz "FROM kernels LIMIT 5" --format csv
      chopper query runs/mine "FROM stragglers" -o stragglers.parquet
    """
    sql, named = _statement(sources, file)
    if sql is None:
        _list(named, kind)
        return
    if output is not None:
        _check_output(output, named, force=force)
        kind = kind or _SUFFIXES.get(output.suffix.lower())
        if kind is None:
            raise UsageError(
                f"{output}: unknown extension; use one of {', '.join(_SUFFIXES)}, or pass --format"
            )
    elif kind == "parquet":
        raise UsageError("--format parquet writes a file: name it with -o")
    from chopper.sql import Query
    from chopper.storage.remote import files_of

    counted: deque[str] = deque([""], maxlen=1)

    def engine() -> Engine:
        return shared.engine_for(files_of(named, counted.append), counted)

    with Query(list(named), sql, memory_bytes, **shared.read_facts(), engine=engine) as query:
        with _limited(memory_bytes):
            _bounded(query, query.plan, timeout_s)
        _read(query, counted)
        with _limited(memory_bytes):
            _bounded(query, lambda: _answer(query, kind or "table", output, top), timeout_s)
    if output is not None:
        tell(f"written: {output}")


def _statement(sources: tuple[str, ...], file: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Tell the SQL, None without any, from what names the run."""
    if file is not None:
        try:
            if file == "-":
                return sys.stdin.read(), sources
            return Path(file).read_text(encoding="utf-8"), sources
        except (OSError, UnicodeError) as exc:
            why = reason_of(exc) if isinstance(exc, OSError) else "it is not UTF-8"
            raise InputError(f"{file}: cannot be read ({why})") from exc
    *named, last = sources
    if last.endswith(".sql"):
        raise UsageError(f"{last}: SQL comes from a file with --file {quoted(last)}")
    # A statement has several words, and is no file.
    if os.path.lexists(last) or is_address(last) or len(last.split()) == 1:
        return None, sources
    if not named:
        raise UsageError("no run: name a run directory or traces before the SQL")
    return last, tuple(named)


def _check_output(output: Path, sources: tuple[str, ...], *, force: bool) -> None:
    from chopper.ingest import check_page

    if output.is_dir() or not output.parent.is_dir():
        raise OutputError(f"{output}: is no file in a directory that exists; choose another -o")
    if output.exists() and not force:
        raise OutputError(f"{output}: exists; pass --force to replace it, or choose another -o")
    check_page(output, sources)


def _list(sources: tuple[str, ...], kind: _Format | None) -> None:
    """Print the tables and views that SQL can name, with their columns."""
    from chopper.sql import declarations
    from chopper.storage.remote import here

    counted: deque[str] = deque([""], maxlen=1)
    with progress("looking for the run", counted):
        here(sources, counted.append)
    declared = declarations(list(sources), shared.mapped())
    if kind == "json":
        for name, table in declared.items():
            columns = [{"name": field.name, "type": str(field.type)} for field in table.schema]
            _write_json(sys.stdout, [{"name": name, "view": table.view, "columns": columns}])
        return
    for title, views in (("Tables", False), ("Views, computed when SQL names them", True)):
        out = click.HelpFormatter(width=terminal_width())
        with out.section(title):
            chosen = {n: t for n, t in declared.items() if t.view is views}
            out.write_dl([(n, ", ".join(t.schema.names)) for n, t in chosen.items()], col_max=24)
        click.echo(out.getvalue(), nl=False)
    words = f'chopper query {{RUN}} "SELECT * FROM {next(iter(declared))}"'
    tell(f"next: {next_command(words, RUN=sources)}")


def _read(query: Query, counted: deque[str]) -> None:
    """Read the tables of a statement; name those that are damaged or empty."""
    from chopper.storage.remote import in_addresses

    with progress(f"reading {', '.join(query.names) or 'nothing'}", counted):
        rows = query.read()
    for finding in query.findings:
        if finding.severity != "info":
            say(f"{finding.severity}: {in_addresses(finding.message)}")
    empty = [name for name, count in rows.items() if count == 0]
    if empty:
        say(f"this run has no recording of {', '.join(empty)}")


def _bounded(query: Query, work: Callable[[], _Result], timeout_s: float) -> _Result:
    """Return what ``work`` returns, or end it: after a time, or when the user interrupts.

    It runs in another thread: few of DuckDB's functions look up, and the process ends without
    those that do not.

    Raises:
        InputError: it took too long.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:  # noqa: BLE001
            errors.append(exc)
        finally:
            done.set()

    threading.Thread(target=run, name="chopper-query", daemon=True).start()
    late: BaseException
    try:
        if done.wait(timeout_s):
            if errors:
                raise errors[0]
            return results[0]
        late = InputError(
            f"SQL: took longer than {timeout_s:g} s (--timeout): raise it, or read fewer rows"
        )
    except (KeyboardInterrupt, SystemExit) as exc:
        late = exc
    query.interrupt()
    if not done.wait(_GRACE_S):
        query.abandon()
        is_error = isinstance(late, InputError)
        say(str(late) if is_error else "interrupted")
        sys.stdout.flush()
        os._exit(1 if is_error else getattr(late, "code", 130))
    raise late


@contextlib.contextmanager
def _limited(memory_bytes: int) -> Iterator[None]:
    """Limit this process to its present memory and that much more: DuckDB counts only a part."""
    status = Path("/proc/self/status")
    if not status.is_file():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    limit = int(lines["VmData"].split()[0]) * 1024 + memory_bytes + _SLACK_BYTES
    if soft in (resource.RLIM_INFINITY, -1) or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _answer(query: Query, kind: _Format, output: Path | None, top: int | None) -> None:
    """Write the rows of a statement as they come; a file is there as a whole or not at all."""
    schema, batches = query.batches(readable=kind != "parquet")
    if output is None:
        _print(schema, batches, kind, sys.stdout, top)
        return
    from chopper.storage.files import create

    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    query.delete_at_end(temporary)
    import pyarrow as pa

    try:
        if kind == "parquet":
            import pyarrow.parquet as pq

            with create(temporary) as file, pq.ParquetWriter(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        else:
            with io.TextIOWrapper(create(temporary), encoding="utf-8", newline="") as text:
                _print(schema, batches, kind, text, top)
        temporary.replace(output)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as exc:
        raise UsageError(f"SQL: {exc}; cast that column, for example to VARCHAR") from exc
    except OSError as exc:
        raise OutputError(f"{output}: cannot be written ({reason_of(exc)})") from exc


def _print(
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    kind: _Format,
    file: IO[str],
    top: int | None,
) -> None:
    """Write rows as text."""
    if kind == "table":
        file.write(_table(schema, batches, top or _ROWS))
    elif kind == "csv":
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(csv_text, schema.names))
        for batch in batches:
            columns = [map(_csv_cell, column.to_pylist()) for column in batch.columns]
            writer.writerows(zip(*columns, strict=True))
    else:
        for batch in batches:
            _write_json(file, batch.to_pylist())
    file.flush()


def _write_json(file: IO[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows, an object and a line each."""
    encoder = _encoder()
    file.writelines(json_text(encoder.encode(row).decode()) + "\n" for row in rows)


@cache
def _encoder() -> Encoder:
    """Return what writes values as JSON; of types that JSON lacks, their text."""
    from msgspec.json import Encoder

    return Encoder(enc_hook=str, decimal_format="number")


def _csv_cell(value: object) -> object:
    """Return a value for CSV."""
    return csv_text(value) if isinstance(value, str) else _cell(value)


def _cell(value: object) -> object:
    """Return a value for a table; control characters are escaped: it may go to a terminal."""
    if isinstance(value, list | dict):
        return json_text(_encoder().encode(value).decode())
    if isinstance(value, bool):
        return str(value).lower()
    return printable(value) if isinstance(value, str) else value


def _table(schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> str:
    """Return the first rows as a table, as wide as the terminal."""
    import pyarrow as pa

    from chopper.reports import to_text
    from chopper.reports.page import Column, Page, Table
    from chopper.wording import UNKNOWN

    taken: list[pa.RecordBatch] = []
    for batch in batches:
        taken.append(batch)
        if sum(b.num_rows for b in taken) > rows:
            break
    table = pa.Table.from_batches(taken, schema)

    def text(value: object) -> str:
        if value is None:
            return UNKNOWN
        return f"{value:.6g}" if isinstance(value, float) else str(_cell(value))

    cells = [map(text, column.to_pylist()) for column in table.slice(0, rows).columns]
    columns = [
        Column(f.name, "number" if str(f.type).startswith(("int", "uint", "double")) else "name")
        for f in schema
    ]
    more = "… more rows (--top N; --format csv or json prints all)"
    grid = Table(
        columns=columns,
        rows=[*zip(*cells, strict=True)],
        rest=more if table.num_rows > rows else "" if table.num_rows else "No rows.",
    )
    page = Page(title="", headline="", summary=(grid,))
    return to_text.render(page, width=terminal_width()).lstrip("\n")
