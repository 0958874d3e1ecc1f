"""A link between two processes that can be shaped, and that is gone when they are.

Each rank puts itself into a network namespace of its own, and the process that started them joins
the two by a veth pair. Nothing is named in the file system and nothing is held by another process:
the kernel removes namespaces, link and queue with the last process in them, however that ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import socket
import subprocess

from chopper.experiments.declarations import Option

INTERFACE = "link0"
ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""Addresses of rank 0 and rank 1, from the block that is set aside for documentation (RFC 5737)."""
RATES: dict[str, int | None] = {
    "unshaped": None,
    "1gbit": 10**9,
    "300mbit": 3 * 10**8,
    "100mbit": 10**8,
}
"""Name → bits per second that each end of the link may send."""
RATE = Option(
    "rate",
    "of the link between two ranks on the CPU; none: the loopback",
    "1gbit",
    choices=("none", *RATES),
)
_CLONE_NEWNET = 0x40000000
_LEAST_BURST_BYTES = 64 << 10
_BURST_S = 0.002
"""Time whose bytes may be sent at once after a pause. The kernel refills the bucket when it finds a
core; with less in it, a link would slow down while both cores compute, as no network card does."""
_LATENCY_MS = 1000
_PROBE = "ip link add probe0 type veth peer name probe1 && tc qdisc add dev probe0 root tbf "


def unavailable() -> str | None:
    """Return why no shaped link can be made here, or None."""
    if platform.system() != "Linux":
        return f"network namespaces are Linux's, this is {platform.system()}"
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            package = "util-linux" if tool == "unshare" else "iproute2"
            return f"`{tool}` is not installed (package {package})"
    if os.geteuid() != 0:
        return "shaping a link needs root"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", _PROBE + _bucket(10**9)],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        lines = (tried.stderr or tried.stdout).strip().splitlines() or ["no reason given"]
        return f"no network namespace with a veth pair and a tbf queue here ({lines[0]})"
    return None


def absence(rate: str, ranks: int, device: str) -> str | None:
    """Return why no link of a rate that was asked for joins these ranks, or None."""
    if device != "cpu" or rate == "none":
        return None
    return unavailable() if ranks == 2 else "it joins exactly two ranks"


def usable(args: argparse.Namespace, ranks: int) -> bool:
    """Tell whether a link can join these ranks: what they send over CUDA comes by none."""
    wanted = ranks == 2 and args.device == "cpu" and getattr(args, "rate", None) != "none"
    return wanted and unavailable() is None


def _bucket(rate_bits_per_s: int) -> str:
    burst_bytes = max(_LEAST_BURST_BYTES, round(rate_bits_per_s / 8 * _BURST_S))
    return f"rate {rate_bits_per_s}bit burst {burst_bytes} latency {_LATENCY_MS}ms"


def join(channel: socket.socket, rank: int) -> None:
    """In a rank, single-threaded still: enter a namespace, get the link, give it an address."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    channel.sendall(b"1")
    if channel.recv(1) != b"1":
        raise OSError("no link was created")
    for arguments in (
        ("address", "add", f"{ADDRESSES[rank]}/30", "dev", INTERFACE),
        ("link", "set", INTERFACE, "up"),
        ("link", "set", "lo", "up"),
    ):
        subprocess.run(["ip", *arguments], check=True)
    # Both ends must be up before anybody connects.
    channel.sendall(b"2")
    if channel.recv(1) != b"2":
        raise OSError("the other rank did not connect")


def connect(pids: tuple[int, int], channels: tuple[socket.socket, socket.socket]) -> None:
    """In the process that started the ranks: make the link when both are in their namespaces."""
    _meet(channels, b"1")
    created = subprocess.run(
        [
            *("ip", "link", "add", INTERFACE, "netns", str(pids[0]), "type", "veth"),
            *("peer", "name", INTERFACE, "netns", str(pids[1])),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if created.returncode:
        raise OSError(f"no link between the ranks: {created.stderr.strip()}")
    _tell(channels, b"1")
    _meet(channels, b"2")
    _tell(channels, b"2")


def _meet(channels: tuple[socket.socket, socket.socket], what: bytes) -> None:
    for channel in channels:
        if channel.recv(1) != what:
            raise OSError("a rank ended before the link was created")


def _tell(channels: tuple[socket.socket, socket.socket], what: bytes) -> None:
    for channel in channels:
        channel.sendall(what)


class Shaper:
    """Sets the rate of this namespace's end by a process of its own: traced ranks must not fork."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [
                "sh",
                "-c",
                f"while read -r queue; do tc qdisc replace dev {INTERFACE} root $queue "
                "|| exit 1; echo; done",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def set(self, rate_bits_per_s: int | None) -> None:
        """Shape what this end sends; None for as fast as it goes."""
        queue = (
            "pfifo limit 10000" if rate_bits_per_s is None else f"tbf {_bucket(rate_bits_per_s)}"
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{queue}\n".encode())
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise OSError(f"tc did not set the queue of {INTERFACE}")

    def close(self) -> None:
        """End the process; the queue stays as it is."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def enter(channel: int, rate_bits_per_s: int | None) -> None:
    """Join the link in a rank that was given this channel to it, and shape what the rank sends."""
    join(socket.socket(fileno=channel), int(os.environ["RANK"]))
    shaper = Shaper()
    shaper.set(rate_bits_per_s)
    shaper.close()
