"""Models of Hugging Face's transformers: how many parameters their modules have, by family.

    python -m benchmarks.families > families.json
    python -m benchmarks.families --track

Builds the module of each configuration in tests/analyzers/estimates/families.json on the meta
device, where nothing is allocated, and prints the file with the parameters of transformers' modules
counted anew; the tests hold the estimate against them.

With --track, small modules of each family train two steps under fake tensors, and the peak that
PyTorch's MemTracker sees is held against the estimate. Attention is one fused operator, as with
FlashAttention (under fake tensors transformers would make masks and repeat keys); in 16 bits, which
grouped products of experts need on a CPU, RMSNorms are PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from chopper.analyzers.estimates.memory import memory
from chopper.analyzers.estimates.training import Training
from chopper.models.configs import of_config

FILE = Path(__file__).parents[1] / "tests/analyzers/estimates/families.json"


def parameters_count(config: dict[str, Any]) -> int:
    """Of transformers' module, shared ones once."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[config["model_type"]].from_dict(config)
        )
    return sum(p.numel() for p in module.parameters())


BATCH, SEQUENCE = 4, 512
_SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "vocab_size": 512,
}
_SMALL_GPT = {"n_layer": 4, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 512}
_HEADS: dict[str, Any] = {"head_dim": 64}
_CHOSEN: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 8}
_NARROW: dict[str, Any] = {
    "num_experts_per_tok": 4,
    "n_routed_experts": 16,
    "num_experts": 16,
    "moe_intermediate_size": 256,
}
_SMALL_LATENT: dict[str, Any] = {
    **_NARROW,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    # As wide as keys: else a CPU has no fused attention.
    "v_head_dim": 96,
    "first_k_dense_replace": 1,
}
TRACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": _HEADS,
    "gemma2": _HEADS,
    "olmo2": {},
    "phi3": {},
    "glm": _HEADS,
    "glm4": _HEADS,
    "arcee": _HEADS,
    "stablelm": {},
    "cohere": {},
    "starcoder2": {},
    "nemotron": _HEADS,
    "phi": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 2048, "word_embed_proj_dim": 512, "max_position_embeddings": 2048},
    "gpt2": _SMALL_GPT,
    "mixtral": _CHOSEN,
    "phimoe": {**_CHOSEN, "attention_bias": True, "lm_head_bias": True},
    "granitemoe": _CHOSEN,
    "gpt_oss": {**_HEADS, **_CHOSEN},
    "olmoe": {**_NARROW, "intermediate_size": 256},
    "qwen2_moe": {**_NARROW, "shared_expert_intermediate_size": 512},
    "qwen3_moe": {**_HEADS, **_NARROW},
    "glm4_moe": {**_HEADS, **_NARROW, "n_shared_experts": 1, "use_qk_norm": True},
    "deepseek_v2": {**_SMALL_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {
        **_SMALL_LATENT,
        "q_lora_rank": 192,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""What small modules have besides `_SMALL`."""


def fused(
    _module: Any, q: Any, k: Any, v: Any, _mask: Any, scaling: float | None = None, **_rest: Any
) -> tuple[Any, None]:
    """One operator, whatever heads share keys."""
    import torch.nn.functional as F

    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2), None


def plain_norms(module: Any) -> None:
    """RMSNorms as PyTorch's."""
    import torch.nn.functional as F

    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):

            def forward(x: Any, weight: Any = part.weight) -> Any:
                return F.rms_norm(x, weight.shape, weight, 1e-6)

            part.forward = forward


def tracked_bytes(config: dict[str, Any], *, narrow: bool) -> int:
    """The peak of two steps of transformers' module."""
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import (
        CONFIG_MAPPING,
        AttentionInterface,
        AutoModelForCausalLM,
    )

    AttentionInterface.register("fused", fused)
    tokens = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
    made = CONFIG_MAPPING[config["model_type"]].from_dict({**config, **tokens})
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16 if narrow else torch.float32)
        how = {"experts_implementation": "grouped_mm"} if narrow else {}
        module = AutoModelForCausalLM.from_config(made, attn_implementation="fused", **how)
        torch.set_default_dtype(torch.float32)
        module.train()
        if narrow:
            plain_norms(module)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        shape = (BATCH, SEQUENCE)
        x, y = (torch.randint(0, config["vocab_size"], shape) for _ in range(2))
        tracker: Any = MemTracker()
        tracker.track_external(module, optimizer)
        with tracker:
            for _ in range(2):
                logits = module(input_ids=x, use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
                del logits
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def track() -> None:
    """One line for each family."""
    for kind, rest in TRACKED.items():
        small = {} if "n_embd" in rest else _SMALL
        config = {"model_type": kind, **small, **rest}
        architecture = of_config(config, kind, kind)
        narrow = architecture.experts is not None
        measured = tracked_bytes(config, narrow=narrow)
        expected = memory(
            Training(
                architecture=architecture,
                batch_count=BATCH,
                sequence_count=SEQUENCE,
                precision="bf16" if narrow else "fp32",
                optimizer_kind="loop",
                kernels="cpu",
                fragmentation_ratio=0,
            )
        ).allocated_bytes
        print(
            f"{measured / 2**20:8.1f} MiB {expected / 2**20:8.1f} MiB  "
            f"{expected / measured - 1:+6.1%}  {kind}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--track", action="store_true", help="memory of small modules")
    if parser.parse_args().track:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        track()
        return
    import transformers

    found = json.loads(FILE.read_text(encoding="utf-8"))
    found["transformers"] = transformers.__version__
    for name, row in found["models"].items():
        row["parameters_count"] = parameters_count(row["config"])
        print(f"{name}: {row['parameters_count']:,}", file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
