"""Hugging Face's config.json of decoder-only models, read as the shapes that they describe.

What a configuration leaves out means what transformers' configuration class of its ``model_type``
gives it; a size without which nothing can be built has to be there. The families of models stand in
``chopper/data/model_types.json``: ``model_type`` → field of Architecture → its value, or the method
of :class:`Config` that reads it with its arguments. ``from`` is the family whose fields it has,
too; ``left_out`` the meaning of a key that is not there, where that does not follow from the other
sizes (null is not left out); ``only`` the values without which its shapes are others.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from chopper.errors import InputError, UsageError
from chopper.models.architectures import MAX_LAYERS, Architecture, Experts, Latent
from chopper.storage.files import decode_json, read_bytes

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


class Config:
    """A configuration whose values are checked as they are read.

    Every reader raises InputError where a key is missing or has a value that cannot be.
    """

    def __init__(self, values: dict[str, Any], where: Path | str) -> None:
        self.values = values
        self.where = where

    def refuse(self, what: str) -> InputError:
        """The error that names the file."""
        return InputError(f"{self.where}: {what}")

    def value(self, rule: Any) -> Any:
        """Apply a rule: a reader and its arguments, or a value."""
        if isinstance(rule, list):
            return getattr(self, rule[0])(*rule[1:])
        return rule

    def size(self, *names: str) -> int:
        """A whole number above zero, under the first of these names that is there."""
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            problem = "is missing" if value is None else f"is {value!r}"
            raise self.refuse(f"{name} {problem}; expected a whole number above zero")
        return value

    def size_or(self, name: str, otherwise: int) -> int:
        """An optional size: null and zero mean the usual one."""
        return self.size(name) if self.values.get(name) else otherwise

    def size_or_four(self, name: str, width: str) -> int:
        """An optional size, else four widths."""
        return self.size_or(name, 4 * self.size(width))

    def sum_of_sizes(self, *names: str) -> int:
        """Several sizes together."""
        return sum(self.size(name) for name in names)

    def flag(self, name: str, otherwise: bool) -> bool:
        """A switch: true, false or absent."""
        value = self.values.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise self.refuse(f"{name} is {value!r}; expected true or false")
        return value

    def when(self, name: str, usual: bool, then: Any, otherwise: Any) -> Any:
        """One of two rules, by a switch."""
        return self.value(then if self.flag(name, usual) else otherwise)

    def any_of(self, otherwise: float, *names: str) -> bool:
        """Return whether one of these shares is above zero."""
        return any(self.values.get(name, otherwise) for name in names)

    def activation(self, name: str, otherwise: str) -> str:
        """The activation of a network that is not gated."""
        value = self.values.get(name) or otherwise
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.refuse(f"{name} is {value!r}; expected one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def even(self, width_name: str, *heads_names: str) -> int:
        """Width of a head, of which the heads make up the whole."""
        width, heads = self.size(width_name), self.size(*heads_names)
        if width % heads:
            raise self.refuse(f"{width_name} {width} does not divide into {heads} heads")
        return width // heads

    def head_width(self) -> int:
        """Width of a head, which need not make up the whole where it is told."""
        stated = bool(self.values.get("head_dim"))
        return self.size("head_dim") if stated else self.even("hidden_size", "num_attention_heads")

    def kv_heads(self) -> int:
        """Heads of keys and values; as many as of queries where it is not told."""
        return self.size_or("num_key_value_heads", self.size("num_attention_heads"))

    def opt_positions(self) -> int:
        """OPT's, of which no token can have the first two."""
        return self.size_or("max_position_embeddings", 2048) + 2

    def falcon_norms(self) -> int:
        """Falcon's per layer: one where attention and the network beside it share it."""
        new = self.flag("new_decoder_architecture", False)
        if not new and not self.flag("parallel_attn", True):
            return 2
        return 2 if self.size_or("num_ln_in_parallel_attn", 2 if new else 1) == 2 else 1

    def layers(self) -> int:
        """The number of layers, where each is looked at."""
        count = self.size("num_hidden_layers")
        if count > MAX_LAYERS:
            raise self.refuse(f"num_hidden_layers is {count:.3g}; expected at most {MAX_LAYERS}")
        return count

    def sparse(self) -> tuple[int, ...]:
        """Qwen's layers without experts: listed ones, and all but each n-th."""
        listed = self.values.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
            raise self.refuse(f"mlp_only_layers is {listed!r}; expected a list of layers")
        each = self.size_or("decoder_sparse_step", 1)
        plain = {*listed}
        return tuple(i for i in range(self.layers()) if i in plain or (i + 1) % each)

    def first_dense(self, otherwise: int) -> dict[str, Any]:
        """DeepSeek's experts: first layers plain, shared experts beside the others."""
        width = self.size("moe_intermediate_size")
        first = self.values.get("first_k_dense_replace")
        first = otherwise if first is None else first
        if not isinstance(first, int) or first < 0:
            raise self.refuse(
                f"first_k_dense_replace is {first!r}; expected a whole number from zero"
            )
        self.only("moe_layer_freq", [1, None])
        return {
            "width": width,
            "shared_width": width * self.size_or("n_shared_experts", 0),
            "router_in_float32": True,
            "dense_layers": tuple(range(min(first, self.layers()))),
        }

    def experts(self, rule: Any) -> Experts:
        """A mixture of experts."""
        fields = rule if isinstance(rule, dict) else self.value(rule)
        return Experts(
            count=self.size("num_local_experts", "num_experts", "n_routed_experts"),
            chosen_count=self.size("num_experts_per_tok"),
            **{field: self.value(how) for field, how in fields.items()},
        )

    def only(self, name: str, allowed: list[Any]) -> None:
        """Refuse another value than these."""
        value = self.values.get(name)
        if value not in allowed:
            known = " or ".join(repr(v) for v in allowed if v is not None)
            raise self.refuse(
                f"{self.values.get('model_type')} with {name} {value!r} is not supported; expected "
                f"{known}, or capture the module itself with --module"
            )


