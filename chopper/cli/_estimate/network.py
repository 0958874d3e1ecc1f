"""``chopper estimate network``: collectives by α-β, flows on uplinks, interconnects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.cli._estimate.common import COUNT, RATE, SIZE, TIME, check, contradict, show, shown
from chopper.cli._path import NamedPath
from chopper.errors import InputError, UsageError
from chopper.storage.files import JSON_ERRORS, read_bytes

if TYPE_CHECKING:
    from chopper.analyzers.estimates.network import Topology


@click.command("network", short_help="Collectives and flows over a network.")
@click.option(
    "--collective", default="all_reduce", show_default=True, help="As nccl-tests name it."
)
@click.option("--ranks", type=COUNT, default="16", show_default=True, help="Ranks that take part.")
@click.option(
    "--size", "sizes", type=SIZE, multiple=True, help="May be repeated.  [default: 1 KiB to 4 GiB]"
)
@click.option(
    "--algorithm", "algorithms", multiple=True, help="ring, tree or hierarchical.  [default: all]"
)
@click.option(
    "--topology",
    type=NamedPath(),
    metavar="FILE",
    help="A described network, .json or .yaml; options below override its fields.",
)
@click.option(
    "--calibrated", is_flag=True, help="Links as chopper calibrate measured them on this machine."
)
@click.option("--ranks-per-node", type=COUNT, help="Ranks of one node.  [default: 8]")
@click.option("--node-link", type=RATE, help="One direction, per rank.  [default: 450GB/s]")
@click.option("--node-latency", type=TIME, help="Of one step in a node.  [default: 3.4us]")
@click.option("--network-link", type=RATE, help="One direction, per rank.  [default: 50GB/s]")
@click.option("--network-latency", type=TIME, help="Of one step between nodes.  [default: 9.6us]")
@click.option("--uplinks", type=COUNT, help="That flows are spread over.  [default: 16]")
@click.option("--flows", type=COUNT, default="128", show_default=True, help="Flows on the uplinks.")
@click.option(
    "--queue-pairs",
    type=COUNT,
    multiple=True,
    default=("1", "4", "16"),
    show_default=True,
    help="Of each flow; may be repeated.",
)
@click.option(
    "--failed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Uplinks that failed.",
)
@click.option("--senders", type=COUNT, default="32", show_default=True, help="Of the incast.")
@click.option("--trials", type=COUNT, default="4000", show_default=True, help="Of the hashing.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the hashing.")
@shown
def command(
    sizes: tuple[int, ...],
    topology: Path | None,
    calibrated: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Show how long a collective takes on a network, and how its flows share the uplinks.

    Times are α-β for ring, tree and hierarchical algorithms; flows × queue pairs are hashed onto
    uplinks as ECMP and E-ECMP do; an incast is shown with and without admission by the receiver.

    \b
    Examples:
      chopper estimate network --ranks 1024 --size 1GiB
      chopper estimate network --flows 64 --uplinks 16 --failed 2
      chopper estimate network --topology cluster.json --collective all_gather --json
    """
    from chopper.analyzers.estimates.network import SIZES_BYTES, network
    from chopper.reports.estimates.network import page

    check(output, force=force)
    contradict("topology", "calibrated")
    if len(sizes) and max(sizes) > 2**60:
        raise UsageError("--size: more than 1 EiB is not a message")
    found = network(
        collective=options["collective"],
        ranks_count=options["ranks"],
        sizes_bytes=sizes or SIZES_BYTES,
        algorithms=options["algorithms"] or None,
        topology=_topology(topology, calibrated, options),
        flows_count=options["flows"],
        queue_pairs=tuple(options["queue_pairs"]),
        failed_count=options["failed"],
        senders_count=options["senders"],
        trials_count=options["trials"],
        seed=options["seed"],
    )
    show(found, page, as_json=as_json, output=output)


_FIELDS = {
    "ranks_per_node": "ranks_per_node_count",
    "node_link": "node_link_bytes_per_s",
    "node_latency": "node_latency_s",
    "network_link": "network_link_bytes_per_s",
    "network_latency": "network_latency_s",
    "uplinks": "uplinks_count",
}


def _topology(file: Path | None, calibrated: bool, options: dict[str, Any]) -> Topology:
    import msgspec

    from chopper.analyzers.estimates.network import Topology

    found = Topology()
    if file is not None:
        found = read_topology(file)
    elif calibrated:
        found = calibrated_topology()
    given = {field: options[o] for o, field in _FIELDS.items() if options[o] is not None}
    if given:
        source = f"{found.source}; given: {', '.join(given)}"
        found = msgspec.structs.replace(found, **given, source=source)
    return found


def read_topology(file: Path) -> Topology:
    """A network described in JSON or YAML, by the fields of Topology; numbers in SI units.

    Raises:
        InputError: it cannot be read, or a field is unknown or wrong.
    """
    import msgspec

    from chopper.analyzers.estimates.network import Topology

    data = read_bytes(file)
    try:
        if file.suffix.lower() in (".yaml", ".yml"):
            found = msgspec.yaml.decode(data, type=Topology)
        else:
            found = msgspec.json.decode(data, type=Topology)
    except ImportError as exc:
        raise InputError(f"{file}: YAML needs pyyaml; install it, or write JSON") from exc
    except (*JSON_ERRORS, UsageError) as exc:
        known = ", ".join(Topology.__struct_fields__)
        raise InputError(f"{file}: {exc}; a network has the fields {known}") from exc
    described = msgspec.structs.replace(found, source=f"described in {file.name}")
    return described if found.source == Topology().source else found


def calibrated_topology() -> Topology:
    """Links of this machine as measured; the network between nodes stays as it is by default.

    Raises:
        UsageError: nothing was measured here.
    """
    import socket

    from chopper.analyzers.estimates.network import Topology
    from chopper.hardware import calibration

    here = socket.gethostname()
    stored = [
        c
        for c in calibration.load_all()
        if c.hostname == here and c.link_bytes_per_s and c.link_ranks
    ]
    if not stored:
        raise UsageError(
            "--calibrated: no link was measured here; run: chopper calibrate --ranks 2"
        )
    best = stored[0]
    return Topology(
        ranks_per_node_count=best.link_ranks or 1,
        node_link_bytes_per_s=best.link_bytes_per_s or 0.0,
        node_latency_s=(best.roundtrip_ns or 3400) / 1e9,
        source=f"{best.source}; network between nodes as by default",
    )
