"""Every number that the reference workloads exist to show, and all else that they measured.

    python -m benchmarks.headlines                      # all of them, 29 minutes on two cores
    python -m benchmarks.headlines gemm overlap
    python -m benchmarks.headlines --output runs/headlines --docs docs/workloads

Each workload runs as `chopper bench NAME` does, at its default size. What cannot run is left out
with its reason. With --output the experiments are kept, and --keep then measures only what is not
there yet, so that the table can be made in parts.

Figures in the documentation come from this: --docs writes the table into headlines.md, and each
workload's own rows, with machine, date and command, into the marked part of its page:
`<!-- measured: NAME -->` … `<!-- end -->`. It takes all that --output holds, so that workloads
can be measured again one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from benchmarks._modelled import modelled
from chopper import wording as fmt
from chopper.errors import ChopperError
from chopper.experiments.loading import load
from chopper.experiments.prepare import find, program, workloads
from chopper.experiments.results import Experiment, Headline, headline_to_dict
from chopper.reports import to_markdown
from chopper.reports.experiment import facts, headline_table, machine, section

TOOK = "headlines.json"
"""In the output directory: workload → seconds that it took, or why it did not run."""
EXPERIMENTS = tuple(name for name, workload in workloads().items() if workload.experiment)
TABLE = "headlines"
PAGES = {
    TABLE: "headlines.md",
    "fsdp": "training.md",
    "batch_sequence": "batch-sequence.md",
    **dict.fromkeys(("collectives", "gemm", "membw"), "microbenchmarks.md"),
}
"""Where a marked part is; a workload's own page by default."""
END = "<!-- end -->"
Took = dict[str, float | str]


def begin(name: str) -> str:
    """What the marked part of a workload, or the table's, begins with."""
    return f"<!-- measured: {name} -->"


def page_of(docs: Path, name: str) -> Path:
    """The page that has the marked part of a workload, or the table's."""
    return docs / PAGES.get(name, f"{name}.md")


def run(name: str, output: Path, extra: list[str]) -> str | None:
    """Run one workload; None, or why it did not end well. Its progress is passed on."""
    command = [sys.executable, "-m", "chopper", "bench", name, "-o", str(output), "--force", *extra]
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                told, mark, said = line.partition("chopper: ")
                if mark and not told and re.match(r"\d+ of \d+", said):
                    print(f"{name}: {said}", end="", file=sys.stderr, flush=True)
                elif not re.match(r"report: |next: |  ", line):
                    last = line.strip() or last
        except BaseException:  # leaving waits for it
            process.terminate()
            raise
    return None if not process.returncode else last or f"exit code {process.returncode}"


def day(experiment: Experiment) -> dt.date:
    """When it began, in UTC."""
    return dt.datetime.fromtimestamp(experiment.plan.created_ns / 1e9, dt.UTC).date()


def rows(experiments: Sequence[Experiment], took: Took) -> tuple[Headline, ...]:
    """What was measured, and what is arithmetic alone of workloads that could not run."""
    absent = [program(name) for name, why in took.items() if isinstance(why, str)]
    return (
        *(h for e in experiments for h in e.headlines),
        *(h for p in absent if p is not None and p.model is not None for h in p.model()),
        *modelled(),
    )


def table(experiments: Sequence[Experiment], took: Took, command: str) -> list[str]:
    """The marked part of the table's page."""
    days = sorted(day(e) for e in experiments)
    ran = {name: s for name, s in took.items() if not isinstance(s, str)}
    said = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in ran.items())
    # Headlines that nothing published compares with are on the workloads' own pages.
    stated = [h for h in rows(experiments, took) if h.published or h.primary]
    return [
        f"Measured {'' if days[0] == days[-1] else f'from {days[0]} to '}{days[-1]} on "
        f"{machine(experiments[0])}, by",
        "",
        f"    {command}",
        "",
        f"in {fmt.duration(sum(ran.values()) * 1e9)}: {said}.",
        "",
        *to_markdown.table(headline_table(stated))[0].split("\n"),
        "",
        *(f"Not measured: {name} ({why})." for name, why in took.items() if isinstance(why, str)),
    ]


def measured(experiment: Experiment, seconds: float) -> list[str]:
    """The marked part of a workload's page."""
    return [
        f"Measured {day(experiment)} on {machine(experiment)}, in {seconds:.0f} s, by",
        "",
        f"    {command_of(experiment)}",
        "",
        f"as one of `python -m benchmarks.headlines`: {' · '.join(facts(experiment))}.",
        "",
        *section(experiment),
    ]


def command_of(experiment: Experiment) -> str:
    """What measures the same again, wherever it was kept."""
    words = iter(experiment.plan.command)
    kept = []
    for word in words:
        if word == "-o":
            next(words)
        elif word != "--force":
            kept.append(word)
    return shlex.join(kept)


