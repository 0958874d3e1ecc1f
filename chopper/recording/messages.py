"""Lines that a recording says on stderr, and how a program ended, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from chopper.errors import ChopperError, say
from chopper.storage import manifest as m
from chopper.storage.parts import other_processes, read_manifest
from chopper.wording import next_command, plural

Status = Literal["complete", "interrupted", "failed"]


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
