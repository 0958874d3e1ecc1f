"""Devices with sensors that a vendor's driver reads: selection, calls, and refusals.

A vendor's source adds each device's calls once (``DeviceReader.add``); a reading makes them and
returns a row. A call or a column that the driver refuses for good is not asked for again, and its
reason is named; a device that is lost ends alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from chopper.collectors.base import (
    DRIVER_TIMEOUT_S,
    Availability,
    CollectorContext,
    call_within,
)
from chopper.collectors.sampler import CLOCKS, Gone, Part, SampledCollector, Sink, SourceSpec
from chopper.errors import CollectorUnavailable
from chopper.hardware.launchers import environment_count

Loss = Literal["sensor", "moment", "device", "library"]
"""Loss by an error: of this sensor, this reading, this device, or everything."""
_LARGEST = (1 << 63) - 1
_CHANGES = 8
"""Changes of a sensor from which its refresh rate is known."""


class DriverError(Exception):
    """A driver's call failed with a code; or, with a reason, its value is unusable."""

    def __init__(self, value: int, reason: str | None = None) -> None:
        super().__init__(value if reason is None else reason)
        self.value = value
        self.reason = reason


Reading = int | float | DriverError | None
"""Number of a sensor, None where it is unknown, or why it was refused."""


class Errors(dict[int, tuple[Loss, str]]):
    """A vendor's error codes: what each takes away, and in words why (``driver_errors.json``)."""

    def __init__(self, library: str) -> None:
        self._library = library
        text = Path(__file__).with_name("driver_errors.json").read_text(encoding="utf-8")
        for loss, reasons in json.loads(text)[library].items():
            self.update({int(code): (loss, reason) for code, reason in reasons.items()})

    def explain(self, code: int) -> tuple[Loss, str]:
        """Return loss and reason; a code of a newer driver costs one reading."""
        unknown = f"{self._library} error {code}, which this version does not know"
        return self.get(code & 0xFFFFFFFF, ("moment", unknown))

    def explain_error(self, error: Any) -> tuple[Loss, str]:
        """Return loss and reason of a DriverError, or of a binding's own error with a ``value``."""
        reason: str | None = getattr(error, "reason", None)
        return self.explain(error.value) if reason is None else ("sensor", reason)


@dataclass
class Device:
    """A device that a driver listed.

    Attributes:
        index: as the vendor's runtime numbers it.
        uuid, pci_address: as the driver writes them; None where it refuses.
        lost: why it is read no more, None while it is.
    """

    handle: Any
    index: int
    uuid: str | None = None
    pci_address: str | None = None
    lost: str | None = field(default=None, compare=False, kw_only=True)


_D = TypeVar("_D", bound=Device)


class NothingVisible(CollectorUnavailable):
    """There are devices, and the environment hides all of them from this process."""

    def __init__(self, variable: str, runtime: str) -> None:
        value = os.environ.get(variable, "").strip()
        set_to = f"{variable}={value}" if value else f"{variable} is empty"
        super().__init__(f"{set_to}: {runtime} sees no device in this process")
        self.remedy = f"none where the program computes on the CPU; else unset {variable}"


def chosen_by(
    variable: str,
    listed: list[_D],
    named: Callable[[str], list[_D] | None],
    *,
    numbers_known: bool = True,
) -> list[_D] | None:
    """Return the devices that a variable such as CUDA_VISIBLE_DEVICES chooses; None if unknown.

    A runtime takes its entries up to the first that it does not understand.

    Args:
        listed: all devices, in the runtime's order.
        named: returns those that a name stands for; None where that is not known.
        numbers_known: whether the order of ``listed`` is that of the runtime's numbers.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    chosen: dict[int, _D] = {}
    for entry in filter(None, map(str.strip, value.split(","))):
        try:
            number = int(entry)
        except ValueError:
            devices = named(entry)
        else:
            devices = listed[number : number + 1] if number >= 0 else []
            if devices and not numbers_known:
                return None
        if devices is None:
            return None
        if not devices:
            break
        chosen |= {device.index: device for device in devices}
    return [chosen[index] for index in sorted(chosen)]


def local_ranks() -> tuple[int, str | None]:
    """Return the launcher's count of ranks on this host, 0 if unknown, and an error or None."""
    count = environment_count("LOCAL_WORLD_SIZE")
    value = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    if count is not None or not value:
        return count or 0, None
    return 0, (
        f"LOCAL_WORLD_SIZE={value!r} is not a number: how many ranks share this host's "
        "devices is unknown"
    )


