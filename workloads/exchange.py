"""A matrix product and the exchange between ranks that feeds it, or that it feeds.

Used by the workload overlap: each variant of ordering them is a call that runs the whole once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from chopper.hardware.measure import gather_into, scatter_sum
from chopper.workloads.symmetric import team

if TYPE_CHECKING:
    from chopper.workloads.tiles import Order as Swizzle

Operation = Callable[[], Tensor]
Order = list[tuple[int, int | None]]
"""(owner of rows, which chunk of them, or None for all)."""


TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def require_exact(what: str, errors: Sequence[float], dtype: str) -> float:
    """End the workload where a result is not a product's, rounding apart; return the worst error.

    Each is looked at: the largest of numbers and NaN may be a number.
    """
    for error in errors:
        if not error <= TOLERANCE[dtype]:  # NaN neither
            raise SystemExit(
                f"overlap: {what} is wrong: relative error {error:.1e} against float64, at most "
                f"{TOLERANCE[dtype]:.0e} is rounding"
            )
    return max(errors)


def overlap_measures(
    whole_s: float, compute_s: float, transfer_s: float, *, chunks: int, error: float
) -> dict[str, float]:
    """Return a variant's measures; its bound is the longer part and a first chunk."""
    bound_s = max(compute_s, transfer_s) + transfer_s / chunks
    return {
        "time_ns": whole_s * 1e9,
        "compute_ns": compute_s * 1e9,
        "transfer_ns": transfer_s * 1e9,
        "bound_ns": bound_s * 1e9,
        "bound_over_time_ratio": bound_s / whole_s,
        "relative_error": error,
    }


def group_name() -> str:
    """Name the group of all ranks, for the operators on symmetric memory, which this defines."""
    import torch.distributed._symmetric_memory  # noqa: F401

    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


class Exchange:
    """A product and the transfer around it, in all variants, on fresh random numbers."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.m, self.k, self.n, self.chunks = args.m, args.k, args.n, args.chunks
        self.rows = self.m // self.ranks  # of each rank
        self.step = self.rows // self.chunks
        self.pieces = range(self.chunks)
        self.dtype, self.device = getattr(torch, args.dtype), device

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, scaled so that products neither grow nor shrink."""
        numbers: Tensor = torch.randn(*shape, device=self.device) / shape[-1] ** 0.5
        return numbers.to(self.dtype)

    def others(self) -> list[tuple[int, int]]:
        """(to whom, from whom) of each round: each rank begins with its neighbour."""
        return [
            ((self.rank + i) % self.ranks, (self.rank - i) % self.ranks)
            for i in range(1, self.ranks)
        ]

    def part(self, of: Tensor, owner: int, chunk: int | None = None) -> Tensor:
        """Rows of ``of`` that belong to a rank, all or one chunk."""
        start = owner * self.rows + (0 if chunk is None else chunk * self.step)
        return of[start : start + (self.rows if chunk is None else self.step)]

    def post(
        self,
        receives: Iterable[tuple[Tensor, int]] = (),
        sends: Iterable[tuple[Tensor, int]] = (),
    ) -> list[dist.Work]:
        """Begin to receive (into, source) and to send (what, to); all of it at once over NCCL."""
        # Gloo asks for what it receives on the connection that it sends on: behind the data of a
        # send that was posted before, the other side's data would come after it, not beside it.
        begun = [dist.P2POp(dist.irecv, into, source) for into, source in receives]
        begun += [dist.P2POp(dist.isend, what, to) for what, to in sends]
        return dist.batch_isend_irecv(begun) if begun else []

    def by_rows(self) -> Order:
        """All chunks in the order of the rows, the own ones as one."""
        order: Order = []
        for owner in range(self.ranks):
            order += [(owner, c) for c in ([None] if owner == self.rank else self.pieces)]
        return order

    @property
    def ahead(self) -> bool:
        """True where all receives are begun before the first send.

        NCCL runs what is posted in order: a receive before the send that the other rank waits for
        would never end. Gloo's requests never wait behind data.
        """
        return self.device.type == "cpu"

    def swap(self, into: Callable[[int], Tensor], what: Callable[[int], Tensor]) -> None:
        """Exchange whole shards: from each other rank into its place, to each its own."""
        works = []
        for to, source in self.others():
            works += self.post([(into(source), source)], [(what(to), to)])
        for work in works:
            work.wait()


