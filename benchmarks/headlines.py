"""Every number that the reference workloads exist to show, measured here, in one table.

    python -m benchmarks.headlines                      # all of them, under 20 minutes on two cores
    python -m benchmarks.headlines gemm overlap
    python -m benchmarks.headlines --output runs/headlines --docs docs/workloads/headlines.md

Each workload runs as `chopper run NAME` does, at its default size. What cannot run here is left out
with its reason. With --output the experiments are kept, and --keep then measures only what is not
there yet, so that the table can be made in parts. Figures in the documentation come from this: --docs
writes the table, the machine and the command into the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chopper import _format as fmt
from chopper import experiment as ex
from chopper._workloads import WORKLOADS, find, headlines_of
from chopper.errors import ChopperError
from chopper.experiment import Experiment, Headline
from chopper.reports.experiment import headline_table
from chopper.workloads.headlines import MODELS

TOOK = "headlines.json"
"""In the output directory: workload → seconds that it took, or why it did not run."""
BEGIN, END = "<!-- headlines: begin -->", "<!-- headlines: end -->"


def run(name: str, output: Path, extra: list[str]) -> str | None:
    """Run one workload; None, or why it did not end well. Its progress is passed on."""
    command = [sys.executable, "-m", "chopper", "run", name, "-o", str(output), "--force", *extra]
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip() or last
            if line.startswith("chopper: ") and " of " in line:
                print(
                    f"{name}: {line.removeprefix('chopper: ')}", end="", file=sys.stderr, flush=True
                )
    return None if not process.returncode else last or f"exit code {process.returncode}"


def machine(experiment: Experiment) -> str:
    """What it was measured on, in a line."""
    attribution = next(a for runs in experiment.attributions.values() for a in runs)
    rank = attribution.run.manifest.ranks[0]
    said = rank.environment
    device = next((d.name for d in rank.devices if d.name), None)
    parts = [
        f"{said.get('cores_allowed', '?')} cores of {said.get('cpu', 'an unknown processor')}",
        *([device] if device else []),
        f"torch {said.get('torch', '?')}",
        " ".join(said.get("platform", "").split("-")[:2]),  # system and kernel
    ]
    return ", ".join(part for part in parts if part)


def rows(experiments: list[Experiment], took: dict[str, float | str]) -> tuple[Headline, ...]:
    """What was measured, and what is arithmetic alone of workloads that could not run."""
    models = [MODELS[name] for name, why in took.items() if isinstance(why, str) and name in MODELS]
    return (
        *(h for e in experiments for h in e.headlines),
        *(h for model in models for h in model()),
    )


def page(
    before: str, experiments: list[Experiment], took: dict[str, float | str], command: str
) -> str:
    """The page with its generated part made anew.

    Raises:
        SystemExit: the page has no such part.
    """
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page has no part between {BEGIN} and {END}")
    days = sorted(
        dt.datetime.fromtimestamp(e.plan.created_ns / 1e9, dt.UTC).date() for e in experiments
    )
    ran = {name: s for name, s in took.items() if not isinstance(s, str)}
    said = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in ran.items())
    lines = [
        *("", ""),
        f"Measured {'' if days[0] == days[-1] else f'from {days[0]} to '}{days[-1]} on "
        f"{machine(experiments[0])}, by",
        "",
        f"    {command}",
        "",
        f"in {fmt.duration(sum(ran.values()) * 1e9)}: {said}.",
        "",
        *headline_table(rows(experiments, took)),
        "",
        *(f"Not measured: {name} ({why})." for name, why in took.items() if isinstance(why, str)),
    ]
    return head + begin + "\n".join(lines).rstrip() + "\n\n" + end + tail


def main() -> None:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="names; all that have headlines by default")
    parser.add_argument("--output", type=Path, help="keep the experiments there")
    parser.add_argument("--keep", action="store_true", help="do not run again what is there")
    parser.add_argument("--repeats", type=int, help="of each variant")
    parser.add_argument("--docs", type=Path, help="page to write the table into")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    if args.keep and args.output is None:
        parser.error("--keep: name the experiments' directory with --output")
    known = [n for n, w in WORKLOADS.items() if w.experiment and headlines_of(n) is not None]
    names = args.workloads or known
    for name in names:
        try:
            find(name)
        except ChopperError as exc:
            parser.error(str(exc))
        if name not in known:
            parser.error(f"{name} has no headline; {', '.join(known)} have")
    if args.docs is not None:  # a page that cannot be written is refused before anything runs
        page_before = args.docs.read_text(encoding="utf-8")
        if BEGIN not in page_before or END not in page_before:
            parser.error(f"{args.docs}: has no part between {BEGIN} and {END}")
    extra = [] if args.repeats is None else ["--repeats", str(args.repeats)]
    experiments: list[Experiment] = []
    with tempfile.TemporaryDirectory(prefix="chopper-headlines-") as scratch:
        place = args.output or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        kept = place / TOOK
        took: dict[str, float | str] = json.loads(kept.read_text()) if kept.is_file() else {}
        for name in names:
            if not (args.keep and isinstance(took.get(name), float)):
                begin_s = time.perf_counter()
                why = run(name, place / name, extra)
                took[name] = why or time.perf_counter() - begin_s
                kept.write_text(json.dumps(took, indent=2) + "\n")
            if isinstance(took[name], str):
                print(f"{name}: {took[name]}", file=sys.stderr, flush=True)
                continue
            print(f"{name}: took {took[name]:.0f} s", file=sys.stderr, flush=True)
            experiments.append(ex.load(place / name))
            _ = experiments[-1].headlines  # drawn while its files are there
        took = {name: took[name] for name in names}
        if args.docs is not None and experiments:
            words = [*args.workloads, *(["--repeats", str(args.repeats)] if extra else [])]
            command = shlex.join(["python", "-m", "benchmarks.headlines", *words])
            args.docs.write_text(page(page_before, experiments, took, command), encoding="utf-8")
    headlines = rows(experiments, took)
    absent = {name: why for name, why in took.items() if isinstance(why, str)}
    if args.as_json:
        document = {
            "schema": "chopper.headlines/1",
            "machine": machine(experiments[0]) if experiments else None,
            "seconds": {n: s for n, s in took.items() if n not in absent},
            "headlines": [ex.headline_to_dict(h) for h in headlines],
            "absent": absent,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    print("\n".join(headline_table(headlines)))
    for name, reason in absent.items():
        print(f"\n{name}: {reason}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
