"""Tables as Arrow IPC streams: written batch by batch, read up to the last whole batch.

Each batch carries the checksum of what stands before it. Damage ends what can be read.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from typing import TYPE_CHECKING, Any, cast

from chopper.errors import InputError, OutputError, SchemaError, printable
from chopper.storage.files import create, read_bytes
from chopper.storage.findings import finding
from chopper.tables import TABLES
from chopper.tables.ranges import TIME_MOST_NS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

    from chopper.storage.manifest import Finding

CHECKSUM = b"chopper.crc32"
"""Key of a batch's metadata: CRC-32 of the bytes of the file before the batch, in hexadecimal."""
_TRAILER = b"chopper.crc32="
"""Follows the end mark of a stream; then the CRC-32 of all bytes before it, in hexadecimal."""
_FLUSH_NS = 1_000_000_000


class ChecksummedSink(io.BufferedWriter):
    """A file, opened for writing without a buffer, that computes the CRC-32 of its bytes."""

    crc32 = 0

    def write(self, data: Any, /) -> int:
        """Write bytes and return how many."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)

    def write_trailer(self) -> None:
        """Write the checksum of the whole file, after the stream's end."""
        self.write(_TRAILER + b"%08x" % self.crc32)


class DamagedStreamError(ValueError):
    """A stream cannot be read further; its message is the reason, in one line."""


def arrow_errors() -> tuple[type[Exception], ...]:
    """Exceptions that reading damaged Arrow and Parquet data raises."""
    import pyarrow as pa

    # Names that are not UTF-8 are ValueErrors, absurd sizes memory or overflow errors.
    return (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, EOFError)


def check_batch(batch: pa.RecordBatch) -> None:
    """Check a batch that was read: offsets, indices, UTF-8, nulls inside dictionaries.

    Raises:
        DamagedStreamError: using it could crash, or give other values than were written.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
        for column in batch.columns:
            if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
                raise DamagedStreamError("a dictionary holds nulls")
    except arrow_errors() as exc:
        raise DamagedStreamError(one_line(exc)) from exc


def one_line(exc: BaseException) -> str:
    """First line of an exception's message, or its type where it has none."""
    lines = str(exc).splitlines()
    return printable(lines[0]) if lines else type(exc).__name__


def stream_batches(data: bytes) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow IPC stream, each checked; those without checksums are older.

    A batch is returned when the checksum that follows it agrees, or when nothing follows it.

    Raises:
        DamagedStreamError: the stream ends in the middle, or is damaged; what was returned is good.
    """
    import pyarrow as pa

    file = pa.BufferReader(data)
    before: pa.RecordBatch | None = None
    checksummed = False
    crc32 = start = 0
    try:
        with pa.ipc.open_stream(file) as reader:
            while True:
                end = file.tell() if before is not None else 0
                try:
                    batch, metadata = reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    break
                crc32, start = zlib.crc32(memoryview(data)[start:end], crc32), end
                checksum = (metadata or {}).get(CHECKSUM)
                if before is None:
                    checksummed = checksum is not None
                if checksum != (b"%08x" % crc32 if checksummed else None):
                    raise DamagedStreamError("its checksum differs")
                if before is not None:
                    yield before
                check_batch(batch)
                before = batch
            end = file.tell()
    except DamagedStreamError:
        raise
    except arrow_errors() as exc:
        if before is not None:
            yield before
        raise DamagedStreamError(one_line(exc)) from exc
    trailer = _TRAILER + b"%08x" % zlib.crc32(memoryview(data)[start:end], crc32)
    # A writer that was killed leaves a part of it, an older one none.
    if not trailer.startswith(data[end:]):
        raise DamagedStreamError("its checksum differs")
    if before is not None:
        yield before


def read_stream(path: Path, name: str) -> tuple[pa.Table, Finding | None]:
    """Read an Arrow IPC stream up to its last whole batch.

    A killed writer leaves an open end; the batches before it are returned with a finding.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    declared = TABLES[name]
    batches: list[pa.RecordBatch] = []
    problem: str | None = None
    try:
        for batch in stream_batches(read_bytes(path, most_bytes=None)):
            batches.append(batch)
    except (DamagedStreamError, InputError, MemoryError) as exc:
        problem = one_line(exc)
    table = pa.Table.from_batches(batches) if batches else declared.empty()
    try:
        table = declared.completed(table)
    except SchemaError as exc:
        raise SchemaError(f"{path}: {exc}") from exc
    note = None
    rows_count = table.num_rows
    for column in {"time_ns", "start_ns", "end_ns"} & set(table.column_names):
        early = pc.less(table[column], -TIME_MOST_NS)
        late = pc.greater(table[column], TIME_MOST_NS)
        table = table.filter(pc.invert(pc.fill_null(pc.or_(early, late), fill_value=False)))
    if table.num_rows < rows_count:
        note = finding(
            "telemetry.rows_lost",
            "impossible_times",
            severity="warning",
            count=rows_count - table.num_rows,
            source=path.name,
            rows=rows_count,
        )
    if problem is not None:
        note = finding(
            "telemetry.truncated", source=path.name, problem=problem, rows=table.num_rows
        )
    return table.unify_dictionaries(), note


