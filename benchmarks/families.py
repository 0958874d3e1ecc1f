"""Models of Hugging Face's transformers: how many parameters their modules have, by family.

    pip install --target /tmp/transformers transformers
    PYTHONPATH=/tmp/transformers python -m benchmarks.families > families.json
    PYTHONPATH=/tmp/transformers python -m benchmarks.families --track

Builds the module of each configuration on the meta device, where nothing is allocated, and prints
the configurations with the count of the module's parameters, which the tests hold the estimate
against (tests/analyzers/estimates/families.json). transformers is needed to make the file, not to
test with it.

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
from typing import Any

from chopper.analyzers.estimates.memory import memory
from chopper.analyzers.estimates.training import Training
from chopper.models.configs import of_config

CONFIGS: dict[str, dict[str, Any]] = {}
"""Name → what its config.json says of shapes."""


def _add(name: str, kind: str, shape: tuple[int, ...], **rest: Any) -> None:
    """Layers, width, heads, key heads, feed-forward width and vocabulary, in Llama's names."""
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    CONFIGS[name] = {"model_type": kind, **dict(zip(names, shape, strict=True)), **rest}


_add("Llama-3.1-8B", "llama", (32, 4096, 32, 8, 14336, 128256))
_add("Mistral-7B", "mistral", (32, 4096, 32, 8, 14336, 32000))
_add("Qwen2.5-7B", "qwen2", (28, 3584, 28, 4, 18944, 152064))
_add("Qwen3-8B", "qwen3", (36, 4096, 32, 8, 12288, 151936), head_dim=128)
_add("Qwen3-0.6B", "qwen3", (28, 1024, 16, 8, 3072, 151936), head_dim=128, tie_word_embeddings=True)
_add("gemma-7b", "gemma", (28, 3072, 16, 16, 24576, 256000), head_dim=256)
_add("gemma-2-2b", "gemma2", (26, 2304, 8, 4, 9216, 256000), head_dim=256)
_add("gemma-3-4b", "gemma3_text", (34, 2560, 8, 4, 10240, 262208), head_dim=256)
_add("phi-2", "phi", (32, 2560, 32, 32, 10240, 51200))
_add("Phi-3-mini", "phi3", (32, 3072, 32, 32, 8192, 32064))
_add("Phi-4", "phi3", (40, 5120, 40, 10, 17920, 100352))
_add("pythia-1b", "gpt_neox", (16, 2048, 8, 8, 8192, 50304))
_add("gpt-neox-20b", "gpt_neox", (44, 6144, 64, 64, 24576, 50432))
_add("starcoder2-3b", "starcoder2", (30, 3072, 24, 2, 12288, 49152))
_add("stablelm-3b-4e1t", "stablelm", (32, 2560, 32, 32, 6912, 50304))
_add(
    "stablelm-2-12b",
    "stablelm",
    (40, 5120, 32, 8, 13824, 100352),
    qk_layernorm=True,
    use_parallel_residual=True,
)
_add("stablelm-2-1_6b", "stablelm", (24, 2048, 32, 32, 5632, 100352), use_qkv_bias=True)
_add("command-r", "cohere", (40, 8192, 64, 64, 22528, 256000))
_add("command-r-plus", "cohere", (64, 12288, 96, 8, 33792, 256000), use_qk_norm=True)
_add("command-r7b", "cohere2", (32, 4096, 32, 8, 14336, 256000), head_dim=128)
_add("OLMo-7B", "olmo", (32, 4096, 32, 32, 11008, 50304))
_add("OLMo-2-7B", "olmo2", (32, 4096, 32, 32, 11008, 100352))
_add("OLMo-3-32B", "olmo3", (64, 5120, 40, 8, 27648, 100278))
_add("granite-3-8b", "granite", (40, 4096, 32, 8, 12800, 49155), tie_word_embeddings=True)
_add("glm-4-9b", "glm", (40, 4096, 32, 2, 13696, 151552), head_dim=128)
_add("GLM-4-9B-0414", "glm4", (40, 4096, 32, 2, 13696, 151552), head_dim=128, attention_bias=False)
_add("Minitron-8B", "nemotron", (32, 4096, 48, 8, 16384, 256000), head_dim=128)
_add("SmolLM3-3B", "smollm3", (36, 2048, 16, 4, 11008, 128256))
_add("Seed-OSS-36B", "seed_oss", (64, 5120, 80, 8, 27648, 155136), head_dim=128)
_add("AFM-4.5B", "arcee", (36, 2560, 20, 4, 18432, 128004), head_dim=128)
_add("ERNIE-4.5-0.3B", "ernie4_5", (18, 1024, 16, 2, 3072, 103424), head_dim=128)
CONFIGS["gpt2"] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
CONFIGS["starcoder"] = {
    "model_type": "gpt_bigcode",
    "n_layer": 40,
    "n_embd": 6144,
    "n_head": 48,
    "n_positions": 8192,
    "vocab_size": 49152,
}
CONFIGS["gpt-j-6b"] = {
    "model_type": "gptj",
    "n_layer": 28,
    "n_embd": 4096,
    "n_head": 16,
    "n_positions": 2048,
    "vocab_size": 50400,
}
for _name, _layers, _width, _heads in (
    ("opt-125m", 12, 768, 12),
    ("opt-6.7b", 32, 4096, 32),
    ("opt-66b", 64, 9216, 72),
):
    CONFIGS[_name] = {
        "model_type": "opt",
        "num_hidden_layers": _layers,
        "hidden_size": _width,
        "num_attention_heads": _heads,
        "ffn_dim": 4 * _width,
        "word_embed_proj_dim": _width,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
    }
