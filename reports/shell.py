"""The shell of the small pages: a template filled, styles, scripts and figures inside one file."""

from __future__ import annotations

import datetime as dt
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper._version import __version__
from chopper.reports import plotly_script
from chopper.reports.labels import sentence
from chopper.reports.to_html import to_script_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("util.js", "plots.js", "rows.js", "page.js")
_STYLES = ("report.css",)


def render(template: str, context: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """One self-contained page; names from data are escaped by the template.

    Args:
        template: file below ``reports/assets``.
        context: what the template shows.
        figures: id → Plotly figure, drawn into the element with that ``data-figure``.
    """
    plotly_script.prefetch()
    import jinja2
    from markupsafe import Markup as safe

    script = "(() => {\n'use strict';\n" + "\n".join(_asset(s) for s in _SCRIPTS) + "\n})();"
    plotly = plotly_script.get()
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
    )
    environment.filters["sentence"] = sentence
    return environment.get_template(template).render(
        **context,
        version=__version__,
        made=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        css=safe("".join(_asset(s) for s in _STYLES)),
        js=safe(script),
        data=safe(to_script_json({"figures": dict(figures)})),
        plotly=safe(plotly.deflated),
        plotly_bytes=plotly.size_bytes,
        script_hashes=safe(f"{plotly_script.policy_hash(script.encode())} {plotly.policy_hash}"),
    )


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
