"""Databases of Nsight Systems (exported), rocprofv3 (rocpd) and rocmProfileData (rpd).

They are opened so that nothing in them can act: read-only, without their views. Only plain tables
are read, one at a time and in order; names that come from the file are looked up in its own list
first, and quoted. Joins are made here, so that the work is linear in the file.
"""

from __future__ import annotations

import contextlib
import importlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chopper.collectors.formats.parsed import NO_VALUE, ParsedTrace
from chopper.collectors.formats.recording import Recording, traces_of
from chopper.collectors.formats.unpack import DAMAGE, PACKED, salvaged
from chopper.errors import InputError
from chopper.limits import Intake
from chopper.storage.caches import scratch
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding

_FORMATS = ("nsys", "rocpd", "rpd")
"""Modules with ``knows(database)`` and ``read(database)``, in the order in which they are asked."""
MAGIC = b"SQLite format 3\x00"
_ROWS = 1 << 16
_DAMAGE = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""What damage raises; the library's own messages may quote names that are no UTF-8."""
_LONGEST_TEXT = 16 << 20
"""Longer texts are no names: the database is refused rather than held in memory."""


class Database:
    """One database; ``findings`` describe its damage."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self._connection = connection
        self._columns: dict[str, tuple[str, ...]] = {}
        try:
            rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
            # A virtual table runs code of its own.
            self.tables = frozenset(
                str(name) for name, sql in rows if not str(sql).upper().startswith("CREATE VIRTUAL")
            )
        except _DAMAGE as exc:
            raise InputError(f"{path}: a damaged SQLite database ({_why(exc)})") from exc

    def columns(self, table: str) -> tuple[str, ...]:
        """Columns of a table; empty for one that is not there."""
        if table not in self.tables:
            return ()
        if table not in self._columns:
            try:
                rows = self._connection.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
            except _DAMAGE:
                rows = []
            self._columns[table] = tuple(str(row[1]) for row in rows)
        return self._columns[table]

    def has(self, table: str, *columns: str) -> bool:
        """Return whether a table is there with all of these columns."""
        return set(columns) <= set(self.columns(table)) and table in self.tables

    def require(self, tool: str, table: str, *columns: str) -> None:
        """Refuse a table that is there but lacks a column, as of a version that nobody knows."""
        missing = [column for column in columns if column not in self.columns(table)]
        if table in self.tables and missing:
            raise InputError(
                f"{self.path}: {tool}: its table {table} lacks {' and '.join(missing)}; found "
                f"{', '.join(self.columns(table)[:8]) or 'none'}"
            )

    def integers(
        self, table: str, names: Sequence[str], *, among: Mapping[str, Iterable[int]] | None = None
    ) -> dict[str, np.ndarray]:
        """Columns of whole numbers; ``NO_VALUE`` where there is none, or no such column.

        A table that is not there has no rows. With ``among``, only the rows whose column has one
        of these values.
        """
        where = "".join(
            f" WHERE {_quoted(column)} IN ({', '.join(map(str, values))})"
            for column, values in (among or {}).items()
        )
        there = set(self.columns(table))
        known = [name for name in names if name in there]
        cells = [
            f"CASE typeof({_quoted(n)}) WHEN 'integer' THEN {_quoted(n)} ELSE {NO_VALUE} END"
            for n in known
        ]
        parts = [np.zeros((0, len(known)), np.int64)]
        if known:
            parts += [
                np.array(rows, dtype=np.int64)
                for rows in self._rows(
                    f"SELECT {', '.join(cells)} FROM {_quoted(table)}{where}", table
                )
            ]
        cells_read = np.concatenate(parts)
        columns = {name: np.ascontiguousarray(cells_read[:, i]) for i, name in enumerate(known)}
        absent = np.full(len(cells_read), NO_VALUE, dtype=np.int64)
        return {name: columns.get(name, absent) for name in names}

    def texts(self, table: str, column: str) -> list[str | None]:
        """Return one column as text, in row order; None for NULL."""
        if not self.has(table, column):
            return []
        cell = _quoted(column)
        query = (
            f"SELECT CASE typeof({cell}) WHEN 'null' THEN NULL ELSE CAST({cell} AS TEXT) END "
            f"FROM {_quoted(table)}"
        )
        return [row[0] for rows in self._rows(query, table) for row in rows]

    def named(self, table: str, key: str, value: str) -> dict[int, str]:
        """Texts by number: a table of strings."""
        keys = self.integers(table, (key,))[key].tolist()
        return {
            number: text
            for number, text in zip(keys, self.texts(table, value), strict=False)
            if text is not None
        }

    def facts(self, table: str, key: str, value: str) -> dict[str | None, str | None]:
        """Return a two-column table of facts about the recording as a dictionary."""
        return dict(zip(self.texts(table, key), self.texts(table, value), strict=False))

    def with_schema(self, tool: str, metadata: str) -> str:
        """Return what wrote the database, with the version of its schema where it says."""
        version = self.facts(metadata, "tag", "value").get("schema_version")
        return tool + (f", schema {version}" if version else "")

    def _rows(self, query: str, table: str) -> Iterator[list[tuple[Any, ...]]]:
        count = 0
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(_ROWS):
                count += len(rows)
                yield rows
        except _DAMAGE as exc:
            if not any(table in f.message for f in self.findings):
                found = finding(
                    "trace.damaged_table",
                    count=count,
                    source=self.path.name,
                    table=table,
                    problem=_why(exc),
                )
                self.findings.append(found)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Database]:
    """A database, packed or not, for as long as it is read.

    Raises:
        InputError: it cannot be read, or is no database.
    """
    with contextlib.ExitStack() as stack:
        findings: list[Finding] = []
        try:
            with path.open("rb") as file:
                packed = file.read(4).startswith(tuple(PACKED))
            plain = path
            if packed:
                folder = stack.enter_context(scratch("database"))
                plain = folder / "unpacked.sqlite"
                _unpack(path, plain, findings)
        except OSError as exc:
            raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
        try:
            # Immutable: no lock, no journal beside it, nothing is written.
            uri = f"{plain.resolve().as_uri()}?mode=ro&immutable=1"
            connection = stack.enter_context(contextlib.closing(sqlite3.connect(uri, uri=True)))
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_TEXT)
            connection.execute("PRAGMA trusted_schema = OFF")
        except _DAMAGE as exc:
            raise InputError(
                f"{path}: not an SQLite database that can be read ({_why(exc)})"
            ) from exc
        database = Database(path, connection)
        _note_unwritten(path, findings)
        database.findings[:0] = findings
        yield database


def _unpack(path: Path, target: Path, findings: list[Finding]) -> None:
    problem = None
    with path.open("rb") as source, target.open("wb") as out:
        try:
            for piece in salvaged(source, Intake(path, 0)):
                out.write(piece)
        except DAMAGE as exc:
            problem = str(exc)
        size = out.tell()
    if not size:
        raise InputError(f"{path}: the compressed stream is damaged from its start ({problem})")
    if problem is not None:
        found = finding(
            "trace.truncated_gzip", source=path.name, problem=problem, size=f"{size} bytes"
        )
        findings.append(found)


def _note_unwritten(path: Path, findings: list[Finding]) -> None:
    log = path.with_name(f"{path.name}-wal")
    try:
        waiting = log.stat().st_size if log.is_file() else 0
    except OSError:
        waiting = 0
    if waiting:
        found = finding("trace.unwritten_log", source=path.name, log_bytes=waiting, log=log.name)
        findings.append(found)


def _why(exc: Exception) -> str:
    if isinstance(exc, UnicodeDecodeError):
        return "names that are not text"
    return " ".join(str(exc).split())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def sniff(head: bytes) -> bool:
    """Return whether a file begins as databases do."""
    return head.startswith(MAGIC)


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read one database.

    Raises:
        InputError: it is damaged from its start, or of a tool that nobody here knows.
    """
    (path,) = files
    with opened(path) as database:
        for name in _FORMATS:
            module = importlib.import_module(f"chopper.collectors.formats.{name}")
            if module.knows(database):
                recording: Recording = module.read(database)
                recording.findings += database.findings
                return traces_of(recording)
        listed = ", ".join(sorted(database.tables)[:6]) or "none"
        raise InputError(
            f"{path}: an SQLite database, but none of a profiler that chopper knows; expected "
            "CUPTI_ACTIVITY_KIND_KERNEL (nsys export), rocpd_kernel_dispatch (rocprofv3) or "
            f"rocpd_op (rpd) among its tables; found {listed}"
        )
