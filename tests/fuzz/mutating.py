"""Changes to valid inputs. Each depends on nothing but the random numbers that it is given."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chopper.errors import ChopperError
from chopper.storage.streams import StreamWriter, read_stream

SECRET = "hunter2-outside-of-every-run"
"""Stands in a file that no command is told of."""

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, -(2**31), 2**32 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, -(2**63), 2**64 - 1, 10**25, 0.5, -0.5, 1e-300, 1e18, 1e25, 1e308, float("inf"),
    float("-inf"), float("nan"), "", " ", "7", "-1", "stream 7", "ProfilerStep#12", "nccl",
    "[0, 1]", "[[64, 32], [32, 16]]", "[" * 200 + "]" * 200,
    "NaN", "1e999", "0x4", "\ud800", "\u202ebidi",
    "\x1b[31m", "a\nb", "\0", "ß" * 40, "k" * 5000, [], {}, [[]], [1, [2]], {"a": {"b": 1}},
    [2**62] * 20, "../../outside/secret.txt", "/etc/hostname", "GPU 0", "<script>alert(1)</script>",
    "aten::mm", "ncclDevKernel_AllReduce_Sum_f32", "Memcpy HtoD (Pageable -> Device)",
    "chopper::phase::evaluation", "chopper::layer::", "nan", "inf",
)  # fmt: skip


def edit_bytes(random: Random, data: bytes) -> bytes:
    """Flip, delete, insert, truncate, or copy at random places."""
    edited = bytearray(data)
    at = random.randrange(len(edited) + 1)
    length = random.choice((1, 2, 4, 8, 40, 400))
    match random.choice(("flip", "flip", "byte", "delete", "insert", "truncate", "copy", "zeros")):
        case "flip" if edited:
            edited[at % len(edited)] ^= 1 << random.randrange(8)
        case "byte" if edited:
            edited[at % len(edited)] = random.choice((0, 0x22, 0x5B, 0x7B, 0x80, 0xC0, 0xFF))
        case "delete":
            del edited[at : at + length]
        case "insert":
            edited[at:at] = bytes([random.randrange(256)]) * length
        case "truncate":
            del edited[at:]
        case "copy":
            edited[at:at] = edited[at : at + length * 20]
        case "zeros":
            edited[at : at + length] = bytes(length)
    return bytes(edited)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all members of a JSON document."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield from places(value[i], (*path, i))


def edit_json(random: Random, document: Any) -> Any:
    """Change one member of a document: its value, its existence, its name, or its place."""
    paths = list(places(document))
    if not paths:
        return random.choice(SCALARS)
    path = random.choice(paths)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    match random.choice(("set", "set", "set", "set", "nudge", "remove", "double", "swap", "deep")):
        case "set":
            holder[key] = random.choice(SCALARS)
        case "nudge" if isinstance(holder[key], int | float):
            factor = random.choice((-1, 0, 2, 1000, 1e9, 1e-3))
            holder[key] = type(holder[key])(holder[key] * factor)
        case "remove":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.insert(random.randrange(len(holder) + 1), holder[key])
        case "double":
            holder[f"{key}"[::-1]] = holder[key]
        case "swap" if isinstance(holder, list):
            random.shuffle(holder)
        case "deep":
            value = holder[key]
            for _ in range(random.choice((2, 30, 600))):
                value = [value]
            holder[key] = value
    return document


FORGED: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -2, 2**31 - 1, 2**31, -(2**31), 2**53, 2**61, 2**62, 2**63 - 1,
    0.0, 2**63, -(2**63), 2**64, 10**25, -(10**25), 10**400, 1e300, -1e300, 5e-324, 1e-300, 0.5,
    -0.5, 1.5, 1e18, 1e25, float("nan"), float("inf"), float("-inf"), 10**15, 1e9, "7", "",
)  # fmt: skip
"""Values to stand where a number is."""


def forge(random: Random, document: Any) -> Any:
    """Change numbers of a document: one, or all of a name; sometimes another member."""
    paths = list(places(document))
    numbers = [p for p in paths if type(_at(document, p)) in (int, float)]
    if not numbers or random.random() < 0.2:
        return edit_json(random, document)
    chosen = [random.choice(numbers)]
    if random.random() < 0.3:
        chosen = [p for p in numbers if p[-1] == chosen[0][-1]]
    value = random.choice(FORGED)
    for path in chosen:
        _at(document, path[:-1])[path[-1]] = value
    return document


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def forge_file(random: Random, file: Path) -> None:
    """Change numbers of a JSON file that may be damaged already."""
    data = file.read_bytes()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        file.write_bytes(edit_bytes(random, data))
    else:
        file.write_bytes(to_text(random, forge(random, document)))


def edit_history(random: Random, folder: Path) -> None:
    """Change the runs of a history: their numbers, texts, order, number, schema."""
    files = sorted(folder.iterdir())
    file, other = random.choice(files), random.choice(files)
    texts = ("chopper.history/0", "chopper.history/2", "", "other", "k" * 5000, "\x1b[31m")
    match random.choice(("forge",) * 8 + ("file", "again", "swap", "drop", "schema", "few", "all")):
        case "forge":
            forge_file(random, file)
        case "file":
            edit_file(random, file)
        case "again":
            shutil.copyfile(file, file.with_name(f"{random.randrange(9)}-{file.name}"))
        case "swap":
            data = file.read_bytes()
            file.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case "drop" if len(files) > 1:
            file.unlink()
        case "schema":
            text = random.choice(texts)
            file.write_bytes(file.read_bytes().replace(b"chopper.history/1", text.encode()))
        case "few":
            for one in files[random.randrange(1, 4) :]:
                one.unlink()
        case "all":
            kept = random.getstate()
            for one in files:
                random.setstate(kept)
                forge_file(random, one)


def edit_event(random: Random, document: Any) -> Any:
    """Change the events of a trace: order, number, overlap, device, nesting."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not events:
        return document
    event = random.choice(events)
    if not isinstance(event, dict):
        return document
    args = event.get("args")
    match random.choice(("shuffle", "reverse", "again", "drop", "time", "device", "name", "field")):
        case "shuffle":
            random.shuffle(events)
        case "reverse":
            events.reverse()
        case "again":
            events.extend([dict(event)] * random.choice((1, 2, 50)))
        case "drop":
            events.remove(event)
        case "time":
            key = random.choice(("ts", "dur"))
            now = event.get(key)
            value = float(now) if isinstance(now, int | float) else 0.0
            event[key] = random.choice((value * 2, value + 5, -value, 0, 1e12, value / 2, 1e-3))
        case "device" if isinstance(args, dict):
            args[random.choice(("device", "stream", "correlation", "External id"))] = random.choice(
                (-1, None, 2**32 - 1, 2**31, "0", 1, 0.0, 63)
            )
        case "name":
            event["name"] = random.choice([s for s in SCALARS if isinstance(s, str)])
        case "field":
            event[random.choice(("ph", "cat", "pid", "tid", "id"))] = random.choice(SCALARS)
    return document


