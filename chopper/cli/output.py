"""Output of commands: writable whatever the encoding; pages, JSON, and progress on stderr."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.addresses import without_secrets
from chopper.errors import json_text, printable, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.reports.page import Page

_ERRORS = "chopper.readable"
_QUIET_S = 1.0
_FRAME_S = 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
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


def terminal_width() -> int:
    """Return the columns to fill: COLUMNS, piped or not, else the terminal's up to 120, or 100."""
    width = shutil.get_terminal_size((100, 24)).columns
    return width if os.environ.get("COLUMNS") else min(width, 120)


def print_page(page: Page) -> None:
    """Print a page to stdout as text, as wide as the terminal."""
    from chopper.reports import to_text

    terminal, width = sys.stdout.isatty(), terminal_width()
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    click.echo(to_text.render(page, width=width, color=color), nl=False, color=color)


def print_json(document: Any) -> None:
    """Print a document to stdout; what its encoding lacks is escaped, which loses nothing."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    unicode = codecs.lookup(encoding).name.startswith("utf-")
    click.echo(json_text(json.dumps(document, indent=2, ensure_ascii=not unicode)))


def print_path(path: Path | str) -> None:
    """Print where something was written: a path, or an address without its secrets.

    Escaped where a terminal shows it; else byte by byte, for ``page=$(chopper report …)``.
    """
    name = str(path) if isinstance(path, Path) else without_secrets(path)
    if sys.stdout.isatty():
        click.echo(printable(name))
    else:
        click.echo(os.fsencode(name) if hasattr(sys.stdout, "buffer") else name, color=True)


def show_status(line: str) -> None:
    """Write a line to a terminal's stderr, over the last one."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\r{printable(line)}\x1b[K")
        sys.stderr.flush()


@contextlib.contextmanager
def progress(what: str, counted: Sequence[str] = ("",)) -> Iterator[None]:
    """Name the activity on stderr once it has taken a second.

    On a terminal the line shows the seconds so far, and how much is done by the last text of
    ``counted``, and is wiped at the end; elsewhere it is printed once.
    """
    done = threading.Event()
    thread = threading.Thread(
        target=_show, args=(what, counted, done), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(what: str, counted: Sequence[str], done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(_QUIET_S):
        return
    if not sys.stderr.isatty():
        say(f"{what} …")
        return
    frame = 0
    while True:
        seconds = time.monotonic() - start
        show_status(f"{_FRAMES[frame % len(_FRAMES)]} {what}{counted[-1]} … {seconds:.0f} s")
        frame += 1
        if done.wait(_FRAME_S):
            break
    show_status("")