class Unit(NamedTuple):
    """Unit and range of a sensor's numbers."""

    factor: float = 1
    """One of the driver's units in the column's; an integer keeps integers."""
    least: float = 0
    most: float = _LARGEST
    """Numbers outside the range, among them blanks with all bits one, are unknown."""

    def convert(self, number: float | None) -> int | float | None:
        """Return a number in the column's unit; None if it is unknown or does not fit the table."""
        factor, least, most = self
        if number is None or not least <= number <= most:
            return None
        if isinstance(factor, int):
            converted = int(number) * factor
            return converted if converted <= _LARGEST else None
        return number * factor


class Getter:
    """A call of the driver, and the columns that it gives.

    Args:
        label: the call's name in reports of costs.
        columns: the one, or several.
        read: returns the value of the one column; of several, a value or a DriverError each, and
            None if there is nothing to tell yet.
        every: made at one of so many readings; between them its columns are null.
        turn: readings before the first.
    """

    def __init__(
        self,
        label: str,
        columns: str | Sequence[str],
        read: Callable[[], Any],
        *,
        every: int = 1,
        turn: int = 0,
    ) -> None:
        self.label = label
        self.columns = (columns,) if isinstance(columns, str) else tuple(columns)
        self.alone = isinstance(columns, str)
        self.read = read
        self.every = every
        self._turn = turn

    def due(self) -> bool:
        """Return whether it is this call's turn; called at each reading."""
        due = self._turn == 0
        self._turn = (self.every if due else self._turn) - 1
        return due


