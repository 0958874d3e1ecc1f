"""The end of a recording: how the program ended, one manifest of all ranks, what is said."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from chopper.errors import ChopperError, InputError, OutputError, RunFormatError, say
from chopper.storage import manifest as m
from chopper.storage.files import write_atomic
from chopper.storage.layout import MANIFEST, sub_runs
from chopper.storage.parts import (
    of_all_ranks,
    other_processes,
    read_manifest,
    read_parts,
    run_of_parts,
    yield_ranks,
)
from chopper.storage.processes import LOCK, LOCK_WAIT_S, HeldElsewhere, locked, recorders
from chopper.wording import next_command, plural

Status = Literal["complete", "interrupted", "failed"]
OF_WHOLE_RUN = frozenset(
    ("run.ranks_missing", "run.part_missing", "run.rank_died", "run.windows_apart")
)
"""Findings that change with the ranks that are there, and whether they have ended."""


def finalize(
    path: Path,
    *,
    command: Iterable[str] | None = None,
    workload: str | None = None,
    exit_code: int | None = None,
) -> m.RunManifest:
    """Make ``manifest.json`` from the ranks' parts; called once, by whoever launched them.

    The runs of further processes inside of it get one each, and its rank goes to one of them when
    the process that holds it took no step.

    Raises:
        RunFormatError: no rank recorded anything.
    """
    yield_ranks(path)
    for inner in sub_runs(path):
        if not recorders(inner):
            with contextlib.suppress(RunFormatError, OutputError):
                finalize(inner)
    with contextlib.ExitStack() as held:
        # Of several recorders of one job, each with its own ranks, the last says what there is.
        with contextlib.suppress(HeldElsewhere):
            held.enter_context(locked(path / LOCK, wait_s=LOCK_WAIT_S))
        parts, findings = read_parts(path, exit_code)
        if not parts:
            raise RunFormatError(
                f"{path}: no rank recorded anything; did the command import torch and run a step?"
            )
        embed_calibration(parts)
        run = run_of_parts(path, parts, [*findings, *of_all_ranks(parts)])
        run.workload, run.exit_code = workload, exit_code
        if command is not None:
            run.command = tuple(command)
        write_atomic(path / MANIFEST, m.encode(run))
    return run


def embed_calibration(parts: list[m.RankManifest]) -> None:
    """Write what this machine was measured to achieve into the parts of ranks that ran on it.

    The measured ceiling travels with the run: it can be attributed elsewhere.
    """
    from chopper.hardware import calibration

    here = [p for p in parts if p.hostname == socket.gethostname()]
    on_host = sum(not part.devices for part in here)
    # A damaged store is `chopper calibrate`'s to report; the recording is worth more.
    with contextlib.suppress(InputError):
        for part in here:
            name = next((d.name for d in part.devices if d.device_id == part.device_id), None)
            if part.calibration is not None or (part.devices and name is None):
                continue
            if name is None:
                cpu_name = part.environment.get("cpu")
                measured = calibration.load(None, cpu_name=cpu_name, ranks=on_host)
            else:
                # Devices do not share their units: what one reached alone holds beside others.
                measured = calibration.load(name, ranks=len(here)) or calibration.load(name)
            if measured is not None:
                part.calibration = calibration.to_manifest(measured)


def exception_text(exc: BaseException) -> str:
    """Return an exception as one line: its class, unless it is ours, and its first line."""
    kind = type(exc).__name__
    try:
        text = str(exc).strip().splitlines()
    except Exception:  # noqa: BLE001 - the program's own class, which may do anything
        return kind
    if isinstance(exc, ChopperError):
        return text[0] if text else kind
    return f"{kind}: {text[0]}" if text else kind


def ending(exc: BaseException | None) -> tuple[Status, str | None]:
    """Return status and error of a program that an exception ended, or nothing did."""
    if exc is None or (isinstance(exc, SystemExit) and exc.code in (None, 0)):
        return "complete", None
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "failed", exception_text(exc)


def announce(path: Path, shown_path: Path, part: m.RankManifest) -> None:
    """Say where the run of rank 0 is, what its findings warn of, and which collectors failed."""
    process_findings = other_processes(path, shown_path)
    is_single = part.world_size == 1
    parts = read_manifest(path).ranks if is_single else [part]
    steps = max((part.steps_count or 0) for part in parts)
    ranks = plural(len(parts), "rank") if is_single else "rank 0"
    done = f"recorded {ranks}, {plural(steps, 'step')}"
    say(f"{done}; next: {next_command('chopper analyze {RUN}', RUN=[shown_path])}")
    for finding in (*process_findings, *(f for part in parts for f in part.findings)):
        if finding.severity != "info" or finding.code == "run.processes":
            say(f"{finding.severity}: {finding.message}")
    for report in parts[0].collectors:
        if report.status == "failed":
            say(f"collector {report.name} failed: {report.reason}")
