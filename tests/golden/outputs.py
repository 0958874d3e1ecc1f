"""Store what the command line says of many sources, and compare two such stores.

    python -m tests.golden.outputs take STORE RUN… [--workers 2]
    python -m tests.golden.outputs compare BEFORE AFTER

For changes of the structure that must not change a figure: take a store with each of two checkouts
and compare them. ``take`` runs every level, every view, some predictions and the comparison with
itself, of each trace below ``CHOPPER_TRACES``, of the traces of several ranks together, and of each
RUN. Times are compared to the nanosecond; ``--skip`` leaves out paths of JSON that match a regular
expression.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gzip
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEVELS = ("step", "phase", "layer", "op", "kernel", "rank")
PREDICTIONS = (
    ("--fix", "communication"),
    ("--fix", "data"),
    ("--faster", "gemm=2x"),
    ("--graphs",),
    ("--link", "x2"),
)
Output = list[Any]
"""Exit code, stdout and stderr of a command."""


def sources(runs: list[Path]) -> dict[str, list[Path]]:
    """Name and files of each source: single traces, traces of one job together, run directories."""
    traces = Path(os.environ["CHOPPER_TRACES"])
    files = sorted(f for f in traces.rglob("*") if f.is_file() and f.suffix != ".md")
    listed = {str(f.relative_to(traces)): [f] for f in files}
    jobs: dict[str, list[Path]] = {}
    for file in files:
        job = re.sub(r"rank\d+", "rankN", str(file.relative_to(traces)))
        jobs.setdefault(job, []).append(file)
    listed |= {job: members for job, members in jobs.items() if len(members) > 1}
    return listed | {f"runs/{run.name}": [run] for run in runs}


def called(*words: str) -> Output:
    """Run a command in this process."""
    from chopper.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    sys.argv = ["chopper", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exc:
            code = exc.code
    return [code, out.getvalue(), err.getvalue()]


def store(job: tuple[str, list[Path], Path]) -> None:
    """Write the outputs of one source as gzipped JSON: command to output."""
    from chopper.views import VIEWS

    name, files, folder = job
    given = [str(file) for file in files]
    outputs = {"analyze --json": called("analyze", *given, "--json")}
    if outputs["analyze --json"][0] == 0:
        outputs["analyze --csv"] = called("analyze", *given, "--csv")
        for level in LEVELS:
            outputs[f"--by {level}"] = called("analyze", *given, "--by", level, "--json")
        for view in VIEWS:
            outputs[f"--view {view}"] = called("analyze", *given, "--view", view, "--csv")
        for words in PREDICTIONS:
            outputs[" ".join(("whatif", *words))] = called("whatif", *given, *words, "--json")
        if len(given) == 1:
            outputs["compare"] = called("compare", *given, *given, "--json", "--allow-different")
    packed = gzip.compress(json.dumps(outputs).encode(), mtime=0)
    (folder / (name.replace("/", "__") + ".gz")).write_bytes(packed)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf of a JSON document."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from flat(below, f"{path}.{key}")
    elif isinstance(value, list):
        yield f"{path}.length", len(value)
        for i, below in enumerate(value):
            yield from flat(below, f"{path}[{i}]")
    else:
        yield path, value


def differences(before: Output, after: Output, skip: re.Pattern[str] | None) -> list[str]:
    """List where two outputs of one command differ; what goes to stderr may."""
    if before[0] != after[0]:
        return [f"exit code {before[0]} -> {after[0]}: {after[2][-200:]}"]
    if before[1] == after[1]:
        return []
    try:
        a, b = dict(flat(json.loads(before[1]))), dict(flat(json.loads(after[1])))
    except ValueError:
        lines = difflib.unified_diff(
            before[1].splitlines(), after[1].splitlines(), lineterm="", n=0
        )
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return [
        f"{path}: {a.get(path)!r} -> {b.get(path)!r}"
        for path in {**a, **b}
        if a.get(path) != b.get(path) and not (skip and skip.search(path))
    ]


def compare(before: Path, after: Path, skip: re.Pattern[str] | None) -> int:
    """Print every difference of two stores; return how many outputs differ."""
    compared = different = 0
    for file in sorted(before.glob("*.gz")):
        a, b = (json.loads(gzip.decompress((f / file.name).read_bytes())) for f in (before, after))
        for command in a:
            compared += 1
            lines = differences(a[command], b.get(command, [None, "", "no such command"]), skip)
            if lines:
                different += 1
                print(
                    f"{file.stem}: {command}",
                    *(f"    {line[:200]}" for line in lines[:6]),
                    sep="\n",
                )
    print(f"{compared} outputs compared, {different} differ")
    return different


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("take")
    take.add_argument("store", type=Path)
    take.add_argument("runs", type=Path, nargs="*")
    take.add_argument("--workers", type=int, default=os.cpu_count())
    judge = commands.add_parser("compare")
    judge.add_argument("before", type=Path)
    judge.add_argument("after", type=Path)
    judge.add_argument("--skip", type=re.compile)
    args = parser.parse_args()
    if args.command == "compare":
        sys.exit(compare(args.before, args.after, args.skip) > 0)
    args.store.mkdir(parents=True)
    jobs = [(name, files, args.store) for name, files in sources(args.runs).items()]
    # A fresh process now and then: one that stays holds what the sources before left.
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=12) as pool:
        for _ in pool.imap_unordered(store, jobs):
            pass


if __name__ == "__main__":
    main()
