"""Shapes of decoder-only transformers, dense or with mixtures of experts, and a catalogue by name.

Only what determines parameters, FLOP and memory is kept. Parameters are counted from the shapes,
never quoted, and the tests hold them against the totals that the models are published with, and
against those of the modules of Hugging Face's transformers.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

import msgspec

from chopper.errors import UsageError
from chopper.quantities import one_of

MAX_PARAMETERS = 10**15
"""More than this is a slip, and overflows what is computed from it."""
MAX_LAYERS = 10_000
"""Each is looked at; no model has as many."""


_POSITIVE = (
    *("layers_count", "width", "heads_count", "kv_heads_count", "head_width", "ffn_width"),
    *("vocabulary_count", "count", "chosen_count", "kv_rank", "rope_width", "value_width"),
)


class Experts(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mixture of experts in the place of a layer's feed-forward network; each expert is gated."""

    count: int
    """Of a layer."""
    chosen_count: int
    """Of each token."""
    width: int
    """Of one expert's feed-forward network."""
    shared_width: int = 0
    """Of the experts that all tokens go through, together."""
    shared_gate: bool = False
    """Shared experts are weighted by a product of their own."""
    bias: bool = False
    router_bias: bool = False
    router_in_float32: bool = False
    """The router reads a float32 copy of its input."""
    clamped: bool = False
    """gpt-oss's gate: both halves clamped, x·sigmoid(αx), one added to the other half."""
    dense_layers: tuple[int, ...] = ()
    """Layers, from 0, with a plain feed-forward network instead."""


