"""Texts that a terminal, a spreadsheet, Markdown, HTML or SQL would obey; and who finds them there.

Each output is read by a real parser of its format.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import sqlite3
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from markdown_it import MarkdownIt

from chopper.errors import MESSAGE_MOST, ChopperError, is_shown
from chopper.storage.streams import StreamWriter, read_stream

MARK = "qzxqzx"
"""Stands in what would become markup: found there, it did."""

_PIECES = (
    "\x1b[2J", "\x1b]8;;http://qzx\x07", "\x9b31m", "\r", "\n", "\t", "\x00", "\x7f", "\b",
    "\u2028", "\u202e", "\u2066", "\u200f", "\u061c", "\u200b", "\ufeff", "\u3164", "\ufe0f",
    "\U000e0041", "\ud800", "\udcff", "\ud83d", "=cmd|' /C calc'!A1", "+1+qzx", "-2+qzx",
    "@SUM(qzx)",
    "\t=qzx",
    "＝qzx", "@qzx", "a@qzx.org", "#12", "GH-12", "https://qzx.org/a", "www.qzx.org", "1. qzx",
    "2) qzx", "- qzx", "* qzx", "+ qzx", "# qzx", "> qzx", "---", "===", "***", "~~~", "```", "`",
    "``qzx``", "`qzx", "|", "|qzx|", "**qzx**", "_qzx_", "~~qzx~~", "[qzx](http://qzx)",
    "![qzx](x)",
    "[qzx]: http://qzx", "<qzx>", "</script><qzx>", "<script>qzx()</script>", "<!--qzx", "-->",
    "<img src=qzx onerror=qzx()>", "\" onmouseover=\"qzx()", "' onclick='qzx()", "&lt;qzx&gt;",
    "&#60;qzx&#62;", "javascript:qzx()", "{{qzx}}", "{%qzx%}", "{0}", "%s", "${qzx}", "$(qzx)",
    "[bold]qzx[/bold]", ":smile:", "\\", "\\n", "'", '"', "''", '""', ";", ",", "' OR '1'='1",
    "--", "/*", "١٢٣", "²", "𝟙", "rank ٣", "ß" * 40, "k" * 700, "word " * 150, " ", "  ", "\u00a0",
    "漢字", "e\u0301", "ﬁ", "]]>", "NaN", "null", "0x1F", "1e999", "..", "/", "../x", "C:\\x", "~",
)  # fmt: skip
PIECES = tuple(piece.replace("qzx", MARK) for piece in _PIECES)


def text(random: Random) -> str:
    """A hostile text."""
    count = random.choice((1, 1, 1, 2, 2, 3, 6))
    joint = random.choice(("", "", " ", "\n", MARK))
    return joint.join(random.choice(PIECES) for _ in range(count))


def argument(random: Random) -> str:
    """A hostile text that a command line can hold: bytes that are no UTF-8, but no NUL."""
    return re.sub("[\0\ud800-\udc7f\udd00-\udfff]", "", text(random))


def file_name(random: Random) -> str:
    """A hostile name of a file."""
    name = argument(random).replace("/", "_")
    while len(name.encode("utf-8", "surrogateescape")) > 180:
        name = name[: len(name) // 2]
    return "x" if name in ("", ".", "..") else name


# ---------------------------------------------------------------- into inputs

_STRUCTURE = frozenset(("ph", "cat", "schema", "schema_version", "status", "bp", "id", "s"))


def _leaves(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str):
        if key not in _STRUCTURE:
            yield value
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from _leaves(member, name)
    elif isinstance(value, list):
        for member in value:
            yield from _leaves(member, key)


def _replaced(value: Any, old: str, new: str, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _replaced(member, old, new, name) for name, member in value.items()}
    if isinstance(value, list):
        return [_replaced(member, old, new, key) for member in value]
    return new if value == old and key not in _STRUCTURE else value


def _new(random: Random, old: str) -> str:
    return random.choice(
        (text(random), text(random), f"{old}{text(random)}", f"{text(random)}{old}")
    )


def edit(random: Random, file: Path) -> None:
    """Replace one text of a file, wherever it stands, by a hostile one."""
    match file.suffix:
        case ".json":
            document = json.loads(file.read_bytes())
            if found := sorted({*_leaves(document)}):
                old = random.choice(found)
                document = _replaced(document, old, _new(random, old))
            file.write_text(json.dumps(document))
        case ".parquet":
            table = pq.read_table(file)
            pq.write_table(_edited(random, table), file)
        case ".arrow":
            with contextlib.suppress(ChopperError):
                table = _edited(random, read_stream(file, file.stem)[0])
                stream = StreamWriter(file, file.stem)
                try:
                    stream.write(table.to_pydict())
                finally:
                    stream.close()
        case ".sqlite" | ".db" | ".rpd":
            with contextlib.closing(sqlite3.connect(file)) as db:
                _edit_database(random, db)
                db.commit()


def _edited(random: Random, table: pa.Table) -> pa.Table:
    names = [f.name for f in table.schema if "string" in str(f.type)]
    if not names or not table.num_rows:
        return table
    name = random.choice(names)
    values = table[name].to_pylist()
    old = random.choice(values)
    new = _new(random, old or "").encode("utf-8", "replace").decode()
    changed = pa.array([new if v == old else v for v in values], table.schema.field(name).type)
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), changed)


def _edit_database(random: Random, db: sqlite3.Connection) -> None:
    tables = [r[0] for r in db.execute("select name from sqlite_master where type='table'")]
    places = [
        (table, column[1])
        for table in sorted(tables)
        for column in db.execute(f'pragma table_info("{table}")')
        if "text" in column[2].lower() or "char" in column[2].lower()
    ]
    if not places:
        return
    table, column = random.choice(places)
    found = [r[0] for r in db.execute(f'select distinct "{column}" from "{table}"')]
    if texts := sorted(value for value in found if isinstance(value, str)):
        old = random.choice(texts)
        new = _new(random, old).encode("utf-8", "replace").decode()
        with contextlib.suppress(sqlite3.IntegrityError):
            db.execute(f'update "{table}" set "{column}" = ? where "{column}" = ?', (new, old))


# ---------------------------------------------------------------- in outputs


def of_terminal(shown: str) -> str | None:
    """A character that a terminal would obey, or that nobody sees."""
    found = next((c for c in shown if c != "\n" and not is_shown(c)), None)
    return None if found is None else f"{found!r} is shown"


def of_messages(err: str) -> str | None:
    """What is wrong with lines on stderr."""
    if (problem := of_terminal(err)) is not None:
        return f"stderr: {problem}"
    longest = max(map(len, err.split("\n")))
    return f"stderr: a line of {longest} characters" if longest > MESSAGE_MOST else None


def _json(data: str) -> str | None:
    json.loads(data)
    return of_terminal(data)


def _json_lines(data: str) -> str | None:
    for line in data.splitlines():
        json.loads(line)
    return of_terminal(data)


def of_json(data: str) -> str | None:
    """What is wrong with a JSON document, or with one in each line."""
    try:
        return _json(data)
    except ValueError:
        return _json_lines(data)


_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_NUMBER = re.compile(
    r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE | re.ASCII
)


def of_csv(data: str) -> str | None:
    """What is wrong with a CSV, to Python and DuckDB."""
    rows = [*csv.reader(io.StringIO(data, newline=""), strict=True)]
    if len({len(row) for row in rows}) > 1:
        return f"rows of {sorted({len(row) for row in rows})} cells"
    for cell in (cell for row in rows for cell in row):
        if (problem := of_terminal(cell)) is not None:
            return f"{problem} in a cell"
        if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell):
            return f"a cell is a formula: {cell[:60]!r}"
    with contextlib.closing(duckdb.connect()) as db:
        db.execute("SET threads=1")
        found = db.read_csv(
            io.StringIO(data), all_varchar=True, header=True, delimiter=",", quotechar='"',
            escapechar='"', na_values="\x01",
        ).fetchall()  # fmt: skip
    if [[cell or "" for cell in row] for row in found] != rows[1:]:
        return "DuckDB reads other cells"
    return None


_LIVE = re.compile(r"(?<!\w)@\w|#\d|GH-\d|https?:|www\.|ftp:", re.IGNORECASE)
_BLOCKS = ("ordered_list_open", "blockquote_open", "fence", "code_block", "html_block", "hr")


def of_markdown(data: str) -> str | None:
    """What a text became in Markdown: markup, a link, a mention."""
    if (problem := of_terminal(data)) is not None:
        return problem
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for token in parser.parse(data):
        if token.type in _BLOCKS:
            return f"{token.type}: {token.content[:80]!r} in line {token.map}"
        if token.type == "heading_open" and token.markup in "==-":
            return f"a heading of {token.markup!r} in line {token.map}"
        for child in token.children or ():
            if child.type in ("html_inline", "link_open", "image", "s_open", "hardbreak"):
                return (
                    f"{child.type} {child.content[:80]!r} {child.attrs} in {token.content[:200]!r}"
                )
            if child.type == "text" and (live := _LIVE.search(child.content)):
                return f"{live[0]!r} is live in {token.content[:200]!r}"
        strong = re.search(
            rf"(?<!\\)\*\*{MARK}(?<!\\)\*\*|(?<![\\\w])_{MARK}_(?!\w)", token.content
        )
        if token.children and strong and any(c.content == MARK for c in token.children):
            return f"{strong[0]} is markup in {token.content[:200]!r}"
    return None


def _of_packed(data: str) -> str | None:
    """What is wrong with JSON that is deflated, maybe before arrays."""
    try:
        inside = zlib.decompress(base64.b64decode(data, validate=True))
    except (ValueError, zlib.error):
        return None
    if inside[4:5] == b"{":
        inside = inside[4 : 4 + int.from_bytes(inside[:4], "little")]
    return of_json(inside.decode()) if inside[:1] in b"{[" else None


class _Html(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.problem: str | None = None
        self._inside = ""
        self._json = False
        self._data: list[str] = []

    def _found(self, problem: str) -> None:
        self.problem = self.problem or problem

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if MARK in tag:
            self._found(f"a tag <{tag}>")
        for name, value in attrs:
            if MARK in name or (MARK in (value or "") and name.startswith("on")):
                self._found(f"an attribute {name}={value!r} of {tag}")
            if name in ("href", "src") and (value or "").strip().lower().startswith("javascript:"):
                self._found(f"a script in {name}={value!r} of {tag}")
            if tag == "img" and name == "src" and value == MARK:
                self._found("an image")
            if (shown := of_terminal((value or "").replace("\n", ""))) is not None:
                self._found(f"{shown} in {name} of {tag}")
        if tag in ("script", "style"):
            self._inside, self._data = tag, []
            self._json = dict(attrs).get("type") == "application/json"

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            data, self._inside = "".join(self._data), ""
            if self._json:
                if (problem := of_json(data)) is not None:
                    self._found(f"{problem} in a script's data")
            elif (problem := _of_packed(data)) is not None:
                self._found(f"{problem} in a script's packed data")
            elif MARK in data:
                self._found(f"words of the recording in a {tag}")

    def handle_comment(self, data: str) -> None:
        if MARK in data:
            self._found("words of the recording in a comment")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self._data.append(data)
        elif (problem := of_terminal(data)) is not None:
            self._found(f"{problem} in {data[:80]!r}")


def of_html(data: str) -> str | None:
    """What a text became in HTML."""
    parser = _Html()
    parser.feed(data)
    parser.close()
    return parser.problem


def _xml(data: str) -> str | None:
    ET.fromstring(data)
    return of_terminal(data)


_OF_FILES: dict[str, Callable[[str], str | None]] = {
    ".json": of_json,
    ".csv": of_csv,
    ".md": of_markdown,
    ".html": of_html,
    ".txt": of_terminal,
    ".xml": _xml,
}


def of_file(file: Path) -> str | None:
    """What is wrong with an output, to a parser of its format."""
    try:
        if file.suffix == ".parquet":
            pq.read_table(io.BytesIO(file.read_bytes()))
            return None
        if file.suffix == ".gz":
            return of_json(gzip.decompress(file.read_bytes()).decode())
        check = _OF_FILES.get(file.suffix.lower())
        with file.open(encoding="utf-8", newline="") as opened:
            return None if check is None else check(opened.read())
    except (ValueError, csv.Error, ET.ParseError, duckdb.Error, pa.ArrowException, OSError) as exc:
        return f"cannot be parsed: {type(exc).__name__}: {str(exc)[:300]}"


def of_stdout(command: list[str], out: str) -> str | None:
    """What is wrong with what a command printed, which no terminal reads: paths are exact."""
    for before, word in itertools.pairwise(command):
        if before in ("-o", "--junit"):
            out = out.replace(str(Path(word)), "")
    if "--csv" in command or ("csv" in command and "--format" in command):
        try:
            return of_csv(out) if out else None
        except (csv.Error, duckdb.Error) as exc:
            return f"CSV that is none: {exc}"
    return of_terminal(out)
