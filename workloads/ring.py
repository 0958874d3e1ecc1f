"""Attention over a sequence that is spread over the ranks: keys and values go round in a ring.

Each rank holds some of the sequence. In n turns it attends with its queries to the keys and values
of each rank, while it passes those on to the next (arXiv 2310.01889); in backward their gradients
follow them round. Partial results are merged by their log-sum-exp. Under a causal mask, what lies
behind a query is not computed, to the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from chopper.workloads.timeline import Timeline


def own_tiles(rank: int, ranks: int, tiles: int, *, zigzag: bool) -> list[int]:
    """Return which of ``ranks`` × ``tiles`` tiles of the sequence a rank has, in order.

    One stretch of it, or by ``zigzag`` one of 2·``ranks`` from the begin and its mirror image.
    """
    if not zigzag:
        return [*range(rank * tiles, (rank + 1) * tiles)]
    half, last = tiles // 2, ranks * tiles
    return [
        *range(rank * half, (rank + 1) * half),
        *range(last - (rank + 1) * half, last - rank * half),
    ]


class Passing(NamedTuple):
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    works: list[dist.Work]
    sent: Tensor
    arriving: Tensor


class Pair(NamedTuple):
    """Queries and the keys that they see in one rank's part."""

    queries: slice
    keys: slice
    masked: bool
    """The last tile of the keys is that of the queries: half of it lies behind."""


