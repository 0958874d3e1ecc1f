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
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn

import chopper
from chopper.errors import UsageError
from chopper.workloads import link, llama, options
from chopper.workloads.fsdp2 import sharded_model
from chopper.workloads.machine import Needs
from chopper.workloads.processes import RATES, rank_of
from chopper.workloads.training import train

RANKS = 2
TRACED = (1, 6)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """What one rank takes; a namespace for each, and a link between them."""
    if ranks != RANKS:
        raise UsageError(f"--ranks {ranks}: the link has two ends, it takes {RANKS} ranks")
    if device != "cpu":
        raise UsageError("--device cuda: NCCL would not use the link; it takes --device cpu")
    reason = link.unavailable()
    if reason is not None:
        raise ValueError(f"{reason}; the model alone: chopper estimate network")
    return llama.needs(args, ranks, device)


def main() -> None:
    """Join the other rank over the link, train, leave."""
    args = options.parse(
        options.INTERCONNECT, prog="interconnect", description="Train over a shaped link."
    )
    if args.channel is None:
        raise SystemExit("interconnect: no link was made; start it with `chopper run interconnect`")
    with rank_of(args, rate=args.variant) as device:
        model, optimizer = sharded_model(args, device)
        dist.barrier()
        # A step over the slowest link takes seconds, so there are few: all but the first.
        with chopper.profile(args.output, steps=TRACED if args.steps > 1 else (0, 1)) as prof:
            before = sent_bytes()
            train(prof, model, optimizer, args, device)
            rate = RATES[args.variant]
            if rate is not None:
                prof.measure("link_bytes_per_s", rate / 8)
            prof.measure("sent_bytes", (sent_bytes() - before) / args.steps)
            prof.measure("ring_bytes", ring_bytes(model, RANKS))
            prof.measure("gloo_bytes", ring_bytes(model, RANKS, reductions=2))


def sent_bytes() -> int:
    """Bytes that this namespace's end of the link has sent, headers included."""
    # Not from /sys/class/net: that shows the namespace in which it was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == link.INTERFACE:
            return int(counters.split()[8])
    raise OSError(f"{link.INTERFACE}: no such interface in this namespace")


def ring_bytes(model: nn.Module, ranks: int, *, reductions: int = 1) -> float:
    """Bytes that each rank of a ring sends per step of this sharding.

    Each weight is gathered for forward and its gradient reduced and scattered; those of the blocks,
    which are dropped after forward, are gathered again for backward. Each of the three sends
    (n − 1) / n of the whole. An all-reduce in place of the reduce-scatter sends that twice.
    """
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    dropped = sum(
        p.numel() * p.element_size() for name, p in model.named_parameters() if "layers." in name
    )
    return (ranks - 1) / ranks * ((1 + reductions) * whole + dropped)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
