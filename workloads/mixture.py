"""A layer of experts that are spread over the ranks, with its two all-to-alls.

A router sends each token to one expert (arXiv 2101.03961), on whatever rank that is (*dispatch*),
and the expert's answer comes back to the token's rank (*combine*); backward goes the same ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from chopper.models.architectures import Architecture
from chopper.workloads.llama import FeedForward
from chopper.workloads.timeline import Timeline

_BALANCING = 16
"""Corrections of the router's bias per forward: each more than halves the distance."""


class Exchange(torch.autograd.Function):
    """All-to-all of rows, [rows, width], and in backward of their gradients.

    Its time is the span ``exchange``; the time from a dispatch to its combine, and in backward from
    a combine to its dispatch, is the span ``experts``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        layer: Mixture,
        dispatch: bool,
    ) -> Tensor:
        """Send ``sent[r]`` rows to each rank r, receive ``received[r]`` from it."""
        ctx.counts, ctx.layer, ctx.dispatch = (sent, received), layer, dispatch
        return layer.exchanged(rows, sent, received, first=dispatch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Send each row's gradient to where the row came from."""
        sent, received = ctx.counts
        back = ctx.layer.exchanged(grads[0], received, sent, first=not ctx.dispatch)
        return back, None, None, None, None


class Mixture(nn.Module):
    """Experts of all ranks between hidden states: [tokens, width] -> the same.

    Args:
        config: its widths are those of each expert.
        shares: of the tokens, for each expert; this rank's are an equal part in the rank's place.
        timeline: that keeps the spans.
        mesh: of all ranks; the default group without one.
    """

    shares: Tensor
    bias: Tensor
    loads: Tensor
    """Tokens that each of this rank's experts had in the last forward."""

    def __init__(
        self,
        config: Architecture,
        shares: Sequence[float],
        timeline: Timeline,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.timeline, self.mesh = timeline, mesh
        self.group = None if mesh is None else mesh.get_group()
        self.gate = nn.Linear(config.width, len(shares), bias=False)
        local = len(shares) // dist.get_world_size()
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(local))
        self.register_buffer("shares", torch.tensor(shares))
        self.register_buffer("bias", torch.zeros(len(shares)))

    def exchanged(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, first: bool
    ) -> Tensor:
        """Exchange rows between the ranks, ``first`` of the two ways of this direction or last."""
        if not first:
            self.timeline.end("experts")
        result = rows.new_empty((sum(received), rows.shape[1]))
        with self.timeline.span("exchange"):
            dist.all_to_all_single(
                result, rows.contiguous(), [*received], [*sent], group=self.group
            )
        if first:
            self.timeline.begin("experts")
        return result

    @torch.no_grad()
    def route(self, scores: Tensor) -> Tensor:
        """Choose an expert for each token: that of the highest score, after a bias.

        The bias is moved until the experts have their shares, as auxiliary-loss-free balancing does
        over many steps towards equal ones (arXiv 2408.15664).
        """
        for _ in range(_BALANCING):
            counts = (scores + self.bias).argmax(1).bincount(minlength=len(self.bias))
            self.bias += 2 * scores.std() * (self.shares - counts / len(scores))
        return (scores + self.bias).argmax(1)

    def forward(self, x: Tensor) -> Tensor:
        """Add to each token the answer of its expert."""
        ranks, local = dist.get_world_size(), len(self.experts)
        normed = F.rms_norm(x, x.shape[-1:])
        scores = self.gate(normed).float()
        chosen = self.route(scores.detach())
        weight = scores.softmax(1).gather(1, chosen[:, None]).to(x.dtype)

        # Rows by expert, so that those for one rank lie together; how many come from where.
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=ranks * local).view(ranks, local)
        received = torch.empty_like(sent)
        with self.timeline.span("exchange"):
            dist.all_to_all_single(received, sent, group=self.group)
        self.loads = received.sum(0)
        counts = received.tolist()
        rows_sent, rows_received = sent.sum(1).tolist(), [sum(of_rank) for of_rank in counts]

        rows = Exchange.apply(normed[order], rows_sent, rows_received, self, True)
        # [rank][expert] -> each expert at once over all ranks' rows -> [rank][expert]
        parts = rows.split([count for of_rank in counts for count in of_rank])
        answers = [
            expert(torch.cat(parts[at::local])).split([of_rank[at] for of_rank in counts])
            for at, expert in enumerate(self.experts)
        ]
        rows = torch.cat([answers[at][rank] for rank in range(ranks) for at in range(local)])
        rows = Exchange.apply(rows, rows_received, rows_sent, self, False)
        result: Tensor = x + weight * rows[order.argsort()]
        return result
