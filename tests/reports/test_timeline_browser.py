"""The timeline's details, sums, links and address, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import pytest

from tests.reports.test_browser import Opened, browser, replayable, report  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

_SCALE = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
_PAPER_PX = 718
"""An A4 page within its margins."""


@pytest.fixture
def show(browser: Browser) -> Iterator[Callable[..., Opened]]:  # noqa: F811
    contexts = []

    def opened(path: Path, *, width: int = 1280, hash: str = "") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        contexts.append(context)
        return Opened(context.new_page(), path, hash)

    yield opened
    for context in contexts:
        context.close()


def _detail(page: Page) -> str:
    return str(page.locator("#tl-detail").inner_text())


def _ns(text: str) -> float:
    number, unit = text.split()
    return float(number) * _SCALE[unit]


def _address(page: Page) -> dict[str, list[str]]:
    return parse_qs(str(page.evaluate("location.hash")).partition("?")[2])


def _drag(page: Page, start: float, end: float) -> None:
    """Drag over a stretch of the timeline, in shares of its width."""
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 60, steps=3)
    page.mouse.up()


def test_a_stretch_sums_to_its_length(show, report) -> None:  # noqa: F811
    page = show(report).page
    _drag(page, 0.25, 0.5)
    head = page.locator("#tl-detail h3").inner_text()
    assert head.startswith("Selected stretch: ")
    length = _ns(head.partition(": ")[2])
    cells = page.locator("#tl-detail .sums.device td:nth-child(2)").all_inner_texts()
    assert len(cells) > 2
    assert sum(map(_ns, cells)) == pytest.approx(length, rel=0.01)
    ranks = page.locator("#tl-detail .sums.ranks tr").all_inner_texts()
    assert [row.split("\t")[0] for row in ranks[1:]] == ["rank 0", "rank 1"]
    page.get_by_role("button", name="Zoom", exact=True).click()
    page.get_by_role("button", name="Clear", exact=True).click()
    assert page.locator("#tl-detail h3").inner_text().startswith("Whole step")


def test_all_ranks_stand_below_each_other_and_can_be_turned_to(show, report) -> None:  # noqa: F811
    opened = show(report)
    page = opened.page
    ranks = page.locator(".tl-gutter .of-rank")
    assert [text.split("\n")[0] for text in ranks.all_inner_texts()] == ["rank 0", "rank 1"]
    other = page.locator(".of-rank[aria-pressed=false]")
    words = other.inner_text().split("\n")[0]
    before = opened.pixels()
    other.click()
    opened.until(lambda: opened.pixels() != before, "the other rank")
    assert page.locator("#tl-rank").input_value() == words.removeprefix("rank ")
    assert opened.messages == []


def test_an_event_shows_its_launch_and_its_stack(show, replayable) -> None:  # noqa: F811
    opened = show(replayable)
    page = opened.page
    before = opened.settled()
    page.locator("#tl-detail .sums.events button").first.click()
    assert opened.settled() != before
    detail = _detail(page)
    assert "Launched by\ncudaLaunchKernel" in detail.replace("\n\n", "\n")
    assert "Launch delay" in detail
    page.get_by_role("button", name="cudaLaunchKernel", exact=True).click()
    assert "Launches" in _detail(page)
    page.locator("#tl-detail summary", has_text="Host stack").click()
    frames = page.locator("#tl-detail .frames li").all_inner_texts()
    assert frames[-1] == "cudaLaunchKernel"
    assert len(frames) > 1
    assert opened.messages == []


def test_the_address_brings_back_what_was_shown(show, report) -> None:  # noqa: F811
    opened = show(report)
    page = opened.page
    page.select_option("#tl-rank", "0")
    page.select_option("#tl-color", "phase")
    page.fill("#tl-search", "flash_fwd")
    page.locator("#tl-next:not(:disabled)").click()
    page.get_by_role("tab", name="Operator", exact=True).click()
    page.locator("#view-operators").click()
    opened.until(lambda: "table" in _address(page), "the address")
    kept, detail = _address(page), _detail(page)
    assert kept["rank"] == ["0"]
    assert {"event", "view", "find", "colour", "by"} <= set(kept)
    page.reload()
    page.wait_for_selector("html[data-ready=all]", state="attached")
    assert _detail(page) == detail
    assert page.locator("#tl-color").input_value() == "phase"
    assert page.locator("#tab-op").get_attribute("aria-selected") == "true"
    assert page.locator("#view-operators").get_attribute("aria-selected") == "true"
    assert _address(page) == kept
    assert opened.messages == []


def test_an_address_that_nobody_made_does_no_harm(show, report) -> None:  # noqa: F811
    hostile = "rank=99&step=-1&view=9-1&event=99999999&only=cause:<b>&path=x&by=none&at=1e9"
    opened = show(
        report, hash=f"#timeline?{hostile}&table=none&stretch=a-b&colour=red&row=__proto__"
    )
    assert opened.messages == []
    assert opened.page.locator("#tl-only").inner_text().startswith("cause <b>")
    assert opened.page.locator("#tl-only b").count() == 0


@pytest.mark.parametrize(
    "selector",
    [
        ".strip a >> nth=0",
        ".families .part a >> nth=1",
        "#gap table a.plain >> nth=0",
        "#details-table a.go >> nth=0",
        "#fig-waterfall .bars .point >> nth=6",
    ],
)
def test_bars_and_rows_lead_to_their_place(show, report, selector) -> None:  # noqa: F811
    opened = show(report)
    page = opened.page
    link = page.locator(selector)
    link.scroll_into_view_if_needed()
    link.click(force="bars" in selector)
    opened.until(lambda: "event" in _address(page), "an event")
    top = "document.querySelector('#tl').getBoundingClientRect().top"
    opened.until(lambda: 0 <= page.evaluate(top) < 400, "the timeline in view")
    assert page.locator("#tl-only").is_visible()
    assert page.get_by_role("button", name="Close", exact=True).is_visible()
    page.locator("#tl-only").click()
    assert (
        "only" not in parse_qs(page.url.partition("?")[2]) or page.locator("#tl-only").is_hidden()
    )
    assert opened.messages == []


def test_a_row_of_the_breakdown_leads_there_and_back(show, report) -> None:  # noqa: F811
    opened = show(report)
    page = opened.page
    page.get_by_role("tab", name="Operator", exact=True).click()
    page.locator("#breakdown-table .name button", has_text="flash_attention").first.click()
    page.locator("#breakdown-table .links a").click()
    opened.until(lambda: "event" in _address(page), "an event")
    assert "flash_fwd_kernel" in _detail(page)
    page.locator("#tl-detail .rows a", has_text="kernel").click()
    kernel = page.locator("#tab-kernel[aria-selected=true]")
    kernel.wait_for()
    assert page.locator("#breakdown-table .causes li").count() > 0
    assert opened.messages == []


def test_printed_it_is_a_document(show, report) -> None:  # noqa: F811
    page = show(report).page
    page.emulate_media(media="print")
    for control in (".bar", "#tl .tools", ".picker", ".top [data-copy]"):
        assert not page.locator(control).first.is_visible(), control
    assert page.locator("#tl-detail .sums").first.is_visible()
    # What causes mean stands once, and leaves room for their names.
    assert not page.locator("#gap tbody td.prose").first.is_visible()
    assert page.locator("#method tbody td.prose").first.is_visible()
    page.set_viewport_size({"width": _PAPER_PX, "height": 900})
    names = page.locator("#gap tbody td:first-child").all()
    assert min(name.bounding_box()["width"] for name in names) >= 150
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#fig-waterfall svg").first.bounding_box()["width"] <= _PAPER_PX
    assert page.pdf()[:5] == b"%PDF-"


def test_a_cause_leads_to_its_meaning(show, report) -> None:  # noqa: F811
    page = show(report).page
    link = page.locator("#gap td.prose a").first
    target = link.get_attribute("href")
    link.click()
    page.wait_for_function("location.hash.startsWith('#cause-')")
    row = page.locator(f"#method tr:has([id='{target[1:]}'])")
    assert link.inner_text() in row.inner_text()
    assert row.bounding_box()["y"] < page.viewport_size["height"]
    addresses = page.eval_on_selector_all("#gap td.prose a", "all => all.map((a) => a.hash)")
    assert all(page.locator(f"[id='{address[1:]}']").count() == 1 for address in addresses)
