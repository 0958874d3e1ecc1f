"""Links: from trees like /sys, by the collectors' sources, to rates and signs of congestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.collectors.fabric import PauseSource, PortSource
from chopper.collectors.sampler import Sink
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from chopper.views import view
from tests.analyzers.make import kernel, kernels, spans, steps, table
from tests.made_runs import put_table

S = 1_000_000_000
BASE = 1_700_000_000 * S


def put(root: Path, port: str, **counters: int | str) -> None:
    for name, value in counters.items():
        folder = "counters" if name.startswith(("port_", "symbol", "link_")) else "hw_counters"
        file = root / "sys/class/infiniband" / port / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")


def rows_of(source: Any, time_s: float) -> list[tuple[str, dict[str, Any]]]:
    sink = Sink()
    source.sample(sink, 0)
    return [
        (
            name,
            dict(zip([c.name for c in TABLES[name].columns][2:], values, strict=True))
            | {"time_ns": BASE + round(time_s * S), "span_ns": 0},
        )
        for name, values in sink.take()
    ]


def links_of(ranks: int = 1, **recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The view of a run of four steps of 1 s each, from what rank 0's samplers wrote."""
    parts = [
        m.RankManifest(rank=r, device_id=r, hostname="node", devices=[m.Device(device_id=r)])
        for r in range(ranks)
    ]
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=parts), None, {}, "made")
    bounds = [(BASE + i * S, BASE + (i + 1) * S) for i in range(4)]
    for r in range(ranks):
        put_table(run, r, "host_span", spans())
        put_table(run, r, "device_event", kernels(*(kernel(a, b, device_id=r) for a, b in bounds)))
        put_table(run, r, "step", steps(*bounds))
    for name, rows in recorded.items():
        put_table(run, 0, name, table(name, rows))
    found: list[dict[str, Any]] = view(pipeline.attribute(run), "links").to_pylist()
    return found


def test_words_of_four_bytes_and_congestion_of_a_roce_port(tmp_path: Path) -> None:
    port = "mlx5_0/ports/1"
    start: dict[str, int | str] = dict.fromkeys(
        ("port_xmit_data", "port_rcv_data", "port_xmit_wait", "np_cnp_sent", "rp_cnp_handled"), 1000
    )
    start |= dict.fromkeys(("packet_seq_err", "local_ack_timeout_err", "symbol_error"), 0)
    put(tmp_path, port, **start)
    source = PortSource(str(tmp_path))
    source.open()
    found = []
    for i in range(9):  # every half second; congestion in the third step only
        put(tmp_path, port, port_xmit_data=1000 + 500_000_000 * i, port_rcv_data=1000 + 10 * i)
        if i in (5, 6):
            put(tmp_path, port, rp_cnp_handled=1000 + 300 * (i - 4), packet_seq_err=4 * (i - 4))
        found += [row for _, row in rows_of(source, i / 2)]
    rows = links_of(ranks=2, fabric_port=found)
    whole = rows[0]
    assert (whole["link"], whole["kind"], whole["step"]) == ("mlx5_0/1", "port", None)
    assert whole["ranks"] == "0-1"
    assert whole["tx_bytes_per_s"] == pytest.approx(4e9)  # 10^9 words of four bytes a second
    assert whole["rx_bytes_per_s"] == pytest.approx(80)
    assert whole["cnp_handled_hz"] == pytest.approx(150)
    assert whole["retransmit_count"] == 8
    assert whole["retransmits_per_byte"] == pytest.approx(8 / 16e9)
    assert whole["error_count"] == 0
    assert whole["pause_ratio"] is None
    assert "slowed down by congestion notifications, 150/s" in whole["signal"]
    by_step = {row["step"]: row for row in rows[1:]}
    assert next(iter(by_step)) == 2  # the congested one on top
    assert by_step[2]["cnp_handled_hz"] == pytest.approx(600)
    assert by_step[2]["retransmit_count"] == 8
    assert "one in 477 MiB" in by_step[2]["signal"]
    assert by_step[0]["cnp_handled_hz"] == 0
    assert by_step[0]["signal"] is None
    assert by_step[0]["tx_bytes_per_s"] == pytest.approx(4e9)


def test_efa_counts_bytes_and_what_it_sends_again(tmp_path: Path) -> None:
    port = "rdmap0s6/ports/1"
    put(tmp_path, port, tx_bytes=0, rx_bytes=0, retrans_bytes=0)
    source = PortSource(str(tmp_path))
    source.open()
    found = []
    for i in range(5):
        put(tmp_path, port, tx_bytes=10**9 * i, rx_bytes=2 * 10**9 * i, retrans_bytes=10**6 * i)
        found += [row for _, row in rows_of(source, i)]
    whole = links_of(fabric_port=found)[0]
    assert whole["tx_bytes_per_s"] == pytest.approx(1e9)
    assert whole["rx_bytes_per_s"] == pytest.approx(2e9)
    assert whole["retransmit_ratio"] == pytest.approx(1e-3)
    assert "0.001 of the bytes retransmitted" in whole["signal"]


class Statistics:
    """An interface's driver that counts pauses of two priorities, in microseconds."""

    names = ["rx_prio3_pause", "rx_prio3_pause_duration", "rx_prio0_pause_duration"]  # noqa: RUF012

    def __init__(self, interface: str) -> None:
        del interface
        self.reads = -1

    def read(self) -> list[int]:
        self.reads += 1
        return [self.reads * 10, self.reads * 120_000, self.reads * 1000]

    def close(self) -> None:
        pass


