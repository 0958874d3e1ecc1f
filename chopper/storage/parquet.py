"""Tables of ranks as Parquet files that any reader understands.

``rank-00000/<table>.parquet`` has the declared columns after two that make the files of all ranks
one table: ``rank``, and ``row``, by which tables name each other's rows. Texts are plain strings,
and the schema is the same in every rank's file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper.errors import InputError, OutputError, SchemaError, reason_of
from chopper.storage.files import create, inside
from chopper.storage.streams import arrow_errors, check_batch, one_line
from chopper.tables import TABLES
from chopper.tables.ranges import TIME_MOST_NS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

SUFFIX = ".parquet"
_ROW_GROUP = 1 << 18
_ROWS_OF_THREADS = 100_000


def plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema with plain strings in place of dictionaries, which not all readers know."""
    fields = [
        pa.field(f.name, pa.string(), f.nullable) if pa.types.is_dictionary(f.type) else f
        for f in schema
    ]
    return pa.schema(fields, metadata=schema.metadata)


def schema_of(name: str) -> pa.Schema:
    """Return the schema of a rank's table in a file: ``rank``, ``row``, the declared columns."""
    declared = TABLES[name].arrow
    numbers = [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
    ]
    # The rank of a process that a sampler saw is the row's own.
    added = [f for f in numbers if f.name not in declared.names]
    return plain(pa.schema([*added, *declared], metadata=declared.metadata))


def numbered(table: pa.Table, name: str, rank: int, first_row: int = 0) -> pa.Table:
    """Return a rank's table, or its rows from one on, with the columns that its file has."""
    row = np.arange(first_row, first_row + table.num_rows, dtype=np.int64)
    values = {
        "rank": pa.repeat(pa.scalar(rank, pa.int32()), table.num_rows),
        "row": pa.Array.from_buffers(pa.int64(), len(row), [None, pa.py_buffer(row)]),
    }
    names, every = table.column_names, schema_of(name).names
    columns = [table[n] if n in names else values[n] for n in every]
    return pa.table(columns, names=every).replace_schema_metadata(schema_of(name).metadata)


class Writer:
    """Writes a Parquet file as a whole: under its own name there is never a part of one.

    As a context manager it gives the file its name at the end, unless there was an error.

    Raises:
        OutputError: the disk is full, or the place is read-only.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.rows_count = 0
        """Rows written so far."""

    def __enter__(self) -> Writer:
        import pyarrow.parquet as pq

        texts = [f.name for f in self._schema if pa.types.is_string(f.type)]
        times = [f.name for f in self._schema if f.type == pa.int64()]
        with self._errors():
            # Opened here: pyarrow takes no paths other than UTF-8.
            self._file = create(self._temporary)
            self._writer = pq.ParquetWriter(
                self._file,
                self._schema,
                compression="zstd",
                use_dictionary=texts,
                column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
            )
        return self

    def write(self, table: pa.Table) -> None:
        """Write rows behind those that are there, as row groups of their own."""
        with self._errors():
            self._writer.write_table(table, row_group_size=_ROW_GROUP)
        self.rows_count += table.num_rows

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        try:
            with self._errors(), self._file:
                self._writer.close()
            if kind is None:
                with self._errors():
                    self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self._temporary.unlink(missing_ok=True)
            raise OutputError(f"{self._path}: cannot be written ({reason_of(exc)})") from exc


def write(table: pa.Table, path: Path) -> None:
    """Write a Parquet file.

    Raises:
        OutputError: the disk is full, or the place is read-only.
    """
    with Writer(path, table.schema) as file:
        file.write(table)


class TablesWriter:
    """Writes the tables of a rank into its folder, in parts or whole; those that have rows.

    As a context manager it gives the files their names at the end, unless there was an error.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._writers: dict[str, Writer] = {}
        self._files = contextlib.ExitStack()

    def __enter__(self) -> TablesWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def rows_count(self, name: str) -> int:
        """Return how many rows of a table are written."""
        return self._writers[name].rows_count if name in self._writers else 0

    def write(self, name: str, table: pa.Table) -> None:
        """Write rows of a table behind those that are there."""
        if not table.num_rows:
            return
        if name not in self._writers:
            path = self._folder / f"{name}{SUFFIX}"
            self._writers[name] = self._files.enter_context(Writer(path, schema_of(name)))
        for first in range(0, table.num_rows, _ROW_GROUP):
            part = table.slice(first, _ROW_GROUP)
            rows = numbered(part, name, self._rank, self.rows_count(name))
            self._writers[name].write(rows.cast(schema_of(name)))


