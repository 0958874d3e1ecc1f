"""Ranks of traces, and the checks that traces are of one run.

Two profilers that watched one run saw the same kernels begin, each by its own clock. The difference
of the clocks is the one at which most kernels of a name in the one meet one of that name in the
other; where hardly any do, it was another run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.arrow import with_column
from chopper.collectors.formats.kineto import ParsedTrace
from chopper.collectors.formats.parsed import to_numpy
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding, RankManifest
from chopper.storage.parts import ranks_missing
from chopper.tables.ranges import MOST_RANKS, NUMBER_MOST
from chopper.wording import base_name, device_name, some

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
        coordinates=trace.coordinates,
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
            note = finding("run.rank_number", source=trace.source, stated=trace.rank)
            findings.append(note)
            trace.rank = None
        if trace.world_size is not None and trace.world_size > MOST_RANKS:
            note = finding("run.world_size", source=trace.source, stated=trace.world_size)
            findings.append(note)
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
    # What it withholds shows when the ranks' collectives are matched.
    return [] if overlap else [finding("run.no_common_time", withholds=False)]


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
        note = finding("run.rank_unknown", count=len(unknown), files=some(unknown), world=world)
        findings.append(note)
    beyond = [rank for rank in main if rank >= world]
    if beyond:
        note = finding(
            "run.rank_beyond_world",
            count=len(beyond),
            ranks=some(beyond),
            world=world,
            last=world - 1,
        )
        findings.append(note)
    # One of many alone is as its user wants it.
    return findings + ranks_missing(main, world, None if len(main) > 1 else "info")


_MOST_PAIRS = 400_000
_BIN_NS = 20_000
"""Clocks of one host drift apart by tens of millionths: by this in a second or two."""
_MET_NS = 100_000
_LEAST_RATIO = 0.8
_TABLES = ("device_clock", "device_activity", "counter")

Read = list[tuple["Path", "ParsedTrace"]]


def is_of_others(trace: ParsedTrace) -> bool:
    """Return whether another profiler than torch's recorded a trace."""
    return "recorded_by" in trace.environment


def without_foreign(traces: Read, named: Mapping[Path, bool]) -> tuple[Read, list[Finding]]:
    """Kineto's traces, with what others recorded of the same run; others alone stay as they are.

    Raises:
        InputError: a recording that was ``named`` beside Kineto's is of none of these ranks.
    """
    findings: list[Finding] = []
    foreign = [item for item in traces if is_of_others(item[1])]
    kinetos = [item for item in traces if not is_of_others(item[1])]
    if not foreign or not kinetos:
        return traces, findings
    for file, other in foreign:
        met = [(_meeting(trace, other), i) for i, (_, trace) in enumerate(kinetos)]
        (ratio, offset_ns), at = max(met, key=lambda item: item[0])
        if ratio < _LEAST_RATIO:
            refused = InputError(
                f"{file}: recorded by another profiler, next to a trace of torch's: only "
                f"{fmt.ratio(ratio)} of the trace's kernels are in it at any clock offset, so it "
                "belongs to another run; import them separately (chopper compare takes both)"
            )
            if named.get(file, True):
                raise refused
            findings.append(finding("run.file_left_out", "foreign", reason=refused))
            continue
        path, trace = kinetos[at]
        kinetos[at] = path, _with(trace, file, other, offset_ns, ratio)
    return kinetos, findings


def _with(
    trace: ParsedTrace, file: Path, other: ParsedTrace, offset_ns: int, ratio: float
) -> ParsedTrace:
    tables = dict(trace.tables)
    taken = []
    for name in _TABLES:
        table = other.tables.get(name)
        if (
            table is not None
            and table.num_rows
            and (name not in tables or not tables[name].num_rows)
        ):
            tables[name] = _moved(table, offset_ns, trace.device_id)
            taken.append(name)
    counters = other.tables.get("kernel_counter")
    if counters is not None and counters.num_rows:
        tables["kernel_counter"] = counters
        taken.append("kernel_counter")
    note = finding(
        "trace.joined_recording",
        source=file.name,
        ratio=fmt.ratio(ratio),
        offset_s=-offset_ns / 1e9,
        tables=", ".join(taken) or "nothing",
    )
    return replace(
        trace,
        tables=tables,
        findings=[*trace.findings, note],
        borrowed=trace.borrowed.union(taken),
    )


def _moved(table: pa.Table, offset_ns: int, device_id: int | None) -> pa.Table:
    moved = pc.add(table["time_ns"], pa.scalar(offset_ns, pa.int64()))
    table = with_column(table, "time_ns", moved)
    if "device_id" not in table.column_names or device_id is None:
        return table
    # The one device that ran these kernels, whatever the other tool calls it.
    return with_column(table, "device_id", pa.array([device_id] * table.num_rows, pa.int32()))


def _meeting(trace: ParsedTrace, other: ParsedTrace) -> tuple[float, int]:
    """(share of the trace's kernels that the other has, what to add to the other's times)."""
    ours, theirs = _starts(trace), _starts(other)
    shared = sorted(ours.keys() & theirs.keys(), key=lambda n: len(ours[n]) * len(theirs[n]))
    differences: list[np.ndarray] = []
    pairs = 0
    for name in shared:
        size = len(ours[name]) * len(theirs[name])
        if differences and pairs + size > _MOST_PAIRS:
            break
        # Of a name that is everywhere, some are enough.
        step = max(1, size // _MOST_PAIRS)
        differences.append((ours[name][:, None] - theirs[name][None, ::step]).reshape(-1))
        pairs += size // step
    if not differences:
        return 0.0, 0
    all_ = np.concatenate(differences)
    bins, counts = np.unique(all_ // _BIN_NS, return_counts=True)
    # What lies across an edge counts together.
    next_counts = np.where(np.append(bins[1:] == bins[:-1] + 1, False), np.append(counts[1:], 0), 0)
    best = int(bins[np.argmax(counts + next_counts)]) * _BIN_NS
    near = all_[(all_ >= best) & (all_ < best + 2 * _BIN_NS)]
    offset = int(np.median(near))
    met = 0
    for name in shared:
        at = np.searchsorted(theirs[name], ours[name] - offset)
        low = theirs[name][np.maximum(at - 1, 0)]
        high = theirs[name][np.minimum(at, len(theirs[name]) - 1)]
        gap = np.minimum(np.abs(ours[name] - offset - low), np.abs(ours[name] - offset - high))
        met += int((gap <= _MET_NS).sum())
    return met / max(sum(map(len, ours.values())), 1), offset


def _starts(trace: ParsedTrace) -> dict[str, np.ndarray]:
    """Starts of kernels by name, ascending."""
    table = trace.tables["device_event"]
    kind, name = table["kind"].combine_chunks(), table["name"].combine_chunks()
    kinds = kind.dictionary.to_pylist()
    if "kernel" not in kinds:
        return {}
    kernel = to_numpy(kind.indices) == kinds.index("kernel")
    short = [base_name(text) for text in name.dictionary.to_pylist()]
    number = {text: i for i, text in enumerate(dict.fromkeys(short))}
    of_name = np.array([number[text] for text in short])[to_numpy(name.indices)[kernel]]
    start = to_numpy(table["start_ns"])[kernel]
    starts = {}
    for text, code in number.items():
        mine = start[of_name == code]
        if len(mine):
            starts[text] = np.sort(mine)
    return starts