CONFIGS["falcon-7b"] = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
}
CONFIGS["falcon-40b"] = {
    "model_type": "falcon",
    "num_hidden_layers": 60,
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "vocab_size": 65024,
    "new_decoder_architecture": True,
    "bias": False,
}
CONFIGS["falcon-11b"] = {
    "model_type": "falcon",
    "num_hidden_layers": 60,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "vocab_size": 65024,
    "new_decoder_architecture": True,
    "bias": False,
    "num_ln_in_parallel_attn": 1,
    "tie_word_embeddings": False,
}

_add(
    "Mixtral-8x7B",
    "mixtral",
    (32, 4096, 32, 8, 14336, 32000),
    num_local_experts=8,
    num_experts_per_tok=2,
)
_add(
    "Mixtral-8x22B",
    "mixtral",
    (56, 6144, 48, 8, 16384, 32768),
    num_local_experts=8,
    num_experts_per_tok=2,
)
_add(
    "Qwen1.5-MoE-A2.7B",
    "qwen2_moe",
    (24, 2048, 16, 16, 5632, 151936),
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
)
_add(
    "Qwen2-57B, every other layer",
    "qwen2_moe",
    (28, 3584, 28, 4, 18944, 151936),
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=2560,
    shared_expert_intermediate_size=20480,
    mlp_only_layers=[0, 3],
    decoder_sparse_step=2,
)
for _name, _shape, _rest in (
    ("Qwen3-30B-A3B", (48, 2048, 32, 4, 6144, 151936), {"moe_intermediate_size": 768}),
    ("Qwen3-235B-A22B", (94, 4096, 64, 4, 12288, 151936), {"moe_intermediate_size": 1536}),
):
    _add(_name, "qwen3_moe", _shape, head_dim=128, num_experts=128, num_experts_per_tok=8, **_rest)
_add(
    "OLMoE-1B-7B",
    "olmoe",
    (16, 2048, 16, 16, 1024, 50304),
    num_experts=64,
    num_experts_per_tok=8,
)
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_add(
    "DeepSeek-V2-Lite",
    "deepseek_v2",
    (27, 2048, 16, 16, 10944, 102400),
    q_lora_rank=None,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    **_LATENT,
)
_add(
    "DeepSeek-V2",
    "deepseek_v2",
    (60, 5120, 128, 128, 12288, 102400),
    q_lora_rank=1536,
    n_routed_experts=160,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1536,
    first_k_dense_replace=1,
    n_group=8,
    topk_group=3,
    **_LATENT,
)
_add(
    "DeepSeek-V3",
    "deepseek_v3",
    (61, 7168, 128, 128, 18432, 129280),
    q_lora_rank=1536,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    **_LATENT,
)
for _name, _layers, _count in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
    _add(
        _name,
        "gpt_oss",
        (_layers, 2880, 64, 8, 2880, 201088),
        head_dim=64,
        num_local_experts=_count,
        num_experts_per_tok=4,
    )
_add(
    "Phi-3.5-MoE",
    "phimoe",
    (32, 4096, 32, 8, 6400, 32064),
    num_local_experts=16,
    num_experts_per_tok=2,
    attention_bias=True,
    lm_head_bias=True,
)
_add(
    "granite-3.1-3b-a800m",
    "granitemoe",
    (32, 1536, 24, 8, 512, 49155),
    num_local_experts=40,
    num_experts_per_tok=8,
    tie_word_embeddings=True,
)
_add(
    "granite shared",
    "granitemoeshared",
    (4, 1024, 16, 4, 512, 49155),
    num_local_experts=8,
    num_experts_per_tok=2,
    shared_intermediate_size=768,
)
_add(
    "GLM-4.5-Air",
    "glm4_moe",
    (46, 4096, 96, 8, 10944, 151552),
    head_dim=128,
    attention_bias=True,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
)


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

    rows = {}
    for name, config in CONFIGS.items():
        rows[name] = {"config": config, "parameters_count": parameters_count(config)}
        print(f"{name}: {rows[name]['parameters_count']:,}", file=sys.stderr)
    made = {
        "made_by": "python -m benchmarks.families",
        "transformers": transformers.__version__,
        "models": rows,
    }
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
