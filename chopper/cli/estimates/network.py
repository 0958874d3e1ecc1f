"""Collectives by size and algorithm, flows on uplinks, interconnects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from chopper.analyzers.estimates import Option, OptionsOf
from chopper.analyzers.estimates.network import SIZES_BYTES, Network, Topology, network
from chopper.cli import _options
from chopper.errors import JSON_ERRORS, InputError, UsageError
from chopper.reports.estimates.network import page
from chopper.storage.files import read_bytes

__all__ = ["Options", "estimate", "page"]


class Options(_options.Options, kw_only=True, frozen=True):
    """Show how long a collective takes on a network, and how its flows share the uplinks.

    Times are α-β for ring, tree and hierarchical algorithms; flows × queue pairs are hashed onto
    uplinks as ECMP and E-ECMP do; an incast is shown with and without admission by the receiver.

    \b
    Examples:
      chopper estimate network --ranks 1024 --size 1GiB
      chopper estimate network --flows 64 --uplinks 16 --failed 2
      chopper estimate network --topology cluster.json --collective all_gather --json
    """

    collective: Annotated[str, Option("As nccl-tests name it.")] = "all_reduce"
    ranks_count: Annotated[int, Option("Ranks that take part.")] = 16
    size_bytes: Annotated[
        tuple[int, ...], Option("May be repeated.  [default: 1 KiB to 4 GiB]")
    ] = SIZES_BYTES
    algorithm: Annotated[
        tuple[str, ...], Option("ring, tree or hierarchical.  [default: all]")
    ] = ()
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
    flows_count: Annotated[int, Option("Flows on the uplinks.")] = 128
    queue_pairs_count: Annotated[tuple[int, ...], Option("Of each flow; may be repeated.")] = (
        1,
        4,
        16,
    )
    failed: Annotated[int, Option("Uplinks that failed.")] = 0
    senders_count: Annotated[int, Option("Of the incast.")] = 32
    trials_count: Annotated[int, Option("Of the hashing.")] = 4000
    seed: Annotated[int, Option("Of the hashing.")] = 0


def estimate(options: Options) -> Network:
    """Return times of a collective, the spread of flows, and the interconnect table."""
    options.contradict("file", "calibrated")
    if max(options.size_bytes) > 2**60:
        raise UsageError("--size: more than 1 EiB is not a message")
    return network(
        collective=options.collective,
        ranks_count=options.ranks_count,
        sizes_bytes=options.size_bytes,
        algorithms=options.algorithm or None,
        topology=_topology(options),
        flows_count=options.flows_count,
        queue_pairs=options.queue_pairs_count,
        failed_count=options.failed,
        senders_count=options.senders_count,
        trials_count=options.trials_count,
        seed=options.seed,
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
