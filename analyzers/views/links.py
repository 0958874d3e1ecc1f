"""Traffic of ports, interfaces and device links by step, and signs of congestion.

Counters are totals: rates are differences over the time of a step, linear between two readings. A
step shorter than the time between readings gets none. A counter that went backwards or stuck at the
end of its 32 bits tells nothing of that time.

Rows without a step are the whole run. Ports and interfaces are their host's, shared by its ranks;
device links are a rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.meter import Counter, counter_of
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.samples import of_rank, table_beside
from chopper.analyzers.views import View
from chopper.analyzers.views._sharing import ranks_by_host, ranks_by_socket
from chopper.storage.run import Run
from chopper.tables import column, optional
from chopper.wording import ranges

_STUCK_BYTES = 4 * (2**32 - 1)
"""A count of words that stuck at 32 bits, as bytes."""
_RETRANSMITS = ("sequence_error_count", "timeout_count", "adaptive_retransmit_count")
_ERRORS = ("tx_discard_count", "link_down_count", "symbol_error_count", "out_of_buffer_count")
_DEVICE_ERRORS = ("link_error_count", "pcie_replay_count", "pcie_nak_count", "pcie_recovery_count")
# Kind, name, and what the totals are in the device's table.
_DEVICE_LINKS = (
    (
        "device link",
        "NVLink, XGMI",
        {
            "tx_bytes": "link_tx_bytes",
            "rx_bytes": "link_rx_bytes",
            "link_error_count": "link_error_count",
        },
    ),
    (
        "PCIe",
        "PCIe",
        {
            "tx_bytes": "pcie_tx_bytes",
            "rx_bytes": "pcie_rx_bytes",
            "both_bytes": "pcie_bytes",
            **{name: name for name in _DEVICE_ERRORS[1:]},
        },
    ),
)
_PORT = (
    *("tx_bytes", "rx_bytes", "retransmitted_bytes", "tx_wait_count", "cnp_sent_count"),
    *("cnp_handled_count", "ecn_marked_count", "out_of_sequence_count", *_RETRANSMITS, *_ERRORS),
)
_PRIORITIES = 8
_TOTALS = {
    **{name: (name,) for name in _PORT if name not in (*_RETRANSMITS, *_ERRORS)},
    "both_bytes": ("both_bytes",),
    "retransmit_count": _RETRANSMITS,
    "error_count": (*_ERRORS, *_DEVICE_ERRORS),
}
_RATES = {
    "tx_bytes_per_s": "tx_bytes",
    "rx_bytes_per_s": "rx_bytes",
    "both_bytes_per_s": "both_bytes",
    "cnp_handled_hz": "cnp_handled_count",
    "cnp_sent_hz": "cnp_sent_count",
    "ecn_marked_hz": "ecn_marked_count",
    "tx_wait_hz": "tx_wait_count",
}
_PAUSES = {"pause_ratio": "rx_pause_ns", "sent_pause_ratio": "tx_pause_ns"}
_LEAST_PAUSE = 0.001
_UNREAD_RATIO = 0.01
"""So much of a span may lie before the first reading or after the last one."""
_ROWS = 5000
"""Rows about single steps at most."""

VIEW = View(
    "links",
    __doc__,
    (
        column("link", "Name of the port or interface, or the links of the rank's device."),
        optional("step", "Step number; null for the whole run.", "int64"),
        optional("signal", "Signs of congestion in words; null without any.", "text"),
        optional("tx_bytes_per_s", "Rate of bytes sent."),
        optional("rx_bytes_per_s", "Rate of bytes received."),
        optional(
            "both_bytes_per_s",
            "Rate of bytes sent and received, where the device does not tell them apart (AMD's "
            "PCIe).",
        ),
        optional("pause_ratio", "Share of the time in which sending was paused by flow control."),
        optional("cnp_handled_hz", "Rate of congestion notifications obeyed.", "float64"),
        optional("retransmit_ratio", "Share of the bytes sent that were sent again (EFA)."),
        column("ranks", "Global ranks that share the link."),
        column("kind", "Kind of link: port, interface, flow control, device link or PCIe."),
        column("rank", "Global rank whose steps divide the time.", "int32"),
        column("span_ns", "Time over which the counters are compared."),
        optional("sent_pause_ratio", "Share of the time in which the peers were told to pause."),
        optional("cnp_sent_hz", "Rate of congestion notifications sent.", "float64"),
        optional("ecn_marked_hz", "Rate of packets that a switch had marked (ECN).", "float64"),
        optional("tx_wait_hz", "Rate of ticks spent waiting for credits (InfiniBand).", "float64"),
        optional("retransmits_per_byte", "Retransmits (RoCE) per byte sent.", "float64"),
        optional("retransmit_count", "Number of order errors, timeouts and adaptive retransmits."),
        optional("out_of_sequence_count", "Number of packets that came out of order."),
        optional(
            "error_count", "Number of discards, link and CRC errors, replays, NAKs, recoveries."
        ),
        optional("tx_bytes", "Bytes sent in all."),
        optional("rx_bytes", "Bytes received in all."),
    ),
    title="Links",
    section="Communication",
    needs="no link's counters were sampled (the collectors `host`, `fabric`, `nvml`, `amdsmi` do)",
)


@dataclass(frozen=True)
class _Link:
    """One link's totals at its readings.

    Attributes:
        kind: port, interface, flow control, device link or PCIe.
        ranks: all that share the link; the first one's steps divide the time.
        time_ns: of the readings, in order.
        counters: column → its total, of those that were read twice.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    time_ns: np.ndarray
    counters: dict[str, Counter]

    def growth(self, columns: Iterable[str], start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the growth of each counted column over each span, NaN where it is not known."""
        rows = [np.full(len(start), np.nan)]
        for counter in (self.counters[c] for c in columns if c in self.counters):
            time = counter.time_ns
            unread_ns = np.maximum(time[0] - start, 0) + np.maximum(end - time[-1], 0)
            read = unread_ns <= _UNREAD_RATIO * (end - start)
            known = read & counter.unbroken(start, end)
            rows.append(np.where(known, counter.growth(start, end), np.nan))
        return np.stack(rows[1:] or rows)


def links(run: Attributed) -> pa.Table:
    """FABRIC_PORT, PAUSE, NIC, DEVICE_COUNTER -> LINKS.

    The whole run first, congested links and busy ones on top; then the steps.
    """
    run_rows: list[dict[str, Any]] = []
    step_rows: list[dict[str, Any]] = []
    for link in _links(run.recording):
        windows = windows_of(run, link.ranks[0])
        if not windows.num_rows:
            continue
        steps = windows["number"].to_pylist()
        start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
        # The span of the run is what was read of it.
        low = np.array([max(int(start[0]), int(link.time_ns[0]))])
        high = np.array([min(int(end[-1]), int(link.time_ns[-1]))])
        if high[0] > low[0]:
            run_rows += _rows(link, [None], low, high)
        long = (end - start) >= np.median(np.diff(link.time_ns))
        numbers = [n for n, kept in zip(steps, long.tolist(), strict=True) if kept]
        if len(steps) > 1:
            step_rows += _rows(link, numbers, start[long], end[long])
    run_rows.sort(key=lambda r: (-_severity(r), -_busy(r)))
    step_rows = [row for row in step_rows if row["signal"] or _busy(row) > 0]
    step_rows.sort(key=lambda r: (-_severity(r), -_busy(r)))
    return VIEW.of_rows([*run_rows, *step_rows[:_ROWS]])


def _busy(row: dict[str, Any]) -> float:
    return sum(row[f"{way}_bytes_per_s"] or 0.0 for way in ("tx", "rx", "both"))


def _severity(row: dict[str, Any]) -> float:
    """Signs of congestion in the order in which they hurt."""
    return (
        1e6 * (row["pause_ratio"] or 0.0)
        + 1e3 * (row["retransmit_ratio"] or 0.0)
        + (row["cnp_handled_hz"] or 0.0)
        + (row["cnp_sent_hz"] or 0.0)
        + (row["retransmit_count"] or 0)
    )


def _rows(
    link: _Link, steps: Sequence[int | None], start: np.ndarray, end: np.ndarray
) -> list[dict[str, Any]]:
    """One row per span."""
    span_ns = end - start
    found = {name: link.growth(totals, start, end).sum(axis=0) for name, totals in _TOTALS.items()}
    for name, total in _PAUSES.items():
        # Priorities are paused each by itself: the worst one is the link's.
        each = link.growth((f"{total}/{p}" for p in range(_PRIORITIES)), start, end)
        found[name] = np.fmax.reduce(each) / span_ns
    with np.errstate(divide="ignore", invalid="ignore"):
        found |= {name: found[total] / (span_ns / 1e9) for name, total in _RATES.items()}
        found["retransmit_ratio"] = found["retransmitted_bytes"] / found["tx_bytes"]
        found["retransmits_per_byte"] = found["retransmit_count"] / found["tx_bytes"]
    shown = [c for c in VIEW.columns if c.name in found]
    rows = []
    for i, step in enumerate(steps):
        values = {c.name: (float(found[c.name][i]), c.type) for c in shown}
        known = {
            name: round(value) if kind == "int64" else value
            for name, (value, kind) in values.items()
            if np.isfinite(value)
        }
        if known:
            row: dict[str, Any] = dict.fromkeys(values) | known
            row |= {"link": link.name, "kind": link.kind, "rank": link.ranks[0], "step": step}
            row |= {"ranks": ranges(link.ranks), "span_ns": int(span_ns[i])}
            rows.append(row | {"signal": _signal(row)})
    return rows


def _signal(row: dict[str, Any]) -> str | None:
    """Signs of congestion in words; None without any."""
    words = []
    if (row["pause_ratio"] or 0) >= _LEAST_PAUSE:
        words.append(f"told to pause for {fmt.ratio(row['pause_ratio'])} of the time")
    if (row["sent_pause_ratio"] or 0) >= _LEAST_PAUSE:
        words.append(f"told others to pause for {fmt.ratio(row['sent_pause_ratio'])}")
    for name, what in (
        ("cnp_handled_hz", "slowed down by notifications"),
        ("cnp_sent_hz", "sent notifications"),
        ("ecn_marked_hz", "marked packets"),
    ):
        if row[name]:
            words.append(f"{what}, {row[name]:.3g}/s")
    if row["retransmit_count"]:
        per = row["tx_bytes"] / row["retransmit_count"] if row["tx_bytes"] else None
        words.append("retransmits" + (f", one in {fmt.bytes_(per)}" if per else ""))
    if row["retransmit_ratio"]:
        words.append(f"{row['retransmit_ratio']:.2g} of the bytes sent again")
    return "; ".join(words) or None


def _links(recording: Run) -> Iterator[_Link]:
    """All links of a run with readings."""
    for ranks in ranks_by_socket(recording):
        yield from _device_links(recording, ranks)
    for ranks in ranks_by_host(recording):
        yield from _ports(recording, ranks)


def _link(
    kind: str, name: str, ranks: tuple[int, ...], time_ns: np.ndarray, totals: dict[str, np.ndarray]
) -> Iterator[_Link]:
    """The link of some totals, where any of them was read twice."""
    read = {column: counter_of(time_ns, total) for column, total in totals.items()}
    counters = {column: counter for column, counter in read.items() if counter is not None}
    if counters:
        yield _Link(kind, name, ranks, np.unique(time_ns), counters)


def _device_links(recording: Run, ranks: tuple[int, ...]) -> Iterator[_Link]:
    """Links of one device; its parts (MIG, CPX) share their totals."""
    tables = ((rank, of_rank(recording, rank, "device_counter")) for rank in ranks)
    for rank, table in ((rank, table) for rank, table in tables if table.num_rows):
        limits = of_rank(recording, rank, "device_limit")
        whole = " of the whole device" if limits.num_rows and limits["mig"][0].as_py() else ""
        order = (rank, *(other for other in ranks if other != rank))
        for kind, name, columns in _DEVICE_LINKS:
            totals = {to: reals(table, column) for to, column in columns.items()}
            yield from _link(kind, name + whole, order, ints(table, "time_ns"), totals)
        return


def _ports(recording: Run, ranks: tuple[int, ...]) -> Iterator[_Link]:
    """Ports and interfaces of a host; bytes and pauses of one have readings of their own."""
    fabric, nic, pause = (
        table_beside(recording, ranks[0], name) for name in ("fabric_port", "nic", "pause")
    )
    for device, of_device in _by(fabric, "device"):
        port_ids = ints(of_device, "port_id")
        for port in np.unique(port_ids).tolist():
            rows = of_device.filter(pa.array(port_ids == port))
            totals = {name: reals(rows, name) for name in _PORT}
            for name in ("tx_bytes", "rx_bytes"):
                totals[name][totals[name] == _STUCK_BYTES] = np.nan
            yield from _link("port", f"{device}/{port}", ranks, ints(rows, "time_ns"), totals)
    for name, rows in _by(nic, "interface"):
        totals = {column: reals(rows, column) for column in ("tx_bytes", "rx_bytes")}
        yield from _link("interface", name, ranks, ints(rows, "time_ns"), totals)
    for name, rows in _by(pause, "interface"):
        priority = ints(rows, "priority")
        totals = {
            f"{column}/{p}": np.where(priority == p, reals(rows, column), np.nan)
            for column in _PAUSES.values()
            for p in range(_PRIORITIES)
        }
        yield from _link("flow control", name, ranks, ints(rows, "time_ns"), totals)


def _by(table: pa.Table, column: str) -> Iterator[tuple[str, pa.Table]]:
    codes, names = strings(table, column)
    for code, name in enumerate(names):
        yield name, table.filter(pa.array(codes == code))
