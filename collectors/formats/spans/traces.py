"""Traces of the workers of a job from their spans."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chopper.collectors.formats.parsed import (
    NO_VALUE,
    ParsedTrace,
    dictionary,
    sorted_table,
    step_table,
    table_of_rows,
    to_arrow,
)
from chopper.collectors.formats.spans.columns import Spans
from chopper.collectors.formats.spans.groups import Communication
from chopper.errors import InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Coordinate, Dimension, Finding
from chopper.tables import TABLES
from chopper.tables.ranges import MOST_RANKS
from chopper.wording import duration, some

_MOST_APART_RATIO = 0.5
"""Steps whose first spans lie closer together than this part of a step count their times from the
start of each step."""
_SHORTEST_NS, _LONGEST_NS = 1_000, 86_400 * 10**9
"""Operations that last less at the median, or more than a day, were read in a wrong unit."""


def traces_of(spans: Spans) -> list[ParsedTrace]:
    """Return the trace of each worker: device events, communication, steps, and its place.

    Raises:
        InputError: times or places cannot be right; one line says which.
    """
    _check_times(spans)
    communication = Communication(spans)
    axis = _Axis(spans)
    share_a_clock = axis.is_relative and not communication.contradicts(axis.start_ns, axis.end_ns)
    order = np.argsort(spans.worker, kind="stable")
    firsts = np.searchsorted(spans.worker[order], np.arange(len(spans.workers) + 1))
    traces = []
    for worker, rank in enumerate(spans.workers.tolist()):
        rows = order[firsts[worker] : firsts[worker + 1]]
        events, moved = _events(spans, axis, rows)
        tables = {
            "host_span": TABLES["host_span"].empty(),
            "thread": TABLES["thread"].empty(),
            "device_event": events,
            "collective": communication.table(worker, rows, moved),
            "pipeline_action": _actions(spans, rows, moved),
            "step": axis.steps(rows),
            "counter": axis.counters(rank),
        }
        traces.append(
            ParsedTrace(
                source=spans.path.name,
                rank=rank,
                world_size=len(spans.workers) if _are_all(spans.workers) else None,
                host_pid=None,
                device_id=0,
                main=True,
                devices=[],
                process_groups=communication.groups_of(worker),
                coordinates=_coordinates(spans, communication, worker),
                environment={
                    "recorded_by": spans.tool,
                    **({"trace_clock": "job"} if share_a_clock else {}),
                },
                tables=tables,
            )
        )
    traces[0].findings += [*_findings(spans, communication), *spans.findings]
    return traces


def _coordinates(spans: Spans, communication: Communication, worker: int) -> list[Coordinate]:
    """Return the place of a worker: its stage, and its data-parallel rank."""
    places: dict[str, tuple[Dimension, np.ndarray | None]] = {
        "stage": ("pipeline", communication.stage),
        "data_rank": ("data", communication.data_rank),
    }
    coordinates = [
        Coordinate(
            dimension=dimension,
            index=int(place[worker]),
            size=int(place.max()) + 1,
            source=spans.sources[name],
        )
        for name, (dimension, place) in places.items()
        if place is not None and place[worker] >= 0
    ]
    chunks = 1 if spans.chunk is None else max(int(spans.chunk.max()) + 1, 1)
    told: tuple[int, ...] = ()
    if spans.global_chunk is not None:
        own = np.unique(spans.global_chunk[spans.worker == worker]).tolist()
        told = tuple(stage for stage in own if stage >= 0)
    return [
        msgspec.structs.replace(
            one,
            stages=told
            if len(told) == chunks
            else tuple(chunk * one.size + one.index for chunk in range(chunks)),
            stages_count=chunks * one.size,
        )
        if one.dimension == "pipeline"
        else one
        for one in coordinates
    ]


def _are_all(workers: np.ndarray) -> bool:
    """Return whether the workers are numbered from 0 without a gap: then the file has them all."""
    return int(workers[-1]) == len(workers) - 1


def _check_times(spans: Spans) -> None:
    """Refuse times in another unit than they were read in, and ranks that no job has.

    Raises:
        InputError: that is so.
    """
    ranks = spans.workers[(spans.workers < 0) | (spans.workers >= MOST_RANKS)]
    if len(ranks):
        raise InputError(f"{spans.path}: rank {ranks[0]}, expected 0 to {MOST_RANKS - 1}")
    length_ns = spans.end_ns - spans.start_ns
    longest_ns = int(length_ns.max())
    typical_ns = int(np.median(length_ns[length_ns > 0])) if longest_ns else 0
    if typical_ns < _SHORTEST_NS or longest_ns > _LONGEST_NS:
        raise InputError(
            f"{spans.path}: spans last {duration(typical_ns)} at the median and "
            f"{duration(longest_ns)} at most, expected operations of microseconds to hours; name "
            "the unit of the times: --map unit=s (or ms, us, ns)"
        )


class _Axis:
    """The spans of all workers on one axis of time, and their steps.

    Where a file counts the times of each step from its start, each step is placed after the end of
    the one before it, over all workers.

    Attributes:
        start_ns, end_ns: of each span.
        is_relative: whether times count from the start of each step.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.start_ns, self.end_ns = spans.start_ns, spans.end_ns
        self.is_relative = False
        if spans.step is not None:
            self._numbers, self._at = np.unique(spans.step, return_inverse=True)
            self._place_steps()
        self.end_ns = self._without_rounding()

    def _place_steps(self) -> None:
        spans, count = self._spans, len(self._numbers)
        first = np.full(count, np.iinfo(np.int64).max)
        last = np.full(count, np.iinfo(np.int64).min)
        np.minimum.at(first, self._at, spans.start_ns)
        np.maximum.at(last, self._at, spans.end_ns)
        lengths_ns = [spans.lengths_ns.get(number, 0) for number in self._numbers.tolist()]
        last = np.maximum(last, lengths_ns)
        apart_ns = int(first.max() - first.min())
        self.is_relative = apart_ns < _MOST_APART_RATIO * float(np.median(last - first))
        if not self.is_relative:
            return
        # A worker that starts late in its step starts late after the origin of all.
        first[:] = min(int(first.min()), 0)
        self._bounds_ns = np.append(0, np.cumsum(last - first))
        moved = (self._bounds_ns[:-1] - first)[self._at]
        self.start_ns, self.end_ns = spans.start_ns + moved, spans.end_ns + moved

    def _without_rounding(self) -> np.ndarray:
        """Return ends, without overlaps on a worker's stream that come of rounded times."""
        spans = self._spans
        if spans.resolution_ns is None:
            return self.end_ns
        order = np.lexsort((self.start_ns, spans.stream, spans.worker))
        same = (np.diff(spans.worker[order]) == 0) & (np.diff(spans.stream[order]) == 0)
        row, following = order[:-1], order[1:]
        over_ns = self.end_ns[row] - self.start_ns[following]
        cut = same & (over_ns > 0) & (over_ns <= 2 * spans.resolution_ns[row])
        end_ns = self.end_ns.copy()
        end_ns[row[cut]] = np.maximum(self.start_ns[following], self.start_ns[row])[cut]
        return end_ns

    def steps(self, rows: np.ndarray) -> pa.Table:
        """Return STEP of a worker: of the steps that it has spans of."""
        spans = self._spans
        if spans.step is None:
            return TABLES["step"].empty()
        at, code = np.unique(self._at[rows], return_inverse=True)
        if self.is_relative:
            bounds = self._bounds_ns[at], self._bounds_ns[at + 1]
        else:
            first, last = self.start_ns[rows], self.end_ns[rows]
            bounds = np.full(len(at), first.max()), np.full(len(at), last.min())
            np.minimum.at(bounds[0], code, first)
            np.maximum.at(bounds[1], code, last)
        source = "span" if self.is_relative else "range"
        return step_table(self._numbers[at].tolist(), *bounds, source)

    def counters(self, rank: int) -> pa.Table:
        """Return COUNTER of a worker: what was read at the end of its steps."""
        of = self._spans
        if not of.counters or not self.is_relative:
            return TABLES["counter"].empty()
        end_ns = dict(zip(self._numbers.tolist(), self._bounds_ns[1:].tolist(), strict=True))
        mine = [counter for counter in of.counters if counter[0] == rank]
        rows = [(end_ns[step], of.tool, name, value) for _, step, name, value in mine]
        return table_of_rows("counter", rows)


