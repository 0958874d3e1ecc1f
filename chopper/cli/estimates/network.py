"""Collectives by size and algorithm, and flows on uplinks.

α-β: a collective of S bytes takes base + steps × latency + bytes on the slowest link ÷ its rate
(ring and tree as NCCL's Simple protocol). ECMP: flows are hashed onto uplinks, and the fullest one
decides; E-ECMP hashes queue pairs instead, of which each flow has several (Gangidi et al., "RDMA
over Ethernet for distributed AI training at Meta scale", SIGCOMM 2024).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from chopper import wording as fmt
from chopper.analyzers.estimates import Estimate, Option, OptionsOf, assumed
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.quantities import between, one_of, positive
from chopper.reports.estimate import estimate_page, listing
from chopper.reports.page import Page, Section

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
_MAX_RANKS, _MAX_UPLINKS, _MAX_PIECES, _MAX_BYTES = 10**7, 25_000, 10**9, 2**60
_SENT_AT_ONCE_COUNT = 64
"""Peers of an all-to-all that NCCL serves at once: a batch of a channel holds 8 sends
(NCCL_MAX_DEV_WORK_P2P_PER_BATCH) and peers go round the channels (ncclP2pChannelBaseForRound). Its
logs have 8 to 16 such channels, 1 or 2 of them for each peer (issues 634 and 1189): 32 to 128, this
is between."""
_HEADROOM_RATIO = 1.2
_DRAWS = 4000


class Topology(msgspec.Struct, kw_only=True, frozen=True):
    """Nodes with their ranks and links; rates are per rank and of one direction.

    The defaults are HGX H100 with one 400 Gb/s port per GPU; latencies are NCCL's Simple ring's.
    """

    ranks_per_node_count: Annotated[int, Option("Ranks of one node.")] = 8
    node_link_bytes_per_s: Annotated[float, Option("Links in a node, one direction.")] = 450e9
    node_latency_s: Annotated[float, Option("Latency of a step in a node; PCIe: 5.7us.")] = 3.4e-6
    network_link_bytes_per_s: Annotated[float, Option("Network per rank, one direction.")] = 50e9
    network_latency_s: Annotated[float, Option("Latency of a step between nodes.")] = 9.6e-6
    base_latency_s: float = 8.4e-6
    """Of any collective."""
    uplinks_count: Annotated[int, Option("Uplinks of a switch, onto which flows hash.")] = 16

    def __post_init__(self) -> None:
        """Raise UsageError, which names the field, for an impossible network."""
        for name in self.__struct_fields__:
            positive(getattr(self, name), f"topology: {name}")
        between(self.ranks_per_node_count, 1, _MAX_RANKS, "topology: ranks_per_node_count")
        between(self.uplinks_count, 1, _MAX_UPLINKS, "topology: uplinks_count")


class Options(_options.Options, kw_only=True, frozen=True):
    """Show how long a collective takes on a network, and how its flows share the uplinks.

    Times are α-β for ring, tree and hierarchical algorithms; flows × queue pairs are hashed onto
    uplinks as ECMP and E-ECMP do.

    \b
    Examples:
      chopper estimate network --ranks 1024 --size 1GiB
      chopper estimate network --flows 64 --uplinks 16
      chopper estimate network --collective all_gather --network-link 25GB/s
    """

    collective: Annotated[str, Option("Name of the collective, as in nccl-tests.")] = "all_reduce"
    ranks_count: Annotated[int, Option("Number of ranks that take part.")] = 16
    size_bytes: Annotated[
        tuple[int, ...], Option("Message size; may be repeated. [default: 1 KiB to 4 GiB]")
    ] = tuple(4**k for k in range(5, 17))
    topology: Annotated[dict[str, Any], OptionsOf(Topology)] = msgspec.field(default_factory=dict)
    flows_count: Annotated[int, Option("Number of flows on the uplinks.")] = 128
    queue_pairs_count: Annotated[
        tuple[int, ...], Option("Queue pairs per flow; may be repeated.")
    ] = (1, 4, 16)


class Timed(msgspec.Struct, kw_only=True, frozen=True):
    """One collective of one size by one algorithm, with nccl-tests' algbw and busbw."""

    size_bytes: int
    algorithm: str
    time_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    fastest: bool


