"""A program: small models under fake tensors, each strategy that PyTorch's MemTracker can follow.

Prints one JSON object: case → bytes at the peak. Run by test_memory.py, with ``--half`` unless
CHOPPER_ALL_CASES is set: each strategy with one of two sizes of the vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from chopper.workloads.llama import Attention, Llama, LlamaConfig, rotate

LAYERS, WIDTH, HEADS, KV, FFN = 4, 1024, 16, 4, 3584
RANKS = 4
BATCH, SEQUENCE = 8, 512
KEEP = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def llama(vocabulary: int) -> Llama:
    return Llama(
        LlamaConfig(
            dim=WIDTH,
            layer_count=LAYERS,
            head_count=HEADS,
            kv_head_count=KV,
            ffn_dim=FFN,
            vocabulary=vocabulary,
        )
    )


class GPT(nn.Module):
    def __init__(self, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(GPTBlock(dropout) for _ in range(LAYERS))
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


def full(module: Any) -> Any:
    for i, layer in enumerate(module.layers):
        module.layers[i] = checkpoint_wrapper(layer)
    return module


def selective(module: Any) -> Any:
    """Every other product is kept, and attention: torchtitan's policy."""

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op == KEEP[0]:
                counts[ctx.is_recompute] += 1
                if counts[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for i, layer in enumerate(module.layers):
        module.layers[i] = checkpoint_wrapper(layer, context_fn=contexts)
    return module


def tensor_parallel(module: Any, mesh: DeviceMesh) -> Any:
    plan = {f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")}
    plan |= {"ffn.w1": ColwiseParallel(), "ffn.w3": ColwiseParallel()}
    down = {"attention.wo": RowwiseParallel(), "ffn.w2": RowwiseParallel()}

    def attend(self: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.wo(out.transpose(1, 2).reshape(b, s, -1))
        return projected

    Attention.forward = attend  # type: ignore[method-assign]
    for layer in module.layers:
        parallelize_module(layer, mesh, {**plan, **down})
    return module


def sharded(module: Any, mesh: DeviceMesh, mixed: bool) -> Any:
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def peak(
    make: Any,
    vocabulary: int,
    *,
    wrap: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    autocast: bool = False,
    wide_loss: bool = False,
    optimizer: str = "foreach",
    fsdp: bool = False,
) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(dtype)
        module = make()
        torch.set_default_dtype(torch.float32)
        module = wrap(module) if wrap else module
        foreach = optimizer == "foreach"
        adam: Any = (
            torch.optim.SGD(module.parameters(), foreach=False)
            if optimizer == "sgd"
            else torch.optim.AdamW(module.parameters(), foreach=foreach)
        )
        x = torch.randint(0, vocabulary, (BATCH, SEQUENCE))
        y = torch.randint(0, vocabulary, (BATCH, SEQUENCE))
        peaks = []
        # DTensor runs an operator whole when it first meets it: the first time does not count.
        for _ in range(2 if dist.is_initialized() else 1):
            tracker: Any = FSDPMemTracker(module, adam) if fsdp else MemTracker()
            if fsdp:
                tracker.track_inputs((x, y))
            else:
                tracker.track_external(module, adam)
            with tracker:
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        logits = module(x)
                        logits = logits.float() if wide_loss else logits
                        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
                    del logits
                    loss.backward()
                    del loss
                    adam.step()
                    adam.zero_grad()
                    tracker.reset_mod_stats()
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
        return int(min(peaks))


VOCABULARIES = (32000, 64)
Case = tuple[str, Callable[[], int]]


def on_one_rank(v: int) -> list[Case]:
    """Strategies of one process with a vocabulary."""
    single = torch.float32

    def of_llama(name: str, **how: Any) -> Case:
        return f"{name} {v}", lambda: peak(lambda: llama(v), v, **how)

    return [
        of_llama("bf16 none"),
        of_llama("bf16 full", wrap=full),
        of_llama("bf16 selective", wrap=selective),
        of_llama("bf16 fp32-loss", wide_loss=True),
        of_llama("fp32 none", dtype=single),
        of_llama("fp32 full", dtype=single, wrap=full),
        of_llama("autocast none", dtype=single, autocast=True),
        of_llama("autocast full", dtype=single, autocast=True, wrap=full),
        of_llama("bf16 sgd", optimizer="sgd"),
        (f"gpt2 0.0 {v}", lambda: peak(lambda: GPT(v, 0.0), v)),
        (f"gpt2 0.1 {v}", lambda: peak(lambda: GPT(v, 0.1), v)),
    ]


def on_several(v: int, mesh: DeviceMesh) -> list[Case]:
    """FSDP2 with a vocabulary."""

    def of_fsdp2(name: str, recompute: Any, mixed: bool) -> Case:
        def wrap(module: Any) -> Any:
            return sharded(recompute(module) if recompute else module, mesh, mixed)

        how: dict[str, Any] = {
            "wrap": wrap,
            "dtype": torch.float32,
            "wide_loss": True,
            "fsdp": True,
        }
        called = f"fsdp2 {'mixed' if mixed else 'fp32'} {name} {v}"
        return called, lambda: peak(lambda: llama(v), v, **how)

    return [
        of_fsdp2(name, recompute, mixed)
        for mixed in (True, False)
        for name, recompute in (("none", None), ("full", full), ("selective", selective))
    ]


def chosen(lists: list[list[Case]], *, half: bool) -> list[Case]:
    """All cases, or half: each strategy with one of two vocabularies, in turn."""
    if not half:
        return [case for cases in lists for case in cases]
    return [case for i, cases in enumerate(lists) for case in cases[i::2]]


def main() -> None:
    half = "--half" in sys.argv[1:]
    cases = chosen([on_one_rank(v) for v in VOCABULARIES], half=half)
    found = {name: measure() for name, measure in cases}
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    cases = chosen([on_several(v, mesh) for v in VOCABULARIES], half=half)
    found |= {name: measure() for name, measure in cases}
    found["tp4 none 64"] = peak(
        lambda: llama(64), 64, wrap=lambda m: tensor_parallel(m, mesh), optimizer="loop"
    )
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.suppress(BrokenPipeError):
        main()
