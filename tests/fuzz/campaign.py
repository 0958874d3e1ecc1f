"""Mutates inputs of every kind and gives them to the commands, in watched processes.

    make fuzz                                        # ten minutes, a new seed each day
    python -m tests.fuzz --seconds 60 --seed 7 --only run --only trace
    python -m tests.fuzz --case run:123456           # one input again, and what it did

Every input follows from its kind and a number. Whatever fails is printed with both, made smaller by
leaving edits out, and kept in ``corpus/``, which every campaign and ``make test`` run again.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import itertools
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.fuzz import bases, kills
from tests.fuzz.cases import TARGETS, WEIGHTS, Case, Commands, build, judge
from tests.fuzz.pool import run_all

CORPUS = Path(__file__).parent / "corpus"
_KEPT_MOST_BYTES = 64 << 10
_SECONDS = 600.0
_SAME_MOST = 3
"""Failures at one place of the code that are kept."""


def run_case(bases_folder: Path, job: Case | Path | kills.Kill, folder: Path) -> str | None:
    """Make and judge one input: of a seed, of the corpus, or a recording that is killed."""
    if isinstance(job, kills.Kill):
        return kills.judge(job, bases_folder, folder)
    if isinstance(job, Path):
        return judge(unpack(job, bases_folder, folder), folder)
    return judge(build(job, bases_folder, folder), folder)


def cases(seed: int, only: tuple[str, ...]) -> Iterator[Case]:
    """Cases without end."""
    random = Random(seed)
    names = [name for name in TARGETS if not only or name in only]
    weights = [WEIGHTS[name] for name in names]
    while names:
        yield Case(random.choices(names, weights)[0], random.randrange(1 << 40))


def signature(problem: str) -> str:
    """What failures of one kind have in common."""
    return problem.split("\n")[1] if problem.startswith("chopper ") else problem.split("\n")[0]


def smaller(work: functools.partial[str | None], case: Case, problem: str) -> Case:
    """Leave out the edits without which the same problem comes about."""
    for number in case.numbers():
        rest = tuple(n for n in case.numbers() if n != number)
        candidate = Case(case.target, case.seed, rest)
        ((_, again),) = run_all(work, [candidate], workers_count=1)
        if again is not None and signature(again) == signature(problem):
            case = candidate
    return case


def keep(case: Case, problem: str, bases_folder: Path) -> Path:
    """Write a failing input to the corpus."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "case")
        commands = build(case, bases_folder, folder)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz") as tar:
            tar.add(folder / "in", "in")
            if (folder / "home").exists():
                tar.add(folder / "home", "home")
        data = packed.getvalue()
    words = [[w.replace(str(bases_folder), "BASES") for w in command] for command in commands]
    entry = {
        "made_by": "tests/fuzz, from an input that this repository's own writers made",
        "case": f"{case.target}:{case.seed}",
        "edits": case.numbers(),
        "problem": signature(problem),
        "commands": words,
        "input": base64.b64encode(data).decode() if len(data) <= _KEPT_MOST_BYTES else None,
    }
    CORPUS.mkdir(exist_ok=True)
    file = CORPUS / f"{case.target}-{case.seed}.json"
    file.write_text(json.dumps(entry, indent=1) + "\n")
    return file


def unpack(entry: Path, bases_folder: Path, folder: Path) -> Commands:
    """Lay out an input of the corpus; returns its commands."""
    kept = json.loads(entry.read_text())
    target, _, seed = kept["case"].partition(":")
    commands = build(Case(target, int(seed), tuple(kept["edits"])), bases_folder, folder)
    if kept["input"] is None:
        return commands
    shutil.rmtree(folder / "in")
    shutil.rmtree(folder / "home", ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(kept["input"]))) as tar:
        tar.extractall(folder, filter="fully_trusted")
    return [[w.replace("BASES", str(bases_folder)) for w in c] for c in kept["commands"]]


def campaign(
    *, seconds: float, seed: int, only: tuple[str, ...], workers_count: int, count: int | None
) -> int:
    """Run the corpus, then cases until the time is over; returns how many kinds of failures."""
    with tempfile.TemporaryDirectory(prefix="chopper-fuzz-bases-") as name:
        folder = Path(name)
        bases.make(folder)
        work = functools.partial(run_case, folder)
        jobs = itertools.chain(
            sorted(CORPUS.glob("*.json")) if not only else (),
            itertools.islice(kills.kills(seed), count)
            if only == ("kill",)
            else _with_kills(itertools.islice(cases(seed, only), count), seed, kill=not only),
        )
        began_s = time.monotonic()
        done: Counter[str] = Counter()
        failures: Counter[str] = Counter()
        for job, problem in run_all(work, jobs, workers_count=workers_count, give_up_s=seconds):
            done[_kind(job)] += 1
            if problem is None:
                continue
            failures[signature(problem)] += 1
            if failures[signature(problem)] > _SAME_MOST:
                continue
            print(f"\nFAILED {_label(job)}\n{problem}", flush=True)
            if isinstance(job, Case):
                job = smaller(work, job, problem)
                print(f"kept as {keep(job, problem, folder)}", flush=True)
        taken_s = time.monotonic() - began_s
        kinds = ", ".join(f"{count} {kind}" for kind, count in done.most_common())
        print(f"\n{done.total()} inputs in {taken_s:.0f} s, seed {seed} ({kinds})")
        for text, times in failures.most_common():
            print(f"  {times:>5} × {text}")
        return len(failures)


def _with_kills(many: Iterator[Case], seed: int, *, kill: bool) -> Iterator[Case | kills.Kill]:
    """A recording that is killed after every so many other inputs: it takes seconds."""
    killing = kills.kills(seed)
    for number, case in enumerate(many):
        yield case
        if kill and number % kills.EVERY == 0:
            yield next(killing)


def _kind(job: Case | Path | kills.Kill) -> str:
    if isinstance(job, kills.Kill):
        return f"kill of {job.target}"
    return "corpus" if isinstance(job, Path) else job.target


def _label(job: Case | Path | kills.Kill) -> str:
    return f"{job.target}:{job.seed}" if isinstance(job, Case) else str(job)


def again(label: str) -> int:
    """Run one input in this process, and say what it did."""
    target, _, seed = label.partition(":")
    with tempfile.TemporaryDirectory(prefix="chopper-fuzz-") as name:
        (Path(name) / "bases").mkdir()
        bases.make(Path(name) / "bases")
        folder = Path(name, "case")
        commands = build(Case(target, int(seed)), Path(name) / "bases", folder)
        for command in commands:
            print("chopper " + " ".join(command))
        problem = judge(commands, folder)
        print(problem or "nothing is wrong")
    return problem is not None


def main() -> int:
    """Command line; the exit code is 1 when anything failed."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--count", type=int, help="inputs at most")
    parser.add_argument("--seed", type=int, default=int(time.time() // 86_400))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", choices=sorted((*TARGETS, "kill")), default=[])
    parser.add_argument("--case", help="run one input again: KIND:NUMBER")
    options = parser.parse_args()
    if options.case:
        return again(options.case)
    found = campaign(
        seconds=options.seconds,
        seed=options.seed,
        only=tuple(options.only),
        workers_count=options.workers,
        count=options.count,
    )
    return 1 if found else 0
