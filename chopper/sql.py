"""SQL over the tables and views of a run, by DuckDB: it only reads, and no files.

All tables and views are declared to DuckDB by their columns. Planning a statement tells which of
them it names, and only these are read or computed. Tables of a run directory are scanned where they
lie, rank by rank; those that exist only in traces are written to temporary files first, one rank
after another, so that memory does not grow with the ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.coordinates import with_coordinates
from chopper.analyzers.relations import RECORDED, connection, on_host, relation, schema_of
from chopper.analyzers.views import View
from chopper.attribution_cache import attribution_of, names_of
from chopper.engines import Serial
from chopper.errors import ChopperError, InputError, UsageError, printable
from chopper.hardware.ceilings import Stated
from chopper.ingest.recorded import filed_tables, read_rank
from chopper.ingest.sources import find
from chopper.storage import parquet
from chopper.storage.caches import scratch
from chopper.storage.files import inside
from chopper.storage.layout import is_run, rank_dir_name
from chopper.storage.parts import read_manifest
from chopper.storage.remote import here
from chopper.storage.run import OF_MANIFEST, Run
from chopper.storage.streams import read_stream
from chopper.tables import GROUPS, TABLES, ColumnType, optional
from chopper.views import VIEWS, relations, typed
from chopper.wording import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow.dataset as ds

    from chopper.engines import Engine
    from chopper.pipeline import Source
    from chopper.storage.manifest import Finding, RankManifest, RunManifest

_UNATTRIBUTED = RECORDED.union(OF_MANIFEST)
_TRACED = ("device_event", "host_span")
"""Tables of which a rank with a kernel trace has one."""
_ROWS_NAMED = re.compile(r"row\b|\bnatural\b", re.IGNORECASE)
_BATCH_ROWS = 10_000
_POSITION = re.compile(r"^LINE (\d{1,9}): (.*)\n( *)\^", re.MULTILINE)
_LINE_END = re.compile(r"\r\n|[\r\n]")
_NUMBERS = frozenset((
    *("boolean", "tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger"),
    *("ubigint", "hugeint", "float", "double", "decimal", "varchar", "null"),
))  # fmt: skip
"""DuckDB's types that read alike in a table, CSV and JSON."""
_IN_ARROW = _NUMBERS.union(
    ("blob", "date", "time", "time_ns", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns"),
    ("timestamp with time zone", "uuid", "enum"),
)
"""Types whose values Arrow and Parquet hold exactly."""
_MOST_NESTED = 50
VIEW_MEMORY_BYTES = 2_000_000_000
"""Memory of the query of a user's view."""


def schemas() -> dict[str, pa.Schema]:
    """Return the columns that SQL sees, by table and view."""
    tables = {name: schema_of(name) for name in TABLES}
    return tables | {name: parquet.plain(view.arrow) for name, view in VIEWS.items()}


@dataclass(frozen=True)
class Declaration:
    """A name of SQL: its columns, and whether it is a view of the attribution."""

    schema: pa.Schema
    view: bool


def declarations(
    source: Source, columns: Mapping[str, str] | None = None
) -> dict[str, Declaration]:
    """Return the tables and views that a run may have rows of, without reading its traces.

    Raises:
        InputError: there is nothing there, or not what it should be.
    """
    directory = _directory(source)
    names = {*OF_MANIFEST}
    traced = False
    if directory is not None:
        for part in read_manifest(directory).ranks:
            folder = inside(directory, rank_dir_name(part.rank))
            names.update(file.stem for file in folder.glob("*.arrow"))
            files = filed_tables(folder, part)
            names.update(files)
            traced = traced or bool(part.traces) or not files.keys().isdisjoint(_TRACED)
    else:
        sources = find([source] if isinstance(source, str | Path) else list(source), columns)
        names.update(t.name for t in GROUPS["telemetry"] if sources.logs or sources.runs)
        names.update(t.name for t in GROUPS["memory"] if sources.snapshots or sources.runs)
        traced = bool(sources.traces or sources.runs)
    if traced:
        names.update(VIEWS, *({t.name for t in GROUPS[group]} for group in ("trace", "analysis")))
    return {
        name: Declaration(schema, view=name in VIEWS)
        for name, schema in schemas().items()
        if name in names
    }


class _Declared:
    """A table that a statement may name; it has columns and no rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self.planned = False
        """Whether its columns were asked for."""

    def __arrow_c_schema__(self) -> object:
        self.planned = True
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._schema.empty_table().__arrow_c_stream__(requested_schema)


class Query:
    """One statement about one run: plan it, read what it names, take its rows.

    As a context manager it frees what it holds at the end.

    Args:
        source: a run or its attribution, or what names one.
        sql: one statement that reads.
        memory_bytes: what DuckDB may take for it.
        device: the device that the run was recorded on, or rank → device, as the user says.
        columns: which column of a table of spans is what, as the user says.
        layout: how the job was divided over its ranks, as the user says.
        engine: returns what reads and attributes a run that is named; by default this process.
        label: what errors call the statement.
    """

    def __init__(
        self,
        source: Run | Attribution | Source,
        sql: str,
        memory_bytes: int,
        *,
        device: Stated | None = None,
        columns: Mapping[str, str] | None = None,
        layout: str | None = None,
        engine: Callable[[], Engine] = Serial,
        label: str = "SQL",
    ) -> None:
        self._source = source
        self._label = label
        self._engine = engine
        self._stated: dict[str, Any] = {"device": device, "columns": columns, "layout": layout}
        self._sql = sql
        self._memory_bytes = memory_bytes
        self._connection = connection(memory_bytes)
        self._files_held = contextlib.ExitStack()
        self._folder = cache(lambda: self._files_held.enter_context(scratch("query")))
        self.names: list[str] = []
        """Tables and views that the statement names, once it is planned."""
        self.findings: list[Finding] = []
        """What was wrong with files that were read for it."""
        self.interrupt: Callable[[], None] = self._connection.interrupt
        """Ends the statement, from another thread."""

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what it holds, temporary files included; safe to call twice."""
        self._connection.close()
        self.abandon()

    def abandon(self) -> None:
        """Delete temporary files, though the statement still runs: the process is about to end."""
        self._files_held.close()

    def delete_at_end(self, file: Path) -> None:
        """Have a temporary file deleted with those of the query."""
        self._files_held.callback(file.unlink, missing_ok=True)

    def plan(self) -> None:
        """Check the statement, and find what it names.

        Raises:
            UsageError: it has an error, names what there is not, or would do more than read.
            InputError: planning needs more memory, or was interrupted.
        """
        declared = {name: _Declared(schema) for name, schema in schemas().items()}
        for name, table in declared.items():
            self._connection.register(name, table)
            table.planned = False
        try:
            self._sql.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(f"{self._label}: is not UTF-8") from exc
        with self._errors():
            statements = self._connection.extract_statements(self._sql)
        kinds = [_kind(statement) for statement in statements]
        if kinds != ["SELECT"]:
            remedy = "; PIVOT needs its values: ON c IN ('a', 'b')" if "MULTI" in kinds else ""
            raise UsageError(
                f"{self._label}: found {', '.join(kinds) or 'nothing'}, expected one statement "
                f"that reads (SELECT, WITH, FROM, DESCRIBE, SUMMARIZE){remedy}"
            )
        with self._errors(lines_before=1):
            self._connection.execute(f"EXPLAIN\n{self._sql}").fetchall()
        self.names = [name for name, table in declared.items() if table.planned]

    def read(self) -> dict[str, int | None]:
        """Read or compute what the statement names; return the rows of each, None if not known.

        Raises:
            InputError: the run or its traces cannot be read.
        """
        rows: dict[str, int | None] = {}
        for name, table in self._tables().items():
            self._connection.register(name, table)
            rows[name] = table.num_rows if isinstance(table, pa.Table) else None
        return rows

    def batches(self, *, readable: bool = False) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Run the statement: its columns, and its rows as they come.

        Args:
            readable: values other than numbers and texts, such as times, are DuckDB's text of them.

        Raises:
            InputError: it needs more memory, or was interrupted.
            UsageError: it fails, by a division by zero or the like.
        """
        kept = _NUMBERS if readable else _IN_ARROW
        with self._errors():
            result = self._connection.sql(self._sql)
            columns = result.columns
            casts = [_cast(kind, kept) for kind in result.types]
        if any(casts):
            each = ", ".join(f"#{n}{cast}" for n, cast in enumerate(casts, 1))
            with self._errors(lines_before=1):
                result = self._connection.sql(f"SELECT {each} FROM (\n{_unended(self._sql)}\n)")
        with self._errors(lines_before=1 if any(casts) else 0):
            reader = result.to_arrow_reader(_BATCH_ROWS)
        names: dict[str, None] = {}
        for name in columns:
            numbers = itertools.count(1)
            unique = name
            while unique in names:
                unique = f"{name}_{next(numbers)}"
            names[unique] = None
        kinds = map(_number, reader.schema.types)
        schema = pa.schema([pa.field(n, k) for n, k in zip(names, kinds, strict=True)])
        return schema, self._converted(reader, schema)

    def _converted(
        self, reader: pa.RecordBatchReader, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Return batches with the names and types of a result."""
        while True:
            with self._errors():
                batch = next(reader, None)
            if batch is None:
                return
            try:
                columns = [c.cast(f.type) for c, f in zip(batch.columns, schema, strict=True)]
            except pa.ArrowInvalid as exc:
                raise UsageError(
                    f"{self._label}: {exc}: more than 64 bits can hold; cast it: sum(x)::DOUBLE"
                ) from exc
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    @contextlib.contextmanager
    def _errors(self, *, lines_before: int = 0) -> Iterator[None]:
        """Raise DuckDB's errors as lines of ours."""
        import duckdb

        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError, MemoryError) as exc:
            raise self._error(str(exc) or "Out of Memory Error", lines_before) from exc

    def _error(self, said: str, lines_before: int) -> ChopperError:
        """Return an error in one line: where in the SQL, and what."""
        kind, _, message = said.partition(": ")
        lines = itertools.takewhile(lambda line: not line.startswith("LINE "), message.splitlines())
        text = printable(" ".join(filter(None, map(str.strip, lines))) or said)
        if "Out of Memory" in kind or "realloc" in said or "allocat" in text:
            return InputError(
                f"{self._label}: needs more memory than {self._memory_bytes / 1e9:g} GB "
                "(--memory): raise it, or read fewer rows and columns, and group before sorting or "
                "joining"
            )
        if "INTERRUPT" in kind:
            return InputError(f"{self._label}: interrupted")
        where = self._label
        if (position := _POSITION.search(said)) is not None:
            where = self._place(position, lines_before) or where
        if "Permission" in kind:
            text = f"{text}; SQL reads the tables of the run and no files"
        word = re.search(r'syntax error at or near "(\w+)"', text)
        if word is not None and word[1].lower() in TABLES:
            text += f"; a table of this name stands in quotes: '\"{word[1]}\"'"
        return UsageError(f"{where}: {text}")

    def _place(self, position: re.Match[str], lines_before: int) -> str | None:
        """Return where in the SQL an error is; None if DuckDB shows another text."""
        line = int(position[1]) - lines_before
        lines = _LINE_END.split(self._sql)
        # Of a long line DuckDB shows a part, behind three dots.
        shown = position[2].removeprefix("...").removesuffix("...")
        if not 0 < line <= len(lines) or (before := lines[line - 1].find(shown)) < 0:
            return None
        column = before + len(position[3]) - len(f"LINE {position[1]}: ")
        column -= 3 if position[2].startswith("...") else 0
        return f"{self._label}, line {line}, column {column + 1}"

    def _tables(self) -> Mapping[str, pa.Table | ds.Dataset]:
        """Return what the statement names, with its rows."""
        source, attributes = self._source, not _UNATTRIBUTED.issuperset(self.names)
        directory = None if isinstance(source, Run | Attribution) else _directory(source)
        if directory is not None and not attributes and not any(self._stated.values()):
            return self._scanned(directory)
        if isinstance(source, Run):
            source = pipeline.attribute(source, self._engine()) if attributes else source
        elif not isinstance(source, Attribution) and not attributes:
            source = pipeline.read(source, self._engine(), **self._stated)
        elif not isinstance(source, Attribution):
            named = source  # as it was named, by which an earlier command kept it
            source = attribution_of(
                names_of(named),
                lambda: pipeline.attribute(named, self._engine(), **self._stated),
                *(None, None, *self._stated.values()),
            )
        if not isinstance(source, Attribution):
            return {name: relation(source, name) for name in self.names}
        large = _large(source.recording)
        _check_rows(large, self.names, self._sql)
        if not large or directory is None:
            return relations(source, self.names)
        attributed = [name for name in self.names if name not in RECORDED]
        return {**self._scanned(directory), **relations(source, attributed)}

    def _scanned(self, directory: Path) -> dict[str, pa.Table | ds.Dataset]:
        """Return tables of a run directory, which are read as DuckDB scans them."""
        try:
            str(directory).encode()
        except UnicodeEncodeError:  # Arrow opens no such path
            directory, named = self._folder() / "run", directory
            directory.symlink_to(named.resolve(), target_is_directory=True)
        manifest = with_coordinates(read_manifest(directory))
        tables: dict[str, pa.Table | ds.Dataset] = {}
        for name, files in self._files(directory, manifest).items():
            empty = parquet.schema_of(name).empty_table()
            tables[name] = parquet.scan(name, files) if files else empty
        for name in OF_MANIFEST.keys() & {*self.names}:
            tables[name] = OF_MANIFEST[name](manifest)
        return tables

    def _files(self, directory: Path, manifest: RunManifest) -> dict[str, dict[Path, int]]:
        """Return the Parquet files of each table with their ranks; those missing are written."""
        names = [name for name in self.names if name in RECORDED]
        files: dict[str, dict[Path, int]] = {name: {} for name in names}
        for part in manifest.ranks if names else ():
            folder = inside(directory, rank_dir_name(part.rank))
            for name, table in self._tables_of(folder, part, names).items():
                if isinstance(table, Path):
                    files[name][table] = part.rank
                elif table.num_rows:
                    file = self._folder() / f"{name}-{part.rank}{parquet.SUFFIX}"
                    rows = parquet.numbered(table, name, part.rank)
                    parquet.write(rows.cast(parquet.schema_of(name)), file)
                    files[name][file] = part.rank
        return files

    def _tables_of(
        self, folder: Path, part: RankManifest, names: Sequence[str]
    ) -> dict[str, Path | pa.Table]:
        """Return the tables of a rank: the file where there is one, else the table."""
        tables: dict[str, Path | pa.Table] = {}
        written = filed_tables(folder, part)
        traced: Mapping[str, pa.Table] | None = None if not written else {}
        wanted = dict.fromkeys(names)
        if "device_event" in wanted and "device_event" not in written:
            wanted["host_span"] = None  # on a host alone it stands in
        for name in wanted:
            stream = inside(folder, f"{name}.arrow")
            if name in written:
                tables[name] = written[name]
                parquet.check(written[name], name)
            elif not written and stream.is_file():
                tables[name], finding = read_stream(stream, name)
                self.findings += [] if finding is None else [finding]
            else:
                if traced is None:
                    complete, traced = read_rank(folder, part)
                    self.findings += [f for f in complete.findings if f not in part.findings]
                tables[name] = traced.get(name, TABLES[name].empty())
        events = tables.get("device_event")
        if isinstance(events, pa.Table) and not events.num_rows:
            spans = tables["host_span"]
            spans = parquet.read(spans, "host_span") if isinstance(spans, Path) else spans
            tables["device_event"] = on_host(spans)
        return {name: tables[name] for name in names}


