"""Plans of the fast tier: functions to call, their arguments, and the places of the values.

A source finds library, devices and sensors through the vendor's binding and describes the calls of
one sample as a :class:`Plan`. :class:`Background` runs it in C (``_fast.c``), in a thread that
needs no GIL. :class:`DeviceReader` makes the same readings in Python: at the start, to find out
what a device refuses, and throughout where the part in C was not compiled.
"""

from __future__ import annotations

import struct
from ctypes import CFUNCTYPE, addressof, c_int, c_uint, c_void_p, cast, sizeof, string_at
from ctypes import create_string_buffer as string_buffer
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from chopper.collectors.base import held
from chopper.storage import clock

try:
    from chopper.collectors._fast import Loop
except ImportError:  # not compiled here
    Loop = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    """All calls of one sample."""

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
    return cast(handle, c_void_p).value or 0


def content(structure: Any) -> bytes:
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


NOTHING = -(1 << 31)
"""What a call returns that has nothing to tell yet, or whose turn it is not."""
FIELD_BYTES = 40
"""Size of one nvmlFieldValue_t."""
_FIELD = struct.Struct("<24xIi8s")
"""Of which: type, code and value."""
_FIELD_TYPES = ("<d", "<I", "<Q", "<Q", "<q", "<i", "<H")
_BLANK = {1: (1 << 32) - 1, 2: (1 << 64) - 1, 3: (1 << 64) - 1}
_METRIC = struct.Struct("<4xid")
"""nvmlGpmMetric_t: code and value."""
VERSION_MISMATCH = 25
"""NVML's code for a value of a type that nobody knows."""


def field_value(kind: int, data: bytes) -> int | float | None:
    """Return the number that the 8 bytes of an nvmlValue_t hold; None for all bits one.

    Raises IndexError for a type of a newer driver.
    """
    number: int | float = struct.unpack_from(_FIELD_TYPES[kind], data)[0]
    return None if number == _BLANK.get(kind) or not isfinite(number) else number


class LiveCall:
    """A call that is made from Python, and what it wrote last."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.buffer = string_buffer(call.buffer, len(call.buffer))
        self.refused = 0
        self._turn = call.turn
        argument = () if call.argument is None else (c_uint,)
        self._function = CFUNCTYPE(c_int, c_void_p, *argument, c_void_p)(call.function)
        self._arguments = (call.handle, *(() if call.argument is None else (call.argument,)))
        interval = call.interval
        self._snapshots = [interval.older, interval.newer] if interval is not None else []
        """The one that is taken next first."""
        self._has_older = False

    def make(self) -> int:
        interval = self.call.interval
        if interval is None:
            code: int = self._function(*self._arguments, self.buffer)
            return code
        newer, older = self._snapshots
        code = self._function(*self._arguments, newer)
        if not code and self._has_older:
            struct.pack_into("P", self.buffer, interval.older_at, older)
            struct.pack_into("P", self.buffer, interval.newer_at, newer)
            code = CFUNCTYPE(c_int, c_void_p)(interval.compute)(self.buffer)
        if code:
            return code
        first, self._has_older = not self._has_older, True
        self._snapshots.reverse()
        return NOTHING if first else 0

    def make_in_turn(self) -> int:
        due = self._turn == 0
        self._turn = (self.call.every if due else self._turn) - 1
        return self.make() if due else NOTHING


class DeviceReader:
    """One device of a plan, read in Python as the loop in C reads it."""

    def __init__(
        self, device: PlannedDevice, outcomes: Mapping[int, int], *, keep_empty: bool = False
    ) -> None:
        self.device = device
        self.calls = [LiveCall(call) for call in device.calls]
        self.lost = 0
        self.refused = [0] * len(device.columns)
        self._outcomes = outcomes
        self._keep_empty = keep_empty
        self._refused_places: dict[tuple[int, int], int] = {}
        self._counts: dict[int, dict[int, int | None]] = {}
        """Column of residencies → place → what was read before."""

    def read(self, *, whole: bool = False) -> list[int | float | None] | None:
        """Make the calls, all or in turn; return each column's value, None for no row."""
        codes = []
        for call in self.calls:
            code = call.refused or (call.make() if whole else call.make_in_turn())
            loss = self._outcomes.get(code)
            if loss == DEVICE:
                self.lost = code
                return None
            if loss == SENSOR:
                call.refused = code
            codes.append(code)
        values = []
        for at, column in enumerate(self.device.columns):
            value = None
            if column is not None and not codes[column.call] and not self.refused[at]:
                code, value = self._value(at, column)
                loss = self._outcomes.get(code)
                if loss == DEVICE:
                    self.lost = code
                    return None
                self.refused[at] = code if loss == SENSOR else 0
            elif column is not None:
                self.refused[at] = self.refused[at] or self.calls[column.call].refused
            values.append(value)
        empty = not self._keep_empty and all(value is None for value in values)
        return None if empty or all(codes) else values

    def planned(self) -> PlannedDevice:
        """The device as it is now, without what it refused."""
        columns = [
            None if refused else column
            for column, refused in zip(self.device.columns, self.refused, strict=True)
        ]
        used = sorted({column.call for column in columns if column is not None})
        calls = [self.calls[at] for at in used]
        return self.device._replace(
            calls=tuple(live.call._replace(buffer=live.buffer.raw) for live in calls),
            columns=tuple(c and c._replace(call=used.index(c.call)) for c in columns),
        )

    def _value(self, at: int, column: Column) -> tuple[int, int | float | None]:
        data = self.calls[column.call].buffer.raw
        if column.kind == FIELD:
            return self._first_field(at, column, data)
        if column.kind == SUM:
            return _sum_of_fields(column, data)
        if column.kind == METRIC:
            code, value = _METRIC.unpack_from(data, column.places[0][0])
            known = not code and isfinite(value) and 0 <= value <= (column.most or value)
            return code, value * column.factor if known else None
        if column.kind == MEAN:
            return 0, _mean(column, data)
        if column.kind == RESIDENCY:
            return 0, self._residency(at, column, data)
        return 0, _first_number(column, column.places, data)

    def _first_field(self, at: int, column: Column, data: bytes) -> tuple[int, int | float | None]:
        """The first of the fields that the device has."""
        for number, place in enumerate(column.places):
            if (at, number) not in self._refused_places:
                code, value = _field(column, place, data)
                if self._outcomes.get(code) != SENSOR:
                    return code, value
                self._refused_places[at, number] = code
        return self._refused_places[at, 0], None

    def _residency(self, at: int, column: Column, data: bytes) -> int | None:
        """The bits of the accumulators that grew since the reading before."""
        now = [_number(place, data) for place in column.places]
        ticks = next(i for i, (*_, tag) in enumerate(column.places) if not tag)
        if now[ticks] is None or all(v is None for i, v in enumerate(now) if i != ticks):
            return None
        before = self._counts.get(at)
        if before is not None and before[ticks] == now[ticks]:
            return None  # not refreshed since
        self._counts[at] = dict(enumerate(now))
        if before is None:
            return None
        bits = 0
        for i, value in enumerate(now):
            last = before[i]
            if value is not None and last is not None:
                if value < last:
                    return None  # reset
                bits |= column.places[i][2] if value > last else 0
        return bits


