"""A small transformer; `extra` more passes over 1 GiB in each step keep its device busy.

    python lead.py RUN EXTRA

With 20 of them the device decides how long a step takes, without them the host does.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import chopper

WIDTH, WORDS = 512, 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 16, WIDTH // 16).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(seen.reshape(batch, length, WIDTH))
        y: torch.Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + y


def main(run: str, extra: int) -> None:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    model = model.cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    large = torch.randn(256 << 20, device="cuda")
    with chopper.profile(run, steps=(40, 45)) as prof:
        for _ in range(120):
            tokens = torch.randint(0, WORDS, (8, 513), device="cuda")
            logits = model(tokens[:, :-1]).flatten(0, 1)
            F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(extra):
                large.mul_(1.0001)
            prof.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
