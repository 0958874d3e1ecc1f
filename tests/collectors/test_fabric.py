"""The network's sources: fake trees of /sys, and this machine's own interfaces."""

from __future__ import annotations

import errno
import shutil
import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chopper.collectors.base import CollectorContext
from chopper.collectors.fabric import EthtoolStatistics, FabricCollector, PauseSource, PortSource
from chopper.collectors.procfs import KeptFile
from chopper.errors import CollectorUnavailable
from tests.collectors.sampled import taken


def write(folder: Path, **counters: str) -> None:
    for name, value in counters.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")


def port(root: Path, device: str, number: int = 1) -> Path:
    return root / "sys/class/infiniband" / device / "ports" / str(number)


def opened(root: Path) -> PortSource:
    source = PortSource(str(root))
    source.open()
    return source


def test_infiniband_counts_words_and_efa_counts_bytes(tmp_path: Path) -> None:
    write(
        port(tmp_path, "mlx5_0"),
        counters__port_xmit_data="1000",
        counters__port_rcv_data="500",
        hw_counters__np_cnp_sent="7",
    )
    write(
        port(tmp_path, "rdmap0s6"),
        hw_counters__tx_bytes="1000",
        hw_counters__rdma_read_bytes="42",
        hw_counters__retrans_bytes="3",
    )
    mlx, efa = taken(opened(tmp_path))
    assert (mlx["device"], mlx["port_id"]) == ("mlx5_0", 1)
    assert (mlx["tx_bytes"], mlx["rx_bytes"], mlx["cnp_sent_count"]) == (4000, 2000, 7)
    assert (efa["tx_bytes"], efa["rdma_read_bytes"], efa["retransmitted_bytes"]) == (1000, 42, 3)
    assert efa["cnp_sent_count"] is None
    assert mlx["rdma_read_bytes"] is None


@pytest.mark.parametrize(
    ("sent", "received", "errors", "row"),
    [
        ("N/A (no PMA)", "", "0", (None, None, 0)),
        (str(2**64 - 1), str(2**61 - 1), "-1", (None, 4 * (2**61 - 1), None)),
    ],
    ids=["no numbers", "beyond every count"],
)
def test_what_is_no_count_is_unknown(
    tmp_path: Path, sent: str, received: str, errors: str, row: tuple[int | None, ...]
) -> None:
    names = ("counters__port_xmit_data", "counters__port_rcv_data", "counters__symbol_error")
    write(port(tmp_path, "mlx5_0"), **dict(zip(names, (sent, received, errors), strict=True)))
    (found,) = taken(opened(tmp_path))
    assert (found["tx_bytes"], found["rx_bytes"], found["symbol_error_count"]) == row


def test_a_counter_that_is_not_there_or_may_not_be_read_says_why(tmp_path: Path) -> None:
    write(port(tmp_path, "mlx5_0"), counters__port_xmit_data="1")
    # Reading a directory is refused to everyone, as a file without permission is to most.
    (port(tmp_path, "mlx5_0") / "counters/port_rcv_data").mkdir()
    source = opened(tmp_path)
    assert taken(source)[0]["tx_bytes"] == 4
    assert source.absent["fabric_port.rdma_read_bytes"] == "no port of this machine counts it"
    assert source.absent["fabric_port.rx_bytes"].endswith("port_rcv_data: Is a directory")
    assert "fabric_port.tx_bytes" not in source.absent


def test_each_reading_is_told_by_itself_and_under_the_first_name(tmp_path: Path) -> None:
    """A counter may wrap or be no number for a while; udev may rename a device whose files stay."""
    write(
        port(tmp_path, "mlx5_0"),
        counters__port_xmit_data=str(2**32 - 1),
        counters__port_rcv_data="2",
    )
    source = opened(tmp_path)
    devices = tmp_path / "sys/class/infiniband"
    (devices / "mlx5_0").rename(devices / "rocep1s0")
    counter = port(tmp_path, "rocep1s0") / "counters/port_xmit_data"
    found = []
    for text in (str(2**32 - 1), "5", "", "18446744073709551615", "N/A", "7"):
        counter.write_text(f"{text}\n")
        found += [(r["device"], r["tx_bytes"], r["rx_bytes"]) for r in taken(source)]
    sent = (4 * (2**32 - 1), 20, None, None, None, 28)
    assert found == [("mlx5_0", tx_bytes, 8) for tx_bytes in sent]
    key = "fabric_port.tx_bytes[mlx5_0/1]"
    assert source.absent[key] == "some of its readings were not numbers"
    source.close()


def test_a_port_that_is_removed_leaves_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    for device in ("mlx5_0", "mlx5_1"):
        write(port(tmp_path, device), counters__port_xmit_data="1")
    source = opened(tmp_path)
    shutil.rmtree(port(tmp_path, "mlx5_0"))
    read = KeptFile.read

    def gone(self: KeptFile) -> bytes:
        # What sysfs answers once the device is unbound; an unlinked plain file could still be read.
        if "mlx5_0" in self.path:
            raise OSError(19, "No such device")
        return read(self)

    monkeypatch.setattr(KeptFile, "read", gone)
    assert [row["device"] for row in taken(source)] == ["mlx5_1"]
    assert source.absent["fabric_port[mlx5_0/1]"] == "has disappeared: No such device"


