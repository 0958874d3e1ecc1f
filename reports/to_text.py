"""Show a page in a terminal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from chopper import wording as fmt
from chopper.errors import printable
from chopper.reports import page as model
from chopper.reports.page import Block, Cell, Column, Page

_MIN_WIDTH = 60
_GAP = 2
_NAME_WIDTHS = (24, 17)
"""Least width of a first column of names, and of the others, where they are longer."""
_PROSE_WIDTH = 24
_WANTED = {"name": 30, "prose": 44}
"""Width of names and prose for which columns are left out; beyond, they are shortened."""
_BAR_WIDTHS = (6, 30)
MARKS = {
    "error": ("✗", "bold red"),
    "warning": ("!", "yellow"),
    "info": ("·", "dim"),
    "ok": ("✓", "green"),
    "unknown": ("?", "yellow"),
    "": ("-", ""),
}


def render(page: Page, *, width: int = 100, color: bool = False) -> str:
    """Return a page as text.

    Args:
        page: what to show.
        width: columns of the terminal; lines never exceed it.
        color: emit ANSI colours.
    """
    width = max(width, _MIN_WIDTH)
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    title = Text(printable(page.title), style="bold")
    if page.facts:
        title.append("  " + printable(" · ".join(page.facts)), style="not bold dim")
    console.print(title)
    if page.headline:
        console.print()
        console.print(Text(printable(page.headline), style="bold"))
    _blocks(console, page.summary, started=True)
    for section in page.sections:
        blocks = [b for b in section.blocks if "txt" in b.formats]
        if "txt" in section.formats and blocks:
            console.print()
            if section.title:
                console.print(Text(printable(section.title), style="bold"))
            titled = bool(section.title and getattr(blocks[0], "title", ""))
            _blocks(console, blocks, started=titled)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _blocks(console: Console, blocks: Sequence[Block], *, started: bool) -> None:
    """Print blocks, the first below something if started; tables stand apart from all else."""
    apart = False
    for block in blocks:
        if "txt" not in block.formats:
            continue
        tabular = isinstance(block, model.Table | model.Facts)
        heading = isinstance(block, model.Paragraph) and block.style == "strong"
        if started and (tabular or apart or (heading and block is not blocks[0])):
            console.print()
        started, apart = True, tabular
        if isinstance(block, model.Paragraph):
            style = {"strong": "bold", "dim": "dim"}.get(block.style, "")
            console.print(Text(printable(block.text), style=style))
        elif isinstance(block, model.Items):
            _items(console, block)
        elif isinstance(block, model.Facts):
            _facts(console, block)
        elif isinstance(block, model.Table):
            _table(console, block)


def _titled(console: Console, title: str) -> None:
    if title:
        console.print(Text(printable(title), style="bold"))


def _items(console: Console, block: model.Items) -> None:
    _titled(console, block.title)
    for one in block.entries():
        mark, style = MARKS[one.mark]
        line = Grid.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(overflow="fold")
        line.add_row(Text(mark, style=style), Text(printable(one.text), style=style))
        console.print(line)


def _facts(console: Console, block: model.Facts) -> None:
    _titled(console, block.title)
    for fact in block.facts:
        line = Text(f"{printable(fact.label)}: ", style="dim")
        line.append(printable(fact.value), style="not dim")
        if fact.note:
            line.append(f" ({printable(fact.note)})")
        console.print(line)


def _table(console: Console, table: model.Table) -> None:
    _titled(console, table.title)
    columns, rows = table.typed_columns(), table.typed_rows()
    listed = rows[: table.limit]
    if listed and columns:
        longest = [max(len(_text(row[i])) for row in listed) for i in range(len(columns))]
        blocks = _layout(columns, longest, console.width, names_all=table.overflow == "below")
        below = blocks if table.overflow == "below" else blocks[:1]
        for number, block in enumerate(below):
            if number:
                console.print()
            _grid(console, columns, listed, block)
        shown_columns = {i for block in below for i in block}
        rest = [
            printable(columns[i].heading)
            for block in blocks
            for i in block
            if i not in shown_columns
        ]
        if rest:
            words = f"… hidden columns (see --csv and --json): {', '.join(rest)}"
            console.print(Text(words, style="dim"))
    more = fmt.plural(len(rows) - len(listed), "more row")
    notes = f"… {more} (--top N)" if len(rows) > len(listed) else "", table.rest, table.note
    for words in filter(None, notes):
        console.print(Text(printable(words), style="dim"))


def _text(cell: Cell) -> str:
    """Return a cell as one line."""
    below = f" ({cell.below})" if cell.below else ""
    return "  " * cell.depth + printable(cell.text + below)


def _layout(
    columns: list[Column], cells: list[int], width: int, *, names_all: bool
) -> list[dict[int, int]]:
    """Return the blocks to print below each other, each column → its characters.

    ``cells`` are the characters of each column's longest cell; with ``names_all`` each block begins
    with all leading columns of names, else with the first alone.
    """
    natural = [max(n, len(printable(c.heading))) for n, c in zip(cells, columns, strict=True)]
    chosen = list(range(len(columns)))
    wanted = [
        n if c.kind in ("number", "id") else min(n, _WANTED[c.kind])
        for n, c in zip(natural, columns, strict=True)
    ]
    wide = [i for i in chosen if columns[i].wide]
    while wide and _total(wanted[i] for i in chosen) > width:
        chosen.remove(wide.pop())
    least = {i: _least(columns[i], cells[i], first=i == 0) for i in chosen}
    names = [*itertools.takewhile(lambda i: columns[i].kind != "number", chosen)]
    names = names if names_all else chosen[:1]
    blocks = [[*names]]
    for i in chosen[len(names) :]:
        if blocks[-1] != names and _total(least[k] for k in (*blocks[-1], i)) > width:
            blocks.append([*names])
        blocks[-1].append(i)
    return [_spread(columns, {i: least[i] for i in block}, natural, width) for block in blocks]


def _least(column: Column, cells: int, *, first: bool) -> int:
    """Return the characters that a column cannot do without; headings are wrapped."""
    floor = {"name": _NAME_WIDTHS[not first], "prose": _PROSE_WIDTH}.get(column.kind, cells)
    return max(min(cells, floor), *map(len, ["", *printable(column.heading).split()]))


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _spread(
    columns: list[Column], widths: dict[int, int], natural: list[int], width: int
) -> dict[int, int]:
    """Divide the remaining width among columns that need it: headings first, then short names."""
    spare = max(width - _total(widths.values()), 0)
    order = sorted(widths, key=lambda i: (columns[i].kind != "number", natural[i]))
    for remaining_count, i in zip(range(len(order), 0, -1), order, strict=True):
        share = spare if columns[i].kind == "number" else spare // remaining_count
        more = min(natural[i] - widths[i], share)
        widths[i] += more
        spare -= more
    return widths


def _grid(
    console: Console, columns: list[Column], rows: list[list[Cell]], widths: dict[int, int]
) -> None:
    """Print some columns beside each other, and a bar where there is room for it."""
    spare = min(console.width - _total(widths.values()) - _GAP, _BAR_WIDTHS[1])
    bars = [next((row[i] for i in widths if row[i].share_ratio is not None), None) for row in rows]
    drawn = any(bars) and spare >= _BAR_WIDTHS[0]
    grid = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for i, width in widths.items():
        side: Literal["right", "left"] = "right" if columns[i].kind == "number" else "left"
        heading = Text(printable(columns[i].heading))
        grid.add_column(heading, justify=side, width=width, overflow="fold")
    if drawn:
        grid.add_column("", no_wrap=True, width=spare)
    texts = {i: [_text(row[i]) for row in rows] for i in widths}
    for i, width in widths.items():
        if columns[i].kind == "name":
            texts[i] = fmt.ellipsize_all(texts[i], width)
    for number, (row, bar) in enumerate(zip(rows, bars, strict=True)):
        cells = [Text(texts[i][number], style=_style(row[i])) for i in widths]
        grid.add_row(*cells, *([_bar(bar, spare)] if drawn else []))
    console.print(grid)


def _style(cell: Cell) -> str:
    style = MARKS[cell.mark][1] if cell.mark else ""
    return "bold" if cell.strong else style or ("dim" if cell.dim else "")


def _bar(cell: Cell | None, width: int) -> Text:
    if cell is None or cell.share_ratio is None:
        return Text("")
    eighths = round(min(max(cell.share_ratio, 0.0), 1.0) * width * 8)
    full, part = divmod(max(eighths, 1 if cell.share_ratio > 0 else 0), 8)
    return Text("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else ""), style=cell.color)
