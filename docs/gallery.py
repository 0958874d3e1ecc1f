"""Makes the gallery of example reports from recordings that lie in every clone, and from estimates.

With ``CHOPPER_TRACES`` it has reports of public traces, too. Thumbnails need Chromium and
Playwright. ``recordings/overlap`` is of ``chopper bench overlap --repeats 1`` on 2026-11-22,
on two cores of an AMD EPYC; two variants are kept, without derived tables and that machine's paths.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.command import run

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "tests" / "golden" / "own"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Exhibit:
    """A report, the command that writes it, and where its inputs come from."""

    name: str
    title: str
    text: str
    command: str
    inputs: tuple[tuple[str, str], ...] = ()
    """Name in the command → recording, below the checkout, or ``traces:`` below CHOPPER_TRACES."""


EXHIBITS = (
    Exhibit(
        "resnet50-v100",
        "A loader that does not keep up",
        "ResNet-50 on a V100, the trace of [Read your first report](first-report.md). "
        "[pytorch/kineto](https://github.com/pytorch/kineto), BSD-3-Clause.",
        "chopper report before.json.gz -o resnet50-v100.html",
        (("before.json.gz", "traces:kineto/v100-resnet50-dataloader0-2021.json.gz"),),
    ),
    Exhibit(
        "resnet50-v100-compared",
        "Before and after",
        "The same training with four loader processes: which causes changed, and is it more than "
        "noise?",
        "chopper compare before.json.gz after.json.gz -o resnet50-v100-compared.html",
        (
            ("before.json.gz", "traces:kineto/v100-resnet50-dataloader0-2021.json.gz"),
            ("after.json.gz", "traces:kineto/v100-resnet50-dataloader4-2021.json.gz"),
        ),
    ),
    Exhibit(
        "resnet-mi300x",
        "An MI300X",
        "ResNet with recomputed activations, rank 0 of 8. "
        "[AMD-AGI/TraceLens](https://github.com/AMD-AGI/TraceLens), MIT.",
        "chopper report mi300x.json.gz -o resnet-mi300x.html",
        (
            (
                "mi300x.json.gz",
                "traces:tracelens/mi300x-resnet-train-rank0of8-act-checkpoint.json.gz",
            ),
        ),
    ),
    Exhibit(
        "dlrm-8-ranks",
        "Eight ranks",
        "A recommendation model on eight V100: who waits for whom at each collective. "
        "[facebookresearch/param](https://github.com/facebookresearch/param), MIT.",
        "chopper report v100-dlrm-8ranks -o dlrm-8-ranks.html",
        (("v100-dlrm-8ranks", "traces:param/v100-dlrm-8ranks"),),
    ),
    Exhibit(
        "known-causes-cuda",
        "Known causes, CUDA",
        "Two simulated GPUs, one 20 % slow, with a late batch in each step: what a report says "
        "where [the truth is known](concepts/validation.md).",
        "chopper report model-cuda -o known-causes-cuda.html",
        (("model-cuda", "tests/golden/own/model-cuda"),),
    ),
    Exhibit(
        "known-causes-rocm",
        "Known causes, ROCm",
        "The same job as a trace of an AMD machine.",
        "chopper report model-rocm -o known-causes-rocm.html",
        (("model-rocm", "tests/golden/own/model-rocm"),),
    ),
    Exhibit(
        "fsdp2-cpu",
        "Recorded without GPUs",
        "Two ranks of FSDP2 over gloo on two busy cores, recorded by `chopper record`, with "
        "telemetry of the host.",
        "chopper report fsdp2 -o fsdp2-cpu.html",
        (("fsdp2", "tests/golden/own/fsdp2"),),
    ),
    Exhibit(
        "loading-cpu",
        "Waiting for data",
        "A loop on a CPU that waits for its batches and collects garbage.",
        "chopper report loading -o loading-cpu.html",
        (("loading", "tests/golden/own/loading"),),
    ),
    Exhibit(
        "overlap",
        "An experiment",
        "Matrix products beside the transfer of their inputs: two variants of "
        "`chopper bench overlap` on two cores ([the workload](workloads/overlap.md)).",
        "chopper report overlap -o overlap.html",
        (("overlap", "docs/recordings/overlap"),),
    ),
    Exhibit(
        "memory-llama3-8b",
        "Does it fit?",
        "An estimate before anything runs ([formulas and errors](concepts/estimates/memory.md)).",
        "chopper estimate memory llama3-8b --strategy fsdp2 --ranks 8 --sequence 8192 "
        "--device h100-sxm -o memory-llama3-8b.html",
    ),
    Exhibit(
        "network-16-ranks",
        "What does the network take?",
        "Collectives by size and algorithm, and flows on uplinks "
        "([the model](concepts/estimates/network.md)).",
        "chopper estimate network --size 1KiB --size 1GiB --ranks 16 -o network-16-ranks.html",
    ),
)


def origin(place: str) -> Path | None:
    """Where a recording is; None for one of the public traces that is not here."""
    if not place.startswith("traces:"):
        return ROOT / place
    traces = os.environ.get("CHOPPER_TRACES")
    path = Path(traces or "") / place.removeprefix("traces:")
    return path.resolve() if traces and path.exists() else None


@lru_cache(maxsize=1)
def reports() -> dict[Exhibit, str]:
    """The page of each exhibit whose recordings are here, as its command writes it."""
    pages = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for exhibit in EXHIBITS:
            origins = {name: origin(place) for name, place in exhibit.inputs}
            if None in origins.values():
                continue
            for name, path in origins.items():
                assert path is not None
                if path.is_dir():  # tables are stored beside a recording
                    shutil.copytree(path, folder / name, dirs_exist_ok=True)
                else:
                    shutil.copy(path, folder / name)
            outcome = run(*shlex.split(exhibit.command)[1:], cwd=folder)
            if outcome.code:
                raise RuntimeError(f"{exhibit.command}: {outcome.err}")
            page = folder / f"{exhibit.name}.html"
            pages[exhibit] = page.read_text(encoding="utf-8")
    return pages


@lru_cache(maxsize=1)
def thumbnails() -> dict[Exhibit, bytes]:
    """A picture of the top of each page; none where there is no browser to take it."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        browser = None
    if browser is None:
        print("gallery: without pictures, which need Chromium and Playwright", file=sys.stderr)
        return {}
    options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    pictures = {}
    try:
        with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=options)
            view = chromium.new_context(
                viewport={"width": 1280, "height": 900}, device_scale_factor=0.4
            )
            for exhibit, text in reports().items():
                file = Path(directory) / "page.html"
                file.write_text(text, encoding="utf-8")
                page = view.new_page()
                page.goto(file.as_uri())
                pictures[exhibit] = page.screenshot()
                page.close()
            chromium.close()
    except Error as exc:
        print(f"gallery: without pictures: {exc}", file=sys.stderr)
        return {}
    return pictures


def files() -> Iterator[tuple[str, str | bytes]]:
    """The page of the gallery, and what it links to: path on the site, content."""
    pictures = thumbnails()
    cards = []
    for exhibit, text in reports().items():
        yield f"gallery/{exhibit.name}.html", text
        picture = ""
        if exhibit in pictures:
            yield f"gallery/{exhibit.name}.png", pictures[exhibit]
            alt = f"The top of the page: {exhibit.title}"
            picture = f"[![{alt}](gallery/{exhibit.name}.png)](gallery/{exhibit.name}.html)\n\n"
        cards.append(
            f"## [{exhibit.title}](gallery/{exhibit.name}.html)\n\n{picture}{exhibit.text}\n\n"
            f"```\n{exhibit.command}\n```\n"
        )
    left_out = len(EXHIBITS) - len(cards)
    note = (
        f"{left_out} more are of public traces: `make traces` downloads these, and "
        "`CHOPPER_TRACES=traces make docs` builds their reports.\n\n"
        if left_out
        else ""
    )
    yield (
        "gallery.md",
        "# Example reports\n\nEach is one file, as its command wrote it when this site was built: "
        "open it, drag the timeline, click.\n\n" + note + "\n".join(cards),
    )