def _kind(statement: Any) -> str:
    """Return the kind of a statement; DuckDB parses some that its Python library cannot name."""
    try:
        return str(statement.type.name)
    except ValueError:
        return "a statement of another kind"


def _unended(sql: str) -> str:
    """Return a statement without the semicolons and comments at its end."""
    import duckdb

    text = sql.encode()
    for start, kind in reversed(duckdb.tokenize(sql)):
        if text[start : start + 1] != b";" and kind != duckdb.token_type.comment:
            break
        text = text[:start]
    return text.decode()


def _cast(kind: Any, kept: Collection[str]) -> str:
    """Return what makes DuckDB's text of the values of a type, "" for types that are kept.

    Of lists, structs and maps, the values in them become texts.
    """
    wanted = _readable(kind, kept, 0)
    return "" if wanted == str(kind) else f"::{wanted}"


def _readable(kind: Any, kept: Collection[str], depth: int) -> str:
    if kind.id in kept:
        return str(kind)
    if depth < _MOST_NESTED and kind.id in ("list", "array", "struct", "map"):
        children = dict(kind.children)
        size = children.pop("size", "") if kind.id == "array" else ""
        names = [f'"{name.replace(chr(34), chr(34) * 2)}" ' for name in children]
        inner = [_readable(child, kept, depth + 1) for child in children.values()]
        if kind.id in ("list", "array"):
            return f"{inner[0]}[{size}]"
        if kind.id == "map":
            return f"MAP({', '.join(inner)})"
        fields = ", ".join(name + child for name, child in zip(names, inner, strict=True))
        changed = inner != [str(child) for child in children.values()]
        return f"STRUCT({fields})" if changed else str(kind)
    return "VARCHAR"


