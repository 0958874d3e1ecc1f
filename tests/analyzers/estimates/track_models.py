"""A program: small models under fake tensors, each strategy that PyTorch's MemTracker can follow.

    python -m tests.analyzers.estimates.track_models [--few]

Prints one JSON object: case → bytes at the peak. With ``--few``, one case for each kind of
strategy, precision, checkpointing and loss; they take a sixth of the time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._memory_track import peak, several

WIDTH, HEADS, SEQUENCE = 1024, 16, 512
SHAPE = {
    "dim": WIDTH,
    "layer_count": 2,  # each takes as long as its operators; nothing else grows with them
    "head_count": HEADS,
    "kv_head_count": 4,
    "ffn_dim": 3584,
}
RANKS = 4
VOCABULARIES = (32000, 64)
FEW = (
    "bf16 selective 32000",
    "fp32 full 64",
    "autocast none 32000",
    "gpt2 0.1 64",
    "fsdp2 mixed full 32000",
    "tp-sp none 32000",
)
Cases = list[tuple[str, dict[str, Any]]]


class GPT(nn.Module):
    def __init__(self, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(GPTBlock(dropout) for _ in range(SHAPE["layer_count"]))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPTBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, s, h)))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


def case(vocabulary: int, **how: Any) -> dict[str, Any]:
    """One case, in bf16 on one rank unless told otherwise."""
    common = {
        "model": {**SHAPE, "vocabulary": vocabulary},
        "strategy": "single",
        "batch": 8,
        "sequence": SEQUENCE,
        "precision": "bf16",
        "checkpoint": "none",
        "optimizer": "foreach",
        "loss": "native",
    }
    return {**common, **how}


def on_one_rank(v: int) -> Cases:
    """Strategies of one process with a vocabulary."""
    return [
        (f"bf16 none {v}", case(v)),
        (f"bf16 full {v}", case(v, checkpoint="full")),
        (f"bf16 selective {v}", case(v, checkpoint="selective")),
        (f"bf16 fp32-loss {v}", case(v, loss="fp32")),
        (f"fp32 none {v}", case(v, precision="fp32")),
        (f"fp32 full {v}", case(v, precision="fp32", checkpoint="full")),
        (f"autocast none {v}", case(v, precision="autocast")),
        (f"autocast full {v}", case(v, precision="autocast", checkpoint="full")),
        (f"bf16 sgd {v}", case(v, optimizer="sgd")),
        (f"gpt2 0.0 {v}", case(v)),
        (f"gpt2 0.1 {v}", case(v)),
    ]


def on_several(v: int) -> Cases:
    """FSDP2 with a vocabulary."""
    return [
        (
            f"fsdp2 {precision} {checkpoint} {v}",
            case(v, strategy="fsdp2", precision=precision, checkpoint=checkpoint, loss="fp32"),
        )
        for precision in ("mixed", "fp32")
        for checkpoint in ("none", "full", "selective")
    ]


def cut(v: int) -> Cases:
    """Tensor parallelism, the vocabulary and its loss cut over the ranks."""
    return [
        (f"{strategy} none {v}", case(v, strategy=strategy, optimizer="loop", loss="fp32"))
        for strategy in ("tp", "tp-sp", "tp-gathered")
    ]


def chosen(*, few: bool) -> Cases:
    """All cases, or some."""
    found = [case for of in (on_one_rank, on_several) for v in VOCABULARIES for case in of(v)]
    found += cut(VOCABULARIES[0])
    return [(name, of) for name, of in found if name in FEW] if few else found


def main() -> None:
    mesh = several(RANKS)
    found = {}
    for name, of in chosen(few="--few" in sys.argv[1:]):
        words = name.split()
        vocabulary, dropout = of["model"]["vocabulary"], words[1]

        def gpt(vocabulary: int = vocabulary, dropout: str = dropout) -> nn.Module:
            return GPT(vocabulary, float(dropout))

        found[name] = peak(of, mesh, gpt if words[0] == "gpt2" else None)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.suppress(BrokenPipeError):
        main()
