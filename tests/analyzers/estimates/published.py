"""Published formulas of activations, for what the estimate is held against.

Korthikanti et al. (arXiv 2205.05198); and what follows for other networks from the tensors that
autograd keeps.
"""

from __future__ import annotations

from typing import Literal


def layer_activation_bytes(
    *,
    sequence_count: int,
    batch_count: int,
    width: int,
    heads_count: int,
    tensor_parallel_count: int = 1,
    sequence_parallel: bool = False,
    checkpoint: Literal["none", "selective", "full"] = "none",
) -> float:
    """Activations of one GPT layer in 16 bits (Korthikanti et al., table 2).

    None: sbh(34+5as/h); selective recomputation of attention 34sbh; full 2sbh. With t-way tensor
    parallelism sbh(10+24/t+5as/(ht)), with sequence parallelism sbh/t·(34+5as/h).
    """
    s, b, h, a, t = sequence_count, batch_count, width, heads_count, tensor_parallel_count
    sbh = s * b * h
    if checkpoint == "full":
        return 2.0 * sbh
    scores = 0.0 if checkpoint == "selective" else 5 * a * s / h
    if sequence_parallel:
        return sbh / t * (34 + scores)
    return sbh * (10 + 24 / t + scores / t)


def llama_layer_activation_bytes(
    *,
    sequence_count: int,
    batch_count: int,
    width: int,
    heads_count: int,
    kv_heads_count: int,
    ffn_width: int,
    head_width: int | None = None,
) -> float:
    """Activations of one Llama layer in 16 bits, fused attention: sbh(12 + 4·kv/a + 8f/h).

    Of the 12, 4 are the queries and attention's output, a·d wide, where heads of width d do not
    make up h (Gemma): sb(8h + 4ad + 4·kv·d + 8f). Without `head_width`, d = h/a.
    """
    d = width / heads_count if head_width is None else head_width
    attention = 4 * d * (heads_count + kv_heads_count)
    return sequence_count * batch_count * (8 * width + attention + 8 * ffn_width)


def experts_activation_bytes(
    *,
    tokens_count: int,
    width: int,
    experts_count: int,
    chosen_count: int,
    expert_width: int,
    shared_width: int = 0,
) -> int:
    """Activations of one layer's experts in 16 bits, in the place of a feed-forward network's 8sbf.

    sb(k(4h + 8f + 36) + 8f_shared + 4E): for each chosen expert the row that is sent (2h), both
    halves, the activation and their product (8f), what comes back before it is weighted (2h), its
    weight (4), its number and three permutations (8 each); the router's probabilities in float32
    (4E). Derived from the tensors that transformers' ``grouped_mm_experts_forward`` and its routers
    keep for backward.
    """
    row = 4 * width + 8 * expert_width + 36
    return tokens_count * (chosen_count * row + 8 * shared_width + 4 * experts_count)


def logits_bytes(*, sequence_count: int, batch_count: int, vocabulary_count: int) -> int:
    """Logits in 16 bits, their float32 copy and its gradient, in one piece: s·b·V·10."""
    return 10 * sequence_count * batch_count * vocabulary_count
