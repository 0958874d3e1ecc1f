"""Train with FSDP2 over a link of a chosen rate: two hosts in miniature, with real sockets.

    chopper run interconnect
    chopper run interconnect --variants unshaped,100mbit -- --steps 12

Each of the two ranks lives in a network namespace of its own; a veth pair joins them, and a token
bucket (``tc tbf``) lets each end send at the variant's rate. Needs root. The kernel removes
namespaces, link and queue with the last process in them, however it ends.

The step should take T = T_c + V / B: the time without a link's limit, and the bytes that a rank
sends over the link's rate. What each rank sent is counted by the kernel; what a ring would have to
send follows from the sizes alone. Gloo sends more: it reduces and scatters by an all-reduce, of
which each rank keeps its part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import chopper
from chopper.workloads import link, llama, options
from chopper.workloads.fsdp2 import sharded_model
from chopper.workloads.machine import Needs
from chopper.workloads.training import train

RANKS = 2
RATES: dict[str, int | None] = {
    "unshaped": None,
    "1gbit": 10**9,
    "300mbit": 3 * 10**8,
    "100mbit": 10**8,
}
"""Variant → bits per second that each end may send."""
_POLL_S = 0.05
_GRACE_S = 5.0


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """What one rank takes; a namespace for each, and a link between them."""
    if ranks != RANKS:
        raise ValueError(f"--ranks {ranks}: the link has two ends, it takes {RANKS} ranks")
    if device != "cpu":
        raise ValueError("--device cuda: NCCL would not use the link; it takes --device cpu")
    reason = link.unavailable()
    if reason is not None:
        raise ValueError(f"{reason}; the model alone: chopper estimate network")
    return llama.needs(args, ranks, device)


def main() -> None:
    """Start the ranks and wait for them; or, with a channel given, be one of them."""
    args = options.parse(
        options.INTERCONNECT, prog="interconnect", description="Train over a shaped link."
    )
    if args.channel is None:
        drive(args)
    else:
        be_rank(args)


def drive(args: argparse.Namespace) -> None:
    """Start two ranks, join them by the link, wait; none is left when this returns."""
    if args.ranks != RANKS:
        raise SystemExit(f"interconnect: the link has two ends, it takes {RANKS} ranks")
    channels = [socket.socketpair() for _ in range(RANKS)]
    started: list[subprocess.Popen[bytes]] = []
    with ended(started):
        for rank, (_, theirs) in enumerate(channels):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": link.ADDRESSES[0],
                "MASTER_PORT": "29500",  # of a namespace where nobody else listens
                "GLOO_SOCKET_IFNAME": link.INTERFACE,
                # It warns that nobody names the addresses, which are nobody's.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            started.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "chopper.workloads.interconnect"),
                        *(*sys.argv[1:], "--channel", str(theirs.fileno())),
                    ],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                )
            )
        for _, theirs in channels:
            theirs.close()  # so that a rank that ends is noticed
        try:
            link.connect((started[0].pid, started[1].pid), (channels[0][0], channels[1][0]))
        except OSError as exc:
            raise SystemExit(f"interconnect: the ranks cannot be linked: {exc}") from exc
        while any(process.poll() is None for process in started):
            failed = next((p.returncode for p in started if p.returncode), None)
            if failed is not None:
                raise SystemExit(failed if failed > 0 else 128 - failed)
            time.sleep(_POLL_S)
    codes = [process.returncode for process in started]
    if any(codes):
        raise SystemExit(max(abs(code) for code in codes))


@contextlib.contextmanager
def ended(started: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End the processes when the block does, politely first."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in started:
                if process.poll() is None:
                    end(process)
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)


def be_rank(args: argparse.Namespace) -> None:
    """Enter the namespace, shape what it sends, train."""
    rank = int(os.environ["RANK"])
    link.join(socket.socket(fileno=args.channel), rank)
    shaper = link.Shaper()
    shaper.set(RATES[args.variant])
    shaper.close()
    dist.init_process_group("gloo")
    try:
        model, optimizer = sharded_model(args, torch.device("cpu"))
        dist.barrier()
        with chopper.profile(args.output) as prof:
            before = sent_bytes()
            train(prof, model, optimizer, args, torch.device("cpu"))
            per_step = (sent_bytes() - before) / args.steps
            rate = RATES[args.variant]
            if rate is not None:
                prof.measure("link_bytes_per_s", rate / 8)
            prof.measure("sent_bytes", per_step)
            prof.measure("ring_bytes", ring_bytes(model, RANKS))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def sent_bytes() -> int:
    """Bytes that this namespace's end of the link has sent, headers included."""
    # Not from /sys/class/net: that shows the namespace in which it was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == link.INTERFACE:
            return int(counters.split()[8])
    raise OSError(f"{link.INTERFACE}: no such interface in this namespace")


def ring_bytes(model: nn.Module, ranks: int) -> float:
    """Bytes that each rank of a ring sends per step of this sharding.

    Each weight is gathered for forward and its gradient reduced and scattered; those of the blocks,
    which are dropped after forward, are gathered again for backward. Each of the three sends
    (n − 1) / n of the whole.
    """
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    dropped = sum(
        p.numel() * p.element_size() for name, p in model.named_parameters() if "layers." in name
    )
    return (ranks - 1) / ranks * (2 * whole + dropped)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