class StreamWriter:
    """Writes one table as an Arrow IPC stream; every ``write`` is flushed to the file.

    Raises:
        FileExistsError: it is there already, and was to be ``exclusive``.
        OutputError: it cannot be created.
    """

    def __init__(self, path: Path, name: str, *, exclusive: bool = False) -> None:
        import pyarrow as pa

        self._declared = TABLES[name]
        self.path = path
        try:
            opened = path.open("xb", buffering=0) if exclusive else create(path, buffering=0)
            self._sink = ChecksummedSink(cast(io.FileIO, opened))
        except FileExistsError:
            raise
        except OSError as exc:
            raise OutputError(f"{path}: cannot be written ({exc.strerror})") from exc
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        # Writes nothing yet: the schema goes out with the first batch.
        self._writer = pa.ipc.new_stream(self._sink, self._declared.arrow, options=options)

    def write(self, columns: dict[str, Any]) -> None:
        """Append one batch; ``columns`` maps every declared column to a sequence.

        Raises:
            OutputError: the disk is full or the file vanished.
        """
        import pyarrow as pa

        from chopper.arrow import to_arrow

        schema = self._declared.arrow
        batch = pa.record_batch([to_arrow(columns[f.name], f.type) for f in schema], schema=schema)
        try:
            before = {CHECKSUM: b"%08x" % self._sink.crc32}
            self._writer.write_batch(batch, before)
            self._sink.flush()
        except OSError as exc:
            raise OutputError(f"{self.path}: cannot be written ({exc.strerror})") from exc

    def write_rows(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append a batch of rows, each with all declared columns in their order; none for none."""
        if rows:
            names = [column.name for column in self._declared.columns]
            self.write(dict(zip(names, zip(*rows, strict=True), strict=True)))

    def close(self) -> None:
        """End the stream; safe to call twice.

        Raises:
            OutputError: its end cannot be written; the batches before it are readable.
        """
        if self._sink.closed:
            return
        try:
            self._writer.close()
            self._sink.write_trailer()
            self._sink.close()
        except OSError as exc:
            raise OutputError(f"{self.path}: cannot be written ({exc.strerror})") from exc
        finally:
            with contextlib.suppress(OSError):
                self._sink.close()


def write_table(folder: Path, name: str, columns: dict[str, Any]) -> str:
    """Write a whole table into a folder, and return the file's name."""
    with contextlib.closing(StreamWriter(folder / f"{name}.arrow", name)) as writer:
        writer.write(columns)
    return writer.path.name


class RowLog:
    """Rows of a table, on disk about once a second; the file is there once any are.

    Args:
        path: the file.
        name: the table; by default the file is called ``<table>.arrow``.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._name = name or path.stem
        self.rows: list[tuple[Any, ...]] = []
        """Rows that are not on disk."""
        self._writer: StreamWriter | None = None
        self._is_closed = False
        self._flushed_ns = 0

    def open(self) -> None:
        """Make the file now, without rows.

        Raises:
            OutputError: it cannot be created.
        """
        self._writer = StreamWriter(self.path, self._name)

    def due(self, now_ns: int) -> bool:
        """Return whether it is time to flush; all times are of one clock."""
        return now_ns - self._flushed_ns > _FLUSH_NS

    def flush(self, now_ns: int) -> int:
        """Write the rows that are not on disk; return how many."""
        self._flushed_ns = now_ns
        rows, self.rows = self.rows, []
        if not rows or self._is_closed:
            return 0
        if self._writer is None:
            self.open()
        assert self._writer is not None
        self._writer.write_rows(rows)
        return len(rows)

    def close(self) -> None:
        """Write the remaining rows and close the file; safe to call twice."""
        try:
            self.flush(self._flushed_ns)
        finally:
            self._is_closed = True
            if self._writer is not None:
                self._writer.close()