def _number(kind: pa.DataType) -> pa.DataType:
    """Return the type of a result's column: DuckDB's decimals become what all programs know."""
    if pa.types.is_decimal(kind):
        return pa.float64() if kind.scale else pa.int64()
    return kind


def _directory(source: Source) -> Path | None:
    """Return the run directory that is named; None for traces."""
    named = here([source] if isinstance(source, str | Path) else list(source))
    return Path(named[0]) if len(named) == 1 and is_run(Path(named[0])) else None


def _large(recording: Run) -> list[int]:
    """Return the ranks that are so large that their events are attributed a stretch at a time."""
    return [rank for rank in recording.ranks if recording.tables.stretches(rank)]


def _check_rows(large: Sequence[int], names: Sequence[str], sql: str) -> None:
    """Refuse to join tables whose rows are counted in a stretch with those of the whole trace.

    By their times they may be joined: the statement then names no column of rows.

    Raises:
        InputError: it names one, and there are ``large`` ranks.
    """
    counted = {"event_link", "piece", "gap", "communication", "critical_path_timeline"}
    of_stretch = sorted(counted.intersection(names))
    of_whole = sorted(RECORDED.intersection(names))
    if large and of_stretch and of_whole and _ROWS_NAMED.search(sql):
        raise InputError(
            f"SQL: rank {ranges(large)} is too large to be held: rows are counted in the stretch "
            f"of steps that is looked at closely in {', '.join(of_stretch)}, and in the whole "
            f"trace in {', '.join(of_whole)}; join them by rank and time, query them apart, or "
            "record fewer steps"
        )


def run_view(run: Attribution, view: View, path: str) -> tuple[View, pa.Table]:
    """Run the view of a user's file; undeclared columns follow those that it declares.

    Raises:
        InputError: the query needs too much memory.
        UsageError: the query has an error.
        SchemaError: the query does not return what the file declares.
    """
    with Query(run, view.sql, VIEW_MEMORY_BYTES, label=path) as query:
        query.plan()
        query.read()
        schema, batches = query.batches(readable=True)
        table = pa.Table.from_batches(batches, schema)
    declared = {column.name for column in view.columns}
    more = [
        optional(field.name, "", _column_type(field.type))
        for field in table.schema
        if field.name not in declared
    ]
    view = replace(view, columns=(*view.columns, *more))
    return view, typed(table, view, path)


def _column_type(kind: pa.DataType) -> ColumnType:
    """Return the declared type that holds the values of a result's column."""
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int64"
    return "float64" if pa.types.is_floating(kind) else "string"
