"""Show a page as one self-contained HTML file.

It opens without a network and runs nothing that a trace says. Names from traces reach the page in
three ways only: through the templates, which escape them; as JSON in a data block, with ``<``,
``>`` and ``&`` as escapes; and deflated. Scripts put them on the page as text. The content policy
lets run exactly the page's own script and Plotly, by their hashes, and no request.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import importlib.util
import json
import re
import sys
import threading
import zlib
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from chopper import wording as fmt
from chopper.causes import CAUSES, parents
from chopper.errors import ChopperError, is_shown, printable, printable_members
from chopper.reports import page as model
from chopper.reports.labels import color, full_label, ink, meaning
from chopper.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jinja2
    import numpy as np

    from chopper.reports.page import Block, Page


_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("util.js", "plots.js", "rows.js", "page.js")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_CELL_PX, _ROW_PX, _MOST_CELL_PX = 200, 34, 560
"""Height of a cell, of each row of its tables, and the most, beyond which it scrolls."""
_LEVEL = 4
"""zlib's: half the time of level 6, and 4 % more bytes."""
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
    plotly = _plotly()
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
        script_hashes=safe(f"{policy_hash(script.encode())} {plotly.policy_hash}"),
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


_ESCAPED = re.compile(r'\\[^"\\]')


def narrow(values: np.ndarray) -> np.ndarray:
    """The same integers in the smallest type that holds them; float64 beyond 32 bits.

    float64 is exact up to 2**53 ns, which is 104 days.
    """
    if len(values) == 0:
        return values.astype("u1")
    low, high = int(values.min()), int(values.max())
    for bits in (8, 16, 32):
        if low >= 0 and high < 2**bits:
            return values.astype(f"u{bits // 8}")
        if -(2 ** (bits - 1)) <= low < 0 and high < 2 ** (bits - 1):
            return values.astype(f"i{bits // 8}")
    return values.astype("f8")


def pack(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """Return ``meta`` and arrays as one base64 string, which ``assets/util.js`` reads.

    It is a zlib stream of ``uint32 header length, header (JSON), planes``. The header names each
    array with its type and length; its bytes follow plane by plane (all lowest bytes first),
    because high bytes of small numbers are runs of zeros that deflate to nothing.

    Args:
        meta: small things, JSON.
        arrays: integers (narrowed here) or float32/float64.
    """
    described = []
    planes: list[bytes] = []
    for name, values in arrays.items():
        values = values if values.dtype.kind == "f" else narrow(values)
        if sys.byteorder == "big":
            values = values.astype(values.dtype.newbyteorder("<"))
        width = values.dtype.itemsize
        described.append(
            {"name": name, "type": f"{values.dtype.kind}{width * 8}", "count": len(values)}
        )
        raw = values.tobytes()
        planes += [raw[byte::width] for byte in range(width)]
    header = compact_json({"meta": meta, "arrays": described}).encode()
    data = len(header).to_bytes(4, "little") + header + b"".join(planes)
    return deflate_text(data)


def compact_json(document: Any) -> str:
    """Return JSON for a page, whose scripts show its texts: those are printable."""

    def encoded(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    text = encoded(document)
    # JSON itself escapes control characters.
    if _ESCAPED.search(text) is None and all(map(is_shown, set(text))):
        return text
    return encoded(printable_members(document))


def deflate_text(text: bytes) -> str:
    """Return data as deflated base64."""
    return base64.b64encode(zlib.compress(text, _LEVEL)).decode("ascii")


class Script(msgspec.Struct, frozen=True):
    """A script as the page holds it."""

    deflated: str
    """zlib, base64."""
    policy_hash: str
    """Its source expression in a content security policy."""
    size_bytes: int
    """As it is evaluated."""


def _load_plotly() -> Script:
    # Found without importing plotly, whose figure classes the page does not need.
    spec = importlib.util.find_spec("plotly")
    origin = Path(spec.origin).parent if spec and spec.origin else Path()
    where = origin / "package_data" / "plotly.min.js"
    if not where.is_file():
        raise ChopperError(
            "plotly.min.js is not in the plotly package; reinstall it: "
            "pip install --force-reinstall plotly"
        )
    code = where.read_bytes()
    return Script(deflate_text(code), policy_hash(code), len(code))


def policy_hash(code: bytes) -> str:
    """The source expression that lets exactly this script run."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(code).digest()).decode("ascii") + "'"


@cache
def prefetch_plotly() -> Future[Script]:
    """Start compressing, to be ready when the rest of the report is.

    zlib works without the interpreter's lock, so this costs nothing beside reading a trace.
    """
    script: Future[Script] = Future()

    def load() -> None:
        try:
            script.set_result(_load_plotly())
        except Exception as exc:  # noqa: BLE001 - raised again where the script is waited for
            script.set_exception(exc)

    # A daemon: a command that ends with an error does not wait for it.
    threading.Thread(target=load, name="plotly", daemon=True).start()
    return script


def _plotly() -> Script:
    """Return the script, waited for where it is being prepared.

    Raises:
        ChopperError: the plotly package does not hold it.
    """
    return prefetch_plotly().result()