def test_the_share_of_pauses_is_that_of_the_worst_priority() -> None:
    source = PauseSource(["eth0"], Statistics)
    source.open()
    found = [row for i in range(5) for _, row in rows_of(source, i)]
    whole = links_of(pause=found)[0]
    assert (whole["link"], whole["kind"]) == ("eth0", "flow control")
    assert whole["pause_ratio"] == pytest.approx(0.12)
    assert whole["sent_pause_ratio"] is None
    assert whole["signal"] == "paused by flow control for 12.0 % of the time"


def counters(
    values: list[int | None], column: str = "tx_bytes", **more: Any
) -> list[dict[str, Any]]:
    return [
        {"time_ns": BASE + i * S, "span_ns": 0, "device": "mlx5_0", "port_id": 1, column: v, **more}
        for i, v in enumerate(values)
    ]


def test_a_counter_that_went_backwards_tells_nothing_of_that_step() -> None:
    rows = links_of(fabric_port=counters([0, 10**9, 5, 10**9 + 5, 2 * 10**9 + 5]))
    by_step = {row["step"]: row["tx_bytes_per_s"] for row in rows}
    assert by_step.get(1) is None
    assert by_step[0] == pytest.approx(1e9)
    assert by_step[3] == pytest.approx(1e9)
    assert None not in by_step  # nor is anything claimed of the run


def test_a_sum_of_which_a_part_is_not_known_is_unknown() -> None:
    rows = counters([0, 10, 20, 30, 40], sequence_error_count=0)
    for row, timeouts in zip(rows, [0, 1, 5, 0, 2], strict=True):  # reset in the third step
        row["timeout_count"] = timeouts
    by_step = {row["step"]: row["retransmit_count"] for row in links_of(fabric_port=rows)}
    assert (by_step[0], by_step[1], by_step[2], by_step[3]) == (1, 4, None, 2)


def test_a_counter_that_stuck_at_32_bits_is_unknown() -> None:
    stuck = 4 * (2**32 - 1)
    assert links_of(fabric_port=counters([stuck] * 5)) == []


def test_steps_shorter_than_the_time_between_readings_have_no_row() -> None:
    rows = links_of(
        fabric_port=[row for i, row in enumerate(counters([0, 1, 2, 3, 4])) if i % 4 == 0]
    )
    assert [row["step"] for row in rows] == [None]


def test_a_step_that_was_read_in_part_has_no_rate() -> None:
    late = [row | {"time_ns": row["time_ns"] + S // 2} for row in counters([0, 10, 20, 30])]
    rates = {row["step"]: row["tx_bytes_per_s"] for row in links_of(fabric_port=late)}
    assert rates == {None: pytest.approx(10), 1: pytest.approx(10), 2: pytest.approx(10)}


def test_device_links_are_a_ranks_own() -> None:
    rows = [
        {
            "time_ns": BASE + i * S,
            "span_ns": 0,
            "device_id": r,
            "link_tx_bytes": 10**11 * i * (r + 1),
            "link_rx_bytes": 10**11 * i,
            "pcie_rx_bytes": 10**9 * i,
            "link_error_count": i,
        }
        for r in range(2)
        for i in range(5)
    ]
    found = [row for row in links_of(ranks=2, device_counter=rows) if row["step"] is None]
    assert [(r["link"], r["rank"], r["tx_bytes_per_s"]) for r in found] == [
        ("NVLink, XGMI", 1, pytest.approx(2e11)),
        ("NVLink, XGMI", 0, pytest.approx(1e11)),
        ("PCIe", 0, None),
        ("PCIe", 1, None),
    ]
    assert found[2]["rx_bytes_per_s"] == pytest.approx(1e9)
    assert found[0]["error_count"] == 4


def test_parts_of_one_device_share_its_links() -> None:
    """Each part counts the whole socket's bytes: one row for all ranks on it, not one for each."""
    rows = [
        {"time_ns": BASE + i * S, "span_ns": 0, "device_id": r, "link_tx_bytes": 10**11 * i}
        for r in range(3)
        for i in range(5)
    ]
    limits: list[dict[str, Any]] = [
        {"time_ns": BASE, "span_ns": 0, "device_id": r, "pci_address": address, "mig": r < 2}
        for r, address in enumerate(("0000:03:00.0", "0000:03:00.1", "0000:43:00.0"))
    ]
    found = [
        row
        for row in links_of(ranks=3, device_counter=rows, device_limit=limits)
        if row["step"] is None
    ]
    assert sorted((r["link"], r["ranks"], r["tx_bytes_per_s"]) for r in found) == [
        ("NVLink, XGMI", "2", pytest.approx(1e11)),
        ("NVLink, XGMI of the whole device", "0-1", pytest.approx(1e11)),
    ]


def test_bytes_over_pcie_that_are_not_told_apart_are_both_ways() -> None:
    rows = [
        {
            "time_ns": BASE + i * S,
            "span_ns": 0,
            "device_id": 0,
            "pcie_bytes": 10**9 * i,
            "pcie_replay_count": 0,
            "pcie_nak_count": 2 * i,
            "pcie_recovery_count": 1,
        }
        for i in range(5)
    ]
    (row,) = [row for row in links_of(device_counter=rows) if row["step"] is None]
    assert (row["link"], row["tx_bytes_per_s"], row["rx_bytes_per_s"]) == ("PCIe", None, None)
    assert row["both_bytes_per_s"] == pytest.approx(1e9)
    assert row["error_count"] == 8


def test_a_run_without_counters_has_no_links() -> None:
    assert links_of() == []
