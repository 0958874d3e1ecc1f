"""Collectives and flows of a network as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.reports.estimates.parts import estimate_page, lines_figure, listing
from chopper.reports.page import Figure, Page, Section

if TYPE_CHECKING:
    from chopper.analyzers.estimates.network import Network


def page(result: Network) -> Page:
    """Return times by size and algorithm, uplinks, incast, and the interconnect table."""
    largest = max(t.size_bytes for t in result.times)
    best = next(t for t in result.times if t.size_bytes == largest and t.fastest)
    gain = result.spreads[-1].gain_ratio if result.spreads else 1.0
    return estimate_page(
        result,
        title="Network",
        headline=f"{result.collective} of {fmt.bytes_(largest)} over {result.ranks_count} ranks: "
        f"{fmt.duration(best.time_s * 1e9)} by {best.algorithm}, "
        f"{fmt.rate(best.bus_bytes_per_s)} of bus bandwidth. "
        f"More queue pairs: {gain:.2f}× of plain ECMP.",
        facts=(f"network: {result.topology.source}", *_against_published(result)),
        figures=(_times_figure(result),),
        sections=(
            _times(result),
            _uplinks(result),
            *((_simulations(result),) if result.simulations else ()),
            _incasts(result),
            _interconnects(result),
        ),
    )


def _times(result: Network) -> Section:
    return listing(
        f"{result.collective} over {result.ranks_count} ranks, "
        f"{fmt.plural(result.nodes_count, 'node')}",
        result.times,
        {
            "size": lambda t: fmt.bytes_(t.size_bytes),
            "algorithm": lambda t: t.algorithm,
            "time": lambda t: fmt.duration(t.time_s * 1e9),
            "algbw": lambda t: fmt.rate(t.algorithm_bytes_per_s),
            "busbw": lambda t: fmt.rate(t.bus_bytes_per_s),
            "fastest": lambda t: "yes" if t.fastest else "",
        },
        words=2,
        note="algbw = size ÷ time, busbw = algbw × bus factor, as nccl-tests define them",
    )


def _times_figure(result: Network) -> Figure:
    series = {
        a: (
            [float(t.size_bytes) for t in result.times if t.algorithm == a],
            [float(f"{t.time_s * 1e6:.5g}") for t in result.times if t.algorithm == a],
        )
        for a in dict.fromkeys(t.algorithm for t in result.times)
    }
    sizes = sorted({t.size_bytes for t in result.times})
    figure = lines_figure(
        series,
        x="size",
        y="time",
        log_x=True,
        log_y=True,
        x_ticks={float(n): fmt.bytes_(n).replace(".00", "").replace(".0 ", " ") for n in sizes},
        y_ticks={10.0**p: _power_of_ten(p) for p in range(-3, 9)},
    )
    return Figure(name="collective", title=f"Time of {result.collective} by size", figure=figure)


def _power_of_ten(exponent: int) -> str:
    """Return 10 ** exponent µs in words."""
    thousands, digits = divmod(exponent + 3, 3)
    return f"{10**digits} {('ns', 'µs', 'ms', 's')[thousands]}"


def _uplinks(result: Network) -> Section:
    failed = result.spreads[0].failed_count if result.spreads else 0
    return listing(
        "Flows hashed onto uplinks"
        + (f", {fmt.plural(failed, 'uplink')} failed" if failed else ""),
        result.spreads,
        {
            "flows": lambda s: str(s.flows_count),
            "queue pairs": lambda s: str(s.queue_pairs_count),
            "uplinks": lambda s: str(s.uplinks_count),
            "max ÷ mean": lambda s: f"{s.max_over_mean_ratio:.2f}",
            "±": lambda s: f"{s.standard_error_ratio:.3f}",
            "95th": lambda s: f"{s.p95_ratio:.2f}",
            "of even": lambda s: fmt.ratio(s.throughput_ratio),
            "gain": lambda s: f"{s.gain_ratio:.2f}×",
        },
        words=0,
        note="one queue pair is plain ECMP; gain: throughput against it, where uplinks are the "
        "bottleneck",
    )


def _simulations(result: Network) -> Section:
    return listing(
        f"The same flows from first to last byte, over {result.topology.uplinks_count} uplinks",
        result.simulations,
        {
            "queue pairs": lambda s: str(s.queue_pairs_count),
            "to": lambda s: fmt.plural(s.receivers_count, "receiver"),
            "room": lambda s: f"{s.headroom_ratio - 1:.0%}",
            "fail": lambda s: str(s.failed_count),
            "admitted": lambda s: "all" if s.admitted_count is None else str(s.admitted_count),
            "at once": lambda s: str(s.most_at_once_count),
            "last ends": lambda s: f"{s.finish_ratio:.2f}",
            "±": lambda s: f"{s.standard_error_ratio:.2f}",
            "mean": lambda s: f"{s.mean_finish_ratio:.2f}",
            "gain": lambda s: f"{s.gain_ratio:.2f}×",
        },
        words=0,
        note="ends: 1 is what even sharing would take; room: of the uplinks, over what all "
        "ports can "
        "send; fail: uplinks, half way; admitted: flows that a receiver lets send at a time",
    )


def _incasts(result: Network) -> Section:
    return listing(
        "Incast: many senders, one receiver",
        result.incasts,
        {
            "senders": lambda i: str(i.senders_count),
            "admitted at once": lambda i: str(i.admitted_count),
            "finished": lambda i: fmt.duration(i.finish_s * 1e9),
            "highest queue": lambda i: fmt.bytes_(i.peak_queue_bytes),
            "ports paused": lambda i: fmt.ratio(i.paused_ratio),
        },
        words=0,
        note="admission by the receiver does not make it faster; it keeps pauses from all that "
        "shares the senders' ports",
    )


def _interconnects(result: Network) -> Section:
    return listing(
        "Interconnect table: 12 B parameters on two nodes of 8",
        result.interconnects,
        {
            "interconnect": lambda i: i.name,
            "per node": lambda i: fmt.rate(i.node_bytes_per_s),
            "communication": lambda i: fmt.duration(i.communication_s * 1e9),
            "step": lambda i: fmt.duration(i.step_s * 1e9),
            "survey says": lambda i: "–" if i.published_s is None else f"{i.published_s:g} s",
        },
        note="consistent with the survey's numbers, which do not state their assumptions; ours "
        "stand "
        "below",
    )


def _against_published(result: Network) -> tuple[str, ...]:
    """Return what the simulated flows gain, beside the published gain."""
    most = max((s.queue_pairs_count for s in result.simulations), default=1)
    said = ", ".join(
        f"{s.gain_ratio - 1:.0%} with {s.headroom_ratio - 1:.0%} of the uplinks to spare"
        for s in result.simulations
        if s.queue_pairs_count == most > 1
        and not s.failed_count
        and s.receivers_count == result.spreads[0].flows_count
    )
    if not said:
        return ()
    return (
        f"{most} queue pairs instead of one gain {said}; published of E-ECMP: up to 40 % on an "
        "AllReduce benchmark",
    )