class Spread(msgspec.Struct, kw_only=True, frozen=True):
    """Load of the uplinks by hashing, mean over draws."""

    flows_count: int
    queue_pairs_count: int
    uplinks_count: int
    max_over_mean_ratio: float
    """Load of the fullest uplink over the mean load."""
    throughput_ratio: float
    """Relative to even sharing: 1 ÷ max over mean."""
    gain_ratio: float
    """Throughput over that of plain ECMP (one queue pair), if the uplinks are the bottleneck."""
    gain_with_headroom_ratio: float
    """The same if the uplinks together have 20 % more bandwidth than the ports below them."""


class Network(Estimate, kw_only=True, frozen=True):
    """Times of a collective, and the spread of its flows."""

    SCHEMA: ClassVar[str] = "chopper.estimate.network/3"

    topology: Topology
    collective: str
    ranks_count: int
    nodes_count: int
    times: tuple[Timed, ...]
    spreads: tuple[Spread, ...]


def bus_factor(collective: str, ranks_count: int) -> float:
    """Return nccl-tests' busbw ÷ algbw; algbw is S ÷ t with S the whole array for gathers too."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks_count - 1) / ranks_count


def collective_times_s(
    collective: str, size_bytes: float, ranks_count: int, topology: Topology
) -> dict[str, float]:
    """Return the time of one collective in seconds by each algorithm that it has.

    Ring: base + steps × latency + S × bus factor ÷ slowest link (in a node, or all ports of a node
    together); of the steps, those that cross nodes have the network's latency. An all-to-all has no
    ring: each rank sends S ÷ n to each other one, to those of other nodes through its own port, and
    to so many at once that their latencies are one. Tree (all-reduce, broadcast, reduce): double
    binary, chains within nodes, 2 log₂(nodes) network steps, and 2S (else S) through each link.
    Hierarchical (all-reduce): reduce-scatter in the node, ring all-reduce of S ÷ g between nodes,
    all-gather.
    """
    name = one_of("collective", collective, COLLECTIVES)
    between(size_bytes, 1, _MAX_BYTES, "size in bytes")
    between(ranks_count, 2, _MAX_RANKS, "ranks")
    n, per_node = ranks_count, topology.ranks_per_node_count
    if n > per_node and n % per_node:
        raise UsageError(f"ranks: {n} do not fill the nodes; give a multiple of {per_node}")
    nodes = max(1, n // per_node)
    group, crossing, both = n // nodes, nodes > 1, 2 if name == "all_reduce" else 1
    near_s, far_s = topology.node_latency_s, topology.network_latency_s
    near, far = topology.node_link_bytes_per_s, topology.network_link_bytes_per_s
    base_s = topology.base_latency_s
    if name == "all_to_all":
        each_s = math.ceil((n - 1) / _SENT_AT_ONCE_COUNT) * (far_s if crossing else near_s)
        inside, outside = (group - 1) / n * size_bytes / near, (n - group) / n * size_bytes / far
        return {"ring": base_s + each_s + max(inside, outside)}
    # As many rings (trees) as ranks in a node, each leaving through another one's port.
    slowest = min(near if n > nodes else math.inf, far * group if crossing else math.inf)
    apart = both * (nodes - 1)
    latency_s = (both * (n - 1) - apart) * near_s + apart * far_s
    times_s = {"ring": base_s + latency_s + size_bytes * bus_factor(name, n) / slowest}
    if name in ("all_reduce", "broadcast", "reduce"):
        latency_s = (group - 1) * near_s + math.ceil(math.log2(nodes)) * far_s
        times_s["tree"] = base_s + both * latency_s + both * size_bytes / slowest
    if name == "all_reduce":
        inside_s = (group - 1) * near_s + size_bytes * (group - 1) / group / near
        outside_s = 2 * (nodes - 1) * far_s + size_bytes / group * 2 * (nodes - 1) / nodes / far
        times_s["hierarchical"] = base_s + 2 * inside_s + outside_s
    return times_s


def ecmp(
    flows_count: int, uplinks_count: int, queue_pairs: tuple[int, ...] = (1, 4, 16)
) -> tuple[Spread, ...]:
    """Compare plain ECMP (one queue pair per flow) with E-ECMP (several).

    Flows × queue pairs are hashed onto the uplinks, uniformly; the fullest one decides.
    """
    even = np.full(uplinks_count, 1 / uplinks_count)
    fullest = {}  # queue pairs → max ÷ mean load of each draw, (draws,)
    for n in {1, *queue_pairs}:
        between(flows_count * n, 1, _MAX_PIECES, "flows × queue pairs")
        loads = np.random.default_rng(0).multinomial(flows_count * n, even, size=_DRAWS)
        fullest[n] = loads.max(1) / (flows_count * n / uplinks_count)

    def gain(count: int, headroom_ratio: float) -> float:
        plain, spread_out = (np.maximum(fullest[n], headroom_ratio).mean() for n in (1, count))
        return float(plain / spread_out)

    return tuple(
        Spread(
            flows_count=flows_count,
            queue_pairs_count=n,
            uplinks_count=uplinks_count,
            max_over_mean_ratio=float(fullest[n].mean()),
            throughput_ratio=1 / float(fullest[n].mean()),
            gain_ratio=gain(n, 1.0),
            gain_with_headroom_ratio=gain(n, _HEADROOM_RATIO),
        )
        for n in queue_pairs
    )


def estimate(options: Options) -> Network:
    """Return times of a collective, and the spread of flows."""
    topology, ranks = Topology(**options.topology), options.ranks_count
    name = one_of("collective", options.collective, COLLECTIVES)
    times = []
    for size in options.size_bytes:
        of_size = collective_times_s(name, size, ranks, topology)
        times += [
            Timed(
                size_bytes=size,
                algorithm=algorithm,
                time_s=time_s,
                algorithm_bytes_per_s=size / time_s,
                bus_bytes_per_s=size / time_s * bus_factor(name, ranks),
                fastest=algorithm == min(of_size, key=lambda a: of_size[a]),
            )
            for algorithm, time_s in of_size.items()
        ]
    return Network(
        assumptions=assumed("network"),
        topology=topology,
        collective=name,
        ranks_count=ranks,
        nodes_count=max(1, ranks // topology.ranks_per_node_count),
        times=tuple(times),
        spreads=ecmp(options.flows_count, topology.uplinks_count, options.queue_pairs_count),
    )


def page(result: Network) -> Page:
    """Return the page: times by size and algorithm, and uplinks."""
    name, ranks = result.collective, f"{result.ranks_count} ranks"
    best = max((t for t in result.times if t.fastest), key=lambda t: t.size_bytes)
    latency_s = collective_times_s(name, 1, result.ranks_count, result.topology)[best.algorithm]
    by = "latency" if latency_s > best.time_s / 2 else "bandwidth"
    most = max(result.spreads, key=lambda s: s.gain_ratio)
    plain_ratio = most.throughput_ratio / most.gain_ratio
    remedy = "other algorithms with --details, other links with --node-link and --network-link"
    longer = ""
    if by == "latency":
        remedy = "fewer, larger messages"
    elif result.nodes_count > 1 and plain_ratio < 1:
        longest_s = latency_s + (best.time_s - latency_s) / plain_ratio
        longer = f" – {fmt.duration(longest_s * 1e9)}"
        if most.gain_ratio > 1:
            remedy = (
                f"{most.queue_pairs_count} queue pairs for each flow: {most.gain_ratio:.2f}× of "
                "plain ECMP where uplinks limit"
            )
    times = listing(
        f"{name} over {ranks}, {fmt.plural(result.nodes_count, 'node')}",
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
    return estimate_page(
        result,
        title="Network",
        headline=f"{name} of {fmt.bytes_(best.size_bytes)} over {ranks}: "
        f"{fmt.duration(best.time_s * 1e9)}{longer} by {best.algorithm}.",
        limit=f"{by}; {fmt.duration(latency_s * 1e9)} is latency, and busbw "
        f"{fmt.rate(best.bus_bytes_per_s)}",
        assumes=f"nothing else on the links{longer and '; the longer time: flows that collide'}",
        remedy=remedy,
        facts=(),
        sections=(times, _uplinks(result.spreads)),
    )


def _uplinks(spreads: tuple[Spread, ...]) -> Section:
    return listing(
        "Flows hashed onto uplinks",
        spreads,
        {
            "flows": "flows_count",
            "queue pairs": "queue_pairs_count",
            "uplinks": "uplinks_count",
            "max ÷ mean": lambda s: f"{s.max_over_mean_ratio:.2f}",
            "of even": "throughput_ratio",
            "gain": lambda s: f"{s.gain_ratio:.2f}×",
            "with room": lambda s: f"{s.gain_with_headroom_ratio:.2f}×",
        },
        words=0,
        note="one queue pair is plain ECMP; gain: throughput against it, if uplinks are the "
        f"bottleneck; with room: if they have {fmt.percent(_HEADROOM_RATIO - 1, '.0f')} more "
        "bandwidth than the ports; published of E-ECMP: up to 40 % on an AllReduce benchmark",
    )
