"""Whole commands of two checkouts side by side: time and memory, before and after a change.

    python -m benchmarks.commands BEFORE AFTER [--repeats 5] [TRACE ...]

BEFORE and AFTER are checkouts, each with its environment in ``.venv``. Commands run in turns, each
in a process and with an empty cache directory of its own; the least wall and CPU time and the
median peak memory of the process are shown. Traces: arguments, else the largest of
``$CHOPPER_TRACES``. `make bench` names no checkouts and passes by.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks._peers import Sample, best
from benchmarks.ingest import largest


def main() -> None:
    """Print one line for each command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("traces", nargs="*", type=Path)
    given = parser.parse_intermixed_args()
    if given.after is None:
        print("name two checkouts, before and after: nothing to compare")
        return
    print(f"{'command':60}  {'wall s':>14}  {'CPU s':>14}  ratio  {'peak MB':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        for command in _commands(given.traces or largest(), Path(scratch)):
            samples: tuple[list[Sample], list[Sample]] = ([], [])
            for turn in range(given.repeats):
                for side in (turn % 2, 1 - turn % 2):
                    checkout = (given.before, given.after)[side]
                    samples[side].append(_sample(checkout.resolve(), command))
            _print(" ".join(Path(word).name for word in command), *map(best, samples))


def _commands(traces: list[Path], scratch: Path) -> list[list[str]]:
    commands = [["--help"]]
    for trace in map(str, traces):
        commands.append(["analyze", trace])
        commands.append(["report", trace, "-o", str(scratch / "report.html"), "--force"])
        commands.append(["whatif", trace, "--fix", "communication"])
    return commands


def _sample(checkout: Path, command: list[str]) -> Sample:
    python = checkout / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as answer:
        start = time.perf_counter()
        process = subprocess.Popen(
            [python, "-m", "chopper", *command],
            cwd=checkout,
            stdout=answer,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"},
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        if status:
            answer.seek(0)
            raise SystemExit(f"chopper {' '.join(command)}\n{answer.read().decode()[-2000:]}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _print(command: str, before: Sample, after: Sample) -> None:
    wall = f"{before.wall_s:6.2f} {after.wall_s:7.2f}"
    cpu = f"{before.cpu_s:6.2f} {after.cpu_s:7.2f}"
    peak = f"{before.peak_bytes / 1e6:5.0f} {after.peak_bytes / 1e6:5.0f}"
    ratio = after.cpu_s / before.cpu_s
    print(f"{command[:60]:60}  {wall:>14}  {cpu:>14}  {ratio:5.2f}  {peak}", flush=True)


if __name__ == "__main__":
    main()
