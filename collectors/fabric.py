"""The network between hosts: InfiniBand and RoCE ports, AWS EFA, Ethernet pause frames.

RDMA traffic bypasses the kernel: /proc/net/dev does not see it. The ports' own counters do.
"""

from __future__ import annotations

import array
import errno
import fcntl
import re
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from chopper.collectors.base import CollectorContext
from chopper.collectors.procfs import FileSource, KeptFile, content, counted, try_open
from chopper.collectors.sampler import CLOCKS, SampledCollector, Sink, SourceSpec
from chopper.errors import CollectorUnavailable

NAME = "fabric"
BY_DEFAULT = True
_WORD_BYTES = 4
"""InfiniBand counts data in words of 4 octets (its architecture volume 1, PortCounters)."""
_PORT_FILES = 1024
"""Files kept open at most, over all ports; what lies beyond is left out and named."""

# Column of `fabric_port` → files under the port to try in turn. EFA counts plain bytes under names
# of its own.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "tx_bytes": ("counters/port_xmit_data", "hw_counters/tx_bytes"),
    "rx_bytes": ("counters/port_rcv_data", "hw_counters/rx_bytes"),
    "rdma_read_bytes": ("hw_counters/rdma_read_bytes",),
    "rdma_write_bytes": ("hw_counters/rdma_write_bytes",),
    "retransmitted_bytes": ("hw_counters/retrans_bytes",),
    "tx_wait_count": ("counters/port_xmit_wait",),
    "tx_discard_count": ("counters/port_xmit_discards",),
    "link_down_count": ("counters/link_downed",),
    "symbol_error_count": ("counters/symbol_error",),
    "cnp_sent_count": ("hw_counters/np_cnp_sent",),
    "cnp_handled_count": ("hw_counters/rp_cnp_handled",),
    "ecn_marked_count": ("hw_counters/np_ecn_marked_roce_packets",),
    "out_of_sequence_count": ("hw_counters/out_of_sequence",),
    "sequence_error_count": ("hw_counters/packet_seq_err",),
    "timeout_count": ("hw_counters/local_ack_timeout_err",),
    "receiver_not_ready_count": ("hw_counters/rnr_nak_retry_err",),
    "adaptive_retransmit_count": ("hw_counters/roce_adp_retrans",),
    "out_of_buffer_count": ("hw_counters/out_of_buffer",),
}