class GatherMatmul(Exchange):
    """Y = all_gather(X) · W, X [m, k] by rows over ranks, W [k, n] of each rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        self.shard, self.w = self.random(self.rows, self.k), self.random(self.k, self.n)
        self.x = torch.full((self.m, self.k), float("nan"), dtype=self.dtype, device=device)
        self.y = torch.empty(self.m, self.n, dtype=self.dtype, device=device)

    def library(self) -> Tensor:
        """The collective of torch.distributed, and the whole product."""
        gather_into(self.x, self.shard)
        return self.compute()

    def sequential(self) -> Tensor:
        """All of the exchange, and all of the product."""
        self.transfer()
        return self.compute()

    def chunked(self, *, swizzle: bool) -> Tensor:
        """Each chunk as it comes, or as soon as it is made."""
        receives: dict[tuple[int, int], list[dist.Work]] = {}
        rounds = [(to, source, c) for c in self.pieces for to, source in self.others()]
        sent: list[dist.Work] = []
        for _, source, chunk in rounds if self.ahead else ():
            receives[source, chunk] = self.post([(self.part(self.x, source, chunk), source)])
        for to, source, chunk in rounds:
            sends = [(self.shard[chunk * self.step : (chunk + 1) * self.step], to)]
            if self.ahead:
                sent += self.post((), sends)
            else:
                into = self.part(self.x, source, chunk)
                receives[source, chunk] = self.post([(into, source)], sends)
        # The own rows in one product, which is quicker than their chunks. Then each chunk as it
        # comes, of the nearest neighbour first; or all in the order of the rows.
        order: Order = [(self.rank, None), *((source, c) for _, source, c in rounds)]
        if not swizzle:
            order = self.by_rows()
        for owner, piece in order:
            rows = self.shard if piece is None else self.part(self.x, owner, piece)
            for work in () if piece is None else receives[owner, piece]:
                work.wait()
            torch.mm(rows, self.w, out=self.part(self.y, owner, piece))
        for work in sent:
            work.wait()
        return self.y

    def symmetric(self) -> Tensor:
        """Torch's fused operator: a shard's product while the next one is copied."""
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            self.shard, [self.w], 0, group_name(), return_A=False
        )
        return cast(Tensor, y)

    def fused(self, order: Swizzle) -> Operation:
        """One kernel: tiles of the product wait for the chunks that its other programs send."""
        from chopper.workloads.tiles import GatherProduct

        kernel = GatherProduct(order, self.shard, rows_per_chunk=self.step)
        return lambda: kernel(self.shard, self.w, self.y)

    def compute(self) -> Tensor:
        """The product alone."""
        return torch.mm(self.x, self.w, out=self.y)

    def transfer(self) -> None:
        """The exchange alone."""
        self.part(self.x, self.rank).copy_(self.shard)
        self.swap(lambda source: self.part(self.x, source), lambda _: self.shard)

    def error(self, run: Operation) -> float:
        """Against float64 on fresh numbers, with every place poisoned before."""
        self.shard.copy_(self.random(self.rows, self.k))
        self.x.fill_(float("nan"))  # what is not received must not pass for what is
        self.y.fill_(float("nan"))
        shards = [torch.empty_like(self.shard) for _ in range(self.ranks)]
        dist.all_gather(shards, self.shard)
        run_y, w = run(), self.w.double()
        # A part at a time: X in float64 would be most of the memory.
        exact = (shard.double() @ w for shard in shards)
        norms = [
            (float((self.part(run_y, owner).double() - part).norm()), float(part.norm()))
            for owner, part in enumerate(exact)
        ]
        wrong, right = (math.hypot(*of) for of in zip(*norms, strict=True))
        return wrong / right


class MatmulScatter(Exchange):
    """Y = reduce_scatter(X · W), X [m, k / ranks] and W [k / ranks, n] of each rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        inner = self.k // self.ranks
        self.x, self.w = self.random(self.m, inner), self.random(inner, self.n)
        self.partial = torch.empty(self.m, self.n, dtype=self.dtype, device=device)
        self.y = torch.empty(self.rows, self.n, dtype=self.dtype, device=device)
        # One place for each rank's contribution: they come in any order.
        self.incoming = [torch.empty_like(self.y) for _ in range(self.ranks)]

    def library(self) -> Tensor:
        """The whole product, and the collective of torch.distributed."""
        self.compute()
        scatter_sum(self.y, self.partial)
        return self.y

    def sequential(self) -> Tensor:
        """All of the product, and all of the exchange."""
        self.compute()
        self.transfer()
        return self._sum()

    def chunked(self, *, swizzle: bool) -> Tensor:
        """Each chunk as it comes, or as soon as it is made."""
        # What others wait for first, the own rows last and in one product, which is quicker than
        # their chunks; or all in the order of the rows.
        order: Order = [(to, c) for c in self.pieces for to, _ in self.others()]
        order += [(self.rank, None)]
        if not swizzle:
            order = self.by_rows()
        works = self.post(r for c in self.pieces for r in self._coming(c)) if self.ahead else []
        for owner, chunk in order:
            product = self.part(self.partial, owner, chunk)
            torch.mm(self.part(self.x, owner, chunk), self.w, out=product)
            sends = [] if chunk is None else [(product, owner)]
            if self.ahead:
                works += self.post((), sends)
            elif swizzle:
                # All ranks send to different ones: this one receives from its mirror image.
                source = (2 * self.rank - owner) % self.ranks
                works += self.post([] if chunk is None else self._coming(chunk, source), sends)
            else:
                # All ranks send to the owner of the rows, which alone receives.
                works += self.post((), sends)
                for c in self.pieces if chunk is None else ():
                    works += self.post(self._coming(c))
        for work in works:
            work.wait()
        return self._sum()

    def _coming(self, chunk: int, source: int | None = None) -> list[tuple[Tensor, int]]:
        """Destinations of a chunk of each other rank, or of one: (into, source)."""
        rows = slice(chunk * self.step, (chunk + 1) * self.step)
        sources = [s for _, s in self.others()] if source is None else [source]
        return [(self.incoming[s][rows], s) for s in sources]

    def symmetric(self) -> Tensor:
        """Torch's fused operator: a shard's product while the last one is written."""
        y = torch.ops.symm_mem.fused_matmul_reduce_scatter(self.x, self.w, "sum", 0, group_name())
        return cast(Tensor, y)

    def fused(self, order: Swizzle) -> Operation:
        """One kernel: each tile is stored in the memory of its owner, which adds what comes."""
        from chopper.workloads.tiles import ProductScatter

        kernel = ProductScatter(order, self.y)
        return lambda: kernel(self.x, self.w, self.y)

    def _sum(self) -> Tensor:
        self.y.copy_(self.part(self.partial, self.rank))
        for _, source in self.others():
            self.y += self.incoming[source]
        return self.y

    def compute(self) -> Tensor:
        """The product alone."""
        return torch.mm(self.x, self.w, out=self.partial)

    def transfer(self) -> None:
        """The exchange alone."""
        self.swap(self.incoming.__getitem__, lambda to: self.part(self.partial, to))

    def error(self, run: Operation) -> float:
        """Against float64 on fresh numbers, with every place poisoned before."""
        self.x.copy_(self.random(*self.x.shape))
        for buffer in (self.partial, self.y, *self.incoming):
            buffer.fill_(float("nan"))
        expected = self.x.double() @ self.w.double()
        dist.all_reduce(expected)
        mine = self.part(expected, self.rank)
        return float((run().double() - mine).norm() / mine.norm())


