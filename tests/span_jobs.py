"""A job of spans that is small enough to work out by hand, as tables of several kinds."""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

STEPS = (7, 9)
"""Step numbers have gaps."""


def operations(stage: int, replica: int, stages: int) -> Iterator[tuple[str, float, float, int]]:
    """Operation, start, duration and micro-batch of a worker's spans in one step."""
    for batch in range(2):
        begin = float(stage + batch)
        yield "forward-compute", begin, 1.0, batch
        if stage < stages - 1:
            yield "forward-send", begin + 1.0, 0.1, -1
        if stage > 0:
            yield "forward-recv", begin - 0.05, 0.05, -1
    for batch in range(2):
        begin = stages + 2 + 2 * batch + 2.2 * (stages - 1 - stage)
        yield "backward-compute", begin, 2.0, batch
        if stage > 0:
            yield "backward-send", begin + 2.0, 0.01, -1
        if stage < stages - 1:
            yield "backward-recv", begin - 0.15, 0.05, -1
    late = 0.5 if replica == 0 else 0.0
    done = 4 * stages + 4.0
    yield "grads-reduce-scatter", done + late, 1.0 - late, -1
    yield "optimizer-clip-main-grad", done + 1.0, 0.5, -1
    yield "optimizer", done + 1.5, 0.25 + 0.25 * stage, -1


def job(stages: int = 2, replicas: int = 2) -> list[Row]:
    """Two steps of two micro-batches on each stage of each replica, in seconds of each step.

    A forward takes 1 s, a backward 2 s. What the last stage sends back is received 40 ms after it
    was sent: the two never overlap. Gradients of two stages are summed from 12 to 13 s; the first
    replica comes half a second late.
    """
    rows: list[Row] = []
    for step, replica, stage in itertools.product(STEPS, range(replicas), range(stages)):
        counts: defaultdict[str, int] = defaultdict(int)
        for op, start, length, batch in operations(stage, replica, stages):
            rows.append(
                {
                    "dp_rank": replica,
                    "stage": stage,
                    "rank": 4 * (stage * replicas + replica),
                    "step": step,
                    "optype": op,
                    "start_ts": start,
                    "duration": length,
                    "seq_id": counts[op],
                    "mb_id": batch,
                }
            )
            counts[op] += 1
    return rows


def parquet(folder: Path, rows: Iterable[Row], name: str = "job.parquet") -> Path:
    path = folder / name
    pq.write_table(pa.Table.from_pylist([*rows]), path)
    return path


def as_csv(folder: Path, rows: list[Row], name: str = "job.csv") -> Path:
    path = folder / name
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return path


def renamed(rows: Iterable[Row], names: Mapping[str, str], scale: float = 1.0) -> list[Row]:
    times = ("start_ts", "duration")
    return [
        {names.get(n, n): v * scale if n in times else v for n, v in row.items()} for row in rows
    ]
