"""Show a page as Markdown: for pull requests, issues and logs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chopper import wording as fmt
from chopper.errors import printable
from chopper.reports import page as model
from chopper.reports.page import Block, Cell, Page

# An underscore between letters or digits emphasizes nothing.
_SPECIAL = r"[\\`*{}\[\]<>#|~$&!]|(?<![^\W_])_|_(?![^\W_])"
_CODE_OR_SPECIAL = re.compile(rf"`[^`]+`|{_SPECIAL}")


# What becomes a mention, a reference or a link without any markup: an invisible space prevents it.
# Wherever it stands: "_" and "²" are word characters to Python, and end a word to others.
_LIVE = re.compile(r"(@|#)(?=\w)|(https?|ftp)(?=:)|(www)(?=\.)|(GH)(?=-\d)", re.IGNORECASE)
# At the begin of a line: a list, a rule, or a heading's underline.
_BLOCK = re.compile(r"^(\d{1,9})(?=[.)](?:\s|$))|^(?=[-+=][-+= ]*(?:\s|$))")


def escape(text: str) -> str:
    """Return a text that Markdown shows as it is: no markup, no HTML, no mention, one line."""
    return _inert(re.sub(_SPECIAL, r"\\\g<0>", _line(text)))


def _inert(text: str) -> str:
    """Return a text that begins no list, and in which names and addresses are no links."""
    return _BLOCK.sub(r"\1\\", _LIVE.sub(r"\g<0>&#8203;", text))


def _line(text: str) -> str:
    return " ".join(printable(" ".join(text.split())).split())


def _prose(text: str, *, cell: bool = False) -> str:
    """Return a text as Markdown; what stands between backticks is code.

    A table's cells end at bars, also within code.
    """

    def shown(found: re.Match[str]) -> str:
        code = found[0].replace("|", "\\|") if cell else found[0]
        reference = found[0] == "#" and found.string[found.end() :][:1].isalnum()
        return code if len(code) > 2 else f"\\{found[0]}" + "&#8203;" * reference

    text, parts, end = _line(text), [], 0
    for found in _CODE_OR_SPECIAL.finditer(text):
        parts += [_LIVE.sub(r"\g<0>&#8203;", text[end : found.start()]), shown(found)]
        end = found.end()
    return _BLOCK.sub(r"\1\\", "".join(parts) + _LIVE.sub(r"\g<0>&#8203;", text[end:]))


def _code(text: str) -> str:
    return _prose(f"`{text}`" if "`" not in text else text)


def render(page: Page) -> str:
    """Return a page as Markdown, without figures."""
    parts = [f"# {escape(page.title)}"]
    if page.facts:
        parts.append(escape(" · ".join(page.facts)))
    if page.headline:
        parts.append(f"**{_prose(page.headline)}**")
    parts += blocks(page.summary, level=2)
    for section in page.sections:
        inner = blocks(section.blocks, level=3)
        if "md" in section.formats and inner:
            parts += [f"## {escape(section.title)}"] if section.title else []
            parts += [_prose(section.intro)] if section.intro else []
            parts += inner
    return "\n\n".join(parts) + "\n"


def blocks(shown: Sequence[Block], *, level: int) -> list[str]:
    """Return those blocks that are for Markdown as paragraphs; titles are headings of a level.

    At level 0 they are bold: parts of a page that has headings of its own.
    """
    parts: list[str] = []
    for block in shown:
        if "md" not in block.formats:
            continue
        if isinstance(block, model.Paragraph):
            strong = block.style == "strong"
            parts.append(f"**{escape(block.text)}**" if strong else _prose(block.text))
            continue
        title = getattr(block, "title", "")
        if title:
            text = escape(title)
            parts.append(f"{'#' * level} {text}" if level else f"**{text}**")
        if isinstance(block, model.Table):
            parts += table(block)
        elif isinstance(block, model.Items):
            parts.append("\n".join(_item(i) for i in block.entries()))
        elif isinstance(block, model.Facts):
            parts.append("\n".join(_fact(f) for f in block.facts))
    return [part for part in parts if part]


def _item(item: model.Item) -> str:
    mark = f"**{item.mark}**: " if item.mark else ""
    code = f" ({_code(item.code)})" if item.code else ""
    return f"- {mark}{_prose(item.text)}{code}"


def _fact(fact: model.Fact) -> str:
    note = f" ({escape(fact.note)})" if fact.note else ""
    value = _code(fact.value) if fact.code else escape(fact.value)
    return f"- {escape(fact.label)}: {value}{note}"


def table(shown: model.Table) -> list[str]:
    """Return a table as paragraphs of Markdown: the rows and their notes."""
    columns = shown.typed_columns()
    rows = shown.typed_rows()
    listed = rows if shown.limit is None else rows[: shown.limit]
    lines = []
    if columns and listed:
        rule = ["---:" if c.kind == "number" else "---" for c in columns]
        head = [escape(c.heading) for c in columns]
        body = ([_cell(cell) for cell in row] for row in listed)
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *body)]
    more = fmt.plural(len(rows) - len(listed), "more row") if len(rows) > len(listed) else ""
    notes = (more and f"{more}.", _prose(shown.rest), _prose(shown.note))
    return [part for part in ("\n".join(lines), *notes) if part]


def _cell(cell: Cell) -> str:
    text = f"`{cell.text}`" if cell.code and "`" not in cell.text else cell.text
    text = _prose(text + (f" ({cell.below})" if cell.below else ""), cell=True)
    return "&nbsp;" * 4 * cell.depth + (f"**{text}**" if cell.strong and text else text)
