"""The page of a result's report, as a notebook shows it."""

from __future__ import annotations

import importlib
from typing import Any


def as_cell(result: Any, page: str) -> str:
    """Return HTML for a notebook's cell.

    Args:
        result: of any kind that has a report.
        page: ``module:function`` that makes the report's page of it; imported when a cell is shown.
    """
    module, _, function = page.partition(":")
    render = importlib.import_module("chopper.reports.to_html").cell
    html: str = render(getattr(importlib.import_module(module), function)(result))
    return html
