"""Sources of devices, whoever made them: one part a device, lost devices, codes of errors."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from chopper.collectors._plan import (
    DEVICE,
    SENSOR,
    Call,
    Column,
    DeviceReader,
    DeviceTotals,
    LiveCall,
    Plan,
    PlannedDevice,
)
from chopper.collectors.sampler import Gone, Part, Sink

Loss = Literal["sensor", "moment", "device", "library"]
"""Loss by an error: of this sensor, this reading, this device, or everything."""


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


class Reads(Protocol):
    """Reader of one device."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Column → why the device does not offer it."""
        ...


_D = TypeVar("_D", bound=Device)
_R = TypeVar("_R", bound=Reads)


class DeviceSource(ABC, Generic[_D, _R]):
    """Reads devices one by one, each as a part of its own."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        """The driver's session."""
        self._devices: list[tuple[_D, _R]] = []
        """Devices, and what reads each of them."""

    @abstractmethod
    def _add(self, sink: Sink, device: _D, reader: _R, now_ns: int) -> None:
        """Read a device and add its rows; set ``lost`` where it will never answer again."""

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

    def _read(self, device: _D, reader: _R, sink: Sink, now_ns: int) -> None:
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

    def close(self) -> None:
        """Shut the driver's library down."""
        self._stack.close()


class PlannedReader(DeviceReader):
    """Calls and columns of one device: described, then read.

    ``absent`` says of each column that the device does not offer why.
    """

    def __init__(self, source: PlannedSource[Any], owner: Device) -> None:
        self.table_columns = columns_of(source.tables[0])
        nothing = PlannedDevice(owner.index, owner.uuid, (), (None,) * len(self.table_columns))
        super().__init__(nothing, source.outcomes, keep_empty=source.keep_empty)
        self.absent: dict[str, str] = {}
        self._owner = owner
        self._errors = source.errors
        self._labels: list[str] = []

    def describe(self, label: str, call: Call, columns: Mapping[str, Column]) -> None:
        """Add a call, by its name in reports of costs, and what of the row comes from it."""
        described = dict(zip(self.table_columns, self.device.columns, strict=True))
        for name, column in columns.items():
            described[name] = column._replace(call=len(self.calls))
            self.absent.pop(name, None)
        self.device = self.device._replace(columns=tuple(described.values()))
        self.calls.append(LiveCall(call))
        self._labels.append(label)

    def read(self, *, whole: bool = False) -> list[Any] | None:
        """Return the values of a row, None for no row; what is refused is not asked again."""
        values = super().read(whole=whole)
        self._learn()
        return values

    def take_over(self, lost: int, refused: tuple[int, ...]) -> None:
        """Take over the codes by which the device or columns were lost elsewhere."""
        self.lost = self.lost or lost
        self.refused = [own or code for own, code in zip(self.refused, refused, strict=True)]
        self._learn()

    def _learn(self) -> None:
        if self.lost and self._owner.lost is None:
            self._owner.lost = self._errors.explain(self.lost)[1]
        for name, code in zip(self.table_columns, self.refused, strict=True):
            if code:
                self.absent[name] = self._errors.explain(code)[1]

    def calls_by_label(self) -> dict[str, Callable[[], object]]:
        """Each call by its name; it raises where the device refuses it."""
        return dict(zip(self._labels, map(self._making, self.calls), strict=True))

    def _making(self, live: LiveCall) -> Callable[[], object]:
        def make() -> None:
            loss, reason = self._errors.explain(live.make())
            if loss != "moment":
                raise RuntimeError(reason)

        return make


class PlannedSource(DeviceSource[_D, PlannedReader]):
    """Devices whose readings a thread in C can make: one row per device and sample."""

    errors: ClassVar[Errors]
    keep_empty: ClassVar[bool] = False
    """True where a reading of which nothing is known makes a row too."""
    sensor_outcome: ClassVar[int] = SENSOR
    """What is lost where a call is refused."""

    @property
    def outcomes(self) -> dict[int, int]:
        """Loss by each of the driver's codes, for the plan."""
        return {
            code: self.sensor_outcome if loss == "sensor" else DEVICE
            for code, (loss, _) in self.errors.items()
            if loss != "moment"
        }

    @abstractmethod
    def _describe(self, reader: PlannedReader, device: _D) -> None:
        """Describe what the device offers of this source's table."""

    def _begin(self, devices: list[_D]) -> list[list[Any] | None]:
        """Describe the devices, and return what each tells at its first reading."""
        rows = []
        for device in devices:
            reader = PlannedReader(self, device)
            self._describe(reader, device)
            rows.append(reader.read(whole=True))
            self._devices.append((device, reader))
        return rows

    def _add(self, sink: Sink, device: _D, reader: PlannedReader, _now_ns: int) -> None:
        values = reader.read()
        if values is not None:
            sink.add(self.tables[0], device.index, device.uuid, *values)

    def plan(self) -> Plan:
        """The same readings for the thread in C: what was refused at the start is not asked."""
        devices = [reader.planned() for device, reader in self._devices if device.lost is None]
        return Plan(self.tables[0], tuple(devices), self.outcomes, keep_empty=self.keep_empty)

    def learn(self, totals: list[DeviceTotals]) -> None:
        """Take over what the thread in C was refused."""
        readers = {device.index: reader for device, reader in self._devices}
        for one in totals:
            readers[one.id].take_over(one.lost, one.refused)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Each call of the driver that one device's sample makes."""
        live = (reader for device, reader in self._devices if device.lost is None)
        return next((reader.calls_by_label() for reader in live), {})


def columns_of(table: str) -> list[str]:
    """Return the columns of a table of devices, after time, span, number and UUID."""
    from chopper.tables import TABLES

    return [column.name for column in TABLES[table].columns][4:]
