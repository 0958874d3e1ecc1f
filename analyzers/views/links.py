"""Traffic of ports, interfaces and device links by step, and signs of congestion.

Counters are totals: rates are differences over the time of a step, linear between two readings. A
step shorter than the time between readings gets none. A counter that went backwards or stuck at the
end of its 32 bits tells nothing of that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.samples import of_rank, table_beside
from chopper.analyzers.views import View
from chopper.analyzers.views._sharing import ranks_by_host, ranks_by_socket
from chopper.tables import column, optional
from chopper.wording import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.attributed import Attributed
    from chopper.storage.run import Run

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
_LEAST_PAUSE = 0.001
_UNREAD_RATIO = 0.01
"""So much of a span may lie before the first reading or after the last one."""
_ROWS = 5000
"""Rows about single steps at most."""

VIEW = View(
    "links",
    1,
    "What links carried, and what speaks of congestion on them: rows without a step are the whole "
    "run. Ports and interfaces are their host's, shared by its ranks; device links are a rank's "
    "own. Steps shorter than the time between readings have no row.",
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
        optional(
            "cnp_handled_hz", "Rate of congestion notifications that the sender obeyed.", "float64"
        ),
        optional("retransmit_ratio", "Share of the bytes sent that were sent again (EFA)."),
        column("ranks", "Global ranks that share the link."),
        column("kind", "Kind of link: port, interface, flow control, device link or PCIe."),
        column("rank", "Global rank whose steps divide the time.", "int32"),
        column("span_ns", "Time over which the counters are compared."),
        optional("sent_pause_ratio", "Share of the time in which the peers were told to pause."),
        optional(
            "cnp_sent_hz", "Rate of congestion notifications sent as the receiver.", "float64"
        ),
        optional("ecn_marked_hz", "Rate of packets that a switch had marked (ECN).", "float64"),
        optional("tx_wait_hz", "Rate of ticks spent waiting for credits (InfiniBand).", "float64"),
        optional("retransmits_per_byte", "Retransmits (RoCE) per byte sent.", "float64"),
        optional("retransmit_count", "Number of order errors, timeouts and adaptive retransmits."),
        optional("out_of_sequence_count", "Number of packets that came out of order."),
        optional(
            "error_count", "Number of discards, link and CRC errors, replays, NAKs and recoveries."
        ),
        optional("tx_bytes", "Bytes sent in all."),
        optional("rx_bytes", "Bytes received in all."),
    ),
    module_doc=__doc__,
    title="Links",
    section="Communication",
    needs="no link's counters were sampled (the collectors `host`, `fabric`, `nvml`, `amdsmi` do)",
)


@dataclass(frozen=True)
class _Link:
    """One link's totals at its readings.

    Attributes:
        kind: port, interface, device link or PCIe.
        rank: rank whose steps count; ``ranks`` are all that share the link.
        time_ns: of the readings, in order.
        total: column → totals, NaN where not known.
    """

    kind: str
    name: str
    rank: int
    ranks: tuple[int, ...]
    time_ns: np.ndarray
    total: dict[str, np.ndarray]

    def grown(self, column: str, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Growth of one total over each span; NaN where it is not known."""
        total = self.total.get(column)
        if total is None:
            return np.full(len(start_ns), np.nan)
        good = np.isfinite(total)
        time, values = self.time_ns[good], total[good]
        if len(time) < 2:
            return np.full(len(start_ns), np.nan)
        change = np.diff(values)
        back = change < 0
        whole = np.concatenate([[0.0], np.cumsum(np.where(back, 0.0, change))])
        zero = time[0]
        found = np.interp(end_ns - zero, time - zero, whole) - np.interp(
            start_ns - zero, time - zero, whole
        )
        last = len(time) - 2
        first = np.clip(np.searchsorted(time, start_ns, side="right") - 1, 0, last)
        final = np.clip(np.searchsorted(time, end_ns, side="left") - 1, first, last)
        bad = np.concatenate([[0], np.cumsum(back)])
        unread_ns = np.maximum(time[0] - start_ns, 0) + np.maximum(end_ns - time[-1], 0)
        read = unread_ns <= _UNREAD_RATIO * (end_ns - start_ns)
        return np.where(read & (bad[final + 1] == bad[first]), found, np.nan)

    @property
    def period_ns(self) -> float:
        """Median time between readings."""
        return float(np.median(np.diff(self.time_ns)))