def _events(spans: Spans, axis: _Axis, rows: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """Return DEVICE_EVENT of a worker's spans, and the row of each in it."""
    count = len(rows)
    none = np.full(count, NO_VALUE, dtype=np.int64)
    no_text = np.zeros(count, dtype=np.int32), [None]
    columns: dict[str, Any] = {
        f.name: no_text if pa.types.is_dictionary(f.type) else none
        for f in TABLES["device_event"].arrow
    }
    start_ns = axis.start_ns[rows]
    columns |= {
        "start_ns": start_ns,
        "dur_ns": axis.end_ns[rows] - start_ns,
        "device_id": np.zeros(count, dtype=np.int64),
        "stream_id": spans.stream[rows].astype(np.int64),
        "kind": (np.ones(count, dtype=np.int32), [None, "kernel"]),
        "name": (spans.op[rows].astype(np.int32) + 1, [None, *spans.names]),
        "occupancy_ratio": np.full(count, np.nan),
    }
    return sorted_table("device_event", columns, None, 0)


def _actions(spans: Spans, rows: np.ndarray, moved: np.ndarray) -> pa.Table:
    """Return PIPELINE_ACTION of a worker's spans that tell a stage, a micro-batch or a pass."""
    actions = [one.action for one in spans.operations]
    action, stage = spans.op[rows] + 1, np.full(len(rows), -1, dtype=np.int64)
    if spans.stage is not None:
        stage = spans.stage[rows]
        if spans.chunk is not None and spans.chunk.max() > 0:
            # Megatron-LM's interleaving: chunk c of rank r is stage c · size + r.
            chunk = spans.chunk[rows]
            stage = np.where(chunk < 0, -1, chunk * (int(spans.stage.max()) + 1) + stage)
            if spans.global_chunk is not None:
                whole = spans.global_chunk[rows]
                stage = np.where(whole < 0, stage, whole)
    batch = np.full(len(rows), -1) if spans.micro_batch is None else spans.micro_batch[rows]
    told = np.array([a is not None for a in actions])[spans.op[rows]] | (stage >= 0) | (batch >= 0)
    told = np.flatnonzero(told)
    told = told[np.argsort(moved[told])]
    return TABLES["pipeline_action"].of(
        {
            "event_row": to_arrow(moved[told]),
            "stage_index": _integers(stage[told]),
            "micro_batch_index": _integers(batch[told]),
            "action": dictionary(action[told].astype(np.int32), [None, *actions]),
        }
    )


def _integers(values: np.ndarray) -> pa.Array:
    return to_arrow(values.astype(np.int32), values < 0)


def _findings(spans: Spans, communication: Communication) -> list[Finding]:
    """Say what the file does not tell, and which workers of its layout are not in it."""
    source = spans.path.name
    lacks = ["the host", "launches", "kernels within an operation", "FLOP and bytes", "clocks"]
    unknown = dict.fromkeys(m.channel for m in communication.members if not m.ranks)
    lacks += [f"who takes part in {', '.join(unknown)}"] * bool(unknown)
    lacks += ["communication"] * (not communication.members)
    if len(spans.workers) > 1 and int(np.diff(spans.workers).min()) > 1:
        lacks.append("the ranks between those of its workers")
    listed = ", ".join([*spans.lacks, *lacks])
    findings = [finding("trace.not_recorded", source=source, tool=spans.tool, lacks=listed)]
    stage, data_rank = communication.stage, communication.data_rank
    if stage is not None and data_rank is not None:
        sizes = int(stage.max()) + 1, int(data_rank.max()) + 1
        places = {*zip(stage.tolist(), data_rank.tolist(), strict=True)}
        missing = [
            f"stage {s} of data rank {d}" for s, d in np.ndindex(*sizes) if (s, d) not in places
        ]
        if missing:
            findings.append(
                finding(
                    "run.ranks_missing",
                    "of_layout",
                    count=len(missing),
                    source=source,
                    world=sizes[0] * sizes[1],
                    ranks=some(missing),
                )
            )
    return findings
