"""Hugging Face's config.json of decoder-only models, read as the shapes that they describe.

What a configuration leaves out means what transformers' configuration class of its ``model_type``
gives it; a size without which nothing can be built has to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from chopper.errors import JSON_ERRORS, InputError, UsageError
from chopper.models.architectures import MAX_LAYERS, Architecture, Experts, Latent
from chopper.storage.files import read_bytes

Shapes = dict[str, Any]


class Config:
    """A configuration whose values are checked as they are read."""

    def __init__(self, found: dict[str, Any], where: Path | str) -> None:
        self.found = found
        self.where = where

    def refuse(self, what: str) -> InputError:
        """The error that names the file."""
        return InputError(f"{self.where}: {what}")

    def size(self, *names: str) -> int:
        """A whole number above zero, under the first of these names that is there.

        Raises:
            InputError: missing, or no such number.
        """
        name = next((n for n in names if self.found.get(n) is not None), names[0])
        value = self.found.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            said = "is missing" if value is None else f"is {value!r}"
            raise self.refuse(f"{name} {said}; expected a whole number above zero")
        return value

    def size_or(self, name: str, otherwise: int) -> int:
        """An optional size: null and zero stand for what is usual."""
        return self.size(name) if self.found.get(name) else otherwise

    def flag(self, name: str, otherwise: bool) -> bool:
        """A switch.

        Raises:
            InputError: neither true, false nor absent.
        """
        value = self.found.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise self.refuse(f"{name} is {value!r}; expected true or false")
        return value

    def only(self, name: str, allowed: tuple[object, ...]) -> None:
        """Refuse another value than these.

        Raises:
            InputError: another one.
        """
        value = self.found.get(name)
        if value not in allowed:
            known = " or ".join(repr(v) for v in allowed if v is not None)
            raise self.refuse(
                f"{self.found.get('model_type')} with {name} {value!r} is not supported; expected "
                f"{known}, or capture the module itself with --module"
            )

    def any_of(self, *names: str, otherwise: float = 0) -> bool:
        """Whether one of these shares is above zero."""
        return any(self.found.get(name, otherwise) for name in names)


def _common(c: Config) -> Shapes:
    """Llama's names for what nearly all have."""
    layers, width, heads = (
        c.size("num_hidden_layers"),
        c.size("hidden_size"),
        c.size("num_attention_heads"),
    )
    head_width = c.size_or("head_dim", width // heads)
    if not c.found.get("head_dim") and width % heads:
        raise c.refuse(f"hidden_size {width} does not divide into {heads} heads")
    bias = c.flag("attention_bias", False)
    return {
        "layers_count": layers,
        "width": width,
        "heads_count": heads,
        "kv_heads_count": c.size_or("num_key_value_heads", heads),
        "head_width": head_width,
        "ffn_width": c.size("intermediate_size"),
        "vocabulary_count": c.size("vocab_size"),
        "tied": c.flag("tie_word_embeddings", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": c.flag("mlp_bias", False),
        "context_count": c.size_or("max_position_embeddings", 0),
    }


_ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu_new": "tanh",
    "gelu": "smooth",
    "gelu_pytorch_tanh": "smooth",
    "silu": "smooth",
    "swish": "smooth",
}
"""transformers' names: by what their modules keep for backward."""


def _activation(c: Config, name: str, otherwise: str) -> str:
    """Of a network that is not gated.

    Raises:
        InputError: one that is not known.
    """
    value = c.found.get(name) or otherwise
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise c.refuse(f"{name} is {value!r}; expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _layer_norms(c: Config, activation: str = "gelu") -> Shapes:
    """Plain networks of GPT's kind with Llama's names."""
    kind = _activation(c, "hidden_act", activation)
    return _common(c) | {"gated": False, "norm": "layer", "activation": kind}


def _llama(c: Config) -> Shapes:
    return _common(c)


def _qwen2(c: Config) -> Shapes:
    return _common(c) | {"qkv_bias": True}


def _qwen3(c: Config) -> Shapes:
    return _common(c) | {"qk_norm": True}


def _gemma(c: Config) -> Shapes:
    # Gemma's configurations leave the key out, and mean true.
    return _common(c) | {"tied": c.flag("tie_word_embeddings", True)}


def _gemma2(c: Config) -> Shapes:
    return _gemma(c) | {"norms_per_layer_count": 4}


def _gemma3(c: Config) -> Shapes:
    return _gemma2(c) | {"qk_norm": True}


def _tied(c: Config) -> Shapes:
    return _common(c) | {"tied": c.flag("tie_word_embeddings", True)}


def _ernie(c: Config) -> Shapes:
    bias = c.flag("use_bias", False)
    return _tied(c) | {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _seed_oss(c: Config) -> Shapes:
    return _common(c) | {
        "qkv_bias": c.flag("attention_bias", True),
        "output_bias": c.flag("attention_out_bias", False),
        "dropout": c.any_of("residual_dropout", otherwise=0.1),
    }


def _arcee(c: Config) -> Shapes:
    return _common(c) | {"gated": False, "activation": _activation(c, "hidden_act", "relu2")}


def _glm(c: Config) -> Shapes:
    shapes = _common(c) | {"fused_up": True, "output_bias": False, "rotates_a_part": True}
    return shapes | {"qkv_bias": c.flag("attention_bias", True)}


def _glm4(c: Config) -> Shapes:
    return _glm(c) | {"norms_per_layer_count": 4}


def _phi3(c: Config) -> Shapes:
    return _common(c) | {
        "fused_qkv": True,
        "fused_up": True,
        "rotates_a_part": True,
        "dropout": c.any_of("resid_pdrop"),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
    }


def _olmo(c: Config) -> Shapes:
    return _common(c) | {"norm": "layer", "norm_weight": False, "norm_bias": False}


def _olmo2(c: Config) -> Shapes:
    return _common(c) | {"norms_after": True, "qk_norm": True, "qk_norm_whole": True}


def _cohere(c: Config) -> Shapes:
    return _tied(c) | {
        "norm": "layer",
        "norm_bias": False,
        "norms_per_layer_count": 1,
        "parallel": True,
        "qk_norm": c.flag("use_qk_norm", False),
        "qk_norm_whole": True,
    }


def _stablelm(c: Config) -> Shapes:
    parallel = c.flag("use_parallel_residual", False)
    return _common(c) | {
        "norm": "layer",
        "norms_per_layer_count": 1 if parallel else 2,
        "parallel": parallel,
        "qkv_bias": c.flag("use_qkv_bias", False),
        "output_bias": False,
        "rotates_a_part": True,
        "qk_norm": c.flag("qk_layernorm", False),
        "qk_norm_whole": True,
        "dropout": c.any_of("hidden_dropout"),
    }


def _starcoder2(c: Config) -> Shapes:
    bias = c.flag("use_bias", True)
    return _layer_norms(c) | {
        "tied": c.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "dropout": c.any_of("residual_dropout"),
    }


def _nemotron(c: Config) -> Shapes:
    return _layer_norms(c, "relu2") | {"rotates_a_part": True}


def _phi(c: Config) -> Shapes:
    c.only("qk_layernorm", (False, None))
    return _layer_norms(c, "gelu_new") | {
        "rotates_a_part": True,
        "norms_per_layer_count": 1,
        "parallel": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "dropout": c.any_of("resid_pdrop"),
    }


def _gpt_neox(c: Config) -> Shapes:
    bias = c.flag("attention_bias", True)
    shapes = _layer_norms(c)
    return shapes | {
        "kv_heads_count": shapes["heads_count"],
        "rotates_a_part": True,
        "parallel": c.flag("use_parallel_residual", True),
        "fused_qkv": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "dropout": c.any_of("hidden_dropout"),
    }


def _falcon(c: Config) -> Shapes:
    c.only("alibi", (False, None))
    width, heads = c.size("hidden_size"), c.size("num_attention_heads", "n_head")
    new = c.flag("new_decoder_architecture", False)
    parallel = new or c.flag("parallel_attn", True)
    if new:
        kv = c.size("num_kv_heads", "n_head_kv")
    else:
        kv = 1 if c.flag("multi_query", True) else heads
    if width % heads:
        raise c.refuse(f"hidden_size {width} does not divide into {heads} heads")
    bias = c.flag("bias", False)
    two = not parallel or c.size_or("num_ln_in_parallel_attn", 2 if new else 1) == 2
    return {
        "layers_count": c.size("num_hidden_layers", "n_layer"),
        "width": width,
        "heads_count": heads,
        "kv_heads_count": kv,
        "head_width": width // heads,
        "ffn_width": c.size_or("ffn_hidden_size", 4 * width),
        "vocabulary_count": c.size("vocab_size"),
        "tied": c.flag("tie_word_embeddings", True),
        "gated": False,
        "activation": _activation(c, "activation", "gelu"),
        "norm": "layer",
        "norms_per_layer_count": 2 if two else 1,
        "parallel": parallel,
        "fused_qkv": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "dropout": c.any_of("hidden_dropout"),
        "context_count": c.size_or("max_position_embeddings", 0),
    }


def _opt(c: Config) -> Shapes:
    width, heads = c.size("hidden_size"), c.size("num_attention_heads")
    c.only("word_embed_proj_dim", (width, None))
    c.only("do_layer_norm_before", (True, None))
    c.only("_remove_final_layer_norm", (False, None))
    if width % heads:
        raise c.refuse(f"hidden_size {width} does not divide into {heads} heads")
    affine, bias = c.flag("layer_norm_elementwise_affine", True), c.flag("enable_bias", True)
    positions = c.size_or("max_position_embeddings", 2048)
    return {
        "layers_count": c.size("num_hidden_layers"),
        "width": width,
        "heads_count": heads,
        "kv_heads_count": heads,
        "head_width": width // heads,
        "ffn_width": c.size("ffn_dim"),
        "vocabulary_count": c.size("vocab_size"),
        "tied": c.flag("tie_word_embeddings", True),
        "positions_count": positions + 2,
        "positions_unused_count": 2,
        "gated": False,
        "activation": _activation(c, "activation_function", "relu"),
        "norm": "layer",
        "norm_weight": affine,
        "norm_bias": affine,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "dropout": c.any_of("dropout", otherwise=0.1),
        "context_count": positions,
    }


def _gpt(c: Config) -> Shapes:
    """GPT-2's names."""
    width, heads = c.size("n_embd"), c.size("n_head")
    if width % heads:
        raise c.refuse(f"n_embd {width} does not divide into n_head {heads} heads")
    return {
        "layers_count": c.size("n_layer"),
        "width": width,
        "heads_count": heads,
        "kv_heads_count": heads,
        "head_width": width // heads,
        "ffn_width": c.size_or("n_inner", 4 * width),
        "vocabulary_count": c.size("vocab_size"),
        "gated": False,
        "activation": _activation(c, "activation_function", "gelu_new"),
        "norm": "layer",
        "mlp_bias": True,
        "context_count": c.size("n_positions"),
    }


def _gpt2(c: Config) -> Shapes:
    return _gpt(c) | {
        "tied": c.flag("tie_word_embeddings", True),
        "positions_count": c.size("n_positions"),
        "qkv_bias": True,
        "output_bias": True,
        "dropout": c.any_of("resid_pdrop", "attn_pdrop", "embd_pdrop", otherwise=0.1),
    }


def _gpt_bigcode(c: Config) -> Shapes:
    many = not c.flag("multi_query", True)
    return _gpt2(c) | {
        "kv_heads_count": c.size("n_head") if many else 1,
        "fused_qkv": True,
        "activation": _activation(c, "activation_function", "gelu_pytorch_tanh"),
    }


def _gptj(c: Config) -> Shapes:
    return _gpt(c) | {
        "rotates_a_part": True,
        "tied": c.flag("tie_word_embeddings", False),
        "norms_per_layer_count": 1,
        "parallel": True,
        "head_bias": True,
        "dropout": c.any_of("resid_pdrop"),
    }


def _experts(c: Config, width: int, **rest: Any) -> Experts:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return Experts(
        count=c.size(*names), chosen_count=c.size("num_experts_per_tok"), width=width, **rest
    )


def _mixtral(c: Config) -> Shapes:
    shapes = _common(c)
    return shapes | {
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "experts": _experts(c, shapes["ffn_width"]),
    }


def _phimoe(c: Config) -> Shapes:
    shapes = _common(c)
    return shapes | {
        "norm": "layer",
        "head_bias": c.flag("lm_head_bias", False),
        "mlp_bias": False,
        "experts": _experts(c, shapes["ffn_width"]),
    }


def _granitemoe(c: Config) -> Shapes:
    shapes = _common(c)
    shared = c.size_or("shared_intermediate_size", 0)
    return shapes | {
        "output_bias": shapes["qkv_bias"],
        "mlp_bias": False,
        "experts": _experts(c, shapes["ffn_width"], shared_width=shared),
    }


def _olmoe(c: Config) -> Shapes:
    shapes = _common(c)
    return shapes | {
        "qk_norm": True,
        "qk_norm_whole": True,
        "mlp_bias": False,
        "experts": _experts(c, shapes["ffn_width"]),
    }


def _gpt_oss(c: Config) -> Shapes:
    shapes = _common(c)
    bias = c.flag("attention_bias", True)
    return shapes | {
        "qkv_bias": bias,
        "output_bias": bias,
        "sinks": True,
        "experts": _experts(c, shapes["ffn_width"], bias=True, router_bias=True, clamped=True),
    }


def _layers(c: Config) -> int:
    """Layers, where each is looked at.

    Raises:
        InputError: more than any model has.
    """
    count = c.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise c.refuse(f"num_hidden_layers is {count:.3g}; expected at most {MAX_LAYERS}")
    return count


def _sparse(c: Config) -> tuple[int, ...]:
    """Qwen's layers without experts: listed ones, and all but each n-th."""
    listed = c.found.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise c.refuse(f"mlp_only_layers is {listed!r}; expected a list of layers")
    each = c.size_or("decoder_sparse_step", 1)
    layers = range(_layers(c))
    plain = set(listed)
    return tuple(i for i in layers if i in plain or (i + 1) % each)


def _qwen2_moe(c: Config) -> Shapes:
    return _common(c) | {
        "qkv_bias": c.flag("qkv_bias", True),
        "output_bias": False,
        "mlp_bias": False,
        "experts": _experts(
            c,
            c.size("moe_intermediate_size"),
            shared_width=c.size("shared_expert_intermediate_size"),
            shared_gate=True,
            dense_layers=_sparse(c),
        ),
    }


def _qwen3_moe(c: Config) -> Shapes:
    return _common(c) | {
        "qk_norm": True,
        "mlp_bias": False,
        "experts": _experts(c, c.size("moe_intermediate_size"), dense_layers=_sparse(c)),
    }


def _first_dense(c: Config, otherwise: int) -> Experts:
    """DeepSeek's: the first layers plain, experts that are shared beside the others."""
    width = c.size("moe_intermediate_size")
    first = c.found.get("first_k_dense_replace")
    first = otherwise if first is None else first
    if not isinstance(first, int) or first < 0:
        raise c.refuse(f"first_k_dense_replace is {first!r}; expected a whole number from zero")
    c.only("moe_layer_freq", (1, None))
    return _experts(
        c,
        width,
        shared_width=width * c.size_or("n_shared_experts", 0),
        router_in_float32=True,
        dense_layers=tuple(range(min(first, _layers(c)))),
    )


def _deepseek(c: Config) -> Shapes:
    rope, nope = c.size("qk_rope_head_dim"), c.size("qk_nope_head_dim")
    # Their head_dim is that of the rotated part.
    shapes = _common(Config({**c.found, "head_dim": nope + rope}, c.where))
    first = 0 if c.found["model_type"] == "deepseek_v2" else 3
    return shapes | {
        "kv_heads_count": shapes["heads_count"],
        "mlp_bias": c.flag("mlp_bias", False),
        "latent": Latent(
            kv_rank=c.size("kv_lora_rank"),
            q_rank=c.size_or("q_lora_rank", 0),
            rope_width=rope,
            value_width=c.size("v_head_dim"),
        ),
        "experts": _first_dense(c, first),
    }


def _glm4_moe(c: Config) -> Shapes:
    return _common(c) | {
        "output_bias": False,
        "mlp_bias": False,
        "rotates_a_part": True,
        "qk_norm": c.flag("use_qk_norm", False),
        "experts": _first_dense(c, 1),
    }


FAMILIES: dict[str, Callable[[Config], Shapes]] = {
    "arcee": _arcee,
    "cohere": _cohere,
    "cohere2": _cohere,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "ernie4_5": _ernie,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "granite": _llama,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "olmoe": _olmoe,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "seed_oss": _seed_oss,
    "smollm3": _tied,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""By ``model_type``."""

_GEMMA2 = {"num_key_value_heads": 4, "head_dim": 256}
_GLM = {"num_key_value_heads": 2, "head_dim": 128}
_DEEPSEEK_V3 = {"q_lora_rank": 1536, "n_shared_experts": 1}
_LEFT_OUT: dict[str, dict[str, int]] = {
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": _DEEPSEEK_V3,
    "ernie4_5": _GLM,
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": _GEMMA2,
    # Published ones leave these out.
    "gemma3_text": {**_GEMMA2, "num_attention_heads": 8, "vocab_size": 262208},
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64},
    "kimi_k2": _DEEPSEEK_V3,
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2},
}
"""What a key that is not there means, where that does not follow from the other sizes (null is not left out)."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def read_config(path: Path) -> Architecture:
    """The shapes that a Hugging Face config.json describes.

    Raises:
        InputError: no JSON object, an architecture that is not supported, a missing or wrong size.
    """
    where = path / "config.json" if path.is_dir() else path
    try:
        found = msgspec.json.decode(read_bytes(where))
    except JSON_ERRORS as exc:
        raise InputError(f"{where}: is not JSON ({exc}); expected a model's config.json") from exc
    if not isinstance(found, dict):
        raise InputError(f"{where}: is not a JSON object; expected a model's config.json")
    # Checkpoints have theirs in a folder that is named for the model.
    name = where.resolve().parent.name if where.stem == "config" else where.stem
    return of_config(found, name or where.stem, where)


def of_config(found: dict[str, Any], name: str, where: Path | str) -> Architecture:
    """The shapes that a configuration describes.

    Args:
        found: what is in a config.json.
        name: of the model.
        where: it was found, for messages.

    Raises:
        InputError: an architecture that is not supported, a missing or wrong size.
    """
    kind = found.get("model_type")
    if kind == "gemma3" and isinstance(found.get("text_config"), dict):
        found = {**found["text_config"], "model_type": "gemma3_text"}
        kind = "gemma3_text"
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(
            f"{where}: model_type {kind!r} is not supported; expected one of "
            f"{', '.join(FAMILIES)}, or capture the module itself with --module"
        )
    try:
        shapes = family(Config({**_LEFT_OUT.get(str(kind), {}), **found}, where))
        if "experts" not in shapes:
            experts = next((k for k in _EXPERTS if found.get(k)), None)
            if experts is not None:
                raise InputError(
                    f"{where}: {experts} is {found[experts]!r}, but {kind} has no mixture of experts; "
                    "give the model_type that has, or capture the module itself with --module"
                )
        return Architecture(name=name, **shapes)
    except UsageError as exc:
        raise InputError(f"{where}: {exc}") from exc