def _number(place: tuple[int, int, int], data: bytes, *, sentinel: bool = True) -> int | None:
    """Return a number of a buffer; None for all bits one, where that means not available."""
    offset, width, _ = place
    value = int.from_bytes(data[offset : offset + width], "little")
    return None if sentinel and value == (1 << 8 * width) - 1 else value


def _first_number(
    column: Column, places: Iterable[tuple[int, int, int]], data: bytes
) -> int | float | None:
    for place in places:
        value = _number(place, data, sentinel=column.sentinel)
        if value is not None:
            if (column.nonzero and not value) or (column.most and value > column.most):
                return None
            if not isinstance(column.factor, float):
                return held(value * column.factor)
            signed = place[2] and value >= 1 << 31
            return (value - (1 << 32) if signed else value) * column.factor
    return None


def _field(
    column: Column, place: tuple[int, int, int], data: bytes
) -> tuple[int, int | float | None]:
    """Return the code that an nvmlFieldValue_t failed with, and its value."""
    offset, _, unit = place
    kind, code, raw = _FIELD.unpack_from(data, offset)
    if code:
        return code, None
    if kind >= len(_FIELD_TYPES):
        return VERSION_MISMATCH, None
    value = field_value(kind, raw)
    if value is None or (column.nonzero and not value):
        return 0, None
    if column.most and not 0 <= value <= column.most:
        return 0, None
    if isinstance(column.factor, float):
        return 0, value * column.factor
    return 0, held(int(value) * (unit or column.factor))


def _sum_of_fields(column: Column, data: bytes) -> tuple[int, int | None]:
    """The sum of all fields; none where one is not known, as it would step back."""
    total = 0
    for place in column.places:
        code, value = _field(column, place, data)
        if code or value is None:
            return code, None
        total += int(value)
    return 0, held(total)


def _mean(column: Column, data: bytes) -> int | float | None:
    """The mean of the places that are tagged and tell a number, else the first other number."""
    items = [value for place in column.places if place[2] and (value := _number(place, data))]
    if items:
        return round(sum(items) * column.factor / len(items))
    others = [place for place in column.places if not place[2]]
    return _first_number(column._replace(sentinel=True), others, data)


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
            tuple((c_int(code).value, loss) for code, loss in plan.outcomes.items()),
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
        import pyarrow.compute as pc

        count, columns = self._loop.take()
        if not count:
            return None
        taken = {}
        for (name, kind, named), (valid, data, nulls) in zip(self._kinds, columns, strict=True):
            buffers = [pa.py_buffer(valid) if nulls else None, pa.py_buffer(data)]
            array = pa.Array.from_buffers(kind, count, buffers, nulls)
            taken[name] = pa.DictionaryArray.from_arrays(array, self._names) if named else array
        if set_by_ns := clock.set_by_ns():  # the loop reads the wall clock
            taken["time_ns"] = pc.subtract(taken["time_ns"], set_by_ns)
        return taken

    def totals(self) -> tuple[list[DeviceTotals], dict[int, int], dict[int, int], int]:
        devices, jitter, cost, ticks = self._loop.statistics()
        return [DeviceTotals(*device) for device in devices], jitter, cost, ticks
