"""Which addresses processes listen on."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable

import psutil


def listening_addresses(processes: Iterable[psutil.Process]) -> list[str]:
    """Addresses and ports of the sockets on which processes listen, over TCP."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [
                f"{connection.laddr.ip} {connection.laddr.port}"
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
    return found


def reachable_from_outside(addresses: Iterable[str]) -> list[str]:
    """Those of them that are not the loopback's."""
    found = []
    for address in addresses:
        ip = ipaddress.ip_address(address.split()[0])
        mapped = getattr(ip, "ipv4_mapped", None)
        if not (mapped or ip).is_loopback:
            found.append(address)
    return found
