"""Shapes of dense transformers: a catalogue by name, and readers of Hugging Face's config.json.

Only what determines parameters, FLOP and memory is kept. Parameters are counted from the shapes,
never quoted, and the tests hold them against the totals that the models are published with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from chopper.errors import InputError, UsageError
from chopper.quantities import one_of

MAX_PARAMETERS = 10**15
"""More than this is a slip, and overflows what is computed from it."""


class Architecture(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One decoder-only transformer."""

    name: str
    layers_count: int
    width: int
    heads_count: int
    kv_heads_count: int
    head_width: int
    ffn_width: int
    vocabulary_count: int
    tied: bool = False
    """The head shares the embedding's weights."""
    positions_count: int = 0
    """Learned position embeddings; 0 for rotary."""
    gated: bool = True
    """SwiGLU or GeGLU: two up projections; else one, with GELU."""
    norm: Literal["rms", "layer"] = "rms"
    norms_per_layer_count: int = 2
    qk_norm: bool = False
    """Queries and keys are normalized per head."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dropout: bool = False
    context_count: int = 0
    """Longest sequence that it was made for; 0 for not known."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built, or counted.

        Raises:
            UsageError: a size that is not positive, heads that do not share evenly, too large.
        """
        for what in (
            "layers_count",
            "width",
            "heads_count",
            "kv_heads_count",
            "head_width",
            "ffn_width",
            "vocabulary_count",
        ):
            if getattr(self, what) <= 0:
                raise UsageError(
                    f"model {self.name}: {what} is {getattr(self, what)}, expected more than zero"
                )
        if self.heads_count % self.kv_heads_count:
            raise UsageError(
                f"model {self.name}: {self.heads_count} query heads cannot share "
                f"{self.kv_heads_count} key heads evenly"
            )
        if self.parameters_count > MAX_PARAMETERS:
            raise UsageError(
                f"model {self.name}: {self.parameters_count:.3g} parameters, expected at most "
                f"{MAX_PARAMETERS:.0g}"
            )

    @property
    def q_width(self) -> int:
        """Width of all queries together; not always the model's."""
        return self.heads_count * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads_count * self.head_width

    @property
    def norm_count(self) -> int:
        """Parameters of one norm over the width."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def attention_count(self) -> int:
        """Parameters of one layer's attention."""
        weights = self.width * (self.q_width + 2 * self.kv_width) + self.q_width * self.width
        biases = (self.q_width + 2 * self.kv_width) * self.qkv_bias + self.width * self.output_bias
        return weights + biases + 2 * self.head_width * self.qk_norm

    @property
    def mlp_count(self) -> int:
        """Parameters of one layer's feed-forward network."""
        ups = 2 if self.gated else 1
        biases = (ups * self.ffn_width + self.width) * self.mlp_bias
        return (ups + 1) * self.width * self.ffn_width + biases

    @property
    def layer_count(self) -> int:
        """Parameters of one layer."""
        norms = self.norms_per_layer_count * self.norm_count
        return self.attention_count + self.mlp_count + norms

    @property
    def embedding_count(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary_count * self.width

    @property
    def outer_count(self) -> int:
        """Parameters outside of the layers: embeddings, last norm, head when it is not tied."""
        head = 0 if self.tied else self.embedding_count
        return self.embedding_count + self.positions_count * self.width + self.norm_count + head

    @property
    def parameters_count(self) -> int:
        """All parameters."""
        return self.layers_count * self.layer_count + self.outer_count


def _llama(name: str, layers: int, width: int, heads: int, kv: int, ffn: int, **rest: Any) -> Any:
    shapes = {"vocabulary_count": 128256, "context_count": 8192, **rest}
    head_width = shapes.pop("head_width", width // heads)
    return Architecture(
        name=name,
        layers_count=layers,
        width=width,
        heads_count=heads,
        kv_heads_count=kv,
        head_width=head_width,
        ffn_width=ffn,
        **shapes,
    )


def _gpt(name: str, layers: int, width: int, heads: int, context: int = 1024) -> Architecture:
    return Architecture(
        name=name,
        layers_count=layers,
        width=width,
        heads_count=heads,
        kv_heads_count=heads,
        head_width=width // heads,
        ffn_width=4 * width,
        vocabulary_count=50257,
        tied=True,
        positions_count=context,
        gated=False,
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=True,
        context_count=context,
    )


_L2: dict[str, Any] = {"vocabulary_count": 32000, "context_count": 4096}
_L31: dict[str, Any] = {"context_count": 131072}
_QWEN: dict[str, Any] = {"qkv_bias": True, "context_count": 32768}
_GEMMA: dict[str, Any] = {"vocabulary_count": 256000, "tied": True}
CATALOGUE: dict[str, Architecture] = {
    model.name: model
    for model in (
        _gpt("gpt2", 12, 768, 12),
        _gpt("gpt2-medium", 24, 1024, 16),
        _gpt("gpt2-large", 36, 1280, 20),
        _gpt("gpt2-xl", 48, 1600, 25),
        _gpt("gpt3-175b", 96, 12288, 96, 2048),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, **_L2),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, **_L2),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, **_L2),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672),
        _llama("llama3.1-8b", 32, 4096, 32, 8, 14336, **_L31),
        _llama("llama3.1-70b", 80, 8192, 64, 8, 28672, **_L31),
        _llama("llama3.1-405b", 126, 16384, 128, 8, 53248, **_L31),
        _llama("llama3.2-1b", 16, 2048, 32, 8, 8192, tied=True, **_L31),
        _llama("llama3.2-3b", 28, 3072, 24, 8, 8192, tied=True, **_L31),
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, vocabulary_count=32000, context_count=32768),
        _llama("qwen2.5-0.5b", 24, 896, 14, 2, 4864, vocabulary_count=151936, tied=True, **_QWEN),
        _llama("qwen2-7b", 28, 3584, 28, 4, 18944, vocabulary_count=152064, **_QWEN),
        _llama("qwen2-72b", 80, 8192, 64, 8, 29568, vocabulary_count=152064, **_QWEN),
        _llama("gemma-2b", 18, 2048, 8, 1, 16384, head_width=256, **_GEMMA),
        _llama("gemma-7b", 28, 3072, 16, 16, 24576, head_width=256, **_GEMMA),
        _llama(
            "gemma2-9b", 42, 3584, 16, 8, 14336, head_width=256, norms_per_layer_count=4, **_GEMMA
        ),
        _llama(
            "gemma3-12b",
            48,
            3840,
            16,
            8,
            15360,
            head_width=256,
            norms_per_layer_count=4,
            qk_norm=True,
            vocabulary_count=262208,
            tied=True,
            context_count=131072,
        ),
    )
}
"""Published models by name: shapes from their config.json, GPT-3's from arXiv 2005.14165."""