def to_text(random: Random, document: Any) -> bytes:
    """JSON in one of the forms that files have."""
    indent = random.choice((None, None, 2))
    try:
        text = json.dumps(document, indent=indent)
    except RecursionError:  # nested deeper than this writer goes; readers meet it all the same
        text = "[" * 5000 + "]" * 5000
    if random.random() < 0.1:
        text = text.replace('"name":', '"name": "twice", "name":', 3)
    if random.random() < 0.05:
        text = "\ufeff" + text
    return text.encode("utf-8", "surrogatepass")


def edit_database(random: Random, file: Path) -> None:
    """Change a cell, drop rows, a column or a table, or rename one."""
    try:
        with contextlib.closing(sqlite3.connect(file)) as db:
            _edit_rows(random, db)
            db.commit()
    except (sqlite3.Error, OverflowError, UnicodeError):
        file.write_bytes(edit_bytes(random, file.read_bytes()))


def _edit_rows(random: Random, db: sqlite3.Connection) -> None:
    tables = [r[0] for r in db.execute("select name from sqlite_master where type='table'")]
    table = random.choice(sorted(tables))
    columns = [r[1] for r in db.execute(f'pragma table_info("{table}")')]
    column = random.choice(columns)
    where = (
        f'rowid in (select rowid from "{table}" order by rowid limit 1 offset '
        f"{random.randrange(4)})"
    )
    match random.choice(("set", "set", "set", "all", "drop", "again", "column", "table", "rename")):
        case "set":
            value = random.choice([s for s in SCALARS if not isinstance(s, list | dict)])
            db.execute(f'update "{table}" set "{column}" = ? where {where}', (value,))
        case "all":
            value = random.choice((None, -1, 0, 2**62, "text", 1.5, b"\xff\xfe"))
            db.execute(f'update "{table}" set "{column}" = ?', (value,))
        case "drop":
            db.execute(f'delete from "{table}" where {where}')
        case "again":
            listed = ", ".join(f'"{c}"' for c in columns if c.lower() != "id")
            if listed:
                db.execute(f'insert into "{table}" ({listed}) select {listed} from "{table}"')
        case "column":
            db.execute(f'alter table "{table}" drop column "{column}"')
        case "table":
            db.execute(f'drop table "{table}"')
        case "rename":
            db.execute(f'alter table "{table}" rename column "{column}" to "other"')


