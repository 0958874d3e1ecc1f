"""A Llama-architecture language model, its named sizes, and the synthetic corpus it trains on.

RMSNorm before each half of a block, rotary position embedding, grouped-query attention through
``scaled_dot_product_attention``, a SwiGLU feed-forward network, an output head that does not
share its weights with the embedding. Shapes as in "The Llama 3 Herd of Models" (arXiv 2407.21783,
table 3) and in Meta's published ``params.json`` files.

    config = SIZES["debug"]
    model = Llama(config)                                  # blocks are model.layers.0, .1, …
    logits = model(tokens)                                 # [batch, sequence] -> [.., vocabulary]
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterable, Sized

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from chopper.models.architectures import Architecture, named

ROPE_THETA = 500000.0
"""Base of the rotary embedding's wavelengths (Llama 3's, for long contexts)."""
NORM_EPS = 1e-5

SIZES: dict[str, Architecture] = {
    # For CPUs: matrices large enough that computing them, not dispatching them, takes the time.
    "debug": Architecture(
        name="debug",
        layers_count=4,
        width=256,
        heads_count=8,
        kv_heads_count=2,
        head_width=32,
        ffn_width=768,
        vocabulary_count=2048,
    ),
    # Its head is untied here: 1.50 B parameters instead of 1.24 B.
    "1b": msgspec.structs.replace(named("llama3.2-1b"), tied=False),
    "8b": named("llama3-8b"),
    "13b": named("llama2-13b"),
}


class Attention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.wq = nn.Linear(config.width, config.q_width, bias=False)
        self.wk = nn.Linear(config.width, config.kv_width, bias=False)
        self.wv = nn.Linear(config.width, config.kv_width, bias=False)
        self.wo = nn.Linear(config.q_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix along the sequence: [batch, sequence, width] -> the same."""
        batch, sequence, _ = x.shape
        # [batch, heads, sequence, head_width]: the layout that the fused kernels expect.
        q, k, v = (
            linear(x).view(batch, sequence, -1, self.head_width).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU: a SiLU gate multiplies a linear projection (arXiv 2002.05202)."""

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.ffn_width, bias=False)
        self.w2 = nn.Linear(config.ffn_width, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.ffn_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position alone: [batch, sequence, width] -> the same."""
        down: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return down


class Block(nn.Module):
    """One transformer layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, sequence, width] -> the same."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Token ids to logits over the vocabulary."""

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_count, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers_count))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.head = nn.Linear(config.width, config.vocabulary_count, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at each place: [batch, sequence] -> [.., vocabulary]."""
        x: Tensor = self.embedding(tokens)
        # Computed at each forward rather than kept as a buffer: it costs microseconds, and
        # a buffer made on the meta device would have to be filled again by each wrapper.
        cos, sin = rotary_table(self.config, tokens.shape[1], device=tokens.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotary_table(
    config: Architecture, sequence: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles (arXiv 2104.09864), each [sequence, head_width]."""
    exponent = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32)
    frequency = ROPE_THETA ** -(exponent / config.head_width)
    position = torch.arange(sequence, device=device, dtype=torch.float32)
    # In float32 until here: bfloat16 cannot tell position 257 from 256.
    angle = torch.outer(position, frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_width/2) of the last axis by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def initial_value(
    name: str, shape: torch.Size, config: Architecture, *, seed: int, device: torch.device
) -> Tensor:
    """Give the initial value of the weight called ``name``, whole, in float32.

    It depends on the name, the shape and the seed alone, so that each way of sharding starts from
    the same model. Norms start at one, all else from a normal distribution; projections back
    into the residual stream are scaled down by the number of additions to it (as in GPT-2).
    """
    name = name.replace("_checkpoint_wrapped_module.", "")
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    std = 0.02
    if name.endswith(("wo.weight", "w2.weight")):
        std /= math.sqrt(2 * config.layers_count)
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(std=std, generator=generator)


def unbuilt(args: argparse.Namespace) -> Llama:
    """The model of ``args.size`` on the meta device: nowhere does the whole of it exist."""
    with torch.device("meta"):
        model = Llama(SIZES[args.size])
    # Checkpointing goes inside sharding: recomputing a block must not gather its weights again.
    if args.checkpoint == "full":
        recompute(model)
    return model


def recompute(model: Llama) -> None:
    """Checkpoint each block: its forward runs again in backward."""
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer: one fused kernel updates all weights; the default on CPUs walks them."""
    return optimizer_of("adamw", model.parameters())


def optimizer_of(name: str, weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW as all workloads use it, or SGD without momentum, which keeps nothing."""
    if name == "sgd":
        # Not fused: on CPUs that leaves weights in bfloat16 as they are (torch 2.13).
        return torch.optim.SGD(weights, lr=0.1)
    return torch.optim.AdamW(weights, lr=3e-4, weight_decay=0.1, fused=True)


class SyntheticTokens(Dataset[tuple[Tensor, Tensor]], Sized):
    """Synthetic corpus: pairs (tokens, next tokens), each int64 [sequence].

    A sequence is generated when it is asked for, from the seed and its index alone: no download, no
    file, the same tokens in every process. Ids follow Zipf's law, as words do, and half of them are
    a function of the id before, so that a model has something to learn and the loss falls.
    """

    def __init__(self, *, length: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.length = length
        self.sequence = sequence
        self.seed = seed
        # Zipf: the r-th most frequent id has a probability proportional to 1/r.
        weight = 1.0 / np.arange(1, vocabulary + 1)
        self.cumulative = np.cumsum(weight / weight.sum())
        self.successor = np.random.default_rng(seed).permutation(vocabulary)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"sequence {index} of {self.length}")
        generator = np.random.default_rng((self.seed, index))
        drawn = np.searchsorted(self.cumulative, generator.random(self.sequence + 1))
        # The last sum may fall short of 1 by a rounding error.
        ids = np.minimum(drawn, len(self.successor) - 1)
        ids[1::2] = self.successor[ids[:-1:2]] if len(ids) % 2 else self.successor[ids[::2]]
        text = torch.from_numpy(ids)
        return text[:-1], text[1:]


def token_loader(
    *,
    steps: int,
    batch: int,
    sequence: int,
    vocabulary: int,
    seed: int,
    rank: int,
    ranks: int,
    workers: int,
    pin_memory: bool,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Serve ``steps`` batches of ``batch`` sequences to each of ``ranks`` ranks, none twice."""
    data = SyntheticTokens(
        length=steps * batch * ranks, sequence=sequence, vocabulary=vocabulary, seed=seed
    )
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        data, num_replicas=ranks, rank=rank, shuffle=True, seed=seed, drop_last=True
    )
    return DataLoader(
        data,
        batch_size=batch,
        sampler=sampler,
        num_workers=workers,
        pin_memory=pin_memory,
        drop_last=True,
    )
