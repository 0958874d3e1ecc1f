"""Collectives over a network: α-β times, how hashing spreads flows, and what an interconnect costs.

α-β: a collective of S bytes takes base + steps × latency + bytes on the slowest link ÷ its rate
(ring and tree as NCCL's Simple protocol). ECMP: flows are hashed onto uplinks, and the fullest one
decides; E-ECMP hashes queue pairs instead, of which each flow has several (Gangidi et al., "RDMA
over Ethernet for distributed AI training at Meta scale", SIGCOMM 2024).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
import numpy as np

from chopper.analyzers.estimates import Estimate, Option, assumed
from chopper.analyzers.estimates.flows import Simulated, check_counts, simulate, too_many
from chopper.errors import UsageError
from chopper.quantities import between, one_of, positive

Collective = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"
]
Algorithm = Literal["ring", "tree", "hierarchical"]


_MOST_RANKS = 10**7


class Topology(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Nodes of some ranks, links within and between them; rates are of one direction, per rank.

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
        """Refuse what is not positive, or no network's."""
        for suffix, least, most in (
            ("_count", 1, _MOST_RANKS),
            ("_bytes_per_s", 1, 1e18),
            ("_latency_s", 1e-12, 3600),
        ):
            for name in self.__struct_fields__:
                if name.endswith(suffix):
                    between(getattr(self, name), least, most, f"topology: {name}")


HGX_H100 = Topology()


def bus_factor(collective: str, ranks_count: int) -> float:
    """nccl-tests: busbw = algbw × this; algbw = S ÷ t, with S the whole array for gathers too."""
    between(ranks_count, 2, _MOST_RANKS, "ranks")
    name = one_of("collective", collective, get_args(Collective))
    n = ranks_count
    if name == "all_reduce":
        return 2 * (n - 1) / n
    return 1.0 if name in ("broadcast", "reduce") else (n - 1) / n


def _nodes(ranks_count: int, topology: Topology) -> int:
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
    """Steps one after the other: 2(n−1) for all-reduce, else n−1."""
    return (2 if collective == "all_reduce" else 1) * (ranks_count - 1)


def algorithms_of(collective: str) -> tuple[str, ...]:
    """Algorithms that a collective has."""
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
    between(ranks_count, 2, _MOST_RANKS, "ranks")
    n, nodes = ranks_count, _nodes(ranks_count, topology)
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
    """Load of the uplinks by hashing, mean over trials."""

    flows_count: int
    queue_pairs_count: int
    uplinks_count: int
    failed_count: int
    max_over_mean_ratio: float
    """Load of the fullest uplink over what each would carry if all of them worked and shared
    evenly."""
    standard_error_ratio: float
    p95_ratio: float
    throughput_ratio: float
    """Of what even sharing would give: 1 ÷ max over mean."""
    gain_ratio: float
    """Times the throughput of plain ECMP (one queue pair), failures alike."""


