"""Reports of growing runs: how long, how large, how soon interactive.

    python -m benchmarks.report [--events 10000 100000 1000000] [--json]

Runs are synthetic (tests/reports/make.py) with random durations, which compress worse than real
ones. Interactive is when tables and the timeline answer; drawn is when every figure is there. Both
are what headless Chromium's own clock says, from navigation; without Chromium they are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chopper import reports
from chopper import wording as fmt
from tests.reports.make import Shape, make

_STEPS, _RANKS, _LAYERS = 5, 2, 16
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LIMIT_BYTES = 8 * 10**6
LIMIT_INTERACTIVE_S = 3.0


def shape_for(events: int) -> Shape:
    """A run with about this many device events and host spans."""
    per_repeat = _RANKS * _STEPS * _LAYERS * 16 * 3.1
    return Shape(
        ranks=_RANKS, steps=_STEPS, layers=_LAYERS, repeat=max(1, round(events / per_repeat))
    )


def measure(events: int, folder: Path) -> dict[str, Any]:
    """One size: render in a fresh state, load in a fresh browser."""
    attribution = make(shape_for(events))
    counted = sum(
        getattr(attribution.joined[rank], name).num_rows
        for rank in attribution.recording.ranks
        for name in ("device_event", "host_span")
    )
    start = time.perf_counter()
    page = reports.render(attribution, "html")
    cold = time.perf_counter() - start
    start = time.perf_counter()
    page = reports.render(attribution, "html")
    warm = time.perf_counter() - start
    path = folder / f"{events}.html"
    path.write_text(page, encoding="utf-8")
    return {
        "events": counted,
        "render_s": cold,
        "render_again_s": warm,
        "size_bytes": path.stat().st_size,
        **interactive(path),
    }


def interactive(path: Path) -> dict[str, float | None]:
    """Seconds until the page answers and until every figure is drawn."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        return {"interactive_s": None, "drawn_s": None}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=all]", state="attached", timeout=120_000)
        marks = page.evaluate(
            "Object.fromEntries(performance.getEntriesByType('mark')"
            ".map(m => [m.name, m.startTime]))"
        )
        browser.close()
    return {
        "interactive_s": marks["chopper-timeline"] / 1e3,
        "drawn_s": marks["chopper-all"] / 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", action="store_true")
    # Each size is measured in a process of its own: nothing is warm.
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(arguments.one, Path(folder))))
        return 0
    rows = []
    for events in arguments.events:
        shown = subprocess.run(
            [sys.executable, "-m", "benchmarks.report", "--one", str(events)],
            capture_output=True,
            text=True,
            check=True,
        )
        rows.append(json.loads(shown.stdout))
    if arguments.json:
        print(json.dumps({"report": rows}, indent=2))
    else:
        print(
            f"{'events':>12}{'render':>10}{'again':>10}{'size':>12}{'interactive':>14}{'drawn':>10}"
        )
        for row in rows:
            times = [
                fmt.duration(None if row[k] is None else row[k] * 1e9)
                for k in ("render_s", "render_again_s", "interactive_s", "drawn_s")
            ]
            size = f"{row['size_bytes'] / 1e6:.2f} MB"
            print(
                f"{fmt.count(row['events']):>12}{times[0]:>10}{times[1]:>10}{size:>12}"
                f"{times[2]:>14}{times[3]:>10}"
            )
    failed = [
        r
        for r in rows
        if r["size_bytes"] > LIMIT_BYTES or (r["interactive_s"] or 0) > LIMIT_INTERACTIVE_S
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
