"""The overlap workload on one GPU: the other ranks' shards come from pinned host memory.

The copy engine pulls them on a side stream, chunk by chunk, while the product runs: what a second
GPU would push over a link, without one. The last shard is here already.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import chopper
from chopper.workloads.exchange import overlap_measures, require_exact
from chopper.workloads.swizzle import KERNELS, Order, turns
from chopper.workloads.symmetric import team

WARMUP = 3
TRACED = 4
"""Rounds behind those that warm up: where `chopper.profile` traces by default, and no more."""


class Pull:
    """A [m, k], the last shard on the GPU and the others in pinned host memory; W [k, n]."""

    def __init__(self, args: argparse.Namespace, device: torch.device, shards: int) -> None:
        self.m, self.k, self.n = args.m, args.k, args.n
        self.chunks = args.chunks  # of a shard
        self.rows = self.m // (shards * args.chunks)
        self.count = shards * args.chunks
        self.here = (shards - 1) * args.chunks  # first chunk that is here already
        dtype = getattr(torch, args.dtype)
        self.host = (torch.randn(self.m, self.k) / self.k**0.5).to(dtype).pin_memory()
        self.w = (torch.randn(self.k, self.n, device=device)).to(dtype)
        self.a = torch.empty(self.m, self.k, dtype=dtype, device=device)
        self.out = torch.empty(self.m, self.n, dtype=dtype, device=device)
        self.flags = torch.zeros(self.count, dtype=torch.int32, device=device)
        self.stops = torch.zeros(2, dtype=torch.int32).pin_memory()  # never raised
        self.side = torch.cuda.Stream(device)
        self.reset()

    def reset(self, *, pulled: bool = False) -> None:
        """Forget what was pulled; or have all of it here."""
        self.a.fill_(float("nan"))
        first = 0 if pulled else self.here
        self.part(self.a, first, self.count).copy_(self.part(self.host, first, self.count))
        self.flags.zero_()
        self.flags[self.here :] = 1
        torch.cuda.synchronize()

    def part(self, of: Tensor, first: int, end: int) -> Tensor:
        """Rows of the chunks from ``first`` to before ``end``."""
        return of[first * self.rows : end * self.rows]

    def pull(self, first: int, end: int) -> None:
        """Copy chunks from the host, in the current stream."""
        self.part(self.a, first, end).copy_(self.part(self.host, first, end), non_blocking=True)

    def raise_flag(self, chunk: int) -> None:
        """Say that a chunk is here, in the current stream, behind its copy.

        Written by the stream itself, behind a fence: on a GPU full of waiting tiles a kernel would
        find no room.
        """
        torch.ops.symm_mem.stream_write_value32_(self.flags.view(torch.uint32), chunk, 1)

    def transfer(self) -> None:
        """All copies and nothing else."""
        self.pull(0, self.here)

    def compute(self) -> Tensor:
        """The product alone."""
        return torch.mm(self.a, self.w, out=self.out)

    def sequential(self) -> Tensor:
        """All copies, then the product."""
        self.transfer()
        return self.compute()

    def chunked(self, *, swizzle: bool) -> Tensor:
        """A product per chunk, behind the event of its copy."""
        self.side.wait_stream(torch.cuda.current_stream())
        events = []
        with torch.cuda.stream(self.side):
            for chunk in range(self.here):
                self.pull(chunk, chunk + 1)
                events.append(torch.cuda.Event())
                events[-1].record(self.side)
        mine = [(self.here, self.count)]
        others = [(chunk, chunk + 1) for chunk in range(self.here)]
        for first, end in [*mine, *others] if swizzle else [*others, *mine]:
            if first < self.here:
                torch.cuda.current_stream().wait_event(events[first])
            torch.mm(self.part(self.a, first, end), self.w, out=self.part(self.out, first, end))
        return self.out

    def fused(self, order: Order) -> Callable[[], Tensor]:
        """One kernel whose tiles wait for the flags that the copy engine raises."""
        from chopper.workloads.tiles import WaitingProduct

        shards = self.count // self.chunks
        product = WaitingProduct(
            order,
            shards - 1,
            shards,
            self.m // shards,
            rows_per_chunk=self.rows,
            lanes=0,
            device=self.a.device,
        )
        coming = turns(order, shards - 1, shards, self.chunks, to=False)
        of = team(shards - 1, [self.a.data_ptr()] * shards, self.stops, self.a.device)

        def run() -> Tensor:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for shard, piece in coming:
                    chunk = shard * self.chunks + piece
                    self.pull(chunk, chunk + 1)
                    self.raise_flag(chunk)
            return product(of, self.a, self.flags, self.w, self.out, 1)

        return run

    def operation(self, variant: str) -> Callable[[], Tensor]:
        """The variant as a call that runs it once."""
        operations: dict[str, Callable[[], Tensor]] = {
            "library": self.sequential,  # one copy and one product: there is no collective here
            "sequential": self.sequential,
            "chunked": lambda: self.chunked(swizzle=True),
            "unswizzled": lambda: self.chunked(swizzle=False),
        }
        return self.fused(KERNELS[variant]) if variant in KERNELS else operations[variant]

    def error(self, run: Callable[[], Tensor]) -> float:
        """‖out − ref‖ / ‖ref‖ against float64, on fresh numbers."""
        self.host.copy_(torch.randn(self.m, self.k) / self.k**0.5)
        self.reset()
        expected = self.host.to(self.a.device).double() @ self.w.double()
        return float((run().double() - expected).norm() / expected.norm())


def measure_one(args: argparse.Namespace, device: torch.device, shards: int) -> None:
    """Check the variant against float64, then time it, its product and its copies alone."""
    problem = Pull(args, device, shards)
    run = problem.operation(args.variant)
    error = require_exact(args.variant, [problem.error(run)], args.dtype)
    whole_s = _median_s(run, args.steps, problem)
    # On what is multiplied elsewhere: a device may clock higher on a matrix of one value.
    compute_s = _median_s(problem.compute, args.steps, problem, pulled=True)
    transfer_s = _median_s(problem.transfer, args.steps, problem)
    with chopper.profile(args.output) as prof:
        _median_s(run, TRACED, problem, prof)
        measures = overlap_measures(
            whole_s, compute_s, transfer_s, chunks=problem.here, error=error
        )
        for name, value in measures.items():
            prof.measure(name, value, operation="all_gather_matmul")


def _median_s(
    run: Callable[[], object],
    steps: int,
    problem: Pull,
    prof: chopper.Profile | None = None,
    *,
    pulled: bool = False,
) -> float:
    times_s = []
    for step in range(WARMUP + steps):
        problem.reset(pulled=pulled)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if step >= WARMUP:
            times_s.append(time.perf_counter() - begin)
        if prof is not None:
            prof.step()
    return statistics.median(times_s)
