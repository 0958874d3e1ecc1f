"""The page model: what a report says, before it has a format.

A report is one function that returns a :class:`Page`. Three renderers show any page: ``text``,
``markdown`` and ``html``. A page holds plain text: renderers escape what their format would
interpret, shorten what does not fit, and set text between backticks as code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

Format = Literal["txt", "md", "html"]
EVERYWHERE: frozenset[Format] = frozenset(("txt", "md", "html"))
TERMINAL: frozenset[Format] = frozenset(("txt",))
DOCUMENT: frozenset[Format] = frozenset(("md", "html"))
PLAIN: frozenset[Format] = frozenset(("txt", "md"))
BROWSER: frozenset[Format] = frozenset(("html",))

Mark = Literal["", "error", "warning", "info", "ok", "unknown"]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of a table; a plain string is a cell without any of this."""

    text: str
    strong: bool = False
    dim: bool = False
    depth: int = 0
    """Levels of indentation."""
    hint: str = ""
    """Shown by a browser on hover: the full name, or what the cell means."""
    below: str = ""
    """A quieter second line; in brackets where there is one line only."""
    color: str = ""
    """Of a swatch before the text, or of the bar."""
    hollow: bool = False
    """The swatch is an outline: a sum of others."""
    share_ratio: float | None = None
    """Length of a bar beside the text, 0 to 1."""
    value: float | None = None
    """What sorting compares; None compares the text."""
    mark: Mark = ""
    """Severity or outcome that the text names."""
    link: str = ""
    """Where a browser's page shows it: an address on the page."""
    anchor: str = ""
    """The address on the page that links lead to."""
    code: bool = False


class Column(msgspec.Struct, frozen=True):
    """One column of a table; a plain string is its heading."""

    heading: str
    kind: Literal["", "number", "id", "name", "prose"] = ""
    """Numbers and ids are never cut, names are shortened in the middle, prose is wrapped. Empty: a
    name among the table's first ``words`` columns, else a number."""
    wide: bool = False
    """Left out where there is little room."""
    hint: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of cells."""

    columns: Sequence[str | Column]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    note: str = ""
    """What it shows, or why it has no rows."""
    rest: str = ""
    """What is said of rows that are not listed."""
    words: int = 1
    """So many leading columns hold names; the others hold numbers."""
    totals: int = 0
    """So many rows at the end are set apart from the others."""
    strong: frozenset[int] = frozenset()
    """Rows that stand out, by number."""
    limit: int | None = None
    """Rows shown in text and Markdown; None for all."""
    searchable: bool = False
    """A browser filters by name and sorts by any column."""
    overflow: Literal["below", "named"] = "below"
    """Columns beyond a terminal's width: printed below, or named only."""
    formats: frozenset[Format] = EVERYWHERE

    @property
    def tree(self) -> bool:
        """Return whether rows are indented."""
        return any(isinstance(c, Cell) and c.depth for row in self.rows for c in row[:1])

    def typed_columns(self) -> list[Column]:
        """Return the columns, each with its kind."""
        kinds: tuple[Literal["name", "number"], ...] = ("name", "number")
        columns = [c if isinstance(c, Column) else Column(c) for c in self.columns]
        return [
            c if c.kind else replace(c, kind=kinds[i >= self.words]) for i, c in enumerate(columns)
        ]

    def typed_rows(self) -> list[list[Cell]]:
        """Return the rows as cells; those of ``strong`` and ``totals`` are strong."""
        first_total = len(self.rows) - self.totals
        return [
            [
                replace(cell, strong=True) if i in self.strong or i >= first_total else cell
                for cell in (Cell(text=c) if isinstance(c, str) else c for c in row)
            ]
            for i, row in enumerate(self.rows)
        ]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A Plotly figure as plain data; browsers only."""

    name: str
    """Unique on the page."""
    title: str
    figure: Mapping[str, Any]
    note: str = ""
    label: str = ""
    """What it shows, for those who cannot see it; default: the title."""
    formats: frozenset[Format] = BROWSER


class Paragraph(msgspec.Struct, frozen=True):
    """A sentence or more."""

    text: str
    style: Literal["", "strong", "dim"] = ""
    formats: frozenset[Format] = EVERYWHERE


class Item(msgspec.Struct, frozen=True):
    """One entry of a list."""

    text: str
    mark: Mark = ""
    code: str = ""
    """Identifier of a finding."""


class Items(msgspec.Struct, frozen=True, kw_only=True):
    """A list: findings, notes, assumptions."""

    items: Sequence[Item | str]
    title: str = ""
    formats: frozenset[Format] = EVERYWHERE

    def entries(self) -> list[Item]:
        """Return the entries, each with its mark."""
        return [Item(i) if isinstance(i, str) else i for i in self.items]

    @property
    def alerting(self) -> bool:
        """Return whether any entry has a mark."""
        return any(i.mark for i in self.entries())


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity with its name."""

    label: str
    value: str
    note: str = ""
    share_ratio: float | None = None
    code: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Quantities with their names."""

    facts: Sequence[Fact]
    title: str = ""
    style: Literal["list", "tiles", "bars"] = "list"
    formats: frozenset[Format] = EVERYWHERE


class Cards(msgspec.Struct, frozen=True, kw_only=True):
    """Paragraphs under headings, beside each other: how numbers were made."""

    cards: Sequence[tuple[str, Sequence[str]]]
    formats: frozenset[Format] = BROWSER


class Widget(msgspec.Struct, frozen=True):
    """A part with a template of its own below ``reports/assets``; browsers only."""

    template: str
    context: Mapping[str, Any] = {}
    formats: frozenset[Format] = BROWSER


Block = Table | Figure | Paragraph | Items | Facts | Cards | Widget


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a page with its heading."""

    title: str
    blocks: Sequence[Block]
    id: str = ""
    """Anchor; sections that have one stand in the page's navigation."""
    short: str = ""
    """The title in the navigation, where it is another one."""
    intro: str = ""
    """What the section shows; not for a terminal."""
    formats: frozenset[Format] = EVERYWHERE


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Scripts and data that a page's own widgets need in a browser beyond figures."""

    scripts: Sequence[str]
    """Files below ``reports/assets``, in order."""
    data: Mapping[str, Any]
    """JSON that the scripts read."""
    blobs: Mapping[str, str]
    """Element id → deflated base64."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A report."""

    title: str
    headline: str
    """The answer, in a sentence; durations in it stand out."""
    facts: Sequence[str] = ()
    """What the page is about: run, ranks, devices, dates."""
    summary: Sequence[Block] = ()
    """What stands below the headline."""
    sections: Sequence[Section] = ()
    source: str = ""
    """Where the data lies."""
    first: Sequence[str] = ()
    """What to try first, a line each: a terminal says it of a page that goes to a file."""
    program: Program | None = None

    def blocks(self, format: Format) -> Iterator[Block]:
        """Yield every block that a format shows, in order."""
        for blocks in (self.summary, *(s.blocks for s in self.sections if format in s.formats)):
            yield from (b for b in blocks if format in b.formats)