_ALIASES = {"llama3-405b": "llama3.1-405b", "llama3.2-8b": "llama3.1-8b", "gpt3": "gpt3-175b"}


def named(name: str) -> Architecture:
    """The model that a person means: ``llama3-8b``, ``Llama 3 8B``, ``Meta-Llama-3-8B``.

    Raises:
        UsageError: no model is called so; the nearest names are suggested.
    """

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum() or c == ".").removeprefix("meta")

    names = {plain(n): n for n in CATALOGUE} | {plain(a): n for a, n in _ALIASES.items()}
    found = names.get(plain(name))
    return CATALOGUE[found if found else one_of("model", name, CATALOGUE)]


_SUPPORTED = ("gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "qwen2", "qwen3")


def read_config(path: Path) -> Architecture:
    """The shapes that a Hugging Face config.json describes.

    Raises:
        InputError: no JSON object, an architecture that is not supported, a missing or wrong size.
    """
    where = path / "config.json" if path.is_dir() else path
    try:
        found = msgspec.json.decode(where.read_bytes())
    except OSError as exc:
        raise InputError(f"{where}: cannot be read ({exc.strerror})") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InputError(f"{where}: is not JSON ({exc}); expected a model's config.json") from exc
    if not isinstance(found, dict):
        raise InputError(f"{where}: is not a JSON object; expected a model's config.json")
    kind = found.get("model_type")
    if kind == "gemma3" and isinstance(found.get("text_config"), dict):
        found = found["text_config"]
        kind = "gemma3_text"
    if kind not in _SUPPORTED:
        raise InputError(
            f"{where}: model_type {kind!r} is not supported; expected one of "
            f"{', '.join(_SUPPORTED)}, or capture the module itself with --module"
        )
    experts = next((k for k in _EXPERTS if found.get(k)), None)
    if experts is not None:
        raise InputError(
            f"{where}: {experts} is {found[experts]!r}: mixtures of experts are not supported; "
            "capture the module itself with --module"
        )
    return _gpt_config(found, where) if kind == "gpt2" else _llama_config(found, where, kind)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def _size_or(config: dict[str, Any], where: Path, name: str, otherwise: int) -> int:
    """An optional size: null and zero stand for what is usual."""
    return _sizes(config, where, name)[0] if config.get(name) else otherwise


def _sizes(config: dict[str, Any], where: Path, *names: str) -> list[int]:
    sizes = []
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            said = "is missing" if value is None else f"is {value!r}"
            raise InputError(f"{where}: {name} {said}; expected a whole number above zero")
        sizes.append(value)
    return sizes


def _made(where: Path, **shapes: Any) -> Architecture:
    try:
        # Checkpoints have theirs in a folder that is named for the model.
        name = where.resolve().parent.name if where.stem == "config" else where.stem
        return Architecture(name=name or where.stem, **shapes)
    except UsageError as exc:
        raise InputError(f"{where}: {exc}") from exc


def _gpt_config(config: dict[str, Any], where: Path) -> Architecture:
    layers, width, heads, vocabulary, positions = _sizes(
        config, where, "n_layer", "n_embd", "n_head", "vocab_size", "n_positions"
    )
    if width % heads:
        raise InputError(f"{where}: n_embd {width} does not divide into n_head {heads} heads")
    dropout = any(config.get(k, 0.1) for k in ("resid_pdrop", "attn_pdrop", "embd_pdrop"))
    return _made(
        where,
        layers_count=layers,
        width=width,
        heads_count=heads,
        kv_heads_count=heads,
        head_width=width // heads,
        ffn_width=_size_or(config, where, "n_inner", 4 * width),
        vocabulary_count=vocabulary,
        tied=config.get("tie_word_embeddings", True),
        positions_count=positions,
        gated=False,
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=dropout,
        context_count=positions,
    )


def _llama_config(config: dict[str, Any], where: Path, kind: str) -> Architecture:
    layers, width, heads, ffn, vocabulary = _sizes(
        config,
        where,
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    kv = _size_or(config, where, "num_key_value_heads", heads)
    head_width = _size_or(config, where, "head_dim", width // heads)
    if not config.get("head_dim") and width % heads:
        raise InputError(f"{where}: hidden_size {width} does not divide into {heads} heads")
    bias = bool(config.get("attention_bias", False))
    return _made(
        where,
        layers_count=layers,
        width=width,
        heads_count=heads,
        kv_heads_count=kv,
        head_width=head_width,
        ffn_width=ffn,
        vocabulary_count=vocabulary,
        # Gemma's configurations leave the key out, and mean true.
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        norms_per_layer_count=4 if kind in ("gemma2", "gemma3_text") else 2,
        qk_norm=kind in ("qwen3", "gemma3_text"),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        context_count=_size_or(config, where, "max_position_embeddings", 0),
    )
