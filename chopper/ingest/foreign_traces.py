"""Recordings of other profilers beside a Kineto trace, recognised by their kernels.

Two profilers that watched one run saw the same kernels begin, each by its own clock. The difference
of the clocks is the one at which most kernels of a name in the one meet one of that name in the
other; where hardly any do, it was another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.arrow import with_column
from chopper.collectors.formats.parsed import ParsedTrace, to_numpy
from chopper.errors import InputError
from chopper.storage.manifest import Finding, add_finding
from chopper.wording import base_name

_MOST_PAIRS = 400_000
_BIN_NS = 20_000
"""Clocks of one host drift apart by tens of millionths: by this in a second or two."""
_MET_NS = 100_000
_LEAST_RATIO = 0.8
_TABLES = ("device_clock", "counter")

Read = list[tuple["Path", "ParsedTrace"]]


def is_of_others(trace: ParsedTrace) -> bool:
    """Return whether another profiler than torch's recorded a trace."""
    return "recorded_by" in trace.environment


def joined(traces: Read, named: Mapping[Path, bool]) -> tuple[Read, list[Finding]]:
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
            add_finding(
                findings,
                "run.file_left_out",
                f"ignored: {refused}",
            )
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
    finding = Finding(
        code="trace.joined_recording",
        severity="info",
        message=f"{file.name}: {fmt.ratio(ratio)} of the trace's kernels are in it, clock offset "
        f"{-offset_ns / 1e9:+.6f} s; {', '.join(taken) or 'nothing'} of it joined",
    )
    return replace(
        trace,
        tables=tables,
        findings=[*trace.findings, finding],
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
