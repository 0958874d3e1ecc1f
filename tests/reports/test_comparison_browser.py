"""The page of a comparison in a real browser, from a file, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chopper.analyzers.compare.gate import decide, parse
from chopper.analyzers.compare.runs import compare
from chopper.reports import comparison as report
from tests.reports.make import HOSTILE, Shape, make
from tests.reports.test_browser import Opened, browser

__all__ = ["browser"]
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    a, b = (make(Shape(ranks=2, steps=6, layers=4, seed=s, hostile=True)) for s in (0, 1))
    a.recording.manifest.name = "</script><script>window.__pwned = 5</script>"
    found = compare(a, b)
    path: Path = tmp_path_factory.mktemp("comparison") / "comparison.html"
    gate = decide(found, parse("step>+5%"))
    path.write_text(report.render(found, "html", gate=gate), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, page_file, request) -> Iterator[Opened]:
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    yield Opened(context.new_page(), page_file)
    context.close()


def test_rows_are_sorted_filtered_and_shown_on_demand(opened) -> None:
    table = opened.page.locator("#kernel")
    rows = table.locator("tbody tr:visible")
    table.get_by_role("button", name="Calls A").click()
    calls = [
        float(v)
        for v in table.locator("tbody td:nth-child(6)").evaluate_all(
            "cells => cells.map((c) => c.dataset.v)"
        )
    ]
    assert calls == sorted(calls, reverse=True)
    table.get_by_role("button", name="Calls A").click()
    assert table.locator("th[aria-sort=ascending]").count() == 1
    table.locator("input").fill("onerror")
    assert rows.count() == 1
    assert HOSTILE[2] in rows.first.inner_text()
    table.locator("input").fill("no such kernel")
    assert rows.count() == 0
    assert "No row" in table.locator(".grid-foot").inner_text()
    assert opened.messages == []
