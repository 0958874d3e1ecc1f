"""What commands print, as the documentation shows it.

    CHOPPER_TRACES=traces python -m tests.docs.transcripts      writes all of it anew

A line ``…`` stands for lines that are left out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path
from unittest import mock

from tests.command import run
from tests.docs.blocks import ROOT, Command, documented

COLUMNS = "100"
COUNTERS = "docs-sample-counter_collection.csv"
PUBLIC = {
    "before.json.gz": "kineto/v100-resnet50-dataloader0-2021.json.gz",
    "after.json.gz": "kineto/v100-resnet50-dataloader4-2021.json.gz",
    "v100-dlrm-8ranks": "param/v100-dlrm-8ranks",
    "v100-ddp-rank1of2.json.gz": "hta/v100-ddp-rank1of2-memory-events.json.gz",
    "snapshot.pickle": "memory-snapshots/cuda-memory-snapshot-transformer.pickle.gz",
    "mi300x-vllm-graph-capture.json.gz": "tracelens/mi300x-vllm-graph-capture.json.gz",
    "runs/with-counters/trace.json.gz": "hpctrainingexamples/mi300x-op-replay.json.gz",
    f"runs/with-counters/{COUNTERS}": f"rocprofiler-sdk/{COUNTERS}",
    "h100-qwen1.5-0.5b-inference.json.gz": "tracelens/h100-qwen1.5-0.5b-inference.json.gz",
    "mi300x-qwen1.5-0.5b-inference.json.gz": "tracelens/mi300x-qwen1.5-0.5b-inference.json.gz",
}
"""File that a command names, or in a folder that it names → its origin in the catalogue."""


def transcripts() -> list[Command]:
    """Those that chopper alone prints, in the order of the pages."""
    shown = [c for c in documented() if c.printed is not None]
    return [c for c in shown if c.text.startswith("chopper ")]


def lay_out(command: Command, traces: Path | None, folder: Path) -> str | None:
    """Link what it reads into a folder; return what is missing for that."""
    for name, origin in PUBLIC.items():
        if {name, str(Path(name).parent)} & {*command.words}:
            if traces is None or not (traces / origin).exists():
                return f"real traces not present: set CHOPPER_TRACES ({name})"
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to((traces / origin).resolve())
    return None


def printed(command: Command, folder: Path) -> str:
    """What it prints at the documentation's width: its answer, a gate's verdict, or a refusal."""
    with mock.patch.dict(os.environ, COLUMNS=COLUMNS):
        outcome = run(*command.words[1:], cwd=folder)
    aside = [line for line in outcome.lines if not line.startswith("next: ")]
    return "\n".join((*outcome.out.rstrip("\n").split("\n"), *aside)).strip("\n")


def parts(shown: str) -> list[list[str]]:
    """Lines that stand together, between those that are left out."""
    found: list[list[str]] = [[]]
    for line in shown.rstrip("\n").split("\n"):
        if line == "…":
            found.append([])
        else:
            found[-1].append(line)
    return found


def agrees(shown: str, said: str) -> bool:
    """Every line stands in what was said, in order, with nothing between but where it says …."""
    lines = shown.rstrip("\n").split("\n")
    pattern = "".join("(?:.*\n)*" if line == "…" else f"{re.escape(line)}\n" for line in lines)
    return re.fullmatch(pattern, f"{said}\n") is not None


def renewed(shown: str, said: str) -> str:
    """The same parts of what is said now, each from the line most like its first to its last."""
    pieces = parts(shown)
    lines, at = said.split("\n"), 0

    def most_like(wanted: str) -> int:
        likeness = [SequenceMatcher(None, wanted, line).ratio() for line in lines[at:]]
        return at + likeness.index(max(likeness))

    written: list[str] = []
    for number, part in enumerate(pieces):
        if number:
            written.append("…")
        if part:
            at = most_like(part[0]) if number else 0
            end = most_like(part[-1]) + 1 if number < len(pieces) - 1 else len(lines)
            written += lines[at:end]
            at = end
    return "\n".join(written)


def main() -> int:
    """Write every transcript anew; exit with 1 where traces for one are missing."""
    directory = os.environ.get("CHOPPER_TRACES")
    missing = 0
    for command in transcripts():
        with tempfile.TemporaryDirectory() as folder:
            if lacking := lay_out(command, Path(directory) if directory else None, Path(folder)):
                print(f"{command.source}: {lacking}", file=sys.stderr)
                missing = 1
                continue
            said = printed(command, Path(folder))
        if not agrees(command.printed or "", said):
            page = ROOT / command.source.rpartition(":")[0]
            text = page.read_text(encoding="utf-8")
            old = (command.printed or "").rstrip("\n")
            assert text.count(old) == 1, command.source
            page.write_text(text.replace(old, renewed(old, said)), encoding="utf-8")
            print(f"{command.source}: written anew", file=sys.stderr)
    return missing


if __name__ == "__main__":
    sys.exit(main())