def test_a_counter_that_is_refused_once_harms_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    write(port(tmp_path, "mlx5_0"), counters__port_xmit_data="1", counters__port_rcv_data="2")
    source = opened(tmp_path)
    read = KeptFile.read

    def refused(self: KeptFile) -> bytes:
        if self.path.endswith("rcv_data"):
            raise OSError(22, "Invalid argument")
        return read(self)

    with monkeypatch.context() as patch:
        patch.setattr(KeptFile, "read", refused)
        (row,) = taken(source)
        assert (row["tx_bytes"], row["rx_bytes"]) == (4, None)
    assert taken(source)[0]["rx_bytes"] == 8


def test_thousands_of_ports_through_the_real_path(tmp_path: Path) -> None:
    for i in range(3000):
        write(port(tmp_path, f"mlx5_{i:04}"), counters__port_xmit_data=str(i))
    source = opened(tmp_path)
    found = taken(source)
    assert [row["tx_bytes"] for row in found] == [4 * i for i in range(1024)]
    assert source.absent["fabric_port"].startswith("1976 of 3000 ports are left out")
    source.close()


def test_a_machine_without_such_a_network_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CollectorUnavailable, match="no InfiniBand, RoCE or EFA device"):
        opened(tmp_path)
    (port(tmp_path, "mlx5_0") / "counters").mkdir(parents=True)
    with pytest.raises(CollectorUnavailable, match="no counter can be read"):
        opened(tmp_path)


class Scripted:
    """Statistics of an mlx5 interface, by name."""

    names: ClassVar[list[str]] = [
        "rx_packets",
        "rx_prio3_pause",
        "tx_prio3_pause",
        "rx_prio3_pause_duration",
        "rx_prio5_pause",
        "tx_pause_storm_warning_events",
    ]

    def __init__(self, interface: str) -> None:
        if interface == "lo":
            raise OSError(95, "Operation not supported")
        self.gone = False
        self.closed = False

    def read(self) -> list[int]:
        if self.gone:
            raise OSError(19, "No such device")
        return [10, 1, 2, 3, 4, 5]

    def close(self) -> None:
        self.closed = True


def test_pauses_are_told_by_priority_in_their_units() -> None:
    source = PauseSource(["lo", "eth0"], Scripted)
    source.open()
    three, five = taken(source)
    assert three == {
        "interface": "eth0",
        "priority": 3,
        "rx_pause_count": 1,
        "tx_pause_count": 2,
        "rx_pause_ns": 3000,
        "tx_pause_ns": None,
    }
    assert (five["priority"], five["rx_pause_count"], five["rx_pause_ns"]) == (5, 4, None)


def test_an_interface_that_vanishes_is_left_out() -> None:
    made: list[Scripted] = []

    def make(name: str) -> Scripted:
        made.append(Scripted(name))
        return made[-1]

    source = PauseSource(["eth0", "eth1"], make)
    source.open()
    made[0].gone = True
    assert {row["interface"] for row in taken(source)} == {"eth1"}
    assert made[0].closed
    made[1].gone = True
    with pytest.raises(CollectorUnavailable, match="all interfaces have disappeared"):
        taken(source)


def test_an_interface_that_counts_other_things_now_is_looked_at_anew() -> None:
    """More queues, or another interface of the same name: positions have moved."""
    made: list[Scripted] = []

    class Earlier(Scripted):
        def read(self) -> list[int]:
            if self.gone:
                raise OSError(errno.ESTALE, "it counts 7 things now, 6 before")
            return super().read()

    class Later(Scripted):
        names: ClassVar[list[str]] = ["rx9_packets", *Scripted.names]

        def read(self) -> list[int]:
            return [99, *super().read()]

    def make(name: str) -> Scripted:
        made.append(Later(name) if made else Earlier(name))
        return made[-1]

    source = PauseSource(["eth0"], make)
    source.open()
    before = taken(source)
    made[0].gone = True
    assert taken(source) == []
    assert made[0].closed
    assert taken(source) == before
    assert source.absent == {}


def test_this_machines_interfaces_answer_or_refuse() -> None:
    for _, name in socket.if_nameindex():
        try:
            statistics = EthtoolStatistics(name)
        except OSError:
            continue  # its driver has none
        values = statistics.read()
        assert len(values) == len(statistics.names)
        assert all(statistics.names)
        statistics.close()
    with pytest.raises(OSError, match="No such device"):
        EthtoolStatistics("no-such-if")


def test_the_collector_says_why_it_cannot_run(tmp_path: Path) -> None:
    context = CollectorContext(directory=tmp_path, run_path=tmp_path, pid=1)
    answer = FabricCollector(root=str(tmp_path)).probe(context)
    assert not answer.ok or "no InfiniBand" in (answer.reason or "")
    write(port(tmp_path, "mlx5_0"), counters__port_xmit_data="1")
    assert FabricCollector(root=str(tmp_path)).probe(context).ok
    assert set(FabricCollector(root=str(tmp_path)).call_costs_ns(context)) >= {"ports"}