def spread(
    flows_count: int,
    queue_pairs_count: int,
    uplinks_count: int,
    *,
    failed_count: int = 0,
    trials_count: int = 4000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Hash flows × queue pairs onto the working uplinks, uniformly; the fullest one decides.

    A failed uplink's queue pairs are hashed onto the others.

    Returns:
        Mean of max ÷ mean, its standard error, and the 95th percentile, over trials.
    """
    check_counts(
        failed_count,
        uplinks_count,
        flows=flows_count,
        queue_pairs=queue_pairs_count,
        trials=trials_count,
    )
    if seed < 0:
        raise UsageError(f"seed: found {seed}, expected 0 or more")
    pieces = flows_count * queue_pairs_count
    for name, value, most in (
        ("flows × queue pairs", pieces, 10**9),
        ("uplinks × trials", uplinks_count * trials_count, 10**8),
    ):
        if value > most:
            raise UsageError(
                f"{name}: {value:.3g} are more than can be simulated, at most {most:.0e}"
            )
    working = uplinks_count - failed_count
    loads = np.random.default_rng(seed).multinomial(
        pieces, np.full(working, 1 / working), size=trials_count
    )
    fullest = loads.max(1) / (pieces / uplinks_count)
    error = float(fullest.std() / np.sqrt(trials_count))
    return float(fullest.mean()), error, float(np.quantile(fullest, 0.95))


def ecmp(
    flows_count: int,
    uplinks_count: int,
    queue_pairs: tuple[int, ...] = (1, 4, 16),
    *,
    failed_count: int = 0,
    trials_count: int = 4000,
    seed: int = 0,
) -> tuple[Spread, ...]:
    """Compare plain ECMP (one queue pair per flow) with E-ECMP (several).

    Raises:
        UsageError: as :func:`spread`.
    """
    options = {"failed_count": failed_count, "trials_count": trials_count, "seed": seed}
    by_count = {
        count: spread(flows_count, count, uplinks_count, **options) for count in (1, *queue_pairs)
    }
    return tuple(
        Spread(
            flows_count=flows_count,
            queue_pairs_count=count,
            uplinks_count=uplinks_count,
            failed_count=failed_count,
            max_over_mean_ratio=by_count[count][0],
            standard_error_ratio=by_count[count][1],
            p95_ratio=by_count[count][2],
            throughput_ratio=1 / by_count[count][0],
            gain_ratio=by_count[1][0] / by_count[count][0],
        )
        for count in queue_pairs
    )


class Incast(msgspec.Struct, kw_only=True, frozen=True):
    """Many senders to one receiver, with and without receiver-driven admission."""

    senders_count: int
    admitted_count: int
    """At once; as many as senders: no admission."""
    finish_s: float
    peak_queue_bytes: int
    paused_ratio: float
    """Share of the time that upstream ports are paused by PFC, and all that shares them with it."""


_BUFFER_BYTES, _CHANNEL_BYTES = 2**20, 2**18
"""Of the switch's port, and of what a receiver admits at a time."""
_ROUND_TRIP_S = 10e-6


def incast(
    senders_count: int,
    message_bytes: float,
    *,
    link_bytes_per_s: float = 50e9,
    admitted_count: int | None = None,
) -> Incast:
    """Fluid model of an incast: all links alike, the receiver's is the bottleneck.

    Without admission every sender sends at line rate: the queue at the last switch grows by
    (N − 1)·B until the buffer makes PFC pause the ports above, which then run 1/N of the time. With
    admission the receiver grants as many senders as it has channel buffers, and what is under way
    is at most channels × their size. Either way the messages take N·M/B; a single channel waits
    a round trip per grant.
    """
    between(senders_count, 1, _MOST_RANKS, "senders")
    positive(message_bytes, "message")
    positive(link_bytes_per_s, "link")
    at_once = senders_count if admitted_count is None else min(admitted_count, senders_count)
    positive(at_once, "admitted senders")
    finish_s = senders_count * message_bytes / link_bytes_per_s
    limited = admitted_count is not None and at_once < senders_count
    if limited and at_once * _CHANNEL_BYTES < link_bytes_per_s * _ROUND_TRIP_S:
        # Too few grants to cover the round trip: the link idles between them.
        finish_s *= link_bytes_per_s * _ROUND_TRIP_S / (at_once * _CHANNEL_BYTES)
    under_way = min(_CHANNEL_BYTES, message_bytes) if limited else message_bytes
    wanted = (at_once - 1) * under_way
    full = wanted > _BUFFER_BYTES
    filling_s = _BUFFER_BYTES / ((at_once - 1) * link_bytes_per_s) if full else 0.0
    paused = (1 - 1 / at_once) * max(0.0, 1 - filling_s / finish_s) if full else 0.0
    return Incast(
        senders_count=senders_count,
        admitted_count=at_once,
        finish_s=finish_s,
        peak_queue_bytes=int(min(wanted, _BUFFER_BYTES)),
        paused_ratio=paused,
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
    """Published fine-tuning of 12 B parameters on two nodes of 8 GPUs: V = 2(n−1)/n × 2 B × N."""
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

    SCHEMA: ClassVar[str] = "chopper.estimate.network/1"

    topology: Topology
    collective: str
    ranks_count: int
    nodes_count: int
    times: tuple[Timed, ...]
    spreads: tuple[Spread, ...]
    simulations: tuple[Simulated, ...]
    """The same flows from first to last byte: as they are, with room on the uplinks, with uplinks
    that fail half way, and many to a receiver without and with admission; none where they are too
    many to simulate."""
    incasts: tuple[Incast, ...]
    interconnects: tuple[Interconnect, ...]


SIZES_BYTES = tuple(4**k for k in range(5, 17))
"""1 KiB … 4 GiB."""


HEADROOM_RATIO = 1.2
FLOWS_PER_RECEIVER_COUNT = 8
ADMITTED_COUNT = 4
_INCAST_TRIALS = 16
"""Receivers' ports bound these, whatever the hash: they scatter less, and take longer."""


def _simulations(
    flows: int, uplinks: int, queue_pairs: tuple[int, ...], failed: int, seed: int
) -> tuple[Simulated, ...]:
    if too_many(flows, queue_pairs, uplinks):
        return ()
    receivers = max(1, flows // FLOWS_PER_RECEIVER_COUNT)
    incast = {"receivers_count": receivers, "trials_count": _INCAST_TRIALS}
    ways: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (queue_pairs, {}),
        (tuple(dict.fromkeys((1, queue_pairs[-1]))), {"headroom_ratio": HEADROOM_RATIO}),
    ]
    if uplinks > 1:
        ways.append((queue_pairs, {"failed_count": failed or 1}))
    if receivers < flows:
        ways.append((queue_pairs[-1:], incast))
        ways.append((queue_pairs[-1:], {**incast, "admitted_count": ADMITTED_COUNT}))
    return tuple(
        result
        for counts, options in ways
        for result in simulate(flows, uplinks, counts, seed=seed, **options)
    )


def network(
    *,
    collective: str = "all_reduce",
    ranks_count: int = 16,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    algorithms: tuple[str, ...] | None = None,
    topology: Topology = HGX_H100,
    flows_count: int = 128,
    queue_pairs: tuple[int, ...] = (1, 4, 16),
    failed_count: int = 0,
    senders_count: int = 32,
    trials_count: int = 4000,
    seed: int = 0,
) -> Network:
    """Return times, spread and incast of one collective on one network.

    Raises:
        UsageError: unknown names, or sizes that make no sense.
    """
    name = one_of("collective", collective, get_args(Collective))
    chosen = algorithms or algorithms_of(name)
    times = []
    for size in sizes_bytes:
        of_size = {a: collective_time_s(name, size, ranks_count, topology, a) for a in chosen}
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
    message = max(sizes_bytes) / ranks_count
    rate = topology.network_link_bytes_per_s
    return Network(
        assumptions=assumed("network"),
        topology=topology,
        collective=name,
        ranks_count=ranks_count,
        nodes_count=_nodes(ranks_count, topology),
        times=tuple(times),
        spreads=ecmp(
            flows_count,
            topology.uplinks_count,
            queue_pairs,
            failed_count=failed_count,
            trials_count=trials_count,
            seed=seed,
        ),
        simulations=_simulations(
            flows_count, topology.uplinks_count, queue_pairs, failed_count, seed
        ),
        incasts=(
            incast(senders_count, message, link_bytes_per_s=rate),
            incast(senders_count, message, link_bytes_per_s=rate, admitted_count=4),
        ),
        interconnects=interconnect_table(),
    )
