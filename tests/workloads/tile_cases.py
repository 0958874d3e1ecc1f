"""What ranks do in the tests of the tiles; each function is run in all of them."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from chopper.workloads import tiles
from chopper.workloads.exchange import GatherMatmul, MatmulScatter, operation
from chopper.workloads.symmetric import SymmetricMemory, team
from chopper.workloads.tiles import Order, turns
from tests.waiting import until

BLOCKS = tiles.Blocks(16, 16, 16)
FAR = 1e30
"""In what no rank has computed yet."""


@triton.jit
def no_wait(signal, step, team):
    """Read at once, whatever has come."""
    tl.debug_barrier()


def drawn(*shape: int, seed: int) -> Tensor:
    """Return random numbers that every rank can draw."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> bool:
    """Tell whether a result is the expected one, rounding apart."""
    return bool((found.double() - expected).norm() / expected.norm() < 1e-6)


Step = Callable[[int], bool]
"""Runs the step of a number and returns whether the result is right."""


def gather(rows: int, k: int, n: int, chunk: int, order: Order) -> tuple[SymmetricMemory, Step]:
    """All-gather, then product."""
    me, of = dist.get_rank(), dist.get_world_size()
    whole = tiles.GatherProduct(order, torch.empty(rows, k), rows_per_chunk=chunk, blocks=BLOCKS)

    def step(number: int) -> bool:
        x, w = drawn(of * rows, k, seed=number), drawn(k, n, seed=-1 - me)
        y = torch.full((of * rows, n), FAR)
        whole(x[me * rows : (me + 1) * rows], w, y)
        return close(y, x.double() @ w.double())

    return whole.memory, step


def scatter(rows: int, k: int, n: int, order: Order) -> tuple[SymmetricMemory, Step]:
    """Product, then reduce-scatter."""
    me, of = dist.get_rank(), dist.get_world_size()
    whole = tiles.ProductScatter(order, torch.empty(rows, n), blocks=BLOCKS)

    def step(number: int) -> bool:
        x, w = drawn(of, of * rows, k, seed=number), drawn(of, k, n, seed=-1)
        y = whole(x[me], w[me], torch.full((rows, n), FAR))
        return close(y, (x.double() @ w.double()).sum(0)[me * rows : (me + 1) * rows])

    return whole.memory, step


def repeat(operation: str, steps: int = 2, **arguments: object) -> list[bool]:
    """Run an operation in several steps, each rank after a while of its own."""
    _, step = globals()[operation](**arguments)
    found = []
    for number in range(steps):
        size = (1, 300)[(number + dist.get_rank()) % 2]
        torch.randn(size, size) @ torch.randn(size, size)
        found.append(step(number))
    return found


def last_is_late(operation: str, *, waits: bool, **arguments: object) -> bool:
    """Begin in the last rank when all others have sent, and, where they do not wait, have ended."""
    if not waits:
        tiles.__dict__["wait"] = no_wait
    memory, step = globals()[operation](**arguments)
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        until(lambda: bool((memory.signals[:-1] == 1).all()), "what the others send")
        if not waits:
            dist.barrier()
    right = bool(step(0))
    if not last and not waits:
        dist.barrier()
    return right


def as_variants() -> list[float]:
    """Run the kernels as the workload does; return the errors of three steps of each."""
    args = argparse.Namespace(m=24, k=20, n=12, chunks=3, dtype="float32")
    problems = [kind(args, torch.device("cpu")) for kind in (GatherMatmul, MatmulScatter)]
    runs = [(problem, operation(problem, "triton", "ring")) for problem in problems]
    return [problem.error(run) for problem, run in runs for _ in range(3)]


def brought(order: Order, shards: int, rows: int, k: int, n: int, chunk: int) -> int:
    """Bring rows to a product that sends none; return what was ready before the first came.

    None comes before the tiles of the own shard, the last, are computed.
    """
    device, chunks = torch.device("cpu"), -(-rows // chunk)
    product = tiles.WaitingProduct(
        order,
        shards - 1,
        shards,
        rows,
        rows_per_chunk=chunk,
        lanes=0,
        device=device,
        blocks=BLOCKS,
    )
    whole, w = drawn(shards, rows, k, seed=1), drawn(k, n, seed=2)
    x, y = torch.full_like(whole, FAR), torch.full((shards, rows, n), FAR)
    x[-1] = whole[-1]
    signals, stops = torch.zeros(shards, chunks, dtype=torch.int32), torch.zeros(2).int()
    ready = []

    def bring() -> None:
        until(lambda: not (y[-1] == FAR).any(), "the tiles that need not wait")
        ready.append(int((y != FAR).sum()))
        for shard, piece in turns(order, shards - 1, shards, chunks, to=False):
            part = slice(piece * chunk, (piece + 1) * chunk)
            x[shard, part] = whole[shard, part]
            signals[shard, piece] = 1

    bringer = threading.Thread(target=bring)
    bringer.start()
    product(team(shards - 1, [x.data_ptr()] * shards, stops, device), x, signals, w, y, 1)
    bringer.join()
    assert close(y, whole.double() @ w.double())
    return ready[0]
