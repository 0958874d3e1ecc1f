"""Ranks of traces, and the checks that traces are of one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from chopper.collectors.formats.kineto import ParsedTrace
from chopper.errors import InputError
from chopper.storage.manifest import Finding, RankManifest, add_finding
from chopper.storage.parts import ranks_missing
from chopper.tables.ranges import MOST_RANKS, NUMBER_MOST
from chopper.wording import device_name, some

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker|gpu)[-_.]?([0-9]{1,6})(?!\d)", re.I)
_HANDLER_NAME = re.compile(r"(.+)_([0-9]{1,10})\.[0-9]+\.pt\.trace\.json")
"""As ``torch.profiler.tensorboard_trace_handler`` names files: host, process, milliseconds."""
APART_NS = 3600 * 10**9
"""Ranks of one run overlap in time; files an hour apart are two runs."""

Numbered = dict[int, "tuple[Path, ParsedTrace]"]


def number_ranks(traces: list[tuple[Path, ParsedTrace]]) -> Numbered:
    """Number traces by the recorded rank, else by the file's name, else in order.

    Further devices of a process come after all ranks.
    """
    numbered: Numbered = {}
    main = [item for item in traces if item[1].main]
    secondary = [item for item in traces if not item[1].main]
    rest: list[tuple[Path, ParsedTrace]] = []
    for file, trace in main:
        rank = trace.rank
        if rank is None:
            rest.append((file, trace))
            continue
        if rank in numbered:
            raise InputError(
                f"two traces claim rank {rank}: {numbered[rank][0]} and {file}; pass one of them "
                "(they may be two windows of that rank, or two runs), or analyze them "
                "separately"
            )
        numbered[rank] = (file, trace)
    named: Numbered = {}
    for file, trace in rest:
        rank = rank_by_name(file)
        if rank is None or rank in named or rank in numbered:
            named = {}
            break
        named[rank] = (file, trace)
    if len(named) == len(rest):
        numbered |= named
    else:
        free = (i for i in range(len(main) + len(numbered)) if i not in numbered)
        numbered |= {next(free): item for item in rest}
    first = max([*numbered, *(t.world_size - 1 for _, t in main if t.world_size), -1]) + 1
    return numbered | {first + i: item for i, item in enumerate(secondary)}


def rank_by_name(file: Path) -> int | None:
    """Return the rank that a file's name says, None where it says none."""
    match = _RANK_IN_NAME.search(file.name)
    return int(match.group(1)) if match else None


def rank_in(file: Path, ranks: Sequence[int]) -> int | None:
    """Return the rank that a file's name says, where there is that rank."""
    rank = rank_by_name(file)
    return rank if rank in ranks else None


def part_of(rank: int, file: Path, trace: ParsedTrace) -> RankManifest:
    """Return the manifest of a rank, as its trace tells it."""
    span = trace.span_ns
    return RankManifest(
        rank=rank,
        label=_label(rank, file, trace),
        world_size=trace.world_size,
        start_ns=span[0] if span else None,
        end_ns=span[1] if span else None,
        status="imported",
        backend=trace.backend,
        process_groups=trace.process_groups,
        environment=trace.environment,
        devices=trace.devices,
        device_id=trace.device_id,
        traces=(str(file.resolve()),),
        findings=trace.findings,
        pid=trace.host_pid if 0 <= (trace.host_pid or 0) <= NUMBER_MOST else None,
        hostname=host_of(file, trace),
    )


def host_of(file: Path, trace: ParsedTrace) -> str | None:
    """Return the host of a trace, by its header or by the name that torch gives the file."""
    named = trace.environment.get("host_name")
    if named is None:
        match = _HANDLER_NAME.match(file.name)
        if match is not None and int(match[2]) == trace.host_pid:
            return match[1]
    return named


def _label(rank: int, file: Path, trace: ParsedTrace) -> str | None:
    """Return the label shown instead of a rank's number, where the number says too little."""
    if trace.rank is not None:
        named = f"rank {trace.rank}"
    else:
        named = f"{file.name} {trace.process}" if trace.process else file.name
    if not trace.main:
        return f"{named} {device_name(trace.device_id)}"
    return named if trace.rank != rank else None


def credible(traces: list[ParsedTrace]) -> list[Finding]:
    """Forget ranks and job sizes that no job has: all that counts ranks would believe them."""
    findings: list[Finding] = []
    for trace in traces:
        if trace.rank is not None and trace.rank >= MOST_RANKS:
            add_finding(
                findings,
                "run.rank_number",
                f"{trace.source}: says it is rank {trace.rank}; rejected",
            )
            trace.rank = None
        if trace.world_size is not None and trace.world_size > MOST_RANKS:
            add_finding(
                findings,
                "run.world_size",
                f"{trace.source}: says it is of a job of {trace.world_size} ranks; rejected",
            )
            trace.world_size = None
    return findings


def check_one_run(traces: list[tuple[Path, ParsedTrace]]) -> list[Finding]:
    """Refuse files that cannot be of one run."""
    if len(traces) < 2:
        return []
    worlds: dict[int, Path] = {}
    for file, trace in traces:
        if trace.world_size is not None:
            worlds.setdefault(trace.world_size, file)
    if len(worlds) > 1:
        sizes = ", ".join(f"{file} says {world}" for world, file in sorted(worlds.items()))
        raise InputError(
            f"traces of different runs: world sizes differ ({sizes}); pass the files of one run"
        )
    spans = sorted(
        ((trace.span_ns, file) for file, trace in traces if trace.span_ns), key=lambda s: s[0]
    )
    if not spans:
        return []
    end, last = spans[0][0][1], spans[0][1]
    for (start, this_end), file in spans[1:]:
        if start - end > APART_NS:
            hours = (start - end) / 3.6e12
            raise InputError(
                f"traces of different runs: {file} starts {hours:.1f} h after {last} ended; "
                "pass the files of one run"
            )
        if this_end > end:
            end, last = this_end, file
    overlap = max(s[0] for s, _ in spans) < min(s[1] for s, _ in spans)
    if overlap:
        return []
    return [
        Finding(
            code="run.no_common_time",
            severity="warning",
            message="the ranks' traces do not overlap in time: their clocks disagree, or they "
            "are of different windows; ranks are attributed separately",
        )
    ]


def check_ranks(numbered: Numbered) -> list[Finding]:
    """Return findings about ranks that are missing, unknown or beyond the job's size."""
    findings: list[Finding] = []
    main = {rank: item for rank, item in numbered.items() if item[1].main}
    worlds = {t.world_size for _, t in main.values() if t.world_size}
    if not worlds:
        return findings
    world = max(worlds)
    unknown = [file.name for file, t in main.values() if t.rank is None]
    if unknown and len(main) > 1:
        add_finding(
            findings,
            "run.rank_unknown",
            f"{some(unknown)} do not name their rank, unlike files of a job of "
            f"{world} next to them: they may belong to another run, and their ranks are guessed",
            count=len(unknown),
        )
    beyond = [rank for rank in main if rank >= world]
    if beyond:
        add_finding(
            findings,
            "run.rank_beyond_world",
            f"rank {some(beyond)} of a job of {world}: ranks count from 0 to {world - 1}",
            count=len(beyond),
        )
    # One of many alone is as its user wants it.
    return findings + ranks_missing(main, world, "warning" if len(main) > 1 else "info")