def links(run: Attributed) -> pa.Table:
    """FABRIC_PORT, PAUSE, NIC, DEVICE_COUNTER -> LINKS.

    The whole run first, congested links and busy ones on top; then the steps.
    """
    run_rows: list[dict[str, Any]] = []
    step_rows: list[dict[str, Any]] = []
    for link in _links(run.recording):
        windows = windows_of(run, link.rank)
        if len(link.time_ns) < 2 or not windows.num_rows:
            continue
        steps = windows["number"].to_pylist()
        start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
        # The span of the run is what was read of it.
        low = np.array([max(int(start[0]), int(link.time_ns[0]))])
        high = np.array([min(int(end[-1]), int(link.time_ns[-1]))])
        if high[0] > low[0]:
            run_rows += _rows(link, [None], low, high)
        long = (end - start) >= link.period_ns
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
    seconds = (end - start) / 1e9

    def grown(*columns: str) -> np.ndarray:
        """Sum of those that the link counts; NaN where none is, or one of them is not known."""
        counted = [c for c in columns if c in link.total and np.isfinite(link.total[c]).any()]
        if not counted:
            return np.full(len(start), np.nan)
        added: np.ndarray = np.sum([link.grown(c, start, end) for c in counted], axis=0)
        return added

    tx, rx = grown("tx_bytes"), grown("rx_bytes")
    pause = [link.grown(f"rx_pause_ns/{p}", start, end) for p in range(_PRIORITIES)]
    sent = [link.grown(f"tx_pause_ns/{p}", start, end) for p in range(_PRIORITIES)]
    again = grown("retransmitted_bytes")
    retransmits = grown(*_RETRANSMITS)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "tx_bytes_per_s": tx / seconds,
            "rx_bytes_per_s": rx / seconds,
            "both_bytes_per_s": grown("both_bytes") / seconds,
            # Priorities are paused each by itself: the worst one is the link's.
            "pause_ratio": _most(pause) / (end - start),
            "sent_pause_ratio": _most(sent) / (end - start),
            "cnp_handled_hz": grown("cnp_handled_count") / seconds,
            "cnp_sent_hz": grown("cnp_sent_count") / seconds,
            "ecn_marked_hz": grown("ecn_marked_count") / seconds,
            "tx_wait_hz": grown("tx_wait_count") / seconds,
            "retransmit_ratio": again / tx,
            "retransmits_per_byte": retransmits / tx,
            "tx_bytes": tx,
            "rx_bytes": rx,
            "retransmit_count": retransmits,
            "out_of_sequence_count": grown("out_of_sequence_count"),
            "error_count": grown(*_ERRORS, *_DEVICE_ERRORS),
        }
    rows = []
    for i, step in enumerate(steps):
        row: dict[str, Any] = {
            "link": link.name,
            "kind": link.kind,
            "rank": link.rank,
            "ranks": ranges(link.ranks),
            "step": step,
            "span_ns": int(end[i] - start[i]),
        }
        for name, values in found.items():
            value = float(values[i])
            if not np.isfinite(value):
                row[name] = None
            elif name.endswith("_count") or name in ("tx_bytes", "rx_bytes"):
                row[name] = round(value)
            else:
                row[name] = value
        if all(row[name] is None for name in found):
            continue
        row["signal"] = _signal(row)
        rows.append(row)
    return rows


def _most(values: list[np.ndarray]) -> np.ndarray:
    """Largest of each span, NaN where none is known."""
    stacked = np.stack(values)
    known = np.isfinite(stacked)
    found: np.ndarray = np.where(
        known.any(axis=0), np.where(known, stacked, -np.inf).max(axis=0), np.nan
    )
    return found


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
        yield from _ports(table_beside(recording, ranks[0], "fabric_port"), ranks)
        nic, pause = (table_beside(recording, ranks[0], name) for name in ("nic", "pause"))
        yield from _interfaces(nic, pause, ranks)


def _device_links(recording: Run, ranks: tuple[int, ...]) -> Iterator[_Link]:
    """Links of one device; its parts (MIG, CPX) share their totals."""
    read = ((rank, of_rank(recording, rank, "device_counter")) for rank in ranks)
    found = next(((rank, table) for rank, table in read if table.num_rows), None)
    if found is None:
        return
    rank, table = found
    limits = of_rank(recording, rank, "device_limit")
    part = limits.num_rows > 0 and limits["mig"][0].as_py()
    for kind, name, columns in _DEVICE_LINKS:
        if part:
            name += " of the whole device"
        total = {to: reals(table, column) for to, column in columns.items()}
        if any(np.isfinite(v).any() for v in total.values()):
            yield _Link(kind, name, rank, ranks, ints(table, "time_ns"), total)


def _ports(table: pa.Table, ranks: tuple[int, ...]) -> Iterator[_Link]:
    codes, devices = strings(table, "device")
    ports = ints(table, "port_id")
    for code, device in enumerate(devices):
        for port in np.unique(ports[codes == code]).tolist():
            mine = table.filter(pa.array((codes == code) & (ports == port)))
            total = {name: reals(mine, name) for name in _PORT}
            for name in ("tx_bytes", "rx_bytes"):
                total[name] = np.where(total[name] == _STUCK_BYTES, np.nan, total[name])
            yield _Link("port", f"{device}/{port}", ranks[0], ranks, ints(mine, "time_ns"), total)


def _interfaces(nic: pa.Table, pause: pa.Table, ranks: tuple[int, ...]) -> Iterator[_Link]:
    """Ethernet interfaces: their bytes and their pauses have readings of their own."""
    for table, columns in ((nic, ("tx_bytes", "rx_bytes")), (pause, ())):
        codes, names = strings(table, "interface")
        for code, name in enumerate(names):
            mine = table.filter(pa.array(codes == code))
            total = {column: reals(mine, column) for column in columns}
            time = ints(mine, "time_ns")
            if table is pause:
                time, at = np.unique(time, return_inverse=True)
                priority = ints(mine, "priority")
                for column in ("rx_pause_ns", "tx_pause_ns"):
                    values = reals(mine, column)
                    for number in np.unique(priority).tolist():
                        own = np.full(len(time), np.nan)
                        own[at[priority == number]] = values[priority == number]
                        total[f"{column}/{number}"] = own
            kind = "interface" if columns else "flow control"
            if any(np.isfinite(v).any() for v in total.values()):
                yield _Link(kind, name, ranks[0], ranks, time, total)
