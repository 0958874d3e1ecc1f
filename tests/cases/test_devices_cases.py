"""Boards that report less memory than their label or were not listed; work counted once; snapshots.

Each file stands for a kind of input that was once answered wrongly; the right answers are values.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chopper import pipeline
from tests import command

FILES = Path(__file__).with_name("devices")


@pytest.mark.parametrize(
    ("file", "name", "peak"),
    [
        # Turing has no bf16, which is what these products are of: the board is known all the same.
        ("r18-t4-memory-size.json", "NVIDIA T4", None),
        ("r19-a40-memory-size.json", "NVIDIA A40", 149.7e12),
        ("r20-a10g-not-in-table.json", "NVIDIA A10G", 70e12),
    ],
)
def test_the_board_is_recognized(file: str, name: str, peak: float | None) -> None:
    run = pipeline.attribute(pipeline.read(FILES / file))
    (rank,) = run.ranks
    assert rank.peak_source is not None
    assert name.split()[-1] in rank.peak_source
    ceiling = run.ceilings[0].theoretical
    assert ceiling is not None
    assert ceiling.flop_per_s.get("bf16") == peak
    assert not [f for f in run.findings if "table of peaks" in f.message]


@pytest.mark.parametrize("file", ["r25-cpu-conv-flop-doubled.json", "r25-reference.json"])
def test_a_convolution_counts_once_whatever_it_calls(file: str) -> None:
    run = pipeline.attribute(pipeline.read(FILES / file))
    work = run.work[0]
    # Four convolutions of 5 x 64 x 56 x 56 with 64 filters of 64 x 3 x 3: 2·5·64·64·9·56·56 each.
    assert work.work_flop[work.math].sum() == 4 * 2 * 5 * 64 * 64 * 9 * 56 * 56 == 4_624_220_160
    assert sum(cause.time_ns for cause in run.leaves()) == run.observed_ns


def test_a_snapshot_says_first_what_held_memory() -> None:
    path = FILES / "r34-snapshot-first-screen.pickle"
    text = " ".join(command.run("analyze", path).out.split())
    assert "Tensors on device 0 held 3.00 MiB at the end, 13.0 MiB at most" in text
    assert "20.0 MiB were reserved" in text
    assert "train.py:10: f: 3.00 MiB" in text
    assert "nothing to attribute" not in text
    verdict = json.loads(command.run("analyze", path, "--json").out)["verdict"]
    assert verdict["sentence"].startswith("Tensors on device 0 held 3.00 MiB")
