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
"""Field of an architecture → its value, or how it is read."""


class Config:
    """A configuration whose values are checked as they are read."""

    def __init__(self, values: dict[str, Any], where: Path | str) -> None:
        self.values = values
        self.where = where

    def refuse(self, what: str) -> InputError:
        """The error that names the file."""
        return InputError(f"{self.where}: {what}")

    def size(self, *names: str) -> int:
        """A whole number above zero, under the first of these names that is there.

        Raises:
            InputError: missing, or no such number.
        """
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            said = "is missing" if value is None else f"is {value!r}"
            raise self.refuse(f"{name} {said}; expected a whole number above zero")
        return value

    def size_or(self, name: str, otherwise: int) -> int:
        """An optional size: null and zero stand for what is usual."""
        return self.size(name) if self.values.get(name) else otherwise

    def flag(self, name: str, otherwise: bool) -> bool:
        """A switch.

        Raises:
            InputError: neither true, false nor absent.
        """
        value = self.values.get(name)
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
        value = self.values.get(name)
        if value not in allowed:
            known = " or ".join(repr(v) for v in allowed if v is not None)
            raise self.refuse(
                f"{self.values.get('model_type')} with {name} {value!r} is not supported; expected "
                f"{known}, or capture the module itself with --module"
            )

    def any_of(self, *names: str, otherwise: float = 0) -> bool:
        """Return whether one of these shares is above zero."""
        return any(self.values.get(name, otherwise) for name in names)


Read = Callable[[Config], Any]


def _size(*names: str) -> Read:
    return lambda c: c.size(*names)


def _size_or(name: str, otherwise: int) -> Read:
    return lambda c: c.size_or(name, otherwise)


def _flag(name: str, otherwise: bool) -> Read:
    return lambda c: c.flag(name, otherwise)


def _any_of(*names: str, otherwise: float = 0) -> Read:
    return lambda c: c.any_of(*names, otherwise=otherwise)


