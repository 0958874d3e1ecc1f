"""Collectives over a network: α-β times, how hashing spreads flows, and what an interconnect costs.

α-β: a collective of S bytes takes base + steps × latency + bytes on the slowest link ÷ its rate
(ring and tree as NCCL's Simple protocol). ECMP: flows are hashed onto uplinks, and the fullest one
decides; E-ECMP hashes queue pairs instead, of which each flow has several (Gangidi et al., "RDMA
over Ethernet for distributed AI training at Meta scale", SIGCOMM 2024).
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
import numpy as np

from chopper.analyzers.estimates import Estimate, Option, assumed
from chopper.errors import UsageError
from chopper.quantities import between, one_of, positive

Collective = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"
]
Algorithm = Literal["ring", "tree", "hierarchical"]


_MAX_RANKS = 10**7
_MAX_UPLINKS = 25_000


class Topology(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Nodes with their ranks and links; rates are per rank and of one direction.

    The defaults are HGX H100 with one 400 Gb/s port per GPU; latencies are NCCL's Simple ring's.
    """

    ranks_per_node_count: Annotated[int, Option("Ranks of one node.")] = 8
    node_link_bytes_per_s: Annotated[
        float, Option("Links of a rank in its node, one direction.")
    ] = 450e9
    node_latency_s: Annotated[
        float, Option("Latency of one step within a node; 5.7us over PCIe.")
    ] = 3.4e-6
    network_link_bytes_per_s: Annotated[float, Option("Network per rank, one direction.")] = 50e9
    network_latency_s: Annotated[float, Option("Latency of one step between nodes.")] = 9.6e-6
    base_latency_s: float = 8.4e-6
    """Of any collective."""
    uplinks_count: Annotated[
        int, Option("Uplinks of a switch, over which its hosts' flows are spread.")
    ] = 16
    source: str = "HGX H100, 400 Gb/s per GPU: datasheet rates, NCCL's latencies"

    def __post_init__(self) -> None:
        """Raise UsageError, which names the field, for an impossible network."""
        for suffix, least, most in (
            ("_node_count", 1, _MAX_RANKS),
            ("uplinks_count", 1, _MAX_UPLINKS),
            ("_bytes_per_s", 1, 1e18),
            ("_latency_s", 1e-12, 3600),
        ):
            for name in self.__struct_fields__:
                if name.endswith(suffix):
                    between(getattr(self, name), least, most, f"topology: {name}")


HGX_H100 = Topology()


def bus_factor(collective: str, ranks_count: int) -> float:
    """Return nccl-tests' bus factor: busbw = algbw × factor.

    algbw = S ÷ t, where S is the whole array for gathers too.
    """
    between(ranks_count, 2, _MAX_RANKS, "ranks")
    name = one_of("collective", collective, get_args(Collective))
    n = ranks_count
    if name == "all_reduce":
        return 2 * (n - 1) / n
    return 1.0 if name in ("broadcast", "reduce") else (n - 1) / n


