"""What a notebook's cell shows of each result."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.estimates.memory import memory
from chopper.analyzers.estimates.training import Training
from chopper.cli.estimates import cost, limits, network
from chopper.cli.estimates.offload import Options, estimate
from chopper.experiments.results import Experiment, Plan, VariantPlan
from chopper.models.architectures import named
from tests.analyzers.replay.make import late_second_launch
from tests.analyzers.replay.make import run as recorded
from tests.reports.make import HOSTILE, Shape, make
from tests.reports.test_browser import browser
from tests.waiting import PATIENCE_S

__all__ = ["browser"]

_MOST_BYTES = 200_000
_SHOWN = ("Where the time went", "replayed without changes")


class _Frames(HTMLParser):
    """The elements of a cell, and the text of a page within one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def _within(html: str) -> str:
    """Return the document in a cell's only element, a frame that runs no script."""
    ((tag, attributes),) = _Frames(html).elements
    assert tag == "iframe"
    # Without a value it allows nothing: no script, no form, no way to the notebook's own page.
    assert attributes["sandbox"] is None
    document = attributes["srcdoc"]
    assert document is not None
    return document


def _said(html: str) -> str:
    return re.sub(r"\s+", " ", "".join(_Frames(_within(html)).words))


@pytest.fixture(scope="module")
def run() -> Any:
    attribution = make(Shape(ranks=2, steps=6, layers=2, hostile=True))
    attribution.recording.manifest.name = HOSTILE[2]
    return attribution


@pytest.fixture(scope="module")
def results(run: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Each result, and words of its report."""
    training = Training(architecture=named("gpt2"), sequence_count=512)
    plan = Plan(
        chopper_version="0",
        workload="made",
        summary="makes it",
        command=["chopper", "run", "made"],
        created_ns=1,
        ranks=1,
        device="cpu",
        options={},
        steps=False,
        baseline=None,
        variants=[VariantPlan(name="a", summary="variant a", runs=[])],
    )
    replayable = pipeline.attribute(recorded(late_second_launch()))
    spent = cost.estimate(cost.Options(tokens_per_s=9, price=2))
    return {
        "attribution": (chopper.Attribution(run), ("A step takes", "Where the time went")),
        "comparison": (chopper.compare(run, run), ("Where the runs differ",)),
        "whatif": (chopper.whatif(replayable), ("replayed without changes", "launching call")),
        "experiment": (Experiment(Path("made"), plan, (), {}), ("Makes it", "made")),
        "memory": (memory(training), ("per rank at the peak", "Limit: ", "About the rule")),
        "network": (network.estimate(network.Options(flows_count=4)), ("all_reduce of", "uplinks")),
        "limits": (
            limits.estimate(limits.Options(flop=(1e27,))),
            ("Utilization", "fewest devices"),
        ),
        "cost": (spent, ("USD per million tokens", "Energy")),
        "offload": (estimate(Options(model="gpt2")), ("a step", "Activations: keep")),
    }


NAMES = ("attribution", "comparison", "whatif", "experiment")
ESTIMATES = ("memory", "network", "limits", "cost", "offload")


@pytest.mark.parametrize("name", [*NAMES, *ESTIMATES])
def test_a_cell_shows_what_the_report_shows(name: str, results: Any) -> None:
    result, words = results[name]
    html = result._repr_html_()
    said = _said(html)
    for word in words:
        assert word in said
    assert len(html) < _MOST_BYTES
    elements = _Frames(_within(html)).elements
    assert not {"script", "img", "link"} & {tag for tag, _ in elements}
    assert not {"src", "href", "onerror"} & {name for _, of in elements for name in of}


def test_names_of_a_trace_stay_text(results: Any) -> None:
    html = results["attribution"][0]._repr_html_()
    assert all(re.sub(r"\s+", " ", name) in _said(html) for name in HOSTILE[:4])
    assert not [tag for tag, _ in _Frames(_within(html)).elements if tag in ("img", "a", "script")]


@pytest.mark.long
@pytest.mark.slow
def test_a_notebook_records_and_shows_a_run(tmp_path: Path) -> None:
    # It runs where it lies.
    examples = Path(__file__).parents[2] / "examples"
    notebook = shutil.copy(examples / "notebook.ipynb", tmp_path / "notebook.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "execute", notebook, "--output", tmp_path / "done"],
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    executed = json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))
    outputs = [one for cell in executed["cells"] for one in cell.get("outputs", [])]
    cells = [one["data"]["text/html"] for one in outputs if "text/html" in one.get("data", {})]
    shown = ["".join(lines) for lines in cells]
    assert [word in _said(html) for html, word in zip(shown, _SHOWN, strict=True)] == [True, True]
    assert "Timeline" in Path(tmp_path, "runs", "notebook.html").read_text(encoding="utf-8")


@pytest.mark.browser
def test_the_notebooks_own_page_stays_as_it_is(browser: Any, results: Any, tmp_path: Path) -> None:
    mine = "<h1 style='margin:0'>Mine</h1><table><tr><td>1</td></tr></table>"
    look = """() => ['h1', 'table', 'td', 'body'].map((name) => {
      const style = getComputedStyle(document.querySelector(name));
      return [style.font, style.color, style.background, style.padding, style.display];
    })"""
    seen = []
    messages: list[str] = []
    context = browser.new_context(offline=True)
    for name, cells in (
        ("plain", ""),
        ("cells", "".join(result._repr_html_() for result, _ in results.values())),
    ):
        file = tmp_path / f"{name}.html"
        file.write_text(f"<!doctype html><meta charset=utf-8>{mine}{cells}", encoding="utf-8")
        page = context.new_page()
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(file.as_uri())
        seen.append(page.evaluate(look))
        assert page.evaluate("window.__pwned") is None
        assert not messages
        frames = page.frames[1:]
    assert seen[0] == seen[1]
    assert len(frames) == len(results)
    for frame in frames:
        assert frame.locator("h1").inner_text()
    context.close()
