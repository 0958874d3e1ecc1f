"""Reports: pure functions from tables to HTML, Markdown, text and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from chopper.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from chopper.attribution import Attribution

FORMATS: tuple[str, ...] = ("html", "md", "json", "txt")


def format_of(path: Path) -> str:
    """The format that a file's extension names.

    Raises:
        UsageError: no report has this extension.
    """
    extension = path.suffix.lower().lstrip(".")
    extension = {"htm": "html", "markdown": "md", "text": "txt"}.get(extension, extension)
    if extension not in FORMATS:
        found = f"extension {path.suffix!r}" if path.suffix else "no extension"
        known = ", ".join(f".{f}" for f in FORMATS)
        raise UsageError(f"{path}: {found}; the format follows the extension: {known}")
    return extension


def render(attribution: Attribution, format: str) -> str:
    """A report as one string.

    Args:
        attribution: what to report.
        format: ``html`` (one self-contained page), ``md``, ``json`` (the documented schema) or
            ``txt``.

    Raises:
        UsageError: no such format.
    """
    if format == "html":
        from chopper.reports import html

        out = html.render(attribution)
    elif format == "md":
        from chopper.reports import markdown

        out = markdown.render(attribution)
    elif format == "txt":
        from chopper.reports import text

        out = text.render(attribution)
    elif format == "json":
        out = json.dumps(attribution.to_dict(), indent=2, ensure_ascii=False) + "\n"
    else:
        raise UsageError(f"format {format!r} unknown: one of {', '.join(FORMATS)}")
    # A name with a lone surrogate could not be written: it shows as "?".
    return out.encode("utf-8", "replace").decode("utf-8")
