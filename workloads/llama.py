"""A Llama-architecture language model, its named sizes, and what they cost.

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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from chopper.models.architectures import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shapes of one model; the defaults are what all Llama 3 models share."""

    dim: int
    """Width of the residual stream."""

    layer_count: int
    """Number of transformer blocks."""

    head_count: int
    """Query heads; each is ``dim // head_count`` wide."""

    kv_head_count: int
    """Key and value heads, each shared by ``head_count // kv_head_count`` query heads."""

    ffn_dim: int
    """Width between the SwiGLU's two up projections and its down projection."""

    vocabulary: int = 128256
    """Number of token ids."""

    rope_theta: float = 500000.0
    """Base of the rotary embedding's wavelengths (Llama 3 value, for long contexts)."""

    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.head_count

    @property
    def architecture(self) -> Architecture:
        """The model as estimates know it."""
        return Architecture(
            name="llama",
            layers_count=self.layer_count,
            width=self.dim,
            heads_count=self.head_count,
            kv_heads_count=self.kv_head_count,
            head_width=self.head_dim,
            ffn_width=self.ffn_dim,
            vocabulary_count=self.vocabulary,
        )


SIZES: dict[str, LlamaConfig] = {
    # For CPUs: matrices large enough that computing them, not dispatching them, takes the time.
    "debug": LlamaConfig(
        dim=256, layer_count=4, head_count=8, kv_head_count=2, ffn_dim=768, vocabulary=2048
    ),
    # Llama 3.2 1B, except that its head is untied here: 1.50 B parameters instead of 1.24 B.
    "1b": LlamaConfig(dim=2048, layer_count=16, head_count=32, kv_head_count=8, ffn_dim=8192),
    # Llama 3 8B: 8.03 B parameters.
    "8b": LlamaConfig(dim=4096, layer_count=32, head_count=32, kv_head_count=8, ffn_dim=14336),
}


class Attention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_head_count * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix along the sequence: [batch, sequence, dim] -> the same."""
        batch, sequence, dim = x.shape
        # [batch, heads, sequence, head_dim]: the layout that the fused kernels expect.
        q = self.wq(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.wo(out.transpose(1, 2).reshape(batch, sequence, dim))
        return projected


class FeedForward(nn.Module):
    """SwiGLU: a SiLU gate multiplies a linear projection (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position alone: [batch, sequence, dim] -> the same."""
        down: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return down


class Block(nn.Module):
    """One transformer layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, sequence, dim] -> the same."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Token ids to logits over the vocabulary."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layer_count))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

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
    config: LlamaConfig, sequence: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles (arXiv 2104.09864), each [sequence, head_dim]."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** -(exponent / config.head_dim)
    position = torch.arange(sequence, device=device, dtype=torch.float32)
    # In float32 until here: bfloat16 cannot tell position 257 from 256.
    angle = torch.outer(position, frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim/2) of the last axis by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def initial_value(
    name: str, shape: torch.Size, config: LlamaConfig, *, seed: int, device: torch.device
) -> Tensor:
    """Give the initial value of the weight called ``name``, whole, in float32.

    It depends on the name, the shape and the seed alone, so that each rank, and each way of
    sharding, starts from the same model. Norms start at one, all else from a normal
    distribution; projections back into the residual stream are scaled down by the number of
    additions to it, so that its variance does not grow with depth (as in GPT-2).
    """
    name = name.replace("_checkpoint_wrapped_module.", "")
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    std = 0.02
    if name.endswith(("wo.weight", "w2.weight")):
        std /= math.sqrt(2 * config.layer_count)
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(std=std, generator=generator)


def unbuilt(args: argparse.Namespace) -> Llama:
    """The model of ``args.size`` on the meta device.

    There weights have a shape but no storage: nowhere does the whole model exist.
    """
    with torch.device("meta"):
        model = Llama(SIZES[args.size])
    # Checkpointing goes inside sharding: recomputing a block must not gather its weights again.
    if args.checkpoint == "full":
        recompute(model)
    return model


def recompute(model: Llama) -> None:
    """Have each block's forward run again in backward, instead of keeping what it needs."""
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer: one fused kernel updates all weights; the default on CPUs walks them."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