@cache
def model_types() -> dict[str, dict[str, Any]]:
    """``model_type`` → field of Architecture → its value, or how it is read."""
    text = files("chopper").joinpath("data", "model_types.json").read_bytes()
    families: dict[str, dict[str, Any]] = {}
    for name, values in msgspec.json.decode(text, type=dict[str, dict[str, Any]]).items():
        families[name] = {**families.get(values.get("from", ""), {}), **values}
    return {name: family for name, family in families.items() if not name.startswith("_")}


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def read_config(path: Path) -> Architecture:
    """Read the shapes from a Hugging Face config.json.

    Raises:
        InputError: no JSON object, an architecture that is not supported, a missing or wrong size.
    """
    where = path / "config.json" if path.is_dir() else path
    fields = decode_json(
        read_bytes(where),
        dict[str, Any],
        f"{where}: is not a model's config.json",
        error=InputError,
    )
    # Checkpoints have theirs in a folder that is named for the model.
    name = where.resolve().parent.name if where.stem == "config" else where.stem
    return of_config(fields, name or where.stem, where)


def of_config(fields: dict[str, Any], name: str, where: Path | str) -> Architecture:
    """The shapes that a configuration of this name describes; `where` it was found, for messages.

    Raises:
        InputError: an architecture that is not supported, a missing or wrong size.
    """
    kind = fields.get("model_type")
    if kind == "gemma3" and isinstance(fields.get("text_config"), dict):
        kind = "gemma3_text"
        fields = {**fields["text_config"], "model_type": kind}
    family = dict(model_types().get(kind, {})) if isinstance(kind, str) else {}
    if not family:
        raise InputError(
            f"{where}: model_type {kind!r} is not supported; expected one of "
            f"{', '.join(model_types())}, or capture the module itself with --module"
        )
    for key in ("from", "note"):
        family.pop(key, None)
    config = Config({**family.pop("left_out", {}), **fields}, where)
    try:
        for key, allowed in family.pop("only", {}).items():
            config.only(key, [config.value(value) for value in allowed])
        experts, latent = family.pop("experts", None), family.pop("latent", None)
        shapes = {field: config.value(how) for field, how in family.items()}
        if latent is not None:
            read = {field: config.value(how) for field, how in latent.items()}
            shapes["latent"] = Latent(**read)
        if experts is not None:
            shapes["experts"] = config.experts(experts)
        elif key := next((k for k in _EXPERTS if fields.get(k)), ""):
            raise config.refuse(
                f"{key} is {fields[key]!r}, but {kind} has no mixture of experts; give the "
                "model_type that has, or capture the module itself with --module"
            )
        return Architecture(name=name, **shapes)
    except UsageError as exc:
        raise InputError(f"{where}: {exc}") from exc
