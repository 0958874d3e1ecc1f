"""Plans of the fast tier: functions to call, their arguments, and the places of the values.

A source finds library, devices and sensors through the vendor's binding and describes the calls of
one sample as a :class:`Plan`. :class:`Background` runs it in C (``_fast.c``), in a thread that
needs no GIL. Where that part was not compiled, the source's ``sample`` reads the same in Python.
"""

from __future__ import annotations

from ctypes import addressof, c_void_p, cast, sizeof, string_at
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    from chopper.collectors._fast import Loop
except ImportError:  # not compiled here
    Loop = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

AVAILABLE = Loop is not None
"""True where the part in C was compiled."""

NUMBER, FIELD, MEAN, RESIDENCY, SUM, METRIC = range(6)
"""Kinds of columns, by the places they are made of.

NUMBER: the first that is available (tagged 1: a signed one). FIELD: the first ``nvmlFieldValue_t``
that is not refused (tagged with its unit, 0 for the column's factor). MEAN: the mean of those
tagged 1, else the first other. RESIDENCY: bits (the tags) of those that grew; the one tagged 0
counts the ticks. SUM: of several ``nvmlFieldValue_t``. METRIC: one ``nvmlGpmMetric_t``.
"""

SENSOR, DEVICE = 1, 2
"""Losses by an error code. Codes that are not named cost one reading."""

_RING_S = 8
_RING_MIN = 1024


class Interval(NamedTuple):
    """A driver's function of two snapshots of its counters."""

    compute: int
    """``int f(buffer)``."""
    older: int
    newer: int
    """The two snapshots; they are swapped at each reading."""
    older_at: int
    newer_at: int
    """Offsets in the buffer that names them."""


class Call(NamedTuple):
    """One function of the driver: ``int f(handle[, argument], buffer)``.

    With an interval it is ``int f(handle, snapshot)``, and what that computes fills the buffer.
    """

    function: int
    handle: int
    argument: int | None
    buffer: bytes
    """Content of the buffer before the first call."""
    interval: Interval | None = None
    every: int = 1
    """Made at one of so many samples; between them its columns are null."""
    turn: int = 0
    """Samples before it is made for the first time."""


class Column(NamedTuple):
    """A column of the table after time, span and device."""

    kind: int
    call: int
    """Index of the device's call that writes it."""
    places: tuple[tuple[int, int, int], ...]
    """Offset and width in bytes, and a tag."""
    factor: int | float
    """One unit in the column's unit; a float makes the column one of floats."""
    nonzero: bool = False
    """0 says that it is not known."""
    sentinel: bool = False
    """All bits one say that it is not known."""
    most: int = 0
    """A number that is larger, or less than 0, is no value; 0 for no such end."""


class PlannedDevice(NamedTuple):
    """One device's calls and columns; a column that it does not offer is None."""

    id: int
    uuid: str | None
    calls: tuple[Call, ...]
    columns: tuple[Column | None, ...]


@dataclass(frozen=True)
class Plan:
    """All calls of one sample.

    Attributes:
        table: declared table; its columns after time, span, device and UUID are the plan's.
        devices: what is read, in this order.
        outcomes: error code → SENSOR or DEVICE.
        keep_empty: a reading of which nothing is known makes a row too.
    """

    table: str
    devices: tuple[PlannedDevice, ...]
    outcomes: Mapping[int, int]
    keep_empty: bool = False


def address(function: Any) -> int:
    """Return the address of a function that ctypes has bound."""
    value = cast(function, c_void_p).value
    assert value is not None
    return value


def pointer(handle: Any) -> int:
    """The value of an opaque handle."""
    return cast(handle, c_void_p).value or 0


def content(structure: Any) -> bytes:
    """The bytes of a ctypes structure or array as they are now."""
    return string_at(addressof(structure), sizeof(structure))


class DeviceTotals(NamedTuple):
    """Counts of one device's readings."""

    id: int
    samples: int
    late: int
    dropped: int
    overflowed: int
    elapsed_ns: int
    lost: int
    refused: tuple[int, ...]


def ring_records(period_ns: int) -> int:
    """Records that a device's ring holds: those of some seconds, a power of two."""
    records = max(_RING_MIN, _RING_S * 1_000_000_000 // period_ns)
    return 1 << (records - 1).bit_length()


class Background:
    """A plan at work."""

    def __init__(self, plan: Plan, period_ns: int) -> None:
        import pyarrow as pa

        from chopper.arrow import to_arrow
        from chopper.tables import TABLES

        self._schema = TABLES[plan.table].arrow
        # Of each column: what its numbers are, and the names that they stand for.
        self._kinds = [
            (field.name, field.type.index_type, True)
            if pa.types.is_dictionary(field.type)
            else (field.name, field.type, False)
            for field in self._schema
        ]
        self._names = to_arrow([device.uuid or "" for device in plan.devices], pa.string())
        self._loop = Loop(
            period_ns,
            ring_records(period_ns),
            len(self._schema) - 4,
            tuple((_signed(code), kind) for code, kind in plan.outcomes.items()),
            plan.keep_empty,
            tuple(
                (d.id, -1 if d.uuid is None else code, d.calls, d.columns)
                for code, d in enumerate(plan.devices)
            ),
        )
        self.start = self._loop.start
        self.relieve = self._loop.relieve
        self.set_period = self._loop.set_period
        self.stop = self._loop.stop

    def take(self) -> dict[str, pa.Array] | None:
        """Columns of the rows since the last call, by time; None when there are none."""
        import pyarrow as pa

        count, columns = self._loop.take()
        if not count:
            return None
        taken = {}
        for (name, kind, named), (valid, data, nulls) in zip(self._kinds, columns, strict=True):
            buffers = [pa.py_buffer(valid) if nulls else None, pa.py_buffer(data)]
            array = pa.Array.from_buffers(kind, count, buffers, nulls)
            taken[name] = pa.DictionaryArray.from_arrays(array, self._names) if named else array
        return taken

    def totals(self) -> tuple[list[DeviceTotals], dict[int, int], dict[int, int], int]:
        """Each device's totals, counts of delays and costs by bucket, and how many ticks."""
        devices, jitter, cost, ticks = self._loop.statistics()
        return [DeviceTotals(*device) for device in devices], jitter, cost, ticks


def _signed(code: int) -> int:
    """An error code as C's int has it."""
    return code - (1 << 32) if code >= 1 << 31 else code
