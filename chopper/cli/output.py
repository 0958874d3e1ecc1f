"""Makes output writable, whatever the terminal's encoding and the names that it contains."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from chopper.reports.page import Page

_ERRORS = "chopper.readable"
_SIMILAR = {
    **dict.fromkeys("–—‑─", "-"),
    **dict.fromkeys("█▉▊▋▌▍▎▏▇▆▅▄▃▂▁●", "#"),
    **dict.fromkeys("│┃", "|"),
    "…": "...",
    "×": "x",
    "→": "->",
    "≥": ">=",
    "≤": "<=",
    "≈": "~",
    "−": "-",
    "±": "+-",
    "µ": "u",
    "μ": "u",
    "Δ": "d",
    "α": "alpha",
    "β": "beta",
    "·": "-",
    "²": "^2",
    "°": "",
}
"""What chopper writes beyond ASCII, as a terminal without it can show it."""


def make_writable() -> None:
    """Have stdout and stderr write what their encoding lacks as similar characters or ``\\u20ac``.

    Without it, a bar in a Latin-1 terminal is a traceback, and so is a file name that is not UTF-8.
    """
    codecs.register_error(_ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ERRORS)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(
        _SIMILAR.get(character) or character.encode("ascii", "backslashreplace").decode()
        for character in error.object[error.start : error.end]
    ), error.end


def print_page(page: Page) -> None:
    """Print a page to stdout as text, as wide as the terminal."""
    from chopper.reports import to_text

    terminal = sys.stdout.isatty()
    width = min(shutil.get_terminal_size((100, 24)).columns, 120) if terminal else 100
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    click.echo(to_text.render(page, width=width, color=color), nl=False, color=color)


def print_json(document: Any) -> None:
    """Print a document to stdout; what its encoding lacks is escaped, which loses nothing."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    unicode = codecs.lookup(encoding).name.startswith("utf-")
    click.echo(json.dumps(document, indent=2, ensure_ascii=not unicode))