def _head_width(c: Config) -> int:
    width, heads = c.size("hidden_size"), c.size("num_attention_heads")
    if not c.values.get("head_dim") and width % heads:
        raise c.refuse(f"hidden_size {width} does not divide into {heads} heads")
    return c.size_or("head_dim", width // heads)


def _even(width_name: str, *heads_names: str) -> Read:
    """Return a reader of the width of a head, of which the heads make up the whole."""

    def read(c: Config) -> int:
        width, heads = c.size(width_name), c.size(*heads_names)
        if width % heads:
            of = "heads" if width_name == "hidden_size" else "n_head"
            many = f"{heads} heads" if of == "heads" else f"n_head {heads} heads"
            raise c.refuse(f"{width_name} {width} does not divide into {many}")
        return width // heads

    return read


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


def _activation(name: str, otherwise: str) -> Read:
    """Return a reader of the activation of a network that is not gated."""

    def read(c: Config) -> str:
        value = c.values.get(name) or otherwise
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise c.refuse(f"{name} is {value!r}; expected one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    return read


def _experts(width: Read, *, dense_layers: Read | None = None, **rest: Any) -> Read:
    """Return a reader of a mixture of experts, each of a width."""

    def read(c: Config) -> Experts:
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        more = {k: v(c) if callable(v) else v for k, v in rest.items()}
        if dense_layers is not None:
            more["dense_layers"] = dense_layers(c)
        return Experts(
            count=c.size(*names), chosen_count=c.size("num_experts_per_tok"), width=width(c), **more
        )

    return read


def _layers(c: Config) -> int:
    """Return the number of layers, where each is looked at."""
    count = c.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise c.refuse(f"num_hidden_layers is {count:.3g}; expected at most {MAX_LAYERS}")
    return count


def _sparse(c: Config) -> tuple[int, ...]:
    """Return Qwen's layers without experts: listed ones, and all but each n-th."""
    listed = c.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise c.refuse(f"mlp_only_layers is {listed!r}; expected a list of layers")
    each = c.size_or("decoder_sparse_step", 1)
    plain = set(listed)
    return tuple(i for i in range(_layers(c)) if i in plain or (i + 1) % each)


def _first_dense(otherwise: int) -> Read:
    """Return a reader of DeepSeek's: first layers plain, shared experts beside the others."""

    def read(c: Config) -> Experts:
        width = c.size("moe_intermediate_size")
        first = c.values.get("first_k_dense_replace")
        first = otherwise if first is None else first
        if not isinstance(first, int) or first < 0:
            raise c.refuse(f"first_k_dense_replace is {first!r}; expected a whole number from zero")
        c.only("moe_layer_freq", (1, None))
        shared = width * c.size_or("n_shared_experts", 0)
        plain = tuple(range(min(first, _layers(c))))
        made: Experts = _experts(lambda _: width, shared_width=shared, router_in_float32=True)(c)
        return msgspec.structs.replace(made, dense_layers=plain)

    return read


def _latent(c: Config) -> Latent:
    return Latent(
        kv_rank=c.size("kv_lora_rank"),
        q_rank=c.size_or("q_lora_rank", 0),
        rope_width=c.size("qk_rope_head_dim"),
        value_width=c.size("v_head_dim"),
    )


def _falcon_kv(c: Config) -> int:
    if c.flag("new_decoder_architecture", False):
        return c.size("num_kv_heads", "n_head_kv")
    return 1 if c.flag("multi_query", True) else c.size("num_attention_heads", "n_head")


def _falcon_parallel(c: Config) -> bool:
    return c.flag("new_decoder_architecture", False) or c.flag("parallel_attn", True)


def _falcon_norms(c: Config) -> int:
    usual = 2 if c.flag("new_decoder_architecture", False) else 1
    if not _falcon_parallel(c):
        return 2
    return 2 if c.size_or("num_ln_in_parallel_attn", usual) == 2 else 1


_KV_HEADS: Read = lambda c: c.size_or("num_key_value_heads", c.size("num_attention_heads"))  # noqa: E731
_MIXTURE_WIDTH = _size("intermediate_size")


def _biased(read: Read | bool, *names: str) -> Shapes:
    """Return the same switch for several kinds of bias; all three where none is named."""
    return dict.fromkeys(names or ("qkv_bias", "output_bias", "mlp_bias"), read)


_COMMON: Shapes = {
    "layers_count": _size("num_hidden_layers"),
    "width": _size("hidden_size"),
    "heads_count": _size("num_attention_heads"),
    "head_width": _head_width,
    **_biased(_flag("attention_bias", False), "qkv_bias", "output_bias"),
    "kv_heads_count": _KV_HEADS,
    "ffn_width": _size("intermediate_size"),
    "vocabulary_count": _size("vocab_size"),
    "tied": _flag("tie_word_embeddings", False),
    "mlp_bias": _flag("mlp_bias", False),
    "context_count": _size_or("max_position_embeddings", 0),
}
"""Llama's names, which nearly all have."""
_TIED = _COMMON | {"tied": _flag("tie_word_embeddings", True)}
"""Configurations that leave the key out mean true."""
_PLAIN: Shapes = {"gated": False, "norm": "layer"}
_LAYER_NORMS = _COMMON | _PLAIN | {"activation": _activation("hidden_act", "gelu")}
"""Plain networks of GPT's kind with Llama's names."""
_GEMMA2_SHAPES = _TIED | {"norms_per_layer_count": 4}
_GLM_SHAPES = _COMMON | {
    "fused_up": True,
    "output_bias": False,
    "rotates_a_part": True,
    "qkv_bias": _flag("attention_bias", True),
}
_OLMO2 = _COMMON | {"norms_after": True, "qk_norm": True, "qk_norm_whole": True}
_COHERE = _TIED | {
    "norm": "layer",
    "norm_bias": False,
    "norms_per_layer_count": 1,
    "parallel": True,
    "qk_norm": _flag("use_qk_norm", False),
    "qk_norm_whole": True,
}
_GPT: Shapes = {
    "layers_count": _size("n_layer"),
    "width": _size("n_embd"),
    "heads_count": _size("n_head"),
    "kv_heads_count": _size("n_head"),
    "head_width": _even("n_embd", "n_head"),
    "ffn_width": lambda c: c.size_or("n_inner", 4 * c.size("n_embd")),
    "vocabulary_count": _size("vocab_size"),
    **_PLAIN,
    "activation": _activation("activation_function", "gelu_new"),
    "mlp_bias": True,
    "context_count": _size("n_positions"),
}
"""GPT-2's names."""
_GPT2 = _GPT | {
    "tied": _flag("tie_word_embeddings", True),
    "positions_count": _size("n_positions"),
    "qkv_bias": True,
    "output_bias": True,
    "dropout": _any_of("resid_pdrop", "attn_pdrop", "embd_pdrop", otherwise=0.1),
}
_MIXTRAL = _COMMON | _biased(False) | {"experts": _experts(_MIXTURE_WIDTH)}
_GRANITE_MOE = _COMMON | {
    "mlp_bias": False,
    "experts": _experts(_MIXTURE_WIDTH, shared_width=_size_or("shared_intermediate_size", 0)),
}
_DEEPSEEK = _COMMON | {
    "head_width": lambda c: c.size("qk_nope_head_dim") + c.size("qk_rope_head_dim"),
    "kv_heads_count": _size("num_attention_heads"),
    "mlp_bias": _flag("mlp_bias", False),
    "latent": _latent,
}

FAMILIES: dict[str, Shapes] = {
    "arcee": _COMMON | {"gated": False, "activation": _activation("hidden_act", "relu2")},
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "deepseek_v2": _DEEPSEEK | {"experts": _first_dense(0)},
    "deepseek_v3": _DEEPSEEK | {"experts": _first_dense(3)},
    "ernie4_5": _TIED | _biased(_flag("use_bias", False)),
    "falcon": {
        "layers_count": _size("num_hidden_layers", "n_layer"),
        "width": _size("hidden_size"),
        "heads_count": _size("num_attention_heads", "n_head"),
        "kv_heads_count": _falcon_kv,
        "head_width": _even("hidden_size", "num_attention_heads", "n_head"),
        "ffn_width": lambda c: c.size_or("ffn_hidden_size", 4 * c.size("hidden_size")),
        "vocabulary_count": _size("vocab_size"),
        "tied": _flag("tie_word_embeddings", True),
        **_PLAIN,
        "activation": _activation("activation", "gelu"),
        "norms_per_layer_count": _falcon_norms,
        "parallel": _falcon_parallel,
        "fused_qkv": True,
        **_biased(_flag("bias", False)),
        "dropout": _any_of("hidden_dropout"),
        "context_count": _size_or("max_position_embeddings", 0),
    },
    "gemma": _TIED,
    "gemma2": _GEMMA2_SHAPES,
    "gemma3_text": _GEMMA2_SHAPES | {"qk_norm": True},
    "glm": _GLM_SHAPES,
    "glm4": _GLM_SHAPES | {"norms_per_layer_count": 4},
    "glm4_moe": _COMMON
    | {
        "output_bias": False,
        "mlp_bias": False,
        "rotates_a_part": True,
        "qk_norm": _flag("use_qk_norm", False),
        "experts": _first_dense(1),
    },
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2
    | {
        "kv_heads_count": lambda c: 1 if c.flag("multi_query", True) else c.size("n_head"),
        "fused_qkv": True,
        "activation": _activation("activation_function", "gelu_pytorch_tanh"),
    },
    "gpt_neox": _LAYER_NORMS
    | _biased(_flag("attention_bias", True), "qkv_bias", "output_bias")
    | {
        "kv_heads_count": _size("num_attention_heads"),
        "rotates_a_part": True,
        "parallel": _flag("use_parallel_residual", True),
        "fused_qkv": True,
        "mlp_bias": True,
        "dropout": _any_of("hidden_dropout"),
    },
    "gpt_oss": _COMMON
    | _biased(_flag("attention_bias", True), "qkv_bias", "output_bias")
    | {
        "sinks": True,
        "experts": _experts(_MIXTURE_WIDTH, bias=True, router_bias=True, clamped=True),
    },
    "gptj": _GPT
    | {
        "rotates_a_part": True,
        "tied": _flag("tie_word_embeddings", False),
        "norms_per_layer_count": 1,
        "parallel": True,
        "head_bias": True,
        "dropout": _any_of("resid_pdrop"),
    },
    "granite": _COMMON,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "kimi_k2": _DEEPSEEK | {"experts": _first_dense(3)},
    "llama": _COMMON,
    "mistral": _COMMON,
    "mixtral": _MIXTRAL,
    "nemotron": _LAYER_NORMS
    | {"activation": _activation("hidden_act", "relu2"), "rotates_a_part": True},
    "olmo": _COMMON | {"norm": "layer", "norm_weight": False, "norm_bias": False},
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _COMMON
    | {
        "qk_norm": True,
        "qk_norm_whole": True,
        "mlp_bias": False,
        "experts": _experts(_MIXTURE_WIDTH),
    },
    "opt": {
        "layers_count": _size("num_hidden_layers"),
        "width": _size("hidden_size"),
        "heads_count": _size("num_attention_heads"),
        "kv_heads_count": _size("num_attention_heads"),
        "head_width": _even("hidden_size", "num_attention_heads"),
        "ffn_width": _size("ffn_dim"),
        "vocabulary_count": _size("vocab_size"),
        "tied": _flag("tie_word_embeddings", True),
        "positions_count": lambda c: c.size_or("max_position_embeddings", 2048) + 2,
        "positions_unused_count": 2,
        **_PLAIN,
        "activation": _activation("activation_function", "relu"),
        **_biased(_flag("layer_norm_elementwise_affine", True), "norm_weight", "norm_bias"),
        **_biased(_flag("enable_bias", True)),
        "dropout": _any_of("dropout", otherwise=0.1),
        "context_count": _size_or("max_position_embeddings", 2048),
    },
    "phi": _LAYER_NORMS
    | _biased(True)
    | {
        "activation": _activation("hidden_act", "gelu_new"),
        "rotates_a_part": True,
        "norms_per_layer_count": 1,
        "parallel": True,
        "head_bias": True,
        "dropout": _any_of("resid_pdrop"),
    },
    "phi3": _COMMON
    | _biased(False)
    | {
        "fused_qkv": True,
        "fused_up": True,
        "rotates_a_part": True,
        "dropout": _any_of("resid_pdrop"),
    },
    "phimoe": _COMMON
    | {
        "norm": "layer",
        "head_bias": _flag("lm_head_bias", False),
        "mlp_bias": False,
        "experts": _experts(_MIXTURE_WIDTH),
    },
    "qwen2": _COMMON | {"qkv_bias": True},
    "qwen2_moe": _COMMON
    | {
        "qkv_bias": _flag("qkv_bias", True),
        "output_bias": False,
        "mlp_bias": False,
        "experts": _experts(
            _size("moe_intermediate_size"),
            shared_width=_size("shared_expert_intermediate_size"),
            shared_gate=True,
            dense_layers=_sparse,
        ),
    },
    "qwen3": _COMMON | {"qk_norm": True},
    "qwen3_moe": _COMMON
    | {
        "qk_norm": True,
        "mlp_bias": False,
        "experts": _experts(_size("moe_intermediate_size"), dense_layers=_sparse),
    },
    "seed_oss": _COMMON
    | {
        "qkv_bias": _flag("attention_bias", True),
        "output_bias": _flag("attention_out_bias", False),
        "dropout": _any_of("residual_dropout", otherwise=0.1),
    },
    "smollm3": _TIED,
    "stablelm": _COMMON
    | {
        "norm": "layer",
        "norms_per_layer_count": lambda c: 1 if c.flag("use_parallel_residual", False) else 2,
        "parallel": _flag("use_parallel_residual", False),
        "qkv_bias": _flag("use_qkv_bias", False),
        "output_bias": False,
        "rotates_a_part": True,
        "qk_norm": _flag("qk_layernorm", False),
        "qk_norm_whole": True,
        "dropout": _any_of("hidden_dropout"),
    },
    "starcoder2": _LAYER_NORMS
    | _biased(_flag("use_bias", True))
    | {
        "tied": _flag("tie_word_embeddings", True),
        "dropout": _any_of("residual_dropout"),
    },
}
"""``model_type`` → field of Architecture → its value, or how it is read."""

_ONLY: dict[str, dict[str, Callable[[Config], tuple[object, ...]]]] = {
    "falcon": {"alibi": lambda _: (False, None)},
    "opt": {
        "word_embed_proj_dim": lambda c: (c.size("hidden_size"), None),
        "do_layer_norm_before": lambda _: (True, None),
        "_remove_final_layer_norm": lambda _: (False, None),
    },
    "phi": {"qk_layernorm": lambda _: (False, None)},
}
"""``model_type`` → key → values without which its shapes are others."""

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
"""Meaning of a key that is not there, where that does not follow from the other sizes (null is not
left out)."""

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
        config = Config({**_LEFT_OUT.get(str(kind), {}), **found}, where)
        for key, allowed in _ONLY.get(str(kind), {}).items():
            config.only(key, allowed(config))
        shapes = {field: how(config) if callable(how) else how for field, how in family.items()}
        if "experts" not in shapes:
            experts = next((k for k in _EXPERTS if found.get(k)), None)
            if experts is not None:
                raise InputError(
                    f"{where}: {experts} is {found[experts]!r}, but {kind} has no mixture of "
                    f"experts; "
                    "give the model_type that has, or capture the module itself with --module"
                )
        return Architecture(name=name, **shapes)
    except UsageError as exc:
        raise InputError(f"{where}: {exc}") from exc
