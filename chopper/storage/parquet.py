"""Tables of ranks as Parquet files that any reader understands.

``rank-00000/<table>.parquet`` has the declared columns after two that make the files of all ranks
one table: ``rank``, and ``row``, by which tables name each other's rows. Texts are plain strings,
and the schema is the same in every rank's file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.errors import InputError, OutputError, SchemaError, reason_of
from chopper.storage.files import inside
from chopper.storage.streams import arrow_errors, one_line
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow.dataset as ds

SUFFIX = ".parquet"
_ROW_GROUP = 1 << 18


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


def numbered(table: pa.Table, name: str, rank: int) -> pa.Table:
    """Return a rank's table with the columns of its file."""
    values = {
        "rank": pa.repeat(pa.scalar(rank, pa.int32()), table.num_rows),
        "row": pa.array(np.arange(table.num_rows, dtype=np.int64)),
    }
    schema = schema_of(name)
    names = table.column_names
    columns = [table[n] if n in names else values[n] for n in schema.names]
    return pa.table(columns, names=schema.names).cast(schema)


def write(table: pa.Table, path: Path) -> None:
    """Write a Parquet file as a whole: under its own name there is never a part of one.

    Raises:
        OutputError: the disk is full, or the place is read-only.
    """
    import pyarrow.parquet as pq

    texts = [f.name for f in table.schema if pa.types.is_string(f.type)]
    times = [f.name for f in table.schema if f.type == pa.int64()]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Opened here: pyarrow takes no paths other than UTF-8.
        with temporary.open("wb") as file:
            pq.write_table(
                table,
                file,
                compression="zstd",
                row_group_size=_ROW_GROUP,
                use_dictionary=texts,
                column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
            )
        temporary.replace(path)
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written ({reason_of(exc)})") from exc
    finally:
        temporary.unlink(missing_ok=True)


def write_rank(folder: Path, rank: int, tables: Mapping[str, pa.Table]) -> None:
    """Write the tables of a rank that have rows into its folder."""
    for name, table in tables.items():
        if table.num_rows:
            write(numbered(table, name, rank), folder / f"{name}{SUFFIX}")


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


def read(path: Path, name: str) -> pa.Table:
    """Read a table of a rank as it was declared.

    Raises:
        InputError: the file is damaged, or not this table.
    """
    import pyarrow.parquet as pq

    declared = TABLES[name]
    texts = [column.name for column in declared.columns if column.type == "string"]
    damage: tuple[type[Exception], ...] = (SchemaError, *arrow_errors())
    try:
        with path.open("rb") as file:
            there = pq.read_schema(file).names  # an older file lacks columns of today
            texts = [text for text in texts if text in there]
            table = pq.ParquetFile(file, read_dictionary=texts).read()
        names = [name for name in declared.arrow.names if name in table.column_names]
        return declared.completed(
            table.select(names).replace_schema_metadata(table.schema.metadata)
        )
    except damage as exc:
        raise _damaged(path, exc) from exc


class _Tables(dict[str, pa.Table]):
    """Tables by name, each read when it is asked for first."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __missing__(self, name: str) -> pa.Table:
        return self.setdefault(name, read(self._files[name], name))


@dataclass(frozen=True)
class FiledTables:
    """Tables of a rank that stay in their files, by name."""

    files: Mapping[str, Path]

    def get(self) -> Mapping[str, pa.Table]:
        """Return the tables; one is read when it is asked for."""
        return _Tables(self.files)


def rows_count(path: Path) -> int:
    """Return how many rows a file has, which must be whole.

    Raises:
        InputError: it is damaged.
    """
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            return int(pq.read_metadata(file).num_rows)
    except arrow_errors() as exc:
        raise _damaged(path, exc) from exc


def _damaged(path: Path, exc: BaseException) -> InputError:
    return InputError(
        f"{path}: damaged ({one_line(exc)}); delete the *{SUFFIX} files of {path.parent.name}, "
        "then its trace is read"
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
