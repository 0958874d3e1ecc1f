"""``chopper compare RUN --history DIR``: the files of a history, and what a run does to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from chopper.errors import InputError, OutputError, printable, reason_of
from chopper.storage.files import decode_json, encode_json, read_bytes, write_atomic

if TYPE_CHECKING:
    from chopper.analyzers.compare.history import PastRun


class _Schema(msgspec.Struct):
    schema: str = ""


def read(folder: Path) -> list[PastRun]:
    """Read all runs of a history; none where it does not exist yet.

    Raises:
        InputError: it is no history, or a file in it is damaged or of a newer version.
    """
    from chopper.analyzers.compare.history import SCHEMA, PastRun

    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise InputError(f"{folder}: cannot be read as a history ({reason_of(exc)})") from exc
    runs = []
    for file in files:
        data = read_bytes(file)
        remedy = "remove the file, or name the directory of a history"
        problem = f"{file}: is not a run of a history"
        schema = decode_json(data, _Schema, problem, remedy=remedy, error=InputError).schema
        if schema != SCHEMA:
            raise InputError(
                f"{problem}: has schema {schema[:80]!r}, expected {SCHEMA!r}; {remedy}"
            )
        runs.append(decode_json(data, PastRun, problem, remedy=remedy, error=InputError))
    return runs


def add(folder: Path, run: PastRun) -> None:
    """Add a run to a history; a run that is in it is replaced.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be made ({reason_of(exc)})") from exc
    write_atomic(folder / f"{run.time_ns}-{run.id}.json", encode_json(run) + b"\n")


class Options(NamedTuple):
    """The options of ``--history``, in their order."""

    folder: Path
    find_percent: float
    add: bool
    accept: bool
    strict: bool
    junit: Path | None


def judged(
    source: str, options: Options, output: Path | None, kind: str | None, *, as_json: bool
) -> int:
    """Judge a run, add it where that is asked for, and say so; return the exit code."""
    folder, find_percent, add_run, accept, strict, junit = options
    history = read(folder)  # before minutes are spent on the run
    from chopper.analyzers.compare.history import adds, is_new_level, judge, past_run
    from chopper.cli import _shared as shared
    from chopper.cli.output import print_json, print_page
    from chopper.reports import history as report
    from chopper.reports.to_text import MARKS

    run = past_run(shared.attributed([source]))
    judgement = judge(run, history, find_ratio=find_percent / 100)
    new_level = (accept and is_new_level(judgement)) or any(
        earlier.accepted for earlier in history if earlier.id == run.id
    )
    if accept or (add_run and adds(judgement)):
        add(folder, msgspec.structs.replace(run, accepted=new_level))
        outcome = "added to the history" + (" as a new level" if new_level else "")
    elif add_run or judgement.failed:
        outcome = "not added to the history; --accept adds it, as a new level"
    else:
        outcome = "not added to the history; --add does"
    if junit is not None:
        text = report.junit(run.name, report.cases(judgement), run.time_ns)
        shared.write_report(junit, text)
    if output is not None and kind is not None:
        shared.write_report(output, report.render(judgement, kind, outcome=outcome))
        if not as_json:
            click.echo(output)
    if as_json:
        print_json(judgement.to_dict())
    elif output is None:
        print_page(report.page(judgement, outcome=outcome))
    if as_json or output is not None:
        mark = MARKS["error" if judgement.failed else "unknown" if judgement.undecided else "ok"][0]
        click.echo(printable(f"{mark} {judgement.sentence}"), err=True)
        click.echo(printable(outcome), err=True)
    return int(not accept and (judgement.failed or (strict and judgement.undecided)))
