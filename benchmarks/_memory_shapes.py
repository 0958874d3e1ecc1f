"""The shapes of a random model, for what builds it and for the estimate."""

from __future__ import annotations

from chopper.models.architectures import Architecture, Experts


def architecture(of: dict[str, int], mixture: dict[str, int] | None = None) -> Architecture:
    """Return the architecture that a random case describes."""
    found = None
    if mixture:
        found = Experts(
            count=mixture["count"],
            chosen_count=mixture["chosen"],
            width=mixture["width"],
            shared_width=mixture["shared"],
            dense_layers=tuple(range(mixture["first"])),
        )
    return Architecture(
        experts=found,
        name="random",
        layers_count=of["layer_count"],
        width=of["dim"],
        heads_count=of["head_count"],
        kv_heads_count=of["kv_head_count"],
        head_width=of["dim"] // of["head_count"],
        ffn_width=of["ffn_dim"],
        vocabulary_count=of["vocabulary"],
    )
