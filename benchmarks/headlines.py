"""Every number that the reference workloads exist to show, measured here, in one table.

    python -m benchmarks.headlines                      # all of them, under 20 minutes on two cores
    python -m benchmarks.headlines gemm overlap
    python -m benchmarks.headlines --output runs/headlines --json

Each workload runs as `chopper run NAME` does, at its default size. What cannot run here is left out
with its reason. Figures in the documentation come from this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chopper import experiment as ex
from chopper._workloads import WORKLOADS, find, headlines_of
from chopper.errors import ChopperError
from chopper.experiment import Headline
from chopper.reports.experiment import headline_table


def run(name: str, output: Path, extra: list[str]) -> tuple[Headline, ...] | str:
    """Headlines of one workload, or why there are none."""
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "run", name, "-o", str(output), "--force", *extra],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    try:
        return ex.load(output).headlines
    except ChopperError as exc:
        return str(exc)


def main() -> None:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", help="names; all that have headlines by default")
    parser.add_argument("--output", type=Path, help="keep the experiments there")
    parser.add_argument("--repeats", type=int, help="of each variant")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    known = [n for n, w in WORKLOADS.items() if w.experiment and headlines_of(n) is not None]
    names = args.workloads or known
    for name in names:
        find(name)
    extra = [] if args.repeats is None else ["--repeats", str(args.repeats)]
    found: dict[str, tuple[Headline, ...] | str] = {}
    with tempfile.TemporaryDirectory(prefix="chopper-headlines-") as scratch:
        place = args.output or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            begin = time.perf_counter()
            found[name] = run(name, place / name, extra)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    headlines = tuple(h for rows in found.values() if not isinstance(rows, str) for h in rows)
    absent = {name: rows for name, rows in found.items() if isinstance(rows, str)}
    if args.as_json:
        document = {
            "schema": "chopper.headlines/1",
            "headlines": [ex.headline_to_dict(h) for h in headlines],
            "absent": absent,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    print("\n".join(headline_table(headlines)))
    for name, reason in absent.items():
        print(f"\n{name}: {reason}")


if __name__ == "__main__":
    main()
