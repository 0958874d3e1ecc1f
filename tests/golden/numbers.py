"""The numbers of an attribution that golden files hold: rows of rank, step, name and value."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.analyzers.attribution import Attribution
    from chopper.storage.run import Run

_CALLS = pa.array(["runtime", "driver"])
EXPECTED = Path(__file__).parent / "expected"
HEADER = ("rank", "step", "name", "value")
Row = tuple[str, str, str, str]


def numbers(run: Run, attribution: Attribution) -> list[Row]:
    """Counts of what was read, causes of each step and rank, step time, coverage and findings."""
    rows = [_row(name, value) for name, value in _whole(run, attribution)]
    for rank in run.ranks:
        rows += [_row(name, value, rank) for name, value in _counts(run, rank)]
    steps = attribution.windows.to_pylist()
    for window in steps:
        length_ns = window["end_ns"] - window["start_ns"]
        rows.append(_row("window_ns", length_ns, window["rank"], window["step_index"]))
    keys = ("rank", "step_index", "cause")
    sums = attribution.pieces.group_by([*keys]).aggregate([("time_ns", "sum")])
    for sum_ns in sorted(sums.to_pylist(), key=lambda s: tuple(s[k] for k in keys)):
        if sum_ns["time_ns_sum"]:
            where = sum_ns["rank"], sum_ns["step_index"]
            rows.append(_row(sum_ns["cause"], sum_ns["time_ns_sum"], *where))
    return rows


def _row(name: str, value: object, rank: object = "", step: object = "") -> Row:
    return str(rank), str(step), name, str(value)


def _whole(run: Run, attribution: Attribution) -> Iterator[tuple[str, object]]:
    yield "ranks", len(run.ranks)
    time = attribution.step_time()
    if time.untraced is not None:
        yield "untraced_step.median_ns", time.untraced.median_ns
        yield "untraced_step.count", time.untraced.steps_count
    for name, ratio in sorted(attribution.coverage.items()):
        yield f"coverage.{name}", ratio
    for code, count in sorted(Counter(_found(attribution)).items()):
        yield f"finding.{code}", count


def _found(attribution: Attribution) -> Iterator[str]:
    for finding in attribution.findings:
        yield from [finding.code] * (finding.count or 1)


def _counts(run: Run, rank: int) -> Iterator[tuple[str, object]]:
    part = run.part(rank)
    yield "world_size", part.world_size
    yield "backend", part.backend
    yield "device", part.devices[0].name if part.devices else None
    yield "devices", len(part.devices)
    yield "steps", run.table(rank, "step").num_rows
    device, host = run.table(rank, "device_event"), run.table(rank, "host_span")
    for table, column in ((device, "kind"), (host, "category")):
        counts = pc.value_counts(table[column].combine_chunks().cast("string")).to_pylist()
        for count in sorted(counts, key=lambda c: str(c["values"])):
            yield f"{column}.{count['values']}", count["counts"]
    kernels = device.filter(pc.equal(device["kind"].cast("string"), "kernel"))
    yield "kernels.zero_length", pc.sum(pc.equal(kernels["dur_ns"], 0)).as_py() or 0
    names = kernels["name"].cast("string")
    matches = pc.match_substring_regex(names, "nccl|rccl", ignore_case=True)
    yield "kernels.nccl", pc.sum(matches).as_py() or 0
    calls = host.filter(pc.is_in(host["category"].cast("string"), _CALLS))
    launched = pc.is_in(
        kernels["correlation_id"], calls["correlation_id"].drop_null().combine_chunks()
    )
    yield "kernels.without_launch", kernels.num_rows - (pc.sum(launched).as_py() or 0)
    yield "memory_events", run.table(rank, "memory_event").num_rows
    yield "spans_with_shapes", len(host) - host["input_dims"].null_count