class _Port:
    """One port with its kept files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = folder.parent.parent.name
        self.number = int(folder.name)
        self.files: dict[str, tuple[KeptFile, int]] = {}
        """Column → its file, and what one unit of it is."""
        self.refused: dict[str, str] = {}
        """Column → why a counter that is there cannot be read."""
        self.unread: dict[str, str] = {}
        """Column → why some reading of it is not known."""
        for column, paths in _COUNTERS.items():
            opened: KeptFile | str = ""
            for path in paths:
                opened = try_open(folder / path)
                if isinstance(opened, KeptFile):
                    break
                if (folder / path).exists():
                    self.refused[column] = opened
            # One that tells no number ("N/A (no PMA)") from the start is asked no more.
            if isinstance(opened, KeptFile) and counted(content(opened)) is None:
                opened.close()
                opened = ""
            if isinstance(opened, KeptFile):
                factor = _WORD_BYTES if opened.path.endswith("_data") else 1
                self.files[column] = (opened, factor)

    def values(self) -> list[int | None]:
        """Counters in the order of the columns.

        Raises:
            OSError: the port has gone.
        """
        counts: list[int | None] = []
        for column in _COUNTERS:
            if column not in self.files:
                counts.append(None)
                continue
            file, factor = self.files[column]
            try:
                text = file.read()
            except OSError as exc:
                if not self.folder.exists():
                    raise
                # One counter that is refused now (EINVAL, EIO) harms no other.
                self.unread[column] = f"some readings failed: {exc.strerror}"
                counts.append(None)
                continue
            counts.append(counted(text, factor))
            if counts[-1] is None:
                self.unread[column] = "some of its readings were not numbers"
        return counts

    def close(self) -> None:
        for file, _ in self.files.values():
            file.close()


class PortSource(FileSource):
    """Counters of each InfiniBand, RoCE or EFA port. /sys/class/infiniband -> FABRIC_PORT."""

    name: ClassVar[str] = "ports"
    tables: ClassVar[tuple[str, ...]] = ("fabric_port",)

    def __init__(self, root: str = "/") -> None:
        super().__init__(root)
        self._folder = self.root / "sys/class/infiniband"
        self._ports: list[_Port] = []

    def open(self) -> None:
        """Find the ports and keep their counters open."""
        folders = sorted(self._folder.glob("*/ports/*"))
        if not folders:
            raise CollectorUnavailable(f"{self._folder}: no InfiniBand, RoCE or EFA device")
        open_count = 0
        refused: dict[str, str] = {}
        for folder in folders:
            if open_count >= _PORT_FILES:
                self.absent["fabric_port"] = (
                    f"{len(folders) - len(self._ports)} of {len(folders)} ports are left out: "
                    f"{_PORT_FILES} files are kept open at most"
                )
                break
            port = _Port(folder)
            refused = port.refused | refused
            if port.files:
                open_count += len(port.files)
                self._ports.append(port)
        if not self._ports:
            why = next(iter(refused.values()), f"{self._folder}: no counter can be read")
            raise CollectorUnavailable(why)
        for column in _COUNTERS:
            if not any(column in port.files for port in self._ports):
                self.absent[f"fabric_port.{column}"] = refused.get(
                    column, "no port of this machine counts it"
                )

    def sample(self, sink: Sink, _now_ns: int) -> None:
        """One row per port that is still there."""
        for port in list(self._ports):
            try:
                values = port.values()
            except OSError as exc:
                self.absent[f"fabric_port[{port.device}/{port.number}]"] = (
                    f"has disappeared: {exc.strerror}"
                )
                port.close()
                self._ports.remove(port)
                continue
            for column, why in port.unread.items():
                self.absent[f"fabric_port.{column}[{port.device}/{port.number}]"] = why
            port.unread.clear()
            sink.add("fabric_port", port.device, port.number, *values)
        if not self._ports:
            raise CollectorUnavailable("all ports have disappeared")

    def close(self) -> None:
        """Close the files."""
        for port in self._ports:
            port.close()


_SIOCETHTOOL = 0x8946
_GET_STRINGS, _GET_STATS, _GET_SET_INFO = 0x1B, 0x1D, 0x37
_STATS_SET = 1
_NAME_BYTES = 32
_SPARE = 4096
"""Statistics that a driver may have got since its names were read."""
_PAUSE = re.compile(r"^(rx|tx)_prio([0-7])_pause(_duration)?$")


class EthtoolStatistics:
    """An interface's own statistics, through the kernel's ethtool interface (SIOCETHTOOL).

    Raises:
        OSError: it has none, or they may not be read.
    """

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._interface = interface.encode()
        try:
            self.names = self._names()
            # The kernel writes as many as there are by then, whatever was asked for: a driver that
            # has got more queues since must find room.
            self._buffer = bytearray(8 + 8 * (2 * len(self.names) + _SPARE))
        except OSError:
            self._socket.close()
            raise

    def _call(self, data: bytearray) -> None:
        block = array.array("B", data)
        address, _ = block.buffer_info()
        fcntl.ioctl(self._socket, _SIOCETHTOOL, struct.pack("16sP", self._interface, address))
        data[:] = block.tobytes()

    def _names(self) -> list[str]:
        info = bytearray(struct.pack("IIQI", _GET_SET_INFO, 0, 1 << _STATS_SET, 0))
        self._call(info)
        count = struct.unpack_from("I", info, 16)[0]
        strings = bytearray(struct.pack("III", _GET_STRINGS, _STATS_SET, count))
        strings += bytes(_NAME_BYTES * (2 * count + _SPARE))
        self._call(strings)
        return [
            bytes(strings[12 + _NAME_BYTES * i : 12 + _NAME_BYTES * (i + 1)])
            .partition(b"\0")[0]
            .decode(errors="replace")
            for i in range(count)
        ]

    def read(self) -> list[int]:
        """The statistics, in the order of ``names``.

        Raises:
            OSError: the interface has gone, or another one has its name now.
        """
        struct.pack_into("II", self._buffer, 0, _GET_STATS, len(self.names))
        self._call(self._buffer)
        (count,) = struct.unpack_from("I", self._buffer, 4)
        if count != len(self.names):
            raise OSError(errno.ESTALE, f"it counts {count} items now, {len(self.names)} before")
        return list(struct.unpack_from(f"{len(self.names)}Q", self._buffer, 8))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PauseSource:
    """Priority flow control of each Ethernet interface. ethtool -> PAUSE.

    Without names of interfaces, of all that this process sees.
    """

    name: ClassVar[str] = "pause"
    tables: ClassVar[tuple[str, ...]] = ("pause",)

    def __init__(
        self,
        interfaces: Iterable[str] | None = None,
        statistics: Callable[[str], Any] = EthtoolStatistics,
    ) -> None:
        self.absent: dict[str, str] = {}
        self._interfaces = interfaces
        self._make = statistics
        self._open: dict[str, tuple[Any, dict[int, dict[str, int]]]] = {}
        """Interface → its statistics, and by priority where each of its counts stands in them."""

    def open(self) -> None:
        """Find the interfaces whose driver counts pause frames by priority."""
        names = self._interfaces
        if names is None:
            names = [name for _, name in socket.if_nameindex()]
        for name in names:
            self._begin(name)
        if not self._open:
            raise CollectorUnavailable("no interface counts pause frames by priority")

    def _begin(self, name: str) -> bool:
        """Look which statistics of an interface are pauses; False where none is."""
        try:
            statistics = self._make(name)
        except OSError:
            return False
        positions: dict[int, dict[str, int]] = {}
        for i, label in enumerate(statistics.names):
            if match := _PAUSE.match(label):
                positions.setdefault(int(match[2]), {})[match[1] + (match[3] or "")] = i
        if not positions:
            statistics.close()
            return False
        self._open[name] = (statistics, positions)
        return True

    def sample(self, sink: Sink, _now_ns: int) -> None:
        """One row per interface and priority."""
        for name, (statistics, positions) in list(self._open.items()):
            try:
                values = statistics.read()
            except OSError as exc:
                statistics.close()
                del self._open[name]
                # With other statistics now (queues were added), they are found anew.
                if exc.errno != errno.ESTALE or not self._begin(name):
                    self.absent[f"pause[{name}]"] = f"has disappeared: {exc.strerror}"
                continue
            for priority, position in sorted(positions.items()):
                counts = {kind: values[at] for kind, at in position.items()}
                durations_us = [counts.get(kind) for kind in ("rx_duration", "tx_duration")]
                durations_ns = [None if us is None else us * 1000 for us in durations_us]
                sink.add("pause", name, priority, counts.get("rx"), counts.get("tx"), *durations_ns)
        if not self._open:
            raise CollectorUnavailable("all interfaces have disappeared")

    def close(self) -> None:
        """Close the sockets."""
        for statistics, _ in self._open.values():
            statistics.close()


class FabricCollector(SampledCollector):
    """Samples the ports and interfaces of the host between hosts, in a process of its own.

    -> FABRIC_PORT, PAUSE.

    Args:
        hz: rate; hardware counters behind a ``lifespan`` of 10 ms or more refresh no faster.
    """

    name: ClassVar[str] = NAME

    absent_remedy: ClassVar[str] = (
        "none on a machine without such a network; in a container, mount /sys and use the host's "
        "network namespace"
    )

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        del context
        return [
            SourceSpec(factory=f"{__name__}:PortSource", hz=self._hz, options={"root": self._root}),
            SourceSpec(factory=f"{__name__}:PauseSource", hz=self._hz),
            CLOCKS,
        ]
