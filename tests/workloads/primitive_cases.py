"""What ranks do in the tests of the primitives; each function is run in all of them."""

from __future__ import annotations

import os
import random
import signal

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from chopper.workloads.symmetric import Place, RankLost, SymmetricMemory
from chopper.workloads.tiles import notify, put, rank, ranks, wait
from tests.waiting import until

BLOCK = 16


@triton.jit
def swap_kernel(
    team, incoming, signals, mine, order, out, count, stride, step, BLOCK: tl.constexpr
):
    """Send a row to all others and wait for theirs, each in the order of this rank."""
    me = rank(team)
    others = ranks(team) - 1
    for i in range(others):
        peer = tl.load(order + i)
        put(incoming, me * stride, mine, count, peer, team, BLOCK)
        notify(signals + 2 * me, step, peer, team, False)
    for i in range(others):
        peer = tl.load(order + others - 1 - i)
        wait(signals + 2 * peer, step, team)
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            row = tl.load(incoming + peer * stride + at, mask=at < count)
            tl.store(out + peer * stride + at, row, mask=at < count)
        notify(signals + 2 * me + 1, step, peer, team, False)
    for i in range(others):
        wait(signals + 2 * tl.load(order + i) + 1, step, team)


@triton.jit
def send_kernel(team, incoming, signals, mine, count, stride, step, BLOCK: tl.constexpr):
    """Send all that others wait for, and wait for none of them."""
    me = rank(team)
    for peer in range(ranks(team)):
        if peer != me:
            put(incoming, me * stride, mine, count, peer, team, BLOCK)
            notify(signals + 2 * me, step, peer, team, False)
            notify(signals + 2 * me + 1, step, peer, team, False)


def dawdle(chance: random.Random) -> None:
    """Work for a random while: ranks come early and late in any order."""
    size = chance.choice((1, 1, 50, 400))
    torch.randn(size, size) @ torch.randn(size, size)


def sent(step: int, by: int, count: int) -> Tensor:
    """Return what a rank sends in a step: every element differs from those of all others."""
    return torch.arange(count, dtype=torch.float64) + 1000 * by + 100_000 * step


def swap(steps: int, count: int, seed: int = 0, lost: list[object] | None = None) -> str:
    """Exchange rows in several steps; what has been read is overwritten with NaN."""
    me, of = dist.get_rank(), dist.get_world_size()
    stride = -(-count // 8) * 8
    device, chance = torch.device("cpu"), random.Random(seed * of + me)
    places = {"rows": Place((of, stride), torch.float64)}
    memory = SymmetricMemory("swap", device, places, signals=2)
    others = [peer for peer in range(of) if peer != me]
    for number in range(steps):
        dawdle(chance)
        if lost == [number, "killed"] and me == of - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if lost == [number, "late"] and me == of - 1:
            dist.barrier()  # the others come here when they have given up
            return "late"
        if lost == [number, "late"]:
            memory.deadline_s = 0.5  # only here: on a busy machine any step may take longer
        chance.shuffle(others)
        if lost == [number, "left"]:
            if me == of - 1:
                memory.step += 1
                args = (memory.team, memory["rows"], memory.signals, sent(number, me, count))
                send_kernel[(1,)](*args, count, stride, memory.step, BLOCK=BLOCK)
                os._exit(0)
            until(lambda: memory.gone() == {of - 1}, "the end of the last rank")
        out = torch.full((of, stride), float("nan"), dtype=torch.float64)
        mine = sent(number, me, count)
        try:
            with memory.next_step() as step:
                swap_kernel[(1,)](
                    memory.team,
                    memory["rows"],
                    memory.signals,
                    mine,
                    torch.tensor(others, dtype=torch.int32),
                    out,
                    count,
                    stride,
                    step,
                    BLOCK=BLOCK,
                )
        except RankLost as exc:
            if lost is not None and lost[1] == "late":
                dist.barrier()
            return str(exc)
        for peer in others:
            assert torch.equal(out[peer, :count], sent(number, peer, count)), (number, peer, out)
    return "done"
