"""Every kind of page in both colour schemes, on a phone and on a desk: what axe-core finds, what is
cut off, what is blank, and ids that stand where labels belong."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chopper import pipeline, reports
from chopper.analyzers.compare.history import judge
from chopper.analyzers.compare.runs import compare
from chopper.causes import CAUSES
from chopper.experiments.loading import load
from chopper.experiments.sweep import swept
from chopper.reports import comparison, experiment
from chopper.reports import page as run_page
from tests.analyzers.compare.test_history import job, of
from tests.collectors.test_snapshot import snapshot
from tests.command import run
from tests.experiments.test_judgement import experiment as measured
from tests.reports.make import Shape, make
from tests.reports.test_browser import Opened, browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["browser"]
ROOT = Path(__file__).parents[2]
DVFS = ROOT / "tests/golden/own/dvfs_random"
FSDP2 = ROOT / "tests/golden/own/fsdp2"


def _written(folder: Path, *command: str | Path) -> str:
    out = folder / "written.html"
    done = run(*command, "-o", out, "--force")
    assert done.code == 0, done.err
    return out.read_text(encoding="utf-8")


def _of_experiment(folder: Path, name: str, factor: float = 1.0) -> Any:
    def time_ns(size: int, by: float) -> Callable[[int], float]:
        return lambda repeat: factor * size / by * (1 + 0.01 * repeat)

    values = {
        variant: {
            ("tokens_per_s",): 1000.0 * by,
            **{("time_ns", ("size_bytes", size)): time_ns(size, by) for size in (1024, 4096)},
        }
        for variant, by in (("a", 1.0), ("b", 2.0))
    }
    return load(measured(folder / name, "gemm", values, other_cores=0.0))


def _of_sweep(folder: Path) -> str:
    clocks = {"2000MHz": 2e9, "1500MHz": 1.5e9, "1000MHz": 1e9}
    values = {
        name: {
            ("step_ns",): (lambda r, hz=hz: 1e8 * (hz / 2e9) ** -0.8 * (1 + 0.01 * r)),
            ("power_w",): 400 * (hz / 2e9) ** 2,
        }
        for name, hz in clocks.items()
    }
    found = swept(load(measured(folder / "sweep", "sweep", values)), clocks, "Hz")
    return reports.formatted(lambda: experiment.sweep_page(found), dict, "html")


def _html(page: run_page.Page) -> str:
    return reports.formatted(lambda: page, dict, "html")


def _of_snapshot(folder: Path) -> str:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    return _written(folder, "report", path)


def _of_comparison(_folder: Path) -> str:
    a, b = (make(Shape(ranks=2, steps=4, layers=1, seed=seed)) for seed in (0, 1))
    return comparison.render(compare(a, b), "html")


PAGES: dict[str, Callable[[Path], str]] = {
    "run": lambda _: reports.render(make(Shape(ranks=4, steps=3, layers=1)), "html"),
    "recorded run": lambda _: reports.render(pipeline.attribute(FSDP2), "html"),
    "clocks": lambda _: reports.render(pipeline.attribute(DVFS), "html"),
    "snapshot": _of_snapshot,
    "comparison": _of_comparison,
    "whatif": lambda folder: _written(folder, "whatif", FSDP2),
    "limits": lambda folder: _written(folder, "estimate", "limits"),
    "memory": lambda folder: _written(folder, "estimate", "memory", "llama3-8b"),
    "network": lambda folder: _written(folder, "estimate", "network"),
    "experiment": lambda folder: experiment.render(_of_experiment(folder, "one"), "html"),
    "experiments": lambda folder: _html(
        experiment.page_of_two(
            experiment.Experiments(_of_experiment(folder, "a"), _of_experiment(folder, "b", 1.1))
        )
    ),
    "sweep": _of_sweep,
    "history": lambda _: _html(
        comparison.history_page(judge(of(1.03), job(0.002), find_ratio=0.02), outcome="not added")
    ),
}

LARGE = {"recorded run", "clocks", "network", "limits", "sweep"}
"""Their parts are on other pages, too."""
CUT = """() => [...document.querySelectorAll(".plot svg.main-svg text")].filter((text) => {
  const box = text.getBoundingClientRect(), room = text.closest(".plot").getBoundingClientRect();
  return box.width && (box.left < room.left - 1 || box.right > room.right + 1);
}).map((text) => text.textContent)"""
"""Texts of figures that do not fit."""
BLANK = """() => [...document.querySelectorAll("main tbody tr")].filter((row) => {
  const right = row.closest(".card")?.getBoundingClientRect().right ?? innerWidth;
  const bottom = Math.max(...[...row.cells].map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const box = range.getBoundingClientRect();
    return box.left < right - 24 ? box.bottom : 0;
  }));
  return row.getBoundingClientRect().bottom - bottom > 72;
}).map((row) => row.textContent.trim())"""
"""Rows whose height comes from what lies beyond the right edge."""
EMPTY = """() => [...document.querySelectorAll("main > section:not(.hero)")].filter((section) => {
  const heading = section.querySelector("h2").textContent.trim();
  return section.textContent.trim() === heading || section.querySelector(".empty");
}).map((section) => section.textContent.trim())"""
WORDS = """() => {
  const main = document.querySelector("main").cloneNode(true);
  main.querySelectorAll("code, [hidden]").forEach((one) => one.remove());
  return main.textContent;
}"""
IDS = re.compile(rf"(?<![\w.])(?:{'|'.join(re.escape(c) for c in CAUSES if '.' in c)})(?![\w.])")


@pytest.fixture(scope="module")
def axe() -> str:
    package = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    return (Path(package.__path__[0]) / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.browser
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.long) if k in LARGE else k for k in PAGES],
)
def test_a_page_is_readable(browser, tmp_path, axe, kind) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[kind](tmp_path), encoding="utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 900}, offline=True)
    opened = Opened(context.new_page(), path)
    page = opened.page
    page.evaluate(axe)
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        opened.frame()
        assert _violations(page) == [], width
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(CUT) == []
        assert page.evaluate(BLANK) == []
    page.emulate_media(color_scheme="dark")
    opened.frame()
    assert _violations(page, "color-contrast", "link-in-text-block") == []
    assert page.evaluate(EMPTY) == []
    assert not IDS.findall(page.evaluate(WORDS))
    assert opened.messages == []
    context.close()


def test_a_snapshot_says_in_text_what_it_holds(tmp_path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    for format in ("txt", "md"):
        text = reports.render(pipeline.attribute(path), format)
        assert "Memory segments: " in text
        assert "--view memory_segments" in text


def _violations(page: Page, *rules: str) -> list[str]:
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    options |= {"runOnly": rules} if rules else {}
    found = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]
