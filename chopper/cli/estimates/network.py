"""Collectives by size and algorithm, flows on uplinks, interconnects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from chopper import wording as fmt
from chopper.analyzers.estimates import Option, OptionsOf
from chopper.analyzers.estimates.network import (
    HEADROOM_RATIO,
    SIZES_BYTES,
    Network,
    Topology,
    collective_time_s,
    network,
)
from chopper.cli import _options
from chopper.errors import JSON_ERRORS, InputError, UsageError
from chopper.reports.estimate import estimate_page, listing
from chopper.reports.figures import lines
from chopper.reports.page import Figure, Page, Section
from chopper.storage.files import read_bytes

_SMALL_GAIN_RATIO = 1.05


class Options(_options.Options, kw_only=True, frozen=True):
    """Show how long a collective takes on a network, and how its flows share the uplinks.

    Times are α-β for ring, tree and hierarchical algorithms; flows × queue pairs are hashed onto
    uplinks as ECMP and E-ECMP do.

    \b
    Examples:
      chopper estimate network --ranks 1024 --size 1GiB
      chopper estimate network --flows 64 --uplinks 16
      chopper estimate network --topology cluster.json --collective all_gather
    """

    collective: Annotated[str, Option("Name of the collective, as in nccl-tests.")] = "all_reduce"
    ranks_count: Annotated[int, Option("Number of ranks that take part.")] = 16
    size_bytes: Annotated[
        tuple[int, ...], Option("Message size; may be repeated. [default: 1 KiB to 4 GiB]")
    ] = SIZES_BYTES
    file: Annotated[
        Path | None,
        Option(
            "A described network, .json or .yaml; options below override its fields.",
            "topology",
            metavar="FILE",
        ),
    ] = None
    calibrated: Annotated[
        bool, Option("Links as chopper calibrate measured them on this machine.")
    ] = False
    topology: Annotated[dict[str, Any], OptionsOf(Topology)] = msgspec.field(default_factory=dict)
    flows_count: Annotated[int, Option("Number of flows on the uplinks.")] = 128
    queue_pairs_count: Annotated[
        tuple[int, ...], Option("Queue pairs per flow; may be repeated.")
    ] = (1, 4, 16)


def estimate(options: Options) -> Network:
    """Return times of a collective, the spread of flows, and the interconnect table."""
    options.contradict("file", "calibrated")
    if max(options.size_bytes) > 2**60:
        raise UsageError("--size: found more than 1 EiB")
    return network(
        collective=options.collective,
        ranks_count=options.ranks_count,
        sizes_bytes=options.size_bytes,
        topology=_topology(options),
        flows_count=options.flows_count,
        queue_pairs=options.queue_pairs_count,
    )


def _topology(options: Options) -> Topology:
    described = Topology()
    if options.file is not None:
        described = read_topology(options.file)
    elif options.calibrated:
        described = calibrated_topology()
    if not options.topology:
        return described
    source = f"{described.source}; given: {', '.join(options.topology)}"
    return msgspec.structs.replace(described, **options.topology, source=source)


def read_topology(file: Path) -> Topology:
    """Read a network described in JSON or YAML, by the fields of Topology; numbers in SI units.

    Raises:
        InputError: it cannot be read, or a field is unknown or wrong.
    """
    data = read_bytes(file)
    decode = (
        msgspec.yaml.decode if file.suffix.lower() in (".yaml", ".yml") else msgspec.json.decode
    )
    try:
        topology = decode(data, type=Topology)
    except ImportError as exc:
        raise InputError(f"{file}: YAML needs pyyaml; install it, or write JSON") from exc
    except (*JSON_ERRORS, UsageError) as exc:
        known = ", ".join(Topology.__struct_fields__)
        raise InputError(f"{file}: {exc}; a network has the fields {known}") from exc
    described = msgspec.structs.replace(topology, source=f"described in {file.name}")
    return described if topology.source == Topology().source else topology


def calibrated_topology() -> Topology:
    """Return the links of this machine as measured; the network between nodes is the default.

    Raises:
        UsageError: nothing was measured here.
    """
    import socket

    from chopper.hardware import calibration

    here = socket.gethostname()
    stored = (c for c in calibration.load_all() if c.hostname == here)
    best = next((c for c in stored if c.link_bytes_per_s and c.link_ranks), None)
    if best is None:
        raise UsageError(
            "--calibrated: no link was measured here; run: chopper calibrate --ranks 2"
        )
    return Topology(
        ranks_per_node_count=best.link_ranks or 1,
        node_link_bytes_per_s=best.link_bytes_per_s or 0.0,
        node_latency_s=(best.roundtrip_ns or 3400) / 1e9,
        source=f"{best.source}; network between nodes as by default",
    )


def page(result: Network) -> Page:
    """Return the page: times by size and algorithm, uplinks, and the interconnect table."""
    largest = max(t.size_bytes for t in result.times)
    best = next(t for t in result.times if t.size_bytes == largest and t.fastest)
    of = result.collective, 1, result.ranks_count, result.topology, best.algorithm
    latency_s = collective_time_s(*of)
    by = "latency" if latency_s > best.time_s / 2 else "bandwidth"
    collided = ""
    plain_ratio = min((s.throughput_ratio / s.gain_ratio for s in result.spreads), default=1.0)
    if result.nodes_count > 1 and plain_ratio < 1 and by == "bandwidth":
        longest_s = latency_s + (best.time_s - latency_s) / plain_ratio
        collided = f" – {fmt.duration(longest_s * 1e9)}"
    return estimate_page(
        result,
        title="Network",
        headline=f"{result.collective} of {fmt.bytes_(largest)} over {result.ranks_count} ranks: "
        f"{fmt.duration(best.time_s * 1e9)}{collided} by {best.algorithm}.",
        limit=f"{by}; {fmt.duration(latency_s * 1e9)} is latency, and busbw "
        f"{fmt.rate(best.bus_bytes_per_s)}",
        assumes=f"nothing else on the links{collided and '; the longer time: flows that collide'}",
        remedy=_remedy(result, by),
        facts=(f"network: {result.topology.source}", *_against_published(result)),
        figures=(_times_figure(result),),
        sections=(_times(result), _uplinks(result), _interconnects(result)),
    )


def _remedy(result: Network, by: str) -> str:
    if by == "latency":
        return "fewer, larger messages"
    best = max(result.spreads, key=lambda s: s.gain_ratio, default=None)
    if result.nodes_count == 1 or best is None or best.gain_ratio < _SMALL_GAIN_RATIO:
        return "other algorithms with --details, another network with --topology"
    return (
        f"{best.queue_pairs_count} queue pairs for each flow: {best.gain_ratio:.2f}× of plain ECMP "
        "where uplinks limit"
    )


def _times(result: Network) -> Section:
    return listing(
        f"{result.collective} over {result.ranks_count} ranks, "
        f"{fmt.plural(result.nodes_count, 'node')}",
        result.times,
        {
            "size": "size_bytes",
            "algorithm": "algorithm",
            "time": "time_s",
            "algbw": "algorithm_bytes_per_s",
            "busbw": "bus_bytes_per_s",
            "fastest": lambda t: "yes" if t.fastest else "",
        },
        words=2,
        note="algbw = size ÷ time, busbw = algbw × bus factor, as nccl-tests define them",
    )


def _times_figure(result: Network) -> Figure:
    series = {
        a: (
            [float(t.size_bytes) for t in result.times if t.algorithm == a],
            [t.time_s for t in result.times if t.algorithm == a],
        )
        for a in dict.fromkeys(t.algorithm for t in result.times)
    }
    sizes = sorted({t.size_bytes for t in result.times})
    figure = lines(
        series,
        x="size",
        y="time",
        unit="s",
        log_x=True,
        log_y=True,
        x_ticks={float(n): fmt.bytes_(n).replace(".00", "").replace(".0 ", " ") for n in sizes},
    )
    return Figure(name="collective", title=f"Time of {result.collective} by size", figure=figure)


def _uplinks(result: Network) -> Section:
    return listing(
        "Flows hashed onto uplinks",
        result.spreads,
        {
            "flows": "flows_count",
            "queue pairs": "queue_pairs_count",
            "uplinks": "uplinks_count",
            "max ÷ mean": lambda s: f"{s.max_over_mean_ratio:.2f}",
            "±": lambda s: f"{s.standard_error_ratio:.3f}",
            "95th": lambda s: f"{s.p95_ratio:.2f}",
            "of even": "throughput_ratio",
            "gain": lambda s: f"{s.gain_ratio:.2f}×",
            "with room": lambda s: f"{s.gain_with_headroom_ratio:.2f}×",
        },
        words=0,
        note="one queue pair is plain ECMP; gain: throughput against it, if uplinks are the "
        f"bottleneck; with room: if they have {fmt.percent(HEADROOM_RATIO - 1, '.0f')} more "
        "bandwidth than the ports",
    )


def _interconnects(result: Network) -> Section:
    return listing(
        "Interconnect table: 12 B parameters on two nodes of 8",
        result.interconnects,
        {
            "interconnect": "name",
            "per node": "node_bytes_per_s",
            "communication": "communication_s",
            "step": "step_s",
            "published": lambda i: f"{i.published_s:g} s",
        },
        note="consistent with the published times, which do not state their assumptions; ours "
        "are listed below",
    )


def _against_published(result: Network) -> tuple[str, ...]:
    """Return the gain of the most queue pairs, with the published one."""
    best = max(result.spreads, key=lambda s: s.queue_pairs_count)
    if best.queue_pairs_count == 1:
        return ()
    return (
        f"{best.queue_pairs_count} queue pairs instead of one gain "
        f"{fmt.percent(best.gain_ratio - 1, '.0f')} if uplinks limit, "
        f"{fmt.percent(best.gain_with_headroom_ratio - 1, '.0f')} with "
        f"{fmt.percent(HEADROOM_RATIO - 1, '.0f')} of them to spare; published of E-ECMP: up to "
        "40 % on an AllReduce benchmark",
    )
