from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from chopper import reports
from chopper.errors import printable
from chopper.storage.manifest import Finding
from tests.reports.make import HOSTILE, Shape, make


class _Page(HTMLParser):
    """Elements and scripts of a page as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.handlers: list[str] = []
        self.urls: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._script: dict[str, str | None] | None = None
        self._buffer: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        self.urls += [v or "" for k, v in attrs if k in ("src", "href", "action", "srcset")]
        if tag == "script":
            self._script, self._buffer = dict(attrs), []

    def handle_data(self, data) -> None:
        if self._script is not None:
            self._buffer.append(data)

    def handle_endtag(self, tag) -> None:
        if tag == "script" and self._script is not None:
            self.scripts.append((self._script, "".join(self._buffer)))
            self._script = None


@pytest.fixture(scope="module")
def hostile() -> str:
    attribution = make(Shape(hostile=True), source=HOSTILE[2])
    attribution.recording.manifest.name = HOSTILE[1]
    attribution.recording.manifest.ranks[0].hostname = HOSTILE[0]
    attribution.recording.manifest.ranks[0].environment["gpu<b>"] = HOSTILE[3]
    attribution.findings.append(
        Finding(code="x<i>", severity="error", message=f"name {HOSTILE[0]}", rank=0)
    )
    return reports.render(attribution, "html")


def test_names_from_traces_add_no_element(hostile) -> None:
    page, plain = _Page(hostile), _Page(reports.render(make(Shape()), "html"))
    assert set(page.tags) == set(plain.tags)
    assert "img" not in page.tags
    assert page.handlers == []
    assert len(page.scripts) == len(plain.scripts)


def test_nothing_is_fetched(hostile) -> None:
    page = _Page(hostile)
    assert all(u.startswith("#") or u == "data:," for u in page.urls), page.urls
    assert "@import" not in hostile
    assert "connect-src" not in hostile  # default-src 'none' refuses connections


def test_the_policy_names_exactly_the_pages_scripts(hostile) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', hostile)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    hashes = re.search(r"script-src ([^;]*)", policy[1])
    assert hashes is not None
    allowed = set(hashes[1].replace("&#39;", "'").split())
    runnable = [code for attrs, code in _Page(hostile).scripts if "type" not in attrs]
    assert len(runnable) == 1
    digest = base64.b64encode(hashlib.sha256(runnable[0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in allowed
    assert len(allowed) == 2
    assert "unsafe-eval" not in policy[1]


def test_the_data_block_holds_the_attribution(hostile) -> None:
    attribution = make(Shape(hostile=True), source=HOSTILE[2])
    (block,) = [code for attrs, code in _Page(hostile).scripts if attrs.get("id") == "data"]
    data = json.loads(block)
    assert data["observed_ns"] == attribution.observed_ns
    for level in data["levels"]:
        assert sum(row[2] for row in level["rows"]) == attribution.observed_ns, level["id"]
        for row in level["rows"]:
            assert sum(t for _, t in row[6]) == row[2]
    kernels = {
        row[0] for level in data["levels"] if level["id"] == "kernel" for row in level["rows"]
    }
    assert {*map(printable, HOSTILE)} <= kernels


def test_calls_are_counted_over_all_ranks() -> None:
    attribution = make(Shape())
    groups = {group.key: group for group in attribution.by("kernel")}
    for name in ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",):
        n = t = 0
        for rank in (0, 1):
            events = attribution.joined[rank].device_event.to_pydict()
            mine = [d for d, k in zip(events["dur_ns"], events["name"], strict=True) if k == name]
            n, t = n + len(mine), t + sum(mine)
        assert (groups[name].events_count, groups[name].own_ns) == (n, t)


def test_lone_surrogates_do_not_stop_a_report() -> None:
    attribution = make(Shape(ranks=1, steps=1))
    attribution.recording.manifest.name = "bad \udc80 name"
    for kind in reports.FORMATS:
        reports.render(attribution, kind).encode()


def test_what_was_refused_is_shown_with_reason_and_remedy() -> None:
    page = reports.render(make(Shape()), "html")
    assert "libnvidia-ml.so.1: cannot open shared object file" in page
    assert "install the NVIDIA driver" in page
    assert "99.8 Hz of 100 Hz" in page
    assert "+2.5 %" in page


def test_a_big_run_stays_small() -> None:
    # 260 000 events; the size of a million is measured in benchmarks/report.py.
    attribution = make(Shape(ranks=2, steps=8, layers=20, repeat=12))
    events = sum(
        getattr(attribution.joined[r], t).num_rows
        for r in (0, 1)
        for t in ("device_event", "host_span")
    )
    assert events > 180_000
    assert len(reports.render(attribution, "html")) < 8 * 2**20
