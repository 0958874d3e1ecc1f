"""Reports: pure functions from results to a page, shown as text, Markdown or HTML; and as JSON."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, Any, cast

from chopper.errors import UsageError, json_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chopper.analyzers.attribution import Attribution
    from chopper.reports.page import Format, Page

FORMATS: tuple[str, ...] = ("html", "md", "json", "txt")


def format_of(path: Path) -> str:
    """Return the format that a file's extension names.

    Raises:
        UsageError: no report has this extension.
    """
    extension = path.suffix.lower().lstrip(".")
    extension = {"htm": "html", "markdown": "md", "text": "txt"}.get(extension, extension)
    if extension not in FORMATS:
        described = f"extension {path.suffix!r}" if path.suffix else "no extension"
        known = ", ".join(f".{f}" for f in FORMATS)
        raise UsageError(f"{path}: {described}; the format follows the extension: {known}")
    return extension


def formatted(page: Callable[[], Page], document: Callable[[], object], format: str) -> str:
    """Return a report as one string.

    Args:
        page: makes the page; not called for JSON.
        document: makes the documented JSON form; called for JSON only.
        format: ``html`` (one self-contained page), ``md``, ``json`` or ``txt``.

    Raises:
        UsageError: no such format.
    """
    if format == "html":
        from chopper.reports import to_html

        to_html.prefetch_plotly()
        out = to_html.render(page())
    elif format == "md":
        from chopper.reports import to_markdown

        out = to_markdown.render(page())
    elif format == "txt":
        from chopper.reports import to_text

        out = to_text.render(page())
    elif format == "json":
        out = json_text(dumps(document(), indent=2, ensure_ascii=False)) + "\n"
    else:
        raise UsageError(f"format {format!r} unknown: one of {', '.join(FORMATS)}")
    # A name with a lone surrogate could not be written: it shows as "?".
    return out.encode("utf-8", "replace").decode("utf-8")


def render(attribution: Attribution, format: str, said: list[str] | None = None) -> str:
    """Return the report of a run as one string; formats are those of :func:`formatted`.

    Args:
        attribution: of the run.
        format: of the report.
        said: gets the verdict and, but for JSON, what to try first, a line each.
    """
    from chopper.reports import run

    notices = [] if said is None else said

    def page() -> Page:
        built = run.page(attribution, cast("Format", format))
        notices.extend([built.headline, *built.first])
        return built

    def as_document() -> dict[str, Any]:
        members = document(attribution)
        notices.append(members["verdict"]["sentence"])
        return members

    return formatted(page, as_document, format)


def document(attribution: Attribution) -> dict[str, Any]:
    """Return the documented JSON form of a run's attribution."""
    from chopper.analyzers.actions import actions
    from chopper.analyzers.replay.replay import recoverable, replay_or_reason
    from chopper.reports.actions import dropped_json, to_json
    from chopper.reports.story import Story
    from chopper.reports.tables import attribution_json
    from chopper.reports.verdict import verdict
    from chopper.storage.parts import further_processes
    from chopper.views import view

    def answers() -> tuple[Any, ...]:
        replay = replay_or_reason(attribution)
        tried = None if isinstance(replay, str) else actions(attribution, replay)
        return (
            verdict(Story(attribution), replay).to_dict(),
            recoverable(attribution, replay),
            None if tried is None else to_json(tried.ranked),
            view(attribution, "utilization").to_pylist() if attribution.ceilings else (),
            None if tried is None else dropped_json(tried),
            None if tried is None else tried.failed,
            None if tried is None else tried.pace,
        )

    said, savings, ranked, utilization, *rest = attribution.answer("document", answers)
    path = attribution.recording.path
    further = further_processes(path) if path else ()
    return attribution_json(attribution, said, savings, ranked, utilization, further, *rest)
