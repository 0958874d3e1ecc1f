"""Models of Hugging Face's transformers: how many parameters their modules have, by family.

    pip install --target /tmp/transformers transformers
    PYTHONPATH=/tmp/transformers python -m benchmarks.families > tests/estimates/families.json

Builds the module of each configuration on the meta device, where nothing is allocated, and prints the
configurations with the count of the module's parameters, which the tests hold the estimate against.
transformers is needed to make the file, not to test with it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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


def main() -> None:
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
