"""The view of links between devices and hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.meter import Counter, counter_of, ranks_by_host, ranks_by_socket
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.samples import of_rank, table_beside
from chopper.analyzers.views import Rows, view
from chopper.storage.run import Run
from chopper.wording import ranges

Row = dict[str, Any]

_STUCK_BYTES = 4 * (2**32 - 1)
"""A count of words that stuck at 32 bits, as bytes."""
_COUNTED = (
    *("tx_bytes", "rx_bytes", "retransmitted_bytes", "tx_wait_count", "cnp_sent_count"),
    *("cnp_handled_count", "ecn_marked_count", "out_of_sequence_count"),
)
_SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "port": {
        **{name: (name,) for name in _COUNTED},
        "retransmit_count": ("sequence_error_count", "timeout_count", "adaptive_retransmit_count"),
        "error_count": (
            *("tx_discard_count", "link_down_count", "symbol_error_count", "out_of_buffer_count"),
        ),
    },
    "interface": {"tx_bytes": ("tx_bytes",), "rx_bytes": ("rx_bytes",)},
    "device link": {
        "tx_bytes": ("link_tx_bytes",),
        "rx_bytes": ("link_rx_bytes",),
        "error_count": ("link_error_count",),
    },
    "PCIe": {
        "tx_bytes": ("pcie_tx_bytes",),
        "rx_bytes": ("pcie_rx_bytes",),
        "both_bytes": ("pcie_bytes",),
        "error_count": ("pcie_replay_count", "pcie_nak_count", "pcie_recovery_count"),
    },
}
"""Kind of link → a total of it, and the columns of the recorded table that make it up."""
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


class _Link(msgspec.Struct, frozen=True):
    """One link's totals at its readings.

    Attributes:
        kind: port, interface, flow control, device link or PCIe.
        ranks: all that share the link; the first one's steps divide the time.
        time_ns: of the readings, in order.
        counters: total of the link → the counters that make it up, of those that were read twice.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    time_ns: np.ndarray
    counters: dict[str, list[Counter]]


@view
def links(run: Attribution) -> Rows:
    """Traffic of ports, interfaces and device links by step, and signs of congestion.

    Counters are totals: rates are differences over the time of a step, interpolated linearly
    between two samples. A step shorter than the sampling period has none. A counter that went
    backwards, or saturated at 32 bits, has no rate for that time.

    Rows without a step cover the whole run. Ports and interfaces belong to the host and are shared
    by its ranks; device links belong to one rank.

    title: Links
    section: Communication
    needs: no link's counters were sampled (the collectors `host`, `fabric`, `nvml`, `amdsmi` do)
    columns:
      link: Name of the port or interface, or the links of the rank's device.
      step, int64, null: Step number; null for the whole run.
      signal, text, null: Signs of congestion; null without any.
      tx_bytes_per_s, null: Rate of bytes sent; null where not counted.
      rx_bytes_per_s, null: Rate of bytes received; null where not counted.
      both_bytes_per_s, null: Rate of bytes in both directions, where not separated (AMD's PCIe).
      pause_ratio, null: Share of the time in which sending was paused by flow control.
      cnp_handled_hz, float64, null: Rate of congestion notifications obeyed.
      retransmit_ratio, null: Share of the sent bytes that were retransmitted (EFA).
      ranks: Global ranks that share the link.
      kind: Kind of link: port, interface, flow control, device link or PCIe.
      rank, int32: Global rank whose steps divide the time.
      span_ns: Time over which the counters are compared.
      sent_pause_ratio, null: Share of the time in which the peers were paused by flow control.
      cnp_sent_hz, float64, null: Rate of congestion notifications sent.
      ecn_marked_hz, float64, null: Rate of packets that a switch had marked (ECN).
      tx_wait_hz, float64, null: Rate of ticks spent waiting for credits (InfiniBand).
      retransmits_per_byte, float64, null: Retransmits (RoCE) per byte sent.
      retransmit_count, null: Number of ordering errors, timeouts and adaptive retransmissions.
      out_of_sequence_count, null: Number of packets that arrived out of order.
      error_count, null: Number of discards, link errors, replays, NAKs, recoveries.
      tx_bytes, null: Total bytes sent; null where not counted.
      rx_bytes, null: Total bytes received; null where not counted.
    """
    run_rows: list[Row] = []
    step_rows: list[Row] = []
    for link in _links(run.recording):
        windows = windows_of(run, link.ranks[0])
        if not windows.num_rows:
            continue
        start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
        # The span of the run is what was read of it.
        low, high = np.maximum(start[:1], link.time_ns[0]), np.minimum(end[-1:], link.time_ns[-1])
        if high > low:
            run_rows += _rows(link, [None], low, high)
        long = (end - start) >= np.median(np.diff(link.time_ns))
        if len(start) > 1:
            numbers = windows["number"].filter(pa.array(long)).to_pylist()
            step_rows += _rows(link, numbers, start[long], end[long])
    run_rows.sort(key=_order)
    step_rows = [row for row in step_rows if row["signal"] or _busy(row) > 0]
    step_rows.sort(key=_order)
    return [*run_rows, *step_rows[:_ROWS]]


def _busy(row: Row) -> float:
    return sum(row.get(f"{way}_bytes_per_s", 0.0) for way in ("tx", "rx", "both"))


def _order(row: Row) -> tuple[float, float]:
    """Signs of congestion in the order in which they hurt, then how busy it is; most first."""
    severity = 1e6 * row.get("pause_ratio", 0.0) + 1e3 * row.get("retransmit_ratio", 0.0)
    severity += sum(row.get(n, 0) for n in ("cnp_handled_hz", "cnp_sent_hz", "retransmit_count"))
    return -severity, -_busy(row)


