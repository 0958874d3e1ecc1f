"""One rank's trace as arrays, with what every analyzer asks of it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import compact, ints, matching, pick, strings
from chopper.analyzers.trace.nesting import Activity, Nesting, activity, nest
from chopper.analyzers.trace.span_forest import forest
from chopper.hardware.ceilings import Ceiling, Ceilings
from chopper.models.layouts import GroupDimensions
from chopper.storage.run import Span


@dataclass(frozen=True)
class RankTables:
    """The input of an attribution: declared tables of one rank and facts about its device.

    Attributes:
        ceiling, ceilings: peaks that count, and all that are known: theoretical and measured.
        no_peak_remedy: what to do when there are none, for the message.
        devices_listed: the trace names devices, so that a lack of device events is a lack.
        world_size: ranks of the run, None when not known.
        process_groups: name → global ranks, as far as the trace lists them.
        dimensions: of its process groups; None where nothing tells any.
        staged: the rank is in a pipeline of several stages.
        recorded: chopper took the trace.
        span: steps of the stretch, where this is one of a trace.
        common_steps: numbers of the steps that all ranks traced; None if they traced the same.
    """

    rank: int
    host_span: pa.Table
    device_event: pa.Table
    step: pa.Table
    collective: pa.Table
    ceiling: Ceiling | None
    no_peak_remedy: str
    devices_listed: bool
    world_size: int | None = None
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dimensions: GroupDimensions | None = None
    device_clock: pa.Table | None = None
    device_counter: pa.Table | None = None
    device_limit: pa.Table | None = None
    kernel_counter: pa.Table | None = None
    core_wait: pa.Table | None = None
    synchronization: pa.Table | None = None
    python_sample: pa.Table | None = None
    pipeline_action: pa.Table | None = None
    staged: bool = False
    recorded: bool = False
    ceilings: Ceilings | None = None
    span: Span | None = None
    common_steps: frozenset[int] | None = None


def _numbers(name: str) -> cached_property[np.ndarray]:
    """A column of whole numbers, -1 where there is none."""
    return cached_property(lambda timed: ints(timed.table, name))


def _texts(name: str) -> cached_property[tuple[np.ndarray, list[str]]]:
    """Codes (int32) and values of a column."""
    return cached_property(lambda timed: strings(timed.table, name, narrow=True))


@dataclass
class _Timed:
    """A table of named intervals as arrays."""

    table: pa.Table

    start_ns = _numbers("start_ns")
    """Starts, ascending."""
    dur_ns = _numbers("dur_ns")

    @cached_property
    def end_ns(self) -> np.ndarray:
        """Ends as recorded."""
        return self.start_ns + self.dur_ns

    @cached_property
    def names(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the names."""
        return strings(self.table, "name")

    def named(self, predicate: Callable[[str], object]) -> np.ndarray:
        """Mask of the rows whose name satisfies ``predicate``."""
        return matching(*self.names, predicate)

    def __len__(self) -> int:
        return int(self.table.num_rows)


@dataclass
class HostSpans(_Timed):
    """The `host_span` table of one rank as arrays."""

    names = _texts("name")

    @cached_property
    def kinds(self) -> tuple[np.ndarray, list[tuple[str, str]]]:
        """Codes (int32) and values of what occurs as (category, name)."""
        codes, values = self.names
        category, categories = strings(self.table, "category")
        distinct, number = compact(category * len(values) + codes)
        pairs = [(categories[d // len(values)], values[d % len(values)]) for d in distinct]
        return number.astype(np.int32), pairs

    sequence_id = _numbers("sequence_id")
    forward_tid = _numbers("forward_tid")
    """Forward thread of backward nodes, -1 where none."""
    input_dims = _texts("input_dims")
    input_types = _texts("input_types")
    concrete_inputs = _texts("concrete_inputs")

    @cached_property
    def nesting(self) -> Nesting:
        """The forest of spans.

        Spans that end in another call than they began in stand in lanes of their own.
        """
        tid = ints(self.table, "tid")
        unscoped = np.flatnonzero(self.named(names.is_unscoped_span))
        if len(unscoped):
            tid = tid.copy()
            tid[unscoped] = _FIRST_LANE - _lanes(self.start_ns[unscoped], self.ends(unscoped))
        return nest(self.start_ns, self.dur_ns, ints(self.table, "pid"), tid)

    @cached_property
    def activity(self) -> Activity:
        """Innermost span from each moment on, per thread."""
        return activity(self.nesting)

    def of(self, *categories: str) -> np.ndarray:
        """Mask of the spans of these categories."""
        return self.where(lambda category, _: category in categories)

    def where(self, predicate: Callable[[str, str], object]) -> np.ndarray:
        """Mask of the spans whose category and name satisfy ``predicate``."""
        codes, values = self.kinds
        return forest.look_up(codes, np.array([bool(predicate(*v)) for v in values] or [False]))

    def classified(self, code: Callable[[str, str], int]) -> np.ndarray:
        """A code (int32) for each span by its category and name."""
        codes, values = self.kinds
        return forest.look_up(codes, np.array([code(*v) for v in values] or [-1], dtype=np.int32))

    def names_of(self, rows: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the names of some spans; -1 for row -1."""
        codes, values = self.names
        return pick(codes, rows), values

    def ends(self, rows: np.ndarray) -> np.ndarray:
        """Ends of some spans, without computing those of all."""
        return self.start_ns[rows] + self.dur_ns[rows]


_FIRST_LANE = -1_000


def _lanes(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """The first lane, from 0, in which each interval overlaps none before it; starts ascend."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    lanes = np.empty(len(start_ns), dtype=np.int64)
    for i, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes[i] = lane
    return lanes


@dataclass
class DeviceEvents(_Timed):
    """The `device_event` table of one rank as arrays."""

    stream_id = _numbers("stream_id")
    device_id = _numbers("device_id")

    @cached_property
    def stream_key(self) -> np.ndarray:
        """A number for each stream of each device."""
        return self.device_id * (1 << 40) + self.stream_id

    @cached_property
    def kinds(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the kinds."""
        return strings(self.table, "kind", narrow=True)

    def of(self, *kinds: str) -> np.ndarray:
        """Mask of the events of these kinds."""
        return matching(*self.kinds, lambda k: k in kinds)
