"""A small decoder that trains on rows of documents, and what a document costs it."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chopper.workloads.batch import Batch
from chopper.workloads.planning import Cost


class Decoder(nn.Module):
    """One block of a transformer; no document of a row sees another one."""

    def __init__(self, width: int, longest: int, vocabulary: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, places: Tensor, documents: list[list[int]]) -> Tensor:
        """Logits [rows, length, vocabulary] of tokens and their places, both [rows, length]."""
        x = self.tokens(tokens) + self.places(places)
        qkv = self.qkv(F.layer_norm(x, x.shape[-1:]))
        qkv = qkv.view(*tokens.shape, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(qkv, documents).transpose(1, 2).reshape(x.shape))
        x = x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))
        logits: Tensor = self.head(F.layer_norm(x, x.shape[-1:]))
        return logits

    def attend(self, qkv: Tensor, documents: list[list[int]]) -> Tensor:
        """[rows, heads, length, head] from [3, rows, heads, length, head]."""
        if all(len(row) == 1 for row in documents):
            # Padding lies behind the only document, where causal attention does not look.
            return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        rows = []
        for row, lengths in enumerate(documents):
            rest = qkv.shape[3] - sum(lengths)
            *parts, padding = qkv[:, row : row + 1].split([*lengths, rest], dim=3)
            done = [F.scaled_dot_product_attention(p[0], p[1], p[2], is_causal=True) for p in parts]
            rows.append(torch.cat([*done, padding[2]], dim=2))
        return torch.cat(rows)


def cost_of(width: int, vocabulary: int) -> Cost:
    """FLOP to train on a document: 6 per weight and token, causal attention's 6·width·length²."""
    return Cost(alpha=6 * (12 * width * width + width * vocabulary), beta=6 * width)


def loss_of(model: nn.Module, batch: Batch, ranks: int, device: torch.device) -> Tensor:
    """Loss per token of the step: a rank's sum, so scaled that the mean over ranks is right."""
    arrays = (batch.tokens.astype(np.int64), batch.places(), batch.targets())
    tokens, where, wanted = (torch.from_numpy(a).to(device, non_blocking=True) for a in arrays)
    logits = model(tokens, where, batch.documents)
    summed = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    # DistributedDataParallel takes the mean over ranks.
    return summed * ranks / batch.step_tokens
