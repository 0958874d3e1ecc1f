"""Start a workload's ranks without torchrun: joined by a shaped link, or on this host's own.

    python -m chopper.workloads.processes RANKS MODULE [options of the module]

Used where ranks must live in network namespaces, which torchrun's agent could not reach, and where
many short runs follow each other: what starts the ranks here does not load torch, which takes
torchrun's agent longer than some of the runs.
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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from chopper.workloads import link

if TYPE_CHECKING:
    import torch

RATES: dict[str, int | None] = {
    "unshaped": None,
    "1gbit": 10**9,
    "300mbit": 3 * 10**8,
    "100mbit": 10**8,
}
"""Name → bits per second that each end of the link may send."""
_POLL_S = 0.05
_GRACE_S = 5.0


def run_ranks(module: str, ranks: int, *, linked: bool, words: Sequence[str] = ()) -> None:
    """Run ``ranks`` processes of a module to their end; none is left when this returns.

    Each is given ``words``; with a link also ``--channel``, a socket for ``rank_of``.

    Raises:
        SystemExit: a rank failed, with its exit code (128 + n when signal n killed it), or the
            link cannot be made.
    """
    # In a namespace of their own nobody else listens.
    port = "29500" if linked else _free_port()
    channels = [socket.socketpair() for _ in range(ranks)]
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as held, _ended(started):
        for ours, theirs in channels:
            held.enter_context(ours)
            held.enter_context(theirs)
        for rank, (_, theirs) in enumerate(channels):
            channel = ["--channel", str(theirs.fileno())] if linked else []
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *words, *channel],
                    env=os.environ | _environment(rank, ranks, port, linked=linked),
                    pass_fds=[theirs.fileno()],
                )
            )
        for _, theirs in channels:
            theirs.close()  # so that a rank that ends is noticed
        if linked:
            try:
                link.connect((started[0].pid, started[1].pid), (channels[0][0], channels[1][0]))
            except OSError as exc:
                raise SystemExit(f"{module}: the ranks cannot be linked: {exc}") from exc
        while True:
            codes = [process.poll() for process in started]
            for rank, code in enumerate(codes):
                if code:
                    _tell_first(rank, started[rank].pid, code)
                    raise SystemExit(code if code > 0 else 128 - code)
            if None not in codes:
                break
            time.sleep(_POLL_S)


def _environment(rank: int, ranks: int, port: str, *, linked: bool) -> dict[str, str]:
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": link.ADDRESSES[0] if linked else "127.0.0.1",
        "MASTER_PORT": port,
    }
    if linked:
        # The second: it warns that nobody names the addresses, which are nobody's.
        found |= {"GLOO_SOCKET_IFNAME": link.INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return found


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _tell_first(rank: int, pid: int, code: int) -> None:
    """What torchrun's agent would say of it; an interrupt was wanted."""
    if code not in (130, -signal.SIGINT):
        how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        sys.stderr.write(f"chopper: rank {rank} (process {pid}) ended first, {how}\n")


@contextlib.contextmanager
def _ended(started: list[subprocess.Popen[bytes]]) -> Iterator[None]:
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


@contextlib.contextmanager
def rank_of(args: argparse.Namespace, *, rate: str | None) -> Iterator[torch.device]:
    """The device of a rank that ``run_ranks`` started, inside a process group of all of them.

    Args:
        args: its options, with ``channel`` and the settled ``device``.
        rate: one of ``RATES``, of the link that joins the ranks; None without a link.
    """
    import torch
    import torch.distributed as dist

    from chopper.workloads.machine import BACKEND

    rank = int(os.environ["RANK"])
    if rate is not None:
        link.join(socket.socket(fileno=args.channel), rank)
        shaper = link.Shaper()
        shaper.set(RATES[rate])
        shaper.close()
    device = torch.device(f"cuda:{rank}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKEND[device.type], device_id=device if device.type == "cuda" else None
    )
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        run_ranks(sys.argv[2], int(sys.argv[1]), linked=False, words=sys.argv[3:])
    except KeyboardInterrupt:
        sys.exit(130)