def edit_table(random: Random, data: bytes) -> bytes:
    """Change a cell, a row or the separators of a CSV."""
    rows = data.decode("utf-8", "replace").splitlines()
    if not rows:
        return edit_bytes(random, data)
    at = random.randrange(len(rows))
    cells = rows[at].split(",")
    match random.choice(("cell", "cell", "cell", "drop", "again", "reverse", "shuffle", "quote",
                         "separator", "number")):  # fmt: skip
        case "cell":
            value = random.choice([str(s) for s in SCALARS if not isinstance(s, list | dict)])
            cells[random.randrange(len(cells))] = value
            rows[at] = ",".join(cells)
        case "drop":
            del rows[at]
        case "again":
            rows[at:at] = [rows[at]] * random.choice((1, 3, 100))
        case "reverse":
            rows[1:] = rows[1:][::-1]
        case "shuffle":
            rows[1:] = random.sample(rows[1:], len(rows) - 1)
        case "quote":
            rows[at] = '"' + rows[at]
        case "separator":
            rows = [row.replace(",", random.choice((";", "\t"))) for row in rows]
        case "number":
            digits = [i for i, c in enumerate(rows[at]) if c.isdigit()]
            if digits:
                i = random.choice(digits)
                rows[at] = (
                    rows[at][:i] + random.choice(("-", "9" * 25, "²", ".", "e5")) + rows[at][i:]
                )
    return "\n".join(rows).encode("utf-8", "surrogatepass")


def edit_file(random: Random, file: Path) -> None:
    """Change a file as befits its kind; sometimes as bytes, sometimes packed."""
    data = file.read_bytes()
    if random.random() < 0.25:
        file.write_bytes(edit_bytes(random, data))
        return
    match file.suffix:
        case ".json":
            try:
                document = json.loads(data)
            except (ValueError, RecursionError):
                file.write_bytes(edit_bytes(random, data))
                return
            edit = random.choice((edit_json, edit_event))
            file.write_bytes(to_text(random, edit(random, document)))
        case ".sqlite" | ".db" | ".rpd":
            edit_database(random, file)
        case ".csv":
            file.write_bytes(edit_table(random, data))
        case ".arrow":
            edit_stream(random, file)
        case ".parquet":
            edit_parquet(random, file)
        case _:
            file.write_bytes(edit_bytes(random, data))


def pack(random: Random, file: Path) -> Path:
    """Compress a file, sometimes damaged."""
    packed = gzip.compress(file.read_bytes(), mtime=0)
    if random.random() < 0.5:
        packed = edit_bytes(random, packed)
    target = file.with_name(file.name + ".gz")
    target.write_bytes(packed)
    file.unlink()
    return target


def edit_stream(random: Random, file: Path) -> None:
    """Write a telemetry stream anew, with correct checksums and a value that nobody expects."""
    name = file.stem
    try:
        table, _ = read_stream(file, name)
    except (ChopperError, KeyError):
        table = pa.table({})
    if not table.num_rows:
        file.write_bytes(edit_bytes(random, file.read_bytes()))
        return
    columns = table.to_pydict()
    column = random.choice(table.schema.names)
    kind = table.schema.field(column).type
    value: Any
    if pa.types.is_integer(kind):
        most = (1 << (kind.bit_width - 1)) - 1
        value = random.choice((0, -1, most, -most - 1, 7))
    elif pa.types.is_floating(kind):
        value = random.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 1e-300))
    elif pa.types.is_boolean(kind):
        value = random.random() < 0.5
    else:
        value = random.choice(("", "k" * 3000, "\x1b[2J", "a\nb", "<b>", "ß"))
    rows = columns[column]
    match random.choice(("one", "all", "shuffle", "reverse")):
        case "one":
            rows[random.randrange(len(rows))] = value
        case "all":
            columns[column] = [value] * len(rows)
        case "shuffle":
            random.shuffle(rows)
        case "reverse":
            columns = {key: values[::-1] for key, values in columns.items()}
    stream = StreamWriter(file, name)
    try:
        stream.write(columns)
    finally:
        stream.close()


