"""A mixture of experts in plain PyTorch, in the place of a Llama's feed-forward networks.

Rows are sorted by expert, go through the experts as one grouped product, are weighted, put back in
order and added up, as transformers' ``grouped_mm_experts_forward`` does. The grouped product is a
batched one over equal parts of the rows: a balanced load, which changes no tensor's size.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from benchmarks._memory_shapes import architecture
from chopper.models.architectures import Architecture
from chopper.workloads.llama import FeedForward, Llama


class Grouped(nn.Module):
    """The experts of one rank."""

    def __init__(self, dim: int, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.02 * torch.randn(count, dim, 2 * width))
        self.down = nn.Parameter(0.02 * torch.randn(count, width, dim))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows by expert: [rows, dim] -> the same."""
        parts = rows.view(self.up.shape[0], -1, rows.shape[-1])
        gate, up = torch.bmm(parts, self.up).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.down).view_as(rows)


class Mixture(nn.Module):
    """Router, experts, and what all tokens go through."""

    def __init__(self, config: Architecture, of: dict[str, Any]) -> None:
        super().__init__()
        self.chosen = of["chosen"]
        self.ranks = of.get("ep", 1)
        self.router = nn.Linear(config.width, of["count"], bias=False)
        self.experts = Grouped(config.width, of["count"] // self.ranks, of["width"])
        self.shared = None
        if of["shared"]:
            shape = msgspec.structs.replace(config, ffn_width=of["shared"])
            self.shared = FeedForward(shape)

    def sent(self, rows: Tensor) -> Tensor:
        """To the ranks that have the experts, or back; as many to each."""
        if self.ranks == 1:
            return rows
        parts = [rows.shape[0] // self.ranks] * self.ranks
        everyone: Any = dist.group.WORLD
        received: Tensor = all_to_all_single_autograd(rows, parts, parts, everyone)
        return received

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, dim] -> the same."""
        tokens = x.reshape(-1, x.shape[-1])
        shares = F.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, experts = shares.topk(self.chosen, dim=-1)
        order = experts.flatten().argsort()
        rows = tokens[order // self.chosen]
        made = self.sent(self.experts(self.sent(rows)))
        made = made * weights.flatten()[order].unsqueeze(-1).to(made.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        out = made[back].view(tokens.shape[0], self.chosen, -1).sum(dim=1)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


def made(case: dict[str, Any]) -> Llama:
    """The case's model, with experts where it has some."""
    config = architecture(case["model"])
    of = case.get("experts")
    module = Llama(config)
    if of:
        for layer in module.layers[of["first"] :]:
            layer.ffn = Mixture(config, of)
    return module


def expert_names(module: nn.Module) -> list[str]:
    """Parameters of experts."""
    return [name for name, _ in module.named_parameters() if ".experts." in name]
