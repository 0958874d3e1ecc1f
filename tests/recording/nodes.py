"""Two nodes of one job on this machine: network namespaces, each with a host name of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""From the block that is set aside for documentation (RFC 5737)."""
INTERFACE = "node0"


class Node:
    """A network namespace with one end of a link.

    Attributes:
        name: of the namespace and of the host.
        address: on the link.
        hosts: file of the names of both.
    """

    def __init__(self, name: str, address: str, hosts: Path) -> None:
        self.name, self.address, self.hosts = name, address, hosts
        _ip("netns", "add", name)

    def connect(self) -> None:
        """Bring this end of the link up."""
        for arguments in (
            ("address", "add", f"{self.address}/30", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.name, *arguments)

    def popen(
        self, command: Sequence[str | Path], cwd: Path, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command on this node."""
        own = {k: v for k, v in os.environ.items() if not k.startswith("CHOPPER_")}
        own |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", **environment}
        # torchrun looks the host's own name up.
        named = f'hostname {self.name} && mount --bind {self.hosts} /etc/hosts && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", named, "sh", *map(str, command)]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *inside],
            cwd=cwd,
            env=own,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes(directory: Path) -> Iterator[tuple[Node, Node]]:
    """Make two nodes that a link joins; all is gone afterwards."""
    with contextlib.ExitStack() as held:
        nodes: list[Node] = []
        names = [f"chopper-{os.getpid()}-{number}" for number in range(2)]
        hosts = directory / "hosts"
        pairs = [*zip(ADDRESSES, names, strict=True), ("127.0.0.1", "localhost")]
        hosts.write_text("".join(f"{address} {name}\n" for address, name in pairs))
        for name, address in zip(names, ADDRESSES, strict=True):
            nodes.append(Node(name, address, hosts))
            held.callback(_ip, "netns", "delete", nodes[-1].name)
        ends = ("link", "add", INTERFACE, "netns", nodes[0].name, "type", "veth")
        _ip(*ends, "peer", "name", INTERFACE, "netns", nodes[1].name)
        for node in nodes:
            node.connect()
        yield nodes[0], nodes[1]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    """Wait for commands: exit code, standard output and error of each."""
    results = []
    for process in processes:
        with process:
            out, err = process.communicate(timeout=PATIENCE_S)
        results.append((process.returncode, out, err))
    return results
