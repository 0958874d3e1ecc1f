"""Show a page in a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from chopper import wording as fmt
from chopper.errors import printable
from chopper.reports import page as model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.reports.page import Block, Cell, Column, Page

_MIN_WIDTH = 60
_GAP = 2
_NAME_WIDTHS = (24, 17)
"""Least width of a first column of names, and of the others, where they are longer."""
_PROSE_WIDTH = 24
_WANTED = 44
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
    """Print blocks; tables stand apart from what is around them.

    Args:
        console: takes them.
        blocks: any; those that are not for a terminal are left out.
        started: something stands above the first.
    """
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
        line.add_column()
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
    columns = table.typed_columns()
    rows = [[_Shown(cell) for cell in row] for row in table.typed_rows()]
    listed = rows if table.limit is None else rows[: table.limit]
    if listed and columns:
        longest = [max(len(row[i].text) for row in listed) for i in range(len(columns))]
        fitting, rest = _layout(columns, longest, console.width, table.overflow)
        for number, block in enumerate(fitting):
            if number:
                console.print()
            _grid(console, columns, listed, block)
        if rest:
            names = ", ".join(printable(columns[i].heading) for i in rest)
            console.print(Text(f"… not shown, but in --csv and --json: {names}", style="dim"))
    if len(rows) > len(listed):
        more = fmt.plural(len(rows) - len(listed), "more row")
        console.print(Text(f"… {more} (--top N)", style="dim"))
    for words in (table.rest, table.note):
        if words:
            console.print(Text(printable(words), style="dim"))


class _Shown:
    """A cell as one line of text."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        below = f" ({cell.below})" if cell.below else ""
        self.text = "  " * cell.depth + printable(cell.text + below)

    def styled(self, width: int, kind: str) -> Text:
        """Return the text, a name shortened to a width, in its style."""
        style = MARKS[self.cell.mark][1] if self.cell.mark else ""
        style = "bold" if self.cell.strong else style or ("dim" if self.cell.dim else "")
        text = fmt.ellipsize(self.text, width) if kind == "name" else self.text
        return Text(text, style=style)


def _layout(
    columns: list[Column], cells: list[int], width: int, overflow: str
) -> tuple[list[dict[int, int]], list[int]]:
    """Choose the width of each column.

    Args:
        columns: all of them.
        cells: characters of the longest cell of each.
        width: of the terminal.
        overflow: of the table.

    Returns:
        blocks to print below each other, column → characters; columns that are only named.
    """
    natural = [max(n, len(printable(c.heading))) for n, c in zip(cells, columns, strict=True)]
    chosen = list(range(len(columns)))
    wanted = [
        n if c.kind in ("number", "id") else min(n, _WANTED)
        for n, c in zip(natural, columns, strict=True)
    ]
    while _total(wanted[i] for i in chosen) > width:
        wide = [i for i in chosen if columns[i].wide]
        if not wide:
            break
        chosen.remove(wide[-1])
    least = {i: _least(columns[i], cells[i], first=i == 0) for i in chosen}
    if overflow == "named":
        kept = chosen[:1]
        for i in chosen[1:]:
            if _total(least[k] for k in (*kept, i)) > width:
                break
            kept.append(i)
        return [_spread(columns, kept, least, natural, width)], chosen[len(kept) :]
    names = []
    for i in chosen:
        if columns[i].kind == "number":
            break
        names.append(i)
    blocks = [list(names)]
    for i in chosen[len(names) :]:
        if blocks[-1] != names and _total(least[k] for k in (*blocks[-1], i)) > width:
            blocks.append(list(names))
        blocks[-1].append(i)
    return [_spread(columns, block, least, natural, width) for block in blocks], []


def _least(column: Column, cells: int, *, first: bool) -> int:
    """Return the characters that a column cannot do without; headings are wrapped."""
    floor = {"name": _NAME_WIDTHS[not first], "prose": _PROSE_WIDTH}.get(column.kind, cells)
    return max(min(cells, floor), *map(len, ["", *printable(column.heading).split()]))


def _total(widths: object) -> int:
    sizes = list(widths)  # type: ignore[call-overload]
    return int(sum(sizes)) + _GAP * (len(sizes) - 1)


def _spread(
    columns: list[Column], chosen: list[int], least: dict[int, int], natural: list[int], width: int
) -> dict[int, int]:
    """Share what is left among the columns that lack room: headings first, then short names."""
    out = {i: least[i] for i in chosen}
    spare = max(width - _total(out.values()), 0)
    order = sorted(chosen, key=lambda i: (columns[i].kind != "number", natural[i]))
    for left, i in zip(range(len(order), 0, -1), order, strict=True):
        if columns[i].kind == "number":
            left = 1
        more = min(natural[i] - out[i], spare // left)
        out[i] += more
        spare -= more
    return out


def _grid(
    console: Console, columns: list[Column], rows: list[list[_Shown]], widths: dict[int, int]
) -> None:
    """Print some columns beside each other, and a bar where there is room for it."""
    spare = console.width - _total(widths.values()) - _GAP
    bars = any(row[i].cell.share_ratio is not None for row in rows for i in widths)
    bar_width = min(spare, _BAR_WIDTHS[1]) if bars and spare >= _BAR_WIDTHS[0] else 0
    grid = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for i, width in widths.items():
        column = columns[i]
        number = column.kind == "number"
        grid.add_column(
            Text(printable(column.heading)),
            justify="right" if number else "left",
            width=width,
            overflow="fold",
        )
    if bar_width:
        grid.add_column("", no_wrap=True, width=bar_width)
    for row in rows:
        cells = [row[i].styled(width, columns[i].kind) for i, width in widths.items()]
        if bar_width:
            cells.append(_bar([row[i].cell for i in widths], bar_width))
        grid.add_row(*cells)
    console.print(grid)


def _bar(cells: list[Cell], width: int) -> Text:
    for cell in cells:
        if cell.share_ratio is not None:
            eighths = round(min(max(cell.share_ratio, 0.0), 1.0) * width * 8)
            full, part = divmod(max(eighths, 1 if cell.share_ratio > 0 else 0), 8)
            return Text("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else ""), style=cell.color)
    return Text("")