class Ring:
    """One rank's place in the ring.

    Args:
        rows: of the sequence that each rank has.
        tiles: parts of these, each computed whole or not at all but for the mask.
        zigzag: see `own_tiles`.
        timeline: keeps the spans ``attention`` and ``ring``, the wait for what is passed on.
        mesh: of all ranks; the default group without one.
    """

    def __init__(
        self,
        rows: int,
        tiles: int,
        *,
        zigzag: bool,
        timeline: Timeline,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.timeline, self.mesh = timeline, mesh
        self.group = None if mesh is None else mesh.get_group()
        self.tile = rows // tiles
        self.parts = [
            own_tiles(rank, self.ranks, tiles, zigzag=zigzag) for rank in range(self.ranks)
        ]

    def pairs(self, turn: int) -> Iterator[Pair]:
        """Return which of this rank's queries see which keys of the block that it has in a turn."""
        source = (self.rank - turn) % self.ranks
        for at, tile in enumerate(self.parts[self.rank]):
            seen = sum(other <= tile for other in self.parts[source])
            if seen:
                queries = slice(at * self.tile, (at + 1) * self.tile)
                yield Pair(queries, slice(0, seen * self.tile), source == self.rank)

    def begin(self, tensor: Tensor) -> Passing:
        """Begin to pass a tensor on to the next rank, and to receive the previous rank's."""
        arriving = torch.empty_like(tensor)
        to, source = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, to, self.group),
                dist.P2POp(dist.irecv, arriving, source, self.group),
            ]
        )
        return Passing(works, tensor, arriving)

    def end(self, passing: Passing) -> Tensor:
        """Wait for it, and return what arrived."""
        with self.timeline.span("ring"):
            for work in passing.works:
                work.wait()
        return passing.arriving

    def scores(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        """Return the scaled products of queries and keys in float32, -inf behind the mask."""
        scores = (q[:, pair.queries] @ k[:, pair.keys].transpose(1, 2)).float()
        scores *= q.shape[-1] ** -0.5
        if pair.masked:
            diagonal = scores[..., -self.tile :]
            behind = torch.ones_like(diagonal[0], dtype=torch.bool).triu(1)
            diagonal.masked_fill_(behind, -torch.inf)
        return scores


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to all ranks' keys and values.

    Results, log-sum-exps and gradients of keys and values are summed up in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        """Map [heads, rows, head_width], this rank's rows, three times -> the same once."""
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = torch.full_like(out[..., :1], -torch.inf)
        block = torch.stack((k, v))
        for turn in range(ring.ranks):
            passing = ring.begin(block) if turn < ring.ranks - 1 else None
            with ring.timeline.span("attention"):
                for pair in ring.pairs(turn):
                    scores = ring.scores(q, block[0], pair)
                    of_pair = scores.logsumexp(-1, keepdim=True)
                    values = (scores - of_pair).exp().to(v.dtype) @ block[1][:, pair.keys]
                    before = lse[:, pair.queries]
                    total = before.logaddexp(of_pair)
                    out[:, pair.queries] *= (before - total).exp()
                    out[:, pair.queries] += values * (of_pair - total).exp()
                    lse[:, pair.queries] = total
            if passing is not None:
                block = ring.end(passing)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Send keys and values round once more, and behind them their gradients."""
        q, k, v, out, lse = ctx.saved_tensors
        ring, grad, scale = ctx.ring, grads[0].contiguous(), q.shape[-1] ** -0.5
        # The gradient of a softmax's input: p · (gradient of p − its mean under p).
        mean = (grad * out).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(out)
        block, following = torch.stack((k, v)), None
        for turn in range(ring.ranks):
            passing = ring.begin(block) if turn < ring.ranks - 1 else None
            grad_block = torch.zeros_like(block, dtype=torch.float32)
            with ring.timeline.span("attention"):
                for pair in ring.pairs(turn):
                    queries, keys, _ = pair
                    p = (ring.scores(q, block[0], pair) - lse[:, queries]).exp()
                    grad_block[1][:, keys] += p.to(q.dtype).transpose(1, 2) @ grad[:, queries]
                    grad_p = grad[:, queries] @ block[1][:, keys].transpose(1, 2)
                    grad_scores = ((grad_p - mean[:, queries]) * p * scale).to(q.dtype)
                    grad_q[:, queries] += grad_scores @ block[0][:, keys]
                    grad_block[0][:, keys] += grad_scores.transpose(1, 2) @ q[:, queries]
            if following is not None:
                grad_block += ring.end(following)
            following = ring.begin(grad_block)  # to the rank that has this block next
            if passing is not None:
                block = ring.end(passing)
        assert following is not None
        grad_k, grad_v = ring.end(following)  # once round: of this rank's own keys and values
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None


def error_of(ring: Ring, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative error of a result and its gradients against float64.

    Of two heads of width 8, on random numbers: ‖found − exact‖ / ‖exact‖, whole attention of all
    ranks' rows.
    """
    shape = (4, 2, ring.tile * len(ring.parts[0]), 8)
    own = torch.randn(shape, device=device).to(dtype)
    of_all = [torch.empty_like(own) for _ in range(ring.ranks)]
    dist.all_gather(of_all, own)
    q, k, v = (tensor.clone().requires_grad_() for tensor in own[:3])
    out = RingAttention.apply(q, k, v, ring)
    out.backward(own[3])

    order = torch.tensor(ring.parts, device=device).flatten().argsort()
    tiled = torch.cat(of_all, 2).double().unflatten(2, (-1, ring.tile))
    *inputs, grad = tiled[:, :, order].flatten(2, 3)
    whole_q, whole_k, whole_v = inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = nn.functional.scaled_dot_product_attention(whole_q, whole_k, whole_v, is_causal=True)
    exact.backward(grad)
    errors = []
    for found, whole in zip(
        (out, q.grad, k.grad, v.grad), (exact, *(i.grad for i in inputs)), strict=True
    ):
        assert found is not None
        assert whole is not None
        found, whole = found.detach(), whole.detach()
        mine = whole.unflatten(1, (-1, ring.tile))[:, ring.parts[ring.rank]].flatten(1, 2)
        errors.append(float((found.double() - mine).norm() / mine.norm()))
    return max(errors)


class Layer(nn.Module):
    """Ring attention between hidden states: [rows, width] -> the same."""

    def __init__(self, width: int, heads: int, ring: Ring) -> None:
        super().__init__()
        self.ring, self.heads = ring, heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Add to each position what it attends to."""
        normed = nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (
            linear(normed).unflatten(1, (self.heads, -1)).transpose(0, 1).contiguous()
            for linear in (self.wq, self.wk, self.wv)
        )
        out = RingAttention.apply(q, k, v, self.ring)
        projected: Tensor = self.wo(out.transpose(0, 1).flatten(1))
        return x + projected