class HostShards:
    """All-gather and product on one GPU: the other ranks' shards come from pinned host memory.

    A [m, k], of which the last shard is on the GPU, times W [k, n]. The copy engine pulls the
    other shards on a side stream, chunk by chunk, as a second GPU would push them over a link.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, shards: int) -> None:
        self.m, self.k, self.n = args.m, args.k, args.n
        self.per_shard = args.chunks
        self.rows = self.m // (shards * args.chunks)
        self.count = shards * args.chunks
        self.chunks = (shards - 1) * args.chunks  # that are pulled
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
        """Clear the pulled chunks; with ``pulled``, copy all of them to the GPU."""
        self.a.fill_(float("nan"))
        first = 0 if pulled else self.chunks
        self.part(self.a, first, self.count).copy_(self.part(self.host, first, self.count))
        self.flags.zero_()
        self.flags[self.chunks :] = 1
        torch.cuda.synchronize()

    def before(self, part: str) -> None:
        """Reset what a run of ``all``, ``compute`` or ``transfer`` starts from."""
        # A device may clock higher on a matrix of one value: compute on real rows.
        self.reset(pulled=part == "compute")

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
        self.pull(0, self.chunks)

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
            for chunk in range(self.chunks):
                self.pull(chunk, chunk + 1)
                events.append(torch.cuda.Event())
                events[-1].record(self.side)
        mine = [(self.chunks, self.count)]
        pulled = [(chunk, chunk + 1) for chunk in range(self.chunks)]
        for first, end in [*mine, *pulled] if swizzle else [*pulled, *mine]:
            if first < self.chunks:
                torch.cuda.current_stream().wait_event(events[first])
            torch.mm(self.part(self.a, first, end), self.w, out=self.part(self.out, first, end))
        return self.out

    def fused(self, order: Swizzle) -> Operation:
        """One kernel whose tiles wait for the flags that the copy engine raises."""
        from chopper.workloads.tiles import WaitingProduct, turns

        shards = self.count // self.per_shard
        product = WaitingProduct(
            order,
            shards - 1,
            shards,
            self.m // shards,
            rows_per_chunk=self.rows,
            lanes=0,
            device=self.a.device,
        )
        order_of_pulls = turns(order, shards - 1, shards, self.per_shard, to=False)
        of = team(shards - 1, [self.a.data_ptr()] * shards, self.stops, self.a.device)

        def run() -> Tensor:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for shard, piece in order_of_pulls:
                    chunk = shard * self.per_shard + piece
                    self.pull(chunk, chunk + 1)
                    self.raise_flag(chunk)
            return product(of, self.a, self.flags, self.w, self.out, 1)

        return run

    def error(self, run: Operation) -> float:
        """‖out − ref‖ / ‖ref‖ against float64, on fresh numbers."""
        self.host.copy_(torch.randn(self.m, self.k) / self.k**0.5)
        self.reset()
        expected = self.host.to(self.a.device).double() @ self.w.double()
        return float((run().double() - expected).norm() / expected.norm())


Problem = GatherMatmul | MatmulScatter | HostShards


def operation(problem: Problem, variant: str, kernel: Swizzle | None) -> Operation:
    """Return the variant as a call that runs it once and returns this rank's result.

    Args:
        kernel: order in which a variant that is one kernel sends and computes.
    """
    if kernel is not None:
        return problem.fused(kernel)
    if variant in ("chunked", "unswizzled"):
        return lambda: problem.chunked(swizzle=variant == "chunked")
    run: Operation = getattr(problem, variant)
    return run