def files(folder: Path) -> dict[str, Path]:
    """Return the Parquet files in a rank's folder, by table."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    return {
        file.stem: inside(folder, file.name)
        for file in entries
        if file.suffix == SUFFIX and file.stem in TABLES
    }


def _opened(path: Path) -> pa.NativeFile:
    """Open a file such that Arrow's threads never wait for Python, which may be about to end.

    One that did is ended by Python with the process, by SIGABRT.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device, which would be waited for.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("is not a regular file")
    try:
        return pa.OSFile(os.fspath(path))
    except UnicodeEncodeError:  # Arrow opens no such path
        return pa.PythonFile(path.open("rb"))


def read(path: Path, name: str, ranges: np.ndarray | None = None) -> pa.Table:
    """Read a table of a rank as it was declared.

    Args:
        path: the file.
        name: of the table.
        ranges: rows to read, ascending, as (first, one after the last); by default all.

    Raises:
        InputError: the file is damaged, or not this table.
    """
    with _damage(path), _opened(path) as file:
        opened = _table_file(file, name)
        # Threads cost more than a small table, of which a large run has many.
        is_large = opened.metadata.num_rows > _ROWS_OF_THREADS
        table = opened.read(use_threads=is_large) if ranges is None else _rows(opened, ranges)
        return _checked(table, name, 0 if ranges is None else None)[0]


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Say of a file what reading it raises."""
    damage: tuple[type[Exception], ...] = (SchemaError, *arrow_errors())
    try:
        yield
    except damage as exc:
        raise _unreadable(path, exc) from exc


def _table_file(file: pa.NativeFile, name: str) -> pq.ParquetFile:
    """Open the file of a table, texts as dictionaries where so declared."""
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(file)
    there = opened.schema_arrow  # an older file lacks columns of today
    TABLES[name].check_names(there)
    declared = [c.name for c in TABLES[name].columns if c.type == "string"]
    texts = [c for c in declared if c in there.names and there.field(c).type == pa.string()]
    if texts:
        opened = pq.ParquetFile(file, metadata=opened.metadata, read_dictionary=texts)
    return opened


def _declared(table: pa.Table, name: str) -> pa.Table:
    """Return rows of a file as they were declared, without ``rank`` and ``row``."""
    declared = TABLES[name]
    names = [name for name in declared.arrow.names if name in table.column_names]
    return declared.completed(table.select(names).replace_schema_metadata(table.schema.metadata))


def _checked(
    table: pa.Table, name: str, first_row: int | None, after_ns: int = -TIME_MOST_NS
) -> tuple[pa.Table, int]:
    """Return rows of a file as they were declared, and the time of the last.

    This is the one check of tables that others may have written: every reader goes through it.

    Args:
        table: the rows, with all columns of the file.
        name: of the table.
        first_row: number of the first; None for rows from several places.
        after_ns: time of the row before them.
    """
    for batch in table.to_batches():
        check_batch(batch)
    if first_row is not None and "row" not in TABLES[name].arrow.names:
        row = table["row"] if "row" in table.column_names else None
        if (
            row is None
            or row.type != pa.int64()
            or row.null_count
            or (row.to_numpy() != np.arange(first_row, first_row + table.num_rows)).any()
        ):
            raise SchemaError(f"table {name}: column row does not count the rows")
    table = _declared(table, name)
    return table, TABLES[name].check_values(table, after_ns)


def _rows(file: pq.ParquetFile, ranges: np.ndarray) -> pa.Table:
    """Read some rows: of the row groups that hold them, one after another."""
    parts: list[pa.Table] = []
    first = 0
    for number in range(file.num_row_groups):
        after = first + file.metadata.row_group(number).num_rows
        inside = ranges[(ranges[:, 0] < after) & (ranges[:, 1] > first)].clip(first, after) - first
        if len(inside):
            edges = np.zeros(after - first + 1, dtype=np.int32)
            np.add.at(edges, inside[:, 0], 1)
            np.add.at(edges, inside[:, 1], -1)
            bits = pa.py_buffer(np.packbits(np.cumsum(edges[:-1]) > 0, bitorder="little"))
            mask = pa.Array.from_buffers(pa.bool_(), after - first, [None, bits])
            parts.append(file.read_row_group(number).filter(mask))
        first = after
    return pa.concat_tables([file.schema_arrow.empty_table(), *parts]).combine_chunks()


def blocks(path: Path, name: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a table's file, some rows at a time; texts as dictionaries.

    Raises:
        InputError: the file is damaged.
    """
    with _damage(path), _opened(path) as file:
        after_ns = -TIME_MOST_NS
        opened = _table_file(file, name)
        _declared(opened.schema_arrow.empty_table(), name)
        if missing := {*columns}.difference(opened.schema_arrow.names):
            raise SchemaError(f"table {name}: column {min(missing)} is missing")
        for block in opened.iter_batches(_ROW_GROUP, columns=columns):
            after_ns = TABLES[name].check_values(pa.Table.from_batches([block]), after_ns)
            yield block