def edit_parquet(random: Random, file: Path) -> None:
    """Write a table anew, well-formed, with columns, types, rows or values that nobody expects."""
    try:
        table = pq.read_table(file)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError):
        file.write_bytes(edit_bytes(random, file.read_bytes()))
        return
    rows, at = table.num_rows, random.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at).combine_chunks()

    def of_type() -> pa.Array:
        texts = [str(value) for value in column.to_pylist()]
        bad = pa.array([b"\xff\xfe" + t.encode() for t in texts])
        return random.choice((
            pa.array([[text] for text in texts]), pa.array([{"a": text} for text in texts]),
            pa.StringArray.from_buffers(rows, *bad.buffers()[1:]), bad, pa.array(texts),
            pa.array(texts).dictionary_encode(), pa.array([hash(t) % 9 for t in range(rows)]),
            pa.array([1.5] * rows), pa.nulls(rows), pa.nulls(rows, column.type),
            pa.array([2**63 - 1] * rows, pa.timestamp("ns")), pa.array([0] * rows, pa.uint64()),
        ))  # fmt: skip

    def of_value() -> pa.Array:
        values = column.to_pylist()
        most = 2**63 - 1 if not pa.types.is_int32(column.type) else 2**31 - 1
        value: Any = random.choice([s for s in SCALARS if isinstance(s, str)][:-1])
        if pa.types.is_integer(column.type):
            value = random.choice(
                (0, -1, most, -most - 1, most // 2, most // 4, 7, 10**9, most >> 23)
            )
        elif pa.types.is_floating(column.type):
            value = random.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 1e-300))
        elif pa.types.is_boolean(column.type):
            value = random.random() < 0.5
        elif not pa.types.is_string(column.type):
            return of_type()
        chosen = random.choice(([random.randrange(rows)] if rows else [], range(rows)))
        for row in chosen:
            values[row] = value if isinstance(value, bool) or value != "\ud800" else None
        return pa.array(values, column.type)

    match random.choice(
        ("drop", "double", "name", "type", "type", *["value"] * 8, "order", "rows")
    ):
        case "drop":
            table = table.drop_columns(name)
        case "double":
            table = table.append_column(name, column)
        case "name":
            table = table.rename_columns(
                [*table.column_names[:at], "x", *table.column_names[at + 1 :]]
            )
        case "type":
            table = table.set_column(at, name, of_type())
        case "value":
            table = table.set_column(at, name, of_value())
        case "order":
            table = table.take(random.sample(range(rows), rows))
        case "rows":
            table = pa.concat_tables(
                [table.slice(rows // 2), table, *[table] * random.choice((0, 3))]
            )
    pq.write_table(table, file)


def edit_directory(random: Random, root: Path) -> None:
    """Change a run directory: its files, which there are, and what they are."""
    entries = sorted(root.rglob("*"))
    files = [p for p in entries if p.is_file() and not p.is_symlink()]
    if not files:
        return
    file, entry = random.choice(files), random.choice(entries)
    outside = Path(os.path.relpath(root.parent.parent / "outside", entry.parent))
    moves: dict[str, Callable[[], object]] = {
        "edit": lambda: edit_file(random, file),
        "flip": lambda: file.write_bytes(edit_bytes(random, file.read_bytes())),
        "delete": lambda: shutil.rmtree(entry) if entry.is_dir() else entry.unlink(),
        "empty": lambda: file.write_bytes(b""),
        "link": lambda: _replace_by_link(entry, outside),
        "absolute": lambda: _replace_by_link(entry, (root.parent.parent / "outside").resolve()),
        "swap": lambda: shutil.copyfile(file, random.choice(files)),
        "rename": lambda: entry.rename(entry.with_name(random.choice(
            ("rank-00002", "rank-00000x", "tables", "manifest.json", "x", "step.arrow")
        ))),
        "folder": lambda: file.unlink() or file.mkdir(),  # type: ignore[func-returns-value]
        "fifo": lambda: file.unlink() or os.mkfifo(file),  # type: ignore[func-returns-value]
    }  # fmt: skip
    kind = random.choice(("edit",) * 8 + ("flip",) * 3 + tuple(moves))
    with contextlib.suppress(OSError, shutil.Error):
        moves[kind]()


def _replace_by_link(entry: Path, outside: Path) -> None:
    target = outside if entry.is_dir() else outside / "secret.txt"
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()
    entry.symlink_to(target)


_TYPES = ("DATE", "TIME", "TIME_NS", "TIMETZ", "TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_NS", "BIT",
          "TIMESTAMPTZ", "INTERVAL", "BLOB", "UUID", "BIGNUM", "UHUGEINT", "HUGEINT", "VARIANT",
          "DECIMAL(38, 9)", "DOUBLE", "VARCHAR", "JSON", "ENUM('a', '=1')", "UNION(a INT, b DATE)",
          "TINYINT", "GEOMETRY", '"NULL"', 'STRUCT("a b" DATE, """" INTERVAL)')  # fmt: skip
_LITERALS = ("'infinity'", "'-infinity'", "'290000-01-01'", "'4000-01-01 (BC)'", "'24:00'", "-1",
             "'12:34:56.123456789'", "'12:00:00+15:59:59'", "'0101'", "9223372036854775807", "''",
             "1e308", "'nan'", "'-170 years 5 days -3 us'", r"'\xAA\x00'", "'=1+1'", "'a\nb'", "*",
             "'\x1b[2J\u202e'", "NULL", "number", "'9999999999999999999999999'")  # fmt: skip
_NESTED = ("[{0}, {1}]", "{{'a': {0}, 'B\n': {1}}}", "MAP {{{0}: {1}}}", "row({0})", "min({0})",
           "union_value(k := {0})", "{0} || {1}", "if(number > 10, {0}, {1})")  # fmt: skip
_CLAUSES = ("FROM step", "FROM step ORDER BY ALL", "FROM step LIMIT 2 -- x", "FROM step; -- x", "",
            "FROM step GROUP BY ALL", "FROM range(3)", "FROM step; SELECT 1", "FROM nope", "WHERE",
            "FROM step UNION ALL SELECT 1", "FROM step WHERE error('x\ny')")  # fmt: skip
_OTHERS = ("UPDATE EXTENSIONS", "INSTALL x", "LOAD x", "COPY step TO 'outside/x'", "SHOW TABLES",
           "ATTACH 'outside/x.db'", "PRAGMA version", "SET threads = 1", "SUMMARIZE step",
           "DESCRIBE step", "FROM read_text('outside/secret.txt')", "EXPORT DATABASE 'outside'",
           "CREATE TABLE x AS FROM step", "PIVOT step ON number", "FROM glob('*')")  # fmt: skip


def statement(random: Random) -> str:
    """A SQL statement, mostly of strange values, sometimes with a strange character somewhere."""

    def value(depth: int) -> str:
        if depth and random.random() < 0.5:
            return random.choice(_NESTED).format(value(depth - 1), value(depth - 1))
        literal, kind = random.choice(_LITERALS), random.choice(_TYPES)
        return random.choice((f"{literal}::{kind}", *[f"TRY_CAST({literal} AS {kind})"] * 4))

    values = ", ".join(value(3) for _ in range(random.randint(1, 3)))
    text = f"SELECT {values} {random.choice(_CLAUSES)}"
    if random.random() < 0.2:
        text = random.choice(_OTHERS)
    if random.random() < 0.3:
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice("\r\n\0\x1b\x0b\x85\u2028\u202e;'\"(\ud800") + text[at:]
    return text


_UNITS = ("", "ns", "us", "µs", "ms", "s", "%", "Hz", "MHz", "GB/s", "GiB", "x", "K", "e5")
_WORDS = ("step", "median", "idle", "communication.wait", "or", "and", ">", "<", "=", "+", "-", "−",
          "(", "²", "½", "٣", " ", "\t", "compute", "gemm=2x", "reference", "data", "x2", ".*", "[",
          "((a+)+)+$", "aten::mm", "=", "nan", "inf", "0x10", "1_000", "--json", "-")  # fmt: skip


def expression(random: Random) -> str:
    """A condition, a quantity or something like them."""

    def quantity() -> str:
        digits = random.choice(
            ("0", "1", "5", "1e3", ".5", "5.", "1e999", "9" * 400, "-1", "²", "")
        )
        return digits + random.choice(_UNITS)

    match random.randrange(4):
        case 0:
            return quantity()
        case 1:
            return f"step>{random.choice('+-')}{quantity()}"
        case 2:
            terms = [f"{random.choice(_WORDS)}{random.choice('<>')}{quantity()}" for _ in range(3)]
            return random.choice((" or ", "or", "", " ")).join(terms)
        case _:
            return "".join(random.choice((*_WORDS, quantity())) for _ in range(random.randrange(6)))