def nodes_of(ranks_count: int, topology: Topology) -> int:
    """Return the number of nodes; raise UsageError if the ranks do not fill them."""
    per_node = topology.ranks_per_node_count
    if ranks_count > per_node and ranks_count % per_node:
        raise UsageError(
            f"ranks: {ranks_count} do not fill nodes of {per_node}; give a multiple of {per_node}"
        )
    return max(1, ranks_count // per_node)


_SENT_AT_ONCE_COUNT = 64
"""Peers of an all-to-all that NCCL serves at once: a batch of a channel holds 8 sends
(NCCL_MAX_DEV_WORK_P2P_PER_BATCH) and peers go round the channels (ncclP2pChannelBaseForRound). Its
logs have 8 to 16 such channels, 1 or 2 of them for each peer (issues 634 and 1189): 32 to 128, this
is between."""


def ring_steps(collective: str, ranks_count: int) -> int:
    """Return the number of sequential steps: 2(n−1) for all-reduce, else n−1."""
    return (2 if collective == "all_reduce" else 1) * (ranks_count - 1)


def algorithms_of(collective: str) -> tuple[str, ...]:
    """Return the algorithms that a collective has."""
    if collective == "all_reduce":
        return get_args(Algorithm)
    return ("ring", "tree") if collective in ("broadcast", "reduce") else ("ring",)


def collective_time_s(
    collective: str,
    size_bytes: float,
    ranks_count: int,
    topology: Topology = HGX_H100,
    algorithm: str = "ring",
) -> float:
    """Return the time of one collective in seconds.

    Ring: base + steps × latency + S × bus factor ÷ slowest link (in a node, or all ports of a node
    together); of the steps, those that cross nodes have the network's latency. An all-to-all has no
    ring: each rank sends S ÷ n to each other one, to those of other nodes through its own port, and
    to so many at once that their latencies are one. Tree
    (all-reduce, broadcast, reduce): double binary, chains within nodes, 2 log₂(nodes) network
    steps, and 2S (else S) through each link. Hierarchical (all-reduce): reduce-scatter in the node,
    ring all-reduce of S ÷ g between nodes, all-gather.

    Raises:
        UsageError: unknown names, sizes or ranks that make no sense, an algorithm that the
            collective does not have.
    """
    name = one_of("collective", collective, get_args(Collective))
    kind = one_of("algorithm", algorithm, get_args(Algorithm))
    if kind not in algorithms_of(name):
        known = " and ".join(algorithms_of(name))
        raise UsageError(f"algorithm {kind}: not of {name}, which has {known}")
    positive(size_bytes, "size")
    between(ranks_count, 2, _MAX_RANKS, "ranks")
    n, nodes = ranks_count, nodes_of(ranks_count, topology)
    group, crossing, both = n // nodes, nodes > 1, 2 if name == "all_reduce" else 1
    near_s, far_s = topology.node_latency_s, topology.network_latency_s
    near, far = topology.node_link_bytes_per_s, topology.network_link_bytes_per_s
    # As many rings (trees) as ranks in a node, each leaving through another one's port.
    slowest = min(near if n > nodes else np.inf, far * group if crossing else np.inf)
    base_s = topology.base_latency_s
    if name == "all_to_all":
        each_s = math.ceil((n - 1) / _SENT_AT_ONCE_COUNT) * (far_s if crossing else near_s)
        inside, outside = (group - 1) / n * size_bytes / near, (n - group) / n * size_bytes / far
        return base_s + each_s + max(inside, outside)
    if kind == "ring":
        apart = both * (nodes - 1)
        latency_s = (ring_steps(name, n) - apart) * near_s + apart * far_s
        return base_s + latency_s + size_bytes * bus_factor(name, n) / slowest
    if kind == "tree":
        latency_s = (group - 1) * near_s + np.ceil(np.log2(nodes)) * far_s
        return float(base_s + both * latency_s + both * size_bytes / slowest)
    inside_s = (group - 1) * near_s + size_bytes * (group - 1) / group / near
    outside_s = 2 * (nodes - 1) * far_s + size_bytes / group * 2 * (nodes - 1) / nodes / far
    return base_s + 2 * inside_s + outside_s


class Timed(msgspec.Struct, kw_only=True, frozen=True):
    """One collective of one size by one algorithm."""

    size_bytes: int
    algorithm: str
    time_s: float
    algorithm_bytes_per_s: float
    """nccl-tests' algbw."""
    bus_bytes_per_s: float
    """nccl-tests' busbw."""
    fastest: bool


class Spread(msgspec.Struct, kw_only=True, frozen=True):
    """Load of the uplinks by hashing, mean over draws."""

    flows_count: int
    queue_pairs_count: int
    uplinks_count: int
    max_over_mean_ratio: float
    """Load of the fullest uplink over the mean load."""
    standard_error_ratio: float
    p95_ratio: float
    throughput_ratio: float
    """Relative to even sharing: 1 ÷ max over mean."""
    gain_ratio: float
    """Throughput over that of plain ECMP (one queue pair), if the uplinks are the bottleneck."""
    gain_with_headroom_ratio: float
    """The same if the uplinks together have 20 % more bandwidth than the ports below them."""


HEADROOM_RATIO = 1.2
_DRAWS = 4000
_MAX_PIECES = 10**9


def _fullest_over_mean(pieces: int, uplinks_count: int) -> np.ndarray:
    """Hash flows or queue pairs onto uplinks; return max ÷ mean load of each draw, (draws,)."""
    if pieces > _MAX_PIECES:
        raise UsageError(
            f"flows × queue pairs: {pieces:.3g} are more than can be drawn, at most "
            f"{_MAX_PIECES:.0e}"
        )
    even = np.full(uplinks_count, 1 / uplinks_count)
    loads = np.random.default_rng(0).multinomial(pieces, even, size=_DRAWS)
    return np.asarray(loads.max(1) / (pieces / uplinks_count))


def ecmp(
    flows_count: int, uplinks_count: int, queue_pairs: tuple[int, ...] = (1, 4, 16)
) -> tuple[Spread, ...]:
    """Compare plain ECMP (one queue pair per flow) with E-ECMP (several).

    Flows × queue pairs are hashed onto the uplinks, uniformly; the fullest one decides.

    Raises:
        UsageError: a count below 1, or more than can be drawn.
    """
    between(flows_count, 1, _MAX_PIECES, "flows")
    between(min(queue_pairs), 1, _MAX_PIECES, "queue pairs")
    between(uplinks_count, 1, _MAX_UPLINKS, "uplinks")
    fullest = {n: _fullest_over_mean(flows_count * n, uplinks_count) for n in {1, *queue_pairs}}

    def gain(count: int, headroom_ratio: float) -> float:
        plain, spread_out = (np.maximum(fullest[n], headroom_ratio).mean() for n in (1, count))
        return float(plain / spread_out)

    return tuple(
        Spread(
            flows_count=flows_count,
            queue_pairs_count=n,
            uplinks_count=uplinks_count,
            max_over_mean_ratio=float(fullest[n].mean()),
            standard_error_ratio=float(fullest[n].std() / np.sqrt(_DRAWS)),
            p95_ratio=float(np.quantile(fullest[n], 0.95)),
            throughput_ratio=1 / float(fullest[n].mean()),
            gain_ratio=gain(n, 1.0),
            gain_with_headroom_ratio=gain(n, HEADROOM_RATIO),
        )
        for n in queue_pairs
    )


class Interconnect(msgspec.Struct, kw_only=True, frozen=True):
    """Step time over one interconnect: T = T_c + V ÷ B."""

    name: str
    node_bytes_per_s: float
    """All ports of a node together, one direction."""
    step_s: float
    communication_s: float
    published_s: float
    """Published step time."""


INTERCONNECTS = (("10 GbE", 1.25e9, 39.8), ("8 × 400 Gb/s InfiniBand", 400e9, 4.4))
COMPUTE_S = 4.29
"""Fitted: what is left of 4.4 s without communication."""
TABLE_PARAMETERS_COUNT = 12_000_000_000
TABLE_RANKS_COUNT = 16


def interconnect_table() -> tuple[Interconnect, ...]:
    """Return the published fine-tuning of 12 B parameters on two nodes of 8 GPUs.

    V = 2(n−1)/n × 2 B × N.
    """
    volume = bus_factor("all_reduce", TABLE_RANKS_COUNT) * 2 * TABLE_PARAMETERS_COUNT
    return tuple(
        Interconnect(
            name=name,
            node_bytes_per_s=rate,
            communication_s=volume / rate,
            step_s=COMPUTE_S + volume / rate,
            published_s=published,
        )
        for name, rate, published in INTERCONNECTS
    )


class Network(Estimate, kw_only=True, frozen=True):
    """Times of a collective, the spread of its flows, and the interconnect table."""

    SCHEMA: ClassVar[str] = "chopper.estimate.network/2"

    topology: Topology
    collective: str
    ranks_count: int
    nodes_count: int
    times: tuple[Timed, ...]
    spreads: tuple[Spread, ...]
    interconnects: tuple[Interconnect, ...]


SIZES_BYTES = tuple(4**k for k in range(5, 17))
"""1 KiB … 4 GiB."""


def network(
    *,
    collective: str = "all_reduce",
    ranks_count: int = 16,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    topology: Topology = HGX_H100,
    flows_count: int = 128,
    queue_pairs: tuple[int, ...] = (1, 4, 16),
) -> Network:
    """Return times of one collective on one network, the spread of flows, and interconnects.

    Raises:
        UsageError: unknown names, or sizes that make no sense.
    """
    name = one_of("collective", collective, get_args(Collective))
    times = []
    for size in sizes_bytes:
        of_size = {
            algorithm: collective_time_s(name, size, ranks_count, topology, algorithm)
            for algorithm in algorithms_of(name)
        }
        best = min(of_size, key=lambda a: of_size[a])
        times += [
            Timed(
                size_bytes=size,
                algorithm=a,
                time_s=t,
                algorithm_bytes_per_s=size / t,
                bus_bytes_per_s=size / t * bus_factor(name, ranks_count),
                fastest=a == best,
            )
            for a, t in of_size.items()
        ]
    return Network(
        assumptions=assumed("network"),
        topology=topology,
        collective=name,
        ranks_count=ranks_count,
        nodes_count=nodes_of(ranks_count, topology),
        times=tuple(times),
        spreads=ecmp(flows_count, topology.uplinks_count, queue_pairs),
        interconnects=interconnect_table(),
    )
