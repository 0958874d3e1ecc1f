"""The page about clocks and the strips under the timeline, drawn by a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from chopper import reports
from chopper.analyzers.attribution import Attribution
from tests.analyzers.views.test_clock_views import attribution  # noqa: F401 - fixture
from tests.reports.test_browser import Opened, browser  # noqa: F401 - fixture

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_silently_and_strips_can_be_read(
    attribution: Attribution,  # noqa: F811
    browser: Browser,  # noqa: F811
    tmp_path: Path,
    scheme: Literal["light", "dark"],
) -> None:
    path = tmp_path / "report.html"
    path.write_text(reports.render(attribution, "html"), encoding="utf-8")
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme=scheme, offline=True
    )
    opened = Opened(context.new_page(), path)
    page = opened.page
    for figure in ("clocks_distribution", "clocks_power"):
        assert page.locator(f'[data-figure="{figure}"] svg.main-svg').count() >= 1, figure
    assert page.locator("#clocks .tiles dt").count() >= 4
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    labels = page.locator(".tl-gutter").inner_text()
    assert "Clock held by" in labels
    assert labels.index("SM clock") < labels.index("Board power")
    # A reading under the pointer, in its unit.
    strip = page.locator(".tl-gutter div[title='SM clock']").bounding_box()
    canvas = page.locator(".tl-canvas").bounding_box()
    assert strip is not None
    assert canvas is not None
    x, y = canvas["width"] * 0.9, strip["y"] - canvas["y"] + 20
    page.locator(".tl-canvas").hover(position={"x": x, "y": y})
    opened.until(lambda: "1.00 GHz" in page.locator("#tip").inner_text(), "the reading")
    assert opened.messages == []
    assert opened.requests == [opened.url]
    context.close()
