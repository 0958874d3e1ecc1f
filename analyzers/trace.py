"""One rank's trace as arrays, with what every analyzer asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.columns import ints, matching, strings
from chopper.analyzers.nesting import Activity, Nesting, activity, nest

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa


@dataclass
class _Timed:
    """A table of named intervals as arrays."""

    table: pa.Table

    @cached_property
    def start_ns(self) -> np.ndarray:
        """Starts, ascending."""
        return ints(self.table, "start_ns")

    @cached_property
    def dur_ns(self) -> np.ndarray:
        """Durations."""
        return ints(self.table, "dur_ns")

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

    @cached_property
    def pid(self) -> np.ndarray:
        """Processes."""
        return ints(self.table, "pid")

    @cached_property
    def sequence_id(self) -> np.ndarray:
        """Autograd sequence numbers, -1 where none."""
        return ints(self.table, "sequence_id")

    @cached_property
    def forward_tid(self) -> np.ndarray:
        """Forward thread of backward nodes, -1 where none."""
        return ints(self.table, "forward_tid")

    @cached_property
    def categories(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the categories."""
        return strings(self.table, "category", narrow=True)

    @cached_property
    def input_dims(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the recorded shapes."""
        return strings(self.table, "input_dims", narrow=True)

    @cached_property
    def input_types(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the recorded data types."""
        return strings(self.table, "input_types", narrow=True)

    @cached_property
    def concrete_inputs(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the recorded scalar inputs."""
        return strings(self.table, "concrete_inputs", narrow=True)

    @cached_property
    def nesting(self) -> Nesting:
        """The forest of spans."""
        return nest(self.start_ns, self.dur_ns, self.pid, ints(self.table, "tid"))

    @cached_property
    def activity(self) -> Activity:
        """Who is innermost from when on, per thread."""
        return activity(self.nesting)

    def of(self, *categories: str) -> np.ndarray:
        """Mask of the spans of these categories."""
        return matching(*self.categories, lambda c: c in categories)


@dataclass
class DeviceEvents(_Timed):
    """The `device_event` table of one rank as arrays."""

    @cached_property
    def stream_id(self) -> np.ndarray:
        """Streams."""
        return ints(self.table, "stream_id")

    @cached_property
    def device_id(self) -> np.ndarray:
        """Devices."""
        return ints(self.table, "device_id")

    @cached_property
    def kinds(self) -> tuple[np.ndarray, list[str]]:
        """Codes and values of the kinds."""
        return strings(self.table, "kind", narrow=True)

    def of(self, *kinds: str) -> np.ndarray:
        """Mask of the events of these kinds."""
        return matching(*self.kinds, lambda k: k in kinds)