def filled(text: str, name: str, lines: list[str]) -> str:
    """A page with one marked part made anew.

    Raises:
        SystemExit: the page has no such part.
    """
    head, marked, rest = text.partition(begin(name))
    _, end, tail = rest.partition(END)
    if not (marked and end):
        raise SystemExit(f"the page has no part between {begin(name)} and {END}")
    made = "\n".join(lines).rstrip()
    return f"{head}{marked}\n\n{made}\n\n{end}{tail}"


def unmarked(docs: Path) -> Iterator[str]:
    """What keeps the pages from being written."""
    for name in (TABLE, *EXPERIMENTS):
        page = page_of(docs, name)
        try:
            filled(page.read_text(encoding="utf-8"), name, [])
        except OSError as exc:
            yield f"{page}: cannot be read ({exc.strerror})"
        except SystemExit as exc:
            yield f"{page}: {exc}"


def write(docs: Path, experiments: Sequence[Experiment], took: Took, command: str) -> None:
    """Write the table, and what each workload measured, into the pages."""
    parts = {TABLE: table(experiments, took, command)}
    found = {e.plan.workload: e for e in experiments}
    for name, seconds in took.items():
        if isinstance(seconds, str):
            parts[name] = [f"Not measured: {seconds}."]
        else:
            parts[name] = measured(found[name], seconds)
    for name, lines in parts.items():
        page = page_of(docs, name)
        page.write_text(filled(page.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


def main() -> None:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="names; all that are experiments by default")
    parser.add_argument("--output", type=Path, help="keep the experiments there")
    parser.add_argument("--keep", action="store_true", help="do not run again what is there")
    parser.add_argument("--repeats", type=int, help="of each variant")
    parser.add_argument("--docs", type=Path, help="folder of the pages to write into")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    if args.keep and args.output is None:
        parser.error("--keep: name the experiments' directory with --output")
    names = args.workloads or [*EXPERIMENTS]
    for name in names:
        try:
            find(name)
        except ChopperError as exc:
            parser.error(str(exc))
        if name not in EXPERIMENTS:
            parser.error(f"{name} is no experiment; {', '.join(EXPERIMENTS)} are")
    took = kept(args.output)
    if args.docs is not None:  # what cannot be written is refused before anything runs
        absent = [name for name in EXPERIMENTS if name not in took and name not in names]
        if absent:
            where = args.output or "an --output"
            parser.error(f"--docs takes all: {', '.join(absent)} not in {where}; name no workloads")
        for problem in unmarked(args.docs):
            parser.error(f"--docs: {problem}")
    extra = [] if args.repeats is None else ["--repeats", str(args.repeats)]
    with contextlib.ExitStack() as stack:
        place = args.output or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chopper-headlines-"))
        )
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (args.keep and isinstance(took.get(name), float)):
                begin_s = time.perf_counter()
                why = run(name, place / name, extra)
                took[name] = why or time.perf_counter() - begin_s
                (place / TOOK).write_text(json.dumps(took, indent=2) + "\n")
            said = took[name]
            said = said if isinstance(said, str) else f"took {said:.0f} s"
            print(f"{name}: {said}", file=sys.stderr, flush=True)
        if args.docs is None:
            took = {name: took[name] for name in names}
        else:
            took = {name: took[name] for name in EXPERIMENTS}
        experiments = [load(place / n) for n, s in took.items() if not isinstance(s, str)]
        for experiment in experiments:
            _ = experiment.headlines  # drawn while its files are there
        if args.docs is not None and experiments:
            command = shlex.join(["python", "-m", "benchmarks.headlines", *extra])
            write(args.docs, experiments, took, command)
    tell(experiments, took, as_json=args.as_json)


def kept(output: Path | None) -> Took:
    """What an output directory says of the workloads that it holds."""
    if output is None or not (output / TOOK).is_file():
        return {}
    took: Took = json.loads((output / TOOK).read_text())
    return took


def tell(experiments: Sequence[Experiment], took: Took, *, as_json: bool) -> None:
    """Print the table."""
    headlines = rows(experiments, took)
    absent = {name: why for name, why in took.items() if isinstance(why, str)}
    if as_json:
        document = {
            "schema": "chopper.headlines/1",
            "machine": machine(experiments[0]) if experiments else None,
            "seconds": {n: s for n, s in took.items() if n not in absent},
            "headlines": [headline_to_dict(h) for h in headlines],
            "absent": absent,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    print(to_markdown.table(headline_table(headlines))[0])
    for name, reason in absent.items():
        print(f"\n{name}: {reason}")


def leave(number: int, _frame: FrameType | None) -> None:
    """End as after an interrupt, so that what runs is ended, too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