def row_groups(path: Path, name: str) -> Iterator[pa.Table]:
    """Yield a table of a rank as it was declared, some rows at a time.

    Raises:
        InputError: the file is damaged, or not this table.
    """
    for first in range(0, rows_count(path), _ROW_GROUP):
        yield read(path, name, np.array([[first, first + _ROW_GROUP]]))


def check(path: Path, name: str) -> None:
    """Check the file of a table as reading it does, some rows at a time.

    Raises:
        InputError: it is damaged, not this table, or holds times that no clock shows.
    """
    with _damage(path), _opened(path) as file:
        first_row, after_ns = 0, -TIME_MOST_NS
        opened = _table_file(file, name)
        empty = opened.schema_arrow.empty_table()
        for block in itertools.chain(empty.to_batches(), opened.iter_batches(_ROW_GROUP)):
            rows = pa.Table.from_batches([block])
            _, after_ns = _checked(rows, name, first_row, after_ns)
            first_row += block.num_rows


class _Tables(dict[str, pa.Table]):
    """Tables by name, each read when it is asked for first."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __missing__(self, name: str) -> pa.Table:
        return self.setdefault(name, read(self._files[name], name))


@dataclass(frozen=True)
class FiledTables:
    """Tables of a rank that stay in their files, by name.

    Attributes:
        keeper: whoever removes the files; not of another process.
    """

    files: Mapping[str, Path]
    keeper: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return FiledTables, (self.files,)

    def get(self) -> Mapping[str, pa.Table]:
        """Return the tables; one is read when it is asked for."""
        return _Tables(self.files)


def rows_count(path: Path) -> int:
    """Return how many rows a file has, which must be whole.

    Raises:
        InputError: it is damaged.
    """
    return int(_metadata(path).num_rows)


def values_count(path: Path) -> int:
    """Return how many values a file has, of all columns and with null.

    Raises:
        InputError: it is damaged.
    """
    about = _metadata(path)
    return int(about.num_rows * about.num_columns)


def _metadata(path: Path) -> pq.FileMetaData:
    import pyarrow.parquet as pq

    with _damage(path), _opened(path) as file:
        return pq.read_metadata(file)


def _unreadable(path: Path, exc: BaseException) -> InputError:
    state = "missing" if isinstance(exc, FileNotFoundError) else f"damaged ({one_line(exc)})"
    return InputError(
        f"{path}: {state}; delete the *{SUFFIX} files of {path.parent.name}, then its trace is read"
    )


def scan(name: str, ranks: Mapping[Path, int]) -> ds.Dataset:
    """Return the files of a table, each with its rank, as one dataset; nothing is read yet.

    Arrow opens files whose paths are UTF-8.
    """
    import pyarrow.dataset as ds
    from pyarrow import fs

    numbers = None
    if "rank" not in TABLES[name].arrow.names:
        numbers = [ds.field("rank") == rank for rank in ranks.values()]
    return ds.FileSystemDataset.from_paths(
        [str(path) for path in ranks],
        schema=schema_of(name),
        format=ds.ParquetFileFormat(),
        filesystem=fs.LocalFileSystem(),
        partitions=numbers,
    )
