"""The report in a real browser, from a file, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chopper import pipeline, reports
from chopper.experiments.results import Headline
from chopper.reports import to_html
from chopper.reports.experiment import headlines_page
from tests.analyzers.replay.make import late_second_launch, run
from tests.reports.make import Shape, make
from tests.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_TIMEOUT_MS = PATIENCE_S * 1000


def _chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no Chromium on this machine: install chromium or google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=_chromium(), args=_ARGUMENTS, timeout=_TIMEOUT_MS
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    attribution = make(Shape(ranks=2, steps=4, layers=4, hostile=True))
    attribution.recording.manifest.name = "</script><script>window.__pwned = 5</script>"
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(reports.render(attribution, "html"), encoding="utf-8")
    return path


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, page: Page, path: Path, hash: str = "") -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(_TIMEOUT_MS)
        page.on("console", lambda m: self.messages.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.messages.append(f"error: {e}"))
        page.on("request", lambda r: self.requests.append(r.url))
        self.url = path.as_uri()
        page.goto(self.url + hash)
        page.wait_for_selector("html[data-ready=all]", state="attached", timeout=_TIMEOUT_MS)

    def pixels(self) -> str:
        """The timeline's canvas, as a hash of its pixels."""
        return str(
            self.page.evaluate(
                """() => {
                  const shown = document.querySelector('.tl-canvas');
                  const c = Object.assign(document.createElement('canvas'),
                    { width: shown.width, height: shown.height });
                  const g = c.getContext('2d', { willReadFrequently: true });
                  g.drawImage(shown, 0, 0);
                  const d = g.getImageData(0, 0, c.width, c.height).data;
                  let h = 7, painted = 0;
                  for (let i = 0; i < d.length; i += 4) {
                    h = (h * 31 + d[i] * 3 + d[i + 1] * 5 + d[i + 2] * 7 + d[i + 3]) | 0;
                    painted += d[i + 3] > 0;
                  }
                  return painted > 1000 ? String(h) : 'blank';
                }"""
            )
        )

    def frame(self) -> None:
        """Let the page draw what it has been asked for."""
        self.page.evaluate(
            "() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))"
        )

    def settled(self) -> str:
        """The pixels after the next frames."""
        self.frame()
        return self.pixels()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, frame by frame."""

        def after_a_frame() -> bool:
            self.frame()
            return condition()

        until(after_a_frame, what)


@pytest.fixture
def opened(browser, report, request) -> Iterator[Opened]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 900},
        color_scheme=getattr(request, "param", "light"),
        offline=True,
    )
    yield Opened(context.new_page(), report)
    context.close()


@pytest.mark.parametrize("opened", ["light", "dark"], indirect=True)
def test_it_renders_silently_and_alone(opened) -> None:
    assert opened.messages == []
    assert opened.requests == [opened.url]
    for figure in ("waterfall", "steps", "telemetry"):
        assert opened.page.locator(f"#fig-{figure} svg.main-svg").count() >= 1, figure
    assert opened.page.locator("#fig-waterfall .bars .point").count() > 5
    assert opened.pixels() != "blank"
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_are_shown_not_run(opened) -> None:
    page = opened.page
    page.get_by_role("tab", name="Kernel", exact=True).click()
    for name in (
        "<script>window.__pwned = 1</script>",
        '"><img src=x onerror="window.__pwned = 3">',
    ):
        rows = page.locator("#breakdown-table").get_by_role("button", name=name, exact=True)
        assert rows.count() == 1
    page.fill("#tl-search", "onerror")
    page.locator("#tl-next:not(:disabled)").click()
    assert "window.__pwned = 3" in page.locator("#tl-detail h3").inner_text()
    assert page.evaluate("window.__pwned") is None
    assert page.locator("main img").count() == 0
    assert opened.messages == []


def test_the_reason_of_a_withheld_headline_wraps_within_its_column(browser, tmp_path) -> None:
    rows = [
        Headline(system="S", claim="c", ours=4.5, configuration="2 ranks"),
        Headline(system="S", claim="d", why="withheld: " + "the repetitions differ too much; " * 6),
    ]
    file = tmp_path / "headlines.html"
    file.write_text(to_html.render(headlines_page("made", rows)), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = Opened(context.new_page(), file).page
    assert page.get_by_role("cell", name="withheld: the").count() == 1
    fits = "document.querySelector('#headlines .card').scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    context.close()


def _times(page: Page) -> list[float]:
    scale = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
    texts = page.locator("#breakdown-table tbody tr.row td:nth-child(2)").all_inner_texts()
    return [float(t.split()[0]) * scale[t.split()[1]] for t in texts]


def test_tables_sort_and_filter(opened) -> None:
    page = opened.page
    page.get_by_role("tab", name="Operator", exact=True).click()
    falling = _times(page)
    assert len(falling) > 5
    assert falling == sorted(falling, reverse=True)
    page.get_by_role("button", name="Per step").click()
    assert _times(page) == sorted(falling)
    page.get_by_role("columnheader", name="Operator").get_by_role("button").click()
    names = page.locator("#breakdown-table tbody .name").all_inner_texts()
    assert [n.lower() for n in names] == sorted(n.lower() for n in names)
    page.fill("#filter", "mean backward")
    assert page.locator("#breakdown-table tbody .name").all_inner_texts() == ["aten::mean_backward"]
    page.fill("#filter", "no such operator")
    assert "No row" in page.locator("#breakdown-table").inner_text()


def test_a_row_opens_to_its_causes_by_keyboard(opened) -> None:
    page = opened.page
    row = page.locator("#breakdown-table tbody .name button").first
    row.focus()
    page.keyboard.press("Enter")
    assert page.locator("#breakdown-table .causes li").count() > 2
    page.keyboard.press("Enter")
    assert page.locator("#breakdown-table .causes li").count() == 0


def test_the_timeline_zooms_by_wheel_drag_keys_and_buttons(opened) -> None:
    page = opened.page
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    whole = opened.settled()
    box = canvas.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + 60

    page.mouse.move(x - 100, y)
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=4)
    page.mouse.up()
    page.mouse.move(5, 5)
    assert "Selected stretch" in page.locator("#tl-detail").inner_text()
    page.locator("#tl-body").focus()
    page.keyboard.press("z")
    dragged = opened.settled()
    assert dragged != whole
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    assert opened.settled() == whole
    page.keyboard.press("+")
    zoomed = opened.settled()
    assert zoomed != whole
    page.keyboard.press("ArrowRight")
    assert opened.settled() != zoomed
    page.keyboard.press("0")

    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    # Unlike the others, a turn of the wheel is not waited for.
    opened.until(lambda: opened.pixels() != whole, "another scale")
    page.mouse.move(5, 5)
    page.locator("#tl-fit").click()
    assert opened.settled() == whole
    page.locator("#tl-in").click()
    assert opened.settled() != whole
    assert opened.messages == []


def test_the_timeline_tells_what_is_under_the_pointer(opened) -> None:
    page = opened.page
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    page.fill("#tl-search", "flash_fwd")
    page.locator("#tl-next:not(:disabled)").click()
    detail = page.locator("#tl-detail").inner_text()
    assert "flash_fwd_kernel" in detail
    assert "aten::_scaled_dot_product_flash_attention" in detail
    box = canvas.bounding_box()
    assert box is not None
    top = (
        page.locator(".tl-gutter", has_text="stream 7")
        .locator("div", has_text="stream 7")
        .first.bounding_box()
    )
    assert top is not None
    page.mouse.move(box["x"] + box["width"] / 2, top["y"] + 8)
    tip = page.locator("#tip")
    tip.wait_for(state="visible")
    assert "flash_fwd_kernel" in tip.inner_text()
    assert "model.layers" in tip.inner_text() or "pwned" in tip.inner_text()


def test_ranks_and_steps_can_be_chosen(opened) -> None:
    page = opened.page
    first = opened.settled()
    page.select_option("#tl-rank", "0")
    page.select_option("#tl-step", index=0)
    opened.until(lambda: opened.pixels() != first, "another timeline")
    bars = page.locator("#fig-steps .bars").first
    before = bars.inner_html()
    page.select_option("#steps-rank", "1")
    opened.until(lambda: bars.inner_html() != before, "another rank's steps")
    assert opened.messages == []


def test_it_tells_its_story_without_scripts(browser, report) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(report.as_uri())
    text = page.locator("main").inner_text()
    assert "A step takes" in text
    assert "Straggler wait" in text
    context.close()


def test_detailed_tables_can_be_chosen_sorted_and_filtered(opened) -> None:
    page = opened.page
    table = page.locator("#details-table")
    page.locator("#view-kernels").click()
    assert page.locator("#view-kernels").get_attribute("aria-selected") == "true"
    rows = table.locator("tbody tr")
    everything = rows.count()
    assert everything > 5

    def column(label: str) -> list[str]:
        labels = table.locator("thead th").all_inner_texts()
        at = [text.strip().lower() for text in labels].index(label)
        texts: list[str] = table.locator(f"tbody td:nth-child({at + 1})").all_inner_texts()
        return texts

    calls = table.locator("thead button", has_text="Calls")
    for order in (True, False):
        calls.click()
        found = [int(text.replace("\u202f", "")) for text in column("calls")]
        assert found == sorted(found, reverse=order)
    assert table.locator("th[aria-sort=ascending]").inner_text().lower().startswith("calls")
    page.fill("#details-filter", "flash_fwd")
    assert 0 < rows.count() < everything
    page.fill("#details-filter", "no kernel of this name")
    assert "No row matches these words." in table.inner_text()
    page.locator("#view-kernels").press("ArrowDown")
    assert page.locator("#view-kernels").get_attribute("aria-selected") == "false"
    assert page.locator("#details-filter").input_value() == ""
    assert opened.messages == []


@pytest.fixture(scope="module")
def replayable(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(reports.render(pipeline.attribute(run(late_second_launch())), "html"))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_critical_path_is_marked_on_request(browser, replayable, scheme) -> None:
    context = browser.new_context(color_scheme=scheme, offline=True)
    opened = Opened(context.new_page(), replayable)
    page, button = opened.page, opened.page.locator("#tl-path")
    assert page.locator(".tl-gutter").get_by_text("Critical path", exact=True).count() == 1
    before = opened.settled()
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert opened.settled() != before
    legend = page.locator("#tl-legend").inner_text()
    assert "on the critical path" in legend
    assert "User Python 75.0 %" in legend  # 390 of 520
    button.click()
    assert opened.settled() == before
    assert "on the critical path" not in page.locator("#tl-legend").inner_text()
    assert opened.messages == []
    context.close()


def test_a_run_that_cannot_be_replayed_offers_no_critical_path(opened) -> None:
    assert opened.page.locator("#tl-path").is_hidden()