class Latent(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Attention with keys and values made from a narrow latent (MLA, arXiv 2405.04434)."""

    kv_rank: int
    q_rank: int = 0
    """0: queries are made from the input itself."""
    rope_width: int
    """Of a head, rotated; the key's is the same for all heads."""
    value_width: int
    """Of a head's values."""


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
    positions_unused_count: int = 0
    """Number of them that no token can have (OPT's first two)."""
    gated: bool = True
    """SwiGLU or GeGLU: two up projections; else one, with GELU."""
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = True
    """Of a LayerNorm; an RMSNorm has none."""
    norms_per_layer_count: int = 2
    norms_after: bool = False
    """Attention and feed-forward network are normalized after, not before, where there are two."""
    parallel: bool = False
    """Both read the layer's input, and their sum is added to it."""
    qk_norm: bool = False
    """Queries and keys are normalized per head."""
    qk_norm_whole: bool = False
    """Each head has weights of its own, or all are normalized together."""
    fused_qkv: bool = False
    """One product makes queries, keys and values; of its result, values are a view."""
    fused_up: bool = False
    """One product makes both halves of a gated feed-forward network."""
    activation: Literal["smooth", "relu", "relu2", "tanh"] = "smooth"
    """Smooth ones (SiLU, GELU) keep what they read, ReLU what it writes, its square both; GELU by a
    tanh, operator by operator (transformers' ``gelu_new``), what it reads and three more."""
    rotates_a_part: bool = False
    """Of each head: queries are joined from two parts, so they and attention's output lie by head,
    and the latter is copied into rows."""
    sinks: bool = False
    """One learned number per head in attention's softmax."""
    head_bias: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dropout: bool = False
    context_count: int = 0
    """Longest sequence that it was trained for; 0 if unknown."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built, or counted.

        Raises:
            UsageError: a size that is not positive, heads that do not share evenly, too large.
        """
        for part in (self, self.experts, self.latent):
            of = "" if part is self else f"{type(part).__name__.lower()}' "
            for what in _POSITIVE:
                if getattr(part, what, 1) <= 0:
                    raise UsageError(
                        f"model {self.name}: {of}{what} is {getattr(part, what)}, "
                        "expected more than zero"
                    )
        if self.heads_count % self.kv_heads_count:
            raise UsageError(
                f"model {self.name}: {self.heads_count} query heads cannot share "
                f"{self.kv_heads_count} key heads evenly"
            )
        if self.experts is not None and self.experts.chosen_count > self.experts.count:
            raise UsageError(
                f"model {self.name}: each token chooses {self.experts.chosen_count} of "
                f"{self.experts.count} experts; expected no more than there are"
            )
        for value, what, most in (
            (self.parameters_count, "parameters", MAX_PARAMETERS),
            (self.layers_count, "layers", MAX_LAYERS),
        ):
            if value > most:
                raise UsageError(
                    f"model {self.name}: {value:.3g} {what}, expected at most {most:g}"
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
        return self.width * (self.norm_weight + (self.norm == "layer" and self.norm_bias))

    @property
    def attention_count(self) -> int:
        """Parameters of one layer's attention."""
        sinks = self.heads_count * self.sinks
        if self.latent is not None:
            return self._latent_count(self.latent) + sinks
        weights = self.width * (self.q_width + 2 * self.kv_width) + self.q_width * self.width
        biases = (self.q_width + 2 * self.kv_width) * self.qkv_bias + self.width * self.output_bias
        normed = self.q_width + self.kv_width if self.qk_norm_whole else 2 * self.head_width
        return weights + biases + normed * self.qk_norm + sinks

    def _latent_count(self, of: Latent) -> int:
        """Narrow products have biases where the configuration asks for some, wide ones never."""
        w, narrow = self.width, of.kv_rank + of.rope_width
        if of.q_rank:
            queries = w * of.q_rank + of.q_rank * self.qkv_bias + of.q_rank * (1 + self.q_width)
        else:
            queries = w * self.q_width
        projected = self.heads_count * (self.head_width - of.rope_width + of.value_width)
        keys = w * narrow + narrow * self.qkv_bias + of.kv_rank * (1 + projected)
        output = self.heads_count * of.value_width * w + w * self.output_bias
        return queries + keys + output

    @property
    def mlp_count(self) -> int:
        """Parameters of one layer's plain feed-forward network."""
        return self.feed_forward_count(self.ffn_width, bias=self.mlp_bias)

    def feed_forward_count(self, width: int, *, bias: bool) -> int:
        """Parameters of one feed-forward network, plain or an expert."""
        ups = 2 if self.gated else 1
        return (ups + 1) * self.width * width + (ups * width + self.width) * bias

    @property
    def expert_count(self) -> int:
        """Parameters of one expert; 0 without any."""
        of = self.experts
        return 0 if of is None else self.feed_forward_count(of.width, bias=of.bias)

    @property
    def mixture_count(self) -> int:
        """Parameters of one layer's experts, router and shared experts; 0 without any."""
        of = self.experts
        if of is None:
            return 0
        router = of.count * (self.width + of.router_bias)
        shared = self.feed_forward_count(of.shared_width, bias=False) + self.width * of.shared_gate
        return of.count * self.expert_count + router + shared

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def mixtures_count(self) -> int:
        """Layers with experts."""
        if self.experts is None:
            return 0
        plain = {i for i in self.experts.dense_layers if 0 <= i < self.layers_count}
        return self.layers_count - len(plain)

    @property
    def layer_count(self) -> int:
        """Parameters of the largest kind of layer."""
        norms = self.norms_per_layer_count * self.norm_count
        mixed = self.mixture_count if self.mixtures_count else 0
        return self.attention_count + max(self.mlp_count, mixed) + norms

    @property
    def embedding_count(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary_count * self.width

    @property
    def outer_count(self) -> int:
        """Parameters outside of the layers: embeddings, last norm, head when it is not tied."""
        head = (0 if self.tied else self.embedding_count) + self.vocabulary_count * self.head_bias
        return self.embedding_count + self.positions_count * self.width + self.norm_count + head

    @property
    def parameters_count(self) -> int:
        """All parameters."""
        common = self.attention_count + self.norms_per_layer_count * self.norm_count
        mixed = self.mixtures_count
        plain = self.layers_count - mixed
        networks = plain * self.mlp_count + mixed * self.mixture_count
        return self.layers_count * common + networks + self.outer_count

    @property
    def active_count(self) -> int:
        """Parameters that one token uses: of the experts, only the chosen ones."""
        if self.experts is None:
            return self.parameters_count
        idle = self.experts.count - self.experts.chosen_count
        return self.parameters_count - self.mixtures_count * idle * self.expert_count


CATALOGUE: dict[str, Architecture] = {
    model.name: model
    for model in msgspec.json.decode(
        files("chopper").joinpath("data", "models.json").read_bytes(), type=list[Architecture]
    )
}
"""Published models by name: shapes from their config.json, GPT-3's from arXiv 2005.14165."""

_ALIASES = {"llama3-405b": "llama3.1-405b", "llama3.2-8b": "llama3.1-8b", "gpt3": "gpt3-175b"}


def named(name: str) -> Architecture:
    """Return the model of a name: ``llama3-8b``, ``Llama 3 8B``, ``Meta-Llama-3-8B``.

    Raises:
        UsageError: unknown name; the nearest ones are suggested.
    """

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum() or c == ".").removeprefix("meta")

    names = {plain(n): n for n in CATALOGUE} | {plain(a): n for a, n in _ALIASES.items()}
    architecture = names.get(plain(name))
    return CATALOGUE[architecture if architecture else one_of("model", name, CATALOGUE)]