def _rows(
    link: _Link, steps: Sequence[int | None], start: np.ndarray, end: np.ndarray
) -> list[Row]:
    """One row per span with what is known of it."""
    span_ns = end - start
    found = dict.fromkeys((*_COUNTED, "retransmit_count"), np.full(len(start), np.nan))
    for name, counters in link.counters.items():
        each = [_growth(counter, start, end) for counter in counters]
        # Priorities are paused each by itself: the worst one is the link's.
        found[name] = np.fmax.reduce(each) / span_ns if name in _PAUSES else np.sum(each, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found |= {n: found[t] / (span_ns / 1e9) for n, t in _RATES.items() if t in found}
        found["retransmit_ratio"] = found["retransmitted_bytes"] / found["tx_bytes"]
        found["retransmits_per_byte"] = found["retransmit_count"] / found["tx_bytes"]
    shown = [
        (c.name, c.type == "int64", found[c.name]) for c in links.view.columns if c.name in found
    ]
    rows = []
    for i, step in enumerate(steps):
        row: Row = {
            name: round(float(values[i])) if whole else float(values[i])
            for name, whole, values in shown
            if np.isfinite(values[i])
        }
        if row:
            signal = "; ".join(_signals(row)) or None
            row |= {"link": link.name, "kind": link.kind, "rank": link.ranks[0], "step": step}
            row |= {"ranks": ranges(link.ranks), "span_ns": int(span_ns[i]), "signal": signal}
            rows.append(row)
    return rows


def _growth(counter: Counter, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Growth over each span, NaN where it is not known."""
    time = counter.time_ns
    unread_ns = np.maximum(time[0] - start, 0) + np.maximum(end - time[-1], 0)
    known = (unread_ns <= _UNREAD_RATIO * (end - start)) & counter.unbroken(start, end)
    return np.where(known, counter.growth(start, end), np.nan)


def _signals(row: Row) -> Iterator[str]:
    """Signs of congestion in words."""
    if row.get("pause_ratio", 0) >= _LEAST_PAUSE:
        yield f"paused by flow control for {fmt.ratio(row['pause_ratio'])} of the time"
    if row.get("sent_pause_ratio", 0) >= _LEAST_PAUSE:
        yield f"paused others for {fmt.ratio(row['sent_pause_ratio'])}"
    for name, what in (
        ("cnp_handled_hz", "slowed down by congestion notifications"),
        ("cnp_sent_hz", "sent congestion notifications"),
        ("ecn_marked_hz", "received marked packets"),
    ):
        if row.get(name):
            yield f"{what}, {row[name]:.3g}/s"
    if row.get("retransmit_count"):
        per = row.get("tx_bytes", 0) / row["retransmit_count"]
        yield "retransmits" + (f", one in {fmt.bytes_(per)}" if per else "")
    if row.get("retransmit_ratio"):
        yield f"{row['retransmit_ratio']:.2g} of the bytes retransmitted"


def _links(recording: Run) -> Iterator[_Link]:
    """All links of a run with readings; parts of one device (MIG, CPX) share their totals."""
    for ranks in ranks_by_socket(recording):
        tables = ((rank, of_rank(recording, rank, "device_counter")) for rank in ranks)
        rank, table = next(((r, t) for r, t in tables if t.num_rows), (None, None))
        if rank is not None:
            limits = of_rank(recording, rank, "device_limit")
            whole = " of the whole device" if limits.num_rows and limits["mig"][0].as_py() else ""
            order = (rank, *(other for other in ranks if other != rank))
            yield from _link("device link", f"NVLink, XGMI{whole}", order, table)
            yield from _link("PCIe", f"PCIe{whole}", order, table)
    for ranks in ranks_by_host(recording):
        fabric, nic, pause = (
            table_beside(recording, ranks[0], name) for name in ("fabric_port", "nic", "pause")
        )
        for device, of_device in _by(fabric, "device"):
            port_ids = ints(of_device, "port_id")
            for port in np.unique(port_ids).tolist():
                rows = of_device.filter(pa.array(port_ids == port))
                yield from _link("port", f"{device}/{port}", ranks, rows)
        for name, rows in _by(nic, "interface"):
            yield from _link("interface", name, ranks, rows)
        for name, rows in _by(pause, "interface"):
            yield from _link("flow control", name, ranks, rows)


def _by(table: pa.Table, column: str) -> Iterator[tuple[str, pa.Table]]:
    codes, names = strings(table, column)
    for code, name in enumerate(names):
        yield name, table.filter(pa.array(codes == code))


def _link(kind: str, name: str, ranks: tuple[int, ...], table: pa.Table) -> Iterator[_Link]:
    """The link of a table's rows, where any of its totals was read twice."""
    time_ns = ints(table, "time_ns")
    if kind == "flow control":
        priority = ints(table, "priority")
        masks = [priority == one for one in np.unique(priority)]
        totals = {
            shown: [np.where(mask, reals(table, column), np.nan) for mask in masks]
            for shown, column in _PAUSES.items()
        }
    else:
        totals = {
            total: [reals(table, column) for column in columns]
            for total, columns in _SOURCES[kind].items()
        }
    read: dict[str, list[Counter]] = {}
    for total, values in totals.items():
        known = (np.where(of == _STUCK_BYTES, np.nan, of) for of in values)
        counters = [counter_of(time_ns, of) for of in known]
        read[total] = [counter for counter in counters if counter is not None]
    if any(read.values()):
        read = {total: of for total, of in read.items() if of}
        yield _Link(kind, name, ranks, np.unique(time_ns), read)
