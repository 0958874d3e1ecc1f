"""Show a page as one self-contained HTML file.

It opens without a network and runs nothing that a trace says. Names from traces reach the page in
three ways only: through the templates, which escape them; as JSON in a data block, with ``<``,
``>`` and ``&`` as escapes; and deflated. Scripts put them on the page as text. The content policy
lets run exactly the page's own script and Plotly, by their hashes, and no request.
"""

from __future__ import annotations

import datetime as dt
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from chopper import wording as fmt
from chopper.causes import CAUSES, parents
from chopper.errors import printable
from chopper.reports import page as model
from chopper.reports import plotly_script
from chopper.reports.labels import advice, color, full_label, ink, meaning
from chopper.reports.pack import compact_json
from chopper.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jinja2

    from chopper.reports.page import Block, Page

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("util.js", "plots.js", "rows.js", "page.js")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_CELL_PX, _ROW_PX, _MOST_CELL_PX = 200, 34, 560
"""Height of a cell, of each row of its tables, and the most, beyond which it scrolls."""
_DURATION = re.compile(r"(−?\d[\d.,\u202f]{0,20} ?(?:ns|µs|ms|s|min \d+ s)\b)")


def render(page: Page) -> str:
    """Return a page as HTML.

    Raises:
        ChopperError: the plotly package lacks its script.
    """
    from markupsafe import Markup as safe

    program = page.program or model.Program(scripts=_SCRIPTS, data={}, blobs={})
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, program.scripts)) + "\n})();"
    figures = {
        b.name: b.figure for b in page.blocks("html") if isinstance(b, model.Figure) and b.figure
    }
    template = _environment().get_template("page.html.j2")
    plotly = plotly_script.get()
    return template.render(
        page=page,
        sections=[s for s in page.sections if "html" in s.formats and (s.blocks or s.intro)],
        version=__version__,
        now=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        css=safe(_asset("report.css")),
        js=safe(script),
        data=safe(to_script_json({"figures": figures, **program.data})),
        blobs=[(name, safe(blob)) for name, blob in program.blobs.items()],
        plotly=safe(plotly.deflated),
        plotly_bytes=plotly.size_bytes,
        script_hashes=safe(f"{plotly_script.policy_hash(script.encode())} {plotly.policy_hash}"),
    )


def cell(page: Page) -> str:
    """Return a page, all but its figures, as HTML for a notebook's cell.

    It stands in a frame whose styles reach nothing else and which runs no script, and is small
    enough to be stored with the notebook.
    """
    from markupsafe import Markup as safe

    page = replace(
        page,
        summary=[_unlinked(block) for block in page.summary],
        sections=[replace(s, blocks=[_unlinked(b) for b in s.blocks]) for s in page.sections],
    )
    blocks = list(page.blocks("md"))
    document = (
        _environment()
        .get_template("notebook.html.j2")
        .render(
            page=page,
            sections=[s for s in page.sections if any("md" in b.formats for b in s.blocks)],
            css=safe(_asset("report.css")),
            figures=any(isinstance(b, model.Figure) for b in page.blocks("html")),
        )
    )
    rows = sum(len(b.rows) for b in blocks if isinstance(b, model.Table))
    height_px = min(_CELL_PX + _ROW_PX * (rows + len(blocks)), _MOST_CELL_PX)
    attributes = safe('title="{}" srcdoc="{}"').format(page.title, document)
    style = f"width:100%;height:{height_px}px;border:0"
    frame: str = safe('<iframe sandbox {} style="{}"></iframe>').format(attributes, style)
    return str(frame)


def _unlinked(block: Block) -> Block:
    """Return a block without links to places of the report, which a cell has not."""
    if not isinstance(block, model.Table):
        return block
    return replace(block, rows=[[replace(c, link="") for c in row] for row in block.typed_rows()])


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
        finalize=lambda v: printable(v) if isinstance(v, str) and not isinstance(v, Markup) else v,
    )
    environment.filters["prose"] = lambda text: _prose(text, Markup)
    environment.filters["emphasised"] = lambda text: _emphasised(text, Markup)
    environment.filters |= {
        "grouped": _grouped,
        "advice": advice,
        "color": color,
        "doc": lambda cause: CAUSES[cause].doc,
        "path": lambda cause: " › ".join(CAUSES[p].label for p in reversed(parents(cause))),
        "ink": ink,
        "label": full_label,
        "meaning": meaning,
        "duration": fmt.duration,
        "ratio": fmt.ratio,
    }
    environment.globals["kind"] = lambda block: type(block).__name__
    return environment


def _grouped(blocks: Sequence[Block]) -> list[list[Block]]:
    """Return the blocks for a browser, adjacent half-width figures as one group."""
    groups: list[list[Block]] = []
    is_adjacent = False
    for block in blocks:
        if "html" in block.formats:
            half = isinstance(block, model.Figure) and block.half
            if half and is_adjacent:
                groups[-1].append(block)
            else:
                groups.append([block])
            is_adjacent = half
    return groups


def _prose(text: str, safe: Any) -> Any:
    """Return a text as markup; what stands between backticks is code."""
    return _marked(text.split("`"), "code", safe)


def _emphasised(text: str, safe: Any) -> Any:
    """Return a sentence as markup; durations are strong, what stands between backticks is code."""
    parts = text.split("`")
    parts[::2] = [_marked(_DURATION.split(printable(part)), "b", safe) for part in parts[::2]]
    return _marked(parts, "code", safe)


def _marked(parts: Sequence[str], tag: str, safe: Any) -> Any:
    """Join parts that are markup or texts; every second one is an element of a tag."""
    escaped = (part if isinstance(part, safe) else safe.escape(printable(part)) for part in parts)
    return safe("").join(safe(f"<{tag}>{p}</{tag}>") if i % 2 else p for i, p in enumerate(escaped))


def to_script_json(value: Any) -> str:
    """Return JSON that can stand inside a script element whatever its strings hold."""
    text = compact_json(value)
    return re.sub("[<>&]", lambda m: _UNSAFE[m.group()], text)
