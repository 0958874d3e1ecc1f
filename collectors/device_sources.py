"""Sources of devices, whoever made them: one part a device, lost devices, codes of errors."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeVar

from chopper.collectors.sampler import Gone, Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chopper.collectors.sampler import Sink

Loss = Literal["sensor", "moment", "device", "library"]
"""Loss by an error: of this sensor, this reading, this device, or everything."""


class Device(Protocol):
    """A device that a driver listed."""

    index: int
    lost: str | None
    """Why it is read no more, None while it is."""


_D = TypeVar("_D", bound=Device)
_R = TypeVar("_R")


class DeviceSource(ABC, Generic[_D, _R]):
    """Reads devices one by one, each as a part of its own."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        """The driver's session."""
        self._devices: list[tuple[_D, _R]] = []
        """Devices, and what reads each of them."""

    @property
    @abstractmethod
    def absent(self) -> Mapping[str, str]:
        """``table.column`` → why it stays null: on all devices, or on which ones."""

    @abstractmethod
    def _add(self, sink: Sink, device: _D, reader: _R, now_ns: int) -> None:
        """Read a device and add its rows; set ``lost`` where it will never answer again."""

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


def columns_of(table: str) -> list[str]:
    """Return the columns of a table of devices, after time, span, number and UUID."""
    from chopper.tables import TABLES

    return [column.name for column in TABLES[table].columns][4:]
