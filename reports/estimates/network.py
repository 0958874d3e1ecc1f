"""Collectives and flows of a network as a page."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.analyzers.estimates.network import Network
from chopper.reports.estimates.page import Grid, Page, Plot, lines_figure


def page(found: Network) -> Page:
    """Times by size and algorithm, uplinks, incast, and the interconnect table."""
    largest = max(t.size_bytes for t in found.times)
    best = next(t for t in found.times if t.size_bytes == largest and t.fastest)
    times = Grid(
        title=f"{found.collective} over {found.ranks_count} ranks, {fmt.plural(found.nodes_count, 'node')}",
        columns=("size", "algorithm", "time", "algbw", "busbw", "fastest"),
        left=2,
        rows=[
            (
                fmt.bytes_(t.size_bytes),
                t.algorithm,
                fmt.duration(t.time_s * 1e9),
                fmt.rate(t.algorithm_bytes_per_s),
                fmt.rate(t.bus_bytes_per_s),
                "yes" if t.fastest else "",
            )
            for t in found.times
        ],
        note="algbw = size ÷ time, busbw = algbw × bus factor, as nccl-tests define them",
    )
    failed = found.spreads[0].failed_count if found.spreads else 0
    spreads = Grid(
        title="Flows hashed onto uplinks"
        + (f", {fmt.plural(failed, 'uplink')} failed" if failed else ""),
        columns=("flows", "queue pairs", "uplinks", "max ÷ mean", "±", "95th", "of even", "gain"),
        left=0,
        rows=[
            (
                str(s.flows_count),
                str(s.queue_pairs_count),
                str(s.uplinks_count),
                f"{s.max_over_mean_ratio:.2f}",
                f"{s.standard_error_ratio:.3f}",
                f"{s.p95_ratio:.2f}",
                fmt.ratio(s.throughput_ratio),
                f"{s.gain_ratio:.2f}×",
            )
            for s in found.spreads
        ],
        note="one queue pair is plain ECMP; gain: throughput against it, where uplinks are the bottleneck",
    )
    simulations = Grid(
        title=f"The same flows from first to last byte, over {found.topology.uplinks_count} uplinks",
        columns=(
            "queue pairs",
            "to",
            "room",
            "fail",
            "admitted",
            "at once",
            "last ends",
            "±",
            "mean",
            "gain",
        ),
        left=0,
        rows=[
            (
                str(s.queue_pairs_count),
                fmt.plural(s.receivers_count, "receiver"),
                f"{s.headroom_ratio - 1:.0%}",
                str(s.failed_count),
                "all" if s.admitted_count is None else str(s.admitted_count),
                str(s.most_at_once_count),
                f"{s.finish_ratio:.2f}",
                f"{s.standard_error_ratio:.2f}",
                f"{s.mean_finish_ratio:.2f}",
                f"{s.gain_ratio:.2f}×",
            )
            for s in found.simulations
        ],
        note="ends: 1 is what even sharing would take; room: of the uplinks, over what all ports can send; "
        "fail: uplinks, half way; admitted: flows that a receiver lets send at a time",
    )
    incasts = Grid(
        title="Incast: many senders, one receiver",
        columns=("senders", "admitted at once", "finished", "highest queue", "ports paused"),
        left=0,
        rows=[
            (
                str(i.senders_count),
                str(i.admitted_count),
                fmt.duration(i.finish_s * 1e9),
                fmt.bytes_(i.peak_queue_bytes),
                fmt.ratio(i.paused_ratio),
            )
            for i in found.incasts
        ],
        note="admission by the receiver does not make it faster; it keeps pauses from all that shares "
        "the senders' ports",
    )
    table = Grid(
        title="Interconnect table: 12 B parameters on two nodes of 8",
        columns=("interconnect", "per node", "communication", "step", "survey says"),
        rows=[
            (
                i.name,
                fmt.rate(i.node_bytes_per_s),
                fmt.duration(i.communication_s * 1e9),
                fmt.duration(i.step_s * 1e9),
                "–" if i.published_s is None else f"{i.published_s:g} s",
            )
            for i in found.interconnects
        ],
        note="consistent with the survey's numbers, which do not state their assumptions; ours stand below",
    )
    algorithms = list(dict.fromkeys(t.algorithm for t in found.times))
    series = {
        a: (
            [float(t.size_bytes) for t in found.times if t.algorithm == a],
            [float(f"{t.time_s * 1e6:.5g}") for t in found.times if t.algorithm == a],
        )
        for a in algorithms
    }
    sizes = sorted({t.size_bytes for t in found.times})
    gain = found.spreads[-1].gain_ratio if found.spreads else 1.0
    return Page(
        title="Network",
        verdict=f"{found.collective} of {fmt.bytes_(largest)} over {found.ranks_count} ranks: "
        f"{fmt.duration(best.time_s * 1e9)} by {best.algorithm}, "
        f"{fmt.rate(best.bus_bytes_per_s)} of bus bandwidth. More queue pairs: {gain:.2f}× of plain ECMP.",
        facts=(f"network: {found.topology.source}", *_against_published(found)),
        grids=(times, spreads, *((simulations,) if found.simulations else ()), incasts, table),
        plots=(
            Plot(
                name="collective",
                title=f"Time of {found.collective} by size",
                figure=lines_figure(
                    series,
                    x="size",
                    y="time",
                    log_x=True,
                    log_y=True,
                    x_ticks={
                        float(n): fmt.bytes_(n).replace(".00", "").replace(".0 ", " ")
                        for n in sizes
                    },
                    y_ticks={10.0**p: _power_of_ten(p) for p in range(-3, 9)},
                ),
            ),
        ),
        assumptions=found.assumptions,
    )


def _power_of_ten(exponent: int) -> str:
    """10 ** exponent µs."""
    thousands, digits = divmod(exponent + 3, 3)
    return f"{10**digits} {('ns', 'µs', 'ms', 's')[thousands]}"


def _against_published(found: Network) -> tuple[str, ...]:
    """What the simulated flows gain, beside the published gain."""
    most = max((s.queue_pairs_count for s in found.simulations), default=1)
    of = [
        s
        for s in found.simulations
        if s.queue_pairs_count == most > 1
        and not s.failed_count
        and s.receivers_count == found.spreads[0].flows_count
    ]
    if not of:
        return ()
    said = ", ".join(
        f"{s.gain_ratio - 1:.0%} with {s.headroom_ratio - 1:.0%} of the uplinks to spare"
        for s in of
    )
    return (
        f"{most} queue pairs instead of one gain {said}; published of E-ECMP: up to 40 % on an AllReduce "
        "benchmark",
    )