class DeviceReader:
    """Calls of one device, made to fill a row of a table.

    Attributes:
        absent: column -> why the device does not offer it.
        now_ns: time of the reading that is going on; None for the first, which makes no row.
        notes_changes: whether it measures how often the sensors are renewed.
    """

    def __init__(
        self,
        device: Device,
        table: str,
        errors: Errors,
        failures: tuple[type[Exception], ...] = (DriverError,),
    ) -> None:
        self.columns = columns_of(table)
        self.absent: dict[str, str] = {}
        self.now_ns: int | None = None
        self.notes_changes = True
        self._device = device
        self._errors = errors
        self._failures = failures
        self._getters: list[Getter] = []
        self._live: list[tuple[Getter, list[int]]] = []
        """Calls that are not refused, and the positions of their columns in a row."""
        self._refused: set[str] = set()
        self._last: list[Any] = []
        self._changed_ns: dict[int, int] = {}
        """Position of a column -> time of its last change."""
        self._between_ns: dict[int, deque[int]] = {}

    def add(self, getter: Getter) -> None:
        """Add a call."""
        self._getters.append(getter)
        self._choose()

    @contextlib.contextmanager
    def refusals(self, *columns: str) -> Iterator[None]:
        """Name the columns that this driver has no call for."""
        try:
            yield
        except DriverError as exc:
            self.absent |= dict.fromkeys(columns, self._errors.explain_error(exc)[1])

    @property
    def calls(self) -> list[Getter]:
        """The calls that the device does not refuse."""
        return [getter for getter, _ in self._live]

    def _choose(self) -> None:
        live = (one for one in self._getters if not self._refused.issuperset(one.columns))
        self._live = [(one, [self.columns.index(name) for name in one.columns]) for one in live]

    def read(self, now_ns: int | None = None) -> list[Any] | None:
        """Make the calls whose turn it is, all without a time; return a row, None if none answers.

        Sets ``lost`` of a device that will never answer again.
        """
        self.now_ns = now_ns
        row: list[Any] = [None] * len(self.columns)
        answered = False
        for getter, positions in self._live:
            if getter.every > 1 and now_ns is not None and not getter.due():
                continue
            try:
                values = getter.read()
            except self._failures as exc:
                self._lose(exc, getter.columns)
                if self._device.lost is not None:
                    return None
                continue
            if getter.alone:
                answered = True
                row[positions[0]] = values
            elif values is not None:
                answered = True
                self._fill(row, positions, values)
        if not answered or self._device.lost is not None:
            return None
        if self.notes_changes and now_ns is not None and row != self._last:
            self._note_changes(row, now_ns)
        return row

    def _fill(self, row: list[Any], positions: list[int], values: Iterable[Any]) -> None:
        for at, value in zip(positions, values, strict=True):
            if self._refused and self.columns[at] in self._refused:
                continue
            if isinstance(value, DriverError):
                self._lose(value, (self.columns[at],))
            else:
                row[at] = value

    def _lose(self, error: Exception, columns: Iterable[str]) -> None:
        loss, reason = self._errors.explain_error(error)
        if loss == "sensor":
            self._refused.update(columns)
            self._choose()
            self.absent |= dict.fromkeys(columns, reason)
        elif loss != "moment":
            self._device.lost = self._device.lost or reason

    def _note_changes(self, values: list[Any], now_ns: int) -> None:
        last, self._last = self._last, values
        for at, (before, value) in enumerate(zip(last, values, strict=False)):
            if value != before and value is not None:
                changed_ns = self._changed_ns.get(at)
                if changed_ns is not None:
                    between_ns = self._between_ns.setdefault(at, deque(maxlen=_CHANGES))
                    between_ns.append(now_ns - changed_ns)
                self._changed_ns[at] = now_ns

    def refresh_ns(self) -> int | None:
        """Return the time in which the fastest sensor is renewed, None before it is known.

        The median of the last times between two changes of its value.
        """
        known = (times for times in self._between_ns.values() if len(times) == _CHANGES)
        return min((sorted(times)[_CHANGES // 2] for times in known), default=None)


class DeviceSource(ABC, Generic[_D]):
    """Devices, each read as a part of its own: one row per device and reading."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]
    errors: ClassVar[Errors]
    keep_empty: ClassVar[bool] = False
    """True where a reading of which nothing is known makes a row too."""
    failures: ClassVar[tuple[type[Exception], ...]] = (DriverError,)
    """Errors of the driver's binding, with its code as ``value``."""
    fast: ClassVar[bool] = False
    """True if it is read at twice the rate at most at which its sensors are renewed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        """The driver's session."""
        self._devices: list[tuple[_D, DeviceReader]] = []

    @abstractmethod
    def _list(self) -> list[_D]:
        """Begin the driver's session, and return its devices."""

    @abstractmethod
    def _describe(self, reader: DeviceReader, device: _D) -> None:
        """Add the calls that fill this source's table."""

    def open(self) -> None:
        """Find the devices, and what each of them offers: by a first reading."""
        for device in self._list():
            reader = DeviceReader(device, self.tables[0], self.errors, self.failures)
            self._describe(reader, device)
            self._first(reader)
            reader.notes_changes = self.fast
            self._devices.append((device, reader))
        if not any(device.lost is None and reader.calls for device, reader in self._devices):
            reasons = "; ".join(dict.fromkeys(self.absent.values()))
            self.close()
            raise CollectorUnavailable(reasons)

    def _first(self, reader: DeviceReader) -> None:
        """Make the first reading."""
        reader.read()

    def _add(self, sink: Sink, device: _D, reader: DeviceReader, now_ns: int) -> None:
        """Read a device and add its row."""
        values = reader.read(now_ns)
        if values is not None and (self.keep_empty or values.count(None) < len(values)):
            sink.add(self.tables[0], device.index, device.uuid, *values)

    @property
    def absent(self) -> dict[str, str]:
        """``table.column`` → why it stays null: on all devices, or on which ones."""
        table = self.tables[0]
        why: dict[str, dict[int, str]] = {}
        for device, reader in self._devices:
            reasons = {f"{table}.{column}": reason for column, reason in reader.absent.items()}
            if device.lost is not None:
                reasons = {table: device.lost}
            for what, reason in reasons.items():
                why.setdefault(what, {})[device.index] = reason
        absent = {}
        for what, by_device in why.items():
            distinct = set(by_device.values())
            if len(by_device) == len(self._devices) and len(distinct) == 1:
                absent[what] = distinct.pop()
            else:
                absent |= {f"{what}[device {i}]": reason for i, reason in by_device.items()}
        return absent

    def parts(self) -> list[Part]:
        """Return one part a device."""
        return [
            Part(f"device {device.index}", partial(self._read, device, reader))
            for device, reader in self._devices
        ]

    def _read(self, device: _D, reader: DeviceReader, sink: Sink, now_ns: int) -> None:
        if device.lost is None:
            self._add(sink, device, reader, now_ns)
        if device.lost is not None:
            raise Gone(device.lost)

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Read all devices that are still there."""
        live = False
        for part in self.parts():
            with contextlib.suppress(Gone):
                part.read(sink, now_ns)
                live = True
        if not live:
            raise RuntimeError("; ".join(dict.fromkeys(self.absent.values())) or "no device left")

    def refresh_ns(self) -> int | None:
        """Return the time in which the fastest sensor of any device is renewed, if known."""
        known = (reader.refresh_ns() for _, reader in self._devices)
        return min((ns for ns in known if ns is not None), default=None)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the calls of the driver that one device's reading makes; they raise if refused."""
        for device, reader in self._devices:
            if device.lost is None:
                return {getter.label: partial(self._make, getter) for getter in reader.calls}
        return {}

    def _make(self, getter: Getter) -> None:
        try:
            getter.read()
        except self.failures as exc:
            if self.errors.explain_error(exc)[0] != "moment":
                raise

    def close(self) -> None:
        """Shut the driver's library down."""
        self._stack.close()


def columns_of(table: str) -> list[str]:
    """Return the columns of a table of devices, after time, span, number and UUID."""
    from chopper.tables import TABLES

    return [column.name for column in TABLES[table].columns][4:]


class DeviceCollector(SampledCollector, Generic[_D]):
    """A collector of devices that a vendor's driver lists.

    Args:
        hz: most readings per second of the fast tier. It is read at twice its sensors' own refresh
            rate at most, and as often as the sampler's share of a core allows.
    """

    cpu_ratio: ClassVar[float | None] = 0.01
    driver: ClassVar[str]
    """The driver in words."""
    silent_remedy: ClassVar[str]
    """Advice where it does not answer."""
    timeout_s: ClassVar[float] = DRIVER_TIMEOUT_S
    sources: ClassVar[str]
    """Module of its sources, of which ``ClockSource`` is the fast tier."""
    rates_hz: ClassVar[Mapping[str, float]]
    """Rates of its other sources, by class."""

    def __init__(self, *, hz: float = 100.0) -> None:
        super().__init__(hz=hz)

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        del context
        rates_hz = {"ClockSource": self._hz, **self.rates_hz}
        specs = [SourceSpec(factory=f"{self.sources}:{k}", hz=hz) for k, hz in rates_hz.items()]
        return [*specs, CLOCKS]

    @abstractmethod
    def devices(self) -> list[_D]:
        """Ask the driver for its devices, which may never return."""

    @abstractmethod
    def restrictions(self, devices: list[_D]) -> list[str | None]:
        """Return what keeps these devices from being read wholly, in words."""

    def probe(self, context: CollectorContext) -> Availability:
        """Available where the driver lists a device; nothing is read of it yet."""
        del context
        try:
            devices = call_within(self.timeout_s, self.devices)
        except TimeoutError:
            reason = f"{self.driver} has not answered for {self.timeout_s:g} s"
            return Availability(ok=False, reason=reason, remedy=self.silent_remedy)
        except CollectorUnavailable as exc:
            remedy = exc.remedy if isinstance(exc, NothingVisible) else self.absent_remedy
            return Availability(ok=False, reason=str(exc), remedy=remedy)
        self._limits = "; ".join(filter(None, self.restrictions(devices))) or None
        return Availability(ok=True, reason=self._limits)
